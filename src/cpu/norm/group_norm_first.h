/* SPDX-License-Identifier: MIT */
/*
 * group_norm with channels first: a group is one run of memory, and each of its channels is a part of that run, a
 * plane, with one gamma and beta. Ordinarily a task takes whole groups; few large ones are split into chunks: of the
 * group for its moments, of a channel for the rest, with one round of tasks for each pass (`wide`).
 */
#ifndef VJP_CPU_GROUP_NORM_FIRST_H
#define VJP_CPU_GROUP_NORM_FIRST_H

#include "cpu/norm/group_norm.h"

/* ---- Loops along a plane ----------------------------------------------------------------------------------- */

INLINE norm_sums plane_sums_typed(vjp_dtype dtype, const void *x, const void *dy, int64_t n, norm_scale scale) {
    norm_sums m = {0};
    vf rstd = vf_set(scale.rstd), shift = vf_set(scale.shift);
    for (int64_t block = 0; block < n; block += NORM_BLOCK) {
        int64_t end = vjp_min(block + NORM_BLOCK, n), i = block;
        vf sum[2] = {vf_zero(), vf_zero()}, sum_xh[2] = {vf_zero(), vf_zero()};
        for (; i + 2 * LANES <= end; i += 2 * LANES)
            for (int k = 0; k < 2; k++) {
                vf d = vf_load(dtype, dy, i + k * LANES);
                vf xh = norm_xh(vf_load(dtype, x, i + k * LANES), rstd, shift);
                sum[k] = vf_add(sum[k], d);
                sum_xh[k] = vf_fma(d, xh, sum_xh[k]);
            }
        for (int k = 0; i < end; i += LANES, k++) {
            vf d = vf_load_part(dtype, dy, i, end - i);
            vf xh = norm_xh(vf_load_part(dtype, x, i, end - i), rstd, shift);
            sum[k] = vf_add(sum[k], d);
            sum_xh[k] = vf_fma(d, xh, sum_xh[k]);
        }
        m.sum += (double)vf_sum(vf_add(sum[0], sum[1]));
        m.sum_xh += (double)vf_sum(vf_add(sum_xh[0], sum_xh[1]));
    }
    m.sum_xh += (double)scale.rest * m.sum;
    return m;
}

/* Sums of dy and dy * xh over the n elements from `first` on; in double where f32 cannot hold them. */
OUTLINE norm_sums plane_sums(const group_norm *call, int64_t first, int64_t n, norm_scale scale) {
    const void *x = at(call->dtype, call->x, first), *dy = at(call->dtype, call->dy, first);
    norm_sums m = {0};
    if (norm_scale_fits(scale)) {
        m = BY_DTYPE(call->dtype, plane_sums_typed, x, dy, n, scale);
        if (norm_sums_fit(m)) return m;
        m = (norm_sums){0};
    }
    for (int64_t i = 0; i < n; i++) {
        double d = (double)f32_load(call->dtype, dy, i);
        m.sum += d;
        m.sum_xh += d * norm_xh_exact(scale, f32_load(call->dtype, x, i));
    }
    return m;
}

/* out = weight * dy + (slope * xh + level), xh without its rest; the forward has no dy. */
typedef struct plane_line {
    float weight, slope, level;
} plane_line;

INLINE void plane_at(vjp_dtype dtype, write_mode mode, bool backward, norm_run run, norm_scale scale, plane_line line,
                     int64_t i, int64_t n) {
    vf xh = norm_xh(vf_load_part(dtype, run.x, i, n), vf_set(scale.rstd), vf_set(scale.shift));
    vf value = vf_fma(vf_set(line.slope), xh, vf_set(line.level));
    if (backward) value = vf_fma(vf_set(line.weight), vf_load_part(dtype, run.dy, i, n), value);
    vf_write_part(mode, dtype, run.out, i, n, value);
}

INLINE void plane_write(vjp_dtype dtype, write_mode mode, bool backward, norm_run run, norm_scale scale,
                        plane_line line) {
    int64_t i = norm_head(dtype, mode, run.out, run.n);
    if (i) plane_at(dtype, mode, backward, run, scale, line, 0, i);
    for (; i + LANES <= run.n; i += LANES) {
        norm_prefetch(dtype, backward, &run, i);
        plane_at(dtype, mode, backward, run, scale, line, i, LANES);
    }
    if (i < run.n) plane_at(dtype, mode, backward, run, scale, line, i, run.n - i);
}

