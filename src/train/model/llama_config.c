/* SPDX-License-Identifier: MIT */
/*
 * Reads the config.json of a Llama or a related family; llama_config_write.c writes it, llama_weights.c has the weights
 * and presets.
 *
 *     family    model_type  biases                   norms of q, k   window of attention
 *     Llama     llama       attention_bias (all      no              no
 *                           four), mlp_bias
 *     Mistral   mistral     no                       no              all layers, unless sliding_window is null
 *     Qwen 2    qwen2       q, k, v                  no              use_sliding_window: layers from
 *                                                                    max_window_layers, or by layer_types
 *     Qwen 3    qwen3       attention_bias           each head       as Qwen 2
 *     Gemma 3   gemma3_text attention_bias           each head       all but every sixth (sliding_window_pattern), or
 * by layer_types
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

#include "train/model/llama_families.h"

/* Bounds that let every product of sizes stay within int64: 2^12 layers of 7 matrices of 2^48, and the embedding. */
static const int64_t MAX_WIDTH = 1 << 24, MAX_TOKENS = INT32_MAX;

/* The defaults of transformers that all families share. */
static const double DEFAULT_THETA = 10000, DEFAULT_EPS = 1e-6;

/* Those of Gemma. */
static const double DEFAULT_GLOBAL_THETA = 1e6;
static const int64_t DEFAULT_QUERY_SCALAR = 256, DEFAULT_PATTERN = 6;

static const int64_t DEFAULT_WINDOW = 4096, DEFAULT_FULL_LAYERS = 28;

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

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

/* ---- Reading ----------------------------------------------------------------------------------------- */

static bool refuse(const char *key, const json_value *value, const char *takes, char *error) {
    char shown[JSON_SHOWN];
    return train_fail(error, "\"%s\" is %s; vjp takes %s", key, json_show(value, shown), takes);
}

static bool unknown(const char *key, const json_value *value, char *error) {
    char shown[JSON_SHOWN];
    return train_fail(error,
                      "\"%.64s\" is %s; vjp does not know this setting, which may change what the model computes", key,
                      json_show(value, shown));
}

/* transformers writes null for a missing value. */
static bool read_integer(const json_value *object, const char *key, int64_t *value, char *error) {
    const json_value *v = json_member(object, key);
    if (!v || v->type == JSON_NULL) return true;
    if (v->type != JSON_NUMBER || !v->exact) return refuse(key, v, "an integer", error);
    *value = v->integer;
    return true;
}

static bool read_real(const json_value *object, const char *key, double *value, char *error) {
    const json_value *v = json_member(object, key);
    if (!v || v->type == JSON_NULL) return true;
    if (v->type != JSON_NUMBER) return refuse(key, v, "a number", error);
    *value = v->number;
    return true;
}

static bool read_boolean(const json_value *object, const char *key, bool *value, char *error) {
    const json_value *v = json_member(object, key);
    if (!v || v->type == JSON_NULL) return true;
    if (v->type != JSON_BOOLEAN) return refuse(key, v, "true or false", error);
    *value = v->boolean;
    return true;
}

static bool is_text(const json_value *value, const char *text) {
    return value && value->type == JSON_STRING && strcmp(value->text, text) == 0;
}

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

/* The kind of a rotation, by "rope_type" or, in older files, "type". */
static bool read_rope_kind(const json_value *rope, const char *name, llama_config *c, char *error) {
    static const char *const keys[] = {"rope_type", "type"}, *const kinds[] = {"default", "linear", "llama3"};
    char key[64];
    for (size_t i = 0; i < COUNT(keys); i++) {
        if (!json_has(rope, keys[i])) continue;
        const json_value *kind = json_member(rope, keys[i]);
        size_t found = 0;
        while (found < COUNT(kinds) && !is_text(kind, kinds[found]))
            found++;
        snprintf(key, sizeof key, "%s.%s", name, keys[i]);
        if (found == COUNT(kinds)) return refuse(key, kind, "\"default\", \"linear\" or \"llama3\"", error);
        c->rope.kind = (int)found == 0 ? LLAMA_ROPE_DEFAULT : (int)found == 1 ? LLAMA_ROPE_LINEAR : LLAMA_ROPE_LLAMA3;
    }
    return true;
}

static bool is_one_of(const char *key, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(key, list[i]) == 0) return true;
    return false;
}

