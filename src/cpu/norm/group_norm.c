/*
 * group_norm on the CPU. With xh = (x - mean) * rstd over a group and g = dy * gamma, all that the backward needs are
 * two sums a channel, S = sum of dy and Sx = sum of dy * xh: over the batch they are dbeta and dgamma, and weighted
 * by gamma within a group they are mean(g) and mean(g * xh), of which dx is made (docs/ops/group_norm.md).
 *
 * Channels first (here `planes`, in this file): a group is one run of memory, a channel a part of it with one gamma.
 * Channels last (cpu/group_norm_last.h): channels are columns, summed down the rows of the plane.
 * Either way a task ordinarily takes whole groups and writes dx while they are in the cache. Where there are only a
 * few, large groups, they are cut into pieces, with one round of tasks for each pass (`wide`). Groups of a handful
 * of elements go through plain loops in double, as dx cancels to almost nothing there.
 */
#include "cpu/norm/group_norm_last.h"

/* ---- Handfuls -------------------------------------------------------------------------------------------- */

static norm_statistics short_statistics(const group_norm *call, int64_t n, int64_t group) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t row = n * s->groups + group;
    if (call->rstd_in) return (norm_statistics){(double)call->mean_in[row], (double)call->rstd_in[row]};
    return group_statistics_exact(call, n, group);
}

static void short_put(const group_norm *call, int64_t i, double value) {
    norm_write_doubles(call->work->storage, call->store, call->out, i, 1, &value);
}

static void short_forward(const group_norm *call, int64_t n, int64_t group) {
    vjp_dtype dtype = call->work->storage;
    const vjp_group_norm_sizes *s = &call->size;
    norm_statistics stat = short_statistics(call, n, group);
    group_save(call, n, group, stat);
    for (int64_t c = group * s->group_channels; c < (group + 1) * s->group_channels && call->out; c++)
        for (int64_t k = 0; k < s->plane; k++) {
            int64_t at = n * s->channels * s->plane + c * s->channel_stride + k * s->plane_stride;
            double xh = ((double)f32_load(dtype, call->x, at) - stat.mean) * stat.rstd;
            short_put(call, at, xh * (double)call->gamma_f32[c] + (double)call->beta_f32[c]);
        }
}

static void short_backward(const group_norm *call, int64_t n, int64_t group, double *dgamma, double *dbeta) {
    vjp_dtype dtype = call->work->storage;
    const vjp_group_norm_sizes *s = &call->size;
    norm_statistics stat = short_statistics(call, n, group);
    double mean_g = 0, mean_gxh = 0, count = (double)(s->group_channels * s->plane);
    for (int pass = 0; pass < (call->out ? 2 : 1); pass++) {
        for (int64_t c = group * s->group_channels; c < (group + 1) * s->group_channels; c++)
            for (int64_t k = 0; k < s->plane; k++) {
                int64_t at = n * s->channels * s->plane + c * s->channel_stride + k * s->plane_stride;
                double xh = ((double)f32_load(dtype, call->x, at) - stat.mean) * stat.rstd;
                double dy = (double)f32_load(dtype, call->dy, at), g = dy * (double)call->gamma_f32[c];
                if (pass == 1) {
                    short_put(call, at, stat.rstd * (g - mean_g - xh * mean_gxh));
                    continue;
                }
                mean_g += g / count;
                mean_gxh += g * xh / count;
                if (dgamma) dgamma[c] += dy * xh;
                if (dbeta) dbeta[c] += dy;
            }
    }
}

/* ---- Channels first: steps on the run of one channel
 * ------------------------------------------------------------------ */

