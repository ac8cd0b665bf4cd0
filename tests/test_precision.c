/* SPDX-License-Identifier: MIT */
/*
 * Training with fewer bits: moments and gradients in bf16 against those in f32, element by element; a scaled loss
 * against one that is not, bit for bit; steps that the device skips, and a scale that has become too small.
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

#include "core/half.h"
#include "graph/graph.h"
#include "little_llama.h"
#include "on_cpu.h"
#include "train/trainer/loss_scale.h"
#include "train/trainer/trainer.h"

enum { LAYERS = 2, BATCH = 2 };

/* ---- A run ------------------------------------------------------------------------------------------- */

/* Nothing is clipped: then a power of two times the loss changes no bit. */
static const trainer_options usual = {.steps = 40,
                                      .warmup = 2,
                                      .accumulate = 1,
                                      .rate = 1e-2,
                                      .last_rate = 0.1,
                                      .weight_decay = 0.1,
                                      .beta1 = 0.9,
                                      .beta2 = 0.95,
                                      .eps = 1e-8,
                                      .seed = 5};

typedef struct run {
    train_model model;
    trainer *trainer;
    const safetensors_tensor *weight, *kept;
    size_t weights, kept_count;
} run;

static int64_t batch_rows = BATCH;
static const train_source source = {.context = &batch_rows, .fill = fill_little};

static void look(run *r) {
    char error[TRAIN_ERROR];
    if (!trainer_tensors(r->trainer, &r->weight, &r->weights, &r->kept, &r->kept_count, error)) fail_msg("%s", error);
}

/* The model must stay where it is. */
static void begin(run *r, vjp_dtype dtype, const trainer_options *options) {
    char error[TRAIN_ERROR];
    *r = (run){0};
    build_little(&r->model, LAYERS, BATCH, dtype);
    r->trainer = trainer_create(device, &r->model, options, error);
    if (!r->trainer) fail_msg("%s", error);
    look(r);
}

static void end(run *r) {
    trainer_destroy(r->trainer);
    model_free(&r->model);
}

static trainer_step_result take(run *r, int64_t step) {
    char error[TRAIN_ERROR];
    trainer_step_result result;
    if (!trainer_step(r->trainer, &source, step, &result, error)) fail_msg("%s", error);
    look(r);
    return result;
}

