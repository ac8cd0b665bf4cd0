/* SPDX-License-Identifier: MIT */
/*
 * group_norm on the CPU. With xh = (x - mean) * rstd over a group and g = dy * gamma, all that the backward needs are
 * two sums per channel, of dy and of dy * xh: over the batch they are dbeta and dgamma, and weighted by gamma within a
 * group they are mean(g) and mean(g * xh), from which dx is made (docs/ops/group_norm.md).
 *
 * | path        | taken for                                | a task is        | why                                   |
 * |-------------|------------------------------------------|------------------|---------------------------------------|
 * | short       | groups of fewer elements than a vector   | ranges of groups | dx cancels to almost nothing there:   |
 * |             |                                          |                  | plain loops in double                 |
 * | planes      | channels first                           | ranges of groups | a group is one run of memory; dx is   |
 * |             |                                          |                  | written while it is in the cache      |
 * | planes wide | channels first, fewer groups than        | a chunk of a     | too few groups for all threads; one   |
 * |             | GROUP_MIN_TASKS, each large              | group or channel | round of tasks for each pass          |
 * | last        | channels last                            | whole samples    | channels are columns, summed down the |
 * |             |                                          |                  | rows of the plane                     |
 * | last wide   | channels last, fewer samples than        | some rows of a   | as for planes wide                    |
 * |             | GROUP_MIN_TASKS, large in all            | plane            |                                       |
 *
 * Channels first is in group_norm_first.h, channels last in group_norm_last.h, short groups in group_norm.h. The loops
 * in double of short groups also compute what f32 cannot hold on the other paths.
 */
#include "cpu/norm/group_norm_first.h"
#include "cpu/norm/group_norm_last.h"

/* ---- Calls --------------------------------------------------------------------------------------------------- */

/* Short groups and planes: a range of the batch by a range of the groups. */
static void groups_task(void *argument, size_t task) {
    const group_norm *call = argument;
    const vjp_group_norm_sizes *s = &call->size;
    size_t part = task / (size_t)call->groups.count, range = task % (size_t)call->groups.count;
    int64_t from = cpu_split_begin(&call->groups, range), to = cpu_split_end(&call->groups, range);
    double *dgamma = NULL, *dbeta = NULL;
    group_partials(call, (int64_t)part, from * s->group_channels, to * s->group_channels, &dgamma, &dbeta);
    for (int64_t n = cpu_split_begin(&call->batch, part); n < cpu_split_end(&call->batch, part); n++)
        for (int64_t group = from; group < to; group++) {
            if (call->path == GROUPS_SHORT && call->backward)
                group_exact_backward(call, n, group, dgamma, dbeta);
            else if (call->path == GROUPS_SHORT)
                group_exact_forward(call, n, group);
            else if (call->backward)
                planes_backward(call, n, group, dgamma, dbeta);
            else
                planes_forward(call, n, group);
        }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

static group_norm call_of(const vjp_work *work) {
    const vjp_group_norm_attributes *a = work->attributes;
    bool backward = work->pass == VJP_BACKWARD;
    bool saved = backward && work->tensor[GROUP_NORM_B_MEAN] && work->tensor[GROUP_NORM_B_RSTD];
    group_norm call = {
        .work = work,
        .dtype = work->storage,
        .backward = backward,
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
    int64_t elements = call.size.batch * call.size.channels * call.size.plane;
    call.mode = norm_write_mode(work, elements, call.out == call.x || call.out == call.dy);
    return call;
}

static size_t workspace(const vjp_work *work) {
    group_norm call = call_of(work);
    return group_plan(&call, NULL);
}

static vjp_status run(const vjp_work *work) {
    group_norm call = call_of(work);
    int64_t channels = call.size.channels;
    if (!call.out && !call.mean_out && !call.rstd_out && !call.dgamma.data && !call.dbeta.data) return VJP_OK;
    group_plan(&call, work->workspace);
    call.gamma_f32 = norm_parameter_read(call.gamma, 0, channels, 1, call.gamma_buffer);
    if (!call.backward) call.beta_f32 = norm_parameter_read(call.beta, 0, channels, 0, call.beta_buffer);
    switch (call.path) {
    case GROUPS_SHORT:
    case GROUPS_PLANES: vjp_cpu_for(work, call.batch.count * call.groups.count, groups_task, &call); break;
    case GROUPS_LAST: vjp_cpu_for(work, call.batch.count, last_samples, &call); break;
    case GROUPS_PLANES_WIDE: planes_run_wide(&call); break;
    case GROUPS_LAST_WIDE: last_run_wide(&call); break;
    }
    if (call.partials) group_columns(&call);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(group_norm)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(group_norm)[VJP_PASS_COUNT] = {
    {run, workspace, VJP_STORAGE_16_32},
    {run, workspace, VJP_STORAGE_16_32},
};