/* Sums of dy and dy * xh over n elements. */
INLINE void plane_sums_step(norm_piece *p, vjp_dtype dtype) {
    norm_moments m = {0, 0};
    vf rstd = vf_set(p->scale[0].rstd), shift = vf_set(p->scale[0].shift);
    for (int64_t block = 0; block < p->n; block += NORM_BLOCK) {
        int64_t end = norm_min(block + NORM_BLOCK, p->n), i = block;
        vf sum[2] = {vf_zero(), vf_zero()}, sum_xh[2] = {vf_zero(), vf_zero()};
        for (; i + 2 * LANES <= end; i += 2 * LANES)
            for (int k = 0; k < 2; k++) {
                vf d = norm_load(dtype, p->dy, i + k * LANES, LANES);
                vf xh = norm_xh(norm_load(dtype, p->x, i + k * LANES, LANES), rstd, shift);
                sum[k] = vf_add(sum[k], d);
                sum_xh[k] = vf_fma(d, xh, sum_xh[k]);
            }
        for (int k = 0; i < end; i += LANES, k++) {
            vf d = norm_load(dtype, p->dy, i, norm_min(LANES, end - i));
            vf xh = norm_xh(norm_load(dtype, p->x, i, norm_min(LANES, end - i)), rstd, shift);
            sum[k] = vf_add(sum[k], d);
            sum_xh[k] = vf_fma(d, xh, sum_xh[k]);
        }
        m.sum += (double)vf_sum(vf_add(sum[0], sum[1]));
        m.squares += (double)vf_sum(vf_add(sum_xh[0], sum_xh[1]));
    }
    m.squares += (double)p->scale[0].rest * m.sum;
    p->sums[0] = m;
}

/* out = weight * dy + (slope * xh + level); the forward has no dy. */
INLINE void plane_at(const norm_piece *p, vjp_dtype dtype, norm_store store, bool backward, int64_t i, int64_t n) {
    vf xh = norm_xh(norm_load(dtype, p->x, i, n), vf_set(p->scale[0].rstd), vf_set(p->scale[0].shift));
    vf value = vf_fma(vf_set(p->slope[0]), xh, vf_set(p->level[0]));
    if (backward) value = vf_fma(vf_set(p->weight[0]), norm_load(dtype, p->dy, i, n), value);
    norm_put(dtype, store, p->out, i, n, value);
}

INLINE void plane_as(const norm_piece *p, vjp_dtype dtype, norm_store store, bool backward, int64_t from, int64_t to) {
    /* Copies, which no store can change, so that they stay in registers. */
    const float slope = p->slope[0], level = p->level[0], weight = backward ? p->weight[0] : 0;
    norm_piece local = *p;
    local.slope = &slope;
    local.level = &level;
    local.weight = &weight;
    for (int64_t i = from; i < to; i += LANES) {
        norm_prefetch(dtype, local.x, i + local.ahead);
        if (backward) norm_prefetch(dtype, local.dy, i + local.ahead);
        plane_at(&local, dtype, store, backward, i, LANES);
    }
}

INLINE void plane_out_step(norm_piece *p, vjp_dtype dtype, bool backward) {
    int64_t head = norm_head(dtype, p->store, p->out, p->n), whole = head + (p->n - head) / LANES * LANES;
    const int64_t ends[2][2] = {{0, head}, {whole, p->n - whole}};
    switch (p->store) {
    case NORM_WRITE: plane_as(p, dtype, NORM_WRITE, backward, head, whole); break;
    case NORM_ADD: plane_as(p, dtype, NORM_ADD, backward, head, whole); break;
    case NORM_STREAM: plane_as(p, dtype, NORM_STREAM, backward, head, whole); break;
    }
    for (int k = 0; k < 2; k++)
        if (ends[k][1]) plane_at(p, dtype, p->store, backward, ends[k][0], ends[k][1]);
}

INLINE void group_step(norm_piece *p, vjp_dtype dtype) {
    switch (p->step) {
    case NORM_MEASURE: norm_step_measure(p, dtype, true); break;
    case NORM_EXACT: norm_step_exact(p, dtype, true); break;
    case NORM_PLANE_SUMS: plane_sums_step(p, dtype); break;
    case NORM_PLANE_OUT:
        if (p->dy)
            plane_out_step(p, dtype, true);
        else
            plane_out_step(p, dtype, false);
        break;
    case NORM_COLUMN_SUMS:
        if (p->dy)
            column_sums(p, dtype, true);
        else
            column_sums(p, dtype, false);
        break;
    case NORM_COLUMN_OUT:
        if (p->dy)
            column_out(p, dtype, true);
        else
            column_out(p, dtype, false);
        break;
    default: break;
    }
}

static void step_f32(norm_piece *piece) {
    group_step(piece, VJP_F32);
}

static void step_bf16(norm_piece *piece) {
    group_step(piece, VJP_BF16);
}

static void step_f16(norm_piece *piece) {
    group_step(piece, VJP_F16);
}

static const norm_by_dtype steps[] = {[VJP_F32] = step_f32, [VJP_BF16] = step_bf16, [VJP_F16] = step_f16};

