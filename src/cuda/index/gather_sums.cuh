/* SPDX-License-Identifier: MIT */
/*
 * The sums of gather's backward: every row of dtable written once, in the order that gather_order.cuh makes.
 *
 * The order is split into equal parts, whatever row they belong to: a group of `lanes` threads reads CHAIN_OF rows of
 * dy, a slice of them of up to 32 vectors of 16 bytes, and adds each list in f32. A list that lies within the group is
 * written at once. If several groups of a block share a list, the block adds their sums in order, in double; if several
 * blocks share it, each block leaves its sum, and the last block to arrive adds these, again in order. Which block is
 * last changes no bit: where a list is split follows from the indices and the width of a row.
 *
 * Rows without any index are zeros: other blocks of the same launch write them. Bytes: dy read, dtable written, and for
 * each block of sums (64 KiB of dy) up to 4 KiB of partial sums, most of them in L2. 32 warps on a multiprocessor with
 * AHEAD vectors of 16 bytes in flight per thread are 64 KiB.
 */
#ifndef VJP_CUDA_GATHER_SUMS_CUH
#define VJP_CUDA_GATHER_SUMS_CUH

#include "cuda/index/gather_order.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

/* So many repeats are added in f32 (error below 16 x 6e-8), and such sums in double. */
constexpr int CHAIN_BITS = 4, CHAIN_OF = 1 << CHAIN_BITS; /* two chains share a word of bits */

/* Rows of dy that a thread loads before it adds the first of them, and blocks per multiprocessor. */
constexpr int AHEAD = 4, RESIDENT = 4;

/* The narrowest group, for the shortest rows, and so the largest number of entries of a block. */
constexpr int MIN_LANES = 4, MAX_ENTRIES = THREADS / MIN_LANES * CHAIN_OF;

/* How the order and the rows are split. The width of a row alone decides. */
struct sum_split {
    int lanes, lane_bits;    /* of a group: across a slice */
    int groups, group_bits;  /* of a block */
    int entries, entry_bits; /* of the order, per block */
    int64_t slices;          /* of a row */
};

inline sum_split split_of(int64_t inner, int wide) {
    int64_t vectors = vjp_divide_up(inner, wide);
    int bits = bits_for(31);
    while (1 << bits > MIN_LANES && 1 << (bits - 1) >= vectors)
        bits--;
    int group_bits = bits_for(THREADS - 1) - bits, entry_bits = group_bits + CHAIN_BITS;
    return {
        1 << bits, bits, 1 << group_bits, group_bits, 1 << entry_bits, entry_bits, vjp_divide_up(vectors, 1 << bits)};
}

/* The partial sums of a block: of a list that ends in it, and of one that continues in the next. */
enum { ENDS_HERE, CONTINUES, PARTIALS };

template <class T, class D> struct sum_call {
    vjp_gather_sizes s;
    order o;
    sum_split split;
    const T *dy;
    D *dtable;
    bool add;
    int64_t sums;      /* blocks of sums: parts of the order x outer x slices, slices adjacent */
    int64_t zero_rows; /* of outer x rows: those to clear if no index names them */
};

/* Rows that a block checks for zeros. */
constexpr int ZERO_ROWS = 32;

template <class T> struct sum_space {
    int64_t row[MAX_ENTRIES + 2]; /* of a block's entries, the one before and the one behind; -1: none */
    int64_t from[MAX_ENTRIES];    /* where the entry's row of dy begins */
    unsigned valid[MAX_ENTRIES / 32], ends[MAX_ENTRIES / 32]; /* a bit per entry: it is valid; its list ends with it */
    union {
        float part[PARTIALS][WIDE<T>][THREADS]; /* what a group leaves for its block */
        double sum[WIDE<T>][THREADS];
    };
    bool last;
};

