/* SPDX-License-Identifier: MIT */
/*
 * conv2d and its gradients.
 *
 *     result      path      when
 *     y, dx,      hopper    on a Hopper card: hopper_results_of(); 16 bits, and tf32
 *     dweight
 *     y           tiles     at least 64 weights per tap of a group; at most 65536 terms; 32-bit indices suffice
 *     dx          tiles     the same, and at most 16 phases (stride_h x stride_w)
 *     dweight     tiles     the same, with any number of terms
 *     y, dx       general   otherwise, such as depthwise: a thread per element
 *     dweight     general   otherwise: a block per element
 *     dbias       hopper    beside dweight on that path (conv2d_hopper_bias.cuh)
 *     dbias       chunks    otherwise: sums over chunks of pixels (conv2d_bias.cuh)
 *
 *     tiles in    product                                           results of a block
 *     bf16, f16   tensor cores (mma.sync), f32 sums                 128 x 128, or 128 x 64 for up to 64 columns
 *     tf32        the same: f32 on a device with matrix_products = "tf32"
 *     f32         FMA, 8 x 8 or 8 x 4 results per thread            128 x 128, 256 x 64 or 128 x 64: with_shape()
 *
 * Tiles read 16-byte runs of channels. A tensor that is stored channels first, or whose groups are not whole aligned
 * runs, is packed in the workspace first, so that both layouts have the same kernels. conv2d_tiles.cuh and
 * conv2d_hopper.cuh describe the products, conv2d_general.cuh the general path.
 */
#include "cuda/conv/conv2d_bias.cuh"
#include "cuda/conv/conv2d_hopper.cuh"
#include "cuda/conv/conv2d_steps.cuh"

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

/* ---- Hopper ------------------------------------------------------------------------------------------ */

/* The copy engine reads stages of 128 bytes of channels: most of one must count, and most of a tile's columns. */
constexpr int64_t MIN_COLUMNS = 32;

/* Some drivers are said to describe walks over smaller pictures wrongly. */
constexpr double MIN_WALK_BYTES = 131072;

bool fills_stages(int64_t channels, int64_t run) {
    return 2 * channels >= vjp_round_up(channels, 8 * run);
}

hopper::walk_axis walk_of(const tile_axis &a, const axis_windows &w) {
    if (w.taps == 0) return {a.source, 0, w.count, 1, 0, 0};
    bool back = w.move < 0; /* the copy engine moves forward */
    return {a.source, back ? w.base + (w.taps - 1) * w.move : w.base, w.count, w.step, w.taps, back ? -w.move : w.move};
}

hopper::tap_axis taps_of(const axis_windows &w) {
    if (w.move >= 0) return {w.first_tap, w.next_tap};
    return {w.first_tap + (w.taps - 1) * w.next_tap, -w.next_tap};
}

/* All phases along an axis. */
bool can_walk(const tile_axis &a, bool transposed, int phases) {
    for (int i = 0; i < phases; i++)
        if (!hopper::can_walk(walk_of(a, windows_of(a, transposed, i)))) return false;
    return true;
}

/* Which results are computed by Hopper's kernels, of those that tiles can compute. */
struct hopper_results {
    bool y, dx, dweight;
    bool along;                /* pictures stay channels first */
    hopper::pixel_order order; /* of dweight */
};

/* Stages of dweight that begin with each image may have this share of their pixels outside: a transpose takes longer.
 */
constexpr double MAX_OUTSIDE = 0.125;