/* The same in double. */
OUTLINE void plane_out_exact(const group_norm *call, norm_run run, int64_t c, norm_scale scale,
                             const norm_sums *group) {
    double gamma = (double)call->gamma_f32[c];
    for (int64_t i = 0; i < run.n; i++) {
        double xh = norm_xh_exact(scale, f32_load(call->dtype, run.x, i)), value;
        if (group)
            value = norm_dx_exact(scale, (double)f32_load(call->dtype, run.dy, i) * gamma, xh, *group,
                                  call->size.group_channels * call->size.plane);
        else
            value = xh * gamma + (double)call->beta_f32[c];
        norm_write_doubles(call->dtype, call->mode == WRITE_ADD, run.out, i, 1, &value);
    }
}

/*
 * y of n elements of channel c, or dx from its group's sums of g and g * xh; `ahead`: the distance to what is read
 * next.
 */
OUTLINE void plane_out(const group_norm *call, int64_t first, int64_t n, int64_t c, norm_scale scale,
                       const norm_sums *group, int64_t ahead) {
    double gamma = (double)call->gamma_f32[c];
    norm_run run = {.x = at(call->dtype, call->x, first), .n = n, .ahead = ahead};
    run.out = at_mutable(call->dtype, call->out, first);
    if (group) {
        run.dy = at(call->dtype, call->dy, first);
        norm_line of_group = norm_line_of(scale, *group, call->size.group_channels * call->size.plane);
        plane_line line = {(float)((double)scale.rstd * gamma), of_group.slope, of_group.level};
        if (norm_scale_fits(scale) && norm_sums_fit(*group) && norm_line_fits(of_group) &&
            fabsf(line.weight) <= FLT_MAX)
            BY_DTYPE_AND_MODE(call->dtype, call->mode, plane_write, true, run, scale, line);
        else
            plane_out_exact(call, run, c, scale, group);
    } else {
        float level = (float)((double)call->beta_f32[c] + gamma * (double)scale.rest);
        plane_line line = {0, (float)gamma, level};
        if (norm_scale_fits(scale) && fabsf(level) <= FLT_MAX)
            BY_DTYPE_AND_MODE(call->dtype, call->mode, plane_write, false, run, scale, line);
        else
            plane_out_exact(call, run, c, scale, NULL);
    }
}

/* ---- Whole groups --------------------------------------------------------------------------------------------- */

static inline norm_statistics planes_statistics(const group_norm *call, int64_t row) {
    int64_t span = call->size.group_channels * call->size.plane;
    if (call->rstd_in) return group_saved(call, row);
    return norm_statistics_of(call->dtype, true, at(call->dtype, call->x, row * span), span, call->eps);
}

/* Elements from a group to the next, where that is prefetched while the group's result is written; else 0. */
static inline int64_t planes_ahead(const group_norm *call, int64_t row) {
    int64_t span = call->size.group_channels * call->size.plane;
    bool fits = span * (int64_t)dtype_bytes(call->dtype) <= GROUP_AHEAD_BYTES;
    return fits && row + 1 < call->size.batch * call->size.groups ? span : 0;
}

static inline void planes_forward(const group_norm *call, int64_t n, int64_t group) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t first = group * s->group_channels, start = (n * s->channels + first) * s->plane;
    int64_t row = n * s->groups + group;
    norm_statistics stat = planes_statistics(call, row);
    group_save(call, row, stat);
    for (int64_t c = 0; c < s->group_channels && call->out; c++)
        plane_out(call, start + c * s->plane, s->plane, first + c, norm_scale_of(stat), NULL, planes_ahead(call, row));
}

/* Adds a channel's sums of dy and dy * xh to dbeta and dgamma, and times gamma to its group's sums of g and g * xh. */
static inline void add_channel(const group_norm *call, int64_t c, norm_sums channel, norm_sums *group, double *dgamma,
                               double *dbeta) {
    group->sum += channel.sum * (double)call->gamma_f32[c];
    group->sum_xh += channel.sum_xh * (double)call->gamma_f32[c];
    if (dbeta) dbeta[c] += channel.sum;
    if (dgamma) dgamma[c] += channel.sum_xh;
}

