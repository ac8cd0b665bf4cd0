/* SPDX-License-Identifier: MIT */
/*
 * conv2d. The forward and dx are sums of one form (conv2d.h); dweight and dbias are sums over all output positions.
 *
 *     pass           when                        path                  how
 *     forward, dx    channels first              conv2d_planes.h       GEMM micro-kernel on copied planes, no im2col
 *     forward, dx    channels last               conv2d_pixels.h       GEMM that gathers windows while it packs
 *     forward, dx    channels last, depthwise    conv2d_depthwise.h    vectors along channels: no product to block
 *     dweight        not depthwise               conv2d_weight.h       GEMM micro-kernel on windows of x, no im2col
 *     dweight        depthwise                   conv2d_depthwise.h    direct sums per tap
 *     dbias          always                      here                  sums of dy in double
 *
 * Depthwise means one input and one output channel per group. A device that uses BLAS runs the same kernels: with BLIS
 * doing the products, ResNet's shapes took 1.4 to 3.4 times as long.
 */
#include "cpu/conv/conv2d.h"
#include "cpu/conv/conv2d_depthwise.h"
#include "cpu/conv/conv2d_pixels.h"
#include "cpu/conv/conv2d_planes.h"
#include "cpu/conv/conv2d_weight.h"

/* ---- Forward, and the phases of dx -------------------------------------------------------------------  */

static size_t sum_workspace(const vjp_conv2d_sizes *s, const conv_sum *p) {
    if (!s->channels_last) return planes_workspace(p);
    return is_depthwise(s) ? depthwise_workspace(p) : pixels_workspace(p);
}

static void run_sum(const vjp_work *work, const vjp_conv2d_sizes *s, const conv_sum *p, void *workspace) {
    if (!s->channels_last)
        sum_planes(work, p, workspace);
    else if (is_depthwise(s))
        sum_depthwise(work, p, workspace);
    else
        sum_pixels(work, p, workspace);
}

static size_t forward_workspace(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_sum p = forward_sum(work);
    return sum_workspace(&s, &p);
}

static vjp_status forward(const vjp_work *work) {
    if (!work->tensor[CONV2D_Y]) return VJP_OK;
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_sum p = forward_sum(work);
    run_sum(work, &s, &p, work->workspace);
    return VJP_OK;
}

static size_t dx_workspace(const vjp_work *work, const vjp_conv2d_sizes *s) {
    size_t bytes = 0;
    for (int64_t down = 0; down < phases_of(side_of(s, false)); down++)
        for (int64_t across = 0; across < phases_of(side_of(s, true)); across++) {
            conv_sum p = backward_sum(work, down, across);
            bytes = max_bytes(bytes, sum_workspace(s, &p));
        }
    return bytes;
}

/* dx is zero where no tap reaches, so all of it is cleared before the phases are written. */
static void clear(const vjp_work *work, int slot, int64_t count) {
    memset(vjp_data(work, slot), 0, (size_t)count * dtype_bytes(work->storage));
}

static void make_dx(const vjp_work *work, const vjp_conv2d_sizes *s) {
    int64_t count = s->batch * s->channels * s->height * s->width;
    if (count == 0) return;
    bool gaps = leaves_gaps(side_of(s, false)) || leaves_gaps(side_of(s, true));
    if (gaps && !vjp_accumulates(work, CONV2D_B_DX)) clear(work, CONV2D_B_DX, count);
    for (int64_t down = 0; down < phases_of(side_of(s, false)); down++)
        for (int64_t across = 0; across < phases_of(side_of(s, true)); across++) {
            conv_sum p = backward_sum(work, down, across);
            run_sum(work, s, &p, work->workspace);
        }
}

/* ---- dweight ------------------------------------------------------------------------------------------ */

/* The forward's sum over x, for the backward. */
static conv_sum windows_of_x(const vjp_work *work, const vjp_conv2d_sizes *s) {
    return (conv_sum){.h = forward_axis(side_of(s, false)),
                      .w = forward_axis(side_of(s, true)),
                      .batch = s->batch,
                      .groups = s->groups,
                      .ins = s->channels / s->groups,
                      .outs = s->out_channels / s->groups,
                      .source = matrix_of(work, CONV2D_B_X, 0, 0),
                      .channels_last = s->channels_last,
                      .threads = cpu_state_of(work)->threads};
}

static size_t dweight_workspace(const vjp_work *work, const vjp_conv2d_sizes *s) {
    conv_sum p = windows_of_x(work, s);
    return is_depthwise(s) ? depthwise_gradient_workspace(&p) : weights_workspace(&p);
}

