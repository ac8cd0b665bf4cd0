/* SPDX-License-Identifier: MIT */
/*
 * What the kernels share: storage types, 16-byte accesses, sums over warps and blocks in a fixed order, parameters of
 * either type, and chained launches. An index is read with read_index() (findings.cuh).
 */
#ifndef VJP_CUDA_KERNEL_CUH
#define VJP_CUDA_KERNEL_CUH

#include "cuda/common/findings.cuh"
#include "cuda/common/instructions.cuh"

namespace vjp {

/*
 * Calls f with a value of the C++ type of a storage dtype: with_type(dtype, [&](auto zero) { using T = decltype(zero);
 * ... }).
 */
template <class F> auto with_type(vjp_dtype dtype, F f) {
    switch (dtype) {
    case VJP_BF16: return f(bf16{});
    case VJP_F16: return f(f16{});
    default: return f(float{});
    }
}

/* Calls f with std::true_type or std::false_type. */
template <class F> auto with_bool(bool b, F f) {
    return b ? f(std::true_type{}) : f(std::false_type{});
}

/* a / b rounded upwards, for kernels; the host has vjp_divide_up(). */
template <class A, class B> __device__ constexpr auto divide_up(A a, B b) {
    return (a + b - 1) / b;
}

__device__ inline float to_f32(float x) {
    return x;
}
__device__ inline float to_f32(bf16 x) {
    return __bfloat162float(x);
}
__device__ inline float to_f32(f16 x) {
    return __half2float(x);
}

template <class T> __device__ T from_f32(float x);
template <> __device__ inline float from_f32<float>(float x) {
    return x;
}
template <> __device__ inline bf16 from_f32<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ inline f16 from_f32<f16>(float x) {
    return __float2half_rn(x);
}

/* ---- Blocks of a multiprocessor ---------------------------------------------------------------------- */

/* Threads that a multiprocessor holds: fewer on the cards that are not made for data centres (8.6, 8.9, 12.x). */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
constexpr int MULTIPROCESSOR_THREADS = 2048;
#else
constexpr int MULTIPROCESSOR_THREADS = 1536;
#endif

/*
 * For __launch_bounds__: `wanted` blocks of `threads` threads on a multiprocessor at once, or as many as it holds. A
 * bound above that does not assemble.
 */
constexpr int resident_blocks(int threads, int wanted) {
    return wanted * threads <= MULTIPROCESSOR_THREADS ? wanted : MULTIPROCESSOR_THREADS / threads;
}

/* ---- Sixteen bytes at a time ------------------------------------------------------------------------- */

/* Elements in 16 bytes. */
template <class T> constexpr int WIDE = 16 / (int)sizeof(T);

/* 16 bytes of T; the address is aligned to 16. */
template <class T> struct alignas(16) wide { T v[WIDE<T>]; };

template <class T> __device__ wide<T> load_wide(const T *from) {
    wide<T> r;
    *reinterpret_cast<uint4 *>(&r) = *reinterpret_cast<const uint4 *>(from);
    return r;
}

/* For data that is read once: it does not evict other data from the first-level cache. */
template <class T> __device__ wide<T> load_wide_once(const T *from) {
    wide<T> r;
    *reinterpret_cast<uint4 *>(&r) = __ldcs(reinterpret_cast<const uint4 *>(from));
    return r;
}

template <class T> __device__ void store_wide(T *to, const wide<T> &w) {
    *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(&w);
}

/* For data that is not read again soon. */
template <class T> __device__ void store_wide_once(T *to, const wide<T> &w) {
    __stcs(reinterpret_cast<uint4 *>(to), *reinterpret_cast<const uint4 *>(&w));
}

/*
 * 16 bytes as four registers, two 16-bit elements in each, until they are used: in a struct of elements the compiler
 * would keep each element in its own register.
 */
template <class T> __device__ uint4 load_raw_once(const T *from) {
    return __ldcs(reinterpret_cast<const uint4 *>(from));
}

template <class T> __device__ void unpack(uint4 raw, float (&v)[WIDE<T>]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; w++)
        if constexpr (sizeof(T) == 4) {
            v[w] = __uint_as_float(words[w]);
        } else if constexpr (__is_same(T, bf16)) {
            v[2 * w] = __uint_as_float(words[w] << 16);
            v[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
        } else {
            float2 two = __half22float2(*reinterpret_cast<const __half2 *>(&words[w]));
            v[2 * w] = two.x;
            v[2 * w + 1] = two.y;
        }
}

template <class T> __device__ uint4 pack(const float (&v)[WIDE<T>]) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; w++)
        if constexpr (sizeof(T) == 4) {
            words[w] = __float_as_uint(v[w]);
        } else if constexpr (__is_same(T, bf16)) {
            __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * w], v[2 * w + 1]);
            words[w] = *reinterpret_cast<unsigned *>(&two);
        } else {
            __half2 two = __floats2half2_rn(v[2 * w], v[2 * w + 1]);
            words[w] = *reinterpret_cast<unsigned *>(&two);
        }
    return {words[0], words[1], words[2], words[3]};
}

