/* SPDX-License-Identifier: MIT */
/*
 * vjp bench: the time of each op, forward and backward, beside the minimum time that this machine allows, measured in
 * the same run.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench.h"
#include "core/core.h"
#include "proof/cases.h"
#include "proof/timing.h"

enum { TEXT = 256, BAR = 30 };

static const double BUDGET = 1.5, QUICK_BUDGET = 0.25, SMALL_BUDGET = 0.2; /* seconds per shape */

typedef struct bench_run {
    vjp_device *device;
    proof_yardstick *yardstick;
    vjp_dtype dtype;
    const char *device_name;
    int64_t threads;
    bool json, quick;
    int kind;      /* PROOF_HOST or PROOF_CARD */
    double target; /* bytes that a backward should move (host), and that the copy moves */
    double copy_rate, product_rate;
} bench_run;

/* ---- Sizes ------------------------------------------------------------------------------------------- */

/* Replaces every @ of the text by the count. */
static void replace_at(const char *text, int64_t count, char out[TEXT]) {
    int used = 0;
    for (const char *at; (at = strchr(text, '@')) && used < TEXT; text = at + 1)
        used += snprintf(out + used, (size_t)(TEXT - used), "%.*s%lld", (int)(at - text), text, (long long)count);
    if (used < TEXT) snprintf(out + used, (size_t)(TEXT - used), "%s", text);
}

static double min_bytes(const bench_run *run, const vjp_op *op, const char *text, int64_t count,
                        char error[TEXT_ERROR]) {
    char sized[TEXT];
    proof_setup setup;
    replace_at(text, count, sized);
    if (!proof_setup_read(&setup, op, sized, error)) return -1;
    return proof_min_bytes(run->device, &setup, run->dtype, error);
}

/* Bytes grow linearly with @: two points give the count that reaches the target. */
static bool size_text(const bench_run *run, const vjp_op *op, const char *text, char out[TEXT],
                      char error[TEXT_ERROR]) {
    double one = min_bytes(run, op, text, 1, error);
    if (one < 0) return false;
    int64_t count = 1;
    if (strchr(text, '@')) {
        double each = min_bytes(run, op, text, 2, error) - one;
        if (each > 0) count = 1 + (int64_t)ceil((run->target - one) / each);
        if (count < 1) count = 1;
    }
    replace_at(text, count, out);
    return true;
}

/* ---- Printing ---------------------------------------------------------------------------------------- */

enum { COLUMNS = 7 };

static cli_column columns[COLUMNS] = {
    {"op", 11, false},  {"pass", 8, false}, {"ms", 9, true},     {"limit", 9, true},
    {"share", 5, true}, {"", BAR, false},   {"shape", 0, false},
};