static void make_dweight(const vjp_work *work, const vjp_conv2d_sizes *s) {
    conv_sum p = windows_of_x(work, s);
    matrix dy = matrix_of(work, CONV2D_B_DY, 0, 0), dweight = matrix_of(work, CONV2D_B_DWEIGHT, 0, 0);
    if (is_depthwise(s))
        depthwise_weight_gradient(work, &p, &dy, &dweight, s->channels_last, work->workspace);
    else
        weight_gradient_of(work, &p, &dy, &dweight, work->workspace);
}

/* ---- dbias -------------------------------------------------------------------------------------------- */

/*
 * Limits on the doubles of all partial sums (4 MiB) and on the partial sums per channel; numbers summed in f32 before
 * they are added in double.
 */
enum { BIAS_PARTIALS = 1 << 19, BIAS_CHUNKS = 64, BIAS_RUN = 1024 };

/* dy as `rows` rows of `n` numbers: pixels of channels, or planes, where row r is of channel r % channels. */
typedef struct bias_pass {
    matrix dy;
    bool last;
    int64_t rows, n, channels;
    cpu_split split;
    double *partial; /* [chunk][channel] */
} bias_pass;

static double sum_run(const matrix *m, int64_t at, int64_t count) {
    float values[BIAS_RUN];
    load_row(m->dtype, m->data, at, count, values);
    vf sum = vf_zero();
    for (int64_t i = 0; i < count; i += LANES)
        sum = vf_add(sum, vf_load_part(VJP_F32, values, i, count - i));
    return (double)vf_sum(sum);
}

static void bias_task(void *argument, size_t task) {
    const bias_pass *b = argument;
    double *sums = b->partial + (int64_t)task * b->channels;
    memset(sums, 0, (size_t)b->channels * sizeof *sums);
    for (int64_t row = cpu_split_begin(&b->split, task); row < cpu_split_end(&b->split, task); row++)
        for (int64_t i = 0; i < b->n; i += BIAS_RUN) {
            int64_t count = vjp_min(BIAS_RUN, b->n - i);
            if (!b->last) {
                sums[row % b->channels] += sum_run(&b->dy, row * b->n + i, count);
                continue;
            }
            float values[BIAS_RUN];
            load_row(b->dy.dtype, b->dy.data, row * b->n + i, count, values);
            for (int64_t j = 0; j < count; j++)
                sums[i + j] += (double)values[j];
        }
}

static bias_pass bias_pass_of(const vjp_work *work, const vjp_conv2d_sizes *s) {
    int64_t plane = s->out_height * s->out_width;
    bias_pass b = {.dy = matrix_of(work, CONV2D_B_DY, 0, 0), .last = s->channels_last, .channels = s->out_channels};
    b.rows = s->batch * (b.last ? plane : s->out_channels);
    b.n = b.last ? s->out_channels : plane;
    int64_t limit = vjp_max(1, vjp_min(BIAS_CHUNKS, BIAS_PARTIALS / vjp_max(1, s->out_channels)));
    b.split = vjp_cpu_split_items(b.rows, b.n * (int64_t)dtype_bytes(work->storage), limit);
    return b;
}

static size_t dbias_workspace(const vjp_work *work, const vjp_conv2d_sizes *s) {
    return whole_lines(bias_pass_of(work, s).split.count * s->out_channels * (int64_t)sizeof(double));
}

static void make_dbias(const vjp_work *work, const vjp_conv2d_sizes *s) {
    bias_pass b = bias_pass_of(work, s);
    b.partial = work->workspace;
    matrix dbias = matrix_of(work, CONV2D_B_DBIAS, 0, 0);
    vjp_cpu_for(work, b.split.count, bias_task, &b);
    for (int64_t o = 0; o < s->out_channels; o++) {
        double total = 0;
        for (int64_t chunk = 0; chunk < b.split.count; chunk++)
            total += b.partial[chunk * s->out_channels + o];
        store_element(&dbias, o, (float)total);
    }
}

/* ---- Backward ----------------------------------------------------------------------------------------  */

/* The gradients are computed one after the other, in the same workspace. */
static size_t backward_workspace(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    size_t dx = work->tensor[CONV2D_B_DX] ? dx_workspace(work, &s) : 0;
    size_t dweight = work->tensor[CONV2D_B_DWEIGHT] ? dweight_workspace(work, &s) : 0;
    size_t dbias = work->tensor[CONV2D_B_DBIAS] ? dbias_workspace(work, &s) : 0;
    return max_bytes(dx, max_bytes(dweight, dbias));
}

static vjp_status backward(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    if (work->tensor[CONV2D_B_DX]) make_dx(work, &s);
    if (work->tensor[CONV2D_B_DWEIGHT]) make_dweight(work, &s);
    if (work->tensor[CONV2D_B_DBIAS]) make_dbias(work, &s);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(conv2d)[VJP_PASS_COUNT];

const vjp_kernel CPU_NAME(conv2d)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_STORAGE_16_32},
    {backward, backward_workspace, VJP_STORAGE_16_32},
};
