/* SPDX-License-Identifier: MIT */
/*
 * Definitions shared by the convolution kernels: the forward and dx as one form of sum.
 *
 * Along each axis, output i under tap t of the kernel reads the source at i*step + base + t*dilation. Forward, the
 * source is x and the step is the stride. dx is the same sum over dy: the elements of x that are equal modulo the
 * stride (a phase) meet the same taps, and from one to the next dy moves by 1. So dx is one such sum per phase that has
 * taps; each element of dx is written by one task, and nothing is scattered.
 */
#ifndef VJP_CPU_CONV2D_H
#define VJP_CPU_CONV2D_H

#include "cpu/gemm/rows.h"
#include "cpu/simd/shuffle.h"
#include "op/op.h"

typedef struct conv_axis {
    int64_t size; /* of the source */
    int64_t step, base, dilation, taps;
    int64_t kernel, kernel_step; /* tap t is the kernel's element kernel + t * kernel_step */
    int64_t out;                 /* outputs */
    int64_t to, to_step;         /* output i is element to + i * to_step of the target */
} conv_axis;

/* One axis as the caller gave it. */
typedef struct conv_side {
    int64_t size, out, kernel, stride, padding, dilation;
} conv_side;

static inline conv_side side_of(const vjp_conv2d_sizes *s, bool across) {
    if (across) return (conv_side){s->width, s->out_width, s->kernel_w, s->stride_w, s->padding_w, s->dilation_w};
    return (conv_side){s->height, s->out_height, s->kernel_h, s->stride_h, s->padding_h, s->dilation_h};
}

static inline int64_t common_divisor(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static inline conv_axis forward_axis(conv_side s) {
    return (conv_axis){.size = s.size,
                       .step = s.stride,
                       .base = -s.padding,
                       .dilation = s.dilation,
                       .taps = s.kernel,
                       .kernel_step = 1,
                       .out = s.out,
                       .to_step = 1};
}

/* Phases of x that any tap reaches. Taps of one phase are stride / common divisor apart. */
static inline int64_t phases_of(conv_side s) {
    return vjp_min(s.kernel, s.stride / common_divisor(s.stride, s.dilation));
}

/* The phase that tap `first` reaches, with all its taps, in the order in which they move through dy. */
static inline conv_axis backward_axis(conv_side s, int64_t first) {
    int64_t divisor = common_divisor(s.stride, s.dilation), apart = s.stride / divisor;
    int64_t taps = (s.kernel - 1 - first) / apart + 1, last = first + (taps - 1) * apart;
    int64_t phase = (first * s.dilation - s.padding) % s.stride;
    if (phase < 0) phase += s.stride;
    return (conv_axis){.size = s.out,
                       .step = 1,
                       .base = (phase + s.padding - last * s.dilation) / s.stride,
                       .dilation = s.dilation / divisor,
                       .taps = taps,
                       .kernel = last,
                       .kernel_step = -apart,
                       .out = phase < s.size ? (s.size - 1 - phase) / s.stride + 1 : 0,
                       .to = phase,
                       .to_step = s.stride};
}

/* Whether some elements of x are in no phase, so that they stay zero. */
static inline bool leaves_gaps(conv_side s) {
    return phases_of(s) < s.stride;
}

typedef struct conv_range {
    int64_t begin, end;
} conv_range;

/* Which i in [from, from + count) have i*step + shift inside the source. */
static inline conv_range inside(const conv_axis *x, int64_t shift, int64_t from, int64_t count) {
    int64_t begin = vjp_max(0, -shift), end = vjp_max(0, x->size - shift);
    if (x->step > 1) { /* avoids a division where possible: rows are short */
        begin = vjp_divide_up(begin, x->step);
        end = vjp_divide_up(end, x->step);
    }
    begin = vjp_max(begin, from);
    end = vjp_min(end, from + count);
    return (conv_range){begin, vjp_max(begin, end)};
}

/* Elements that are `step` apart. */
INLINE void load_strided(vjp_dtype dtype, const void *from, int64_t at, int64_t step, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++)
        to[i] = f32_load(dtype, from, at + i * step);
}

/*
 * Elements [at, at + n) of a tensor of `size`; the lanes past n are zero. A whole load and a mask, where that stays
 * inside.
 */
