/* SPDX-License-Identifier: MIT */
/*
 * The norm of rows, for layer_norm (`centered`: each row's mean is subtracted) and rms_norm (it is not). With
 * xh = (x - mean) * rstd and g = dy * gamma (docs/ops/layer_norm.md derives it):
 *
 *     y  = xh * gamma + beta
 *     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy over rows
 *
 * rms_norm's backward gives y again where it is wanted, with the forward's bits.
 *
 * Three paths:
 *
 *     short  rows shorter than a vector. A task is whole rows. dx cancels to almost nothing: sums in double.
 *     wide   few rows (WIDE_ROWS), of WIDE_DIM elements or more: too few for all threads. A task is NORM_COLUMNS
 *            columns of all rows: one round of tasks for the sums, one for the result.
 *     rows   everything else. A task is whole rows: sums over a few of them, then it writes their dx from the cache.
 *            x and dy are read from memory once.
 *
 * Every task of whole rows has its own column sums in the workspace; they are added in the order of the tasks.
 * The order of all additions follows from rows and dim alone. How many rows share a pass over the column sums does
 * not change it: each row's sums are its own, and a column's sum takes the rows one after the other.
 */
#ifndef VJP_CPU_NORM_ROWS_H
#define VJP_CPU_NORM_ROWS_H

#include "cpu/norm/norm_loops.h"

/* x and dy of the rows taken together stay in a second-level cache of 1 MiB or more. */
enum { ROWS_TOGETHER_BYTES = 1 << 20 };

/* Rows of a task with column sums: with 8, its partial is a sixth of what it moves; usually it is a hundredth. */
enum { MIN_TASK_ROWS = 8 };

/* Elements, at least, between the row whose y is written and the row that is prefetched meanwhile. */
enum { FORWARD_AHEAD = 512 };

/* Fewer rows than this, and rows at least this long, are split by columns. */
enum { WIDE_ROWS = 64, WIDE_ROWS_FORWARD = 16, WIDE_DIM = 8 * NORM_COLUMNS };

/* One call, forward or backward: what norm.c fills in, then what the plan adds. */
typedef struct norm_rows {
    const vjp_work *work;
    vjp_dtype dtype;
    bool centered;
    vjp_norm_sizes size;
    double eps;
    const void *x, *dy;
    void *out; /* y or dx */
    void *y;   /* the backward's; its input beta is for that */
    bool add_y;
    write_mode mode;
    norm_parameter gamma, beta, dgamma, dbeta;
    float *mean_out, *rstd_out;     /* forward: statistics to save */
    const float *mean_in, *rstd_in; /* backward: saved statistics; rstd_in is NULL where they are measured again */

    bool wide, two_level;
    int64_t padded;
    cpu_split split;
    const float *gamma_f32, *beta_f32; /* whole rows only */
    float *gamma_buffer, *beta_buffer;
    float *partials; /* of task t at partials + t * partial_floats: recent dgamma, recent dbeta, older the same */
    int64_t partial_floats;
    double *short_sums; /* short rows: [tasks, 2, LANES], dgamma and dbeta */
    /* Wide rows: */
    int64_t units;         /* of NORM_COLUMNS columns */
    norm_scale *scale;     /* [rows] */
    norm_moments *moments; /* [rows, units] */
    norm_sums *sums;       /* [rows, units] */
} norm_rows;

/* ---- Plan ---------------------------------------------------------------------------------------------- */

