"""Units of memory, and sizes in them."""

MIB, GIB = 2**20, 2**30
FLOAT32 = 4  # bytes of a weight, a gradient and a moment
DIGEST_BYTES = 16  # of digests that tell contents apart


def size(nbytes: int) -> str:
    """Format bytes as 1.23 GiB, or as 340.0 MiB below 1 GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
