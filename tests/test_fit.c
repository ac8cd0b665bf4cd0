/* SPDX-License-Identifier: MIT */
/*
 * Plans without memory: they say what a trainer then allocates, and allocate nothing themselves; and the number of
 * feed-forward parts, or of blocks, that a limit of memory makes a Llama recompute is the smallest that fits. Where
 * intermediates can wait in the host's memory, they do that first; and before either, values that one pass over memory
 * computes are recomputed, as few as the limit asks for.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "little_llama.h"
#include "merging.h"
#include "train/job/fit.h"
#include "train/job/job.h"

enum { LAYERS = 5 };

static const llama_config small = {.vocab_size = 64,
                                   .hidden_size = 64,
                                   .intermediate_size = 160,
                                   .layers = LAYERS,
                                   .heads = 4,
                                   .kv_heads = 2,
                                   .head_dim = 16,
                                   .max_positions = 32,
                                   .rope_theta = 10000,
                                   .norm_eps = 1e-5,
                                   .tied = true};
static const llama_options usual = {.batch = 4, .context = 32, .dtype = VJP_F32};
static const fit_model little_llama = {.llama = &small, .llama_options = &usual};

/* Memory whose bytes are counted. */
typedef struct counted {
    size_t bytes, calls;
} counted;

static void *allocate(void *context, size_t bytes, size_t alignment) {
    counted *c = context;
    c->bytes += bytes;
    c->calls++;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void release(void *context, void *data) {
    (void)context;
    free(data);
}

static vjp_device *open_counted(counted *c) {
    vjp_device *device;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.threads = 1;
    options.allocate = allocate;
    options.release = release;
    options.allocate_context = c;
    if (vjp_open("cpu", &options, &device) != VJP_OK) fail_msg("%s", vjp_error(device));
    *c = (counted){0};
    return device;
}

/* ---- What is planned is what is allocated ------------------------------------------------------------ */

static void fill(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    (void)context, (void)validation, (void)part;
    memset(input, 0, (size_t)(usual.batch * usual.context) * sizeof(int32_t));
    memset(target, 0, (size_t)(usual.batch * usual.context) * sizeof(int32_t));
}

static void plan_is_what_is_allocated(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR];
    const train_source source = {.fill = fill, .validation_parts = 1};
    for (int i = 0; i < 8; i++) {
        bool validates = i & 1;
        trainer_options options = job_defaults().trainer;
        options.accumulate = i & 2 ? 3 : 1;
        llama_options how = usual;
        how.dtype = i & 4 ? VJP_BF16 : VJP_F32;
        how.recompute = i & 4 ? 2 : 0;
        counted c;
        vjp_device *device = open_counted(&c);
        train_model model;
        trainer_needs needs;
        llama_build(&model, &small, &how);
        if (!trainer_plan(device, &model, &options, validates, &needs, error)) fail_msg("%s", error);
        model_free(&model);
        assert_int_equal(c.calls, 0);
        assert_int_equal(needs.bytes, needs.kept_bytes + needs.arena_bytes);

        llama_build(&model, &small, &how);
        trainer *t = trainer_create(device, &model, &options, error);
        if (!t) fail_msg("%s", error);
        double loss;
        if (validates && !trainer_evaluate(t, &source, 1, &loss, error)) fail_msg("%s", error);
        /* Each value that is kept begins at an aligned address. */
        double parts = 6.0 * model.parameters + 16;
        if (!(c.bytes >= needs.bytes && (double)c.bytes <= (double)needs.bytes + 64 * parts))
            fail_msg("case %d: planned %zu bytes, allocated %zu", i, needs.bytes, c.bytes);
        trainer_destroy(t);
        model_free(&model);
        vjp_close(device);
    }
}

/* ---- The fewest blocks ------------------------------------------------------------------------------- */

/* The feed-forward part of one block more, and when all have that, one whole block more. */
enum { CHOICES = 2 * LAYERS + 1 };

static int64_t blocks_of(int64_t choice) {
    return choice > LAYERS ? choice - LAYERS : 0;
}

static int64_t mlps_of(int64_t choice) {
    return choice > LAYERS ? LAYERS : choice;
}

