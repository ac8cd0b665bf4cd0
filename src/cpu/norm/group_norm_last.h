/*
 * group_norm with channels last: x is [N, plane, channels], channels are columns. Column sums down the rows of the
 * plane give every channel's moments, then its sums of dy and dy * xh; a group takes those of its channels. A group's
 * pilot, scale and slopes are spread over its columns, so that the loops run along rows whatever the groups are.
 *
 * Ordinarily a task takes whole planes, one after the other. With only a few of them (wide) there are rounds of tasks,
 * each some rows of a plane; a chunk's column sums wait in the workspace. Cutting a plane by columns, so that
 * it stays in the cache, does not pay: rows a power of two apart share a few sets of the cache (measured at 256
 * channels: half the speed).
 */
#ifndef VJP_CPU_GROUP_NORM_LAST_H
#define VJP_CPU_GROUP_NORM_LAST_H

#include "cpu/norm/group_norm.h"

/*
 * Rows that share each load and store of the column sums: with a few columns as many as are added before a flush, else
 * so few that the hardware still follows them all (4 and 8 measure alike). What comes next is fetched on the way.
 */
enum { LAST_ROWS = 4, LAST_NARROW = 8 * LANES };

/* The columns [first, first + count) of n, and what is known of each. */
typedef struct last_slot {
    int64_t n, first, count, groups;
    float *rstd, *shift, *weight, *slope, *level; /* by column; level holds the pilot while measuring */
    double *sum, *squares;                        /* by column: moments, then sums of dy and dy * xh */
    norm_scale *scale;                            /* by group */
} last_slot;

static inline last_slot last_slot_at(const group_norm *call, int64_t slot, int64_t n, int64_t group, int64_t groups) {
    int64_t w = call->width;
    char *memory = call->slots + slot * w * GROUP_SLOT_FLOATS * 4;
    double *doubles = (double *)memory;
    float *floats = (float *)(doubles + 2 * w);
    return (last_slot){
        .n = n,
        .first = group * call->size.group_channels,
        .count = groups * call->size.group_channels,
        .groups = groups,
        .sum = doubles,
        .squares = doubles + w,
        .rstd = floats,
        .shift = floats + w,
        .weight = floats + 2 * w,
        .slope = floats + 3 * w,
        .level = floats + 4 * w,
        .scale = (norm_scale *)(floats + 5 * w),
    };
}

static inline float *last_chunk_at(const group_norm *call, int64_t slot, int64_t chunk) {
    return call->chunks + (slot * call->rows.count + chunk) * 4 * call->width;
}

static inline int64_t last_offset(const group_norm *call, const last_slot *slot, int64_t row) {
    return (slot->n * call->size.plane + row) * call->size.channels + slot->first;
}

static inline void last_spread(const group_norm *call, float *columns, int64_t group, float value) {
    for (int64_t c = 0; c < call->size.group_channels; c++)
        columns[group * call->size.group_channels + c] = value;
}

/* ---- Steps --------------------------------------------------------------------------------------------------- */

/* Columns [i, i + n) down `rows` rows: moments around the pilot (level), or with dy the sums of dy and dy * xh. */
INLINE void column_sums_at(const norm_piece *p, vjp_dtype dtype, bool backward, int64_t from, int64_t rows, int64_t i,
                           int64_t n) {
    vf sum = vf_load(VJP_F32, p->dbeta, i), products = vf_load(VJP_F32, p->dgamma, i);
    vf rstd = vf_zero(), shift = vf_zero(), pilot = vf_zero();
    if (backward) {
        rstd = vf_load(VJP_F32, p->rstd, i);
        shift = vf_load(VJP_F32, p->shift, i);
    } else {
        pilot = vf_load(VJP_F32, p->level, i);
    }
    int64_t stride = p->stride, ahead = p->ahead;
    const void *x = p->x, *dy = p->dy;
    for (int64_t at = from * stride + i, r = 0; r < rows; r++, at += stride) {
        norm_prefetch(dtype, x, at + ahead);
        vf value = norm_load(dtype, x, at, n);
        if (backward) {
            norm_prefetch(dtype, dy, at + ahead);
            vf d = norm_load(dtype, dy, at, n);
            sum = vf_add(sum, d);
            products = vf_fma(d, norm_xh(value, rstd, shift), products);
        } else {
            value = vf_sub(value, pilot);
            sum = vf_add(sum, value);
            products = vf_fma(value, value, products);
        }
    }
    vf_store(VJP_F32, p->dbeta, i, sum);
    vf_store(VJP_F32, p->dgamma, i, products);
}

