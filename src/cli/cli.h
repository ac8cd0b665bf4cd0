/* SPDX-License-Identifier: MIT */
/*
 * What the subcommands of `vjp` share: exit statuses, options, opening a device, JSON and tables.
 *
 * A subcommand is one file with one entry, `int cli_<name>(int argc, char **argv)`, argv[0] being its name, listed in
 * main.c. It describes its options in a cli_command, calls cli_parse(), works, and returns an exit status. Results go
 * to stdout, everything else to stderr. main() flushes stdout at the end and turns a write error into status 1;
 * cli_json_end() and cli_row() flush each line, so that a long run stops when its output is lost.
 */
#ifndef VJP_CLI_H
#define VJP_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "vjp.h"

enum { CLI_OK = 0, CLI_FAILURE = 1, CLI_MISUSE = 2 };

int cli_info(int argc, char **argv);
int cli_ops(int argc, char **argv);
int cli_run(int argc, char **argv);
int cli_check(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_train(int argc, char **argv);
int cli_sample(int argc, char **argv);
int cli_graph(int argc, char **argv);
int cli_tokenizer(int argc, char **argv);
int cli_eval(int argc, char **argv);
int cli_runs(int argc, char **argv);
int cli_merge(int argc, char **argv);

/* ---- Options ----------------------------------------------------------------------------------------- */

typedef enum cli_option_type {
    CLI_FLAG,    /* bool: --quick */
    CLI_TEXT,    /* const char *: --device cpu, --device=cpu */
    CLI_INTEGER, /* int64_t within [min, max] */
    CLI_REAL,    /* double, finite, within [min, max] */
    CLI_DTYPE,   /* int: a vjp_dtype; initialise to -1 */
    CLI_HEADING, /* no option: `about` is printed in the help, above those that follow */
    CLI_LIST,    /* cli_list: each use adds the value's words, separated by commas: --outputs dx,dgamma */
    CLI_TEXTS    /* cli_list: each use adds the value as it is */
} cli_option_type;

typedef struct cli_option {
    const char *name;  /* without the dashes */
    char letter;       /* 'o' for -o; 0: none */
    const char *value; /* the name of its value in the help: "N"; NULL for a flag */
    const char *about;
    cli_option_type type;
    void *target;     /* set when the option is given, untouched otherwise */
    int64_t min, max; /* of a number */
} cli_option;

enum { CLI_LIST_MAX = 32 };

typedef struct cli_list {
    char *item[CLI_LIST_MAX]; /* parts of argv */
    int count;
} cli_list;

typedef struct cli_command {
    const char *name;
    const char *usage; /* what follows "vjp ": "run OP.PASS IN.safetensors -o OUT.safetensors [name=value ...]" */
    const char *about; /* what it does, as lines for the help */
    const char *more;  /* printed after the options: examples; NULL: none */
    const cli_option *options;
    size_t option_count;
    bool *json;       /* set by --json, an option of every subcommand */
    int min_operands; /* arguments that are not options */
    int max_operands; /* -1: any number */
} cli_command;

typedef struct cli_operands {
    char **item;
    int count;
} cli_operands;

/*
 * Reads the command line. Anything but CLI_CONTINUE is the exit status to return at once: the help or an error was
 * printed. Options and operands may be mixed; "--" ends the options.
 */
enum { CLI_CONTINUE = -1 };
int cli_parse(const cli_command *command, int argc, char **argv, cli_operands *operands);

/* "vjp run: <sentence>" on stderr. Returns CLI_FAILURE. */
int cli_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same, and a line that points to --help. Returns CLI_MISUSE. */
int cli_misuse(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/*
 * The usual options of a command that computes; put these first in its table:
 *     cli_device_options on = CLI_DEVICE_DEFAULTS;
 *     cli_option options[] = {CLI_OPTION_DEVICE(on), CLI_OPTION_THREADS(on), ...};
 */
typedef struct cli_device_options {
    const char *device;
    int64_t threads;
    const char *matrix_products; /* as in vjp_options: --products */
    const char *instruction_set; /* no option of the command line */
    bool fixed_rows;
} cli_device_options;

#define CLI_OPTION_HEADING(text)                                                                                       \
    { "", 0, NULL, text, CLI_HEADING, NULL, 0, 0 }
#define CLI_DEVICE_DEFAULTS                                                                                            \
    { .device = "cpu", .threads = 0 }
#define CLI_OPTION_DEVICE(on)                                                                                          \
    { "device", 0, "D", "ref, cpu, cuda:N, webgpu or metal; default cpu", CLI_TEXT, &(on).device, 0, 0 }
#define CLI_OPTION_THREADS(on)                                                                                         \
    { "threads", 0, "N", "threads of the cpu; default: one per core", CLI_INTEGER, &(on).threads, 1, 1024 }

#define CLI_OPTION_PRODUCTS(on)                                                                                        \
    {                                                                                                                  \
        "products", 0, "P", "matrix products of the cpu: builtin, amx, blas; of cuda in f32: f32, tf32", CLI_TEXT,     \
            &(on).matrix_products, 0, 0                                                                                \
    }

/* Opens that device. NULL: the reason has been printed; return CLI_FAILURE. */
vjp_device *cli_open(const char *command, const cli_device_options *on);

/*
 * The bytes of --memory: "40GiB", "512MiB", "24GB", or "80%" of what the device has. Without a device only its form is
 * checked. Anything but CLI_CONTINUE is the exit status to return.
 */
int cli_memory(const char *command, const char *text, vjp_device *device, int64_t *bytes);

#define CLI_OPTION_MEMORY(place)                                                                                       \
    { "memory", 0, "M", "40GiB, 24GB, 80%: stay within it by host memory and by recomputing", CLI_TEXT, &(place), 0, 0 }

/* Whether --residual goes with --dtype; both are -1 where not given. */
int cli_residual(const char *command, int dtype, int residual);

#define CLI_OPTION_RESIDUAL(place)                                                                                     \
    {                                                                                                                  \
        "residual", 0, "D", "dtype of the llama's residual stream: f32, or as --dtype, the default", CLI_DTYPE,        \
            &(place), 0, 0                                                                                             \
    }

/*
 * Takes --moments and --gradients, -1 where not given, if they go with the other options; `how` must have these
 * already.
 */
struct trainer_options;
int cli_precision(const char *command, int dtype, int moments, int gradients, struct trainer_options *how);

#define CLI_OPTION_MOMENTS(place)                                                                                      \
    { "moments", 0, "D", "f32 or bf16: dtype of AdamW's moments; default f32", CLI_DTYPE, &(place), 0, 0 }
#define CLI_OPTION_GRADIENTS(place)                                                                                    \
    {                                                                                                                  \
        "gradients", 0, "D", "f32 or bf16: dtype of the gradients of bf16 products; default f32", CLI_DTYPE, &(place), \
            0, 0                                                                                                       \
    }

/* Whether --shards is a power of two. */
int cli_shards(const char *command, int64_t shards);

#define CLI_OPTION_BASE(place)                                                                                         \
    {                                                                                                                  \
        "base", 0, "DIR", "of adapters: the folder of their model; default: the one that they name", CLI_TEXT,         \
            &(place), 0, 0                                                                                             \
    }

#define CLI_OPTION_SHARDS(place)                                                                                       \
    {                                                                                                                  \
        "shards", 0, "S", "power of two: split each batch so that 1 to S processes can share it; default 1",           \
            CLI_INTEGER, &(place), 1, 1 << 20                                                                          \
    }

/* The value of an option that is "on" or "off"; NULL: it was not given, and `value` stays. */
int cli_switch(const char *command, const char *option, const char *text, bool *value);

#define CLI_OPTION_ZERO(place)                                                                                         \
    { "zero", 0, "on|off", "split the optimiser's moments over the processes; default on", CLI_TEXT, &(place), 0, 0 }

#define CLI_OPTION_OVERLAP(place)                                                                                      \
    { "overlap", 0, "on|off", "send gradients during the backward pass; default on the cpu", CLI_TEXT, &(place), 0, 0 }

/* The processes that a launcher started on this machine share its cores, unless it has given each its own. */
void cli_share_cores(cli_device_options *on);

/*
 * Where the launcher would not say which rank has died, this process continues as its own child, and waits for it to
 * say that. True: the child has ended, and `status` is what to return.
 */
bool cli_outlive(const char *command, int *status);

/* The op of that name. NULL: the error, with the nearest name, has been printed; return CLI_MISUSE. */
const vjp_op *cli_find_op(const char *command, const char *name);

/* ---- JSON: one object per line ------------------------------------------------------------------------- */

/*
 * Keys are NULL inside an array. Reals are printed so that they read back as the same double; NaN and the infinities,
 * which JSON has no numbers for, as the strings "NaN", "Infinity" and "-Infinity" (Python's float() and JavaScript's
 * Number() take them).
 */
void cli_json_begin(void);
void cli_json_end(void);                                /* ends the line, too */
void cli_json_text(const char *key, const char *value); /* NULL: null */
void cli_json_real(const char *key, double value);
void cli_json_integer(const char *key, int64_t value);
void cli_json_boolean(const char *key, bool value);
void cli_json_null(const char *key);
void cli_json_shape(const char *key, int ndim, const int64_t *shape); /* [7,65] */
void cli_json_object(const char *key);
void cli_json_object_end(void);
void cli_json_array(const char *key);
void cli_json_array_end(void);

/* ---- Tables for people ------------------------------------------------------------------------------- */

typedef enum cli_colour { CLI_PLAIN, CLI_BOLD, CLI_DIM, CLI_GREEN, CLI_YELLOW, CLI_RED, CLI_BLUE } cli_colour;

/* The escape that starts a colour (CLI_PLAIN ends it); "" unless stdout is a terminal and NO_COLOR is not set. */
const char *cli_paint(cli_colour colour);

/* Whether standard output is a terminal: it may have colours, and a line may replace the one before it. */
bool cli_is_terminal(void);

typedef struct cli_cell {
    const char *text; /* UTF-8; NULL: empty */
    cli_colour colour;
} cli_cell;

typedef struct cli_column {
    const char *title;
    int width;  /* at least; a wider cell pushes the rest of its row */
    bool right; /* aligned to the right: numbers */
} cli_column;

/* Widens the columns so that these cells (and the titles) fit; for tables that are known before they are printed. */
void cli_fit(cli_column *columns, int count, const cli_cell *cells);

void cli_head(const cli_column *columns, int count);
void cli_row(const cli_column *columns, int count, const cli_cell *cells);

/* The width of a text in characters. */
int cli_width(const char *text);

/* "1.5 MiB". */
enum { CLI_BYTES_TEXT = 32 };
const char *cli_bytes(double bytes, char text[CLI_BYTES_TEXT]);

/* "0.25", "nan": a number with so many significant digits; a NaN without the sign that printf() would show. */
enum { CLI_NUMBER_TEXT = 32 };
const char *cli_number(double value, int digits, char text[CLI_NUMBER_TEXT]);

/* Flushes stdout; if it could not be written, says so and ends the program with CLI_FAILURE. */
void cli_flush(void);

/*
 * For a command that must save its work first: from now on, cli_flush() only records a failure. cli_write_error() is
 * the errno of the first one, or 0. A stdout that was closed from the start counts as unwanted and never fails.
 */
void cli_defer_write_errors(void);
int cli_write_error(void);

#endif
