/* SPDX-License-Identifier: MIT */
/*
 * Llama's config.json: files of transformers 4 and 5 are read, what vjp does not compute is refused by its key, what
 * vjp writes reads back the same; the weights have the standard names and shapes; the presets are valid models.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/model/llama_config.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static bool read_text(const char *text, llama_config *config, char *error) {
    json_document document;
    if (!json_parse(text, strlen(text), &document, error)) fail_msg("%s: %s", text, error);
    bool ok = llama_config_read(document.root, config, error);
    json_free(&document);
    return ok;
}

#define SIZES                                                                                                          \
    "\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": 88, "                 \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4"

/* As transformers 5 writes it. */
static const char of_five[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"attention_bias\": false, \"attention_dropout\": 0.0, "
    "\"bos_token_id\": 1, \"dtype\": \"bfloat16\", \"eos_token_id\": 2, \"head_dim\": 16, \"hidden_act\": \"silu\", "
    "\"initializer_range\": 0.02, \"max_position_embeddings\": 64, \"mlp_bias\": false, \"num_key_value_heads\": 2, "
    "\"pad_token_id\": null, \"pretraining_tp\": 1, \"rms_norm_eps\": 1e-06, \"rope_parameters\": {\"rope_theta\": "
    "500000.0, \"rope_type\": \"default\"}, \"tie_word_embeddings\": true, \"transformers_version\": \"5.0.0\", "
    "\"use_cache\": true, " SIZES "}";

/* As transformers 4 writes it, for a model with several end tokens. */
static const char of_four[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"bos_token_id\": null, \"eos_token_id\": [3, 4, 5], \"rope_theta\": "
    "20000, \"rope_scaling\": null, \"rms_norm_eps\": 1e-05, \"tie_word_embeddings\": false, \"torch_dtype\": "
    "\"float16\", " SIZES "}";

static void test_read(void **state) {
    (void)state;
    char error[TRAIN_ERROR];
    llama_config c;
    if (!read_text(of_five, &c, error)) fail_msg("%s", error);
    assert_true(c.vocab_size == 256 && c.hidden_size == 32 && c.intermediate_size == 88 && c.layers == 2);
    assert_true(c.heads == 4 && c.kv_heads == 2 && c.head_dim == 16 && c.max_positions == 64);
    assert_true(c.rope_theta == 500000 && c.norm_eps == 1e-6 && c.tied && c.dtype == VJP_BF16);
    assert_true(c.begin_token == 1 && c.end_count == 1 && c.end_tokens[0] == 2);
    if (!read_text(of_four, &c, error)) fail_msg("%s", error);
    assert_true(c.kv_heads == 4 && c.head_dim == 8 && c.max_positions == 2048);
    assert_true(c.rope_theta == 20000 && c.norm_eps == 1e-5 && !c.tied && c.dtype == VJP_F16);
    assert_true(c.begin_token == -1 && c.end_count == 3 && c.end_tokens[2] == 5);
    if (!read_text("{" SIZES "}", &c, error)) fail_msg("%s", error);
    assert_true(c.rope_theta == 10000 && c.norm_eps == 1e-6 && !c.tied && c.dtype == VJP_F32 && c.end_count == 0);
}

/* What is added to a valid file; a key that is already there is replaced. */
static const struct {
    const char *key, *value;
    const char *says; /* NULL: it is accepted */
} rows[] = {
    {"unknown", "{\"a\": []}", NULL},
    {"model_type", "\"mistral\"", "\"model_type\" is \"mistral\"; vjp takes \"llama\""},
    {"model_type", "7", "\"model_type\" is 7"},
    {"architectures", "[\"LlamaForSequenceClassification\"]",
     "\"architectures\" is \"LlamaForSequenceClassification\""},
    {"architectures", "[]", NULL},
    {"architectures", "null", NULL},
    {"hidden_act", "\"gelu\"", "\"hidden_act\" is \"gelu\"; vjp takes \"silu\""},
    {"attention_bias", "true", "\"attention_bias\" is true; vjp takes false"},
    {"mlp_bias", "true", "\"mlp_bias\" is true"},
    {"attention_dropout", "0.1", "\"attention_dropout\" is 0.1"},
    {"attention_dropout", "0", NULL},
    {"partial_rotary_factor", "0.5", "\"partial_rotary_factor\" is 0.5"},
    {"quantization_config", "{\"bits\": 4}", "\"quantization_config\" is {...}"},
    {"quantization_config", "null", NULL},
    {"rope_scaling", "{\"type\": \"default\"}", NULL},
    {"rope_scaling", "{\"type\": \"linear\", \"factor\": 2.0}", "\"rope_scaling.type\" is \"linear\""},
    {"rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 8.0}", "\"rope_scaling.rope_type\" is \"llama3\""},
    {"rope_scaling", "[]", "\"rope_scaling\" is []"},
    {"rope_parameters", "{\"rope_type\": \"yarn\"}", "\"rope_parameters.rope_type\" is \"yarn\""},
    {"rope_parameters", "{\"full_attention\": {}}", "\"rope_parameters.full_attention\" is {}"},
    {"rope_parameters", "{\"partial_rotary_factor\": 0.5}", "\"rope_parameters.partial_rotary_factor\" is 0.5"},
    {"rope_parameters", "{\"rope_theta\": \"x\"}", "\"rope_theta\" is \"x\""},
    {"rope_theta", "-1", "\"rope_theta\" is -1"},
    {"rms_norm_eps", "-1e-5", "\"rms_norm_eps\" is -1e-05"},
    {"rms_norm_eps", "\"1e-5\"", "\"rms_norm_eps\" is \"1e-5\""},
    {"tie_word_embeddings", "1", "\"tie_word_embeddings\" is 1; vjp takes true or false"},
    {"torch_dtype", "\"float8_e4m3fn\"", "\"torch_dtype\" is \"float8_e4m3fn\""},
    {"dtype", "\"int8\"", "\"dtype\" is \"int8\""},
    {"eos_token_id", "[1, \"2\"]", "\"eos_token_id\" is \"2\""},
    {"eos_token_id", "[1, 2, 3, 4, 5, 6, 7, 8, 9]", "\"eos_token_id\" has 9 elements"},
    {"bos_token_id", "1.5", "\"bos_token_id\" is 1.5"},
    {"head_dim", "7", "\"head_dim\" is 7; vjp takes an even one"},
    {"head_dim", "8388608", "their product is at most"},
    {"hidden_size", "null", "there is no \"hidden_size\""},
    {"hidden_size", "32.0", "\"hidden_size\" is 32.0; vjp takes an integer"},
    {"hidden_size", "0", "\"hidden_size\" is 0; vjp takes 1 to"},
    {"hidden_size", "34", "\"num_attention_heads\" is 4, which does not divide hidden_size 34"},
    {"hidden_size", "9223372036854775807", "\"hidden_size\" is 9223372036854775807"},
    {"num_hidden_layers", "-1", "\"num_hidden_layers\" is -1"},
    {"num_hidden_layers", "1000000", "\"num_hidden_layers\" is 1000000"},
    {"num_attention_heads", "0", "\"num_attention_heads\" is 0"},
    {"num_key_value_heads", "3", "\"num_key_value_heads\" is 3, which does not divide"},
    {"num_key_value_heads", "0", "\"num_key_value_heads\" is 0"},
    {"vocab_size", "2147483648", "\"vocab_size\" is 2147483648"},
    {"max_position_embeddings", "0", "\"max_position_embeddings\" is 0"},
};

static void test_refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(rows); i++) {
        /* The valid file's key is renamed. */
        char text[1024], quoted[64], error[TRAIN_ERROR] = "";
        snprintf(text, sizeof text, "{" SIZES ", \"%s\": %s}", rows[i].key, rows[i].value);
        snprintf(quoted, sizeof quoted, "\"%s\"", rows[i].key);
        char *first = strstr(text, quoted);
        if (strstr(first + 1, quoted)) first[1] = '_';
        llama_config c;
        bool ok = read_text(text, &c, error);
        if (ok != !rows[i].says) fail_msg("%s = %s: %s", rows[i].key, rows[i].value, ok ? "taken" : error);
        if (!ok && !strstr(error, rows[i].says)) fail_msg("\"%s\" does not say \"%s\"", error, rows[i].says);
    }
    llama_config c;
    char error[TRAIN_ERROR];
    assert_false(read_text("[]", &c, error));
    assert_non_null(strstr(error, "no \"model_type\""));
}