INLINE void column_sums(norm_piece *p, vjp_dtype dtype, bool backward) {
    int64_t step = p->n <= LAST_NARROW ? p->rows : LAST_ROWS;
    for (int64_t row = 0; row < p->rows; row += step) {
        int64_t i = 0, rows = norm_min(step, p->rows - row);
        for (; i + LANES <= p->n; i += LANES)
            column_sums_at(p, dtype, backward, row, rows, i, LANES);
        if (i < p->n) column_sums_at(p, dtype, backward, row, rows, i, p->n - i);
    }
}

INLINE void column_out_at(const norm_piece *p, vjp_dtype dtype, norm_store store, bool backward, int64_t i, int64_t n) {
    vf rstd = vf_load_part(VJP_F32, p->rstd, i, n), shift = vf_load_part(VJP_F32, p->shift, i, n);
    vf xh = norm_xh(norm_load(dtype, p->x, i, n), rstd, shift);
    vf value = vf_fma(vf_load_part(VJP_F32, p->slope, i, n), xh, vf_load_part(VJP_F32, p->level, i, n));
    if (backward) value = vf_fma(vf_load_part(VJP_F32, p->weight, i, n), norm_load(dtype, p->dy, i, n), value);
    norm_put(dtype, store, p->out, i, n, value);
}

INLINE void column_out_as(const norm_piece *p, vjp_dtype dtype, norm_store store, bool backward, int64_t from,
                          int64_t to) {
    norm_piece row = *p;
    for (int64_t i = from; i < to; i += LANES)
        column_out_at(&row, dtype, store, backward, i, LANES);
}

/* y or dx of some rows: out = weight * dy + (slope * xh + level). */
INLINE void column_out(norm_piece *p, vjp_dtype dtype, bool backward) {
    for (int64_t row = 0; row < p->rows; row++) {
        int64_t head = norm_head(dtype, p->store, p->out, p->n), whole = head + (p->n - head) / LANES * LANES;
        const int64_t ends[2][2] = {{0, head}, {whole, p->n - whole}};
        switch (p->store) {
        case NORM_WRITE: column_out_as(p, dtype, NORM_WRITE, backward, head, whole); break;
        case NORM_ADD: column_out_as(p, dtype, NORM_ADD, backward, head, whole); break;
        case NORM_STREAM: column_out_as(p, dtype, NORM_STREAM, backward, head, whole); break;
        }
        for (int k = 0; k < 2; k++)
            if (ends[k][1]) column_out_at(p, dtype, p->store, backward, ends[k][0], ends[k][1]);
        p->x = norm_at(dtype, p->x, p->stride);
        p->out = norm_at_out(dtype, p->out, p->stride);
        if (backward) p->dy = norm_at(dtype, p->dy, p->stride);
    }
}

/* ---- Column sums ------------------------------------------------------------------------------------------- */

/* Rows [from, to) of the slot's columns into a chunk: recent and older sums of each kind. */
static inline void last_sums(const group_norm *call, bool backward, const last_slot *slot, int64_t from, int64_t to,
                             float *chunk) {
    int64_t stride = call->size.channels, w = call->width;
    memset(chunk, 0, (size_t)(4 * w) * sizeof(float));
    for (int64_t row = from; row < to; row += NORM_FLUSH_ROWS) {
        int64_t at = last_offset(call, slot, row);
        norm_piece p = {.step = NORM_COLUMN_SUMS, .n = slot->count, .stride = stride};
        p.rows = norm_min(NORM_FLUSH_ROWS, to - row);
        p.x = group_at(call, call->x, at);
        if (backward) p.dy = group_at(call, call->dy, at);
        p.dbeta = chunk;
        p.dgamma = chunk + w;
        p.rstd = slot->rstd;
        p.shift = slot->shift;
        p.level = slot->level;
        if (row + 2 * NORM_FLUSH_ROWS <= to) p.ahead = stride * (slot->count <= LAST_NARROW ? p.rows : LAST_ROWS);
        call->by_dtype(&p);
        norm_flush(chunk, chunk + 2 * w, w);
        norm_flush(chunk + w, chunk + 3 * w, w);
    }
}

/* A slot's column sums from those of its chunks, in order. */
static inline void last_collect(const group_norm *call, const last_slot *slot, int64_t index) {
    int64_t w = call->width;
    for (int64_t i = 0; i < slot->count; i++)
        slot->sum[i] = slot->squares[i] = 0;
    for (int64_t k = 0; k < call->rows.count; k++) {
        const float *chunk = last_chunk_at(call, index, k);
        for (int64_t i = 0; i < slot->count; i++) {
            slot->sum[i] += (double)chunk[2 * w + i] + (double)chunk[i];
            slot->squares[i] += (double)chunk[3 * w + i] + (double)chunk[w + i];
        }
    }
}

/* ---- Groups ------------------------------------------------------------------------------------------------- */