/* With few tokens the peak is in a block's backward, with many at the loss. Returns the bytes for each choice. */
static void find_fewest(int64_t tokens, size_t bytes[CHOICES]) {
    char error[TRAIN_ERROR], number[32];
    const trainer_options options = job_defaults().trainer;
    counted c;
    vjp_device *device = open_counted(&c);
    const fit_run run = {device, &options, true};
    fit_result found;
    llama_config config = small;
    config.vocab_size = tokens;
    const fit_model model = {.llama = &config, .llama_options = &usual};
    size_t min = SIZE_MAX;
    double flops = 0;
    for (int64_t k = 0; k < CHOICES; k++) {
        llama_options how = usual;
        how.recompute = blocks_of(k);
        how.recompute_mlp = mlps_of(k);
        if (!fit_check(&run, &(fit_model){.llama = &config, .llama_options = &how}, &(fit_limit){0}, &found, error))
            fail_msg("%s", error);
        bytes[k] = found.needs.bytes;
        if (bytes[k] < min) min = bytes[k];
        assert_true(found.needs.cost.flops > flops);
        flops = found.needs.cost.flops;
        assert_true(k == 0 || fit_price(&found) > 0);
    }
    assert_true(bytes[1] < bytes[0]);
    for (int64_t k = 0; k < CHOICES; k++)
        for (int less = 0; less < 2; less++) {
            const fit_limit limit = {.asked = bytes[k] - (size_t)less};
            int64_t expected = 0;
            while (expected < CHOICES && bytes[expected] > limit.asked)
                expected++;
            bool fits = fit_choose(&run, &model, &limit, &found, error);
            assert_int_equal(fits, expected < CHOICES);
            if (fits) {
                assert_int_equal(found.recompute, blocks_of(expected));
                assert_int_equal(found.recompute_mlp, mlps_of(expected));
                assert_int_equal(found.needs.bytes, bytes[expected]);
                assert_int_equal(found.before.bytes, bytes[0]);
            }
        }
    /* Both numbers are in the sentence. */
    const fit_limit little = {.asked = min / 2}, card = {.free = bytes[0] / 2};
    assert_false(fit_choose(&run, &model, &little, &found, error));
    snprintf(number, sizeof number, "%.4g GiB", (double)min / 0x1p30);
    assert_non_null(strstr(error, number));
    snprintf(number, sizeof number, "allows %.4g GiB", (double)little.asked / 0x1p30);
    assert_non_null(strstr(error, number));
    assert_false(fit_check(&run, &model, &card, &found, error));
    snprintf(number, sizeof number, "needs %.4g GiB", (double)bytes[0] / 0x1p30);
    assert_non_null(strstr(error, number));
    snprintf(number, sizeof number, "has %.4g GiB free", (double)card.free / 0x1p30);
    assert_non_null(strstr(error, number));
    /* What is free bounds what is asked for. */
    const fit_limit both = {.asked = bytes[0], .free = bytes[1]};
    assert_true(fit_choose(&run, &model, &both, &found, error));
    assert_int_equal(found.recompute, 0);
    assert_int_equal(found.recompute_mlp, 1);
    assert_int_equal(c.calls, 0);
    vjp_close(device);
}

/* Three blocks of a model, the feed-forward part of each or all of it. */
static void part_and_block(fit_result *part, fit_result *block) {
    char error[TRAIN_ERROR];
    const trainer_options options = job_defaults().trainer;
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    const fit_run run = {device, &options, false};
    llama_options how = usual;
    how.recompute_mlp = 3;
    if (!fit_check(&run, &(fit_model){.llama = &small, .llama_options = &how}, &(fit_limit){0}, part, error))
        fail_msg("%s", error);
    how.recompute = 3;
    if (!fit_check(&run, &(fit_model){.llama = &small, .llama_options = &how}, &(fit_limit){0}, block, error))
        fail_msg("%s", error);
    char text[FIT_TEXT];
    const char *start = "the feed-forward parts of 3 of 5 blocks are recomputed, which saves ";
    assert_ptr_equal(strstr(fit_text(part, text), start), text);
    assert_ptr_equal(strstr(fit_text(block, text), "3 of 5 blocks are recomputed, which saves "), text);
    vjp_close(device);
}

