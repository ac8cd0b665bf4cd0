/* SPDX-License-Identifier: MIT */
/*
 * The program `vjp`: finds the subcommand, and has what all of them share: options, messages, opening a device, exit
 * status. Printing is in output.c.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "comm/group.h"
#include "core/system.h"
#include "proof/text.h"

static const struct {
    const char *name;
    int (*entry)(int argc, char **argv);
    const char *about;
} commands[] = {
    {"info", cli_info, "this machine: instruction set, threads, caches, BLAS, devices"},
    {"ops", cli_ops, "the ops: tensors, attributes, and which device supports which dtype"},
    {"run", cli_run, "computes one pass of an op on tensors from a safetensors file"},
    {"check", cli_check, "compares a device with the reference, and the reference with finite differences"},
    {"bench", cli_bench, "measures each op against the limit of this machine"},
    {"train", cli_train, "trains a model on text or pictures"},
    {"sample", cli_sample, "generates text with a trained model"},
    {"eval", cli_eval, "measures how well a model predicts a text: loss, perplexity, bits per byte"},
    {"merge", cli_merge, "makes one model of adapters and their base, in the layout of Hugging Face"},
    {"runs", cli_runs, "compares training runs in one table and one picture"},
    {"graph", cli_graph, "draws a model's graph, and shows how much memory it needs"},
    {"tokenizer", cli_tokenizer, "encodes and decodes text, and trains a tokenizer"},
};

enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

/* ---- Messages ---------------------------------------------------------------------------------------- */

static void print_message(const char *command, const char *format, va_list list) {
    fflush(stdout);
    fprintf(stderr, "vjp%s%s: ", *command ? " " : "", command);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
}

int cli_fail(const char *command, const char *format, ...) {
    va_list list;
    va_start(list, format);
    print_message(command, format, list);
    va_end(list);
    return CLI_FAILURE;
}

int cli_misuse(const char *command, const char *format, ...) {
    if (vjp_group_launched_rank() > 0) return CLI_MISUSE; /* all processes have the same arguments: one says it */
    va_list list;
    va_start(list, format);
    print_message(command, format, list);
    va_end(list);
    fprintf(stderr, "Try: vjp %s%s--help\n", command, *command ? " " : "");
    return CLI_MISUSE;
}

/* ---- Options ----------------------------------------------------------------------------------------- */

enum { MAX_OPTIONS = 64 };

static void print_option(const char *name, char letter, const char *value, const char *about) {
    char left[64];
    snprintf(left, sizeof left, "%c%c%s--%s%s%s", letter ? '-' : ' ', letter ? letter : ' ', letter ? ", " : "  ", name,
             value ? " " : "", value ? value : "");
    printf("  %-29s %s\n", left, about);
}

static void print_help(const cli_command *command) {
    const char *bold = cli_paint(CLI_BOLD), *plain = cli_paint(CLI_PLAIN);
    printf("%svjp %s%s\n\n%s\n", bold, command->usage, plain, command->about);
    if (!command->option_count || command->options[0].type != CLI_HEADING) printf("\nOptions:\n");
    for (size_t i = 0; i < command->option_count; i++) {
        const cli_option *o = &command->options[i];
        if (o->type == CLI_HEADING)
            printf("\n%s%s%s\n", bold, o->about, plain);
        else
            print_option(o->name, o->letter, o->value, o->about);
    }
    print_option("json", 0, NULL, "print one JSON object per line");
    print_option("help", 'h', NULL, "print this help");
    if (command->more) printf("\n%s\n", command->more);
}

static const cli_option *find_option(const cli_command *command, const char *name, size_t length) {
    for (size_t i = 0; i < command->option_count && length; i++) /* a heading has no name */
        if (strlen(command->options[i].name) == length && memcmp(command->options[i].name, name, length) == 0)
            return &command->options[i];
    return NULL;
}

static const cli_option *find_letter(const cli_command *command, char letter) {
    for (size_t i = 0; i < command->option_count; i++)
        if (command->options[i].letter == letter) return &command->options[i];
    return NULL;
}

