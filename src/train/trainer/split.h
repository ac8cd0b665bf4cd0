/* SPDX-License-Identifier: MIT */
/*
 * What an optimiser keeps, split over the processes of a group (ZeRO, stage 1). Each process owns neighbouring
 * parameters: it receives their summed gradients alone, keeps their moments alone, takes their steps, and sends the new
 * weights to the others. That is as much on the wire as a sum of all gradients.
 *
 * Parameters stay whole, so that every bit is that of one process: the squares of a parameter's gradient are summed in
 * one call, which adds them to those of the parameters before it, and Muon needs whole matrices. The price is that no
 * range is shorter than the largest parameter.
 */
#ifndef VJP_TRAIN_TRAINER_SPLIT_H
#define VJP_TRAIN_TRAINER_SPLIT_H

#include "train/trainer/shards.h"

typedef struct parameter_split {
    vjp_group *group;   /* NULL: every process keeps everything, and all else is empty */
    int64_t *bounds;    /* [size + 1]: of the ranges, in elements of all parameters together */
    size_t *begin;      /* [size + 1]: the first parameter of each range */
    size_t first, last; /* parameters [first, last) are owned by this process */
    vjp_tensor *weight; /* [parameters]: each with one axis */
    void *square;       /* a number on the device */
} parameter_split;

/* Chooses the ranges of `count` parameters, with so many elements each, so that the longest is as short as possible. */
bool split_choose(parameter_split *s, vjp_group *group, const int64_t *elements, size_t count, char error[TRAIN_ERROR]);

/* Allocates for weights at these places, which must stay. A failure's sentence is in vjp_error(device). */
vjp_status split_create(parameter_split *s, const shards *sum, const vjp_tensor *weight);
void split_free(parameter_split *s, vjp_device *device);

/* Takes the longest range as the own one: a plan of it has the same size in all processes. */
void split_take_longest(parameter_split *s);

/* Whether this process owns a parameter. */
bool split_owns(const parameter_split *s, size_t parameter);

/*
 * Sums the gradients over all processes: the own parameters get theirs, others keep what they had. `squares` is the sum
 * of the squares of all gradients in the order of the parameters. `reduced`: buffer[0] has the own range already.
 */
vjp_status split_sum(parameter_split *s, shards *sum, bool reduced, float *squares);

/* Copies the weights of all parameters from their owners to all processes. */
vjp_status split_share_weights(parameter_split *s, shards *sum);

#endif
