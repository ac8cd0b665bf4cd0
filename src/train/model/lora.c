/* SPDX-License-Identifier: MIT */
/* Adapters: their settings in the form of PEFT, and whether a file's tensors fit a model. See lora.h. */
#include "train/model/lora.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "train/files/checkpoint.h"

const char *const lora_targets[] = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", NULL};

static const uint32_t ALL = (1u << (sizeof lora_targets / sizeof lora_targets[0] - 1)) - 1;

double lora_scale(const lora_config *lora) {
    return lora->alpha / (lora->root ? sqrt((double)lora->rank) : (double)lora->rank);
}

/* The number of a target, whose name has `length` bytes; -1: unknown name. */
static int find_target(const char *name, size_t length) {
    for (int i = 0; lora_targets[i]; i++)
        if (strlen(lora_targets[i]) == length && memcmp(lora_targets[i], name, length) == 0) return i;
    return -1;
}

bool lora_adapts(const lora_config *lora, const char *weight, char a[LLAMA_NAME], char b[LLAMA_NAME]) {
    static const char end[] = ".weight";
    size_t length = strlen(weight);
    if (!lora->rank || length < sizeof end || strcmp(weight + length - (sizeof end - 1), end) != 0) return false;
    length -= sizeof end - 1;
    size_t begin = length;
    while (begin && weight[begin - 1] != '.')
        begin--;
    int target = find_target(weight + begin, length - begin);
    if (target < 0 || !(lora->adapts >> target & 1)) return false;
    snprintf(a, LLAMA_NAME, "base_model.model.%.*s.lora_A.weight", (int)length, weight);
    snprintf(b, LLAMA_NAME, "base_model.model.%.*s.lora_B.weight", (int)length, weight);
    return true;
}

/* ---- Targets ----------------------------------------------------------------------------------------- */

static bool add_target(const char *name, size_t length, uint32_t *adapts, char *error) {
    char all[LORA_TARGETS_TEXT];
    int target = find_target(name, length);
    lora_write_targets(ALL, all);
    if (target < 0)
        return train_fail(error, "an adapter cannot be put on \"%.*s\"; it can on %s", (int)(length < 64 ? length : 64),
                          name, all);
    *adapts |= 1u << target;
    return true;
}

bool lora_read_targets(const char *text, uint32_t *adapts, char error[TRAIN_ERROR]) {
    *adapts = strcmp(text, "all") == 0 ? ALL : 0;
    if (*adapts) return true;
    for (;; text++) {
        size_t length = strcspn(text, ",");
        if (!add_target(text, length, adapts, error)) return false;
        text += length;
        if (!*text) return true;
    }
}

void lora_write_targets(uint32_t adapts, char text[LORA_TARGETS_TEXT]) {
    size_t length = 0;
    text[0] = 0;
    for (int i = 0; lora_targets[i]; i++)
        if (adapts >> i & 1)
            length +=
                (size_t)snprintf(text + length, LORA_TARGETS_TEXT - length, "%s%s", length ? "," : "", lora_targets[i]);
}

bool lora_suits(const lora_config *lora, const llama_config *config, char error[TRAIN_ERROR]) {
    static const char gate[] = "gate_proj";
    uint32_t adapted = 1u << find_target(gate, strlen(gate));
    if (!lora->rank || !config->gemma || !(lora->adapts & adapted)) return true;
    char others[LORA_TARGETS_TEXT];
    lora_write_targets(lora->adapts & ~adapted, others);
    return train_fail(error,
                      "an adapter of gate_proj cannot be computed in this family, whose gate is activated within the "
                      "product; the other targets are --lora-targets %s",
                      others);
}

/* ---- adapter_config.json ----------------------------------------------------------------------------- */

/* Keys that change no result of an adapter that is only computed with, whatever their value. */
static const char *const ignored[] = {
    "auto_mapping", "base_model_name_or_path", "inference_mode",    "loftq_config",
    "lora_dropout", "megatron_config",         "megatron_core",     "peft_version",
    "revision",     "runtime_config",          "qalora_group_size",
};

