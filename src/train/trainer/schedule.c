/* SPDX-License-Identifier: MIT */
/*
 * What changes from step to step by a formula: the learning rate, and a step's share in the average of the weights.
 *
 *     cosine    half a cosine from the peak to the last rate
 *     linear    a straight line
 *     wsd       the peak until the last `decay_share` of all steps, then a straight line
 *     constant  the peak
 *
 * All of them rise in a straight line over the warm-up first.
 */
#include <math.h>

#include "train/trainer/trainer.h"

/* What is left of the distance from the last rate to the peak: 1 after the warm-up, 0 at the end. */
static double left(const trainer_options *o, int64_t step) {
    double done = fmin((double)(step - o->warmup) / fmax(1, (double)(o->steps - o->warmup)), 1);
    double decay = fmax(1, floor(o->decay_share * (double)o->steps)); /* steps */
    switch (o->schedule) {
    case TRAINER_COSINE: return 0.5 * (1 + cos(3.14159265358979323846 * done));
    case TRAINER_LINEAR: return 1 - done;
    case TRAINER_WSD: return fmax(0, fmin(1, (double)(o->steps - step) / decay));
    case TRAINER_CONSTANT: return 1;
    }
    return 1;
}

double trainer_rate(const trainer_options *o, int64_t step) {
    if (step <= o->warmup) return o->rate * (double)step / (double)o->warmup;
    return o->rate * (o->last_rate + (1 - o->last_rate) * left(o, step));
}

double trainer_average_share(const trainer_options *o, int64_t step) {
    return (1 - o->average) / (1 - pow(o->average, (double)step));
}
