/* SPDX-License-Identifier: MIT */
/*
 * vjp_graph_minimize() compared with the same step written by hand, bit for bit; what it refuses; first values compared
 * with their definition; parameters and states through a file and back, and files that are refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>
#include <unistd.h>

#include "core/half.h"
#include "core/philox.h"
#include "files/safetensors.h"
#include "vjp.h"

static vjp_device *open_device(const char *name) {
    vjp_device *device;
    if (vjp_open(name, NULL, &device) != VJP_OK) fail_msg("%s", vjp_error(device));
    return device;
}

static vjp_program *compile(vjp_device *device, vjp_graph *graph, const vjp_value *results, size_t count) {
    vjp_program *program;
    if (vjp_compile(device, graph, results, count, NULL, &program) != VJP_OK) fail_msg("%s", vjp_error(device));
    return program;
}

static void expect_graph_error(vjp_graph *graph, const char *part) {
    assert_int_not_equal(vjp_graph_status(graph), VJP_OK);
    if (!strstr(vjp_graph_error(graph), part))
        fail_msg("expected a sentence with \"%s\"; got \"%s\"", part, vjp_graph_error(graph));
    vjp_graph_destroy(graph);
}

#define CHECK(device, call)                                                                                            \
    do {                                                                                                               \
        if ((call) != VJP_OK) fail_msg("%s", vjp_error(device));                                                       \
    } while (0)

/* ---- Steps ------------------------------------------------------------------------------------------- */

enum { ROWS = 6, IN = 5, OUT = 4, STEPS = 3 };

typedef struct network {
    vjp_graph *graph;
    vjp_value x, label, w, b, loss;
} network;

static network build(void) {
    const int64_t rows[] = {ROWS, IN}, matrix[] = {OUT, IN}, out[] = {OUT};
    network n = {.graph = vjp_graph_create()};
    n.x = vjp_graph_input(n.graph, "x", VJP_F32, 2, rows);
    n.label = vjp_graph_input(n.graph, "label", VJP_I32, 1, rows);
    n.w = vjp_graph_parameter(n.graph, "layer.weight", VJP_F32, 2, matrix);
    n.b = vjp_graph_parameter(n.graph, "layer.bias", VJP_F32, 1, out);
    vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
    linear.transpose_b = 1;
    n.loss = vjp_graph_cross_entropy(n.graph, vjp_graph_linear(n.graph, n.x, n.w, n.b, 0, 0, &linear), n.label, NULL);
    return n;
}

static void train(vjp_device *device, vjp_program *program, const network *n, vjp_value lr, vjp_value step,
                  float w[OUT * IN], float b[OUT]) {
    float rate = 0.1f;
    int32_t labels[ROWS] = {0, 1, 2, 3, 0, 1};
    CHECK(device, vjp_program_init_normal(program, n->x, 0, 3, 5));
    CHECK(device, vjp_program_init_kaiming(program, n->w, 7));
    CHECK(device, vjp_program_init_uniform(program, n->b, 0.5, 1, 7));
    CHECK(device, vjp_program_write(program, n->label, labels, sizeof labels));
    CHECK(device, vjp_program_write(program, lr, &rate, sizeof rate));
    for (int64_t i = 1; i <= STEPS; i++) {
        if (step) CHECK(device, vjp_program_write(program, step, &i, sizeof i));
        CHECK(device, vjp_program_run(program));
    }
    CHECK(device, vjp_program_read(program, n->w, w, OUT * IN * sizeof *w));
    CHECK(device, vjp_program_read(program, n->b, b, OUT * sizeof *b));
}

static int only_the_bias_decays(void *context, const char *name, const vjp_tensor *parameter) {
    assert_ptr_equal(context, &only_the_bias_decays);
    return strcmp(name, "layer.bias") == 0 && parameter->ndim == 1;
}

typedef struct step_case {
    const char *name;
    double max_norm, decay;
    bool sgd, decay_bias;
    double beta; /* of SGD */
} step_case;

