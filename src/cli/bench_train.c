/* SPDX-License-Identifier: MIT */
/*
 * vjp bench train: one step of training, whole and by op, beside what the machine allows.
 *
 * Steps with and without the programs' profile take turns, so both see the same machine. Without it only the whole step
 * is timed. With it every call is timed, too; its best time over the steps is shown beside its limit, which is also the
 * best of many. The difference between the fastest of those steps and the sum of its calls is the executor's part:
 * making the batch and copying it in, the loop over the calls, reading the loss back, and one reading of the clock per
 * call. The overhead of a call before its kernel begins is inside the calls' times; the shortest call of the step,
 * usually on a scalar, is an upper bound of it. The rate of a copy, and of raw products of the sizes that occur in the
 * step, are measured in the middle and at the end of the same run.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench.h"
#include "core/core.h"
#include "core/philox.h"
#include "core/system.h"
#include "op/op.h"
#include "proof/timing.h"
#include "train/job/job.h"

enum { TEXT_BYTES = 1 << 20, WARM_UP = 2, USUAL_STEPS = 10, MAX_OPS = 256, MAX_PRODUCTS = 32 };

static const double RATES_BUDGET = 0.5, PRODUCT_BUDGET = 0.2; /* seconds */

/* All calls of an op's pass in one step. */
typedef struct op_row {
    const vjp_op *op;
    vjp_pass pass;
    int64_t calls;
    double seconds, limit;
    vjp_cost cost;
} op_row;

/* One timed call of a step. */
typedef struct one_call {
    const vjp_op *op;
    vjp_pass pass;
    double seconds; /* the best of the steps */
    vjp_cost cost;
    int product; /* which of the raw products it is limited by; -1: none */
} one_call;

/* The products of a linear without bias and activation, raw: one forward, two backward. */
typedef struct raw_product {
    int64_t m, k, n;
    bool transpose_b;
    double limit[VJP_PASS_COUNT];
} raw_product;

/* Of a step, on devices that count: dispatches, submissions, waits. */
enum { COUNTS = 3 };
static const char *const count_names[COUNTS] = {"dispatches", "submissions", "waits"};
typedef struct counts {
    int64_t count[COUNTS];
} counts;

typedef struct bench_train {
    vjp_device *device;
    counts counts;
    const char *device_name, *preset;
    int64_t threads, batch, context, steps, taken;
    vjp_dtype dtype, residual;
    trainer_options how;
    int64_t memory; /* bytes allowed; 0: any */
    fit_result fit; /* what is done for that */
    bool json, quick;
    int64_t shards;
    vjp_group *group;
    bool zero, overlap;
    text_data text;
    train_source source;
    train_model model;
    trainer *trainer;
    vjp_program *program[TRAINER_PROGRAMS];
    int programs;
    double *seconds;           /* [steps]: of steps without a profile */
    double profiled, in_calls; /* of the fastest step with one: all of it, and the sum of its calls */
    one_call *call;            /* [calls] */
    int64_t calls;
    int side;             /* of the raw product */
    double flops_a_token; /* as models are compared: parameters and causal attention, nothing recomputed */
    double copy_rate, product_rate, peak_bytes;
    double device_bytes; /* of a device with its own memory: what training took of it; 0: it does not say */
    raw_product product[MAX_PRODUCTS];
    int products;
    op_row row[MAX_OPS];
    int rows;
} bench_train;

/* ---- Setting up -------------------------------------------------------------------------------------- */

/* Bytes without a pattern: what a step takes does not depend on them. */
static bool make_text(bench_train *b, char error[TRAIN_ERROR]) {
    b->text.bytes = malloc(TEXT_BYTES);
    if (!b->text.bytes) return train_fail(error, "no memory for a text");
    b->text.count = b->text.trained = TEXT_BYTES;
    for (uint32_t i = 0; i < TEXT_BYTES; i++)
        b->text.bytes[i] = (unsigned char)vjp_philox4x32_10((vjp_philox){{i, 0, 0, 0}}, 1, 0).word[0];
    return text_source(&b->text, b->batch, b->shards, b->context, 1, &b->source, error);
}

