/* SPDX-License-Identifier: MIT */
/* Running a program: a loop over its calls; its reports, and a search for the call that makes a NaN. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/half.h"
#include "core/system.h"
#include "graph/program.h"
#include "op/op.h"

/* The device's sentence, with the node's name before it. */
static vjp_status failed(const vjp_program *program, const program_call *call, vjp_status status) {
    char why[VJP_ERROR_BYTES];
    snprintf(why, sizeof why, "%s", program->device->error);
    return vjp_fail(program->device, status, "%s: %s", call->name, why);
}

static vjp_status run_call(vjp_program *program, program_call *call) {
    vjp_status status = vjp_run(&call->work, call->kernel);
    return status == VJP_OK ? VJP_OK : failed(program, call, status);
}

enum { MERGED_CALLS = 256 }; /* at once; more are no faster */

/* Hands the calls of a group to `many`, MERGED_CALLS at a time. */
static vjp_status for_group(const vjp_program *program, const program_group *group,
                            vjp_status (*many)(const vjp_work *const *works, size_t count)) {
    const program_call *call = &program->call[group->first];
    vjp_status status = VJP_OK;
    for (int32_t done = 0, count = 0; done < group->count && status == VJP_OK; done += count) {
        const vjp_work *works[MERGED_CALLS];
        for (count = 0; count < MERGED_CALLS && done + count < group->count; count++)
            works[count] = &call[done + count].work;
        status = many(works, (size_t)count);
        if (status != VJP_OK) status = failed(program, &call[done], status);
    }
    return status;
}

static vjp_status run_pair(const vjp_program *program, const program_call *first) {
    vjp_status status = program->device->backend->run_pair(&first[0].work, &first[1].work);
    return status == VJP_OK ? VJP_OK : failed(program, first, status);
}

static vjp_status run_group(vjp_program *program, const program_group *group) {
    if (group->count == 1) return run_call(program, &program->call[group->first]);
    if (group->pair) return run_pair(program, &program->call[group->first]);
    return for_group(program, group, program->device->backend->run_many);
}

vjp_status program_warm(const vjp_program *program) {
    const vjp_backend *backend = program->device->backend;
    vjp_status status = VJP_OK;
    for (int32_t g = 0; g < program->groups && status == VJP_OK; g++) {
        const program_group *group = &program->group[g];
        const program_call *call = &program->call[group->first];
        if (group->count > 1 && !group->pair) {
            if (backend->warm_many) status = for_group(program, group, backend->warm_many);
            continue;
        }
        for (int32_t k = 0; k < group->count && status == VJP_OK; k++) {
            status = vjp_warm_work(&call[k].work);
            if (status != VJP_OK) status = failed(program, &call[k], status);
        }
    }
    return status;
}

/* The time of calls that run as one is shared out by the bytes that each must move. */
static vjp_status time_group(vjp_program *program, const program_group *group) {
    program_call *call = &program->call[group->first];
    vjp_status status = vjp_synchronize(program->device);
    double begin = system_seconds(), bytes = 0;
    if (status == VJP_OK) status = run_group(program, group);
    if (status == VJP_OK) status = vjp_synchronize(program->device);
    double seconds = system_seconds() - begin;
    for (int32_t k = 0; k < group->count; k++)
        bytes += call[k].cost.bytes;
    for (int32_t k = 0; k < group->count; k++) {
        call[k].seconds += bytes > 0 ? seconds * call[k].cost.bytes / bytes : seconds / group->count;
        call[k].runs++;
    }
    return status;
}

