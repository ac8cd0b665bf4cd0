/*
 * maxpool2d on CUDA: y is the maximum of each window, argmax its place in the plane (the first wins ties, a NaN wins
 * over all, padding never does), and dx takes dy where the maxima were.
 *
 * The backward gathers: every element of dx is added up by one thread, which goes through the windows over it in
 * row-major order and adds dy of those whose argmax it is. So no atomics, and the same bits every time.
 *
 * Two ways. The common square windows go by tiles in registers (maxpool2d_tiles.cuh). All others, channels last too,
 * go by pieces: a thread takes one element, or 16 bytes of channels of one element, and loops over a window's elements
 * or the windows over an element. There a backward without argmax first finds it again, into workspace: searching
 * each window once costs K x K reads a window, searching it for each element would cost as many an element and window.
 */
#include "cuda/pool/maxpool2d_tiles.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256;

/* ---- By pieces --------------------------------------------------------------------------------------- */

/* Elements first, first + step, ... of an axis, `count` of them, that a window holds: never none. */
struct taps {
    int64_t first, count;
};

__device__ inline taps taps_of(const axis &a, int64_t window) {
    int64_t origin = window * a.stride - a.padding;
    int64_t begin = origin < 0 ? (-origin + a.dilation - 1) / a.dilation : 0;
    int64_t end = (a.size - origin + a.dilation - 1) / a.dilation;
    return {origin + begin * a.dilation, (end < a.kernel ? end : a.kernel) - begin};
}

/* Windows [begin, end) that reach over an element. */
struct span {
    int64_t begin, end;
};

__device__ inline span windows_over(const axis &a, int64_t element) {
    int64_t last = element + a.padding, reach = last - (a.kernel - 1) * a.dilation;
    int64_t end = last / a.stride + 1;
    return {reach > 0 ? (reach + a.stride - 1) / a.stride : 0, end < a.windows ? end : a.windows};
}

/* Piece t of a tensor whose planes have rows of `width`: V neighbours along the inner axis. */
struct piece_place {
    int64_t plane, row, column, inner;
};

template <int V> __device__ piece_place piece_of(const pool_call &c, int64_t t, int64_t height, int64_t width) {
    piece_place p;
    int64_t pieces = c.inner / V, element = t / pieces, row = element / width;
    p.inner = (t - element * pieces) * V;
    p.column = element - row * width;
    p.plane = row / height;
    p.row = row - p.plane * height;
    return p;
}

template <class INDEX, class PLACE, int V>
__device__ void store_argmax(void *argmax, int64_t to, const best<PLACE> (&b)[V]) {
    store_run(static_cast<INDEX *>(argmax) + to, gather_run<INDEX, V>([&](int v) { return (INDEX)b[v].place; }));
}

