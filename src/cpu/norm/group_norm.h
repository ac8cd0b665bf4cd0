/*
 * One call of group_norm on the CPU: its sizes and pointers, how it is cut into tasks, and what both layouts need.
 * Cutting looks at the problem alone; see group_norm.c for the forms.
 */
#ifndef VJP_CPU_GROUP_NORM_H
#define VJP_CPU_GROUP_NORM_H

#include "cpu/norm/norm.h"

/* Elements of a piece of a large group: 64 KiB of f32, as a task is worth at least. */
enum { GROUP_PIECE = 16 << 10 };

/* Tasks that whole groups should make, where there are enough; with fewer than LEAST, large groups are cut. */
enum { GROUP_TASKS = 64, GROUP_TASKS_LEAST = 16, GROUP_WIDE_ELEMENTS = 16 * GROUP_PIECE };

/* A group whose bytes are fetched while the one before is written: with it, it should fit a second-level cache. */
enum { GROUP_AHEAD_BYTES = 256 << 10 };

/* Most bytes of workspace that the columns of tasks with channels last may take together. */
enum { GROUP_SLOT_BYTES = 32 << 20 };

typedef enum group_form {
    GROUPS_SHORT,       /* groups of fewer elements than a vector */
    GROUPS_PLANES,      /* channels first, whole groups */
    GROUPS_PLANES_WIDE, /* channels first, pieces of groups */
    GROUPS_LAST,        /* channels last, whole planes */
    GROUPS_LAST_WIDE    /* channels last, all columns of some rows of the plane */
} group_form;

/* dx = rstd * g + (slope * xh + level), xh without its rest. */
typedef struct group_slopes {
    double slope, level;
} group_slopes;

typedef struct group_norm {
    const vjp_work *work;
    norm_by_dtype by_dtype; /* group_step() for the call's storage type */
    vjp_group_norm_sizes size;
    double eps;
    const void *x, *dy;
    void *out; /* y or dx */
    norm_store store;
    norm_parameter gamma, beta, dgamma, dbeta;
    float *mean_out, *rstd_out;
    const float *mean_in, *rstd_in; /* both NULL where the statistics are measured */

    group_form form;
    cpu_cut batch, groups; /* whole groups: a task is a range of each */
    const float *gamma_f32, *beta_f32;
    float *gamma_buffer, *beta_buffer;
    double *partials; /* [batch.count or 1, 2, channels]: dgamma and dbeta; NULL where neither is wanted */
    /* Channels first, wide: */
    int64_t pieces, channel_pieces; /* of a group, of a channel */
    norm_scale *scale;              /* [batch * groups] */
    group_slopes *slopes;           /* [batch * groups] */
    norm_moments *moments, *sums;   /* [batch * groups, pieces], [batch * channels, channel_pieces] */
    /* Channels last: */
    int64_t width;   /* columns of a slot, a multiple of LANES */
    char *slots;     /* a task's, or wide an n's, columns; see group_norm_last.h */
    float *chunks;   /* [slot, chunk, 4, width]: recent and older column sums */
    cpu_cut rows;    /* of the plane */
    int64_t parties; /* how many slots there are */
} group_norm;

static inline void *group_take(void *workspace, size_t *used, size_t bytes) {
    void *at = workspace ? (char *)workspace + *used : NULL;
    *used += (bytes + 63) / 64 * 64;
    return at;
}

enum { GROUP_SLOT_FLOATS = 5 + 2 * 2 + 3 }; /* floats a column of a slot: group_norm_last.h names them */

/* vjp_cpu_cut_items() with at least `least` items a task. */
static inline cpu_cut group_cut(int64_t items, int64_t bytes_each, int64_t most, int64_t least) {
    cpu_cut cut = vjp_cpu_cut_items(items, bytes_each, most);
    if (cut.size < least) cut = (cpu_cut){(items + least - 1) / least, least, items};
    return cut;
}

