/* SPDX-License-Identifier: MIT */
/* The rows of a record, shared by metrics.c and metrics_draw.c. */
#ifndef VJP_TRAIN_METRICS_ROWS_H
#define VJP_TRAIN_METRICS_ROWS_H

#include <stdio.h>

#include "train/files/metrics.h"

struct metrics {
    char dir[4096], path[4096 + 32];
    FILE *file;
    metrics_row *row;
    size_t count, room;
    double average; /* the smoothed loss */
};

#endif
