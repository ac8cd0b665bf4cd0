/*
 * The norm of rows, for layer_norm (`centered`: each row's mean is taken away) and rms_norm (it is not). With
 * xh = (x - mean) * rstd and g = dy * gamma (docs/ops/layer_norm.md derives it):
 *
 *     y  = xh * gamma + beta
 *     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy over rows
 *
 * Ordinarily a task takes whole rows: it sums over a few of them (and down their columns), then writes their dx while
 * they are still in the cache, so x and dy are read from memory once. Every task has its own column sums in the
 * workspace; they are added in the order of the tasks. A few huge rows are cut the other way (`wide`): a task takes
 * NORM_COLUMNS columns of all rows, with one round of tasks for the sums and one for dx.
 *
 * The order of all additions follows from rows and dim alone. How many rows share a pass over the column sums does
 * not change it: each row's sums are its own, and a column's sum takes the rows one after the other.
 */
#ifndef VJP_CPU_NORM_ROWS_H
#define VJP_CPU_NORM_ROWS_H

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

/* x and dy of the rows taken together stay in a second-level cache of 1 MiB or more. */
enum { ROWS_TOGETHER_BYTES = 1 << 20 };

/* Least rows of a task with column sums: with 8, its partial is a sixth of what it moves; usually it is a hundredth. */
enum { LEAST_ROWS = 8 };

/* Elements, at least, between the row whose y is written and the row that is fetched meanwhile. */
enum { FORWARD_AHEAD = 512 };

/* Fewer rows than this, and rows at least this long, are cut by columns. */
enum { WIDE_ROWS = 64, WIDE_ROWS_FORWARD = 16, WIDE_DIM = 8 * NORM_COLUMNS };

/* One call, forward or backward: what the op's file fills in, then what the plan adds. */
typedef struct norm_rows {
    const vjp_work *work;
    norm_by_dtype by_dtype; /* norm_rows_step() for the call's storage type */
    bool centered;
    vjp_norm_sizes size;
    double eps;
    const void *x, *dy;
    void *out; /* y or dx */
    norm_store store;
    norm_parameter gamma, beta, dgamma, dbeta;
    float *mean_out, *rstd_out;     /* forward: statistics to save */
    const float *mean_in, *rstd_in; /* backward: saved statistics; rstd_in is NULL where they are measured again */

    bool wide, two_level;
    int64_t padded, units;
    cpu_cut cut;
    const float *gamma_f32, *beta_f32; /* whole rows only */
    float *gamma_buffer, *beta_buffer;
    float *partials; /* of task t at partials + t * partial_floats: recent dgamma, recent dbeta, older the same */
    int64_t partial_floats;
    double *short_sums; /* short rows: [tasks, 2, LANES], dgamma and dbeta */
    /* Wide rows: */
    norm_scale *scale;     /* [rows] */
    norm_moments *moments; /* [rows, units]: for the statistics, then sums of g and g * xh */
} norm_rows;

/* ---- Plan ---------------------------------------------------------------------------------------------- */

static inline void *norm_take(void *workspace, size_t *used, size_t bytes) {
    void *at = workspace ? (char *)workspace + *used : NULL;
    *used += (bytes + 63) / 64 * 64;
    return at;
}

