/* SPDX-License-Identifier: MIT */
/*
 * Reads the config.json of a Llama or a related family; llama_layers.c reads its rotations and windows,
 * llama_config_write.c writes it, llama_weights.c has the weights and presets.
 *
 *     family    model_type  biases                   norms of q, k   window of attention
 *     Llama     llama       attention_bias (all      no              no
 *                           four), mlp_bias
 *     Mistral   mistral     no                       no              all layers, unless sliding_window is null
 *     Qwen 2    qwen2       q, k, v                  no              use_sliding_window: layers from
 *                                                                    max_window_layers, or by layer_types
 *     Qwen 3    qwen3       attention_bias           each head       as Qwen 2
 *     Gemma 3   gemma3_text attention_bias           each head       all layers but every sixth
 *                                                                    (sliding_window_pattern), or by layer_types
 *
 * Gemma 3 also has four norms per layer, a scaled embedding, a gelu, and another rotation in layers with a window.
 *
 * SmolLM and TinyLlama call themselves llama. Where a key is missing, the default is that of transformers.
 */
#include "train/model/llama_config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/model/llama_read.h"

/* Bounds that let every product of sizes stay within int64: 2^12 layers of 7 matrices of 2^48, and the embedding. */
static const int64_t MAX_WIDTH = 1 << 24, MAX_TOKENS = INT32_MAX;

/* The defaults of transformers that all families share. */
static const double DEFAULT_THETA = 10000, DEFAULT_EPS = 1e-6;

/* Those of Gemma. */
static const double DEFAULT_GLOBAL_THETA = 1e6;
static const int64_t DEFAULT_QUERY_SCALAR = 256;

const llama_family_info llama_families[LLAMA_FAMILIES] = {
    [LLAMA_LLAMA] = {"llama", "LlamaForCausalLM", .positions = 2048, .attention_bias = true, .mlp_bias = true},
    [LLAMA_MISTRAL] = {"mistral", "MistralForCausalLM", .positions = 131072, .kv_heads = 8,
                       .windows = LLAMA_ALL_WINDOWED},
    [LLAMA_QWEN2] = {"qwen2", "Qwen2ForCausalLM", .positions = 32768, .kv_heads = 32, .windows = LLAMA_SOME_WINDOWED,
                     .always_qkv_bias = true},
    [LLAMA_QWEN3] = {"qwen3", "Qwen3ForCausalLM", .positions = 32768, .kv_heads = 32, .head_dim = 128,
                     .windows = LLAMA_SOME_WINDOWED, .attention_bias = true, .head_norms = true},
    [LLAMA_GEMMA3] = {"gemma3_text", "Gemma3ForCausalLM", .positions = 131072, .kv_heads = 4, .head_dim = 256,
                      .windows = LLAMA_PATTERN_WINDOWED, .attention_bias = true, .head_norms = true, .gemma = true},
};

const llama_dtype_name llama_dtype_names[LLAMA_DTYPES] = {
    {"float32", VJP_F32}, {"bfloat16", VJP_BF16}, {"float16", VJP_F16}, {"float64", VJP_F64}};

/* Keys that are read, by any family. A family that does not have one of them refuses it: see check_settings(). */
static const char *const read_keys[] = {
    "_sliding_window_pattern",
    "architectures",
    "attn_logit_softcapping",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_interleaved",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "sliding_window_pattern",
    "tie_word_embeddings",
    "torch_dtype",
    "use_bidirectional_attention",
    "use_mrope",
    "use_sliding_window",
    "vocab_size",
};

/* Keys that change no logit and no gradient: how weights were initialised, how text is generated, who wrote the file.
 */
static const char *const ignored_keys[] = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "_commit_hash",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
};

/* ---- Reading ----------------------------------------------------------------------------------------- */

