/* SPDX-License-Identifier: MIT */
/*
 * Times both passes of an op as training runs them: the forward saves what it can, the backward uses it and computes
 * every gradient.
 *
 * The limit of a memory-bound op is its minimum bytes over the rate of the yardstick's copy. The limit of linear is the
 * time of its raw products (the same call without bias and activation, one output at a time, by the fastest engine for
 * products that the device has: linear itself, the CPU's other engine, or the raw product of vjp_backend), and the
 * bytes of the passes between them over the copy's rate: the forward writes pre, the backward reads dy and pre and
 * writes dpre. The limit of another op that computes (conv2d) is its flops at the rate of a square matrix product by
 * the fastest engine, or its bytes where those take longer.
 *
 * All parts run in every round, so that a noisy neighbour slows the op and its limit alike, and the best round of each
 * counts.
 *
 * A device with its own clock (vjp_backend.measure) is timed by it and cycles through several sets of tensors, so that
 * nothing comes from its cache. The host's tensors are larger than its caches: one set will do.
 */
#include "proof/timing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/core.h"
#include "core/system.h"
#include "op/op.h"
#include "proof/values.h"

enum {
    MIN_ROUNDS = 3,
    MAX_ROUNDS = 200,
    FILL_BLOCK = 1 << 18, /* random elements, repeated: no kernel's time depends on them */
    MAX_SETS = 16,
    REPLAYS = 3, /* of a recorded round; the device's clock is fine enough */
};

/* Between two uses of a set the others move this many times the size of the device's cache. */
static const double CACHES_BETWEEN = 8;

static const double MEASURABLE = 2e-4; /* seconds; shorter calls are repeated until they take this long */

/* One set of tensors of both passes. */
typedef struct tensor_set {
    vjp_tensor tensor[VJP_PASS_COUNT][VJP_MAX_SLOTS];
    bool present[VJP_PASS_COUNT][VJP_MAX_SLOTS];
} tensor_set;

typedef struct bench {
    vjp_device *device, *rival; /* rival: the device with the other engine for products; NULL: none */
    proof_problem p;
    tensor_set set[MAX_SETS];
    int sets;
    void *owned[MAX_SETS * VJP_PASS_COUNT * VJP_MAX_SLOTS + 3];
    int owned_count;
} bench;

/* ---- Buffers ----------------------------------------------------------------------------------------- */

/*
 * Ordinary numbers, but for weights of a product, which are as small as trained ones: a pre-activation of order sqrt(K)
 * has a derivative among the denormals, where one operation can take as long as a hundred others.
 */
static double scale_of(const bench *b, const char *name) {
    bool head = b->p.setup.op->id == OP_ID(linear_cross_entropy) && strcmp(name, "weight") == 0;
    if (!head && (b->p.setup.op->id != OP_ID(linear) || strcmp(name, "b") != 0)) return 1;
    const vjp_tensor *a = &b->p.slot[VJP_FORWARD][head ? (int)LINEAR_CROSS_ENTROPY_X : (int)LINEAR_A].tensor;
    return 1 / sqrt(fmax(1, (double)a->shape[a->ndim - 1]));
}

static vjp_status fill_floats(bench *b, void *data, vjp_dtype dtype, int64_t count, const char *name) {
    size_t size = vjp_dtype_size(dtype);
    unsigned char *block = proof_memory(FILL_BLOCK * size);
    proof_random random = proof_random_of(0, b->p.info->name, name, "bench");
    double scale = scale_of(b, name);
    bool average = b->p.setup.op->id == OP_ID(adamw) && strcmp(name, "v") == 0; /* of squares */
    for (int64_t i = 0; i < FILL_BLOCK; i++)
        proof_put(block, dtype, i, average ? fabs(proof_random_normal(&random)) : scale * proof_random_normal(&random));
    vjp_status status = VJP_OK;
    for (int64_t at = 0; at < count && status == VJP_OK; at += FILL_BLOCK) {
        int64_t length = count - at < FILL_BLOCK ? count - at : FILL_BLOCK;
        status = vjp_upload(b->device, data, (uint64_t)at * size, block, (size_t)length * size);
    }
    free(block);
    return status;
}

