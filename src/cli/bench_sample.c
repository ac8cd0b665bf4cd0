/* SPDX-License-Identifier: MIT */
/*
 * vjp bench sample: how fast tokens are read (a prompt) and generated, beside what the machine allows, for models of
 * several sizes with random weights.
 *
 * A generated token reads every weight once, so the limit is the bytes of the weights over the rate of a copy; several
 * texts at once share that reading. A copy counts what it reads and what it writes, and a core may read alone at little
 * more than half of that rate: the share of a loop that only reads is shown beside it. A prompt is limited by its
 * products: their flops over the rate of a square product. Copies, prompts and steps take turns, and the best of each
 * counts.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench.h"
#include "core/arithmetic.h"
#include "core/half.h"
#include "core/system.h"
#include "op/op.h"
#include "proof/timing.h"
#include "train/generate/decoder.h"
#include "train/model/llama.h"

enum { ROUNDS = 5, STEPS = 6, PROMPT = 512, CONTEXT = 1024, MAX_TEXTS = 16 };

static const double PRODUCT_BUDGET = 0.5; /* seconds */

/* Byte-level and small, an early GPT's size, and the size of TinyLlama. */
static const char *const usual_presets[] = {"medium", "124M", "1.1B"};

typedef struct bench_sample {
    vjp_device *device;
    proof_yardstick *yardstick;
    vjp_dtype dtype;
    int64_t texts;
    double copy_rate, read_rate, product_rate; /* the best; 0: not measured */
    bool json;
} bench_sample;

typedef struct figures {
    double weights, prompt_flops;        /* bytes that a step reads; flops of a prompt */
    double prompt_seconds, step_seconds; /* the best */
    int64_t prompt;
} figures;

/* Numbers without a pattern, as small as trained ones. */
static bool load_random(void *context, const char *name, const vjp_tensor *want, void *to, char error[TRAIN_ERROR]) {
    (void)error;
    uint64_t *state = context;
    bool norm = strstr(name, "norm") != NULL;
    int64_t count = 1;
    for (int i = 0; i < want->ndim; i++)
        count *= want->shape[i];
    for (int64_t i = 0; i < count; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        float x = (float)((double)(*state >> 40) * 0x1p-24 - 0.5) * 0.07f;
        if (norm) x += 1;
        if (want->dtype == VJP_F32)
            ((float *)to)[i] = x;
        else
            ((uint16_t *)to)[i] = want->dtype == VJP_BF16 ? vjp_f32_to_bf16(x) : vjp_f32_to_f16(x);
    }
    return true;
}

static bool take_product_rate(bench_sample *b, char error[TRAIN_ERROR]) {
    char why[TEXT_ERROR], sizes[BENCH_TEXT * 4];
    long long side = proof_square_side(b->device);
    proof_setup setup;
    proof_timing timing;
    snprintf(sizes, sizeof sizes, "a=[%lld,%lld] b=[%lld,%lld]", side, side, side, side);
    if (!proof_setup_read(&setup, vjp_op_find("linear"), sizes, why) ||
        !proof_time(b->device, NULL, &setup, b->dtype, PRODUCT_BUDGET, &timing, why))
        return train_fail(error, "%s", why);
    b->product_rate = fmax(b->product_rate, timing.product_rate);
    return true;
}

static void take_memory_rates(bench_sample *b) {
    if (!b->yardstick) return;
    b->copy_rate = fmax(b->copy_rate, proof_yardstick_copy(b->yardstick));
    b->read_rate = fmax(b->read_rate, proof_yardstick_read(b->yardstick));
}

/* One round: a copy, a prompt, and some steps of all texts after it. */
static bool take_round(bench_sample *b, decoder *d, const int32_t *tokens, float *logits, figures *f,
                       char error[TRAIN_ERROR]) {
    int64_t texts[MAX_TEXTS];
    take_memory_rates(b);
    for (int64_t t = 0; t < b->texts; t++) {
        texts[t] = t;
        decoder_clear(d, t);
        double begin = system_seconds();
        if (!decoder_append(d, t, tokens, f->prompt, logits, error)) return false;
        f->prompt_seconds = fmin(f->prompt_seconds, system_seconds() - begin);
    }
    for (int i = 0; i < STEPS; i++) {
        double begin = system_seconds();
        if (!decoder_step(d, texts, tokens, b->texts, logits, error)) return false;
        f->step_seconds = fmin(f->step_seconds, system_seconds() - begin);
    }
    return true;
}