/* Decides how the call is cut and lays the workspace out; returns its bytes. NULL: only to know them. */
static inline size_t norm_rows_plan(norm_rows *call, void *workspace) {
    int64_t rows = call->size.rows, dim = call->size.dim, item = (int64_t)dtype_bytes(call->work->storage);
    bool backward = call->work->pass == VJP_BACKWARD, partials = call->dgamma.data || call->dbeta.data;
    size_t used = 0;
    call->padded = norm_pad(dim);
    call->wide = dim >= WIDE_DIM && rows < (partials ? WIDE_ROWS : WIDE_ROWS_FORWARD);
    if (call->wide) {
        call->units = (dim + NORM_COLUMNS - 1) / NORM_COLUMNS;
        call->scale = norm_take(workspace, &used, (size_t)rows * sizeof *call->scale);
        call->moments = norm_take(workspace, &used, (size_t)(rows * call->units) * sizeof *call->moments);
        return used;
    }
    call->cut = vjp_cpu_cut_items(rows, dim * item * (backward ? 3 : 2), partials ? CPU_MOST_PARTIALS : CPU_MOST_TASKS);
    if (partials && call->cut.size < LEAST_ROWS) {
        call->cut.size = LEAST_ROWS;
        call->cut.count = (rows + LEAST_ROWS - 1) / LEAST_ROWS;
    }
    if (norm_parameter_converts(call->gamma))
        call->gamma_buffer = norm_take(workspace, &used, (size_t)dim * sizeof(float));
    if (!backward && norm_parameter_converts(call->beta))
        call->beta_buffer = norm_take(workspace, &used, (size_t)dim * sizeof(float));
    if (partials && dim < LANES) {
        call->short_sums = norm_take(workspace, &used, (size_t)call->cut.count * 2 * LANES * sizeof(double));
    } else if (partials) {
        call->two_level = call->cut.size > NORM_FLUSH_ROWS;
        int arrays = ((call->dgamma.data != NULL) + (call->dbeta.data != NULL)) * (call->two_level ? 2 : 1);
        call->partial_floats = call->padded * arrays;
        call->partials = norm_take(workspace, &used, (size_t)(call->cut.count * call->partial_floats) * sizeof(float));
    }
    return used;
}

/* ---- Steps: the loops, compiled once a storage type ----------------------------------------------------- */

INLINE void norm_y_at(norm_piece *p, vjp_dtype dtype, norm_store store, bool centered, int64_t i, int64_t n) {
    vf xh = norm_load(dtype, p->x, i, n), rstd = vf_set(p->scale[0].rstd);
    if (centered)
        xh = vf_add(norm_xh(xh, rstd, vf_set(p->scale[0].shift)), vf_set(p->scale[0].rest));
    else
        xh = vf_mul(xh, rstd);
    norm_put(dtype, store, p->out, i, n,
             vf_fma(xh, vf_load_part(VJP_F32, p->gamma, i, n), vf_load_part(VJP_F32, p->beta, i, n)));
}

/* dx = rstd * g + (slope * xh + level), xh without its rest: that is in `level`. */
INLINE void norm_dx_at(norm_piece *p, vjp_dtype dtype, norm_store store, bool centered, int64_t i, int64_t n) {
    vf x = norm_load(dtype, p->x, i, n), rstd = vf_set(p->scale[0].rstd), slope = vf_set(p->slope[0]);
    vf g = vf_mul(norm_load(dtype, p->dy, i, n), vf_load_part(VJP_F32, p->gamma, i, n));
    vf rest = centered ? vf_fma(slope, norm_xh(x, rstd, vf_set(p->scale[0].shift)), vf_set(p->level[0]))
                       : vf_mul(slope, vf_mul(x, rstd));
    norm_put(dtype, store, p->out, i, n, vf_fma(rstd, g, rest));
}

/* y or dx of a row's n columns: whole vectors, with the ends (before an aligned address, after the last vector) apart.
 */
INLINE void norm_out_as(norm_piece *p, vjp_dtype dtype, norm_store store, bool centered, bool backward, int64_t from,
                        int64_t to) {
    norm_piece local = *p; /* its constants stay in registers whatever the stores write to */
    for (int64_t i = from; i < to; i += LANES) {
        norm_prefetch(dtype, local.x, i + local.ahead);
        if (backward) {
            norm_prefetch(dtype, local.dy, i + local.ahead);
            norm_dx_at(&local, dtype, store, centered, i, LANES);
        } else {
            norm_y_at(&local, dtype, store, centered, i, LANES);
        }
    }
}

INLINE void norm_out(norm_piece *p, vjp_dtype dtype, bool centered, bool backward) {
    int64_t head = norm_head(dtype, p->store, p->out, p->n), whole = head + (p->n - head) / LANES * LANES;
    const int64_t ends[2][2] = {{0, head}, {whole, p->n - whole}};
    switch (p->store) {
    case NORM_WRITE: norm_out_as(p, dtype, NORM_WRITE, centered, backward, head, whole); break;
    case NORM_ADD: norm_out_as(p, dtype, NORM_ADD, centered, backward, head, whole); break;
    case NORM_STREAM: norm_out_as(p, dtype, NORM_STREAM, centered, backward, head, whole); break;
    }
    for (int k = 0; k < 2; k++) {
        if (ends[k][1] == 0) continue;
        if (backward)
            norm_dx_at(p, dtype, p->store, centered, ends[k][0], ends[k][1]);
        else
            norm_y_at(p, dtype, p->store, centered, ends[k][0], ends[k][1]);
    }
}

