/* SPDX-License-Identifier: MIT */
/*
 * Parameters in halves: the halves of an f32 are that f32, adamw of halves is adamw, and a program that keeps its
 * weights so takes the same steps as one that casts them, whoever reads, writes, saves, loads or shares them. The CPU
 * does it only when VJP_REWRITES says so.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "graph/program.h"
#include "halves.h"
#include "little_llama.h"
#include "on_cpu.h"
#include "op/op.h"
#include "scratch.h"
#include "train/trainer/trainer.h"

enum { LAYERS = 2, BATCH = 2, STEPS = 4 };

/* ---- Numbers ----------------------------------------------------------------------------------------- */

static void check_number(uint32_t bits) {
    float f = vjp_bits_to_f32(bits);
    uint16_t upper = vjp_upper_half(f);
    float joined = vjp_join_halves(upper, vjp_lower_half(f)), rounded = vjp_bf16_to_f32(upper);
    if (isnan(f)) {
        assert_true(isnan(joined) && isnan(rounded) && !signbit(joined) == !signbit(f));
        return;
    }
    if (vjp_f32_to_bits(joined) != bits) fail_msg("%08x became %08x", bits, vjp_f32_to_bits(joined));
    /* Only halfway cases are rounded otherwise than cast does it, and then as near. */
    uint16_t even = vjp_f32_to_bf16(f);
    if (upper != even && ((bits & 0xffff) != 0x8000 || upper != even + 1)) fail_msg("%08x is rounded wrongly", bits);
}

static void halves_are_the_whole(void **unused) {
    (void)unused;
    static const uint32_t lower[] = {0, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
    for (uint32_t upper = 0; upper < 0x10000; upper++)
        for (size_t i = 0; i < sizeof lower / sizeof lower[0]; i++)
            check_number(upper << 16 | lower[i]);
    for (uint32_t i = 0; i < 0x10000; i++)
        check_number(i * 0x9e3779b9u);
}

static void steps_have_the_same_bits(void **unused) {
    (void)unused;
    vjp_device *ref;
    assert_int_equal(vjp_open("ref", NULL, &ref), VJP_OK);
    check_halves(device);
    check_halves(ref);
    vjp_close(ref);
}

static void only_f32_has_halves(void **unused) {
    (void)unused;
    uint16_t narrow[4] = {0};
    float wide[4] = {0}, rate = 0.1f;
    int64_t step = 1, count = 4;
    vjp_tensor w = vjp_tensor_of(narrow, VJP_BF16, 1, &count), m = vjp_tensor_of(wide, VJP_F32, 1, &count);
    vjp_tensor lr = vjp_tensor_of(&rate, VJP_F32, 0, NULL), number = vjp_tensor_of(&step, VJP_I64, 0, NULL);
    const vjp_adamw_attributes halves = {.struct_size = sizeof halves, .beta1 = 0.9, .beta2 = 0.9, .halves = 1};
    assert_int_equal(vjp_adamw_forward(device, &w, NULL, NULL, &w, &m, &m, &m, &lr, &number, NULL, &halves),
                     VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "only f32 lies in halves"));
}

/* ---- Programs ---------------------------------------------------------------------------------------- */

/* A step of training a little Llama, its weights in halves or not. */
typedef struct stepping {
    train_model model;
    vjp_minimize_result made;
    vjp_program *program[2]; /* whole, in halves */
} stepping;