hopper_results hopper_results_of(const vjp_work *work, const conv_call &q, const tile_sizes &s, int64_t run) {
    hopper_results h{};
    const device_state *state = state_of(work->device);
    bool f32 = work->storage == VJP_F32;
    if (!VJP_CUDA_HOPPER || state->capability != 90 || s.groups != 1 || (f32 && !state->tf32)) return h;
    double x_bytes = (double)q.batch * (double)(q.x.height * q.x.width) * s.channels * (16 / (double)run);
    double y_bytes = (double)q.batch * (double)(q.y.height * q.y.width) * s.outs * (16 / (double)run);
    bool walks = can_walk(axis_down(q, false), false, 1) && can_walk(axis_across(q, false), false, 1);
    h.y = s.y && walks && fills_stages(s.channels, run) && q.outs >= MIN_COLUMNS && x_bytes >= MIN_WALK_BYTES;
    h.dx = s.dx && fills_stages(s.outs, run) && q.channels >= MIN_COLUMNS && y_bytes >= MIN_WALK_BYTES &&
           can_walk(axis_down(q, true), true, s.phases_down) && can_walk(axis_across(q, true), true, s.phases_across);
    h.dweight =
        s.dweight && walks && fills_stages(s.channels, run) && q.outs >= MIN_COLUMNS && x_bytes >= MIN_WALK_BYTES;
    bool pointwise = s.taps == 1 && q.stride_h == 1 && q.stride_w == 1 && q.padding_h == 0 && q.padding_w == 0;
    h.along = h.y && h.dx && h.dweight && pointwise && !q.channels_last && q.x.height * q.x.width % run == 0 &&
              q.channels % run == 0 && q.outs % run == 0;
    int64_t plane = q.y.height * q.y.width, stages = vjp_round_up(plane, 8 * run);
    bool planes = f32 && !q.channels_last && plane % run == 0 && q.outs % run == 0 &&
                  (double)(stages - plane) <= MAX_OUTSIDE * (double)stages;
    h.order = h.along ? hopper::PLANES : planes ? hopper::DY_PLANES : hopper::WALK;
    return h;
}

/* A picture as Hopper's kernels read it; `along`: as it is, but aligned. */
template <class T>
const void *hopper_picture(steps &w, const conv_call &q, const tile_sizes &s, bool along, const void *data,
                           const picture &p, int64_t channels, int padded) {
    if (!along) return packed_picture<T>(w, q, s, data, p, channels, padded);
    if (data && is_aligned(data, 16)) return data;
    T *copy = w.layout.take<T>(q.batch * p.image);
    if (w.enqueues && w.status == VJP_OK)
        w.status = result_of(w.work, cudaMemcpyAsync(copy, data, (size_t)(q.batch * p.image) * sizeof(T),
                                                     cudaMemcpyDeviceToDevice, stream_of(w.work)));
    return copy;
}

/* y, or dx with `transposed`, a launch for each phase. */
template <class T>
void run_hopper_windows(steps &w, const conv_call &q, const tile_sizes &s, bool transposed, bool along,
                        const void *source) {
    hopper::windows c{};
    c.source = source;
    c.weight = packed_weight<T>(w, q, s, transposed);
    c.result = q.result;
    c.along = along;
    c.channels_last = q.channels_last;
    c.add = q.add;
    c.bias = q.bias;
    c.batch = q.batch;
    c.channels = transposed ? s.outs : s.channels;
    c.columns = transposed ? q.channels : q.outs;
    c.kernel_h = q.window.height;
    c.kernel_w = q.window.width;
    tile_axis down = axis_down(q, transposed), across = axis_across(q, transposed);
    int phases_down = transposed ? s.phases_down : 1, phases_across = transposed ? s.phases_across : 1;
    for (int phase = 0; phase < phases_down * phases_across && w.enqueues && w.status == VJP_OK; phase++) {
        axis_windows rows = windows_of(down, transposed, phase / phases_across);
        axis_windows columns = windows_of(across, transposed, phase % phases_across);
        c.down = walk_of(down, rows);
        c.across = walk_of(across, columns);
        c.tap_down = taps_of(rows);
        c.tap_across = taps_of(columns);
        c.result_down = {down.result, rows.first, rows.apart};
        c.result_across = {across.result, columns.first, columns.apart};
        w.status = hopper::multiply_windows(w.work, c);
    }
}

/* ---- The results ------------------------------------------------------------------------------------- */

