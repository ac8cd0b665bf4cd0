/* SPDX-License-Identifier: MIT */
/*
 * The trainer: its step against AdamW done by hand in double; parts of a batch against the whole batch; the schedule;
 * what it says of a loss that is no number, and that such a step changes nothing; steps that are queued ahead; names
 * and shapes that it does not load.
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

#include "little_llama.h"
#include "merging.h"
#include "on_cpu.h"
#include "train/trainer/trainer.h"

/* ---- A model and its options ---------------------------------------------------------------------------- */

static const trainer_options usual = {.steps = 10,
                                      .warmup = 2,
                                      .accumulate = 1,
                                      .rate = 1e-2,
                                      .last_rate = 0.1,
                                      .weight_decay = 0.1,
                                      .max_norm = 0.5,
                                      .beta1 = 0.9,
                                      .beta2 = 0.95,
                                      .eps = 1e-8,
                                      .seed = 5};

static trainer *create(train_model *model, const trainer_options *options) {
    char error[TRAIN_ERROR];
    trainer *t = trainer_create(device, model, options, error);
    if (!t) fail_msg("%s", error);
    return t;
}

typedef struct tensors {
    const safetensors_tensor *model, *optimiser;
    size_t models, optimisers;
} tensors;

static tensors look(trainer *t) {
    tensors now;
    char error[TRAIN_ERROR];
    if (!trainer_tensors(t, &now.model, &now.models, &now.optimiser, &now.optimisers, error)) fail_msg("%s", error);
    assert_int_equal(now.optimisers, 2 * now.models);
    return now;
}

static int64_t count_of(const safetensors_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* ---- A step by hand ---------------------------------------------------------------------------------- */

/* Everything in double, one block a parameter: weight, moments, gradient. */
typedef struct by_hand {
    double *w, *m, *v, *g;
    int64_t count;
} by_hand;

static by_hand *copy_of(const tensors *now) {
    by_hand *all = calloc(now->models, sizeof *all);
    for (size_t p = 0; p < now->models; p++) {
        int64_t count = all[p].count = count_of(&now->model[p]);
        all[p].w = calloc(4 * (size_t)count, sizeof(double));
        all[p].m = all[p].w + count;
        all[p].v = all[p].m + count;
        all[p].g = all[p].v + count;
        for (int64_t i = 0; i < count; i++)
            all[p].w[i] = ((const float *)now->model[p].data)[i];
    }
    return all;
}

/* The gradients of a batch at these weights, from a program of the test's own. */
static void differentiate(by_hand *all, uint64_t part, int64_t batch) {
    train_model model;
    build_little(&model, 2, batch, VJP_F32);
    size_t count = (size_t)model.parameters;
    vjp_value *wrt = calloc(2 * count, sizeof *wrt), *gradient = wrt + count;
    for (size_t p = 0; p < count; p++)
        wrt[p] = model.parameter[p].value;
    vjp_graph_grad(model.graph, model.loss, wrt, count, NULL, 0, gradient);
    vjp_program *program;
    if (vjp_compile(device, model.graph, gradient, count, NULL, &program) != VJP_OK) fail_msg("%s", vjp_error(device));
    vjp_tensor input, target, at;
    assert_int_equal(vjp_program_tensor(program, model.input, &input), VJP_OK);
    assert_int_equal(vjp_program_tensor(program, model.target, &target), VJP_OK);
    fill_little(&batch, false, part, (char *)input.data + input.offset,
                (int32_t *)((char *)target.data + target.offset));
    for (size_t p = 0; p < count; p++) {
        assert_int_equal(vjp_program_tensor(program, wrt[p], &at), VJP_OK);
        for (int64_t i = 0; i < all[p].count; i++)
            ((float *)((char *)at.data + at.offset))[i] = (float)all[p].w[i];
    }
    assert_int_equal(vjp_program_run(program), VJP_OK);
    for (size_t p = 0; p < count; p++) {
        assert_int_equal(vjp_program_tensor(program, gradient[p], &at), VJP_OK);
        for (int64_t i = 0; i < all[p].count; i++)
            all[p].g[i] = ((const float *)((const char *)at.data + at.offset))[i];
    }
    vjp_program_destroy(program);
    free(wrt);
    model_free(&model);
}

/* The decoupled step of Loshchilov and Hutter; returns the norm of the gradients. */
static double adamw(by_hand *all, const train_model *model, const trainer_options *o, int step, double rate) {
    double squares = 0;
    for (int p = 0; p < model->parameters; p++)
        for (int64_t i = 0; i < all[p].count; i++)
            squares += all[p].g[i] * all[p].g[i];
    double norm = sqrt(squares), scale = norm > o->max_norm ? o->max_norm / norm : 1;
    for (int p = 0; p < model->parameters; p++) {
        double decay = strstr(model->parameter[p].name, "norm") ? 0 : o->weight_decay;
        for (int64_t i = 0; i < all[p].count; i++) {
            double g = scale * all[p].g[i], *m = &all[p].m[i], *v = &all[p].v[i], *w = &all[p].w[i];
            *m = o->beta1 * *m + (1 - o->beta1) * g;
            *v = o->beta2 * *v + (1 - o->beta2) * g * g;
            double m_hat = *m / (1 - pow(o->beta1, step)), v_hat = *v / (1 - pow(o->beta2, step));
            *w -= rate * (m_hat / (sqrt(v_hat) + o->eps) + decay * *w);
        }
    }
    return norm;
}

static void expect_near(const char *name, const safetensors_tensor *got, const double *wanted, double bound) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count_of(got); i++) {
        double d = ((const float *)got->data)[i] - wanted[i];
        difference += d * d;
        size += wanted[i] * wanted[i];
    }
    if (!(sqrt(difference) <= bound * sqrt(size))) fail_msg("%s is %.3g off", name, sqrt(difference / size));
}

