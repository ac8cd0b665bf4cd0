/* SPDX-License-Identifier: MIT */
/*
 * What the trainer does beside AdamW: schedules against a table; which parameters Muon trains; the average of the
 * weights against the sum in double, and its validation; resuming from a checkpoint's tensors, and calls that are
 * merged, bit for bit; a step that is suppressed.
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

enum { BATCH = 2, STEPS = 6 };

/* ---- A model, its data, and its tensors ---------------------------------------------------------------- */

static int64_t batch_rows = BATCH;
static const train_source source = {.context = &batch_rows, .fill = fill_little, .validation_parts = 3};

static trainer_options options_of(trainer_optimiser optimiser, int64_t parts, double average) {
    return (trainer_options){.steps = 10,
                             .warmup = 2,
                             .accumulate = parts,
                             .rate = 1e-2,
                             .last_rate = 0.1,
                             .weight_decay = 0.1,
                             .max_norm = 0.5,
                             .beta1 = 0.9,
                             .beta2 = 0.95,
                             .eps = 1e-8,
                             .seed = 5,
                             .optimiser = optimiser,
                             .schedule = TRAINER_LINEAR,
                             .momentum = 0.95,
                             .average = average};
}

typedef struct tensors {
    const safetensors_tensor *model, *optimiser;
    size_t models, optimisers;
} tensors;

static tensors look(trainer *t) {
    tensors now;
    char error[TRAIN_ERROR];
    if (!trainer_tensors(t, &now.model, &now.models, &now.optimiser, &now.optimisers, error)) fail_msg("%s", error);
    return now;
}

static trainer *create(train_model *model, const trainer_options *options) {
    char error[TRAIN_ERROR];
    trainer *t = trainer_create(device, model, options, error);
    if (!t) fail_msg("%s", error);
    return t;
}

static void take_steps(trainer *t, int first, int last) {
    char error[TRAIN_ERROR];
    trainer_step_result result;
    for (int step = first; step <= last; step++)
        if (!trainer_step(t, &source, step, &result, error)) fail_msg("%s", error);
}

static size_t count_of(const safetensors_tensor *tensor) {
    size_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= (size_t)tensor->shape[i];
    return count;
}

static const float *find(const tensors *now, const char *name) {
    for (size_t i = 0; i < now->models + now->optimisers; i++) {
        const safetensors_tensor *one = i < now->models ? &now->model[i] : &now->optimiser[i - now->models];
        if (strcmp(one->name, name) == 0) return one->data;
    }
    return NULL;
}

/* A copy of everything; equal lists have equal bits. */
static float *bits_of(trainer *t, size_t *bytes) {
    tensors now = look(t);
    float *bits = NULL;
    size_t used = 0;
    for (size_t i = 0; i < now.models + now.optimisers; i++) {
        const safetensors_tensor *one = i < now.models ? &now.model[i] : &now.optimiser[i - now.models];
        bits = realloc(bits, (used + count_of(one)) * sizeof *bits);
        memcpy(bits + used, one->data, count_of(one) * sizeof *bits);
        used += count_of(one);
    }
    *bytes = used * sizeof *bits;
    return bits;
}

/* ---- Schedules --------------------------------------------------------------------------------------- */

static void schedules(void **unused) {
    (void)unused;
    static const struct {
        trainer_schedule schedule;
        int64_t step;
        double rate;
    } rows[] = {
        {TRAINER_COSINE, 5, 1},     {TRAINER_COSINE, 60, 1.25},  {TRAINER_COSINE, 110, 0.5}, {TRAINER_LINEAR, 5, 1},
        {TRAINER_LINEAR, 10, 2},    {TRAINER_LINEAR, 35, 1.625}, {TRAINER_LINEAR, 60, 1.25}, {TRAINER_LINEAR, 110, 0.5},
        {TRAINER_LINEAR, 200, 0.5}, {TRAINER_WSD, 5, 1},         {TRAINER_WSD, 11, 2},       {TRAINER_WSD, 88, 2},
        {TRAINER_WSD, 99, 1.25},    {TRAINER_WSD, 110, 0.5},     {TRAINER_WSD, 200, 0.5},    {TRAINER_CONSTANT, 5, 1},
        {TRAINER_CONSTANT, 11, 2},  {TRAINER_CONSTANT, 110, 2},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const trainer_options o = {
            .steps = 110, .warmup = 10, .rate = 2, .last_rate = 0.25, .schedule = rows[i].schedule, .decay_share = 0.2};
        double rate = trainer_rate(&o, rows[i].step);
        if (fabs(rate - rows[i].rate) > 1e-12) fail_msg("row %zu: %.17g", i, rate);
    }
}

