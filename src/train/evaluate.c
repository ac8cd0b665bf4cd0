/* SPDX-License-Identifier: MIT */
/* Evaluation of a model on a text; see evaluate.h. */
#include "train/evaluate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "train/data/tokens.h"
#include "train/fit.h"
#include "train/model/llama.h"

typedef struct evaluation {
    vjp_device *device;
    llama_config config;
    llama_options options;
    text_data text;
    model_tokenizer tokenizer;
    train_model model;
    vjp_program *program;
    int32_t *input, *target; /* [batch, context] */
} evaluation;

/* ---- The text and the model -------------------------------------------------------------------------- */

static int32_t token_at(const text_data *text, size_t at) {
    return text->tokens.count ? text->tokens.ids[at] : text->bytes[at];
}

static bool read_text(evaluation *e, const checkpoint *from, const char *path, char error[TRAIN_ERROR]) {
    if (!llama_config_read(from->config.root, &e->config, error) || !model_tokenizer_of(from, &e->tokenizer, error) ||
        !model_tokenizer_fits(&e->tokenizer, from, e->config.vocab_size, error) ||
        !llama_require_weights(&e->config, from, error) || !lora_of(from, &e->config, &e->options.lora, error) ||
        !text_read(path, &e->text, error) || !model_tokenizer_encode(&e->tokenizer, &e->text, error))
        return false;
    return e->text.length > 1 ||
           train_fail(error, "%.300s has one token; at least two are needed to predict one", path);
}

/* Tokens that are predicted: all but the first. */
static int64_t predicted(const evaluation *e) {
    return (int64_t)e->text.length - 1;
}

static int64_t window_count(const evaluation *e) {
    return (predicted(e) + e->options.context - 1) / e->options.context;
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
    if (e->options.context > predicted(e)) e->options.context = predicted(e); /* one short window */
    if (e->options.batch > window_count(e)) e->options.batch = window_count(e);
    return true;
}

static bool build(evaluation *e, const checkpoint *from, char error[TRAIN_ERROR]) {
    size_t count = (size_t)e->options.batch * (size_t)e->options.context;
    llama_build(&e->model, &e->config, &e->options);
    if (vjp_graph_status(e->model.graph) != VJP_OK) return train_fail(error, "%s", vjp_graph_error(e->model.graph));
    e->input = calloc(count, sizeof *e->input);
    e->target = calloc(count, sizeof *e->target);
    if (!e->input || !e->target) return train_fail(error, "there is no memory for %zu tokens at once", count);
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

/* Fills a batch from window `first` on. What is after the text is ignored. Returns how many tokens are predicted. */
static int64_t fill(evaluation *e, int64_t first) {
    const vjp_cross_entropy_attributes defaults = VJP_CROSS_ENTROPY_DEFAULTS;
    int64_t count = e->options.batch * e->options.context, begin = first * e->options.context, used = 0;
    for (int64_t i = 0; i < count; i++) {
        bool inside = begin + i < predicted(e);
        e->input[i] = inside ? token_at(&e->text, (size_t)(begin + i)) : 0;
        e->target[i] = inside ? token_at(&e->text, (size_t)(begin + i + 1)) : (int32_t)defaults.ignore_index;
        used += inside;
    }
    return used;
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
    for (int64_t window = 0; window < result->windows; window += e->options.batch) {
        if (!run(e, fill(e, window), &sum)) return train_fail(error, "%s", vjp_error(e->device));
        if (o->progress && !o->progress(o->progress_context, window, result->windows))
            return train_fail(error, "it was stopped");
    }
    result->loss = sum / (double)result->tokens;
    return true;
}

/* The bytes of all tokens but the first. */
static bool count_bytes(const evaluation *e, int64_t *bytes, char error[TRAIN_ERROR]) {
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
    bool ok = read_text(&e, from, text, error) && choose_sizes(&e, options, error) && build(&e, from, error) &&
              count_bytes(&e, &result->bytes, error);
    if (ok) {
        result->tokens = predicted(&e);
        result->windows = window_count(&e);
        result->context = e.options.context;
    }
    ok = ok && measure(&e, options, result, error);
    vjp_program_destroy(e.program);
    model_free(&e.model);
    text_free(&e.text);
    model_tokenizer_free(&e.tokenizer);
    free(e.input);
    free(e.target);
    return ok;
}

double evaluate_perplexity(const evaluate_result *r) {
    return exp(r->loss);
}

double evaluate_bits_per_byte(const evaluate_result *r) {
    return r->loss * (double)r->tokens / ((double)r->bytes * 0.69314718055994530942);
}