static bool set_up(bench_train *b, char error[TRAIN_ERROR]) {
    const llama_preset *preset = llama_preset_find(b->preset, error);
    if (!preset) return false;
    llama_config config = preset->config;
    if (!b->batch) b->batch = preset->batch;
    if (!b->context) b->context = config.max_positions;
    config.max_positions = b->context;
    b->side = (int)proof_square_side(b->device);
    b->flops_a_token = 6 * (double)llama_size(&config) +
                       6 * (double)config.layers * (double)b->context * (double)config.heads * (double)config.head_dim;
    if (b->batch % b->shards != 0)
        return train_fail(error, "a batch of %lld rows cannot be split into %lld shards", (long long)b->batch,
                          (long long)b->shards);
    llama_options options = {.batch = b->batch / b->shards,
                             .context = b->context,
                             .dtype = b->dtype,
                             .wide_residual = b->residual != b->dtype};
    trainer_options how = b->how;
    how.group = b->group;
    how.zero = b->zero;
    how.overlap = b->overlap;
    how.steps = WARM_UP + 2 * b->steps;
    const fit_run run = {b->device, &how, false};
    const fit_limit limit = {.asked = (size_t)b->memory, .free = fit_free(b->device)};
    const fit_model model = {.llama = &config, .llama_options = &options};
    if (limit.asked && !fit_choose(&run, &model, &limit, &b->fit, error)) return false;
    options.recompute = b->fit.recompute;
    options.recompute_mlp = b->fit.recompute_mlp;
    how.arena_limit = b->fit.arena_limit;
    if (!make_text(b, error)) return false;
    llama_build(&b->model, &config, &options);
    b->device_bytes = (double)limit.free;
    b->trainer = trainer_create(b->device, &b->model, &how, error);
    if (!b->trainer) return false;
    b->programs = trainer_programs(b->trainer, b->program);
    for (int i = 0; i < b->programs; i++) {
        vjp_program_report report = {.struct_size = sizeof report};
        vjp_program_describe(b->program[i], &report);
        b->calls += (int64_t)report.calls;
    }
    b->seconds = calloc((size_t)b->steps, sizeof *b->seconds);
    b->call = calloc((size_t)b->calls, sizeof *b->call);
    b->profiled = INFINITY;
    return (b->seconds && b->call) || train_fail(error, "no memory for the times");
}

static void tear_down(bench_train *b) {
    trainer_destroy(b->trainer);
    model_free(&b->model);
    text_free(&b->text);
    free(b->seconds);
    free(b->call);
}

/* ---- Measuring --------------------------------------------------------------------------------------- */

static bool take_step(bench_train *b, double *seconds, char error[TRAIN_ERROR]) {
    trainer_step_result result;
    double begin = system_seconds();
    bool ok = trainer_step(b->trainer, &b->source, ++b->taken, &result, error);
    *seconds = system_seconds() - begin;
    return ok;
}

static void profile(bench_train *b, bool on) {
    for (int i = 0; i < b->programs; i++)
        vjp_program_profile(b->program[i], on);
}

static int64_t rows_of(const vjp_tensor *t) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < t->ndim; i++)
        rows *= t->shape[i];
    return rows;
}

/* Which raw product limits a call: -1 where it is not linear, does more than its products, or too many differ. */
static int product_of(bench_train *b, const vjp_call_time *call) {
    if (call->op->id != OP_ID(linear)) return -1;
    const vjp_linear_attributes *attributes = call->attributes;
    bool forward = call->pass == VJP_FORWARD;
    const vjp_tensor *x = call->tensors[forward ? LINEAR_A : LINEAR_B_A];
    const vjp_tensor *w = call->tensors[forward ? LINEAR_B : LINEAR_B_B];
    bool all = forward || (call->tensors[LINEAR_B_DA] && call->tensors[LINEAR_B_DB]);
    if (!all || w->ndim != 2 || attributes->activation != VJP_ACTIVATION_NONE) return -1;
    raw_product p = {rows_of(x),
                     x->shape[x->ndim - 1],
                     w->shape[!attributes->transpose_b],
                     attributes->transpose_b,
                     {INFINITY, INFINITY}};
    for (int i = 0; i < b->products; i++) {
        const raw_product *q = &b->product[i];
        if (q->m == p.m && q->k == p.k && q->n == p.n && q->transpose_b == p.transpose_b) return i;
    }
    if (b->products == MAX_PRODUCTS) return -1;
    b->product[b->products] = p;
    return b->products++;
}