/*
 * Adds the sums of g and g * xh of `count` rows, n columns each and `stride` apart, to sums[row], and dy * xh and dy to
 * the column sums. What is not wanted is NULL. The parts of a vector are the outer loop, so that a 128-bit
 * instruction set holds four rows' sums in registers as a 512-bit one does.
 */
INLINE void norm_sums(vjp_dtype dtype, bool centered, int count, const void *x, const void *dy, int64_t stride,
                      int64_t n, const float *gamma, const norm_scale *scale, norm_moments *sums, float *dgamma,
                      float *dbeta) {
    for (int64_t block = 0; block < n; block += NORM_BLOCK) {
        int64_t end = norm_min(block + NORM_BLOCK, n), whole = block + (end - block) / LANES * LANES;
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
                if (sums) weight = norm_load_native(VJP_F32, gamma, i);
                if (dgamma) column_gamma = norm_load_native(VJP_F32, dgamma, i);
                if (dbeta) column_beta = norm_load_native(VJP_F32, dbeta, i);
                for (int r = 0; r < count; r++) {
                    native_f d = norm_load_native(dtype, dy, r * stride + i);
                    native_f xh = norm_load_native(dtype, x, r * stride + i);
                    xh = centered ? norm_xh_native(xh, rstd[r], shift[r]) + rest[r] : xh * rstd[r];
                    if (sums) {
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
            if (sums) {
                vf g = vf_mul(d, vf_load_part(VJP_F32, gamma, whole, end - whole));
                if (centered) sum_g[r] = vf_add(sum_g[r], g);
                sum_gxh[r] = vf_fma(g, xh, sum_gxh[r]);
            }
            if (dgamma) vf_store(VJP_F32, dgamma, whole, vf_fma(d, xh, vf_load(VJP_F32, dgamma, whole)));
            if (dbeta) vf_store(VJP_F32, dbeta, whole, vf_add(d, vf_load(VJP_F32, dbeta, whole)));
        }
        for (int r = 0; r < count && sums; r++) {
            if (centered) sums[r].sum += (double)vf_sum(sum_g[r]);
            sums[r].squares += (double)vf_sum(sum_gxh[r]);
        }
    }
}

/* What training asks for (all outputs) is compiled by itself, everything else with the choices in the loop. */
INLINE void norm_sums_step(norm_piece *p, vjp_dtype dtype, bool centered) {
    norm_moments *sums = p->want_sums ? p->sums : NULL;
    if (p->rows == 1)
        norm_sums(dtype, centered, 1, p->x, p->dy, p->stride, p->n, p->gamma, p->scale, sums, p->dgamma, p->dbeta);
    else if (sums && p->dgamma && p->dbeta)
        norm_sums(dtype, centered, ROWS_TOGETHER, p->x, p->dy, p->stride, p->n, p->gamma, p->scale, p->sums, p->dgamma,
                  p->dbeta);
    else
        norm_sums(dtype, centered, ROWS_TOGETHER, p->x, p->dy, p->stride, p->n, p->gamma, p->scale, sums, p->dgamma,
                  p->dbeta);
}

/* An op's file calls this with constants, in one function a storage type. */
INLINE void norm_rows_step(norm_piece *p, vjp_dtype dtype, bool centered) {
    switch (p->step) {
    case NORM_MEASURE: norm_step_measure(p, dtype, centered); break;
    case NORM_EXACT: norm_step_exact(p, dtype, centered); break;
    case NORM_Y: norm_out(p, dtype, centered, false); break;
    case NORM_SUMS: norm_sums_step(p, dtype, centered); break;
    case NORM_DX: norm_out(p, dtype, centered, true); break;
    default: break;
    }
}

/* ---- Tasks of whole rows ----------------------------------------------------------------------------------- */

static inline const void *norm_rows_at(const norm_rows *call, const void *data, int64_t i) {
    return norm_at(call->work->storage, data, i);
}

static inline norm_statistics norm_rows_statistics(const norm_rows *call, int64_t row) {
    if (call->rstd_in)
        return (norm_statistics){call->mean_in ? (double)call->mean_in[row] : 0, (double)call->rstd_in[row]};
    int64_t dim = call->size.dim;
    return norm_statistics_of(call->by_dtype, norm_rows_at(call, call->x, row * dim), dim, call->eps, call->centered);
}

static inline void norm_rows_save(const norm_rows *call, int64_t row, norm_statistics s) {
    if (call->mean_out) call->mean_out[row] = (float)s.mean;
    if (call->rstd_out) call->rstd_out[row] = (float)s.rstd;
}

static inline void norm_rows_y(const norm_rows *call, int64_t at, int64_t n, const float *gamma, const float *beta,
                               norm_scale scale, int64_t ahead) {
    norm_piece p = {.step = NORM_Y, .store = call->store, .n = n, .gamma = gamma, .scale = {scale}, .ahead = ahead};
    p.beta = beta;
    p.x = norm_rows_at(call, call->x, at);
    p.out = norm_at_out(call->work->storage, call->out, at);
    call->by_dtype(&p);
}

/* dx of n columns at `at`, from the sums of g and g * xh over the whole row. */
static inline void norm_rows_dx(const norm_rows *call, int64_t at, int64_t n, const float *gamma, norm_scale scale,
                                norm_moments sums, int64_t ahead) {
    double rstd = (double)scale.rstd, dim = (double)call->size.dim, steep = -rstd * (sums.squares / dim);
    float slope = (float)steep, level = (float)(-rstd * (sums.sum / dim) + steep * (double)scale.rest);
    norm_piece p = {.step = NORM_DX, .store = call->store, .n = n, .gamma = gamma, .scale = {scale}, .ahead = ahead};
    p.slope = &slope;
    p.level = &level;
    p.x = norm_rows_at(call, call->x, at);
    p.dy = norm_rows_at(call, call->dy, at);
    p.out = norm_at_out(call->work->storage, call->out, at);
    call->by_dtype(&p);
}

static inline void norm_rows_forward(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t dim = call->size.dim, end = cpu_cut_end(&call->cut, task), further = 1 + FORWARD_AHEAD / dim;
    for (int64_t row = cpu_cut_begin(&call->cut, task); row < end; row++) {
        norm_statistics s = norm_rows_statistics(call, row);
        norm_rows_save(call, row, s);
        if (call->out)
            norm_rows_y(call, row * dim, dim, call->gamma_f32, call->beta_f32, norm_scale_of(s),
                        row + further < end ? further * dim : 0);
    }
    if (call->store == NORM_STREAM) vf_stream_done();
}

static inline void norm_rows_backward(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t dim = call->size.dim, begin = cpu_cut_begin(&call->cut, task), end = cpu_cut_end(&call->cut, task);
    float *next = call->partials ? call->partials + (int64_t)task * call->partial_floats : NULL;
    if (next) memset(next, 0, (size_t)call->partial_floats * sizeof(float));
    float *dgamma = call->dgamma.data ? next : NULL;
    float *dbeta = call->dbeta.data ? next + (dgamma ? call->padded : 0) : NULL;
    int64_t older = call->partial_floats / 2, item = (int64_t)dtype_bytes(call->work->storage);
    int64_t together = 2 * ROWS_TOGETHER * dim * item <= ROWS_TOGETHER_BYTES ? ROWS_TOGETHER : 1;
    for (int64_t row = begin; row < end;) {
        norm_piece p = {.step = NORM_SUMS, .n = dim, .stride = dim, .gamma = call->gamma_f32};
        p.rows = end - row >= together ? together : 1;
        p.want_sums = call->out != NULL;
        p.dgamma = dgamma;
        p.dbeta = dbeta;
        p.x = norm_rows_at(call, call->x, row * dim);
        p.dy = norm_rows_at(call, call->dy, row * dim);
        for (int64_t r = 0; r < p.rows && (call->out || dgamma); r++) /* dbeta alone needs no xh */
            p.scale[r] = norm_scale_of(norm_rows_statistics(call, row + r));
        call->by_dtype(&p);
        int64_t ahead = end - row >= 2 * p.rows ? p.rows * dim : 0;
        for (int64_t r = 0; r < p.rows && call->out; r++)
            norm_rows_dx(call, (row + r) * dim, dim, call->gamma_f32, p.scale[r], p.sums[r], ahead);
        row += p.rows;
        /* Counted in rows of the task, so that it does not matter how many were taken together. */
        if (call->two_level && (row - begin) % NORM_FLUSH_ROWS == 0) {
            if (dgamma) norm_flush(dgamma, dgamma + older, call->padded);
            if (dbeta) norm_flush(dbeta, dbeta + older, call->padded);
        }
    }
    if (call->store == NORM_STREAM) vf_stream_done();
}

/* Adds the tasks' column sums, NORM_COLUMNS columns a task. */
static inline void norm_rows_columns(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t from = (int64_t)task * NORM_COLUMNS, n = norm_min(NORM_COLUMNS, call->size.dim - from);
    const norm_parameter outputs[] = {call->dgamma, call->dbeta};
    const float *partials = call->partials + from;
    for (int k = 0; k < 2; k++) {
        if (!outputs[k].data) continue;
        double sum[NORM_COLUMNS];
        memset(sum, 0, (size_t)n * sizeof sum[0]);
        norm_add_columns(sum, partials, call->cut.count, call->partial_floats, n);
        if (call->two_level)
            norm_add_columns(sum, partials + call->partial_floats / 2, call->cut.count, call->partial_floats, n);
        norm_parameter_write(outputs[k], from, n, sum);
        partials += call->padded;
    }
}

/* ---- Short rows --------------------------------------------------------------------------------------------- */

/*
 * Rows shorter than a vector, an element at a time in double. There the result often cancels to almost nothing (the dx
 * of a row of one or two elements is all but zero whatever dy is), which f32 would drown in its rounding.
 */
static inline norm_statistics norm_short_statistics(const norm_rows *call, int64_t row, const double *x) {
    if (call->rstd_in) return norm_rows_statistics(call, row);
    int64_t dim = call->size.dim;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < dim && call->centered; i++)
        sum += x[i];
    double mean = sum / (double)dim;
    for (int64_t i = 0; i < dim; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    return (norm_statistics){mean, 1 / sqrt(squares / (double)dim + call->eps)};
}

static inline void norm_short_forward(void *argument, size_t task) {
    const norm_rows *call = argument;
    vjp_dtype dtype = call->work->storage;
    int64_t dim = call->size.dim;
    for (int64_t row = cpu_cut_begin(&call->cut, task); row < cpu_cut_end(&call->cut, task); row++) {
        double x[LANES];
        norm_read_doubles(dtype, call->x, row * dim, dim, x);
        norm_statistics s = norm_short_statistics(call, row, x);
        norm_rows_save(call, row, s);
        for (int64_t i = 0; i < dim; i++)
            x[i] = (x[i] - s.mean) * s.rstd * (double)call->gamma_f32[i] + (double)call->beta_f32[i];
        if (call->out) norm_write_doubles(dtype, call->store, call->out, row * dim, dim, x);
    }
}

static inline void norm_short_backward(void *argument, size_t task) {
    const norm_rows *call = argument;
    vjp_dtype dtype = call->work->storage;
    int64_t dim = call->size.dim, begin = cpu_cut_begin(&call->cut, task), end = cpu_cut_end(&call->cut, task);
    double dgamma[LANES] = {0}, dbeta[LANES] = {0};
    for (int64_t row = begin; row < end; row++) {
        double xh[LANES], dy[LANES], sum_g = 0, sum_gxh = 0;
        norm_read_doubles(dtype, call->x, row * dim, dim, xh);
        norm_read_doubles(dtype, call->dy, row * dim, dim, dy);
        norm_statistics s = norm_short_statistics(call, row, xh);
        for (int64_t i = 0; i < dim; i++) {
            xh[i] = (xh[i] - s.mean) * s.rstd;
            dgamma[i] += dy[i] * xh[i];
            dbeta[i] += dy[i];
            dy[i] *= (double)call->gamma_f32[i]; /* g */
            sum_g += dy[i];
            sum_gxh += dy[i] * xh[i];
        }
        double mean_g = call->centered ? sum_g / (double)dim : 0, mean_gxh = sum_gxh / (double)dim;
        for (int64_t i = 0; i < dim; i++)
            dy[i] = s.rstd * (dy[i] - mean_g - xh[i] * mean_gxh);
        if (call->out) norm_write_doubles(dtype, call->store, call->out, row * dim, dim, dy);
    }
    double *sums = call->short_sums ? call->short_sums + (int64_t)task * 2 * LANES : NULL;
    for (int64_t i = 0; i < LANES && sums; i++) {
        sums[i] = dgamma[i];
        sums[LANES + i] = dbeta[i];
    }
}

/* Adds the tasks' column sums. */
static inline void norm_short_columns(const norm_rows *call) {
    const norm_parameter outputs[] = {call->dgamma, call->dbeta};
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < call->size.dim && outputs[k].data; i++) {
            double sum = 0;
            for (int64_t task = 0; task < call->cut.count; task++)
                sum += call->short_sums[(task * 2 + k) * LANES + i];
            norm_parameter_write(outputs[k], i, 1, &sum);
        }
}

