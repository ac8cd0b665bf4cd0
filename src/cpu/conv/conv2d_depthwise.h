/* SPDX-License-Identifier: MIT */
/*
 * Depthwise convolution: one input and one output channel per group.
 *
 *     forward, dx   channels last    here: vectors along the channels
 *     forward, dx   channels first   conv2d_planes.h, with one channel per group
 *     dweight       either layout    here: a sum over all positions per tap, in short f32 chains added in double, over
 *                                    chunks that depend on the sizes alone and are added in order
 */
#ifndef VJP_CPU_CONV2D_EACH_H
#define VJP_CPU_CONV2D_EACH_H

#include "cpu/conv/conv2d.h"

static bool is_depthwise(const vjp_conv2d_sizes *s) {
    return s->channels == s->groups && s->out_channels == s->groups;
}

/* ---- Forward and dx, channels last -------------------------------------------------------------------  */

typedef struct depthwise_run {
    const conv_sum *sum;
    const float *weights; /* [tap][channel] */
    cpu_split split;      /* of the output rows of all images */
} depthwise_run;

/* Taps of output i that are inside the source. */
static conv_range taps_inside(const conv_axis *x, int64_t i) {
    int64_t from = i * x->step + x->base, begin = 0, end = x->taps;
    while (begin < end && from + begin * x->dilation < 0)
        begin++;
    while (begin < end && from + (end - 1) * x->dilation >= x->size)
        end--;
    return (conv_range){begin, end};
}

/* Vectors of channels that are summed side by side. */
enum { DEPTHWISE_VECTORS = 4 };

/* Channels [c, c + n) of one output, in up to `vectors` vectors, a constant after inlining. */
INLINE void depthwise_channels(const depthwise_run *r, vjp_dtype dtype, int vectors, conv_range rows,
                               conv_range columns, int64_t from, int64_t to, int64_t c, int64_t n) {
    const conv_sum *p = r->sum;
    int64_t channels = p->groups;
    vf sum[DEPTHWISE_VECTORS];
    for (int v = 0; v < vectors; v++)
        sum[v] = vf_zero();
    for (int64_t down = rows.begin; down < rows.end; down++)
        for (int64_t across = columns.begin; across < columns.end; across++) {
            int64_t at = from + (down * p->h.dilation * p->w.size + across * p->w.dilation) * channels + c;
            int64_t weight = (down * p->w.taps + across) * channels + c;
            for (int v = 0; v < vectors; v++) {
                vf x = vf_load_part(dtype, p->source.data, at + v * LANES, n - v * LANES);
                vf w = vf_load_part(VJP_F32, r->weights, weight + v * LANES, n - v * LANES);
                sum[v] = vf_fma(x, w, sum[v]);
            }
        }
    for (int v = 0; v < vectors; v++) {
        int64_t k = c + v * LANES, left = n - v * LANES;
        if (p->bias.data && p->bias.dtype == VJP_F32)
            sum[v] = vf_add(sum[v], vf_load_part(VJP_F32, p->bias.data, k, left));
        else if (p->bias.data)
            sum[v] = vf_add(sum[v], vf_load_part(dtype, p->bias.data, k, left));
        if (p->target.accumulate) sum[v] = vf_add(vf_load_part(dtype, p->target.data, to + k, left), sum[v]);
        vf_store_part(dtype, p->target.data, to + k, left, sum[v]);
    }
}

INLINE void depthwise_pixel(const depthwise_run *r, vjp_dtype dtype, int64_t image, int64_t i, int64_t j,
                            conv_range rows) {
    const conv_sum *p = r->sum;
    int64_t channels = p->groups, h = p->h.to + i * p->h.to_step, w = p->w.to + j * p->w.to_step, c = 0;
    int64_t to = ((image * p->target_h + h) * p->target_w + w) * channels;
    int64_t from_h = i * p->h.step + p->h.base, from_w = j * p->w.step + p->w.base;
    int64_t from = ((image * p->h.size + from_h) * p->w.size + from_w) * channels;
    conv_range columns = taps_inside(&p->w, j);
    for (; c + DEPTHWISE_VECTORS * LANES <= channels; c += DEPTHWISE_VECTORS * LANES)
        depthwise_channels(r, dtype, DEPTHWISE_VECTORS, rows, columns, from, to, c, DEPTHWISE_VECTORS * LANES);
    for (; c < channels; c += LANES)
        depthwise_channels(r, dtype, 1, rows, columns, from, to, c, vjp_min(LANES, channels - c));
}

INLINE void depthwise_rows(const depthwise_run *r, vjp_dtype dtype, size_t task) {
    const conv_sum *p = r->sum;
    for (int64_t row = cpu_split_begin(&r->split, task); row < cpu_split_end(&r->split, task); row++)
        for (int64_t j = 0; j < p->w.out; j++)
            depthwise_pixel(r, dtype, row / p->h.out, row % p->h.out, j, taps_inside(&p->h, row % p->h.out));
}