/* Calls f with a value of the type of the product: T, or tf32. */
template <class T, class F> void with_product(const vjp_work *work, F f) {
    if constexpr (std::is_same_v<T, float>)
        if (state_of(work->device)->tf32) return f(tf32{});
    f(T{});
}

template <int R, int C> struct tile_shape { static constexpr int ROWS = R, COLUMNS = C; };

/* How long it takes to compute the tiles by FMA: rounds over the multiprocessors of the largest Hopper cards. */
int64_t rounds_of(int64_t rows, int64_t columns, int64_t times, int64_t tile_rows, int64_t tile_columns) {
    int64_t tiles = vjp_divide_up(rows, tile_rows) * vjp_divide_up(columns, tile_columns) * times;
    return vjp_divide_up(tiles, CHUNKS / 2) * tile_rows * tile_columns;
}

/*
 * Calls f with the tile_shape for `times` products of so many rows and columns. Tensor cores need large tiles. FMAs are
 * faster with 8 x 8 results per thread (128 x 128, 256 x 64) than with 8 x 4, but larger tiles may leave more
 * multiprocessors idle in the last round, and the highest need more shared memory than all cards have. The bits of y
 * and dx do not depend on the shape.
 */
template <class T, bool HIGH, class F>
void with_shape(int64_t rows, int64_t columns, int64_t times, size_t memory, F f) {
    if constexpr (BY_FMA<T>) {
        int64_t low = rounds_of(rows, columns, times, 128, 64), wide = rounds_of(rows, columns, times, 128, 128);
        int64_t high = rounds_of(rows, columns, times, 256, 64);
        if (wide <= low && wide <= high) return f(tile_shape<128, 128>{});
        if constexpr (HIGH)
            if (high <= low && memory >= window_bytes<T, 256, 64>) return f(tile_shape<256, 64>{});
    } else if (columns > 64) {
        return f(tile_shape<128, 128>{});
    }
    f(tile_shape<128, 64>{});
}

/* Shared memory that a block can have; 0 if the driver does not say. */
size_t block_memory(const vjp_work *work) {
    int bytes = 0;
    if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, state_of(work->device)->ordinal))
        return 0;
    return (size_t)bytes;
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
    int64_t times = (int64_t)c.phases_down * c.phases_across * c.groups;
    with_product<T>(w.work, [&](auto product) {
        using P = decltype(product);
        with_shape<P, true>(rows, c.columns, times, block_memory(w.work), [&](auto shape) {
            c.row_tiles = (int)vjp_divide_up(rows, shape.ROWS);
            c.column_tiles = (int)vjp_divide_up(c.columns, shape.COLUMNS);
            enqueue(w, window_tiles<P, shape.ROWS, shape.COLUMNS>, times * c.row_tiles * c.column_tiles,
                    TILE_BYTES<P, shape.ROWS, shape.COLUMNS>, c);
        });
    });
}

/*
 * The pixels that dweight sums in registers. Then the sums are added to the part in the workspace. In 16 bits four
 * times as many are accurate enough.
 */
constexpr int64_t MAX_CHAIN_PIXELS = 4096;

int64_t chain_pixels(const vjp_work *work) {
    if (work->storage == VJP_F32) return MAX_CHAIN_PIXELS;
    bool exact = vjp_type(work, CONV2D_B_DWEIGHT) == VJP_F32;
    return exact ? max_tensor_terms(work->device, work->storage, true) : 4 * MAX_CHAIN_PIXELS;
}

/*
 * Parts of the pixels: of one chain each where the workspace allows (16 Mi sums, 64 MiB), at least MIN_PART pixels, and
 * enough blocks for the largest cards: the fewest parts that leave at most 5 % of CHUNKS blocks idle in the last round,
 * or those that leave the fewest idle. The number of multiprocessors does not matter, since the split decides the bits.
 */
constexpr int64_t MAX_PARTIAL = 16 << 20, MIN_PART = 256;