/* One rotation; `name` is where it is. */
static bool read_rope_object(const json_value *rope, const char *name, llama_config *c, char *error) {
    static const char *const known[] = {"rope_type",
                                        "type",
                                        "rope_theta",
                                        "factor",
                                        "low_freq_factor",
                                        "high_freq_factor",
                                        "original_max_position_embeddings",
                                        "partial_rotary_factor"};
    char key[64];
    if (!rope || rope->type == JSON_NULL) return true;
    if (rope->type != JSON_OBJECT) return refuse(name, rope, "an object", error);
    if (!read_rope_kind(rope, name, c, error)) return false;
    for (const json_value *v = rope->first; v; v = v->next) {
        snprintf(key, sizeof key, "%s.%.32s", name, v->key);
        if (v->type == JSON_OBJECT || v->type == JSON_ARRAY)
            return refuse(key, v, "one rotation for all layers", error);
        if (v->type != JSON_NULL && !is_one_of(v->key, known, COUNT(known))) return unknown(key, v, error);
    }
    const json_value *partial = json_member(rope, "partial_rotary_factor");
    snprintf(key, sizeof key, "%s.partial_rotary_factor", name);
    if (partial && partial->type != JSON_NULL && !(partial->type == JSON_NUMBER && partial->number == 1))
        return refuse(key, partial, "1", error);
    llama_rope_scaling *scaling = &c->rope;
    return read_real(rope, "rope_theta", &c->rope_theta, error) && read_real(rope, "factor", &scaling->factor, error) &&
           read_real(rope, "low_freq_factor", &scaling->low, error) &&
           read_real(rope, "high_freq_factor", &scaling->high, error) &&
           read_integer(rope, "original_max_position_embeddings", &scaling->original_positions, error);
}

/*
 * "rope_parameters" of transformers 5, "rope_scaling" of 4. Where layers with a window have a rotation of their own, 5
 * has an object for each kind of layer, and 4 has "rope_local_base_freq".
 */
static bool read_rotations(const json_value *root, llama_config *c, char *error) {
    const json_value *both = json_member(root, "rope_parameters");
    if (!read_real(root, "rope_theta", &c->rope_theta, error) ||
        !read_rope_object(json_member(root, "rope_scaling"), "rope_scaling", c, error))
        return false;
    if (!c->gemma) return read_rope_object(both, "rope_parameters", c, error);
    if (!read_real(root, "rope_local_base_freq", &c->local_theta, error)) return false;
    if (!both || both->type == JSON_NULL) return true;
    if (both->type != JSON_OBJECT) return refuse("rope_parameters", both, "an object", error);
    for (const json_value *v = both->first; v; v = v->next) {
        llama_config own = {.rope_theta = c->local_theta};
        char name[64];
        snprintf(name, sizeof name, "rope_parameters.%.32s", v->key);
        bool local = strcmp(v->key, "sliding_attention") == 0;
        if (!local && strcmp(v->key, "full_attention") != 0) return unknown(name, v, error);
        if (!read_rope_object(v, name, local ? &own : c, error)) return false;
        if (local && own.rope.kind != LLAMA_ROPE_DEFAULT)
            return refuse(name, v, "a rotation of kind \"default\" in the layers with a window", error);
        if (local) c->local_theta = own.rope_theta;
    }
    return true;
}

static bool read_rope(const json_value *root, llama_config *c, char *error) {
    if (!read_rotations(root, c, error)) return false;
    if (c->rope.kind == LLAMA_ROPE_LLAMA3 && !c->rope.original_positions) c->rope.original_positions = c->max_positions;
    /* What the kind does not use is forgotten, so that the file written has only what counts. */
    if (c->rope.kind != LLAMA_ROPE_LLAMA3) c->rope.low = c->rope.high = 0, c->rope.original_positions = 0;
    if (c->rope.kind == LLAMA_ROPE_DEFAULT) c->rope.factor = 0;
    return true;
}

/* ---- Windows of attention ---------------------------------------------------------------------------- */

static void set_windowed(llama_config *c, int64_t layer, bool windowed) {
    uint8_t bit = (uint8_t)(1u << layer % 8), *byte = &c->windowed[layer / 8];
    *byte = (uint8_t)(windowed ? *byte | bit : *byte & ~bit);
}

static bool is_windowed(const llama_config *c, int64_t layer) {
    return c->windowed[layer / 8] >> layer % 8 & 1;
}

int64_t llama_window(const llama_config *config, int64_t layer) {
    return is_windowed(config, layer) ? config->window : 0;
}

/* "layer_types" names each layer; a family whose layers are all alike must have it so. */
static bool read_layer_types(const json_value *root, llama_config *c, char *error) {
    const json_value *types = json_member(root, "layer_types");
    if (!types || types->type == JSON_NULL) return true;
    if (types->type != JSON_ARRAY || types->count != (size_t)c->layers)
        return train_fail(error, "\"layer_types\" must be a list of %" PRId64 " names, one per layer", c->layers);
    int64_t layer = 0;
    for (const json_value *v = types->first; v; v = v->next, layer++) {
        bool windowed = is_text(v, "sliding_attention");
        if (!windowed && !is_text(v, "full_attention"))
            return refuse("layer_types", v, "\"full_attention\" and \"sliding_attention\"", error);
        if (windowed && !c->window)
            return train_fail(error, "\"layer_types\" has \"sliding_attention\", but no window is set");
        if (llama_families[c->family].windows == LLAMA_ALL_WINDOWED && windowed != is_windowed(c, layer))
            return refuse("layer_types", v, "layers that are all alike in this family", error);
        set_windowed(c, layer, windowed);
    }
    return true;
}

