/*
 * gather on CUDA. Forward: rows of the table copied by index, as bytes. Backward: the deterministic scatter-add
 * dtable[o, index[k], :] += dy[o, k, :], repeats in the order of k, every row of dtable written once, no float atomics.
 *
 * The backward first makes, for each row of dtable, the list of its k in order:
 *   few indices    integer atomics count the rows' k and give each a place in its row's list, in any order; the sums
 *                  sort a short list as they read it, and a kernel of its own sorts the long ones by a bit map;
 *   many indices   a stable radix sort of (row, k): CUB's, in the workspace.
 * Then two kernels, side by side, write every row: one those with many k, the other all the rest, most of them zeros.
 * Sums wait for memory several times over (the list, then dy), zeros never do: it is the mixture that keeps it busy.
 * Where a card cannot run one kernel beside the next, they follow one another. Least bytes: dy read, dtable written;
 * everything about the lists is some 40 bytes an index and 16 a row, most of it in the second-level cache.
 *
 * A sum: a warp reads a slice of 32 pieces of 16 bytes of each row of dy, the k in order, up to FEW of them in an f32
 * chain and those sums in double. A long list is cut into equal parts, one for each warp of a block (or several, of
 * narrower slices, where it is very long), which are added in order. All of that follows from the length of the list
 * and the width of a row, so the bits do not depend on the card.
 */
#include <cub/device/device_radix_sort.cuh>

#include "cuda/kernel.cuh"

namespace vjp {
namespace {

/* Up to so many indices the lists are made by counting; the bit map of a long list then fits in shared memory. */
constexpr int64_t FEW_INDICES = 1 << 19;

/*
 * Lists that a warp sums with all of the row's slices, one row after the other; lists that it sorts and of which it
 * sums one slice, so that a row is the work of many; longer ones are summed by blocks.
 */
constexpr int FEW_REPEATS = 4, SHORT = 32;

/* From here on a row's slices are a quarter as wide: four times as many blocks, of four times as many parts. */
constexpr int64_t VERY_LONG = 128;

/* So many repeats are added in f32 (error below 16 x 6e-8), and such sums in double. */
constexpr int FEW = 16;

constexpr int THREADS = 256, WARPS = THREADS / 32;

/* Blocks of the kernels that loop: as many as a large Hopper card holds, where registers are many and where they are
 * few. */
constexpr int64_t LISTED_BLOCKS = 132 * 2, LOOPING_BLOCKS = 132 * 8;

int64_t blocks_for(int64_t items, int64_t per_block) {
    return least(MOST_BLOCKS, divide_up(items, per_block));
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

/* Pieces in flight a thread. */
constexpr int PIECES = 4;

/* P is what is moved at once: 16 bytes, or one element where rows do not begin at multiples of 16. */
template <class T, class P>
__global__ void gather_rows(vjp_gather_sizes s, P *y, const P *table, const void *index, vjp_dtype index_type, bool add,
                            findings f) {
    int64_t across = s.inner * (int64_t)sizeof(T) / (int64_t)sizeof(P), total = s.outer * s.count * across;
    int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x; first < total; first += stride * PIECES) {
        P piece[PIECES];
        bool good[PIECES];
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            int64_t at = first + p * stride;
            good[p] = false;
            if (at >= total) continue;
            int64_t item = at / across, column = at - item * across, outer = item / s.count;
            int64_t row = read_index(f, index, index_type, item - outer * s.count, s.rows);
            good[p] = row >= 0;
            if (good[p]) piece[p] = table[(outer * s.rows + row) * across + column];
        }
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            int64_t at = first + p * stride;
            if (!good[p]) continue;
            if (add) {
                T *mine = reinterpret_cast<T *>(&piece[p]);
                const T *old = reinterpret_cast<const T *>(y + at);
#pragma unroll
                for (int i = 0; i < (int)(sizeof(P) / sizeof(T)); i++)
                    mine[i] = from_f32<T>(to_f32(old[i]) + to_f32(mine[i]));
            }
            y[at] = piece[p];
        }
    }
}

