/* SPDX-License-Identifier: MIT */
/*
 * cumsum on CUDA: x as [outer, length, inner], running sums along length, from either end, inclusive or exclusive. The
 * backward is the same scan from the other end, which the sizes already express.
 *
 * It moves the fewest bytes possible: x once and y once. The carry is in double, so a long axis loses nothing: 2^25
 * ones reach 33554432. Only sums within 16 terms, or 512 bytes by a tree, are f32. Three paths:
 *
 *     path     when                                    what
 *     short    lines of up to 64 elements (256 if not  many lines in shared memory, each scanned by a thread
 *              a multiple of 16 bytes), or slabs of
 *              up to 1024 with inner below 32
 *     lines    inner is 1                              a warp moves along a line, 512 bytes at a time: a lane
 *                                                      sums 16 bytes, shuffles scan the lanes; no barriers
 *     columns  inner is more than 1                    a thread moves down a column, adjacent threads on
 *                                                      adjacent columns
 *
 * Where there are too few lines or columns to fill the card, the axis is split into segments: one launch sums each, one
 * scans the sums, and one scans the segments from there: x is then read twice. The split follows from the sizes alone,
 * and the order of additions never depends on alignment, so neither do the bits. Everything is read before its place is
 * written, so y may be x.
 */
#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

enum scan_path { SCAN_LINES, SCAN_SHORT, SCAN_COLUMNS };

struct scan_call {
    void *y;
    const void *x;
    double *totals; /* [outer][segments][inner]: first each segment's sum, then the sum of all before it */
    int64_t outer, length, inner;
    int64_t segment, segments; /* places in each, and how many; the last in memory may be shorter */
    bool exclusive, reverse, add;
    scan_path path;
};

/*
 * Segments are counted in the order of the scan. Those of an axis begin at multiples of `segment`, whichever end the
 * scan begins at.
 */
struct segment_range {
    int64_t begin, count;
};

template <bool REVERSE> __device__ segment_range segment_at(const scan_call &c, int64_t i) {
    int64_t begin = (REVERSE ? c.segments - 1 - i : i) * c.segment, left = c.length - begin;
    return {begin, left < c.segment ? left : c.segment};
}

/*
 * Replaces each of N values by its sum over this lane and all before it; N at once, because each shuffle waits for the
 * previous one.
 */
template <class S, int N> __device__ void scan_lanes(S (&x)[N], int lane) {
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        S before[N];
#pragma unroll
        for (int k = 0; k < N; k++)
            before[k] = __shfl_up_sync(0xffffffffu, x[k], by);
#pragma unroll
        for (int k = 0; k < N; k++)
            if (lane >= by) x[k] += before[k];
    }
}

/* ---- Lines ------------------------------------------------------------------------------------------- */

/*
 * A warp has SLICES slices of 512 bytes in each step, whose shuffles overlap, and copies them STAGES - 1 steps ahead: 6
 * KiB per warp, over 100 KiB per multiprocessor. A warp has one line: the multiprocessors are not equally near to
 * memory, and those that finish their blocks early take others, so that all end together (H200, 16384 x 4096 in bf16:
 * 0.935 of the limit; 0.91 with two lines per warp, 0.87 with four).
 */
constexpr int LINE_WARPS = 4;
constexpr int SLICES = 4;
constexpr int STAGES = 4;

/* Blocks that a large Hopper card holds at once. */
constexpr int64_t RESIDENT_BLOCKS = 6 * 132;

template <class T> constexpr int SLICE = 32 * WIDE<T>;
template <class T> constexpr int STEP = SLICES *SLICE<T>;

