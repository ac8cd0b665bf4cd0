/* SPDX-License-Identifier: MIT */
/*
 * Curves over the steps of a run, as SVG: panels below each other that share the axis of steps. Colours follow the
 * reader's light or dark theme. For a long run the file stays small: no curve has more points than pixels.
 */
#ifndef VJP_TRAIN_CHART_H
#define VJP_TRAIN_CHART_H

#include <stdio.h>

#include "train/files/metrics.h"

enum { CHART_WIDTH = 960, CHART_LEFT = 76, CHART_RIGHT = 28, CHART_COLOURS = 8 };

typedef struct chart {
    FILE *file;
    int64_t first, last; /* steps */
} chart;

/* A quantity of the rows: loss, smoothed, validation, rate or norm. NaN: not measured at that step. */
typedef enum chart_value { CHART_LOSS, CHART_SMOOTHED, CHART_VALIDATION, CHART_RATE, CHART_NORM } chart_value;

typedef struct chart_rows {
    const metrics_row *row;
    size_t count;
} chart_rows;

/* The part of the picture in which values from `low` to `high` are drawn; larger and smaller ones at its edge. */
typedef struct chart_panel {
    const chart *chart;
    double top, height, low, high, step; /* step: between the lines of the grid */
} chart_panel;

void chart_begin(chart *c, FILE *file, int height, const char *title);
void chart_end(const chart *c);

/* Widens a range (at first INFINITY to -INFINITY) by the values of some rows. */
void chart_widen(chart_rows rows, chart_value value, double *low, double *high);

/* A panel for at least this range, with its grid and label. `lines`: of the grid, about. */
chart_panel chart_add_panel(const chart *c, double top, double height, double low, double high, int lines,
                            const char *label);

/* The numbers of the steps below the last panel, which ends at `bottom`. */
void chart_steps(const chart *c, double bottom);

/* `style` is the class of the curve: "raw", "smooth", "valid", "rate", "norm", or "run0" to "run7". */
void chart_line(const chart_panel *p, chart_rows rows, chart_value value, const char *style);
void chart_band(const chart_panel *p, chart_rows rows, chart_value value, const char *style); /* lowest to highest */
void chart_dots(const chart_panel *p, chart_rows rows, chart_value value, const char *style);

/* A line and its name; returns where the next one can begin. */
double chart_legend(const chart *c, double x, double y, const char *style, bool dot, const char *text);

#endif
