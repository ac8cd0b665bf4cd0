/* SPDX-License-Identifier: MIT */
/*
 * Gradients travel while the backward pass is still computing others. Neighbouring parameters form buckets, from the
 * last parameter to the first, as the backward pass reaches them. As soon as the program of the last own part has
 * written a gradient, the sums of the other own shards are added to it; when a bucket is complete, a second thread
 * exchanges it with the other processes. Every element is added in the same tree as without buckets (shards.h), so the
 * bits are the same. A device that computes beside the host runs the calls one by one, not as a recording, with an
 * event after each bucket: the second thread waits for it, and has a queue of its own for what it copies and adds.
 *
 * The legal order of calls of a step: overlap_begin(), the run of the program, overlap_end(), in every process, whether
 * its own parts have failed or not: the others wait for its buckets.
 */
#ifndef VJP_TRAIN_TRAINER_OVERLAP_H
#define VJP_TRAIN_TRAINER_OVERLAP_H

#include <stdatomic.h>

#include "core/system.h"
#include "train/trainer/shards.h"

typedef struct overlap {
    shards *sum; /* NULL: there is no overlap */
    vjp_program *program;
    const int64_t *bounds;
    size_t buckets;
    size_t *first;     /* [buckets]: bucket b has parameters [first[b], first[b - 1]), and [first[0], all) */
    int64_t *begin;    /* [parameters + 1]: where each begins, in elements */
    int32_t *order;    /* [parameters]: as the program completes their gradients */
    int32_t *call;     /* [parameters]: the call after which each is complete */
    size_t *missing;   /* [buckets]: parameters that are not complete yet */
    size_t next;       /* in order[] */
    size_t complete;   /* buckets, from 0 */
    vjp_event **event; /* [buckets]: on a device with a queue of its own, after which each is complete */
    atomic_size_t ready;
    system_thread thread;
    bool started;
    vjp_status status; /* of the program's thread; `sent` is of the other */
    vjp_status sent;
    double busy;   /* seconds in the exchanges of a step */
    double hidden; /* of them, beside the backward pass: the sum of all steps */
} overlap;

/* Prepares for the program of the last own part. A failure's sentence is in vjp_error(device). */
vjp_status overlap_create(overlap *o, shards *sum, vjp_program *program, const int64_t *bounds);
void overlap_free(overlap *o);

/* Before the program of the last own part runs. */
vjp_status overlap_begin(overlap *o);

/* After it; `ok`: it ran without failure. Then the own range of buffer[0] has the sum over all processes. */
vjp_status overlap_end(overlap *o, bool ok);

#endif