/* A warp's position: its segment of a line (`item`), and its step. */
template <class T, bool REVERSE> struct cursor {
    int64_t item, first, count; /* the segment is elements [first, first + count) of x */
    int64_t at;                 /* the step begins there, counted from `first` */

    __device__ void enter(const scan_call &c, int64_t to) {
        item = to;
        if (done(c)) return;
        int64_t row = c.segments == 1 ? item : item / c.segments;
        segment_range range = segment_at<REVERSE>(c, item - row * c.segments);
        first = row * c.length + range.begin;
        count = range.count;
        at = REVERSE ? (count - 1) / STEP<T> * STEP<T> : 0;
    }

    __device__ bool done(const scan_call &c) const {
        return item >= c.outer * c.segments;
    }

    /* Elements of the step that are in the segment. */
    __device__ int left() const {
        return count - at < STEP<T> ? (int)(count - at) : STEP<T>;
    }

    /* Whether the segment ends with this step. */
    __device__ bool last() const {
        return REVERSE ? at == 0 : at + STEP<T> >= count;
    }

    __device__ void advance(const scan_call &c, int64_t warps) {
        if (last())
            enter(c, item + warps);
        else
            at += REVERSE ? -STEP<T> : STEP<T>;
    }
};

/*
 * One step in shared memory, in the order of memory. ALIGNED: a thread copies only what it reads itself, 16 bytes at a
 * time, asynchronously. Otherwise the warp copies for all its lanes, an element at a time, so that accesses to memory
 * are still coalesced.
 */
template <class T> struct alignas(16) step_buffer { T v[STEP<T>]; };

template <class T, bool REVERSE>
__device__ void fetch_step(const scan_call &c, step_buffer<T> &buffer, const cursor<T, REVERSE> &to, int place) {
    const T *x = static_cast<const T *>(c.x) + to.first + to.at + place * WIDE<T>;
    T *shared = buffer.v + place * WIDE<T>;
    int left = to.left() - place * WIDE<T>;
    if (left > (SLICES - 1) * SLICE<T>) {
#pragma unroll
        for (int k = 0; k < SLICES; k++)
            copy_async(shared + k * SLICE<T>, x + k * SLICE<T>);
    } else {
        for (int k = 0; k * SLICE<T> < left; k++)
            copy_async(shared + k * SLICE<T>, x + k * SLICE<T>);
    }
    if (c.add)
        for (int k = 0; k * SLICE<T> < left; k++)
            prefetch(static_cast<const T *>(c.y) + to.first + to.at + place * WIDE<T> + k * SLICE<T>);
}

template <class T, bool REVERSE>
__device__ void read_step(const scan_call &c, step_buffer<T> &buffer, const cursor<T, REVERSE> &now, int lane) {
    const T *x = static_cast<const T *>(c.x) + now.first + now.at;
    int left = now.left();
    T values[STEP<T> / 32];
#pragma unroll
    for (int k = 0; k < STEP<T> / 32; k++)
        values[k] = k * 32 + lane < left ? x[k * 32 + lane] : from_f32<T>(0);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < STEP<T> / 32; k++)
        buffer.v[k * 32 + lane] = values[k];
    __syncwarp();
}

template <class T, bool REVERSE>
__device__ void write_step(const scan_call &c, const step_buffer<T> &buffer, const cursor<T, REVERSE> &now, int lane) {
    T *y = static_cast<T *>(c.y) + now.first + now.at;
    int left = now.left();
    __syncwarp();
#pragma unroll 4
    for (int k = 0; k < STEP<T> / 32; k++)
        if (k * 32 + lane < left) y[k * 32 + lane] = buffer.v[k * 32 + lane];
}

/* Computes the running sums of a lane's elements in the order of the scan; returns the last. */
template <class T, bool REVERSE> __device__ float scan_own(float (&sums)[WIDE<T>], const T *own) {
    wide<T> w = load_wide(own);
#pragma unroll
    for (int j = 0; j < WIDE<T>; j++) {
        float x = to_f32(w.v[REVERSE ? WIDE<T> - 1 - j : j]);
        sums[j] = j ? sums[j - 1] + x : x;
    }
    return sums[WIDE<T> - 1];
}

/*
 * N slices from slice `first` on, in the order of the scan: each lane's own sum, what comes before it in the slice,
 * then the carry from slice to slice. SUMS: only the carry is wanted. 16-bit data at full speed leaves room for about
 * 28 instructions per element, so a lane's sums in a slice are scanned in f32 (eight terms and five levels deep).
 */
