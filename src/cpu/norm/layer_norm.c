/*
 * layer_norm on the CPU: rows normalised with their mean taken away. The kernels are those of cpu/norm_rows.h, compiled
 * here for centred rows, once a storage type; the rest reads the call's slots.
 */
#include "cpu/norm/norm_rows.h"

static void step_f32(norm_piece *piece) {
    norm_rows_step(piece, VJP_F32, true);
}

static void step_bf16(norm_piece *piece) {
    norm_rows_step(piece, VJP_BF16, true);
}

static void step_f16(norm_piece *piece) {
    norm_rows_step(piece, VJP_F16, true);
}

static const norm_by_dtype steps[] = {[VJP_F32] = step_f32, [VJP_BF16] = step_bf16, [VJP_F16] = step_f16};

/* Bytes that x, and the tensors like it, have together. */
static double moved(const vjp_work *work, vjp_norm_sizes size, int tensors) {
    return (double)size.rows * (double)size.dim * (double)dtype_bytes(work->storage) * tensors;
}

static norm_rows forward_call(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    vjp_norm_sizes size = vjp_layer_norm_sizes(work);
    void *y = vjp_data(work, LAYER_NORM_Y), *x = vjp_data(work, LAYER_NORM_X);
    return (norm_rows){
        .work = work,
        .by_dtype = steps[work->storage],
        .centered = true,
        .size = size,
        .eps = a->eps,
        .x = x,
        .out = y,
        .store = norm_store_of(work, LAYER_NORM_Y, y == x, moved(work, size, 2)),
        .gamma = norm_parameter_of(work, LAYER_NORM_GAMMA),
        .beta = norm_parameter_of(work, LAYER_NORM_BETA),
        .mean_out = vjp_data(work, LAYER_NORM_MEAN),
        .rstd_out = vjp_data(work, LAYER_NORM_RSTD),
    };
}

static norm_rows backward_call(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    vjp_norm_sizes size = vjp_layer_norm_sizes(work);
    void *dx = vjp_data(work, LAYER_NORM_B_DX), *dy = vjp_data(work, LAYER_NORM_B_DY),
         *x = vjp_data(work, LAYER_NORM_B_X);
    bool saved = work->tensor[LAYER_NORM_B_MEAN] && work->tensor[LAYER_NORM_B_RSTD];
    return (norm_rows){
        .work = work,
        .by_dtype = steps[work->storage],
        .centered = true,
        .size = size,
        .eps = a->eps,
        .x = x,
        .dy = dy,
        .out = dx,
        .store = norm_store_of(work, LAYER_NORM_B_DX, dx == dy || dx == x, moved(work, size, 3)),
        .gamma = norm_parameter_of(work, LAYER_NORM_B_GAMMA),
        .dgamma = norm_parameter_of(work, LAYER_NORM_B_DGAMMA),
        .dbeta = norm_parameter_of(work, LAYER_NORM_B_DBETA),
        .mean_in = saved ? vjp_data(work, LAYER_NORM_B_MEAN) : NULL,
        .rstd_in = saved ? vjp_data(work, LAYER_NORM_B_RSTD) : NULL,
    };
}

static size_t forward_workspace(const vjp_work *work) {
    norm_rows call = forward_call(work);
    return norm_rows_plan(&call, NULL);
}

static vjp_status forward(const vjp_work *work) {
    norm_rows call = forward_call(work);
    return norm_rows_run(&call);
}

static size_t backward_workspace(const vjp_work *work) {
    norm_rows call = backward_call(work);
    return norm_rows_plan(&call, NULL);
}

static vjp_status backward(const vjp_work *work) {
    norm_rows call = backward_call(work);
    return norm_rows_run(&call);
}

extern const vjp_kernel CPU_NAME(layer_norm)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(layer_norm)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_BITS_CPU},
    {backward, backward_workspace, VJP_BITS_CPU},
};
