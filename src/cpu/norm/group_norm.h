/* SPDX-License-Identifier: MIT */
/*
 * One call of group_norm on the CPU: its sizes and pointers, how it is split into tasks, and what both layouts share.
 * The plan looks at the problem alone; see group_norm.c for the table of paths.
 */
#ifndef VJP_CPU_GROUP_NORM_H
#define VJP_CPU_GROUP_NORM_H

#include "cpu/norm/norm.h"

/* Elements of a chunk of a large group: 64 KiB of f32, as a task is worth at least. */
enum { GROUP_CHUNK = 16 << 10 };

/* Tasks that whole groups should make, where there are enough; with fewer than the minimum, large groups are split. */
enum { GROUP_TASKS = 64, GROUP_MIN_TASKS = 16, GROUP_WIDE_ELEMENTS = 16 * GROUP_CHUNK };

/* A group whose bytes are prefetched while the one before is written: with it, it should fit a second-level cache. */
enum { GROUP_AHEAD_BYTES = 256 << 10 };

/* Bytes of workspace that the column slots of all tasks with channels last may take together. */
enum { GROUP_MAX_SLOT_BYTES = 32 << 20 };

typedef enum group_path {
    GROUPS_SHORT,       /* groups of fewer elements than a vector */
    GROUPS_PLANES,      /* channels first, whole groups */
    GROUPS_PLANES_WIDE, /* channels first, chunks of groups */
    GROUPS_LAST,        /* channels last, whole planes */
    GROUPS_LAST_WIDE    /* channels last, all columns of some rows of the plane */
} group_path;

typedef struct group_norm {
    const vjp_work *work;
    vjp_dtype dtype;
    bool backward;
    vjp_group_norm_sizes size;
    double eps;
    const void *x, *dy;
    void *out; /* y or dx */
    write_mode mode;
    norm_parameter gamma, beta, dgamma, dbeta;
    float *mean_out, *rstd_out;
    const float *mean_in, *rstd_in; /* both NULL where the statistics are measured */

    group_path path;
    cpu_split batch, groups; /* whole groups: a task is a range of each */
    const float *gamma_f32, *beta_f32;
    float *gamma_buffer, *beta_buffer;
    double *partials; /* [batch.count or 1, 2, channels]: dgamma and dbeta; NULL where neither is wanted */
    /* Channels first, wide: */
    int64_t chunks, channel_chunks; /* of a group, of a channel */
    norm_scale *scale;              /* [batch * groups] */
    norm_sums *group_sums;          /* [batch * groups]: of g and g * xh */
    norm_moments *moments;          /* [batch * groups, chunks] */
    norm_sums *sums;                /* [batch * channels, channel_chunks] */
    /* Channels last: */
    int64_t width; /* columns of a slot, a multiple of LANES */
    char *slots;   /* columns: one slot per task, or on the wide path per sample; see group_norm_last.h */
    int64_t slot_count;
    float *row_sums; /* [slot, range of rows, 4, width]: recent and older column sums */
    cpu_split rows;  /* of the plane */
    uint32_t exact;  /* wide: bit n is set for a sample that f32 cannot hold; there are few samples */
} group_norm;

enum {
    GROUP_SLOT_FLOATS = 5 + 2 * 2 + sizeof(norm_scale) / 4
}; /* floats per column of a slot: group_norm_last.h names them */

/* vjp_cpu_split_items() with at least `min_items` items per task. */
static inline cpu_split group_split(int64_t items, int64_t bytes_each, int64_t max_tasks, int64_t min_items) {
    cpu_split split = vjp_cpu_split_items(items, bytes_each, max_tasks);
    if (split.size < min_items) split = (cpu_split){vjp_divide_up(items, min_items), min_items, items};
    return split;
}

