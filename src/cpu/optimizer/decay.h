/* SPDX-License-Identifier: MIT */
/* Weight decay, for the steps of the optimizers. */
#ifndef VJP_CPU_DECAY_H
#define VJP_CPU_DECAY_H

#include "cpu/simd/vec.h"

/*
 * g + decay w. Without decay an infinite w adds nothing, as 0 * Inf would: the product is then a zero of w's sign,
 * which for every finite w it is anyway.
 */
INLINE vf decayed(vf w, float decay, vf g) {
    return decay != 0 ? vf_fma(w, vf_set(decay), g) : vf_add(vf_copysign(vf_zero(), w), g);
}

#endif