static bool measure(bench_sample *b, const llama_config *config, figures *f, char error[TRAIN_ERROR]) {
    const llama_options options = {.batch = 1, .context = vjp_min(CONTEXT, config->max_positions), .dtype = b->dtype};
    train_model model;
    uint64_t state = 1;
    int32_t tokens[PROMPT];
    for (int i = 0; i < PROMPT; i++)
        tokens[i] = i % (int32_t)config->vocab_size;
    f->prompt = vjp_min(PROMPT, options.context - STEPS);
    f->prompt_seconds = f->step_seconds = INFINITY;
    llama_build(&model, config, &options);
    decoder *d = decoder_open(b->device, &model, &(decoder_options){.texts = b->texts, .rows = PROMPT}, load_random,
                              &state, error);
    float *logits = malloc((size_t)(b->texts * config->vocab_size) * sizeof *logits);
    bool ok = d && (logits || train_fail(error, "no memory for the logits"));
    for (int i = 0; i < ROUNDS && ok; i++)
        ok = take_round(b, d, tokens, logits, f, error);
    if (ok) {
        /* The head is applied to the prompt's last token only. */
        double head = (double)config->vocab_size * (double)config->hidden_size;
        double rows = (double)f->prompt, width = (double)(config->heads * config->head_dim);
        f->weights = (double)decoder_weight_bytes(d);
        f->prompt_flops = 2 * rows * (f->weights / (double)vjp_dtype_size(b->dtype) - head) +
                          2 * (double)config->layers * rows * (rows + 1) * width;
    }
    free(logits);
    decoder_close(d);
    model_free(&model);
    return ok;
}

enum { COLUMNS = 9 };

static const cli_column columns[COLUMNS] = {
    {"model", 8, false}, {"weights", 9, true}, {"prompt tokens/s", 0, true},
    {"limit", 8, true},  {"share", 0, true},   {"tokens/s", 9, true},
    {"limit", 8, true},  {"share", 0, true},   {"of reading", 0, true},
};

static void print_row(const bench_sample *b, const char *name, const figures *f) {
    double prompt = (double)f->prompt / f->prompt_seconds, step = (double)b->texts / f->step_seconds;
    double prompt_limit = b->product_rate > 0 ? (double)f->prompt * b->product_rate / f->prompt_flops : NAN;
    double of_reading = b->read_rate > 0 ? f->weights / f->step_seconds / b->read_rate : NAN;
    double step_limit = b->copy_rate > 0 ? (double)b->texts * b->copy_rate / f->weights : NAN;
    if (b->json) {
        cli_json_begin();
        cli_json_text("model", name);
        cli_json_text("dtype", vjp_dtype_name(b->dtype));
        cli_json_integer("texts", b->texts);
        cli_json_real("weight_bytes", f->weights);
        cli_json_real("prompt_tokens_per_second", prompt);
        cli_json_real("prompt_of_limit", prompt / prompt_limit);
        cli_json_real("tokens_per_second", step);
        cli_json_real("of_limit", step / step_limit);
        cli_json_real("of_read_limit", of_reading);
        cli_json_real("read_gbps", b->read_rate > 0 ? b->read_rate / 1e9 : NAN);
        cli_json_real("copy_gbps", b->copy_rate > 0 ? b->copy_rate / 1e9 : NAN);
        cli_json_real("product_gflops", b->product_rate > 0 ? b->product_rate / 1e9 : NAN);
        cli_json_end();
        return;
    }
    char bytes[CLI_BYTES_TEXT], text[7][BENCH_TEXT];
    const double numbers[] = {prompt, prompt_limit, step, step_limit};
    for (int i = 0; i < 4; i++)
        snprintf(text[i], BENCH_TEXT, isfinite(numbers[i]) ? "%.1f" : "-", numbers[i]);
    bench_share(prompt / prompt_limit, text[4]);
    bench_share(step / step_limit, text[5]);
    bench_share(of_reading, text[6]);
    const cli_cell cells[COLUMNS] = {
        {name, CLI_PLAIN},  {cli_bytes(f->weights, bytes), CLI_PLAIN},      {text[0], CLI_PLAIN},
        {text[1], CLI_DIM}, {text[4], bench_colour(prompt / prompt_limit)}, {text[2], CLI_PLAIN},
        {text[3], CLI_DIM}, {text[5], bench_colour(step / step_limit)},     {text[6], bench_colour(of_reading)}};
    cli_row(columns, COLUMNS, cells);
}

