/* SPDX-License-Identifier: MIT */
/*
 * conv2d and its gradients.
 *
 *     result      path      when
 *     y           tiles     at least 64 weights per tap of a group; at most 65536 terms; 32-bit indices suffice
 *     dx          tiles     the same, and at most 16 phases (stride_h x stride_w)
 *     dweight     tiles     the same, with any number of terms
 *     y, dx       general   otherwise, such as depthwise: a thread per element
 *     dweight     general   otherwise: a block per element
 *     dbias       chunks    always: sums over chunks of pixels, added in order
 *
 *     tiles in    product                                           results of a block
 *     bf16, f16   tensor cores (mma.sync), f32 sums                 128 x 128, or 128 x 64 for up to 64 columns
 *     f32         FMA, 8 x 4 results per thread                     128 x 64
 *
 * Tiles read 16-byte runs of channels. A tensor that is stored channels first, or whose groups are not whole aligned
 * runs, is packed in the workspace first, so that both layouts have the same kernels. conv2d_tiles.cuh describes the
 * products, conv2d_general.cuh the general path.
 */
#include "cuda/conv/conv2d_pack.cuh"
#include "cuda/conv/conv2d_tiles.cuh"

namespace vjp {
namespace {

conv_call call_of(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    conv_call q{};
    q.batch = s.batch;
    q.channels = s.channels / s.groups;
    q.outs = s.out_channels / s.groups;
    q.x = picture_of(s.channels_last, s.channels, s.height, s.width);
    q.y = picture_of(s.channels_last, s.out_channels, s.out_height, s.out_width);
    q.window = picture_of(s.channels_last, q.channels, s.kernel_h, s.kernel_w);
    q.stride_h = s.stride_h;
    q.stride_w = s.stride_w;
    q.padding_h = s.padding_h;
    q.padding_w = s.padding_w;
    q.dilation_h = s.dilation_h;
    q.dilation_w = s.dilation_w;
    q.channels_last = s.channels_last;
    bool back = work->pass == VJP_BACKWARD;
    int result = back ? (int)CONV2D_B_DX : (int)CONV2D_Y;
    q.x_data = vjp_data(work, back ? (int)CONV2D_B_X : (int)CONV2D_X);
    q.weight = vjp_data(work, back ? (int)CONV2D_B_WEIGHT : (int)CONV2D_WEIGHT);
    q.result = vjp_data(work, result);
    q.add = vjp_accumulates(work, result);
    if (back) {
        q.y_data = vjp_data(work, CONV2D_B_DY);
        q.dweight = parameter_output_of(work, CONV2D_B_DWEIGHT);
        q.dbias = parameter_output_of(work, CONV2D_B_DBIAS);
    } else {
        q.bias = parameter_of(work, CONV2D_BIAS);
    }
    return q;
}

int64_t blocks_of(int64_t threads) {
    return vjp_min(vjp_divide_up(threads, THREADS), MAX_BLOCKS);
}

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
 * one chain on tensor cores, as for linear; and phases of dx, each of which has its own tiles.
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
    pack_call c{};
    c.from = data;
    c.source = p;
    c.pixels = p.height * p.width;
    c.images = q.batch;
    c.to = w.layout.take<T>(c.images * c.pixels * s.groups * padded);
    if (q.channels_last) { /* the pictures are one */
        c.pixels *= c.images;
        c.images = 1;
    }
    c.groups = s.groups;
    c.channels = (int)channels;
    c.padded = padded;
    c.channels_last = q.channels_last;
    c.pixel_tiles = vjp_divide_up(c.pixels, PACK);
    c.channel_tiles = vjp_divide_up((int64_t)s.groups * padded, PACK);
    enqueue(w, pack_picture<T>, c.images * c.pixel_tiles * c.channel_tiles, 0, c);
    return static_cast<const uint4 *>(c.to);
}

/* The weights as [groups, columns, taps, padded]. */
template <class T> const uint4 *packed_weight(steps &w, const conv_call &q, const tile_sizes &s, bool transposed) {
    if (!transposed && is_packed<T>(q.weight, q.channels_last, q.channels)) return static_cast<const uint4 *>(q.weight);
    pack_weight_call c{};
    c.from = q.weight;
    c.window = q.window;
    c.groups = s.groups;
    c.channels = (int)q.channels;
    c.outs = (int)q.outs;
    c.taps = s.taps;
    c.padded = transposed ? s.outs : s.channels;
    c.transposed = transposed;
    int64_t elements = (int64_t)s.groups * (transposed ? c.channels : c.outs) * s.taps * c.padded;
    c.to = w.layout.take<T>(elements);
    enqueue(w, pack_weight<T>, blocks_of(elements), 0, c);
    return static_cast<const uint4 *>(c.to);
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

/* ---- The results ------------------------------------------------------------------------------------- */

/* Calls f with the number of columns of a tile. 128 x 128 results in f32 would not fit into the registers. */
template <class T, class F> void with_columns(int64_t columns, F f) {
    if constexpr (sizeof(T) == 2)
        if (columns > 64) return f(std::integral_constant<int, 128>{});
    f(std::integral_constant<int, 64>{});
}

/* y, or dx with `transposed`. */
template <class T>
void run_windows(steps &w, const conv_call &q, const tile_sizes &s, bool transposed, const uint4 *source) {
    window_call c{};
    c.source = source;
    c.weight = packed_weight<T>(w, q, s, transposed);
    c.result = q.result;
    c.add = q.add;
    c.channels_last = q.channels_last;
    c.transposed = transposed;
    c.bias = q.bias;
    c.batch = (int)q.batch;
    c.groups = s.groups;
    c.runs = (transposed ? s.outs : s.channels) / WIDE<T>;
    c.columns = (int)(transposed ? q.channels : q.outs);
    c.wide = is_packed<T>(q.result, q.channels_last, c.columns);
    c.down = axis_down(q, transposed);
    c.across = axis_across(q, transposed);
    c.phases_down = transposed ? s.phases_down : 1;
    c.phases_across = transposed ? s.phases_across : 1;
    /* The first phase has the most rows. */
    int64_t rows = q.batch * vjp_divide_up(c.down.result, transposed ? c.down.stride : 1) *
                   vjp_divide_up(c.across.result, transposed ? c.across.stride : 1);
    c.row_tiles = (int)vjp_divide_up(rows, ROWS);
    with_columns<T>(c.columns, [&](auto columns) {
        c.column_tiles = (int)vjp_divide_up(c.columns, columns);
        int64_t grid = (int64_t)c.row_tiles * c.column_tiles * c.phases_down * c.phases_across * c.groups;
        enqueue(w, window_tiles<T, columns>, grid, TILE_BYTES<columns>, c);
    });
}

/*
 * Parts of the pixels: enough blocks for the largest cards, chains of MAX_CHAIN_PIXELS where the workspace allows
 * (16 Mi sums, 64 MiB), and at least MIN_PART pixels. Depends on the sizes alone, since the split decides the bits.
 */
constexpr int64_t MAX_PARTIAL = 16 << 20, MIN_PART = 256;

template <class T>
void run_dweight(steps &w, const conv_call &q, const tile_sizes &s, const uint4 *x, const uint4 *dy) {
    weight_call c{};
    c.x = x;
    c.dy = dy;
    c.groups = s.groups;
    c.x_runs = s.channels / WIDE<T>;
    c.y_runs = s.outs / WIDE<T>;
    c.rows = s.taps * s.channels;
    c.columns = s.outs;
    c.pixels = (int)(q.batch * q.y.height * q.y.width);
    c.down = axis_down(q, false);
    c.across = axis_across(q, false);
    c.row_tiles = (int)vjp_divide_up(c.rows, ROWS);
    with_columns<T>(c.columns, [&](auto columns) {
        c.column_tiles = (int)vjp_divide_up(c.columns, columns);
        int64_t tiles = (int64_t)c.row_tiles * c.column_tiles * c.groups;
        int64_t sums = (int64_t)c.groups * c.rows * c.columns;
        int64_t parts = vjp_max(vjp_divide_up(c.pixels, MAX_CHAIN_PIXELS), vjp_divide_up(CHUNKS, tiles));
        parts = vjp_min(parts, vjp_max(1, MAX_PARTIAL / sums));
        c.part = (int)vjp_max(MIN_PART, vjp_round_up(vjp_divide_up(c.pixels, parts), DEPTH<T>));
        c.parts = (int)vjp_divide_up(c.pixels, c.part);
        c.partial = w.layout.take<float>(c.parts * sums);
        enqueue(w, weight_tiles<T, columns>, tiles * c.parts, TILE_BYTES<columns>, c);
    });
    weight_sum_call sum{};
    sum.partial = c.partial;
    sum.parts = c.parts;
    sum.groups = c.groups;
    sum.channels = (int)q.channels;
    sum.outs = (int)q.outs;
    sum.taps = s.taps;
    sum.padded_channels = s.channels;
    sum.padded_outs = s.outs;
    sum.window = q.window;
    sum.dweight = q.dweight;
    enqueue(w, sum_weight_parts<T>, blocks_of(q.y.channels * q.window.image), 0, sum);
}

template <class T> void run_dbias(steps &w, const conv_call &q) {
    bias_split s = bias_split_of(q);
    s.partial = w.layout.take<double>(s.chunks * q.y.channels);
    enqueue(w, dbias_chunks<T>, vjp_min(s.chunks * s.tiles, MAX_BLOCKS), 0, q, s);
    enqueue(w, dbias_sum<T>, blocks_of(q.y.channels), 0, q, s);
}

template <class T> void forward_steps(steps &w) {
    conv_call q = call_of(w.work);
    tile_sizes s = tile_sizes_of(q, WIDE<T>);
    if (!w.work->tensor[CONV2D_Y]) return;
    if (s.y)
        run_windows<T>(w, q, s, false, packed_picture<T>(w, q, s, q.x_data, q.x, q.channels, s.channels));
    else
        enqueue(w, forward_general<T>, blocks_of(q.batch * q.y.image), 0, q);
}

template <class T> void backward_steps(steps &w) {
    conv_call q = call_of(w.work);
    tile_sizes s = tile_sizes_of(q, WIDE<T>);
    bool dx = w.work->tensor[CONV2D_B_DX], dweight = w.work->tensor[CONV2D_B_DWEIGHT];
    if (w.work->tensor[CONV2D_B_DBIAS]) run_dbias<T>(w, q);
    const uint4 *dy = nullptr;
    if ((dx && s.dx) || (dweight && s.dweight)) dy = packed_picture<T>(w, q, s, q.y_data, q.y, q.outs, s.outs);
    if (dx && s.dx)
        run_windows<T>(w, q, s, true, dy);
    else if (dx)
        enqueue(w, dx_general<T>, blocks_of(q.batch * q.x.image), 0, q);
    if (dweight && s.dweight)
        run_dweight<T>(w, q, s, packed_picture<T>(w, q, s, q.x_data, q.x, q.channels, s.channels), dy);
    else if (dweight)
        enqueue(w, dweight_general<T>, vjp_min(q.y.channels * q.window.image, MAX_BLOCKS), 0, q);
}

template <class T> void pass_steps(steps &w) {
    if (w.work->pass == VJP_FORWARD)
        forward_steps<T>(w);
    else
        backward_steps<T>(w);
}

vjp_status run(const vjp_work *work) {
    steps w{work, true, VJP_OK, workspace_layout(work->workspace)};
    with_type(work->storage, [&](auto zero) { pass_steps<decltype(zero)>(w); });
    return w.status;
}

size_t workspace(const vjp_work *work) {
    steps w{work, false, VJP_OK, workspace_layout(nullptr)};
    with_type(work->storage, [&](auto zero) { pass_steps<decltype(zero)>(w); });
    return w.layout.max;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_conv2d[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_conv2d[VJP_PASS_COUNT] = {
    {vjp::run, vjp::workspace, VJP_STORAGE_16_32},
    {vjp::run, vjp::workspace, VJP_STORAGE_16_32},
};
}
