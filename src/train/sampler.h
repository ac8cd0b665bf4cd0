/* Text from a trained model, a byte at a time. */
#ifndef VJP_TRAIN_SAMPLER_H
#define VJP_TRAIN_SAMPLER_H

#include "train/files/checkpoint.h"
#include "train/model/llama.h"

typedef struct sampler_options {
    double temperature; /* 0: always the likeliest byte */
    int64_t top_k;      /* only the k likeliest take part; 0: all */
    uint64_t seed;
} sampler_options;

typedef struct sampler sampler;

/* Loads a model that reads and writes bytes. The device must outlive it. NULL: `error` says why. */
sampler *sampler_open(vjp_device *device, const checkpoint *from, char error[TRAIN_ERROR]);
void sampler_close(sampler *s);

/* Begins anew behind `prompt`, which may be empty. */
void sampler_begin(sampler *s, const sampler_options *options, const void *prompt, size_t bytes);

/* The next byte, or -1 with a sentence. Which one is a function of the model, the prompt and the options alone. */
int sampler_next(sampler *s, char error[TRAIN_ERROR]);

/* One draw from logits: the same rule for everybody. `scratch` holds `count` floats. */
int sampler_draw(const float *logits, int count, const sampler_options *options, uint64_t number, float *scratch);

#endif
