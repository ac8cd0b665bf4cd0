/* SPDX-License-Identifier: MIT */
/* add, plainly: y = a + b, da = dy, db = the sum of dy over the axes that b lacks. */
#include "ref/broadcast.h"

static double sum(double a, double b) {
    return a + b;
}

static vjp_status forward(const vjp_work *work) {
    return ref_broadcast_forward(work, sum);
}

static vjp_status backward(const vjp_work *work) {
    return ref_broadcast_backward(work, -1, -1);
}

const vjp_kernel vjp_ref_add[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, NULL, REF_STORAGE},
};
