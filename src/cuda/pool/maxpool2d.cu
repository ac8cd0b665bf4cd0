/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d on CUDA: y is the maximum of each window, argmax its place in the plane (the first wins ties, a NaN wins
 * over all, padding never does), and dx gets dy where the maxima were.
 *
 * The backward gathers: every element of dx is summed by one thread, which loops over the windows that contain it in
 * row-major order and adds dy of those whose argmax it is. So no atomics, and the same bits every time.
 *
 *     path          when                                    what
 *     wide tiles    windows 2/2/0 and 3/2/1 (size, stride,  tiles of 16 bytes of columns in the registers of a
 *                   padding), channels first, rows aligned  thread (maxpool2d_tiles.cuh)
 *     narrow tiles  those, 3/2/0 and 3/1/1, channels first  the same with 2 columns, single loads
 *     generic       all other windows, channels last        a thread per element, or per 16 bytes of channels,
 *                                                           loops over a window, or the windows of an element
 *
 * On the generic path a backward without argmax first finds it again, into the workspace: searching each window once
 * costs K x K reads per window; searching it for each element would cost as many per element and window.
 */
#include "cuda/pool/maxpool2d_tiles.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256;

/* ---- Generic ----------------------------------------------------------------------------------------- */

/* The elements first, first + dilation, ... of an axis that a window contains: `count`, at least one. */
struct taps {
    int64_t first, count;
};

__device__ inline taps taps_of(const axis &a, int64_t window) {
    int64_t origin = window * a.stride - a.padding;
    int64_t begin = origin < 0 ? divide_up(-origin, a.dilation) : 0;
    int64_t end = divide_up(a.size - origin, a.dilation);
    return {origin + begin * a.dilation, (end < a.kernel ? end : a.kernel) - begin};
}

/* Windows [begin, end) that contain an element. */
struct span {
    int64_t begin, end;
};

__device__ inline span windows_over(const axis &a, int64_t element) {
    int64_t last = element + a.padding, reach = last - (a.kernel - 1) * a.dilation;
    int64_t end = last / a.stride + 1;
    return {reach > 0 ? divide_up(reach, a.stride) : 0, end < a.windows ? end : a.windows};
}

/* Vector t of a tensor whose planes have rows of `width`: V adjacent elements along the inner axis. */
struct vector_place {
    int64_t plane, row, column, inner;
};

template <int V> __device__ vector_place place_of(const pool_call &c, int64_t t, int64_t height, int64_t width) {
    vector_place p;
    int64_t vectors = c.inner / V, element = t / vectors, row = element / width;
    p.inner = (t - element * vectors) * V;
    p.column = element - row * width;
    p.plane = row / height;
    p.row = row - p.plane * height;
    return p;
}

template <class INDEX, class PLACE, int V>
__device__ void store_argmax(void *argmax, int64_t to, const best<PLACE> (&b)[V]) {
    store_packed(static_cast<INDEX *>(argmax) + to, make_packed<INDEX, V>([&](int v) { return (INDEX)b[v].place; }));
}

/* A thread takes V channels of a window. */
template <class T, class PLACE, int V>
__global__ void __launch_bounds__(THREADS) forward_generic(const __grid_constant__ pool_call c, int64_t vectors) {
    const T *x = static_cast<const T *>(c.x);
    T *y = static_cast<T *>(c.y);
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < vectors; t += (int64_t)gridDim.x * THREADS) {
        vector_place p = place_of<V>(c, t, c.down.windows, c.across.windows);
        taps rows = taps_of(c.down, p.row), columns = taps_of(c.across, p.column);
        const T *plane = x + p.plane * c.down.size * c.across.size * c.inner + p.inner;
        best<PLACE> b[V];
        for (int64_t i = 0; i < rows.count; i++)
            for (int64_t j = 0; j < columns.count; j++) {
                int64_t place =
                    (rows.first + i * c.down.dilation) * c.across.size + columns.first + j * c.across.dilation;
                packed<T, V> values = load_packed<T, V>(plane + place * c.inner);
#pragma unroll
                for (int v = 0; v < V; v++) {
                    if (i == 0 && j == 0)
                        b[v] = {to_f32(values[v]), (PLACE)place};
                    else
                        b[v].take(to_f32(values[v]), (PLACE)place);
                }
            }
        int64_t to = t * V;
        if (y) {
            store_packed(y + to, make_packed<T, V>([&](int v) {
                             return from_f32<T>(c.add ? to_f32(y[to + v]) + b[v].value : b[v].value);
                         }));
        }
        if (c.argmax && c.argmax_type == VJP_I32)
            store_argmax<int32_t>(c.argmax, to, b);
        else if (c.argmax)
            store_argmax<int64_t>(c.argmax, to, b);
    }
}

