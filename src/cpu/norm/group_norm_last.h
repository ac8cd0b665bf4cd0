/* SPDX-License-Identifier: MIT */
/*
 * group_norm with channels last: x is [N, plane, channels], channels are columns. Column sums down the rows of the
 * plane give every channel's moments, then its sums of dy and dy * xh; a group takes those of its channels. A group's
 * pilot, scale and line are spread over its columns, so that the loops run along rows whatever the groups are.
 *
 * Ordinarily a task takes whole planes, one after the other. With only a few of them (wide) there are rounds of tasks,
 * each some rows of a plane; the column sums of each range of rows wait in the workspace. Splitting a plane by columns,
 * so that it stays in the cache, does not pay: rows a power of two apart share a few sets of the cache (measured at 256
 * channels: half the speed).
 */
#ifndef VJP_CPU_GROUP_NORM_LAST_H
#define VJP_CPU_GROUP_NORM_LAST_H

#include "cpu/norm/group_norm.h"

/*
 * Rows that share each load and store of the column sums: with a few columns as many as are added before a flush, else
 * so few that the hardware still follows them all (4 and 8 measure alike). The next rows are prefetched meanwhile.
 */
enum { LAST_ROWS = 4, LAST_NARROW = 8 * LANES };

/* The columns of sample n, and the constants and sums of each. */
typedef struct last_slot {
    int64_t n, index;
    float *rstd, *shift, *weight, *slope, *level; /* by column; level holds the pilot while measuring */
    double *sum, *products;                       /* by column: of x - pilot and its square, then of dy and dy * xh */
    norm_scale *scale;                            /* by group */
} last_slot;

/* Slot `index`, for sample n. */
static inline last_slot last_slot_at(const group_norm *call, int64_t index, int64_t n) {
    int64_t w = call->width;
    double *doubles = (double *)(void *)(call->slots + index * w * GROUP_SLOT_FLOATS * 4);
    float *floats = (float *)(doubles + 2 * w);
    return (last_slot){
        .n = n,
        .index = index,
        .sum = doubles,
        .products = doubles + w,
        .rstd = floats,
        .shift = floats + w,
        .weight = floats + 2 * w,
        .slope = floats + 3 * w,
        .level = floats + 4 * w,
        .scale = (norm_scale *)(floats + 5 * w),
    };
}

static inline float *last_row_sums(const group_norm *call, const last_slot *slot, int64_t range) {
    return call->row_sums + (slot->index * call->rows.count + range) * 4 * call->width;
}

static inline int64_t last_offset(const group_norm *call, const last_slot *slot, int64_t row) {
    return (slot->n * call->size.plane + row) * call->size.channels;
}

static inline void last_spread(const group_norm *call, float *columns, int64_t group, float value) {
    for (int64_t c = 0; c < call->size.group_channels; c++)
        columns[group * call->size.group_channels + c] = value;
}

/* ---- Loops down the columns and along the rows ---------------------------------------------------------------- */

/* `count` rows of n columns, to be added into the column sums `sum` and `products`. */
typedef struct last_rows {
    const void *x, *dy; /* dy is NULL for the moments */
    int64_t n, count, ahead;
    float *sum, *products;
} last_rows;

/* Columns [i, i + n) of `count` rows: moments around the pilot, or with dy the sums of dy and dy * xh. */
INLINE void column_sums_at(vjp_dtype dtype, bool backward, last_rows r, const last_slot *slot, int64_t from,
                           int64_t count, int64_t i, int64_t n) {
    vf sum = vf_load(VJP_F32, r.sum, i), products = vf_load(VJP_F32, r.products, i);
    vf rstd = vf_zero(), shift = vf_zero(), pilot = vf_zero();
    if (backward) {
        rstd = vf_load(VJP_F32, slot->rstd, i);
        shift = vf_load(VJP_F32, slot->shift, i);
    } else {
        pilot = vf_load(VJP_F32, slot->level, i);
    }
    for (int64_t e = from * r.n + i, row = 0; row < count; row++, e += r.n) {
        __builtin_prefetch(at(dtype, r.x, e + r.ahead));
        vf value = vf_load_part(dtype, r.x, e, n);
        if (backward) {
            __builtin_prefetch(at(dtype, r.dy, e + r.ahead));
            vf d = vf_load_part(dtype, r.dy, e, n);
            sum = vf_add(sum, d);
            products = vf_fma(d, norm_xh(value, rstd, shift), products);
        } else {
            value = vf_sub(value, pilot);
            sum = vf_add(sum, value);
            products = vf_fma(value, value, products);
        }
    }
    vf_store(VJP_F32, r.sum, i, sum);
    vf_store(VJP_F32, r.products, i, products);
}