/* Decides how the call is split and lays the workspace out; returns its bytes. NULL: only to count them. */
static inline size_t norm_rows_plan(norm_rows *call, void *workspace) {
    int64_t rows = call->size.rows, dim = call->size.dim, item = (int64_t)dtype_bytes(call->dtype);
    bool backward = call->work->pass == VJP_BACKWARD, partials = call->dgamma.data || call->dbeta.data;
    size_t used = 0;
    call->padded = vjp_round_up(dim, LANES);
    call->wide = dim >= WIDE_DIM && rows < (partials ? WIDE_ROWS : WIDE_ROWS_FORWARD);
    if (call->wide) {
        call->units = vjp_divide_up(dim, NORM_COLUMNS);
        size_t parts = (size_t)(rows * call->units);
        call->scale = norm_take(workspace, &used, (size_t)rows * sizeof *call->scale);
        if (!call->rstd_in) call->moments = norm_take(workspace, &used, parts * sizeof *call->moments);
        if (backward) call->sums = norm_take(workspace, &used, parts * sizeof *call->sums);
        return used;
    }
    call->split =
        vjp_cpu_split_items(rows, dim * item * (backward ? 3 : 2), partials ? CPU_MAX_PARTIALS : CPU_MAX_TASKS);
    if (partials && call->split.size < MIN_TASK_ROWS) {
        call->split.size = MIN_TASK_ROWS;
        call->split.count = vjp_divide_up(rows, MIN_TASK_ROWS);
    }
    if (norm_parameter_converts(call->gamma))
        call->gamma_buffer = norm_take(workspace, &used, (size_t)dim * sizeof(float));
    if ((!backward || call->y) && norm_parameter_converts(call->beta))
        call->beta_buffer = norm_take(workspace, &used, (size_t)dim * sizeof(float));
    if (partials && dim < LANES) {
        call->short_sums = norm_take(workspace, &used, (size_t)call->split.count * 2 * LANES * sizeof(double));
    } else if (partials) {
        call->two_level = call->split.size > NORM_FLUSH_ROWS;
        int arrays = ((call->dgamma.data != NULL) + (call->dbeta.data != NULL)) * (call->two_level ? 2 : 1);
        call->partial_floats = call->padded * arrays;
        call->partials =
            norm_take(workspace, &used, (size_t)(call->split.count * call->partial_floats) * sizeof(float));
    }
    return used;
}

/* ---- Steps: the loops of norm_loops.h for a call's dtype, or in double ------------------------------------------- */

/* Row r's sums in double, and where `columns` what it adds to the column sums. */
OUTLINE void norm_sum_exact_row(const norm_rows *call, int64_t r, norm_row_block *b, bool columns) {
    norm_sums s = {.exact = true};
    for (int64_t i = 0; i < b->n; i++) {
        double dy = (double)f32_load(call->dtype, b->dy, r * b->stride + i), g = dy * (double)b->gamma[i];
        double xh = norm_xh_exact(b->scale[r], f32_load(call->dtype, b->x, r * b->stride + i));
        if (call->centered) s.sum += g;
        s.sum_xh += g * xh;
        if (columns && b->dgamma) b->dgamma[i] = (float)((double)b->dgamma[i] + dy * xh);
        if (columns && b->dbeta) b->dbeta[i] = (float)((double)b->dbeta[i] + dy);
    }
    b->sums[r] = s;
}

/* `count` is 1 or ROWS_TOGETHER. Rows that f32 cannot hold are summed in double. dbeta alone needs no scale. */
OUTLINE void norm_rows_sum(const norm_rows *call, int64_t count, norm_row_block *b) {
    bool fits = true;
    for (int64_t r = 0; r < count && (b->want_sums || b->dgamma); r++)
        fits = fits && norm_scale_fits(b->scale[r]);
    if (!fits && count == 1) {
        norm_sum_exact_row(call, 0, b, true);
        return;
    }
    for (int64_t r = 0; r < count && !fits; r++) { /* the others' bits must not depend on how many are together */
        norm_row_block one = *b;
        one.x = at(call->dtype, b->x, r * b->stride);
        one.dy = at(call->dtype, b->dy, r * b->stride);
        one.scale[0] = b->scale[r];
        norm_rows_sum(call, 1, &one);
        b->sums[r] = one.sums[0];
    }
    if (!fits) return;
    if (call->centered)
        BY_DTYPE(call->dtype, norm_sum_block, true, count, b);
    else
        BY_DTYPE(call->dtype, norm_sum_block, false, count, b);
    for (int64_t r = 0; r < count && b->want_sums; r++)
        if (!norm_sums_fit(b->sums[r])) norm_sum_exact_row(call, r, b, false);
}

/* y in double. */
static inline void norm_y_doubles(const norm_rows *call, const norm_run *run, int64_t from, int64_t n,
                                  const float *gamma, const float *beta, norm_scale scale, double *y) {
    for (int64_t i = 0; i < n; i++)
        y[i] = norm_y_exact(call->centered, scale.exact, (double)f32_load(call->dtype, run->x, from + i),
                            gamma[from + i], beta[from + i]);
}