/* The same step, written with the graph's own functions. */
static void train_by_hand(vjp_device *device, const step_case *c, float w[OUT * IN], float b[OUT]) {
    network n = build();
    vjp_graph *g = n.graph;
    vjp_value parameter[] = {n.w, n.b}, gradient[2], result[2], scale = 0;
    vjp_graph_grad(g, n.loss, parameter, 2, NULL, 0, gradient);
    if (c->max_norm > 0) {
        vjp_value squares = vjp_graph_sum_squares(g, gradient[0]);
        squares = vjp_graph_accumulate(g, squares, vjp_graph_sum_squares(g, gradient[1]));
        const vjp_clip_attributes clip = {sizeof clip, c->max_norm};
        scale = vjp_graph_clip(g, squares, &clip);
    }
    vjp_value lr = vjp_graph_input(g, "lr", VJP_F32, 0, NULL), step = 0;
    if (!c->sgd) step = vjp_graph_input(g, "step", VJP_I64, 0, NULL);
    for (int i = 0; i < 2; i++) {
        vjp_tensor like = vjp_graph_describe(g, parameter[i]);
        double decay = (i == 1) == c->decay_bias ? c->decay : 0;
        vjp_value state[2] = {0};
        for (int k = 0; k < (c->sgd ? c->beta != 0 : 2); k++) {
            char name[8];
            snprintf(name, sizeof name, "s%d%d", i, k);
            state[k] = vjp_graph_state(g, name, VJP_F32, like.ndim, like.shape);
        }
        const vjp_sgd_attributes sgd = {sizeof sgd, c->beta, decay, 0};
        const vjp_adamw_attributes adamw = {sizeof adamw, 0.9, 0.999, 1e-8, decay, 0};
        result[i] = c->sgd ? vjp_graph_sgd(g, parameter[i], state[0], gradient[i], lr, scale, &sgd)
                           : vjp_graph_adamw(g, parameter[i], state[0], state[1], gradient[i], lr, step, scale, &adamw);
    }
    vjp_program *program = compile(device, g, result, 2);
    train(device, program, &n, lr, step, w, b);
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
}

static void steps_are_those_by_hand(void **unused) {
    (void)unused;
    static const step_case cases[] = {
        {"adamw", 0, 0.01, false, false, 0},           {"adamw, clipped", 0.05, 0.01, false, false, 0},
        {"adamw, decays", 0.05, 0.3, false, true, 0},  {"sgd", 0, 0.2, true, false, 0},
        {"sgd, momentum", 0.05, 0.2, true, true, 0.9},
    };
    vjp_device *device = open_device("cpu");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const step_case *c = &cases[i];
        network n = build();
        const vjp_sgd_attributes sgd = {sizeof sgd, c->beta, c->decay, 0};
        const vjp_adamw_attributes adamw = {sizeof adamw, 0.9, 0.999, 1e-8, c->decay, 0};
        vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
        options.max_norm = c->max_norm;
        options.sgd = c->sgd ? &sgd : NULL;
        options.adamw = &adamw;
        if (c->decay_bias) options.decays = only_the_bias_decays;
        options.context = (void *)(uintptr_t)&only_the_bias_decays;
        vjp_minimize_result made = {.struct_size = sizeof made};
        vjp_graph_push(n.graph, "outer"); /* a scope that is open changes no name */
        if (vjp_graph_minimize(n.graph, n.loss, i ? &options : NULL, &made) != VJP_OK)
            fail_msg("%s: %s", c->name, vjp_graph_error(n.graph));
        assert_int_equal(made.results[0], n.loss);
        assert_int_equal(made.count, 3 + (c->max_norm > 0));
        assert_int_equal(made.norm != 0, c->max_norm > 0);
        assert_int_equal(made.step != 0, !c->sgd);
        assert_int_equal(made.lr, vjp_graph_find(n.graph, "lr"));
        const char *state = c->sgd ? "layer.bias.momentum" : "layer.bias.v";
        assert_int_equal(vjp_graph_find(n.graph, state) != 0, !c->sgd || c->beta != 0);
        vjp_program *program = compile(device, n.graph, made.results, made.count);
        float w[2][OUT * IN], b[2][OUT];
        train(device, program, &n, made.lr, made.step, w[0], b[0]);
        train_by_hand(device, c, w[1], b[1]);
        if (memcmp(w[0], w[1], sizeof w[0]) != 0 || memcmp(b[0], b[1], sizeof b[0]) != 0)
            fail_msg("%s: other bits than by hand", c->name);
        vjp_program_destroy(program);
        vjp_graph_destroy(n.graph);
    }
    vjp_close(device);
}