/* ---- Optimisers -------------------------------------------------------------------------------------- */

static void states_of_each_parameter(void **unused) {
    (void)unused;
    static const struct {
        trainer_optimiser optimiser;
        const char *name;
        bool is_there;
    } rows[] = {
        {TRAINER_ADAMW, "model.layers.0.mlp.up_proj.weight.exp_avg_sq", true},
        {TRAINER_ADAMW, "model.layers.0.mlp.up_proj.weight.momentum_buffer", false},
        {TRAINER_MUON, "model.layers.0.mlp.up_proj.weight.momentum_buffer", true},
        {TRAINER_MUON, "model.layers.0.mlp.up_proj.weight.exp_avg", false},
        {TRAINER_MUON, "model.layers.0.self_attn.o_proj.weight.momentum_buffer", true},
        {TRAINER_MUON, "model.embed_tokens.weight.exp_avg", true},
        {TRAINER_MUON, "model.embed_tokens.weight.momentum_buffer", false},
        {TRAINER_MUON, "lm_head.weight.exp_avg", true},
        {TRAINER_MUON, "model.norm.weight.exp_avg_sq", true},
        {TRAINER_SGD, "lm_head.weight.momentum_buffer", true},
        {TRAINER_SGD, "model.norm.weight.exp_avg", false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const trainer_options options = options_of(rows[i].optimiser, 1, 0);
        train_model model;
        build_little(&model, 1, BATCH, VJP_F32);
        trainer *t = create(&model, &options);
        tensors now = look(t);
        if ((find(&now, rows[i].name) != NULL) != rows[i].is_there) fail_msg("row %zu: %s", i, rows[i].name);
        char name[TRAINER_NAME];
        for (size_t k = 0; k < now.optimisers; k++) {
            assert_true(trainer_state_name(t, k, name));
            assert_string_equal(name, now.optimiser[k].name);
        }
        assert_false(trainer_state_name(t, now.optimisers, name));
        trainer_destroy(t);
        model_free(&model);
    }
}

static void muon_needs_hidden_matrices(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR] = "";
    const trainer_options options = options_of(TRAINER_MUON, 1, 0);
    train_model model;
    build_little(&model, 0, BATCH, VJP_F32);
    assert_null(trainer_create(device, &model, &options, error));
    assert_non_null(strstr(error, "this model has none"));
    model_free(&model);
}

/* ---- Averages ---------------------------------------------------------------------------------------- */

/* The mean of the weights after steps 1 to n, in which step s counts d^(n - s). */
static void averages_are_sums(void **unused) {
    (void)unused;
    static const char name[] = "model.layers.0.mlp.up_proj.weight",
                      trained[] = "model.layers.0.mlp.up_proj.weight.trained";
    enum { COUNT = 16 * 20 };
    const double d = 0.8;
    const trainer_options options = options_of(TRAINER_ADAMW, 1, d), plain = options_of(TRAINER_ADAMW, 1, 0);
    train_model model, plain_model;
    build_little(&model, 1, BATCH, VJP_F32);
    build_little(&plain_model, 1, BATCH, VJP_F32);
    trainer *t = create(&model, &options), *other = create(&plain_model, &plain);
    tensors now = look(t);
    assert_memory_equal(find(&now, name), find(&now, trained), COUNT * sizeof(float)); /* before the first step */
    double sum[COUNT] = {0}, weight = 0;
    for (int step = 1; step <= STEPS; step++) {
        take_steps(t, step, step);
        take_steps(other, step, step);
        now = look(t);
        const float *average = find(&now, name), *w = find(&now, trained);
        weight = d * weight + 1;
        for (int i = 0; i < COUNT; i++) {
            sum[i] = d * sum[i] + w[i];
            if (fabs(average[i] - sum[i] / weight) > 1e-7) fail_msg("step %d: %g", step, average[i] - sum[i] / weight);
        }
        tensors theirs = look(other);
        assert_memory_equal(w, find(&theirs, name), COUNT * sizeof *w); /* averaging changes no weight */
    }
    trainer_destroy(t);
    trainer_destroy(other);
    model_free(&model);
    model_free(&plain_model);
}