/* Keeps the times of the last step's calls where they are the best so far, and returns their sum. */
static bool keep_calls(bench_train *b, double *sum, char error[TRAIN_ERROR]) {
    one_call *next = b->call;
    *sum = 0;
    for (int i = 0; i < b->programs; i++) {
        vjp_program_report report = {.struct_size = sizeof report};
        vjp_program_describe(b->program[i], &report);
        for (size_t k = 0; k < report.calls; k++) {
            vjp_call_time time = {.struct_size = sizeof time};
            if (vjp_program_time(b->program[i], k, &time) != VJP_OK)
                return train_fail(error, "%s", vjp_error(b->device));
            *sum += time.seconds;
            double best = next->op ? fmin(next->seconds, time.seconds) : time.seconds;
            *next++ = (one_call){time.op, time.pass, best, time.cost, product_of(b, &time)};
        }
    }
    return true;
}

/* A step without a profile, then one with. */
static bool take_round(bench_train *b, double *plain, char error[TRAIN_ERROR]) {
    double profiled, in_calls;
    if (!take_step(b, plain, error)) return false;
    profile(b, true);
    bool ok = take_step(b, &profiled, error) && keep_calls(b, &in_calls, error);
    profile(b, false);
    if (!ok || profiled >= b->profiled) return ok;
    b->profiled = profiled;
    b->in_calls = in_calls;
    return true;
}

static bool time_product(bench_train *b, proof_yardstick *yardstick, const char *sizes, double budget,
                         proof_timing *timing, char why[TEXT_ERROR]) {
    proof_setup setup;
    return proof_setup_read(&setup, vjp_op_find("linear"), sizes, why) &&
           proof_time(b->device, yardstick, &setup, b->dtype, budget, timing, why);
}

static bool take_rates(bench_train *b, char error[TRAIN_ERROR]) {
    if (b->quick) return true;
    char why[TEXT_ERROR];
    proof_timing timing;
    proof_yardstick *yardstick = proof_yardstick_open(b->device, (size_t)bench_target_bytes(b->device, true));
    char square[BENCH_TEXT * 4];
    snprintf(square, sizeof square, "a=[%d,%d] b=[%d,%d]", b->side, b->side, b->side, b->side);
    bool ok = time_product(b, yardstick, square, RATES_BUDGET, &timing, why);
    proof_yardstick_close(yardstick);
    if (ok) {
        b->copy_rate = fmax(b->copy_rate, timing.copy_rate);
        b->product_rate = fmax(b->product_rate, timing.product_rate);
    }
    for (int i = 0; ok && i < b->products; i++) {
        raw_product *p = &b->product[i];
        char sizes[BENCH_TEXT * 4];
        long long m = p->m, k = p->k, n = p->n, rows = p->transpose_b ? n : k, columns = p->transpose_b ? k : n;
        snprintf(sizes, sizeof sizes, "a=[%lld,%lld] b=[%lld,%lld] transpose_b=%d -bias", m, k, rows, columns,
                 p->transpose_b);
        ok = time_product(b, NULL, sizes, PRODUCT_BUDGET, &timing, why);
        for (int pass = 0; ok && pass < VJP_PASS_COUNT; pass++)
            p->limit[pass] = fmin(p->limit[pass], timing.limit[pass]);
    }
    return ok || train_fail(error, "%s", why);
}

/* What the device has counted; 0 where it counts nothing. */
static counts counts_of(const bench_train *b) {
    counts c = {{0}};
    char text[32];
    for (int i = 0; i < COUNTS; i++)
        if (vjp_device_property(b->device, count_names[i], text, sizeof text) == VJP_OK)
            c.count[i] = strtoll(text, NULL, 10);
    return c;
}