static vjp_program *compile(const stepping *s, const char *rewrites, const vjp_value *results, size_t count,
                            const vjp_program *share) {
    const vjp_program_options options = {.struct_size = sizeof options, .share = share, .halves = 1};
    vjp_program *program;
    setenv("VJP_REWRITES", rewrites, 1);
    if (vjp_compile(device, s->model.graph, results, count, &options, &program) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    unsetenv("VJP_REWRITES");
    return program;
}

static size_t size_of(const stepping *s, int parameter) {
    vjp_tensor t = vjp_graph_describe(s->model.graph, s->model.parameter[parameter].value);
    return (size_t)count_of(&t);
}

static void begin(stepping *s, const char *whole, const char *halves) {
    *s = (stepping){.made = {.struct_size = sizeof s->made}};
    build_little(&s->model, LAYERS, BATCH, VJP_BF16);
    if (vjp_graph_minimize(s->model.graph, s->model.loss, NULL, &s->made) != VJP_OK)
        fail_msg("%s", vjp_graph_error(s->model.graph));
    s->program[0] = compile(s, whole, s->made.results, s->made.count, NULL);
    s->program[1] = compile(s, halves, s->made.results, s->made.count, NULL);
    int32_t tokens[BATCH * CONTEXT], targets[BATCH * CONTEXT];
    fill_little(&(int64_t){BATCH}, false, 0, tokens, targets);
    for (int h = 0; h < 2; h++) {
        for (int i = 0; i < s->model.parameters; i++) {
            const model_parameter *p = &s->model.parameter[i];
            assert_int_equal(vjp_program_init_normal(s->program[h], p->value, p->centre, 0.1, 7), VJP_OK);
        }
        assert_int_equal(vjp_program_write(s->program[h], s->model.input, tokens, sizeof tokens), VJP_OK);
        assert_int_equal(vjp_program_write(s->program[h], s->model.target, targets, sizeof targets), VJP_OK);
    }
}

static void end(stepping *s) {
    vjp_program_destroy(s->program[0]);
    vjp_program_destroy(s->program[1]);
    model_free(&s->model);
}

/* Both have the same weights. None is left halfway between two numbers of bf16, which cast rounds otherwise. */
static void same_weights(const stepping *s) {
    for (int i = 0; i < s->model.parameters; i++) {
        size_t count = size_of(s, i);
        float *whole = malloc(2 * count * sizeof *whole), *joined = whole + count;
        vjp_value value = s->model.parameter[i].value;
        assert_int_equal(vjp_program_read(s->program[0], value, whole, count * 4), VJP_OK);
        assert_int_equal(vjp_program_read(s->program[1], value, joined, count * 4), VJP_OK);
        assert_memory_equal(whole, joined, count * 4);
        for (size_t k = 0; k < count; k++)
            if ((vjp_f32_to_bits(whole[k]) & 0xffff) == 0x8000) whole[k] = nextafterf(whole[k], 1);
        for (int h = 0; h < 2; h++)
            assert_int_equal(vjp_program_write(s->program[h], value, whole, count * 4), VJP_OK);
        free(whole);
    }
}

static void same_steps(const stepping *s, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; step++) {
        double loss[2];
        same_weights(s);
        for (int h = 0; h < 2; h++)
            if (vjp_program_step(s->program[h], &s->made, 0.01, step, &loss[h]) != VJP_OK)
                fail_msg("%s", vjp_error(device));
        assert_true(isfinite(loss[0]) && memcmp(&loss[0], &loss[1], sizeof loss[0]) == 0);
    }
    same_weights(s);
}

/* How many calls cast to bf16 what is kept. */
static int count_casts(const vjp_program *program) {
    int found = 0;
    for (int32_t k = 0; k < program->calls; k++) {
        const vjp_work *work = &program->call[k].work;
        bool kept = work->op == &vjp_op_cast && work->tensor[CAST_X]->data == program->persistent;
        found += kept && work->tensor[CAST_Y]->dtype == VJP_BF16;
    }
    return found;
}

static int count_halves(const vjp_program *program, const train_model *model) {
    int found = 0;
    for (int i = 0; i < model->parameters; i++)
        found += program->value[model->parameter[i].value].halves;
    return found;
}

static void a_model_takes_the_same_steps(void **unused) {
    (void)unused;
    static const char *const rewrites[][2] = {{"-all", "-all,+halves"}, {"+all,-halves", "+all"}};
    for (int all = 0; all < 2; all++) {
        stepping s;
        begin(&s, rewrites[all][0], rewrites[all][1]);
        /* All matrices of a layer, the embeddings and the head; the norms' weights are read in f32. */
        const int matrices = 7 * LAYERS + 2;
        assert_int_equal(count_halves(s.program[0], &s.model), 0);
        assert_int_equal(count_halves(s.program[1], &s.model), matrices);
        assert_true(count_casts(s.program[0]) >= matrices);
        /* Those of q, k and v are copied below each other. */
        assert_int_equal(count_casts(s.program[1]), all ? 3 * LAYERS : 0);
        assert_true(s.program[1]->report.live_bytes <= s.program[0]->report.live_bytes);
        same_steps(&s, 1, STEPS);
        end(&s);
    }
}

