/* SPDX-License-Identifier: MIT */
/*
 * Products of at most 16 rows with AMX: generating text multiplies one row per text by every weight of the model, so
 * the time is that of reading the weights once. The weights [n, k] are the left operand here, c^T = b a^T: their tiles
 * are loaded from where they are, 16 rows of 32 terms, and nothing is packed but the few rows of a.
 *
 * Each sum has the same terms in the same order as in gemm_amx.h (slices of GEMM_DEPTH terms, added in order), and an
 * instruction treats its operands alike: the bits are those of a product of many rows.
 */
#ifndef VJP_CPU_GEMM_FEW_AMX_H
#define VJP_CPU_GEMM_FEW_AMX_H

#include "cpu/gemm/gemm_amx.h"
#include "cpu/gemm/gemm_few.h"

/* Rows of a, and rows of b per block: two tiles, whose two chains of sums hide each other's latency. */
enum { FEW_ROWS = SIDE, FEW_COLUMNS = 2 * SIDE };

static bool suits_few_rows(const gemm_call *call) {
    const gemm_operand *a = &call->a, *b = &call->b;
    return call->items == 1 && call->m <= FEW_ROWS && call->n >= FEW_COLUMNS && call->k > 0 && a->dtype == VJP_BF16 &&
           !a->read && !a->slab_rows && !a->transposed && b->dtype == VJP_BF16 && !b->read && !b->slab_rows &&
           b->transposed && (call->c.epilogue || !call->c.accumulate);
}

/* Packed rows of a: for each 32 terms, 16 pairs of terms of every row. */
static size_t few_rows_bytes(const gemm_call *call) {
    return (size_t)(vjp_divide_up(call->k, TERMS) * SIDE * call->m) * sizeof(uint32_t);
}

static void pack_few_rows(const gemm_call *call, void *workspace) {
    const uint16_t *a = call->a.data;
    uint32_t *to = workspace;
    for (int64_t p = 0; p < vjp_divide_up(call->k, TERMS) * SIDE; p++)
        for (int64_t r = 0; r < call->m; r++) {
            const uint16_t *row = a + r * call->a.stride + 2 * p;
            uint32_t even = 2 * p < call->k ? row[0] : 0, odd = 2 * p + 1 < call->k ? row[1] : 0;
            to[p * call->m + r] = even | odd << 16;
        }
}

static void begin_few_rows(int64_t rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } setup = {.palette = 1};
    uint16_t narrow = (uint16_t)(rows * (int64_t)sizeof(float));
    const uint16_t bytes[] = {narrow, narrow, CACHE_LINE, CACHE_LINE, narrow};
    for (int i = 0; i < 5; i++) {
        setup.row_bytes[i] = bytes[i];
        setup.rows[i] = SIDE;
    }
    _tile_loadconfig(&setup);
}

static void end_few_rows(void) {
    _tile_release();
}

/* 32 terms of one block. */
INLINE void few_terms(const uint16_t *left, int64_t stride, const uint32_t *right, int64_t rows) {
    _tile_loadd(4, right, rows * (int64_t)sizeof *right);
    _tile_loadd(2, left, stride * (int64_t)sizeof *left);
    _tile_dpbf16ps(0, 2, 4);
    _tile_loadd(3, left + SIDE * stride, stride * (int64_t)sizeof *left);
    _tile_dpbf16ps(1, 3, 4);
}

/* The sums of all rows of a with FEW_COLUMNS rows of b from `column`. */
static void few_block(const gemm_call *call, const void *packed, int64_t column, float sums[FEW_ROWS][FEW_COLUMNS]) {
    int64_t stride = call->b.stride, rows = call->m, k = call->k;
    const uint16_t *block = (const uint16_t *)call->b.data + column * stride;
    const uint32_t *pairs = packed;
    _Alignas(CACHE_LINE) float slice[FEW_COLUMNS][SIDE] = {{0}}, total[FEW_COLUMNS][SIDE];
    _Alignas(CACHE_LINE) uint16_t last[FEW_COLUMNS][TERMS];
    for (int64_t begin = 0; begin < k; begin += GEMM_DEPTH) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t t = begin; t < vjp_min(k, begin + GEMM_DEPTH); t += TERMS) {
            prefetch_few(block, GEMM_NUMBER, stride, k, t);
            if (k - t >= TERMS) {
                few_terms(block + t, stride, pairs + t / 2 * rows, rows);
                continue;
            }
            memset(last, 0, sizeof last);
            for (int64_t j = 0; j < FEW_COLUMNS; j++)
                memcpy(last[j], block + j * stride + t, (size_t)(k - t) * sizeof **last);
            few_terms(last[0], TERMS, pairs + t / 2 * rows, rows);
        }
        _tile_stored(0, slice[0], sizeof *slice);
        _tile_stored(1, slice[SIDE], sizeof *slice);
        for (int64_t j = 0; j < FEW_COLUMNS; j++) {
            vf sum = vf_load(VJP_F32, slice[j], 0);
            if (begin > 0) sum = vf_add(vf_load(VJP_F32, total[j], 0), sum);
            vf_store(VJP_F32, total[j], 0, sum);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < FEW_COLUMNS; j++)
            sums[r][j] = total[j][r];
}

#endif
