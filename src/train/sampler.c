/* SPDX-License-Identifier: MIT */
/*
 * Sampling: the model is run over the last `context` tokens, and the next is drawn from its prediction. The window
 * has a fixed length; after the text it holds zeros, which causal attention never reads.
 */
#include "train/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "text/utf8.h"
#include "train/data/tokens.h"
#include "train/fit.h"

struct sampler {
    vjp_device *device;
    train_model model;
    vjp_program *program;
    sampler_options options;
    int32_t *window; /* [context] */
    int64_t used;
    uint64_t drawn;
    size_t vocabulary;       /* tokens of the model */
    size_t drawable;         /* those that a text can have: the tokenizer's, or the bytes */
    float *logits, *scratch; /* [context, vocabulary], [drawable] */
    model_tokenizer tokenizer;
    token_list drawn_tokens; /* whose text is not complete yet, and those before, which it may depend on */
    size_t shown;            /* of them */
};

/* ---- Drawing ----------------------------------------------------------------------------------------- */

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

int sampler_draw(const float *logits, int count, const sampler_options *options, uint64_t number, float *scratch) {
    int best = 0;
    for (int i = 1; i < count; i++)
        if (logits[i] > logits[best]) best = i;
    if (options->temperature <= 0) return best;
    float threshold = -INFINITY;
    if (options->top_k > 0 && options->top_k < count) {
        memcpy(scratch, logits, (size_t)count * sizeof *scratch);
        qsort(scratch, (size_t)count, sizeof *scratch, descending);
        threshold = scratch[options->top_k - 1];
    }
    double total = 0;
    for (int i = 0; i < count; i++)
        if (logits[i] >= threshold) total += exp((logits[i] - logits[best]) / options->temperature);
    vjp_philox words = {{(uint32_t)number, (uint32_t)(number >> 32), 0, 0x64726177u /* "draw" */}};
    words = vjp_philox4x32_10(words, (uint32_t)options->seed, (uint32_t)(options->seed >> 32));
    double wanted = total * ((double)words.word[0] + (double)words.word[1] * 0x1p-32) * 0x1p-32, sum = 0;
    for (int i = 0; i < count; i++) {
        if (!(logits[i] >= threshold)) continue;
        sum += exp((logits[i] - logits[best]) / options->temperature);
        if (wanted < sum) return i;
    }
    return best;
}

/* ---- The model --------------------------------------------------------------------------------------- */

static bool load_weights(sampler *s, const checkpoint *from, char error[TRAIN_ERROR]) {
    for (int i = 0; i < s->model.parameters; i++) {
        const model_parameter *p = &s->model.parameter[i];
        const safetensors_tensor *tensor = checkpoint_tensor(from, p->name);
        if (!tensor) return train_fail(error, "the checkpoint has no tensor %s", p->name);
        if (!model_load(&s->model, s->program, p->value, tensor, error)) return false;
    }
    return true;
}

static bool build(sampler *s, const checkpoint *from, char error[TRAIN_ERROR]) {
    llama_config config;
    if (!llama_config_read(from->config.root, &config, error)) return false;
    if (!model_tokenizer_of(from, &s->tokenizer, error) ||
        !model_tokenizer_fits(&s->tokenizer, from, config.vocab_size, error) ||
        !llama_require_weights(&config, from, error))
        return false;
    const llama_options options = {.batch = 1, .context = config.max_positions, .dtype = VJP_F32};
    llama_build(&s->model, &config, &options);
    s->window = calloc((size_t)options.context, sizeof *s->window);
    s->vocabulary = (size_t)config.vocab_size;
    s->logits = calloc((size_t)options.context, s->vocabulary * sizeof *s->logits);
    s->drawable = s->tokenizer.tokens ? (size_t)tokenizer_size(s->tokenizer.tokens) : TEXT_TOKENS;
    s->scratch = malloc(s->drawable * sizeof *s->scratch);
    if (!s->window || !s->logits || !s->scratch) return train_fail(error, "there is no memory to sample the model");
    if (!fit_program(s->device, s->model.graph, &s->model.logits, 1, "sampling this model", error)) return false;
    if (vjp_compile(s->device, s->model.graph, &s->model.logits, 1, NULL, &s->program) != VJP_OK)
        return train_fail(error, "%s", vjp_error(s->device));
    return load_weights(s, from, error);
}

sampler *sampler_open(vjp_device *device, const checkpoint *from, char error[TRAIN_ERROR]) {
    sampler *s = calloc(1, sizeof *s);
    if (!s) {
        train_fail(error, "there is no memory for a sampler");
        return NULL;
    }
    s->device = device;
    if (build(s, from, error)) return s;
    sampler_close(s);
    return NULL;
}

void sampler_close(sampler *s) {
    if (!s) return;
    vjp_program_destroy(s->program);
    model_free(&s->model);
    free(s->window);
    free(s->logits);
    free(s->scratch);
    model_tokenizer_free(&s->tokenizer);
    token_list_free(&s->drawn_tokens);
    free(s);
}

/* ---- A text ------------------------------------------------------------------------------------------ */