static void a_step_is_adamw(void **unused) {
    (void)unused;
    int64_t batch = 2;
    train_model model;
    build_little(&model, 2, batch, VJP_F32);
    trainer *t = create(&model, &usual);
    const train_source source = {.context = &batch, .fill = fill_little};
    tensors now = look(t);
    by_hand *all = copy_of(&now);
    static const double rates[] = {0.5e-2, 1e-2, 0.1e-2 + 0.9e-2 * 0.5 * (1 + 0.92387953251128674)};
    for (int step = 1; step <= 3; step++) {
        char error[TRAIN_ERROR];
        trainer_step_result result;
        differentiate(all, (uint64_t)step - 1, batch);
        double norm = adamw(all, &model, &usual, step, rates[step - 1]);
        if (!trainer_step(t, &source, step, &result, error)) fail_msg("%s", error);
        assert_true(fabs(result.rate - rates[step - 1]) < 1e-9);
        assert_true(norm > usual.max_norm); /* so it is clipped */
        assert_true(fabs(result.norm - norm) <= 1e-6 * norm);
        now = look(t);
        for (size_t p = 0; p < now.models; p++) {
            assert_string_equal(now.model[p].name, model.parameter[p].name);
            assert_non_null(strstr(now.optimiser[2 * p].name, ".exp_avg"));
            assert_non_null(strstr(now.optimiser[2 * p + 1].name, ".exp_avg_sq"));
            expect_near(now.model[p].name, &now.model[p], all[p].w, 1e-6);
            expect_near(now.optimiser[2 * p].name, &now.optimiser[2 * p], all[p].m, 1e-6);
            expect_near(now.optimiser[2 * p + 1].name, &now.optimiser[2 * p + 1], all[p].v, 1e-6);
            /* The next gradient is taken where the trainer is. */
            for (int64_t i = 0; i < all[p].count; i++)
                all[p].w[i] = ((const float *)now.model[p].data)[i];
        }
    }
    for (size_t p = 0; p < now.models; p++)
        free(all[p].w);
    free(all);
    trainer_destroy(t);
    model_free(&model);
}

/* ---- Parts of a batch -------------------------------------------------------------------------------- */

