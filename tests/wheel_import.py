# SPDX-License-Identifier: MIT
"""Imports the installed package, computes a forward and a backward pass in f32, and compares them with NumPy in f64."""
import subprocess
import sys

import numpy as np

import vjp

rng = np.random.default_rng(0)
x, dy = rng.standard_normal((2, 8, 64)).astype(np.float32)
gamma, beta = np.ones(64, np.float32), np.zeros(64, np.float32)
y, mean, rstd = vjp.layer_norm(x, gamma, beta, eps=1e-5)
wide = x.astype(np.float64)
normal = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
assert np.abs(y - normal).max() < 1e-5, "layer_norm"
dx, dgamma, dbeta = vjp.layer_norm_backward(dy, x, gamma, mean=mean, rstd=rstd)
assert np.abs(dgamma - (dy * normal).sum(0)).max() < 1e-4 and np.abs(dbeta - dy.sum(0, dtype=np.float64)).max() < 1e-4, "dgamma, dbeta"
try:
    vjp.layer_norm(x, gamma[:3], beta)
    sys.exit("a wrong shape was taken")
except vjp.Error as error:
    print(error)
print(vjp.__version__, vjp.devices())