static vjp_status run_calls(void *argument) {
    vjp_program *program = argument;
    vjp_status status = VJP_OK;
    int32_t moves = 0;
    for (int32_t g = 0; g < program->groups && status == VJP_OK; g++) {
        const program_group *group = &program->group[g];
        int32_t k = group->first;
        if (k <= program->commits &&
            atomic_load_explicit(&program->running, memory_order_relaxed) == PROGRAM_INTERRUPTED)
            status = vjp_fail(program->device, VJP_INTERRUPTED, "%s: interrupted before this call, %d of %d",
                              program->call[k].name, k + 1, program->calls);
        if (status == VJP_OK) status = program_move_before(program, k, &moves);
        if (status == VJP_OK) status = program->profiling ? time_group(program, group) : run_group(program, group);
        if (status == VJP_OK && program->after) program->after(program->context, k + group->count - 1);
    }
    if (status != VJP_OK) program_end_moves(program, moves);
    return status;
}

/*
 * The first run goes call by call, so that the device's libraries can make the choices that they make once per shape. A
 * device that is able to records the second run, and replays it from then on.
 */
static vjp_status run_or_replay(vjp_program *program) {
    const vjp_backend *backend = program->device->backend;
    /* A recording runs as a whole, so that nothing can be enqueued after one of its calls. */
    bool records =
        backend->record && !program->profiling && !program->unrecordable && !program->after && program->runs > 0;
    program->runs++;
    if (!records) return run_calls(program);
    if (!program->recording && backend->record(program->device, run_calls, program, &program->recording) != VJP_OK) {
        program->unrecordable = atomic_load(&program->running) != PROGRAM_INTERRUPTED;
        return run_calls(program);
    }
    return backend->replay(program->device, program->recording);
}

vjp_status vjp_program_run(vjp_program *program) {
    if (!program) return VJP_INVALID;
    program->device->error[0] = 0;
    atomic_store(&program->running, PROGRAM_RUNS);
    vjp_status status = run_or_replay(program);
    atomic_store(&program->running, PROGRAM_IDLE);
    return status;
}

/* Between runs nothing is kept: an interrupt that arrives too late must not stop the next run. */
void vjp_program_interrupt(vjp_program *program) {
    int runs = PROGRAM_RUNS;
    if (program) atomic_compare_exchange_strong(&program->running, &runs, PROGRAM_INTERRUPTED);
}

/* ---- Reports and tracing ----------------------------------------------------------------------------- */

static vjp_status wrong_size(const vjp_program *program, const char *function, uint64_t given, size_t size) {
    return vjp_fail(program->device, VJP_INVALID, "%s: struct_size is %llu; it must be %zu", function,
                    (unsigned long long)given, size);
}

vjp_status vjp_program_describe(const vjp_program *program, vjp_program_report *report) {
    if (!program) return VJP_INVALID;
    program->device->error[0] = 0;
    if (!report) return program_is_null(program, "vjp_program_describe", "report");
    if (report->struct_size != sizeof *report)
        return wrong_size(program, "vjp_program_describe", report->struct_size, sizeof *report);
    *report = program->report;
    report->struct_size = sizeof *report;
    return VJP_OK;
}

void vjp_program_profile(vjp_program *program, int on) {
    if (!program) return;
    program->profiling = on != 0;
    for (int32_t k = 0; k < program->calls && on; k++) {
        program->call[k].seconds = 0;
        program->call[k].runs = 0;
    }
}

vjp_status vjp_program_time(const vjp_program *program, size_t call, vjp_call_time *time) {
    if (!program) return VJP_INVALID;
    program->device->error[0] = 0;
    if (!time) return program_is_null(program, "vjp_program_time", "time");
    if (time->struct_size != sizeof *time)
        return wrong_size(program, "vjp_program_time", time->struct_size, sizeof *time);
    if (call >= (size_t)program->calls)
        return vjp_fail(program->device, VJP_INVALID, "call %zu; the program has %d", call, program->calls);
    const program_call *c = &program->call[call];
    *time = (vjp_call_time){.struct_size = sizeof *time,
                            .node = c->name,
                            .op = c->work.op,
                            .pass = c->work.pass,
                            .seconds = c->seconds,
                            .runs = c->runs,
                            .cost = c->cost,
                            .tensors = c->work.tensor,
                            .attributes = c->attributes};
    return VJP_OK;
}