static void depthwise_f32(void *run, size_t task) {
    depthwise_rows(run, VJP_F32, task);
}

static void depthwise_bf16(void *run, size_t task) {
    depthwise_rows(run, VJP_BF16, task);
}

static void depthwise_f16(void *run, size_t task) {
    depthwise_rows(run, VJP_F16, task);
}

static size_t depthwise_workspace(const conv_sum *p) {
    return whole_lines(p->h.taps * p->w.taps * p->groups * (int64_t)sizeof(float));
}

static void sum_depthwise(const vjp_work *work, const conv_sum *p, void *workspace) {
    static const vjp_task tasks[] = {[VJP_F32] = depthwise_f32, [VJP_BF16] = depthwise_bf16, [VJP_F16] = depthwise_f16};
    if (p->batch * p->groups * p->h.out * p->w.out == 0) return;
    float *weights = workspace;
    for (int64_t down = 0; down < p->h.taps; down++)
        for (int64_t across = 0; across < p->w.taps; across++)
            for (int64_t c = 0; c < p->groups; c++)
                weights[(down * p->w.taps + across) * p->groups + c] =
                    load_element(&p->weight, weight_index(p, c, 0, 0, down, across));
    int64_t bytes = p->w.out * p->groups * p->h.taps * (int64_t)dtype_bytes(p->source.dtype);
    depthwise_run r = {p, weights, vjp_cpu_split_items(p->batch * p->h.out, bytes, CPU_MAX_TASKS)};
    vjp_cpu_for(work, r.split.count, tasks[p->source.dtype], &r);
}

/* ---- dweight -----------------------------------------------------------------------------------------  */

/* Terms of an f32 chain before it is added in double. */
enum { DEPTHWISE_CHAIN = 64 };

/* Limits on the doubles of all partial sums (4 MiB) and on the partial sums per element. */
enum { DEPTHWISE_PARTIALS = 1 << 19, DEPTHWISE_CHUNKS = 64 };

typedef struct depthwise_gradient {
    conv_sum sum; /* the forward's: source is x */
    matrix dy;
    bool last;
    cpu_split split; /* of the output rows of all images */
    double *partial; /* [chunk][tap][channel] */
} depthwise_gradient;

/* Columns from `from`, at most DEPTHWISE_CHAIN, in which tap `across` is inside the source. */
static conv_range columns_inside(const conv_sum *p, int64_t across, int64_t from) {
    return inside(&p->w, p->w.base + across * p->w.dilation, from, vjp_min(DEPTHWISE_CHAIN, p->w.out - from));
}

INLINE void depthwise_gradient_pixels(const depthwise_gradient *g, vjp_dtype dtype, int64_t row, int64_t h,
                                      int64_t down, double *sums) {
    const conv_sum *p = &g->sum;
    int64_t channels = p->groups, image = row / p->h.out;
    for (int64_t across = 0; across < p->w.taps; across++)
        for (int64_t from = 0; from < p->w.out; from += DEPTHWISE_CHAIN) {
            conv_range r = columns_inside(p, across, from);
            for (int64_t c = 0; c < channels && r.begin < r.end; c += LANES) {
                int64_t n = vjp_min(LANES, channels - c);
                vf sum = vf_zero();
                for (int64_t j = r.begin; j < r.end; j++) {
                    int64_t w = j * p->w.step + p->w.base + across * p->w.dilation;
                    vf x = vf_load_part(dtype, p->source.data, ((image * p->h.size + h) * p->w.size + w) * channels + c,
                                        n);
                    sum = vf_fma(vf_load_part(dtype, g->dy.data, (row * p->w.out + j) * channels + c, n), x, sum);
                }
                float lanes[LANES];
                vf_store(VJP_F32, lanes, 0, sum);
                for (int64_t i = 0; i < n; i++)
                    sums[(down * p->w.taps + across) * channels + c + i] += (double)lanes[i];
            }
        }
}

