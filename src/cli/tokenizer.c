/* SPDX-License-Identifier: MIT */
/* vjp tokenizer: encodes and decodes text with a tokenizer.json, and trains one. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/cli.h"
#include "files/json.h"
#include "text/tokenizer.h"
#include "text/train.h"
#include "train/data/text.h"
#include "train/files/checkpoint.h"
#include "train/files/input.h"

/* All of a stream; false: `errno` says why, EFBIG if it has more than TEXT_MAX_BYTES, as one that never ends has. */
static bool read_all(FILE *stream, byte_list *to) {
    enum { AT_ONCE = 1 << 16 };
    while (!feof(stream)) {
        if (to->count > (size_t)TEXT_MAX_BYTES) return errno = EFBIG, false;
        if (!byte_list_reserve(to, AT_ONCE)) return errno = ENOMEM, false;
        to->count += fread(to->bytes + to->count, 1, AT_ONCE, stream);
        if (ferror(stream)) return false;
    }
    return true;
}

/* A regular file, or standard input, which may be a pipe. */
static int read_input(const char *path, byte_list *to) {
    char error[TRAIN_ERROR];
    bool standard = !path || strcmp(path, "-") == 0;
    int64_t bytes;
    FILE *stream = standard ? stdin : input_stream(path, TEXT_MAX_BYTES, &bytes, error);
    if (!stream) return cli_fail("tokenizer", "%s", error);
    errno = 0;
    bool ok = read_all(stream, to);
    int reason = errno;
    if (!standard) fclose(stream);
    if (ok) return CLI_CONTINUE;
    return cli_fail("tokenizer", "%.300s: it cannot be read: %s", standard ? "standard input" : path, strerror(reason));
}