/*
 * A thread takes V channels of an element of dx. Sums are f32 over the windows of a row (CHAIN at most) and double over
 * these. A bad argmax is reported by the threads of all elements that its window contains, each the first it sees.
 */
template <class T, class INDEX, int V>
__global__ void __launch_bounds__(THREADS) backward_generic(const __grid_constant__ pool_call c, int64_t vectors) {
    const T *dy = static_cast<const T *>(c.dy);
    const INDEX *saved = static_cast<const INDEX *>(c.saved);
    T *dx = static_cast<T *>(c.dx);
    int64_t plane = c.down.size * c.across.size, windows = c.down.windows * c.across.windows;
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < vectors; t += (int64_t)gridDim.x * THREADS) {
        vector_place p = place_of<V>(c, t, c.down.size, c.across.size);
        span rows = windows_over(c.down, p.row), columns = windows_over(c.across, p.column);
        int64_t place = p.row * c.across.size + p.column, bad = -1;
        double sum[V] = {};
        for (int64_t oh = rows.begin; oh < rows.end; oh++) {
            int64_t from = (p.plane * windows + oh * c.across.windows) * c.inner + p.inner;
            for (int64_t chain = columns.begin; chain < columns.end; chain += CHAIN) {
                int64_t end = chain + CHAIN < columns.end ? chain + CHAIN : columns.end;
                float part[V] = {};
                for (int64_t ow = chain; ow < end; ow++) {
                    int64_t k = from + ow * c.inner;
                    packed<INDEX, V> places = load_packed<INDEX, V>(saved + k);
                    bool any = false;
#pragma unroll
                    for (int v = V - 1; v >= 0; v--) {
                        any |= (int64_t)places[v] == place;
                        if ((uint64_t)(int64_t)places[v] >= (uint64_t)plane && (bad < 0 || k + v <= bad)) bad = k + v;
                    }
                    if (!any) continue;
                    packed<T, V> values = load_packed<T, V>(dy + k);
#pragma unroll
                    for (int v = 0; v < V; v++)
                        if ((int64_t)places[v] == place) part[v] += to_f32(values[v]);
                }
#pragma unroll
                for (int v = 0; v < V; v++)
                    sum[v] += part[v];
            }
        }
        T *to = dx + t * V;
        store_packed(to, make_packed<T, V>([&](int v) {
                         return from_f32<T>(c.add ? to_f32(to[v]) + (float)sum[v] : (float)sum[v]);
                     }));
        if (bad >= 0) report(c.found, bad, (double)saved[bad], plane);
    }
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* Whether 32 bits hold the places of a plane. */
bool is_short(const pool_call &c) {
    return c.down.size * c.across.size <= INT32_MAX;
}

int64_t windows_of(const pool_call &c) {
    return c.planes * c.down.windows * c.across.windows * c.inner;
}

int64_t elements_of(const pool_call &c) {
    return c.planes * c.down.size * c.across.size * c.inner;
}

template <int K_, int S_, int P_> struct window_constants { static constexpr int K = K_, S = S_, P = P_; };

/* Calls f with a window that has a tile kernel; false if this one has none, or what f returns. */
template <class F> bool with_window(const pool_call &c, F f) {
    const axis &a = c.down, &b = c.across;
    if (c.inner != 1 || a.kernel != b.kernel || a.stride != b.stride || a.padding != b.padding || a.dilation != 1 ||
        b.dilation != 1)
        return false;
    auto is = [&](int64_t kernel, int64_t stride, int64_t padding) {
        return a.kernel == kernel && a.stride == stride && a.padding == padding;
    };
    if (is(2, 2, 0)) return f(window_constants<2, 2, 0>{});
    if (is(3, 2, 1)) return f(window_constants<3, 2, 1>{});
    if (is(3, 2, 0)) return f(window_constants<3, 2, 0>{});
    if (is(3, 1, 1)) return f(window_constants<3, 1, 1>{});
    return false;
}

/*
 * The windows that also have wide tiles: those that many networks begin with and halve their planes with. With 3/2/0
 * rows have an odd number of windows, or of elements, and would seldom be aligned; 3/1/1 takes so many comparisons (18
 * per element) that wide tiles would not reach copy speed.
 */
