/* SPDX-License-Identifier: MIT */
/* Builds a launch: operands, parameters, constants. */
#include "gpu/gpu.h"

#include <stdio.h>
#include <string.h>

gpu_launch gpu_begin(const vjp_work *work, const char *kernel) {
    return (gpu_launch){.work = work, .shader = work->op->info.name, .kernel = kernel, .threads = GPU_THREADS};
}

static gpu_operand *add(gpu_launch *l, const char *name, gpu_form form, vjp_dtype dtype) {
    gpu_operand *o = &l->operand[l->operands++];
    *o = (gpu_operand){.name = name, .form = form, .dtype = dtype};
    return o;
}

static gpu_form form_of(vjp_kind kind) {
    return kind == VJP_KIND_INDEX || kind == VJP_KIND_ARGMAX ? GPU_INDEX : GPU_FLOAT;
}

/*
 * Whether every run starts a multiple of `unit` elements after the tensor. Where rows lie apart there are two or more
 * of them, so there is more than one run.
 */
static bool runs_start_at(const vjp_work *work, int slot, int64_t run, int64_t unit) {
    int64_t count = vjp_elements(work, slot);
    bool apart = vjp_extent(work->tensor[slot]) != count * (int64_t)vjp_dtype_size(vjp_type(work, slot));
    if (apart) return run % unit == 0 && vjp_step(work, slot) % unit == 0;
    return run % unit == 0 || run == count;
}

void gpu_tensor(gpu_launch *l, const char *name, int slot, int64_t run) {
    const vjp_work *work = l->work;
    gpu_operand *o = add(l, name, form_of(vjp_slot_at(work, slot)->kind), vjp_type(work, slot));
    size_t size = vjp_dtype_size(o->dtype);
    o->address = vjp_data(work, slot);
    if (!o->address || vjp_elements(work, slot) == 0) return;
    o->present = true;
    o->output = vjp_slot_at(work, slot)->flags & VJP_SLOT_OUTPUT;
    o->adds = vjp_accumulates(work, slot);
    o->bytes = (uint64_t)vjp_extent(work->tensor[slot]);
    o->label = vjp_slot_at(work, slot)->name;
    uintptr_t at = (uintptr_t)o->address;
    o->paired = size != 2 || (at % 4 == 0 && run != 1 && runs_start_at(work, slot, run, 2));
    /* A shader counts elements, and 16-byte words of the window around them, in 32 bits. */
    if (o->bytes / size >= UINT64_C(1) << 31 && !l->too_big) l->too_big = o->label;
}

void gpu_fours(gpu_launch *l, const char *name, int slot, int64_t run) {
    gpu_tensor(l, name, slot, run);
    gpu_operand *o = &l->operand[l->operands - 1];
    o->fours = o->present && (uintptr_t)o->address % (4 * vjp_dtype_size(o->dtype)) == 0 &&
               runs_start_at(l->work, slot, run, 4);
}

void gpu_part(gpu_launch *l, int64_t first, int64_t count) {
    gpu_operand *o = &l->operand[l->operands - 1];
    size_t size = vjp_dtype_size(o->dtype);
    if (!o->present) return;
    o->address += (size_t)first * size;
    o->bytes = (uint64_t)count * size;
}

void gpu_rows(gpu_launch *l, int slot, int64_t first, int64_t count) {
    const vjp_tensor *t = l->work->tensor[slot];
    if (!l->operand[l->operands - 1].present) return;
    int64_t step = vjp_row_step(t), row = t->shape[t->ndim - 2] * t->shape[t->ndim - 1];
    gpu_part(l, first * step, (count - 1) * step + row);
}

void gpu_scratch(gpu_launch *l, const char *name, vjp_dtype dtype, size_t offset, int64_t count, bool output) {
    gpu_operand *o = add(l, name, dtype == VJP_F32 ? GPU_FLOAT : GPU_WORD, dtype);
    o->present = count > 0;
    o->output = output;
    o->paired = true;
    o->label = "its workspace";
    if (!o->present) return; /* there may be no workspace at all */
    o->address = (const char *)l->work->workspace + offset;
    o->bytes = (uint64_t)count * 4;
    if (count >= INT64_C(1) << 31 && !l->too_big) l->too_big = o->label;
}

void gpu_floats(gpu_launch *l, const char *name, const vjp_tensor *t, bool output) {
    gpu_operand *o = add(l, name, GPU_FLOAT, (vjp_dtype)t->dtype);
    size_t size = vjp_dtype_size(o->dtype);
    o->present = true;
    o->output = output;
    o->address = (const char *)t->data + t->offset;
    o->bytes = (uint64_t)vjp_extent(t);
    o->paired = (uintptr_t)o->address % 4 == 0;
    o->fours = (uintptr_t)o->address % (4 * size) == 0;
    o->label = name;
    if (o->bytes / size >= UINT64_C(1) << 31 && !l->too_big) l->too_big = name;
}