template <class T, class P> vjp_status forward_as(const vjp_work *work, const vjp_gather_sizes &s) {
    int64_t pieces = s.outer * s.count * (s.inner * (int64_t)sizeof(T) / (int64_t)sizeof(P));
    return launch(work, true, gather_rows<T, P>, blocks_for(pieces, THREADS * PIECES), THREADS, 0, s,
                  static_cast<P *>(vjp_data(work, GATHER_Y)), static_cast<const P *>(vjp_data(work, GATHER_TABLE)),
                  vjp_data(work, GATHER_INDEX), vjp_type(work, GATHER_INDEX), vjp_accumulates(work, GATHER_Y),
                  findings_of(work));
}

vjp_status forward(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    void *y = vjp_data(work, GATHER_Y), *table = vjp_data(work, GATHER_TABLE);
    if (!y || s.outer * s.count * s.inner == 0) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        bool wide = is_aligned(y, 16) && is_aligned(table, 16) && s.inner % WIDE<T> == 0;
        return wide ? forward_as<T, uint4>(work, s) : forward_as<T, T>(work, s);
    });
}

/* ---- Backward: the lists ----------------------------------------------------------------------------- */

typedef unsigned long long counter;

/* The work lists: rows with more than FEW_REPEATS up to SHORT, and with more; and counters of what is used. */
enum { LIST_SHORT, LIST_LONG, LISTS, USED_ORDER = LISTS, USED_COUNT };

/* A row on a work list, with all that a sum begins with. */
struct listed {
    int64_t row, begin, length;
};

struct lists {
    counter *count;      /* [rows]: how many k */
    int64_t *begin;      /* [rows]: of the row's list in `order` */
    int64_t *order;      /* [count]: k by row */
    listed *list[LISTS]; /* rows that are asked for often, by the length of their list */
    counter *used;       /* of each list, and of `order` */
    int64_t *row_of;     /* [count]: few indices: the row of k, -1 for a bad index; many: the keys, sorted */
    int64_t *rank;       /* [count]: few indices: k's place in its row's list */
    /* Many indices: keys and values before the sort, and CUB's own space. */
    uint64_t *key;
    int64_t *value;
    void *sorting;
    size_t sorting_bytes;
};

__global__ void clear_lists(lists l, int64_t rows) {
    take_turn();
    int64_t stride = (int64_t)gridDim.x * THREADS, first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (int64_t row = first; row < rows; row += stride)
        l.count[row] = 0;
    if (first < USED_COUNT) l.used[first] = 0;
}

__global__ void count_rows(lists l, const void *index, vjp_dtype index_type, int64_t count, int64_t rows, findings f) {
    take_turn();
    int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (k >= count) return;
    int64_t row = read_index(f, index, index_type, k, rows);
    l.row_of[k] = row;
    if (row < 0) return;
    /* One atomic for all lanes with the same row: a frequent row would have the others wait in line. */
    unsigned same = __match_any_sync(__activemask(), (unsigned long long)row);
    int lane = threadIdx.x % 32, first = __ffs((int)same) - 1;
    counter base = 0;
    if (lane == first) base = atomicAdd(&l.count[row], (counter)__popc(same));
    base = __shfl_sync(same, base, first);
    l.rank[k] = (int64_t)base + __popc(same & ((1u << lane) - 1));
}

/*
 * Room for `wanted` of each thread behind `used`: one atomic a block, since all blocks add to the same number. Which
 * block comes first changes no sum. Every thread of the block calls it.
 */
__device__ counter take_room(counter *used, counter wanted, counter (&warp_total)[WARPS + 1]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    counter before = wanted;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        counter other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) warp_total[warp] = before;
    __syncthreads();
    if (threadIdx.x == 0) {
        counter total = 0;
        for (int w = 0; w < WARPS; w++)
            total += warp_total[w];
        warp_total[WARPS] = total ? atomicAdd(used, total) : 0;
    }
    __syncthreads();
    counter at = warp_total[WARPS] + before - wanted;
    for (int w = 0; w < warp; w++)
        at += warp_total[w];
    __syncthreads();
    return at;
}

/* Gives each row's list its room in `order`, unless it has it, and puts the row on the work list for its length. */
__global__ void find_room(lists l, int64_t rows, bool place) {
    __shared__ counter room[WARPS + 1];
    take_turn();
    int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t first = (int64_t)blockIdx.x * THREADS; first < rows; first += stride) {
        int64_t row = first + threadIdx.x;
        counter count = row < rows ? l.count[row] : 0;
        int64_t begin = place ? (int64_t)take_room(&l.used[USED_ORDER], count, room) : 0;
        if (!place && count) begin = l.begin[row];
        if (count > FEW_REPEATS) {
            int kind = count <= SHORT ? LIST_SHORT : LIST_LONG; /* rare, so an atomic each will do */
            l.list[kind][atomicAdd(&l.used[kind], 1ull)] = {row, begin, (int64_t)count};
        }
        if (count) l.begin[row] = begin;
    }
}

