/* SPDX-License-Identifier: MIT */
// layer_norm: see norm.metal.
#define LAYER true
#include "norm.metal"
