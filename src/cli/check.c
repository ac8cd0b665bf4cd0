/* SPDX-License-Identifier: MIT */
/*
 * vjp check: compares a device with `ref`, and `ref` with central differences. It prints one line per output with the
 * worst of its cases, and every failure in full; with --json, one line per output and case.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "core/system.h"
#include "proof/proof.h"

/* All rows of one output. Lines are in the order of their first row. */
typedef struct output_line {
    const char *check;
    char op[24], pass[16], output[24], dtype[8], device[64];
    int64_t rows, failed;
    double error, bound; /* of the row that is closest to its bound */
} output_line;

typedef struct tally {
    const char *check; /* which proof is running */
    bool json, verbose;
    int64_t rows, failed;
    output_line *lines;
    size_t count, room;
} tally;

static output_line *line_of(tally *t, const proof_row *row) {
    for (size_t i = t->count; i-- > 0;) {
        output_line *l = &t->lines[i];
        if (l->check == t->check && !strcmp(l->op, row->op) && !strcmp(l->pass, row->pass) &&
            !strcmp(l->output, row->output) && !strcmp(l->dtype, row->dtype))
            return l;
    }
    if (t->count == t->room) {
        t->room = t->room ? 2 * t->room : 64;
        t->lines = realloc(t->lines, t->room * sizeof *t->lines);
        if (!t->lines) exit(cli_fail("check", "there is no memory for the report"));
    }
    output_line *l = &t->lines[t->count++];
    *l = (output_line){.check = t->check};
    snprintf(l->op, sizeof l->op, "%s", row->op);
    snprintf(l->pass, sizeof l->pass, "%s", row->pass);
    snprintf(l->output, sizeof l->output, "%s", row->output);
    snprintf(l->dtype, sizeof l->dtype, "%s", row->dtype);
    snprintf(l->device, sizeof l->device, "%s", row->device);
    return l;
}

/* The error as a share of its bound. */
static double share(double error, double bound) {
    if (error == 0) return 0;
    return bound > 0 ? error / bound : INFINITY;
}

enum { COLUMNS = 8 };

static cli_column columns[COLUMNS] = {
    {"op", 11, false},    {"pass", 8, false}, {"output", 12, false}, {"dtype", 5, false},
    {"device", 6, false}, {"error", 8, true}, {"bound", 8, true},    {"verdict", 0, false},
};

static void print_line(const char *op, const char *pass, const char *output, const char *dtype, const char *device,
                       double error, double bound, const char *verdict, bool ok) {
    char error_text[CLI_NUMBER_TEXT], bound_text[CLI_NUMBER_TEXT];
    cli_number(error, 2, error_text);
    cli_number(bound, 2, bound_text);
    cli_cell cells[COLUMNS] = {
        {op, CLI_PLAIN},     {pass, CLI_PLAIN},       {output, CLI_PLAIN},     {dtype, CLI_PLAIN},
        {device, CLI_PLAIN}, {error_text, CLI_PLAIN}, {bound_text, CLI_PLAIN}, {verdict, ok ? CLI_GREEN : CLI_RED}};
    cli_row(columns, COLUMNS, cells);
}

static void print_json(const proof_row *row) {
    cli_json_begin();
    cli_json_text("op", row->op);
    cli_json_text("pass", row->pass);
    cli_json_text("output", row->output);
    cli_json_text("dtype", row->dtype);
    cli_json_text("device", row->device);
    cli_json_text("case", row->text);
    cli_json_real("error", row->error);
    cli_json_real("bound", row->bound);
    cli_json_boolean("ok", row->ok);
    if (!row->ok) cli_json_text("why", row->why);
    cli_json_end();
}

static void take_row(void *context, const proof_row *row) {
    tally *t = context;
    t->rows++;
    t->failed += !row->ok;
    if (t->json) {
        print_json(row);
        return;
    }
    output_line *l = line_of(t, row);
    l->rows++;
    l->failed += !row->ok;
    if (l->rows == 1 || share(row->error, row->bound) > share(l->error, l->bound)) {
        l->error = row->error;
        l->bound = row->bound;
    }
    if (!row->ok || t->verbose) {
        char verdict[768];
        snprintf(verdict, sizeof verdict, "%s  %s%s%s", row->ok ? "ok" : "FAILED", row->text, row->why[0] ? ": " : "",
                 row->why);
        print_line(row->op, row->pass, row->output, row->dtype, row->device, row->error, row->bound, verdict, row->ok);
    }
}