static void wrong_options_are_refused(void **unused) {
    (void)unused;
    vjp_minimize_result made = {.struct_size = sizeof made};
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    network n = build();
    assert_int_equal(vjp_graph_minimize(n.graph, n.loss, NULL, NULL), VJP_INVALID);
    expect_graph_error(n.graph, "vjp_graph_minimize: result is NULL or has another struct_size");
    n = build();
    options.struct_size = 8;
    assert_int_equal(vjp_graph_minimize(n.graph, n.loss, &options, &made), VJP_INVALID);
    expect_graph_error(n.graph, "vjp_graph_minimize: options is NULL or has another struct_size");
    options.struct_size = sizeof options;
    n = build();
    options.count = 1;
    vjp_graph_minimize(n.graph, n.loss, &options, &made);
    expect_graph_error(n.graph, "parameters and count must be given together");
    n = build();
    vjp_minimize_options narrow = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    narrow.moments = VJP_F16;
    vjp_graph_minimize(n.graph, n.loss, &narrow, &made);
    expect_graph_error(n.graph, "moments is f16; it must be f32 or bf16");
    n = build();
    options.parameters = &n.x;
    vjp_graph_minimize(n.graph, n.loss, &options, &made);
    expect_graph_error(n.graph, "x: it cannot be trained: it is not a parameter of a float type");
    n = build();
    vjp_graph_input(n.graph, "lr", VJP_F64, 0, NULL);
    vjp_graph_minimize(n.graph, n.loss, NULL, &made);
    expect_graph_error(n.graph, "lr: it must be a scalar input of dtype f32");
    n = build();
    assert_int_equal(vjp_graph_minimize(n.graph, 0, NULL, &made), VJP_INVALID);
    expect_graph_error(n.graph, "the loss is 0");
    n.graph = vjp_graph_create();
    n.x = vjp_graph_input(n.graph, "x", VJP_F32, 0, NULL);
    vjp_graph_minimize(n.graph, n.x, NULL, &made);
    expect_graph_error(n.graph, "there is no parameter to train");
    n.graph = vjp_graph_create();
    assert_int_equal(vjp_graph_clip_norm(n.graph, NULL, 0, 1, NULL), 0);
    expect_graph_error(n.graph, "no gradients");
}

/* ---- First values ------------------------------------------------------------------------------------ */

static uint32_t hash_of(const char *name) {
    uint32_t hash = 2166136261u;
    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    return hash;
}

/* Longer than a chunk, so that chunks must join. */
static void first_values_are_as_defined(void **unused) {
    (void)unused;
    enum { COUNT = 270000 };
    static const vjp_dtype dtypes[] = {VJP_F32, VJP_F64, VJP_BF16, VJP_F16};
    static double got[COUNT];
    const int64_t shape[] = {COUNT / 100, 100};
    vjp_device *device = open_device("cpu");
    for (int d = 0; d < 4; d++) {
        vjp_graph *g = vjp_graph_create();
        vjp_value w = vjp_graph_parameter(g, "a.weight", dtypes[d], 2, shape);
        vjp_program *program = compile(device, g, &w, 1);
        const uint64_t seed = 0x123456789abcdefull;
        for (int kind = 0; kind < 3; kind++) {
            if (kind == 0) CHECK(device, vjp_program_init_normal(program, w, 0.25, 0.5, seed));
            if (kind == 1) CHECK(device, vjp_program_init_uniform(program, w, -1, 3, seed));
            if (kind == 2) CHECK(device, vjp_program_init_kaiming(program, w, seed));
            CHECK(device, vjp_program_read(program, w, got, COUNT * vjp_dtype_size(dtypes[d])));
            double sum = 0, squares = 0;
            for (uint64_t i = 0; i < COUNT; i++) {
                vjp_philox r = {{(uint32_t)i, 0, hash_of("a.weight"), kind == 1}};
                r = vjp_philox4x32_10(r, (uint32_t)seed, (uint32_t)(seed >> 32));
                double unit = ((double)r.word[0] + 0.5) / 0x1p32, turn = (double)r.word[1] / 0x1p32;
                double normal = sqrt(-2 * log(unit)) * cos(turn * 2 * acos(-1));
                double want = kind == 0 ? 0.25 + 0.5 * normal : kind == 1 ? -1 + 4 * unit : normal * sqrt(2. / 100);
                double value = d == 0   ? ((float *)got)[i]
                               : d == 1 ? got[i]
                               : d == 2 ? vjp_bf16_to_f32(((uint16_t *)got)[i])
                                        : vjp_f16_to_f32(((uint16_t *)got)[i]);
                /* Half a unit in the last place for each rounding: of the difference from the mean, of the sum, and to
                 * 16 bits (with the smallest f16 beside it). */
                const double half[] = {0, 0, 0x1p-8, 0x1p-11};
                double from_mean = kind == 0 ? fabs(want - 0.25) : fabs(want);
                double bound =
                    0x1p-24 * 1.01 * (from_mean + fabs(want)) + half[d] * 1.01 * fabs(want) + 0x1p-25 * (d == 3);
                if (!(fabs(value - want) <= bound))
                    fail_msg("%s, kind %d, element %d: %g instead of %g", vjp_dtype_name(dtypes[d]), kind, (int)i,
                             value, want);
                sum += value;
                squares += value * value;
            }
            const double means[] = {0.25, 1, 0}, deviations[] = {0.5, 4 / sqrt(12), sqrt(0.02)};
            double mean = sum / COUNT, deviation = sqrt(squares / COUNT - mean * mean);
            assert_true(fabs(mean - means[kind]) < 0.02);
            assert_true(fabs(deviation / deviations[kind] - 1) < 0.02);
        }
        vjp_program_destroy(program);
        vjp_graph_destroy(g);
    }
    vjp_close(device);
}

