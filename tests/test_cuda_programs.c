/* SPDX-License-Identifier: MIT */
/*
 * What CUDA does for programs, beside the same ones without it.
 *
 * Calls that run in pairs (vjp_backend.pairs): Hopper has kernels for products that end with swiglu and its backward,
 * where they are large enough; so has the card that the processor emulates (tests/cuda), of any size. On other cards
 * there are none.
 *
 * Intermediates that wait in the host's memory, run call by call and replayed.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "graph/program.h"
#include "numbers.h"
#include "on_device.h"

enum { PAIR_INPUTS = 6, PAIR_RESULTS = 8 };

/* A graph, what its inputs are filled with (random numbers of that size), and the pairs that its program has. */
typedef struct pair_graph {
    vjp_graph *graph;
    int inputs, results, pairs;
    vjp_value input[PAIR_INPUTS], result[PAIR_RESULTS];
    double size[PAIR_INPUTS];
} pair_graph;

static vjp_value pair_input(pair_graph *p, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape,
                            double size) {
    p->size[p->inputs] = size;
    return p->input[p->inputs++] = vjp_graph_input(p->graph, name, dtype, ndim, shape);
}

static int pairs_of(const vjp_program *program) {
    int pairs = 0;
    for (int32_t i = 0; i < program->groups; i++)
        pairs += program->group[i].pair;
    return pairs;
}

/* A copy of the value's tensor in the host's memory, and its bytes. */
static vjp_tensor copied(vjp_program *program, vjp_value value, size_t *bytes) {
    vjp_tensor tensor;
    assert_int_equal(vjp_program_tensor(program, value, &tensor), VJP_OK);
    *bytes = (size_t)count_of(&tensor) * vjp_dtype_size((vjp_dtype)tensor.dtype);
    void *host = malloc(*bytes);
    assert_non_null(host);
    assert_int_equal(vjp_download(device, host, tensor.data, tensor.offset, *bytes), VJP_OK);
    tensor.data = host;
    tensor.offset = 0;
    return tensor;
}

static void fill_on_device(const pair_graph *p, vjp_program *program, int input) {
    size_t bytes;
    vjp_value value = p->input[input];
    vjp_tensor to, from = copied(program, value, &bytes);
    assert_int_equal(vjp_program_tensor(program, value, &to), VJP_OK);
    for (int64_t i = 0; i < count_of(&from); i++)
        put(&from, i, p->size[input] * random_of(11, (uint64_t)value, (uint64_t)i));
    assert_int_equal(vjp_upload(device, to.data, to.offset, from.data, bytes), VJP_OK);
    free(from.data);
}

/*
 * Runs the program twice, and the one without pairs. A program's bits are the same each time. Those of the other are
 * the same or, where cuBLASLt adds in another order, close to them. Destroys the graph.
 */
static void check_pairs(const char *what, pair_graph *p) {
    vjp_program_options options[2] = {VJP_PROGRAM_OPTIONS_DEFAULTS, VJP_PROGRAM_OPTIONS_DEFAULTS};
    options[1].unplanned = 1;
    vjp_program *program[2];
    vjp_tensor first[PAIR_RESULTS];
    for (int i = 0; i < 2; i++) {
        if (vjp_compile(device, p->graph, p->result, (size_t)p->results, &options[i], &program[i]) != VJP_OK)
            fail_msg("%s", vjp_error(device));
        assert_int_equal(pairs_of(program[i]), i ? 0 : p->pairs);
        for (int k = 0; k < p->inputs; k++)
            fill_on_device(p, program[i], k);
        for (int run = 0; run < 2 - i; run++) {
            if (vjp_program_run(program[i]) != VJP_OK || vjp_synchronize(device) != VJP_OK)
                fail_msg("%s", vjp_error(device));
            for (int r = 0; r < p->results && !i; r++) {
                size_t bytes;
                vjp_tensor now = copied(program[0], p->result[r], &bytes);
                if (run) assert_memory_equal(now.data, first[r].data, bytes);
                if (run) free(now.data);
                if (!run) first[r] = now;
            }
        }
    }
    printf("%s: %d pairs; differ from separate calls by", what, p->pairs);
    for (int r = 0; r < p->results; r++) {
        size_t bytes;
        vjp_tensor alone = copied(program[1], p->result[r], &bytes);
        double off = 0, all = 0;
        for (int64_t i = 0; i < count_of(&alone); i++) {
            double one = get(&first[r], i), other = get(&alone, i);
            if (!isfinite(one) || !isfinite(other)) {
                assert_true(isfinite(one) == isfinite(other));
                continue;
            }
            off += (one - other) * (one - other);
            all += other * other;
        }
        printf(" %.0e", sqrt(off / all));
        assert_true(all > 0 && off <= 4e-6 * all); /* 2e-3: half of what a result of bf16 may be off by */
        free(alone.data);
        free(first[r].data);
    }
    printf("\n");
    for (int i = 0; i < 2; i++)
        vjp_program_destroy(program[i]);
    vjp_graph_destroy(p->graph);
}

