/* SPDX-License-Identifier: MIT */
/* Chooses how a step stays within a limit of memory. How many blocks are recomputed is found by a binary search, whose
 * probes build and plan the model. */
#include "train/job/fit.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/system.h"

static const double GIB = 1024.0 * 1024 * 1024;

size_t fit_free(vjp_device *device) {
    char text[32];
    if (vjp_device_property(device, "memory_free", text, sizeof text) != VJP_OK) return 0;
    return (size_t)strtoull(text, NULL, 10);
}

size_t fit_available(vjp_device *device) {
    return vjp_device_is_host(device) ? (size_t)system_available_bytes() : fit_free(device);
}

bool fit_bytes(vjp_device *device, double needed, const char *what, char error[TRAIN_ERROR]) {
    size_t available = fit_available(device);
    return !available || needed <= (double)available ||
           train_fail(error, "%s needs %.4g GiB of memory, and %.4g GiB are available", what, needed / GIB,
                      (double)available / GIB);
}

bool fit_program(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count, const char *what,
                 char error[TRAIN_ERROR]) {
    vjp_program_report report = {.struct_size = sizeof report};
    if (vjp_plan(device, graph, results, count, NULL, &report) != VJP_OK)
        return train_fail(error, "%s", vjp_error(device));
    return fit_bytes(device, (double)report.arena_bytes + (double)report.persistent_bytes, what, error);
}

bool fit_allows(const fit_limit *limit, const trainer_needs *needs, const char *how, char error[TRAIN_ERROR]) {
    double need = (double)needs->bytes / GIB;
    if (limit->asked && needs->bytes > limit->asked)
        return train_fail(error, "training needs at least %.4g GiB%s; --memory allows %.4g GiB", need, how,
                          (double)limit->asked / GIB);
    if (limit->free && needs->bytes > limit->free)
        return train_fail(error,
                          "training needs %.4g GiB%s, and the device has %.4g GiB free: a smaller --batch or --context "
                          "needs less, and --memory chooses blocks to recompute",
                          need, how, (double)limit->free / GIB);
    return true;
}

/* A model with so many of its blocks recomputed, whole or the feed-forward part; of every block at most. */
typedef struct choice {
    const fit_model *model;
    int64_t recompute, recompute_mlp;
} choice;

static int64_t layers_of(const fit_model *model) {
    return model->llama ? model->llama->layers : 0;
}

static choice choice_of(const fit_model *model, int64_t blocks, int64_t mlps) {
    choice c = {.model = model, .recompute = vjp_min(blocks, layers_of(model))};
    c.recompute_mlp = vjp_max(c.recompute, vjp_min(mlps, layers_of(model)));
    return c;
}

static bool plan(const fit_run *run, choice c, trainer_needs *needs, char error[TRAIN_ERROR]) {
    train_model model;
    if (c.model->llama) {
        llama_options own = *c.model->llama_options;
        own.recompute = c.recompute;
        own.recompute_mlp = c.recompute_mlp;
        llama_build(&model, c.model->llama, &own);
    } else {
        convnet_build(&model, c.model->convnet, c.model->convnet_options);
    }
    bool ok = trainer_plan(run->device, &model, run->trainer, run->validates, needs, error);
    model_free(&model);
    return ok;
}

bool fit_check(const fit_run *run, const fit_model *model, const fit_limit *limit, fit_result *result,
               char error[TRAIN_ERROR]) {
    trainer_options plain = *run->trainer;
    plain.arena_limit = 0;
    const fit_run usual = {run->device, &plain, run->validates};
    const choice none = choice_of(model, 0, 0);
    *result = (fit_result){.layers = layers_of(model), .arena_limit = run->trainer->arena_limit};
    if (!plan(&usual, none, &result->before, error)) return false;
    result->needs = result->before;
    if (result->arena_limit && !plan(run, none, &result->needs, error)) return false;
    result->passes = result->needs.cost.bytes > result->before.cost.bytes;
    if (model->llama) {
        choice own = choice_of(model, model->llama_options->recompute, model->llama_options->recompute_mlp);
        result->recompute = own.recompute;
        result->recompute_mlp = own.recompute_mlp;
        if (own.recompute_mlp && !plan(run, own, &result->needs, error)) return false;
    }
    return fit_allows(limit, &result->needs, "", error);
}

/* The fewest parts, or blocks, with which a step fits; `fits`: whether any do. `min` is the least that was needed. */
static bool find_fewest(const fit_run *run, const fit_model *model, bool whole, size_t allowed, fit_result *result,
                        trainer_needs *min, bool *fits, char error[TRAIN_ERROR]) {
    /*
     * More of them need less memory, but perhaps for the last block: while that one is recomputed, nothing else is
     * freed yet. All of them are tried only where one less was not enough.
     */
    int64_t layers = layers_of(model), too_few = 0, enough = layers + 1;
    trainer_needs needs;
    while (too_few + 1 < enough) {
        int64_t middle = too_few + (enough - too_few) / 2;
        choice own = choice_of(model, whole ? middle : 0, whole ? layers : middle);
        if (!plan(run, own, &needs, error)) return false;
        if (needs.bytes < min->bytes) *min = needs;
        if (needs.bytes > allowed) {
            too_few = middle;
            continue;
        }
        enough = middle;
        result->needs = needs;
        result->recompute = own.recompute;
        result->recompute_mlp = own.recompute_mlp;
    }
    *fits = enough <= layers;
    return true;
}