/* Decides the path and the split, and lays the workspace out; returns its bytes. NULL: only to count them. */
static inline size_t group_plan(group_norm *call, void *workspace) {
    const vjp_group_norm_sizes *s = &call->size;
    bool partials = call->dgamma.data || call->dbeta.data;
    int64_t item = (int64_t)dtype_bytes(call->dtype), tensors = call->backward ? 3 : 2;
    int64_t span = s->group_channels * s->plane, total = s->batch * s->channels * s->plane, rows = s->batch * s->groups;
    /* With one channel, or a plane of one element, the layouts are the same memory: take the longer runs. */
    bool last = s->channel_stride == 1 && (s->plane == 1 || s->channels > 1);
    size_t used = 0;
    if (norm_parameter_converts(call->gamma))
        call->gamma_buffer = norm_take(workspace, &used, (size_t)s->channels * sizeof(float));
    if (!call->backward && norm_parameter_converts(call->beta))
        call->beta_buffer = norm_take(workspace, &used, (size_t)s->channels * sizeof(float));

    /* A task's partial, 32 bytes per channel written and read, should be little beside 64 elements or more. */
    int64_t min_samples = partials ? vjp_divide_up(64, s->plane) : 1;
    call->batch = group_split(s->batch, s->channels * s->plane * item * tensors, CPU_MAX_PARTIALS, min_samples);
    int64_t ranges = call->batch.count ? vjp_divide_up(GROUP_TASKS, call->batch.count) : 1;
    call->groups = vjp_cpu_split_items(s->groups, call->batch.size * span * item * tensors, ranges);
    if (last && span >= LANES) {
        bool wide = total >= GROUP_WIDE_ELEMENTS && s->plane > 1 && s->batch < GROUP_MIN_TASKS;
        call->path = wide ? GROUPS_LAST_WIDE : GROUPS_LAST;
        int64_t slot = vjp_round_up(s->channels, LANES) * (GROUP_SLOT_FLOATS + 4) * (int64_t)sizeof(float);
        int64_t max_tasks = vjp_min(CPU_MAX_PARTIALS, 1 + GROUP_MAX_SLOT_BYTES / slot);
        call->batch = group_split(s->batch, s->channels * s->plane * item * tensors, max_tasks, min_samples);
    } else if (span < LANES) {
        call->path = GROUPS_SHORT;
    } else {
        call->path = rows < GROUP_MIN_TASKS && span >= GROUP_WIDE_ELEMENTS ? GROUPS_PLANES_WIDE : GROUPS_PLANES;
    }

    bool wide = call->path == GROUPS_PLANES_WIDE || call->path == GROUPS_LAST_WIDE;
    if (wide) call->batch.count = vjp_min(s->batch, 1);
    if (partials)
        call->partials = norm_take(workspace, &used, (size_t)(call->batch.count * 2 * s->channels) * sizeof(double));
    if (call->path == GROUPS_PLANES_WIDE) {
        call->chunks = vjp_divide_up(span, GROUP_CHUNK);
        call->channel_chunks = vjp_divide_up(s->plane, GROUP_CHUNK);
        call->scale = norm_take(workspace, &used, (size_t)rows * sizeof *call->scale);
        call->group_sums = norm_take(workspace, &used, (size_t)rows * sizeof *call->group_sums);
        call->moments = norm_take(workspace, &used, (size_t)(rows * call->chunks) * sizeof *call->moments);
        if (call->backward)
            call->sums = norm_take(workspace, &used,
                                   (size_t)(s->batch * s->channels * call->channel_chunks) * sizeof *call->sums);
    } else if (call->path == GROUPS_LAST || call->path == GROUPS_LAST_WIDE) {
        call->width = vjp_round_up(s->channels, LANES);
        call->slot_count = wide ? s->batch : call->batch.count;
        call->rows = (cpu_split){1, s->plane, s->plane};
        if (wide) call->rows = vjp_cpu_split_items(s->plane, s->channels * item * tensors, CPU_MAX_PARTIALS / s->batch);
        int64_t columns = call->slot_count * call->width;
        call->slots = norm_take(workspace, &used, (size_t)columns * GROUP_SLOT_FLOATS * 4);
        call->row_sums = norm_take(workspace, &used, (size_t)(columns * call->rows.count) * 4 * 4);
    }
    return used;
}

/* Sample n's group as a row of the statistics. */
static inline norm_statistics group_saved(const group_norm *call, int64_t row) {
    return (norm_statistics){(double)call->mean_in[row], (double)call->rstd_in[row]};
}

static inline void group_save(const group_norm *call, int64_t row, norm_statistics s) {
    if (call->mean_out) call->mean_out[row] = norm_round(s.mean);
    if (call->rstd_out) call->rstd_out[row] = norm_round(s.rstd);
}

