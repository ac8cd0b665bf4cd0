/* SPDX-License-Identifier: MIT */
/*
 * Adapters: only they are trained and only they need memory for it; they begin as no change; their files are read as
 * they were written and refused where they are broken or do not fit; merging gives the same model; and a run is resumed
 * bit for bit. Gradients are compared with differences in test_models.c, and with PEFT in test_lora.py.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/half.h"
#include "model_run.h"
#include "scratch.h"
#include "train/job/job.h"
#include "train/job/merge.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

enum { CONTEXT = 12, BATCH = 2, RANK = 3 };

static const llama_config config = {.vocab_size = 256,
                                    .hidden_size = 16,
                                    .intermediate_size = 20,
                                    .layers = 2,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .head_dim = 8,
                                    .max_positions = CONTEXT,
                                    .rope_theta = 10000,
                                    .norm_eps = 1e-5,
                                    .tied = true,
                                    .dtype = VJP_F32,
                                    .begin_token = -1};

static const lora_config adapters = {.rank = RANK, .alpha = 5, .adapts = 0x15}; /* q_proj, v_proj and gate_proj */

static vjp_device *open_cpu(void) {
    vjp_device *device;
    const vjp_options options = {.struct_size = sizeof options, .threads = 1};
    if (vjp_open("cpu", &options, &device) != VJP_OK) fail_msg("%s", vjp_error(device));
    return device;
}

/* ---- Folders ----------------------------------------------------------------------------------------- */

/* Random numbers that depend on the name of the tensor. */
static float *random_numbers(const char *name, int64_t count) {
    float *numbers = malloc((size_t)count * sizeof *numbers);
    uint64_t state = 88172645463325252u;
    for (const char *c = name; *c; c++)
        state = (state ^ (unsigned char)*c) * 1099511628211u;
    for (int64_t i = 0; i < count; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        numbers[i] = ((float)(state >> 40) * 0x1p-24f - 0.5f) * 0.6f;
    }
    return numbers;
}

static safetensors_tensor random_tensor(const char *name, int ndim, int64_t rows, int64_t columns, vjp_dtype dtype) {
    int64_t count = rows * (ndim == 2 ? columns : 1);
    float *numbers = random_numbers(name, count);
    safetensors_tensor tensor = {
        .name = strdup(name), .dtype = dtype, .ndim = ndim, .shape = {rows, columns}, .data = numbers};
    if (dtype != VJP_BF16) return tensor;
    uint16_t *narrow = malloc((size_t)count * sizeof *narrow);
    for (int64_t i = 0; i < count; i++)
        narrow[i] = vjp_f32_to_bf16(numbers[i]);
    free(numbers);
    tensor.data = narrow;
    return tensor;
}

static void free_tensors(safetensors_tensor *tensors, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free((void *)tensors[i].name);
        free((void *)tensors[i].data);
    }
}

enum { MAX_TENSORS = 64 };

static void save(const char *folder, const checkpoint_content *content) {
    char error[TRAIN_ERROR];
    if (!checkpoint_save(folder, 1, content, error)) fail_msg("%s", error);
}

static void save_base(const char *folder, const llama_config *base) {
    safetensors_tensor tensors[MAX_TENSORS];
    size_t count = (size_t)llama_weight_count(base);
    assert_true(count <= MAX_TENSORS);
    for (size_t i = 0; i < count; i++) {
        llama_weight weight = llama_weight_at(base, (int64_t)i);
        tensors[i] = random_tensor(weight.name, weight.ndim, weight.shape[0], weight.shape[1], base->dtype);
    }
    char *text = llama_config_write(base);
    save(folder, &(checkpoint_content){.config = text, .model = tensors, .model_count = count});
    free(text);
    free_tensors(tensors, count);
}

/* What is wrong with adapters that are saved. */
typedef enum defect { NONE, MISSING, EXTRA, OTHER_SHAPE, TRANSPOSED, OF_INTEGERS } defect;