/* Assigns values[] to 16 bytes, or adds: with `add` the old ones are read, added in f32 and rounded once. */
template <class T> __device__ void write_wide(T *to, const float (&values)[WIDE<T>], bool add) {
    wide<T> w;
    if (add) w = load_wide(to);
#pragma unroll
    for (int i = 0; i < WIDE<T>; i++)
        w.v[i] = from_f32<T>(add ? to_f32(w.v[i]) + values[i] : values[i]);
    store_wide_once(to, w);
}

template <class T> __device__ void write_one(T *to, float value, bool add) {
    *to = from_f32<T>(add ? to_f32(*to) + value : value);
}

/* ---- Parameters: each of type T or f32 --------------------------------------------------------------- */

struct parameter {
    const void *data; /* NULL: absent */
    bool f32;         /* else of type T */
};

struct parameter_output {
    void *data;
    bool f32, add;
};

inline parameter parameter_of(const vjp_work *work, int slot) {
    return {vjp_data(work, slot), vjp_type(work, slot) == VJP_F32};
}

inline parameter_output parameter_output_of(const vjp_work *work, int slot) {
    return {vjp_data(work, slot), vjp_type(work, slot) == VJP_F32, vjp_accumulates(work, slot)};
}

template <class T> __device__ float read_parameter(parameter p, int64_t i) {
    return p.f32 ? static_cast<const float *>(p.data)[i] : to_f32(static_cast<const T *>(p.data)[i]);
}

template <class T> __device__ void write_parameter(parameter_output p, int64_t i, float value) {
    if (p.f32)
        write_one(static_cast<float *>(p.data) + i, value, p.add);
    else
        write_one(static_cast<T *>(p.data) + i, value, p.add);
}

/* ---- Sums -------------------------------------------------------------------------------------------- */

/* The sum over the 32 lanes, the same bits in all of them: addition commutes, and every lane adds the same pairs. */
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ inline double warp_sum(double x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/*
 * N sums at once over the block's THREADS threads, in every thread. Calls alternate between two buffers, so a buffer is
 * written again only after the barrier of the call between: one barrier per call.
 */
template <class S, int N, int THREADS> struct block_sums { S warp[2][N][THREADS / 32]; };

template <class S, int N, int THREADS>
__device__ void block_sum(S (&x)[N], block_sums<S, N, THREADS> &shared, int &turn) {
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = warp_sum(x[i]);
    if constexpr (THREADS > 32) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < N; i++)
                shared.warp[turn][i][warp] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++) {
            S sum = shared.warp[turn][i][0];
#pragma unroll
            for (int w = 1; w < THREADS / 32; w++)
                sum += shared.warp[turn][i][w];
            x[i] = sum;
        }
        turn ^= 1;
    }
}

/* ---- Chained launches -------------------------------------------------------------------------------- */

/* Lets the next kernel on the stream become resident; it still waits before it reads. */
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/*
 * Waits until the previous kernel on the stream is done and its writes are visible. A prefetch() may come before: if
 * the previous kernel writes there, its writes are in L2 too.
 */
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

/* The first statement of a chained kernel that touches memory at once. */
__device__ inline void begin_chained() {
    let_next_begin();
    wait_for_previous();
}

/*
 * The block's number when a kernel goes through its tensors from the end. What the kernel before it wrote last is then
 * read first, while it is still in L2; and a product that follows, which begins with the first rows, finds those there.
 * Timed alone rms_norm and rope gain nothing by it, but a training step does (docs/training.md).
 */
__device__ inline unsigned block_from_the_end() {
    return gridDim.x - 1 - blockIdx.x;
}

} // namespace vjp

#endif
