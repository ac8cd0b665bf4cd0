/* SPDX-License-Identifier: MIT */
/* Generates text with a trained model, byte by byte. */
#ifndef VJP_TRAIN_SAMPLER_H
#define VJP_TRAIN_SAMPLER_H

#include "train/files/checkpoint.h"
#include "train/model/llama.h"

typedef struct sampler_options {
    double temperature; /* 0: always the most likely byte */
    int64_t top_k;      /* only the k most likely are drawn; 0: all */
    uint64_t seed;
} sampler_options;

typedef struct sampler sampler;

/* Loads a model that reads and writes bytes. The device must outlive it. NULL: `error` says why. */
sampler *sampler_open(vjp_device *device, const checkpoint *from, char error[TRAIN_ERROR]);
void sampler_close(sampler *s);

/* Starts a new text after `prompt`, which may be empty. */
void sampler_begin(sampler *s, const sampler_options *options, const void *prompt, size_t bytes);

/* The next byte, or -1 with a sentence. It depends on the model, the prompt and the options alone. */
int sampler_next(sampler *s, char error[TRAIN_ERROR]);

/* Draws from logits. `scratch` holds `count` floats. */
int sampler_draw(const float *logits, int count, const sampler_options *options, uint64_t number, float *scratch);

#endif