static void save_adapters(const char *folder, const char *base, const lora_config *lora, defect wrong) {
    safetensors_tensor tensors[MAX_TENSORS];
    char a[LLAMA_NAME], b[LLAMA_NAME];
    size_t count = 0;
    for (int64_t i = 0; i < llama_weight_count(&config); i++) {
        llama_weight weight = llama_weight_at(&config, i);
        if (!lora_adapts(lora, weight.name, a, b)) continue;
        tensors[count++] = random_tensor(a, 2, lora->rank, weight.shape[1], VJP_F32);
        tensors[count++] = random_tensor(b, 2, weight.shape[0], lora->rank, VJP_F32);
    }
    if (wrong == EXTRA)
        tensors[count++] = random_tensor("base_model.model.lm_head.lora_A.weight", 2, RANK, 16, VJP_F32);
    if (wrong == MISSING) free_tensors(&tensors[--count], 1);
    if (wrong == OTHER_SHAPE) tensors[2].shape[0]--;
    if (wrong == TRANSPOSED) tensors[0].shape[0] = 16, tensors[0].shape[1] = RANK;
    if (wrong == OF_INTEGERS) tensors[0].dtype = VJP_I32;
    char *text = lora_config_write(lora, base);
    save(folder, &(checkpoint_content){.config = text, .is_adapter = true, .model = tensors, .model_count = count});
    free(text);
    free_tensors(tensors, count);
}

/* ---- Settings ---------------------------------------------------------------------------------------- */

static bool read_config(const char *text, lora_config *lora, char *error) {
    json_document parsed;
    bool ok = json_parse(text, strlen(text), &parsed, error) && lora_config_read(parsed.root, lora, error);
    json_free(&parsed);
    return ok;
}

static void settings_are_read_as_written(void **unused) {
    (void)unused;
    static const lora_config rows[] = {{1, 1, false, 1}, {16, 32, false, 0x7f}, {3, 0.25, true, 0x15}};
    for (size_t i = 0; i < COUNT(rows); i++) {
        char error[TRAIN_ERROR] = "", *text = lora_config_write(&rows[i], "some/model");
        lora_config back;
        if (!read_config(text, &back, error)) fail_msg("%s", error);
        assert_true(back.rank == rows[i].rank && back.alpha == rows[i].alpha && back.root == rows[i].root &&
                    back.adapts == rows[i].adapts);
        free(text);
    }
    assert_true(lora_scale(&rows[1]) == 2 && fabs(lora_scale(&rows[2]) - 0.25 / sqrt(3)) < 1e-15);
    uint32_t adapts;
    char error[TRAIN_ERROR] = "", text[LORA_TARGETS_TEXT];
    assert_true(lora_read_targets("all", &adapts, error) && adapts == 0x7f);
    lora_write_targets(adapts, text);
    assert_string_equal(text, "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj");
    assert_true(lora_read_targets("down_proj,q_proj", &adapts, error) && adapts == 0x41);
    static const char *const bad[] = {"", "q_proj,", ",q_proj", "lm_head", "q_proj v_proj", "Q_PROJ", "all,q_proj"};
    for (size_t i = 0; i < COUNT(bad); i++)
        if (lora_read_targets(bad[i], &adapts, error)) fail_msg("\"%s\" was taken", bad[i]);
}