static void first_values_are_refused_where_they_make_no_sense(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {3};
    const float data[] = {1, 2, 3};
    vjp_value w = vjp_graph_parameter(g, "w", VJP_F32, 1, shape), k = vjp_graph_input(g, "k", VJP_I32, 1, shape);
    vjp_value c = vjp_graph_constant(g, "c", VJP_F32, 1, shape, data), all[] = {w, k, c};
    vjp_program *program = compile(device, g, all, 3);
#define REFUSED(call, sentence)                                                                                        \
    do {                                                                                                               \
        assert_int_equal(call, VJP_INVALID);                                                                           \
        if (!strstr(vjp_error(device), sentence)) fail_msg("%s", vjp_error(device));                                   \
    } while (0)
    REFUSED(vjp_program_init_normal(program, k, 0, 1, 1), "k cannot be given first values");
    REFUSED(vjp_program_init_normal(program, c, 0, 1, 1), "c cannot be given first values");
    REFUSED(vjp_program_init_normal(program, 99, 0, 1, 1), "value 99 is not an input");
    REFUSED(vjp_program_init_normal(program, w, NAN, 1, 1), "both must be finite");
    REFUSED(vjp_program_init_normal(program, w, 0, -1, 1), "the second not negative");
    REFUSED(vjp_program_init_uniform(program, w, 1, 0, 1), "the second not below the first");
    REFUSED(vjp_program_init_kaiming(program, w, 1), "w has 1 axes");
    assert_int_equal(vjp_program_init_kaiming(NULL, w, 1), VJP_INVALID);
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

/* vjp_program_init() and vjp_program_step() are the calls that they stand for. */
static void one_call_is_a_step(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    int32_t labels[ROWS] = {0, 1, 2, 3, 0, 1};
    float w[2][OUT * IN], zero[OUT] = {0}, b[OUT], rate = 0.1f, single = 0;
    double loss[2] = {0};
    for (int by_hand = 0; by_hand < 2; by_hand++) {
        network n = build();
        vjp_minimize_result made = {.struct_size = sizeof made};
        assert_int_equal(vjp_graph_minimize(n.graph, n.loss, NULL, &made), VJP_OK);
        assert_int_equal(made.loss, n.loss);
        vjp_program *program = compile(device, n.graph, made.results, made.count);
        CHECK(device, vjp_program_init_normal(program, n.x, 0, 3, 5));
        CHECK(device, vjp_program_write(program, n.label, labels, sizeof labels));
        CHECK(device, by_hand ? vjp_program_init_kaiming(program, n.w, 9) : vjp_program_init(program, 9));
        CHECK(device, vjp_program_read(program, n.b, b, sizeof b));
        assert_memory_equal(b, zero, sizeof b);
        for (int64_t i = 1; i <= STEPS; i++) {
            if (!by_hand) {
                CHECK(device, vjp_program_step(program, &made, 0.1, i, &loss[0]));
                continue;
            }
            CHECK(device, vjp_program_write(program, made.lr, &rate, sizeof rate));
            CHECK(device, vjp_program_write(program, made.step, &i, sizeof i));
            CHECK(device, vjp_program_run(program));
            CHECK(device, vjp_program_read(program, n.loss, &single, sizeof single));
            loss[1] = single;
        }
        CHECK(device, vjp_program_read(program, n.w, w[by_hand], sizeof w[0]));
        assert_int_equal(vjp_program_step(program, NULL, 0.1, 1, NULL), VJP_INVALID);
        assert_int_equal(vjp_program_step(NULL, &made, 0.1, 1, NULL), VJP_INVALID);
        assert_int_equal(vjp_program_init(NULL, 1), VJP_INVALID);
        made.loss = 0;
        assert_int_equal(vjp_program_step(program, &made, 0.1, 1, &loss[by_hand]), VJP_INVALID);
        assert_non_null(strstr(vjp_error(device), "no loss"));
        vjp_program_destroy(program);
        vjp_graph_destroy(n.graph);
    }
    assert_memory_equal(w[0], w[1], sizeof w[0]);
    assert_true(loss[0] == loss[1] && loss[0] > 0);
    vjp_close(device);
}

static void files_restore_a_run(void **unused) {
    (void)unused;
    char path[] = "/tmp/vjp_training_XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    close(file);
    vjp_device *device = open_device("cpu");
    float w[3][OUT * IN], b[3][OUT];
    network n = build();
    vjp_minimize_result made = {.struct_size = sizeof made};
    assert_int_equal(vjp_graph_minimize(n.graph, n.loss, NULL, &made), VJP_OK);
    vjp_program *program = compile(device, n.graph, made.results, made.count);
    train(device, program, &n, made.lr, made.step, w[0], b[0]);
    CHECK(device, vjp_program_save(program, path));
    /* One more step, then load and repeat it: weights and moments were all saved. */
    for (int again = 1; again < 3; again++) {
        int64_t next = STEPS + 1;
        CHECK(device, vjp_program_write(program, made.step, &next, sizeof next));
        CHECK(device, vjp_program_run(program));
        CHECK(device, vjp_program_read(program, n.w, w[again], sizeof w[0]));
        CHECK(device, vjp_program_read(program, n.b, b[again], sizeof b[0]));
        if (again == 1) CHECK(device, vjp_program_load(program, path));
    }
    assert_memory_not_equal(w[0], w[1], sizeof w[0]);
    assert_memory_equal(w[1], w[2], sizeof w[0]);
    assert_memory_equal(b[1], b[2], sizeof b[0]);

    safetensors_file stored;
    char error[SAFETENSORS_ERROR] = "";
    if (!safetensors_read(path, &stored, error)) fail_msg("%s", error);
    assert_int_equal(stored.count, 6);
    assert_non_null(safetensors_find(&stored, "layer.weight.v"));

    /* Each of these files is refused, and changes nothing. */
    safetensors_tensor tensors[7];
    memcpy(tensors, stored.tensors, 6 * sizeof tensors[0]);
    tensors[6] = (safetensors_tensor){.name = "more", .dtype = VJP_F32, .ndim = 1, .shape = {1}, .data = b[0]};
    int weight = -1;
    for (int i = 0; i < 6; i++)
        if (strcmp(tensors[i].name, "layer.weight") == 0) weight = i;
    const struct {
        const char *name, *sentence;
        size_t count;
        int dtype;
        int64_t rows;
    } cases[] = {
        {"layer.weight", "it has 7 tensors; the program has 6 parameters and states", 7, VJP_F32, OUT},
        {"other", "it has no tensor \"layer.weight\"", 6, VJP_F32, OUT},
        {"layer.weight", "the dtype or shape of \"layer.weight\" differs; in the program it is f32, [4, 5]", 6, VJP_I32,
         OUT},
        {"layer.weight", "the dtype or shape of \"layer.weight\" differs; in the program it is f32, [4, 5]", 6, VJP_F32,
         2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tensors[weight].name = cases[i].name;
        tensors[weight].dtype = cases[i].dtype;
        tensors[weight].shape[0] = cases[i].rows;
        if (!safetensors_write(path, tensors, cases[i].count, NULL, 0, error)) fail_msg("%s", error);
        assert_int_equal(vjp_program_load(program, path), VJP_FILE);
        if (!strstr(vjp_error(device), cases[i].sentence)) fail_msg("%s", vjp_error(device));
        CHECK(device, vjp_program_read(program, n.w, w[0], sizeof w[0]));
        assert_memory_equal(w[0], w[2], sizeof w[0]);
    }
    safetensors_free(&stored);
    unlink(path);
    assert_int_equal(vjp_program_load(program, path), VJP_FILE);
    assert_non_null(strstr(vjp_error(device), "cannot be opened"));
    assert_int_equal(vjp_program_save(program, "/nowhere/at/all"), VJP_FILE);
    assert_int_equal(vjp_program_save(program, NULL), VJP_INVALID);
    assert_int_equal(vjp_program_load(program, NULL), VJP_INVALID);
    vjp_program_destroy(program);
    vjp_graph_destroy(n.graph);
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_those_by_hand),
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(first_values_are_as_defined),
        cmocka_unit_test(first_values_are_refused_where_they_make_no_sense),
        cmocka_unit_test(one_call_is_a_step),
        cmocka_unit_test(files_restore_a_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
