/* SPDX-License-Identifier: MIT */
/*
 * The record of a run: DIR/metrics.jsonl, one line per step, and DIR/loss.svg, the curve. A resumed run reads its
 * record and drops the lines after its checkpoint.
 */
#ifndef VJP_TRAIN_METRICS_H
#define VJP_TRAIN_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "train/fail.h"

typedef struct metrics_row {
    int64_t step;
    double loss;
    double smoothed;   /* set by metrics_add(): a moving average over about an eighth of the steps, at most 50 */
    double validation; /* NaN: not measured at this step */
    double rate, norm;
    int64_t tokens;    /* seen so far; pictures, where there are no tokens */
    double seconds;    /* spent on training so far */
    double loss_scale; /* after the step; 0: the loss is not scaled */
    bool skipped;      /* the gradients were not finite with the scale before; norm is 0 */
} metrics_row;

typedef struct metrics metrics;

/* Opens the record in the folder `dir`; lines after `step` (0: all) are dropped. NULL: `error` says why. */
metrics *metrics_open(const char *dir, int64_t step, char error[TRAIN_ERROR]);
void metrics_close(metrics *m);

/* Reads the record of a run that may be in progress; nothing is written, and no row may be added. */
metrics *metrics_read(const char *dir, char error[TRAIN_ERROR]);

/* All rows, which stay valid until the next is added. */
const metrics_row *metrics_rows(const metrics *m, size_t *count);

/* Writes a line and sets row->smoothed. The line survives a crash of the process, but not of the system. */
bool metrics_add(metrics *m, metrics_row *row, char error[TRAIN_ERROR]);

/* Syncs all lines to the disk. The folder itself is synced by checkpoint_save(). */
bool metrics_sync(metrics *m, char error[TRAIN_ERROR]);

/* The last row; step 0: there is none. */
metrics_row metrics_last(const metrics *m);

/* Draws loss.svg; on failure the old one stays. */
bool metrics_draw(const metrics *m, const char *title, char error[TRAIN_ERROR]);

/* Draws several runs into one picture. */
bool metrics_draw_runs(const metrics *const *m, const char *const *names, size_t count, const char *path,
                       char error[TRAIN_ERROR]);

#endif