static norm_moments plane_sums(const group_norm *call, int64_t at, int64_t n, norm_scale scale) {
    norm_piece p = {.step = NORM_PLANE_SUMS, .n = n, .scale = {scale}};
    p.x = group_at(call, call->x, at);
    p.dy = group_at(call, call->dy, at);
    call->by_dtype(&p);
    return p.sums[0];
}

/* y of n elements of channel c, or with slopes dx; `ahead`: elements to what is read next. */
static void plane_out(const group_norm *call, int64_t at, int64_t n, int64_t c, norm_scale scale,
                      const group_slopes *slopes, int64_t ahead) {
    double gamma = (double)call->gamma_f32[c];
    float weight = (float)((double)scale.rstd * gamma), slope = (float)gamma, level;
    if (slopes) {
        slope = (float)slopes->slope;
        level = (float)slopes->level;
    } else {
        level = (float)((double)call->beta_f32[c] + gamma * (double)scale.rest);
    }
    norm_piece p = {.step = NORM_PLANE_OUT, .store = call->store, .n = n, .scale = {scale}, .ahead = ahead};
    p.x = group_at(call, call->x, at);
    p.dy = group_at(call, call->dy, at);
    p.out = norm_at_out(call->work->storage, call->out, at);
    p.weight = &weight;
    p.slope = &slope;
    p.level = &level;
    call->by_dtype(&p);
}

/* ---- Channels first, whole groups ---------------------------------------------------------------------------- */

static norm_statistics planes_statistics(const group_norm *call, int64_t row) {
    int64_t span = call->size.group_channels * call->size.plane;
    if (call->rstd_in) return (norm_statistics){(double)call->mean_in[row], (double)call->rstd_in[row]};
    return norm_statistics_of(call->by_dtype, group_at(call, call->x, row * span), span, call->eps, true);
}

/* Elements from a group to the next, where that is fetched while the group's result is written; else 0. */
static int64_t planes_ahead(const group_norm *call, int64_t row) {
    int64_t span = call->size.group_channels * call->size.plane;
    bool fits = span * (int64_t)dtype_bytes(call->work->storage) <= GROUP_AHEAD_BYTES;
    return fits && row + 1 < call->size.batch * call->size.groups ? span : 0;
}

static void planes_forward(const group_norm *call, int64_t n, int64_t group) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t first = group * s->group_channels, at = (n * s->channels + first) * s->plane;
    norm_statistics stat = planes_statistics(call, n * s->groups + group);
    group_save(call, n, group, stat);
    for (int64_t c = 0; c < s->group_channels && call->out; c++)
        plane_out(call, at + c * s->plane, s->plane, first + c, norm_scale_of(stat), NULL,
                  planes_ahead(call, n * s->groups + group));
}

static void planes_backward(const group_norm *call, int64_t n, int64_t group, double *dgamma, double *dbeta) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t first = group * s->group_channels, span = s->group_channels * s->plane;
    int64_t at = (n * s->channels + first) * s->plane, row = n * s->groups + group;
    norm_scale scale = norm_scale_of(planes_statistics(call, row));
    double sum_g = 0, sum_gxh = 0;
    for (int64_t c = 0; c < s->group_channels; c++) {
        norm_moments m = plane_sums(call, at + c * s->plane, s->plane, scale);
        sum_g += m.sum * (double)call->gamma_f32[first + c];
        sum_gxh += m.squares * (double)call->gamma_f32[first + c];
        if (dbeta) dbeta[first + c] += m.sum;
        if (dgamma) dgamma[first + c] += m.squares;
    }
    group_slopes slopes = group_slopes_of(scale, sum_g / (double)span, sum_gxh / (double)span);
    for (int64_t c = 0; c < s->group_channels && call->out; c++)
        plane_out(call, at + c * s->plane, s->plane, first + c, scale, &slopes, planes_ahead(call, row));
}