/* ---- Wide rows ---------------------------------------------------------------------------------------------- */

static inline norm_piece norm_wide_piece(const norm_rows *call, int64_t row, int64_t unit) {
    int64_t dim = call->size.dim, from = unit * NORM_COLUMNS;
    return (norm_piece){.step = NORM_MEASURE,
                        .x = norm_rows_at(call, call->x, row * dim),
                        .from = from,
                        .n = norm_min(NORM_COLUMNS, dim - from),
                        .run = dim,
                        .eps = call->eps};
}

/* The moments of unit `task % units` of row `task / units`. */
static inline void norm_wide_measure(void *argument, size_t task) {
    const norm_rows *call = argument;
    norm_piece p = norm_wide_piece(call, (int64_t)task / call->units, (int64_t)task % call->units);
    call->by_dtype(&p);
    call->moments[task] = p.sums[0];
}

/* The sums of a row from those of its units, in their order. */
static inline norm_moments norm_wide_total(const norm_rows *call, int64_t row) {
    norm_moments total = {0, 0};
    for (int64_t unit = 0; unit < call->units; unit++) {
        total.sum += call->moments[row * call->units + unit].sum;
        total.squares += call->moments[row * call->units + unit].squares;
    }
    return total;
}

/* A row's statistics: saved ones, or from its units' moments. */
static inline void norm_wide_statistics(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t row = (int64_t)task;
    norm_statistics s;
    if (call->rstd_in) {
        s = norm_rows_statistics(call, row);
    } else {
        norm_piece p = norm_wide_piece(call, row, 0);
        p.n = 0; /* only the pilot */
        call->by_dtype(&p);
        s = norm_conclude(call->by_dtype, &p, norm_wide_total(call, row), call->centered);
    }
    norm_rows_save(call, row, s);
    call->scale[row] = norm_scale_of(s);
}

