/* SPDX-License-Identifier: MIT */
/*
 * Turns a case into tensors. Shapes come from the op table: the forward's from vjp_infer(), the backward's from the
 * names (dx is shaped like x, dy like y). What the forward saves for the backward is ref's stored result: the device
 * and ref then start from the same numbers.
 */
#include "proof/problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op/op.h"
#include "proof/values.h"

static bool is_output(const vjp_slot *slot) {
    return slot->flags & VJP_SLOT_OUTPUT;
}

static bool is_integer(vjp_kind kind) {
    return kind == VJP_KIND_INDEX || kind == VJP_KIND_ARGMAX;
}

int proof_find_slot(const vjp_pass_info *pass, const char *name) {
    for (size_t i = 0; i < pass->count; i++)
        if (strcmp(pass->slots[i].name, name) == 0) return (int)i;
    return -1;
}

static vjp_dtype dtype_of(const proof_setup *setup, const vjp_slot *slot, vjp_dtype storage) {
    const proof_choice *choice = proof_choice_of(setup, slot);
    if (choice && choice->dtype >= 0) return (vjp_dtype)choice->dtype;
    switch (slot->kind) {
    case VJP_KIND_STATISTIC:
    case VJP_KIND_MOMENT: return storage == VJP_F64 ? VJP_F64 : VJP_F32;
    case VJP_KIND_INDEX:
    case VJP_KIND_ARGMAX: return VJP_I64;
    case VJP_KIND_FLOAT: return VJP_F32;
    default: return storage;
    }
}

uint32_t proof_present(const proof_problem *problem, vjp_pass pass) {
    uint32_t present = 0;
    for (size_t i = 0; i < problem->info->pass[pass].count; i++)
        present |= (uint32_t)problem->slot[pass][i].present << i;
    return present;
}

/* ---- Shapes ------------------------------------------------------------------------------------------ */

/*
 * A required input whose shape the row does not give has that of an input with the same shape text in the table: sine
 * like cosine. A scalar needs none.
 */
static const proof_choice *shape_source(const proof_setup *setup, const vjp_pass_info *pass, size_t slot) {
    static const proof_choice scalar = {.shaped = true, .dtype = -1};
    if (strcmp(pass->slots[slot].shape, "[]") == 0) return &scalar;
    for (size_t i = pass->outputs; i < pass->count; i++) {
        const proof_choice *choice = proof_choice_of(setup, &pass->slots[i]);
        bool same = i == slot || (!(pass->slots[slot].flags & VJP_SLOT_OPTIONAL) &&
                                  strcmp(pass->slots[i].shape, pass->slots[slot].shape) == 0);
        if (same && choice && choice->shaped) return choice;
    }
    return NULL;
}

static bool is_first(const proof_problem *p, const vjp_slot *slot) {
    return p->setup.op->id == OP_ID(attention) && slot->kind == VJP_KIND_INDEX;
}

/* attention's first, and linear's residual and gate, are there only where a row names them: most calls have none. */
static bool is_rare(const proof_problem *p, const vjp_slot *slot) {
    return is_first(p, slot) || (p->setup.op->id == OP_ID(linear) &&
                                 (strcmp(slot->name, "residual") == 0 || strcmp(slot->name, "gate") == 0));
}

static bool shape_forward(proof_problem *p, vjp_device *ref, char error[TEXT_ERROR]) {
    const vjp_pass_info *pass = &p->info->pass[VJP_FORWARD];
    vjp_tensor given[VJP_MAX_SLOTS], described[VJP_MAX_SLOTS];
    const vjp_tensor *tensors[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < pass->count; i++) {
        const vjp_slot *slot = &pass->slots[i];
        const proof_choice *choice = proof_choice_of(&p->setup, slot);
        p->slot[VJP_FORWARD][i].present = choice ? !choice->absent : !is_rare(p, slot);
        if (is_output(slot)) continue;
        const proof_choice *source = shape_source(&p->setup, pass, i);
        if (!source) continue;
        given[i] = vjp_tensor_of(NULL, dtype_of(&p->setup, slot, p->storage), source->ndim, source->shape);
        tensors[i] = &given[i];
    }
    vjp_status status = vjp_infer(ref, p->setup.op, VJP_FORWARD, tensors, pass->count, &p->setup.attributes, described);
    if (status != VJP_OK) {
        snprintf(error, TEXT_ERROR, "%s", vjp_error(ref));
        return false;
    }
    for (size_t i = 0; i < pass->count; i++) {
        proof_values *v = &p->slot[VJP_FORWARD][i];
        v->slot = &pass->slots[i];
        v->tensor = described[i];
        /* A new moment has the dtype of the old one. */
        if (v->slot->kind != VJP_KIND_MOMENT) v->tensor.dtype = (int32_t)dtype_of(&p->setup, v->slot, p->storage);
        v->count = proof_count(&v->tensor);
    }
    return true;
}