__global__ void place_indices(lists l, int64_t count) {
    take_turn();
    int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (k >= count) return;
    int64_t row = l.row_of[k];
    if (row >= 0) l.order[l.begin[row] + l.rank[k]] = k;
}

/* Puts each long list in order: a bit for each k, read from the first to the last. A block a list. */
__global__ void sort_long_lists(lists l, int64_t count) {
    extern __shared__ unsigned map[];
    __shared__ int warp_total[WARPS], done;
    take_turn();
    int words = (int)((count + 31) / 32), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t i = blockIdx.x; i < (int64_t)l.used[LIST_LONG]; i += gridDim.x) {
        listed list = l.list[LIST_LONG][i];
        int64_t *order = l.order + list.begin, length = list.length;
        for (int w = threadIdx.x; w < words; w += THREADS)
            map[w] = 0;
        if (threadIdx.x == 0) done = 0;
        __syncthreads();
        for (int64_t j = threadIdx.x; j < length; j += THREADS)
            atomicOr(&map[order[j] / 32], 1u << (order[j] % 32));
        __syncthreads();
        for (int w0 = 0; w0 < words; w0 += THREADS) {
            unsigned bits = w0 + (int)threadIdx.x < words ? map[w0 + threadIdx.x] : 0;
            int mine = __popc(bits), before = mine;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(0xffffffffu, before, step);
                if (lane >= step) before += other;
            }
            if (lane == 31) warp_total[warp] = before;
            __syncthreads();
            int at = done + before - mine, total = 0;
            for (int v = 0; v < WARPS; v++) {
                if (v < warp) at += warp_total[v];
                total += warp_total[v];
            }
            for (; bits; bits &= bits - 1)
                order[at++] = (int64_t)(w0 + threadIdx.x) * 32 + __ffs((int)bits) - 1;
            __syncthreads();
            if (threadIdx.x == 0) done += total;
            __syncthreads();
        }
    }
}

/* ---- Backward: the lists of many indices ------------------------------------------------------------- */

__global__ void make_keys(lists l, const void *index, vjp_dtype index_type, int64_t count, int64_t rows, findings f) {
    take_turn();
    int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x; k < count; k += stride) {
        int64_t row = read_index(f, index, index_type, k, rows);
        l.key[k] = (uint64_t)(row < 0 ? rows : row); /* bad ones behind all others */
        l.value[k] = k;
    }
}

/* Where a row's list begins, and how long it is, from the sorted keys. */
__global__ void find_lists(lists l, int64_t count, int64_t rows) {
    take_turn();
    int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += stride) {
        int64_t row = l.row_of[i];
        if (row >= rows || (i && l.row_of[i - 1] == row)) continue;
        int64_t low = i + 1, high = count; /* the first key past this row's */
        while (low < high) {
            int64_t middle = low + (high - low) / 2;
            if (l.row_of[middle] == row)
                low = middle + 1;
            else
                high = middle;
        }
        l.begin[row] = i;
        l.count[row] = (counter)(low - i);
    }
}

int key_bits(int64_t rows) {
    int bits = 1;
    while (bits < 63 && rows >> bits)
        bits++;
    return bits;
}

/* ---- Backward: the sums ------------------------------------------------------------------------------ */

/* Rows of dy read ahead by a lane before it adds the first of them. */
constexpr int AHEAD = 4;

/*
 * The sum over order[0, length) of one lane's WIDE elements of dy, in order, in double. `columns` of them are there;
 * they lie `step` apart, side by side (step 1, one access of 16 bytes) or in turn with the other lanes.
 */
