/* SPDX-License-Identifier: MIT */
/*
 * What the kernels of loss_rows.cu share: a row of logits as 16-byte windows, and the sums of a row.
 *
 * Windows. A row begins anywhere: 50257 classes of 2 bytes are no multiple of 16. So a row is read as the windows of 16
 * bytes that it touches, counted from the beginning of the tensor; only its first and last window may belong to a
 * neighbour in part, and are then accessed an element at a time. In a tensor that does not begin at a multiple of 16
 * bytes every window is, in the same places: the order of additions depends on sizes alone. The thread that reads a
 * window is the one that writes it, afterwards, so dlogits may be logits.
 *
 * Sums. In one pass, with a running maximum: the sum so far is scaled down whenever the maximum rises. A batch of
 * windows (16 or 32 terms) is summed in f32, batches, lanes and warps in double. Elements outside the row are -Inf,
 * whose exponential is 0.
 *
 * Exponentials. f32 rows use expf (1 unit in the last place). For 16-bit rows it is 2^(x log2(e)) by the hardware, off
 * by 2^-22 + |x| 2^-22, relatively: weighted by e^x that is 4e-7 of a sum at most, where 1e-5 is allowed.
 */
#ifndef VJP_CUDA_ROW_SUMS_CUH
#define VJP_CUDA_ROW_SUMS_CUH

#include "cuda/common/kernel.cuh"
#include "cuda/loss/loss_rows.cuh"

namespace vjp {
namespace {

__device__ inline int64_t chunk_begin(const loss_call &c, int64_t chunk) {
    return chunk * c.chunk_rows + (chunk < c.longer_chunks ? chunk : c.longer_chunks);
}

/*
 * The row's class, or -1 if the row takes no part: its target is ignore_index, or neither that nor a class, which one
 * thread reports.
 */
__device__ inline int64_t class_of(const loss_call &c, int64_t row, bool reports) {
    int64_t i;
    row += c.first_row;
    bool whole = true;
    if (c.target_type == VJP_I32) {
        i = static_cast<const int32_t *>(c.target)[row];
    } else if (c.target_type == VJP_I64) {
        i = static_cast<const int64_t *>(c.target)[row];
    } else {
        float x = static_cast<const float *>(c.target)[row];
        whole = fabsf(x) <= 16777216.0f && x == truncf(x);
        i = whole ? (int64_t)x : -1;
    }
    if (whole && i == c.ignore_index) return -1;
    if (i >= 0 && i < c.classes) return i;
    if (reports) read_index(c.found, c.target, c.target_type, row, c.classes);
    return -1;
}

/* ---- A row as windows -------------------------------------------------------------------------------- */

/* Windows that a thread has in flight at once. */
constexpr int BATCH = 4;

template <class T> struct row_windows {
    int64_t from;        /* the row's first element in the tensor */
    int64_t width;       /* its elements */
    int64_t first, last; /* windows [first, last) are whole */
    int64_t count;       /* of all windows, from 0 */
    int shift;           /* elements of window 0 that precede the row */

    __device__ row_windows(const loss_call &c, int64_t row) : from(row * c.width), width(c.width) {
        shift = (int)(from & (WIDE<T> - 1));
        count = divide_up(shift + width, WIDE<T>);
        first = shift ? 1 : 0;
        last = (shift + width) / WIDE<T>;
    }

    /* Position in the row of a window's first element; negative for a window 0 that the row does not fill. */
    __device__ int64_t at(int64_t window) const {
        return window * WIDE<T> - shift;
    }

    __device__ bool is_whole(int64_t window) const {
        return window >= first && window < last;
    }

    __device__ bool has(int64_t i) const {
        return i >= 0 && i < width;
    }

    /*
     * The window that a thread of a block takes in addition to whole ones: the first, the last, or none (-1). The last
     * two threads take them, because theirs is the warp with the fewest whole windows.
     */
    __device__ int64_t partial() const {
        int from_last = (int)(blockDim.x - 1 - threadIdx.x);
        if (from_last == 0) return first > 0 ? 0 : -1;
        return from_last == 1 && last < count && count > first ? count - 1 : -1;
    }
};

/* 16 bytes of -Inf. */
template <class T> __device__ uint4 no_window() {
    float v[WIDE<T>];
#pragma unroll
    for (int e = 0; e < WIDE<T>; e++)
        v[e] = -CUDART_INF_F;
    return pack<T>(v);
}

template <class T> __device__ uint4 load_elements(const row_windows<T> &r, const T *row, int64_t i) {
    float v[WIDE<T>];
#pragma unroll
    for (int e = 0; e < WIDE<T>; e++)
        v[e] = r.has(i + e) ? to_f32(row[i + e]) : -CUDART_INF_F;
    return pack<T>(v);
}

/* A whole window. ONCE: the row is not read a second time. */
template <class T, bool ONCE, bool ALIGNED>
__device__ uint4 load_whole(const row_windows<T> &r, const T *row, int64_t i) {
    if constexpr (!ALIGNED) return load_elements(r, row, i);
    if constexpr (ONCE) return load_raw_once(row + i);
    return *reinterpret_cast<const uint4 *>(row + i);
}

template <class T> __device__ uint4 load_window(const row_windows<T> &r, const T *row, int64_t window, bool aligned) {
    int64_t i = r.at(window);
    return aligned && r.is_whole(window) ? load_raw_once(row + i) : load_elements(r, row, i);
}

/* Assigns or adds d to the elements of a window that are in the row. */
template <class T>
__device__ void write_window(const row_windows<T> &r, T *to, int64_t i, float (&d)[WIDE<T>], bool wide, bool add) {
    if (!wide) {
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++)
            if (r.has(i + e)) write_one(to + i + e, d[e], add);
        return;
    }
    if (add) {
        float old[WIDE<T>];
        unpack<T>(load_raw_once(to + i), old);
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++)
            d[e] += old[e];
    }
    __stcs(reinterpret_cast<uint4 *>(to + i), pack<T>(d));
}