static bool is_ignored(const char *key) {
    for (size_t i = 0; i < sizeof ignored / sizeof ignored[0]; i++)
        if (strcmp(key, ignored[i]) == 0) return true;
    return false;
}

static bool is_unused(const json_value *value) {
    switch (value->type) {
    case JSON_NULL: return true;
    case JSON_BOOLEAN: return !value->boolean;
    case JSON_STRING: return !value->text[0];
    case JSON_ARRAY:
    case JSON_OBJECT: return !value->count;
    default: return false;
    }
}

static bool is_text(const json_value *value, const char *text) {
    return value->type == JSON_STRING && strcmp(value->text, text) == 0;
}

static bool refuse(const json_value *value, const char *why, char *error) {
    char shown[JSON_SHOWN];
    return train_fail(error, "adapter_config.json: \"%.64s\" is %s; %s", value->key, json_show(value, shown), why);
}

static bool read_targets(const json_value *value, lora_config *lora, char *error) {
    char reason[TRAIN_ERROR];
    if (is_text(value, "all-linear")) {
        lora->adapts = ALL;
        return true;
    }
    if (value->type != JSON_ARRAY || !value->count)
        return refuse(value, "it must be a list of projections, or \"all-linear\"", error);
    for (const json_value *one = value->first; one; one = one->next) {
        if (one->type != JSON_STRING) return refuse(value, "each of its elements must be a text", error);
        if (!add_target(one->text, strlen(one->text), &lora->adapts, reason))
            return train_fail(error, "adapter_config.json: \"target_modules\": %.400s", reason);
    }
    return true;
}

/* First values that leave the base's weights as they are. */
static bool is_plain_start(const json_value *value) {
    return value->type == JSON_BOOLEAN || is_text(value, "gaussian") || is_text(value, "orthogonal") ||
           is_text(value, "eva");
}

static bool read_member(const json_value *value, lora_config *lora, char *error) {
    const char *key = value->key;
    if (strcmp(key, "peft_type") == 0) return is_text(value, "LORA") || refuse(value, "vjp takes \"LORA\"", error);
    if (strcmp(key, "task_type") == 0)
        return is_unused(value) || is_text(value, "CAUSAL_LM") || refuse(value, "vjp takes \"CAUSAL_LM\"", error);
    if (strcmp(key, "bias") == 0) return is_text(value, "none") || refuse(value, "vjp takes \"none\"", error);
    if (strcmp(key, "init_lora_weights") == 0)
        return is_plain_start(value) || refuse(value, "such adapters change the weights of their base", error);
    if (strcmp(key, "target_modules") == 0) return read_targets(value, lora, error);
    if (strcmp(key, "r") == 0) {
        lora->rank = value->type == JSON_NUMBER && value->exact ? value->integer : 0;
        return (lora->rank >= 1 && lora->rank <= LORA_MAX_RANK) ||
               refuse(value, "the rank of an adapter must be an integer of 1 or more", error);
    }
    if (strcmp(key, "lora_alpha") == 0) {
        lora->alpha = value->type == JSON_NUMBER ? value->number : 0;
        return (lora->alpha > 0 && lora->alpha <= LORA_MAX_ALPHA) ||
               refuse(value, "it must be a number above 0, and at most 1e9", error);
    }
    if (strcmp(key, "use_rslora") == 0) {
        lora->root = value->type == JSON_BOOLEAN && value->boolean;
        return value->type == JSON_BOOLEAN || refuse(value, "it must be true or false", error);
    }
    return is_ignored(key) || is_unused(value) || refuse(value, "vjp does not compute this", error);
}

bool lora_config_read(const json_value *root, lora_config *lora, char error[TRAIN_ERROR]) {
    static const char *const required[] = {"peft_type", "r", "lora_alpha", "target_modules"};
    *lora = (lora_config){0};
    if (!root || root->type != JSON_OBJECT) return train_fail(error, "adapter_config.json: it must be a JSON object");
    for (const json_value *member = root->first; member; member = member->next)
        if (!read_member(member, lora, error)) return false;
    for (size_t i = 0; i < sizeof required / sizeof required[0]; i++)
        if (!json_member(root, required[i]))
            return train_fail(error, "adapter_config.json: \"%s\" is missing", required[i]);
    return true;
}

