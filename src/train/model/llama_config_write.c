/* SPDX-License-Identifier: MIT */
/* Writes the config.json of a Llama or a related family, with the keys that transformers 4 and 5 read. */
#include <inttypes.h>

#include "train/model/llama_families.h"

static const double INITIALIZER_RANGE = 0.02; /* of transformers, which new weights there are made with */

static void put_tokens(json_writer *w, const llama_config *c) {
    if (c->begin_token >= 0)
        json_put_integer(w, "bos_token_id", c->begin_token);
    else
        json_put_null(w, "bos_token_id");
    if (c->end_count == 1) {
        json_put_integer(w, "eos_token_id", c->end_tokens[0]);
    } else if (c->end_count == 0) {
        json_put_null(w, "eos_token_id");
    } else {
        json_put_array(w, "eos_token_id");
        for (int i = 0; i < c->end_count; i++)
            json_put_integer(w, NULL, c->end_tokens[i]);
        json_put_array_end(w);
    }
}

static const char *const rope_kinds[] = {
    [LLAMA_ROPE_DEFAULT] = "default", [LLAMA_ROPE_LINEAR] = "linear", [LLAMA_ROPE_LLAMA3] = "llama3"};

static void put_rotation(json_writer *w, const char *name, const llama_rope_scaling *r, double theta) {
    json_put_object(w, name);
    json_put_real(w, "rope_theta", theta);
    json_put_text(w, "rope_type", rope_kinds[r->kind]);
    if (r->kind != LLAMA_ROPE_DEFAULT) json_put_real(w, "factor", r->factor);
    if (r->kind == LLAMA_ROPE_LLAMA3) {
        json_put_real(w, "low_freq_factor", r->low);
        json_put_real(w, "high_freq_factor", r->high);
        json_put_integer(w, "original_max_position_embeddings", r->original_positions);
    }
    json_put_object_end(w);
}

/* transformers 4 reads "rope_theta" and "rope_scaling" and ignores "rope_parameters"; 5 reads that. */
static void put_rope(json_writer *w, const llama_config *c) {
    const llama_rope_scaling plain = {.kind = LLAMA_ROPE_DEFAULT};
    json_put_real(w, "rope_theta", c->rope_theta);
    if (c->local_theta > 0) json_put_real(w, "rope_local_base_freq", c->local_theta);
    if (c->rope.kind != LLAMA_ROPE_DEFAULT) put_rotation(w, "rope_scaling", &c->rope, c->rope_theta);
    if (!(c->local_theta > 0)) {
        put_rotation(w, "rope_parameters", &c->rope, c->rope_theta);
        return;
    }
    json_put_object(w, "rope_parameters");
    put_rotation(w, "full_attention", &c->rope, c->rope_theta);
    put_rotation(w, "sliding_attention", &plain, c->local_theta);
    json_put_object_end(w);
}

/* max_window_layers is for versions before "layer_types": exact where the windows are those of the last layers. */
static void put_windows(json_writer *w, const llama_config *c, llama_windows windows) {
    if (windows == LLAMA_NOT_WINDOWED) return;
    if (c->window)
        json_put_integer(w, "sliding_window", c->window);
    else
        json_put_null(w, "sliding_window");
    if (windows == LLAMA_ALL_WINDOWED) return;
    int64_t full = 0;
    while (full < c->layers && !llama_window(c, full))
        full++;
    if (windows == LLAMA_SOME_WINDOWED) {
        json_put_boolean(w, "use_sliding_window", c->window > 0);
        json_put_integer(w, "max_window_layers", full);
    }
    json_put_array(w, "layer_types");
    for (int64_t layer = 0; layer < c->layers; layer++)
        json_put_text(w, NULL, llama_window(c, layer) ? "sliding_attention" : "full_attention");
    json_put_array_end(w);
}

char *llama_config_write(const llama_config *config) {
    json_writer w = {.indented = true};
    const llama_family_info *family = &llama_families[config->family];
    const char *dtype = "float32";
    for (int i = 0; i < LLAMA_DTYPES; i++)
        if (llama_dtype_names[i].dtype == config->dtype) dtype = llama_dtype_names[i].name;
    json_put_object(&w, NULL);
    json_put_array(&w, "architectures");
    json_put_text(&w, NULL, family->architecture);
    json_put_array_end(&w);
    json_put_text(&w, "model_type", family->model_type);
    json_put_integer(&w, "vocab_size", config->vocab_size);
    json_put_integer(&w, "hidden_size", config->hidden_size);
    json_put_integer(&w, "intermediate_size", config->intermediate_size);
    json_put_integer(&w, "num_hidden_layers", config->layers);
    json_put_integer(&w, "num_attention_heads", config->heads);
    json_put_integer(&w, "num_key_value_heads", config->kv_heads);
    json_put_integer(&w, "head_dim", config->head_dim);
    json_put_integer(&w, "max_position_embeddings", config->max_positions);
    json_put_text(&w, config->gemma ? "hidden_activation" : "hidden_act", config->gemma ? "gelu_pytorch_tanh" : "silu");
    if (config->gemma) json_put_integer(&w, "query_pre_attn_scalar", config->query_scalar);
    json_put_real(&w, "rms_norm_eps", config->norm_eps);
    json_put_real(&w, "initializer_range", INITIALIZER_RANGE);
    put_rope(&w, config);
    if (family->attention_bias) json_put_boolean(&w, "attention_bias", config->output_bias);
    if (family->mlp_bias) json_put_boolean(&w, "mlp_bias", config->mlp_bias);
    json_put_real(&w, "attention_dropout", 0);
    put_windows(&w, config, family->windows);
    json_put_boolean(&w, "tie_word_embeddings", config->tied);
    put_tokens(&w, config);
    json_put_text(&w, "torch_dtype", dtype); /* the name that both versions read */
    json_put_boolean(&w, "use_cache", true);
    json_put_object_end(&w);
    return json_take(&w);
}
