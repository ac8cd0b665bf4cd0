/* SPDX-License-Identifier: MIT */
/*
 * The engine for processors with AMX: bf16 products added in f32, 16 x 16 sums of 32 terms per instruction, at 16 times
 * the rate of FMA. The driver (gemm.c) is compiled a second time with this engine, for products with a 16-bit operand.
 *
 * A number is packed as bf16 limbs that add up to it exactly: one for bf16, two for f16, three for f32 (dy *
 * act'(pre)); two, good to 17 bits, where the result has 16 bits. The product of two numbers is the sum of the products
 * of their limbs, without those below 2^-24 of it (2^-16 for a 16-bit result).
 *
 * An instruction adds the even and the odd of 32 terms in two chains of FMAs, adds the two, then adds the total to the
 * sums; it treats numbers below 2^-126 as zero. The bits are the same for any number of threads, but differ from those
 * of the FMA engine.
 */
#ifndef VJP_CPU_GEMM_AMX_H
#define VJP_CPU_GEMM_AMX_H

#include <immintrin.h>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemm_engine.h"
#include "cpu/gemm/rows.h"

/* A tile has 16 rows of 64 bytes: 32 bf16 numbers, or 16 pairs of them, or 16 sums. */
enum { SIDE = 16, TERMS = 32, TILE_NUMBERS = SIDE * TERMS, MAX_LIMBS = 3 };

/* Two by two tiles of sums and two tiles of each operand use all eight tile registers. */
enum { GEMM_ROWS = 2 * SIDE, GEMM_COLUMNS = 2 * SIDE };

/*
 * 256 terms: one limb of a panel of b (16 KiB) stays in the first-level cache beside one of a, and adding to the sums
 * takes an eighth of the time.
 */
enum { GEMM_DEPTH = 256 };

/*
 * A packed panel has two tiles per limb for every 32 terms. Those of a are rows of 32 terms; those of b are rows of two
 * terms for 16 columns.
 */
enum {
    GEMM_NUMBER = sizeof(uint16_t),
    GEMM_A_PANEL = GEMM_ROWS * GEMM_DEPTH * GEMM_NUMBER / (int)sizeof(float),
    GEMM_B_PANEL = GEMM_COLUMNS * GEMM_DEPTH * GEMM_NUMBER / (int)sizeof(float),
    GEMM_STRIP = 4
};

/* Lines of each operand that are prefetched while 32 terms are multiplied. */
enum { PREFETCH_LINES = 4, GEMM_PREFETCH = GEMM_DEPTH / TERMS * PREFETCH_LINES * CACHE_LINE };

static inline int64_t limbs_of_type(vjp_dtype dtype, vjp_dtype result) {
    return dtype == VJP_BF16 ? 1 : dtype == VJP_F16 || result != VJP_F32 ? 2 : MAX_LIMBS;
}

static inline gemm_limbs limbs_of(const gemm_call *call) {
    vjp_dtype result = call->c.dtype;
    return (gemm_limbs){limbs_of_type(call->a.dtype, result), limbs_of_type(call->b.dtype, result),
                        result == VJP_F32 ? MAX_LIMBS : 2};
}

/* As in gemm_fma.h; a multiply-add takes a tenth of the time here. */
enum { TILE_STEP_M = SIDE, TILE_EDGE = 72, TASK_MACS = 1 << 22 };

/*
 * One panel of columns goes through the whole block of K before the next: its sums and the current part of b stay in
 * the first-level cache, all of the tile's rows of a in the second. So only b streams in from other cores, at a rate
 * that they can deliver.
 */
static inline int64_t columns_at_once(int64_t columns) {
    return vjp_min(columns, GEMM_COLUMNS);
}

enum { MAX_TERMS = 1024 };

static inline int64_t tile_bytes(int64_t rows, int64_t columns, int64_t terms) {
    return (rows + 2 * GEMM_COLUMNS) * terms * GEMM_NUMBER + rows * columns * (int64_t)sizeof(float);
}

/* Products of few rows or columns run on the FMA engine. */
enum { PACKS_ALL = true };