/* The forward's slot that a slot of the backward belongs to: itself, or the one whose gradient it is. */
static int forward_slot(const vjp_op_info *info, const char *name) {
    int same = proof_find_slot(&info->pass[VJP_FORWARD], name);
    return same >= 0 ? same : proof_find_slot(&info->pass[VJP_FORWARD], name + 1);
}

static void shape_backward(proof_problem *p) {
    const vjp_pass_info *pass = &p->info->pass[VJP_BACKWARD];
    for (size_t i = 0; i < pass->count; i++) {
        const vjp_slot *slot = &pass->slots[i];
        const proof_values *from = &p->slot[VJP_FORWARD][forward_slot(p->info, slot->name)];
        proof_values *v = &p->slot[VJP_BACKWARD][i];
        v->slot = slot;
        v->tensor = from->tensor;
        v->tensor.dtype = (int32_t)dtype_of(&p->setup, slot, p->storage);
        v->count = from->count;
        v->present =
            (is_output(slot) && !is_rare(p, from->slot)) || from->present; /* dgamma is defined without gamma */
        bool optional = slot->flags & VJP_SLOT_OPTIONAL;
        if (optional && is_output(from->slot)) p->saved |= 1u << i;
    }
    /* maxpool2d's x and linear's bias are needed only to compute again what was saved. */
    int x = proof_find_slot(pass, "x"), bias = proof_find_slot(pass, "bias");
    if (x >= 0 && (pass->slots[x].flags & VJP_SLOT_OPTIONAL)) p->without |= 1u << x;
    if (bias >= 0) p->without |= 1u << bias;
}

/* ---- Numbers ----------------------------------------------------------------------------------------- */

/* Where an activation or its derivative is easily wrong: zeros, tails where 1 - t*t cancels, and past exp's range. */
static const double wide[] = {0,  -0.0, 1e-30, -1e-30, 1e-4, -1e-4, 0.5, -0.5, 1,   -1,   3,    -3,    5,    -5,   7,
                              -7, 8.5,  -8.5,  9.5,    -9.5, 11,    -11, 13,   -13, 20,   -20,  60,    -60,  80,   -80,
                              87, -87,  89,    -89,    100,  -100,  104, -104, 1e4, -1e4, 1e10, -1e10, 1e30, -1e30};

enum { WIDE_COUNT = sizeof wide / sizeof wide[0], SPRINKLE = 29 };

static double scale_of(proof_data data, vjp_dtype storage, int64_t row) {
    double far = storage == VJP_F16 ? 1e3 : 1e20;
    switch (data) {
    case PROOF_TINY: return 1 / far;
    case PROOF_HUGE: return far;
    case PROOF_MIXED: return row % 3 == 0 ? 1 / far : row % 3 == 1 ? 1 : far;
    default: return 1;
    }
}

