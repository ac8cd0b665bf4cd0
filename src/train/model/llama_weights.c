/* SPDX-License-Identifier: MIT */
/* The names and shapes of a model's weights, as in transformers, and the presets. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "train/files/checkpoint.h"
#include "train/model/llama_config.h"

/* ---- Weights ----------------------------------------------------------------------------------------- */

enum { MAX_PER_LAYER = 20, BEFORE_LAYERS = 1, AFTER_LAYERS = 2 };

typedef struct layer_weight {
    const char *name;
    int64_t out, in; /* in 0: a norm or a bias */
} layer_weight;

/* The weights of a layer; returns how many it has. */
static int list_layer(const llama_config *c, layer_weight list[MAX_PER_LAYER]) {
    const int64_t hidden = c->hidden_size, inner = c->intermediate_size;
    const int64_t width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
    const struct {
        layer_weight weight;
        bool present;
    } all[MAX_PER_LAYER] = {
        {{"input_layernorm.weight", hidden, 0}, true},
        {{"self_attn.q_proj.weight", width, hidden}, true},
        {{"self_attn.q_proj.bias", width, 0}, c->qkv_bias},
        {{"self_attn.k_proj.weight", kv_width, hidden}, true},
        {{"self_attn.k_proj.bias", kv_width, 0}, c->qkv_bias},
        {{"self_attn.v_proj.weight", kv_width, hidden}, true},
        {{"self_attn.v_proj.bias", kv_width, 0}, c->qkv_bias},
        {{"self_attn.q_norm.weight", c->head_dim, 0}, c->head_norms},
        {{"self_attn.k_norm.weight", c->head_dim, 0}, c->head_norms},
        {{"self_attn.o_proj.weight", hidden, width}, true},
        {{"self_attn.o_proj.bias", hidden, 0}, c->output_bias},
        {{"post_attention_layernorm.weight", hidden, 0}, true},
        {{"pre_feedforward_layernorm.weight", hidden, 0}, c->gemma},
        {{"mlp.gate_proj.weight", inner, hidden}, true},
        {{"mlp.gate_proj.bias", inner, 0}, c->mlp_bias},
        {{"mlp.up_proj.weight", inner, hidden}, true},
        {{"mlp.up_proj.bias", inner, 0}, c->mlp_bias},
        {{"mlp.down_proj.weight", hidden, inner}, true},
        {{"mlp.down_proj.bias", hidden, 0}, c->mlp_bias},
        {{"post_feedforward_layernorm.weight", hidden, 0}, c->gemma},
    };
    int count = 0;
    for (int i = 0; i < MAX_PER_LAYER; i++)
        if (all[i].present) list[count++] = all[i].weight;
    return count;
}

int64_t llama_weight_count(const llama_config *config) {
    layer_weight layer[MAX_PER_LAYER];
    return BEFORE_LAYERS + config->layers * list_layer(config, layer) + AFTER_LAYERS - config->tied;
}

llama_weight llama_weight_at(const llama_config *c, int64_t index) {
    layer_weight layer[MAX_PER_LAYER];
    llama_weight weight = {.ndim = 2, .shape = {c->vocab_size, c->hidden_size}};
    const int64_t each = list_layer(c, layer), within = index - BEFORE_LAYERS;
    if (index < BEFORE_LAYERS) {
        snprintf(weight.name, LLAMA_NAME, "model.embed_tokens.weight");
    } else if (within < c->layers * each) {
        const layer_weight *own = &layer[within % each];
        snprintf(weight.name, LLAMA_NAME, "model.layers.%" PRId64 ".%s", within / each, own->name);
        weight.shape[0] = own->out;
        weight.shape[1] = own->in;
    } else if (within == c->layers * each) {
        snprintf(weight.name, LLAMA_NAME, "model.norm.weight");
        weight.shape[0] = c->hidden_size;
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

static bool check_shape(const llama_weight *weight, const safetensors_tensor *tensor, char *error) {
    vjp_shape is = {.ndim = tensor->ndim < VJP_MAX_DIMS ? tensor->ndim : VJP_MAX_DIMS},
              must_be = {.ndim = weight->ndim};
    char is_text[VJP_SHAPE_TEXT], must_be_text[VJP_SHAPE_TEXT];
    memcpy(is.size, tensor->shape, sizeof is.size);
    memcpy(must_be.size, weight->shape, sizeof weight->shape);
    bool same = is.ndim == must_be.ndim;
    for (int i = 0; i < must_be.ndim && same; i++)
        same = is.size[i] == must_be.size[i];
    return same || train_fail(error, "tensor %s is %s in the file; by config.json it is %s", weight->name,
                              vjp_shape_text(&is, is_text), vjp_shape_text(&must_be, must_be_text));
}

/* Tensors that some files have and no model reads: a head that is the embedding, and tables of rotations. */
static bool is_spare(const llama_config *config, const char *name) {
    static const char table[] = ".rotary_emb.inv_freq";
    size_t length = strlen(name), end = sizeof table - 1;
    return (config->tied && strcmp(name, "lm_head.weight") == 0) ||
           (length > end && strcmp(name + length - end, table) == 0);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const llama_weight *)a)->name, ((const llama_weight *)b)->name);
}

bool llama_require_weights(const llama_config *config, const struct checkpoint *from, char error[TRAIN_ERROR]) {
    int64_t count = llama_weight_count(config);
    llama_weight *weights = calloc((size_t)count, sizeof *weights);
    bool ok = weights || train_fail(error, "there is no memory for the names of %" PRId64 " tensors", count);
    for (int64_t i = 0; i < count && ok; i++) {
        weights[i] = llama_weight_at(config, i);
        const safetensors_tensor *tensor = checkpoint_tensor(from, weights[i].name);
        if (!tensor)
            ok = train_fail(error, "the checkpoint has no tensor %s", weights[i].name);
        else
            ok = check_shape(&weights[i], tensor, error);
    }
    if (ok) qsort(weights, (size_t)count, sizeof *weights, by_name);
    for (size_t i = 0; i < from->model_count && ok; i++) {
        llama_weight key = {.ndim = 0};
        snprintf(key.name, sizeof key.name, "%s", from->model[i]->name);
        if (!bsearch(&key, weights, (size_t)count, sizeof *weights, by_name) && !is_spare(config, from->model[i]->name))
            ok = train_fail(error, "the checkpoint has a tensor %.64s, which config.json gives no place", key.name);
    }
    free(weights);
    return ok;
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
