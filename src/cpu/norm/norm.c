/* SPDX-License-Identifier: MIT */
/*
 * layer_norm and rms_norm on the CPU: the same kernels (cpu/norm/norm_rows.h), with and without subtracting each row's
 * mean. This file only reads the slots of a call->
 */
#include "cpu/norm/norm_rows.h"

static void layer_norm_call(const vjp_work *work, norm_rows *call) {
    const vjp_layer_norm_attributes *a = work->attributes;
    *call = (norm_rows){
        .work = work,
        .dtype = work->storage,
        .centered = true,
        .size = vjp_layer_norm_sizes(work),
        .eps = a->eps,
        .out = vjp_data(work, 0),
    };
    if (work->pass == VJP_FORWARD) {
        call->x = vjp_data(work, LAYER_NORM_X);
        call->gamma = norm_parameter_of(work, LAYER_NORM_GAMMA);
        call->beta = norm_parameter_of(work, LAYER_NORM_BETA);
        call->mean_out = vjp_data(work, LAYER_NORM_MEAN);
        call->rstd_out = vjp_data(work, LAYER_NORM_RSTD);
    } else {
        bool saved = work->tensor[LAYER_NORM_B_MEAN] && work->tensor[LAYER_NORM_B_RSTD];
        call->x = vjp_data(work, LAYER_NORM_B_X);
        call->dy = vjp_data(work, LAYER_NORM_B_DY);
        call->gamma = norm_parameter_of(work, LAYER_NORM_B_GAMMA);
        call->dgamma = norm_parameter_of(work, LAYER_NORM_B_DGAMMA);
        call->dbeta = norm_parameter_of(work, LAYER_NORM_B_DBETA);
        call->mean_in = saved ? vjp_data(work, LAYER_NORM_B_MEAN) : NULL;
        call->rstd_in = saved ? vjp_data(work, LAYER_NORM_B_RSTD) : NULL;
    }
}

static void rms_norm_call(const vjp_work *work, norm_rows *call) {
    const vjp_rms_norm_attributes *a = work->attributes;
    *call = (norm_rows){
        .work = work,
        .dtype = work->storage,
        .centered = false,
        .size = vjp_rms_norm_sizes(work),
        .eps = a->eps,
        .out = vjp_data(work, 0),
    };
    if (work->pass == VJP_FORWARD) {
        call->x = vjp_data(work, RMS_NORM_X);
        call->gamma = norm_parameter_of(work, RMS_NORM_GAMMA);
        call->beta = norm_parameter_of(work, RMS_NORM_BETA);
        call->rstd_out = vjp_data(work, RMS_NORM_RSTD);
    } else {
        call->x = vjp_data(work, RMS_NORM_B_X);
        call->dy = vjp_data(work, RMS_NORM_B_DY);
        call->gamma = norm_parameter_of(work, RMS_NORM_B_GAMMA);
        call->dgamma = norm_parameter_of(work, RMS_NORM_B_DGAMMA);
        call->dbeta = norm_parameter_of(work, RMS_NORM_B_DBETA);
        call->rstd_in = vjp_data(work, RMS_NORM_B_RSTD);
        call->y = vjp_data(work, RMS_NORM_B_Y);
        call->add_y = vjp_accumulates(work, RMS_NORM_B_Y);
        call->beta = norm_parameter_of(work, RMS_NORM_B_BETA);
    }
}

static void read_call(const vjp_work *work, norm_rows *call) {
    if (work->op->id == OP_ID(layer_norm))
        layer_norm_call(work, call);
    else
        rms_norm_call(work, call);
    bool in_place = call->out == call->x || call->out == call->dy;
    call->mode = norm_write_mode(work, call->size.rows * call->size.dim, in_place);
}

static size_t workspace(const vjp_work *work) {
    norm_rows call;
    read_call(work, &call);
    return norm_rows_plan(&call, NULL);
}

static vjp_status run(const vjp_work *work) {
    norm_rows call;
    read_call(work, &call);
    return norm_rows_run(&call);
}

extern const vjp_kernel CPU_NAME(layer_norm)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(layer_norm)[VJP_PASS_COUNT] = {
    {run, workspace, VJP_STORAGE_16_32},
    {run, workspace, VJP_STORAGE_16_32},
};

extern const vjp_kernel CPU_NAME(rms_norm)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(rms_norm)[VJP_PASS_COUNT] = {
    {run, workspace, VJP_STORAGE_16_32},
    {run, workspace, VJP_STORAGE_16_32},
};
