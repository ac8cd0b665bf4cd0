/*
 * Depthwise convolution: each channel by itself. There is no product to speak of, so pixels (channels last) are summed
 * directly, with vectors along the channels; planes go through conv2d_planes.h with one channel a group. The gradient
 * of the weights is a sum over all outputs for each tap, in either layout: short runs in f32, those in double, in
 * chunks that follow from the sizes and are added in order.
 */
#ifndef VJP_CPU_CONV2D_EACH_H
#define VJP_CPU_CONV2D_EACH_H

#include "cpu/conv2d.h"

static bool is_each(const vjp_conv2d_sizes *s) {
    return s->channels == s->groups && s->out_channels == s->groups;
}

/* ---- Pixels ------------------------------------------------------------------------------------------ */

typedef struct each_run {
    const conv_sum *sum;
    const float *weights; /* [tap][channel] */
    cpu_cut cut;          /* of the output rows of all images */
} each_run;

INLINE void each_pixel(const each_run *r, vjp_dtype dtype, int64_t image, int64_t i, int64_t j) {
    const conv_sum *p = r->sum;
    int64_t channels = p->groups, h = p->h.to + i * p->h.to_step, w = p->w.to + j * p->w.to_step;
    int64_t to = ((image * p->target_h + h) * p->target_w + w) * channels;
    for (int64_t c = 0; c < channels; c += LANES) {
        int64_t n = least(LANES, channels - c);
        vf sum = vf_zero();
        for (int64_t down = 0; down < p->h.taps; down++) {
            int64_t from_h = i * p->h.step + p->h.base + down * p->h.dilation;
            if (from_h < 0 || from_h >= p->h.size) continue;
            for (int64_t across = 0; across < p->w.taps; across++) {
                int64_t from_w = j * p->w.step + p->w.base + across * p->w.dilation;
                if (from_w < 0 || from_w >= p->w.size) continue;
                int64_t from = ((image * p->h.size + from_h) * p->w.size + from_w) * channels + c;
                vf weight = vf_load_part(VJP_F32, r->weights, (down * p->w.taps + across) * channels + c, n);
                sum = vf_fma(vf_load_part(dtype, p->source.data, from, n), weight, sum);
            }
        }
        if (p->bias.data && p->bias.dtype == VJP_F32) sum = vf_add(sum, vf_load_part(VJP_F32, p->bias.data, c, n));
        if (p->bias.data && p->bias.dtype != VJP_F32) sum = vf_add(sum, vf_load_part(dtype, p->bias.data, c, n));
        if (p->target.accumulate) sum = vf_add(vf_load_part(dtype, p->target.data, to + c, n), sum);
        vf_store_part(dtype, p->target.data, to + c, n, sum);
    }
}

INLINE void each_rows(const each_run *r, vjp_dtype dtype, size_t task) {
    const conv_sum *p = r->sum;
    for (int64_t row = cpu_cut_begin(&r->cut, task); row < cpu_cut_end(&r->cut, task); row++)
        for (int64_t j = 0; j < p->w.out; j++)
            each_pixel(r, dtype, row / p->h.out, row % p->h.out, j);
}

static void each_f32(void *run, size_t task) {
    each_rows(run, VJP_F32, task);
}

static void each_bf16(void *run, size_t task) {
    each_rows(run, VJP_BF16, task);
}

static void each_f16(void *run, size_t task) {
    each_rows(run, VJP_F16, task);
}

static size_t each_workspace(const conv_sum *p) {
    return round_up(p->h.taps * p->w.taps * p->groups * (int64_t)sizeof(float));
}

static void sum_each(const vjp_work *work, const conv_sum *p, void *workspace) {
    static const vjp_task tasks[] = {[VJP_F32] = each_f32, [VJP_BF16] = each_bf16, [VJP_F16] = each_f16};
    if (p->batch * p->groups * p->h.out * p->w.out == 0) return;
    float *weights = workspace;
    for (int64_t down = 0; down < p->h.taps; down++)
        for (int64_t across = 0; across < p->w.taps; across++)
            for (int64_t c = 0; c < p->groups; c++)
                weights[(down * p->w.taps + across) * p->groups + c] =
                    one_element(&p->weight, weight_place(p, c, 0, 0, down, across));
    int64_t bytes = p->w.out * p->groups * p->h.taps * (int64_t)dtype_bytes(p->source.dtype);
    each_run r = {p, weights, vjp_cpu_cut_items(p->batch * p->h.out, bytes, CPU_MOST_TASKS)};
    vjp_cpu_for(work, r.cut.count, tasks[p->source.dtype], &r);
}

/* ---- The gradient of the weights --------------------------------------------------------------------- */

/* Outputs whose products are summed in f32 before they go into a double. */
enum { EACH_RUN = 64 };

/* The most doubles of all partial sums: 4 MiB. */
enum { EACH_PARTIALS = 1 << 19, EACH_CHUNKS = 64 };

typedef struct each_gradient {
    conv_sum sum; /* the forward's: source is x */
    matrix dy;
    bool last;
    cpu_cut cut;     /* of the output rows of all images */
    double *partial; /* [chunk][tap][channel] */
} each_gradient;