template <class T, bool WHOLE>
__device__ void sum_list(double (&sum)[WIDE<T>], const T *dy, const int64_t *order, int64_t length, int64_t inner,
                         int columns, int64_t step) {
#pragma unroll
    for (int c = 0; c < WIDE<T>; c++)
        sum[c] = 0;
#pragma unroll 1
    for (int64_t i = 0; i < length; i += FEW) {
        float few[WIDE<T>] = {};
#pragma unroll 1
        for (int j = 0; j < FEW && i + j < length; j += AHEAD) {
            uint4 row[AHEAD];
            T element[AHEAD][WIDE<T>];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (i + j + a >= length) continue;
                const T *from = dy + order[i + j + a] * inner;
                if constexpr (WHOLE)
                    row[a] = load_raw_once(from);
                else
                    for (int c = 0; c < WIDE<T>; c++)
                        if (c < columns) element[a][c] = from[c * step];
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (i + j + a >= length) continue;
                float values[WIDE<T>];
                if constexpr (WHOLE) unpack<T>(row[a], values);
#pragma unroll
                for (int c = 0; c < WIDE<T>; c++) {
                    if (!WHOLE) values[c] = c < columns ? to_f32(element[a][c]) : 0.0f;
                    few[c] += values[c];
                }
            }
        }
#pragma unroll
        for (int c = 0; c < WIDE<T>; c++)
            sum[c] += (double)few[c];
    }
}

/* How the lanes of a warp share a slice: `lanes` of them across it, 32 / lanes parts of the list beside each other. */
struct slicing {
    int lanes;
    int64_t slices; /* of a row */
};

template <class T> __host__ __device__ slicing slicing_of(int64_t inner, bool narrow) {
    int64_t pieces = (inner + WIDE<T> - 1) / WIDE<T>;
    int lanes = narrow ? 8 : 32;
    while (lanes > 1 && lanes / 2 >= pieces)
        lanes /= 2;
    return {lanes, (pieces + lanes - 1) / lanes};
}

template <class T, class D> struct sum_call {
    vjp_gather_sizes s;
    lists l;
    const T *dy;
    D *dtable;
    bool add;
};

/* Puts a lane's finished sums where they belong. */
template <class T, class D, bool WHOLE>
__device__ void put_sums(D *to, const float (&sum)[WIDE<T>], int columns, int64_t step, bool add) {
    if constexpr (WHOLE) {
#pragma unroll
        for (int part = 0; part < WIDE<T>; part += WIDE<D>) {
            float values[WIDE<D>];
#pragma unroll
            for (int c = 0; c < WIDE<D>; c++)
                values[c] = sum[part + c];
            write_wide(to + part, values, add);
        }
    } else {
        for (int c = 0; c < WIDE<T>; c++)
            if (c < columns) write_one(to + c * step, sum[c], add);
    }
}

/*
 * One slice of one row by one warp (part of `parts`) or by all warps of a block. Lanes of several parts of the list lie
 * beside each other; the sums of all parts are added in order.
 */
template <class T, class D, bool WHOLE, bool BLOCK>
__device__ void sum_slice(const sum_call<T, D> &call, int64_t outer, int64_t row, int64_t slice, slicing cut,
                          const int64_t *order, int64_t length, double *shared) {
    int lane = threadIdx.x % 32, warp = BLOCK ? threadIdx.x / 32 : 0, warps = BLOCK ? WARPS : 1;
    int across = lane % cut.lanes, parts = warps * (32 / cut.lanes), part = warp * (32 / cut.lanes) + lane / cut.lanes;
    int64_t inner = call.s.inner, first = slice * cut.lanes * WIDE<T>, step = WHOLE ? 1 : cut.lanes;
    int64_t column = first + (WHOLE ? across * WIDE<T> : across);
    int columns = 0;
    if (column < inner) columns = WHOLE ? WIDE<T> : (int)min((inner - column + step - 1) / step, (int64_t)WIDE<T>);
    int64_t each = (length + parts - 1) / parts, begin = min(length, part * each), end = min(length, begin + each);
    double sum[WIDE<T>] = {};
    if (columns)
        sum_list<T, WHOLE>(sum, call.dy + outer * call.s.count * inner + column, order + begin, end - begin, inner,
                           columns, step);
    if (parts > 1) {
        /* [part][lane across][element] */
#pragma unroll
        for (int c = 0; c < WIDE<T>; c++)
            shared[(part * cut.lanes + across) * WIDE<T> + c] = sum[c];
        if (BLOCK)
            __syncthreads();
        else
            __syncwarp();
        if (part == 0)
#pragma unroll 1
            for (int q = 1; q < parts; q++)
#pragma unroll
                for (int c = 0; c < WIDE<T>; c++)
                    sum[c] += shared[(q * cut.lanes + across) * WIDE<T> + c];
        if (BLOCK)
            __syncthreads();
        else
            __syncwarp();
    }
    D *to = call.dtable + (outer * call.s.rows + row) * inner + column;
    float rounded[WIDE<T>];
#pragma unroll
    for (int c = 0; c < WIDE<T>; c++)
        rounded[c] = (float)sum[c];
    if (part == 0 && columns) put_sums<T, D, WHOLE>(to, rounded, columns, step, call.add);
}