void gpu_words(gpu_launch *l, const char *name, const void *address, uint64_t bytes, bool output) {
    gpu_operand *o = add(l, name, GPU_WORD, VJP_I32);
    o->present = o->paired = true;
    o->output = output;
    o->address = address;
    o->bytes = bytes;
    o->label = name;
}

void gpu_report_bad_index(gpu_launch *l, int64_t limit) {
    add(l, "bad_index", GPU_BAD_INDEX, VJP_I32)->output = true;
    l->limit = limit;
}

void gpu_report_bad_integer(gpu_launch *l, int64_t first) {
    gpu_report_bad_index(l, INT64_MAX);
    l->first = first;
}

vjp_status gpu_explain(const vjp_work *work, int slot) {
    gpu_launch l = gpu_begin(work, "explain");
    l.shader = "tools";
    l.threads = gpu_threads(work->device);
    gpu_tensor(&l, "explained", slot, 1);
    if (!l.operand[0].present) return VJP_OK;
    gpu_u32(&l, vjp_elements(work, slot));
    gpu_report_bad_index(&l, -1);
    return gpu_enqueue(&l, 1);
}

void gpu_u32(gpu_launch *l, int64_t value) {
    if ((value < 0 || value > UINT32_MAX) && !l->too_big) l->too_big = "a size";
    l->param[l->params++] = (uint32_t)value;
}

void gpu_f32(gpu_launch *l, double value) {
    float narrow = (float)value;
    memcpy(&l->param[l->params++], &narrow, sizeof narrow);
}

void gpu_constant(gpu_launch *l, const char *name, int64_t value) {
    l->constant[l->constants++] = (gpu_constant_value){name, (uint32_t)value};
}

/* The kernels of each op: ops/<op>.c, and ops/norm.c for layer_norm and rms_norm. */
#define OP(name, family, cuda, gpu) extern const vjp_kernel gpu_##name[VJP_PASS_COUNT];
#include "op/ops.def"

static const vjp_kernel *const kernels[VJP_OP_COUNT] = {
#define OP(name, family, cuda, gpu) OP_KERNELS_##gpu(gpu_##name),
#include "op/ops.def"
};

const vjp_kernel *gpu_kernel(const vjp_op *op, vjp_pass pass) {
    return kernels[op->id] ? &kernels[op->id][pass] : NULL;
}

vjp_status gpu_rehearse(const vjp_work *work, gpu_mode *mode, gpu_mode during) {
    *mode = during;
    vjp_status status = gpu_kernel(work->op, work->pass)->run(work);
    *mode = GPU_RUN;
    return status;
}

/* ---- Counts ------------------------------------------------------------------------------------------ */

const char *gpu_count(const gpu_counts *counts, const char *name, char *text, size_t bytes) {
    const struct {
        const char *name;
        uint64_t value;
    } known[] = {{"dispatches", counts->dispatches},
                 {"submissions", counts->submissions},
                 {"waits", counts->waits},
                 {"pipelines", counts->pipelines}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(name, known[i].name) == 0) {
            snprintf(text, bytes, "%llu", (unsigned long long)known[i].value);
            return text;
        }
    if (strcmp(name, "pipeline_seconds") != 0) return NULL;
    snprintf(text, bytes, "%.3f", counts->pipeline_seconds);
    return text;
}

/* ---- Refusals ---------------------------------------------------------------------------------------- */

vjp_status gpu_refuse(vjp_device *device, const gpu_launch *l, vjp_status status, const char *what, const char *name) {
    if (l->work) return vjp_refuse(l->work, status, "%s %s", name, what);
    return vjp_fail(device, status, "%s: %s %s", device->name, name, what);
}

vjp_status gpu_refuse_memory(vjp_device *device, const gpu_launch *l, const gpu_operand *o) {
    return gpu_refuse(device, l, VJP_INVALID, "does not lie in memory of this device: vjp_alloc() it there", o->label);
}

vjp_status gpu_launch_counts(vjp_device *device, const gpu_launch *l, int64_t groups) {
    if (l->too_big)
        return gpu_refuse(device, l, VJP_UNSUPPORTED, "is too large for this device: shaders count in 32 bits",
                          l->too_big);
    if (groups > INT32_MAX)
        return gpu_refuse(device, l, VJP_UNSUPPORTED, "needs more workgroups than 32 bits count", l->kernel);
    return VJP_OK;
}