/* Every buffer is written before it is timed, outputs too: the first touch of a page is not the kernel's. */
static vjp_status make_buffer(bench *b, tensor_set *set, vjp_pass pass, int slot) {
    proof_values *v = &b->p.slot[pass][slot];
    vjp_dtype dtype = (vjp_dtype)v->tensor.dtype;
    size_t bytes = (size_t)v->count * vjp_dtype_size(dtype);
    void *data = NULL;
    vjp_status status = vjp_alloc(b->device, bytes, &data);
    if (status != VJP_OK) return status;
    b->owned[b->owned_count++] = data;
    set->tensor[pass][slot].data = data;
    const char *name = v->slot->name;
    bool table = v->slot->kind == VJP_KIND_INDEX || strcmp(name, "cosine") == 0 || strcmp(name, "sine") == 0;
    if (table) {
        if (!v->stored) proof_problem_fill(&b->p, pass, slot, 0);
        return vjp_upload(b->device, data, 0, v->stored, bytes);
    }
    if (v->slot->kind == VJP_KIND_ARGMAX) {
        void *zeros = proof_memory(bytes);
        status = vjp_upload(b->device, data, 0, zeros, bytes);
        free(zeros);
        return status;
    }
    return fill_floats(b, data, dtype, v->count, name);
}

/* The forward's result that the backward can repeat, a pass over memory more: it is not timed. */
static bool is_repeated(const proof_problem *p, int pass, const vjp_slot *slot) {
    return pass == VJP_BACKWARD && slot->flags & VJP_SLOT_OUTPUT && slot->kind == VJP_KIND_STORAGE &&
           proof_find_slot(&p->info->pass[VJP_FORWARD], slot->name) >= 0;
}

/* One buffer per name: the backward reads the forward's own tensors, and what it has saved. */
static vjp_status make_set(bench *b, tensor_set *set) {
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++)
        for (size_t i = 0; i < b->p.info->pass[pass].count; i++) {
            const proof_values *v = &b->p.slot[pass][i];
            if (!v->present || is_repeated(&b->p, pass, v->slot)) continue;
            set->tensor[pass][i] = v->tensor;
            set->present[pass][i] = true;
            int same = pass == VJP_BACKWARD ? proof_find_slot(&b->p.info->pass[VJP_FORWARD], v->slot->name) : -1;
            if (same >= 0) {
                set->tensor[pass][i].data = set->tensor[VJP_FORWARD][same].data;
                continue;
            }
            vjp_status status = make_buffer(b, set, (vjp_pass)pass, (int)i);
            if (status != VJP_OK) return status;
        }
    return VJP_OK;
}

static size_t set_bytes(const bench *b) {
    size_t bytes = 0;
    int last = vjp_passes(b->p.info) - 1;
    for (size_t i = 0; i < b->p.info->pass[last].count; i++) {
        const proof_values *v = &b->p.slot[last][i];
        if (v->present && !is_repeated(&b->p, last, v->slot))
            bytes += (size_t)v->count * vjp_dtype_size((vjp_dtype)v->tensor.dtype);
    }
    return bytes;
}

/* A small shape is timed in a loop, from the cache: it shows the cost of a call. */
static int count_sets(const bench *b) {
    const vjp_backend *backend = b->device->backend;
    if (!backend->measure || !backend->cache_bytes) return 1;
    double cache = (double)backend->cache_bytes(b->device), bytes = (double)set_bytes(b);
    if (bytes < cache / 4) return 1;
    return (int)fmin(MAX_SETS, ceil(CACHES_BETWEEN * cache / bytes));
}

