/* SPDX-License-Identifier: MIT */
/*
 * The order in which gather's backward adds: the indices sorted by row, those of a row in the order of k, and where the
 * list of each row begins and ends.
 *
 * Few indices: a block sorts up to RUN of them by row, stably, in shared memory (a radix sort; row and k share 32
 * bits), while other blocks begin to clear dtable; a second launch merges several such runs, while other blocks clear
 * more. Many indices: CUB's radix sort of (row, k), in the workspace.
 *
 * Bad indices are sorted behind all others.
 */
#ifndef VJP_CUDA_GATHER_ORDER_CUH
#define VJP_CUDA_GATHER_ORDER_CUH

#include <cub/device/device_radix_sort.cuh>

#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

struct order {
    uint32_t *packed; /* [count]: few indices: row << k_bits | k; else NULL, and `row` and `k` */
    int k_bits;
    int64_t *row, *k; /* [count] */
    /*
     * [rows]: of a row's list. They are never cleared: for a row without a list they hold garbage, which has_entries()
     * detects because the entry at `first` is of another row.
     */
    int64_t *first, *last;
    unsigned *arrived; /* [arrivals]: zeros; blocks of sums count themselves here */
    int64_t arrivals;
    double *partial; /* for gather_sums.cuh */
    /* Few indices in several runs: the sorted runs. Many: keys and values before the sort, and CUB's workspace. */
    uint32_t *runs;
    uint64_t *key;
    int64_t *value;
    void *sorting;
    size_t sorting_bytes;
};

struct entry {
    int64_t row, k;
};

__device__ inline entry entry_at(const order &o, int64_t i) {
    if (!o.packed) return {o.row[i], o.k[i]};
    uint32_t both = o.packed[i];
    return {both >> o.k_bits, both & ((1u << o.k_bits) - 1)};
}

/* Whether any index names the row. */
__device__ inline bool has_entries(const order &o, int64_t row, int64_t count) {
    int64_t at = o.first[row];
    return at >= 0 && at < count && entry_at(o, at).row == row;
}

/* Entry i of the order, which may begin or end the list of its row. */
__device__ inline void mark_list(const order &o, int64_t i, int64_t row, bool begins, bool ends) {
    if (begins) o.first[row] = i;
    if (ends) o.last[row] = i;
}

__device__ inline void clear_arrivals(const order &o) {
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < o.arrivals; i += stride)
        o.arrived[i] = 0;
}

/* a / b; in 32 bits where possible, which is a fifth of the instructions. */
__device__ inline int64_t quotient(int64_t a, int64_t b) {
    if (((a | b) >> 32) == 0) return (uint32_t)a / (uint32_t)b;
    return a / b;
}

/* Bits that hold 0 to max. */
inline int bits_for(int64_t max) {
    int bits = 0;
    while (bits < 63 && max >> bits)
        bits++;
    return bits;
}

/* ---- Few indices: runs, each sorted by a block ------------------------------------------------------- */

/*
 * A thread keeps ITEMS keys in registers. On an H200 16384 indices took 36 us as one run, 26 us as four with the zeros
 * written at the same time; with two keys per thread, so eight runs, the backward was slower (0.62 of the limit, 0.71
 * with four runs).
 */
constexpr int SORT_THREADS = 1024, SORT_WARPS = SORT_THREADS / 32, ITEMS = 4, RUN = SORT_THREADS * ITEMS;

/* merge_runs() takes too long to search more runs than this; it is also compiled for few runs. */
constexpr int MAX_RUNS = 64 / ITEMS, FEW_RUNS = 16 / ITEMS;

/* The most bits of a digit: 32 warps x 512 counts of 16 bits are 32 KiB. */
constexpr int DIGIT = 9, BINS = 1 << DIGIT;

constexpr size_t SORT_BYTES = RUN * sizeof(uint32_t) + SORT_WARPS * BINS * sizeof(uint16_t);

struct sorter {
    uint32_t *key;   /* [RUN] */
    uint16_t *count; /* [SORT_WARPS][BINS] */
};