static bool read_sizes(const json_value *root, llama_config *c, char *error) {
    const struct {
        const char *key;
        int64_t *value;
        bool optional;
    } sizes[] = {
        {"vocab_size", &c->vocab_size, false},
        {"hidden_size", &c->hidden_size, false},
        {"intermediate_size", &c->intermediate_size, false},
        {"num_hidden_layers", &c->layers, false},
        {"num_attention_heads", &c->heads, false},
        {"num_key_value_heads", &c->kv_heads, true},
        {"head_dim", &c->head_dim, true},
        {"max_position_embeddings", &c->max_positions, true},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (!sizes[i].optional && !json_has(root, sizes[i].key))
            return train_fail(error, "there is no \"%s\"", sizes[i].key);
        if (!read_integer(root, sizes[i].key, sizes[i].value, error)) return false;
    }
    /* A key that is missing has the family's default; null means what Llama's default is. */
    const llama_family_info *family = &llama_families[c->family];
    bool kv_heads = !json_member(root, "num_key_value_heads") && family->kv_heads;
    bool head_dim = !json_member(root, "head_dim") && family->head_dim;
    if (!json_has(root, "num_key_value_heads")) c->kv_heads = kv_heads ? family->kv_heads : c->heads;
    if (!json_has(root, "head_dim") && c->heads > 0)
        c->head_dim = head_dim ? family->head_dim : c->hidden_size / c->heads;
    return true;
}

static bool read_biases(const json_value *root, llama_config *c, char *error) {
    const llama_family_info *family = &llama_families[c->family];
    bool attention = false;
    if (!read_boolean(root, "attention_bias", &attention, error) ||
        !read_boolean(root, "mlp_bias", &c->mlp_bias, error))
        return false;
    c->output_bias = attention;
    c->qkv_bias = attention || family->always_qkv_bias;
    c->head_norms = family->head_norms;
    return true;
}

/* What Gemma has beside the others, before the rotations are read. */
static bool read_gemma(const json_value *root, llama_config *c, char *error) {
    c->gemma = llama_families[c->family].gemma;
    if (!c->gemma) return true;
    c->tied = true;
    c->rope_theta = DEFAULT_GLOBAL_THETA;
    c->local_theta = DEFAULT_THETA;
    c->query_scalar = DEFAULT_QUERY_SCALAR;
    return read_integer(root, "query_pre_attn_scalar", &c->query_scalar, error);
}

static bool read_tokens(const json_value *root, llama_config *c, char *error) {
    if (!read_integer(root, "bos_token_id", &c->begin_token, error)) return false;
    const json_value *end = json_member(root, "eos_token_id");
    if (!end || end->type == JSON_NULL) return true;
    bool list = end->type == JSON_ARRAY;
    for (const json_value *v = list ? end->first : end; v; v = list ? v->next : NULL) {
        if (v->type != JSON_NUMBER || !v->exact) return refuse("eos_token_id", v, "integers", error);
        if (c->end_count == LLAMA_MAX_ENDS)
            return train_fail(error, "\"eos_token_id\" has %zu elements; vjp takes %d", end->count, LLAMA_MAX_ENDS);
        c->end_tokens[c->end_count++] = v->integer;
    }
    return true;
}

static bool read_dtype(const json_value *root, llama_config *c, char *error) {
    const char *key = json_has(root, "dtype") ? "dtype" : "torch_dtype"; /* the name before transformers 5 */
    if (!json_has(root, key)) return true;
    const json_value *value = json_member(root, key);
    for (int i = 0; i < LLAMA_DTYPES; i++)
        if (is_text(value, llama_dtype_names[i].name)) {
            c->dtype = llama_dtype_names[i].dtype;
            return true;
        }
    return refuse(key, value, "float32, bfloat16, float16 or float64", error);
}