/* One text of a valid config replaced. */
static const struct {
    const char *from, *to, *says;
} broken_configs[] = {
    {"\"r\": 3", "\"r\": 0", "\"r\" is 0; the rank of an adapter must be"},
    {"\"r\": 3", "\"r\": -1", "\"r\" is -1; the rank of an adapter must be"},
    {"\"r\": 3", "\"r\": 3.5", "\"r\" is 3.5; the rank of an adapter must be"},
    {"\"r\": 3", "\"r\": 99999999999", "the rank of an adapter must be"},
    {"\"r\": 3,", "", "\"r\" is missing"},
    {"\"lora_alpha\": 5", "\"lora_alpha\": NaN", "byte"},
    {"\"lora_alpha\": 5", "\"lora_alpha\": 1e999", "a number that no double can hold"},
    {"\"lora_alpha\": 5", "\"lora_alpha\": 0", "\"lora_alpha\" is 0; it must be a number above 0"},
    {"\"lora_alpha\": 5", "\"lora_alpha\": 1e300", "it must be a number above 0, and at most 1e9"},
    {"\"lora_alpha\": 5", "\"lora_alpha\": -2", "it must be a number above 0"},
    {"\"lora_alpha\": 5", "\"lora_alpha\": \"5\"", "\"lora_alpha\" is \"5\""},
    {"\"LORA\"", "\"IA3\"", "\"peft_type\" is \"IA3\"; vjp takes \"LORA\""},
    {"\"CAUSAL_LM\"", "\"SEQ_CLS\"", "\"task_type\" is \"SEQ_CLS\""},
    {"\"none\"", "\"all\"", "\"bias\" is \"all\""},
    {"\"fan_in_fan_out\": false", "\"fan_in_fan_out\": true", "\"fan_in_fan_out\" is true"},
    {"\"fan_in_fan_out\": false", "\"use_dora\": true", "\"use_dora\" is true; vjp does not compute this"},
    {"\"fan_in_fan_out\": false", "\"rank_pattern\": {\"q_proj\": 2}", "\"rank_pattern\""},
    {"\"fan_in_fan_out\": false", "\"modules_to_save\": [\"lm_head\"]", "\"modules_to_save\""},
    {"\"fan_in_fan_out\": false", "\"a_setting_of_tomorrow\": 1", "\"a_setting_of_tomorrow\" is 1"},
    {"\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"", "change the weights of their base"},
    {"\"use_rslora\": false", "\"use_rslora\": 1", "\"use_rslora\" is 1"},
    {"\"gate_proj\"", "\"lm_head\"", "cannot be put on \"lm_head\""},
    {"\"gate_proj\"", "7", "each of its elements must be a text"},
};

static void broken_configs_are_refused(void **unused) {
    (void)unused;
    char *text = lora_config_write(&adapters, "base");
    for (size_t i = 0; i < COUNT(broken_configs); i++) {
        char changed[2048], error[TRAIN_ERROR] = "";
        const char *at = strstr(text, broken_configs[i].from);
        if (!at) fail_msg("row %zu is not in the config", i);
        snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, broken_configs[i].to,
                 at + strlen(broken_configs[i].from));
        lora_config lora;
        if (read_config(changed, &lora, error)) fail_msg("row %zu was taken: %s", i, broken_configs[i].to);
        if (!strstr(error, broken_configs[i].says)) fail_msg("\"%s\" does not say %s", error, broken_configs[i].says);
    }
    free(text);
}

/* What PEFT 0.21 writes. Settings that are not used are null, false or empty; some others have defaults. */
static void the_config_of_peft_is_read(void **unused) {
    (void)unused;
    static const char text[] =
        "{\"alora_invocation_tokens\": null, \"alpha_pattern\": {}, \"arrow_config\": null, \"auto_mapping\": null, "
        "\"base_model_name_or_path\": \"base\", \"bias\": \"none\", \"corda_config\": null, "
        "\"ensure_weight_tying\": false, \"eva_config\": null, \"exclude_modules\": null, \"fan_in_fan_out\": false, "
        "\"inference_mode\": true, \"init_lora_weights\": true, \"layer_replication\": null, "
        "\"layers_pattern\": null, \"layers_to_transform\": null, \"loftq_config\": {}, \"lora_alpha\": 32, "
        "\"lora_bias\": false, \"lora_dropout\": 0.05, \"megatron_config\": null, \"megatron_core\": "
        "\"megatron.core\", \"modules_to_save\": null, \"peft_type\": \"LORA\", \"peft_version\": \"0.21.2\", "
        "\"qalora_group_size\": 16, \"r\": 16, \"rank_pattern\": {}, \"revision\": null, \"target_modules\": "
        "[\"v_proj\", \"q_proj\"], \"target_parameters\": null, \"task_type\": \"CAUSAL_LM\", "
        "\"trainable_token_indices\": null, \"use_dora\": false, \"use_qalora\": false, \"use_rslora\": false}";
    char error[TRAIN_ERROR] = "";
    lora_config lora;
    if (!read_config(text, &lora, error)) fail_msg("%s", error);
    assert_true(lora.rank == 16 && lora.alpha == 32 && lora.adapts == 5 && !lora.root);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

static void open_adapters(const char *folder, checkpoint *from) {
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR] = "";
    if (!checkpoint_open_newest(folder, path, from, error)) fail_msg("%s", error);
}

