/* SPDX-License-Identifier: MIT */
/* vjp merge: makes one model of adapters and their base. */
#include "train/job/merge.h"

#include "cli/cli.h"

typedef struct arguments {
    cli_device_options on;
    const char *out, *base;
    bool json;
} arguments;

static int run(arguments *a, const char *dir) {
    char error[TRAIN_ERROR], path[CHECKPOINT_PATH];
    checkpoint from = {0};
    int64_t merged = -1;
    if (!checkpoint_open_newest(dir, path, &from, error)) return cli_fail("merge", "%s", error);
    vjp_device *device = NULL;
    if (checkpoint_open_base(&from, a->base, error)) {
        device = cli_open("merge", &a->on);
        if (!device) {
            checkpoint_close(&from);
            return CLI_FAILURE;
        }
        merged = merge_adapters(device, &from, path, a->out, error);
    }
    if (merged < 0) cli_fail("merge", "%s: %s", path, error);
    if (merged >= 0 && a->json) {
        cli_json_begin();
        cli_json_text("adapters", path);
        cli_json_text("base", from.base);
        cli_json_text("model", a->out);
        cli_json_integer("merged", merged);
        cli_json_end();
    } else if (merged >= 0) {
        printf("%s: the adapters of %lld weights are merged into %s\n", a->out, (long long)merged, from.base);
    }
    vjp_close(device);
    checkpoint_close(&from);
    return merged < 0 ? CLI_FAILURE : CLI_OK;
}

int cli_merge(int argc, char **argv) {
    arguments a = {.on = CLI_DEVICE_DEFAULTS};
    const cli_option options[] = {
        {"out", 'o', "MODEL", "the folder to write, which must not be there yet", CLI_TEXT, &a.out, 0, 0},
        CLI_OPTION_BASE(a.base),
        CLI_OPTION_THREADS(a.on),
    };
    const cli_command command = {
        .name = "merge",
        .usage = "merge DIR -o MODEL [--base DIR]",
        .about = "Makes one model of adapters and the model that they were trained for. DIR is a folder that\n"
                 "`vjp train --lora` made, a checkpoint in it such as DIR/best, or adapters of PEFT. MODEL has the\n"
                 "layout of Hugging Face and the dtypes of the base, whose config and tokenizer are copied.",
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
    if (!a.out || !a.out[0]) return cli_misuse("merge", "-o is missing: the folder to write");
    return run(&a, operands.item[0]);
}
