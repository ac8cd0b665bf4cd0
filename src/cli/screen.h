/* SPDX-License-Identifier: MIT */
/* What `vjp train` prints. A terminal has a line that changes; anything else gets lines now and then, or JSON. */
#ifndef VJP_CLI_SCREEN_H
#define VJP_CLI_SCREEN_H

#include "cli/cli.h"
#include "train/job/job.h"

typedef struct screen {
    bool json, terminal;
    int width; /* of the terminal */
    double begun, shown;
    int64_t first_step;
} screen;

/* Before the first step: the model, its data, its memory. */
void screen_job(const job *j);

/* After each step. */
void screen_step(screen *s, const job *j, const metrics_row *row);

/* At the end; `stopped`: by a signal, whose echo may stand on the last line. */
void screen_end(const screen *s, const job *j, bool stopped);

/* The bar while .jsonl files are encoded. `context` is a double, the time when it was last shown. */
bool screen_encoding(void *context, int64_t done, int64_t all);

#endif