INLINE void column_sums(vjp_dtype dtype, bool backward, last_rows r, const last_slot *slot) {
    int64_t step = r.n <= LAST_NARROW ? r.count : LAST_ROWS;
    for (int64_t row = 0; row < r.count; row += step) {
        int64_t i = 0, count = vjp_min(step, r.count - row);
        for (; i + LANES <= r.n; i += LANES)
            column_sums_at(dtype, backward, r, slot, row, count, i, LANES);
        if (i < r.n) column_sums_at(dtype, backward, r, slot, row, count, i, r.n - i);
    }
}

/* out = weight * dy + (slope * xh + level); the forward has no dy. */
INLINE void column_out_at(vjp_dtype dtype, write_mode mode, bool backward, norm_run run, const last_slot *slot,
                          int64_t i, int64_t n) {
    vf rstd = vf_load_part(VJP_F32, slot->rstd, i, n), shift = vf_load_part(VJP_F32, slot->shift, i, n);
    vf xh = norm_xh(vf_load_part(dtype, run.x, i, n), rstd, shift);
    vf value = vf_fma(vf_load_part(VJP_F32, slot->slope, i, n), xh, vf_load_part(VJP_F32, slot->level, i, n));
    if (backward) value = vf_fma(vf_load_part(VJP_F32, slot->weight, i, n), vf_load_part(dtype, run.dy, i, n), value);
    vf_write_part(mode, dtype, run.out, i, n, value);
}

/* y or dx of `rows` rows from run's on. */
INLINE void column_write(vjp_dtype dtype, write_mode mode, bool backward, norm_run run, int64_t rows,
                         const last_slot *slot) {
    const last_slot columns = *slot; /* a copy that no store can change, so that its pointers stay in registers */
    for (int64_t row = 0; row < rows; row++) {
        int64_t i = write_head(mode, dtype, run.out, run.n);
        if (i) column_out_at(dtype, mode, backward, run, &columns, 0, i);
        for (; i + LANES <= run.n; i += LANES)
            column_out_at(dtype, mode, backward, run, &columns, i, LANES);
        if (i < run.n) column_out_at(dtype, mode, backward, run, &columns, i, run.n - i);
        run.x = at(dtype, run.x, run.n);
        run.out = at_mutable(dtype, run.out, run.n);
        if (backward) run.dy = at(dtype, run.dy, run.n);
    }
}

/* ---- Column sums ------------------------------------------------------------------------------------------- */

/* Sums the columns of range `range` of the plane's rows: recent and older sums of each kind. */
OUTLINE void last_sums(const group_norm *call, bool backward, const last_slot *slot, int64_t range) {
    int64_t n = call->size.channels, w = call->width, end = cpu_split_end(&call->rows, (size_t)range);
    float *recent = last_row_sums(call, slot, range), *older = recent + 2 * w;
    memset(recent, 0, (size_t)(4 * w) * sizeof(float));
    for (int64_t row = cpu_split_begin(&call->rows, (size_t)range); row < end; row += NORM_FLUSH_ROWS) {
        int64_t first = last_offset(call, slot, row);
        last_rows r = {.x = at(call->dtype, call->x, first), .n = n, .sum = recent, .products = recent + w};
        r.count = vjp_min(NORM_FLUSH_ROWS, end - row);
        if (row + 2 * NORM_FLUSH_ROWS <= end) r.ahead = n * (n <= LAST_NARROW ? r.count : LAST_ROWS);
        if (backward) {
            r.dy = at(call->dtype, call->dy, first);
            BY_DTYPE(call->dtype, column_sums, true, r, slot);
        } else {
            BY_DTYPE(call->dtype, column_sums, false, r, slot);
        }
        norm_flush(recent, older, w);
        norm_flush(recent + w, older + w, w);
    }
}

/* A slot's column sums from those of the ranges of rows, in order. */
static inline void last_collect(const group_norm *call, const last_slot *slot) {
    int64_t w = call->width, n = call->size.channels;
    for (int64_t i = 0; i < n; i++)
        slot->sum[i] = slot->products[i] = 0;
    for (int64_t range = 0; range < call->rows.count; range++) {
        const float *recent = last_row_sums(call, slot, range), *older = recent + 2 * w;
        for (int64_t i = 0; i < n; i++) {
            slot->sum[i] += (double)older[i] + (double)recent[i];
            slot->products[i] += (double)older[w + i] + (double)recent[w + i];
        }
    }
}

/* ---- Groups ------------------------------------------------------------------------------------------------- */