static vjp_status make_buffers(bench *b) {
    b->sets = count_sets(b);
    vjp_status status = VJP_OK;
    for (int i = 0; i < b->sets && status == VJP_OK; i++)
        status = make_set(b, &b->set[i]);
    return status;
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* A call with some of the tensors and these attributes, or a raw product of the device. */
typedef struct timed_call {
    vjp_device *device; /* NULL: there is no such call */
    const vjp_op *op;
    vjp_pass pass;
    const vjp_tensor *tensors[MAX_SETS][VJP_MAX_SLOTS];
    int sets;
    size_t count;
    const void *attributes;
    vjp_tensor raw[MAX_SETS][3]; /* where `op` is NULL: y, a, b */
    int repeats;                 /* rounds through the sets */
    double best;                 /* seconds per call */
} timed_call;

static vjp_status enqueue(void *argument) {
    const timed_call *c = argument;
    vjp_status status = VJP_OK;
    for (int i = 0; i < c->repeats * c->sets && status == VJP_OK; i++) {
        const vjp_tensor *raw = c->raw[i % c->sets];
        status = c->op ? vjp_call(c->device, c->op, c->pass, c->tensors[i % c->sets], c->count, c->attributes)
                       : c->device->backend->raw_product(c->device, &raw[0], &raw[1], &raw[2]);
    }
    return status;
}

static vjp_status run(timed_call *c) {
    vjp_status status = enqueue(c);
    return status == VJP_OK ? vjp_synchronize(c->device) : status;
}

static vjp_status time_once(timed_call *c) {
    if (!c->device) return VJP_OK;
    const vjp_backend *backend = c->device->backend;
    double seconds;
    vjp_status status;
    if (backend->measure) {
        status = backend->measure(c->device, enqueue, c, REPLAYS, &seconds);
    } else {
        double start = system_seconds();
        status = run(c);
        seconds = system_seconds() - start;
    }
    seconds /= c->repeats * c->sets;
    if (status == VJP_OK && seconds < c->best) c->best = seconds;
    return status;
}

/* Warms up, and finds how often the call must be repeated to be measured. */
static vjp_status warm_up(timed_call *c) {
    vjp_status status = run(c);
    if (status == VJP_OK) status = time_once(c);
    if (status != VJP_OK) return status;
    double round = c->best * c->sets;
    if (round < MEASURABLE) c->repeats = (int)(MEASURABLE / fmax(round, 1e-8)) + 1;
    c->best = INFINITY;
    return VJP_OK;
}

static vjp_status reserve_for(const timed_call *c) {
    size_t workspace;
    vjp_status status =
        vjp_workspace_size(c->device, c->op, c->pass, c->tensors[0], c->count, c->attributes, &workspace);
    return status == VJP_OK ? vjp_reserve(c->device, workspace) : status;
}

static vjp_status call_make(timed_call *c, const bench *b, vjp_device *device, vjp_pass pass, uint32_t present,
                            const void *attributes) {
    *c = (timed_call){.device = device,
                      .op = b->p.setup.op,
                      .pass = pass,
                      .sets = b->sets,
                      .count = b->p.info->pass[pass].count,
                      .attributes = attributes,
                      .repeats = 1,
                      .best = INFINITY};
    for (int set = 0; set < c->sets; set++)
        for (size_t i = 0; i < c->count; i++)
            c->tensors[set][i] =
                (present >> i & 1) && b->set[set].present[pass][i] ? &b->set[set].tensor[pass][i] : NULL;
    vjp_status status = reserve_for(c);
    return status == VJP_OK ? warm_up(c) : status;
}

/*
 * The device's own raw product of these sizes, on memory of the call's tensors, whatever their shapes. There is none
 * where the device has no such product, or not of these sizes.
 */
static vjp_status raw_make(timed_call *c, const bench *b, int64_t rows, int64_t columns, int64_t depth,
                           const vjp_tensor *const memory[][3], int sets) {
    const int64_t sizes[3][2] = {{rows, columns}, {rows, depth}, {depth, columns}};
    *c = (timed_call){.sets = sets, .repeats = 1, .best = INFINITY};
    if (!b->device->backend->raw_product) return VJP_OK;
    for (int set = 0; set < sets; set++)
        for (int i = 0; i < 3; i++) {
            const vjp_tensor *from = memory[set][i];
            if ((vjp_dtype)from->dtype != b->p.storage) return VJP_OK;
            c->raw[set][i] = vjp_tensor_of(from->data, b->p.storage, 2, sizes[i]);
        }
    c->device = b->device;
    vjp_status status = warm_up(c);
    if (status != VJP_UNSUPPORTED) return status;
    c->device = NULL;
    return VJP_OK;
}

static void run_on_pool_of(void *device, size_t count, vjp_task task, void *argument) {
    vjp_parallel(device, count, task, argument);
}

/*
 * The CPU's other engine for matrix products, on the same threads: the threads of a second pool would keep spinning for
 * a while on the cores where the device is being timed.
 */
static vjp_device *open_rival(vjp_device *device) {
    char set[16], products[16], threads[16];
    if (vjp_device_property(device, "instruction_set", set, sizeof set) != VJP_OK ||
        vjp_device_property(device, "matrix_products", products, sizeof products) != VJP_OK ||
        vjp_device_property(device, "threads", threads, sizeof threads) != VJP_OK)
        return NULL;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.threads = atoi(threads);
    options.parallel_for = run_on_pool_of;
    options.parallel_context = device;
    options.instruction_set = set;
    options.matrix_products = strcmp(products, "blas") == 0 ? "builtin" : "blas";
    vjp_device *rival;
    if (vjp_open("cpu", &options, &rival) == VJP_OK) return rival;
    vjp_close(rival);
    return NULL;
}

/* ---- linear's products ------------------------------------------------------------------------------- */

/* y, da, db; by linear, by linear on the rival, and by the device's raw product, where there are those. */
enum { PRODUCTS = 3, LINEAR = 0, RIVAL, RAW, ENGINES };

typedef struct raw_products {
    vjp_linear_attributes attributes;
    timed_call call[PRODUCTS][ENGINES];
    double flops; /* of one product */
} raw_products;

/*
 * y = a b, da = dy b^T and db = a^T dy have the same flops, and take the raw product as long whichever way their
 * operands are stored.
 */
static vjp_status make_raw_product(raw_products *r, const bench *b, int product) {
    const vjp_tensor *memory[MAX_SETS][3], *first = &b->p.slot[VJP_FORWARD][LINEAR_A].tensor;
    const vjp_tensor *weight = &b->p.slot[VJP_FORWARD][LINEAR_B].tensor;
    timed_call *c = &r->call[product][RAW];
    *c = (timed_call){.best = INFINITY};
    if (weight->ndim != 2) return VJP_OK;
    int64_t k = first->shape[first->ndim - 1], n = weight->shape[r->attributes.transpose_b ? 0 : 1];
    int64_t m = b->p.slot[VJP_FORWARD][LINEAR_A].count / vjp_max(k, 1);
    for (int set = 0; set < b->sets; set++) {
        const vjp_tensor *x = b->set[set].tensor[VJP_FORWARD], *dx = b->set[set].tensor[VJP_BACKWARD];
        const vjp_tensor *all[PRODUCTS][3] = {{&x[LINEAR_Y], &x[LINEAR_A], &x[LINEAR_B]},
                                              {&dx[LINEAR_B_DA], &dx[LINEAR_B_DY], &dx[LINEAR_B_B]},
                                              {&dx[LINEAR_B_DB], &dx[LINEAR_B_A], &dx[LINEAR_B_DY]}};
        memcpy(memory[set], all[product], sizeof memory[set]);
    }
    const int64_t size[PRODUCTS][3] = {{m, n, k}, {m, k, n}, {k, n, m}};
    return raw_make(c, b, size[product][0], size[product][1], size[product][2], memory, b->sets);
}

static vjp_status make_products(raw_products *r, bench *b) {
    const vjp_linear_attributes *own = (const void *)b->p.setup.attributes.bytes;
    static const char *const outputs[PRODUCTS] = {"y", "da", "db"};
    r->attributes = (vjp_linear_attributes)VJP_LINEAR_DEFAULTS;
    r->attributes.transpose_b = own->transpose_b;
    for (int i = 0; i < PRODUCTS; i++) {
        vjp_status status = make_raw_product(r, b, i);
        if (status != VJP_OK) return status;
        r->call[i][RIVAL] = (timed_call){.best = INFINITY};
        for (int e = 0; e <= (b->rival ? RIVAL : LINEAR); e++) {
            vjp_pass pass = i == 0 ? VJP_FORWARD : VJP_BACKWARD;
            const vjp_pass_info *info = &b->p.info->pass[pass];
            uint32_t present = 1u << proof_find_slot(info, outputs[i]) | 1u << proof_find_slot(info, "a") |
                               1u << proof_find_slot(info, "b");
            if (pass == VJP_BACKWARD) present |= 1u << proof_find_slot(info, "dy");
            status = call_make(&r->call[i][e], b, e ? b->rival : b->device, pass, present, &r->attributes);
            if (status != VJP_OK) return status;
        }
    }
    vjp_cost cost;
    const timed_call *y = &r->call[0][0];
    vjp_status status = vjp_min_cost(y->device, y->op, y->pass, y->tensors[0], y->count, y->attributes, &cost);
    r->flops = cost.flops;
    return status;
}

static double best_of(const timed_call call[ENGINES]) {
    return fmin(call[LINEAR].best, fmin(call[RIVAL].best, call[RAW].best));
}

/* Bytes that the passes between the products move. */
static double between_bytes(const bench *b, vjp_pass pass) {
    const vjp_linear_attributes *own = (const void *)b->p.setup.attributes.bytes;
    if (own->activation == VJP_ACTIVATION_NONE) return 0;
    int pre = proof_find_slot(&b->p.info->pass[VJP_FORWARD], "pre");
    const proof_values *v = &b->p.slot[VJP_FORWARD][pre];
    double pre_bytes = (double)v->count * (double)vjp_dtype_size((vjp_dtype)v->tensor.dtype);
    double dy_bytes = (double)v->count * (double)vjp_dtype_size(b->p.storage);
    return pass == VJP_FORWARD ? pre_bytes : pre_bytes + 2 * dy_bytes;
}

/* ---- The rate of matrix products, for other ops that compute ------------------------------------------- */

enum { SQUARE = 1024, SQUARE_CARD = 8192 }; /* large enough to fill the device */

int64_t proof_square_side(const vjp_device *device) {
    return strcmp(device->backend->name, "cuda") == 0 ? SQUARE_CARD : SQUARE;
}

typedef struct square_product {
    vjp_tensor y, a, b;
    timed_call call[ENGINES];
    int64_t side;
} square_product;

static vjp_status make_square(square_product *q, bench *b) {
    const int64_t side = proof_square_side(b->device), shape[2] = {side, side};
    vjp_tensor *tensors[] = {&q->y, &q->a, &q->b};
    *q = (square_product){.side = side};
    for (int i = 0; i < 3; i++) {
        void *data = NULL;
        vjp_status status = vjp_alloc(b->device, (size_t)(side * side) * vjp_dtype_size(b->p.storage), &data);
        if (status != VJP_OK) return status;
        b->owned[b->owned_count++] = data;
        *tensors[i] = vjp_tensor_of(data, b->p.storage, 2, shape);
        status = fill_floats(b, data, b->p.storage, side * side, "square");
        if (status != VJP_OK) return status;
    }
    for (int e = LINEAR; e <= RIVAL; e++) {
        timed_call *c = &q->call[e];
        *c = (timed_call){.device = e == RIVAL ? b->rival : b->device,
                          .op = &vjp_op_linear,
                          .pass = VJP_FORWARD,
                          .tensors = {{[LINEAR_Y] = &q->y, [LINEAR_A] = &q->a, [LINEAR_B] = &q->b}},
                          .sets = 1,
                          .count = LINEAR_GATE + 1,
                          .repeats = 1,
                          .best = INFINITY};
        if (!c->device) continue;
        vjp_status status = reserve_for(c);
        if (status == VJP_OK) status = warm_up(c);
        if (status != VJP_OK) return status;
    }
    const vjp_tensor *const memory[][3] = {{&q->y, &q->a, &q->b}};
    return raw_make(&q->call[RAW], b, side, side, side, memory, 1);
}

static double square_rate(const square_product *q) {
    double side = (double)q->side;
    return 2 * side * side * side / best_of(q->call);
}

/* ---- The run ----------------------------------------------------------------------------------------- */

/* An op whose limit is that of the matrix products, and which is not linear. */
static bool computes_elsewhere(const bench *b) {
    return b->p.setup.op->id == OP_ID(conv2d) || b->p.setup.op->id == OP_ID(attention) ||
           b->p.setup.op->id == OP_ID(linear_cross_entropy);
}

static vjp_status time_all(bench *b, proof_yardstick *yardstick, double budget, proof_timing *t) {
    timed_call calls[VJP_PASS_COUNT];
    raw_products products;
    square_product square;
    bool has_products = strcmp(b->p.info->name, "linear") == 0, computes = computes_elsewhere(b);
    double bytes[VJP_PASS_COUNT], flops[VJP_PASS_COUNT];
    int passes = vjp_passes(b->p.info);
    for (int pass = 0; pass < passes; pass++) {
        timed_call *c = &calls[pass];
        uint32_t present = proof_present(&b->p, (vjp_pass)pass);
        vjp_status status = call_make(c, b, b->device, (vjp_pass)pass, present, &b->p.setup.attributes);
        if (status != VJP_OK) return status;
        vjp_cost cost;
        status = vjp_min_cost(c->device, c->op, c->pass, c->tensors[0], c->count, c->attributes, &cost);
        if (status != VJP_OK) return status;
        bytes[pass] = cost.bytes;
        flops[pass] = cost.flops;
    }
    if (has_products) {
        vjp_status status = make_products(&products, b);
        if (status != VJP_OK) return status;
    }
    if (computes) {
        vjp_status status = make_square(&square, b);
        if (status != VJP_OK) return status;
    }
    double start = system_seconds();
    for (int round = 0; round < MAX_ROUNDS; round++) {
        if (round >= MIN_ROUNDS && system_seconds() - start > budget) break;
        vjp_status status = VJP_OK;
        /* The limits first, after the copy: overwriting lines that are in other cores' caches is slow. */
        for (int i = 0; has_products && i < PRODUCTS * ENGINES && status == VJP_OK; i++)
            status = time_once(&products.call[i / ENGINES][i % ENGINES]);
        for (int pass = 0; pass < passes && status == VJP_OK; pass++)
            status = time_once(&calls[pass]);
        for (int i = 0; computes && i < ENGINES && status == VJP_OK; i++)
            status = time_once(&square.call[i]);
        if (status != VJP_OK) return status;
        /* A copy larger than any cache takes much longer than a small call: a few are enough. */
        if (yardstick && (calls[0].repeats == 1 || round < MIN_ROUNDS))
            t->copy_rate = fmax(t->copy_rate, proof_yardstick_copy(yardstick));
    }
    for (int pass = 0; pass < passes; pass++) {
        t->seconds[pass] = calls[pass].best;
        t->limit[pass] = yardstick ? bytes[pass] / t->copy_rate : NAN;
        if (computes) {
            t->product_rate = square_rate(&square);
            t->limit[pass] = fmax(flops[pass] / t->product_rate, yardstick ? t->limit[pass] : 0);
        }
        if (!has_products) continue;
        double raw =
            pass == VJP_FORWARD ? best_of(products.call[0]) : best_of(products.call[1]) + best_of(products.call[2]);
        double between = between_bytes(b, (vjp_pass)pass);
        t->limit[pass] = between > 0 ? raw + (yardstick ? between / t->copy_rate : NAN) : raw;
        t->product_rate = fmax(t->product_rate, products.flops * (pass == VJP_FORWARD ? 1 : 2) / raw);
    }
    return VJP_OK;
}

bool proof_time(vjp_device *device, proof_yardstick *yardstick, const proof_setup *setup, vjp_dtype storage,
                double budget, proof_timing *timing, char error[TEXT_ERROR]) {
    *timing = (proof_timing){0};
    bench *b = proof_memory(sizeof *b);
    b->device = device;
    bool good = proof_problem_shape(&b->p, device, setup, storage, error);
    if (good) {
        if (strcmp(b->p.info->name, "linear") == 0 || computes_elsewhere(b)) b->rival = open_rival(device);
        good = make_buffers(b) == VJP_OK && time_all(b, yardstick, budget, timing) == VJP_OK;
        if (!good) snprintf(error, TEXT_ERROR, "%s", vjp_error(device));
    }
    for (int i = 0; i < b->owned_count; i++)
        vjp_free(device, b->owned[i]);
    if (b->rival) vjp_close(b->rival);
    proof_problem_free(&b->p);
    free(b);
    return good;
}

double proof_min_bytes(vjp_device *device, const proof_setup *setup, vjp_dtype storage, char error[TEXT_ERROR]) {
    proof_problem p;
    if (!proof_problem_shape(&p, device, setup, storage, error)) return -1;
    const vjp_tensor *tensors[VJP_MAX_SLOTS] = {0};
    vjp_pass last = (vjp_pass)(vjp_passes(p.info) - 1);
    size_t count = p.info->pass[last].count;
    for (size_t i = 0; i < count; i++)
        if (p.slot[last][i].present && !is_repeated(&p, last, p.slot[last][i].slot))
            tensors[i] = &p.slot[last][i].tensor;
    vjp_cost cost;
    if (vjp_min_cost(device, setup->op, last, tensors, count, &setup->attributes, &cost) == VJP_OK) return cost.bytes;
    snprintf(error, TEXT_ERROR, "%s", vjp_error(device));
    return -1;
}
