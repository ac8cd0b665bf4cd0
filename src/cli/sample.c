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
    size_t length = strlen(a->prompt);
    char *text = malloc((size_t)a->bytes + 1);
    if (!text) return cli_fail("sample", "there is no memory for %lld bytes", (long long)a->bytes);
    sampler_begin(s, &a->options, a->prompt, length);
    if (!a->json) fwrite(a->prompt, 1, length, stdout);
    int byte = 0;
    for (int64_t i = 0; i < a->bytes && byte >= 0; i++) {
        byte = sampler_next(s, error);
        if (byte < 0) break;
        text[i] = (char)(byte ? byte : ' '); /* a zero would end the text */
        text[i + 1] = 0;
        if (a->json) continue;
        putchar(byte);
        cli_flush();
    }
    if (byte >= 0 && a->json) {
        cli_json_begin();
        cli_json_text("prompt", a->prompt);
        cli_json_text("text", text);
        cli_json_end();
    } else if (byte >= 0) {
        putchar('\n');
    }
    free(text);
    return byte < 0 ? cli_fail("sample", "%s", error) : CLI_OK;
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
        {"bytes", 'n', "N", "how many bytes to generate; default 500", CLI_INTEGER, &a.bytes, 1, 100000000},
        {"temperature", 0, "T", "randomness; 0: always the most likely byte; default 0.8", CLI_REAL,
         &a.options.temperature, 0, 1000},
        {"top-k", 0, "K", "choose among the K most likely bytes; 0: all; default 40", CLI_INTEGER, &a.options.top_k, 0,
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