/* Part `part`'s sums for dgamma and dbeta, zeroed for channels [from, to); NULL where not wanted. */
static inline void group_partials(const group_norm *call, int64_t part, int64_t from, int64_t to, double **dgamma,
                                  double **dbeta) {
    double *sums = call->partials ? call->partials + part * 2 * call->size.channels : NULL;
    if (call->dgamma.data) *dgamma = sums;
    if (call->dbeta.data) *dbeta = sums + call->size.channels;
    for (int64_t c = from; c < to && sums; c++)
        sums[c] = sums[call->size.channels + c] = 0;
}

/* dgamma and dbeta from the parts' sums, in order. */
static inline void group_columns(const group_norm *call) {
    const norm_parameter outputs[] = {call->dgamma, call->dbeta};
    for (int k = 0; k < 2; k++)
        for (int64_t c = 0; c < call->size.channels && outputs[k].data; c++) {
            double sum = 0;
            for (int64_t part = 0; part < call->batch.count; part++)
                sum += call->partials[(part * 2 + k) * call->size.channels + c];
            norm_parameter_write(outputs[k], c, 1, &sum);
        }
}

/* ---- In double, in either layout ------------------------------------------------------------------------------ */

static inline int64_t group_offset(const vjp_group_norm_sizes *s, int64_t n, int64_t c, int64_t k) {
    return n * s->channels * s->plane + c * s->channel_stride + k * s->plane_stride;
}

/* A group's statistics, where f32 cannot hold the squares. */
static inline norm_statistics group_statistics_exact(const group_norm *call, int64_t n, int64_t group) {
    const vjp_group_norm_sizes *s = &call->size;
    double sum = 0, squares = 0, count = (double)(s->group_channels * s->plane), mean = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t c = group * s->group_channels; c < (group + 1) * s->group_channels; c++)
            for (int64_t k = 0; k < s->plane; k++) {
                double d = (double)f32_load(call->dtype, call->x, group_offset(s, n, c, k)) - mean;
                if (pass)
                    squares += d * d;
                else
                    sum += d;
            }
        if (!pass) mean = sum / count;
    }
    return (norm_statistics){mean, 1 / sqrt(squares / count + call->eps)};
}

static inline norm_statistics group_any_statistics(const group_norm *call, int64_t n, int64_t group) {
    if (call->rstd_in) return group_saved(call, n * call->size.groups + group);
    return group_statistics_exact(call, n, group);
}

static inline void group_exact_put(const group_norm *call, int64_t i, double value) {
    norm_write_doubles(call->dtype, call->mode == WRITE_ADD, call->out, i, 1, &value);
}

static inline void group_exact_forward(const group_norm *call, int64_t n, int64_t group) {
    const vjp_group_norm_sizes *s = &call->size;
    norm_statistics stat = group_any_statistics(call, n, group);
    group_save(call, n * s->groups + group, stat);
    for (int64_t c = group * s->group_channels; c < (group + 1) * s->group_channels && call->out; c++)
        for (int64_t k = 0; k < s->plane; k++) {
            int64_t i = group_offset(s, n, c, k);
            double xh = ((double)f32_load(call->dtype, call->x, i) - stat.mean) * stat.rstd;
            group_exact_put(call, i, xh * (double)call->gamma_f32[c] + (double)call->beta_f32[c]);
        }
}

static inline void group_exact_backward(const group_norm *call, int64_t n, int64_t group, double *dgamma,
                                        double *dbeta) {
    const vjp_group_norm_sizes *s = &call->size;
    norm_statistics stat = group_any_statistics(call, n, group);
    double mean_g = 0, mean_gxh = 0, count = (double)(s->group_channels * s->plane);
    for (int pass = 0; pass < (call->out ? 2 : 1); pass++) {
        for (int64_t c = group * s->group_channels; c < (group + 1) * s->group_channels; c++)
            for (int64_t k = 0; k < s->plane; k++) {
                int64_t i = group_offset(s, n, c, k);
                double xh = ((double)f32_load(call->dtype, call->x, i) - stat.mean) * stat.rstd;
                double dy = (double)f32_load(call->dtype, call->dy, i), g = dy * (double)call->gamma_f32[c];
                if (pass == 1) {
                    group_exact_put(call, i, stat.rstd * (g - mean_g - xh * mean_gxh));
                    continue;
                }
                mean_g += g / count;
                mean_gxh += g * xh / count;
                if (dgamma) dgamma[c] += dy * xh;
                if (dbeta) dbeta[c] += dy;
            }
    }
}

#endif
