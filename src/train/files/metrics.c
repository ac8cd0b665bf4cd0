/* The record of a run: lines of JSON, and what is read back of them. metrics_draw.c draws it. */
#include "train/files/metrics_rows.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files/json.h"

/* A step counts 1/50 in the average. */
static const double SMOOTHING = 0.98;

static bool keep(metrics *m, const metrics_row *row) {
    if (m->count == m->room) {
        size_t room = m->room ? 2 * m->room : 256;
        metrics_row *more = realloc(m->row, room * sizeof *more);
        if (!more) return false;
        m->row = more;
        m->room = room;
    }
    m->row[m->count++] = *row;
    /* An average that starts at nothing, divided by what it lacks for that. */
    m->average = SMOOTHING * m->average + (1 - SMOOTHING) * row->loss;
    m->weight = SMOOTHING * m->weight + (1 - SMOOTHING);
    return true;
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

static bool number(const json_value *object, const char *key, double *value) {
    const json_value *member = json_member(object, key);
    if (!member || member->type != JSON_NUMBER) return false;
    *value = member->number;
    return true;
}

static bool read_row(const char *line, size_t length, metrics_row *row) {
    char error[TRAIN_ERROR];
    json_document document;
    double step, tokens;
    if (!json_parse(line, length, &document, error)) return false;
    const json_value *root = document.root;
    bool ok = number(root, "step", &step) && number(root, "loss", &row->loss) &&
              number(root, "smoothed", &row->smoothed) && number(root, "rate", &row->rate) &&
              number(root, "norm", &row->norm) && number(root, "tokens", &tokens) &&
              number(root, "seconds", &row->seconds);
    if (!number(root, "validation", &row->validation)) row->validation = NAN;
    if (ok) {
        row->step = (int64_t)step;
        row->tokens = (int64_t)tokens;
    }
    json_free(&document);
    return ok;
}

/* Keeps the rows up to `step`, in order; a last line that a dead process left unfinished is dropped. */
static bool read_rows(metrics *m, int64_t step, char error[TRAIN_ERROR]) {
    FILE *file = fopen(m->path, "r");
    if (!file) return errno == ENOENT || train_fail(error, "%s: %s", m->path, strerror(errno));
    char *line = NULL;
    size_t room = 0;
    bool ok = true;
    for (ssize_t length; ok && (length = getline(&line, &room, file)) > 0;) {
        metrics_row row;
        if (line[length - 1] != '\n' || !read_row(line, (size_t)length, &row) || row.step > step) break;
        if (m->count && row.step <= m->row[m->count - 1].step) break;
        ok = keep(m, &row) || train_fail(error, "%s: no memory for its rows", m->path);
    }
    free(line);
    fclose(file);
    return ok;
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

static char *row_text(const metrics_row *row) {
    json_writer w = {0};
    json_put_object(&w, NULL);
    json_put_integer(&w, "step", row->step);
    json_put_real(&w, "loss", row->loss);
    json_put_real(&w, "smoothed", row->smoothed);
    if (!isnan(row->validation)) json_put_real(&w, "validation", row->validation);
    json_put_real(&w, "rate", row->rate);
    json_put_real(&w, "norm", row->norm);
    json_put_integer(&w, "tokens", row->tokens);
    json_put_real(&w, "seconds", row->seconds);
    json_put_object_end(&w);
    return json_take(&w);
}

static bool write_row(metrics *m, FILE *file, const metrics_row *row, char error[TRAIN_ERROR]) {
    char *text = row_text(row);
    if (!text) return train_fail(error, "%s: no memory for a line", m->path);
    bool ok = fputs(text, file) >= 0 && fflush(file) == 0;
    if (!ok) train_fail(error, "%s: %s", m->path, strerror(errno));
    free(text);
    return ok;
}

/* The rows that were kept, under a name of their own, which then takes the place of the old file. */
static bool write_kept(metrics *m, char error[TRAIN_ERROR]) {
    char path[sizeof m->path + 8];
    snprintf(path, sizeof path, "%s.tmp", m->path);
    FILE *file = fopen(path, "w");
    if (!file) return train_fail(error, "%s: %s", path, strerror(errno));
    bool ok = true;
    for (size_t i = 0; i < m->count && ok; i++)
        ok = write_row(m, file, &m->row[i], error);
    if (fclose(file) && ok) ok = train_fail(error, "%s: %s", path, strerror(errno));
    if (ok && rename(path, m->path)) ok = train_fail(error, "%s: %s", m->path, strerror(errno));
    if (!ok) unlink(path);
    return ok;
}

metrics *metrics_open(const char *dir, int64_t step, char error[TRAIN_ERROR]) {
    metrics *m = calloc(1, sizeof *m);
    if (!m) {
        train_fail(error, "no memory for the record of a run");
        return NULL;
    }
    bool ok = snprintf(m->dir, sizeof m->dir, "%s", dir) < (int)sizeof m->dir - 32 ||
              train_fail(error, "%s: the path is too long", dir);
    if (ok) snprintf(m->path, sizeof m->path, "%s/metrics.jsonl", m->dir);
    if (ok && mkdir(dir, 0777) && errno != EEXIST) ok = train_fail(error, "%s: %s", dir, strerror(errno));
    ok = ok && (step == 0 || read_rows(m, step, error)) && write_kept(m, error);
    if (ok) {
        m->file = fopen(m->path, "a");
        if (!m->file) ok = train_fail(error, "%s: %s", m->path, strerror(errno));
    }
    if (ok) return m;
    metrics_close(m);
    return NULL;
}

void metrics_close(metrics *m) {
    if (!m) return;
    if (m->file) fclose(m->file);
    free(m->row);
    free(m);
}

bool metrics_add(metrics *m, metrics_row *row, char error[TRAIN_ERROR]) {
    if (!keep(m, row)) return train_fail(error, "%s: no memory for a row", m->path);
    m->row[m->count - 1].smoothed = row->smoothed = m->average / m->weight;
    return write_row(m, m->file, row, error);
}

metrics_row metrics_last(const metrics *m) {
    return m->count ? m->row[m->count - 1] : (metrics_row){0};
}
