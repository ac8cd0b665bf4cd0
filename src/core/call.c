/* SPDX-License-Identifier: MIT */
/*
 * Every call goes through here: collect the tensors, check them against the op's table, dispatch to the kernel.
 *
 * All checks come before any write and need no memory, so a refused call has changed nothing. The order matters for the
 * sentence that the caller reads: first each tensor alone (rank, sizes, strides, alignment), then dtypes, then the op's
 * own shape rules (infer), then each shape compared with infer's, then overlaps, then values.
 */
#include <stdio.h>
#include <string.h>

#include "core/core.h"

static bool is_output(const vjp_slot *slot) {
    return slot->flags & VJP_SLOT_OUTPUT;
}

static int64_t element_count(const vjp_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

static int64_t byte_count(const vjp_tensor *tensor) {
    return element_count(tensor) * (int64_t)vjp_dtype_size((vjp_dtype)tensor->dtype);
}

/* Whether elements of axes [from, to) follow each other when `expected` is the distance on the last of them. The
 * strides of an axis of one element are never used. */
static bool follow(const vjp_tensor *tensor, int from, int to, int64_t expected) {
    for (int i = to - 1; i >= from; i--) {
        if (tensor->shape[i] != 1 && tensor->stride[i] != expected) return false;
        expected *= tensor->shape[i];
    }
    return true;
}

/* The strides of an empty tensor are never used. */
static bool is_packed(const vjp_tensor *tensor) {
    return element_count(tensor) == 0 || follow(tensor, 0, tensor->ndim, 1);
}

/* Whether the rows, the last two axes, are packed and lie apart at one distance, and their end can be computed. */
static bool has_rows_apart(const vjp_tensor *tensor) {
    int axes = tensor->ndim - 2;
    if (axes < 1 || element_count(tensor) == 0 || !follow(tensor, axes, tensor->ndim, 1)) return false;
    int64_t row = tensor->shape[axes] * tensor->shape[axes + 1], step = vjp_row_step(tensor);
    return step > row && vjp_sizes_fit(2, (const int64_t[]){element_count(tensor) / row, step}) &&
           follow(tensor, 0, axes, step);
}

int64_t vjp_extent(const vjp_tensor *tensor) {
    int64_t count = element_count(tensor), row = count;
    if (count && tensor->ndim > 2) {
        row = tensor->shape[tensor->ndim - 2] * tensor->shape[tensor->ndim - 1];
        count = (count / row - 1) * vjp_row_step(tensor) + row;
    }
    return count * (int64_t)vjp_dtype_size((vjp_dtype)tensor->dtype);
}

static vjp_status refuse_strides(const vjp_work *work, const vjp_slot *slot, const vjp_tensor *tensor) {
    vjp_shape shape = {.ndim = tensor->ndim}, stride = {.ndim = tensor->ndim};
    char shape_text[VJP_SHAPE_TEXT], stride_text[VJP_SHAPE_TEXT];
    memcpy(shape.size, tensor->shape, sizeof shape.size);
    memcpy(stride.size, tensor->stride, sizeof stride.size);
    return vjp_refuse(work, VJP_UNSUPPORTED,
                      "%s of shape %s has strides %s, which is not packed row-major; copy it into a packed tensor "
                      "(vjp_tensor_of() fills in packed strides)",
                      slot->name, vjp_shape_text(&shape, shape_text), vjp_shape_text(&stride, stride_text));
}

/* Rules for every tensor of every op: a known dtype, a valid rank, sizes whose product fits, strides that the slot
 * takes. */
static vjp_status check_form(const vjp_work *work, const vjp_slot *slot, const vjp_tensor *tensor) {
    size_t size = vjp_dtype_size((vjp_dtype)tensor->dtype);
    if (!size) return vjp_refuse(work, VJP_INVALID, "%s has the unknown dtype %d", slot->name, tensor->dtype);
    if (tensor->ndim < 0 || tensor->ndim > VJP_MAX_DIMS)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d; ranks go from 0 to %d", slot->name, tensor->ndim,
                          VJP_MAX_DIMS);
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] < 0)
            return vjp_refuse(work, VJP_INVALID, "%s has size %lld on axis %d", slot->name, (long long)tensor->shape[i],
                              i);
    if (!vjp_sizes_fit(tensor->ndim, tensor->shape))
        return vjp_refuse(work, VJP_INVALID, "%s is too large: the product of its %d sizes overflows", slot->name,
                          tensor->ndim);
    if (!is_packed(tensor) && !(slot->flags & VJP_SLOT_ROWS && has_rows_apart(tensor)))
        return refuse_strides(work, slot, tensor);
    if (tensor->reserved)
        return vjp_refuse(work, VJP_INVALID, "%s has %u in its reserved member, which must be 0", slot->name,
                          (unsigned)tensor->reserved);
    if (tensor->flags & ~(uint32_t)VJP_ACCUMULATE)
        return vjp_refuse(work, VJP_INVALID, "%s has unknown flags 0x%x", slot->name, (unsigned)tensor->flags);
    if ((tensor->flags & VJP_ACCUMULATE) && !(slot->flags & VJP_SLOT_ACCUMULATES))
        return vjp_refuse(work, VJP_INVALID, "%s cannot accumulate: it is %s", slot->name,
                          is_output(slot) ? "always overwritten" : "an input");
    return VJP_OK;
}