/* y of one unit of all rows. */
static inline void norm_wide_forward(void *argument, size_t task) {
    const norm_rows *call = argument;
    float gamma_buffer[NORM_COLUMNS], beta_buffer[NORM_COLUMNS];
    int64_t from = (int64_t)task * NORM_COLUMNS, n = norm_min(NORM_COLUMNS, call->size.dim - from);
    const float *gamma = norm_parameter_read(call->gamma, from, n, 1, gamma_buffer);
    const float *beta = norm_parameter_read(call->beta, from, n, 0, beta_buffer);
    for (int64_t row = 0; row < call->size.rows; row++)
        norm_rows_y(call, row * call->size.dim + from, n, gamma, beta, call->scale[row], 0);
    if (call->store == NORM_STREAM) vf_stream_done();
}

/* One unit's sums of all rows, and its columns of dgamma and dbeta. */
static inline void norm_wide_sums(void *argument, size_t task) {
    const norm_rows *call = argument;
    float gamma_buffer[NORM_COLUMNS], recent[2][NORM_COLUMNS] = {{0}}, older[2][NORM_COLUMNS] = {{0}};
    int64_t dim = call->size.dim, from = (int64_t)task * NORM_COLUMNS, n = norm_min(NORM_COLUMNS, dim - from);
    const float *gamma = norm_parameter_read(call->gamma, from, n, 1, gamma_buffer);
    const norm_parameter outputs[] = {call->dgamma, call->dbeta};
    for (int64_t row = 0; row < call->size.rows; row++) {
        int64_t at = row * dim + from;
        norm_piece p = {.step = NORM_SUMS, .n = n, .rows = 1, .gamma = gamma, .scale = {call->scale[row]}};
        p.want_sums = call->out != NULL;
        p.dgamma = outputs[0].data ? recent[0] : NULL;
        p.dbeta = outputs[1].data ? recent[1] : NULL;
        p.x = norm_rows_at(call, call->x, at);
        p.dy = norm_rows_at(call, call->dy, at);
        call->by_dtype(&p);
        call->moments[row * call->units + (int64_t)task] = p.sums[0];
        if ((row + 1) % NORM_FLUSH_ROWS == 0)
            for (int k = 0; k < 2; k++)
                norm_flush(recent[k], older[k], NORM_COLUMNS);
    }
    for (int k = 0; k < 2; k++) {
        double sum[NORM_COLUMNS];
        for (int64_t i = 0; i < n; i++)
            sum[i] = (double)older[k][i] + (double)recent[k][i];
        if (outputs[k].data) norm_parameter_write(outputs[k], from, n, sum);
    }
}