template <class T, bool ALIGNED, bool REVERSE, bool SUMS, int N>
__device__ void scan_slices(const scan_call &c, step_buffer<T> &buffer, const cursor<T, REVERSE> &now, int first,
                            int lane, double &carry) {
    int base = (REVERSE ? SLICES - 1 - first : first) * SLICE<T> + (REVERSE ? 31 - lane : lane) * WIDE<T>;
    int left = now.left() - base; /* elements of the segment from this lane's first on */
    T *own = buffer.v + base, *y = static_cast<T *>(c.y) + now.first + now.at + base;
    constexpr int BY = REVERSE ? -SLICE<T> : SLICE<T>;
    constexpr bool FULL = N == SLICES; /* then all slices are in the segment */
    float sums[N], before[N], result[WIDE<T>], run[WIDE<T>];
#pragma unroll
    for (int k = 0; k < N; k++)
        sums[k] = !ALIGNED || FULL || k * BY < left ? scan_own<T, REVERSE>(run, own + k * BY) : 0;
    scan_lanes(sums, lane);
#pragma unroll
    for (int k = 0; k < N; k++) {
        before[k] = __shfl_up_sync(0xffffffffu, sums[k], 1);
        sums[k] = __shfl_sync(0xffffffffu, sums[k], 31);
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
        float start = (float)(carry + (lane == 0 ? 0 : (double)before[k]));
        carry += (double)sums[k];
        if (SUMS || (!FULL && k * BY >= left)) continue;
        scan_own<T, REVERSE>(run, own + k * BY);
        if (c.exclusive) {
#pragma unroll
            for (int j = 0; j < WIDE<T>; j++)
                result[REVERSE ? WIDE<T> - 1 - j : j] = j ? start + run[j - 1] : start;
        } else {
#pragma unroll
            for (int j = 0; j < WIDE<T>; j++)
                result[REVERSE ? WIDE<T> - 1 - j : j] = start + run[j];
        }
        if constexpr (ALIGNED) {
            write_wide(y + k * BY, result, c.add);
        } else {
            wide<T> w;
#pragma unroll
            for (int j = 0; j < WIDE<T>; j++)
                w.v[j] = from_f32<T>(c.add && k * BY + j < left ? to_f32(y[k * BY + j]) + result[j] : result[j]);
            store_wide(own + k * BY, w);
        }
    }
}

template <class T, bool ALIGNED, bool REVERSE, bool SUMS>
__global__ void __launch_bounds__(32 * LINE_WARPS) scan_lines(scan_call c) {
    constexpr int DEPTH = ALIGNED ? STAGES : 1;
    __shared__ step_buffer<T> buffers[LINE_WARPS][DEPTH];
    let_next_begin();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = REVERSE ? 31 - lane : lane;
    int64_t warps = (int64_t)gridDim.x * LINE_WARPS, begin = (int64_t)blockIdx.x * LINE_WARPS + warp;
    step_buffer<T>(&buffer)[DEPTH] = buffers[warp];
    cursor<T, REVERSE> now, ahead;
    now.enter(c, begin);
    ahead.enter(c, begin);
    /* Blocks that may begin before the previous kernel ends bring their first steps into L2 meanwhile. */
    if (ALIGNED && blockIdx.x < RESIDENT_BLOCKS) {
        cursor<T, REVERSE> first = now;
        for (int stage = 0; stage < DEPTH - 1 && !first.done(c); stage++, first.advance(c, warps))
            for (int k = 0; k * SLICE<T> + place * WIDE<T> < first.left(); k++)
                prefetch(static_cast<const T *>(c.x) + first.first + first.at + place * WIDE<T> + k * SLICE<T>);
    }
    wait_for_previous();
    auto fetch = [&](int stage) {
        if (!ahead.done(c)) {
            fetch_step(c, buffer[stage], ahead, place);
            ahead.advance(c, warps);
        }
        commit_copies();
    };
    if constexpr (ALIGNED)
        for (int stage = 0; stage < DEPTH - 1; stage++)
            fetch(stage);
    bool fresh = true;
    double carry = 0;
    for (int stage = 0; !now.done(c); stage = (stage + 1) % DEPTH) {
        if constexpr (ALIGNED) {
            fetch((stage + DEPTH - 1) % DEPTH);
            wait_copies<DEPTH - 1>();
        } else {
            read_step(c, buffer[0], now, lane);
        }
        if (fresh) carry = SUMS || c.segments == 1 ? 0 : c.totals[now.item];
        if (now.left() == STEP<T>) {
            scan_slices<T, ALIGNED, REVERSE, SUMS, SLICES>(c, buffer[stage], now, 0, lane, carry);
        } else {
#pragma unroll 1
            for (int k = 0; k < SLICES; k++)
                if ((REVERSE ? SLICES - 1 - k : k) * SLICE<T> < now.left())
                    scan_slices<T, ALIGNED, REVERSE, SUMS, 1>(c, buffer[stage], now, k, lane, carry);
        }
        if constexpr (!ALIGNED && !SUMS) write_step(c, buffer[0], now, lane);
        fresh = now.last();
        if (SUMS && fresh && lane == 0) c.totals[now.item] = carry;
        now.advance(c, warps);
    }
}