static int64_t count_of(const safetensors_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* Whether all weights and the first `kept` tensors of the optimiser have the same bits. */
static bool have_same_bits(const run *a, const run *b, size_t kept) {
    bool same = a->weights == b->weights && kept <= a->kept_count && kept <= b->kept_count;
    for (size_t i = 0; i < a->weights && same; i++)
        same = memcmp(a->weight[i].data, b->weight[i].data, (size_t)count_of(&a->weight[i]) * sizeof(float)) == 0;
    for (size_t i = 0; i < kept && same; i++)
        same = a->kept[i].dtype == b->kept[i].dtype &&
               memcmp(a->kept[i].data, b->kept[i].data,
                      (size_t)count_of(&a->kept[i]) * vjp_dtype_size((vjp_dtype)a->kept[i].dtype)) == 0;
    return same;
}

/* A state of the loss scale, which is behind the moments. */
static float scale_state(const run *r, int which) {
    const safetensors_tensor *tensor = &r->kept[2 * r->weights + (size_t)which];
    assert_string_equal(tensor->name, loss_scale_names[which]);
    return *(const float *)tensor->data;
}

/* ---- Moments and gradients --------------------------------------------------------------------------- */

/* In the first step moments begin at 0: those in bf16 are those in f32, rounded, and the weights the same. */
static void narrow_moments_are_rounded(void **unused) {
    (void)unused;
    trainer_options options = usual;
    run wide;
    begin(&wide, VJP_F32, &options);
    options.moments = VJP_BF16;
    run narrow;
    begin(&narrow, VJP_F32, &options);
    take(&wide, 1);
    take(&narrow, 1);
    assert_true(have_same_bits(&wide, &narrow, 0));
    assert_int_equal(narrow.kept_count, 2 * narrow.weights);
    for (size_t k = 0; k < narrow.kept_count; k++) {
        assert_int_equal(narrow.kept[k].dtype, VJP_BF16);
        for (int64_t i = 0; i < count_of(&narrow.kept[k]); i++)
            assert_int_equal(((const uint16_t *)narrow.kept[k].data)[i],
                             vjp_f32_to_bf16(((const float *)wide.kept[k].data)[i]));
    }
    take(&wide, 2);
    take(&narrow, 2);
    assert_false(have_same_bits(&wide, &narrow, 0));
    end(&wide);
    end(&narrow);
}

/* Moments of the other dtype are refused, whichever the run has. */
static void other_moments_are_refused(void **unused) {
    (void)unused;
    trainer_options options = usual;
    char error[TRAIN_ERROR];
    run wide;
    begin(&wide, VJP_F32, &options);
    options.moments = VJP_BF16;
    run narrow;
    begin(&narrow, VJP_F32, &options);
    safetensors_tensor moment = wide.kept[0];
    moment.type = "F32";
    assert_true(trainer_load(wide.trainer, &moment, error));
    assert_false(trainer_load(narrow.trainer, &moment, error));
    assert_non_null(strstr(error, "is F32 in the file, and the run keeps it in bf16"));
    moment = narrow.kept[0];
    moment.type = "BF16";
    assert_true(trainer_load(narrow.trainer, &moment, error));
    assert_false(trainer_load(wide.trainer, &moment, error));
    assert_non_null(strstr(error, "is BF16 in the file, and the run keeps it in f32"));
    end(&wide);
    end(&narrow);
}

/* Matrices, but the head: the loss gives its gradient in f32. */
static bool has_narrow_gradient(const char *name, int ndim) {
    return ndim == 2 && strcmp(name, "lm_head.weight") != 0;
}

/* What is only ever cast to bf16 has its gradient there, without one in f32 besides. */
static void narrow_gradients_are_made_narrow(void **unused) {
    (void)unused;
    for (int narrow = 0; narrow < 2; narrow++) {
        train_model model;
        build_little(&model, LAYERS, BATCH, VJP_BF16);
        size_t count = (size_t)model.parameters;
        vjp_value *wrt = calloc(2 * count, sizeof *wrt), *gradient = wrt + count;
        for (size_t p = 0; p < count; p++)
            wrt[p] = model.parameter[p].value;
        assert_int_equal(graph_grad_as(model.graph, model.loss, wrt, count, narrow ? VJP_BF16 : VJP_F32, gradient),
                         VJP_OK);
        for (size_t p = 0; p < count; p++) {
            vjp_tensor made = vjp_graph_describe(model.graph, gradient[p]);
            assert_int_equal(made.dtype,
                             narrow && has_narrow_gradient(model.parameter[p].name, made.ndim) ? VJP_BF16 : VJP_F32);
        }
        free(wrt);
        model_free(&model);
    }
}

/* The first moment of the first step is a tenth of the gradient: matrices have theirs rounded, others as they were. */
static void narrow_gradients_are_rounded(void **unused) {
    (void)unused;
    trainer_options options = usual;
    run wide;
    begin(&wide, VJP_BF16, &options);
    options.gradients = VJP_BF16;
    run narrow;
    begin(&narrow, VJP_BF16, &options);
    double norm = take(&wide, 1).norm;
    assert_true(fabs(take(&narrow, 1).norm - norm) <= 0x1p-9 * norm);
    for (size_t p = 0; p < narrow.weights; p++) {
        const float *want = wide.kept[2 * p].data, *got = narrow.kept[2 * p].data;
        int64_t count = count_of(&narrow.weight[p]), different = 0;
        for (int64_t i = 0; i < count; i++) {
            different += want[i] != got[i];
            if (!(fabsf(got[i] - want[i]) <= 0x1p-8f * fabsf(want[i])))
                fail_msg("%s[%d] is %g instead of %g", narrow.kept[2 * p].name, (int)i, (double)got[i],
                         (double)want[i]);
        }
        /* Few of an embedding: a token that occurs once has a gradient that is bf16 already. */
        if (has_narrow_gradient(narrow.weight[p].name, narrow.weight[p].ndim) != (different > 0))
            fail_msg("%s: %d of %d differ", narrow.weight[p].name, (int)different, (int)count);
    }
    end(&wide);
    end(&narrow);
}

/* ---- The scale of the loss --------------------------------------------------------------------------- */

static void a_scale_changes_no_bit(void **unused) {
    (void)unused;
    for (int parts = 1; parts <= 2; parts++) {
        trainer_options options = usual;
        options.accumulate = parts;
        run plain;
        begin(&plain, VJP_F32, &options);
        options.loss_scale = 1024;
        run fixed;
        begin(&fixed, VJP_F32, &options);
        options.loss_scale_steps = 2;
        run growing;
        begin(&growing, VJP_F32, &options);
        for (int step = 1; step <= 5; step++) {
            trainer_step_result one = take(&plain, step), two = take(&fixed, step), three = take(&growing, step);
            assert_true(one.loss_scale == 0 && two.loss_scale == 1024);
            assert_true(three.loss_scale == 1024 * (step < 2 ? 1 : step < 4 ? 2 : 4));
            assert_true(one.loss == two.loss && one.loss == three.loss);
            assert_true(one.norm == two.norm && one.norm == three.norm);
            assert_false(one.skipped || two.skipped || three.skipped);
        }
        size_t moments = 2 * plain.weights;
        assert_true(have_same_bits(&plain, &fixed, moments) && have_same_bits(&plain, &growing, moments));
        assert_true(scale_state(&growing, LOSS_SCALE_TAKEN) == 5 && scale_state(&growing, LOSS_SCALE_GOOD) == 1);
        assert_true(scale_state(&growing, LOSS_SCALE_INVERSE) == 0x1p-12f);
        end(&plain);
        end(&fixed);
        end(&growing);
    }
}

/*
 * With so large a scale the squares of the gradients overflow. Steps are skipped until they do not; the first that is
 * taken is AdamW's first.
 */
static void steps_are_skipped(void **unused) {
    (void)unused;
    for (int parts = 1; parts <= 2; parts++) {
        trainer_options options = usual;
        options.accumulate = parts;
        options.loss_scale = 0x1p70;
        options.loss_scale_steps = 100;
        run skipping, still;
        begin(&skipping, VJP_F32, &options);
        begin(&still, VJP_F32, &options);
        int64_t step = 1;
        double scale = options.loss_scale;
        for (trainer_step_result r; (r = take(&skipping, step)).skipped; step++) {
            assert_true(r.loss_scale == scale / 2 && r.norm == 0 && isfinite(r.loss));
            scale = r.loss_scale;
            assert_true(have_same_bits(&skipping, &still, 2 * still.weights));
            assert_true(scale_state(&skipping, LOSS_SCALE_TAKEN) == 0);
        }
        assert_in_range(step, 3, 30);
        options.loss_scale = 1;
        run direct;
        begin(&direct, VJP_F32, &options);
        take(&direct, step);
        assert_true(have_same_bits(&skipping, &direct, 2 * direct.weights));
        assert_true(scale_state(&skipping, LOSS_SCALE_TAKEN) == 1 && scale_state(&skipping, LOSS_SCALE_GOOD) == 1);
        end(&skipping);
        end(&still);
        end(&direct);
    }
}

static void load(run *r, const safetensors_tensor *tensor, int64_t at, float value) {
    char error[TRAIN_ERROR];
    size_t bytes = (size_t)count_of(tensor) * sizeof(float);
    float *data = malloc(bytes);
    memcpy(data, tensor->data, bytes);
    data[at] = value;
    safetensors_tensor changed = *tensor;
    changed.data = data;
    changed.type = "F32";
    if (!trainer_load(r->trainer, &changed, error)) fail_msg("%s", error);
    free(data);
}

/* Gradients that no scale makes finite: the run ends once the scale would fall below 1, or at once if it is fixed. */
static void a_lost_run_ends(void **unused) {
    (void)unused;
    for (int fixed = 0; fixed < 2; fixed++) {
        trainer_options options = usual;
        options.loss_scale = 2;
        options.loss_scale_steps = fixed ? 0 : 10;
        run r;
        begin(&r, VJP_F32, &options);
        for (size_t p = 0; p < r.weights; p++)
            if (strcmp(r.weight[p].name, "lm_head.weight") == 0) load(&r, &r.weight[p], 0, 1e25f);
        char error[TRAIN_ERROR] = "";
        trainer_step_result result;
        if (!fixed) assert_true(take(&r, 1).skipped);
        assert_true(trainer_queue(r.trainer, &source, 2, error) && trainer_queue(r.trainer, &source, 3, error));
        assert_false(trainer_collect(r.trainer, &source, &result, error));
        assert_non_null(strstr(error, "step 2: the norm of the gradients is inf"));
        look(&r);
        assert_true(scale_state(&r, LOSS_SCALE_TAKEN) == 0);
        assert_true(scale_state(&r, LOSS_SCALE) == (fixed ? 2 : 0.5f)); /* step 3 has not halved it again */
        end(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(narrow_moments_are_rounded),
        cmocka_unit_test(other_moments_are_refused),
        cmocka_unit_test(narrow_gradients_are_made_narrow),
        cmocka_unit_test(narrow_gradients_are_rounded),
        cmocka_unit_test(a_scale_changes_no_bit),
        cmocka_unit_test(steps_are_skipped),
        cmocka_unit_test(a_lost_run_ends),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