/* Numbers in slabs are split into limbs like all others. */
enum { READS_SLABS_AS_A = false, READS_SLABS_AS_B = false };

/*
 * Tiles are configured for a thread's share of a product and released after it, so that the kernel need not save them.
 */
static inline void engine_begin(void) {
    typedef struct tile_setup {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tile_setup;
    static const _Alignas(CACHE_LINE) tile_setup setup = {
        .palette = 1,
        .row_bytes = {CACHE_LINE, CACHE_LINE, CACHE_LINE, CACHE_LINE, CACHE_LINE, CACHE_LINE, CACHE_LINE, CACHE_LINE},
        .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    _tile_loadconfig(&setup);
}

static inline void engine_end(void) {
    _tile_release();
}

/* ---- Limbs -------------------------------------------------------------------------------------------  */

/*
 * The first limb of x is its upper 16 bits; each further one is those of the remainder. A zero remainder becomes the
 * smallest normal number with x's sign, and the remainder of an x that is not finite is x itself: zero times Inf would
 * turn Inf into NaN.
 */
INLINE __m512 rest_of(__m512 x, __m512 rest) {
    enum { MIN_MAGNITUDE = 2, SIGN_OF_FIRST = 0 << 2 };
    __m512 first =
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rest), _mm512_set1_epi32((int32_t)0xffff0000)));
    __m512 r = _mm512_sub_ps(rest, first);
    r = _mm512_mask_mov_ps(r, _mm512_cmp_ps_mask(r, r, _CMP_UNORD_Q), x);
    __mmask16 none = _mm512_cmp_ps_mask(r, _mm512_setzero_ps(), _CMP_EQ_OQ);
    return _mm512_mask_range_ps(r, none, x, _mm512_set1_ps(0x1p-126f), MIN_MAGNITUDE | SIGN_OF_FIRST);
}

INLINE void split_as(int64_t limbs, const float *from, int64_t count, uint16_t *const to[MAX_LIMBS]) {
    for (int64_t i = 0; i < count; i += LANES) {
        __m512 x = (__m512)vf_load_part(VJP_F32, from, i, count - i).v[0];
        __m512i quiet = _mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1 << 22));
        x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(quiet));
        __m512 rest = x;
        for (int64_t q = 0; q < limbs; q++) {
            __m512i bits = _mm512_castps_si512(rest);
            if (q > 0 && q + 1 == limbs) bits = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
            _mm256_storeu_si256((__m256i *)(void *)(to[q] + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
            if (q + 1 < limbs) rest = rest_of(x, rest);
        }
    }
}

/* The longest row that is read at a time, in whole vectors. */
enum { MAX_READ = GEMM_DEPTH > GEMM_STRIP *GEMM_COLUMNS ? GEMM_DEPTH : GEMM_STRIP *GEMM_COLUMNS };

/* Part of a stored row, as one array per limb: in place, or split into `converted`. */
typedef struct split_row {
    const uint16_t *of[MAX_LIMBS];
    uint16_t converted[MAX_LIMBS][MAX_READ];
} split_row;

