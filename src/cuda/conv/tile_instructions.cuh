/* SPDX-License-Identifier: MIT */
/*
 * The instructions of tiled products: asynchronous copies that can fill with zeros, loads of 8 x 8 matrices from shared
 * memory, and products on tensor cores (compute capability 8 and later).
 */
#ifndef VJP_CUDA_TILE_INSTRUCTIONS_CUH
#define VJP_CUDA_TILE_INSTRUCTIONS_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {

/* Copies 16 bytes to shared memory, or writes 16 zero bytes; then `global` is not read and may be any address. */
__device__ inline void copy_async_or_zero(uint4 *shared, const uint4 *global, bool present) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("{\n"
                 ".reg .pred absent;\n"
                 "setp.eq.b32 absent, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, absent;\n"
                 "}" ::"r"(to),
                 "l"(global), "r"((int)present)
                 : "memory");
}

/* A product of f32 operands on tensor cores, which read the first 19 bits of each: the type of a product, not stored.
 */
struct tf32 {
    float value;
};

template <class T> using stored = std::conditional_t<std::is_same_v<T, tf32>, float, T>;

/*
 * Makes those 19 bits the nearest number, ties away from zero, by adding half a unit of the last of them: 2^-11 of the
 * power of two that begins x. cvt.rna does the same in three instructions, adding integers where x is finite.
 */
__device__ inline void round_to_tf32(unsigned &x) {
    x = __float_as_uint(fmaf(__uint_as_float(x & 0xff800000u), 0x1p-11f, __uint_as_float(x)));
}

/*
 * Four 8 x 8 matrices of 16-bit elements: lanes 8i to 8i+7 give the addresses of the rows of matrix i. Of each a lane
 * gets row lane / 4, columns lane % 4 * 2 and the next; with TRANSPOSED that column and those rows. Without it, also 8
 * x 4 matrices of 32-bit elements: row lane / 4, column lane % 4.
 */
template <bool TRANSPOSED> __device__ void load_matrices(unsigned (&to)[4], const uint4 *row) {
    unsigned from = (unsigned)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from)
                     : "memory");
}

/*
 * sum += a b: a is 16 x 16, b 16 x 8; with tf32, 16 x 8 and 8 x 8. A lane has sums of rows lane / 4 and that + 8,
 * columns lane % 4 * 2 and the next.
 */
template <class T>
__device__ void multiply_matrices(float (&sum)[4], const unsigned (&a)[4], unsigned b_low, unsigned b_high) {
    if constexpr (std::is_same_v<T, bf16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
    else if constexpr (std::is_same_v<T, tf32>)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

} // namespace vjp

#endif
