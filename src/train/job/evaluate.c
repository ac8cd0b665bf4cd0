/* SPDX-License-Identifier: MIT */
/* Evaluation of a model on a text; see evaluate.h. */
#include "train/job/evaluate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "train/data/jsonl.h"
#include "train/data/packed.h"
#include "train/job/fit.h"
#include "train/model/llama.h"

typedef struct evaluation {
    vjp_device *device;
    llama_config config;
    llama_options options;
    model_tokenizer tokenizer;
    text_data text;
    jsonl_result set; /* of .jsonl files, instead of the text */
    packed_data rows; /* of them, one document each, or a part of one */
    train_model model;
    vjp_program *program;
    int32_t *input, *target; /* [batch, context] */
    int32_t *shown;          /* [context + 1]: tokens whose text is measured */
} evaluation;

/* ---- The text and the model -------------------------------------------------------------------------- */

static int32_t token_at(const text_data *text, size_t at) {
    return text->tokens.count ? text->tokens.ids[at] : text->bytes[at];
}

static bool has_documents(const evaluation *e) {
    return e->set.tokens.map;
}

static bool read_data(evaluation *e, const char *path, const evaluate_options *o, char error[TRAIN_ERROR]) {
    if (jsonl_is_set(path)) {
        const jsonl_options options = {.cache = o->cache, .skip_bad = o->skip_bad};
        return jsonl_open(path, &e->tokenizer, &options, &e->set, error);
    }
    if (o->skip_bad || o->cache)
        return train_fail(error, "%.300s: %s is for .jsonl files", path, o->skip_bad ? "--skip-bad" : "--cache");
    if (!text_read(path, &e->text, error) || !model_tokenizer_encode(&e->tokenizer, &e->text, error)) return false;
    return e->text.length > 1 ||
           train_fail(error, "%.300s has one token; at least two are needed to predict one", path);
}

static bool read_model(evaluation *e, const checkpoint *from, char error[TRAIN_ERROR]) {
    return llama_config_read(from->config.root, &e->config, error) && model_tokenizer_of(from, &e->tokenizer, error) &&
           model_tokenizer_fits(&e->tokenizer, from, e->config.vocab_size, error) &&
           llama_require_weights(&e->config, from, error) && lora_of(from, &e->config, &e->options.lora, error) &&
           lora_suits(&e->options.lora, &e->config, error);
}

/* The most tokens that one window can predict: all of the text but the first, or of the longest document. */
static int64_t longest(const evaluation *e) {
    const token_cache *c = &e->set.tokens;
    uint64_t most = 1, begin = 0;
    if (!has_documents(e)) return (int64_t)e->text.length - 1;
    for (uint64_t i = 0; i < c->has.documents; i++) {
        uint64_t end = c->end[i] & ~TOKEN_CACHE_WHOLE;
        if (end - begin - 1 > most) most = end - begin - 1;
        begin = end;
    }
    return (int64_t)most;
}

static int64_t window_count(const evaluation *e) {
    return has_documents(e) ? e->rows.count : (longest(e) + e->options.context - 1) / e->options.context;
}

static bool choose_sizes(evaluation *e, const evaluate_options *o, char error[TRAIN_ERROR]) {
    e->options =
        (llama_options){.batch = o->batch ? o->batch : LLAMA_USUAL_BATCH,
                        .context = o->context ? o->context : vjp_min(e->config.max_positions, LLAMA_USUAL_CONTEXT),
                        .dtype = o->dtype,
                        .lora = e->options.lora};
    if (e->options.context > e->config.max_positions)
        return train_fail(error, "a context of %lld is too long; the model was made for at most %lld",
                          (long long)e->options.context, (long long)e->config.max_positions);
    e->options.context = vjp_min(e->options.context, longest(e)); /* short windows */
    if (has_documents(e) && !packed_plan(&e->rows, &e->set.tokens, e->options.context, false, error)) return false;
    e->options.batch = vjp_min(e->options.batch, window_count(e));
    return true;
}

