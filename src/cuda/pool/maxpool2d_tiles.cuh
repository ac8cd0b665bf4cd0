/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d, planes split into tiles that stay in the registers of one thread: for the common square windows, whose
 * size, stride and padding are compile-time constants. (Everything else: maxpool2d.cu.)
 *
 * A tile is 16 bytes of columns by STEPS strides of rows of x and dx, and the windows that begin there. The backward
 * first loads all it needs: dy and the saved argmax of the tile's windows and of those above or below that reach it, or
 * x under them to find the argmax again. Then it loops over the windows, rows first, and adds dy to the element whose
 * place is the argmax; the windows of the adjacent tiles come from the adjacent lanes. So an element is summed by one
 * thread in order of windows, with no atomics, no shared memory and no barrier, and what two tiles both read comes from
 * the first-level cache.
 *
 * The fewest bytes of 32x64x112x112, 3/2/1, f32: dx 103 MB, dy 26 MB, and argmax (i32) 26 MB or x 103 MB. A thread has
 * 64 to 160 bytes of its own in flight before it uses the first, and a multiprocessor 640 to 1000 threads: 60 KiB and
 * more. Blocks are small so that some load while others compute and store.
 *
 * Loads never fall outside a tensor: beyond an edge, the element at the edge is read instead. An edge element that
 * occurs twice in a window changes nothing where it comes later, because only a greater one wins, and where it comes
 * first it has the place of the true one. So padding cannot win, and a window of -inf has an argmax.
 */
#ifndef VJP_CUDA_MAXPOOL2D_TILES_CUH
#define VJP_CUDA_MAXPOOL2D_TILES_CUH

#include "cuda/pool/maxpool2d.cuh"

namespace vjp {
namespace {

/* ---- Tiles ------------------------------------------------------------------------------------------- */

constexpr int TILE_THREADS = 128;

/*
 * Window rows that begin in a tile. With more, fewer are read twice (one row of windows per tile); with fewer, less
 * registers are used.
 */
constexpr int STEPS = 4;

/* Division of n < 2^31 by one multiplication: with s = ceil(log2 d), m = floor(2^(31 + s) / d) + 1 is exact. */
struct divider {
    unsigned divisor, multiplier;
    int shift;

