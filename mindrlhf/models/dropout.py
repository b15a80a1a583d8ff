"""Dropout of adapters' inputs, independent of micro-batches and layout.

Only its row's key and its column's key decide whether an element is dropped: see `training.batch.position_keys` for the
rows. Column keys depend on the linear map, so that each map drops other elements.
"""

import zlib

import numpy as np
from mindspore import Tensor, nn, ops

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.random_numbers import random_keys

INT32 = 2**32  # number of values


def column_keys(name: str, columns: range) -> np.ndarray:
    """Draw a random number for each column of a map's input, int32."""
    return random_keys(zlib.crc32(name.encode()), np.arange(columns.start, columns.stop))


def threshold(share: float) -> int:
    """Find the int32 below which this share of all int32 values is."""
    return min(round(share * INT32), INT32 - 1) - INT32 // 2


class InputDropout(nn.Cell):
    """Dropout of a map's input, without the factor 1 / (1 - share).

    name: the map's name. share: share of elements that become 0 (Srivastava et al. 2014, section 4). columns: columns
    of the whole input that are in x [T, in]. The state z of an element is the sum of its two keys modulo 2^32; z (2 z +
    1) is a bijection whose high bits depend on all bits of z (Rivest et al. 1998, the cipher RC6).
    """

    def __init__(self, name: str, share: float, columns: range):
        super().__init__(auto_prefix=False)
        self.keys = Tensor(column_keys(name, columns))
        self.least = threshold(share)
        self.share = share

    def construct(self, x, row_keys):
        """Drop elements of x.

        row_keys: int32, keys of all rows; x has the last of these rows.
        """
        rows = ops.stop_gradient(row_keys)[row_keys.shape[0] - x.shape[0] :]
        state = expand(rows.reshape((-1, 1)), x.shape) + expand(self.keys.reshape((1, -1)), x.shape)
        return ops.select(state * (state + state + 1) >= self.least, x, ops.zeros_like(x))