int64_t parts_of(int64_t tiles, int64_t pixels, int64_t chain, int64_t most) {
    int64_t least = vjp_min(vjp_divide_up(pixels, chain), most), parts = least;
    most = vjp_min(vjp_min(most, vjp_divide_up(pixels, MIN_PART)), least + CHUNKS);
    double best = 0;
    for (int64_t p = least; p <= most && best < 0.95; p++) {
        double busy = (double)(p * tiles) / (double)vjp_round_up(p * tiles, CHUNKS);
        if (busy <= best) continue;
        best = busy;
        parts = p;
    }
    return parts;
}

template <class T>
void add_weight_parts(steps &w, const conv_call &q, const tile_sizes &s, const float *partial, int parts) {
    weight_sum_call sum{};
    sum.partial = partial;
    sum.parts = parts;
    sum.groups = s.groups;
    sum.channels = (int)q.channels;
    sum.outs = (int)q.outs;
    sum.taps = s.taps;
    sum.padded_channels = s.channels;
    sum.padded_outs = s.outs;
    sum.window = q.window;
    sum.dweight = q.dweight;
    enqueue(w, sum_weight_parts<T>, blocks_of(q.y.channels * q.window.image), 0, sum);
}

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
    c.by_height = divisor_of(c.down.result);
    c.by_width = divisor_of(c.across.result);
    with_product<T>(w.work, [&](auto product) {
        using P = decltype(product);
        with_shape<P, false>(1, c.columns, CHUNKS, 0, [&](auto shape) {
            c.row_tiles = (int)vjp_divide_up(c.rows, shape.ROWS);
            c.column_tiles = (int)vjp_divide_up(c.columns, shape.COLUMNS);
            int64_t tiles = (int64_t)c.row_tiles * c.column_tiles * c.groups;
            int64_t sums = (int64_t)c.groups * c.rows * c.columns;
            int64_t chain = chain_pixels(w.work);
            int64_t parts = parts_of(tiles, c.pixels, chain, vjp_max(1, MAX_PARTIAL / sums));
            c.chain = (int)chain / DEPTH<P>;
            c.part = (int)vjp_max(MIN_PART, vjp_round_up(vjp_divide_up(c.pixels, parts), DEPTH<P>));
            c.parts = (int)vjp_divide_up(c.pixels, c.part);
            c.partial = w.layout.take<float>(c.parts * sums);
            enqueue(w, weight_tiles<P, shape.ROWS, shape.COLUMNS>, tiles * c.parts,
                    TILE_BYTES<P, shape.ROWS, shape.COLUMNS>, c);
        });
    });
    add_weight_parts<T>(w, q, s, c.partial, c.parts);
}

/*
 * The same on Hopper. dy: with DY_PLANES as it is, else as hopper_picture() has it. In f32 its pixels must be side by
 * side. `bias`: dbias as well.
 */
template <class T>
void run_hopper_dweight(steps &w, const conv_call &q, const tile_sizes &s, hopper::pixel_order order, const void *x,
                        const void *dy, bool bias) {
    hopper::weight_sums c{};
    bias_split b{};
    tile_axis down = axis_down(q, false), across = axis_across(q, false);
    c.x = x;
    c.dy = dy;
    c.type = w.work->storage;
    c.chain_pixels = (int)chain_pixels(w.work);
    c.order = order;
    if (sizeof(T) == 4 && order == hopper::WALK) {
        transpose_call t{};
        int64_t pixels = q.batch * q.y.height * q.y.width;
        c.dy_step = vjp_round_up(pixels, WIDE<T>);
        t.from = static_cast<const uint4 *>(dy);
        t.to = w.layout.take<uint4>(s.outs * c.dy_step / WIDE<T>);
        t.pixels = (unsigned)pixels;
        t.runs = (unsigned)(s.outs / WIDE<T>);
        t.channel_tiles = vjp_divide_up(t.runs, TRANSPOSE_RUNS);
        c.dy = t.to;
        enqueue(w, transpose_pixels, vjp_divide_up(pixels, TRANSPOSE_PIXELS) * t.channel_tiles, 0, t);
    }
    c.batch = q.batch;
    c.channels = s.channels;
    c.columns = s.outs;
    c.down = walk_of(down, windows_of(down, false, 0));
    c.across = walk_of(across, windows_of(across, false, 0));
    c.parts = hopper::weight_parts(c);
    c.partial = w.layout.take<float>(c.parts * s.taps * s.channels * s.outs);
    if (bias) {
        b.chunks = hopper::bias_chunks(c);
        b.partial = c.bias = w.layout.take<double>(b.chunks * s.outs);
    }
    if (w.enqueues && w.status == VJP_OK) w.status = hopper::multiply_weight_sums(w.work, c);
    add_weight_parts<T>(w, q, s, c.partial, (int)c.parts);
    if (bias) enqueue(w, dbias_sum<T>, blocks_of(q.y.channels * 32), 0, q, b);
}

