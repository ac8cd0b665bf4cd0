/* SPDX-License-Identifier: MIT */
/*
 * Random files through the readers of pictures: JPEG, PNG, PGM, PPM. What must hold: no crash, nothing leaked, a
 * refusal has a sentence that begins with the file's name, and an accepted picture has all the pixels that it says it
 * has.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/data/picture.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_picture: %s\n", what);
    abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    picture p;
    char error[TRAIN_ERROR] = "";
    if (picture_parse("file", data, size, &p, error)) {
        require(p.height > 0 && p.width > 0 && p.pixels, "a picture without pixels");
        require(p.channels == 1 || p.channels == 3, "neither grey nor colours");
        volatile uint8_t sum = 0;
        for (int64_t i = 0; i < p.height * p.width * p.channels; i++)
            sum = (uint8_t)(sum + p.pixels[i]);
    } else {
        require(strncmp(error, "file: ", 6) == 0 && error[6], "refused without a sentence");
        require(!p.pixels, "refused, and there are pixels");
    }
    picture_free(&p);
    return 0;
}