/* ---- Exponentials ------------------------------------------------------------------------------------ */

template <class T> __device__ float exp_of(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    return exp2_denormal(x * CUDART_L2E_F);
}

/* A term of a sum that has a 1: results below 1e-38 may be 0, which saves three instructions. */
template <class T> __device__ float exp_term(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    return exp2_fast(x * CUDART_L2E_F);
}

/* log(x) to 1e-7, relatively, also near 1: the part of x that f32 does not hold is added to first order. */
__device__ inline double log_of(double x) {
    float high = (float)x, low = (float)(x - (double)high), log = logf(high);
    return low == 0 ? (double)log : (double)log + (double)(low / high);
}

/* ---- Sums of a row ----------------------------------------------------------------------------------- */

/* Of the elements that a thread, a warp or a block has seen. */
struct row_sums {
    float max;    /* -Inf where all were */
    double sum;   /* of exp(z - max) */
    double below; /* of max - z; with label smoothing, as is */
    /* How many they were: fewer than 2^32 of a warp, one of 16, as long as a row has fewer than 2^36. */
    unsigned seen;
};

/* Avoids the NaN of -Inf - -Inf: exp(-Inf - 0) is 0 as it should be. */
__device__ inline float finite_shift(float max) {
    return max == -CUDART_INF_F ? 0.0f : max;
}

/* The sums for a maximum that is at least as large. */
template <class T, bool SMOOTH> __device__ void raise(row_sums &s, float max) {
    s.sum *= (double)exp_of<T>(s.max - finite_shift(max));
    if (SMOOTH) s.below += (double)s.seen * ((double)finite_shift(max) - (double)finite_shift(s.max));
    s.max = max;
}

/* The larger ones of two windows' elements; a NaN is never the larger. */
template <class T> __device__ unsigned larger(unsigned a, unsigned b) {
    if constexpr (sizeof(T) == 4) {
        return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    } else {
        using two = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
        two max = __hmax2(*reinterpret_cast<two *>(&a), *reinterpret_cast<two *>(&b));
        return *reinterpret_cast<unsigned *>(&max);
    }
}

template <class T, int N> __device__ float max_of(const uint4 (&raw)[N]) {
    uint4 all = raw[0];
#pragma unroll
    for (int j = 1; j < N; j++)
        all = {larger<T>(all.x, raw[j].x), larger<T>(all.y, raw[j].y), larger<T>(all.z, raw[j].z),
               larger<T>(all.w, raw[j].w)};
    float v[WIDE<T>], max = -CUDART_INF_F;
    unpack<T>(all, v);
#pragma unroll
    for (int e = 0; e < WIDE<T>; e++)
        max = fmaxf(max, v[e]);
    return max;
}

/*
 * Adds N windows; elements [begin[j], end[j]) of window j are in the row, the others are -Inf. max - z is summed in
 * 64ths: up to 32 of them, each at most twice the largest number.
 */
