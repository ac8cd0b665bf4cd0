/* Right calls of every op; see sample.h. */
#include "sample.h"

#include <stdlib.h>
#include <string.h>

#include "core/half.h"

static const sample small[] = {
    {"layer_norm", "", {{"x", 3, {2, 3, 65}}, {"gamma", 1, {65}}, {"beta", 1, {65}}}, 0},
    {"rms_norm", "", {{"x", 3, {2, 3, 65}}, {"gamma", 1, {65}}, {"beta", 1, {65}}}, 0},
    {"group_norm", "groups=2", {{"x", 4, {2, 6, 3, 5}}, {"gamma", 1, {6}}, {"beta", 1, {6}}}, 0},
    {"rope", "n_rot=6", {{"x", 4, {2, 5, 3, 8}}, {"cosine", 2, {7, 3}}, {"sine", 2, {7, 3}}, {"positions", 1, {5}}}, 7},
    {"cumsum", "axis=1", {{"x", 3, {2, 17, 3}}}, 0},
    {"gather", "axis=1", {{"table", 3, {2, 11, 5}}, {"index", 2, {3, 4}}}, 11},
    {"maxpool2d", "kernel_h=3 kernel_w=3 stride_h=2 stride_w=2 padding_h=1 padding_w=1", {{"x", 4, {2, 3, 7, 9}}}, 63},
    {"linear", "activation=gelu_tanh", {{"a", 3, {2, 5, 7}}, {"b", 2, {7, 9}}, {"bias", 1, {9}}}, 0},
    {"sum_squares", "", {{"x", 3, {2, 3, 65}}}, 0},
    {"clip", "", {{NULL, 0, {0}}}, 0},
    {"adamw", "", {{"w", 3, {2, 3, 65}}}, 20},
    {"sgd", "weight_decay=0.1 nesterov=1", {{"w", 3, {2, 3, 65}}, {"momentum", 3, {2, 3, 65}}}, 0},
    {"cross_entropy", "label_smoothing=0.1", {{"logits", 3, {2, 3, 65}}, {"target", 2, {2, 3}}}, 65},
    {"swiglu", "", {{"gate", 2, {3, 65}}, {"up", 2, {3, 65}}}, 0},
    {"conv2d",
     "groups=2 stride_h=2 stride_w=2 padding_h=1 padding_w=1",
     {{"x", 4, {2, 4, 7, 9}}, {"weight", 4, {6, 2, 3, 3}}, {"bias", 1, {6}}},
     0},
    {"add", "", {{"a", 3, {2, 3, 65}}, {"b", 2, {3, 65}}}, 0},
    {"mul", "", {{"a", 3, {2, 3, 65}}, {"b", 2, {3, 65}}}, 0},
    {"scale", "factor=0.7", {{"x", 2, {3, 65}}}, 0},
    {"mean", "axis=1", {{"x", 3, {2, 17, 3}}}, 0},
    {"dropout", "p=0.3 stream=2", {{"x", 2, {3, 65}}, {"counter", 1, {2}}}, 1000000},
    {"cast", "", {{"x", 2, {3, 65}}}, 0},
    {"attention", "", {{"q", 4, {2, 5, 4, 3}}, {"k", 4, {2, 7, 2, 3}}, {"v", 4, {2, 7, 2, 3}}}, 0},
};