static void require_same(const llama_config *a, const llama_config *b) {
    assert_true(a->vocab_size == b->vocab_size && a->hidden_size == b->hidden_size);
    assert_true(a->intermediate_size == b->intermediate_size && a->layers == b->layers && a->heads == b->heads);
    assert_true(a->kv_heads == b->kv_heads && a->head_dim == b->head_dim && a->max_positions == b->max_positions);
    assert_true(a->rope_theta == b->rope_theta && a->norm_eps == b->norm_eps && a->tied == b->tied);
    assert_true(a->dtype == b->dtype && a->begin_token == b->begin_token && a->end_count == b->end_count);
    assert_memory_equal(a->end_tokens, b->end_tokens, sizeof a->end_tokens);
}

static void round_trip(const llama_config *config) {
    char *text = llama_config_write(config), error[TRAIN_ERROR];
    llama_config back;
    assert_non_null(text);
    if (!read_text(text, &back, error)) fail_msg("%s", error);
    require_same(config, &back);
    free(text);
}

static void test_round_trip(void **state) {
    (void)state;
    char error[TRAIN_ERROR];
    llama_config c;
    for (int i = 0; i < llama_preset_count; i++) {
        if (!llama_config_check(&llama_presets[i].config, error)) fail_msg("%s: %s", llama_presets[i].name, error);
        round_trip(&llama_presets[i].config);
    }
    assert_true(read_text(of_five, &c, error));
    round_trip(&c);
    assert_true(read_text(of_four, &c, error));
    round_trip(&c);
    c.rope_theta = 12345.678901234567;
    round_trip(&c);
}