/* dx of one unit of all rows; each row's sums stand in its first unit by now. */
static inline void norm_wide_backward(void *argument, size_t task) {
    const norm_rows *call = argument;
    float buffer[NORM_COLUMNS];
    int64_t from = (int64_t)task * NORM_COLUMNS, n = norm_min(NORM_COLUMNS, call->size.dim - from);
    const float *gamma = norm_parameter_read(call->gamma, from, n, 1, buffer);
    for (int64_t row = 0; row < call->size.rows; row++)
        norm_rows_dx(call, row * call->size.dim + from, n, gamma, call->scale[row], call->moments[row * call->units],
                     0);
    if (call->store == NORM_STREAM) vf_stream_done();
}

/* ---- Calls -------------------------------------------------------------------------------------------------- */

static inline void norm_wide_run(norm_rows *call) {
    int64_t rows = call->size.rows;
    if (!call->rstd_in) vjp_cpu_for(call->work, rows * call->units, norm_wide_measure, call);
    vjp_cpu_for(call->work, rows, norm_wide_statistics, call);
    if (call->work->pass == VJP_FORWARD) {
        if (call->out) vjp_cpu_for(call->work, call->units, norm_wide_forward, call);
        return;
    }
    vjp_cpu_for(call->work, call->units, norm_wide_sums, call);
    for (int64_t row = 0; row < rows; row++)
        call->moments[row * call->units] = norm_wide_total(call, row);
    if (call->out) vjp_cpu_for(call->work, call->units, norm_wide_backward, call);
}

static inline vjp_status norm_rows_run(norm_rows *call) {
    int64_t dim = call->size.dim;
    bool is_short = dim < LANES;
    if (!call->out && !call->mean_out && !call->rstd_out && !call->dgamma.data && !call->dbeta.data) return VJP_OK;
    norm_rows_plan(call, call->work->workspace);
    if (call->wide) {
        norm_wide_run(call);
        return VJP_OK;
    }
    call->gamma_f32 = norm_parameter_read(call->gamma, 0, dim, 1, call->gamma_buffer);
    if (call->work->pass == VJP_FORWARD) {
        call->beta_f32 = norm_parameter_read(call->beta, 0, dim, 0, call->beta_buffer);
        vjp_cpu_for(call->work, call->cut.count, is_short ? norm_short_forward : norm_rows_forward, call);
        return VJP_OK;
    }
    vjp_cpu_for(call->work, call->cut.count, is_short ? norm_short_backward : norm_rows_backward, call);
    if (is_short)
        norm_short_columns(call);
    else if (call->partials)
        vjp_cpu_for(call->work, (dim + NORM_COLUMNS - 1) / NORM_COLUMNS, norm_rows_columns, call);
    return VJP_OK;
}

#endif
