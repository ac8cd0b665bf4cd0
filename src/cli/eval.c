/* SPDX-License-Identifier: MIT */
/* vjp eval: loss, perplexity and bits per byte of a model on a text, or on the answers of documents. */
#include <string.h>

#include "cli/cli.h"
#include "core/system.h"
#include "train/job/evaluate.h"

typedef struct arguments {
    cli_device_options on;
    evaluate_options options;
    const char *base;
    int dtype;
    bool json;
} arguments;

/* One line on a terminal, a few times per second. */
static bool show_progress(void *shown, int64_t done, int64_t all) {
    double now = system_seconds(), *last = shown;
    if (now - *last < 0.25) return true;
    *last = now;
    fprintf(stderr, "\r\033[K%lld of %lld windows", (long long)done, (long long)all);
    fflush(stderr);
    return true;
}

static void show(const arguments *a, const char *path, const evaluate_result *r) {
    if (a->json) {
        cli_json_begin();
        cli_json_text("model", path);
        cli_json_real("loss", r->loss);
        cli_json_real("perplexity", evaluate_perplexity(r));
        cli_json_real("bits_per_byte", evaluate_bits_per_byte(r));
        cli_json_integer("tokens", r->tokens);
        cli_json_integer("bytes", r->bytes);
        cli_json_integer("context", r->context);
        cli_json_integer("windows", r->windows);
        if (r->documents) cli_json_integer("documents", r->documents);
        if (r->documents) cli_json_integer("bad_lines", r->bad);
        cli_json_end();
        return;
    }
    printf("%s: %lld tokens of %lld bytes predicted, in %lld windows of %lld\n", path, (long long)r->tokens,
           (long long)r->bytes, (long long)r->windows, (long long)r->context);
    if (r->documents) printf("%lld documents", (long long)r->documents);
    if (r->bad) printf(", and %lld bad lines that were skipped", (long long)r->bad);
    if (r->documents) printf("\n");
    printf("loss           %.6f nats per token\n", r->loss);
    printf("perplexity     %.6g\n", evaluate_perplexity(r));
    printf("bits per byte  %.6f\n", evaluate_bits_per_byte(r));
}

static int run(arguments *a, const char *dir, const char *text) {
    char error[TRAIN_ERROR], path[CHECKPOINT_PATH];
    double shown = system_seconds();
    bool progress = !a->json && system_output_is_terminal();
    checkpoint from = {0};
    if (!checkpoint_open_newest(dir, path, &from, error)) return cli_fail("eval", "%s", error);
    if (!checkpoint_open_base(&from, a->base, error)) {
        checkpoint_close(&from);
        return cli_fail("eval", "%s: %s", path, error);
    }
    evaluate_result result;
    vjp_device *device = cli_open("eval", &a->on);
    bool ok = device != NULL;
    if (progress) {
        a->options.progress = show_progress;
        a->options.progress_context = &shown;
    }
    if (ok) {
        ok = evaluate(device, &from, text, &a->options, &result, error);
        if (progress) fprintf(stderr, "\r\033[K");
        if (ok)
            show(a, path, &result);
        else
            cli_fail("eval", "%s", error);
    }
    vjp_close(device);
    checkpoint_close(&from);
    return ok ? CLI_OK : CLI_FAILURE;
}

int cli_eval(int argc, char **argv) {
    enum { MANY = 1000000000 };
    arguments a = {.on = CLI_DEVICE_DEFAULTS, .dtype = -1};
    const cli_option options[] = {
        CLI_OPTION_DEVICE(a.on),
        CLI_OPTION_THREADS(a.on),
        CLI_OPTION_PRODUCTS(a.on),
        {"context", 0, "T", "tokens per window; default: the model's, at most 1024", CLI_INTEGER, &a.options.context, 1,
         MANY},
        {"batch", 0, "B", "windows at once; default 8", CLI_INTEGER, &a.options.batch, 1, MANY},
        {"dtype", 0, "D", "f32, bf16 or f16: dtype of the matrix products; default f32", CLI_DTYPE, &a.dtype, 0, 0},
        CLI_OPTION_BASE(a.base),
        {"skip-bad", 0, NULL, "leave out lines of .jsonl files that cannot be used, and count them", CLI_FLAG,
         &a.options.skip_bad, 0, 0},
        {"cache", 0, "DIR", "the folder for encoded .jsonl files; default .vjp-cache beside them", CLI_TEXT,
         &a.options.cache, 0, 0},
    };
    const cli_command command = {
        .name = "eval",
        .usage = "eval DIR TEXT [--context T] [--batch B]",
        .about =
            "Measures how well a model predicts a text, all of it: loss, perplexity and bits per byte. DIR is a\n"
            "folder that `vjp train` made, a checkpoint in it such as DIR/best, a Hugging Face model, or adapters\n"
            "of PEFT. TEXT is a file or a folder. Each window of the context is predicted on its own; the first token\n"
            "of the text is not predicted. Of .jsonl files (docs/data.md) each document is predicted on its own, and\n"
            "only what training would learn: the texts, completions and answers. The results have the same bits for "
            "any number of threads.",
        .more = NULL,
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &a.json,
        .min_operands = 2,
        .max_operands = 2,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    a.options.dtype = a.dtype < 0 ? VJP_F32 : (vjp_dtype)a.dtype;
    if (a.options.dtype != VJP_F32 && a.options.dtype != VJP_BF16 && a.options.dtype != VJP_F16)
        return cli_misuse("eval", "--dtype is %s; it must be f32, bf16 or f16", vjp_dtype_name(a.options.dtype));
    return run(&a, operands.item[0], operands.item[1]);
}