/* Sorts up to 32 k by counting, for each, those before it. */
__device__ void sort_short(int64_t *sorted, const int64_t *order, int length) {
    int lane = threadIdx.x % 32, rank = 0;
    int64_t mine = lane < length ? order[lane] : 0;
    for (int i = 0; i < length; i++)
        rank += __shfl_sync(0xffffffffu, mine, i) < mine;
    if (lane < length) sorted[rank] = mine;
    __syncwarp();
}

/* Long lists, a block a slice, then short ones, a warp a slice: what waits for memory several times over. */
template <class T, class D, bool WHOLE>
__global__ void __launch_bounds__(THREADS, 2) sum_lists(const __grid_constant__ sum_call<T, D> call) {
    __shared__ double shared[THREADS * WIDE<T>];
    __shared__ int64_t all_sorted[WARPS][SHORT];
    wait_for_previous();
    let_next_begin(); /* sum_rows(), beside this one: what it reads is there */
    const lists &l = call.l;
    const vjp_gather_sizes &s = call.s;
    slicing usual = slicing_of<T>(s.inner, false), narrow = slicing_of<T>(s.inner, true);
    /* A list's slices are far apart, and so on different blocks, whether it has many or few. */
    int64_t all = (int64_t)l.used[LIST_LONG] * s.outer;
    for (int64_t item = blockIdx.x; item < all * narrow.slices; item += gridDim.x) {
        int64_t slice = item / all, rest = item - slice * all;
        listed list = l.list[LIST_LONG][rest / s.outer];
        slicing cut = list.length >= VERY_LONG ? narrow : usual;
        if (slice < cut.slices)
            sum_slice<T, D, WHOLE, true>(call, rest % s.outer, list.row, slice, cut, l.order + list.begin, list.length,
                                         shared);
    }
    __syncthreads();
    int warp = threadIdx.x / 32;
    int64_t *sorted = all_sorted[warp], items = (int64_t)l.used[LIST_SHORT] * s.outer * usual.slices;
    for (int64_t item = (int64_t)blockIdx.x * WARPS + warp; item < items; item += (int64_t)gridDim.x * WARPS) {
        int64_t slice = item % usual.slices, rest = item / usual.slices;
        listed list = l.list[LIST_SHORT][rest / s.outer];
        __syncwarp();
        sort_short(sorted, l.order + list.begin, (int)list.length);
        sum_slice<T, D, WHOLE, false>(call, rest % s.outer, list.row, slice, usual, sorted, list.length,
                                      shared + warp * 32 * WIDE<T>);
    }
}

/* Pieces of a row under way at once, where it is asked for once. */
constexpr int COPIED = 4;

/* A row asked for up to FEW_REPEATS times: by k[0, length), in order. Few chains are one, as sum_list() has it. */
template <class T, class D>
__device__ void sum_few(D *to, const T *dy, const int64_t (&k)[FEW_REPEATS], int length, int64_t inner, bool add) {
    int64_t step = 32 * WIDE<T>, first = threadIdx.x % 32 * WIDE<T>;
#pragma unroll 1
    for (int64_t i = first; i < inner && length == 1; i += COPIED * step) {
        uint4 piece[COPIED];
#pragma unroll
        for (int p = 0; p < COPIED; p++)
            if (i + p * step < inner) piece[p] = load_raw_once(dy + k[0] * inner + i + p * step);
#pragma unroll
        for (int p = 0; p < COPIED; p++) {
            if (i + p * step >= inner) continue;
            float values[WIDE<T>];
            unpack<T>(piece[p], values);
            put_sums<T, D, true>(to + i + p * step, values, WIDE<T>, 1, add);
        }
    }
#pragma unroll 1
    for (int64_t i = first; i < inner && length > 1; i += step) {
        uint4 piece[FEW_REPEATS];
#pragma unroll
        for (int r = 0; r < FEW_REPEATS; r++)
            if (r < length) piece[r] = load_raw_once(dy + k[r] * inner + i);
        float sum[WIDE<T>] = {};
#pragma unroll
        for (int r = 0; r < FEW_REPEATS; r++) {
            if (r >= length) continue;
            float values[WIDE<T>];
            unpack<T>(piece[r], values);
#pragma unroll
            for (int c = 0; c < WIDE<T>; c++)
                sum[c] += values[c];
        }
        put_sums<T, D, true>(to + i, sum, WIDE<T>, 1, add);
    }
}