char *lora_config_write(const lora_config *lora, const char *base) {
    json_writer w = {.indented = true};
    json_put_object(&w, NULL);
    json_put_text(&w, "base_model_name_or_path", base);
    json_put_text(&w, "bias", "none");
    json_put_boolean(&w, "fan_in_fan_out", false);
    json_put_boolean(&w, "inference_mode", true);
    json_put_boolean(&w, "init_lora_weights", true);
    if (lora->alpha == floor(lora->alpha) && lora->alpha < 0x1p53)
        json_put_integer(&w, "lora_alpha", (int64_t)lora->alpha);
    else
        json_put_real(&w, "lora_alpha", lora->alpha);
    json_put_real(&w, "lora_dropout", 0);
    json_put_text(&w, "peft_type", "LORA");
    json_put_integer(&w, "r", lora->rank);
    json_put_array(&w, "target_modules");
    for (int i = 0; lora_targets[i]; i++)
        if (lora->adapts >> i & 1) json_put_text(&w, NULL, lora_targets[i]);
    json_put_array_end(&w);
    json_put_text(&w, "task_type", "CAUSAL_LM");
    json_put_boolean(&w, "use_rslora", lora->root);
    json_put_object_end(&w);
    return json_take(&w);
}

/* ---- Tensors ----------------------------------------------------------------------------------------- */

static bool check_tensor(const checkpoint *from, const char *name, int64_t rows, int64_t columns, char *error) {
    const safetensors_tensor *tensor = safetensors_find(&from->adapter.tensors, name);
    if (!tensor) return train_fail(error, "adapter_model.safetensors has no tensor %s, which the model needs", name);
    if (tensor->ndim == 2 && tensor->shape[0] == rows && tensor->shape[1] == columns) return true;
    vjp_shape is = {.ndim = tensor->ndim < VJP_MAX_DIMS ? tensor->ndim : VJP_MAX_DIMS};
    char text[VJP_SHAPE_TEXT];
    memcpy(is.size, tensor->shape, sizeof is.size);
    return train_fail(error, "tensor %s is %s in adapter_model.safetensors; this base model needs [%lld, %lld]", name,
                      vjp_shape_text(&is, text), (long long)rows, (long long)columns);
}

/* The weight of the model that a tensor is an adapter of; false: there is none. */
static bool has_place(const llama_config *config, const lora_config *lora, const char *name) {
    char a[LLAMA_NAME], b[LLAMA_NAME];
    for (int64_t i = 0, count = llama_weight_count(config); i < count; i++) {
        const llama_weight weight = llama_weight_at(config, i);
        if (lora_adapts(lora, weight.name, a, b) && (strcmp(name, a) == 0 || strcmp(name, b) == 0)) return true;
    }
    return false;
}

bool lora_of(const checkpoint *from, const llama_config *config, lora_config *lora, char error[TRAIN_ERROR]) {
    char a[LLAMA_NAME], b[LLAMA_NAME];
    size_t expected = 0;
    *lora = (lora_config){0};
    if (!from->adapter_config.root) return true;
    if (!lora_config_read(from->adapter_config.root, lora, error)) return false;
    for (int64_t i = 0, count = llama_weight_count(config); i < count; i++) {
        const llama_weight weight = llama_weight_at(config, i);
        if (!lora_adapts(lora, weight.name, a, b)) continue;
        if (!check_tensor(from, a, lora->rank, weight.shape[1], error) ||
            !check_tensor(from, b, weight.shape[0], lora->rank, error))
            return false;
        expected += 2;
    }
    const safetensors_file *file = &from->adapter.tensors;
    for (size_t i = 0; i < file->count && file->count != expected; i++)
        if (!has_place(config, lora, file->tensors[i].name))
            return train_fail(error, "adapter_model.safetensors has a tensor %.96s, which the model has no place for",
                              file->tensors[i].name);
    return true;
}