/* The peak is read before the yardstick allocates memory. */
static bool measure(bench_train *b, char error[TRAIN_ERROR]) {
    double ignored;
    for (int i = 0; i < WARM_UP; i++) {
        counts before = counts_of(b);
        if (!take_step(b, &ignored, error)) return false;
        for (int k = 0; k < COUNTS; k++)
            b->counts.count[k] = counts_of(b).count[k] - before.count[k];
    }
    int64_t half = (b->steps + 1) / 2;
    for (int64_t i = 0; i < b->steps; i++) {
        if (!take_round(b, &b->seconds[i], error)) return false;
        if (i + 1 != half) continue;
        b->peak_bytes = system_peak_bytes();
        b->device_bytes -= (double)fit_free(b->device);
        if (!take_rates(b, error)) return false;
    }
    return take_rates(b, error);
}

/* ---- Adding up --------------------------------------------------------------------------------------- */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static int slowest_first(const void *a, const void *b) {
    const op_row *x = a, *y = b;
    return x->seconds > y->seconds ? -1 : x->seconds < y->seconds;
}

/* NaN: the device has no yardstick. */
static double limit_of(const bench_train *b, const one_call *call) {
    if (b->copy_rate <= 0) return NAN;
    double products = b->product_rate > 0 ? call->cost.flops / b->product_rate : 0;
    if (call->product >= 0) products = b->product[call->product].limit[call->pass];
    return fmax(call->cost.bytes / b->copy_rate, products);
}

static op_row *row_of(bench_train *b, const one_call *call) {
    for (int i = 0; i < b->rows; i++)
        if (b->row[i].op == call->op && b->row[i].pass == call->pass) return &b->row[i];
    b->row[b->rows] = (op_row){.op = call->op, .pass = call->pass};
    return &b->row[b->rows++];
}

typedef struct summary {
    double best, median, calls, shortest, limit;
    vjp_cost cost;
} summary;

static summary add_up(bench_train *b) {
    summary s = {.shortest = INFINITY};
    qsort(b->seconds, (size_t)b->steps, sizeof *b->seconds, by_size);
    s.best = b->seconds[0];
    s.median = (b->seconds[(b->steps - 1) / 2] + b->seconds[b->steps / 2]) / 2;
    for (int64_t i = 0; i < b->calls; i++) {
        const one_call *call = &b->call[i];
        op_row *row = row_of(b, call);
        double limit = limit_of(b, call);
        row->calls++;
        row->seconds += call->seconds;
        row->limit += limit;
        row->cost.bytes += call->cost.bytes;
        row->cost.flops += call->cost.flops;
        s.calls += call->seconds;
        s.limit += limit;
        s.cost.bytes += call->cost.bytes;
        s.cost.flops += call->cost.flops;
        s.shortest = fmin(s.shortest, call->seconds);
    }
    qsort(b->row, (size_t)b->rows, sizeof *b->row, slowest_first);
    return s;
}

typedef struct memory {
    double arena, live, intermediates, persistent;
} memory;

/* The programs share an arena; the last one reads and writes all that persists except tokens and constants. */
static memory memory_of(const bench_train *b) {
    memory m = {0};
    for (int i = 0; i < b->programs; i++) {
        vjp_program_report report = {.struct_size = sizeof report};
        vjp_program_describe(b->program[i], &report);
        m.arena = fmax(m.arena, (double)report.arena_bytes);
        m.live = fmax(m.live, (double)report.live_bytes);
        m.intermediates += (double)report.intermediate_bytes;
        m.persistent = (double)report.persistent_bytes;
    }
    return m;
}

/* ---- Printing ---------------------------------------------------------------------------------------- */

static void json_real(const char *key, double value) {
    isfinite(value) ? cli_json_real(key, value) : cli_json_null(key);
}

