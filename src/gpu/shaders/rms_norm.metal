/* SPDX-License-Identifier: MIT */
// rms_norm: see norm.metal.
#define LAYER false
#include "norm.metal"