/* A range of the batch by a range of the groups. */
static void groups_task(void *argument, size_t task) {
    const group_norm *call = argument;
    const vjp_group_norm_sizes *s = &call->size;
    bool backward = call->work->pass == VJP_BACKWARD;
    size_t part = task / (size_t)call->groups.count, range = task % (size_t)call->groups.count;
    int64_t from = cpu_cut_begin(&call->groups, range), to = cpu_cut_end(&call->groups, range);
    double *dgamma = NULL, *dbeta = NULL;
    group_partials(call, (int64_t)part, from * s->group_channels, to * s->group_channels, &dgamma, &dbeta);
    for (int64_t n = cpu_cut_begin(&call->batch, part); n < cpu_cut_end(&call->batch, part); n++)
        for (int64_t group = from; group < to; group++) {
            if (call->form == GROUPS_SHORT && backward)
                short_backward(call, n, group, dgamma, dbeta);
            else if (call->form == GROUPS_SHORT)
                short_forward(call, n, group);
            else if (backward)
                planes_backward(call, n, group, dgamma, dbeta);
            else
                planes_forward(call, n, group);
        }
    if (call->store == NORM_STREAM) vf_stream_done();
}

/* ---- Channels first, wide: pieces of a group for its moments, of a channel for the rest ----------------------- */

static norm_piece wide_run(const group_norm *call, int64_t row, int64_t from) {
    int64_t span = call->size.group_channels * call->size.plane;
    return (norm_piece){.step = NORM_MEASURE,
                        .x = group_at(call, call->x, row * span),
                        .from = from,
                        .n = norm_min(GROUP_PIECE, span - from),
                        .run = span,
                        .eps = call->eps};
}

static void wide_measure(void *argument, size_t task) {
    const group_norm *call = argument;
    norm_piece p = wide_run(call, (int64_t)task / call->pieces, (int64_t)task % call->pieces * GROUP_PIECE);
    call->by_dtype(&p);
    call->moments[task] = p.sums[0];
}

static void wide_statistics(void *argument, size_t task) {
    const group_norm *call = argument;
    int64_t row = (int64_t)task, groups = call->size.groups;
    norm_statistics stat;
    if (call->rstd_in) {
        stat = planes_statistics(call, row);
    } else {
        norm_moments total = {0, 0};
        for (int64_t piece = 0; piece < call->pieces; piece++) {
            total.sum += call->moments[row * call->pieces + piece].sum;
            total.squares += call->moments[row * call->pieces + piece].squares;
        }
        norm_piece p = wide_run(call, row, 0);
        p.n = 0; /* only the pilot */
        call->by_dtype(&p);
        stat = norm_conclude(call->by_dtype, &p, total, true);
    }
    group_save(call, row / groups, row % groups, stat);
    call->scale[row] = norm_scale_of(stat);
}

/* Where a task's piece of a channel lies; channels are numbered through the batch. */
typedef struct wide_place {
    int64_t row, c, at, n;
} wide_place;

static wide_place wide_place_of(const group_norm *call, size_t task) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t channel = (int64_t)task / call->channel_pieces, from = (int64_t)task % call->channel_pieces * GROUP_PIECE;
    return (wide_place){channel / s->group_channels, channel % s->channels, channel * s->plane + from,
                        norm_min(GROUP_PIECE, s->plane - from)};
}

static void wide_sums(void *argument, size_t task) {
    const group_norm *call = argument;
    wide_place w = wide_place_of(call, task);
    call->sums[task] = plane_sums(call, w.at, w.n, call->scale[w.row]);
}

static void wide_out(void *argument, size_t task) {
    const group_norm *call = argument;
    wide_place w = wide_place_of(call, task);
    bool backward = call->work->pass == VJP_BACKWARD;
    plane_out(call, w.at, w.n, w.c, call->scale[w.row], backward ? &call->slopes[w.row] : NULL, 0);
    if (call->store == NORM_STREAM) vf_stream_done();
}

/* Between the rounds: each group's slopes, and dgamma and dbeta, from the sums of the pieces. */
static void wide_combine(const group_norm *call) {
    const vjp_group_norm_sizes *s = &call->size;
    double *dgamma = NULL, *dbeta = NULL, span = (double)(s->group_channels * s->plane);
    group_partials(call, 0, 0, s->channels, &dgamma, &dbeta);
    for (int64_t row = 0; row < s->batch * s->groups; row++) {
        double sum_g = 0, sum_gxh = 0;
        for (int64_t k = 0; k < s->group_channels; k++) {
            int64_t channel = row * s->group_channels + k, c = channel % s->channels;
            norm_moments m = {0, 0};
            for (int64_t piece = 0; piece < call->channel_pieces; piece++) {
                m.sum += call->sums[channel * call->channel_pieces + piece].sum;
                m.squares += call->sums[channel * call->channel_pieces + piece].squares;
            }
            sum_g += m.sum * (double)call->gamma_f32[c];
            sum_gxh += m.squares * (double)call->gamma_f32[c];
            if (dbeta) dbeta[c] += m.sum;
            if (dgamma) dgamma[c] += m.squares;
        }
        call->slopes[row] = group_slopes_of(call->scale[row], sum_g / span, sum_gxh / span);
    }
}

