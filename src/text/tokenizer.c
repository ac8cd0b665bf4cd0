/* SPDX-License-Identifier: MIT */
/* A tokenizer as a whole; read.c makes one of a file. */
#include "text/tokenizer.h"

#include "text/parts.h"
#include "text/utf8.h"

int32_t tokenizer_size(const tokenizer *t) {
    return t->names.size;
}

const char *tokenizer_token(const tokenizer *t, int32_t id) {
    return id >= 0 && id < t->names.size ? t->names.tokens[id].text : NULL;
}

int32_t tokenizer_find(const tokenizer *t, const char *text) {
    return vocabulary_find(&t->names, text, strlen(text));
}

bool tokenizer_is_special(const tokenizer *t, int32_t id) {
    return tokenizer_token(t, id) && t->special[id];
}

bool tokenizer_encode(tokenizer *t, const char *text, size_t length, bool around, token_list *to,
                      char error[FILE_ERROR]) {
    size_t before = to->count;
    encoder e = {.t = t, .to = to, .error = error};
    bool ok = true;
    if (utf8_valid(text, length) < length) {
        t->repaired.count = 0;
        ok = utf8_repair(text, length, &t->repaired) || no_memory(error);
        text = t->repaired.bytes;
        length = t->repaired.count;
    }
    ok = ok && (!around || token_list_add(to, t->before.ids, t->before.count) || no_memory(error));
    ok = ok && added_encode(&e, text, length);
    ok = ok && (!around || token_list_add(to, t->behind.ids, t->behind.count) || no_memory(error));
    if (!ok) to->count = before;
    return ok;
}

static void search_free(search *s) {
    pattern_free(s->expression);
}

void tokenizer_free(tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < t->normalizer_count; i++)
        search_free(&t->normalizers[i].what);
    for (int i = 0; i < t->splitter_count; i++) {
        search_free(&t->splitters[i].what);
        byte_list_free(&t->splitters[i].scratch);
    }
    for (int i = 0; i < t->decoder_count; i++)
        search_free(&t->decoders[i].what);
    bpe_free(&t->model);
    vocabulary_free(&t->names);
    free(t->special);
    free(t->added);
    free(t->raw.nodes);
    free(t->normalized.nodes);
    pattern_free(t->word);
    token_list_free(&t->before);
    token_list_free(&t->behind);
    byte_list_free(&t->repaired);
    byte_list_free(&t->normal[0]);
    byte_list_free(&t->normal[1]);
    free(t->texts);
    free(t->byte_texts);
    free(t);
}
