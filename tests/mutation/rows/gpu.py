# SPDX-License-Identifier: MIT
[
    ("metal: sizes passed as floats", "test test_metal",
     [("src/gpu/launch.c", "l->param[l->params++] = (uint32_t)value;", "l->param[l->params++] = (uint32_t)(float)value;")]),
]
