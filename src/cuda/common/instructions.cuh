/* SPDX-License-Identifier: MIT */
/*
 * Instructions that C++ has no words for, as functions: copies to shared memory, accesses by a 32-bit address, matrices
 * on tensor cores, fast approximations. Kernels take them from here, Hopper's own from hopper_instructions.cuh, and
 * contain no assembly of their own: so tests can put other definitions of the same functions in the place of these
 * files, and run the kernels on a processor (tests/cuda).
 */
#ifndef VJP_CUDA_INSTRUCTIONS_CUH
#define VJP_CUDA_INSTRUCTIONS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>
#include <type_traits>

namespace vjp {

using bf16 = __nv_bfloat16;
using f16 = __half;

/* ---- Shared memory ----------------------------------------------------------------------------------- */

/* The block's dynamic shared memory. An alignment above 16 can cost as many bytes behind static variables. */
template <class T, int ALIGNMENT = 16> __device__ T *dynamic_shared() {
    if constexpr (ALIGNMENT == 1024) {
        extern __shared__ __align__(1024) char tile_memory[];
        return reinterpret_cast<T *>(tile_memory);
    } else if constexpr (ALIGNMENT > 16) {
        static_assert(ALIGNMENT == 128);
        extern __shared__ __align__(128) char aligned_memory[];
        return reinterpret_cast<T *>(aligned_memory);
    } else {
        extern __shared__ __align__(16) char memory[];
        return reinterpret_cast<T *>(memory);
    }
}

/* An address that stays in one register, unlike a pointer. */
__device__ inline uint32_t shared_address(const void *shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

__device__ inline void load_shared(uint32_t from, uint4 &v) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
}
__device__ inline void load_shared(uint32_t from, float4 &v) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(from)
                 : "memory");
}
__device__ inline void load_shared(uint32_t from, uint32_t &value) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
}
__device__ inline void load_shared(uint32_t from, float &value) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
}
__device__ inline void load_shared(uint32_t from, double &value) {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(from) : "memory");
}

__device__ inline void store_shared(uint32_t to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
/* 16 zero bytes, from one register. */
__device__ inline void clear_shared(uint32_t to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}
__device__ inline void store_shared(uint32_t to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ inline void store_shared(uint32_t to, double value) {
    asm volatile("st.shared.f64 [%0], %1;" ::"r"(to), "d"(value) : "memory");
}
__device__ inline void store_shared(uint32_t to, bf16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(__bfloat16_as_ushort(value)) : "memory");
}
__device__ inline void store_shared(uint32_t to, f16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(__half_as_ushort(value)) : "memory");
}

/* ---- Asynchronous copies to shared memory ------------------------------------------------------------ */

/*
 * A thread copies bytes that only it will read, so no barrier is needed, only its own wait. Copies are committed in
 * groups, in order; wait_copies<N>() returns when all but the last N groups have arrived.
 */
__device__ inline void copy_async(uint32_t to, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ inline void copy_async(void *shared, const void *global) {
    copy_async(shared_address(shared), global);
}

/* 4 bytes, for data with no larger alignment. */
__device__ inline void copy_async_word(void *shared, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

/* 16 bytes, or 16 zero bytes; then `global` is not read, but it must be an address of global memory. */
__device__ inline void copy_async_if(bool present, uint32_t to, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(present ? 16 : 0)
                 : "memory");
}

/* The same with one more instruction; without `present`, `global` may be any address. */
__device__ inline void copy_async_or_zero(uint4 *shared, const uint4 *global, bool present) {
    asm volatile("{\n"
                 ".reg .pred absent;\n"
                 "setp.eq.b32 absent, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, absent;\n"
                 "}" ::"r"(shared_address(shared)),
                 "l"(global), "r"((int)present)
                 : "memory");
}

__device__ inline void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- Matrices on tensor cores (compute capability 8 and later) --------------------------------------- */

/* A product of f32 operands, of each of which 19 bits are read: the type of a product, not of memory. */
struct tf32 {
    float value;
};

/*
 * Four 8 x 8 matrices of 16-bit elements: lanes 8i to 8i+7 give the addresses of the rows of matrix i. Of each a lane
 * gets row lane / 4, columns lane % 4 * 2 and the next; with TRANSPOSED that column and those rows. Without it, also 8
 * x 4 matrices of 32-bit elements: row lane / 4, column lane % 4.
 */
template <bool TRANSPOSED> __device__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(row)
                     : "memory");
}

/*
 * sum += a b: a is 16 x 16, b 16 x 8; with tf32, 16 x 8 and 8 x 8. A lane has sums of rows lane / 4 and that + 8,
 * columns lane % 4 * 2 and the next.
 */
template <class T> __device__ void multiply_matrices(float *sum, const uint32_t *a, uint32_t b_low, uint32_t b_high) {
#define VJP_MULTIPLY(shape_and_types)                                                                                  \
    asm("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"         \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high))
    if constexpr (std::is_same_v<T, bf16>)
        VJP_MULTIPLY("m16n8k16.row.col.f32.bf16.bf16.f32");
    else if constexpr (std::is_same_v<T, f16>)
        VJP_MULTIPLY("m16n8k16.row.col.f32.f16.f16.f32");
    else
        VJP_MULTIPLY("m16n8k8.row.col.f32.tf32.tf32.f32");
#undef VJP_MULTIPLY
}

/* ---- Numbers ----------------------------------------------------------------------------------------- */

/* Two numbers in 32 bits, the first in the lower half. */
template <class T> __device__ uint32_t pack_two(float low, float high) {
    uint32_t two;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

/*
 * To TF32's ten bits of fraction, the nearest one, in the upper bits of an f32. The largest numbers, which would become
 * infinite, keep all their bits: a product leaves the lower ones out.
 */
__device__ inline uint32_t round_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return (bits & 0x7fffffffu) == 0x7f800000u ? __float_as_uint(x) : bits;
}

/* 2^x, to 2 units in the last place; results below the smallest normal number are 0. */
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The same with denormal results. */
__device__ inline float exp2_denormal(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1/x, to a unit in the last place; results below the smallest normal number are 0. */
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The smaller and the larger of two; a NaN stays. */
__device__ inline float smaller(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ inline float larger(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

/* ---- Others ------------------------------------------------------------------------------------------ */

/* Waits until `threads` of the block, whole warps, are at barrier `id`; 0 is __syncthreads(). */
__device__ inline void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int THREADS> __device__ void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* Brings a cache line into L2, and reads no value. */
__device__ inline void prefetch(const void *global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/* The compiler may split a plain store of 16 bytes into four. */
__device__ inline void store_global(void *to, const uint4 &v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

/* The compiler keeps the value in a register and does not compute it again. */
template <class I> __device__ void pin(I &value) {
    if constexpr (sizeof(I) == 4)
        asm volatile("" : "+r"(value));
    else
        asm volatile("" : "+l"(value));
}

} // namespace vjp

#endif