static double source_value(proof_data data, vjp_dtype storage, int64_t i, int64_t row, proof_random *random) {
    double normal = proof_random_normal(random) + 0.25;
    switch (data) {
    case PROOF_OFFSET: return normal + 1000;
    case PROOF_TINY:
    case PROOF_HUGE:
    case PROOF_MIXED: return normal * scale_of(data, storage, row);
    case PROOF_ZERO: return 0;
    case PROOF_TIES: {
        double value = (double)proof_random_below(random, 3);
        return value == 0 && normal < 0 ? -0.0 : value; /* -0 and 0 tie, too */
    }
    case PROOF_NAN: return proof_random_below(random, SPRINKLE) ? normal : NAN;
    case PROOF_INF:
        if (proof_random_below(random, SPRINKLE)) return normal;
        return proof_random_below(random, 2) ? INFINITY : -INFINITY;
    case PROOF_MINUS_INF: return proof_random_below(random, SPRINKLE) ? -INFINITY : normal;
    case PROOF_WIDE_NAN:
        if (i % 7 == 3) return NAN;
        /* fall through */
    case PROOF_WIDE: {
        double value = i < WIDE_COUNT ? wide[i] : normal * pow(10, (double)(i % 9) / 4);
        return storage == VJP_F16 ? fmin(fmax(value, -65504), 65504) : value;
    }
    default: return normal;
    }
}

/* A random order of 0.1, 0.2, ...: no two are close, so a small step changes no maximum. */
static void fill_distinct(double *values, int64_t count, proof_random *random) {
    for (int64_t i = 0; i < count; i++) {
        int64_t j = proof_random_below(random, i + 1);
        values[i] = values[j];
        values[j] = 0.1 * (double)(i + 1);
    }
}

/* cos or sin of position * 10000^(-2j/n_rot), as models have them. */
static void fill_table(const proof_values *v, bool sine) {
    int64_t half = v->tensor.shape[1];
    for (int64_t i = 0; i < v->count; i++) {
        double angle = (double)(i / half) * pow(10000, -(double)(i % half) / (double)half);
        v->exact[i] = sine ? sin(angle) : cos(angle);
    }
}

/* How many rows an index chooses from: positions of rope's tables, classes of the logits, or the table's axis. */
static int64_t index_limit(const proof_problem *p) {
    const vjp_pass_info *pass = &p->info->pass[VJP_FORWARD];
    int cosine = proof_find_slot(pass, "cosine"), table = proof_find_slot(pass, "table");
    int logits = proof_find_slot(pass, "logits");
    if (p->setup.op->id == OP_ID(linear_cross_entropy))
        return p->slot[VJP_FORWARD][LINEAR_CROSS_ENTROPY_WEIGHT].tensor.shape[0];
    if (cosine >= 0) return p->slot[VJP_FORWARD][cosine].tensor.shape[0];
    if (logits >= 0) {
        const vjp_tensor *rows = &p->slot[VJP_FORWARD][logits].tensor;
        return rows->shape[rows->ndim - 1];
    }
    const vjp_tensor *tensor = &p->slot[VJP_FORWARD][table].tensor;
    int64_t axis = ((const vjp_gather_attributes *)p->setup.attributes.bytes)->axis;
    return tensor->shape[axis < 0 ? axis + tensor->ndim : axis];
}

enum { UNIFORM_STEPS = 1 << 30 };

/* attention's first: about four documents per row of the batch, some of whose queries see less than all of theirs. */
static void fill_first(const proof_problem *p, const proof_values *v, proof_random *random) {
    int64_t time = v->tensor.shape[1], keys = p->slot[VJP_FORWARD][ATTENTION_K].tensor.shape[1], first = 0;
    for (int64_t i = 0; i < v->count; i++) {
        int64_t own = i % time + keys - time;
        if (i % time == 0) first = proof_random_below(random, own + 1);
        bool begins = proof_random_below(random, 1 + time / 3) == 0;
        if (begins) first = proof_random_below(random, 3) ? own : first + proof_random_below(random, own - first + 1);
        v->exact[i] = (double)first;
    }
}

static void fill_index(const proof_problem *p, const proof_values *v, proof_random *random) {
    int64_t limit = index_limit(p), last = 0;
    bool same = p->setup.data == PROOF_REPEAT || p->setup.data == PROOF_EQUAL;
    for (int64_t i = 0; i < v->count; i++) {
        bool draw = p->setup.data != PROOF_RUNS || proof_random_below(random, 200) == 0;
        if (draw) last = proof_random_below(random, limit);
        if (p->setup.data == PROOF_SKEWED) {
            double u = (double)proof_random_below(random, UNIFORM_STEPS) / UNIFORM_STEPS;
            last = (int64_t)pow((double)limit + 1, u) - 1;
        }
        v->exact[i] = (double)(same ? limit / 2 : last);
    }
    if (p->setup.data == PROOF_IGNORED || p->setup.data == PROOF_ALL_IGNORED) {
        const vjp_cross_entropy_attributes *a = (const void *)p->setup.attributes.bytes;
        const vjp_linear_cross_entropy_attributes *l = (const void *)p->setup.attributes.bytes;
        bool linear = p->setup.op->id == OP_ID(linear_cross_entropy);
        for (int64_t i = 0; i < v->count; i++)
            if (p->setup.data == PROOF_ALL_IGNORED || proof_random_below(random, 4) == 0)
                v->exact[i] = (double)(linear ? l->ignore_index : a->ignore_index);
    }
}

