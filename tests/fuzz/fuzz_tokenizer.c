/* SPDX-License-Identifier: MIT */
/*
 * Random tokenizer files, and random text through those that are accepted; the first zero byte ends the file. What must
 * hold: no crash, nothing leaked, a refusal has a sentence, every token that encoding gives is one of the tokenizer's,
 * the same text gives the same tokens again (then from the cache), and they can be decoded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_tokenizer: %s\n", what);
    abort();
}

static void encode_twice(tokenizer *t, const char *text, size_t length) {
    char error[FILE_ERROR] = "";
    token_list first = {0}, second = {0};
    byte_list decoded = {0};
    if (tokenizer_encode(t, text, length, true, &first, error)) {
        for (size_t i = 0; i < first.count; i++)
            require(tokenizer_token(t, first.ids[i]) != NULL, "a token that the tokenizer does not have");
        require(tokenizer_encode(t, text, length, true, &second, error), "the same text is refused the second time");
        require(first.count == second.count &&
                    (!first.count || memcmp(first.ids, second.ids, first.count * sizeof *first.ids) == 0),
                "the same text has other tokens the second time");
        require(tokenizer_decode(t, first.ids, first.count, length % 2, &decoded, error), "tokens cannot be decoded");
    } else {
        require(*error != 0 && first.count == 0, "refused without a sentence, or with tokens");
    }
    token_list_free(&first);
    token_list_free(&second);
    byte_list_free(&decoded);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *zero = size ? memchr(data, 0, size) : NULL;
    size_t file = zero ? (size_t)(zero - data) : size;
    char error[FILE_ERROR] = "";
    tokenizer *t = tokenizer_parse((const char *)data, file, error);
    if (t && zero)
        encode_twice(t, (const char *)zero + 1, size - file - 1);
    else if (!t)
        require(*error != 0, "refused without a sentence");
    tokenizer_free(t);
    return 0;
}