enum { TOO_MANY = -1 }; /* tiles for an emulated card */

typedef struct block_case {
    vjp_dtype dtype;
    int64_t rows, width, inner, out;
    bool apart;   /* gate and up are of different rows: the forward is no pair */
    int pairs[2]; /* on an H200, and on an emulated Hopper of 6 multiprocessors: the forward's and the backward's */
} block_case;

/* With w_down's gradient (`repeats`) swiglu's y is needed in the backward, too: its backward gives it again. */
static pair_graph feed_forward(const block_case *c, bool repeats, int pairs) {
    pair_graph p = {.graph = vjp_graph_create(), .pairs = pairs};
    vjp_graph *g = p.graph;
    vjp_value x = pair_input(&p, "x", c->dtype, 2, (const int64_t[]){c->rows, c->width}, 1);
    vjp_value w_gate = pair_input(&p, "w_gate", c->dtype, 2, (const int64_t[]){c->inner, c->width}, 0.2);
    vjp_value w_up = pair_input(&p, "w_up", c->dtype, 2, (const int64_t[]){c->inner, c->width}, 0.1);
    vjp_value w_down = pair_input(&p, "w_down", c->dtype, 2, (const int64_t[]){c->out, c->inner}, 0.1);
    vjp_value other = x;
    if (c->apart) other = pair_input(&p, "other", c->dtype, 2, (const int64_t[]){c->rows, c->width}, 1);
    vjp_value factor = pair_input(&p, "factor", c->dtype, 2, (const int64_t[]){c->rows, c->out}, 1);
    vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
    linear.transpose_b = 1;
    vjp_value gate = vjp_graph_linear(g, x, w_gate, 0, 0, 0, &linear);
    vjp_value up = vjp_graph_linear(g, other, w_up, 0, 0, 0, &linear);
    if (repeats) vjp_graph_recompute_begin(g);
    vjp_value y = vjp_graph_swiglu(g, gate, up);
    vjp_value z = vjp_graph_linear(g, y, w_down, 0, 0, 0, &linear);
    if (repeats) vjp_graph_recompute_end(g);
    vjp_value product = vjp_graph_mul(g, z, factor, NULL);
    product = vjp_graph_scale(g, product, WITH(scale, .factor = (double)(c->rows * c->out) / 64));
    vjp_value loss = vjp_graph_mean(g, product, WITH(mean, .axis = 0, .axes = 2));
    vjp_value wanted[] = {x, w_gate, w_up, w_down};
    p.result[p.results++] = loss;
    for (int i = 0; i < 3 && !repeats; i++) /* kept, they would leave y without memory in the backward */
        p.result[p.results++] = (vjp_value[]){gate, up, y}[i];
    size_t count = repeats ? 4 : 3;
    assert_int_equal(vjp_graph_grad(g, loss, wanted, count, NULL, 0, p.result + p.results), VJP_OK);
    p.results += (int)count;
    return p;
}

static void products_end_with_swiglu(void **state) {
    (void)state;
    need_device();
    static const block_case cases[] = {
        {VJP_BF16, 8192, 1024, 2816, 1024, false, {2, TOO_MANY}},
        {VJP_F16, 8100, 200, 1160, 136, false, {2, TOO_MANY}}, /* nothing is a multiple of a tile */
        {VJP_BF16, 4104, 768, 2048, 768, false, {1, TOO_MANY}},
        {VJP_BF16, 1024, 264, 384, 128, false, {0, 2}},
        {VJP_F16, 1016, 200, 376, 136, false, {0, 2}},
        {VJP_BF16, 1024, 200, 384, 64, true, {0, 1}},
        {VJP_BF16, 1024, 64, 384, 64, false, {0, 1}},
        {VJP_BF16, 300, 64, 96, 64, false, {0, 0}},
        {VJP_F16, 33, 24, 40, 16, false, {0, 0}},
    };
    if (!device_is("cuda", "compute capability 9.0")) skip();
    bool emulated = device_is("cuda", "emulated");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int repeats = 0; repeats < 2 && cases[i].pairs[emulated] != TOO_MANY; repeats++) {
            pair_graph p = feed_forward(&cases[i], repeats, cases[i].pairs[emulated]);
            char what[64];
            snprintf(what, sizeof what, "%s [%lld, %lld] x %lld", cases[i].dtype == VJP_BF16 ? "bf16" : "f16",
                     (long long)cases[i].rows, (long long)cases[i].width, (long long)cases[i].inner);
            check_pairs(what, &p);
        }
}