template <class W> constexpr bool HAS_WIDE = W::K == 2 || (W::S == 2 && W::P == 1);

/* Whether every row of every tensor is aligned for tiles of 16 bytes, and every window begins in a tile of x. */
bool wide_fits(const pool_call &c, int64_t columns) {
    for (const void *data : {c.x, c.dy, c.saved, (const void *)c.y, (const void *)c.argmax, (const void *)c.dx})
        if (!is_aligned(data, 16)) return false;
    return c.across.size % columns == 0 && c.across.windows * c.across.stride == c.across.size;
}

constexpr int64_t MAX_TILES = 1 << 30; /* 32 bits number them */

/*
 * Splits planes into tiles of `columns`, enough for all elements and all windows: the last window may begin in the last
 * column, and then belongs to a tile behind it.
 */
bool split_tiles(const pool_call &c, int64_t columns, tile_call &tiles) {
    int64_t across =
        vjp_max(vjp_divide_up(c.across.size, columns), vjp_divide_up(c.across.windows * c.across.stride, columns));
    int64_t rows = STEPS * c.down.stride;
    int64_t down = vjp_max(vjp_divide_up(c.down.size, rows), vjp_divide_up(c.down.windows * c.down.stride, rows));
    int64_t count = c.planes * down * across; /* no overflow: fewer than elements and windows */
    if (!is_short(c) || count > MAX_TILES) return false;
    tiles.pool = c;
    tiles.height = (int)c.down.size;
    tiles.width = (int)c.across.size;
    tiles.out_height = (int)c.down.windows;
    tiles.out_width = (int)c.across.windows;
    tiles.plane = (unsigned)(c.down.size * c.across.size);
    tiles.tiles = (int)count;
    tiles.across = divider_of(across);
    tiles.down = divider_of(down);
    return true;
}

/* Calls f(window, columns, tiles) with the widest tiles that fit; false if the call takes the generic path. */
template <class T, class F> bool with_tiles(const pool_call &c, F f) {
    return with_window(c, [&](auto window) {
        tile_call tiles{};
        if (!split_tiles(c, NARROW, tiles)) return false;
        if constexpr (HAS_WIDE<decltype(window)>)
            if (wide_fits(c, WIDE<T>)) {
                split_tiles(c, WIDE<T>, tiles);
                f(window, std::integral_constant<int, WIDE<T>>{}, tiles);
                return true;
            }
        f(window, std::integral_constant<int, NARROW>{}, tiles);
        return true;
    });
}

pool_call call_of(const vjp_work *work) {
    vjp_maxpool2d_sizes s = vjp_maxpool2d_sizes_of(work);
    bool back = work->pass == VJP_BACKWARD;
    int output = back ? (int)MAXPOOL2D_B_DX : (int)MAXPOOL2D_Y,
        argmax = back ? (int)MAXPOOL2D_B_ARGMAX : (int)MAXPOOL2D_ARGMAX;
    pool_call c{};
    c.x = vjp_data(work, back ? (int)MAXPOOL2D_B_X : (int)MAXPOOL2D_X);
    (back ? c.dx : c.y) = vjp_data(work, output);
    if (back) {
        c.dy = vjp_data(work, MAXPOOL2D_B_DY);
        c.saved = vjp_data(work, argmax);
        if (c.saved) c.x = nullptr;
    } else {
        c.argmax = vjp_data(work, argmax);
    }
    c.argmax_type = vjp_type(work, argmax);
    c.add = vjp_accumulates(work, output);
    c.planes = s.channels_last ? s.batch : s.batch * s.channels;
    c.inner = s.channels_last ? s.channels : 1;
    c.down = {s.height, s.out_height, s.kernel_h, s.stride_h, s.padding_h, s.dilation_h};
    c.across = {s.width, s.out_width, s.kernel_w, s.stride_w, s.padding_w, s.dilation_w};
    return c;
}

int64_t blocks_of(int64_t threads) {
    return vjp_min(vjp_divide_up(threads, THREADS), MAX_BLOCKS);
}

template <class T> vjp_status run_forward_generic(const vjp_work *work, const pool_call &c) {
    constexpr int V = WIDE<T>;
    int64_t windows = windows_of(c);
    if (!is_short(c))
        return launch(work, false, forward_generic<T, int64_t, 1>, blocks_of(windows), THREADS, 0, c, windows);
    if (c.inner % V == 0 && is_aligned(c.x, 16) && is_aligned(c.y, 16) && is_aligned(c.argmax, 16))
        return launch(work, false, forward_generic<T, int32_t, V>, blocks_of(windows / V), THREADS, 0, c, windows / V);
    return launch(work, false, forward_generic<T, int32_t, 1>, blocks_of(windows), THREADS, 0, c, windows);
}