/* What encode and decode begin with: the arguments, DIR's tokenizer, and the input. The caller frees both. */
static int begin(const cli_command *command, int argc, char **argv, tokenizer **t, byte_list *input) {
    cli_operands operands;
    char error[FILE_ERROR];
    int status = cli_parse(command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    *t = tokenizer_read(operands.item[0], error);
    if (!*t) return cli_fail("tokenizer", "%s", error);
    return read_input(operands.count > 1 ? operands.item[1] : NULL, input);
}

/* Of the processor: encoding uses one thread, and other programs should not count. */
static double seconds_used(void) {
    return (double)clock() / CLOCKS_PER_SEC;
}

/* ---- encode ------------------------------------------------------------------------------------------ */

typedef struct encode_arguments {
    bool around, null, count, json;
} encode_arguments;

static void print_ids(const token_list *ids, bool json) {
    if (json) {
        cli_json_begin();
        cli_json_array("ids");
        for (size_t i = 0; i < ids->count; i++)
            cli_json_integer(NULL, ids->ids[i]);
        cli_json_array_end();
        cli_json_end();
        return;
    }
    for (size_t i = 0; i < ids->count; i++)
        printf("%s%" PRId32, i ? " " : "", ids->ids[i]);
    putchar('\n');
}

static void print_count(size_t tokens, size_t bytes, double seconds, bool json) {
    if (json) {
        cli_json_begin();
        cli_json_integer("tokens", (int64_t)tokens);
        cli_json_integer("bytes", (int64_t)bytes);
        cli_json_real("seconds", seconds);
        cli_json_end();
        return;
    }
    printf("%zu tokens from %zu bytes in %.3f s", tokens, bytes, seconds);
    if (seconds > 0) printf(", %.1f MB/s", (double)bytes / seconds / 1e6);
    putchar('\n');
}

static int encode(tokenizer *t, const byte_list *text, const encode_arguments *a) {
    char error[FILE_ERROR];
    token_list ids = {0};
    bool ok = true;
    double begun = seconds_used();
    for (size_t begin = 0; ok && begin <= text->count;) {
        const char *zero = a->null && begin < text->count ? memchr(text->bytes + begin, 0, text->count - begin) : NULL;
        size_t end = zero ? (size_t)(zero - text->bytes) : text->count;
        if (!a->count) ids.count = 0;
        ok = tokenizer_encode(t, text->bytes ? text->bytes + begin : "", end - begin, a->around, &ids, error);
        if (ok && !a->count) print_ids(&ids, a->json);
        begin = end + 1;
        if (a->null && begin == text->count) break; /* a zero at the end does not begin another text */
    }
    if (ok && a->count) print_count(ids.count, text->count, seconds_used() - begun, a->json);
    token_list_free(&ids);
    return ok ? CLI_OK : cli_fail("tokenizer", "%s", error);
}

static int run_encode(int argc, char **argv) {
    encode_arguments a = {0};
    const cli_option options[] = {
        {"special", 0, NULL, "add the tokens that the tokenizer puts around a text", CLI_FLAG, &a.around, 0, 0},
        {"null", '0', NULL, "texts end with a zero byte; one line of tokens for each", CLI_FLAG, &a.null, 0, 0},
        {"count", 0, NULL, "print how many tokens there are, and how fast they were found", CLI_FLAG, &a.count, 0, 0},
    };
    const cli_command command = {
        .name = "tokenizer",
        .usage = "tokenizer encode DIR [FILE] [--special] [--count]",
        .about = "Prints the tokens of a text, from FILE or standard input, by DIR/tokenizer.json. Bytes that are not\n"
                 "UTF-8 are read as U+FFFD.",
        .more = NULL,
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &a.json,
        .min_operands = 1,
        .max_operands = 2,
    };
    tokenizer *t = NULL;
    byte_list text = {0};
    int status = begin(&command, argc, argv, &t, &text);
    if (status == CLI_CONTINUE) status = encode(t, &text, &a);
    byte_list_free(&text);
    tokenizer_free(t);
    return status;
}

/* ---- decode ------------------------------------------------------------------------------------------ */

/* The numbers of one line; false: something else is in it. */
static bool parse_ids(char *line, token_list *ids) {
    ids->count = 0;
    for (char *end; line += strspn(line, " \t\r"), *line; line = end) {
        errno = 0;
        long long value = strtoll(line, &end, 10);
        int32_t id = (int32_t)value;
        if (errno || end == line || value < 0 || value > INT32_MAX || !token_list_add(ids, &id, 1)) return false;
    }
    return true;
}

typedef struct decode_arguments {
    bool skip, null, json;
} decode_arguments;

static void print_text(const byte_list *text, const decode_arguments *a, bool last) {
    if (a->json) {
        cli_json_begin();
        cli_json_text("text", text->bytes);
        cli_json_end();
        return;
    }
    fwrite(text->bytes, 1, text->count - 1, stdout);
    if (a->null || !last) putchar(a->null ? 0 : '\n');
}

static int decode(const tokenizer *t, byte_list *input, const decode_arguments *a) {
    char error[FILE_ERROR];
    token_list ids = {0};
    byte_list text = {0};
    int status = CLI_OK;
    if (input->count && input->bytes[input->count - 1] == '\n') input->count--;
    if (!byte_list_add(input, "", 1)) return cli_fail("tokenizer", "there is no memory for the tokens");
    size_t number = 1;
    for (char *line = input->bytes, *next; line && status == CLI_OK; line = next, number++) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        text.count = 0;
        if (!parse_ids(line, &ids))
            status = cli_fail("tokenizer", "line %zu is not a list of tokens", number);
        else if (!tokenizer_decode(t, ids.ids, ids.count, !a->skip, &text, error))
            status = cli_fail("tokenizer", "%s", error);
        else if (!byte_list_add(&text, "", 1))
            status = cli_fail("tokenizer", "there is no memory for a text");
        else
            print_text(&text, a, !next);
    }
    token_list_free(&ids);
    byte_list_free(&text);
    return status;
}

static int run_decode(int argc, char **argv) {
    decode_arguments a = {0};
    const cli_option options[] = {
        {"skip-special", 0, NULL, "leave out special tokens, such as <|endoftext|>", CLI_FLAG, &a.skip, 0, 0},
        {"null", '0', NULL, "end each text with a zero byte", CLI_FLAG, &a.null, 0, 0},
    };
    const cli_command command = {
        .name = "tokenizer",
        .usage = "tokenizer decode DIR [FILE] [--skip-special]",
        .about = "Prints the text of tokens, which are numbers separated by blanks, from FILE or standard input; one\n"
                 "text for each line.",
        .more = NULL,
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &a.json,
        .min_operands = 1,
        .max_operands = 2,
    };
    tokenizer *t = NULL;
    byte_list input = {0};
    int status = begin(&command, argc, argv, &t, &input);
    if (status == CLI_CONTINUE) status = decode(t, &input, &a);
    byte_list_free(&input);
    tokenizer_free(t);
    return status;
}

/* ---- train ------------------------------------------------------------------------------------------- */

typedef struct train_arguments {
    const char *out, *pattern;
    int64_t size;
    cli_list special;
    bool json;
} train_arguments;