/* ---- Host memory ------------------------------------------------------------------------------------- */

/* Layers whose backward needs what goes into them; the first and the second run go call by call, later ones replay. */
static void intermediates_wait_in_host_memory(void **state) {
    (void)state;
    need_device();
    enum { LAYERS = 12, ROWS = 600, WIDTH = 64 };
    vjp_graph *g = vjp_graph_create();
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 2, (const int64_t[]){ROWS, WIDTH}), y = x;
    vjp_value given[LAYERS + 1] = {x}, result[LAYERS + 2];
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        given[i + 1] = vjp_graph_input(g, name, VJP_F32, 1, (const int64_t[]){WIDTH});
        y = vjp_graph_rms_norm(g, y, given[i + 1], 0, NULL);
    }
    vjp_value loss = vjp_graph_mean(g, vjp_graph_mul(g, y, y, NULL), WITH(mean, .axis = 0, .axes = 2));
    assert_int_equal(vjp_graph_grad(g, loss, given, LAYERS + 1, NULL, 0, result), VJP_OK);
    result[LAYERS + 1] = loss;
    /* Copies of so little would take longer than the calls: the plan is told that they take no time. */
    const vjp_backend *own = device->backend;
    vjp_backend quick = *own;
    quick.copy_cost = 0;
    device->backend = &quick;
    setenv("VJP_REWRITES", "-all", 1);
    vjp_program *program[2];
    vjp_program_report report[2];
    for (int i = 0; i < 2; i++) {
        const vjp_program_options options = {.struct_size = sizeof options,
                                             .arena_limit = i ? report[0].arena_bytes / 2 : 0};
        if (vjp_compile(device, g, result, LAYERS + 2, &options, &program[i]) != VJP_OK)
            fail_msg("%s", vjp_error(device));
        report[i].struct_size = sizeof report[i];
        assert_int_equal(vjp_program_describe(program[i], &report[i]), VJP_OK);
        for (int k = 0; k <= LAYERS; k++) {
            float numbers[ROWS * WIDTH];
            size_t count = k ? WIDTH : ROWS * WIDTH;
            for (size_t e = 0; e < count; e++)
                numbers[e] = (float)random_of(7, (uint64_t)k, e);
            assert_int_equal(vjp_program_write(program[i], given[k], numbers, count * sizeof numbers[0]), VJP_OK);
        }
    }
    unsetenv("VJP_REWRITES");
    assert_true(report[1].host_bytes >= 4 * ROWS * WIDTH * sizeof(float));
    assert_true(report[1].arena_bytes <= report[0].arena_bytes / 2);
    for (int again = 0; again < 5; again++) {
        for (int i = 0; i < 2; i++)
            if (vjp_program_run(program[i]) != VJP_OK) fail_msg("%s", vjp_error(device));
        for (int k = 0; k < LAYERS + 2; k++) {
            size_t bytes[2];
            vjp_tensor of[] = {copied(program[0], result[k], &bytes[0]), copied(program[1], result[k], &bytes[1])};
            if (memcmp(of[0].data, of[1].data, bytes[0]) != 0) fail_msg("run %d: result %d has other bits", again, k);
            free(of[0].data);
            free(of[1].data);
        }
    }
    assert_non_null(program[1]->recording);
    for (int i = 0; i < 2; i++)
        vjp_program_destroy(program[i]);
    vjp_graph_destroy(g);
    device->backend = own;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(products_end_with_swiglu),
                                       cmocka_unit_test(intermediates_wait_in_host_memory)};
    device_start("cuda");
    int failed = cmocka_run_group_tests_name("cuda_programs", tests, NULL, NULL);
    vjp_close(device);
    return failed;
}