static void fewest_blocks_that_fit(void **unused) {
    (void)unused;
    size_t few[CHOICES], many[CHOICES];
    setenv("VJP_REWRITES", "-recompute,-combine", 1); /* otherwise fewer blocks are enough */
    find_fewest(64, few);
    find_fewest(4096, many);
    unsetenv("VJP_REWRITES");
    /* Recomputing the last block, too, is of use in one of them only. */
    assert_true(few[CHOICES - 1] >= few[CHOICES - 2]);
    assert_true(many[CHOICES - 1] < many[CHOICES - 2]);
    /* A feed-forward part gives back more memory for its FLOP than its block. */
    fit_result part, block;
    part_and_block(&part, &block);
    double saved[] = {(double)(part.before.bytes - part.needs.bytes), (double)(block.before.bytes - block.needs.bytes)};
    assert_true(saved[0] / fit_price(&part) > saved[1] / fit_price(&block));
}

/* The losses of a few steps of the little Llama. */
static void train_little(vjp_device *device, int64_t arena_limit, int steps, double *losses) {
    char error[TRAIN_ERROR];
    int64_t batch = 4;
    train_model model;
    build_little(&model, 3, batch, VJP_F32);
    trainer_options options = job_defaults().trainer;
    options.steps = steps;
    options.arena_limit = arena_limit;
    const train_source source = {.context = &batch, .fill = fill_little};
    trainer *t = trainer_create(device, &model, &options, error);
    if (!t) fail_msg("%s", error);
    for (int i = 0; i < steps; i++) {
        trainer_step_result result;
        if (!trainer_step(t, &source, i + 1, &result, error)) fail_msg("%s", error);
        losses[i] = result.loss;
    }
    trainer_destroy(t);
    model_free(&model);
}

/* On a device with memory of its own: what is within reach of copies is not recomputed; the rest is. Same losses. */
static void host_memory_comes_first(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR], text[FIT_TEXT];
    const trainer_options options = job_defaults().trainer;
    vjp_backend backend;
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    merge_calls(device, &backend);
    setenv("VJP_REWRITES", "-recompute,-combine", 1);
    const fit_run run = {device, &options, true};
    fit_result all, some, more;
    assert_true(fit_check(&run, &little_llama, &(fit_limit){0}, &all, error));
    const fit_limit less = {.asked = all.needs.kept_bytes + all.needs.arena_bytes / 10 * 8};
    assert_true(fit_choose(&run, &little_llama, &less, &some, error));
    assert_true(some.needs.bytes <= less.asked && some.needs.host_bytes > 0 && some.arena_limit > 0);
    assert_int_equal(some.recompute_mlp, 0);
    assert_true(fit_price(&some) == 0);
    assert_non_null(strstr(fit_text(&some, text), " MiB of intermediates wait in the host's memory"));
    assert_null(strstr(text, "recomputed"));
    /* Copies that take a while move less: the rest is recomputed. */
    backend.copy_cost = 4;
    backend.flops_per_byte = 100;
    const fit_limit little = {.asked = all.needs.kept_bytes + all.needs.arena_bytes / 10 * 6};
    assert_true(fit_choose(&run, &little_llama, &little, &more, error));
    assert_true(more.needs.bytes <= little.asked && more.recompute_mlp > 0);
    /* A run that is resumed has the limit from its settings. */
    trainer_options kept = options;
    kept.arena_limit = some.arena_limit;
    backend.copy_cost = 0;
    backend.flops_per_byte = 1;
    const fit_run resumed = {device, &kept, true};
    fit_result again;
    assert_true(fit_check(&resumed, &little_llama, &less, &again, error));
    assert_int_equal(again.needs.bytes, some.needs.bytes);
    assert_int_equal(again.before.bytes, all.needs.bytes);
    /* Where nothing can wait there, blocks are recomputed instead. */
    const vjp_backend copies = backend;
    backend.copy_begin = NULL;
    assert_false(fit_check(&resumed, &little_llama, &less, &again, error));
    assert_true(fit_choose(&resumed, &little_llama, &less, &again, error));
    assert_true(again.recompute_mlp > 0 && again.arena_limit == 0 && again.needs.host_bytes == 0);
    backend = copies;
    double losses[2][6];
    for (int i = 0; i < 2; i++)
        train_little(device, i, 6, losses[i]);
    assert_memory_equal(losses[0], losses[1], sizeof losses[0]);
    assert_true(merging_begun > 0);
    assert_int_equal(merging_waiting, 0);
    unsetenv("VJP_REWRITES");
    vjp_close(device);
}

