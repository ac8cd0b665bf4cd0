/*
 * Pictures to train on: IDX files, as digit sets come in, or a folder with a folder of pictures for each class. All
 * have one size. A part of them is kept for validation: the test files of an IDX set, else one picture in ten.
 */
#ifndef VJP_TRAIN_IMAGES_H
#define VJP_TRAIN_IMAGES_H

#include <stddef.h>

#include "train/trainer.h"

/* All zero is empty, safe to free. */
typedef struct image_data {
    unsigned char *pixels; /* [count, height, width, channels] */
    int32_t *label;        /* [count] */
    int64_t count;
    int64_t trained; /* the first so many are trained on, the others kept for validation */
    int64_t height, width, channels, classes;
    char (*class_name)[64]; /* [classes] */
    /* What the source reads. */
    int64_t batch;
    uint64_t seed;
} image_data;

/* False: `error` has a sentence that begins with the path of what is wrong. */
bool images_read(const char *path, image_data *images, char error[TRAIN_ERROR]);
void images_free(image_data *images);

/* Batches of f32 pictures, each pixel (value / 255 - 0.5) * 2. False: there are too few. */
bool images_source(image_data *images, int64_t batch, uint64_t seed, train_source *source, char error[TRAIN_ERROR]);

#endif