/* "[####......]" in eighths of a character. */
static void draw_bar(double share, char bar[4 * BAR + 1]) {
    static const char *const parts[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    int eighths = isfinite(share) ? (int)lround(fmin(fmax(share, 0), 1) * BAR * 8) : 0;
    bar[0] = 0;
    for (int i = 0; i < eighths / 8; i++)
        strcat(bar, "█");
    strcat(bar, parts[eighths % 8]);
}

static void print_pass(const bench_run *run, const char *op, vjp_pass pass, const char *text, double seconds,
                       double limit, bool small) {
    double share = limit / seconds;
    if (run->json) {
        cli_json_begin();
        cli_json_text("op", op);
        cli_json_text("pass", text_pass_name(pass));
        cli_json_text("shape", text);
        cli_json_text("dtype", vjp_dtype_name(run->dtype));
        cli_json_text("device", run->device_name);
        cli_json_integer("threads", run->threads);
        cli_json_real("ms", seconds * 1e3);
        isfinite(limit) ? cli_json_real("limit_ms", limit * 1e3) : cli_json_null("limit_ms");
        isfinite(limit) ? cli_json_real("of_limit", share) : cli_json_null("of_limit");
        cli_json_end();
        return;
    }
    char ms[BENCH_TEXT], limit_ms[BENCH_TEXT], share_text[BENCH_TEXT], bar[4 * BAR + 1] = "";
    bench_milliseconds(seconds, ms);
    bench_milliseconds(limit, limit_ms);
    bench_share(share, share_text);
    if (!small) draw_bar(share, bar);
    cli_colour colour = small ? CLI_DIM : bench_colour(share);
    cli_cell cells[COLUMNS] = {{op, CLI_PLAIN},      {text_pass_name(pass), CLI_PLAIN},
                               {ms, CLI_PLAIN},      {limit_ms, CLI_PLAIN},
                               {share_text, colour}, {bar, colour},
                               {text, CLI_DIM}};
    cli_row(columns, COLUMNS, cells);
}

/* ---- Running ----------------------------------------------------------------------------------------- */

static bool bench_shape(bench_run *run, const vjp_op *op, const char *text, bool small, char error[TEXT_ERROR]) {
    const char *name = vjp_op_describe(op)->name;
    char sized[TEXT];
    proof_setup setup;
    proof_timing timing;
    double budget = small ? SMALL_BUDGET : run->quick ? QUICK_BUDGET : BUDGET;
    if (!size_text(run, op, text, sized, error) || !proof_setup_read(&setup, op, sized, error) ||
        !proof_time(run->device, run->yardstick, &setup, run->dtype, budget, &timing, error))
        return false;
    run->copy_rate = fmax(run->copy_rate, timing.copy_rate);
    run->product_rate = fmax(run->product_rate, timing.product_rate);
    for (int pass = 0; pass < vjp_passes(vjp_op_describe(op)); pass++)
        print_pass(run, name, (vjp_pass)pass, sized, timing.seconds[pass], timing.limit[pass], small);
    return true;
}

/* The words after the op's name as one row: "x=[8192,1024]" "eps=0". */
static void join(const cli_operands *operands, char text[TEXT]) {
    text[0] = 0;
    for (int i = 1; i < operands->count; i++) {
        size_t used = strlen(text);
        snprintf(text + used, TEXT - used, "%s%s", used ? " " : "", operands->item[i]);
    }
}

static int bench_all(bench_run *run, const vjp_op *only, const char *own) {
    char error[TEXT_ERROR];
    int status = CLI_OK;
    if (own[0]) {
        if (bench_shape(run, only, own, false, error)) return CLI_OK;
        return cli_misuse("bench", "%s", error);
    }
    for (size_t i = 0; i < proof_shape_count; i++) {
        const vjp_op *op = vjp_op_find(proof_shapes[i].op);
        bool small = proof_shapes[i].kind == PROOF_SMALL;
        if ((only && op != only) || (!small && proof_shapes[i].kind != run->kind)) continue;
        vjp_pass last = (vjp_pass)(vjp_passes(vjp_op_describe(op)) - 1);
        bool supported = vjp_supports(run->device, op, last, run->dtype) == VJP_OK;
        if (supported && bench_shape(run, op, proof_shapes[i].text, small, error)) continue;
        if (!supported) snprintf(error, sizeof error, "%s", vjp_error(run->device));
        status = cli_fail("bench", "%s", error);
    }
    return status;
}

static void print_rates(const bench_run *run) {
    if (run->json) return;
    printf("\n");
    if (run->copy_rate > 0)
        printf("copy %.1f GB/s (read and written%s)\n", run->copy_rate / 1e9,
               run->kind == PROOF_HOST ? ", best of ordinary and streaming stores" : "");
    else
        printf("%s has no yardstick: its limits are not known\n", run->device_name);
    if (run->product_rate > 0) printf("raw products %.1f GFLOP/s\n", run->product_rate / 1e9);
}

int cli_bench(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "train") == 0) return cli_bench_train(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "sample") == 0) return cli_bench_sample(argc - 1, argv + 1);
    cli_device_options on = CLI_DEVICE_DEFAULTS;
    bench_run run = {.dtype = VJP_F32};
    int dtype = -1;
    const cli_option options[] = {
        CLI_OPTION_DEVICE(on),
        CLI_OPTION_THREADS(on),
        CLI_OPTION_PRODUCTS(on),
        {"dtype", 0, "T", "storage type: f32 (default), bf16, f16", CLI_DTYPE, &dtype, 0, 0},
        {"quick", 0, NULL, "smaller tensors, fewer rounds: seconds in all", CLI_FLAG, &run.quick, 0, 0},
    };
    const cli_command command = {
        .name = "bench",
        .usage = "bench [OP [name=value ...] | train | sample] [--device D] [--threads N] [--dtype T] [--quick]",
        .about =
            "Times each op, forward and backward, beside the minimum time that the machine allows:\n"
            "  bytes   the minimum that the pass must move, over the rate of a copy\n"
            "  linear  its raw products without bias and activation, by the fastest engine (on webgpu and metal\n"
            "          also by a kernel that does nothing else, for whole tiles of 128), and the bytes of the pass\n"
            "          between them (the forward's pre; the backward's dy, pre and dpre) over that rate\n"
            "  attention, conv2d  their flops over the rate of a raw product\n"
            "Copy and products are measured in the same rounds with the same threads; the best of the rounds\n"
            "counts. Tensors are several times the last-level cache (up to 40% of the free memory), and one small\n"
            "shape per op shows what a call costs.\n"
            "vjp bench train does the same for a step of training, vjp bench sample for generating text; see\n"
            "their --help.",
        .more = "Examples:\n"
                "  vjp bench rms_norm --threads 1\n"
                "  vjp bench layer_norm x=[8192,1024] -- -beta\n"
                "Fields with --json: op, pass, shape, dtype, device, threads, ms, limit_ms, of_limit. Limits of a\n"
                "device without a yardstick are null.\n",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &run.json,
        .max_operands = -1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    const vjp_op *op = NULL;
    char own[TEXT];
    if (operands.count && strcmp(operands.item[0], "train") == 0)
        return cli_misuse("bench", "train comes before its options: vjp bench train ...");
    if (operands.count && !(op = cli_find_op("bench", operands.item[0]))) return CLI_MISUSE;
    join(&operands, own);
    if (dtype == VJP_I32 || dtype == VJP_I64)
        return cli_misuse("bench", "--dtype %s: storage is f32, bf16, f16 or f64", vjp_dtype_name((vjp_dtype)dtype));
    if (dtype >= 0) run.dtype = (vjp_dtype)dtype;
    run.device = cli_open("bench", &on);
    if (!run.device) return CLI_FAILURE;
    run.device_name = on.device;
    run.threads = bench_threads(on.device, on.threads);
    run.kind = vjp_device_is_host(run.device) ? PROOF_HOST : PROOF_CARD;
    run.target = bench_target_bytes(run.device, run.quick);
    run.yardstick = proof_yardstick_open(run.device, (size_t)run.target);
    if (!run.json) {
        char bytes[CLI_BYTES_TEXT];
        printf("%s: %s; %s", on.device, vjp_device_summary(run.device), vjp_dtype_name(run.dtype));
        if (run.kind == PROOF_HOST) printf(", tensors of a pass %s", cli_bytes(run.target, bytes));
        printf("\n\n");
        cli_head(columns, COLUMNS);
    }
    status = bench_all(&run, op, own);
    if (status != CLI_MISUSE) print_rates(&run);
    proof_yardstick_close(run.yardstick);
    vjp_close(run.device);
    return status;
}