static vjp_status check_memory(const vjp_work *work, const vjp_slot *slot, const vjp_tensor *tensor) {
    bool empty = element_count(tensor) == 0;
    if (empty && !tensor->data && !tensor->offset) return VJP_OK;
    if (!tensor->data)
        return vjp_refuse(work, VJP_INVALID, "%s has %s but its data is NULL", slot->name,
                          empty ? "an offset" : "elements");
    size_t size = vjp_dtype_size((vjp_dtype)tensor->dtype);
    if (((uintptr_t)tensor->data + tensor->offset) & (size - 1)) /* a power of two; a division takes longer */
        return vjp_refuse(work, VJP_INVALID, "%s at %p + %llu is not aligned to its %zu-byte elements", slot->name,
                          tensor->data, (unsigned long long)tensor->offset, size);
    uintptr_t room = UINTPTR_MAX - (uintptr_t)tensor->data;
    if (tensor->offset > room || (uintptr_t)vjp_extent(tensor) > room - tensor->offset)
        return vjp_refuse(work, VJP_INVALID, "%s at %p + %llu runs past the end of memory", slot->name, tensor->data,
                          (unsigned long long)tensor->offset);
    return VJP_OK;
}

static const char *kind_text(vjp_kind kind, vjp_dtype storage) {
    switch (kind) {
    case VJP_KIND_STORAGE: return vjp_dtype_name(storage);
    case VJP_KIND_PARAMETER:
        switch (storage) {
        case VJP_F32: return "f32";
        case VJP_BF16: return "bf16 or f32";
        case VJP_F16: return "f16 or f32";
        default: return "f64 or f32";
        }
    case VJP_KIND_STATISTIC: return storage == VJP_F64 ? "f64" : "f32";
    case VJP_KIND_INDEX: return "i32, i64 or f32";
    case VJP_KIND_ARGMAX: return "i32 or i64";
    case VJP_KIND_FLOAT: return "f32, bf16, f16 or f64";
    case VJP_KIND_GRADIENT:
        return storage == VJP_F64 ? "f64, f32 or bf16" : storage == VJP_F16 ? "f16, f32 or bf16" : "f32 or bf16";
    case VJP_KIND_MOMENT: return storage == VJP_F64 ? "f64" : "f32 or bf16";
    }
    return "?";
}

static bool kind_allows(vjp_kind kind, vjp_dtype storage, vjp_dtype dtype) {
    switch (kind) {
    case VJP_KIND_STORAGE: return dtype == storage;
    case VJP_KIND_PARAMETER: return dtype == storage || dtype == VJP_F32;
    case VJP_KIND_STATISTIC: return dtype == (storage == VJP_F64 ? VJP_F64 : VJP_F32);
    case VJP_KIND_INDEX: return dtype == VJP_I32 || dtype == VJP_I64 || dtype == VJP_F32;
    case VJP_KIND_ARGMAX: return dtype == VJP_I32 || dtype == VJP_I64;
    case VJP_KIND_FLOAT: return dtype != VJP_I32 && dtype != VJP_I64;
    case VJP_KIND_GRADIENT: return dtype == storage || dtype == VJP_F32 || dtype == VJP_BF16;
    case VJP_KIND_MOMENT: return storage == VJP_F64 ? dtype == VJP_F64 : dtype == VJP_F32 || dtype == VJP_BF16;
    }
    return false;
}

