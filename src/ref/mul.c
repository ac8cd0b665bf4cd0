/* SPDX-License-Identifier: MIT */
/* mul, plainly: y = a * b, da = dy * b, db = the sum of dy * a over the axes that b lacks. */
#include "ref/broadcast.h"

static double product(double a, double b) {
    return a * b;
}

static vjp_status forward(const vjp_work *work) {
    return ref_broadcast_forward(work, product);
}

static vjp_status backward(const vjp_work *work) {
    return ref_broadcast_backward(work, MUL_B_A, MUL_B_B);
}

const vjp_kernel vjp_ref_mul[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, NULL, REF_STORAGE},
};
