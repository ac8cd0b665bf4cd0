# SPDX-License-Identifier: MIT
"""Loads the backend of the installed wheel vjp-cuda13 with the installed vjp, as opening a CUDA device does."""
import ctypes
import os

import vjp

library = os.path.join(os.path.dirname(vjp.__file__), "libvjp-cuda.so")
ctypes.CDLL(library)
with open("/proc/self/maps") as file:
    loaded = {line.split()[-1] for line in file if "cublasLt" in line}
assert all("/nvidia/cu13/lib/" in path for path in loaded) and loaded, loaded
try:
    print(vjp._core.summary("cuda"))
except vjp.NoDeviceError as error:  # without a GPU the backend itself says so
    assert "GPU" in str(error) or "driver" in str(error), error
    print(error)