static bool build(evaluation *e, const checkpoint *from, char error[TRAIN_ERROR]) {
    size_t count = (size_t)e->options.batch * (size_t)e->options.context;
    llama_build(&e->model, &e->config, &e->options);
    if (vjp_graph_status(e->model.graph) != VJP_OK) return train_fail(error, "%s", vjp_graph_error(e->model.graph));
    e->input = calloc(count, sizeof *e->input);
    e->target = calloc(count, sizeof *e->target);
    e->shown = calloc((size_t)e->options.context + 1, sizeof *e->shown);
    if (!e->input || !e->target || !e->shown)
        return train_fail(error, "there is no memory for %zu tokens at once", count);
    if (!fit_program(e->device, e->model.graph, &e->model.loss, 1, "evaluating this model", error)) return false;
    if (vjp_compile(e->device, e->model.graph, &e->model.loss, 1, NULL, &e->program) != VJP_OK)
        return train_fail(error, "%s", vjp_error(e->device));
    for (int i = 0; i < e->model.parameters; i++) {
        const model_parameter *p = &e->model.parameter[i];
        const safetensors_tensor *tensor = checkpoint_tensor(from, p->name);
        if (!tensor) return train_fail(error, "the checkpoint has no tensor %s", p->name);
        if (!model_load(&e->model, e->program, p->value, tensor, error)) return false;
    }
    return true;
}

/* ---- Windows ----------------------------------------------------------------------------------------- */

/* One window. What is after the end is ignored. */
static void fill_window(const evaluation *e, int64_t window, int32_t *input, int32_t *target) {
    const vjp_cross_entropy_attributes defaults = VJP_CROSS_ENTROPY_DEFAULTS;
    int64_t begin = window * e->options.context, end = has_documents(e) ? 0 : longest(e);
    if (has_documents(e) && window < e->rows.count) {
        packed_fill_row(&e->rows, window, input, target, NULL);
        return;
    }
    for (int64_t i = 0; i < e->options.context; i++) {
        bool inside = begin + i < end;
        input[i] = inside ? token_at(&e->text, (size_t)(begin + i)) : 0;
        target[i] = inside ? token_at(&e->text, (size_t)(begin + i + 1)) : (int32_t)defaults.ignore_index;
    }
}

/* Fills a batch from window `first` on. Returns how many tokens are predicted. */
static int64_t fill(evaluation *e, int64_t first) {
    const vjp_cross_entropy_attributes defaults = VJP_CROSS_ENTROPY_DEFAULTS;
    int64_t context = e->options.context, used = 0;
    for (int64_t i = 0; i < e->options.batch; i++)
        fill_window(e, first + i, e->input + i * context, e->target + i * context);
    for (int64_t i = 0; i < e->options.batch * context; i++)
        used += e->target[i] != (int32_t)defaults.ignore_index;
    return used;
}

/*
 * Bytes that tokens add to the text of the one before them: its text can change how the first of them is written.
 * ids[0] is that one.
 */
static bool count_added(const evaluation *e, const int32_t *ids, size_t count, int64_t *bytes,
                        char error[TRAIN_ERROR]) {
    byte_list before = {0}, all = {0};
    bool ok = tokenizer_decode(e->tokenizer.tokens, ids, 1, false, &before, error) &&
              tokenizer_decode(e->tokenizer.tokens, ids, count, false, &all, error);
    *bytes += (int64_t)all.count - (int64_t)before.count;
    byte_list_free(&before);
    byte_list_free(&all);
    return ok;
}