/* On the CPU, too: what one pass over memory computes is recomputed before any block, and no more of it than needed. */
static void passes_come_before_blocks(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR], text[FIT_TEXT];
    trainer_options options = job_defaults().trainer;
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    const fit_run run = {device, &options, true};
    fit_result all, few, many, blocks, again;
    assert_true(fit_check(&run, &little_llama, &(fit_limit){0}, &all, error));
    assert_null(fit_text(&all, text));
    const size_t bytes = all.needs.bytes;
    assert_true(fit_choose(&run, &little_llama, &(fit_limit){.asked = bytes}, &again, error));
    assert_true(again.arena_limit == 0 && again.needs.bytes == bytes && !fit_text(&again, text));
    fit_result *const found[] = {&few, &many};
    for (int i = 0; i < 2; i++) {
        const fit_limit limit = {.asked = all.needs.kept_bytes + all.needs.arena_bytes / 20 * (size_t)(i ? 17 : 19)};
        assert_true(fit_choose(&run, &little_llama, &limit, found[i], error));
        assert_true(found[i]->needs.bytes <= limit.asked && found[i]->recompute_mlp == 0 && found[i]->passes);
        assert_true(fit_price(found[i]) == 0);
        assert_non_null(
            strstr(fit_text(found[i], text), "values that take one pass over memory are recomputed, which"));
        assert_null(strstr(text, "FLOP"));
        /* As a resumed run plans it. */
        trainer_options kept = options;
        kept.arena_limit = found[i]->arena_limit;
        const fit_run resumed = {device, &kept, true};
        assert_true(fit_check(&resumed, &little_llama, &limit, &again, error));
        assert_memory_equal(&again, found[i], sizeof again);
    }
    assert_true(all.needs.cost.bytes < few.needs.cost.bytes && few.needs.cost.bytes < many.needs.cost.bytes);
    /* What the device has free counts as a limit, too. */
    assert_true(fit_choose(&run, &little_llama, &(fit_limit){.free = few.needs.bytes}, &again, error));
    assert_true(again.needs.bytes <= few.needs.bytes && again.passes);
    /* More than passes can save: they save blocks. */
    const fit_limit little = {.asked = all.needs.kept_bytes + all.needs.arena_bytes / 10 * 6};
    assert_true(fit_choose(&run, &little_llama, &little, &blocks, error));
    assert_non_null(
        strstr(fit_text(&blocks, text), "values that take one pass over memory and the feed-forward parts"));
    assert_non_null(strstr(text, " % of FLOP"));
    setenv("VJP_REWRITES", "-recompute,-combine", 1);
    assert_true(fit_choose(&run, &little_llama, &little, &again, error));
    assert_true(blocks.passes && !again.passes && blocks.recompute_mlp < again.recompute_mlp);
    unsetenv("VJP_REWRITES");
    double losses[2][6];
    for (int i = 0; i < 2; i++)
        train_little(device, i, 6, losses[i]);
    assert_memory_equal(losses[0], losses[1], sizeof losses[0]);
    vjp_close(device);
}

/* Where such values are recomputed without a limit, as on GPUs: one with room has fewer of them, or none, recomputed.
 */
static void room_is_used_when_asked(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR], text[FIT_TEXT];
    const trainer_options options = job_defaults().trainer;
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    const fit_run run = {device, &options, true};
    fit_result most, least, some, found;
    assert_true(fit_check(&run, &little_llama, &(fit_limit){0}, &most, error));
    setenv("VJP_REWRITES", "+recompute,+combine", 1);
    assert_true(fit_check(&run, &little_llama, &(fit_limit){0}, &least, error));
    assert_true(least.needs.bytes < most.needs.bytes);
    const fit_limit plenty = {.asked = SIZE_MAX / 4}, half = {.asked = least.needs.bytes / 2 + most.needs.bytes / 2},
                    card = {.free = SIZE_MAX / 4}, exact = {.asked = least.needs.bytes};
    assert_true(fit_choose(&run, &little_llama, &card, &found, error));
    assert_true(found.needs.bytes == least.needs.bytes && !found.arena_limit && !fit_text(&found, text));
    assert_true(fit_choose(&run, &little_llama, &exact, &found, error));
    assert_true(found.needs.bytes <= least.needs.bytes);
    assert_true(fit_choose(&run, &little_llama, &plenty, &found, error));
    assert_int_equal(found.needs.bytes, most.needs.bytes);
    assert_true(found.needs.cost.bytes == most.needs.cost.bytes && !found.passes && found.recompute_mlp == 0);
    assert_non_null(strstr(fit_text(&found, text), " more than it must"));
    assert_true(fit_choose(&run, &little_llama, &half, &some, error));
    assert_true(some.needs.bytes <= half.asked && some.needs.bytes > least.needs.bytes);
    assert_true(some.needs.cost.bytes < least.needs.cost.bytes && some.needs.cost.bytes > most.needs.cost.bytes);
    unsetenv("VJP_REWRITES");
    vjp_close(device);
}