    __device__ unsigned quotient(unsigned n) const {
        return (unsigned)((uint64_t)n * multiplier >> shift);
    }
};

inline divider divider_of(int64_t divisor) {
    int log = 0;
    while ((int64_t)1 << log < divisor)
        log++;
    return {(unsigned)divisor, (unsigned)(((uint64_t)1 << (31 + log)) / (uint64_t)divisor + 1), 31 + log};
}

struct tile_call {
    pool_call pool;
    int height, width, out_height, out_width;
    unsigned plane; /* elements; fewer than 2^31 */
    int tiles;
    divider across, down;
};

/*
 * Columns of a tile: 16 bytes of them where all rows of all tensors are aligned for it (IN_VECTORS), otherwise 2, which
 * are read and written one by one.
 */
constexpr int NARROW = 2;

template <int COLUMNS> constexpr bool IN_VECTORS = COLUMNS > NARROW;

/*
 * Windows of K x K elements, S apart, P of padding; counted from the tile's first window, elements from its first one.
 * FIRST to LAST reach the tile in each direction. Those across that are not the tile's own belong to an adjacent tile.
 */
template <int COLUMNS, int K, int S, int P> struct tile_shape {
    static constexpr int WINDOWS = COLUMNS / S, ROWS = STEPS * S;
    static constexpr int FIRST = -((K - 1 - P) / S), LAST = (COLUMNS - 1 + P) / S, LAST_ROW = (ROWS - 1 + P) / S;
    static constexpr int LEFT = -FIRST, RIGHT = LAST - WINDOWS + 1;
    /* A warp's outermost lanes only work for the adjacent lanes; their own tiles are computed by another warp. */
    static constexpr int LANES = 32 - (LEFT > 0) - (RIGHT > 0);
    static_assert(LEFT <= WINDOWS && RIGHT <= WINDOWS);
};

struct tile_place {
    int64_t plane;
    int row, column; /* of tiles */
};

__device__ inline tile_place find_tile(const tile_call &c, int id) {
    unsigned rows = c.across.quotient((unsigned)id), plane = c.down.quotient(rows);
    return {plane, (int)(rows - plane * c.down.divisor), (int)((unsigned)id - rows * c.across.divisor)};
}

__device__ inline int inside(int i, int size) {
    return min(max(i, 0), size - 1);
}

/* N adjacent elements of a row, and up to one BEFORE and one BEHIND them, as loaded. */
template <class E, int BEFORE, int N, int BEHIND, bool VECTORS> struct strip {
    static_assert(BEFORE <= 1 && BEHIND <= 1);
    packed<E, N> own;
    E before, behind;

    /* i must be a compile-time constant. */
    __device__ float as_f32(int i) const {
        return i < 0 ? to_f32(before) : i < N ? own.as_f32(i) : to_f32(behind);
    }

    /* row: the address of element `first`, which may be outside. */
    __device__ void load(const E *row, int first, int width) {
        auto at = [&](int i) { return row + (inside(first + i, width) - first); };
        if constexpr (VECTORS)
            own = load_packed<E, N>(row);
        else
            own = make_packed<E, N>([&](int i) { return __ldg(at(i)); });
        if constexpr (BEFORE > 0) before = __ldg(at(-1));
        if constexpr (BEHIND > 0) behind = __ldg(at(N));
    }
};

/* Rows [first, first + N) of a plane, each a strip. A pointer that steps is cheaper than N multiplications. */
template <class STRIP, class E, int N>
__device__ void load_rows(STRIP (&strips)[N], const E *plane, int first, int height, int column, int width) {
    const E *row = plane + (int64_t)inside(first, height) * width + column;
#pragma unroll
    for (int i = 0; i < N; i++) {
        strips[i].load(row, column, width);
        if (first + i >= 0 && first + i + 1 < height) row += width;
    }
}

/*
 * x under the tile's own windows across and FIRST to LAST down, and their maxima. Places are counted from the tile's
 * first element, `pitch` from row to row.
 */
template <class T, int COLUMNS, int K, int S, int P, int FIRST, int LAST> struct window_search {
    static constexpr int COUNT = COLUMNS / S;
    static constexpr int TOP = FIRST * S - P, ROWS = (LAST - FIRST) * S + K;
    static constexpr int END = (COUNT - 1) * S - P + K;

    strip<T, P, COLUMNS, (END > COLUMNS ? END - COLUMNS : 0), IN_VECTORS<COLUMNS>> x[ROWS];
    best<unsigned> across[ROWS][COUNT]; /* the maxima of single rows, which vertically adjacent windows share */

    __device__ void load(const tile_call &c, const T *plane, int row, int column) {
        load_rows(x, plane, row + TOP, c.height, column, c.width);
    }

    __device__ void find_across(int r, int row, int column, unsigned pitch) {
        unsigned base = (unsigned)(TOP + r < 0 ? max(TOP + r, -row) : TOP + r) * pitch;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
#pragma unroll
            for (int k = 0; k < K; k++) {
                int i = j * S - P + k;
                unsigned place = (unsigned)(i < 0 ? max(i, -column) : i);
                if (k == 0)
                    across[r][j] = {x[r].as_f32(i), place};
                else
                    across[r][j].take(x[r].as_f32(i), place);
            }
            across[r][j].place += base;
        }
    }

    /* The maxima of window row i, after those of the rows before it. */
    __device__ void find(int i, int row, int column, unsigned pitch, best<unsigned> (&found)[COUNT]) {
        int top = (i - FIRST) * S;
#pragma unroll
        for (int k = 0; k < K; k++)
            if (i == FIRST || k >= K - S) find_across(top + k, row, column, pitch);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            found[j] = across[top][j];
#pragma unroll
            for (int k = 1; k < K; k++)
                found[j].take(across[top + k][j].value, across[top + k][j].place);
        }
    }
};

/* ---- Forward ----------------------------------------------------------------------------------------- */

/* Stores the first `count` of N values to a row. */
template <bool VECTORS, class E, int N> __device__ void store_part(E *to, const packed<E, N> &values, int count) {
    if constexpr (VECTORS) {
        store_packed(to, values);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) to[i] = values[i];
    }
}