/* A thread's part of a slice: `columns` elements from `column` on, `step` apart (1: one access of 16 bytes). */
template <class T, class D, bool WIDE_ROWS> struct row_sums {
    const sum_call<T, D> &call;
    sum_space<T> &space;
    int64_t block, outer, slice, column, step;
    int group, across, columns;

    __device__ row_sums(const sum_call<T, D> &c, sum_space<T> &sp, int64_t task) : call(c), space(sp) {
        int lanes = c.split.lanes;
        int64_t rest = quotient(task, c.split.slices);
        slice = task - rest * c.split.slices;
        block = quotient(rest, c.s.outer);
        outer = rest - block * c.s.outer;
        group = (int)threadIdx.x >> c.split.lane_bits;
        across = (int)threadIdx.x & (lanes - 1);
        step = WIDE_ROWS ? 1 : lanes;
        column = slice * lanes * WIDE<T> + (WIDE_ROWS ? across * WIDE<T> : across);
        columns = 0;
        if (column < c.s.inner)
            columns = WIDE_ROWS ? WIDE<T> : (int)min(divide_up(c.s.inner - column, step), (int64_t)WIDE<T>);
    }

    /* The rows of the entries of group g; [-1] is the entry before, [CHAIN_OF] the one behind. */
    __device__ const int64_t *rows_of(int g) const {
        return space.row + 1 + g * CHAIN_OF;
    }

    /* Whether one list begins before group g, contains all of it and continues behind it. */
    __device__ bool is_inside_list(int g) const {
        const int64_t *row = rows_of(g);
        return row[-1] >= 0 && row[-1] == row[CHAIN_OF];
    }

    __device__ entry read_entry(int64_t i) const {
        entry e{-1, 0};
        if (i >= 0 && i < call.s.count) e = entry_at(call.o, i);
        if (e.row >= call.s.rows) e.row = -1;
        return e;
    }

    /* One wait for memory: the entries before and behind are read by warps that often have nothing else to read. */
    __device__ void read_entries() {
        int entries = call.split.entries;
        int64_t base = block * entries;
        if (threadIdx.x == THREADS - 1) space.row[0] = read_entry(base - 1).row;
        if (threadIdx.x == THREADS - 33) space.row[1 + entries] = read_entry(base + entries).row;
#pragma unroll 1
        for (int t = threadIdx.x; t < entries; t += THREADS) {
            entry mine = read_entry(base + t), next = read_entry(base + t + 1);
            unsigned valid = __ballot_sync(0xffffffffu, mine.row >= 0);
            unsigned ends = __ballot_sync(0xffffffffu, next.row != mine.row);
            space.row[1 + t] = mine.row;
            space.from[t] = mine.k * call.s.inner;
            if (t % 32 == 0) {
                space.valid[t / 32] = valid;
                space.ends[t / 32] = ends;
            }
        }
    }

    __device__ void write_row(int64_t row, const float (&sum)[WIDE<T>]) const {
        D *to = call.dtable + (outer * call.s.rows + row) * call.s.inner + column;
        if constexpr (WIDE_ROWS) {
#pragma unroll
            for (int part = 0; part < WIDE<T>; part += WIDE<D>) {
                float values[WIDE<D>];
#pragma unroll
                for (int c = 0; c < WIDE<D>; c++)
                    values[c] = sum[part + c];
                if (call.add) {
                    wide<D> old = load_wide(to + part);
#pragma unroll
                    for (int c = 0; c < WIDE<D>; c++)
                        values[c] += to_f32(old.v[c]);
                }
                write_wide(to + part, values, false);
            }
        } else {
#pragma unroll
            for (int c = 0; c < WIDE<T>; c++)
                if (c < columns) write_one(to + c * step, sum[c], call.add);
        }
    }

    __device__ void write_row(int64_t row, const double (&sum)[WIDE<T>]) const {
        float rounded[WIDE<T>];
#pragma unroll
        for (int c = 0; c < WIDE<T>; c++)
            rounded[c] = (float)sum[c];
        write_row(row, rounded);
    }

    __device__ void save_part(int kind, const float (&sum)[WIDE<T>]) const {
#pragma unroll
        for (int c = 0; c < WIDE<T>; c++)
            space.part[kind][c][threadIdx.x] = sum[c];
    }

    /* The group's own lists. */
    __device__ void sum_entries() const {
        constexpr int ahead = WIDE_ROWS ? AHEAD : 2;
        const int64_t *row = rows_of(group), *from = space.from + group * CHAIN_OF;
        const T *dy = call.dy + outer * call.s.count * call.s.inner + column;
        unsigned valid = space.valid[group / 2] >> group % 2 * CHAIN_OF & 0xffffu;
        unsigned ends = space.ends[group / 2] >> group % 2 * CHAIN_OF & valid;
        bool began_before = row[-1] == row[0];
        float sum[WIDE<T>] = {};
#pragma unroll 1
        for (int i = 0; valid >> i; i += ahead) {
            uint4 vector[ahead] = {}; /* otherwise the compiler keeps those of the previous iteration */
            T element[ahead][WIDE<T>] = {};
#pragma unroll
            for (int a = 0; a < ahead; a++) {
                if (!(valid >> (i + a) & 1)) continue;
                if constexpr (WIDE_ROWS)
                    vector[a] = load_raw_once(dy + from[i + a]);
                else
#pragma unroll
                    for (int c = 0; c < WIDE<T>; c++)
                        if (c < columns) element[a][c] = dy[from[i + a] + c * step];
            }
#pragma unroll
            for (int a = 0; a < ahead; a++) {
                if (!(valid >> (i + a) & 1)) continue;
                float values[WIDE<T>];
                if constexpr (WIDE_ROWS) unpack<T>(vector[a], values);
#pragma unroll
                for (int c = 0; c < WIDE<T>; c++) {
                    if (!WIDE_ROWS) values[c] = c < columns ? to_f32(element[a][c]) : 0.0f;
                    sum[c] += values[c];
                }
                if (!(ends >> (i + a) & 1)) continue;
                if (began_before)
                    save_part(ENDS_HERE, sum);
                else
                    write_row(row[i + a], sum);
                began_before = false;
#pragma unroll
                for (int c = 0; c < WIDE<T>; c++)
                    sum[c] = 0;
            }
        }
        if ((valid & ~ends) >> (CHAIN_OF - 1)) save_part(CONTINUES, sum);
    }

    __device__ void add_part(double (&sum)[WIDE<T>], int kind, int g) const {
#pragma unroll
        for (int c = 0; c < WIDE<T>; c++)
            sum[c] += (double)space.part[kind][c][g * call.split.lanes + across];
    }

    /*
     * Adds the sums of a list from group g on, where it begins or continues from before the block; returns whether it
     * ends.
     */
    __device__ bool add_groups(double (&sum)[WIDE<T>], int g, bool begins) const {
        int groups = call.split.groups;
        if (begins) add_part(sum, CONTINUES, g++);
#pragma unroll 1
        for (; g < groups && is_inside_list(g); g++)
            add_part(sum, CONTINUES, g);
        if (g < groups) add_part(sum, ENDS_HERE, g);
        return g < groups;
    }

    __device__ double *partial(int64_t of_block, int kind) const {
        int64_t task = (of_block * call.s.outer + outer) * call.split.slices + slice;
        return call.o.partial + (task * PARTIALS + kind) * (call.split.lanes * WIDE<T>)+across;
    }

    __device__ void save_partial(int kind, const double (&sum)[WIDE<T>]) const {
        double *to = partial(block, kind);
#pragma unroll
        for (int c = 0; c < WIDE<T>; c++)
            __stcg(to + c * call.split.lanes, sum[c]);
    }

    /* Lists that several groups share. */
    __device__ void join_groups() const {
        const int64_t *row = rows_of(group);
        if (group == 0 && row[0] >= 0 && row[-1] == row[0]) {
            double sum[WIDE<T>] = {};
            bool ends = add_groups(sum, 0, false);
            save_partial(ends ? ENDS_HERE : CONTINUES, sum);
        }
        int64_t mine = row[CHAIN_OF - 1];
        if (mine >= 0 && mine == row[CHAIN_OF] && mine != row[-1]) {
            double sum[WIDE<T>] = {};
            if (add_groups(sum, group, true))
                write_row(mine, sum);
            else
                save_partial(CONTINUES, sum);
        }
    }

    /* A list that several blocks share: all of them arrive here, and the last one adds their sums. */
    __device__ void join_blocks(int64_t row) {
        __threadfence();
        __syncthreads();
        int64_t begin = call.o.first[row] >> call.split.entry_bits,
                blocks = (call.o.last[row] >> call.split.entry_bits) - begin + 1;
        if (threadIdx.x == 0) {
            unsigned *arrived = call.o.arrived + (begin * call.s.outer + outer) * call.split.slices + slice;
            space.last = atomicAdd(arrived, 1u) == (unsigned)(blocks - 1);
        }
        __syncthreads();
        if (!space.last) return;
        __threadfence();
        /* Each group adds equally many of them, in order. */
        int64_t each = (blocks + call.split.groups - 1) >> call.split.group_bits;
        int64_t from = min(blocks, group * each), to = min(blocks, from + each);
        double sum[WIDE<T>] = {};
#pragma unroll 1
        for (int64_t b = from; b < to && columns; b++) {
            const double *left = partial(begin + b, b == blocks - 1 ? ENDS_HERE : CONTINUES);
#pragma unroll
            for (int c = 0; c < WIDE<T>; c++)
                sum[c] += __ldcg(left + c * call.split.lanes);
        }
#pragma unroll
        for (int c = 0; c < WIDE<T>; c++)
            space.sum[c][threadIdx.x] = sum[c];
        __syncthreads();
        if (group || !columns) return;
#pragma unroll 1
        for (int g = 1; g * each < blocks; g++)
#pragma unroll
            for (int c = 0; c < WIDE<T>; c++)
                sum[c] += space.sum[c][g * call.split.lanes + across];
        write_row(row, sum);
    }

    __device__ void run() {
        __syncthreads(); /* for the block's previous task */
        read_entries();
        __syncthreads();
        if (columns) sum_entries();
        __syncthreads();
        if (columns) join_groups();
        const int64_t *row = rows_of(0);
        int64_t before = row[-1], begin = row[0], end = row[call.split.entries - 1], behind = row[call.split.entries];
        bool shared_begin = begin >= 0 && before == begin, shared_end = end >= 0 && end == behind && end != before;
#pragma unroll 1
        for (int i = 0; i < 2; i++)
            if (i ? shared_end : shared_begin) join_blocks(i ? end : begin);
    }
};