static void broken_files_are_refused(void **unused) {
    (void)unused;
    static const struct {
        defect wrong;
        const char *says;
    } rows[] = {
        {MISSING, "has no tensor base_model.model.model.layers.1.mlp.gate_proj.lora_B.weight"},
        {EXTRA, "has a tensor base_model.model.lm_head.lora_A.weight, which the model has no place for"},
        {OTHER_SHAPE,
         "model.layers.0.self_attn.v_proj.lora_A.weight is [2, 16] in adapter_model.safetensors; this base model needs "
         "[3, 16]"},
        {TRANSPOSED, "q_proj.lora_A.weight is [16, 3] in adapter_model.safetensors; this base model needs [3, 16]"},
        {OF_INTEGERS, "q_proj.lora_A.weight is I32 in the file"},
    };
    char base[256], folder[256];
    snprintf(base, sizeof base, "%s", path_of("base"));
    for (size_t i = 0; i < COUNT(rows); i++) {
        char name[32], error[TRAIN_ERROR] = "";
        snprintf(name, sizeof name, "broken-%zu", i);
        snprintf(folder, sizeof folder, "%s", path_of(name));
        save_adapters(folder, base, &adapters, rows[i].wrong);
        model_run r;
        if (model_run_open(&r, "cpu", folder, 1, CONTEXT, error)) fail_msg("row %zu was taken", i);
        if (!strstr(error, rows[i].says)) fail_msg("\"%s\" does not say \"%s\"", error, rows[i].says);
        model_run_close(&r);
    }
}

/* A base that is not there, that has adapters itself, or that has other sizes. */
static void other_bases_are_refused(void **unused) {
    (void)unused;
    char base[256], other[256], folder[256], nested[256], error[TRAIN_ERROR] = "";
    snprintf(base, sizeof base, "%s", path_of("base"));
    snprintf(other, sizeof other, "%s", path_of("other-base"));
    snprintf(folder, sizeof folder, "%s", path_of("fine"));
    snprintf(nested, sizeof nested, "%s", path_of("nested"));
    llama_config wide = config;
    wide.intermediate_size = 24;
    save_base(other, &wide);
    save_adapters(folder, "no/such/model", &adapters, NONE);
    save_adapters(nested, folder, &adapters, NONE);
    checkpoint from;
    lora_config lora;
    open_adapters(folder, &from);
    assert_false(checkpoint_open_base(&from, NULL, error));
    assert_non_null(strstr(error, "no/such/model"));
    assert_non_null(strstr(error, "--base"));
    if (!checkpoint_open_base(&from, base, error)) fail_msg("%s", error);
    assert_true(lora_of(&from, &config, &lora, error) && lora.rank == RANK);
    checkpoint_close(&from);
    open_adapters(folder, &from);
    if (!checkpoint_open_base(&from, other, error)) fail_msg("%s", error);
    assert_false(lora_of(&from, &wide, &lora, error));
    assert_non_null(strstr(error, "gate_proj.lora_B.weight is [20, 3]"));
    assert_non_null(strstr(error, "needs [24, 3]"));
    checkpoint_close(&from);
    open_adapters(nested, &from);
    assert_false(checkpoint_open_base(&from, NULL, error));
    assert_non_null(strstr(error, "has adapters itself"));
    checkpoint_close(&from);
    open_adapters(base, &from);
    assert_false(checkpoint_open_base(&from, other, error));
    assert_non_null(strstr(error, "--base is for a folder of adapters"));
    checkpoint_close(&from);
}

/* ---- Training ---------------------------------------------------------------------------------------- */

static const trainer_options training = {.steps = 20,
                                         .accumulate = 1,
                                         .rate = 5e-2,
                                         .last_rate = 1,
                                         .weight_decay = 0.1,
                                         .max_norm = 1,
                                         .beta1 = 0.9,
                                         .beta2 = 0.95,
                                         .eps = 1e-8,
                                         .seed = 5};

static void fill(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    (void)context, (void)validation, (void)part;
    for (int32_t i = 0; i < BATCH * CONTEXT; i++) {
        ((int32_t *)input)[i] = i * 37 % 256;
        target[i] = (i * 37 + 37) % 256;
    }
}

static float *read_value(vjp_program *program, vjp_value value, size_t *bytes) {
    vjp_tensor tensor;
    assert_int_equal(vjp_program_tensor(program, value, &tensor), VJP_OK);
    *bytes = vjp_dtype_size((vjp_dtype)tensor.dtype);
    for (int i = 0; i < tensor.ndim; i++)
        *bytes *= (size_t)tensor.shape[i];
    float *numbers = malloc(*bytes);
    assert_int_equal(vjp_program_read(program, value, numbers, *bytes), VJP_OK);
    return numbers;
}