static void wide_run_all(group_norm *call) {
    const vjp_group_norm_sizes *s = &call->size;
    int64_t rows = s->batch * s->groups, pieces = s->batch * s->channels * call->channel_pieces;
    if (!call->rstd_in) vjp_cpu_for(call->work, rows * call->pieces, wide_measure, call);
    vjp_cpu_for(call->work, rows, wide_statistics, call);
    if (call->work->pass == VJP_BACKWARD) {
        vjp_cpu_for(call->work, pieces, wide_sums, call);
        wide_combine(call);
    }
    if (call->out) vjp_cpu_for(call->work, pieces, wide_out, call);
}

/* ---- Calls --------------------------------------------------------------------------------------------------- */

static group_norm call_of(const vjp_work *work) {
    const vjp_group_norm_attributes *a = work->attributes;
    bool backward = work->pass == VJP_BACKWARD;
    bool saved = backward && work->tensor[GROUP_NORM_B_MEAN] && work->tensor[GROUP_NORM_B_RSTD];
    group_norm call = {
        .work = work,
        .by_dtype = steps[work->storage],
        .size = vjp_group_norm_sizes_of(work),
        .eps = a->eps,
        .x = vjp_data(work, backward ? GROUP_NORM_B_X : GROUP_NORM_X),
        .out = vjp_data(work, 0),
        .gamma = norm_parameter_of(work, backward ? GROUP_NORM_B_GAMMA : GROUP_NORM_GAMMA),
    };
    if (backward) {
        call.dy = vjp_data(work, GROUP_NORM_B_DY);
        call.dgamma = norm_parameter_of(work, GROUP_NORM_B_DGAMMA);
        call.dbeta = norm_parameter_of(work, GROUP_NORM_B_DBETA);
        call.mean_in = saved ? vjp_data(work, GROUP_NORM_B_MEAN) : NULL;
        call.rstd_in = saved ? vjp_data(work, GROUP_NORM_B_RSTD) : NULL;
    } else {
        call.beta = norm_parameter_of(work, GROUP_NORM_BETA);
        call.mean_out = vjp_data(work, GROUP_NORM_MEAN);
        call.rstd_out = vjp_data(work, GROUP_NORM_RSTD);
    }
    double elements = (double)call.size.batch * (double)call.size.channels * (double)call.size.plane;
    call.store = norm_store_of(work, 0, call.out == call.x || call.out == call.dy,
                               elements * (double)dtype_bytes(work->storage) * (backward ? 3 : 2));
    return call;
}

static size_t workspace(const vjp_work *work) {
    group_norm call = call_of(work);
    return group_plan(&call, NULL);
}

static vjp_status run(const vjp_work *work) {
    group_norm call = call_of(work);
    const vjp_group_norm_sizes *s = &call.size;
    bool backward = work->pass == VJP_BACKWARD;
    if (!call.out && !call.mean_out && !call.rstd_out && !call.dgamma.data && !call.dbeta.data) return VJP_OK;
    group_plan(&call, work->workspace);
    call.gamma_f32 = norm_parameter_read(call.gamma, 0, s->channels, 1, call.gamma_buffer);
    if (!backward) call.beta_f32 = norm_parameter_read(call.beta, 0, s->channels, 0, call.beta_buffer);
    switch (call.form) {
    case GROUPS_SHORT:
    case GROUPS_PLANES: vjp_cpu_for(work, call.batch.count * call.groups.count, groups_task, &call); break;
    case GROUPS_LAST: vjp_cpu_for(work, call.batch.count * call.groups.count, last_groups, &call); break;
    case GROUPS_PLANES_WIDE: wide_run_all(&call); break;
    case GROUPS_LAST_WIDE: last_run_wide(&call); break;
    }
    if (call.partials) group_columns(&call);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(group_norm)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(group_norm)[VJP_PASS_COUNT] = {
    {run, workspace, VJP_BITS_CPU},
    {run, workspace, VJP_BITS_CPU},
};
