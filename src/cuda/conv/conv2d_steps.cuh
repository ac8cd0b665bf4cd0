/* SPDX-License-Identifier: MIT */
/*
 * The steps of a pass of conv2d, for the host: kernels that are enqueued one after another, which results tiles can
 * compute, and the operands of tiles, in place or packed in the workspace.
 */
#ifndef VJP_CUDA_CONV2D_STEPS_CUH
#define VJP_CUDA_CONV2D_STEPS_CUH

#include "cuda/conv/conv2d_pack.cuh"
#include "cuda/conv/conv2d_tiles.cuh"

namespace vjp {
namespace {

/* ---- The steps of a pass ----------------------------------------------------------------------------- */

/* The steps are one function that runs twice: first for the size of the workspace, then to enqueue them. */
struct steps {
    const vjp_work *work;
    bool enqueues; /* false: only lay out the workspace */
    vjp_status status;
    workspace_layout layout;
};

/* Launches a kernel, unless only the workspace is laid out or an earlier step has failed. */
template <class... Parameters, class... Arguments>
void enqueue(steps &w, void (*kernel)(Parameters...), int64_t grid, size_t shared, const Arguments &...arguments) {
    if (!w.enqueues || w.status != VJP_OK) return;
    w.status = launch(w.work, true, kernel, grid, THREADS, shared, arguments...);
}

/* ---- Which results are computed by tiles ------------------------------------------------------------- */

/*
 * Limits of the tiles: sizes along an axis and elements of a packed tensor, so that 32 bits hold every index; terms of
 * one chain on tensor cores, which drifts; and phases of dx, each of which has its own tiles.
 */
constexpr int64_t MAX_SIZE = 1 << 20, MAX_TERMS = 65536, MAX_PHASES = 16;
constexpr double MAX_ELEMENTS = INT32_MAX;

/* With fewer weights per tap of a group, most of a tile would be padding. */
constexpr int64_t MIN_WEIGHTS = 64;

/* Depends on the sizes and the storage type alone: the path decides the bits. */
struct tile_sizes {
    bool y, dx, dweight;
    int groups, taps, channels, outs; /* channels and outs of a group, padded to whole runs */
    int phases_down, phases_across;
};

bool fits_axis(int64_t source, int64_t result, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
    for (int64_t size : {source, result, kernel, stride, padding, dilation})
        if (size > MAX_SIZE) return false;
    return source > 0 && (kernel - 1) * dilation <= MAX_SIZE && result * stride <= 4 * MAX_SIZE;
}

tile_sizes tile_sizes_of(const conv_call &q, int64_t run) {
    tile_sizes s{};
    if (q.batch == 0 || q.channels == 0 || q.outs == 0 || q.channels < vjp_divide_up(MIN_WEIGHTS, q.outs)) return s;
    if (!fits_axis(q.x.height, q.y.height, q.window.height, q.stride_h, q.padding_h, q.dilation_h) ||
        !fits_axis(q.x.width, q.y.width, q.window.width, q.stride_w, q.padding_w, q.dilation_w))
        return s;
    int64_t channels = vjp_round_up(q.channels, run), outs = vjp_round_up(q.outs, run);
    double groups = (double)(q.x.channels / q.channels), images = (double)q.batch * groups;
    double taps = (double)q.window.height * (double)q.window.width;
    if (images * (double)channels * (double)q.x.height * (double)q.x.width > MAX_ELEMENTS ||
        images * (double)outs * (double)q.y.height * (double)q.y.width > MAX_ELEMENTS ||
        groups * (double)channels * (double)outs * taps > MAX_ELEMENTS)
        return s;
    s.groups = (int)groups;
    s.taps = (int)taps;
    s.channels = (int)channels;
    s.outs = (int)outs;
    s.phases_down = (int)vjp_min(q.stride_h, q.x.height);
    s.phases_across = (int)vjp_min(q.stride_w, q.x.width);
    s.y = (int64_t)s.taps * s.channels <= MAX_TERMS;
    s.dx = (int64_t)s.taps * s.outs <= MAX_TERMS && (int64_t)s.phases_down * s.phases_across <= MAX_PHASES;
    s.dweight = true;
    return s;
}

/* ---- Packed operands --------------------------------------------------------------------------------- */

/* Whether channels are stored in whole 16-byte runs. Only while steps are enqueued are all addresses known. */
template <class T> bool is_packed(const void *data, bool channels_last, int64_t channels) {
    return data && channels_last && channels % WIDE<T> == 0 && is_aligned(data, 16);
}

/* The picture as [batch, pixels, groups, padded]: in place, or a copy. */
template <class T>
const uint4 *packed_picture(steps &w, const conv_call &q, const tile_sizes &s, const void *data, const picture &p,
                            int64_t channels, int padded) {
    if (is_packed<T>(data, q.channels_last, channels)) return static_cast<const uint4 *>(data);
    int64_t plane = p.height * p.width, runs = (int64_t)s.groups * padded / WIDE<T>;
    bool one_group = channels == padded; /* groups without padding are as one */
    pack_call c{};
    c.from = data;
    c.to = w.layout.take<uint4>(q.batch * plane * runs);
    c.groups = one_group ? 1 : (unsigned)s.groups;
    c.channels = (unsigned)(one_group ? p.channels : channels);
    c.padded = (unsigned)(one_group ? p.channels : padded);
    c.channels_last = q.channels_last || plane == 1;
    c.images = c.channels_last ? 1 : (unsigned)q.batch; /* with channels last, all pixels are as one image's */
    c.pixels = (unsigned)(c.channels_last ? q.batch * plane : plane);
    if (c.channels_last || runs <= MAX_DIRECT_RUNS) {
        enqueue(w, pack_runs<bits_of<T>>, vjp_divide_up(q.batch * plane * runs, THREADS), 0, c);
        return c.to;
    }
    with_bool(plane % WIDE<T> == 0 && is_aligned(data, 16), [&](auto aligned) {
        c.pixel_tiles = (unsigned)vjp_divide_up(plane, PACK_STEP<bits_of<T>, aligned>);
        c.channel_tiles = (unsigned)vjp_divide_up(runs, PACK_RUNS);
        enqueue(w, pack_planes<bits_of<T>, aligned>, q.batch * c.pixel_tiles * c.channel_tiles, 0, c);
    });
    return c.to;
}

/* The weights as [groups, columns, taps, padded]. */
template <class T> const uint4 *packed_weight(steps &w, const conv_call &q, const tile_sizes &s, bool transposed) {
    bool channels_last = q.channels_last || s.taps == 1;
    if (!transposed && is_packed<T>(q.weight, channels_last, q.channels)) return static_cast<const uint4 *>(q.weight);
    pack_weight_call c{};
    c.from = q.weight;
    c.window = q.window;
    c.groups = (unsigned)s.groups;
    c.channels = (unsigned)q.channels;
    c.outs = (unsigned)q.outs;
    c.taps = (unsigned)s.taps;
    c.padded = (unsigned)(transposed ? s.outs : s.channels);
    c.channels_last = q.channels_last;
    c.transposed = transposed;
    int64_t runs = s.groups * (transposed ? q.channels : q.outs) * s.taps * c.padded / WIDE<T>;
    c.to = w.layout.take<uint4>(runs);
    enqueue(w, pack_weight<bits_of<T>>, vjp_divide_up(runs, THREADS), 0, c);
    return c.to;
}

tile_axis axis_of(bool transposed, int64_t x, int64_t y, int64_t kernel, int64_t stride, int64_t padding,
                  int64_t dilation) {
    return {
        (int)(transposed ? y : x), (int)(transposed ? x : y), (int)kernel, (int)stride, (int)padding, (int)dilation};
}

tile_axis axis_down(const conv_call &q, bool transposed) {
    return axis_of(transposed, q.x.height, q.y.height, q.window.height, q.stride_h, q.padding_h, q.dilation_h);
}

tile_axis axis_across(const conv_call &q, bool transposed) {
    return axis_of(transposed, q.x.width, q.y.width, q.window.width, q.stride_w, q.padding_w, q.dilation_w);
}

} // namespace
} // namespace vjp

#endif