/* 20 steps in f32 and in bf16, with parts: the loss falls, adapters move, and no bit of the other weights does. */
static void train_adapters(vjp_dtype dtype, int64_t accumulate) {
    char error[TRAIN_ERROR] = "";
    vjp_device *device = open_cpu();
    checkpoint from;
    train_model model;
    open_adapters(path_of("base"), &from);
    llama_build(&model, &config,
                &(llama_options){.batch = BATCH, .context = CONTEXT, .dtype = dtype, .lora = adapters});
    trainer_options options = training;
    options.accumulate = accumulate;
    options.average = 0.5;
    trainer *t = trainer_create(device, &model, &options, error);
    if (!t) fail_msg("%s", error);
    for (int i = 0; i < model.parameters; i++)
        if (model.parameter[i].frozen && !trainer_load(t, checkpoint_tensor(&from, model.parameter[i].name), error))
            fail_msg("%s", error);
    vjp_program *programs[TRAINER_PROGRAMS];
    trainer_programs(t, programs);
    float *before[MAX_TENSORS];
    size_t bytes;
    for (int i = 0; i < model.parameters; i++)
        before[i] = read_value(programs[0], model.parameter[i].value, &bytes);
    const train_source source = {.fill = fill};
    trainer_step_result first, last;
    for (int64_t step = 1; step <= options.steps; step++)
        if (!trainer_step(t, &source, step, step == 1 ? &first : &last, error)) fail_msg("%s", error);
    print_message("the loss falls from %.6f to %.6f\n", first.loss, last.loss);
    assert_true(last.loss < 0.97 * first.loss);
    size_t trained = 0;
    for (int i = 0; i < model.parameters; i++) {
        float *after = read_value(programs[0], model.parameter[i].value, &bytes);
        bool moved = memcmp(before[i], after, bytes) != 0;
        if (moved == model.parameter[i].frozen) fail_msg("%s %s", model.parameter[i].name, moved ? "moved" : "stayed");
        trained += moved;
        free(after);
        free(before[i]);
    }
    const safetensors_tensor *weights, *states;
    size_t weight_count, state_count;
    assert_true(trainer_tensors(t, &weights, &weight_count, &states, &state_count, error));
    assert_true(trained == 12 && weight_count == trained && state_count == 3 * trained);
    for (size_t i = 0; i < weight_count; i++)
        assert_non_null(strstr(weights[i].name, ".lora_"));
    trainer_destroy(t);
    model_free(&model);
    checkpoint_close(&from);
    vjp_close(device);
}

static void only_adapters_are_trained(void **unused) {
    (void)unused;
    train_adapters(VJP_F32, 1);
    train_adapters(VJP_F32, 2);
    train_adapters(VJP_BF16, 1);
}

static trainer_needs needs_of(const llama_config *sizes, const lora_config *lora, vjp_dtype dtype, int64_t parts) {
    char error[TRAIN_ERROR] = "";
    vjp_device *device = open_cpu();
    train_model model;
    trainer_needs needs;
    trainer_options options = training;
    options.accumulate = parts;
    llama_build(&model, sizes, &(llama_options){.batch = 1, .context = 128, .dtype = dtype, .lora = *lora});
    if (!trainer_plan(device, &model, &options, false, &needs, error)) fail_msg("%s", error);
    model_free(&model);
    vjp_close(device);
    return needs;
}

/* 16 bytes per weight with gradients that are summed become 4 in f32 and 2 in bf16; a step has two thirds of the work.
 */
static void frozen_weights_need_no_more(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR];
    const llama_config *sizes = &llama_preset_find("small", error)->config;
    const lora_config none = {0}, some = {.rank = 4, .alpha = 8, .adapts = 0x7f};
    double weights = (double)llama_size(sizes);
    trainer_needs full = needs_of(sizes, &none, VJP_F32, 2), lora = needs_of(sizes, &some, VJP_F32, 2);
    trainer_needs narrow = needs_of(sizes, &some, VJP_BF16, 2);
    print_message("small, %.3g M weights: kept %.1f MiB full, %.1f MiB adapters in f32, %.1f MiB in bf16; arena %.1f, "
                  "%.1f, %.1f MiB; %.2f of the FLOP\n",
                  weights / 1e6, (double)full.kept_bytes / 0x1p20, (double)lora.kept_bytes / 0x1p20,
                  (double)narrow.kept_bytes / 0x1p20, (double)full.arena_bytes / 0x1p20,
                  (double)lora.arena_bytes / 0x1p20, (double)narrow.arena_bytes / 0x1p20,
                  lora.cost.flops / full.cost.flops);
    assert_true((double)full.kept_bytes > 16 * weights);
    assert_true((double)lora.kept_bytes < 4.5 * weights);
    assert_true((double)narrow.kept_bytes < 2.5 * weights);
    assert_true(lora.arena_bytes < full.arena_bytes);
    assert_true(lora.cost.flops < 0.75 * full.cost.flops);
}

