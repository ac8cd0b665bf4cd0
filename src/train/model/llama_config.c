/* SPDX-License-Identifier: MIT */
/* Reads and writes the config.json of a Llama. llama_weights.c has the weights and presets. */
#include "train/model/llama_config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Bounds that let every product of sizes stay within int64: 2^12 layers of 7 matrices of 2^48, and the embedding. */
static const int64_t MAX_WIDTH = 1 << 24, MAX_LAYERS = 1 << 12, MAX_TOKENS = INT32_MAX;

/* The defaults of transformers. */
static const int64_t DEFAULT_POSITIONS = 2048;
static const double DEFAULT_THETA = 10000, DEFAULT_EPS = 1e-6, INITIALIZER_RANGE = 0.02;

static const struct {
    const char *name;
    vjp_dtype dtype;
} dtypes[] = {{"float32", VJP_F32}, {"bfloat16", VJP_BF16}, {"float16", VJP_F16}, {"float64", VJP_F64}};

enum { DTYPE_COUNT = sizeof dtypes / sizeof dtypes[0] };

/* ---- Reading ----------------------------------------------------------------------------------------- */

static bool refuse(const char *key, const json_value *value, const char *takes, char *error) {
    char shown[JSON_SHOWN];
    return train_fail(error, "\"%s\" is %s; vjp takes %s", key, json_show(value, shown), takes);
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
    if (!json_has(root, "num_key_value_heads")) c->kv_heads = c->heads;
    if (!json_has(root, "head_dim") && c->heads > 0) c->head_dim = c->hidden_size / c->heads;
    return true;
}

/* "rope_parameters" of transformers 5, "rope_scaling" of 4: only the plain rotation is supported. */
static bool read_rope_object(const json_value *root, const char *name, llama_config *c, char *error) {
    static const char *const kinds[] = {"rope_type", "type"};
    const json_value *rope = json_member(root, name);
    char key[64];
    if (!rope || rope->type == JSON_NULL) return true;
    if (rope->type != JSON_OBJECT) return refuse(name, rope, "an object", error);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const json_value *kind = json_member(rope, kinds[i]);
        snprintf(key, sizeof key, "%s.%s", name, kinds[i]);
        if (kind && !is_text(kind, "default")) return refuse(key, kind, "\"default\"", error);
    }
    for (const json_value *v = rope->first; v; v = v->next)
        if (v->type == JSON_OBJECT || v->type == JSON_ARRAY) {
            snprintf(key, sizeof key, "%s.%.32s", name, v->key);
            return refuse(key, v, "one rotation for all layers", error);
        }
    return read_real(rope, "rope_theta", &c->rope_theta, error);
}

static bool read_rope(const json_value *root, llama_config *c, char *error) {
    return read_real(root, "rope_theta", &c->rope_theta, error) && read_rope_object(root, "rope_scaling", c, error) &&
           read_rope_object(root, "rope_parameters", c, error);
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
    for (int i = 0; i < DTYPE_COUNT; i++)
        if (is_text(value, dtypes[i].name)) {
            c->dtype = dtypes[i].dtype;
            return true;
        }
    return refuse(key, value, "float32, bfloat16, float16 or float64", error);
}

/* Refuses options that would make the model compute another function. */
static bool check_kind(const json_value *root, char *error) {
    static const struct {
        const char *key;
        enum { TEXT, FALSE, NUMBER, ABSENT } kind;
        const char *text;
        double number;
        const char *takes;
    } rows[] = {
        {"hidden_act", TEXT, "silu", 0, "\"silu\""},
        {"attention_bias", FALSE, NULL, 0, "false"},
        {"mlp_bias", FALSE, NULL, 0, "false"},
        {"attention_dropout", NUMBER, NULL, 0, "0"},
        {"partial_rotary_factor", NUMBER, NULL, 1, "1"},
        {"quantization_config", ABSENT, NULL, 0, "weights that are not quantized"},
    };
    const json_value *type = json_member(root, "model_type");
    if (!type) return train_fail(error, "there is no \"model_type\"");
    if (!is_text(type, "llama")) return refuse("model_type", type, "\"llama\"", error);
    const json_value *architectures = json_member(root, "architectures");
    if (json_has(root, "architectures")) {
        const json_value *first = architectures->type == JSON_ARRAY ? architectures->first : architectures;
        if (first && !is_text(first, "LlamaForCausalLM"))
            return refuse("architectures", first, "\"LlamaForCausalLM\"", error);
    }
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (!json_has(root, rows[i].key)) continue;
        const json_value *v = json_member(root, rows[i].key);
        bool good = rows[i].kind == TEXT     ? is_text(v, rows[i].text)
                    : rows[i].kind == FALSE  ? v->type == JSON_BOOLEAN && !v->boolean
                    : rows[i].kind == NUMBER ? v->type == JSON_NUMBER && v->number == rows[i].number
                                             : false;
        if (!good) return refuse(rows[i].key, v, rows[i].takes, error);
    }
    const json_value *partial = json_member(json_member(root, "rope_parameters"), "partial_rotary_factor");
    if (partial && partial->type != JSON_NULL && !(partial->type == JSON_NUMBER && partial->number == 1))
        return refuse("rope_parameters.partial_rotary_factor", partial, "1", error);
    return true;
}