/* A thread's places in its run: first, first + 32 and so on to `end`. Warps follow one another. */
struct places {
    int first, end;
};

__device__ inline places places_of(int length) {
    int each = divide_up(length, SORT_THREADS) * 32, begin = (int)threadIdx.x / 32 * each;
    return {begin + (int)threadIdx.x % 32, min(length, begin + each)};
}

__device__ inline bool is_row(int32_t i, int64_t rows) {
    return i >= 0 && i < rows;
}
__device__ inline bool is_row(int64_t i, int64_t rows) {
    return i >= 0 && i < rows;
}
__device__ inline bool is_row(float x, int64_t rows) {
    return x >= 0 && x <= 16777216.0f && x == truncf(x) && (int64_t)x < rows;
}

/* Reads a thread's keys. All indices are in flight before the first is tested: a test between would wait for each. */
template <class I>
__device__ void read_keys(uint32_t (&key)[ITEMS], const I *index, vjp_dtype type, uint32_t base, places p, int64_t rows,
                          int k_bits, findings f) {
    I raw[ITEMS];
    unsigned bad = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        raw[i] = p.first + 32 * i < p.end ? index[base + p.first + 32 * i] : (I)0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        uint32_t row = (uint32_t)raw[i];
        if (!is_row(raw[i], rows)) {
            row = (uint32_t)rows;
            bad |= 1u << i;
        }
        key[i] = row << k_bits | (base + p.first + 32 * i);
    }
#pragma unroll 1
    for (; bad; bad &= bad - 1) {
        int at = p.first + 32 * (__ffs((int)bad) - 1);
        if (at < p.end) read_index(f, index, type, base + at, rows); /* to report it */
    }
}

/* The lanes of `among` with the same digit. */
__device__ inline unsigned same_digit(unsigned among, unsigned digit, int width) {
    for (int b = 0; b < width; b++) {
        bool bit = digit >> b & 1;
        unsigned set = __ballot_sync(0xffffffffu, bit);
        among &= bit ? set : ~set;
    }
    return among;
}

/* Replaces each warp's count of each digit by the place of its first key with it: by digit, then by warp. */
__device__ inline void scan_counts(const sorter &s, int bins, int (&warp_total)[SORT_WARPS]) {
    int bin = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, total = 0;
    if (bin < bins)
#pragma unroll 8
        for (int w = 0; w < SORT_WARPS; w++)
            total += s.count[w * BINS + bin];
    int before = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) warp_total[warp] = before;
    __syncthreads();
    if (bin >= bins) return;
    int at = before - total;
    for (int w = 0; w < warp; w++)
        at += warp_total[w];
#pragma unroll 8
    for (int w = 0; w < SORT_WARPS; w++) {
        int count = s.count[w * BINS + bin];
        s.count[w * BINS + bin] = (uint16_t)at;
        at += count;
    }
}

/*
 * Sorts by one digit: a thread's keys go to shared memory, to their places in the order of that digit. A key's rank
 * within its warp is the warp's count before this step plus the lanes before it in this step.
 */
__device__ inline void sort_digit(const sorter &s, const uint32_t (&key)[ITEMS], places p, int shift, int width,
                                  int (&warp_total)[SORT_WARPS]) {
    uint16_t *count = s.count + threadIdx.x / 32 * BINS;
    unsigned mask = (1u << width) - 1, lane = threadIdx.x % 32;
    int rank[ITEMS];
    for (unsigned b = lane; b <= mask; b += 32)
        count[b] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        bool mine = p.first + 32 * i < p.end;
        unsigned among = __ballot_sync(0xffffffffu, mine), digit = key[i] >> shift & mask;
        if (!among) continue;
        unsigned same = same_digit(among, digit, width);
        int before = count[digit];
        __syncwarp();
        rank[i] = before + __popc(same & ((1u << lane) - 1));
        if (mine && same >> lane == 1) count[digit] = (uint16_t)(before + __popc(same)); /* the last of them */
        __syncwarp();
    }
    __syncthreads();
    scan_counts(s, 1 << width, warp_total);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (p.first + 32 * i < p.end) s.key[count[key[i] >> shift & mask] + rank[i]] = key[i];
    __syncthreads();
}