/* The dtype that vjp_infer() proposes for a slot that is absent. */
static vjp_dtype kind_default(vjp_kind kind, vjp_dtype storage) {
    switch (kind) {
    case VJP_KIND_STATISTIC:
    case VJP_KIND_MOMENT: return storage == VJP_F64 ? VJP_F64 : VJP_F32;
    case VJP_KIND_INDEX:
    case VJP_KIND_ARGMAX: return VJP_I64;
    case VJP_KIND_FLOAT: return VJP_F32;
    default: return storage;
    }
}

static vjp_status check_dtypes(vjp_work *work, const vjp_pass_info *pass) {
    /* T comes from an input where there is one, so that the sentence names a wrong output. */
    int source = -1;
    vjp_kind kind = VJP_KIND_STATISTIC; /* the kind that determines T when no slot is T itself */
    for (size_t i = 0; i < pass->count; i++)
        if (pass->slots[i].kind == VJP_KIND_STORAGE) kind = VJP_KIND_STORAGE;
    for (int i = (int)pass->count - 1; i >= 0; i--)
        if (work->tensor[i] && pass->slots[i].kind == kind) {
            if (source >= 0 && is_output(&pass->slots[i])) break;
            source = i;
        }
    if (source < 0) return vjp_refuse(work, VJP_INVALID, "no tensor is given");
    work->storage = (vjp_dtype)work->tensor[source]->dtype;
    if (work->storage == VJP_I32 || work->storage == VJP_I64)
        return vjp_refuse(work, VJP_INVALID, "%s is %s; it must be f32, bf16, f16 or f64", pass->slots[source].name,
                          vjp_dtype_name(work->storage));
    for (size_t i = 0; i < pass->count; i++) {
        const vjp_tensor *tensor = work->tensor[i];
        const vjp_slot *slot = &pass->slots[i];
        if (tensor && !kind_allows(slot->kind, work->storage, (vjp_dtype)tensor->dtype))
            return vjp_refuse(work, VJP_INVALID, "%s is %s; with %s in %s it must be %s", slot->name,
                              vjp_dtype_name((vjp_dtype)tensor->dtype), pass->slots[source].name,
                              vjp_dtype_name(work->storage), kind_text(slot->kind, work->storage));
    }
    return VJP_OK;
}

static vjp_status check_shapes(const vjp_work *work, const vjp_pass_info *pass) {
    for (size_t i = 0; i < pass->count; i++) {
        const vjp_tensor *tensor = work->tensor[i];
        if (!tensor) continue;
        const vjp_shape *expected = &work->shape[i];
        bool same = tensor->ndim == expected->ndim;
        for (int axis = 0; same && axis < tensor->ndim; axis++)
            same = tensor->shape[axis] == expected->size[axis];
        if (same) continue;
        vjp_shape own = {.ndim = tensor->ndim};
        memcpy(own.size, tensor->shape, sizeof own.size);
        char have[VJP_SHAPE_TEXT], want[VJP_SHAPE_TEXT];
        const char *verb = own.ndim ? "has shape" : "is";
        vjp_shape_text(&own, have);
        vjp_shape_text(expected, want);
        if (!expected->ndim)
            return vjp_refuse(work, VJP_INVALID, "%s %s %s; expected %s", pass->slots[i].name, verb, have, want);
        return vjp_refuse(work, VJP_INVALID, "%s %s %s; expected %s (%s)", pass->slots[i].name, verb, have, want,
                          pass->slots[i].shape);
    }
    return VJP_OK;
}

/*
 * Whether two tensors are rows at the same distance, each one's between those of the other, as the queries and the keys
 * of one tensor are. `begin`: where the second begins relative to the first.
 */
static bool interleave(const vjp_tensor *a, const vjp_tensor *b, int64_t begin) {
    if (!has_rows_apart(a) || !has_rows_apart(b)) return false;
    int64_t size[2], step[2], row[2];
    for (int i = 0; i < 2; i++) {
        const vjp_tensor *tensor = i ? b : a;
        size[i] = (int64_t)vjp_dtype_size((vjp_dtype)tensor->dtype);
        step[i] = vjp_row_step(tensor) * size[i];
        row[i] = tensor->shape[tensor->ndim - 2] * tensor->shape[tensor->ndim - 1] * size[i];
    }
    int64_t apart = (begin % step[0] + step[0]) % step[0];
    return step[0] == step[1] && apart >= row[0] && apart + row[1] <= step[0];
}

