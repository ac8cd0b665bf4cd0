# SPDX-License-Identifier: MIT
[
    ("dropout: nine rounds", "check dropout",
     [("src/cpu/simd/philox.h", "for (int round = 0; round < VJP_PHILOX_ROUNDS; round++)\n", "for (int round = 0; round < VJP_PHILOX_ROUNDS - 1; round++)\n")]),
    ("cast: bf16 truncated", "check cast",
     [("src/cpu/simd/vec.h", "(native_u)bits + 0x7fff + (((native_u)bits >> 16) & 1)", "(native_u)bits")]),
]