/* Decides the form and the cuts, and lays the workspace out; returns its bytes. NULL: only to know them. */
static inline size_t group_plan(group_norm *call, void *workspace) {
    const vjp_group_norm_sizes *s = &call->size;
    bool backward = call->work->pass == VJP_BACKWARD, partials = call->dgamma.data || call->dbeta.data;
    int64_t item = (int64_t)dtype_bytes(call->work->storage), tensors = backward ? 3 : 2;
    int64_t span = s->group_channels * s->plane, total = s->batch * s->channels * s->plane, rows = s->batch * s->groups;
    /* With one channel, or a plane of one element, the layouts are the same memory: take the longer runs. */
    bool last = s->channel_stride == 1 && (s->plane == 1 || s->channels > 1);
    size_t used = 0;
    if (norm_parameter_converts(call->gamma))
        call->gamma_buffer = group_take(workspace, &used, (size_t)s->channels * sizeof(float));
    if (!backward && norm_parameter_converts(call->beta))
        call->beta_buffer = group_take(workspace, &used, (size_t)s->channels * sizeof(float));

    /* A task's partial, 32 bytes a channel written and read, should be little beside 64 elements or more. */
    int64_t least = partials ? (63 + s->plane) / s->plane : 1;
    call->batch = group_cut(s->batch, s->channels * s->plane * item * tensors, CPU_MOST_PARTIALS, least);
    int64_t more = call->batch.count ? (GROUP_TASKS + call->batch.count - 1) / call->batch.count : 1;
    call->groups = vjp_cpu_cut_items(s->groups, call->batch.size * span * item * tensors, more);
    if (last && span >= LANES) {
        call->form = total >= GROUP_WIDE_ELEMENTS && s->plane > 1 && s->batch < GROUP_TASKS_LEAST ? GROUPS_LAST_WIDE
                                                                                                  : GROUPS_LAST;
        int64_t slot = norm_pad(s->channels) * (GROUP_SLOT_FLOATS + 4) * (int64_t)sizeof(float);
        int64_t most = norm_min(CPU_MOST_PARTIALS, 1 + GROUP_SLOT_BYTES / slot);
        call->batch = group_cut(s->batch, s->channels * s->plane * item * tensors, most, least);
        call->groups = (cpu_cut){1, s->groups, s->groups};
    } else if (span < LANES) {
        call->form = GROUPS_SHORT;
    } else {
        call->form = rows < GROUP_TASKS_LEAST && span >= GROUP_WIDE_ELEMENTS ? GROUPS_PLANES_WIDE : GROUPS_PLANES;
    }

    bool wide = call->form == GROUPS_PLANES_WIDE || call->form == GROUPS_LAST_WIDE;
    if (wide) call->batch.count = norm_min(s->batch, 1);
    if (partials)
        call->partials = group_take(workspace, &used, (size_t)(call->batch.count * 2 * s->channels) * sizeof(double));
    if (call->form == GROUPS_PLANES_WIDE) {
        call->pieces = (span + GROUP_PIECE - 1) / GROUP_PIECE;
        call->channel_pieces = (s->plane + GROUP_PIECE - 1) / GROUP_PIECE;
        call->scale = group_take(workspace, &used, (size_t)rows * sizeof *call->scale);
        call->slopes = group_take(workspace, &used, (size_t)rows * sizeof *call->slopes);
        call->moments = group_take(workspace, &used, (size_t)(rows * call->pieces) * sizeof *call->moments);
        if (backward)
            call->sums = group_take(workspace, &used,
                                    (size_t)(s->batch * s->channels * call->channel_pieces) * sizeof *call->sums);
    } else if (call->form == GROUPS_LAST || call->form == GROUPS_LAST_WIDE) {
        bool cut = call->form == GROUPS_LAST_WIDE;
        call->width = norm_pad(s->channels);
        call->parties = cut ? s->batch : call->batch.count;
        int64_t most = cut ? CPU_MOST_PARTIALS / s->batch : 1;
        call->rows = vjp_cpu_cut_items(s->plane, s->channels * item * tensors, most < 1 ? 1 : most);
        if (!cut) call->rows = (cpu_cut){1, s->plane, s->plane};
        call->slots = group_take(workspace, &used, (size_t)(call->parties * call->width) * GROUP_SLOT_FLOATS * 4);
        call->chunks = group_take(workspace, &used, (size_t)(call->parties * call->rows.count * call->width) * 4 * 4);
    }
    return used;
}

static inline const void *group_at(const group_norm *call, const void *data, int64_t i) {
    return data ? norm_at(call->work->storage, data, i) : NULL;
}

static inline void group_save(const group_norm *call, int64_t n, int64_t group, norm_statistics s) {
    if (call->mean_out) call->mean_out[n * call->size.groups + group] = (float)s.mean;
    if (call->rstd_out) call->rstd_out[n * call->size.groups + group] = (float)s.rstd;
}

/* A group's statistics in double, in either layout, where f32 cannot hold the squares. */
static inline norm_statistics group_statistics_exact(const group_norm *call, int64_t n, int64_t group) {
    vjp_dtype dtype = call->work->storage;
    const vjp_group_norm_sizes *s = &call->size;
    double sum = 0, squares = 0, count = (double)(s->group_channels * s->plane), mean = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t c = group * s->group_channels; c < (group + 1) * s->group_channels; c++)
            for (int64_t k = 0; k < s->plane; k++) {
                int64_t at = n * s->channels * s->plane + c * s->channel_stride + k * s->plane_stride;
                double d = (double)f32_load(dtype, call->x, at) - mean;
                if (pass)
                    squares += d * d;
                else
                    sum += d;
            }
        if (!pass) mean = sum / count;
    }
    return (norm_statistics){mean, 1 / sqrt(squares / count + call->eps)};
}

static inline group_slopes group_slopes_of(norm_scale scale, double mean_g, double mean_gxh) {
    double slope = -(double)scale.rstd * mean_gxh;
    return (group_slopes){slope, -(double)scale.rstd * mean_g + slope * (double)scale.rest};
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

#endif
