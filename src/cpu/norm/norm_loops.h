/* SPDX-License-Identifier: MIT */
/*
 * The loops along a row of layer_norm and rms_norm, each compiled once for every storage type, store and kind of norm
 * (`centered`: the row's mean is subtracted): y, dx, and the sums of the backward over a few rows together.
 */
#ifndef VJP_CPU_NORM_LOOPS_H
#define VJP_CPU_NORM_LOOPS_H

#include "cpu/norm/norm.h"

/*
 * Rows that share each load and store of the column sums. Four rows need 8 sums and 12 constants in registers: what
 * AVX-512 and NEON hold; AVX2's 16 registers hold two.
 */
#if defined(CPU_ISA_AVX2)
enum { ROWS_TOGETHER = 2 };
#else
enum { ROWS_TOGETHER = 4 };
#endif

INLINE vf norm_y_of(bool centered, vf x, norm_scale scale, const float *gamma, const float *beta, int64_t i,
                    int64_t n) {
    vf rstd = vf_set(scale.rstd);
    vf xh = centered ? vf_add(norm_xh(x, rstd, vf_set(scale.shift)), vf_set(scale.rest)) : vf_mul(x, rstd);
    return vf_fma(xh, vf_load_part(VJP_F32, gamma, i, n), vf_load_part(VJP_F32, beta, i, n));
}

INLINE void norm_y_at(vjp_dtype dtype, write_mode mode, bool centered, norm_run run, norm_scale scale,
                      const float *gamma, const float *beta, int64_t i, int64_t n) {
    vf y = norm_y_of(centered, vf_load_part(dtype, run.x, i, n), scale, gamma, beta, i, n);
    vf_write_part(mode, dtype, run.out, i, n, y);
}

/* Whole vectors, and apart from them the ends: before an aligned address and after the last vector. */
INLINE void norm_y(vjp_dtype dtype, write_mode mode, bool centered, norm_run run, norm_scale scale, const float *gamma,
                   const float *beta) {
    int64_t i = write_head(mode, dtype, run.out, run.n);
    if (i) norm_y_at(dtype, mode, centered, run, scale, gamma, beta, 0, i);
    for (; i + LANES <= run.n; i += LANES) {
        norm_prefetch(dtype, false, &run, i);
        norm_y_at(dtype, mode, centered, run, scale, gamma, beta, i, LANES);
    }
    if (i < run.n) norm_y_at(dtype, mode, centered, run, scale, gamma, beta, i, run.n - i);
}

/* x and dy are loaded before dx and y are written: either may be in their place. */
INLINE void norm_dx_at(vjp_dtype dtype, write_mode mode, bool centered, norm_run run, norm_scale scale, norm_line line,
                       const float *gamma, const float *beta, int64_t i, int64_t n) {
    vf x = vf_load_part(dtype, run.x, i, n), rstd = vf_set(scale.rstd), slope = vf_set(line.slope);
    vf g = vf_mul(vf_load_part(dtype, run.dy, i, n), vf_load_part(VJP_F32, gamma, i, n));
    vf rest = centered ? vf_fma(slope, norm_xh(x, rstd, vf_set(scale.shift)), vf_set(line.level))
                       : vf_mul(slope, vf_mul(x, rstd));
    vf_write_part(mode, dtype, run.out, i, n, vf_fma(rstd, g, rest));
    if (!centered && run.y)
        vf_write_part(run.add_y ? WRITE_ADD : WRITE_PLAIN, dtype, run.y, i, n,
                      norm_y_of(false, x, scale, gamma, beta, i, n));
}

INLINE void norm_dx(vjp_dtype dtype, write_mode mode, bool centered, norm_run run, norm_scale scale, norm_line line,
                    const float *gamma, const float *beta) {
    int64_t i = write_head(mode, dtype, run.out, run.n);
    if (i) norm_dx_at(dtype, mode, centered, run, scale, line, gamma, beta, 0, i);
    for (; i + LANES <= run.n; i += LANES) {
        norm_prefetch(dtype, true, &run, i);
        norm_dx_at(dtype, mode, centered, run, scale, line, gamma, beta, i, LANES);
    }
    if (i < run.n) norm_dx_at(dtype, mode, centered, run, scale, line, gamma, beta, i, run.n - i);
}

/* Consecutive rows of x and dy, `stride` elements apart, of which n columns are summed. */
typedef struct norm_row_block {
    const void *x, *dy;
    int64_t stride, n;
    const float *gamma;              /* by column */
    norm_scale scale[ROWS_TOGETHER]; /* by row */
    norm_sums sums[ROWS_TOGETHER];   /* by row: of g and g * xh; not set where `want_sums` is false */
    bool want_sums;
    float *dgamma, *dbeta; /* by column, to be added to; NULL: not wanted */
} norm_row_block;