static int unknown_option(const cli_command *command, const char *name, size_t length) {
    const char *names[MAX_OPTIONS + 3] = {"help", "json"};
    for (size_t i = 0, at = 2; i < command->option_count && at < MAX_OPTIONS + 2; i++)
        if (command->options[i].type != CLI_HEADING) names[at++] = command->options[i].name;
    char word[64];
    snprintf(word, sizeof word, "%.*s", (int)(length < 63 ? length : 63), name);
    const char *nearest = text_nearest(word, names);
    if (nearest) return cli_misuse(command->name, "unknown option --%s; did you mean --%s?", word, nearest);
    return cli_misuse(command->name, "unknown option --%s", word);
}

static int set_list(const cli_command *command, const cli_option *option, char *value) {
    cli_list *list = option->target;
    for (char *word = value; word;) {
        char *comma = option->type == CLI_LIST ? strchr(word, ',') : NULL;
        if (comma) *comma++ = 0;
        if (!*word) return cli_misuse(command->name, "--%s has an empty word in its list", option->name);
        if (list->count == CLI_LIST_MAX)
            return cli_misuse(command->name, "--%s has more than %d words", option->name, CLI_LIST_MAX);
        list->item[list->count++] = word;
        word = comma;
    }
    return CLI_CONTINUE;
}

static int set_option(const cli_command *command, const cli_option *option, char *value) {
    switch (option->type) {
    case CLI_HEADING: break;
    case CLI_FLAG: *(bool *)option->target = true; break;
    case CLI_TEXT:
        if (!*value) return cli_misuse(command->name, "--%s is empty", option->name);
        *(const char **)option->target = value;
        break;
    case CLI_INTEGER: {
        char *end;
        errno = 0;
        long long number = strtoll(value, &end, 10);
        if (!*value || *end || errno || number < option->min || number > option->max)
            return cli_misuse(command->name, "--%s is \"%s\"; it must be an integer from %lld to %lld", option->name,
                              value, (long long)option->min, (long long)option->max);
        *(int64_t *)option->target = number;
        break;
    }
    case CLI_REAL: {
        char *end;
        double number = strtod(value, &end);
        if (!*value || *end || !(number >= (double)option->min && number <= (double)option->max))
            return cli_misuse(command->name, "--%s is \"%s\"; it must be a number from %lld to %lld", option->name,
                              value, (long long)option->min, (long long)option->max);
        *(double *)option->target = number;
        break;
    }
    case CLI_DTYPE: {
        int dtype = vjp_dtype_find(value);
        if (dtype < 0)
            return cli_misuse(command->name, "--%s is \"%s\"; it must be f32, bf16, f16, f64, i32 or i64", option->name,
                              value);
        *(int *)option->target = dtype;
        break;
    }
    case CLI_LIST:
    case CLI_TEXTS: return set_list(command, option, value);
    }
    return CLI_CONTINUE;
}

/* Reads the option at argv[*at] and moves *at to the last argument it used. */
static int parse_option(const cli_command *command, int argc, char **argv, int *at) {
    char *argument = argv[*at];
    const cli_option *option;
    char *value = NULL;
    if (argument[1] == '-') {
        char *name = argument + 2;
        size_t length = strcspn(name, "=");
        if (length == 4 && (memcmp(name, "json", 4) == 0 || memcmp(name, "help", 4) == 0)) {
            if (name[length]) return cli_misuse(command->name, "--%.4s takes no value", name);
            *command->json = true; /* cli_parse() has handled a plain --help */
            return CLI_CONTINUE;
        }
        option = find_option(command, name, length);
        if (!option) return unknown_option(command, name, length);
        if (name[length] == '=') value = name + length + 1;
    } else {
        option = find_letter(command, argument[1]);
        if (!option) return cli_misuse(command->name, "unknown option -%c", argument[1]);
        if (argument[2]) value = argument + 2; /* -oFILE */
    }
    if (option->type == CLI_FLAG) {
        if (value) return cli_misuse(command->name, "--%s takes no value", option->name);
    } else if (!value) {
        if (*at + 1 >= argc) return cli_misuse(command->name, "--%s needs a value: %s", option->name, option->value);
        value = argv[++*at];
    }
    return set_option(command, option, value);
}