/*
 * Clears those of ZERO_ROWS rows of outer x rows that no index names: a warp checks all of them and clears its share.
 */
template <class T, class D, bool WIDE_ROWS> __device__ void clear_rows(const sum_call<T, D> &call, int64_t task) {
    const vjp_gather_sizes &s = call.s;
    int lane = threadIdx.x % 32, each = ZERO_ROWS / WARPS;
    int64_t begin = task * ZERO_ROWS, at = begin + lane;
    bool clear = at < call.zero_rows;
    if (clear) clear = !has_entries(call.o, at - quotient(at, s.rows) * s.rows, s.count);
    unsigned mask = __ballot_sync(0xffffffffu, clear);
#pragma unroll 1
    for (int r = (int)threadIdx.x / 32 * each, end = r + each; r < end; r++) {
        if (!(mask >> r & 1)) continue;
        D *to = call.dtable + (begin + r) * s.inner;
        if constexpr (WIDE_ROWS)
#pragma unroll 4
            for (int64_t i = lane * WIDE<D>; i < s.inner; i += 32 * WIDE<D>)
                __stcs(reinterpret_cast<uint4 *>(to + i), make_uint4(0, 0, 0, 0));
        else
            for (int64_t i = lane; i < s.inner; i += 32)
                to[i] = from_f32<D>(0.0f);
    }
}

/*
 * A task per block. All sums come first: they wait for one another, and the zeros hide their end. On an H200, 16384
 * indices in bf16: 0.785 of the limit, 0.75 where sums and zeros alternate. Prefetching rows of dy into L2 made it
 * slower (0.725).
 */
template <class T, class D, bool WIDE_ROWS>
__global__ void __launch_bounds__(THREADS, WIDE_ROWS ? RESIDENT : 3)
    write_rows(const __grid_constant__ sum_call<T, D> call) {
    __shared__ sum_space<T> space;
    begin_chained();
    int64_t zeros = divide_up(call.zero_rows, ZERO_ROWS), tasks = call.sums + zeros;
    for (int64_t i = blockIdx.x; i < tasks; i += gridDim.x) {
        if (i < call.sums)
            row_sums<T, D, WIDE_ROWS>(call, space, i).run();
        else
            clear_rows<T, D, WIDE_ROWS>(call, i - call.sums);
    }
}

} // namespace
} // namespace vjp

#endif