static void results_are_whole(void **unused) {
    (void)unused;
    stepping s;
    begin(&s, "-all", "-all,+halves");
    same_steps(&s, 1, 1);
    for (size_t i = 0; i < s.made.count; i++) { /* loss, norm and new weights */
        vjp_tensor t = vjp_graph_describe(s.model.graph, s.made.results[i]);
        size_t bytes = (size_t)count_of(&t) * vjp_dtype_size((vjp_dtype)t.dtype);
        char *both = malloc(2 * bytes);
        for (int h = 0; h < 2; h++)
            assert_int_equal(vjp_program_read(s.program[h], s.made.results[i], both + (size_t)h * bytes, bytes),
                             VJP_OK);
        assert_memory_equal(both, both + bytes, bytes);
        free(both);
    }
    vjp_tensor t;
    int refused = 0;
    for (int i = 0; i < s.model.parameters; i++) {
        vjp_status status = vjp_program_tensor(s.program[1], s.model.parameter[i].value, &t);
        if (status != VJP_OK) assert_non_null(strstr(vjp_error(device), "lies in halves"));
        refused += status == VJP_UNSUPPORTED;
    }
    assert_int_equal(refused, count_halves(s.program[1], &s.model));
    char found[256];
    assert_int_equal(vjp_program_trace(s.program[1], found, sizeof found), VJP_OK);
    assert_string_equal(found, "");
    end(&s);
}

/* A NaN in a weight is found where it is. */
static void a_nan_is_found(void **unused) {
    (void)unused;
    stepping s;
    begin(&s, "-all", "-all,+halves");
    int i = 0;
    while (!s.program[1]->value[s.model.parameter[i].value].halves)
        i++;
    size_t count = size_of(&s, i);
    float *weights = calloc(count, sizeof *weights);
    char found[256];
    weights[count - 1] = NAN;
    assert_int_equal(vjp_program_write(s.program[1], s.model.parameter[i].value, weights, count * 4), VJP_OK);
    assert_int_equal(vjp_program_trace(s.program[1], found, sizeof found), VJP_OK);
    char want[512];
    snprintf(want, sizeof want, "%s holds nan at element %zu before the run", s.model.parameter[i].name, count - 1);
    assert_string_equal(found, want);
    free(weights);
    end(&s);
}

/* A file that one program wrote is read by the other. */
static void files_are_whole(void **unused) {
    (void)unused;
    stepping s;
    begin(&s, "-all", "-all,+halves");
    same_steps(&s, 1, 2);
    static const char *const name[] = {"whole.safetensors", "halves.safetensors"};
    for (int h = 0; h < 2; h++)
        assert_int_equal(vjp_program_save(s.program[h], path_of(name[h])), VJP_OK);
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < s.model.parameters; i++)
            assert_int_equal(vjp_program_init_normal(s.program[h], s.model.parameter[i].value, 0, 1, 1), VJP_OK);
    for (int h = 0; h < 2; h++)
        if (vjp_program_load(s.program[h], path_of(name[1 - h])) != VJP_OK) fail_msg("%s", vjp_error(device));
    same_steps(&s, 3, 4);
    end(&s);
}

/* ---- What stays whole, and sharing ------------------------------------------------------------------- */

/* w is cast and multiplied; the value returned is a loss. */
static vjp_value lose(vjp_graph *g, vjp_value w, vjp_dtype dtype) {
    vjp_value y = vjp_graph_cast(g, w, dtype);
    return vjp_graph_mean(g, vjp_graph_cast(g, vjp_graph_mul(g, y, y, NULL), VJP_F32), WITH(mean, .axes = 1));
}