template <class T, bool SMOOTH, int N>
__device__ void add_windows(row_sums &s, const uint4 (&raw)[N], const int (&begin)[N], const int (&end)[N]) {
    constexpr float SHARE = 1.0f / 64;
    static_assert(2 * BATCH * WIDE<T> * SHARE <= 1 && N <= BATCH);
    float max = max_of<T>(raw);
    if (max > s.max) raise<T, SMOOTH>(s, max);
    float shift = finite_shift(s.max), sum[2] = {0, 0}, below[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < N; j++) {
        float v[WIDE<T>];
        unpack<T>(raw[j], v);
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++) {
            sum[e % 2] += exp_term<T>(v[e] - shift);
            if (SMOOTH && e >= begin[j] && e < end[j]) below[e % 2] += fmaf(v[e], -SHARE, shift * SHARE);
        }
        if (SMOOTH) s.seen += (unsigned)(end[j] - begin[j]);
    }
    s.sum += (double)(sum[0] + sum[1]);
    if (SMOOTH) s.below += (double)(below[0] + below[1]) * (1 / (double)SHARE);
}

/* The elements of a window that are in the row. */
template <class T> __device__ void window_range(const row_windows<T> &r, int64_t i, int &begin, int &end) {
    begin = i < 0 ? (int)-i : 0;
    end = r.width - i < WIDE<T> ? (int)(r.width - i) : WIDE<T>;
}

/* Merges the sums of 2, 4 .. 32 adjacent lanes, the same bits in all of them. Every lane of the warp must call it. */
template <class T, bool SMOOTH> __device__ void merge_lanes(row_sums &s, int lanes) {
    float max = s.max;
#pragma unroll
    for (int step = 16; step; step /= 2)
        if (step < lanes) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
    raise<T, SMOOTH>(s, max);
#pragma unroll
    for (int step = 16; step; step /= 2)
        if (step < lanes) {
            s.sum += __shfl_xor_sync(0xffffffffu, s.sum, step);
            if (SMOOTH) s.below += __shfl_xor_sync(0xffffffffu, s.below, step);
            if (SMOOTH) s.seen += __shfl_xor_sync(0xffffffffu, s.seen, step);
        }
}

/* ---- A row by a block -------------------------------------------------------------------------------- */

/* The warps' sums; rows alternate between two buffers, so that a row needs one barrier. */
template <int THREADS> struct warp_sums { row_sums warp[2][THREADS / 32]; };

/*
 * Adds the thread's whole windows. The next batch is loaded before a batch is added, where registers allow it: label
 * smoothing needs them for its sums.
 */
template <class T, bool SMOOTH, bool ONCE, bool ALIGNED, int THREADS>
__device__ void add_whole_windows(row_sums &s, const row_windows<T> &r, const T *row) {
    auto load = [&](uint4(&raw)[BATCH], int64_t window) {
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            raw[j] = window + j * THREADS < r.last ? load_whole<T, ONCE, ALIGNED>(r, row, r.at(window + j * THREADS))
                                                   : no_window<T>();
    };
    int64_t window = r.first + threadIdx.x;
    constexpr bool EARLY = ALIGNED && !SMOOTH;
    uint4 next[BATCH];
    if (EARLY) load(next, window);
    for (; window < r.last; window += BATCH * THREADS) {
        uint4 raw[BATCH];
        int begin[BATCH], end[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (EARLY) raw[j] = next[j];
            begin[j] = 0;
            end[j] = window + j * THREADS < r.last ? WIDE<T> : 0;
        }
        if (EARLY)
            load(next, window + BATCH * THREADS);
        else
            load(raw, window);
        add_windows<T, SMOOTH>(s, raw, begin, end);
    }
}

/* The sums of a row, in every thread of the block. */
template <class T, bool SMOOTH, bool ONCE, int THREADS>
__device__ row_sums measure(const loss_call &c, const row_windows<T> &r, warp_sums<THREADS> &shared, int &turn) {
    static_assert(THREADS <= 1024);
    const T *row = static_cast<const T *>(c.logits) + r.from;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    row_sums s = {-CUDART_INF_F, 0, 0, 0};
    if (c.aligned)
        add_whole_windows<T, SMOOTH, ONCE, true, THREADS>(s, r, row);
    else
        add_whole_windows<T, SMOOTH, ONCE, false, THREADS>(s, r, row);
    int64_t window = r.partial();
    if (window >= 0) {
        uint4 raw[1] = {load_elements(r, row, r.at(window))};
        int begin[1], end[1];
        window_range(r, r.at(window), begin[0], end[0]);
        add_windows<T, SMOOTH>(s, raw, begin, end);
    }
    __syncwarp();
    merge_lanes<T, SMOOTH>(s, 32);
    if (lane == 0) shared.warp[turn][warp] = s;
    __syncthreads();
    s = {-CUDART_INF_F, 0, 0, 0};
    if (lane < THREADS / 32) s = shared.warp[turn][lane];
    merge_lanes<T, SMOOTH>(s, 32);
    turn ^= 1;
    return s;
}

} // namespace
} // namespace vjp

#endif