template <class T> void run_dbias(steps &w, const conv_call &q) {
    bias_split s = bias_split_of<T>(q);
    s.partial = w.layout.take<double>(s.chunks * q.y.channels);
    int64_t grid = vjp_min(s.chunks * s.tiles, MAX_BLOCKS);
    with_bool(s.aligned, [&](auto aligned) {
        enqueue(w, s.channels_last ? dbias_pixels<T, aligned> : dbias_planes<T, aligned>, grid, 0, q, s);
    });
    enqueue(w, dbias_sum<T>, blocks_of(q.y.channels * 32), 0, q, s);
}

template <class T> void forward_steps(steps &w) {
    conv_call q = call_of(w.work);
    tile_sizes s = tile_sizes_of(q, WIDE<T>);
    hopper_results h = hopper_results_of(w.work, q, s, WIDE<T>);
    if (!w.work->tensor[CONV2D_Y]) return;
    if (h.y)
        run_hopper_windows<T>(w, q, s, false, h.along,
                              hopper_picture<T>(w, q, s, h.along, q.x_data, q.x, q.channels, s.channels));
    else if (s.y)
        run_windows<T>(w, q, s, false, packed_picture<T>(w, q, s, q.x_data, q.x, q.channels, s.channels));
    else
        enqueue(w, forward_general<T>, blocks_of(q.batch * q.y.image), 0, q);
}

template <class T> void backward_steps(steps &w) {
    conv_call q = call_of(w.work);
    tile_sizes s = tile_sizes_of(q, WIDE<T>);
    hopper_results h = hopper_results_of(w.work, q, s, WIDE<T>);
    bool dx = w.work->tensor[CONV2D_B_DX], dweight = w.work->tensor[CONV2D_B_DWEIGHT];
    bool dbias = w.work->tensor[CONV2D_B_DBIAS], beside = dbias && dweight && h.dweight;
    if (dbias && !beside) run_dbias<T>(w, q);
    bool planes = h.dweight && h.order == hopper::DY_PLANES;
    const void *dy = nullptr;
    if ((dx && s.dx) || (dweight && s.dweight && !planes))
        dy = hopper_picture<T>(w, q, s, h.along, q.y_data, q.y, q.outs, s.outs);
    if (dx && h.dx)
        run_hopper_windows<T>(w, q, s, true, h.along, dy);
    else if (dx && s.dx)
        run_windows<T>(w, q, s, true, static_cast<const uint4 *>(dy));
    else if (dx)
        enqueue(w, dx_general<T>, blocks_of(q.batch * q.x.image), 0, q);
    if (!dweight) return;
    const void *x = nullptr;
    if (s.dweight) x = hopper_picture<T>(w, q, s, h.along, q.x_data, q.x, q.channels, s.channels);
    if (planes) dy = hopper_picture<T>(w, q, s, true, q.y_data, q.y, q.outs, s.outs);
    if (h.dweight)
        run_hopper_dweight<T>(w, q, s, h.order, x, dy, beside);
    else if (s.dweight)
        run_dweight<T>(w, q, s, static_cast<const uint4 *>(x), static_cast<const uint4 *>(dy));
    else
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