/* Before measuring: a pilot a group, from up to 64 elements of its first rows. With saved statistics: the scale. */
static inline void last_prepare(const group_norm *call, const last_slot *slot) {
    vjp_dtype dtype = call->work->storage;
    const vjp_group_norm_sizes *s = &call->size;
    int64_t across = norm_min(s->group_channels, 64), down = norm_min(s->plane, 64 / across);
    for (int64_t g = 0; g < slot->groups; g++) {
        double sum = 0;
        for (int64_t row = 0; row < down; row++)
            for (int64_t c = 0; c < across; c++)
                sum += (double)f32_load(dtype, call->x, last_offset(call, slot, row) + g * s->group_channels + c);
        last_spread(call, slot->level, g, norm_pilot_of((float)(sum / (double)(across * down))));
    }
}

static inline void last_scale(const group_norm *call, const last_slot *slot, int64_t g, norm_statistics stat) {
    slot->scale[g] = norm_scale_of(stat);
    last_spread(call, slot->rstd, g, slot->scale[g].rstd);
    last_spread(call, slot->shift, g, slot->scale[g].shift);
}

static inline void last_saved(const group_norm *call, const last_slot *slot) {
    int64_t first = slot->n * call->size.groups + slot->first / call->size.group_channels;
    for (int64_t g = 0; g < slot->groups; g++)
        last_scale(call, slot, g,
                   (norm_statistics){(double)call->mean_in[first + g], (double)call->rstd_in[first + g]});
}

/* The groups' statistics from the columns' moments. */
static inline void last_statistics(const group_norm *call, const last_slot *slot) {
    const vjp_group_norm_sizes *s = &call->size;
    for (int64_t g = 0; g < slot->groups; g++) {
        norm_moments m = {0, 0};
        for (int64_t c = g * s->group_channels; c < (g + 1) * s->group_channels; c++) {
            m.sum += slot->sum[c];
            m.squares += slot->squares[c];
        }
        norm_statistics stat;
        int64_t group = slot->first / s->group_channels + g;
        if (!norm_finish(m, slot->level[g * s->group_channels], s->group_channels * s->plane, call->eps, true, &stat))
            stat = group_statistics_exact(call, slot->n, group);
        group_save(call, slot->n, group, stat);
        last_scale(call, slot, g, stat);
    }
}

/* y = slope * xh + level by column. */
static inline void last_lines_forward(const group_norm *call, const last_slot *slot) {
    for (int64_t i = 0; i < slot->count; i++) {
        double gamma = (double)call->gamma_f32[slot->first + i], beta = (double)call->beta_f32[slot->first + i];
        slot->slope[i] = (float)gamma;
        slot->level[i] = (float)(beta + gamma * (double)slot->scale[i / call->size.group_channels].rest);
    }
}

/* dx = weight * dy + (slope * xh + level) by column, from the columns' sums. */
static inline void last_lines_backward(const group_norm *call, const last_slot *slot) {
    const vjp_group_norm_sizes *s = &call->size;
    double span = (double)(s->group_channels * s->plane);
    for (int64_t g = 0; g < slot->groups; g++) {
        double sum_g = 0, sum_gxh = 0;
        const float *gamma = call->gamma_f32 + slot->first;
        for (int64_t c = g * s->group_channels; c < (g + 1) * s->group_channels; c++) {
            slot->squares[c] += (double)slot->scale[g].rest * slot->sum[c];
            sum_g += (double)gamma[c] * slot->sum[c];
            sum_gxh += (double)gamma[c] * slot->squares[c];
            slot->weight[c] = (float)((double)slot->scale[g].rstd * (double)gamma[c]);
        }
        group_slopes d = group_slopes_of(slot->scale[g], sum_g / span, sum_gxh / span);
        last_spread(call, slot->slope, g, (float)d.slope);
        last_spread(call, slot->level, g, (float)d.level);
    }
}

/* ---- Tasks --------------------------------------------------------------------------------------------------- */

/* y or dx of rows [from, to). */
static inline void last_out(const group_norm *call, bool backward, const last_slot *slot, int64_t from, int64_t to) {
    int64_t at = last_offset(call, slot, from);
    norm_piece p = {.step = NORM_COLUMN_OUT, .store = call->store, .n = slot->count, .rows = to - from};
    p.stride = call->size.channels;
    p.x = group_at(call, call->x, at);
    if (backward) p.dy = group_at(call, call->dy, at);
    p.out = norm_at_out(call->work->storage, call->out, at);
    p.rstd = slot->rstd;
    p.shift = slot->shift;
    p.weight = slot->weight;
    p.slope = slot->slope;
    p.level = slot->level;
    call->by_dtype(&p);
    if (call->store == NORM_STREAM) vf_stream_done();
}

