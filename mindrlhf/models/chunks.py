"""How the rows of large logits are cut, so that [tokens, vocabulary] is never held whole. Pure Python."""

# Logits of one chunk: 64 Mi float32 numbers are 256 MiB. Beyond it, tokens are cut into chunks.
CHUNK_NUMBERS = 64 * 2**20


def chunk_count(tokens: int, vocabulary: int, limit: int = CHUNK_NUMBERS) -> int:
    """Into how many equal chunks `tokens` rows are cut so that none holds more than `limit` logits."""
    chunk = max(1, min(tokens, limit // vocabulary))  # rows; at least one
    while tokens % chunk:
        chunk -= 1
    return tokens // chunk
