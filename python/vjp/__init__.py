# SPDX-License-Identifier: MIT
"""vjp: training kernels. For every operation the forward pass and its closed-form backward pass.

    y, mean, rstd = vjp.layer_norm(x, gamma, beta)
    dx, dgamma, dbeta = vjp.layer_norm_backward(dy, x, gamma, mean=mean, rstd=rstd)

Arrays are NumPy's (bfloat16 by ml_dtypes), torch's, or any with DLPack, in the memory of the host or of an NVIDIA GPU; results
are of the caller's kind. The same inputs give the same bits, for any number of threads. `help(vjp.layer_norm)` describes an op, `vjp.ops()`
lists them all.
"""
from vjp._core import (DeviceError, Error, FileError, InterruptedRunError, InvalidError, NoDeviceError, OutOfMemoryError,
                       UnsupportedError, __version__)
from vjp._ops import *  # noqa: F403
from vjp._ops import __all__ as _functions
from vjp.device import Device, devices, ops, set_threads, synchronize
from vjp.graph import Graph, Program, Training, Value
from vjp.program import Metrics, bench, check, program_path, train
from vjp.schedule import learning_rate

__all__ = [*_functions, "Device", "DeviceError", "Error", "FileError", "Graph", "InterruptedRunError", "InvalidError", "Metrics",
           "NoDeviceError", "OutOfMemoryError", "Program", "Training", "UnsupportedError", "Value", "__version__", "bench", "check",
           "devices", "learning_rate", "ops", "program_path", "set_threads", "synchronize", "train"]