static bool find_family(const json_value *root, llama_config *c, char *error) {
    const json_value *type = json_member(root, "model_type");
    if (!type) return train_fail(error, "there is no \"model_type\"");
    int found = 0;
    while (found < LLAMA_FAMILIES && !is_text(type, llama_families[found].model_type))
        found++;
    if (found == LLAMA_FAMILIES)
        return refuse("model_type", type, "\"llama\", \"mistral\", \"qwen2\", \"qwen3\" and \"gemma3_text\"", error);
    c->family = (llama_family)found;
    const json_value *list = json_member(root, "architectures");
    const json_value *first = list && list->type == JSON_ARRAY ? list->first : list;
    char takes[64];
    snprintf(takes, sizeof takes, "\"%s\"", llama_families[found].architecture);
    if (first && first->type != JSON_NULL && !is_text(first, llama_families[found].architecture))
        return refuse("architectures", first, takes, error);
    return true;
}

/* Refuses settings that would make the model compute another function, and those that are unknown. */
static bool check_settings(const json_value *root, const llama_config *c, char *error) {
    const llama_family_info *family = &llama_families[c->family];
    const bool windows = family->windows != LLAMA_NOT_WINDOWED, some = family->windows == LLAMA_SOME_WINDOWED;
    const bool gemma = family->gemma;
    const struct {
        const char *key;
        enum { TEXT, FALSE, NUMBER, NEVER } kind;
        const char *text;
        double number;
        const char *takes;
        bool read; /* by this family: not checked here */
    } rows[] = {
        {"hidden_act", TEXT, "silu", 0, "\"silu\"", gemma},
        {"hidden_act", NEVER, NULL, 0, "hidden_activation in this family", !gemma},
        {"hidden_activation", TEXT, "gelu_pytorch_tanh", 0, "\"gelu_pytorch_tanh\"", !gemma},
        {"hidden_activation", NEVER, NULL, 0, "hidden_act in this family", gemma},
        {"query_pre_attn_scalar", NEVER, NULL, 0, "null in this family", gemma},
        {"rope_local_base_freq", NEVER, NULL, 0, "null in this family", gemma},
        {"sliding_window_pattern", NEVER, NULL, 0, "null in this family", gemma},
        {"_sliding_window_pattern", NEVER, NULL, 0, "null in this family", gemma},
        {"attn_logit_softcapping", NEVER, NULL, 0, "null", false},
        {"final_logit_softcapping", NEVER, NULL, 0, "null", false},
        {"use_bidirectional_attention", FALSE, NULL, 0, "false", false},
        {"attention_bias", FALSE, NULL, 0, "false in this family", family->attention_bias},
        {"mlp_bias", FALSE, NULL, 0, "false in this family", family->mlp_bias},
        {"use_sliding_window", FALSE, NULL, 0, "false in this family", some},
        {"sliding_window", NEVER, NULL, 0, "null in this family", windows},
        {"attention_dropout", NUMBER, NULL, 0, "0", false},
        {"partial_rotary_factor", NUMBER, NULL, 1, "1", false},
        {"rope_interleaved", FALSE, NULL, 0, "false", false},
        {"use_mrope", FALSE, NULL, 0, "false", false},
        {"quantization_config", NEVER, NULL, 0, "weights that are not quantized", false},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        if (rows[i].read || !json_has(root, rows[i].key)) continue;
        const json_value *v = json_member(root, rows[i].key);
        bool good = rows[i].kind == TEXT     ? is_text(v, rows[i].text)
                    : rows[i].kind == FALSE  ? v->type == JSON_BOOLEAN && !v->boolean
                    : rows[i].kind == NUMBER ? v->type == JSON_NUMBER && v->number == rows[i].number
                                             : false;
        if (!good) return refuse(rows[i].key, v, rows[i].takes, error);
    }
    for (const json_value *v = root->first; v; v = v->next)
        if (!is_one_of(v->key, read_keys, COUNT(read_keys)) && !is_one_of(v->key, ignored_keys, COUNT(ignored_keys)))
            return unknown(v->key, v, error);
    return true;
}

static bool check_sizes(const llama_config *c, char *error);

