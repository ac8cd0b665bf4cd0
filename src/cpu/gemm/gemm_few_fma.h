/* SPDX-License-Identifier: MIT */
/*
 * Products of at most four rows with FMA: generating text multiplies one row per text by every weight of the model, so
 * the time is that of reading the weights once. Squares of b [n, k] are transposed in registers and used at once, where
 * the driver's packed panels would go through memory.
 *
 * Each sum is the same FMA chains of GEMM_DEPTH terms, added in the same order, as in gemm_kernel.h: the bits are those
 * of the packed product.
 */
#ifndef VJP_CPU_GEMM_FEW_FMA_H
#define VJP_CPU_GEMM_FEW_FMA_H

#include "cpu/gemm/gemm_few.h"
#include "cpu/gemm/gemm_fma.h"

/* Rows of a, and rows of b per block: several native vectors, whose chains of sums hide each other's latency. */
enum { FEW_ROWS = 4, FEW_COLUMNS = FEW_BLOCK_ROWS, FEW_VECTORS = FEW_COLUMNS / NATIVE_LANES };

static bool suits_few_rows(const gemm_call *call) {
    const gemm_operand *a = &call->a, *b = &call->b;
    return call->items == 1 && call->m <= FEW_ROWS && call->n >= FEW_COLUMNS && call->k > 0 && !call->blas &&
           !a->transposed && !b->read && !b->slab_rows && b->transposed && (call->c.epilogue || !call->c.accumulate) &&
           splits_of(call) == 1;
}

/* The rows of a in f32. */
static size_t few_rows_bytes(const gemm_call *call) {
    return (size_t)(call->m * call->k) * sizeof(float);
}

static void pack_few_rows(const gemm_call *call, void *workspace) {
    for (int64_t r = 0; r < call->m; r++) {
        float *to = (float *)workspace + r * call->k;
        const float *row = stored_row(&call->a, 0, r, 0, call->k, to);
        if (row != to) memcpy(to, row, (size_t)call->k * sizeof *to);
    }
}

static void begin_few_rows(int64_t rows) {
    (void)rows;
}

static void end_few_rows(void) {
}

/* Terms [t, t + count), at most LANES, of the sums of one native vector of columns: rows of b from element `at`. */
INLINE void few_terms(vjp_dtype dtype, int rows, const void *b, int64_t at, int64_t stride, int64_t count,
                      const float *a, int64_t k, native_f sum[FEW_ROWS]) {
    vf row[NATIVE_LANES];
    UNROLL for (int i = 0; i < NATIVE_LANES; i++) row[i] =
        count == LANES ? vf_load(dtype, b, at + i * stride) : vf_load_part(dtype, b, at + i * stride, count);
    UNROLL for (int p = 0; p < LANES / NATIVE_LANES; p++) {
        native_f square[NATIVE_LANES];
        UNROLL for (int i = 0; i < NATIVE_LANES; i++) square[i] = row[i].v[p];
        native_transpose(square);
        UNROLL for (int i = 0; i < NATIVE_LANES; i++) {
            if (p * NATIVE_LANES + i >= count) continue; /* no break: compilers unroll loops of constant length */
            UNROLL for (int r = 0; r < rows; r++) {
                native_f one = a[r * k + p * NATIVE_LANES + i] - (native_f){0};
                sum[r] = native_fma(one, square[i], sum[r]);
            }
        }
    }
}

/*
 * The same for FEW_PAIRS terms in bf16. Two terms of a row are one lane of a vector, so that a square has twice the
 * terms and each costs half the shuffles; a shift or a mask makes a term f32.
 */
enum { FEW_PAIRS = 2 * NATIVE_LANES };

INLINE void few_pairs(int rows, const uint16_t *b, int64_t stride, const float *a, int64_t k, native_f sum[FEW_ROWS]) {
    native_f square[NATIVE_LANES];
    UNROLL for (int i = 0; i < NATIVE_LANES; i++) memcpy(&square[i], b + i * stride, sizeof square[i]);
    native_transpose(square);
    UNROLL for (int i = 0; i < NATIVE_LANES; i++) {
        native_i pair = (native_i)square[i];
        UNROLL for (int r = 0; r < rows; r++) {
            native_f even = a[r * k + 2 * i] - (native_f){0}, odd = a[r * k + 2 * i + 1] - (native_f){0};
            sum[r] = native_fma(even, (native_f)(pair << 16), sum[r]);
            sum[r] = native_fma(odd, (native_f)(pair & -0x10000), sum[r]);
        }
    }
}

/*
 * Where a and b are bf16, aarch64 has an FMA of their even or odd terms, with one rounding: the bits are those of the
 * terms made f32, in half the instructions beside the transposition (Neoverse V1, one core: 19 instead of 15 GB/s).
 * Only newer assemblers of clang know it.
 */