static void expect_a_batch(int64_t accumulate, int64_t shards) {
    int64_t batch[2] = {2, 8};
    trainer_options options[2] = {usual, usual};
    options[0].accumulate = accumulate;
    options[0].shards = shards;
    options[0].max_norm = options[1].max_norm = 0;
    train_model model[2];
    trainer *t[2];
    tensors now[2];
    trainer_step_result result[2];
    double validation[2];
    for (int i = 0; i < 2; i++) {
        build_little(&model[i], 2, batch[i], VJP_F32);
        t[i] = create(&model[i], &options[i]);
        const train_source source = {.context = &batch[i], .fill = fill_little, .validation_parts = 8 / batch[i]};
        char error[TRAIN_ERROR];
        /* Twice: the first part of a step must not add to the gradients of the step before. */
        for (int step = 1; step <= 2; step++)
            if (!trainer_step(t[i], &source, step, &result[i], error)) fail_msg("%s", error);
        assert_true(trainer_evaluate(t[i], &source, 1000, &validation[i], error));
        now[i] = look(t[i]);
    }
    assert_true(fabs(result[0].loss - result[1].loss) < 1e-5 * result[1].loss);
    assert_true(fabs(result[0].norm - result[1].norm) < 1e-5 * result[1].norm);
    assert_true(fabs(validation[0] - validation[1]) < 1e-5 * validation[1]);
    for (size_t p = 0; p < now[0].models; p++) {
        int64_t count = count_of(&now[1].optimiser[2 * p]);
        double *wanted = calloc((size_t)count, sizeof *wanted);
        for (int64_t i = 0; i < count; i++)
            wanted[i] = ((const float *)now[1].optimiser[2 * p].data)[i];
        expect_near(now[0].optimiser[2 * p].name, &now[0].optimiser[2 * p], wanted, 1e-5);
        free(wanted);
    }
    for (int i = 0; i < 2; i++) {
        trainer_destroy(t[i]);
        model_free(&model[i]);
    }
}

static void parts_are_a_batch(void **unused) {
    (void)unused;
    expect_a_batch(4, 1);
    expect_a_batch(1, 4);
    expect_a_batch(2, 2);
}

