/*
 * The engine of matrix products on a processor with tiles (AMX): products of bf16 numbers added up in f32, 16 x 16 sums
 * of 32 terms an instruction, at sixteen times the rate of FMA. The driver (gemm.c) is compiled with it in place of
 * gemm_fma.h, and runs where an operand has 16 bits.
 *
 * A number is packed in as many bf16 pieces as it takes to be exact: bf16 in one, f16 in two, f32 (dy * act'(pre)) in
 * three; beside a result of 16 bits in two, to 17 bits. The product of two numbers is the sum of the products of their
 * pieces, but for those below 2^-24 of it (beside 16 bits: 2^-16).
 *
 * An instruction adds up the even and the odd of 32 terms in two chains of FMAs, then adds the two, then both to the
 * sums; it takes what is below 2^-126 for zero. The bits are the same for any number of threads, and others than those
 * of a chain of FMAs.
 */
#ifndef VJP_CPU_GEMM_AMX_H
#define VJP_CPU_GEMM_AMX_H

#include <immintrin.h>

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemm_engine.h"
#include "cpu/gemm/rows.h"

/* A tile has 16 rows of 64 bytes: 32 bf16 numbers, or 16 pairs of them, or 16 sums. */
enum { SIDE = 16, TERMS = 32, TILE_NUMBERS = SIDE * TERMS, MOST_PIECES = 3 };

/* Two by two tiles of sums; with two of each operand they are all eight that there are. */
enum { GEMM_ROWS = 2 * SIDE, GEMM_COLUMNS = 2 * SIDE };

/*
 * 256 terms: one piece of a panel of b (16 KiB) stays in the first-level cache beside one of a, and adding up sums
 * takes an eighth of the time.
 */
enum { GEMM_DEPTH = 256 };

/*
 * A packed panel has for every 32 terms and every piece two tiles. Those of a are rows of 32 terms; those of b are rows
 * of two terms for 16 columns.
 */
enum {
    GEMM_NUMBER = sizeof(uint16_t),
    GEMM_A_PANEL = GEMM_ROWS * GEMM_DEPTH * GEMM_NUMBER / (int)sizeof(float),
    GEMM_B_PANEL = GEMM_COLUMNS * GEMM_DEPTH * GEMM_NUMBER / (int)sizeof(float),
    GEMM_STRIP = 4
};

/* Lines of each operand that are called in while 32 terms are multiplied. */
enum { AHEAD_LINES = 4, GEMM_AHEAD = GEMM_DEPTH / TERMS * AHEAD_LINES * GEMM_LINE };

static inline int64_t pieces_of_type(vjp_dtype dtype, vjp_dtype result) {
    return dtype == VJP_BF16 ? 1 : dtype == VJP_F16 || result != VJP_F32 ? 2 : MOST_PIECES;
}

static inline gemm_pieces pieces_of(const gemm_call *call) {
    vjp_dtype result = call->c.dtype;
    return (gemm_pieces){pieces_of_type(call->a.dtype, result), pieces_of_type(call->b.dtype, result),
                         result == VJP_F32 ? MOST_PIECES : 2};
}

/* What gemm_fma.h says of these; a multiply-add takes a tenth of the time here. */
enum { TILE_STEP_M = SIDE, TILE_EDGE = 72, TASK_MACS = 1 << 22 };

/*
 * Columns go one panel after the other, each through all terms of the block: its sums, and what is at work of b, stay
 * in the first-level cache, all of the tile's rows of a in the second. So of what other cores have packed only b comes
 * in steadily, at a rate that they can give.
 */
static inline int64_t columns_at_once(int64_t columns) {
    return least(columns, GEMM_COLUMNS);
}

enum { MOST_TERMS = 1024 };

static inline int64_t tile_bytes(int64_t rows, int64_t columns, int64_t terms) {
    return (rows + 2 * GEMM_COLUMNS) * terms * GEMM_NUMBER + rows * columns * (int64_t)sizeof(float);
}