/* The bytes of the predicted tokens of one window of a document, which are runs between ignored ones. */
static bool count_window(const evaluation *e, const int32_t *input, const int32_t *target, int64_t *bytes,
                         char error[TRAIN_ERROR]) {
    const vjp_cross_entropy_attributes defaults = VJP_CROSS_ENTROPY_DEFAULTS;
    size_t run = 0;
    for (int64_t i = 0; i <= e->options.context; i++) {
        if (i < e->options.context && target[i] != (int32_t)defaults.ignore_index) {
            if (!run) e->shown[run++] = input[i];
            e->shown[run++] = target[i];
            continue;
        }
        if (run && !e->tokenizer.tokens) *bytes += (int64_t)run - 1;
        if (run && e->tokenizer.tokens && !count_added(e, e->shown, run, bytes, error)) return false;
        run = 0;
    }
    return true;
}

/* The sum of the losses of a batch. */
static bool run(evaluation *e, int64_t used, double *sum) {
    size_t bytes = (size_t)e->options.batch * (size_t)e->options.context * sizeof *e->input;
    float mean = 0;
    bool ok = vjp_program_write(e->program, e->model.input, e->input, bytes) == VJP_OK &&
              vjp_program_write(e->program, e->model.target, e->target, bytes) == VJP_OK &&
              vjp_program_run(e->program) == VJP_OK && vjp_synchronize(e->device) == VJP_OK &&
              vjp_program_read(e->program, e->model.loss, &mean, sizeof mean) == VJP_OK;
    *sum += (double)mean * (double)used;
    return ok;
}

static bool measure(evaluation *e, const evaluate_options *o, evaluate_result *result, char error[TRAIN_ERROR]) {
    double sum = 0;
    int64_t context = e->options.context;
    for (int64_t window = 0; window < result->windows; window += e->options.batch) {
        int64_t used = fill(e, window);
        result->tokens += used;
        for (int64_t i = 0; i < e->options.batch && has_documents(e); i++)
            if (!count_window(e, e->input + i * context, e->target + i * context, &result->bytes, error)) return false;
        if (used && !run(e, used, &sum)) return train_fail(error, "%s", vjp_error(e->device));
        if (o->progress && !o->progress(o->progress_context, window, result->windows))
            return train_fail(error, "it was stopped");
    }
    result->loss = sum / (double)result->tokens;
    return true;
}

/* The bytes of all tokens of a text but the first. */
static bool count_text(const evaluation *e, int64_t *bytes, char error[TRAIN_ERROR]) {
    if (has_documents(e)) return true;
    *bytes = (int64_t)e->text.count - 1;
    if (!e->tokenizer.tokens) return true;
    byte_list first = {0};
    bool ok = tokenizer_decode(e->tokenizer.tokens, e->text.tokens.ids, 1, false, &first, error);
    *bytes = (int64_t)e->text.count - (int64_t)first.count;
    byte_list_free(&first);
    return ok;
}

bool evaluate(vjp_device *device, const checkpoint *from, const char *text, const evaluate_options *options,
              evaluate_result *result, char error[TRAIN_ERROR]) {
    evaluation e = {.device = device};
    *result = (evaluate_result){0};
    bool ok = read_model(&e, from, error) && read_data(&e, text, options, error) && choose_sizes(&e, options, error) &&
              build(&e, from, error) && count_text(&e, &result->bytes, error);
    if (ok) {
        result->windows = window_count(&e);
        result->context = e.options.context;
        result->documents = (int64_t)e.set.tokens.has.documents;
        result->bad = (int64_t)e.set.tokens.has.bad;
    }
    ok = ok && measure(&e, options, result, error);
    vjp_program_destroy(e.program);
    model_free(&e.model);
    text_free(&e.text);
    packed_free(&e.rows);
    token_cache_close(&e.set.tokens);
    model_tokenizer_free(&e.tokenizer);
    free(e.input);
    free(e.target);
    free(e.shown);
    return ok;
}

double evaluate_perplexity(const evaluate_result *r) {
    return exp(r->loss);
}

double evaluate_bits_per_byte(const evaluate_result *r) {
    return r->loss * (double)r->tokens / ((double)r->bytes * 0.69314718055994530942);
}
