/* SPDX-License-Identifier: MIT */
/*
 * Memory grows linearly with the context: the workspace that attention requires, on every backend that has it, and the
 * arena of a whole training step of a llama. Nothing is computed here, so contexts can be long.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "graph/program.h"
#include "op/op.h"
#include "train/model/llama.h"

/*
 * Each worker has its own sums of dk and dv, so the number of workers must have reached its maximum at the shortest
 * context; with 8 it has.
 */
static const struct {
    const char *name;
    vjp_options options;
} devices[] = {{"ref", {0}},  {"cpu", {.threads = 1}}, {"cpu", {.threads = 8}},
               {"cuda", {0}}, {"webgpu", {0}},         {"metal", {0}}};
enum { DEVICES = sizeof devices / sizeof devices[0], MUST_HAVE = 3 };

/* NULL: not on this machine. */
static vjp_device *open_device(size_t i) {
    vjp_device *device;
    vjp_options options = devices[i].options;
    options.struct_size = sizeof options;
    if (vjp_open(devices[i].name, &options, &device) == VJP_OK) return device;
    if (i < MUST_HAVE) fail_msg("%s", vjp_error(device));
    vjp_close(device);
    return NULL;
}

/* ---- Attention's workspace --------------------------------------------------------------------------- */

enum { SHORTEST = 256, LONGEST = 16384, BATCH = 2, HEADS = 8, KV_HEADS = 2, DIM = 64 };

/* Partial sums and tiles are rounded up to whole ones. */
enum { ROUNDING = 64 * 1024 };

typedef struct question {
    vjp_pass pass;
    bool causal, saved; /* saved: the backward gets y and lse */
    vjp_dtype dtype;
} question;

/* False: the device has no such kernel. */
static bool ask(vjp_device *device, const question *q, int64_t time, size_t *bytes) {
    const int64_t wide[] = {BATCH, time, HEADS, DIM}, narrow[] = {BATCH, time, KV_HEADS, DIM};
    const int64_t each[] = {BATCH, HEADS, time};
    vjp_tensor query = vjp_tensor_of(NULL, q->dtype, 4, wide), key = vjp_tensor_of(NULL, q->dtype, 4, narrow);
    vjp_tensor lse = vjp_tensor_of(NULL, VJP_F32, 3, each);
    const vjp_tensor *forward[] = {&query, &lse, &query, &key, &key, NULL};
    const vjp_tensor *backward[] = {
        &query, &key, &key, &query, &query, &key, &key, q->saved ? &query : NULL, q->saved ? &lse : NULL, NULL};
    const vjp_attention_attributes attributes = {.struct_size = sizeof(vjp_attention_attributes), .causal = q->causal};
    bool is_forward = q->pass == VJP_FORWARD;
    vjp_status status = vjp_workspace_size(device, &vjp_op_attention, q->pass, is_forward ? forward : backward,
                                           is_forward ? 6 : 10, &attributes, bytes);
    if (status == VJP_UNSUPPORTED) return false;
    if (status != VJP_OK) fail_msg("%s", vjp_error(device));
    return true;
}

static void attention_is_linear_in_time(void **unused) {
    (void)unused;
    static const question questions[] = {
        {VJP_FORWARD, false, false, VJP_F32},  {VJP_FORWARD, true, false, VJP_F32},
        {VJP_FORWARD, true, false, VJP_BF16},  {VJP_BACKWARD, false, true, VJP_F32},
        {VJP_BACKWARD, true, true, VJP_F32},   {VJP_BACKWARD, true, true, VJP_BF16},
        {VJP_BACKWARD, false, false, VJP_F32}, {VJP_BACKWARD, true, false, VJP_BF16},
    };
    for (size_t d = 0; d < DEVICES; d++) {
        vjp_device *device = open_device(d);
        for (size_t i = 0; device && i < sizeof questions / sizeof questions[0]; i++) {
            const question *q = &questions[i];
            size_t before = 0, bytes = 0;
            for (int64_t time = SHORTEST; time <= LONGEST; time *= 2, before = bytes) {
                if (!ask(device, q, time, &bytes)) {
                    assert_true(d >= MUST_HAVE);
                    break;
                }
                if (time > SHORTEST && bytes > 2 * before + ROUNDING)
                    fail_msg("%s, %s, causal %d, saved %d: %zu bytes of workspace at %lld, %zu at %lld",
                             devices[d].name, vjp_pass_name(q->pass), q->causal, q->saved, bytes, (long long)time,
                             before, (long long)time / 2);
            }
        }
        vjp_close(device);
    }
}