/* Adds a token to the window. When it is full, its older half is dropped, and the newer half is the context. */
static void push(sampler *s, int token) {
    if (s->used == s->model.context) {
        int64_t kept = s->model.context / 2;
        memmove(s->window, s->window + s->used - kept, (size_t)kept * sizeof *s->window);
        memset(s->window + kept, 0, (size_t)(s->model.context - kept) * sizeof *s->window);
        s->used = kept;
    }
    s->window[s->used++] = token;
}

static bool push_prompt(sampler *s, const char *prompt, size_t bytes, char error[TRAIN_ERROR]) {
    const model_tokenizer *t = &s->tokenizer;
    if (!t->tokens) {
        for (size_t i = 0; i < bytes; i++)
            push(s, (unsigned char)prompt[i]);
        if (!bytes) push(s, '\n');
        return true;
    }
    token_list ids = {0};
    bool ok = tokenizer_encode(t->tokens, prompt, bytes, true, &ids, error);
    for (size_t i = 0; i < ids.count; i++)
        if (i + 1 < ids.count || ids.ids[i] != t->end) push(s, ids.ids[i]); /* the text is to continue */
    /* A text begins after the end of another one. */
    if (ok && !s->used) push(s, t->begin >= 0 ? t->begin : t->end >= 0 ? t->end : 0);
    token_list_free(&ids);
    return ok;
}

bool sampler_begin(sampler *s, const sampler_options *options, const void *prompt, size_t bytes,
                   char error[TRAIN_ERROR]) {
    s->options = *options;
    s->drawn = 0;
    s->used = 0;
    s->shown = s->drawn_tokens.count = 0;
    memset(s->window, 0, (size_t)s->model.context * sizeof *s->window);
    if (!push_prompt(s, prompt, bytes, error)) return false;
    /* Decoders treat the first token of a text in their own way: the last one before the new text is that. */
    int32_t last = s->window[s->used - 1];
    if (s->tokenizer.tokens && !token_list_add(&s->drawn_tokens, &last, 1))
        return train_fail(error, "there is no memory to sample the model");
    s->shown = s->drawn_tokens.count;
    return true;
}

/*
 * Adds the text of the tokens that are not shown yet, unless it ends inside a character: what the tokens since the last
 * time decode to, less what those among them that are shown decode to.
 */
static bool add_text(sampler *s, int32_t token, byte_list *text, char error[TRAIN_ERROR]) {
    enum { MAX_WAIT = 8 }; /* tokens of one character; more are broken */
    const model_tokenizer *t = &s->tokenizer;
    if (!t->tokens) {
        char byte = (char)token;
        return byte_list_add(text, &byte, 1) || train_fail(error, "there is no memory for the text");
    }
    byte_list before = {0}, now = {0};
    bool ok = token_list_add(&s->drawn_tokens, &token, 1) || train_fail(error, "there is no memory for the text");
    ok = ok && tokenizer_decode(t->tokens, s->drawn_tokens.ids, s->shown, false, &before, error) &&
         tokenizer_decode(t->tokens, s->drawn_tokens.ids, s->drawn_tokens.count, false, &now, error);
    bool replaced = ok && now.count >= 3 && memcmp(now.bytes + now.count - 3, "\xef\xbf\xbd", 3) == 0;
    bool whole = ok && utf8_valid(now.bytes, now.count) == now.count && !replaced;
    if (ok && (whole || s->drawn_tokens.count - s->shown >= MAX_WAIT)) {
        if (now.count > before.count) ok = byte_list_add(text, now.bytes + before.count, now.count - before.count);
        if (!ok) train_fail(error, "there is no memory for the text");
        /* The tokens that were just shown stay, for those that follow. */
        memmove(s->drawn_tokens.ids, s->drawn_tokens.ids + s->shown,
                (s->drawn_tokens.count - s->shown) * sizeof *s->drawn_tokens.ids);
        s->drawn_tokens.count -= s->shown;
        s->shown = s->drawn_tokens.count;
    }
    byte_list_free(&before);
    byte_list_free(&now);
    return ok;
}

sampler_result sampler_next(sampler *s, byte_list *text, char error[TRAIN_ERROR]) {
    size_t context = (size_t)s->model.context;
    if (vjp_program_write(s->program, s->model.input, s->window, context * sizeof *s->window) != VJP_OK ||
        vjp_program_run(s->program) != VJP_OK || vjp_synchronize(s->device) != VJP_OK ||
        vjp_program_read(s->program, s->model.logits, s->logits, context * s->vocabulary * sizeof *s->logits) !=
            VJP_OK) {
        train_fail(error, "%s", vjp_error(s->device));
        return SAMPLER_FAILED;
    }
    /* The model may have more tokens than a text can have. */
    const float *last = s->logits + (size_t)(s->used - 1) * s->vocabulary;
    int token = sampler_draw(last, (int)s->drawable, &s->options, s->drawn++, s->scratch);
    if (s->tokenizer.tokens && token == s->tokenizer.end) return SAMPLER_END;
    push(s, token);
    return add_text(s, token, text, error) ? SAMPLER_TOKEN : SAMPLER_FAILED;
}