/* Columns of a row of outputs that tap `across` reads inside the source, from `from` on, at most EACH_RUN. */
static conv_range each_columns(const conv_sum *p, int64_t across, int64_t from) {
    return inside(&p->w, p->w.base + across * p->w.dilation, from, least(EACH_RUN, p->w.out - from));
}

INLINE void each_gradient_last(const each_gradient *g, vjp_dtype dtype, int64_t row, int64_t h, int64_t down,
                               double *sums) {
    const conv_sum *p = &g->sum;
    int64_t channels = p->groups, image = row / p->h.out;
    for (int64_t across = 0; across < p->w.taps; across++)
        for (int64_t from = 0; from < p->w.out; from += EACH_RUN) {
            conv_range r = each_columns(p, across, from);
            for (int64_t c = 0; c < channels && r.begin < r.end; c += LANES) {
                int64_t n = least(LANES, channels - c);
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

INLINE void each_gradient_first(const each_gradient *g, vjp_dtype dtype, int64_t row, int64_t h, int64_t down,
                                double *sums) {
    const conv_sum *p = &g->sum;
    int64_t channels = p->groups, image = row / p->h.out, i = row % p->h.out;
    for (int64_t c = 0; c < channels; c++) {
        int64_t from_x = ((image * channels + c) * p->h.size + h) * p->w.size;
        int64_t from_dy = ((image * channels + c) * p->h.out + i) * p->w.out;
        for (int64_t across = 0; across < p->w.taps; across++)
            for (int64_t from = 0; from < p->w.out; from += EACH_RUN * LANES) {
                int64_t shift = p->w.base + across * p->w.dilation;
                conv_range r = inside(&p->w, shift, from, least(EACH_RUN * LANES, p->w.out - from));
                vf sum = vf_zero();
                for (int64_t j = r.begin; j < r.end; j += LANES) {
                    int64_t n = least(LANES, r.end - j), at = from_x + j * p->w.step + shift;
                    vf x;
                    if (p->w.step == 1) {
                        x = vf_load_part(dtype, p->source.data, at, n);
                    } else {
                        float lanes[LANES] = {0};
                        load_apart(dtype, p->source.data, at, p->w.step, n, lanes);
                        x = vf_load(VJP_F32, lanes, 0);
                    }
                    sum = vf_fma(vf_load_part(dtype, g->dy.data, from_dy + j, n), x, sum);
                }
                sums[(down * p->w.taps + across) * channels + c] += (double)vf_sum(sum);
            }
    }
}

INLINE void each_gradient_rows(const each_gradient *g, vjp_dtype dtype, size_t task) {
    const conv_sum *p = &g->sum;
    int64_t count = p->h.taps * p->w.taps * p->groups;
    double *sums = g->partial + (int64_t)task * count;
    memset(sums, 0, (size_t)count * sizeof *sums);
    for (int64_t row = cpu_cut_begin(&g->cut, task); row < cpu_cut_end(&g->cut, task); row++)
        for (int64_t down = 0; down < p->h.taps; down++) {
            int64_t h = row % p->h.out * p->h.step + p->h.base + down * p->h.dilation;
            if (h < 0 || h >= p->h.size) continue;
            if (g->last)
                each_gradient_last(g, dtype, row, h, down, sums);
            else
                each_gradient_first(g, dtype, row, h, down, sums);
        }
}

static void each_gradient_f32(void *gradient, size_t task) {
    each_gradient_rows(gradient, VJP_F32, task);
}

static void each_gradient_bf16(void *gradient, size_t task) {
    each_gradient_rows(gradient, VJP_BF16, task);
}

static void each_gradient_f16(void *gradient, size_t task) {
    each_gradient_rows(gradient, VJP_F16, task);
}

static cpu_cut each_gradient_cut(const conv_sum *p) {
    int64_t doubles = p->h.taps * p->w.taps * p->groups;
    int64_t limit = most(1, least(EACH_CHUNKS, EACH_PARTIALS / most(1, doubles)));
    int64_t bytes = p->w.out * p->groups * p->h.taps * (int64_t)dtype_bytes(p->source.dtype);
    return vjp_cpu_cut_items(p->batch * p->h.out, bytes, limit);
}

static size_t each_gradient_workspace(const conv_sum *p) {
    return round_up(most(1, each_gradient_cut(p).count) * p->h.taps * p->w.taps * p->groups * (int64_t)sizeof(double));
}

/* `sum` is the forward's, over x. */
static void each_weight_gradient(const vjp_work *work, const conv_sum *p, const matrix *dy, const matrix *dweight,
                                 bool last, void *workspace) {
    static const vjp_task tasks[] = {
        [VJP_F32] = each_gradient_f32, [VJP_BF16] = each_gradient_bf16, [VJP_F16] = each_gradient_f16};
    each_gradient g = {.sum = *p, .dy = *dy, .last = last, .cut = each_gradient_cut(p), .partial = workspace};
    int64_t taps = p->h.taps * p->w.taps, channels = p->groups;
    vjp_cpu_for(work, g.cut.count, tasks[p->source.dtype], &g);
    for (int64_t c = 0; c < channels; c++)
        for (int64_t tap = 0; tap < taps; tap++) {
            double total = 0;
            for (int64_t chunk = 0; chunk < g.cut.count; chunk++)
                total += g.partial[(chunk * taps + tap) * channels + c];
            put_element(dweight, c * taps + tap, (float)total);
        }
}

#endif