/* How often a layer has no window: 0: never. */
static bool read_pattern(const json_value *root, const llama_config *c, int64_t *pattern, char *error) {
    static const char *const keys[] = {"_sliding_window_pattern", "sliding_window_pattern"};
    *pattern = 0;
    if (llama_families[c->family].windows != LLAMA_PATTERN_WINDOWED) return true;
    *pattern = DEFAULT_PATTERN;
    for (size_t i = 0; i < COUNT(keys); i++)
        if (!read_integer(root, keys[i], pattern, error)) return false;
    return *pattern >= 1 ||
           train_fail(error, "\"sliding_window_pattern\" is %" PRId64 "; vjp takes 1 or more", *pattern);
}

/*
 * As transformers: the layers from max_window_layers have the window, or all but every sixth, unless layer_types says
 * otherwise.
 */
static bool read_windows(const json_value *root, llama_config *c, char *error) {
    const llama_windows windows = llama_families[c->family].windows;
    bool used = windows == LLAMA_ALL_WINDOWED || windows == LLAMA_PATTERN_WINDOWED;
    int64_t full = windows == LLAMA_SOME_WINDOWED ? DEFAULT_FULL_LAYERS : 0, window = DEFAULT_WINDOW, pattern;
    if (!read_pattern(root, c, &pattern, error)) return false;
    if (windows == LLAMA_SOME_WINDOWED && (!read_boolean(root, "use_sliding_window", &used, error) ||
                                           !read_integer(root, "max_window_layers", &full, error)))
        return false;
    if (windows != LLAMA_NOT_WINDOWED && !read_integer(root, "sliding_window", &window, error)) return false;
    const json_value *given = json_member(root, "sliding_window");
    if (given && given->type == JSON_NULL) used = false;
    if (used && (window < 1 || window > MAX_TOKENS))
        return train_fail(error, "\"sliding_window\" is %" PRId64 "; vjp takes 1 to %" PRId64 ", or null", window,
                          MAX_TOKENS);
    if (used) c->window = window;
    for (int64_t layer = 0; layer < c->layers && used; layer++)
        set_windowed(c, layer, layer >= full && (!pattern || (layer + 1) % pattern));
    if (!read_layer_types(root, c, error)) return false;
    bool any = false;
    for (int64_t layer = 0; layer < c->layers; layer++)
        any = any || is_windowed(c, layer);
    if (!any) c->window = 0;
    return true;
}

/* ---- The rest ---------------------------------------------------------------------------------------- */

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
           read_rope(root, config, error) && read_windows(root, config, error) && read_biases(root, config, error) &&
           read_real(root, "rms_norm_eps", &config->norm_eps, error) &&
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

static bool check_rope(const llama_config *c, char *error) {
    const llama_rope_scaling *r = &c->rope;
    if (r->kind != LLAMA_ROPE_DEFAULT && (!(r->factor >= 1) || !isfinite(r->factor)))
        return train_fail(error, "the \"factor\" of the rotation's scaling is %g; vjp takes 1 or more", r->factor);
    if (r->kind != LLAMA_ROPE_LLAMA3) return true;
    if (!(r->low > 0) || !(r->high > r->low) || !isfinite(r->high))
        return train_fail(error, "\"low_freq_factor\" is %g and \"high_freq_factor\" is %g; vjp takes 0 < low < high",
                          r->low, r->high);
    return (r->original_positions >= 1 && r->original_positions <= MAX_TOKENS) ||
           train_fail(error, "\"original_max_position_embeddings\" is %" PRId64 "; vjp takes 1 to %" PRId64,
                      r->original_positions, MAX_TOKENS);
}

bool llama_config_check(const llama_config *c, char error[TRAIN_ERROR]) {
    if (!check_sizes(c, error) || !check_rope(c, error)) return false;
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

/* ---- Rotations --------------------------------------------------------------------------------------- */

double llama_angle(const llama_config *c, bool local, int64_t i) {
    static const double TURN = 6.283185307179586;
    const llama_rope_scaling *r = &c->rope;
    bool own = local && c->local_theta > 0;
    double angle = pow(own ? c->local_theta : c->rope_theta, -2.0 * (double)i / (double)c->head_dim);
    if (own || r->kind == LLAMA_ROPE_DEFAULT) return angle;
    if (r->kind == LLAMA_ROPE_LINEAR) return angle / r->factor;
    /* llama3: turns within the original context; few turns shrink by the factor, many stay, between them a mixture. */
    double turns = (double)r->original_positions * angle / TURN;
    double kept = fmin(1, fmax(0, (turns - r->low) / (r->high - r->low)));
    return (1 - kept) * angle / r->factor + kept * angle;
}
