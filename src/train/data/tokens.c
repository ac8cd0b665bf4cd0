/* SPDX-License-Identifier: MIT */
/* The tokenizer of a model; see tokens.h. */
#include "train/data/tokens.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *copy(const char *text) {
    char *made = text ? malloc(strlen(text) + 1) : NULL;
    return made ? strcpy(made, text) : NULL;
}

/* A token that tokenizer_config.json names: as a text, or as an object with its content. -1: none. */
static int32_t named_token(const model_tokenizer *t, const json_value *root, const char *key) {
    const json_value *value = json_member(root, key);
    if (value && value->type == JSON_OBJECT) value = json_member(value, "content");
    return value && value->type == JSON_STRING ? tokenizer_find(t->tokens, value->text) : -1;
}

static bool parse(const char *json, const char *config, model_tokenizer *t, char error[TRAIN_ERROR]) {
    *t = (model_tokenizer){.begin = -1, .end = -1, .json = copy(json), .config = copy(config)};
    json_document document = {0};
    bool ok = (t->json && (t->config || !config)) || train_fail(error, "there is no memory for its tokenizer");
    if (ok) ok = (t->tokens = tokenizer_parse(json, strlen(json), error)) != NULL;
    if (ok && config && json_parse(config, strlen(config), &document, error)) {
        t->begin = named_token(t, document.root, "bos_token");
        t->end = named_token(t, document.root, "eos_token");
    } else if (config) {
        ok = false;
    }
    if (ok && t->end < 0) t->end = tokenizer_find(t->tokens, "<|endoftext|>");
    json_free(&document);
    if (!ok) model_tokenizer_free(t);
    return ok;
}

bool model_tokenizer_read(const char *folder, model_tokenizer *t, char error[TRAIN_ERROR]) {
    char reason[TRAIN_ERROR], *json = NULL, *config = NULL;
    *t = (model_tokenizer){0};
    bool ok = checkpoint_read_tokenizer(folder, &json, &config, error);
    if (ok && !json) ok = train_fail(error, "%.300s has no tokenizer.json", folder);
    if (ok && !parse(json, config, t, reason)) ok = train_fail(error, "%.200s/tokenizer.json: %.280s", folder, reason);
    free(json);
    free(config);
    return ok;
}

bool model_tokenizer_of(const checkpoint *from, model_tokenizer *t, char error[TRAIN_ERROR]) {
    char reason[TRAIN_ERROR];
    *t = (model_tokenizer){0};
    if (!from->tokenizer) return true;
    if (!from->tokenizer_json)
        return train_fail(error,
                          "the model's tokens are made by its %s, which vjp does not read: it reads tokenizer.json",
                          from->tokenizer);
    return parse(from->tokenizer_json, from->tokenizer_config, t, reason) ||
           train_fail(error, "tokenizer.json: %.400s", reason);
}

void model_tokenizer_free(model_tokenizer *t) {
    tokenizer_free(t->tokens);
    free(t->json);
    free(t->config);
    *t = (model_tokenizer){0};
}

bool model_tokenizer_fits(const model_tokenizer *t, const checkpoint *model, int64_t vocabulary,
                          char error[TRAIN_ERROR]) {
    if (t->tokens)
        return tokenizer_size(t->tokens) <= vocabulary ||
               train_fail(error, "the tokenizer has %d tokens, and the model only %lld", (int)tokenizer_size(t->tokens),
                          (long long)vocabulary);
    /* A run of vjp without a tokenizer was trained on bytes, whatever the size of its vocabulary. */
    if (vocabulary == TEXT_TOKENS || (vocabulary > TEXT_TOKENS && model->trainer.root)) return true;
    return train_fail(error,
                      "the model has a vocabulary of %lld tokens and no tokenizer.json: text would be read and written "
                      "as bytes, which are %d tokens",
                      (long long)vocabulary, TEXT_TOKENS);
}

bool model_tokenizer_encode(const model_tokenizer *t, text_data *text, char error[TRAIN_ERROR]) {
    if (!t->tokens) return true;
    for (int64_t i = 0; i < text->files; i++) {
        size_t begin = i ? text->ends[i - 1] : 0;
        if (!tokenizer_encode(t->tokens, (const char *)text->bytes + begin, text->ends[i] - begin, true, &text->tokens,
                              error))
            return false;
        bool ended = text->tokens.count && text->tokens.ids[text->tokens.count - 1] == t->end;
        if (t->end >= 0 && !ended && !token_list_add(&text->tokens, &t->end, 1))
            return train_fail(error, "there is no memory for the tokens of the text");
    }
    text_set_length(text, text->tokens.count);
    return true;
}