static const sample large[] = {
    {"layer_norm", "", {{"x", 2, {1025, 300}}, {"gamma", 1, {300}}, {"beta", 1, {300}}}, 0},
    {"rms_norm", "", {{"x", 2, {1025, 300}}, {"gamma", 1, {300}}, {"beta", 1, {300}}}, 0},
    {"group_norm", "groups=4", {{"x", 4, {3, 32, 40, 41}}, {"gamma", 1, {32}}, {"beta", 1, {32}}}, 0},
    {"rope",
     "",
     {{"x", 4, {2, 129, 12, 64}}, {"cosine", 2, {200, 32}}, {"sine", 2, {200, 32}}, {"positions", 1, {129}}},
     200},
    {"cumsum", "axis=-1", {{"x", 2, {33, 9001}}}, 0},
    {"gather", "axis=0", {{"table", 2, {777, 96}}, {"index", 2, {3, 1300}}}, 777},
    {"maxpool2d",
     "kernel_h=3 kernel_w=3 stride_h=2 stride_w=2 padding_h=1 padding_w=1",
     {{"x", 4, {2, 20, 65, 63}}},
     65 * 63},
    {"linear", "activation=silu", {{"a", 2, {190, 129}}, {"b", 2, {129, 210}}, {"bias", 1, {210}}}, 0},
    {"sum_squares", "", {{"x", 2, {1025, 300}}}, 0},
    {"clip", "", {{NULL, 0, {0}}}, 0},
    {"adamw", "", {{"w", 2, {1025, 300}}}, 20},
    {"sgd", "weight_decay=0.1 nesterov=1", {{"w", 2, {1025, 300}}, {"momentum", 2, {1025, 300}}}, 0},
    {"cross_entropy", "", {{"logits", 2, {333, 1009}}, {"target", 1, {333}}}, 1009},
    {"swiglu", "", {{"gate", 2, {777, 333}}, {"up", 2, {777, 333}}}, 0},
    {"conv2d",
     "padding_h=1 padding_w=1",
     {{"x", 4, {2, 16, 40, 41}}, {"weight", 4, {24, 16, 3, 3}}, {"bias", 1, {24}}},
     0},
    {"add", "", {{"a", 2, {1025, 300}}, {"b", 1, {300}}}, 0},
    {"mul", "", {{"a", 2, {1025, 300}}, {"b", 1, {300}}}, 0},
    {"scale", "factor=-1.7", {{"x", 2, {1025, 300}}}, 0},
    {"mean", "axis=0", {{"x", 2, {1025, 300}}}, 0},
    {"dropout", "p=0.5", {{"x", 2, {1025, 300}}, {"counter", 1, {2}}}, 1000000},
    {"cast", "", {{"x", 2, {1025, 300}}}, 0},
    {"attention", "", {{"q", 4, {2, 130, 4, 40}}, {"k", 4, {2, 130, 2, 40}}, {"v", 4, {2, 130, 2, 40}}}, 0},
};

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
    case VJP_KIND_FLOAT: return types.parameter;
    case VJP_KIND_STATISTIC: return types.storage == VJP_F64 ? VJP_F64 : VJP_F32;
    case VJP_KIND_INDEX: return types.index;
    case VJP_KIND_ARGMAX: return types.index == VJP_I32 ? VJP_I32 : VJP_I64;
    default: return types.storage;
    }
}

/* Where the sample tells the shape of a slot, -1 if nowhere: under its own name, or that of one like it. */
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

static void fill(const vjp_tensor *tensor, const vjp_slot *slot, int64_t index_limit, uint64_t *seed) {
    int64_t count = elements(tensor);
    for (int64_t i = 0; i < count; i++) {
        uint64_t r = random_next(seed);
        double unit = (double)(r >> 11) * 0x1p-53;
        bool whole = slot->kind == VJP_KIND_INDEX || slot->kind == VJP_KIND_ARGMAX;
        uint64_t first = strcmp(slot->name, "step") == 0; /* steps count from 1 */
        if (whole)
            call_put(tensor, i, (double)(first + r % (uint64_t)(index_limit > 0 ? index_limit : 1)));
        else
            call_put(tensor, i, slot->kind == VJP_KIND_STATISTIC ? 0.5 + unit : 2 * unit - 1);
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
        made->pointer[i] = &made->tensor[i];
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

vjp_status call_run(vjp_device *device, const call *made) {
    return vjp_call(device, made->op, made->pass, made->pointer, made->count, made->attributes);
}

uint64_t call_hash(const call *made, size_t slot) {
    const vjp_tensor *tensor = made->pointer[slot];
    const unsigned char *bytes = (const unsigned char *)tensor->data + tensor->offset;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0, n = call_bytes(tensor); i < n; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}