static bool in_halves(const vjp_graph *g, vjp_value w, const vjp_value *results, size_t count, bool asked) {
    const vjp_program_options options = {.struct_size = sizeof options, .halves = asked};
    vjp_program *program;
    setenv("VJP_REWRITES", "-all,+halves", 1);
    if (vjp_compile(device, g, results, count, &options, &program) != VJP_OK) fail_msg("%s", vjp_error(device));
    unsetenv("VJP_REWRITES");
    bool halves = program->value[w].halves;
    vjp_program_destroy(program);
    return halves;
}

static void others_stay_whole(void **unused) {
    (void)unused;
    const int64_t shape[] = {64};
    enum { USUAL, ALSO_READ, F16, SGD, NEW_READ, OLD_READ, UNASKED, CASES };
    for (int c = 0; c < CASES; c++) {
        vjp_graph *g = vjp_graph_create();
        vjp_value w = vjp_graph_parameter(g, "w", VJP_F32, 1, shape), results[8] = {0};
        vjp_value first = vjp_graph_cast(g, w, VJP_BF16), loss = lose(g, w, c == F16 ? VJP_F16 : VJP_BF16);
        if (c == ALSO_READ) loss = vjp_graph_add(g, loss, vjp_graph_mean(g, w, WITH(mean, .axes = 1)), NULL);
        const vjp_sgd_attributes sgd = {.struct_size = sizeof sgd};
        vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
        if (c == SGD) options.sgd = &sgd;
        vjp_minimize_result made = {.struct_size = sizeof made};
        if (vjp_graph_minimize(g, loss, &options, &made) != VJP_OK) fail_msg("%s", vjp_graph_error(g));
        memcpy(results, made.results, made.count * sizeof *results);
        size_t count = made.count;
        /* The weights after the step, and the old ones, which the step has overwritten. */
        if (c == NEW_READ) results[count++] = lose(g, results[made.count - 1], VJP_BF16);
        if (c == OLD_READ) results[count++] = vjp_graph_scale(g, first, NULL);
        assert_int_equal(in_halves(g, w, results, count, c != UNASKED), c == USUAL);
        vjp_graph_destroy(g);
    }
}

static void programs_share_halves(void **unused) {
    (void)unused;
    stepping s;
    begin(&s, "-all", "-all,+halves");
    same_steps(&s, 1, 1);
    float loss[2];
    vjp_program *forward[2];
    for (int h = 0; h < 2; h++) {
        /* Even where the program that shares does not ask for it. */
        forward[h] = compile(&s, "-all", &s.model.loss, 1, s.program[h]);
        assert_int_equal(count_halves(forward[h], &s.model), count_halves(s.program[h], &s.model));
        assert_int_equal(vjp_program_run(forward[h]), VJP_OK);
        assert_int_equal(vjp_program_read(forward[h], s.model.loss, &loss[h], sizeof loss[h]), VJP_OK);
        vjp_program_destroy(forward[h]);
    }
    assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
    /* What is whole stays whole, whatever the second program asks for. */
    forward[0] = compile(&s, "-all,+halves", &s.model.loss, 1, s.program[0]);
    assert_int_equal(count_halves(forward[0], &s.model), 0);
    vjp_program_destroy(forward[0]);
    int i = 0;
    while (!s.program[1]->value[s.model.parameter[i].value].halves)
        i++;
    vjp_value twice = vjp_graph_scale(s.model.graph, s.model.parameter[i].value, WITH(scale, .factor = 2));
    const vjp_program_options share = {.struct_size = sizeof share, .share = s.program[1]};
    assert_int_equal(vjp_compile(device, s.model.graph, &twice, 1, &share, &forward[1]), VJP_UNSUPPORTED);
    assert_null(forward[1]);
    assert_non_null(strstr(vjp_error(device), "which the shared program keeps in halves"));
    end(&s);
}

/* ---- The trainer ------------------------------------------------------------------------------------- */

static int64_t batch_rows = BATCH;
static const train_source source = {.context = &batch_rows, .fill = fill_little};

