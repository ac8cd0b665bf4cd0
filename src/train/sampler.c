/* SPDX-License-Identifier: MIT */
/*
 * Sampling: the model is run over the last `context` bytes, and the next byte is drawn from its prediction. The window
 * has a fixed length; after the text it holds zeros, which causal attention never reads.
 */
#include "train/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "train/data/text.h"

struct sampler {
    vjp_device *device;
    train_model model;
    vjp_program *program;
    sampler_options options;
    int32_t *window; /* [context] */
    int64_t used;
    uint64_t drawn;
    size_t vocabulary;       /* tokens of the model: the bytes first */
    float *logits, *scratch; /* [context, vocabulary], [TEXT_TOKENS] */
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
    if (!text_is_for(from, config.vocab_size, error) || !llama_require_weights(&config, from, error)) return false;
    const llama_options options = {.batch = 1, .context = config.max_positions, .dtype = VJP_F32};
    llama_build(&s->model, &config, &options);
    s->window = calloc((size_t)options.context, sizeof *s->window);
    s->vocabulary = (size_t)config.vocab_size;
    s->logits = calloc((size_t)options.context, s->vocabulary * sizeof *s->logits);
    s->scratch = malloc(TEXT_TOKENS * sizeof *s->scratch);
    if (!s->window || !s->logits || !s->scratch) return train_fail(error, "there is no memory to sample the model");
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
    free(s);
}

/* ---- A text ------------------------------------------------------------------------------------------ */

/* Adds a byte to the window. When it is full, its older half is dropped, and the newer half is the context. */
static void push(sampler *s, int byte) {
    if (s->used == s->model.context) {
        int64_t kept = s->model.context / 2;
        memmove(s->window, s->window + s->used - kept, (size_t)kept * sizeof *s->window);
        memset(s->window + kept, 0, (size_t)(s->model.context - kept) * sizeof *s->window);
        s->used = kept;
    }
    s->window[s->used++] = byte;
}

void sampler_begin(sampler *s, const sampler_options *options, const void *prompt, size_t bytes) {
    s->options = *options;
    s->drawn = 0;
    s->used = 0;
    memset(s->window, 0, (size_t)s->model.context * sizeof *s->window);
    for (size_t i = 0; i < bytes; i++)
        push(s, ((const unsigned char *)prompt)[i]);
    if (!bytes) push(s, '\n');
}

int sampler_next(sampler *s, char error[TRAIN_ERROR]) {
    size_t context = (size_t)s->model.context;
    if (vjp_program_write(s->program, s->model.input, s->window, context * sizeof *s->window) != VJP_OK ||
        vjp_program_run(s->program) != VJP_OK || vjp_synchronize(s->device) != VJP_OK ||
        vjp_program_read(s->program, s->model.logits, s->logits, context * s->vocabulary * sizeof *s->logits) !=
            VJP_OK) {
        train_fail(error, "%s", vjp_error(s->device));
        return -1;
    }
    /* Tokens past the bytes never occur in a text. */
    const float *last = s->logits + (size_t)(s->used - 1) * s->vocabulary;
    int byte = sampler_draw(last, TEXT_TOKENS, &s->options, s->drawn++, s->scratch);
    push(s, byte);
    return byte;
}
