/* SPDX-License-Identifier: MIT */
/* vjp runs: compares training runs in one table, and in one picture. Nothing in their folders is changed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "train/job/job.h"

enum { MAX_RUNS = 256, COLUMNS = 10, CELL = 48 };

typedef struct run {
    const char *dir;
    metrics *record;
    job_settings settings;
    bool has_settings; /* a run that has not saved yet has none */
    metrics_row last, best;
    double tokens_per_second;
} run;

static bool read_run(const char *dir, run *r, char error[TRAIN_ERROR]) {
    char ignored[TRAIN_ERROR];
    *r = (run){.dir = dir, .record = metrics_read(dir, error), .best = {.validation = NAN}};
    if (!r->record) return false;
    size_t count;
    const metrics_row *rows = metrics_rows(r->record, &count);
    for (size_t i = 0; i < count; i++)
        if (!isnan(rows[i].validation) && !(rows[i].validation >= r->best.validation)) r->best = rows[i];
    r->last = metrics_last(r->record);
    r->tokens_per_second = r->last.seconds > 0 ? (double)r->last.tokens / r->last.seconds : 0;
    r->has_settings = job_recorded(dir, &r->settings, ignored);
    return true;
}

static void show_json(const run *r) {
    cli_json_begin();
    cli_json_text("run", r->dir);
    cli_json_integer("step", r->last.step);
    cli_json_real("smoothed", r->last.smoothed);
    if (r->best.step) {
        cli_json_real("best_validation", r->best.validation);
        cli_json_integer("best_step", r->best.step);
    }
    cli_json_integer("tokens", r->last.tokens);
    cli_json_real("seconds", r->last.seconds);
    if (r->has_settings) {
        const trainer_options *t = &r->settings.trainer;
        cli_json_text("model", r->settings.model);
        cli_json_text("preset", r->settings.preset);
        cli_json_integer("steps", t->steps);
        cli_json_text("optimizer", job_optimisers[t->optimiser]);
        cli_json_text("schedule", job_schedules[t->schedule]);
        cli_json_real("lr", t->rate);
        cli_json_real("average", t->average);
        cli_json_integer("seed", (int64_t)t->seed);
    }
    cli_json_end();
}

static void fill_cells(const run *r, char text[COLUMNS][CELL], cli_cell cell[COLUMNS], bool is_best) {
    const trainer_options *t = &r->settings.trainer;
    for (int i = 0; i < COLUMNS; i++) {
        text[i][0] = 0;
        cell[i] = (cli_cell){text[i], CLI_PLAIN};
    }
    cell[0].text = r->dir;
    snprintf(text[1], CELL, r->has_settings ? "%lld/%lld" : "%lld", (long long)r->last.step, (long long)t->steps);
    if (r->has_settings) {
        snprintf(text[2], CELL, "%s %s", r->settings.model, r->settings.from[0] ? "" : r->settings.preset);
        snprintf(text[3], CELL, "%s", job_optimisers[t->optimiser]);
        snprintf(text[4], CELL, "%s", job_schedules[t->schedule]);
        snprintf(text[5], CELL, "%g", t->rate);
        if (t->average > 0) snprintf(text[6], CELL, "%g", t->average);
    }
    snprintf(text[7], CELL, "%.4f", r->last.smoothed);
    if (r->best.step)
        snprintf(text[8], CELL, "%.4f at %lld%s", r->best.validation, (long long)r->best.step, is_best ? " *" : "");
    if (is_best) cell[8].colour = CLI_GREEN;
    snprintf(text[9], CELL, "%.0f", r->tokens_per_second);
}

static void show_table(const run *runs, int count) {
    cli_column columns[COLUMNS] = {{"run", 0, false},       {"steps", 0, true},     {"model", 0, false},
                                   {"optimizer", 0, false}, {"schedule", 0, false}, {"lr", 0, true},
                                   {"average", 0, true},    {"loss", 0, true},      {"best validation", 0, false},
                                   {"tokens/s", 0, true}};
    char text[COLUMNS][CELL];
    cli_cell cell[COLUMNS];
    int lowest = -1;
    for (int i = 0; i < count; i++)
        if (runs[i].best.step && (lowest < 0 || runs[i].best.validation < runs[lowest].best.validation)) lowest = i;
    for (int pass = 0; pass < 2; pass++) {
        if (pass) cli_head(columns, COLUMNS);
        for (int i = 0; i < count; i++) {
            fill_cells(&runs[i], text, cell, i == lowest && count > 1);
            if (pass)
                cli_row(columns, COLUMNS, cell);
            else
                cli_fit(columns, COLUMNS, cell);
        }
    }
}

static int draw(const run *runs, int count, const char *path) {
    const metrics *records[MAX_RUNS];
    const char *names[MAX_RUNS];
    char error[TRAIN_ERROR];
    for (int i = 0; i < count; i++) {
        records[i] = runs[i].record;
        names[i] = runs[i].dir;
    }
    if (!metrics_draw_runs(records, names, (size_t)count, path, error)) return cli_fail("runs", "%s", error);
    return CLI_OK;
}

static int compare(char **dirs, int count, const char *picture, bool json) {
    char error[TRAIN_ERROR];
    run *runs = calloc((size_t)count, sizeof *runs);
    int status = runs ? CLI_OK : cli_fail("runs", "there is no memory for %d runs", count);
    for (int i = 0; i < count && status == CLI_OK; i++)
        if (!read_run(dirs[i], &runs[i], error)) status = cli_fail("runs", "%s", error);
    if (status == CLI_OK && !json) show_table(runs, count);
    for (int i = 0; i < count && status == CLI_OK && json; i++)
        show_json(&runs[i]);
    if (status == CLI_OK && picture) status = draw(runs, count, picture);
    for (int i = 0; i < count && runs; i++)
        metrics_close(runs[i].record);
    free(runs);
    return status;
}

int cli_runs(int argc, char **argv) {
    bool json = false;
    const char *picture = NULL;
    const cli_option options[] = {
        {"svg", 0, "FILE", "draw their losses into one picture", CLI_TEXT, &picture, 0, 0},
    };
    const cli_command command = {
        .name = "runs",
        .usage = "runs DIR... [--svg FILE]",
        .about =
            "Compares runs of `vjp train` in one table: what they were trained with, the smoothed loss of the last\n"
            "step, the lowest validation loss and its step (* the lowest of all), and their speed. A run that is\n"
            "in progress may be among them.",
        .more = "Example:\n"
                "  vjp runs adamw muon --svg runs.svg",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &json,
        .min_operands = 1,
        .max_operands = -1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    if (operands.count > MAX_RUNS)
        return cli_misuse("runs", "there are %d folders; at most %d can be compared", operands.count, MAX_RUNS);
    return compare(operands.item, operands.count, picture, json);
}