bool llama_config_read(const json_value *root, llama_config *config, char error[TRAIN_ERROR]) {
    *config = (llama_config){.rope_theta = DEFAULT_THETA, .norm_eps = DEFAULT_EPS, .dtype = VJP_F32, .begin_token = -1};
    if (!find_family(root, config, error) || !check_settings(root, config, error)) return false;
    config->max_positions = llama_families[config->family].positions;
    return read_sizes(root, config, error) && check_sizes(config, error) && read_gemma(root, config, error) &&
           llama_read_rope(root, config, error) && llama_read_windows(root, config, error) &&
           read_biases(root, config, error) && read_real(root, "rms_norm_eps", &config->norm_eps, error) &&
           read_boolean(root, "tie_word_embeddings", &config->tied, error) && read_tokens(root, config, error) &&
           read_dtype(root, config, error) && llama_config_check(config, error);
}

/* ---- Checking ---------------------------------------------------------------------------------------- */

static bool check_sizes(const llama_config *c, char *error) {
    const struct {
        const char *key;
        int64_t value, max;
    } sizes[] = {
        {"vocab_size", c->vocab_size, MAX_TOKENS},
        {"hidden_size", c->hidden_size, MAX_WIDTH},
        {"intermediate_size", c->intermediate_size, MAX_WIDTH},
        {"num_hidden_layers", c->layers, LLAMA_MAX_LAYERS},
        {"num_attention_heads", c->heads, MAX_WIDTH},
        {"num_key_value_heads", c->kv_heads, MAX_WIDTH},
        {"head_dim", c->head_dim, MAX_WIDTH},
        {"max_position_embeddings", c->max_positions, MAX_TOKENS},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].max)
            return train_fail(error, "\"%s\" is %" PRId64 "; vjp takes 1 to %" PRId64, sizes[i].key, sizes[i].value,
                              sizes[i].max);
    if (c->head_dim % 2)
        return train_fail(error, "\"head_dim\" is %" PRId64 "; vjp takes an even one, for the rotation of pairs",
                          c->head_dim);
    if (c->heads * c->head_dim > MAX_WIDTH)
        return train_fail(error, "\"head_dim\" is %" PRId64 " for %" PRId64 " heads; their product is at most %" PRId64,
                          c->head_dim, c->heads, MAX_WIDTH);
    if ((c->family == LLAMA_LLAMA || c->gemma) && c->hidden_size % c->heads) /* transformers refuses it, too */
        return train_fail(error, "\"num_attention_heads\" is %" PRId64 ", which does not divide hidden_size %" PRId64,
                          c->heads, c->hidden_size);
    if (c->heads % c->kv_heads)
        return train_fail(error,
                          "\"num_key_value_heads\" is %" PRId64 ", which does not divide num_attention_heads %" PRId64,
                          c->kv_heads, c->heads);
    return true;
}

bool llama_config_check(const llama_config *c, char error[TRAIN_ERROR]) {
    if (!check_sizes(c, error) || !llama_check_rope(c, error)) return false;
    if (!(c->rope_theta > 0) || !isfinite(c->rope_theta))
        return train_fail(error, "\"rope_theta\" is %g; vjp takes a number above 0", c->rope_theta);
    if (c->gemma && (!(c->local_theta > 0) || !isfinite(c->local_theta)))
        return train_fail(error, "\"rope_local_base_freq\" is %g; vjp takes a number above 0", c->local_theta);
    if (c->gemma && (c->query_scalar < 1 || c->query_scalar > MAX_WIDTH))
        return train_fail(error, "\"query_pre_attn_scalar\" is %" PRId64 "; vjp takes 1 to %" PRId64, c->query_scalar,
                          MAX_WIDTH);
    if (!(c->norm_eps >= 0) || !isfinite(c->norm_eps))
        return train_fail(error, "\"rms_norm_eps\" is %g; vjp takes a number of 0 or more", c->norm_eps);
    return true;
}