/* Task of whole groups. */
static inline void last_groups(void *argument, size_t task) {
    const group_norm *call = argument;
    size_t part = task / (size_t)call->groups.count, range = task % (size_t)call->groups.count;
    int64_t group = cpu_cut_begin(&call->groups, range), groups = cpu_cut_end(&call->groups, range) - group;
    int64_t plane = call->size.plane, first = group * call->size.group_channels;
    bool backward = call->work->pass == VJP_BACKWARD;
    float *chunk = last_chunk_at(call, (int64_t)task, 0);
    double *dgamma = NULL, *dbeta = NULL;
    group_partials(call, (int64_t)part, first, first + groups * call->size.group_channels, &dgamma, &dbeta);
    for (int64_t n = cpu_cut_begin(&call->batch, part); n < cpu_cut_end(&call->batch, part); n++) {
        last_slot slot = last_slot_at(call, (int64_t)task, n, group, groups);
        if (call->rstd_in) {
            last_saved(call, &slot);
        } else {
            last_prepare(call, &slot);
            last_sums(call, false, &slot, 0, plane, chunk);
            last_collect(call, &slot, (int64_t)task);
            last_statistics(call, &slot);
        }
        if (backward) {
            last_sums(call, true, &slot, 0, plane, chunk);
            last_collect(call, &slot, (int64_t)task);
            last_lines_backward(call, &slot);
            for (int64_t i = 0; i < slot.count; i++) {
                if (dgamma) dgamma[first + i] += slot.squares[i];
                if (dbeta) dbeta[first + i] += slot.sum[i];
            }
        } else {
            last_lines_forward(call, &slot);
        }
        if (call->out) last_out(call, backward, &slot, 0, plane);
    }
}

/* Wide, a task an n: its pilots; its statistics, saved or from the chunks; its lines. */
static inline void last_wide_prepare(void *argument, size_t task) {
    last_slot slot =
        last_slot_at(argument, (int64_t)task, (int64_t)task, 0, ((const group_norm *)argument)->size.groups);
    last_prepare(argument, &slot);
}

static inline void last_wide_statistics(void *argument, size_t task) {
    const group_norm *call = argument;
    last_slot slot = last_slot_at(call, (int64_t)task, (int64_t)task, 0, call->size.groups);
    if (call->rstd_in) {
        last_saved(call, &slot);
    } else {
        last_collect(call, &slot, (int64_t)task);
        last_statistics(call, &slot);
    }
    if (call->work->pass == VJP_FORWARD) last_lines_forward(call, &slot);
}

static inline void last_wide_slopes(void *argument, size_t task) {
    const group_norm *call = argument;
    last_slot slot = last_slot_at(call, (int64_t)task, (int64_t)task, 0, call->size.groups);
    last_collect(call, &slot, (int64_t)task);
    last_lines_backward(call, &slot);
}

/* Wide, a task a chunk of rows: moments, sums of the backward, results. */
static inline void last_wide_sums(const group_norm *call, size_t task, bool backward) {
    int64_t n = (int64_t)task / call->rows.count;
    size_t chunk = task % (size_t)call->rows.count;
    last_slot slot = last_slot_at(call, n, n, 0, call->size.groups);
    last_sums(call, backward, &slot, cpu_cut_begin(&call->rows, chunk), cpu_cut_end(&call->rows, chunk),
              last_chunk_at(call, n, (int64_t)chunk));
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
    size_t chunk = task % (size_t)call->rows.count;
    last_slot slot = last_slot_at(call, n, n, 0, call->size.groups);
    last_out(call, call->work->pass == VJP_BACKWARD, &slot, cpu_cut_begin(&call->rows, chunk),
             cpu_cut_end(&call->rows, chunk));
}

static inline void last_run_wide(group_norm *call) {
    const vjp_group_norm_sizes *s = &call->size;
    const vjp_work *work = call->work;
    int64_t pieces = s->batch * call->rows.count;
    if (!call->rstd_in) {
        vjp_cpu_for(work, s->batch, last_wide_prepare, call);
        vjp_cpu_for(work, pieces, last_wide_measure, call);
    }
    vjp_cpu_for(work, s->batch, last_wide_statistics, call);
    if (work->pass == VJP_BACKWARD) {
        vjp_cpu_for(work, pieces, last_wide_backward_sums, call);
        vjp_cpu_for(work, s->batch, last_wide_slopes, call);
        double *dgamma = NULL, *dbeta = NULL;
        group_partials(call, 0, 0, s->channels, &dgamma, &dbeta);
        for (int64_t n = 0; n < s->batch; n++) {
            last_slot slot = last_slot_at(call, n, n, 0, s->groups);
            for (int64_t c = 0; c < s->channels; c++) {
                if (dgamma) dgamma[c] += slot.squares[c];
                if (dbeta) dbeta[c] += slot.sum[c];
            }
        }
    }
    if (call->out) vjp_cpu_for(work, pieces, last_wide_out, call);
}

#endif