/* Before measuring: one pilot per group, from up to 64 elements of its first rows. */
static inline void last_pilots(const group_norm *call, const last_slot *slot) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t across = vjp_min(s->group_channels, 64), down = vjp_min(s->plane, 64 / across);
    for (int64_t g = 0; g < s->groups; g++) {
        double sum = 0;
        for (int64_t row = 0; row < down; row++)
            for (int64_t c = 0; c < across; c++)
                sum += (double)f32_load(call->dtype, call->x, last_offset(call, slot, row) + g * s->group_channels + c);
        last_spread(call, slot->level, g, norm_pilot_of((float)(sum / (double)(across * down))));
    }
}

/* A group's statistics from its columns' moments. */
static inline norm_statistics last_measured(const group_norm *call, const last_slot *slot, int64_t g) {
    const vjp_group_norm_sizes *s = &call->size;
    norm_moments m = {0, 0};
    for (int64_t c = g * s->group_channels; c < (g + 1) * s->group_channels; c++) {
        m.sum += slot->sum[c];
        m.squares += slot->products[c];
    }
    norm_statistics stat;
    float pilot = slot->level[g * s->group_channels];
    if (norm_finish(m, pilot, s->group_channels * s->plane, call->eps, true, &stat)) return stat;
    return group_statistics_exact(call, slot->n, g);
}

/* The groups' statistics, saved ones or those measured, and from them the columns' scale. */
static inline void last_statistics(const group_norm *call, const last_slot *slot) {
    if (!call->rstd_in) last_collect(call, slot);
    for (int64_t g = 0; g < call->size.groups; g++) {
        int64_t row = slot->n * call->size.groups + g;
        norm_statistics stat = call->rstd_in ? group_saved(call, row) : last_measured(call, slot, g);
        group_save(call, row, stat);
        slot->scale[g] = norm_scale_of(stat);
        last_spread(call, slot->rstd, g, slot->scale[g].rstd);
        last_spread(call, slot->shift, g, slot->scale[g].shift);
    }
}

/* Each group's scale can be held in f32. */
static inline bool last_scale_fits(const group_norm *call, const last_slot *slot) {
    bool fits = true;
    for (int64_t g = 0; g < call->size.groups; g++)
        fits = fits && norm_scale_fits(slot->scale[g]);
    return fits;
}

/* y = slope * xh + level by column. False where f32 cannot hold them: the sample is then computed in double. */
static inline bool last_lines_forward(const group_norm *call, const last_slot *slot) {
    bool fits = last_scale_fits(call, slot);
    for (int64_t c = 0; c < call->size.channels; c++) {
        double gamma = (double)call->gamma_f32[c], beta = (double)call->beta_f32[c];
        slot->slope[c] = (float)gamma;
        slot->level[c] = (float)(beta + gamma * (double)slot->scale[c / call->size.group_channels].rest);
        fits = fits && fabsf(slot->level[c]) <= FLT_MAX;
    }
    return fits;
}

/* dx = weight * dy + (slope * xh + level) by column, from the columns' sums. False as above. */
static inline bool last_lines_backward(const group_norm *call, const last_slot *slot) {
    const vjp_group_norm_sizes *s = &call->size;
    bool fits = last_scale_fits(call, slot);
    last_collect(call, slot);
    for (int64_t g = 0; g < s->groups; g++) {
        norm_sums sums = {0};
        for (int64_t c = g * s->group_channels; c < (g + 1) * s->group_channels; c++) {
            double gamma = (double)call->gamma_f32[c];
            slot->products[c] += (double)slot->scale[g].rest * slot->sum[c];
            sums.sum += gamma * slot->sum[c];
            sums.sum_xh += gamma * slot->products[c];
            fits = fits && norm_sums_fit((norm_sums){slot->sum[c], slot->products[c], false});
            slot->weight[c] = (float)((double)slot->scale[g].rstd * gamma);
            fits = fits && fabsf(slot->weight[c]) <= FLT_MAX;
        }
        norm_line line = norm_line_of(slot->scale[g], sums, s->group_channels * s->plane);
        fits = fits && norm_line_fits(line);
        last_spread(call, slot->slope, g, line.slope);
        last_spread(call, slot->level, g, line.level);
    }
    return fits;
}

/* A sample's groups in double. */
static inline void last_exact(const group_norm *call, int64_t n, double *dgamma, double *dbeta) {
    for (int64_t g = 0; g < call->size.groups; g++) {
        if (call->backward)
            group_exact_backward(call, n, g, dgamma, dbeta);
        else
            group_exact_forward(call, n, g);
    }
}

/* A sample's part of dgamma and dbeta. */
static inline void last_add_partials(const group_norm *call, const last_slot *slot, double *dgamma, double *dbeta) {
    for (int64_t c = 0; c < call->size.channels; c++) {
        if (dgamma) dgamma[c] += slot->products[c];
        if (dbeta) dbeta[c] += slot->sum[c];
    }
}