static void print_json(const bench_train *b, const summary *s, const memory *m) {
    for (int i = 0; i < b->rows; i++) {
        const op_row *row = &b->row[i];
        cli_json_begin();
        cli_json_text("row", "op");
        cli_json_text("op", vjp_op_describe(row->op)->name);
        cli_json_text("pass", vjp_pass_name(row->pass));
        cli_json_integer("calls", row->calls);
        cli_json_real("ms", row->seconds * 1e3);
        cli_json_real("of_step", row->seconds / s->calls);
        json_real("limit_ms", row->limit * 1e3);
        json_real("of_limit", row->limit / row->seconds);
        cli_json_real("min_bytes", row->cost.bytes);
        cli_json_real("flops", row->cost.flops);
        cli_json_end();
    }
    cli_json_begin();
    cli_json_text("row", "step");
    cli_json_text("preset", b->preset);
    cli_json_integer("parameters", model_size(&b->model));
    cli_json_integer("batch", b->batch);
    cli_json_integer("context", b->context);
    cli_json_text("dtype", vjp_dtype_name(b->dtype));
    cli_json_text("residual", vjp_dtype_name(b->residual));
    cli_json_text("moments", vjp_dtype_name(b->how.moments));
    cli_json_text("gradients", vjp_dtype_name(b->how.gradients));
    cli_json_integer("recomputed_blocks", b->fit.recompute);
    cli_json_integer("recomputed_mlps", b->fit.recompute_mlp);
    cli_json_integer("offloaded_bytes", (int64_t)b->fit.needs.host_bytes);
    cli_json_text("device", b->device_name);
    cli_json_integer("threads", b->threads);
    cli_json_integer("steps", b->steps);
    cli_json_real("ms", s->best * 1e3);
    cli_json_real("median_ms", s->median * 1e3);
    cli_json_real("profiled_ms", b->profiled * 1e3);
    cli_json_real("tokens_per_second", (double)(b->batch * b->context) / s->median);
    cli_json_integer("calls", b->calls);
    cli_json_real("flops", s->cost.flops);
    cli_json_real("gflops", s->cost.flops / s->best / 1e9);
    json_real("product_gflops", b->product_rate > 0 ? b->product_rate / 1e9 : NAN);
    cli_json_real("flops_per_token", b->flops_a_token);
    json_real("of_peak", b->product_rate > 0
                             ? b->flops_a_token * (double)(b->batch * b->context) / s->median / b->product_rate
                             : NAN);
    json_real("copy_gbps", b->copy_rate > 0 ? b->copy_rate / 1e9 : NAN);
    json_real("limit_ms", s->limit * 1e3);
    json_real("of_limit", s->limit / s->best);
    cli_json_real("in_calls", b->in_calls / b->profiled);
    cli_json_real("outside_ms", (b->profiled - b->in_calls) * 1e3);
    cli_json_real("shortest_call_ms", s->shortest * 1e3);
    for (int i = 0; i < COUNTS && b->counts.count[0]; i++)
        cli_json_integer(count_names[i], b->counts.count[i]);
    cli_json_real("arena_bytes", m->arena);
    cli_json_real("live_bytes", m->live);
    cli_json_real("intermediate_bytes", m->intermediates);
    cli_json_real("persistent_bytes", m->persistent);
    cli_json_real("peak_bytes", b->peak_bytes);
    if (b->device_bytes > 0)
        cli_json_real("device_bytes", b->device_bytes);
    else
        cli_json_null("device_bytes");
    cli_json_end();
}

enum { COLUMNS = 7 };

static const cli_column columns[COLUMNS] = {
    {"op", 13, false},    {"pass", 8, false}, {"calls", 5, true},    {"ms", 9, true},
    {"of step", 7, true}, {"limit", 9, true}, {"of limit", 8, true},
};

static void print_rows(const bench_train *b, const summary *s) {
    cli_head(columns, COLUMNS);
    for (int i = 0; i < b->rows; i++) {
        const op_row *row = &b->row[i];
        char calls[BENCH_TEXT], ms[BENCH_TEXT], part[BENCH_TEXT], limit[BENCH_TEXT], share[BENCH_TEXT];
        snprintf(calls, sizeof calls, "%lld", (long long)row->calls);
        bench_milliseconds(row->seconds, ms);
        snprintf(part, sizeof part, "%.2f%%", 100 * row->seconds / s->calls);
        bench_milliseconds(row->limit, limit);
        bench_share(row->limit / row->seconds, share);
        cli_cell cells[COLUMNS] = {{vjp_op_describe(row->op)->name, CLI_PLAIN},
                                   {vjp_pass_name(row->pass), CLI_PLAIN},
                                   {calls, CLI_PLAIN},
                                   {ms, CLI_PLAIN},
                                   {part, CLI_PLAIN},
                                   {limit, CLI_PLAIN},
                                   {share, bench_colour(row->limit / row->seconds)}};
        cli_row(columns, COLUMNS, cells);
    }
}