/* Seed and step of a dropout: any integers that the dtype holds, large and negative ones too. */
static void fill_counter(const proof_values *v, proof_random *random) {
    int bits = v->tensor.dtype == VJP_I64 ? 63 : v->tensor.dtype == VJP_I32 ? 31 : 24;
    for (int64_t i = 0; i < v->count; i++)
        v->exact[i] = (double)((int64_t)proof_random_bits(random) >> (65 - bits));
}

/*
 * The other inputs of an optimiser's step. Rates are such that w changes by about its own size, so a wrong update shows
 * in w_out. Half of the time the step is one of the first, where the bias corrections are far from 1.
 */
static bool fill_step(const proof_problem *p, const proof_values *v, proof_random *random) {
    const char *name = v->slot->name;
    proof_data data = p->setup.data;
    bool fresh = data == PROOF_FIRST || data == PROOF_ZERO, squares = strcmp(name, "squares") == 0;
    bool average = strcmp(name, "m") == 0 || strcmp(name, "v") == 0 || strcmp(name, "momentum") == 0;
    if (vjp_passes(p->info) == VJP_PASS_COUNT) return false;
    if (average && fresh) return true; /* memory comes zeroed */
    double unit = fabs(proof_random_normal(random));
    if (strcmp(name, "lr") == 0 || strcmp(name, "scale") == 0) {
        bool scale = name[0] == 's';
        v->exact[0] = scale && data == PROOF_NAN_SCALE   ? NAN
                      : scale && data == PROOF_INF_SCALE ? INFINITY
                                                         : 0.25 + unit / 2;
    } else if (strcmp(name, "step") == 0) {
        int64_t later = proof_random_below(random, proof_random_below(random, 2) ? 5 : 5000);
        v->exact[0] = (double)(data == PROOF_FIRST ? 1 : 1 + later);
    } else if (squares) {
        v->exact[0] = data == PROOF_NAN    ? NAN
                      : data == PROOF_INF  ? INFINITY
                      : data == PROOF_ZERO ? 0
                                           : (9 + unit) * scale_of(data, p->storage, 0);
    } else if (strcmp(name, "v") == 0) {
        for (int64_t i = 0; i < v->count; i++)
            v->exact[i] = pow(proof_random_normal(random), 2);
    } else {
        return false;
    }
    return true;
}

static void fill_extreme(const proof_problem *p, const proof_values *v, const proof_extreme *e, proof_random *random) {
    vjp_dtype dtype = (vjp_dtype)v->tensor.dtype;
    double size = e->end == PROOF_TOP ? proof_largest(dtype) / 32 / e->share : proof_smallest(dtype) * 32 * e->share;
    bool step = vjp_passes(p->info) < VJP_PASS_COUNT;
    bool positive = step && strcmp(v->slot->name, "w") != 0 && strcmp(v->slot->name, "g") != 0 &&
                    strcmp(v->slot->name, "m") != 0 && strcmp(v->slot->name, "momentum") != 0;
    for (int64_t i = 0; i < v->count; i++) {
        double magnitude = size * (1 + 3 * (double)proof_random_below(random, UNIFORM_STEPS) / UNIFORM_STEPS);
        v->exact[i] = positive || proof_random_below(random, 4) ? magnitude : -magnitude;
    }
}