/* y of n columns from element `first` on, the forward's or that of a backward without dx. */
OUTLINE void norm_rows_y(const norm_rows *call, int64_t first, int64_t n, const float *gamma, const float *beta,
                         norm_scale scale, int64_t ahead) {
    norm_run run = {.x = at(call->dtype, call->x, first), .n = n, .ahead = ahead};
    write_mode mode = !call->y ? call->mode : call->add_y ? WRITE_ADD : WRITE_PLAIN;
    run.out = at_mutable(call->dtype, call->y ? call->y : call->out, first);
    if (!norm_scale_fits(scale)) {
        for (int64_t i = 0; i < n; i++) {
            double y;
            norm_y_doubles(call, &run, i, 1, gamma, beta, scale, &y);
            norm_write_doubles(call->dtype, mode == WRITE_ADD, run.out, i, 1, &y);
        }
        return;
    }
    if (call->centered)
        BY_DTYPE_AND_MODE(call->dtype, mode, norm_y, true, run, scale, gamma, beta);
    else
        BY_DTYPE_AND_MODE(call->dtype, mode, norm_y, false, run, scale, gamma, beta);
}

/*
 * dx in double, a vector at a time: y is made before dx is written, which may be in place of x, in the forward's
 * arithmetic.
 */
OUTLINE void norm_dx_doubles(const norm_rows *call, const norm_run *run, const float *gamma, const float *beta,
                             norm_scale scale, norm_sums sums) {
    bool fits = norm_scale_fits(scale);
    for (int64_t from = 0; from < run->n; from += LANES) {
        int64_t n = vjp_min(LANES, run->n - from);
        double dx[LANES], y[LANES];
        vf in_vector = vf_zero();
        if (run->y && fits)
            in_vector =
                norm_y_of(false, BY_DTYPE(call->dtype, vf_load_part, run->x, from, n), scale, gamma, beta, from, n);
        else if (run->y)
            norm_y_doubles(call, run, from, n, gamma, beta, scale, y);
        for (int64_t i = 0; i < n; i++) {
            double xh = norm_xh_exact(scale, f32_load(call->dtype, run->x, from + i));
            double g = (double)f32_load(call->dtype, run->dy, from + i) * (double)gamma[from + i];
            dx[i] = norm_dx_exact(scale, g, xh, sums, call->size.dim);
        }
        norm_write_doubles(call->dtype, call->mode == WRITE_ADD, run->out, from, n, dx);
        if (run->add_y && fits) in_vector = vf_add(BY_DTYPE(call->dtype, vf_load_part, run->y, from, n), in_vector);
        if (run->y && fits)
            BY_DTYPE(call->dtype, vf_store_part, run->y, from, n, in_vector);
        else if (run->y)
            norm_write_doubles(call->dtype, run->add_y, run->y, from, n, y);
    }
}

/*
 * dx of n columns from element `first` on, and y where it is wanted; `sums` are those of g and g * xh over the whole
 * row.
 */
OUTLINE void norm_rows_dx(const norm_rows *call, int64_t first, int64_t n, const float *gamma, const float *beta,
                          norm_scale scale, norm_sums sums, int64_t ahead) {
    norm_line line = norm_line_of(scale, sums, call->size.dim);
    norm_run run = {.x = at(call->dtype, call->x, first), .dy = at(call->dtype, call->dy, first), .n = n};
    run.ahead = ahead;
    run.out = at_mutable(call->dtype, call->out, first);
    run.y = call->y ? at_mutable(call->dtype, call->y, first) : NULL;
    run.add_y = call->y && call->add_y;
    if (!norm_scale_fits(scale) || !norm_sums_fit(sums) || !norm_line_fits(line))
        norm_dx_doubles(call, &run, gamma, beta, scale, sums);
    else if (call->centered)
        BY_DTYPE_AND_MODE(call->dtype, call->mode, norm_dx, true, run, scale, line, gamma, beta);
    else
        BY_DTYPE_AND_MODE(call->dtype, call->mode, norm_dx, false, run, scale, line, gamma, beta);
}

/* ---- Whole rows ---------------------------------------------------------------------------------------------- */

static inline norm_statistics norm_rows_statistics(const norm_rows *call, int64_t row) {
    if (call->rstd_in)
        return (norm_statistics){call->mean_in ? (double)call->mean_in[row] : 0, (double)call->rstd_in[row]};
    int64_t dim = call->size.dim;
    return norm_statistics_of(call->dtype, call->centered, at(call->dtype, call->x, row * dim), dim, call->eps);
}