template <class T, int COLUMNS, int K, int S, int P>
__global__ void __launch_bounds__(TILE_THREADS, 4) forward_tiles(const __grid_constant__ tile_call c) {
    constexpr int N = COLUMNS / S;
    constexpr bool VECTORS = IN_VECTORS<COLUMNS>;
    unsigned id = blockIdx.x * TILE_THREADS + threadIdx.x;
    if (id >= (unsigned)c.tiles) return;
    tile_place at = find_tile(c, (int)id);
    int row = at.row * STEPS * S, column = at.column * COLUMNS, out_row = at.row * STEPS, out_column = at.column * N;
    window_search<T, COLUMNS, K, S, P, 0, STEPS - 1> search;
    search.load(c, static_cast<const T *>(c.pool.x) + at.plane * c.plane, row, column);
    unsigned base = (unsigned)row * (unsigned)c.width + (unsigned)column;
    int count = c.out_width - out_column;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        best<unsigned> found[N];
        search.find(i, row, column, (unsigned)c.width, found);
        if (out_row + i >= c.out_height) continue;
        int64_t to = (at.plane * c.out_height + out_row + i) * c.out_width + out_column;
        if (c.pool.y) {
            T *y = static_cast<T *>(c.pool.y) + to;
            auto value = [&](int j) {
                return from_f32<T>(c.pool.add && j < count ? to_f32(y[j]) + found[j].value : found[j].value);
            };
            store_part<VECTORS>(y, make_packed<T, N>(value), count);
        }
        auto store_places = [&](auto index) {
            using INDEX = decltype(index);
            packed<INDEX, N> places = make_packed<INDEX, N>([&](int j) { return (INDEX)(found[j].place + base); });
            store_part<VECTORS>(static_cast<INDEX *>(c.pool.argmax) + to, places, count);
        };
        if (c.pool.argmax && c.pool.argmax_type == VJP_I32)
            store_places(int32_t{});
        else if (c.pool.argmax)
            store_places(int64_t{});
    }
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/* Reports the first bad argmax of windows [row, end_row) x [column, end_column) of a plane. */
template <class INDEX>
__device__ __noinline__ void report_first(const tile_call &c, int64_t plane, int row, int end_row, int column,
                                          int end_column) {
    const INDEX *saved = static_cast<const INDEX *>(c.pool.saved);
    for (int h = max(row, 0); h < min(end_row, c.out_height); h++)
        for (int w = column; w < min(end_column, c.out_width); w++) {
            int64_t k = (plane * c.out_height + h) * c.out_width + w;
            if ((uint64_t)(int64_t)saved[k] < c.plane) continue;
            report(c.pool.found, k, (double)saved[k], c.plane);
            return;
        }
}

/* No element's place: they are all below 2^31, and differences from a tile's corner are taken modulo 2^32. */
constexpr unsigned NOWHERE = 0xffffffffu;

/* A saved place. One outside the plane equals no element's place and so is left out. */
template <class INDEX> __device__ unsigned saved_place(INDEX place, unsigned plane, bool &bad) {
    bool outside = (std::make_unsigned_t<INDEX>)place >= plane;
    bad |= outside;
    return sizeof(INDEX) > 4 && outside ? NOWHERE : (unsigned)place;
}

/*
 * Copies own[] of this lane's windows into all[], and from the adjacent lanes the LEFT windows before and the RIGHT
 * windows behind them.
 */
template <int LEFT, int RIGHT, class V, int N, int COUNT> __device__ void share(const V (&own)[N], V (&all)[COUNT]) {
#pragma unroll
    for (int j = 0; j < LEFT; j++)
        all[j] = __shfl_up_sync(0xffffffffu, own[N - LEFT + j], 1);
#pragma unroll
    for (int j = 0; j < N; j++)
        all[LEFT + j] = own[j];
#pragma unroll
    for (int j = 0; j < RIGHT; j++)
        all[LEFT + N + j] = __shfl_down_sync(0xffffffffu, own[j], 1);
}

/*
 * INDEX is the type of the saved argmax, or T where the maxima are found again in x. A multiprocessor has 65536
 * registers: so many blocks leave room for the loads of a tile and as much again to compute with.
 */
template <class INDEX> constexpr int RESIDENT = std::is_same_v<INDEX, int32_t> ? 6 : 5;

/* Distance between rows in places found again: more than any column of a tile and its surroundings. */
constexpr unsigned SEARCH_PITCH = 64;

