/* SPDX-License-Identifier: MIT */
/* Dtypes, tensors and shapes. */
#include <stdio.h>
#include <string.h>

#include "core/core.h"

static const struct {
    const char *name;
    size_t size;
} dtypes[VJP_DTYPE_COUNT] = {
    [VJP_F32] = {"f32", 4}, [VJP_BF16] = {"bf16", 2}, [VJP_F16] = {"f16", 2},
    [VJP_F64] = {"f64", 8}, [VJP_I32] = {"i32", 4},   [VJP_I64] = {"i64", 8},
};

static bool is_dtype(int dtype) {
    return dtype >= 0 && dtype < VJP_DTYPE_COUNT;
}

size_t vjp_dtype_size(vjp_dtype dtype) {
    return is_dtype((int)dtype) ? dtypes[dtype].size : 0;
}

const char *vjp_dtype_name(vjp_dtype dtype) {
    return is_dtype((int)dtype) ? dtypes[dtype].name : "?";
}

int vjp_dtype_find(const char *name) {
    for (int d = 0; name && d < VJP_DTYPE_COUNT; d++)
        if (strcmp(dtypes[d].name, name) == 0) return d;
    return -1;
}

vjp_tensor vjp_tensor_of(void *data, vjp_dtype dtype, int ndim, const int64_t *shape) {
    vjp_tensor tensor = {.data = data, .dtype = (int32_t)dtype, .ndim = ndim};
    if (ndim < 0 || ndim > VJP_MAX_DIMS || (ndim && !shape)) {
        tensor.ndim = -1;
        return tensor;
    }
    uint64_t stride = 1; /* unsigned: sizes that overflow wrap here, and every call refuses them */
    for (int i = ndim - 1; i >= 0; i--) {
        tensor.shape[i] = shape[i];
        tensor.stride[i] = (int64_t)stride;
        stride *= (uint64_t)shape[i];
    }
    return tensor;
}

int64_t vjp_row_step(const vjp_tensor *tensor) {
    int axis = tensor->ndim - 2;
    int64_t row = tensor->ndim < 2 ? 0 : tensor->shape[axis] * tensor->shape[axis + 1];
    for (int i = axis - 1; i >= 0; i--)
        if (tensor->shape[i] != 1) return tensor->stride[i];
    return row;
}

/*
 * As strcmp() == 0, whose calls took a sixth of a small call. Equal texts mostly have one address, since the linker
 * merges them, and others differ within a few characters.
 */
static bool is_same_text(const char *a, const char *b) {
    if (a == b) return true;
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

void vjp_shape_set(vjp_work *work, const char *text, int ndim, const int64_t *size) {
    const vjp_pass_info *pass = &work->op->info.pass[work->pass];
    for (size_t slot = 0; slot < pass->count; slot++) {
        if (!is_same_text(pass->slots[slot].shape, text)) continue;
        work->shape[slot].ndim = ndim;
        for (int i = 0; i < ndim; i++)
            work->shape[slot].size[i] = size[i];
    }
}

void vjp_shape_own(vjp_work *work, int slot) {
    const vjp_tensor *tensor = work->tensor[slot];
    work->shape[slot].ndim = tensor->ndim;
    memcpy(work->shape[slot].size, tensor->shape, sizeof tensor->shape);
}

int64_t vjp_shape_product(const vjp_shape *shape, int from, int to) {
    int64_t product = 1;
    for (int i = from; i < to; i++)
        product *= shape->size[i];
    return product;
}

bool vjp_sizes_fit(int ndim, const int64_t *size) {
    int64_t limit = INT64_MAX / 64;
    for (int i = 0; i < ndim; i++) {
        if (size[i] > limit) return false;
        limit /= size[i] ? size[i] : 1; /* the other sizes of an empty tensor may be multiplied before the zero */
    }
    return true;
}

const char *vjp_shape_text(const vjp_shape *shape, char text[VJP_SHAPE_TEXT]) {
    if (shape->ndim == 0) {
        snprintf(text, VJP_SHAPE_TEXT, "a scalar");
        return text;
    }
    int used = snprintf(text, VJP_SHAPE_TEXT, "[");
    for (int i = 0; i < shape->ndim && used < VJP_SHAPE_TEXT - 24; i++)
        used +=
            snprintf(text + used, VJP_SHAPE_TEXT - (size_t)used, "%s%lld", i ? ", " : "", (long long)shape->size[i]);
    snprintf(text + used, VJP_SHAPE_TEXT - (size_t)used, "]");
    return text;
}