/* A thread takes V channels of a window. */
template <class T, class PLACE, int V>
__global__ void __launch_bounds__(THREADS) forward_pieces(const __grid_constant__ pool_call c, int64_t pieces) {
    const T *x = static_cast<const T *>(c.x);
    T *y = static_cast<T *>(c.y);
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < pieces; t += (int64_t)gridDim.x * THREADS) {
        piece_place p = piece_of<V>(c, t, c.down.windows, c.across.windows);
        taps rows = taps_of(c.down, p.row), columns = taps_of(c.across, p.column);
        const T *plane = x + p.plane * c.down.size * c.across.size * c.inner + p.inner;
        best<PLACE> b[V];
        for (int64_t i = 0; i < rows.count; i++)
            for (int64_t j = 0; j < columns.count; j++) {
                int64_t place =
                    (rows.first + i * c.down.dilation) * c.across.size + columns.first + j * c.across.dilation;
                run<T, V> values = load_run<T, V>(plane + place * c.inner);
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
            store_run(y + to, gather_run<T, V>([&](int v) {
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
 * these. A bad argmax is reported by the threads of all elements that its window reaches over, each the first it sees.
 */
template <class T, class INDEX, int V>
__global__ void __launch_bounds__(THREADS) backward_pieces(const __grid_constant__ pool_call c, int64_t pieces) {
    const T *dy = static_cast<const T *>(c.dy);
    const INDEX *saved = static_cast<const INDEX *>(c.saved);
    T *dx = static_cast<T *>(c.dx);
    int64_t plane = c.down.size * c.across.size, windows = c.down.windows * c.across.windows;
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < pieces; t += (int64_t)gridDim.x * THREADS) {
        piece_place p = piece_of<V>(c, t, c.down.size, c.across.size);
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
                    run<INDEX, V> places = load_run<INDEX, V>(saved + k);
                    bool any = false;
#pragma unroll
                    for (int v = V - 1; v >= 0; v--) {
                        any |= (int64_t)places[v] == place;
                        if ((uint64_t)(int64_t)places[v] >= (uint64_t)plane && (bad < 0 || k + v <= bad)) bad = k + v;
                    }
                    if (!any) continue;
                    run<T, V> values = load_run<T, V>(dy + k);
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
        store_run(to, gather_run<T, V>(
                          [&](int v) { return from_f32<T>(c.add ? to_f32(to[v]) + (float)sum[v] : (float)sum[v]); }));
        if (bad >= 0) report(c.found, bad, (double)saved[bad], plane);
    }
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* Places in a plane that 32 bits hold. */
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

/* Calls f with a window that has tiles of its own; false if this one has none, or f's answer. */
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
 * The windows that have wide tiles too: those that many networks begin with and halve their planes with. 3/2/0 leaves
 * rows of an odd number of windows, or of elements, so that they would seldom be aligned; 3/1/1 takes so many
 * comparisons (18 an element) that wide tiles would not make it a copy.
 */
template <class W> constexpr bool HAS_WIDE = W::K == 2 || (W::S == 2 && W::P == 1);

/* Whether every row of every tensor is aligned for tiles of 16 bytes, and every window begins in a tile of x. */
bool wide_fits(const pool_call &c, int64_t columns) {
    for (const void *data : {c.x, c.dy, c.saved, (const void *)c.y, (const void *)c.argmax, (const void *)c.dx})
        if (!is_aligned(data, 16)) return false;
    return c.across.size % columns == 0 && c.across.windows * c.across.stride == c.across.size;
}

constexpr int64_t MOST_TILES = 1 << 30; /* 32 bits number them */

/*
 * Cuts planes into tiles of `columns`. As many as hold all elements and all windows: the last window may begin in the
 * last column, and then belongs to a tile behind it.
 */
bool cut_tiles(const pool_call &c, int64_t columns, tile_call &tiles) {
    int64_t across = most(divide_up(c.across.size, columns), divide_up(c.across.windows * c.across.stride, columns));
    int64_t rows = STEPS * c.down.stride;
    int64_t down = most(divide_up(c.down.size, rows), divide_up(c.down.windows * c.down.stride, rows));
    int64_t count = c.planes * down * across; /* no overflow: fewer than elements and windows */
    if (!is_short(c) || count > MOST_TILES) return false;
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

/* Calls f(window, columns, tiles) with the widest tiles that fit; false if the call does not go by tiles. */
template <class T, class F> bool with_tiles(const pool_call &c, F f) {
    return with_window(c, [&](auto window) {
        tile_call tiles{};
        if (!cut_tiles(c, NARROW, tiles)) return false;
        if constexpr (HAS_WIDE<decltype(window)>)
            if (wide_fits(c, WIDE<T>)) {
                cut_tiles(c, WIDE<T>, tiles);
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
    return least(divide_up(threads, THREADS), MOST_BLOCKS);
}

template <class T> vjp_status find_by_pieces(const vjp_work *work, const pool_call &c) {
    constexpr int V = WIDE<T>;
    int64_t windows = windows_of(c);
    if (!is_short(c))
        return launch(work, false, forward_pieces<T, int64_t, 1>, blocks_of(windows), THREADS, 0, c, windows);
    if (c.inner % V == 0 && is_aligned(c.x, 16) && is_aligned(c.y, 16) && is_aligned(c.argmax, 16))
        return launch(work, false, forward_pieces<T, int32_t, V>, blocks_of(windows / V), THREADS, 0, c, windows / V);
    return launch(work, false, forward_pieces<T, int32_t, 1>, blocks_of(windows), THREADS, 0, c, windows);
}

template <class T> vjp_status run_forward(const vjp_work *work, const pool_call &c) {
    vjp_status status = VJP_OK;
    bool by_tiles = with_tiles<T>(c, [&](auto window, auto columns, const tile_call &tiles) {
        using W = decltype(window);
        status = launch(work, false, forward_tiles<T, columns, W::K, W::S, W::P>, divide_up(tiles.tiles, TILE_THREADS),
                        TILE_THREADS, 0, tiles);
    });
    return by_tiles ? status : find_by_pieces<T>(work, c);
}

vjp_status forward(const vjp_work *work) {
    pool_call c = call_of(work);
    if ((!c.y && !c.argmax) || c.planes * c.inner == 0) return VJP_OK;
    return with_type(work->storage, [&](auto zero) { return run_forward<decltype(zero)>(work, c); });
}

template <class T, class INDEX> vjp_status gather_pieces(const vjp_work *work, const pool_call &c) {
    constexpr int V = WIDE<T>;
    int64_t elements = elements_of(c);
    if (c.inner % V == 0 && is_aligned(c.dx, 16) && is_aligned(c.dy, 16) && is_aligned(c.saved, 16))
        return launch(work, false, backward_pieces<T, INDEX, V>, blocks_of(elements / V), THREADS, 0, c, elements / V);
    return launch(work, false, backward_pieces<T, INDEX, 1>, blocks_of(elements), THREADS, 0, c, elements);
}

template <class T> vjp_status backward_by_pieces(const vjp_work *work, pool_call c) {
    if (!c.saved) {
        pool_call search = c;
        search.argmax = work->workspace;
        search.argmax_type = is_short(c) ? VJP_I32 : VJP_I64;
        vjp_status status = find_by_pieces<T>(work, search);
        if (status != VJP_OK) return status;
        c.saved = search.argmax;
        c.argmax_type = search.argmax_type;
    }
    return c.argmax_type == VJP_I32 ? gather_pieces<T, int32_t>(work, c) : gather_pieces<T, int64_t>(work, c);
}

template <class T> vjp_status run_backward(const vjp_work *work, const pool_call &c) {
    vjp_status status = VJP_OK;
    bool by_tiles = with_tiles<T>(c, [&](auto window, auto columns, const tile_call &tiles) {
        using W = decltype(window);
        auto kernel = !c.saved                   ? backward_tiles<T, T, columns, W::K, W::S, W::P>
                      : c.argmax_type == VJP_I32 ? backward_tiles<T, int32_t, columns, W::K, W::S, W::P>
                                                 : backward_tiles<T, int64_t, columns, W::K, W::S, W::P>;
        int64_t warps = divide_up(tiles.tiles, tile_shape<columns, W::K, W::S, W::P>::LANES);
        status = launch(work, false, kernel, divide_up(warps, TILE_THREADS / 32), TILE_THREADS, 0, tiles);
    });
    return by_tiles ? status : backward_by_pieces<T>(work, c);
}

vjp_status backward(const vjp_work *work) {
    pool_call c = call_of(work);
    if (!c.dx || c.planes * c.inner == 0) return VJP_OK;
    c.found = findings_of(work);
    return with_type(work->storage, [&](auto zero) { return run_backward<decltype(zero)>(work, c); });
}

/* An argmax found again by pieces. */
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
    {vjp::forward, nullptr, VJP_BITS_CPU},
    {vjp::backward, vjp::backward_workspace, VJP_BITS_CPU},
};
}