bool llama_config_read(const json_value *root, llama_config *config, char error[TRAIN_ERROR]) {
    *config = (llama_config){.max_positions = DEFAULT_POSITIONS,
                             .rope_theta = DEFAULT_THETA,
                             .norm_eps = DEFAULT_EPS,
                             .dtype = VJP_F32,
                             .begin_token = -1};
    return check_kind(root, error) && read_sizes(root, config, error) && read_rope(root, config, error) &&
           read_real(root, "rms_norm_eps", &config->norm_eps, error) &&
           read_boolean(root, "tie_word_embeddings", &config->tied, error) && read_tokens(root, config, error) &&
           read_dtype(root, config, error) && llama_config_check(config, error);
}

bool llama_config_check(const llama_config *c, char error[TRAIN_ERROR]) {
    const struct {
        const char *key;
        int64_t value, max;
    } sizes[] = {
        {"vocab_size", c->vocab_size, MAX_TOKENS},
        {"hidden_size", c->hidden_size, MAX_WIDTH},
        {"intermediate_size", c->intermediate_size, MAX_WIDTH},
        {"num_hidden_layers", c->layers, MAX_LAYERS},
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
    if (c->hidden_size % c->heads)
        return train_fail(error, "\"num_attention_heads\" is %" PRId64 ", which does not divide hidden_size %" PRId64,
                          c->heads, c->hidden_size);
    if (c->heads % c->kv_heads)
        return train_fail(error,
                          "\"num_key_value_heads\" is %" PRId64 ", which does not divide num_attention_heads %" PRId64,
                          c->kv_heads, c->heads);
    if (!(c->rope_theta > 0) || !isfinite(c->rope_theta))
        return train_fail(error, "\"rope_theta\" is %g; vjp takes a number above 0", c->rope_theta);
    if (!(c->norm_eps >= 0) || !isfinite(c->norm_eps))
        return train_fail(error, "\"rms_norm_eps\" is %g; vjp takes a number of 0 or more", c->norm_eps);
    return true;
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

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

char *llama_config_write(const llama_config *config) {
    json_writer w = {.indented = true};
    const char *dtype = "float32";
    for (int i = 0; i < DTYPE_COUNT; i++)
        if (dtypes[i].dtype == config->dtype) dtype = dtypes[i].name;
    json_put_object(&w, NULL);
    json_put_array(&w, "architectures");
    json_put_text(&w, NULL, "LlamaForCausalLM");
    json_put_array_end(&w);
    json_put_text(&w, "model_type", "llama");
    json_put_integer(&w, "vocab_size", config->vocab_size);
    json_put_integer(&w, "hidden_size", config->hidden_size);
    json_put_integer(&w, "intermediate_size", config->intermediate_size);
    json_put_integer(&w, "num_hidden_layers", config->layers);
    json_put_integer(&w, "num_attention_heads", config->heads);
    json_put_integer(&w, "num_key_value_heads", config->kv_heads);
    json_put_integer(&w, "head_dim", config->head_dim);
    json_put_integer(&w, "max_position_embeddings", config->max_positions);
    json_put_text(&w, "hidden_act", "silu");
    json_put_real(&w, "rms_norm_eps", config->norm_eps);
    json_put_real(&w, "initializer_range", INITIALIZER_RANGE);
    /* transformers 4 reads this one and ignores the object; 5 reads the object. */
    json_put_real(&w, "rope_theta", config->rope_theta);
    json_put_object(&w, "rope_parameters");
    json_put_real(&w, "rope_theta", config->rope_theta);
    json_put_text(&w, "rope_type", "default");
    json_put_object_end(&w);
    json_put_boolean(&w, "attention_bias", false);
    json_put_real(&w, "attention_dropout", 0);
    json_put_boolean(&w, "mlp_bias", false);
    json_put_boolean(&w, "tie_word_embeddings", config->tied);
    put_tokens(&w, config);
    json_put_text(&w, "torch_dtype", dtype); /* the name that both versions read */
    json_put_boolean(&w, "use_cache", true);
    json_put_object_end(&w);
    return json_take(&w);
}
