/* SPDX-License-Identifier: MIT */
/*
 * Random lines of .jsonl files, encoded as bytes and by a tokenizer with a chat template. What must hold: no crash,
 * nothing leaked, a refusal has a sentence, and a document that is accepted begins once, has tokens of the vocabulary
 * alone, and one to train on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/data/document.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char CHATML[] =
    "{\"added_tokens\": [{\"id\": 0, \"content\": \"<|im_start|>\", \"special\": true}, {\"id\": 1, "
    "\"content\": \"<|im_end|>\", \"special\": true}], \"model\": {\"type\": \"BPE\", \"vocab\": "
    "{\"a\": 2, \"s\": 3, \"i\": 4, \"t\": 5, \"n\": 6, \"\\n\": 7}, \"merges\": []}}";

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_document: %s\n", what);
    abort();
}

static void encode(const model_tokenizer *t, int32_t vocabulary, const char *line, size_t length) {
    char error[TRAIN_ERROR] = "";
    document d = {0};
    if (document_encode(t, line, length, &d, error)) {
        bool trains = false;
        for (size_t i = 0; i < d.tokens.count; i++) {
            int32_t word = d.tokens.ids[i];
            require((word & DOCUMENT_TOKEN) < vocabulary, "a token outside of the vocabulary");
            require(((word & DOCUMENT_BEGINS) != 0) == (i == 0), "a document that does not begin once");
            trains = trains || (i && !(word & DOCUMENT_GIVEN));
        }
        require(trains, "a document without anything to train on");
    } else {
        require(*error != 0, "refused without a sentence");
    }
    document_free(&d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static model_tokenizer chat = {.begin = -1, .end = 1};
    static const model_tokenizer bytes = {.begin = -1, .end = -1};
    char error[TRAIN_ERROR];
    if (!chat.tokens) chat.tokens = tokenizer_parse(CHATML, sizeof CHATML - 1, error);
    require(chat.tokens, "the tokenizer is refused");
    encode(&bytes, TEXT_TOKENS, (const char *)data, size);
    encode(&chat, tokenizer_size(chat.tokens), (const char *)data, size);
    return 0;
}