/* The numbers of an input that nothing else determines. */
static void fill(const proof_problem *p, proof_values *v, bool source, proof_random *random) {
    v->exact = proof_memory((size_t)v->count * sizeof(double));
    bool dy = strcmp(v->slot->name, "dy") == 0;
    int64_t row_length = v->tensor.ndim ? v->tensor.shape[v->tensor.ndim - 1] : 1;
    proof_data data = p->setup.data;
    const proof_extreme *extreme = proof_extreme_of(&p->setup, v->slot);
    if (!extreme && fill_step(p, v, random)) return;
    if (extreme)
        fill_extreme(p, v, extreme, random);
    else if (strcmp(v->slot->name, "counter") == 0)
        fill_counter(v, random);
    else if (is_first(p, v->slot))
        fill_first(p, v, random);
    else if (v->slot->kind == VJP_KIND_INDEX)
        fill_index(p, v, random);
    else if (strcmp(v->slot->name, "cosine") == 0 || strcmp(v->slot->name, "sine") == 0)
        fill_table(v, v->slot->name[0] == 's');
    else if (source && data == PROOF_DISTINCT)
        fill_distinct(v->exact, v->count, random);
    else
        for (int64_t i = 0; i < v->count; i++)
            v->exact[i] = data == PROOF_ONES                                      ? 1
                          : data == PROOF_EQUAL || (data == PROOF_EQUAL_DY && dy) ? 0.1
                          : source ? source_value(data, p->storage, i, i / row_length, random)
                                   : proof_random_normal(random) + 0.25;
    /* With a single factor of 1 the pre-activation is the source itself. */
    bool factor = strcmp(v->slot->name, "b") == 0 && (data == PROOF_WIDE || data == PROOF_WIDE_NAN);
    for (int64_t i = 0; factor && i < v->count; i++)
        v->exact[i] = 1;
    /* Weights as small as trained ones: an error of a logit is an error of its gradient, so logits must be of order 1.
     */
    bool head = p->setup.op->id == OP_ID(linear_cross_entropy) && strcmp(v->slot->name, "weight") == 0;
    for (int64_t i = 0; head && !extreme && i < v->count; i++)
        v->exact[i] /= sqrt((double)row_length);
}

/* Rounds the numbers to the slot's dtype; `exact` then has the stored values. */
static void store(proof_values *v) {
    v->stored = proof_to_stored(v->exact, (vjp_dtype)v->tensor.dtype, v->count);
    proof_read(v->stored, (vjp_dtype)v->tensor.dtype, 0, v->count, v->exact);
}

static void copy_values(proof_values *to, const proof_values *from) {
    to->exact = proof_memory((size_t)to->count * sizeof(double));
    if (to->count) memcpy(to->exact, from->exact, (size_t)to->count * sizeof(double));
}

bool proof_problem_shape(proof_problem *p, vjp_device *ref, const proof_setup *setup, vjp_dtype storage,
                         char error[TEXT_ERROR]) {
    memset(p, 0, sizeof *p);
    p->setup = *setup;
    p->info = vjp_op_describe(setup->op);
    p->storage = storage;
    if (!shape_forward(p, ref, error)) return false;
    shape_backward(p);
    return true;
}

/* The input that data= applies to. */
static int source_slot(const vjp_op_info *info) {
    const vjp_pass_info *forward = &info->pass[VJP_FORWARD];
    int gradient = vjp_passes(info) < VJP_PASS_COUNT ? proof_find_slot(forward, "g") : -1;
    return gradient >= 0 ? gradient : (int)forward->outputs;
}

void proof_problem_fill(proof_problem *p, vjp_pass pass, int slot, uint64_t seed) {
    const vjp_pass_info *forward_info = &p->info->pass[VJP_FORWARD];
    proof_values *v = &p->slot[pass][slot];
    int from = pass == VJP_BACKWARD ? proof_find_slot(forward_info, v->slot->name) : -1;
    proof_random random = proof_random_of(seed, p->info->name, p->setup.text, v->slot->name);
    if (from >= 0)
        copy_values(v, &p->slot[VJP_FORWARD][from]);
    else
        fill(p, v, pass == VJP_FORWARD && slot == source_slot(p->info), &random);
    store(v);
}