int cli_parse(const cli_command *command, int argc, char **argv, cli_operands *operands) {
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help(command);
            return CLI_OK;
        }
    *operands = (cli_operands){.item = argv + 1};
    bool only_operands = false;
    for (int i = 1; i < argc; i++) {
        if (only_operands || argv[i][0] != '-' || !argv[i][1]) {
            operands->item[operands->count++] = argv[i];
        } else if (strcmp(argv[i], "--") == 0) {
            only_operands = true;
        } else {
            int status = parse_option(command, argc, argv, &i);
            if (status != CLI_CONTINUE) return status;
        }
    }
    if (operands->count < command->min_operands)
        return cli_misuse(command->name, "too few arguments; usage: vjp %s", command->usage);
    if (command->max_operands >= 0 && operands->count > command->max_operands)
        return cli_misuse(command->name, "unexpected argument \"%s\"; usage: vjp %s",
                          operands->item[command->max_operands], command->usage);
    return CLI_CONTINUE;
}

/* ---- Devices and ops --------------------------------------------------------------------------------- */

vjp_device *cli_open(const char *command, const cli_device_options *on) {
    vjp_options options = {.struct_size = sizeof(vjp_options),
                           .threads = (int32_t)on->threads,
                           .fixed_rows = on->fixed_rows,
                           .instruction_set = on->instruction_set,
                           .matrix_products = on->matrix_products};
    vjp_device *device = NULL;
    if (vjp_open(on->device, &options, &device) == VJP_OK) return device;
    cli_fail(command, "%s", vjp_error(device));
    vjp_close(device);
    return NULL;
}

const vjp_op *cli_find_op(const char *command, const char *name) {
    const vjp_op *op = vjp_op_find(name);
    if (op) return op;
    enum { MAX_OPS = 256 };
    const char *names[MAX_OPS + 1] = {0};
    for (size_t i = 0; i < vjp_op_count() && i < MAX_OPS; i++)
        names[i] = vjp_op_describe(vjp_op_at(i))->name;
    const char *nearest = text_nearest(name, names);
    if (nearest)
        cli_misuse(command, "unknown op \"%s\"; did you mean %s?", name, nearest);
    else
        cli_misuse(command, "unknown op \"%s\"; `vjp ops` lists them", name);
    return NULL;
}

/* ---- Finding the subcommand -------------------------------------------------------------------------- */

static void print_overview(void) {
    const char *bold = cli_paint(CLI_BOLD), *plain = cli_paint(CLI_PLAIN);
    printf("%svjp %s%s: training kernels, forward and backward\n\n", bold, vjp_version(), plain);
    printf("Usage: vjp COMMAND [arguments]\n\n");
    for (int i = 0; i < COMMAND_COUNT; i++)
        printf("  %s%-9s%s  %s\n", bold, commands[i].name, plain, commands[i].about);
    printf("\n`vjp COMMAND --help` explains a command, `vjp --version` prints the version. To start:\n\n"
           "  vjp info\n"
           "  vjp ops layer_norm\n"
           "  vjp check --quick\n"
           "  vjp train\n");
}

static int run_command(const char *name, int argc, char **argv) {
    const char *names[COMMAND_COUNT + 2] = {0};
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(name, commands[i].name) == 0) return commands[i].entry(argc, argv);
        names[i] = commands[i].name;
    }
    names[COMMAND_COUNT] = "help";
    const char *nearest = text_nearest(name, names);
    if (nearest) return cli_misuse("", "unknown command \"%s\"; did you mean %s?", name, nearest);
    return cli_misuse("", "unknown command \"%s\"; `vjp help` lists them", name);
}

static int dispatch(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "--help";
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || (strcmp(name, "help") == 0 && argc == 2)) {
        print_overview();
        return CLI_OK;
    }
    if (strcmp(name, "--version") == 0) {
        printf("vjp %s\n", vjp_version());
        return CLI_OK;
    }
    if (strcmp(name, "help") == 0) {
        if (argc > 3) return cli_misuse("", "unexpected argument \"%s\"; usage: vjp help COMMAND", argv[3]);
        char *help[] = {argv[2], "--help", NULL};
        return run_command(argv[2], 2, help);
    }
    if (name[0] == '-') return cli_misuse("", "unknown option %s; the first argument must be a command", name);
    return run_command(name, argc - 1, argv + 1);
}

int main(int argc, char **argv) {
    if (!system_begin_program(&argc, &argv)) _Exit(CLI_FAILURE);
    int status = dispatch(argc, argv);
    if (status == CLI_OK) cli_flush();
    return status;
}