/* The same an element at a time. */
template <class T, class D>
__device__ void sum_few_elements(D *to, const T *dy, const int64_t (&k)[FEW_REPEATS], int length, int64_t inner,
                                 bool add) {
    for (int64_t i = threadIdx.x % 32; i < inner; i += 32) {
        float sum = 0;
#pragma unroll
        for (int r = 0; r < FEW_REPEATS; r++)
            if (r < length) sum += to_f32(dy[k[r] * inner + i]);
        write_one(to + i, sum, add);
    }
}

/*
 * All rows that are on no work list, a warp a row: zeros where nobody asked for it, else a sum of a few. Little is done
 * for each and nearly all of it is waiting, so as many warps as fit do it. It runs beside sum_lists(), and ends after
 * it.
 */
template <class T, class D, bool WHOLE>
__global__ void __launch_bounds__(THREADS, 3) sum_rows(const __grid_constant__ sum_call<T, D> call) {
    const lists &l = call.l;
    const vjp_gather_sizes &s = call.s;
    int lane = threadIdx.x % 32;
    int64_t stride = (int64_t)gridDim.x * WARPS, row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int64_t next = row < s.rows ? (int64_t)l.count[row] : 0;
    for (; row < s.rows; row += stride) {
        int64_t length = next;
        if (row + stride < s.rows) next = (int64_t)l.count[row + stride];
        if (length > FEW_REPEATS || (length == 0 && call.add)) continue;
        int64_t k[FEW_REPEATS] = {};
        if (length) {
            int64_t mine = lane < length ? l.order[l.begin[row] + lane] : 0;
            int rank = 0;
            for (int i = 0; i < (int)length; i++)
                rank += __shfl_sync(0xffffffffu, mine, i) < mine;
#pragma unroll
            for (int r = 0; r < FEW_REPEATS; r++) {
                unsigned who = __ballot_sync(0xffffffffu, lane < length && rank == r);
                if (r < length) k[r] = __shfl_sync(0xffffffffu, mine, __ffs((int)who) - 1);
            }
        }
        for (int64_t outer = 0; outer < s.outer; outer++) {
            D *to = call.dtable + (outer * s.rows + row) * s.inner;
            const T *dy = call.dy + outer * s.count * s.inner;
            if constexpr (WHOLE) {
                for (int64_t i = lane * WIDE<D>; i < s.inner && length == 0; i += 32 * WIDE<D>)
                    __stcs(reinterpret_cast<uint4 *>(to + i), make_uint4(0, 0, 0, 0));
                if (length) sum_few(to, dy, k, (int)length, s.inner, call.add);
            } else {
                sum_few_elements(to, dy, k, (int)length, s.inner, call.add);
            }
        }
    }
    let_next_begin();
    wait_for_previous(); /* for sum_lists(), so that whoever waits for this kernel waits for both */
}

/* ---- Backward: calls --------------------------------------------------------------------------------- */

/* Places in the workspace; the size, when `base` is NULL. */
size_t place_lists(lists *l, char *base, const vjp_gather_sizes &s) {
    size_t place = 0;
    auto take = [&](auto &pointer, int64_t count) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base ? base + place : nullptr);
        place += (size_t)divide_up(count * (int64_t)sizeof *pointer, 256) * 256;
    };
    take(l->count, s.rows);
    take(l->begin, s.rows);
    take(l->order, s.count);
    take(l->list[LIST_SHORT], s.count / FEW_REPEATS + 1);
    take(l->list[LIST_LONG], s.count / SHORT + 1);
    take(l->used, USED_COUNT);
    take(l->row_of, s.count);
    if (s.count <= FEW_INDICES) {
        take(l->rank, s.count);
        return place;
    }
    take(l->key, s.count);
    take(l->value, s.count);
    l->sorting_bytes = 0;
    cub::DeviceRadixSort::SortPairs(nullptr, l->sorting_bytes, l->key, reinterpret_cast<uint64_t *>(l->row_of),
                                    l->value, l->order, s.count, 0, key_bits(s.rows));
    l->sorting = base ? base + place : nullptr;
    return place + l->sorting_bytes;
}