/* An empty tensor occupies no memory, whatever its address. */
static bool has_memory(const vjp_tensor *tensor) {
    return tensor && tensor->data && element_count(tensor) > 0;
}

/* The first byte of a tensor that has memory, and the end of its last. */
typedef struct range {
    uintptr_t begin, end;
} range;

static range range_of(const vjp_tensor *tensor) {
    uintptr_t begin = (uintptr_t)tensor->data + (uintptr_t)tensor->offset;
    return (range){begin, begin + (uintptr_t)vjp_extent(tensor)};
}

/* Whether two tensors, both with memory, share some of it. */
static bool share_memory(const vjp_tensor *a, range in_a, const vjp_tensor *b, range in_b) {
    return in_b.begin < in_a.end && in_a.begin < in_b.end && !interleave(a, b, (int64_t)(in_b.begin - in_a.begin));
}

static vjp_status check_overlaps(const vjp_work *work, const vjp_pass_info *pass) {
    for (size_t i = 0; i < pass->outputs; i++) {
        const vjp_tensor *out = work->tensor[i];
        if (!has_memory(out)) continue;
        range own = range_of(out);
        for (size_t j = 0; j < pass->count; j++) {
            const vjp_tensor *other = work->tensor[j];
            if (j == i || !has_memory(other) || (j < pass->outputs && j < i)) continue;
            range its = range_of(other);
            if (!share_memory(out, own, other, its)) continue;
            bool same = its.begin == own.begin && its.end == own.end && other->dtype == out->dtype &&
                        has_rows_apart(other) == has_rows_apart(out);
            bool allowed = pass->slots[i].aliases >> j & 1;
            if (same && allowed && !(out->flags & VJP_ACCUMULATE)) continue;
            const char *why = same && allowed ? "an accumulating output may not be computed in place"
                              : allowed       ? "only exactly the same memory may be computed in place"
                                              : "this pair may not share memory";
            return vjp_refuse(work, VJP_INVALID, "%s overlaps %s: %s", pass->slots[i].name, pass->slots[j].name, why);
        }
    }
    uintptr_t begin = (uintptr_t)work->workspace;
    for (size_t i = 0; i < pass->count && work->workspace_bytes; i++) {
        const vjp_tensor *tensor = work->tensor[i];
        uintptr_t tensor_begin = has_memory(tensor) ? (uintptr_t)tensor->data + (uintptr_t)tensor->offset : 0;
        if (tensor_begin && begin < tensor_begin + (uintptr_t)vjp_extent(tensor) &&
            tensor_begin < begin + work->workspace_bytes)
            return vjp_refuse(work, VJP_INVALID, "%s overlaps the device's workspace", pass->slots[i].name);
    }
    return VJP_OK;
}

static vjp_status no_pass(const vjp_work *work) {
    return vjp_refuse(work, VJP_UNSUPPORTED, "%s has no %s pass: nothing is differentiated through it",
                      work->op->info.name, vjp_pass_name(work->pass));
}

/* All checks that need neither data nor memory. Fills `work`. */
static vjp_status prepare(vjp_work *work, vjp_device *device, const vjp_op *op, vjp_pass pass,
                          const vjp_tensor *const *tensors, size_t count, const void *attributes, void *defaults) {
    if (!device || !device->backend) return VJP_NO_DEVICE;
    device->error[0] = 0;
    if (!op) return vjp_fail(device, VJP_INVALID, "op is NULL");
    if (pass != VJP_FORWARD && pass != VJP_BACKWARD)
        return vjp_fail(device, VJP_INVALID, "%s: unknown pass %d", op->info.name, (int)pass);
    memset(work, 0, sizeof *work);
    work->device = device;
    work->op = op;
    work->pass = pass;
    const vjp_pass_info *info = &op->info.pass[pass];
    if (!info->count) return no_pass(work);
    if (count != info->count)
        return vjp_refuse(work, VJP_INVALID, "%zu tensors given; the pass has %zu slots", count, info->count);
    if (!tensors) return vjp_refuse(work, VJP_INVALID, "tensors is NULL");
    if (!attributes) {
        vjp_op_defaults(op, defaults);
        attributes = defaults;
    }
    work->attributes = attributes;
    vjp_status status = vjp_check_attributes(work);
    if (status != VJP_OK) return status;
    for (size_t i = 0; i < count; i++) {
        const vjp_slot *slot = &info->slots[i];
        work->tensor[i] = tensors[i];
        if (tensors[i]) {
            status = check_form(work, slot, tensors[i]);
            if (status != VJP_OK) return status;
        } else if (!(slot->flags & (VJP_SLOT_OUTPUT | VJP_SLOT_OPTIONAL))) {
            return vjp_refuse(work, VJP_INVALID, "%s is missing: it is a required input", slot->name);
        }
    }
    status = check_dtypes(work, info);
    if (status != VJP_OK) return status;
    status = op->rules->infer(work);
    if (status != VJP_OK) return status;
    return check_shapes(work, info);
}