/*
 * The same model with a limit for its arena: then values that one pass over memory computes are recomputed as far as
 * that needs it, and no further, and intermediates wait in the host's memory where that has room for them twice over.
 * Kept where the step needs less memory than without, or, where that fits anyway, if it moves fewer bytes.
 */
static bool try_arena_limit(const fit_run *run, const fit_model *model, size_t allowed, trainer_options *how,
                            fit_result *result, char error[TRAIN_ERROR]) {
    const trainer_needs before = result->before;
    how->arena_limit = allowed > before.kept_bytes ? (int64_t)(allowed - before.kept_bytes) : 1;
    const fit_run own = {run->device, how, run->validates};
    trainer_needs needs;
    if (!plan(&own, choice_of(model, 0, 0), &needs, error)) return false;
    double available = system_available_bytes();
    bool room = !needs.host_bytes || available <= 0 || (double)needs.host_bytes <= available / 2;
    bool better = before.bytes > allowed ? needs.bytes < before.bytes
                                         : needs.bytes <= allowed && needs.cost.bytes < before.cost.bytes;
    if (room && better) {
        result->arena_limit = how->arena_limit;
        result->needs = needs;
        result->passes = needs.cost.bytes > before.cost.bytes;
    } else {
        how->arena_limit = 0;
    }
    return true;
}

bool fit_choose(const fit_run *run, const fit_model *model, const fit_limit *limit, fit_result *result,
                char error[TRAIN_ERROR]) {
    size_t allowed = limit->asked;
    if (limit->free && (!allowed || limit->free < allowed)) allowed = limit->free;
    trainer_options how = *run->trainer;
    how.arena_limit = 0;
    const fit_run chosen = {run->device, &how, run->validates};
    *result = (fit_result){.layers = layers_of(model)};
    if (!plan(&chosen, choice_of(model, 0, 0), &result->before, error)) return false;
    result->needs = result->before;
    /* Without being asked to, training does not take memory to be a little faster. */
    if (!allowed || (!limit->asked && result->before.bytes <= allowed)) return true;
    if (!try_arena_limit(run, model, allowed, &how, result, error)) return false;
    if (result->needs.bytes <= allowed) return true;
    trainer_needs min = result->needs;
    bool fits = false;
    for (int whole = 0; whole < 2 && !fits; whole++)
        if (!find_fewest(&chosen, model, whole, allowed, result, &min, &fits, error)) return false;
    return fits || fit_allows(limit, &min, result->layers ? " even with blocks recomputed" : "", error);
}

/* Appends to a sentence. */
static void add_text(char text[FIT_TEXT], const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_text(char text[FIT_TEXT], const char *format, ...) {
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, FIT_TEXT - used, format, arguments);
    va_end(arguments);
}

static void add_bytes(char text[FIT_TEXT], double bytes) {
    add_text(text, "%.3g %s", bytes < GIB ? bytes * 1024 / GIB : bytes / GIB, bytes < GIB ? "MiB" : "GiB");
}

static void add_recomputed(char text[FIT_TEXT], const fit_result *result) {
    long long layers = (long long)result->layers, whole = (long long)result->recompute;
    long long parts = (long long)result->recompute_mlp - whole;
    if (result->passes) add_text(text, "values that take one pass over memory%s", whole || parts ? " and " : "");
    if (parts && !whole)
        add_text(text, "the feed-forward parts of %lld of %lld blocks", parts, layers);
    else if (whole)
        add_text(text, "%lld of %lld blocks", whole, layers);
    if (whole && parts)
        add_text(text, " and the feed-forward parts of %s",
                 result->recompute_mlp == layers ? "the others" : "some others");
    add_text(text, " are recomputed");
}

const char *fit_text(const fit_result *result, char text[FIT_TEXT]) {
    bool recomputes = result->passes || result->recompute_mlp;
    double saved = (double)result->before.bytes - (double)result->needs.bytes;
    text[0] = 0;
    if (result->arena_limit && result->needs.host_bytes) {
        add_bytes(text, (double)result->needs.host_bytes);
        add_text(text, " of intermediates wait in the host's memory%s", recomputes ? ", " : "");
    }
    if (recomputes) add_recomputed(text, result);
    if (text[0]) {
        add_text(text, ", which saves ");
        add_bytes(text, saved);
        if (result->recompute_mlp) add_text(text, " and adds %.1f %% of FLOP", 100 * fit_price(result));
    } else if (result->arena_limit) {
        add_text(text, "to recompute less, it takes ");
        add_bytes(text, -saved);
        add_text(text, " more than it must");
    }
    return text[0] ? text : NULL;
}

double fit_price(const fit_result *result) {
    double before = result->before.cost.flops;
    return before > 0 ? result->needs.cost.flops / before - 1 : 0;
}
