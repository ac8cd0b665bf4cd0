// SPDX-License-Identifier: MIT
// rms_norm: see norm.wgsl.
//# include norm

const LAYER = false;