/* The first dtype of the call that its kernel does not support: T, or that of a slot whose type does not follow from T.
 */
static bool lacks_dtype(const vjp_work *work, const vjp_kernel *kernel, vjp_dtype *dtype) {
    *dtype = work->storage;
    if (!kernel || !kernel->run || !(kernel->storage >> work->storage & 1)) return true;
    const vjp_pass_info *info = &work->op->info.pass[work->pass];
    for (size_t i = 0; i < info->count; i++) {
        vjp_kind kind = info->slots[i].kind;
        bool follows = kind != VJP_KIND_FLOAT && kind != VJP_KIND_GRADIENT && kind != VJP_KIND_MOMENT;
        if (!work->tensor[i] || follows) continue;
        *dtype = (vjp_dtype)work->tensor[i]->dtype;
        if (!(kernel->storage >> *dtype & 1)) return true;
    }
    return false;
}

/* NULL: there is none, and `dtype` is the dtype that is not supported. */
static const vjp_kernel *find_kernel(const vjp_work *work, vjp_dtype *dtype) {
    const vjp_kernel *kernel = work->device->found->kernel(work->device, work->op, work->pass);
    return lacks_dtype(work, kernel, dtype) ? NULL : kernel;
}

static vjp_status no_kernel(const vjp_work *work, vjp_dtype dtype) {
    return vjp_refuse(work, VJP_UNSUPPORTED, "%s has no kernel for %s", work->device->name, vjp_dtype_name(dtype));
}

/* Refuses rows that lie apart, and weights in halves, where the kernel does not take them. */
static vjp_status check_places(const vjp_work *work, const vjp_kernel *kernel) {
    if (work->op->rules->in_halves && work->op->rules->in_halves(work) && !(kernel->storage & VJP_TAKES_HALVES))
        return vjp_refuse(work, VJP_UNSUPPORTED, "%s has no kernel for weights in halves", work->device->name);
    const vjp_pass_info *info = &work->op->info.pass[work->pass];
    for (size_t i = 0; i < info->count && !(kernel->storage & VJP_TAKES_ROWS); i++)
        if (work->tensor[i] && !is_packed(work->tensor[i]))
            return refuse_strides(work, &info->slots[i], work->tensor[i]);
    return VJP_OK;
}

vjp_status vjp_supports(vjp_device *device, const vjp_op *op, vjp_pass pass, vjp_dtype storage) {
    if (!device || !device->found) return VJP_NO_DEVICE;
    if (!op) return vjp_fail(device, VJP_INVALID, "op is NULL");
    if (pass != VJP_FORWARD && pass != VJP_BACKWARD)
        return vjp_fail(device, VJP_INVALID, "%s: unknown pass %d", op->info.name, (int)pass);
    vjp_work work = {.device = device, .op = op, .pass = pass, .storage = storage};
    if (!vjp_dtype_size(storage)) return vjp_refuse(&work, VJP_INVALID, "unknown dtype %d", (int)storage);
    if (!op->info.pass[pass].count) return no_pass(&work);
    vjp_dtype lacking;
    return find_kernel(&work, &lacking) ? VJP_OK : no_kernel(&work, lacking);
}

static vjp_status null_result(vjp_device *device, const char *function, const char *name) {
    if (!device) return VJP_INVALID;
    return vjp_fail(device, VJP_INVALID, "%s: %s is NULL", function, name);
}

