/* Dtypes, tensors and shapes: small facts about them, nothing that computes. */
#include <math.h>
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
    for (int i = 0; i < ndim && i < VJP_MAX_DIMS; i++)
        tensor.shape[i] = shape[i];
    return tensor;
}

void vjp_shape_set(vjp_work *work, const char *text, int ndim, const int64_t *size) {
    const vjp_pass_info *pass = &work->op->info.pass[work->pass];
    for (size_t slot = 0; slot < pass->count; slot++) {
        if (strcmp(pass->slots[slot].shape, text) != 0) continue;
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

const char *vjp_shape_text(const vjp_shape *shape, char text[VJP_SHAPE_TEXT]) {
    int used = snprintf(text, VJP_SHAPE_TEXT, "[");
    for (int i = 0; i < shape->ndim && used < VJP_SHAPE_TEXT - 24; i++)
        used +=
            snprintf(text + used, VJP_SHAPE_TEXT - (size_t)used, "%s%lld", i ? ", " : "", (long long)shape->size[i]);
    snprintf(text + used, VJP_SHAPE_TEXT - (size_t)used, "]");
    return text;
}

bool vjp_index_at(const void *data, vjp_dtype dtype, int64_t k, int64_t *index, double *value) {
    switch (dtype) {
    case VJP_I32: *index = ((const int32_t *)data)[k]; break;
    case VJP_I64: *index = ((const int64_t *)data)[k]; break;
    default: {
        /* Past 2^24 neighbouring integers share one f32: the index may already be another's. */
        float f = ((const float *)data)[k];
        *value = f;
        if (!(fabsf(f) <= 16777216.0f) || f != truncf(f)) return false;
        *index = (int64_t)f;
        break;
    }
    }
    *value = (double)*index;
    return true;
}

vjp_status vjp_check_indices(const vjp_work *work, int slot, int64_t limit, const char *axis) {
    const vjp_shape *shape = &work->shape[slot];
    const void *data = vjp_data(work, slot);
    vjp_dtype dtype = vjp_type(work, slot);
    int64_t count = vjp_shape_product(shape, 0, shape->ndim);
    for (int64_t k = 0; k < count; k++) {
        int64_t index;
        double value;
        bool exact = vjp_index_at(data, dtype, k, &index, &value);
        if (exact && index >= 0 && index < limit) continue;
        const char *name = vjp_slot_at(work, slot)->name;
        if (exact)
            return vjp_refuse(work, VJP_INVALID, "%s[%lld] is %lld, outside [0, %lld), the %s", name, (long long)k,
                              (long long)index, (long long)limit, axis);
        return vjp_refuse(work, VJP_INVALID, "%s[%lld] is %.9g, which is not an integer that f32 holds exactly", name,
                          (long long)k, value);
    }
    return VJP_OK;
}