/* B is 0 at first: the logits have the bits of the base. A is not 0, and within the bounds of PEFT. */
static void new_adapters_change_nothing(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR] = "";
    vjp_device *device = open_cpu();
    checkpoint from;
    float *logits[2];
    size_t bytes[2];
    open_adapters(path_of("base"), &from);
    for (int with = 0; with < 2; with++) {
        train_model model;
        llama_build(
            &model, &config,
            &(llama_options){
                .batch = BATCH, .context = CONTEXT, .dtype = VJP_F32, .lora = with ? adapters : (lora_config){0}});
        trainer *t = trainer_create(device, &model, &training, error);
        if (!t) fail_msg("%s", error);
        vjp_program *programs[TRAINER_PROGRAMS], *forward;
        trainer_programs(t, programs);
        int found = 0;
        for (int i = 0; i < model.parameters; i++) {
            const model_parameter *p = &model.parameter[i];
            const safetensors_tensor *tensor = checkpoint_tensor(&from, p->name);
            if (tensor && !trainer_load(t, tensor, error)) fail_msg("%s", error);
            if (tensor) continue;
            size_t size;
            float *numbers = read_value(programs[0], p->value, &size), max = 0;
            for (size_t k = 0; k < size / sizeof *numbers; k++)
                max = fmaxf(max, fabsf(numbers[k]));
            bool is_b = strstr(p->name, "lora_B") != NULL;
            assert_true(is_b ? max == 0 : max > 0.2f && max <= 0.25f); /* all adapted weights have 16 inputs */
            found++;
            free(numbers);
        }
        assert_int_equal(found, with ? 12 : 0);
        const vjp_program_options share = {.struct_size = sizeof share, .share = programs[0]};
        assert_int_equal(vjp_compile(device, model.graph, &model.logits, 1, &share, &forward), VJP_OK);
        int32_t input[BATCH * CONTEXT], target[BATCH * CONTEXT];
        fill(NULL, false, 1, input, target);
        assert_int_equal(vjp_program_write(forward, model.input, input, sizeof input), VJP_OK);
        assert_int_equal(vjp_program_run(forward), VJP_OK);
        logits[with] = read_value(forward, model.logits, &bytes[with]);
        vjp_program_destroy(forward);
        trainer_destroy(t);
        model_free(&model);
    }
    assert_true(bytes[0] == bytes[1] && memcmp(logits[0], logits[1], bytes[0]) == 0);
    free(logits[0]);
    free(logits[1]);
    checkpoint_close(&from);
    vjp_close(device);
}

/* ---- Merging ----------------------------------------------------------------------------------------- */

static float *logits_of(const char *folder) {
    char error[TRAIN_ERROR] = "";
    model_run r;
    int32_t rows[BATCH * (CONTEXT + 1)];
    for (int i = 0; i < BATCH * (CONTEXT + 1); i++)
        rows[i] = i * 29 % 256;
    if (!model_run_open(&r, "cpu", folder, BATCH, CONTEXT, error) || !model_run_compute(&r, rows, error))
        fail_msg("%s: %s", folder, error);
    float *logits = (float *)model_run_result(&r, 0).data;
    model_run_close(&r);
    return logits;
}

