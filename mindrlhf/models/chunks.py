"""How the rows of large logits are cut, so that [tokens, vocabulary] is never held whole. Pure Python."""

# Logits of one chunk: 64 Mi float32 numbers are 256 MiB. Beyond it, tokens are cut into chunks.
CHUNK_NUMBERS = 64 * 2**20


def chunk_count(tokens: int, vocabulary: int, limit: int = CHUNK_NUMBERS) -> int:
    """Into how many equal chunks `tokens` rows are cut so that none holds more than `limit` logits."""
    count = min(tokens, -(-tokens * vocabulary // limit))  # a chunk is at least one row
    while tokens % count:
        count += 1
    return count