/* The other engine makes products of few rows or columns. */
enum { PACKS_ALL = true };

/* Numbers in slabs are cut into pieces like all others. */
enum { READS_SLABS_AS_A = false, READS_SLABS_AS_B = false };

/* A thread's tiles are set up for its share of a product and given up after: then nobody has to save them. */
static inline void engine_begin(void) {
    typedef struct tile_setup {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tile_setup;
    static const _Alignas(GEMM_LINE) tile_setup setup = {
        .palette = 1,
        .row_bytes = {GEMM_LINE, GEMM_LINE, GEMM_LINE, GEMM_LINE, GEMM_LINE, GEMM_LINE, GEMM_LINE, GEMM_LINE},
        .rows = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    _tile_loadconfig(&setup);
}

static inline void engine_end(void) {
    _tile_release();
}

/* ---- Pieces ------------------------------------------------------------------------------------------ */

/*
 * The first of x is its upper 16 bits; each further one those of what remains. Where nothing remains it is the least
 * number with x's sign, and with an x that is not finite x itself, not zero: times Inf, zero would make NaN of Inf.
 */
INLINE __m512 rest_of(__m512 x, __m512 rest) {
    enum { LEAST_MAGNITUDE = 2, SIGN_OF_FIRST = 0 << 2 };
    __m512 first =
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rest), _mm512_set1_epi32((int32_t)0xffff0000)));
    __m512 r = _mm512_sub_ps(rest, first);
    r = _mm512_mask_mov_ps(r, _mm512_cmp_ps_mask(r, r, _CMP_UNORD_Q), x);
    __mmask16 none = _mm512_cmp_ps_mask(r, _mm512_setzero_ps(), _CMP_EQ_OQ);
    return _mm512_mask_range_ps(r, none, x, _mm512_set1_ps(0x1p-126f), LEAST_MAGNITUDE | SIGN_OF_FIRST);
}

INLINE void split_as(int64_t pieces, const float *from, int64_t count, uint16_t *const to[MOST_PIECES]) {
    for (int64_t i = 0; i < count; i += LANES) {
        __m512 x = (__m512)vf_load_part(VJP_F32, from, i, count - i).v[0];
        __m512i quiet = _mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1 << 22));
        x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(quiet));
        __m512 rest = x;
        for (int64_t q = 0; q < pieces; q++) {
            __m512i bits = _mm512_castps_si512(rest);
            if (q > 0 && q + 1 == pieces) bits = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
            _mm256_storeu_si256((__m256i *)(void *)(to[q] + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
            if (q + 1 < pieces) rest = rest_of(x, rest);
        }
    }
}

/* The longest row that is read at a time, in whole vectors. */
enum { MOST_READ = GEMM_DEPTH > GEMM_STRIP *GEMM_COLUMNS ? GEMM_DEPTH : GEMM_STRIP *GEMM_COLUMNS };

/* Some numbers of a row as stored, each piece's side by side: where they are, or made in `made`. */
typedef struct split_row {
    const uint16_t *of[MOST_PIECES];
    uint16_t made[MOST_PIECES][MOST_READ];
} split_row;

