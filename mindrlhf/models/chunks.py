"""Row chunks of large logits, which never exist as a whole. Pure Python."""

# Limit on logits of one chunk: 64 Mi float32 numbers are 256 MiB. Above it, tokens are cut into chunks.
CHUNK_NUMBERS = 64 * 2**20


def chunk_count(tokens: int, vocabulary: int, limit: int = CHUNK_NUMBERS) -> int:
    """Count the equal chunks of `tokens` rows with at most `limit` logits each."""
    chunk = max(1, min(tokens, limit // vocabulary))  # rows; at least one
    while tokens % chunk:
        chunk -= 1
    return tokens // chunk