/* Prints the title of a check; end() prints its lines. */
static void begin(void *context, const char *check, const char *about) {
    tally *t = context;
    t->check = check;
    if (t->json) return;
    printf("%s%s%s: %s\n", cli_paint(CLI_BOLD), check, cli_paint(CLI_PLAIN), about);
    cli_head(columns, COLUMNS);
}

static void end(void *context) {
    tally *t = context;
    if (t->json) return;
    for (size_t i = 0; i < t->count; i++) {
        const output_line *l = &t->lines[i];
        if (l->check != t->check || t->verbose) continue;
        char verdict[64];
        if (l->failed)
            snprintf(verdict, sizeof verdict, "FAILED  %lld of %lld", (long long)l->failed, (long long)l->rows);
        else
            snprintf(verdict, sizeof verdict, "ok  %lld", (long long)l->rows);
        print_line(l->op, l->pass, l->output, l->dtype, l->device, l->error, l->bound, verdict, !l->failed);
    }
    printf("\n");
    cli_flush();
}

int cli_check(int argc, char **argv) {
    cli_device_options on = CLI_DEVICE_DEFAULTS;
    tally t = {0};
    int dtype = -1;
    int64_t seed = 0;
    bool quick = false;
    const cli_option options[] = {
        CLI_OPTION_DEVICE(on),
        CLI_OPTION_THREADS(on),
        {"dtype", 0, "T", "check only this storage dtype: f32, bf16, f16, f64", CLI_DTYPE, &dtype, 0, 0},
        {"seed", 0, "N", "seed of the random inputs; default 0", CLI_INTEGER, &seed, 0, INT64_MAX},
        {"quick", 0, NULL, "only a few cases per op; takes seconds", CLI_FLAG, &quick, 0, 0},
        {"verbose", 0, NULL, "print every case, not only the worst of each output", CLI_FLAG, &t.verbose, 0, 0},
    };
    const cli_command command = {
        .name = "check",
        .usage = "check [OP] [--device D] [--dtype T] [--seed N] [--quick]",
        .about = "Compares a device with ref in f64, and ref with central differences, for one op or all: odd sizes,\n"
                 "every option, outputs alone and in place, rows that lie apart, += twice, adversarial inputs. Also\n"
                 "checks algebraic properties of the results; on the cpu, that their bits do not depend on threads\n"
                 "or instruction set; on a GPU, that they are the same from run to run.\n"
                 "Prints one line per output with the worst of its cases, and every failure; exits with 1 on failure.",
        .more =
            "Fields with --json, one line per output and case: op, pass, output, dtype, device, case, error, bound,\n"
            "ok; and why, if it failed.\n",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &t.json,
        .max_operands = 1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    proof_plan plan = {.dtype = dtype, .seed = (uint64_t)seed, .quick = quick, .row = take_row, .context = &t};
    if (operands.count) {
        plan.op = cli_find_op("check", operands.item[0]);
        if (!plan.op) return CLI_MISUSE;
    }
    if (dtype == VJP_I32 || dtype == VJP_I64)
        return cli_misuse("check", "--dtype is %s; it must be f32, bf16, f16 or f64", vjp_dtype_name((vjp_dtype)dtype));
    vjp_device *device = cli_open("check", &on);
    if (!device) return CLI_FAILURE;
    double start = system_seconds();
    proof_all(&plan, device, begin, end);
    vjp_close(device);
    free(t.lines);
    if (t.rows == 0) return cli_fail("check", "%s has no kernel for that; nothing was checked", on.device);
    if (!t.json)
        printf("%s%s%s  %lld checks, %lld failed, %.1f s\n", cli_paint(t.failed ? CLI_RED : CLI_GREEN),
               t.failed ? "FAILED" : "ok", cli_paint(CLI_PLAIN), (long long)t.rows, (long long)t.failed,
               system_seconds() - start);
    return t.failed ? CLI_FAILURE : CLI_OK;
}