/*
 * Sums `count` rows into sums[], and adds dy * xh and dy to the column sums. The parts of a vector are the outer loop,
 * so that a 128-bit instruction set holds four rows' sums in registers as a 512-bit one does.
 */
INLINE void norm_sum_rows(vjp_dtype dtype, bool centered, int count, norm_row_block *b, bool want_sums, float *dgamma,
                          float *dbeta) {
    const void *x = b->x, *dy = b->dy;
    const float *gamma = b->gamma;
    int64_t n = b->n, stride = b->stride;
    const norm_scale *scale = b->scale;
    for (int r = 0; r < count; r++)
        b->sums[r] = (norm_sums){0};
    for (int64_t block = 0; block < n; block += NORM_BLOCK) {
        int64_t end = vjp_min(block + NORM_BLOCK, n), whole = block + (end - block) / LANES * LANES;
        vf sum_g[ROWS_TOGETHER], sum_gxh[ROWS_TOGETHER];
        EACH_PART {
            native_f rstd[ROWS_TOGETHER], shift[ROWS_TOGETHER], rest[ROWS_TOGETHER];
            native_f total_g[ROWS_TOGETHER], total_gxh[ROWS_TOGETHER];
            for (int r = 0; r < count; r++) {
                rstd[r] = vf_set(scale[r].rstd).v[0];
                shift[r] = vf_set(scale[r].shift).v[0];
                rest[r] = vf_set(scale[r].rest).v[0];
                total_g[r] = total_gxh[r] = (native_f){0};
            }
            for (int64_t i = block + p * NATIVE_LANES; i < whole; i += LANES) {
                native_f weight = {0}, column_gamma = {0}, column_beta = {0};
                if (want_sums) weight = native_load(VJP_F32, gamma, i);
                if (dgamma) column_gamma = native_load(VJP_F32, dgamma, i);
                if (dbeta) column_beta = native_load(VJP_F32, dbeta, i);
                for (int r = 0; r < count; r++) {
                    native_f d = native_load(dtype, dy, r * stride + i);
                    native_f xh = native_load(dtype, x, r * stride + i);
                    xh = centered ? norm_xh_native(xh, rstd[r], shift[r]) + rest[r] : xh * rstd[r];
                    if (want_sums) {
                        native_f g = d * weight;
                        if (centered) total_g[r] = total_g[r] + g;
                        total_gxh[r] = native_fma(g, xh, total_gxh[r]);
                    }
                    if (dgamma) column_gamma = native_fma(d, xh, column_gamma);
                    if (dbeta) column_beta = column_beta + d;
                }
                if (dgamma) memcpy(dgamma + i, &column_gamma, sizeof column_gamma);
                if (dbeta) memcpy(dbeta + i, &column_beta, sizeof column_beta);
            }
            for (int r = 0; r < count; r++) {
                sum_g[r].v[p] = total_g[r];
                sum_gxh[r].v[p] = total_gxh[r];
            }
        }
        for (int r = 0; r < count && whole < end; r++) {
            vf d = vf_load_part(dtype, dy, r * stride + whole, end - whole);
            vf xh = vf_load_part(dtype, x, r * stride + whole, end - whole);
            xh = centered ? vf_add(norm_xh(xh, vf_set(scale[r].rstd), vf_set(scale[r].shift)), vf_set(scale[r].rest))
                          : vf_mul(xh, vf_set(scale[r].rstd));
            if (want_sums) {
                vf g = vf_mul(d, vf_load_part(VJP_F32, gamma, whole, end - whole));
                if (centered) sum_g[r] = vf_add(sum_g[r], g);
                sum_gxh[r] = vf_fma(g, xh, sum_gxh[r]);
            }
            if (dgamma) vf_store(VJP_F32, dgamma, whole, vf_fma(d, xh, vf_load(VJP_F32, dgamma, whole)));
            if (dbeta) vf_store(VJP_F32, dbeta, whole, vf_add(d, vf_load(VJP_F32, dbeta, whole)));
        }
        for (int r = 0; r < count && want_sums; r++) {
            if (centered) b->sums[r].sum += (double)vf_sum(sum_g[r]);
            b->sums[r].sum_xh += (double)vf_sum(sum_gxh[r]);
        }
    }
}

/* All outputs, as training needs them, are compiled separately; everything else has the choices in the loop. */
INLINE void norm_sum_block(vjp_dtype dtype, bool centered, int64_t count, norm_row_block *b) {
    if (count == 1)
        norm_sum_rows(dtype, centered, 1, b, b->want_sums, b->dgamma, b->dbeta);
    else if (b->want_sums && b->dgamma && b->dbeta)
        norm_sum_rows(dtype, centered, ROWS_TOGETHER, b, true, b->dgamma, b->dbeta);
    else
        norm_sum_rows(dtype, centered, ROWS_TOGETHER, b, b->want_sums, b->dgamma, b->dbeta);
}

#endif