static void print_text(const bench_train *b, const summary *s, const memory *m) {
    double tokens = (double)(b->batch * b->context);
    char bytes[5][CLI_BYTES_TEXT], shortest[BENCH_TEXT], share[BENCH_TEXT], what[FIT_TEXT];
    printf("%s: %s; llama %s, %.3g M parameters, %s, batch %lld x %lld\n\n", b->device_name,
           vjp_device_summary(b->device), b->preset, (double)model_size(&b->model) / 1e6, vjp_dtype_name(b->dtype),
           (long long)b->batch, (long long)b->context);
    if (fit_text(&b->fit, what)) printf("%s\n\n", what);
    print_rows(b, s);
    bench_share(s->limit / s->best, share);
    bench_milliseconds(s->shortest, shortest);
    printf("\nstep     best %.2f ms, median %.2f ms of %lld; %.0f tokens/s (median); %s of the limit\n", s->best * 1e3,
           s->median * 1e3, (long long)b->steps, tokens / s->median, share);
    printf("rate     %.1f GFLOP per step, %.1f GFLOP/s", s->cost.flops / 1e9, s->cost.flops / s->best / 1e9);
    if (b->product_rate > 0)
        printf("; a raw %s product of %d x %d x %d %.1f GFLOP/s: %.2f of it", vjp_dtype_name(b->dtype), b->side,
               b->side, b->side, b->product_rate / 1e9, s->cost.flops / s->best / b->product_rate);
    if (b->copy_rate > 0) printf("; copy %.1f GB/s", b->copy_rate / 1e9);
    if (b->product_rate > 0)
        printf(
            "\npeak     %.2f of that raw product by the median step, counting 6 x parameters + 6 x layers x context x "
            "width\n         = %.4g MFLOP per token",
            b->flops_a_token * tokens / s->median / b->product_rate, b->flops_a_token / 1e6);
    printf("\ncalls    %lld, %.2f ms of a step that took %.2f ms with the profile: %.2f%%; outside of them %.3f ms, "
           "%.2f%%;\n         the shortest call %s ms\n",
           (long long)b->calls, b->in_calls * 1e3, b->profiled * 1e3, 100 * b->in_calls / b->profiled,
           (b->profiled - b->in_calls) * 1e3, 100 * (1 - b->in_calls / b->profiled), shortest);
    if (b->counts.count[0])
        printf(
            "device   %lld dispatches, %lld submissions, %lld wait%s a step; the least bytes that its calls move %s\n",
            (long long)b->counts.count[0], (long long)b->counts.count[1], (long long)b->counts.count[2],
            b->counts.count[2] == 1 ? "" : "s", cli_bytes(s->cost.bytes, bytes[0]));
    printf("memory   arena %s, alive at once %s, all intermediates %s; parameters, gradients and moments %s;\n"
           "         peak of the process %s",
           cli_bytes(m->arena, bytes[0]), cli_bytes(m->live, bytes[1]), cli_bytes(m->intermediates, bytes[2]),
           cli_bytes(m->persistent, bytes[3]), cli_bytes(b->peak_bytes, bytes[4]));
    if (b->device_bytes > 0) printf("; taken of the device's free memory %s", cli_bytes(b->device_bytes, bytes[0]));
    putchar('\n');
}

/* ---- Shards ------------------------------------------------------------------------------------------ */

/*
 * Steps of a batch that is split into shards, on all processes of the group: only whole steps are timed, because each
 * program runs several times in one.
 */