/* Validation is that of a model with the averaged weights, and leaves everything as it was. */
static void averages_are_validated(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR];
    for (int64_t parts = 1; parts <= 2; parts++) {
        const trainer_options options = options_of(TRAINER_MUON, parts, 0.9), plain = options_of(TRAINER_SGD, 1, 0);
        train_model model, plain_model;
        build_little(&model, 1, BATCH, VJP_F32);
        build_little(&plain_model, 1, BATCH, VJP_F32);
        trainer *t = create(&model, &options), *other = create(&plain_model, &plain);
        take_steps(t, 1, 3);
        size_t bytes, after;
        float *before = bits_of(t, &bytes);
        double loss, expected;
        if (!trainer_evaluate(t, &source, 3, &loss, error)) fail_msg("%s", error);
        float *now = bits_of(t, &after);
        assert_int_equal(bytes, after);
        assert_memory_equal(before, now, bytes);
        tensors all = look(t);
        for (size_t i = 0; i < all.models; i++)
            if (!trainer_load(other, &all.model[i], error)) fail_msg("%s", error);
        if (!trainer_evaluate(other, &source, 3, &expected, error)) fail_msg("%s", error);
        assert_true(loss == expected);
        free(before);
        free(now);
        trainer_destroy(t);
        trainer_destroy(other);
        model_free(&model);
        model_free(&plain_model);
    }
}

/* ---- The same bits ----------------------------------------------------------------------------------- */

static void resume_and_merge(void **unused) {
    (void)unused;
    static const trainer_optimiser optimisers[] = {TRAINER_ADAMW, TRAINER_MUON, TRAINER_SGD};
    for (int k = 0; k < 6; k++) {
        char error[TRAIN_ERROR];
        const trainer_options options = options_of(optimisers[k / 2], 1 + k % 2, 0.7);
        train_model model[3];
        trainer *t[3];
        size_t bytes[3];
        float *bits[3];
        for (int i = 0; i < 2; i++) {
            build_little(&model[i], 2, BATCH, VJP_F32);
            t[i] = create(&model[i], &options);
        }
        take_steps(t[0], 1, 2);
        tensors half = look(t[0]); /* as job.c loads a checkpoint */
        for (size_t i = 0; i < half.models; i++)
            if (!trainer_load(t[1], &half.model[i], error)) fail_msg("%s", error);
        if (!trainer_begin_average(t[1], error)) fail_msg("%s", error);
        for (size_t i = 0; i < half.optimisers; i++)
            if (!trainer_load(t[1], &half.optimiser[i], error)) fail_msg("%s", error);
        take_steps(t[0], 3, STEPS);
        take_steps(t[1], 3, STEPS);
        const vjp_backend *own = device->backend;
        vjp_backend backend;
        merge_calls(device, &backend);
        build_little(&model[2], 2, BATCH, VJP_F32);
        t[2] = create(&model[2], &options);
        take_steps(t[2], 1, STEPS);
        for (int i = 2; i >= 0; i--) {
            bits[i] = bits_of(t[i], &bytes[i]);
            trainer_destroy(t[i]);
            model_free(&model[i]);
            device->backend = own;
        }
        for (int i = 1; i < 3; i++) {
            assert_int_equal(bytes[i], bytes[0]);
            if (memcmp(bits[i], bits[0], bytes[0]) != 0)
                fail_msg("%s, case %d: other bits", i == 1 ? "resumed" : "merged", k);
            free(bits[i]);
        }
        free(bits[0]);
    }
}

static void a_bad_step_changes_nothing(void **unused) {
    (void)unused;
    static const trainer_optimiser optimisers[] = {TRAINER_MUON, TRAINER_SGD};
    for (int k = 0; k < 4; k++) {
        char error[TRAIN_ERROR] = "";
        const trainer_options options = options_of(optimisers[k / 2], 1 + k % 2, 0.9);
        train_model model;
        build_little(&model, 1, BATCH, VJP_F32);
        trainer *t = create(&model, &options);
        take_steps(t, 1, 2);
        static float bad[16];
        for (int i = 0; i < 16; i++)
            bad[i] = NAN;
        const safetensors_tensor norm = {
            .name = "model.norm.weight.trained", .dtype = VJP_F32, .ndim = 1, .shape = {16}, .data = bad};
        if (!trainer_load(t, &norm, error)) fail_msg("%s", error);
        size_t bytes, after;
        float *before = bits_of(t, &bytes);
        trainer_step_result result;
        assert_false(trainer_step(t, &source, 3, &result, error));
        if (!strstr(error, "step 3: the loss is nan")) fail_msg("%s", error);
        float *now = bits_of(t, &after);
        assert_int_equal(bytes, after);
        assert_memory_equal(before, now, bytes);
        free(before);
        free(now);
        trainer_destroy(t);
        model_free(&model);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules),
        cmocka_unit_test(states_of_each_parameter),
        cmocka_unit_test(muon_needs_hidden_matrices),
        cmocka_unit_test(averages_are_sums),
        cmocka_unit_test(averages_are_validated),
        cmocka_unit_test(resume_and_merge),
        cmocka_unit_test(a_bad_step_changes_nothing),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