#if defined(CPU_ISA_NEON) && (!defined(__clang__) || __clang_major__ >= 16)
#define FEW_HAS_BF16
INLINE native_f fma_even(native_f pairs, native_f a, native_f sum) {
    __asm__(".arch_extension bf16\n\tbfmlalb %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(pairs), "w"(a));
    return sum;
}

INLINE native_f fma_odd(native_f pairs, native_f a, native_f sum) {
    __asm__(".arch_extension bf16\n\tbfmlalt %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(pairs), "w"(a));
    return sum;
}
#endif

static bool fuses_pairs(const gemm_call *call) {
#ifdef FEW_HAS_BF16
    const gemm_operand *a = &call->a;
    return call->bf16 && a->dtype == VJP_BF16 && !a->read && !a->slab_rows;
#else
    (void)call;
    return false;
#endif
}

/* The same as few_pairs(), from rows of a in bf16. */
INLINE void few_fused(int rows, const uint16_t *b, int64_t stride, const uint16_t *a, int64_t a_stride,
                      native_f sum[FEW_ROWS]) {
#ifdef FEW_HAS_BF16
    native_f square[NATIVE_LANES];
    UNROLL for (int i = 0; i < NATIVE_LANES; i++) memcpy(&square[i], b + i * stride, sizeof square[i]);
    native_transpose(square);
    UNROLL for (int i = 0; i < NATIVE_LANES; i++) {
        UNROLL for (int r = 0; r < rows; r++) {
            float pair;
            memcpy(&pair, a + r * a_stride + 2 * i, sizeof pair);
            native_f both = (native_f)vdupq_n_f32(pair);
            sum[r] = fma_even(square[i], both, sum[r]);
            sum[r] = fma_odd(square[i], both, sum[r]);
        }
    }
#else
    (void)rows, (void)b, (void)stride, (void)a, (void)a_stride, (void)sum;
#endif
}

/* The sums of `rows` rows, a constant after inlining, with FEW_COLUMNS rows of b from `column`. */
INLINE void few_block_as(vjp_dtype dtype, bool fused, int rows, const gemm_call *call, const float *a, int64_t column,
                         float sums[FEW_ROWS][FEW_COLUMNS]) {
    int64_t stride = call->b.stride, k = call->k, first = column * stride;
    const char *block = (const char *)call->b.data + first * (int64_t)dtype_bytes(dtype);
    int64_t terms = dtype == VJP_BF16 ? FEW_PAIRS : LANES;
    for (int64_t begin = 0; begin < k; begin += GEMM_DEPTH) {
        int64_t end = vjp_min(k, begin + GEMM_DEPTH), t = begin;
        native_f sum[FEW_VECTORS][FEW_ROWS];
        UNROLL for (int v = 0; v < FEW_VECTORS; v++) {
            UNROLL for (int r = 0; r < rows; r++) sum[v][r] = (native_f){0};
        }
        for (; t + terms <= end; t += terms) {
            if (t * (int64_t)dtype_bytes(dtype) % CACHE_LINE == 0)
                prefetch_few(block, (int64_t)dtype_bytes(dtype), stride, k, t);
            UNROLL for (int v = 0; v < FEW_VECTORS; v++) {
                int64_t at = first + v * NATIVE_LANES * stride + t;
                if (fused)
                    few_fused(rows, (const uint16_t *)call->b.data + at, stride, (const uint16_t *)call->a.data + t,
                              call->a.stride, sum[v]);
                else if (dtype == VJP_BF16)
                    few_pairs(rows, (const uint16_t *)call->b.data + at, stride, a + t, k, sum[v]);
                else
                    few_terms(dtype, rows, call->b.data, at, stride, LANES, a + t, k, sum[v]);
            }
        }
        for (; t < end; t += LANES)
            UNROLL for (int v = 0; v < FEW_VECTORS; v++)
                few_terms(dtype, rows, call->b.data, first + v * NATIVE_LANES * stride + t, stride,
                          vjp_min(LANES, end - t), a + t, k, sum[v]);
        UNROLL for (int v = 0; v < FEW_VECTORS; v++) {
            UNROLL for (int r = 0; r < rows; r++) {
                float *to = sums[r] + v * NATIVE_LANES;
                native_f total = sum[v][r], old;
                memcpy(&old, to, sizeof old);
                if (begin > 0) total = old + total;
                memcpy(to, &total, sizeof total);
            }
        }
    }
}

INLINE void few_block_rows(vjp_dtype dtype, bool fused, const gemm_call *call, const float *a, int64_t column,
                           float sums[FEW_ROWS][FEW_COLUMNS]) {
    switch (call->m) {
    case 1: few_block_as(dtype, fused, 1, call, a, column, sums); break;
    case 2: few_block_as(dtype, fused, 2, call, a, column, sums); break;
    case 3: few_block_as(dtype, fused, 3, call, a, column, sums); break;
    default: few_block_as(dtype, fused, FEW_ROWS, call, a, column, sums); break;
    }
}

static void few_block(const gemm_call *call, const void *packed, int64_t column, float sums[FEW_ROWS][FEW_COLUMNS]) {
    switch (call->b.dtype) {
    case VJP_BF16:
        if (fuses_pairs(call))
            few_block_rows(VJP_BF16, true, call, packed, column, sums);
        else
            few_block_rows(VJP_BF16, false, call, packed, column, sums);
        break;
    case VJP_F16: few_block_rows(VJP_F16, false, call, packed, column, sums); break;
    default: few_block_rows(VJP_F32, false, call, packed, column, sums); break;
    }
}

#endif