static int run_shards(bench_train *b) {
    char error[TRAIN_ERROR];
    trainer_group_time group = {0};
    double ignored;
    bool ok = set_up(b, error);
    for (int i = 0; i < WARM_UP && ok; i++)
        ok = take_step(b, &ignored, error);
    if (ok) trainer_take_group_time(b->trainer);
    for (int64_t i = 0; i < b->steps && ok; i++)
        ok = take_step(b, &b->seconds[i], error);
    if (!ok) {
        cli_fail("bench train", "rank %d: %s", (int)vjp_group_rank(b->group), error);
        if (vjp_group_size(b->group) > 1) vjp_group_abort(b->group, CLI_FAILURE);
        return CLI_FAILURE;
    }
    group = trainer_take_group_time(b->trainer);
    if (vjp_group_rank(b->group) != 0) return CLI_OK;
    b->calls = 0;
    summary s = add_up(b);
    double total = 0, tokens = (double)(b->batch * b->context);
    for (int64_t i = 0; i < b->steps; i++)
        total += b->seconds[i];
    if (b->json) {
        cli_json_begin();
        cli_json_text("row", "shards");
        cli_json_text("preset", b->preset);
        cli_json_integer("batch", b->batch);
        cli_json_integer("context", b->context);
        cli_json_text("dtype", vjp_dtype_name(b->dtype));
        cli_json_integer("shards", b->shards);
        cli_json_integer("processes", vjp_group_size(b->group));
        cli_json_integer("threads", b->threads);
        cli_json_integer("steps", b->steps);
        cli_json_real("ms", s.best * 1e3);
        cli_json_real("median_ms", s.median * 1e3);
        cli_json_real("tokens_per_second", tokens / s.median);
        cli_json_real("sum_ms", group.sums * 1e3 / (double)b->steps);
        cli_json_real("wait_ms", group.waits * 1e3 / (double)b->steps);
        cli_json_real("hidden_ms", group.hidden * 1e3 / (double)b->steps);
        cli_json_end();
        return CLI_OK;
    }
    printf("llama %s, %s, batch %lld x %lld in %lld shards on %d process%s of %lld thread%s\n", b->preset,
           vjp_dtype_name(b->dtype), (long long)b->batch, (long long)b->context, (long long)b->shards,
           (int)vjp_group_size(b->group), vjp_group_size(b->group) == 1 ? "" : "es", (long long)b->threads,
           b->threads == 1 ? "" : "s");
    printf("step     best %.2f ms, median %.2f ms of %lld; %.0f tokens/s (median)\n", s.best * 1e3, s.median * 1e3,
           (long long)b->steps, tokens / s.median);
    printf("group    %.2f ms of a step in sums of gradients and copies of weights, %.1f%%; %.2f ms waiting for the\n"
           "         others, %.1f%%; %.2f ms of sums hidden by the backward pass\n",
           group.sums * 1e3 / (double)b->steps, 100 * group.sums / total, group.waits * 1e3 / (double)b->steps,
           100 * group.waits / total, group.hidden * 1e3 / (double)b->steps);
    return CLI_OK;
}

/* ---- The command ------------------------------------------------------------------------------------- */

static int run(bench_train *b) {
    char error[TRAIN_ERROR];
    if (b->shards > 1 || vjp_group_size(b->group) > 1) return run_shards(b);
    if (!set_up(b, error) || !measure(b, error)) return cli_fail("bench train", "%s", error);
    summary s = add_up(b);
    memory m = memory_of(b);
    b->json ? print_json(b, &s, &m) : print_text(b, &s, &m);
    return CLI_OK;
}