static bool write_files(const char *dir, const char *json, const training_options *options, char *error) {
    char path[CHECKPOINT_PATH];
    char *config = tokenizer_config(options);
    bool ok = (config || train_fail(error, "there is no memory for tokenizer_config.json")) &&
              checkpoint_make_folders(dir, error);
    if (ok && snprintf(path, sizeof path, "%s/tokenizer.json", dir) >= (int)sizeof path)
        ok = train_fail(error, "%.300s: the path is too long", dir);
    ok = ok && checkpoint_write_text(path, json, error);
    if (ok && snprintf(path, sizeof path, "%s/tokenizer_config.json", dir) >= (int)sizeof path)
        ok = train_fail(error, "%.300s: the path is too long", dir);
    ok = ok && checkpoint_write_text(path, config, error);
    free(config);
    return ok;
}

static void print_trained(const train_arguments *a, const text_data *text, int32_t size) {
    if (a->json) {
        cli_json_begin();
        cli_json_text("folder", a->out);
        cli_json_integer("tokens", size);
        cli_json_integer("files", text->files);
        cli_json_integer("bytes", (int64_t)text->count);
        cli_json_end();
        return;
    }
    printf("%s: %d tokens from %zu bytes in %lld files\n", a->out, (int)size, text->count, (long long)text->files);
    if (size < a->size)
        printf("no pair of tokens is left to merge: the text is too short for %lld\n", (long long)a->size);
    printf("to train a model with it: vjp train TEXT --tokenizer %s\n", a->out);
}

static int train(const train_arguments *a, const char *path) {
    const char *special[CLI_LIST_MAX + 1] = {"<|endoftext|>"};
    for (int i = 0; i < a->special.count; i++)
        special[i + 1] = a->special.item[i];
    const training_options options = {
        .size = (int32_t)a->size, .pattern = a->pattern, .special = special, .special_count = 1 + a->special.count};
    char error[TRAIN_ERROR], *json = NULL;
    int32_t size = 0;
    text_data text;
    bool ok = text_read(path, &text, error);
    if (ok) json = tokenizer_train((const char *)text.bytes, text.ends, (size_t)text.files, &options, &size, error);
    ok = ok && json && write_files(a->out, json, &options, error);
    if (ok) print_trained(a, &text, size);
    free(json);
    text_free(&text);
    return ok ? CLI_OK : cli_fail("tokenizer", "%s", error);
}

static int run_train(int argc, char **argv) {
    train_arguments a = {.pattern = "llama3", .size = 8192};
    const cli_option options[] = {
        {"out", 'o', "DIR", "where tokenizer.json and tokenizer_config.json go", CLI_TEXT, &a.out, 0, 0},
        {"vocab", 0, "N", "how many tokens; default 8192", CLI_INTEGER, &a.size, 257, 1 << 20},
        {"pattern", 0, "P", "how text is split into words: " TRAINING_PATTERNS "; default llama3", CLI_TEXT, &a.pattern,
         0, 0},
        {"special", 0, "T,...", "special tokens in addition to <|endoftext|>", CLI_LIST, &a.special, 0, 0},
    };
    const cli_command command = {
        .name = "tokenizer",
        .usage = "tokenizer train TEXT -o DIR [--vocab N] [--pattern gpt2|llama3]",
        .about = "Trains a byte-level tokenizer on a text file or a folder of them. The same text gives the same\n"
                 "tokenizer. transformers loads the folder.",
        .more = NULL,
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &a.json,
        .min_operands = 1,
        .max_operands = 1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    if (!a.out || !a.out[0]) return cli_misuse("tokenizer", "--out is missing: the folder for the tokenizer");
    return train(&a, operands.item[0]);
}

/* ---- The three ----------------------------------------------------------------------------------------- */

int cli_tokenizer(int argc, char **argv) {
    static const char about[] = "usage: vjp tokenizer train TEXT -o DIR\n"
                                "       vjp tokenizer encode|decode DIR [FILE]\n\n"
                                "  train   makes a tokenizer of a text\n"
                                "  encode  prints the tokens of a text\n"
                                "  decode  prints the text of tokens\n\n"
                                "`vjp tokenizer train --help` explains one.\n";
    const char *name = argc > 1 ? argv[1] : "";
    if (strcmp(name, "encode") == 0) return run_encode(argc - 1, argv + 1);
    if (strcmp(name, "train") == 0) return run_train(argc - 1, argv + 1);
    if (strcmp(name, "decode") == 0) return run_decode(argc - 1, argv + 1);
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        fputs(about, stdout);
        return CLI_OK;
    }
    return cli_misuse("tokenizer", "the first argument must be train, encode or decode");
}
