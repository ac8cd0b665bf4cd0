/* SPDX-License-Identifier: MIT */
/*
 * Loss scaling, for gradients in f16, whose smallest normal number is 6e-5: the loss is multiplied by a large scale
 * before it is differentiated, so that small gradients stay in range, and the optimiser divides by it.
 *
 * The scale changes as training runs: a step whose gradients are not finite is skipped and halves it, and a number of
 * steps in a row without one doubles it. All of this is part of the graph, so that the device decides and no step waits
 * for the host. Legal order of calls: create, then multiply (before the gradients), measure (after them), and finish
 * after the optimiser's steps, which must read the old states.
 */
#ifndef VJP_TRAIN_TRAINER_LOSS_SCALE_H
#define VJP_TRAIN_TRAINER_LOSS_SCALE_H

#include <stdint.h>

#include "vjp.h"

/* The states, all f32 scalars: the scale, 1 / scale, steps since the scale changed, steps taken. */
enum { LOSS_SCALE, LOSS_SCALE_INVERSE, LOSS_SCALE_GOOD, LOSS_SCALE_TAKEN, LOSS_SCALE_STATES };

/* Their names, in the graph and in a checkpoint. */
extern const char *const loss_scale_names[LOSS_SCALE_STATES];

/* The first scale, and the steps after which it is doubled, where nothing else is asked for: PyTorch's choice. */
#define LOSS_SCALE_FIRST 65536.0
enum { LOSS_SCALE_STEPS = 2000, LOSS_SCALE_MAX_STEPS = 1 << 24 /* which f32 counts exactly */ };

typedef struct loss_scale {
    vjp_graph *graph;
    vjp_value state[LOSS_SCALE_STATES];
    int64_t steps;  /* 0: the scale is fixed, and gradients that are not finite end the run */
    vjp_value norm; /* of the gradients, without the scale; not finite: the step is skipped */
    vjp_value step; /* AdamW's: one more than the steps taken */
    vjp_value fine; /* 1; not finite where the norm is not */
} loss_scale;

loss_scale loss_scale_create(vjp_graph *graph, int64_t steps);

/* The first values of the states. */
void loss_scale_first(double scale, float first[LOSS_SCALE_STATES]);

/* The loss times the scale. */
vjp_value loss_scale_multiply(const loss_scale *s, vjp_value loss);

/*
 * Sets norm, step and fine; returns the factor for the gradients, which clips them and removes the scale. It is not
 * finite where the norm is not.
 */
vjp_value loss_scale_measure(loss_scale *s, const vjp_value *gradients, size_t count, double max_norm);

/*
 * The new states, which must be results of the program. `alive` is 0, or not finite: then nothing changes. *lost is not
 * finite once the scale is below 1.
 */
void loss_scale_finish(const loss_scale *s, vjp_value alive, vjp_value results[LOSS_SCALE_STATES], vjp_value *lost);

#endif