/* Sorts run `run` of the indices. If it is the only one, that is the order. */
__device__ inline void sort_run(const order &o, int run, int runs, const void *index, vjp_dtype type, int64_t count,
                                int64_t rows, int row_bits, findings f, void *space) {
    __shared__ int warp_total[SORT_WARPS];
    sorter s{static_cast<uint32_t *>(space), reinterpret_cast<uint16_t *>(static_cast<uint32_t *>(space) + RUN)};
    int base = run * RUN, length = min(RUN, (int)count - base);
    places p = places_of(length);
    uint32_t key[ITEMS];
    if (type == VJP_I32)
        read_keys(key, static_cast<const int32_t *>(index), type, base, p, rows, o.k_bits, f);
    else if (type == VJP_I64)
        read_keys(key, static_cast<const int64_t *>(index), type, base, p, rows, o.k_bits, f);
    else
        read_keys(key, static_cast<const float *>(index), type, base, p, rows, o.k_bits, f);
    int digits = (row_bits + DIGIT - 1) / DIGIT, width = (row_bits + digits - 1) / digits;
    for (int d = 0; d < digits; d++) {
        if (d) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                if (p.first + 32 * i < p.end) key[i] = s.key[p.first + 32 * i];
            __syncthreads();
        }
        sort_digit(s, key, p, o.k_bits + d * width, min(width, row_bits - d * width), warp_total);
    }
    for (int i = threadIdx.x; i < length; i += SORT_THREADS) {
        uint32_t mine = s.key[i], row = mine >> o.k_bits;
        (runs == 1 ? o.packed : o.runs)[base + i] = mine;
        if (runs == 1 && row < rows)
            mark_list(o, i, row, i == 0 || s.key[i - 1] >> o.k_bits != row,
                      i == length - 1 || s.key[i + 1] >> o.k_bits != row);
    }
}

/* Bytes to clear: whole elements, aligned to their size. */
struct zeros {
    char *begin;
    int64_t bytes;
};

/* `writers` blocks clear; this is number `writer`. Elements have at least 2 bytes, blocks at least 8 threads. */
__device__ inline void write_zeros(zeros z, int64_t writer, int64_t writers) {
    int64_t head = min(z.bytes, (int64_t)(-reinterpret_cast<uintptr_t>(z.begin) & 15)), whole = (z.bytes - head) / 16;
    uint4 *to = reinterpret_cast<uint4 *>(z.begin + head);
    for (int64_t i = writer * blockDim.x + threadIdx.x; i < whole; i += writers * blockDim.x)
        __stcs(to + i, make_uint4(0, 0, 0, 0));
    int64_t at = (int64_t)threadIdx.x * 2, tail = head + whole * 16 + at;
    if (writer || threadIdx.x >= 8) return;
    if (at < head) *reinterpret_cast<uint16_t *>(z.begin + at) = 0;
    if (tail < z.bytes) *reinterpret_cast<uint16_t *>(z.begin + tail) = 0;
}

/* The first `runs` blocks sort a run each, the others write zeros. */
__global__ void __launch_bounds__(SORT_THREADS, 1)
    sort_runs(const __grid_constant__ order o, int runs, const void *index, vjp_dtype type, int64_t count, int64_t rows,
              int row_bits, findings f, zeros z) {
    uint4 *space = dynamic_shared<uint4>();
    bool sorts = (int)blockIdx.x < runs;
    let_next_begin();
    if (sorts) { /* prefetch the run's indices into L2 while the previous kernel still runs: 128 bytes per thread */
        int64_t size = type == VJP_I64 ? 8 : 4, at = (int64_t)blockIdx.x * RUN * size + threadIdx.x * 128;
        if (threadIdx.x * 128 < RUN * size && at < count * size) prefetch(static_cast<const char *>(index) + at);
    }
    wait_for_previous();
    clear_arrivals(o);
    if (sorts)
        sort_run(o, (int)blockIdx.x, runs, index, type, count, rows, row_bits, f, space);
    else
        write_zeros(z, blockIdx.x - runs, gridDim.x - runs);
}

