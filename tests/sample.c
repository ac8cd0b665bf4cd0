/* SPDX-License-Identifier: MIT */
/* Valid calls of every op; see sample.h. */
#include "sample.h"

#include <stdlib.h>
#include <string.h>

#include "core/half.h"

#include "samples.h"

enum { SAMPLES = sizeof small / sizeof small[0] };

static const sample *find(const sample *list, const char *op) {
    for (int i = 0; i < SAMPLES; i++)
        if (strcmp(list[i].op, op) == 0) return &list[i];
    return NULL;
}

const sample *sample_find(const char *op) {
    return find(small, op);
}

int sample_passes(void) {
    int passes = 0;
    for (size_t op = 0; op < vjp_op_count(); op++)
        passes += vjp_passes(vjp_op_describe(vjp_op_at(op)));
    return passes;
}

const sample *sample_find_large(const char *op) {
    return find(large, op);
}

/* splitmix64: every value of the counter gives an unrelated number, the same on every machine. */
static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t elements(const vjp_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

size_t call_bytes(const vjp_tensor *tensor) {
    return (size_t)elements(tensor) * vjp_dtype_size((vjp_dtype)tensor->dtype);
}

void call_put(const vjp_tensor *tensor, int64_t element, double value) {
    char *at = (char *)tensor->data + tensor->offset + (size_t)element * vjp_dtype_size((vjp_dtype)tensor->dtype);
    switch (tensor->dtype) {
    case VJP_F32: *(float *)(void *)at = (float)value; break;
    case VJP_BF16: *(uint16_t *)(void *)at = vjp_f32_to_bf16((float)value); break;
    case VJP_F16: *(uint16_t *)(void *)at = vjp_f32_to_f16((float)value); break;
    case VJP_F64: *(double *)(void *)at = value; break;
    case VJP_I32: *(int32_t *)(void *)at = (int32_t)value; break;
    default: *(int64_t *)(void *)at = (int64_t)value; break;
    }
}

double call_get(const vjp_tensor *tensor, int64_t element) {
    const char *at =
        (const char *)tensor->data + tensor->offset + (size_t)element * vjp_dtype_size((vjp_dtype)tensor->dtype);
    switch (tensor->dtype) {
    case VJP_F32: return *(const float *)(const void *)at;
    case VJP_BF16: return vjp_bf16_to_f32(*(const uint16_t *)(const void *)at);
    case VJP_F16: return vjp_f16_to_f32(*(const uint16_t *)(const void *)at);
    case VJP_F64: return *(const double *)(const void *)at;
    case VJP_I32: return *(const int32_t *)(const void *)at;
    default: return (double)*(const int64_t *)(const void *)at;
    }
}

static int find_slot(const vjp_pass_info *pass, const char *name) {
    for (size_t i = 0; i < pass->count; i++)
        if (strcmp(pass->slots[i].name, name) == 0) return (int)i;
    return -1;
}

int call_slot(const call *made, const char *name) {
    return find_slot(&made->info->pass[made->pass], name);
}

bool call_set_attribute(call *made, const char *name, const char *value) {
    for (size_t i = 0; i < made->info->attribute_count; i++) {
        const vjp_attribute *a = &made->info->attributes[i];
        if (strcmp(a->name, name) != 0) continue;
        char *to = (char *)made->attributes + a->offset;
        if (a->type == VJP_REAL) {
            double real = strtod(value, NULL);
            memcpy(to, &real, sizeof real);
            return true;
        }
        int64_t integer = strtoll(value, NULL, 10);
        for (int64_t k = 0; a->type == VJP_CHOICE && a->choices[k]; k++)
            if (strcmp(a->choices[k], value) == 0) integer = k;
        memcpy(to, &integer, sizeof integer);
        return true;
    }
    return false;
}

static bool set_attributes(call *made, const char *text) {
    char copy[256];
    size_t length = strlen(text);
    if (length >= sizeof copy) return false;
    memcpy(copy, text, length + 1);
    char *rest = copy;
    for (char *word; (word = strtok_r(rest, " ", &rest));) {
        char *equals = strchr(word, '=');
        if (!equals) return false;
        *equals = 0;
        if (!call_set_attribute(made, word, equals + 1)) return false;
    }
    return true;
}

static vjp_dtype slot_dtype(vjp_kind kind, sample_types types) {
    switch (kind) {
    case VJP_KIND_PARAMETER:
    case VJP_KIND_GRADIENT:
    case VJP_KIND_FLOAT: return types.parameter;
    case VJP_KIND_STATISTIC:
    case VJP_KIND_MOMENT: return types.storage == VJP_F64 ? VJP_F64 : VJP_F32;
    case VJP_KIND_INDEX: return types.index;
    case VJP_KIND_ARGMAX: return types.index == VJP_I32 ? VJP_I32 : VJP_I64;
    default: return types.storage;
    }
}

/* Which of the sample's inputs gives the shape of a slot, -1 if none: under its own name, or that of one like it. */
static int source_of(const vjp_pass_info *pass, const sample *from, size_t slot) {
    int like = -1;
    for (int i = SAMPLE_INPUTS - 1; i >= 0; i--) {
        int own = from->input[i].name ? find_slot(pass, from->input[i].name) : -1;
        if (own == (int)slot) return i;
        bool required = !(pass->slots[slot].flags & (VJP_SLOT_OUTPUT | VJP_SLOT_OPTIONAL));
        if (own >= 0 && required && strcmp(pass->slots[own].shape, pass->slots[slot].shape) == 0) like = i;
    }
    return like;
}

/* Every slot of the forward, by vjp_infer() from the sample's inputs. */
static bool describe_forward(const call *made, vjp_device *device, const sample *from, sample_types types,
                             vjp_tensor *described) {
    const vjp_pass_info *pass = &made->info->pass[VJP_FORWARD];
    vjp_tensor given[VJP_MAX_SLOTS];
    const vjp_tensor *pointers[VJP_MAX_SLOTS] = {0};
    for (int i = 0; i < SAMPLE_INPUTS && from->input[i].name; i++)
        if (find_slot(pass, from->input[i].name) < 0) return false;
    for (size_t slot = pass->outputs; slot < pass->count; slot++) {
        bool scalar = strcmp(pass->slots[slot].shape, "[]") == 0;
        int source = scalar ? -1 : source_of(pass, from, slot);
        if (!scalar && source < 0) continue;
        vjp_dtype dtype = slot_dtype(pass->slots[slot].kind, types);
        given[slot] = scalar ? vjp_tensor_of(NULL, dtype, 0, NULL)
                             : vjp_tensor_of(NULL, dtype, from->input[source].ndim, from->input[source].shape);
        pointers[slot] = &given[slot];
    }
    return vjp_infer(device, made->op, VJP_FORWARD, pointers, pass->count, made->attributes, described) == VJP_OK;
}

/*
 * Without a limit of the sample there is no index: attention's first, which most devices do not have. linear's gate
 * excludes its activation and its residual.
 */
static bool is_left_out(const vjp_slot *slot, const sample *from) {
    if (strcmp(from->op, "linear") == 0 && strstr(slot->name, "gate")) return true;
    return slot->kind == VJP_KIND_INDEX && (slot->flags & VJP_SLOT_OPTIONAL) && !from->index_limit;
}

static void fill(const vjp_tensor *tensor, const vjp_slot *slot, int64_t index_limit, uint64_t *seed) {
    int64_t count = elements(tensor);
    for (int64_t i = 0; i < count; i++) {
        uint64_t r = random_next(seed);
        double unit = (double)(r >> 11) * 0x1p-53;
        bool whole = slot->kind == VJP_KIND_INDEX || slot->kind == VJP_KIND_ARGMAX;
        /* The root of a negative moment is NaN, whose sign is not the same on all processors. */
        bool positive = slot->kind == VJP_KIND_STATISTIC || slot->kind == VJP_KIND_MOMENT;
        uint64_t first = strcmp(slot->name, "step") == 0; /* steps count from 1 */
        if (whole)
            call_put(tensor, i, (double)(first + r % (uint64_t)(index_limit > 0 ? index_limit : 1)));
        else
            call_put(tensor, i, positive ? 0.5 + unit : 2 * unit - 1);
    }
}

bool call_make(call *made, vjp_device *device, const sample *from, vjp_pass pass, sample_types types, uint64_t seed) {
    memset(made, 0, sizeof *made);
    made->op = vjp_op_find(from->op);
    if (!made->op) return false;
    made->info = vjp_op_describe(made->op);
    made->pass = pass;
    const vjp_pass_info *slots = &made->info->pass[pass], *forward = &made->info->pass[VJP_FORWARD];
    made->count = slots->count;
    vjp_op_defaults(made->op, made->attributes);
    vjp_tensor described[VJP_MAX_SLOTS];
    if (!set_attributes(made, from->attributes) || !describe_forward(made, device, from, types, described))
        return false;

    size_t total = SAMPLE_GUARD;
    size_t at[VJP_MAX_SLOTS];
    for (size_t i = 0; i < made->count; i++) {
        const char *name = slots->slots[i].name;
        int like = find_slot(forward, name);
        if (like < 0 && name[0] == 'd') like = find_slot(forward, name + 1);
        if (like < 0) return false;
        made->tensor[i] =
            vjp_tensor_of(NULL, slot_dtype(slots->slots[i].kind, types), described[like].ndim, described[like].shape);
        made->pointer[i] = is_left_out(&slots->slots[i], from) ? NULL : &made->tensor[i];
        at[i] = total;
        total += (call_bytes(&made->tensor[i]) + 63) / 64 * 64 + SAMPLE_GUARD;
    }
    made->block_bytes = total;
    made->block = aligned_alloc(64, total);
    if (!made->block) return false;
    memset(made->block, 0xa5, total);
    for (size_t i = 0; i < made->count; i++) {
        made->tensor[i].data = made->block + at[i];
        fill(&made->tensor[i], &slots->slots[i], from->index_limit, &seed);
    }
    return true;
}

void call_free(call *made) {
    free(made->block);
    made->block = NULL;
}

/* Makes the block longer; the tensors move with it. */
static bool grow(call *made, size_t bytes) {
    unsigned char *block = aligned_alloc(64, made->block_bytes + bytes);
    if (!block) return false;
    memcpy(block, made->block, made->block_bytes);
    memset(block + made->block_bytes, 0xa5, bytes);
    for (size_t i = 0; i < made->count; i++)
        made->tensor[i].data = block + ((unsigned char *)made->tensor[i].data - made->block);
    free(made->block);
    made->block = block;
    made->block_bytes += bytes;
    return true;
}

void call_set_step(vjp_tensor *tensor, int64_t step) {
    for (int i = tensor->ndim - 3; i >= 0; i--) {
        tensor->stride[i] = step;
        step *= tensor->shape[i];
    }
}

bool call_spread(call *made, size_t slot, int64_t gap) {
    vjp_tensor *tensor = &made->tensor[slot];
    size_t bytes = call_bytes(tensor), size = vjp_dtype_size((vjp_dtype)tensor->dtype), begin = made->block_bytes;
    if (!(made->info->pass[made->pass].slots[slot].flags & VJP_SLOT_ROWS) || tensor->ndim < 3 || !bytes) return false;
    const int64_t *shape = &tensor->shape[tensor->ndim - 2];
    size_t row = (size_t)(shape[0] * shape[1]) * size, step = row + (size_t)gap * size, rows = bytes / row;
    if (!grow(made, (rows * step + 63) / 64 * 64 + SAMPLE_GUARD)) return false;
    memset(made->block + begin, 0xff, (rows - 1) * step + row);
    for (size_t i = 0; i < rows; i++)
        memcpy(made->block + begin + i * step, (unsigned char *)tensor->data + i * row, row);
    tensor->data = made->block + begin;
    call_set_step(tensor, shape[0] * shape[1] + gap);
    return true;
}

vjp_status call_run(vjp_device *device, const call *made) {
    return vjp_call(device, made->op, made->pass, made->pointer, made->count, made->attributes);
}

uint64_t call_hash(const call *made, size_t slot) {
    const vjp_tensor *tensor = made->pointer[slot];
    if (!tensor) return 0;
    const unsigned char *bytes = (const unsigned char *)tensor->data + tensor->offset;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0, n = call_bytes(tensor); i < n; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

int sample_hash(vjp_device *device, const sample *from, vjp_pass pass, sample_types types, uint64_t seed,
                uint64_t hash[VJP_MAX_SLOTS]) {
    call made;
    if (!call_make(&made, device, from, pass, types, seed)) return 0;
    int outputs = call_run(device, &made) == VJP_OK ? (int)made.info->pass[pass].outputs : 0;
    for (int i = 0; i < outputs; i++)
        hash[i] = call_hash(&made, (size_t)i);
    call_free(&made);
    return outputs;
}