/* ---- Short lines ------------------------------------------------------------------------------------- */

/*
 * A tile is as many whole slabs of length x inner elements as fit into TILE floats, read and written contiguously. The
 * pitch is odd, so that threads that scan a line each use different banks.
 */
constexpr int TILE = 4096;
constexpr int SHORT_THREADS = 128;

/* Calls f(i, place) for elements [0, count) of a tile in order, with the place of each in shared memory. */
template <class F> __device__ void for_tile(int count, int slab, int pitch, F f) {
    int row = threadIdx.x / slab, column = threadIdx.x % slab;
    int rows = SHORT_THREADS / slab, columns = SHORT_THREADS % slab;
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += SHORT_THREADS) {
        f(i, row * pitch + column);
        row += rows;
        column += columns;
        if (column >= slab) {
            column -= slab;
            row++;
        }
    }
}

template <class T> __global__ void __launch_bounds__(SHORT_THREADS) scan_short(scan_call c) {
    __shared__ float tile[TILE];
    begin_chained();
    int slab = (int)(c.length * c.inner), pitch = slab | 1, slabs = TILE / pitch;
    int length = (int)c.length, inner = (int)c.inner;
    for (int64_t first = (int64_t)blockIdx.x * slabs; first < c.outer; first += (int64_t)gridDim.x * slabs) {
        int here = (int)(c.outer - first < slabs ? c.outer - first : slabs);
        const T *x = static_cast<const T *>(c.x) + first * slab;
        T *y = static_cast<T *>(c.y) + first * slab;
        for_tile(here * slab, slab, pitch, [&](int i, int place) { tile[place] = to_f32(x[i]); });
        __syncthreads();
        for (int line = threadIdx.x; line < here * inner; line += SHORT_THREADS) {
            float *at = tile + line / inner * pitch + line % inner;
            int by = inner;
            if (c.reverse) {
                at += (length - 1) * inner;
                by = -inner;
            }
            double sum = 0;
#pragma unroll 4
            for (int i = 0; i < length; i++, at += by) {
                double next = sum + (double)*at;
                *at = (float)(c.exclusive ? sum : next);
                sum = next;
            }
        }
        __syncthreads();
        for_tile(here * slab, slab, pitch, [&](int i, int place) { write_one(y + i, tile[place], c.add); });
        __syncthreads();
    }
}

/* ---- Columns ----------------------------------------------------------------------------------------- */

constexpr int COLUMN_THREADS = 256;

/* Rows that a thread loads before it adds the first, and the longest chain in f32. */
constexpr int ROWS = 16;