INLINE vf load_first(vjp_dtype dtype, const void *from, int64_t at, int64_t n, int64_t size) {
    if (n >= LANES) return vf_load(dtype, from, at);
    if (n <= 0) return vf_zero();
    if (at + LANES > size) return vf_load_part(dtype, from, at, n);
    return vf_select(vi_first(n), vf_load(dtype, from, at), vf_zero());
}

/* The first 16 of n elements at, at + 2, ...; the neighbour of the last may be past the end of the tensor. */
INLINE vf load_every_second(vjp_dtype dtype, const void *from, int64_t at, int64_t n, int64_t size) {
    return vf_unzip(load_first(dtype, from, at, 2 * n - 1, size),
                    load_first(dtype, from, at + LANES, 2 * n - 1 - LANES, size), false);
}

/* Such a sum for every image and group: the forward's, or one phase of dx. */
typedef struct conv_sum {
    conv_axis h, w;
    int64_t batch, groups, ins, outs; /* channels per group, of the source and of the target */
    matrix source, target;            /* `columns` is not used */
    int64_t target_h, target_w;
    matrix bias;   /* no data: none */
    matrix weight; /* element (group, out, in, u, v) is at group * weight_group + ... */
    int64_t weight_group, weight_out, weight_in, weight_h, weight_w;
    bool channels_last; /* set only for kernels that handle both layouts */
    int threads;
} conv_sum;

static inline conv_sum forward_sum(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_sum p = {.h = forward_axis(side_of(&s, false)),
                  .w = forward_axis(side_of(&s, true)),
                  .batch = s.batch,
                  .groups = s.groups,
                  .ins = s.channels / s.groups,
                  .outs = s.out_channels / s.groups,
                  .source = matrix_of(work, CONV2D_X, 0, 0),
                  .target = matrix_of(work, CONV2D_Y, 0, 0),
                  .target_h = s.out_height,
                  .target_w = s.out_width,
                  .bias = matrix_of(work, CONV2D_BIAS, 0, 0),
                  .weight = matrix_of(work, CONV2D_WEIGHT, 0, 0),
                  .threads = cpu_state_of(work)->threads};
    p.weight_out = p.ins * s.kernel_h * s.kernel_w;
    p.weight_group = p.outs * p.weight_out;
    p.weight_in = s.channels_last ? 1 : s.kernel_h * s.kernel_w;
    p.weight_w = s.channels_last ? p.ins : 1;
    p.weight_h = s.kernel_w * p.weight_w;
    return p;
}

/* Phase (down, across) of dx, each less than phases_of() its axis. */
static inline conv_sum backward_sum(const vjp_work *work, int64_t down, int64_t across) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_sum p = {.h = backward_axis(side_of(&s, false), down),
                  .w = backward_axis(side_of(&s, true), across),
                  .batch = s.batch,
                  .groups = s.groups,
                  .ins = s.out_channels / s.groups,
                  .outs = s.channels / s.groups,
                  .source = matrix_of(work, CONV2D_B_DY, 0, 0),
                  .target = matrix_of(work, CONV2D_B_DX, 0, 0),
                  .target_h = s.height,
                  .target_w = s.width,
                  .weight = matrix_of(work, CONV2D_B_WEIGHT, 0, 0),
                  .threads = cpu_state_of(work)->threads};
    p.weight_in = p.outs * s.kernel_h * s.kernel_w;
    p.weight_group = p.ins * p.weight_in;
    p.weight_out = s.channels_last ? 1 : s.kernel_h * s.kernel_w;
    p.weight_w = s.channels_last ? p.outs : 1;
    p.weight_h = s.kernel_w * p.weight_w;
    return p;
}

static inline int64_t weight_index(const conv_sum *p, int64_t group, int64_t out, int64_t in, int64_t down,
                                   int64_t across) {
    return group * p->weight_group + out * p->weight_out + in * p->weight_in +
           (p->h.kernel + down * p->h.kernel_step) * p->weight_h +
           (p->w.kernel + across * p->w.kernel_step) * p->weight_w;
}

static inline float load_element(const matrix *m, int64_t at) {
    return f32_load(m->dtype, m->data, at);
}

/* Writes an element of a gradient, or adds to it. */
static inline void store_element(const matrix *m, int64_t at, float value) {
    if (m->accumulate) value = load_element(m, at) + value;
    f32_store(m->dtype, m->data, at, value);
}

#endif
