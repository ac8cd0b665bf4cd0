/* SPDX-License-Identifier: MIT */
/*
 * adamw and sgd: a step over all weights, by the formulas in adamw.wgsl and sgd.wgsl, adamw.metal and sgd.metal. lr,
 * scale and the step's number are read on the device, so that a recorded program runs unchanged every step.
 */
#include <math.h>

#include "gpu/ops/elementwise.h"

/* ---- adamw ------------------------------------------------------------------------------------------- */

/*
 * In place there are seven buffers at most, and an eighth for reports, which is what a device binds. Else there may be
 * ten: then one launch makes w_out from what the others still have, and a second makes m_out and v_out.
 */
static bool runs_in_place(const vjp_work *work) {
    static const int pairs[][2] = {{ADAMW_W_OUT, ADAMW_W}, {ADAMW_M_OUT, ADAMW_M}, {ADAMW_V_OUT, ADAMW_V}};
    for (int i = 0; i < 3; i++)
        if (vjp_data(work, pairs[i][0]) && vjp_data(work, pairs[i][0]) != vjp_data(work, pairs[i][1])) return false;
    return true;
}

/* log(beta), which is minus infinity for 0: at -200 beta^step is 0, too. */
static double log_of(double beta) {
    return fmax(log(beta), -200);
}

static void adamw_numbers(gpu_launch *l) {
    const vjp_adamw_attributes *a = l->work->attributes;
    gpu_f32(l, log_of(a->beta1));
    gpu_f32(l, log_of(a->beta2));
    gpu_f32(l, a->beta1);
    gpu_f32(l, 1 - a->beta1);
    gpu_f32(l, a->beta2);
    gpu_f32(l, 1 - a->beta2);
    gpu_f32(l, a->eps);
    gpu_f32(l, a->weight_decay);
}

static void weights_more(gpu_launch *l) {
    gpu_tensor(l, "lr", ADAMW_LR, 1);
    gpu_tensor(l, "scale", ADAMW_SCALE, 1);
    gpu_tensor(l, "step", ADAMW_STEP, 1);
    adamw_numbers(l);
}

static void averages_more(gpu_launch *l) {
    gpu_tensor(l, "scale", ADAMW_SCALE, 1);
    gpu_tensor(l, "step", ADAMW_STEP, 1);
    gpu_report_bad_integer(l, 1);
    adamw_numbers(l);
}

static void all_more(gpu_launch *l) {
    gpu_tensor(l, "lr", ADAMW_LR, 1);
    averages_more(l);
}

static const gpu_elements all = {.operand = {{"out0", ADAMW_W_OUT},
                                             {"out1", ADAMW_M_OUT},
                                             {"out2", ADAMW_V_OUT},
                                             {"in0", ADAMW_W},
                                             {"in1", ADAMW_G},
                                             {"in2", ADAMW_M},
                                             {"in3", ADAMW_V}},
                                 .more = all_more};
static const gpu_elements weights = {
    .operand = {{"out0", ADAMW_W_OUT}, {"in0", ADAMW_W}, {"in1", ADAMW_G}, {"in2", ADAMW_M}, {"in3", ADAMW_V}},
    .more = weights_more};
static const gpu_elements averages = {
    .operand = {{"out1", ADAMW_M_OUT}, {"out2", ADAMW_V_OUT}, {"in1", ADAMW_G}, {"in2", ADAMW_M}, {"in3", ADAMW_V}},
    .more = averages_more,
    .reports = true};

static vjp_status adamw(const vjp_work *work) {
    if (runs_in_place(work)) return gpu_run_elements(work, &all);
    vjp_status status = gpu_run_elements(work, &weights);
    return status == VJP_OK ? gpu_run_elements(work, &averages) : status;
}

const vjp_kernel gpu_adamw[VJP_PASS_COUNT] = {{adamw, NULL, VJP_STORAGE_16_32}};

/* ---- sgd --------------------------------------------------------------------------------------------- */

static void sgd_more(gpu_launch *l) {
    const vjp_sgd_attributes *a = l->work->attributes;
    gpu_tensor(l, "lr", SGD_LR, 1);
    gpu_tensor(l, "scale", SGD_SCALE, 1);
    gpu_f32(l, a->weight_decay);
    gpu_f32(l, a->beta);
    gpu_u32(l, a->nesterov);
}

static vjp_status sgd(const vjp_work *work) {
    return gpu_run_elements(work, &(gpu_elements){.operand = {{"out0", SGD_W_OUT},
                                                              {"out1", SGD_MOMENTUM_OUT},
                                                              {"in0", SGD_W},
                                                              {"in1", SGD_G},
                                                              {"in2", SGD_MOMENTUM}},
                                                  .more = sgd_more});
}

const vjp_kernel gpu_sgd[VJP_PASS_COUNT] = {{sgd, NULL, VJP_STORAGE_16_32}};