template <class T, bool REVERSE, bool SUMS>
__global__ void __launch_bounds__(COLUMN_THREADS, 4) scan_columns(scan_call c) {
    begin_chained();
    int64_t all = c.outer * c.segments * c.inner, threads = (int64_t)gridDim.x * COLUMN_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * COLUMN_THREADS + threadIdx.x; i < all; i += threads) {
        int64_t item = i / c.inner, column = i - item * c.inner;
        int64_t outer = c.segments == 1 ? item : item / c.segments;
        segment_range range = segment_at<REVERSE>(c, item - outer * c.segments);
        int64_t place = range.begin + (REVERSE ? range.count - 1 : 0), by = REVERSE ? -c.inner : c.inner;
        int64_t start = (outer * c.length + place) * c.inner + column;
        const T *x = static_cast<const T *>(c.x) + start;
        T *y = static_cast<T *>(c.y) + start;
        double carry = SUMS || c.segments == 1 ? 0 : c.totals[i];
        int64_t left = range.count;
        for (; left >= ROWS; left -= ROWS, x += ROWS * by, y += ROWS * by) {
            T values[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                values[r] = x[r * by];
            if (!SUMS && c.add)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    prefetch(y + r * by);
            float before = (float)carry, sum = 0;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float next = sum + to_f32(values[r]);
                if (!SUMS) write_one(y + r * by, before + (c.exclusive ? sum : next), c.add);
                sum = next;
            }
            carry += (double)sum;
        }
        float before = (float)carry, sum = 0;
        for (; left > 0; left--, x += by, y += by) {
            float next = sum + to_f32(*x);
            if (!SUMS) write_one(y, before + (c.exclusive ? sum : next), c.add);
            sum = next;
        }
        carry += (double)sum;
        if (SUMS) c.totals[i] = carry;
    }
}

/* ---- Sums of segments -------------------------------------------------------------------------------- */

constexpr int MAX_TOTAL_THREADS = 1024;

/*
 * Replaces the sums of a line's segments by the sum of all before each. One block per line, so one loop is enough for
 * any number.
 */
__global__ void __launch_bounds__(MAX_TOTAL_THREADS) scan_totals(scan_call c) {
    __shared__ double warp_totals[MAX_TOTAL_THREADS / 32];
    begin_chained();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int64_t line = blockIdx.x; line < c.outer * c.inner; line += gridDim.x) {
        int64_t outer = line / c.inner;
        double *totals = c.totals + outer * c.segments * c.inner + (line - outer * c.inner);
        double carry = 0;
        for (int64_t first = 0; first < c.segments; first += blockDim.x) {
            int64_t i = first + threadIdx.x;
            double sums[1] = {i < c.segments ? totals[i * c.inner] : 0};
            scan_lanes(sums, lane);
            double before = __shfl_up_sync(0xffffffffu, sums[0], 1);
            if (lane == 31) warp_totals[warp] = sums[0];
            __syncthreads();
            double start = carry;
            for (int w = 0; w < warps; w++) {
                if (w == warp) start = carry;
                carry += warp_totals[w];
            }
            if (i < c.segments) totals[i * c.inner] = lane == 0 ? start : start + before;
            __syncthreads();
        }
    }
}

/* ---- The split --------------------------------------------------------------------------------------- */

/* The longest line that one thread scans, and the largest slab of a tile where lines are adjacent. */
constexpr int64_t SHORT_LINE = 64, SHORT_ODD_LINE = 256, SHORT_SLAB = 1024;

/* From this width on adjacent columns are read efficiently as they are. */
constexpr int64_t WIDE_INNER = 32;

/*
 * Fewer lines than this leave a card idle: its warps have less than 32 KiB in flight per multiprocessor. Then the axis
 * is split into as many segments as all resident warps, of at least MIN_LINE_STEPS steps: with fewer the extra launches
 * would cost more.
 */
constexpr int64_t ENOUGH_LINES = 512, MAX_LINE_SEGMENTS = 3072, MIN_LINE_STEPS = 4;

/* The same for columns, in threads and rows. */
constexpr int64_t ENOUGH_COLUMNS = 65536, MAX_COLUMN_SEGMENTS = 131072, MIN_COLUMN_ROWS = 64;

