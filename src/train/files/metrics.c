/* SPDX-License-Identifier: MIT */
/* The record of a run: lines of JSON, written and read. metrics_draw.c draws the curve. */
#include "train/files/metrics_rows.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "files/json.h"
#include "train/files/input.h"

/*
 * The share of the newest step in the moving average: 1/50, but more in the beginning. There the loss falls so fast
 * that an average over 50 steps, or over all, would stay far above it: it covers about the last eighth of the steps
 * then.
 */
static double newest_share(size_t count) {
    return fmax(1.0 / 50, 8 / ((double)count + 7));
}

static bool append(metrics *m, const metrics_row *row) {
    if (m->count == m->room) {
        size_t room = m->room ? 2 * m->room : 256;
        metrics_row *more = realloc(m->row, room * sizeof *more);
        if (!more) return false;
        m->row = more;
        m->room = room;
    }
    m->row[m->count++] = *row;
    m->average += newest_share(m->count) * (row->loss - m->average);
    return true;
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

static bool number(const json_value *object, const char *key, double *value) {
    const json_value *member = json_member(object, key);
    if (!member || member->type != JSON_NUMBER) return false;
    *value = member->number;
    return true;
}

/* False with errno ENOMEM: out of memory; with another: the line is not one of ours. */
static bool read_row(const char *line, size_t length, metrics_row *row) {
    char error[TRAIN_ERROR];
    errno = 0;
    json_document document;
    double step, tokens;
    if (!json_parse(line, length, &document, error)) return false;
    const json_value *root = document.root;
    bool ok = number(root, "step", &step) && number(root, "loss", &row->loss) &&
              number(root, "smoothed", &row->smoothed) && number(root, "rate", &row->rate) &&
              number(root, "norm", &row->norm) && number(root, "tokens", &tokens) &&
              number(root, "seconds", &row->seconds);
    if (!number(root, "validation", &row->validation)) row->validation = NAN;
    if (!number(root, "loss_scale", &row->loss_scale)) row->loss_scale = 0;
    const json_value *skipped = json_member(root, "skipped");
    row->skipped = skipped && skipped->type == JSON_BOOLEAN && skipped->boolean;
    if (ok) {
        row->step = (int64_t)step;
        row->tokens = (int64_t)tokens;
    }
    json_free(&document);
    return ok;
}

enum { MAX_LINE = 4096 }; /* ours have less than 400 bytes */

/*
 * Reads a line with its newline, or as much of it as there is room for: a longer one is not ours, and reading on would
 * take seconds in a damaged file. 0: the file ended, or it failed and errno says why.
 */
static size_t read_line(FILE *file, char line[MAX_LINE]) {
    size_t length = 0;
    for (int c = 0; length < MAX_LINE && c != '\n' && (c = getc(file)) != EOF;)
        line[length++] = (char)c;
    return ferror(file) ? 0 : length;
}

/*
 * Reads the rows up to `step`; stops at the first line that is incomplete, damaged or out of order. The file is then
 * rewritten with these rows, so what cannot be read for another reason must be an error: its rows would be lost.
 */
static bool read_rows(metrics *m, int64_t step, char error[TRAIN_ERROR]) {
    int64_t bytes;
    FILE *file = input_stream(m->path, INT64_MAX, &bytes, error);
    if (!file) return errno == ENOENT;
    char line[MAX_LINE];
    bool ok = true;
    for (size_t length; ok;) {
        metrics_row row;
        errno = 0;
        if ((length = read_line(file, line)) == 0) {
            ok = feof(file) || train_fail(error, "%.300s: it cannot be read: %s", m->path, strerror(errno));
            break;
        }
        if (line[length - 1] != '\n') break;
        if (!read_row(line, length, &row)) {
            ok = errno != ENOMEM || train_fail(error, "%.300s: there is no memory for its rows", m->path);
            break;
        }
        if (row.step > step || (m->count && row.step <= m->row[m->count - 1].step)) break;
        ok = append(m, &row) || train_fail(error, "%.300s: there is no memory for its rows", m->path);
    }
    fclose(file);
    return ok;
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

static bool write_failed(const char *path, char error[TRAIN_ERROR]) {
    return train_fail(error, "%.300s: it cannot be written: %s", path, strerror(errno));
}

static char *row_text(const metrics_row *row) {
    json_writer w = {0};
    json_put_object(&w, NULL);
    json_put_integer(&w, "step", row->step);
    json_put_real(&w, "loss", row->loss);
    json_put_real(&w, "smoothed", row->smoothed);
    if (!isnan(row->validation)) json_put_real(&w, "validation", row->validation);
    json_put_real(&w, "rate", row->rate);
    json_put_real(&w, "norm", row->norm);
    if (row->loss_scale != 0) json_put_real(&w, "loss_scale", row->loss_scale);
    if (row->skipped) json_put_boolean(&w, "skipped", true);
    json_put_integer(&w, "tokens", row->tokens);
    json_put_real(&w, "seconds", row->seconds);
    json_put_object_end(&w);
    return json_take(&w);
}

static bool write_row(metrics *m, FILE *file, const metrics_row *row, char error[TRAIN_ERROR]) {
    char *text = row_text(row);
    if (!text) return train_fail(error, "%s: there is no memory for a line", m->path);
    bool ok = fputs(text, file) >= 0 && fflush(file) == 0;
    if (!ok) write_failed(m->path, error);
    free(text);
    return ok;
}

/* Replaces the file by one that has only the rows that were read. */
static bool rewrite(metrics *m, char error[TRAIN_ERROR]) {
    char path[sizeof m->path + 8];
    snprintf(path, sizeof path, "%s.tmp", m->path);
    FILE *file = system_stream(path, "w");
    if (!file) return write_failed(path, error);
    bool ok = true;
    for (size_t i = 0; i < m->count && ok; i++)
        ok = write_row(m, file, &m->row[i], error);
    if (fclose(file) && ok) ok = write_failed(path, error);
    if (ok && !system_rename(path, m->path)) ok = write_failed(m->path, error);
    if (!ok) system_remove_file(path);
    return ok;
}

/* A record without rows and without a file. */
static metrics *new_metrics(const char *dir, char error[TRAIN_ERROR]) {
    metrics *m = calloc(1, sizeof *m);
    if (!m) {
        train_fail(error, "there is no memory for the record of a run");
        return NULL;
    }
    if (snprintf(m->dir, sizeof m->dir, "%s", dir) >= (int)sizeof m->dir - 32) {
        train_fail(error, "%.300s: the path is too long", dir);
        metrics_close(m);
        return NULL;
    }
    snprintf(m->path, sizeof m->path, "%s/metrics.jsonl", m->dir);
    return m;
}

metrics *metrics_open(const char *dir, int64_t step, char error[TRAIN_ERROR]) {
    metrics *m = new_metrics(dir, error);
    if (!m) return NULL;
    bool ok = (step == 0 || read_rows(m, step, error)) && rewrite(m, error);
    if (ok) {
        m->file = system_stream(m->path, "a");
        if (!m->file) ok = write_failed(m->path, error);
    }
    if (ok) return m;
    metrics_close(m);
    return NULL;
}

metrics *metrics_read(const char *dir, char error[TRAIN_ERROR]) {
    metrics *m = new_metrics(dir, error);
    system_status status;
    bool ok = m && (system_status_of(m->path, &status) ||
                    train_fail(error, "%.300s: it cannot be opened: %s", m->path, strerror(errno)));
    ok = ok && read_rows(m, INT64_MAX, error) && (m->count || train_fail(error, "%.300s: it has no steps", m->path));
    if (ok) return m;
    metrics_close(m);
    return NULL;
}

const metrics_row *metrics_rows(const metrics *m, size_t *count) {
    *count = m->count;
    return m->row;
}

void metrics_close(metrics *m) {
    if (!m) return;
    if (m->file) fclose(m->file);
    free(m->row);
    free(m);
}

bool metrics_add(metrics *m, metrics_row *row, char error[TRAIN_ERROR]) {
    if (!append(m, row)) return train_fail(error, "%s: there is no memory for a row", m->path);
    m->row[m->count - 1].smoothed = row->smoothed = m->average;
    return write_row(m, m->file, row, error);
}

bool metrics_sync(metrics *m, char error[TRAIN_ERROR]) {
    return (fflush(m->file) == 0 && system_sync(system_number_of(m->file))) || write_failed(m->path, error);
}

metrics_row metrics_last(const metrics *m) {
    return m->count ? m->row[m->count - 1] : (metrics_row){0};
}