vjp_status vjp_workspace_size(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                              size_t count, const void *attributes, size_t *bytes) {
    vjp_work work;
    int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8];
    if (!bytes) return null_result(device, "vjp_workspace_size", "bytes");
    *bytes = 0;
    vjp_status status = prepare(&work, device, op, pass, tensors, count, attributes, defaults);
    if (status != VJP_OK) return status;
    vjp_dtype lacking;
    const vjp_kernel *kernel = find_kernel(&work, &lacking);
    if (!kernel) return no_kernel(&work, lacking);
    status = check_places(&work, kernel);
    if (status == VJP_OK && kernel->workspace) *bytes = kernel->workspace(&work);
    return status;
}

/* Of an absent tensor. A new moment has the dtype of the old one, in whose place it can be computed. */
static vjp_dtype proposed_dtype(const vjp_work *work, int slot) {
    const vjp_pass_info *info = &work->op->info.pass[work->pass];
    for (size_t i = info->outputs; info->slots[slot].kind == VJP_KIND_MOMENT && i < info->count; i++)
        if (info->slots[slot].aliases >> i & 1 && work->tensor[i]) return (vjp_dtype)work->tensor[i]->dtype;
    return kind_default(info->slots[slot].kind, work->storage);
}

vjp_status vjp_infer(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                     size_t count, const void *attributes, vjp_tensor *described) {
    vjp_work work;
    int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8];
    if (!described) return null_result(device, "vjp_infer", "described");
    vjp_status status = prepare(&work, device, op, pass, tensors, count, attributes, defaults);
    if (status != VJP_OK) return status;
    for (size_t i = 0; i < count; i++) {
        vjp_dtype dtype = tensors[i] ? (vjp_dtype)tensors[i]->dtype : proposed_dtype(&work, (int)i);
        described[i] = vjp_tensor_of(NULL, dtype, work.shape[i].ndim, work.shape[i].size);
    }
    return VJP_OK;
}

vjp_status vjp_min_cost(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                        size_t count, const void *attributes, vjp_cost *cost) {
    vjp_work work;
    int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8];
    if (!cost) return null_result(device, "vjp_min_cost", "cost");
    *cost = (vjp_cost){0};
    vjp_status status = prepare(&work, device, op, pass, tensors, count, attributes, defaults);
    if (status != VJP_OK) return status;
    for (size_t i = 0; i < count; i++)
        if (tensors[i]) cost->bytes += (double)byte_count(tensors[i]) * (vjp_accumulates(&work, (int)i) ? 2 : 1);
    if (op->rules->cost) op->rules->cost(&work, cost);
    return VJP_OK;
}

vjp_status vjp_describe_work(vjp_work *work, vjp_device *device, const vjp_op *op, vjp_pass pass,
                             const vjp_tensor *const *tensors, size_t count, const void *attributes) {
    return prepare(work, device, op, pass, tensors, count, attributes, NULL);
}

vjp_status vjp_resolve(vjp_work *work, const vjp_kernel **kernel, vjp_device *device, const vjp_op *op, vjp_pass pass,
                       const vjp_tensor *const *tensors, size_t count, const void *attributes, void *workspace,
                       size_t workspace_bytes) {
    vjp_status status = prepare(work, device, op, pass, tensors, count, attributes, NULL);
    if (status != VJP_OK) return status;
    vjp_dtype lacking;
    *kernel = find_kernel(work, &lacking);
    if (!*kernel) return no_kernel(work, lacking);
    status = check_places(work, *kernel);
    if (status != VJP_OK) return status;
    const vjp_pass_info *info = &op->info.pass[pass];
    for (size_t i = 0; i < count; i++)
        if (tensors[i]) {
            status = check_memory(work, &info->slots[i], tensors[i]);
            if (status != VJP_OK) return status;
        }
    size_t needed = (*kernel)->workspace ? (*kernel)->workspace(work) : 0;
    if (needed > workspace_bytes)
        return vjp_refuse(work, VJP_WORKSPACE, "needs %zu bytes of workspace; the device has %zu: vjp_reserve() more",
                          needed, workspace_bytes);
    work->workspace = workspace;
    work->workspace_bytes = needed;
    status = check_overlaps(work, info);
    return status == VJP_OK && device->backend->check ? device->backend->check(work) : status;
}