/* The sum of dy times the source under tap (down, across), over rows [i, end) of one plane. */
INLINE double depthwise_tap_sum(const depthwise_gradient *g, vjp_dtype dtype, int64_t plane, int64_t down,
                                int64_t across, int64_t i, int64_t end) {
    const conv_sum *p = &g->sum;
    int64_t shift = p->w.base + across * p->w.dilation;
    conv_range r = inside(&p->w, shift, 0, p->w.out);
    vf sum = vf_zero();
    double total = 0;
    int64_t summed = 0;
    for (; i < end; i++) {
        int64_t h = i * p->h.step + p->h.base + down * p->h.dilation;
        if (h < 0 || h >= p->h.size) continue;
        int64_t x_row = (plane * p->h.size + h) * p->w.size + shift, dy_row = (plane * p->h.out + i) * p->w.out;
        for (int64_t j = r.begin; j < r.end; j += LANES) {
            int64_t n = vjp_min(LANES, r.end - j), at = x_row + j * p->w.step;
            float lanes[LANES] = {0};
            if (p->w.step > 1) load_strided(dtype, p->source.data, at, p->w.step, n, lanes);
            vf x = p->w.step > 1 ? vf_load(VJP_F32, lanes, 0) : vf_load_part(dtype, p->source.data, at, n);
            sum = vf_fma(vf_load_part(dtype, g->dy.data, dy_row + j, n), x, sum);
            if (++summed % DEPTHWISE_CHAIN) continue;
            total += (double)vf_sum(sum);
            sum = vf_zero();
        }
    }
    return total + (double)vf_sum(sum);
}

/* Rows [i, end) of one image. */
INLINE void depthwise_gradient_planes(const depthwise_gradient *g, vjp_dtype dtype, int64_t image, int64_t i,
                                      int64_t end, double *sums) {
    const conv_sum *p = &g->sum;
    for (int64_t c = 0; c < p->groups; c++)
        for (int64_t down = 0; down < p->h.taps; down++)
            for (int64_t across = 0; across < p->w.taps; across++)
                sums[(down * p->w.taps + across) * p->groups + c] +=
                    depthwise_tap_sum(g, dtype, image * p->groups + c, down, across, i, end);
}

INLINE void depthwise_gradient_rows(const depthwise_gradient *g, vjp_dtype dtype, size_t task) {
    const conv_sum *p = &g->sum;
    int64_t count = p->h.taps * p->w.taps * p->groups, end = cpu_split_end(&g->split, task);
    double *sums = g->partial + (int64_t)task * count;
    memset(sums, 0, (size_t)count * sizeof *sums);
    for (int64_t row = cpu_split_begin(&g->split, task); row < end;) {
        int64_t image = row / p->h.out, i = row % p->h.out;
        if (!g->last) {
            int64_t rows = vjp_min(end - row, p->h.out - i);
            depthwise_gradient_planes(g, dtype, image, i, i + rows, sums);
            row += rows;
            continue;
        }
        for (int64_t down = 0; down < p->h.taps; down++) {
            int64_t h = i * p->h.step + p->h.base + down * p->h.dilation;
            if (h >= 0 && h < p->h.size) depthwise_gradient_pixels(g, dtype, row, h, down, sums);
        }
        row++;
    }
}

static void depthwise_gradient_f32(void *gradient, size_t task) {
    depthwise_gradient_rows(gradient, VJP_F32, task);
}

static void depthwise_gradient_bf16(void *gradient, size_t task) {
    depthwise_gradient_rows(gradient, VJP_BF16, task);
}

static void depthwise_gradient_f16(void *gradient, size_t task) {
    depthwise_gradient_rows(gradient, VJP_F16, task);
}

static cpu_split depthwise_gradient_cut(const conv_sum *p) {
    int64_t doubles = p->h.taps * p->w.taps * p->groups;
    int64_t limit = vjp_max(1, vjp_min(DEPTHWISE_CHUNKS, DEPTHWISE_PARTIALS / vjp_max(1, doubles)));
    int64_t bytes = p->w.out * p->groups * p->h.taps * (int64_t)dtype_bytes(p->source.dtype);
    return vjp_cpu_split_items(p->batch * p->h.out, bytes, limit);
}

static size_t depthwise_gradient_workspace(const conv_sum *p) {
    return whole_lines(vjp_max(1, depthwise_gradient_cut(p).count) * p->h.taps * p->w.taps * p->groups *
                       (int64_t)sizeof(double));
}

/* `p` is the forward's sum, over x. */
static void depthwise_weight_gradient(const vjp_work *work, const conv_sum *p, const matrix *dy, const matrix *dweight,
                                      bool last, void *workspace) {
    static const vjp_task tasks[] = {
        [VJP_F32] = depthwise_gradient_f32, [VJP_BF16] = depthwise_gradient_bf16, [VJP_F16] = depthwise_gradient_f16};
    depthwise_gradient g = {
        .sum = *p, .dy = *dy, .last = last, .split = depthwise_gradient_cut(p), .partial = workspace};
    int64_t taps = p->h.taps * p->w.taps, channels = p->groups;
    vjp_cpu_for(work, g.split.count, tasks[p->source.dtype], &g);
    for (int64_t c = 0; c < channels; c++)
        for (int64_t tap = 0; tap < taps; tap++) {
            double total = 0;
            for (int64_t chunk = 0; chunk < g.split.count; chunk++)
                total += g.partial[(chunk * taps + tap) * channels + c];
            store_element(dweight, c * taps + tap, (float)total);
        }
}

#endif
