/* SPDX-License-Identifier: MIT */
/*
 * Pictures to train on: IDX files, the format of MNIST, or a folder that has a folder of pictures for each class. All
 * have the same size. Some are kept for validation: the test files of an IDX set, else every tenth picture.
 */
#ifndef VJP_TRAIN_IMAGES_H
#define VJP_TRAIN_IMAGES_H

#include <stddef.h>

#include "train/trainer/trainer.h"

/* All zero is empty, safe to free. */
typedef struct image_data {
    unsigned char *pixels; /* [count, height, width, channels] */
    int32_t *label;        /* [count] */
    int64_t count;
    int64_t trained; /* how many, from the first, are trained on; the others are for validation */
    int64_t height, width, channels, classes;
    char (*class_name)[64]; /* [classes] */
    /* Set by images_source(). */
    int64_t rows, shards; /* `rows` of one shard */
    uint64_t seed;
} image_data;

/* False: `error` has a sentence that begins with the path of the file that is wrong. */
bool images_read(const char *path, image_data *images, char error[TRAIN_ERROR]);
void images_free(image_data *images);

/*
 * Batches of f32 pictures, each pixel scaled to (value / 255 - 0.5) * 2. Each part is one of the `shards` of a batch,
 * whose pictures are the same for any number of them. False: there are too few pictures.
 */
bool images_source(image_data *images, int64_t batch, int64_t shards, uint64_t seed, train_source *source,
                   char error[TRAIN_ERROR]);

#endif