vjp_status vjp_warm_work(const vjp_work *work) {
    const vjp_backend *backend = work->device->backend;
    return backend->warm ? backend->warm(work) : VJP_OK;
}

vjp_status vjp_run(const vjp_work *work, const vjp_kernel *kernel) {
    if (work->op->rules->check_values && work->device->backend->host_memory) {
        vjp_status status = work->op->rules->check_values(work);
        if (status != VJP_OK) return status;
    }
    return kernel->run(work);
}

/* With the device's own workspace; `defaults` has room for attributes that are not given. */
static vjp_status resolve_call(vjp_work *work, const vjp_kernel **kernel, vjp_device *device, const vjp_op *op,
                               vjp_pass pass, const vjp_tensor *const *tensors, size_t count, const void *attributes,
                               int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8]) {
    if (op && !attributes) {
        vjp_op_defaults(op, defaults);
        attributes = defaults;
    }
    return vjp_resolve(work, kernel, device, op, pass, tensors, count, attributes, device ? device->workspace : NULL,
                       device ? device->workspace_bytes : 0);
}

vjp_status vjp_call(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors, size_t count,
                    const void *attributes) {
    vjp_work work;
    const vjp_kernel *kernel;
    int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8];
    vjp_status status = resolve_call(&work, &kernel, device, op, pass, tensors, count, attributes, defaults);
    return status == VJP_OK ? vjp_run(&work, kernel) : status;
}

/* Whether no call uses what another one writes. */
static bool are_independent(const vjp_work *works, size_t calls) {
    const vjp_pass_info *pass = &works[0].op->info.pass[works[0].pass];
    for (size_t i = 0; i < calls; i++)
        for (size_t out = 0; out < pass->outputs; out++) {
            const vjp_tensor *written = works[i].tensor[out];
            for (size_t k = 0; k < calls * pass->count && has_memory(written); k++) {
                const vjp_tensor *other = works[k / pass->count].tensor[k % pass->count];
                if (k / pass->count == i || !has_memory(other)) continue;
                if (share_memory(written, range_of(written), other, range_of(other))) return false;
            }
        }
    return true;
}

/* Calls that share the device's workspace run one by one. */
static bool can_merge(const vjp_work *works, size_t calls) {
    const vjp_device *device = works[0].device;
    if (calls < 2 || !device->backend->merges || !device->backend->merges(device, works[0].op, works[0].pass))
        return false;
    for (size_t i = 0; i < calls; i++)
        if (works[i].workspace_bytes) return false;
    return are_independent(works, calls);
}

enum { CALLS_AT_ONCE = 16 }; /* their works are on the stack: 16 KiB */

vjp_status vjp_call_many(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors,
                         size_t count, size_t calls, const void *attributes) {
    vjp_work works[CALLS_AT_ONCE];
    const vjp_work *list[CALLS_AT_ONCE];
    const vjp_kernel *kernel = NULL;
    int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8];
    vjp_status status = VJP_OK;
    /* The first round checks those that do not fit, the second runs. */
    for (size_t i = CALLS_AT_ONCE; i < calls && status == VJP_OK; i++)
        status = resolve_call(&works[0], &kernel, device, op, pass, tensors ? tensors + i * count : NULL, count,
                              attributes, defaults);
    for (size_t done = 0, now = 0; done < calls && status == VJP_OK; done += now) {
        for (now = 0; now < CALLS_AT_ONCE && done + now < calls && status == VJP_OK; now++) {
            status = resolve_call(&works[now], &kernel, device, op, pass,
                                  tensors ? tensors + (done + now) * count : NULL, count, attributes, defaults);
            list[now] = &works[now];
        }
        if (status != VJP_OK) break;
        if (can_merge(works, now)) {
            status = device->backend->run_many(list, now);
            continue;
        }
        for (size_t i = 0; i < now && status == VJP_OK; i++)
            status = vjp_run(&works[i], kernel);
    }
    return status;
}

vjp_status vjp_warm(vjp_device *device, const vjp_op *op, vjp_pass pass, const vjp_tensor *const *tensors, size_t count,
                    const void *attributes) {
    vjp_work work;
    const vjp_kernel *kernel;
    int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8];
    vjp_status status = resolve_call(&work, &kernel, device, op, pass, tensors, count, attributes, defaults);
    return status == VJP_OK ? vjp_warm_work(&work) : status;
}
