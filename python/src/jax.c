/* SPDX-License-Identifier: MIT */
#include "core.h"
PyMethodDef jax_methods[] = {{NULL, NULL, 0, NULL}};
