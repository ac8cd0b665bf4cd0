/* SPDX-License-Identifier: MIT */
/* The names and shapes of a Llama's weights, as in transformers, and the presets. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "train/files/checkpoint.h"
#include "train/model/llama_config.h"

/* ---- Weights ----------------------------------------------------------------------------------------- */

enum { PER_LAYER = 9, BEFORE_LAYERS = 1, AFTER_LAYERS = 2 };

int64_t llama_weight_count(const llama_config *config) {
    return BEFORE_LAYERS + config->layers * PER_LAYER + AFTER_LAYERS - config->tied;
}

llama_weight llama_weight_at(const llama_config *c, int64_t index) {
    const int64_t hidden = c->hidden_size, inner = c->intermediate_size;
    const int64_t width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
    const struct {
        const char *name;
        int64_t out, in; /* in 0: a norm */
    } layer[PER_LAYER] = {
        {"input_layernorm", hidden, 0},         {"self_attn.q_proj", width, hidden},
        {"self_attn.k_proj", kv_width, hidden}, {"self_attn.v_proj", kv_width, hidden},
        {"self_attn.o_proj", hidden, width},    {"post_attention_layernorm", hidden, 0},
        {"mlp.gate_proj", inner, hidden},       {"mlp.up_proj", inner, hidden},
        {"mlp.down_proj", hidden, inner},
    };
    llama_weight weight = {.ndim = 2, .shape = {c->vocab_size, hidden}};
    int64_t within = index - BEFORE_LAYERS;
    if (index < BEFORE_LAYERS) {
        snprintf(weight.name, LLAMA_NAME, "model.embed_tokens.weight");
    } else if (within < c->layers * PER_LAYER) {
        snprintf(weight.name, LLAMA_NAME, "model.layers.%" PRId64 ".%s.weight", within / PER_LAYER,
                 layer[within % PER_LAYER].name);
        weight.shape[0] = layer[within % PER_LAYER].out;
        weight.shape[1] = layer[within % PER_LAYER].in;
    } else if (within == c->layers * PER_LAYER) {
        snprintf(weight.name, LLAMA_NAME, "model.norm.weight");
        weight.shape[0] = hidden;
        weight.shape[1] = 0;
    } else {
        snprintf(weight.name, LLAMA_NAME, "lm_head.weight");
    }
    if (!weight.shape[1]) weight.ndim = 1;
    return weight;
}

int64_t llama_size(const llama_config *config) {
    int64_t size = 0;
    for (int64_t i = 0, count = llama_weight_count(config); i < count; i++) {
        llama_weight weight = llama_weight_at(config, i);
        size += weight.shape[0] * (weight.ndim == 2 ? weight.shape[1] : 1);
    }
    return size;
}

bool llama_require_weights(const llama_config *config, const struct checkpoint *from, char error[TRAIN_ERROR]) {
    for (int64_t i = 0, count = llama_weight_count(config); i < count; i++) {
        llama_weight weight = llama_weight_at(config, i);
        if (!checkpoint_tensor(from, weight.name))
            return train_fail(error, "the checkpoint has no tensor %s", weight.name);
    }
    return true;
}

/* ---- Presets ----------------------------------------------------------------------------------------- */

#define LLAMA .rope_theta = 10000, .norm_eps = 1e-5, .dtype = VJP_F32, .begin_token = -1

/* One token per byte: any text can be read without a vocabulary. */
#define BYTES LLAMA, .vocab_size = 256

/*
 * The shapes that other trainers are measured with: GPT-2's sizes as Llamas, TinyLlama, Llama 2. Bytes are valid tokens
 * of their larger vocabularies, whose other tokens never occur.
 */
#define PUBLISHED LLAMA, .tied = true

const llama_preset llama_presets[] = {
    {"tiny",
     LLAMA_USUAL_BATCH,
     {BYTES, .hidden_size = 128, .intermediate_size = 352, .layers = 4, .heads = 4, .kv_heads = 2, .head_dim = 32,
      .max_positions = 128}},
    {"small",
     LLAMA_USUAL_BATCH,
     {BYTES, .hidden_size = 384, .intermediate_size = 1024, .layers = 6, .heads = 6, .kv_heads = 2, .head_dim = 64,
      .max_positions = 256}},
    {"medium",
     LLAMA_USUAL_BATCH,
     {BYTES, .hidden_size = 768, .intermediate_size = 2048, .layers = 12, .heads = 12, .kv_heads = 4, .head_dim = 64,
      .max_positions = 512}},
    {"large",
     LLAMA_USUAL_BATCH,
     {BYTES, .hidden_size = 1024, .intermediate_size = 2816, .layers = 24, .heads = 16, .kv_heads = 4, .head_dim = 64,
      .max_positions = 1024}},
    {"124M",
     32,
     {PUBLISHED, .vocab_size = 50304, .hidden_size = 768, .intermediate_size = 2048, .layers = 12, .heads = 12,
      .kv_heads = 12, .head_dim = 64, .max_positions = 1024}},
    {"350M",
     16,
     {PUBLISHED, .vocab_size = 50304, .hidden_size = 1024, .intermediate_size = 2816, .layers = 24, .heads = 16,
      .kv_heads = 16, .head_dim = 64, .max_positions = 1024}},
    {"1.1B",
     4,
     {PUBLISHED, .vocab_size = 32000, .hidden_size = 2048, .intermediate_size = 5632, .layers = 22, .heads = 32,
      .kv_heads = 4, .head_dim = 64, .max_positions = 2048}},
    {"7B",
     1,
     {PUBLISHED, .vocab_size = 32000, .hidden_size = 4096, .intermediate_size = 11008, .layers = 32, .heads = 32,
      .kv_heads = 32, .head_dim = 128, .max_positions = 2048}},
};

const int llama_preset_count = sizeof llama_presets / sizeof llama_presets[0];

const llama_preset *llama_preset_find(const char *name, char error[TRAIN_ERROR]) {
    char names[TRAIN_ERROR] = "";
    for (int i = 0; i < llama_preset_count; i++) {
        if (strcmp(llama_presets[i].name, name) == 0) return &llama_presets[i];
        size_t length = strlen(names);
        snprintf(names + length, sizeof names - length, "%s%s", i ? ", " : "", llama_presets[i].name);
    }
    train_fail(error, "unknown preset \"%.64s\"; presets are %s", name, names);
    return NULL;
}