/* Depends on the sizes and the dtype only. */
scan_call plan(const vjp_work *work) {
    vjp_cumsum_sizes s = vjp_cumsum_sizes_of(work);
    int64_t wide = work->storage == VJP_F32 ? WIDE<float> : WIDE<bf16>, step = SLICES * 32 * wide;
    scan_call c{};
    c.outer = s.outer;
    c.length = s.length;
    c.inner = s.inner;
    c.exclusive = s.exclusive;
    c.reverse = s.reverse;
    c.segment = s.length;
    c.segments = 1;
    if (s.outer == 0 || s.length == 0 || s.inner == 0) return c;
    if (s.inner == 1)
        c.path = s.length <= SHORT_LINE || (s.length <= SHORT_ODD_LINE && s.length % wide) ? SCAN_SHORT : SCAN_LINES;
    else
        c.path = s.inner < WIDE_INNER && s.length <= SHORT_SLAB / s.inner ? SCAN_SHORT : SCAN_COLUMNS;
    int64_t lines = s.outer * s.inner, segments = 1, unit = 1;
    if (c.path == SCAN_LINES && lines < ENOUGH_LINES) {
        unit = step;
        segments = vjp_min(MAX_LINE_SEGMENTS / lines, s.length / (MIN_LINE_STEPS * step));
    } else if (c.path == SCAN_COLUMNS && lines < ENOUGH_COLUMNS) {
        segments = vjp_min(MAX_COLUMN_SEGMENTS / lines, s.length / MIN_COLUMN_ROWS);
    }
    if (segments > 1) {
        c.segment = vjp_round_up(vjp_divide_up(s.length, segments), unit);
        c.segments = vjp_divide_up(s.length, c.segment);
    }
    return c;
}

template <class T, bool SUMS> vjp_status enqueue(const vjp_work *work, const scan_call &c) {
    if (c.path == SCAN_SHORT) {
        int64_t slabs = TILE / ((c.length * c.inner) | 1);
        return launch(work, true, scan_short<T>, vjp_min(vjp_divide_up(c.outer, slabs), MAX_BLOCKS), SHORT_THREADS, 0,
                      c);
    }
    return with_bool(c.reverse, [&](auto reverse) {
        constexpr bool REVERSE = decltype(reverse)::value;
        if (c.path == SCAN_COLUMNS) {
            int64_t blocks = vjp_divide_up(c.outer * c.segments * c.inner, COLUMN_THREADS);
            return launch(work, true, scan_columns<T, REVERSE, SUMS>, vjp_min(blocks, MAX_BLOCKS), COLUMN_THREADS, 0,
                          c);
        }
        bool aligned = c.length % WIDE<T> == 0 && is_aligned(c.x, 16) && is_aligned(c.y, 16);
        int64_t blocks = vjp_divide_up(c.outer * c.segments, LINE_WARPS);
        return launch(work, true, aligned ? scan_lines<T, true, REVERSE, SUMS> : scan_lines<T, false, REVERSE, SUMS>,
                      vjp_min(blocks, MAX_BLOCKS), 32 * LINE_WARPS, 0, c);
    });
}

vjp_status run(const vjp_work *work) {
    scan_call c = plan(work);
    c.y = vjp_data(work, CUMSUM_Y);
    c.x = vjp_data(work, CUMSUM_X);
    c.add = vjp_accumulates(work, CUMSUM_Y);
    c.totals = static_cast<double *>(work->workspace);
    if (!c.y || c.outer == 0 || c.length == 0 || c.inner == 0) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (c.segments > 1) {
            scan_call sums = c;
            sums.add = false;
            vjp_status status = enqueue<T, true>(work, sums);
            int threads = (int)vjp_min(vjp_round_up(c.segments, 32), MAX_TOTAL_THREADS);
            if (status == VJP_OK) status = launch(work, true, scan_totals, c.outer * c.inner, threads, 0, c);
            if (status != VJP_OK) return status;
        }
        return enqueue<T, false>(work, c);
    });
}

size_t workspace(const vjp_work *work) {
    scan_call c = plan(work);
    bool wanted = work->tensor[CUMSUM_Y] && c.segments > 1;
    return wanted ? (size_t)(c.outer * c.segments * c.inner) * sizeof(double) : 0;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_cumsum[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_cumsum[VJP_PASS_COUNT] = {
    {vjp::run, vjp::workspace, VJP_STORAGE_16_32},
    {vjp::run, vjp::workspace, VJP_STORAGE_16_32},
};
}