static void test_weights(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int64_t out, in;
    } expected[] = {
        {"model.embed_tokens.weight", 256, 32},
        {"model.layers.0.input_layernorm.weight", 32, 0},
        {"model.layers.0.self_attn.q_proj.weight", 64, 32},
        {"model.layers.0.self_attn.k_proj.weight", 32, 32},
        {"model.layers.0.self_attn.v_proj.weight", 32, 32},
        {"model.layers.0.self_attn.o_proj.weight", 32, 64},
        {"model.layers.0.post_attention_layernorm.weight", 32, 0},
        {"model.layers.0.mlp.gate_proj.weight", 88, 32},
        {"model.layers.0.mlp.up_proj.weight", 88, 32},
        {"model.layers.0.mlp.down_proj.weight", 32, 88},
        {"model.layers.1.input_layernorm.weight", 32, 0},
        {"model.norm.weight", 32, 0},
        {"lm_head.weight", 256, 32},
    };
    char error[TRAIN_ERROR];
    llama_config c;
    assert_true(read_text(of_five, &c, error));
    assert_int_equal(llama_weight_count(&c), 1 + 2 * 9 + 1);
    int64_t tied_size = llama_size(&c);
    c.tied = false;
    int64_t count = llama_weight_count(&c);
    assert_int_equal(count, 1 + 2 * 9 + 2);
    assert_int_equal(llama_size(&c), tied_size + 256 * 32);
    assert_int_equal(tied_size, 256 * 32 + 2 * (2 * 32 + 2 * 64 * 32 + 2 * 32 * 32 + 3 * 88 * 32) + 32);
    for (size_t i = 0; i < COUNT(expected); i++) {
        /* The first eleven come first, the last two last. */
        int64_t index = i < 11 ? (int64_t)i : count - (int64_t)COUNT(expected) + (int64_t)i;
        llama_weight w = llama_weight_at(&c, index);
        assert_string_equal(w.name, expected[i].name);
        assert_int_equal(w.ndim, expected[i].in ? 2 : 1);
        assert_true(w.shape[0] == expected[i].out && w.shape[1] == expected[i].in);
    }
}

static void test_presets(void **state) {
    (void)state;
    char error[TRAIN_ERROR];
    assert_string_equal(llama_preset_find("small", error)->name, "small");
    assert_int_equal(llama_preset_find("tiny", error)->config.vocab_size, 256);
    assert_null(llama_preset_find("huge", error));
    assert_string_equal(error, "unknown preset \"huge\"; presets are tiny, small, medium, large, 124M, 350M, 1.1B, 7B");
    static const struct {
        const char *name;
        int64_t parameters, batch, context;
    } published[] = {{"124M", 123587328, 32, 1024},
                     {"350M", 359842816, 16, 1024},
                     {"1.1B", 1034512384, 4, 2048},
                     {"7B", 6607343616, 1, 2048}};
    for (size_t i = 0; i < COUNT(published); i++) {
        const llama_preset *preset = llama_preset_find(published[i].name, error);
        assert_non_null(preset);
        assert_int_equal(llama_size(&preset->config), published[i].parameters);
        assert_int_equal(preset->batch, published[i].batch);
        assert_int_equal(preset->config.max_positions, published[i].context);
        assert_true(preset->config.tied);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read),    cmocka_unit_test(test_refusals), cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_weights), cmocka_unit_test(test_presets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