static int bench(bench_sample *b, const char *const *presets, int count) {
    char error[TRAIN_ERROR];
    for (int i = 0; i < count; i++) {
        figures f = {0};
        const llama_preset *preset = llama_preset_find(presets[i], error);
        if (!preset || !take_product_rate(b, error) || !measure(b, &preset->config, &f, error))
            return cli_fail("bench sample", "%s", error);
        print_row(b, presets[i], &f);
    }
    if (!b->json && b->copy_rate > 0)
        printf("\ncopy %.1f GB/s (read and written), reading alone %.1f GB/s, raw products %.1f GFLOP/s\n",
               b->copy_rate / 1e9, b->read_rate / 1e9, b->product_rate / 1e9);
    return CLI_OK;
}

int cli_bench_sample(int argc, char **argv) {
    cli_device_options on = CLI_DEVICE_DEFAULTS;
    bench_sample b = {.dtype = VJP_BF16, .texts = 1};
    int dtype = -1;
    const cli_option options[] = {
        CLI_OPTION_DEVICE(on),
        CLI_OPTION_THREADS(on),
        CLI_OPTION_PRODUCTS(on),
        {"dtype", 0, "T", "bf16 (default), f16 or f32", CLI_DTYPE, &dtype, 0, 0},
        {"texts", 0, "N", "texts that are generated at once; default 1", CLI_INTEGER, &b.texts, 1, MAX_TEXTS},
    };
    const cli_command command = {
        .name = "bench sample",
        .usage = "bench sample [PRESET ...] [--device D] [--threads N] [--dtype T] [--texts N]",
        .about = "Times a prompt of 512 tokens and generated tokens, with random weights, beside their limits:\n"
                 "  prompt   its products, at the rate of a square product\n"
                 "  token    the bytes of the weights, each read once, over the rate of a copy,\n"
                 "           and beside it over the rate of a loop that only reads\n"
                 "Presets: " LLAMA_PRESETS ".\nDefault: medium, 124M and 1.1B.",
        .more = NULL,
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &b.json,
        .max_operands = 8,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    if (dtype >= 0) b.dtype = (vjp_dtype)dtype;
    if (b.dtype != VJP_F32 && b.dtype != VJP_BF16 && b.dtype != VJP_F16)
        return cli_misuse("bench sample", "--dtype is %s; it must be f32, bf16 or f16", vjp_dtype_name(b.dtype));
    on.fixed_rows = true;
    b.device = cli_open("bench sample", &on);
    if (!b.device) return CLI_FAILURE;
    b.yardstick = proof_yardstick_open(b.device, (size_t)bench_target_bytes(b.device, true));
    if (!b.json) {
        printf("%s: %s; %s, %lld text%s\n\n", on.device, vjp_device_summary(b.device), vjp_dtype_name(b.dtype),
               (long long)b.texts, b.texts == 1 ? "" : "s");
        cli_head(columns, COLUMNS);
    }
    const char *const *presets = operands.count ? (const char *const *)operands.item : usual_presets;
    int count = operands.count ? operands.count : (int)(sizeof usual_presets / sizeof usual_presets[0]);
    status = bench(&b, presets, count);
    proof_yardstick_close(b.yardstick);
    vjp_close(b.device);
    return status;
}