int cli_bench_train(int argc, char **argv) {
    enum { MANY = 1000000 };
    cli_device_options on = CLI_DEVICE_DEFAULTS;
    bench_train b = {.preset = "small", .steps = USUAL_STEPS, .dtype = VJP_F32, .shards = 1, .zero = true};
    const char *allowed = NULL, *zero = NULL, *overlap = NULL, *group = "auto";
    int dtype = -1, residual = -1, moments = -1, gradients = -1;
    const cli_option options[] = {
        CLI_OPTION_DEVICE(on),
        CLI_OPTION_THREADS(on),
        CLI_OPTION_PRODUCTS(on),
        {"preset", 0, "P", LLAMA_PRESETS "; default small", CLI_TEXT, &b.preset, 0, 0},
        {"batch", 0, "B", "rows of a batch; default: the preset's", CLI_INTEGER, &b.batch, 1, MANY},
        {"context", 0, "T", "bytes of a row; default: the preset's", CLI_INTEGER, &b.context, 1, TEXT_BYTES - 1},
        {"dtype", 0, "D", "f32 or bf16: what products compute with; default f32", CLI_DTYPE, &dtype, 0, 0},
        CLI_OPTION_RESIDUAL(residual),
        CLI_OPTION_MOMENTS(moments),
        CLI_OPTION_GRADIENTS(gradients),
        CLI_OPTION_MEMORY(allowed),
        CLI_OPTION_SHARDS(b.shards),
        {"group", 0, "G", "self, mpi, openmpi, mpich, nccl; default: mpi if a launcher started it, else self", CLI_TEXT,
         &group, 0, 0},
        CLI_OPTION_ZERO(zero),
        CLI_OPTION_OVERLAP(overlap),
        {"steps", 0, "K", "steps to time, with and without the profile; default 10", CLI_INTEGER, &b.steps, 1, MANY},
        {"quick", 0, NULL, "without the limits: minutes less on a slow device", CLI_FLAG, &b.quick, 0, 0},
    };
    const cli_command command = {
        .name = "bench train",
        .usage = "bench train [--preset small] [--batch B] [--context T] [--dtype f32|bf16] [--steps K] [--quick]",
        .about =
            "Times a step of training a llama on bytes without a pattern, whole and by op:\n"
            "  ms        the best of each call over the steps that were profiled\n"
            "  of step   share of the sum of these\n"
            "  limit     for each call the longer of its minimum bytes over the rate of a copy and, for linear,\n"
            "            its raw products alone, by the faster engine; for others their flops over the rate of\n"
            "            a square raw product, of side 8192 on CUDA and 1024 elsewhere; all are measured in the\n"
            "            same run\n"
            "  of limit  limit over time; tensors in a cache move faster than the copy, which exceeds every cache\n"
            "Steps with and without the profile take turns. The time outside of the calls is the executor's:\n"
            "making the batch, the loop, reading the loss, the clock.\n"
            "With --shards only whole steps are timed, on all processes that mpirun started.",
        .more =
            "Fields with --json: of row \"op\" op, pass, calls, ms, of_step, limit_ms, of_limit, min_bytes, flops;\n"
            "of row \"step\", the last, ms (best), median_ms, profiled_ms, tokens_per_second, gflops,\n"
            "product_gflops, flops_per_token, of_peak, copy_gbps, of_limit, in_calls, outside_ms, shortest_call_ms, "
            "and\n"
            "bytes of memory; on WebGPU and Metal dispatches, submissions and waits. Of row \"shards\" shards,\n"
            "processes, sum_ms, wait_ms and hidden_ms beside those of \"step\".\n",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &b.json,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    if (dtype >= 0 && dtype != VJP_F32 && dtype != VJP_BF16 && dtype != VJP_F16)
        return cli_misuse("bench train", "--dtype is %s; it must be f32, bf16 or f16",
                          vjp_dtype_name((vjp_dtype)dtype));
    if (cli_residual("bench train", dtype, residual) != CLI_CONTINUE) return CLI_MISUSE;
    if (allowed && cli_memory("bench train", allowed, NULL, NULL) != CLI_CONTINUE) return CLI_MISUSE;
    if (dtype >= 0) b.dtype = (vjp_dtype)dtype;
    b.residual = residual >= 0 ? (vjp_dtype)residual : b.dtype;
    if (cli_shards("bench train", b.shards) != CLI_CONTINUE) return CLI_MISUSE;
    if (cli_switch("bench train", "zero", zero, &b.zero) != CLI_CONTINUE) return CLI_MISUSE;
    if (cli_switch("bench train", "overlap", overlap, &b.overlap) != CLI_CONTINUE) return CLI_MISUSE;
    b.how = job_defaults().trainer;
    b.how.shards = b.shards;
    if (cli_precision("bench train", dtype, moments, gradients, &b.how) != CLI_CONTINUE) return CLI_MISUSE;
    cli_share_cores(&on);
    b.device = cli_open("bench train", &on);
    if (!b.device) return CLI_FAILURE;
    if (!overlap) b.overlap = vjp_device_is_host(b.device);
    b.device_name = on.device;
    b.threads = bench_threads(on.device, on.threads);
    status = allowed ? cli_memory("bench train", allowed, b.device, &b.memory) : CLI_CONTINUE;
    if (status == CLI_CONTINUE && vjp_group_open(b.device, group, NULL, &b.group) != VJP_OK)
        status = cli_fail("bench train", "%s", vjp_error(b.device));
    if (status == CLI_CONTINUE) {
        status = run(&b);
        tear_down(&b);
    }
    vjp_group_close(b.group);
    vjp_close(b.device);
    return status;
}
