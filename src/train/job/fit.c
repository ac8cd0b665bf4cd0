/* SPDX-License-Identifier: MIT */
/* Chooses how many blocks to recompute: a binary search, each probe of which builds and plans the model. */
#include "train/job/fit.h"

#include <stdio.h>
#include <stdlib.h>

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

static bool plan(const fit_run *run, const llama_config *config, const llama_options *options, int64_t recompute,
                 trainer_needs *needs, char error[TRAIN_ERROR]) {
    train_model model;
    llama_options own = *options;
    own.recompute = recompute;
    llama_build(&model, config, &own);
    bool ok = trainer_plan(run->device, &model, run->trainer, run->validates, needs, error);
    model_free(&model);
    return ok;
}

bool fit_check(const fit_run *run, const llama_config *config, const llama_options *options, const fit_limit *limit,
               fit_result *result, char error[TRAIN_ERROR]) {
    *result = (fit_result){.recompute = options->recompute < config->layers ? options->recompute : config->layers};
    if (!plan(run, config, options, 0, &result->before, error)) return false;
    result->needs = result->before;
    if (result->recompute && !plan(run, config, options, result->recompute, &result->needs, error)) return false;
    return fit_allows(limit, &result->needs, "", error);
}

bool fit_llama(const fit_run *run, const llama_config *config, const llama_options *options, const fit_limit *limit,
               fit_result *result, char error[TRAIN_ERROR]) {
    size_t allowed = limit->asked;
    if (limit->free && (!allowed || limit->free < allowed)) allowed = limit->free;
    *result = (fit_result){0};
    if (!plan(run, config, options, 0, &result->before, error)) return false;
    result->needs = result->before;
    if (!allowed || result->before.bytes <= allowed) return true;
    /* More blocks need less memory; whether all of them are enough is seen last. */
    int64_t too_few = 0, enough = config->layers;
    trainer_needs needs, min = result->before;
    while (too_few + 1 < enough) {
        int64_t middle = too_few + (enough - too_few) / 2;
        if (!plan(run, config, options, middle, &needs, error)) return false;
        bool fits = needs.bytes <= allowed;
        *(fits ? &enough : &too_few) = middle;
        *(fits ? &result->needs : &min) = needs;
    }
    result->recompute = enough;
    if (enough < config->layers) return true;
    if (!plan(run, config, options, enough, &result->needs, error)) return false;
    /* The last block is recomputed while nothing else is kept but its inputs: that can need more than keeping it. */
    if (result->needs.bytes < min.bytes) min = result->needs;
    return fit_allows(limit, &min, " even with blocks recomputed", error);
}

double fit_price(const fit_result *result) {
    double before = result->before.cost.flops;
    return before > 0 ? result->needs.cost.flops / before - 1 : 0;
}