size_t backward_workspace(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    lists l{};
    return work->tensor[GATHER_B_DTABLE] && s.rows ? place_lists(&l, nullptr, s) : 0;
}

/* Enqueues what counts each row's k: few indices; many: their lists, too. */
vjp_status make_lists(const vjp_work *work, const lists &l, const vjp_gather_sizes &s) {
    const void *index = vjp_data(work, GATHER_B_INDEX);
    vjp_dtype type = vjp_type(work, GATHER_B_INDEX);
    vjp_status status =
        launch(work, true, clear_lists, blocks_for(most(s.rows, USED_COUNT), 4 * THREADS), THREADS, 0, l, s.rows);
    if (status != VJP_OK || s.count == 0) return status;
    if (s.count <= FEW_INDICES)
        return launch(work, true, count_rows, divide_up(s.count, THREADS), THREADS, 0, l, index, type, s.count, s.rows,
                      findings_of(work));
    status = launch(work, true, make_keys, blocks_for(s.count, 4 * THREADS), THREADS, 0, l, index, type, s.count,
                    s.rows, findings_of(work));
    if (status != VJP_OK) return status;
    size_t bytes = l.sorting_bytes;
    status = result_of(work, cub::DeviceRadixSort::SortPairs(l.sorting, bytes, l.key,
                                                             reinterpret_cast<uint64_t *>(l.row_of), l.value, l.order,
                                                             s.count, 0, key_bits(s.rows), stream_of(work)));
    if (status != VJP_OK) return status;
    return launch(work, true, find_lists, blocks_for(s.count, 4 * THREADS), THREADS, 0, l, s.count, s.rows);
}

/* Few indices: from counts to lists in order. */
vjp_status fill_lists(const vjp_work *work, const lists &l, const vjp_gather_sizes &s) {
    vjp_status status = launch(work, true, place_indices, divide_up(s.count, THREADS), THREADS, 0, l, s.count);
    if (status != VJP_OK || s.count <= SHORT) return status;
    return launch(work, true, sort_long_lists, least(LOOPING_BLOCKS, s.count / SHORT), THREADS,
                  (size_t)divide_up(s.count, 32) * 4, l, s.count);
}

template <class T, class D> vjp_status sum_as(const vjp_work *work, const vjp_gather_sizes &s, const lists &l) {
    D *dtable = static_cast<D *>(vjp_data(work, GATHER_B_DTABLE));
    const T *dy = static_cast<const T *>(vjp_data(work, GATHER_B_DY));
    sum_call<T, D> call{s, l, dy, dtable, vjp_accumulates(work, GATHER_B_DTABLE)};
    bool whole = s.inner % WIDE<T> == 0 && is_aligned(dy, 16) && is_aligned(dtable, 16);
    vjp_status status =
        launch(work, true, whole ? sum_lists<T, D, true> : sum_lists<T, D, false>, LISTED_BLOCKS, THREADS, 0, call);
    if (status != VJP_OK) return status;
    return launch(work, true, whole ? sum_rows<T, D, true> : sum_rows<T, D, false>,
                  least(divide_up(s.rows, WARPS), LOOPING_BLOCKS), THREADS, 0, call);
}

vjp_status backward(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    if (!vjp_data(work, GATHER_B_DTABLE) || s.outer * s.rows * s.inner == 0) return VJP_OK;
    lists l{};
    place_lists(&l, static_cast<char *>(work->workspace), s);
    bool few = s.count <= FEW_INDICES;
    vjp_status status = make_lists(work, l, s);
    if (status == VJP_OK && s.count)
        status = launch(work, true, find_room, blocks_for(s.rows, THREADS), THREADS, 0, l, s.rows, few);
    if (status == VJP_OK && s.count && few) status = fill_lists(work, l, s);
    if (status != VJP_OK) return status;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (vjp_type(work, GATHER_B_DTABLE) == VJP_F32) return sum_as<T, float>(work, s, l);
        return sum_as<T, T>(work, s, l);
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_gather[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_gather[VJP_PASS_COUNT] = {
    {vjp::forward, nullptr, VJP_BITS_CPU},
    {vjp::backward, vjp::backward_workspace, VJP_BITS_CPU},
};
}
