/*
 * The record of a run: DIR/metrics.jsonl, a line a step, and DIR/loss.svg, the curve. A run that goes on reads what it
 * has written before and drops the lines behind the checkpoint that it goes on from.
 */
#ifndef VJP_TRAIN_METRICS_H
#define VJP_TRAIN_METRICS_H

#include <stdint.h>

#include "train/fail.h"

typedef struct metrics_row {
    int64_t step;
    double loss;
    double smoothed;   /* filled in by metrics_add(): an average in which a step counts 1/50, started without bias */
    double validation; /* NaN: not measured at this step */
    double rate, norm;
    int64_t tokens; /* seen so far; pictures, where there are no tokens */
    double seconds; /* spent on training so far */
} metrics_row;

typedef struct metrics metrics;

/* Opens the record in `dir`, which is made where it is missing; lines past `step` (0: all) are dropped. */
metrics *metrics_open(const char *dir, int64_t step, char error[TRAIN_ERROR]);
void metrics_close(metrics *m);

/* Writes a line, which is on its way to the disk when this returns, and fills in row->smoothed. */
bool metrics_add(metrics *m, metrics_row *row, char error[TRAIN_ERROR]);

/* The last row; step 0: there is none. */
metrics_row metrics_last(const metrics *m);

/* Draws loss.svg, whole or not at all. */
bool metrics_draw(const metrics *m, const char *title, char error[TRAIN_ERROR]);

#endif