/* An output that the case does not save has no numbers. */
static bool is_unsaved(const proof_problem *p, vjp_pass pass, int slot) {
    const char *name = p->slot[pass][slot].slot->name;
    int from = pass == VJP_BACKWARD ? proof_find_slot(&p->info->pass[VJP_FORWARD], name) : -1;
    return from >= 0 && is_output(p->slot[VJP_FORWARD][from].slot) && !p->slot[VJP_FORWARD][from].present;
}

bool proof_problem_make(proof_problem *p, vjp_device *ref, const proof_setup *setup, vjp_dtype storage, uint64_t seed,
                        char error[TEXT_ERROR]) {
    if (!proof_problem_shape(p, ref, setup, storage, error)) return false;
    for (int pass = 0; pass < vjp_passes(p->info); pass++) {
        const vjp_pass_info *info = &p->info->pass[pass];
        for (size_t i = info->outputs; i < info->count; i++)
            if (!is_unsaved(p, (vjp_pass)pass, (int)i)) proof_problem_fill(p, (vjp_pass)pass, (int)i, seed);
        double *result[VJP_MAX_SLOTS] = {0};
        if (proof_reference(p, ref, (vjp_pass)pass, proof_present(p, (vjp_pass)pass), result) != VJP_OK) {
            snprintf(error, TEXT_ERROR, "%s", vjp_error(ref));
            proof_problem_free(p);
            return false;
        }
        for (size_t i = 0; i < info->outputs; i++)
            p->slot[pass][i].exact = result[i];
    }
    return true;
}

void proof_problem_free(proof_problem *p) {
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++)
        for (size_t i = 0; i < VJP_MAX_SLOTS; i++) {
            free(p->slot[pass][i].stored);
            free(p->slot[pass][i].exact);
        }
    memset(p, 0, sizeof *p);
}

bool proof_supports(vjp_device *device, const vjp_op *op, vjp_dtype storage) {
    for (int pass = 0; pass < vjp_passes(vjp_op_describe(op)); pass++)
        if (vjp_supports(device, op, (vjp_pass)pass, storage) != VJP_OK) return false;
    return true;
}

bool proof_takes_rows(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    const vjp_pass_info *info = &vjp_op_describe(op)->pass[pass];
    const vjp_kernel *kernel = device->found->kernel(device, op, pass);
    uint32_t flags = 0;
    for (size_t i = 0; i < info->count; i++)
        flags |= info->slots[i].flags;
    return flags & VJP_SLOT_ROWS && kernel && kernel->storage & VJP_TAKES_ROWS;
}

/* ---- Running ----------------------------------------------------------------------------------------- */

vjp_status proof_reference(const proof_problem *p, vjp_device *ref, vjp_pass pass, uint32_t present,
                           double *result[VJP_MAX_SLOTS]) {
    const vjp_pass_info *info = &p->info->pass[pass];
    vjp_tensor tensor[VJP_MAX_SLOTS];
    const vjp_tensor *tensors[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < info->count; i++) {
        const proof_values *v = &p->slot[pass][i];
        if (!(present >> i & 1)) continue;
        tensor[i] = v->tensor;
        bool integer = is_integer(v->slot->kind);
        if (!integer) tensor[i].dtype = VJP_F64;
        if (is_output(v->slot)) {
            if (integer) tensor[i].dtype = VJP_I64;
            result[i] = proof_memory((size_t)v->count * 8);
            tensor[i].data = result[i];
        } else {
            tensor[i].data = integer ? v->stored : v->exact;
        }
        tensors[i] = &tensor[i];
    }
    size_t workspace = 0;
    vjp_status status =
        vjp_workspace_size(ref, p->setup.op, pass, tensors, info->count, &p->setup.attributes, &workspace);
    if (status == VJP_OK) status = vjp_reserve(ref, workspace);
    if (status == VJP_OK) status = vjp_call(ref, p->setup.op, pass, tensors, info->count, &p->setup.attributes);
    for (size_t i = 0; i < info->outputs; i++) {
        if (status != VJP_OK) free(result[i]), result[i] = NULL;
        for (int64_t k = 0; result[i] && is_integer(info->slots[i].kind) && k < p->slot[pass][i].count; k++)
            result[i][k] = (double)((int64_t *)(void *)result[i])[k];
    }
    return status;
}
