/*
 * rms_norm on the CPU: rows scaled to a mean square of 1, no mean taken away. The kernels are those of cpu/norm_rows.h,
 * compiled here for rows that are not centred, once a storage type; the rest reads the call's slots.
 */
#include "cpu/norm/norm_rows.h"

static void step_f32(norm_piece *piece) {
    norm_rows_step(piece, VJP_F32, false);
}

static void step_bf16(norm_piece *piece) {
    norm_rows_step(piece, VJP_BF16, false);
}

static void step_f16(norm_piece *piece) {
    norm_rows_step(piece, VJP_F16, false);
}

static const norm_by_dtype steps[] = {[VJP_F32] = step_f32, [VJP_BF16] = step_bf16, [VJP_F16] = step_f16};

/* Bytes that x, and the tensors like it, have together. */
static double moved(const vjp_work *work, vjp_norm_sizes size, int tensors) {
    return (double)size.rows * (double)size.dim * (double)dtype_bytes(work->storage) * tensors;
}

static norm_rows forward_call(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    vjp_norm_sizes size = vjp_rms_norm_sizes(work);
    void *y = vjp_data(work, RMS_NORM_Y), *x = vjp_data(work, RMS_NORM_X);
    return (norm_rows){
        .work = work,
        .by_dtype = steps[work->storage],
        .centered = false,
        .size = size,
        .eps = a->eps,
        .x = x,
        .out = y,
        .store = norm_store_of(work, RMS_NORM_Y, y == x, moved(work, size, 2)),
        .gamma = norm_parameter_of(work, RMS_NORM_GAMMA),
        .beta = norm_parameter_of(work, RMS_NORM_BETA),
        .rstd_out = vjp_data(work, RMS_NORM_RSTD),
    };
}

static norm_rows backward_call(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    vjp_norm_sizes size = vjp_rms_norm_sizes(work);
    void *dx = vjp_data(work, RMS_NORM_B_DX), *dy = vjp_data(work, RMS_NORM_B_DY), *x = vjp_data(work, RMS_NORM_B_X);
    bool saved = work->tensor[RMS_NORM_B_RSTD];
    return (norm_rows){
        .work = work,
        .by_dtype = steps[work->storage],
        .centered = false,
        .size = size,
        .eps = a->eps,
        .x = x,
        .dy = dy,
        .out = dx,
        .store = norm_store_of(work, RMS_NORM_B_DX, dx == dy || dx == x, moved(work, size, 3)),
        .gamma = norm_parameter_of(work, RMS_NORM_B_GAMMA),
        .dgamma = norm_parameter_of(work, RMS_NORM_B_DGAMMA),
        .dbeta = norm_parameter_of(work, RMS_NORM_B_DBETA),
        .rstd_in = saved ? vjp_data(work, RMS_NORM_B_RSTD) : NULL,
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

extern const vjp_kernel CPU_NAME(rms_norm)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(rms_norm)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_BITS_CPU},
    {backward, backward_workspace, VJP_BITS_CPU},
};