typedef struct training {
    train_model model;
    trainer *trainer;
    const safetensors_tensor *tensor[2]; /* of the model, of the optimiser */
    size_t count[2];
} training;

static void start(training *t, int64_t accumulate, double average) {
    const trainer_options options = {.steps = 9,
                                     .warmup = 1,
                                     .accumulate = accumulate,
                                     .rate = 1e-2,
                                     .last_rate = 0.1,
                                     .weight_decay = 0.1,
                                     .beta1 = 0.9,
                                     .beta2 = 0.95,
                                     .eps = 1e-8,
                                     .max_norm = 1,
                                     .average = average,
                                     .seed = 5};
    char error[TRAIN_ERROR];
    setenv("VJP_REWRITES", "+all", 1);
    build_little(&t->model, LAYERS, BATCH, VJP_BF16);
    t->trainer = trainer_create(device, &t->model, &options, error);
    if (!t->trainer) fail_msg("%s", error);
}

static void look(training *t) {
    char error[TRAIN_ERROR];
    if (!trainer_tensors(t->trainer, &t->tensor[0], &t->count[0], &t->tensor[1], &t->count[1], error))
        fail_msg("%s", error);
}

static void take(training *t, int64_t first, int64_t last) {
    char error[TRAIN_ERROR];
    for (int64_t step = first; step <= last; step++) {
        trainer_step_result result;
        double loss;
        if (!trainer_step(t->trainer, &source, step, &result, error)) fail_msg("%s", error);
        if (!trainer_evaluate(t->trainer, &source, 1, &loss, error)) fail_msg("%s", error);
    }
    look(t);
}

static void stop(training *t) {
    trainer_destroy(t->trainer);
    model_free(&t->model);
    unsetenv("VJP_REWRITES");
}

/* Five steps, and two and three with a checkpoint between them, give the same bits. */
static void a_trainer_goes_on_with_the_same_bits(void **unused) {
    (void)unused;
    for (int c = 0; c < 3; c++) { /* a whole batch, parts of a batch, averages, with which weights stay whole */
        training all, first, second;
        char error[TRAIN_ERROR];
        start(&all, c == 1 ? 2 : 1, c == 2 ? 0.5 : 0);
        vjp_program *programs[TRAINER_PROGRAMS];
        trainer_programs(all.trainer, programs);
        assert_int_equal(count_halves(programs[0], &all.model) > 0, c < 2);
        take(&all, 1, 5);
        start(&first, c == 1 ? 2 : 1, c == 2 ? 0.5 : 0);
        take(&first, 1, 2);
        start(&second, c == 1 ? 2 : 1, c == 2 ? 0.5 : 0);
        for (int k = 0; k < 2; k++) {
            for (size_t i = 0; i < first.count[k]; i++)
                if (!trainer_load(second.trainer, &first.tensor[k][i], error)) fail_msg("%s", error);
            if (k == 0 && !trainer_begin_average(second.trainer, error)) fail_msg("%s", error);
        }
        take(&second, 3, 5);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(all.count[k], second.count[k]);
            for (size_t i = 0; i < all.count[k]; i++) {
                size_t elements = 1;
                for (int axis = 0; axis < all.tensor[k][i].ndim; axis++)
                    elements *= (size_t)all.tensor[k][i].shape[axis];
                assert_memory_equal(all.tensor[k][i].data, second.tensor[k][i].data, elements * sizeof(float));
            }
        }
        stop(&all);
        stop(&first);
        stop(&second);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_are_the_whole),
        cmocka_unit_test(steps_have_the_same_bits),
        cmocka_unit_test(only_f32_has_halves),
        cmocka_unit_test(a_model_takes_the_same_steps),
        cmocka_unit_test(results_are_whole),
        cmocka_unit_test(a_nan_is_found),
        cmocka_unit_test_setup_teardown(files_are_whole, make_scratch, remove_scratch),
        cmocka_unit_test(others_stay_whole),
        cmocka_unit_test(programs_share_halves),
        cmocka_unit_test(a_trainer_goes_on_with_the_same_bits),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
