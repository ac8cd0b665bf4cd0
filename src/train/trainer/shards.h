/* SPDX-License-Identifier: MIT */
/*
 * The sum of gradients over the shards of a batch. A batch is split into shards, 2^n of them, each with an f32
 * gradient; they are added as one binary tree over the shard's index. Each process of a group has an aligned block of
 * shards and adds these as they are computed, with log2(block) extra buffers; the group adds the blocks by the same
 * tree. So the bits of the sum do not depend on the number of processes.
 */
#ifndef VJP_TRAIN_TRAINER_SHARDS_H
#define VJP_TRAIN_TRAINER_SHARDS_H

#include "train/fail.h"
#include "vjp.h"

enum { SHARDS_MAX_LEVELS = 20, SHARDS_MAX = 1 << SHARDS_MAX_LEVELS };

typedef struct shards {
    vjp_device *device;
    vjp_group *group;                /* NULL: one process */
    int64_t count;                   /* of a batch */
    int64_t own, first;              /* of this process: how many, and the index of the first */
    vjp_tensor *gradient;            /* [gradients]: each with one axis */
    size_t gradients, elements;      /* of all gradients together */
    void *buffer[SHARDS_MAX_LEVELS]; /* each as large as all gradients: [k] holds the sum of a block of 2^k shards */
    double seconds;                  /* spent in the group's sums so far */
} shards;

/* False: `error` says why `count` shards cannot be split over the group's processes. */
bool shards_split(shards *s, vjp_device *device, vjp_group *group, int64_t count, char error[TRAIN_ERROR]);

/* How many buffers it needs, each as large as all gradients. */
int shards_buffers(const shards *s);

/* Allocates for gradients at these places, which must stay. A failure's sentence is in vjp_error(device). */
vjp_status shards_create(shards *s, const vjp_tensor *gradient, size_t gradients);
void shards_free(shards *s);

/* The gradients of own shard `index`, from 0, have been computed; after the last one, they hold the sum of all own. */
vjp_status shards_add(shards *s, int64_t index);

/*
 * Copies tensors [first, last) of a list that has one of each gradient's length into their places of a buffer in which
 * all follow each other, buffer[0], or back. What shards_add() keeps there between shards is not needed after the last.
 */
vjp_status shards_pack(shards *s, const vjp_tensor *tensor, size_t first, size_t last);
vjp_status shards_unpack(shards *s, const vjp_tensor *tensor, size_t first, size_t last);

/*
 * shards_add() of the last own shard, and shards_pack(), for one gradient: it has been computed, others may not have
 * been yet.
 */
vjp_status shards_finish(shards *s, size_t gradient);

/* Replaces the sums of the own shards by those of all processes. `reduced`: buffer[0] has the own range of them. */
vjp_status shards_sum(shards *s, bool reduced);

#endif