static double difference(const float *a, const float *b) {
    double off = 0, size = 0;
    for (int i = 0; i < BATCH * CONTEXT * 256; i++) {
        off += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(off / size);
}

static void merge(const char *folder, const char *out) {
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR] = "";
    vjp_device *device = open_cpu();
    checkpoint from;
    if (!checkpoint_open_newest(folder, path, &from, error) || !checkpoint_open_base(&from, NULL, error))
        fail_msg("%s", error);
    if (merge_adapters(device, &from, path, out, error) != 6) fail_msg("%s", error);
    assert_int_equal(merge_adapters(device, &from, path, out, error), -1);
    assert_non_null(strstr(error, "is already there"));
    checkpoint_close(&from);
    open_adapters(out, &from);
    assert_int_equal(merge_adapters(device, &from, out, path_of("never"), error), -1);
    assert_non_null(strstr(error, "has no adapters"));
    checkpoint_close(&from);
    vjp_close(device);
}

static void merged_is_the_same_model(void **unused) {
    (void)unused;
    char base[256], folder[256], out[256];
    for (int narrow = 0; narrow < 2; narrow++) {
        llama_config own = config;
        own.dtype = narrow ? VJP_BF16 : VJP_F32;
        snprintf(base, sizeof base, "%s", path_of(narrow ? "narrow-base" : "base"));
        snprintf(folder, sizeof folder, "%s", path_of(narrow ? "narrow" : "wide"));
        snprintf(out, sizeof out, "%s", path_of(narrow ? "narrow-merged" : "wide-merged"));
        save_base(base, &own);
        save_adapters(folder, base, &adapters, NONE);
        merge(folder, out);
        float *plain = logits_of(base), *adapted = logits_of(folder), *merged = logits_of(out);
        double off = difference(merged, adapted), moved = difference(plain, adapted);
        print_message("merged in %s: off by %.2g; the adapters change %.2g\n", narrow ? "bf16" : "f32", off, moved);
        assert_true(moved > 0.1 && off < (narrow ? 2e-2 : 1e-5));
        free(plain);
        free(adapted);
        free(merged);
        checkpoint merged_files;
        open_adapters(out, &merged_files);
        assert_int_equal(checkpoint_tensor(&merged_files, "model.norm.weight")->dtype, own.dtype);
        assert_int_equal(checkpoint_tensor(&merged_files, "model.layers.1.self_attn.q_proj.weight")->dtype, own.dtype);
        checkpoint_close(&merged_files);
    }
}

/* ---- Runs -------------------------------------------------------------------------------------------- */

static job_settings run_settings(const char *base) {
    job_settings settings = job_defaults();
    settings.batch = BATCH;
    settings.context = CONTEXT;
    settings.validate_every = 3;
    settings.validate_parts = 1;
    settings.save_best = 1;
    settings.trainer.steps = 9;
    settings.trainer.average = 0.9;
    settings.lora = RANK;
    settings.lora_alpha = 6;
    snprintf(settings.lora_targets, sizeof settings.lora_targets, "q_proj,down_proj");
    snprintf(settings.from, sizeof settings.from, "%s", base);
    snprintf(settings.data, sizeof settings.data, "%s", path_of("book"));
    return settings;
}

static void run_to(job *j, int64_t last) {
    char error[TRAIN_ERROR] = "";
    metrics_row row;
    while (j->step < last)
        if (!job_step(j, last, &row, error)) fail_msg("%s", error);
    if (!job_save(j, error)) fail_msg("%s", error);
}

static void same_file(const char *one, const char *other, const char *name) {
    char path[512], bytes[2][1 << 16];
    size_t count[2];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s/latest/%s", scratch, i ? other : one, name);
        FILE *file = fopen(path, "rb");
        if (!file) fail_msg("%s cannot be opened", path);
        count[i] = fread(bytes[i], 1, sizeof bytes[i], file);
        fclose(file);
    }
    if (count[0] != count[1] || count[0] == sizeof bytes[0] || memcmp(bytes[0], bytes[1], count[0]) != 0)
        fail_msg("%s differs", name);
}

