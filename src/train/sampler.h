/* SPDX-License-Identifier: MIT */
/* Generates text with a trained model, token by token. */
#ifndef VJP_TRAIN_SAMPLER_H
#define VJP_TRAIN_SAMPLER_H

#include "text/list.h"
#include "train/files/checkpoint.h"
#include "train/model/llama.h"

typedef struct sampler_options {
    double temperature; /* 0: always the most likely token */
    int64_t top_k;      /* only the k most likely are drawn; 0: all */
    uint64_t seed;
} sampler_options;

typedef struct sampler sampler;

/* Loads a model and its tokenizer; without one its tokens are bytes. The device must outlive it. NULL: `error` says
 * why. */
sampler *sampler_open(vjp_device *device, const checkpoint *from, char error[TRAIN_ERROR]);
void sampler_close(sampler *s);

/* Starts a new text after `prompt`, which may be empty. */
bool sampler_begin(sampler *s, const sampler_options *options, const void *prompt, size_t bytes,
                   char error[TRAIN_ERROR]);

typedef enum sampler_result { SAMPLER_TOKEN, SAMPLER_END, SAMPLER_FAILED } sampler_result;

/*
 * Draws the next token and adds to `text` what is complete by it: a character may take several tokens. The end: the
 * token that ends a text was drawn. It depends on the model, the prompt and the options alone.
 */
sampler_result sampler_next(sampler *s, byte_list *text, char error[TRAIN_ERROR]);

/* Draws from logits. `scratch` holds `count` floats. */
int sampler_draw(const float *logits, int count, const sampler_options *options, uint64_t number, float *scratch);

#endif