/* A convnet, which has no blocks: what is left is to recompute passes and to let values wait in the host's memory. */
static void a_convnet_is_fitted_too(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR], text[FIT_TEXT];
    const convnet_config config = {.height = 16, .width = 16, .channels = 3, .classes = 4, .features = 8, .stages = 2};
    const convnet_options pictures = {.batch = 8, .dtype = VJP_F32};
    const fit_model model = {.convnet = &config, .convnet_options = &pictures};
    const trainer_options options = job_defaults().trainer;
    vjp_backend backend;
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    const fit_run run = {device, &options, true};
    fit_result all, found, again;
    assert_true(fit_check(&run, &model, &(fit_limit){0}, &all, error));
    assert_true(all.layers == 0 && !fit_text(&all, text));
    const fit_limit less = {.asked = all.needs.bytes - 1}, part = {.asked = all.needs.bytes / 100 * 86};
    assert_true(fit_choose(&run, &model, &less, &found, error));
    assert_true(found.needs.bytes <= less.asked && found.passes && found.recompute_mlp == 0);
    assert_non_null(
        strstr(fit_text(&found, text), "values that take one pass over memory are recomputed, which saves"));
    assert_false(fit_choose(&run, &model, &part, &found, error));
    assert_non_null(strstr(error, "GiB; --memory allows "));
    merge_calls(device, &backend);
    assert_true(fit_choose(&run, &model, &part, &found, error));
    assert_true(found.needs.bytes <= part.asked && found.needs.host_bytes > 0);
    trainer_options kept = options;
    kept.arena_limit = found.arena_limit;
    assert_true(fit_check(&(fit_run){device, &kept, true}, &model, &part, &again, error));
    assert_memory_equal(&again, &found, sizeof again);
    vjp_close(device);
}

static void a_plan_is_refused_like_a_program(void **unused) {
    (void)unused;
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    train_model model;
    llama_build(&model, &small, &usual);
    vjp_program_report report = {.struct_size = sizeof report};
    const vjp_value wrong = 1 << 20;
    assert_int_equal(vjp_plan(device, model.graph, &wrong, 1, NULL, &report), VJP_INVALID);
    assert_int_equal(vjp_plan(device, model.graph, NULL, 1, NULL, &report), VJP_INVALID);
    assert_int_equal(vjp_plan(device, model.graph, &model.loss, 1, NULL, NULL), VJP_INVALID);
    assert_int_equal(vjp_plan(NULL, model.graph, &model.loss, 1, NULL, &report), VJP_NO_DEVICE);
    report.struct_size = 1;
    assert_int_equal(vjp_plan(device, model.graph, &model.loss, 1, NULL, &report), VJP_INVALID);
    report.struct_size = sizeof report;
    assert_int_equal(vjp_plan(device, model.graph, &model.loss, 1, NULL, &report), VJP_OK);
    vjp_program *program;
    vjp_program_report compiled = {.struct_size = sizeof compiled};
    assert_int_equal(vjp_compile(device, model.graph, &model.loss, 1, NULL, &program), VJP_OK);
    assert_int_equal(vjp_program_describe(program, &compiled), VJP_OK);
    assert_memory_equal(&report, &compiled, sizeof report);
    vjp_program_destroy(program);
    model_free(&model);
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan_is_what_is_allocated),        cmocka_unit_test(fewest_blocks_that_fit),
        cmocka_unit_test(host_memory_comes_first),          cmocka_unit_test(passes_come_before_blocks),
        cmocka_unit_test(room_is_used_when_asked),          cmocka_unit_test(a_convnet_is_fitted_too),
        cmocka_unit_test(a_plan_is_refused_like_a_program),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
