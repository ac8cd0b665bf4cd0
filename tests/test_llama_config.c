/* SPDX-License-Identifier: MIT */
/*
 * config.json of Llama and the related families: files of transformers 4 and 5 are read, what vjp does not compute or
 * does not know is refused by its key, what vjp writes reads back the same; the weights have the standard names and
 * shapes; the presets are valid models.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
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

static const struct {
    const char *key, *value;
} sizes[] = {{"model_type", "\"llama\""}, {"vocab_size", "256"},      {"hidden_size", "32"},
             {"intermediate_size", "88"}, {"num_hidden_layers", "2"}, {"num_attention_heads", "4"}};

/* What is added to a valid file; a key that is already there is replaced. */
static const struct {
    const char *key, *value;
    const char *says; /* NULL: it is accepted */
} rows[] = {
    {"unknown", "{\"a\": []}", "\"unknown\" is {...}; vjp does not know this setting"},
    {"attn_logit_softcapping", "30.5", "\"attn_logit_softcapping\" is 30.5; vjp takes null"},
    {"final_logit_softcapping", "30.5", "\"final_logit_softcapping\" is 30.5; vjp takes null"},
    {"hidden_activation", "\"silu\"", "\"hidden_activation\" is \"silu\"; vjp takes hidden_act in this family"},
    {"query_pre_attn_scalar", "8", "\"query_pre_attn_scalar\" is 8; vjp takes null in this family"},
    {"rope_local_base_freq", "8", "\"rope_local_base_freq\" is 8; vjp takes null in this family"},
    {"sliding_window_pattern", "2", "\"sliding_window_pattern\" is 2; vjp takes null in this family"},
    {"use_bidirectional_attention", "true", "\"use_bidirectional_attention\" is true; vjp takes false"},
    {"initializer_range", "0.1", NULL},
    {"transformers.js_config", "{\"a\": []}", NULL},
    {"model_type", "\"gemma2\"", "\"model_type\" is \"gemma2\"; vjp takes \"llama\", \"mistral\""},
    {"model_type", "7", "\"model_type\" is 7"},
    {"architectures", "[\"LlamaForSequenceClassification\"]",
     "\"architectures\" is \"LlamaForSequenceClassification\""},
    {"architectures", "[]", NULL},
    {"architectures", "null", NULL},
    {"hidden_act", "\"gelu\"", "\"hidden_act\" is \"gelu\"; vjp takes \"silu\""},
    {"attention_bias", "true", NULL},
    {"mlp_bias", "true", NULL},
    {"mlp_bias", "1", "\"mlp_bias\" is 1; vjp takes true or false"},
    {"sliding_window", "4096", "\"sliding_window\" is 4096; vjp takes null in this family"},
    {"sliding_window", "null", NULL},
    {"use_sliding_window", "true", "\"use_sliding_window\" is true; vjp takes false in this family"},
    {"layer_types", "[\"full_attention\", \"full_attention\"]", NULL},
    {"layer_types", "[\"full_attention\", \"sliding_attention\"]", "no window is set"},
    {"layer_types", "[\"full_attention\"]", "must be a list of 2 names"},
    {"layer_types", "[\"full_attention\", \"linear_attention\"]", "\"layer_types\" is \"linear_attention\""},
    {"rope_interleaved", "true", "\"rope_interleaved\" is true; vjp takes false"},
    {"rope_interleaved", "false", NULL},
    {"use_mrope", "true", "\"use_mrope\" is true"},
    {"attention_dropout", "0.1", "\"attention_dropout\" is 0.1"},
    {"attention_dropout", "0", NULL},
    {"partial_rotary_factor", "0.5", "\"partial_rotary_factor\" is 0.5"},
    {"quantization_config", "{\"bits\": 4}", "\"quantization_config\" is {...}"},
    {"quantization_config", "null", NULL},
    {"rope_scaling", "{\"type\": \"default\"}", NULL},
    {"rope_scaling", "{\"type\": \"linear\", \"factor\": 2.0}", NULL},
    {"rope_scaling", "{\"type\": \"linear\"}", "\"factor\" of the rotation's scaling is 0"},
    {"rope_scaling", "{\"type\": \"linear\", \"factor\": 0.5}", "\"factor\" of the rotation's scaling is 0.5"},
    {"rope_scaling", "{\"type\": \"dynamic\", \"factor\": 2.0}", "\"rope_scaling.type\" is \"dynamic\""},
    {"rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 8.0}", "\"low_freq_factor\" is 0 and"},
    {"rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, \"high_freq_factor\": 4}",
     "\"low_freq_factor\" is 4 and \"high_freq_factor\" is 4; vjp takes 0 < low < high"},
    {"rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, \"high_freq_factor\": 4}",
     NULL},
    {"rope_scaling", "{\"type\": \"linear\", \"factor\": 2.0, \"attention_factor\": 3}",
     "\"rope_scaling.attention_factor\" is 3; vjp does not know"},
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
        char text[1024], error[TRAIN_ERROR] = "";
        int length = snprintf(text, sizeof text, "{\"%s\": %s", rows[i].key, rows[i].value);
        for (size_t k = 0; k < COUNT(sizes); k++)
            if (strcmp(sizes[k].key, rows[i].key) != 0)
                length +=
                    snprintf(text + length, sizeof text - (size_t)length, ", \"%s\": %s", sizes[k].key, sizes[k].value);
        snprintf(text + length, sizeof text - (size_t)length, "}");
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
    assert_true(a->family == b->family && a->qkv_bias == b->qkv_bias && a->output_bias == b->output_bias);
    assert_true(a->mlp_bias == b->mlp_bias && a->head_norms == b->head_norms && a->window == b->window);
    assert_true(a->rope.kind == b->rope.kind && a->rope.factor == b->rope.factor && a->rope.low == b->rope.low);
    assert_true(a->rope.high == b->rope.high && a->rope.original_positions == b->rope.original_positions);
    assert_memory_equal(a->windowed, b->windowed, sizeof a->windowed);
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

/* ---- Families ---------------------------------------------------------------------------------------- */

#define RELATED                                                                                                        \
    "\"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": 88, \"num_hidden_layers\": 3, "                  \
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 16"

/* A file and what is read from it, or why it is refused. */
static const struct {
    const char *type, *more;
    bool qkv_bias, output_bias, mlp_bias, head_norms, gemma;
    int64_t window[3]; /* of each layer */
    const char *says;
} families[] = {
    {.type = "llama", .more = ""},
    {.type = "llama", .more = ", \"attention_bias\": true", .qkv_bias = true, .output_bias = true},
    {.type = "llama", .more = ", \"mlp_bias\": true", .mlp_bias = true},
    {.type = "mistral", .more = "", .window = {4096, 4096, 4096}},
    {.type = "mistral", .more = ", \"sliding_window\": null"},
    {.type = "mistral", .more = ", \"sliding_window\": 9", .window = {9, 9, 9}},
    {.type = "mistral", .more = ", \"sliding_window\": 0", .says = "\"sliding_window\" is 0; vjp takes 1 to"},
    {.type = "mistral", .more = ", \"attention_bias\": true", .says = "\"attention_bias\" is true; vjp takes false in"},
    {.type = "mistral",
     .more = ", \"layer_types\": [\"sliding_attention\", \"full_attention\", \"full_attention\"]",
     .says = "\"layer_types\" is \"full_attention\"; vjp takes layers that are all alike"},
    {.type = "qwen2", .more = "", .qkv_bias = true},
    {.type = "qwen2", .more = ", \"sliding_window\": 9, \"max_window_layers\": 1", .qkv_bias = true},
    {.type = "qwen2",
     .more = ", \"sliding_window\": 9, \"max_window_layers\": 1, \"use_sliding_window\": true",
     .qkv_bias = true,
     .window = {0, 9, 9}},
    {.type = "qwen2", .more = ", \"sliding_window\": 9, \"use_sliding_window\": true", .qkv_bias = true},
    {.type = "qwen3", .more = "", .head_norms = true},
    {.type = "qwen3",
     .more = ", \"attention_bias\": true, \"sliding_window\": 9, \"use_sliding_window\": true, \"layer_types\": "
             "[\"sliding_attention\", \"full_attention\", \"sliding_attention\"]",
     .qkv_bias = true,
     .output_bias = true,
     .head_norms = true,
     .window = {9, 0, 9}},
    {.type = "qwen3", .more = ", \"mlp_bias\": true", .says = "\"mlp_bias\" is true; vjp takes false in this family"},
    {.type = "gemma3_text", .more = "", .head_norms = true, .gemma = true, .window = {4096, 4096, 4096}},
    {.type = "gemma3_text",
     .more = ", \"sliding_window\": 9, \"sliding_window_pattern\": 2, \"hidden_activation\": \"gelu_pytorch_tanh\"",
     .head_norms = true,
     .gemma = true,
     .window = {9, 0, 9}},
    {.type = "gemma3_text",
     .more = ", \"sliding_window\": 9, \"_sliding_window_pattern\": 6, \"attention_bias\": true, \"layer_types\": "
             "[\"full_attention\", \"full_attention\", \"sliding_attention\"]",
     .qkv_bias = true,
     .output_bias = true,
     .head_norms = true,
     .gemma = true,
     .window = {0, 0, 9}},
    {.type = "gemma3_text", .more = ", \"sliding_window_pattern\": 0", .says = "\"sliding_window_pattern\" is 0"},
    {.type = "gemma3_text", .more = ", \"hidden_act\": \"silu\"", .says = "vjp takes hidden_activation in this family"},
    {.type = "gemma3_text", .more = ", \"hidden_activation\": \"gelu\"", .says = "takes \"gelu_pytorch_tanh\""},
    {.type = "gemma3_text", .more = ", \"query_pre_attn_scalar\": 0", .says = "\"query_pre_attn_scalar\" is 0"},
    {.type = "gemma3_text", .more = ", \"rope_local_base_freq\": 0", .says = "\"rope_local_base_freq\" is 0"},
    {.type = "gemma3_text",
     .more = ", \"rope_parameters\": {\"sliding_attention\": {\"rope_type\": \"linear\", \"factor\": 2}}",
     .says = "a rotation of kind \"default\" in the layers with a window"},
    {.type = "gemma3_text",
     .more = ", \"rope_parameters\": {\"linear_attention\": {}}",
     .says = "\"rope_parameters.linear_attention\" is {}; vjp does not know"},
    {.type = "gemma3_text",
     .more = ", \"rope_parameters\": 7",
     .says = "\"rope_parameters\" is 7; vjp takes an object"},
};

static void test_families(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(families); i++) {
        char text[1024], error[TRAIN_ERROR] = "";
        snprintf(text, sizeof text, "{" RELATED ", \"model_type\": \"%s\"%s}", families[i].type, families[i].more);
        llama_config c;
        bool ok = read_text(text, &c, error);
        if (ok != !families[i].says) fail_msg("%s: %s", text, ok ? "taken" : error);
        if (!ok && !strstr(error, families[i].says)) fail_msg("\"%s\" does not say \"%s\"", error, families[i].says);
        if (!ok) continue;
        assert_true(c.qkv_bias == families[i].qkv_bias && c.output_bias == families[i].output_bias);
        assert_true(c.mlp_bias == families[i].mlp_bias && c.head_norms == families[i].head_norms);
        for (int64_t layer = 0; layer < 3; layer++)
            assert_int_equal(llama_window(&c, layer), families[i].window[layer]);
        round_trip(&c);
        assert_true(c.gemma == families[i].gemma && c.tied == families[i].gemma);
        int64_t biases = 3 * families[i].qkv_bias + families[i].output_bias + 3 * families[i].mlp_bias;
        assert_int_equal(llama_weight_count(&c),
                         3 - c.tied + 3 * (9 + biases + 2 * families[i].head_norms + 2 * families[i].gemma));
    }
    llama_config c;
    char error[TRAIN_ERROR];
    /* The defaults of the families, where they differ. */
    assert_true(
        read_text("{\"model_type\": \"qwen3\", \"vocab_size\": 8, \"hidden_size\": 32, \"intermediate_size\": 8, "
                  "\"num_hidden_layers\": 1, \"num_attention_heads\": 64}",
                  &c, error));
    assert_true(c.head_dim == 128 && c.kv_heads == 32 && c.max_positions == 32768);
    assert_true(
        read_text("{\"model_type\": \"mistral\", \"vocab_size\": 8, \"hidden_size\": 32, \"intermediate_size\": 8, "
                  "\"num_hidden_layers\": 1, \"num_attention_heads\": 16}",
                  &c, error));
    assert_true(c.head_dim == 2 && c.kv_heads == 8 && c.max_positions == 131072);
    assert_true(
        read_text("{\"model_type\": \"gemma3_text\", \"vocab_size\": 8, \"hidden_size\": 32, \"intermediate_size\": "
                  "8, \"num_hidden_layers\": 7, \"num_attention_heads\": 16, \"rope_scaling\": {\"rope_type\": "
                  "\"linear\", \"factor\": 8.0}, \"rope_local_base_freq\": 50}",
                  &c, error));
    assert_true(c.head_dim == 256 && c.kv_heads == 4 && c.max_positions == 131072 && c.query_scalar == 256);
    assert_true(c.rope_theta == 1e6 && llama_window(&c, 4) == 4096 && !llama_window(&c, 5) && llama_window(&c, 6));
    assert_true(llama_angle(&c, false, 0) == 0.125 &&
                llama_angle(&c, true, 0) == 1); /* scaled only where all is seen */
    assert_true(fabs(llama_angle(&c, true, 64) - pow(50, -0.5)) < 1e-15);
    assert_false(read_text("{" SIZES ", \"architectures\": [\"MistralForCausalLM\"]}", &c, error));
    assert_non_null(strstr(error, "vjp takes \"LlamaForCausalLM\""));
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
        cmocka_unit_test(test_weights), cmocka_unit_test(test_presets),  cmocka_unit_test(test_families),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
