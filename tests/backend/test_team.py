"""The threads that share an operator's work: as many as the process may use, whatever MindSpore tells OpenMP."""

import os
import subprocess
import sys

import pytest

from mindrlhf.workers.cores import usable_cores

# In processes that msrun starts, MindSpore runs operators in a thread of its own, for which OpenMP's number is 1.
SCRIPT = """
import ctypes, os
import numpy as np
from mindrlhf.backend.native import library

ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)
linear = ctypes.CDLL(str(library().path)).linear
rows, size = 4096, 64
arrays = [np.ones(shape, np.float32) for shape in ((rows, size), (size, size), (rows, size))]
pointers = (ctypes.c_void_p * 3)(*(array.ctypes.data for array in arrays))
shapes = (ctypes.POINTER(ctypes.c_int64) * 3)(*((ctypes.c_int64 * 2)(*array.shape) for array in arrays))
before = len(os.listdir("/proc/self/task"))
linear(3, pointers, (ctypes.c_int * 3)(2, 2, 2), shapes, None, None, None)
assert (arrays[2] == size).all()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("given", [1, 3, None])
def test_an_operator_has_the_threads_of_its_process(fused, given):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if given:
        environment["OMP_NUM_THREADS"] = str(given)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) + 1 == (given or len(usable_cores()))
