/* SPDX-License-Identifier: MIT */
/*
 * Random files through the safetensors reader. What must hold: no crash, nothing leaked, a refusal has a sentence, and
 * what an accepted file says of its tensors is true: each is inside the given bytes and has the size of its shape and
 * type.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_safetensors: %s\n", what);
    abort();
}

static void check_tensor(const safetensors_file *file, const safetensors_tensor *t, const uint8_t *data, size_t size) {
    const uint8_t *begin = t->data;
    require(t->name && t->type, "a tensor without a name or a type");
    require(t->bytes == 0 || (begin >= data + 8 && begin <= data + size && t->bytes <= (size_t)(data + size - begin)),
            "a tensor outside the file");
    require(safetensors_find(file, t->name) != NULL, "a tensor that its own name does not find");
    require(t->ndim >= 0, "a negative rank");
    if (t->dtype < 0 || t->ndim > VJP_MAX_DIMS) return;
    uint64_t bytes = vjp_dtype_size((vjp_dtype)t->dtype);
    for (int i = 0; i < t->ndim; i++) {
        require(t->shape[i] >= 0, "a negative size");
        require(!__builtin_mul_overflow(bytes, (uint64_t)t->shape[i], &bytes), "sizes that overflow");
    }
    require(bytes == t->bytes, "bytes that the shape does not make");
    /* Every byte can be read. */
    volatile uint8_t sum = 0;
    for (size_t i = 0; i < t->bytes; i++)
        sum = (uint8_t)(sum + begin[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    safetensors_file file;
    char error[SAFETENSORS_ERROR] = "";
    if (safetensors_parse(data, size, &file, error)) {
        for (size_t i = 0; i < file.count; i++)
            check_tensor(&file, &file.tensors[i], data, size);
        for (size_t i = 0; i < file.pairs; i++)
            require(file.metadata[i].key && file.metadata[i].value, "metadata without a text");
    } else {
        require(*error != 0, "refused without a sentence");
    }
    safetensors_free(&file);
    return 0;
}