/* ---- Few indices: one order of several runs ---------------------------------------------------------- */

constexpr int MERGE_THREADS = 512;

/*
 * Few runs are searched in shared memory, to which each block copies all of them: on an H200, 16384 indices in bf16,
 * 0.75 of the limit for the whole backward, 0.71 where they are searched in L2.
 */
constexpr size_t STAGED_BYTES = sizeof(uint32_t) * FEW_RUNS * RUN;

/*
 * An entry's place is the number of entries before it in each of the runs: no two are equal. A thread per entry; it
 * searches all runs at once, and so waits for memory once per step, not once per step and run. The blocks after the
 * first `mergers` write zeros.
 */
template <int RUNS>
__global__ void __launch_bounds__(MERGE_THREADS)
    merge_runs(const __grid_constant__ order o, int mergers, int64_t count, int64_t rows, zeros z) {
    begin_chained();
    if ((int)blockIdx.x >= mergers) {
        write_zeros(z, blockIdx.x - mergers, gridDim.x - mergers);
        return;
    }
    int i = (int)(blockIdx.x * MERGE_THREADS + threadIdx.x), own = i / RUN;
    const uint32_t *runs = o.runs;
    if constexpr (RUNS == FEW_RUNS) {
        uint4 *staged = dynamic_shared<uint4>();
        /* Whole vectors: the workspace extends beyond the last entry. */
        for (int vector = threadIdx.x; vector * WIDE<uint32_t> < count; vector += MERGE_THREADS)
            copy_async(staged + vector, reinterpret_cast<const uint4 *>(o.runs) + vector);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        runs = reinterpret_cast<const uint32_t *>(staged);
    }
    if (i >= count) return;
    uint32_t mine = runs[i], row = mine >> o.k_bits;
    /* Entries of run r, and how many of them are known to be before this one. */
    int length[RUNS], low[RUNS];
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
        length[r] = max(0, min(RUN, (int)count - r * RUN));
        low[r] = r == own ? i % RUN : 0;
    }
#pragma unroll 1
    for (int step = RUN; step; step /= 2) {
        bool before[RUNS];
#pragma unroll
        for (int r = 0; r < RUNS; r++)
            before[r] = r != own && low[r] + step <= length[r] && runs[r * RUN + low[r] + step - 1] < mine;
#pragma unroll
        for (int r = 0; r < RUNS; r++)
            if (before[r]) low[r] += step;
    }
    bool begins = true, ends = true;
    int place = 0;
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
        int next = low[r] + (r == own);
        const uint32_t *run = runs + r * RUN;
        place += low[r];
        begins &= low[r] == 0 || run[low[r] - 1] >> o.k_bits != row;
        ends &= next >= length[r] || run[next] >> o.k_bits != row;
    }
    o.packed[place] = mine;
    if (row < rows) mark_list(o, place, row, begins, ends);
}

/* ---- Many indices ------------------------------------------------------------------------------------ */

__global__ void make_keys(const __grid_constant__ order o, const void *index, vjp_dtype type, int64_t count,
                          int64_t rows, findings f) {
    begin_chained();
    clear_arrivals(o);
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; k < count; k += stride) {
        int64_t row = read_index(f, index, type, k, rows);
        o.key[k] = (uint64_t)(row < 0 ? rows : row);
        o.value[k] = k;
    }
}

__global__ void find_lists(const __grid_constant__ order o, int64_t count, int64_t rows) {
    begin_chained();
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        int64_t row = o.row[i];
        if (row < rows) mark_list(o, i, row, i == 0 || o.row[i - 1] != row, i == count - 1 || o.row[i + 1] != row);
    }
}

} // namespace
} // namespace vjp

#endif
