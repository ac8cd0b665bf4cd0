/* SPDX-License-Identifier: MIT */
/* vjp sample: generates text with a model that vjp train made. */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "train/sampler.h"

typedef struct arguments {
    cli_device_options on;
    const char *prompt;
    sampler_options options;
    int64_t bytes, seed;
    bool json;
} arguments;

static int write_text(sampler *s, const arguments *a) {
    char error[TRAIN_ERROR];
    byte_list text = {0};
    size_t shown = 0;
    sampler_result result = SAMPLER_TOKEN;
    bool ok = sampler_begin(s, &a->options, a->prompt, strlen(a->prompt), error);
    if (ok && !a->json) fputs(a->prompt, stdout);
    /* Tokens without text, which a model may draw for ever, count as one byte. */
    for (int64_t i = 0; ok && result == SAMPLER_TOKEN && i < a->bytes && text.count < (size_t)a->bytes; i++) {
        result = sampler_next(s, &text, error);
        ok = result != SAMPLER_FAILED;
        if (!ok || a->json) continue;
        if (text.count > shown) fwrite(text.bytes + shown, 1, text.count - shown, stdout);
        shown = text.count;
        cli_flush();
    }
    for (size_t i = 0; i < text.count; i++)
        if (!text.bytes[i]) text.bytes[i] = ' '; /* a zero would end the text */
    if (ok && !byte_list_add(&text, "", 1)) ok = train_fail(error, "there is no memory for the text");
    if (ok && a->json) {
        cli_json_begin();
        cli_json_text("prompt", a->prompt);
        cli_json_text("text", text.bytes);
        cli_json_end();
    } else if (ok) {
        putchar('\n');
    }
    byte_list_free(&text);
    return ok ? CLI_OK : cli_fail("sample", "%s", error);
}

static int run(const arguments *a, const char *dir) {
    char error[TRAIN_ERROR], path[CHECKPOINT_PATH];
    checkpoint from = {0};
    if (!checkpoint_open_newest(dir, path, &from, error)) return cli_fail("sample", "%s", error);
    int status = CLI_FAILURE;
    vjp_device *device = cli_open("sample", &a->on);
    if (device) {
        sampler *s = sampler_open(device, &from, error);
        status = s ? write_text(s, a) : cli_fail("sample", "%s: %s", path, error);
        sampler_close(s);
    }
    vjp_close(device);
    checkpoint_close(&from);
    return status;
}

int cli_sample(int argc, char **argv) {
    arguments a = {
        .on = CLI_DEVICE_DEFAULTS, .prompt = "", .options = {.temperature = 0.8, .top_k = 40}, .bytes = 500, .seed = 1};
    const cli_option options[] = {
        CLI_OPTION_DEVICE(a.on),
        CLI_OPTION_THREADS(a.on),
        {"prompt", 'p', "TEXT", "how the text begins", CLI_TEXT, &a.prompt, 0, 0},
        {"bytes", 'n', "N", "how many bytes of text to generate; default 500", CLI_INTEGER, &a.bytes, 1, 100000000},
        {"temperature", 0, "T", "randomness; 0: always the most likely token; default 0.8", CLI_REAL,
         &a.options.temperature, 0, 1000},
        {"top-k", 0, "K", "choose among the K most likely tokens; 0: all; default 40", CLI_INTEGER, &a.options.top_k, 0,
         1000000},
        {"seed", 0, "S", "another seed gives another text; default 1", CLI_INTEGER, &a.seed, 0, INT64_MAX},
    };
    const cli_command command = {
        .name = "sample",
        .usage = "sample DIR [--prompt TEXT] [--bytes N] [--temperature T] [--top-k K] [--seed S]",
        .about =
            "Generates text with a model that `vjp train --out DIR` made: the newest checkpoint in DIR, or DIR itself.",
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
    a.options.seed = (uint64_t)a.seed;
    return run(&a, operands.item[0]);
}
