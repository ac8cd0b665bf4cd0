// SPDX-License-Identifier: MIT
// layer_norm: see norm.wgsl.
//# include norm

const LAYER = true;
