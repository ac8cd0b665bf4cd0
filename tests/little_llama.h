/* SPDX-License-Identifier: MIT */
/* The little Llama of the trainer's tests, and rows of tokens to train it with. */
#ifndef VJP_TESTS_LITTLE_LLAMA_H
#define VJP_TESTS_LITTLE_LLAMA_H

#include "train/model/llama.h"

enum { VOCABULARY = 23, CONTEXT = 9 };

static inline llama_config little_config(int64_t vocabulary, int64_t layers) {
    return (llama_config){.vocab_size = vocabulary,
                          .hidden_size = 16,
                          .intermediate_size = 20,
                          .layers = layers,
                          .heads = 2,
                          .kv_heads = 1,
                          .head_dim = 8,
                          .max_positions = CONTEXT,
                          .rope_theta = 10000,
                          .norm_eps = 1e-5,
                          .dtype = VJP_F32,
                          .begin_token = -1};
}

/* With weights in f32, and `dtype` for what is computed. */
static inline void build_little(train_model *model, int64_t layers, int64_t batch, vjp_dtype dtype) {
    const llama_config config = little_config(VOCABULARY, layers);
    const llama_options options = {.batch = batch, .context = CONTEXT, .dtype = dtype};
    llama_build(model, &config, &options);
}

/* For train_source: row r of all data is the same however they are split into parts; *batch is an int64_t. */
static inline void fill_little(void *batch, bool validation, uint64_t part, void *input, int32_t *target) {
    int64_t rows = *(int64_t *)batch;
    for (int64_t i = 0; i < rows * CONTEXT; i++) {
        int64_t r = (int64_t)part * rows + i / CONTEXT + (validation ? 1000 : 0), t = i % CONTEXT;
        ((int32_t *)input)[i] = (int32_t)((r * r + t * (r + 3)) % VOCABULARY);
        target[i] = (int32_t)((r * r + (t + 1) * (r + 3)) % VOCABULARY);
    }
}

#endif