static inline void norm_rows_save(const norm_rows *call, int64_t row, norm_statistics s) {
    if (call->mean_out) call->mean_out[row] = norm_round(s.mean);
    if (call->rstd_out) call->rstd_out[row] = norm_round(s.rstd);
}

static inline void norm_rows_forward(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t dim = call->size.dim, end = cpu_split_end(&call->split, task), further = 1 + FORWARD_AHEAD / dim;
    for (int64_t row = cpu_split_begin(&call->split, task); row < end; row++) {
        norm_statistics s = norm_rows_statistics(call, row);
        norm_rows_save(call, row, s);
        if (call->out)
            norm_rows_y(call, row * dim, dim, call->gamma_f32, call->beta_f32, norm_scale_of(s),
                        row + further < end ? further * dim : 0);
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

static inline void norm_rows_backward(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t dim = call->size.dim, begin = cpu_split_begin(&call->split, task), end = cpu_split_end(&call->split, task);
    float *recent = call->partials ? call->partials + (int64_t)task * call->partial_floats : NULL;
    if (recent) memset(recent, 0, (size_t)call->partial_floats * sizeof(float));
    norm_row_block b = {.stride = dim, .n = dim, .gamma = call->gamma_f32, .want_sums = call->out != NULL};
    b.dgamma = call->dgamma.data ? recent : NULL;
    b.dbeta = call->dbeta.data ? recent + (b.dgamma ? call->padded : 0) : NULL;
    int64_t older = call->partial_floats / 2, item = (int64_t)dtype_bytes(call->dtype);
    int64_t together = 2 * ROWS_TOGETHER * dim * item <= ROWS_TOGETHER_BYTES ? ROWS_TOGETHER : 1;
    for (int64_t row = begin; row < end;) {
        int64_t count = end - row >= together ? together : 1;
        b.x = at(call->dtype, call->x, row * dim);
        b.dy = at(call->dtype, call->dy, row * dim);
        for (int64_t r = 0; r < count && (call->out || call->y || b.dgamma); r++) /* dbeta alone needs no xh */
            b.scale[r] = norm_scale_of(norm_rows_statistics(call, row + r));
        norm_rows_sum(call, count, &b);
        int64_t ahead = end - row >= 2 * count ? count * dim : 0;
        for (int64_t r = 0; r < count; r++)
            if (call->out)
                norm_rows_dx(call, (row + r) * dim, dim, call->gamma_f32, call->beta_f32, b.scale[r], b.sums[r], ahead);
            else if (call->y)
                norm_rows_y(call, (row + r) * dim, dim, call->gamma_f32, call->beta_f32, b.scale[r], ahead);
        row += count;
        /* Counted in rows of the task, so that it does not matter how many were taken together. */
        if (call->two_level && (row - begin) % NORM_FLUSH_ROWS == 0) {
            if (b.dgamma) norm_flush(b.dgamma, b.dgamma + older, call->padded);
            if (b.dbeta) norm_flush(b.dbeta, b.dbeta + older, call->padded);
        }
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* Adds the tasks' column sums; each task of this round takes NORM_COLUMNS columns. */
static inline void norm_rows_columns(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t from = (int64_t)task * NORM_COLUMNS, n = vjp_min(NORM_COLUMNS, call->size.dim - from);
    const norm_parameter outputs[] = {call->dgamma, call->dbeta};
    const float *partials = call->partials + from;
    for (int k = 0; k < 2; k++) {
        if (!outputs[k].data) continue;
        double sum[NORM_COLUMNS];
        memset(sum, 0, (size_t)n * sizeof sum[0]);
        norm_add_columns(sum, partials, call->split.count, call->partial_floats, n);
        if (call->two_level)
            norm_add_columns(sum, partials + call->partial_floats / 2, call->split.count, call->partial_floats, n);
        norm_parameter_write(outputs[k], from, n, sum);
        partials += call->padded;
    }
}

/* ---- Short rows --------------------------------------------------------------------------------------------- */

/*
 * Rows shorter than a vector, an element at a time in double. There the result often cancels to almost nothing (the dx
 * of a row of one or two elements is all but zero whatever dy is), which f32 would drown in its rounding.
 */
static inline norm_statistics norm_short_measure(const norm_rows *call, const double *x) {
    int64_t dim = call->size.dim;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < dim && call->centered; i++)
        sum += x[i];
    double mean = sum / (double)dim;
    for (int64_t i = 0; i < dim; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    return (norm_statistics){mean, 1 / sqrt(squares / (double)dim + call->eps)};
}

static inline norm_statistics norm_short_statistics(const norm_rows *call, int64_t row, const double *x) {
    return call->rstd_in ? norm_rows_statistics(call, row) : norm_short_measure(call, x);
}

/* Of an rstd that was saved as f32, the double that the forward used, if it is that of the row. */
static inline norm_statistics norm_short_exact(norm_statistics saved, norm_statistics measured) {
    return (float)measured.rstd == (float)saved.rstd ? measured : saved;
}

static inline double norm_short_y(const norm_rows *call, norm_statistics s, double x, int64_t i) {
    return (x - s.mean) * s.rstd * (double)call->gamma_f32[i] + (double)call->beta_f32[i];
}

static inline void norm_short_forward(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t dim = call->size.dim;
    for (int64_t row = cpu_split_begin(&call->split, task); row < cpu_split_end(&call->split, task); row++) {
        double x[LANES];
        norm_read_doubles(call->dtype, call->x, row * dim, dim, x);
        norm_statistics s = norm_short_measure(call, x);
        norm_rows_save(call, row, s);
        for (int64_t i = 0; i < dim; i++)
            x[i] = norm_short_y(call, s, x[i], i);
        if (call->out) norm_write_doubles(call->dtype, call->mode == WRITE_ADD, call->out, row * dim, dim, x);
    }
}

static inline void norm_short_backward(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t dim = call->size.dim, begin = cpu_split_begin(&call->split, task), end = cpu_split_end(&call->split, task);
    double dgamma[LANES] = {0}, dbeta[LANES] = {0};
    for (int64_t row = begin; row < end; row++) {
        double xh[LANES], dy[LANES], y[LANES], sum_g = 0, sum_gxh = 0;
        norm_read_doubles(call->dtype, call->x, row * dim, dim, xh);
        norm_read_doubles(call->dtype, call->dy, row * dim, dim, dy);
        norm_statistics s = norm_short_statistics(call, row, xh), exact = s;
        if (call->y) exact = norm_short_exact(s, norm_short_measure(call, xh));
        for (int64_t i = 0; i < dim; i++) {
            if (call->y) y[i] = norm_short_y(call, exact, xh[i], i);
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
        if (call->out) norm_write_doubles(call->dtype, call->mode == WRITE_ADD, call->out, row * dim, dim, dy);
        if (call->y) norm_write_doubles(call->dtype, call->add_y, call->y, row * dim, dim, y);
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
            for (int64_t task = 0; task < call->split.count; task++)
                sum += call->short_sums[(task * 2 + k) * LANES + i];
            norm_parameter_write(outputs[k], i, 1, &sum);
        }
}

/* ---- Wide rows ---------------------------------------------------------------------------------------------- */

static inline float norm_wide_pilot(const norm_rows *call, int64_t row) {
    return norm_pilot(call->dtype, call->centered, at(call->dtype, call->x, row * call->size.dim), call->size.dim);
}

/* The moments of unit `task % units` of row `task / units`. */
static inline void norm_wide_measure(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t dim = call->size.dim, row = (int64_t)task / call->units;
    int64_t from = (int64_t)task % call->units * NORM_COLUMNS;
    call->moments[task] = norm_measure(call->dtype, call->centered, at(call->dtype, call->x, row * dim + from),
                                       vjp_min(NORM_COLUMNS, dim - from), norm_wide_pilot(call, row));
}

/* A row's statistics: saved ones, or from its units' moments. */
static inline void norm_wide_statistics(void *argument, size_t task) {
    const norm_rows *call = argument;
    int64_t row = (int64_t)task, dim = call->size.dim;
    norm_statistics s;
    if (call->rstd_in)
        s = norm_rows_statistics(call, row);
    else
        s = norm_conclude(call->dtype, call->centered, at(call->dtype, call->x, row * dim), dim, call->eps,
                          norm_wide_pilot(call, row),
                          norm_moments_total(call->moments + row * call->units, call->units));
    norm_rows_save(call, row, s);
    call->scale[row] = norm_scale_of(s);
}

/* y of one unit of all rows. */
static inline void norm_wide_forward(void *argument, size_t task) {
    const norm_rows *call = argument;
    float gamma_buffer[NORM_COLUMNS], beta_buffer[NORM_COLUMNS];
    int64_t from = (int64_t)task * NORM_COLUMNS, n = vjp_min(NORM_COLUMNS, call->size.dim - from);
    const float *gamma = norm_parameter_read(call->gamma, from, n, 1, gamma_buffer);
    const float *beta = norm_parameter_read(call->beta, from, n, 0, beta_buffer);
    for (int64_t row = 0; row < call->size.rows; row++)
        norm_rows_y(call, row * call->size.dim + from, n, gamma, beta, call->scale[row], 0);
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* One unit's sums of all rows, and its columns of dgamma and dbeta. */
static inline void norm_wide_sums(void *argument, size_t task) {
    const norm_rows *call = argument;
    float gamma_buffer[NORM_COLUMNS], recent[2][NORM_COLUMNS] = {{0}}, older[2][NORM_COLUMNS] = {{0}};
    int64_t dim = call->size.dim, from = (int64_t)task * NORM_COLUMNS, n = vjp_min(NORM_COLUMNS, dim - from);
    const norm_parameter outputs[] = {call->dgamma, call->dbeta};
    norm_row_block b = {.n = n, .want_sums = call->out != NULL};
    b.gamma = norm_parameter_read(call->gamma, from, n, 1, gamma_buffer);
    b.dgamma = outputs[0].data ? recent[0] : NULL;
    b.dbeta = outputs[1].data ? recent[1] : NULL;
    for (int64_t row = 0; row < call->size.rows; row++) {
        b.scale[0] = call->scale[row];
        b.x = at(call->dtype, call->x, row * dim + from);
        b.dy = at(call->dtype, call->dy, row * dim + from);
        norm_rows_sum(call, 1, &b);
        call->sums[row * call->units + (int64_t)task] = b.sums[0];
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

/* dx and y of one unit of all rows. The first unit's place holds the whole row's sums by now. */
static inline void norm_wide_backward(void *argument, size_t task) {
    const norm_rows *call = argument;
    float gamma_buffer[NORM_COLUMNS], beta_buffer[NORM_COLUMNS];
    int64_t from = (int64_t)task * NORM_COLUMNS, n = vjp_min(NORM_COLUMNS, call->size.dim - from);
    const float *gamma = norm_parameter_read(call->gamma, from, n, 1, gamma_buffer);
    const float *beta = call->y ? norm_parameter_read(call->beta, from, n, 0, beta_buffer) : NULL;
    for (int64_t row = 0; row < call->size.rows; row++) {
        int64_t first = row * call->size.dim + from;
        if (call->out)
            norm_rows_dx(call, first, n, gamma, beta, call->scale[row], call->sums[row * call->units], 0);
        else
            norm_rows_y(call, first, n, gamma, beta, call->scale[row], 0);
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

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
        call->sums[row * call->units] = norm_sums_total(call->sums + row * call->units, call->units);
    if (call->out || call->y) vjp_cpu_for(call->work, call->units, norm_wide_backward, call);
}

/* ---- Calls -------------------------------------------------------------------------------------------------- */

static inline vjp_status norm_rows_run(norm_rows *call) {
    int64_t dim = call->size.dim;
    bool is_short = dim < LANES;
    if (!call->out && !call->y && !call->mean_out && !call->rstd_out && !call->dgamma.data && !call->dbeta.data)
        return VJP_OK;
    norm_rows_plan(call, call->work->workspace);
    if (call->wide) {
        norm_wide_run(call);
        return VJP_OK;
    }
    call->gamma_f32 = norm_parameter_read(call->gamma, 0, dim, 1, call->gamma_buffer);
    if (call->work->pass == VJP_FORWARD || call->y)
        call->beta_f32 = norm_parameter_read(call->beta, 0, dim, 0, call->beta_buffer);
    if (call->work->pass == VJP_FORWARD) {
        vjp_cpu_for(call->work, call->split.count, is_short ? norm_short_forward : norm_rows_forward, call);
        return VJP_OK;
    }
    vjp_cpu_for(call->work, call->split.count, is_short ? norm_short_backward : norm_rows_backward, call);
    if (is_short)
        norm_short_columns(call);
    else if (call->partials)
        vjp_cpu_for(call->work, vjp_divide_up(dim, NORM_COLUMNS), norm_rows_columns, call);
    return VJP_OK;
}

#endif
