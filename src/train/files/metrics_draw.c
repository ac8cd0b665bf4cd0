/* SPDX-License-Identifier: MIT */
/*
 * The pictures of records. loss.svg of one run: the loss of every step as a pale line, the smoothed loss over it,
 * validation as points, and below them the rate and the norm of the gradients. Of several runs: the smoothed losses and
 * the validations in one panel, a colour per run.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "train/files/chart.h"
#include "train/files/metrics_rows.h"

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The norm that 2 % of the steps exceed, and a fifth more: a few early spikes would flatten the rest of the curve. */
static double highest_shown_norm(const metrics *m) {
    double highest = 0, *norm = malloc((m->count + 1) * sizeof *norm);
    for (size_t i = 0; i < m->count; i++) {
        highest = fmax(highest, m->row[i].norm);
        if (norm) norm[i] = m->row[i].norm;
    }
    if (norm && m->count) {
        qsort(norm, m->count, sizeof *norm, ascending);
        highest = fmin(highest, 1.2 * norm[(m->count - 1) * 98 / 100]);
    }
    free(norm);
    return highest;
}

static void draw_run(FILE *file, const metrics *m, const char *title) {
    enum { HEIGHT = 700, LOSS_TOP = 64, LOSS = 360, RATE_TOP = 450, NORM_TOP = 560, SMALL = 80 };
    const chart_rows rows = {m->row, m->count};
    chart c = {.first = m->count ? m->row[0].step : 0, .last = m->count ? m->row[m->count - 1].step : 1};
    chart_begin(&c, file, HEIGHT, title);
    double low = INFINITY, high = -INFINITY, low_rate = 0, high_rate = -INFINITY;
    chart_widen(rows, CHART_LOSS, &low, &high);
    chart_widen(rows, CHART_VALIDATION, &low, &high);
    chart_panel loss = chart_add_panel(&c, LOSS_TOP, LOSS, low, high, 6, "loss");
    chart_band(&loss, rows, CHART_LOSS, "raw");
    chart_line(&loss, rows, CHART_SMOOTHED, "smooth");
    chart_line(&loss, rows, CHART_VALIDATION, "valid");
    chart_dots(&loss, rows, CHART_VALIDATION, "valid");
    chart_widen(rows, CHART_RATE, &low_rate, &high_rate);
    chart_panel rate = chart_add_panel(&c, RATE_TOP, SMALL, low_rate, high_rate, 2, "rate");
    chart_line(&rate, rows, CHART_RATE, "rate");
    chart_panel norm = chart_add_panel(&c, NORM_TOP, SMALL, 0, highest_shown_norm(m), 2, "norm");
    chart_band(&norm, rows, CHART_NORM, "norm");
    chart_steps(&c, NORM_TOP + SMALL);
    double x = CHART_WIDTH - CHART_RIGHT - 350, y = LOSS_TOP + 18;
    x = chart_legend(&c, x, y, "raw", false, "each step");
    x = chart_legend(&c, x, y, "smooth", false, "smoothed");
    chart_legend(&c, x, y, "valid", true, "validation");
    chart_end(&c);
}

/* The legend is beside the title's line, one run below the other. */
static void draw_runs(FILE *file, const metrics *const *m, const char *const *names, size_t count) {
    enum { LEGEND = 20, LOSS = 400, LEGEND_TOP = 58 };
    double top = LEGEND_TOP + LEGEND * (double)count + 10;
    chart c = {.first = INT64_MAX, .last = INT64_MIN};
    double low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < count; i++) {
        const chart_rows rows = {m[i]->row, m[i]->count};
        if (rows.count && rows.row[0].step < c.first) c.first = rows.row[0].step;
        if (rows.count && rows.row[rows.count - 1].step > c.last) c.last = rows.row[rows.count - 1].step;
        chart_widen(rows, CHART_SMOOTHED, &low, &high);
        chart_widen(rows, CHART_VALIDATION, &low, &high);
    }
    if (c.last < c.first) c.first = 0, c.last = 1;
    chart_begin(&c, file, (int)top + LOSS + 60, "Smoothed loss (lines) and validation loss (points)");
    chart_panel loss = chart_add_panel(&c, top, LOSS, low, high, 7, "loss");
    chart_steps(&c, top + LOSS);
    for (size_t i = 0; i < count; i++) {
        const chart_rows rows = {m[i]->row, m[i]->count};
        char style[16];
        snprintf(style, sizeof style, "run%d", (int)(i % CHART_COLOURS));
        chart_line(&loss, rows, CHART_SMOOTHED, style);
        chart_dots(&loss, rows, CHART_VALIDATION, style);
        chart_legend(&c, CHART_LEFT, LEGEND_TOP + LEGEND * (double)i, style, true, names[i]);
    }
    chart_end(&c);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

/* Gives the picture its name when all of it has been written. */
static bool publish(FILE *file, const char *growing, const char *path, char error[TRAIN_ERROR]) {
    bool ok = !ferror(file);
    ok = fclose(file) == 0 && ok;
    ok = ok && system_rename(growing, path);
    if (ok) return true;
    train_fail(error, "%.300s: it cannot be written: %s", path, strerror(errno));
    system_remove_file(growing);
    return false;
}

static FILE *begin(const char *path, char *growing, size_t room, char error[TRAIN_ERROR]) {
    FILE *file = NULL;
    if (snprintf(growing, room, "%s.tmp", path) >= (int)room)
        train_fail(error, "%.300s: the path is too long", path);
    else if (!(file = system_stream(growing, "w")))
        train_fail(error, "%.300s: it cannot be written: %s", path, strerror(errno));
    return file;
}

bool metrics_draw(const metrics *m, const char *title, char error[TRAIN_ERROR]) {
    char path[sizeof m->dir + 32], growing[sizeof path + 8];
    snprintf(path, sizeof path, "%s/loss.svg", m->dir);
    FILE *file = begin(path, growing, sizeof growing, error);
    if (!file) return false;
    draw_run(file, m, title);
    return publish(file, growing, path, error);
}

bool metrics_draw_runs(const metrics *const *m, const char *const *names, size_t count, const char *path,
                       char error[TRAIN_ERROR]) {
    char growing[sizeof m[0]->path];
    FILE *file = begin(path, growing, sizeof growing, error);
    if (!file) return false;
    draw_runs(file, m, names, count);
    return publish(file, growing, path, error);
}