static inline void planes_backward(const group_norm *call, int64_t n, int64_t group, double *dgamma, double *dbeta) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t first = group * s->group_channels, start = (n * s->channels + first) * s->plane;
    int64_t row = n * s->groups + group;
    norm_scale scale = norm_scale_of(planes_statistics(call, row));
    norm_sums sums = {0};
    for (int64_t c = 0; c < s->group_channels; c++)
        add_channel(call, first + c, plane_sums(call, start + c * s->plane, s->plane, scale), &sums, dgamma, dbeta);
    for (int64_t c = 0; c < s->group_channels && call->out; c++)
        plane_out(call, start + c * s->plane, s->plane, first + c, scale, &sums, planes_ahead(call, row));
}

/* ---- Chunks of few large groups -------------------------------------------------------------------------------- */

static inline float wide_pilot(const group_norm *call, int64_t row) {
    int64_t span = call->size.group_channels * call->size.plane;
    return norm_pilot(call->dtype, true, at(call->dtype, call->x, row * span), span);
}

static inline void wide_measure(void *argument, size_t task) {
    const group_norm *call = argument;
    int64_t span = call->size.group_channels * call->size.plane, row = (int64_t)task / call->chunks;
    int64_t from = (int64_t)task % call->chunks * GROUP_CHUNK;
    call->moments[task] = norm_measure(call->dtype, true, at(call->dtype, call->x, row * span + from),
                                       vjp_min(GROUP_CHUNK, span - from), wide_pilot(call, row));
}

static inline void wide_statistics(void *argument, size_t task) {
    const group_norm *call = argument;
    int64_t row = (int64_t)task, span = call->size.group_channels * call->size.plane;
    norm_statistics stat;
    if (call->rstd_in)
        stat = group_saved(call, row);
    else
        stat =
            norm_conclude(call->dtype, true, at(call->dtype, call->x, row * span), span, call->eps,
                          wide_pilot(call, row), norm_moments_total(call->moments + row * call->chunks, call->chunks));
    group_save(call, row, stat);
    call->scale[row] = norm_scale_of(stat);
}

/* A task's chunk of a channel: its group, its channel, its first element and how many. */
typedef struct wide_chunk {
    int64_t row, c, first, n;
} wide_chunk;

/* Channels are numbered through the batch. */
static inline wide_chunk wide_chunk_of(const group_norm *call, size_t task) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t channel = (int64_t)task / call->channel_chunks, from = (int64_t)task % call->channel_chunks * GROUP_CHUNK;
    return (wide_chunk){channel / s->group_channels, channel % s->channels, channel * s->plane + from,
                        vjp_min(GROUP_CHUNK, s->plane - from)};
}

static inline void wide_sums(void *argument, size_t task) {
    const group_norm *call = argument;
    wide_chunk w = wide_chunk_of(call, task);
    call->sums[task] = plane_sums(call, w.first, w.n, call->scale[w.row]);
}

static inline void wide_out(void *argument, size_t task) {
    const group_norm *call = argument;
    wide_chunk w = wide_chunk_of(call, task);
    plane_out(call, w.first, w.n, w.c, call->scale[w.row], call->backward ? &call->group_sums[w.row] : NULL, 0);
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* Between the rounds: each group's sums, and dgamma and dbeta, from the sums of the chunks. */
static inline void wide_combine(const group_norm *call) {
    const vjp_group_norm_sizes *s = &call->size;
    double *dgamma = NULL, *dbeta = NULL;
    group_partials(call, 0, 0, s->channels, &dgamma, &dbeta);
    for (int64_t row = 0; row < s->batch * s->groups; row++) {
        norm_sums sums = {0};
        for (int64_t k = 0; k < s->group_channels; k++) {
            int64_t channel = row * s->group_channels + k;
            const norm_sums *parts = call->sums + channel * call->channel_chunks;
            add_channel(call, channel % s->channels, norm_sums_total(parts, call->channel_chunks), &sums, dgamma,
                        dbeta);
        }
        call->group_sums[row] = sums;
    }
}

static inline void planes_run_wide(group_norm *call) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t rows = s->batch * s->groups, chunks = s->batch * s->channels * call->channel_chunks;
    if (!call->rstd_in) vjp_cpu_for(call->work, rows * call->chunks, wide_measure, call);
    vjp_cpu_for(call->work, rows, wide_statistics, call);
    if (call->backward) {
        vjp_cpu_for(call->work, chunks, wide_sums, call);
        wide_combine(call);
    }
    if (call->out) vjp_cpu_for(call->work, chunks, wide_out, call);
}

#endif