static void read_limbs(const gemm_operand *o, int64_t limbs, int64_t item, int64_t row, int64_t column, int64_t count,
                       split_row *p) {
    if (!o->read && o->dtype == VJP_BF16) {
        p->of[0] = (const uint16_t *)o->data + operand_index(o, item, row, column);
        return;
    }
    float numbers[MAX_READ];
    const float *from = stored_row(o, item, row, column, count, numbers);
    uint16_t *const to[MAX_LIMBS] = {p->converted[0], p->converted[1], p->converted[2]};
    for (int q = 0; q < MAX_LIMBS; q++)
        p->of[q] = to[q];
    switch (limbs) {
    case 1: split_as(1, from, count, to); break;
    case 2: split_as(2, from, count, to); break;
    default: split_as(MAX_LIMBS, from, count, to); break;
    }
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

INLINE __mmask32 first_of_32(int64_t count) {
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
}

/* The tiles of limb q of terms [32 t, 32 t + 32): the upper one (of b: the left one). */
INLINE uint16_t *tile_at_terms(uint16_t *panel, int64_t limbs, int64_t t, int64_t q) {
    return panel + (t * limbs + q) * 2 * TILE_NUMBERS;
}

/* Source rows that run along K become rows of tiles. */
static void pack_rows(const gemm_operand *o, int64_t limbs, int64_t item, int64_t i, int64_t count, int64_t k,
                      int64_t depth, uint16_t *to) {
    split_row p;
    for (int64_t r = 0; r < count; r++) {
        uint16_t *panel = to + r / GEMM_ROWS * limbs * GEMM_ROWS * GEMM_DEPTH;
        read_limbs(o, limbs, item, i + r, k, depth, &p);
        for (int64_t t = 0; t * TERMS < depth; t++)
            for (int64_t q = 0; q < limbs; q++)
                _mm512_storeu_si512(tile_at_terms(panel, limbs, t, q) + r % GEMM_ROWS * TERMS,
                                    _mm512_maskz_loadu_epi16(first_of_32(depth - t * TERMS), p.of[q] + t * TERMS));
    }
}

/* Numbers 2 j and 2 j + 1 of row i of a tile are terms 2 i and 2 i + 1 of column j. */
static const _Alignas(CACHE_LINE) uint16_t pair_left[2 * SIDE] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                                  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                                  11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

/* Source rows that run across K become rows of pairs, two rows at a time. Missing terms are 0. */
static void pack_pairs(const gemm_operand *o, int64_t limbs, int64_t item, int64_t i, int64_t count, int64_t k,
                       int64_t depth, uint16_t *to) {
    int64_t ends = vjp_round_up(depth, TERMS);
    const __m512i left = _mm512_load_si512(pair_left), right = _mm512_add_epi16(left, _mm512_set1_epi16(SIDE));
    split_row even, odd;
    for (int64_t t = 0; t < ends; t += 2) {
        if (t < depth) read_limbs(o, limbs, item, k + t, i, count, &even);
        if (t + 1 < depth) read_limbs(o, limbs, item, k + t + 1, i, count, &odd);
        const split_row *next = t + 1 < depth ? &odd : &even;
        for (int64_t c = 0; c < count; c += GEMM_COLUMNS) {
            uint16_t *panel = to + c / GEMM_COLUMNS * limbs * GEMM_COLUMNS * GEMM_DEPTH;
            __mmask32 some = first_of_32(count - c);
            for (int64_t q = 0; q < limbs; q++) {
                __m512i a = _mm512_maskz_loadu_epi16(t < depth ? some : 0, even.of[q] + c);
                __m512i b = _mm512_maskz_loadu_epi16(t + 1 < depth ? some : 0, next->of[q] + c);
                uint16_t *tile = tile_at_terms(panel, limbs, t / TERMS, q) + t % TERMS / 2 * TERMS;
                _mm512_storeu_si512(tile, _mm512_permutex2var_epi16(a, left, b));
                _mm512_storeu_si512(tile + TILE_NUMBERS, _mm512_permutex2var_epi16(a, right, b));
            }
        }
    }
}

/* Converts rows of terms to rows of pairs and back, by transposing 16 x 16 pairs. */
static void transpose_tiles(int64_t panels, int64_t limbs, int64_t depth, uint16_t *to) {
    for (int64_t i = 0; i < panels; i++, to += limbs * GEMM_ROWS * GEMM_DEPTH)
        for (int64_t t = 0; t < vjp_divide_up(depth, TERMS) * limbs * 2; t++) {
            native_f row[SIDE];
            memcpy(row, to + t * TILE_NUMBERS, sizeof row);
            native_transpose(row);
            memcpy(to + t * TILE_NUMBERS, row, sizeof row);
        }
}

/* Tiles of a are rows, those of b are pairs. */
INLINE void pack_panels(const gemm_operand *o, bool is_a, int64_t limbs, int64_t item, int64_t i, int64_t count,
                        int64_t k, int64_t depth, float *to) {
    bool across = o->transposed == is_a;
    uint16_t *panels = (uint16_t *)(void *)to;
    if (across)
        pack_pairs(o, limbs, item, i, count, k, depth, panels);
    else
        pack_rows(o, limbs, item, i, count, k, depth, panels);
    if (across == is_a) transpose_tiles(vjp_divide_up(count, GEMM_ROWS), limbs, depth, panels);
}

static void pack_a_panels(const gemm_operand *o, int64_t limbs, int64_t item, int64_t i, int64_t rows, int64_t k,
                          int64_t depth, float *to) {
    pack_panels(o, true, limbs, item, i, rows, k, depth, to);
}

static void pack_b_panels(const gemm_operand *o, int64_t limbs, int64_t item, int64_t j, int64_t columns, int64_t k,
                          int64_t depth, float *to) {
    pack_panels(o, false, limbs, item, j, columns, k, depth, to);
}

/* ---- Multiplying ------------------------------------------------------------------------------------- */

/* One limb of a by one limb of b: 32 terms of 32 x 32 sums. An operand that is not `new` is still in its tiles. */
INLINE void multiply_tiles(const uint16_t *a, bool new_a, const uint16_t *b, bool new_b) {
    if (new_a) _tile_loadd(4, a, CACHE_LINE);
    if (new_b) _tile_loadd(6, b, CACHE_LINE);
    if (new_b) _tile_loadd(7, b + TILE_NUMBERS, CACHE_LINE);
    _tile_dpbf16ps(0, 4, 6);
    if (new_a) _tile_loadd(5, a + TILE_NUMBERS, CACHE_LINE);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void store_tiles(float *to, int64_t stride) {
    int64_t bytes = stride * (int64_t)sizeof *to;
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + SIDE, bytes);
    _tile_stored(2, to + SIDE * stride, bytes);
    _tile_stored(3, to + SIDE * stride + SIDE, bytes);
}

/*
 * to = from + a b, as in gemm_fma.h. The smallest products of limbs come first, so that their sum loses least when the
 * large ones are added.
 */
INLINE void multiply_panels(gemm_limbs limbs, bool by_terms, bool slab, int64_t rows, int64_t columns, int64_t depth,
                            const float *a, const float *b, const gemm_target *to, const gemm_prefetch *prefetch) {
    (void)by_terms;
    (void)slab;
    const uint16_t *left = (const uint16_t *)(const void *)a, *right = (const uint16_t *)(const void *)b;
    const char *prefetch_a = prefetch->a, *prefetch_b = prefetch->b;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t * TERMS < depth; t++) {
        for (int line = 0; line < PREFETCH_LINES; line++, prefetch_a += CACHE_LINE, prefetch_b += CACHE_LINE) {
            __builtin_prefetch(prefetch_a, 0, 2);
            __builtin_prefetch(prefetch_b, 0, 2);
        }
        int64_t i = -1, j = -1;
        for (int64_t below = limbs.kept - 1; below >= 0; below--)
            for (int64_t q = vjp_max(0, below - limbs.a + 1); q < limbs.b && q <= below; q++) {
                multiply_tiles(left + (below - q) * 2 * TILE_NUMBERS, below - q != i, right + q * 2 * TILE_NUMBERS,
                               q != j);
                i = below - q;
                j = q;
            }
        left += limbs.a * 2 * TILE_NUMBERS;
        right += limbs.b * 2 * TILE_NUMBERS;
    }
    if (!to->from && rows == GEMM_ROWS && columns >= GEMM_COLUMNS) {
        store_tiles(to->to, to->to_stride);
        return;
    }
    _Alignas(CACHE_LINE) float sums[GEMM_ROWS * GEMM_COLUMNS];
    store_tiles(sums, GEMM_COLUMNS);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < GEMM_COLUMNS && c < columns; c += LANES) {
            vf sum = vf_load(VJP_F32, sums, r * GEMM_COLUMNS + c);
            if (to->from) sum = vf_add(vf_load_part(VJP_F32, to->from, r * to->from_stride + c, columns - c), sum);
            vf_store_part(VJP_F32, to->to, r * to->to_stride + c, columns - c, sum);
        }
}

#endif