static void a_run_is_resumed_bit_for_bit(void **unused) {
    (void)unused;
    static const char *const files[] = {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors",
                                        "trainer.json"};
    char base[256], out[256], text[2000], error[TRAIN_ERROR] = "";
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)('a' + (i * i + i / 5) % 26);
    write_file("book", text, sizeof text);
    snprintf(base, sizeof base, "%s", path_of("run-base"));
    save_base(base, &config);
    vjp_device *device = open_cpu();
    const job_settings settings = run_settings(base);
    const job_arithmetic arithmetic = settings.arithmetic;
    job j;
    for (int stops = 0; stops < 2; stops++) {
        snprintf(out, sizeof out, "%s", path_of(stops ? "stopped" : "whole"));
        if (!job_begin(&j, device, &settings, out, error)) fail_msg("%s", error);
        if (stops) {
            run_to(&j, 4);
            job_close(&j);
            if (!job_resume(&j, device, &(job_processes){0}, &arithmetic, true, &(job_places){0}, out, error))
                fail_msg("%s", error);
            assert_int_equal(j.step, 4);
        }
        run_to(&j, 9);
        assert_true(j.best_step > 0);
        job_close(&j);
    }
    for (size_t i = 0; i < COUNT(files); i++)
        same_file("whole", "stopped", files[i]);
    /* A base that was trained further is not the same, wherever it is. */
    llama_config other = config;
    other.norm_eps = 1e-6;
    char moved[256], changed[256];
    snprintf(moved, sizeof moved, "%s", path_of("moved-base"));
    snprintf(changed, sizeof changed, "%s", path_of("changed-base"));
    save_base(moved, &config);
    other.dtype = VJP_BF16;
    save_base(changed, &other);
    if (!job_resume(&j, device, &(job_processes){0}, &arithmetic, true, &(job_places){.base = moved}, out, error))
        fail_msg("%s", error);
    job_close(&j);
    assert_false(
        job_resume(&j, device, &(job_processes){0}, &arithmetic, true, &(job_places){.base = changed}, out, error));
    assert_non_null(strstr(error, "is not the base model that this run began with"));
    job_close(&j);
    vjp_close(device);
}

static void what_cannot_be_adapted_is_refused(void **unused) {
    (void)unused;
    char base[256], error[TRAIN_ERROR] = "", out[256];
    snprintf(base, sizeof base, "%s", path_of("run-base"));
    snprintf(out, sizeof out, "%s", path_of("refused"));
    vjp_device *device = open_cpu();
    job j;
    job_settings settings = run_settings(base);
    snprintf(settings.model, sizeof settings.model, "convnet");
    assert_false(job_begin(&j, device, &settings, out, error));
    assert_string_equal(error, "--lora is for the llama");
    job_close(&j);
    settings = run_settings("");
    assert_false(job_begin(&j, device, &settings, out, error));
    assert_non_null(strstr(error, "which --from must name"));
    job_close(&j);
    settings = run_settings(path_of("whole"));
    assert_false(job_begin(&j, device, &settings, out, error));
    assert_non_null(strstr(error, "has adapters and not a model"));
    job_close(&j);
    settings = run_settings(path_of("whole"));
    settings.lora = 0;
    assert_false(job_begin(&j, device, &settings, out, error));
    assert_non_null(strstr(error, "has adapters and not a model"));
    job_close(&j);
    llama_config gemma = config;
    gemma.family = LLAMA_GEMMA3;
    gemma.gemma = gemma.head_norms = true;
    gemma.local_theta = gemma.rope_theta;
    gemma.query_scalar = gemma.head_dim;
    save_base(path_of("gemma"), &gemma);
    settings = run_settings(path_of("gemma"));
    snprintf(settings.lora_targets, sizeof settings.lora_targets, "q_proj,gate_proj,up_proj");
    assert_false(job_begin(&j, device, &settings, out, error));
    assert_non_null(strstr(error, "an adapter of gate_proj cannot be computed in this family"));
    assert_non_null(strstr(error, "--lora-targets q_proj,up_proj"));
    job_close(&j);
    vjp_close(device);
}

static int begin(void **unused) {
    if (make_scratch(unused) != 0) return 1;
    save_base(path_of("base"), &config);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings_are_read_as_written),     cmocka_unit_test(broken_configs_are_refused),
        cmocka_unit_test(the_config_of_peft_is_read),       cmocka_unit_test(broken_files_are_refused),
        cmocka_unit_test(other_bases_are_refused),          cmocka_unit_test(only_adapters_are_trained),
        cmocka_unit_test(frozen_weights_need_no_more),      cmocka_unit_test(new_adapters_change_nothing),
        cmocka_unit_test(merged_is_the_same_model),         cmocka_unit_test(a_run_is_resumed_bit_for_bit),
        cmocka_unit_test(what_cannot_be_adapted_is_refused)};
    return cmocka_run_group_tests(tests, begin, remove_scratch);
}