static double element(const void *data, vjp_dtype dtype, size_t i) {
    switch (dtype) {
    case VJP_F32: return ((const float *)data)[i];
    case VJP_F64: return ((const double *)data)[i];
    case VJP_BF16: return vjp_bf16_to_f32(((const uint16_t *)data)[i]);
    case VJP_F16: return vjp_f16_to_f32(((const uint16_t *)data)[i]);
    default: return 0;
    }
}

/* The first element that is not finite; false: all are. Fails only where the device does. */
static vjp_status look(vjp_program *program, const vjp_tensor *tensor, bool halves, bool *bad, size_t *at,
                       double *value) {
    *bad = false;
    const program_value from = {.tensor = *tensor, .halves = halves, .name = "a weight"};
    size_t bytes = program_bytes(tensor), size = vjp_dtype_size((vjp_dtype)tensor->dtype), count = bytes / size;
    if (!bytes) return VJP_OK;
    size_t row = count, step = count; /* of rows that lie apart */
    if (tensor->ndim > 2) {
        row = (size_t)(tensor->shape[tensor->ndim - 2] * tensor->shape[tensor->ndim - 1]);
        step = (size_t)vjp_row_step(tensor);
        bytes = ((count / row - 1) * step + row) * size;
    }
    void *host = malloc(bytes);
    if (!host) return vjp_fail(program->device, VJP_OUT_OF_MEMORY, "no memory to look at %zu bytes", bytes);
    vjp_status status = program_download(program, &from, 0, host, bytes / size);
    for (size_t i = 0; i < count && status == VJP_OK && !*bad; i++) {
        *value = element(host, (vjp_dtype)tensor->dtype, i / row * step + i % row);
        *bad = !isfinite(*value);
        if (isnan(*value)) *value = NAN; /* without a sign, which would be printed */
        *at = i;
    }
    free(host);
    return status;
}

vjp_status vjp_program_trace(vjp_program *program, char *found, size_t bytes) {
    return program ? program_trace(program, program->calls, found, bytes) : VJP_INVALID;
}

vjp_status program_trace(vjp_program *program, int32_t calls, char *found, size_t bytes) {
    if (!found || !bytes) return program_is_null(program, "vjp_program_trace", "found");
    found[0] = 0;
    bool bad = false;
    size_t at = 0;
    double value = 0;
    vjp_status status = VJP_OK;
    for (int32_t v = 1; v < program->values && status == VJP_OK && !bad; v++) {
        const program_value *own = &program->value[v];
        if (!own->name || !graph_is_persistent(own->role)) continue;
        status = look(program, &own->tensor, own->halves, &bad, &at, &value);
        if (bad) snprintf(found, bytes, "%s holds %g at element %zu before the run", own->name, value, at);
    }
    int32_t moves = 0;
    for (int32_t k = 0; k < calls && status == VJP_OK && !bad; k++) {
        program_call *call = &program->call[k];
        const vjp_pass_info *pass = &call->work.op->info.pass[call->work.pass];
        const vjp_op_rules *rules = call->work.op->rules;
        status = program_move_before(program, k, &moves);
        if (status == VJP_OK) status = run_call(program, call);
        if (status == VJP_OK) status = vjp_synchronize(program->device);
        for (size_t i = 0; i < pass->outputs && status == VJP_OK && !bad; i++) {
            if (!call->work.tensor[i]) continue;
            bool halves = i == ADAMW_W_OUT && rules->in_halves && rules->in_halves(&call->work);
            status = look(program, call->work.tensor[i], halves, &bad, &at, &value);
            if (bad)
                snprintf(found, bytes, "%s (%s.%s, call %d of %d) makes %s %g at element %zu", call->name,
                         call->work.op->info.name, vjp_pass_name(call->work.pass), k + 1, program->calls,
                         pass->slots[i].name, value, at);
        }
    }
    program_end_moves(program, moves);
    return status;
}