template <class T> vjp_status run_forward(const vjp_work *work, const pool_call &c) {
    vjp_status status = VJP_OK;
    bool by_tiles = with_tiles<T>(c, [&](auto window, auto columns, const tile_call &tiles) {
        using W = decltype(window);
        status = launch(work, false, forward_tiles<T, columns, W::K, W::S, W::P>,
                        vjp_divide_up(tiles.tiles, TILE_THREADS), TILE_THREADS, 0, tiles);
    });
    return by_tiles ? status : run_forward_generic<T>(work, c);
}

vjp_status forward(const vjp_work *work) {
    pool_call c = call_of(work);
    if ((!c.y && !c.argmax) || c.planes * c.inner == 0) return VJP_OK;
    return with_type(work->storage, [&](auto zero) { return run_forward<decltype(zero)>(work, c); });
}

template <class T, class INDEX> vjp_status launch_backward_generic(const vjp_work *work, const pool_call &c) {
    constexpr int V = WIDE<T>;
    int64_t elements = elements_of(c);
    if (c.inner % V == 0 && is_aligned(c.dx, 16) && is_aligned(c.dy, 16) && is_aligned(c.saved, 16))
        return launch(work, false, backward_generic<T, INDEX, V>, blocks_of(elements / V), THREADS, 0, c, elements / V);
    return launch(work, false, backward_generic<T, INDEX, 1>, blocks_of(elements), THREADS, 0, c, elements);
}

template <class T> vjp_status run_backward_generic(const vjp_work *work, pool_call c) {
    if (!c.saved) {
        pool_call search = c;
        search.argmax = work->workspace;
        search.argmax_type = is_short(c) ? VJP_I32 : VJP_I64;
        vjp_status status = run_forward_generic<T>(work, search);
        if (status != VJP_OK) return status;
        c.saved = search.argmax;
        c.argmax_type = search.argmax_type;
    }
    return c.argmax_type == VJP_I32 ? launch_backward_generic<T, int32_t>(work, c)
                                    : launch_backward_generic<T, int64_t>(work, c);
}

template <class T> vjp_status run_backward(const vjp_work *work, const pool_call &c) {
    vjp_status status = VJP_OK;
    bool by_tiles = with_tiles<T>(c, [&](auto window, auto columns, const tile_call &tiles) {
        using W = decltype(window);
        auto kernel = !c.saved                   ? backward_tiles<T, T, columns, W::K, W::S, W::P>
                      : c.argmax_type == VJP_I32 ? backward_tiles<T, int32_t, columns, W::K, W::S, W::P>
                                                 : backward_tiles<T, int64_t, columns, W::K, W::S, W::P>;
        int64_t warps = vjp_divide_up(tiles.tiles, tile_shape<columns, W::K, W::S, W::P>::LANES);
        status = launch(work, false, kernel, vjp_divide_up(warps, TILE_THREADS / 32), TILE_THREADS, 0, tiles);
    });
    return by_tiles ? status : run_backward_generic<T>(work, c);
}

vjp_status backward(const vjp_work *work) {
    pool_call c = call_of(work);
    if (!c.dx || c.planes * c.inner == 0) return VJP_OK;
    c.found = findings_of(work);
    return with_type(work->storage, [&](auto zero) { return run_backward<decltype(zero)>(work, c); });
}

/* For the argmax that the generic path finds again. */
size_t backward_workspace(const vjp_work *work) {
    pool_call c = call_of(work);
    if (!work->tensor[MAXPOOL2D_B_DX] || work->tensor[MAXPOOL2D_B_ARGMAX] || c.planes * c.inner == 0) return 0;
    bool by_tiles = with_tiles<float>(c, [](auto, auto, const tile_call &) {});
    return by_tiles ? 0 : (size_t)windows_of(c) * (is_short(c) ? sizeof(int32_t) : sizeof(int64_t));
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_maxpool2d[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_maxpool2d[VJP_PASS_COUNT] = {
    {vjp::forward, nullptr, VJP_STORAGE_16_32},
    {vjp::backward, vjp::backward_workspace, VJP_STORAGE_16_32},
};
}
