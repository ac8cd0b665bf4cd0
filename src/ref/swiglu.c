/* SPDX-License-Identifier: MIT */
/* swiglu, plainly: y = silu(gate) * up; dgate = dy * up * silu'(gate), dup = dy * silu(gate), and y once more. */
#include "ref/activation.h"
#include "ref/ref.h"

static int64_t count_of(const vjp_work *work, int slot) {
    return vjp_shape_product(&work->shape[slot], 0, work->shape[slot].ndim);
}

static vjp_status forward(const vjp_work *work) {
    for (int64_t i = 0; i < count_of(work, SWIGLU_GATE); i++) {
        double gate = ref_get(work, SWIGLU_GATE, i, 0), up = ref_get(work, SWIGLU_UP, i, 0);
        ref_put(work, SWIGLU_Y, i, ref_activate(VJP_ACTIVATION_SILU, gate) * up);
    }
    return VJP_OK;
}

static vjp_status backward(const vjp_work *work) {
    for (int64_t i = 0; i < count_of(work, SWIGLU_B_GATE); i++) {
        double dy = ref_get(work, SWIGLU_B_DY, i, 0);
        double gate = ref_get(work, SWIGLU_B_GATE, i, 0), up = ref_get(work, SWIGLU_B_UP, i, 0);
        ref_put(work, SWIGLU_B_DGATE, i, dy * up * ref_activate_slope(VJP_ACTIVATION_SILU, gate));
        ref_put(work, SWIGLU_B_DUP, i, dy * ref_activate(VJP_ACTIVATION_SILU, gate));
        ref_put(work, SWIGLU_B_Y, i, ref_activate(VJP_ACTIVATION_SILU, gate) * up);
    }
    return VJP_OK;
}

const vjp_kernel vjp_ref_swiglu[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, NULL, REF_STORAGE},
};