template <class T, class INDEX, int COLUMNS, int K, int S, int P>
__global__ void __launch_bounds__(TILE_THREADS, IN_VECTORS<COLUMNS> ? RESIDENT<INDEX> : 5)
    backward_tiles(const __grid_constant__ tile_call c) {
    using shape = tile_shape<COLUMNS, K, S, P>;
    constexpr bool VECTORS = IN_VECTORS<COLUMNS>, SAVED = !std::is_same_v<INDEX, T>;
    constexpr int FIRST = shape::FIRST, LAST_ROW = shape::LAST_ROW, LEFT = shape::LEFT, RIGHT = shape::RIGHT;
    constexpr int ROWS = shape::ROWS, WINDOWS = shape::WINDOWS, COUNT = LEFT + WINDOWS + RIGHT;
    constexpr int WINDOW_ROWS = LAST_ROW - FIRST + 1;
    int lane = threadIdx.x % 32, warp = (int)(blockIdx.x * (TILE_THREADS / 32) + threadIdx.x / 32);
    int id = warp * shape::LANES + lane - (LEFT > 0);
    bool owns = lane >= (LEFT > 0) && lane < 32 - (RIGHT > 0) && id < c.tiles;
    tile_place at = find_tile(c, inside(id, c.tiles));
    int row = at.row * ROWS, column = at.column * COLUMNS;
    int out_row = at.row * STEPS, out_column = at.column * WINDOWS;

    strip<T, 0, WINDOWS, 0, VECTORS> dy[WINDOW_ROWS];
    strip<INDEX, 0, WINDOWS, 0, VECTORS> saved[SAVED ? WINDOW_ROWS : 1];
    window_search<T, COLUMNS, K, S, P, FIRST, LAST_ROW> search;
    int64_t plane = at.plane * c.out_height * c.out_width;
    if constexpr (SAVED)
        load_rows(saved, static_cast<const INDEX *>(c.pool.saved) + plane, out_row + FIRST, c.out_height, out_column,
                  c.out_width);
    else
        search.load(c, static_cast<const T *>(c.pool.x) + at.plane * c.plane, row, column);
    load_rows(dy, static_cast<const T *>(c.pool.dy) + plane, out_row + FIRST, c.out_height, out_column, c.out_width);

    T *dx = static_cast<T *>(c.pool.dx) + at.plane * c.plane + (int64_t)row * c.width + column;
    unsigned base = (unsigned)row * (unsigned)c.width + (unsigned)column;
    unsigned pitch = SAVED ? (unsigned)c.width : SEARCH_PITCH;
    float sum[ROWS][COLUMNS] = {};
    bool bad = false;
#pragma unroll
    for (int i = FIRST; i <= LAST_ROW; i++) {
        unsigned own[WINDOWS], place[COUNT];
        float own_value[WINDOWS], value[COUNT];
        if constexpr (SAVED) {
#pragma unroll
            for (int j = 0; j < WINDOWS; j++)
                own[j] = saved_place(saved[i - FIRST].own[j], c.plane, bad);
        } else {
            best<unsigned> found[WINDOWS];
            search.find(i, row, column, pitch, found);
#pragma unroll
            for (int j = 0; j < WINDOWS; j++)
                own[j] = found[j].place;
        }
#pragma unroll
        for (int j = 0; j < WINDOWS; j++)
            own_value[j] = dy[i - FIRST].as_f32(j);
        share<LEFT, RIGHT>(own, place);
        share<LEFT, RIGHT>(own_value, value);
        bool row_exists = (unsigned)(out_row + i) < (unsigned)c.out_height;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            int window = j - LEFT;
            /* From the tile of its owner to this one. */
            if (SAVED)
                place[j] -= base;
            else if (window < 0)
                place[j] -= COLUMNS;
            else if (window >= WINDOWS)
                place[j] += COLUMNS;
            bool surely = VECTORS && window >= 0 && window < WINDOWS;
            bool exists = row_exists && (surely || (unsigned)(out_column + window) < (unsigned)c.out_width);
            if (!exists) place[j] = SAVED ? NOWHERE - base : NOWHERE;
        }
        /* Element (r, k) of the tile has the place r * pitch + k. */
#pragma unroll
        for (int r = max(i * S - P, 0); r < i * S - P + K && r < ROWS; r++)
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                unsigned k = place[j] - (unsigned)r * pitch;
                int left = (j - LEFT) * S - P;
#pragma unroll
                for (int e = max(left, 0); e < left + K && e < COLUMNS; e++)
                    if (k == (unsigned)e) sum[r][e] += value[j];
            }
            /* Write the rows that no later window reaches. */
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if ((r + P) / S != i || !owns || row + r >= c.height) continue;
            T *to = dx + (int64_t)r * c.width;
            if constexpr (VECTORS) {
                write_wide(to, sum[r], c.pool.add);
            } else {
#pragma unroll
                for (int e = 0; e < COLUMNS; e++)
                    if (column + e < c.width) write_one(to + e, sum[r][e], c.pool.add);
            }
        }
    }
    if constexpr (SAVED)
        if (bad && owns)
            report_first<INDEX>(c, at.plane, out_row + FIRST, out_row + LAST_ROW + 1, out_column, out_column + WINDOWS);
}

} // namespace
} // namespace vjp

#endif