/* y or dx of one range of rows. */
OUTLINE void last_out(const group_norm *call, const last_slot *slot, int64_t range) {
    int64_t from = cpu_split_begin(&call->rows, (size_t)range), rows = cpu_split_end(&call->rows, (size_t)range) - from;
    int64_t first = last_offset(call, slot, from);
    norm_run run = {.x = at(call->dtype, call->x, first), .n = call->size.channels};
    run.out = at_mutable(call->dtype, call->out, first);
    if (call->backward) {
        run.dy = at(call->dtype, call->dy, first);
        BY_DTYPE_AND_MODE(call->dtype, call->mode, column_write, true, run, rows, slot);
    } else {
        BY_DTYPE_AND_MODE(call->dtype, call->mode, column_write, false, run, rows, slot);
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* ---- Tasks of whole planes ------------------------------------------------------------------------------------ */

static inline void last_samples(void *argument, size_t task) {
    const group_norm *call = argument;
    double *dgamma = NULL, *dbeta = NULL;
    group_partials(call, (int64_t)task, 0, call->size.channels, &dgamma, &dbeta);
    for (int64_t n = cpu_split_begin(&call->batch, task); n < cpu_split_end(&call->batch, task); n++) {
        last_slot slot = last_slot_at(call, (int64_t)task, n);
        if (!call->rstd_in) {
            last_pilots(call, &slot);
            last_sums(call, false, &slot, 0);
        }
        last_statistics(call, &slot);
        bool fits;
        if (call->backward) {
            last_sums(call, true, &slot, 0);
            fits = last_lines_backward(call, &slot);
            if (fits) last_add_partials(call, &slot, dgamma, dbeta);
        } else {
            fits = last_lines_forward(call, &slot);
        }
        if (!fits)
            last_exact(call, n, dgamma, dbeta);
        else if (call->out)
            last_out(call, &slot, 0);
    }
}

/* ---- Rounds of tasks for a few planes -------------------------------------------------------------------------- */

/* One task per sample: its pilots; its statistics. */
static inline void last_wide_pilots(void *argument, size_t task) {
    last_slot slot = last_slot_at(argument, (int64_t)task, (int64_t)task);
    last_pilots(argument, &slot);
}

static inline void last_wide_statistics(void *argument, size_t task) {
    const group_norm *call = argument;
    last_slot slot = last_slot_at(call, (int64_t)task, (int64_t)task);
    last_statistics(call, &slot);
}

/* One task per range of rows: moments, sums of the backward, results. */
static inline void last_wide_sums(const group_norm *call, size_t task, bool backward) {
    int64_t n = (int64_t)task / call->rows.count;
    last_slot slot = last_slot_at(call, n, n);
    last_sums(call, backward, &slot, (int64_t)task % call->rows.count);
}

static inline void last_wide_measure(void *argument, size_t task) {
    last_wide_sums(argument, task, false);
}

static inline void last_wide_backward_sums(void *argument, size_t task) {
    last_wide_sums(argument, task, true);
}

static inline void last_wide_out(void *argument, size_t task) {
    const group_norm *call = argument;
    int64_t n = (int64_t)task / call->rows.count;
    last_slot slot = last_slot_at(call, n, n);
    if (!(call->exact >> n & 1)) last_out(call, &slot, (int64_t)task % call->rows.count);
}

static inline void last_run_wide(group_norm *call) {
    const vjp_work *work = call->work;
    int64_t batch = call->size.batch, ranges = batch * call->rows.count;
    if (!call->rstd_in) {
        vjp_cpu_for(work, batch, last_wide_pilots, call);
        vjp_cpu_for(work, ranges, last_wide_measure, call);
    }
    vjp_cpu_for(work, batch, last_wide_statistics, call);
    if (call->backward) vjp_cpu_for(work, ranges, last_wide_backward_sums, call);
    double *dgamma = NULL, *dbeta = NULL;
    group_partials(call, 0, 0, call->size.channels, &dgamma, &dbeta);
    for (int64_t n = 0; n < batch; n++) {
        last_slot slot = last_slot_at(call, n, n);
        if (call->backward ? last_lines_backward(call, &slot) : last_lines_forward(call, &slot)) {
            if (call->backward) last_add_partials(call, &slot, dgamma, dbeta);
            continue;
        }
        call->exact |= (uint32_t)1 << n;
        last_exact(call, n, dgamma, dbeta);
    }
    if (call->out) vjp_cpu_for(work, ranges, last_wide_out, call);
}

#endif