static void read_pieces(const gemm_operand *o, int64_t pieces, int64_t item, int64_t row, int64_t column, int64_t count,
                        split_row *p) {
    if (!o->read && o->dtype == VJP_BF16) {
        p->of[0] = (const uint16_t *)o->data + (row + item * o->item_row) * o->stride + column + item * o->item_column;
        return;
    }
    float numbers[MOST_READ];
    const float *from = stored_row(o, item, row, column, count, numbers);
    uint16_t *const to[MOST_PIECES] = {p->made[0], p->made[1], p->made[2]};
    for (int q = 0; q < MOST_PIECES; q++)
        p->of[q] = to[q];
    switch (pieces) {
    case 1: split_as(1, from, count, to); break;
    case 2: split_as(2, from, count, to); break;
    default: split_as(MOST_PIECES, from, count, to); break;
    }
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

INLINE __mmask32 first_of_32(int64_t count) {
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
}

/* Where a tile of a panel is: those of piece q of terms [32 t, 32 t + 32), the upper (of b: the left) one. */
INLINE uint16_t *tile_at_terms(uint16_t *panel, int64_t pieces, int64_t t, int64_t q) {
    return panel + (t * pieces + q) * 2 * TILE_NUMBERS;
}

/* Rows of the source that run along the terms become rows of tiles. */
static void pack_rows(const gemm_operand *o, int64_t pieces, int64_t item, int64_t i, int64_t count, int64_t k,
                      int64_t depth, uint16_t *to) {
    split_row p;
    for (int64_t r = 0; r < count; r++) {
        uint16_t *panel = to + r / GEMM_ROWS * pieces * GEMM_ROWS * GEMM_DEPTH;
        read_pieces(o, pieces, item, i + r, k, depth, &p);
        for (int64_t t = 0; t * TERMS < depth; t++)
            for (int64_t q = 0; q < pieces; q++)
                _mm512_storeu_si512(tile_at_terms(panel, pieces, t, q) + r % GEMM_ROWS * TERMS,
                                    _mm512_maskz_loadu_epi16(first_of_32(depth - t * TERMS), p.of[q] + t * TERMS));
    }
}

/* The numbers 2 j and 2 j + 1 of the rows of a tile are term 2 i and 2 i + 1 of column j. */
static const _Alignas(GEMM_LINE) uint16_t pair_left[2 * SIDE] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                                 37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                                 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

/* Rows of the source that run across the terms become rows of pairs, two at a time. Terms that are not there are 0. */
static void pack_pairs(const gemm_operand *o, int64_t pieces, int64_t item, int64_t i, int64_t count, int64_t k,
                       int64_t depth, uint16_t *to) {
    int64_t ends = divide_up(depth, TERMS) * TERMS;
    const __m512i left = _mm512_load_si512(pair_left), right = _mm512_add_epi16(left, _mm512_set1_epi16(SIDE));
    split_row even, odd;
    for (int64_t t = 0; t < ends; t += 2) {
        if (t < depth) read_pieces(o, pieces, item, k + t, i, count, &even);
        if (t + 1 < depth) read_pieces(o, pieces, item, k + t + 1, i, count, &odd);
        const split_row *next = t + 1 < depth ? &odd : &even;
        for (int64_t c = 0; c < count; c += GEMM_COLUMNS) {
            uint16_t *panel = to + c / GEMM_COLUMNS * pieces * GEMM_COLUMNS * GEMM_DEPTH;
            __mmask32 some = first_of_32(count - c);
            for (int64_t q = 0; q < pieces; q++) {
                __m512i a = _mm512_maskz_loadu_epi16(t < depth ? some : 0, even.of[q] + c);
                __m512i b = _mm512_maskz_loadu_epi16(t + 1 < depth ? some : 0, next->of[q] + c);
                uint16_t *tile = tile_at_terms(panel, pieces, t / TERMS, q) + t % TERMS / 2 * TERMS;
                _mm512_storeu_si512(tile, _mm512_permutex2var_epi16(a, left, b));
                _mm512_storeu_si512(tile + TILE_NUMBERS, _mm512_permutex2var_epi16(a, right, b));
            }
        }
    }
}

/* Rows of terms to rows of pairs and back: 16 x 16 pairs turned. */
static void turn_tiles(int64_t panels, int64_t pieces, int64_t depth, uint16_t *to) {
    for (int64_t i = 0; i < panels; i++, to += pieces * GEMM_ROWS * GEMM_DEPTH)
        for (int64_t t = 0; t < divide_up(depth, TERMS) * pieces * 2; t++) {
            native_f row[SIDE];
            memcpy(row, to + t * TILE_NUMBERS, sizeof row);
            native_transpose(row);
            memcpy(to + t * TILE_NUMBERS, row, sizeof row);
        }
}

/* a wants its tiles by rows, b by pairs. */
INLINE void pack_panels(const gemm_operand *o, bool is_a, int64_t pieces, int64_t item, int64_t i, int64_t count,
                        int64_t k, int64_t depth, float *to) {
    bool across = o->transposed == is_a;
    uint16_t *panels = (uint16_t *)(void *)to;
    if (across)
        pack_pairs(o, pieces, item, i, count, k, depth, panels);
    else
        pack_rows(o, pieces, item, i, count, k, depth, panels);
    if (across == is_a) turn_tiles(divide_up(count, GEMM_ROWS), pieces, depth, panels);
}

static void pack_a_panels(const gemm_operand *o, int64_t pieces, int64_t item, int64_t i, int64_t rows, int64_t k,
                          int64_t depth, float *to) {
    pack_panels(o, true, pieces, item, i, rows, k, depth, to);
}

static void pack_b_panels(const gemm_operand *o, int64_t pieces, int64_t item, int64_t j, int64_t columns, int64_t k,
                          int64_t depth, float *to) {
    pack_panels(o, false, pieces, item, j, columns, k, depth, to);
}

/* ---- Multiplying ------------------------------------------------------------------------------------- */

/* One piece of a by one piece of b: 32 terms of 32 x 32 sums. Without a `new` one it is the piece of the call before.
 */
INLINE void multiply_tiles(const uint16_t *a, bool new_a, const uint16_t *b, bool new_b) {
    if (new_a) _tile_loadd(4, a, GEMM_LINE);
    if (new_b) _tile_loadd(6, b, GEMM_LINE);
    if (new_b) _tile_loadd(7, b + TILE_NUMBERS, GEMM_LINE);
    _tile_dpbf16ps(0, 4, 6);
    if (new_a) _tile_loadd(5, a + TILE_NUMBERS, GEMM_LINE);
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
 * to = from + a b, as in gemm_fma.h. The small products of two pieces come first: their sum is as exact as it gets when
 * the large ones are added.
 */
INLINE void multiply_panels(gemm_pieces pieces, bool by_terms, bool slab, int64_t rows, int64_t columns, int64_t depth,
                            const float *a, const float *b, const gemm_target *to, const gemm_ahead *ahead) {
    (void)by_terms;
    (void)slab;
    const uint16_t *left = (const uint16_t *)(const void *)a, *right = (const uint16_t *)(const void *)b;
    const char *ahead_a = ahead->a, *ahead_b = ahead->b;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t * TERMS < depth; t++) {
        for (int line = 0; line < AHEAD_LINES; line++, ahead_a += GEMM_LINE, ahead_b += GEMM_LINE) {
            __builtin_prefetch(ahead_a, 0, 2);
            __builtin_prefetch(ahead_b, 0, 2);
        }
        int64_t i = -1, j = -1;
        for (int64_t below = pieces.kept - 1; below >= 0; below--)
            for (int64_t q = most(0, below - pieces.a + 1); q < pieces.b && q <= below; q++) {
                multiply_tiles(left + (below - q) * 2 * TILE_NUMBERS, below - q != i, right + q * 2 * TILE_NUMBERS,
                               q != j);
                i = below - q;
                j = q;
            }
        left += pieces.a * 2 * TILE_NUMBERS;
        right += pieces.b * 2 * TILE_NUMBERS;
    }
    if (!to->from && rows == GEMM_ROWS && columns >= GEMM_COLUMNS) {
        store_tiles(to->to, to->to_stride);
        return;
    }
    _Alignas(GEMM_LINE) float sums[GEMM_ROWS * GEMM_COLUMNS];
    store_tiles(sums, GEMM_COLUMNS);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < GEMM_COLUMNS && c < columns; c += LANES) {
            vf sum = vf_load(VJP_F32, sums, r * GEMM_COLUMNS + c);
            if (to->from) sum = vf_add(vf_load_part(VJP_F32, to->from, r * to->from_stride + c, columns - c), sum);
            vf_store_part(VJP_F32, to->to, r * to->to_stride + c, columns - c, sum);
        }
}

#endif
