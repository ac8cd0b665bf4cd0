/* SPDX-License-Identifier: MIT */
/*
 * What the readers of a config.json share: values by their type, and the sentences of what is refused. Values that are
 * missing or null leave the default as it is.
 */
#ifndef VJP_TRAIN_LLAMA_READ_H
#define VJP_TRAIN_LLAMA_READ_H

#include <string.h>

#include "train/model/llama_families.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static inline bool refuse(const char *key, const json_value *value, const char *takes, char *error) {
    char shown[JSON_SHOWN];
    return train_fail(error, "\"%s\" is %s; vjp takes %s", key, json_show(value, shown), takes);
}

static inline bool unknown(const char *key, const json_value *value, char *error) {
    char shown[JSON_SHOWN];
    return train_fail(error,
                      "\"%.64s\" is %s; vjp does not know this setting, which may change what the model computes", key,
                      json_show(value, shown));
}

/* transformers writes null for a missing value. */
static inline bool read_integer(const json_value *object, const char *key, int64_t *value, char *error) {
    const json_value *v = json_member(object, key);
    if (!v || v->type == JSON_NULL) return true;
    if (v->type != JSON_NUMBER || !v->exact) return refuse(key, v, "an integer", error);
    *value = v->integer;
    return true;
}

static inline bool read_real(const json_value *object, const char *key, double *value, char *error) {
    const json_value *v = json_member(object, key);
    if (!v || v->type == JSON_NULL) return true;
    if (v->type != JSON_NUMBER) return refuse(key, v, "a number", error);
    *value = v->number;
    return true;
}

static inline bool read_boolean(const json_value *object, const char *key, bool *value, char *error) {
    const json_value *v = json_member(object, key);
    if (!v || v->type == JSON_NULL) return true;
    if (v->type != JSON_BOOLEAN) return refuse(key, v, "true or false", error);
    *value = v->boolean;
    return true;
}

static inline bool is_text(const json_value *value, const char *text) {
    return value && value->type == JSON_STRING && strcmp(value->text, text) == 0;
}

static inline bool is_one_of(const char *key, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(key, list[i]) == 0) return true;
    return false;
}

/* ---- What layers differ in: llama_layers.c ----------------------------------------------------------- */

bool llama_read_rope(const json_value *root, llama_config *config, char error[TRAIN_ERROR]);
bool llama_read_windows(const json_value *root, llama_config *config, char error[TRAIN_ERROR]);
bool llama_check_rope(const llama_config *config, char error[TRAIN_ERROR]);

#endif