/* ---- A step's arena ---------------------------------------------------------------------------------- */

/* The arena of the gradients of a small llama without those gradients, which do not depend on the context. */
static bool arena_at(vjp_device *device, int64_t context, bool recompute, size_t *bytes) {
    const llama_config config = {.vocab_size = 64,
                                 .hidden_size = 32,
                                 .intermediate_size = 64,
                                 .layers = 2,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 8,
                                 .max_positions = LONGEST,
                                 .rope_theta = 10000,
                                 .norm_eps = 1e-5,
                                 .dtype = VJP_F32};
    const llama_options options = {
        .batch = 1, .context = context, .dtype = VJP_F32, .recompute = recompute ? LLAMA_ALL_BLOCKS : 0};
    train_model model;
    llama_build(&model, &config, &options);
    size_t count = (size_t)model.parameters, fixed = 0;
    vjp_value *results = calloc(2 * count + 1, sizeof *results), *parameters = results + count + 1;
    for (size_t i = 0; i < count; i++) {
        vjp_tensor weight = vjp_graph_describe(model.graph, model.parameter[i].value);
        parameters[i] = model.parameter[i].value;
        size_t size = sizeof(float);
        for (int axis = 0; axis < weight.ndim; axis++)
            size *= (size_t)weight.shape[axis];
        fixed += (size + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
    }
    vjp_graph_grad(model.graph, model.loss, parameters, count, NULL, 0, results);
    results[count] = model.loss;
    vjp_program *program;
    vjp_status status = vjp_compile(device, model.graph, results, count + 1, NULL, &program);
    if (status != VJP_OK && status != VJP_UNSUPPORTED) fail_msg("%s", vjp_error(device));
    vjp_program_report report = {.struct_size = sizeof report};
    vjp_program_describe(program, &report);
    *bytes = report.arena_bytes - (status == VJP_OK ? fixed : 0);
    vjp_program_destroy(program);
    free(results);
    model_free(&model);
    return status == VJP_OK;
}

/*
 * One head's matrix of scores would be 2048 floats per token, 8 KiB, and twice that at the longer context; all else
 * that is alive at once is 4.5 KiB per token. So the test detects even one head's matrix in one call's scratch. The
 * plan itself is not quite linear: which ranges fall into which gaps changes with their sizes, by 1.01 at most where it
 * was measured.
 */
static void a_step_is_linear_in_time(void **unused) {
    (void)unused;
    enum { CONTEXT = 2048 };
    for (size_t d = 0; d < DEVICES; d++) {
        vjp_device *device = open_device(d);
        for (int recompute = 0; device && recompute < 2; recompute++) {
            size_t one = 0, two = 0;
            if (!arena_at(device, CONTEXT, recompute, &one) || !arena_at(device, 2 * CONTEXT, recompute, &two)) {
                assert_true(d >= MUST_HAVE);
                break;
            }
            if ((double)two > 2 * 1.05 * (double)one)
                fail_msg("%s, recompute %d: an arena of %zu bytes at %d, of %zu at %d", devices[d].name, recompute, one,
                         CONTEXT, two, 2 * CONTEXT);
        }
        vjp_close(device);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_linear_in_time),
        cmocka_unit_test(a_step_is_linear_in_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