static void the_rate_rises_and_falls(void **unused) {
    (void)unused;
    static const trainer_options o = {.steps = 110, .warmup = 10, .rate = 2, .last_rate = 0.25};
    static const struct {
        int64_t step;
        double rate;
    } rows[] = {{1, 0.2}, {5, 1}, {10, 2}, {60, 1.25}, {110, 0.5}, {500, 0.5}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        assert_true(fabs(trainer_rate(&o, rows[i].step) - rows[i].rate) < 1e-12);
    for (int64_t step = 11; step < 110; step++)
        assert_true(trainer_rate(&o, step + 1) < trainer_rate(&o, step));
    const trainer_options cold = {.steps = 1, .rate = 1, .last_rate = 0.5};
    assert_true(trainer_rate(&cold, 1) == 0.5);
}

/* ---- What is no number ------------------------------------------------------------------------------- */

static void set(trainer *t, const safetensors_tensor *from, int64_t at, float value) {
    char error[TRAIN_ERROR];
    int64_t count = count_of(from);
    float *data = malloc((size_t)count * sizeof *data);
    memcpy(data, from->data, (size_t)count * sizeof *data);
    data[at] = value;
    safetensors_tensor changed = *from;
    changed.data = data;
    if (!trainer_load(t, &changed, error)) fail_msg("%s", error);
    free(data);
}

static const safetensors_tensor *named(const tensors *now, const char *name) {
    for (size_t p = 0; p < now->models; p++)
        if (strcmp(now->model[p].name, name) == 0) return &now->model[p];
    fail_msg("no tensor %s", name);
    return NULL;
}

/* The step stops, names where the first NaN was made, and changes neither weights nor moments. */
static void a_nan_is_named(void **unused) {
    (void)unused;
    static const struct {
        const char *tensor;
        float value;
        const char *what, *where;
    } rows[] = {
        {"model.norm.weight", NAN, "the loss is nan", "model.norm.weight holds nan at element 3 before the run"},
        {"model.layers.0.self_attn.q_proj.weight", 3e38f, "the loss is nan",
         "model.layers.0.linear (linear.forward, call 3 of "},
        {"model.layers.1.input_layernorm.weight", 3e38f, "the loss is nan",
         "model.layers.1.rms_norm (rms_norm.forward, call 17 of "},
        /* Gradients that are numbers, but not the sum of their squares. */
        {"lm_head.weight", 1e25f, "the norm of the gradients is inf", "sum_squares (sum_squares.forward, call "},
    };
    static const int64_t splits[][2] = {{1, 1}, {2, 1}, {1, 2}}; /* accumulate, shards */
    for (int split = 0; split < 3; split++)
        for (size_t row = 0; row < sizeof rows / sizeof rows[0]; row++) {
            int64_t batch = 2;
            trainer_options options = usual;
            options.accumulate = splits[split][0];
            options.shards = splits[split][1];
            train_model model;
            build_little(&model, 2, batch, VJP_F32);
            trainer *t = create(&model, &options);
            const train_source source = {.context = &batch, .fill = fill_little};
            char error[TRAIN_ERROR] = "";
            trainer_step_result result;
            assert_true(trainer_step(t, &source, 1, &result, error));
            tensors now = look(t);
            set(t, named(&now, rows[row].tensor), 3, rows[row].value);
            now = look(t);
            by_hand *before = copy_of(&now);
            bool ok = trainer_step(t, &source, 2, &result, error);
            if (ok) fail_msg("%s: a step was taken", rows[row].tensor);
            if (strncmp(error, "step 2: ", 8) || !strstr(error, rows[row].what) || !strstr(error, rows[row].where) ||
                strstr(error, ".grad holds"))
                fail_msg("%s: \"%s\"", rows[row].tensor, error);
            now = look(t);
            for (size_t p = 0; p < now.models; p++) {
                for (int64_t i = 0; i < before[p].count; i++) {
                    float is = ((const float *)now.model[p].data)[i], was = (float)before[p].w[i];
                    assert_true(is == was || (isnan(is) && isnan(was)));
                    assert_true(isfinite(((const float *)now.optimiser[2 * p].data)[i]));
                }
                free(before[p].w);
            }
            free(before);
            trainer_destroy(t);
            model_free(&model);
        }
}

/* ---- Steps in the queue ------------------------------------------------------------------------------ */

/* As fill_little(), without the last token, which only part 1 has. */
static void fill_rarely(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    fill_little(context, validation, part, input, target);
    int64_t batch = *(int64_t *)context;
    for (int64_t i = 0; i < batch * CONTEXT; i++)
        if (((int32_t *)input)[i] == VOCABULARY - 1) ((int32_t *)input)[i] = 0;
    if (part == 1) ((int32_t *)input)[3] = VOCABULARY - 1;
}

/* Whether weights and moments still have the bits of `before`. */
static bool is_unchanged(trainer *t, const float *before) {
    tensors now = look(t);
    bool same = true;
    for (size_t i = 0; i < now.models + now.optimisers; i++) {
        const safetensors_tensor *tensor = i < now.models ? &now.model[i] : &now.optimiser[i - now.models];
        same = same && memcmp(tensor->data, before, (size_t)count_of(tensor) * sizeof *before) == 0;
        before += count_of(tensor);
    }
    return same;
}

static float *bits_of(trainer *t) {
    tensors now = look(t);
    size_t count = 0;
    for (size_t p = 0; p < now.models; p++)
        count += 3 * (size_t)count_of(&now.model[p]);
    float *bits = calloc(count, sizeof *bits), *to = bits;
    for (size_t i = 0; i < now.models + now.optimisers; i++) {
        const safetensors_tensor *tensor = i < now.models ? &now.model[i] : &now.optimiser[i - now.models];
        memcpy(to, tensor->data, (size_t)count_of(tensor) * sizeof *to);
        to += count_of(tensor);
    }
    return bits;
}

/* Step 2 is bad and step 3, which is already queued, is not: neither changes anything, and step 2 is blamed. */
static void a_bad_step_suppresses_the_next(void **unused) {
    (void)unused;
    for (int parts = 1; parts <= 2; parts++) {
        int64_t batch = 2;
        trainer_options options = usual;
        options.accumulate = parts;
        train_model model;
        build_little(&model, 2, batch, VJP_F32);
        trainer *t = create(&model, &options);
        const train_source source = {.context = &batch, .fill = fill_rarely};
        char error[TRAIN_ERROR] = "";
        trainer_step_result result;
        if (parts == 1 && !trainer_step(t, &source, 1, &result, error)) fail_msg("%s", error);
        tensors now = look(t);
        const safetensors_tensor *table = named(&now, "model.embed_tokens.weight");
        set(t, table, count_of(table) - 1, NAN);
        float *before = bits_of(t);
        int64_t bad = parts == 1 ? 2 : 1;
        assert_true(trainer_queue(t, &source, bad, error));
        assert_true(trainer_queue(t, &source, bad + 1, error));
        assert_false(trainer_queue(t, &source, bad + 2, error)); /* two are the most */
        assert_false(trainer_collect(t, &source, &result, error));
        char says[64];
        snprintf(says, sizeof says, "step %d: the loss is nan; where it first appears: ", (int)bad);
        if (strncmp(error, says, strlen(says)) != 0) fail_msg("\"%s\"", error);
        assert_true(is_unchanged(t, before));
        assert_false(trainer_collect(t, &source, &result, error));
        /* The next good step is taken again. */
        if (!trainer_step(t, &source, bad + 1, &result, error)) fail_msg("%s", error);
        assert_false(is_unchanged(t, before));
        free(before);
        trainer_destroy(t);
        model_free(&model);
    }
}

enum { STEPS = 10 };

/* The losses and norms of ten steps, and the weights and moments after them. With `ahead` two are always queued. */
static float *train(const trainer_options *options, vjp_dtype dtype, bool ahead, double numbers[2 * STEPS]) {
    int64_t batch = 2;
    char error[TRAIN_ERROR];
    train_model model;
    build_little(&model, 2, batch, dtype);
    trainer *t = create(&model, options);
    assert_int_equal(trainer_depth(t), ahead ? 2 : 1);
    const train_source source = {.context = &batch, .fill = fill_little};
    for (int step = 1; step <= STEPS; step++) {
        trainer_step_result result;
        bool ok = (ahead && step > 1) || trainer_queue(t, &source, step, error);
        if (ahead && step < STEPS) ok = ok && trainer_queue(t, &source, step + 1, error);
        if (!ok || !trainer_collect(t, &source, &result, error)) fail_msg("%s", error);
        numbers[2 * step - 2] = result.loss;
        numbers[2 * step - 1] = result.norm;
    }
    float *bits = bits_of(t);
    trainer_destroy(t);
    model_free(&model);
    return bits;
}

/* Calls that run at once, and steps that are queued ahead, give the bits of one after the other. */
static void merged_is_separate(void **unused) {
    (void)unused;
    static const vjp_dtype dtypes[] = {VJP_F32, VJP_BF16};
    for (int parts = 1; parts <= 3; parts += 2)
        for (int d = 0; d < 2; d++) {
            trainer_options options = usual;
            options.accumulate = parts;
            double numbers[2][2 * STEPS];
            const vjp_backend *own = device->backend;
            vjp_backend backend;
            float *separate = train(&options, dtypes[d], false, numbers[0]);
            merge_calls(device, &backend);
            float *merged = train(&options, dtypes[d], true, numbers[1]);
            device->backend = own;
            train_model model;
            build_little(&model, 2, 2, dtypes[d]);
            assert_memory_equal(numbers[0], numbers[1], sizeof numbers[0]);
            assert_memory_equal(separate, merged, 3 * (size_t)model_size(&model) * sizeof *merged);
            model_free(&model);
            free(separate);
            free(merged);
        }
}

static void other_tensors_are_refused(void **unused) {
    (void)unused;
    train_model model;
    build_little(&model, 2, 2, VJP_F32);
    trainer *t = create(&model, &usual);
    static const float zeros[16 * VOCABULARY] = {0};
    const struct {
        safetensors_tensor tensor;
        const char *says;
    } rows[] = {
        {{.name = "model.norm.bias", .dtype = VJP_F32, .ndim = 1, .shape = {16}},
         "the model has no tensor model.norm.bias"},
        {{.name = "model.norm.weight.exp", .dtype = VJP_F32, .ndim = 1, .shape = {16}}, "the model has no tensor"},
        {{.name = "", .dtype = VJP_F32, .ndim = 1, .shape = {16}}, "the model has no tensor"},
        {{.name = "model.norm.weight", .dtype = VJP_F32, .ndim = 1, .shape = {15}}, "has another shape"},
        {{.name = "model.norm.weight", .dtype = VJP_F32, .ndim = 2, .shape = {16, 1}}, "has another shape"},
        {{.name = "model.norm.weight", .dtype = VJP_F32, .ndim = 0}, "has another shape"},
        {{.name = "model.norm.weight", .type = "I32", .dtype = VJP_I32, .ndim = 1, .shape = {16}},
         "is I32 in the file"},
        {{.name = "model.norm.weight.exp_avg", .type = "F64", .dtype = VJP_F64, .ndim = 1, .shape = {16}}, "is F64"},
        {{.name = "lm_head.weight.exp_avg_sq", .dtype = VJP_F32, .ndim = 2, .shape = {16, VOCABULARY}},
         "another shape"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char error[TRAIN_ERROR] = "";
        safetensors_tensor tensor = rows[i].tensor;
        tensor.data = zeros;
        assert_false(trainer_load(t, &tensor, error));
        if (!strstr(error, rows[i].says)) fail_msg("%s: \"%s\"", tensor.name, error);
    }
    trainer_destroy(t);
    model_free(&model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_is_adamw),
        cmocka_unit_test(parts_are_a_batch),
        cmocka_unit_test(the_rate_rises_and_falls),
        cmocka_unit_test(a_nan_is_named),
        cmocka_unit_test(a_bad_step_suppresses_the_next),
        cmocka_unit_test(merged_is_separate),
        cmocka_unit_test(other_tensors_are_refused),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
