/* SPDX-License-Identifier: MIT */
/*
 * The rewrite that makes queries, keys and values one product: the numbers are those of three products, the bits those
 * of a program without a plan, and what cannot be joined stays.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "graph/program.h"
#include "merging.h"
#include "numbers.h"
#include "op/op.h"

typedef enum qkv_choice {
    QKV_PLAIN,
    QKV_BIAS,
    QKV_NO_ROPE,
    QKV_APART,       /* q and k turn by other angles: each has its rope */
    QKV_MARKED,      /* the block is computed again for the backward */
    QKV_FROZEN,      /* no weight has a gradient */
    QKV_NO_DX,       /* nor has what they multiply */
    QKV_MORE_DX,     /* which something else reads, too */
    QKV_FEW_ROWS,    /* f32: copying the weights would cost more than it saves */
    QKV_ONE_FROZEN,  /* k's weight has no gradient: only the forward is joined */
    QKV_SHARED,      /* k and v have the same weight */
    QKV_ACTIVATION,  /* of v */
    QKV_RESULT,      /* v is a result */
    QKV_OTHER,       /* v is read by another op */
    QKV_EARLY,       /* q is turned before k's product */
    QKV_CHANGED,     /* q's f32 weight changes before k's product */
    QKV_LATER,       /* it changes between forward and backward */
    QKV_OTHER_INPUT, /* v comes from other rows */
    QKV_CHOICES
} qkv_choice;

/* Products less than without the rewrite; the forward counts twice where it runs twice. */
static int products_saved(qkv_choice choice, bool narrow) {
    switch (choice) {
    case QKV_PLAIN:
    case QKV_BIAS:
    case QKV_NO_ROPE:
    case QKV_APART:
    case QKV_FROZEN:
    case QKV_NO_DX:
    case QKV_MORE_DX:
    case QKV_EARLY: return 4;
    case QKV_MARKED: return 6;
    case QKV_FEW_ROWS: return narrow ? 4 : 0;
    case QKV_ONE_FROZEN: return 2;
    case QKV_RESULT: return 2;               /* the backward is joined all the same */
    case QKV_CHANGED: return narrow ? 2 : 0; /* then the casts are made before */
    case QKV_LATER: return narrow ? 4 : 2;
    case QKV_SHARED: return narrow ? 2 : 0; /* it is cast twice; the gradients add up */
    default: return 0;
    }
}

enum { BATCH = 2, TIME = 40, FEW = 8, DIM = 24, HEADS = 4, KV_HEADS = 2, HEAD = 8, RESULTS = 12 };

typedef struct qkv_graph {
    vjp_graph *graph;
    vjp_value x, parameter[8], result[RESULTS], state;
    size_t parameters, results;
} qkv_graph;

static vjp_value add_parameter(qkv_graph *r, const char *name, int ndim, int64_t rows, int64_t columns) {
    return r->parameter[r->parameters++] =
               vjp_graph_parameter(r->graph, name, VJP_F32, ndim, (const int64_t[]){rows, columns});
}

static vjp_value project(qkv_graph *r, vjp_value a, vjp_value w, vjp_value bias, int64_t heads, vjp_dtype dtype,
                         vjp_activation activation) {
    vjp_graph *g = r->graph;
    const vjp_tensor shape = vjp_graph_describe(g, a);
    vjp_value b = dtype == VJP_F32 ? w : vjp_graph_cast(g, w, dtype);
    vjp_value y = vjp_graph_linear(g, a, b, bias, 0, 0, WITH(linear, .transpose_b = 1, .activation = activation));
    return vjp_graph_reshape(g, y, 4, (const int64_t[]){BATCH, shape.shape[1], heads, HEAD});
}

static qkv_graph qkv_make(qkv_choice choice, vjp_dtype dtype) {
    qkv_graph r = {.graph = vjp_graph_create()};
    vjp_graph *g = r.graph;
    const int64_t time = choice == QKV_FEW_ROWS ? FEW : TIME, table[] = {time, HEAD / 2};
    float angles[2][TIME * HEAD / 2];
    for (int i = 0; i < TIME * HEAD / 2; i++) {
        angles[0][i] = (float)cos(i * 0.1);
        angles[1][i] = (float)sin(i * 0.1);
    }
    r.x = vjp_graph_input(g, "x", dtype, 3, (const int64_t[]){BATCH, time, DIM});
    vjp_value cosine = vjp_graph_constant(g, "cosine", VJP_F32, 2, table, angles[0]);
    vjp_value sine = vjp_graph_constant(g, "sine", VJP_F32, 2, table, angles[1]);
    vjp_value gamma = add_parameter(&r, "gamma", 1, DIM, 0);
    vjp_value wq = add_parameter(&r, "wq", 2, HEADS * HEAD, DIM), wk = add_parameter(&r, "wk", 2, KV_HEADS * HEAD, DIM);
    vjp_value wv = choice == QKV_SHARED ? wk : add_parameter(&r, "wv", 2, KV_HEADS * HEAD, DIM), bias[3] = {0};
    size_t wanted = r.parameters;
    if (choice == QKV_BIAS) {
        bias[0] = add_parameter(&r, "bq", 1, HEADS * HEAD, 0);
        bias[1] = add_parameter(&r, "bk", 1, KV_HEADS * HEAD, 0);
        bias[2] = add_parameter(&r, "bv", 1, KV_HEADS * HEAD, 0);
        wanted = r.parameters;
    }
    if (choice == QKV_MARKED) vjp_graph_recompute_begin(g);
    vjp_value a = choice == QKV_NO_DX ? r.x : vjp_graph_rms_norm(g, r.x, gamma, 0, NULL);
    vjp_value other = choice == QKV_OTHER_INPUT ? vjp_graph_scale(g, a, WITH(scale, .factor = 2)) : a;
    vjp_value q = project(&r, a, wq, bias[0], HEADS, dtype, VJP_ACTIVATION_NONE), changed = 0;
    if (choice == QKV_EARLY) q = vjp_graph_rope(g, q, cosine, sine, 0, NULL);
    if (choice == QKV_CHANGED) changed = vjp_graph_assign(g, wq, vjp_graph_scale(g, wq, WITH(scale, .factor = 0.5)));
    vjp_value k = project(&r, a, wk, bias[1], KV_HEADS, dtype, VJP_ACTIVATION_NONE);
    vjp_value v = project(&r, other, wv, bias[2], KV_HEADS, dtype,
                          choice == QKV_ACTIVATION ? VJP_ACTIVATION_TANH : VJP_ACTIVATION_NONE);
    if (choice != QKV_NO_ROPE && choice != QKV_EARLY) q = vjp_graph_rope(g, q, cosine, sine, 0, NULL);
    if (choice != QKV_NO_ROPE) k = vjp_graph_rope(g, k, cosine, choice == QKV_APART ? cosine : sine, 0, NULL);
    vjp_value y = vjp_graph_attention(g, q, k, v, 0, NULL);
    if (choice == QKV_LATER) changed = vjp_graph_assign(g, wq, vjp_graph_scale(g, wq, WITH(scale, .factor = 0.5)));
    if (choice == QKV_MARKED) vjp_graph_recompute_end(g);
    vjp_value terms[3] = {y, choice == QKV_MORE_DX ? a : 0, choice == QKV_OTHER ? v : 0}, loss = 0;
    for (int i = 0; i < 3; i++) {
        if (!terms[i]) continue;
        vjp_value term = vjp_graph_cast(g, vjp_graph_mul(g, terms[i], terms[i], NULL), VJP_F32);
        term = vjp_graph_mean(g, term, WITH(mean, .axes = 0));
        loss = loss ? vjp_graph_add(g, loss, term, NULL) : term;
    }
    vjp_value wrt[8];
    size_t count = 0;
    for (size_t i = 0; i < wanted; i++) {
        bool frozen = r.parameter[i] == gamma
                          ? choice == QKV_NO_DX
                          : choice == QKV_FROZEN || (choice == QKV_ONE_FROZEN && r.parameter[i] == wk) ||
                                (choice == QKV_CHANGED && r.parameter[i] == wq);
        if (!frozen) wrt[count++] = r.parameter[i];
    }
    vjp_graph_grad(g, loss, wrt, count, NULL, 0, r.result);
    r.results = count;
    r.result[r.results++] = loss;
    if (choice == QKV_RESULT) r.result[r.results++] = v;
    if (changed) r.result[r.results++] = changed;
    if (vjp_graph_status(g) != VJP_OK) fail_msg("%d: %s", choice, vjp_graph_error(g));
    return r;
}

static vjp_program *qkv_run(vjp_device *device, const qkv_graph *r, const char *rewrites, bool unplanned, int fill,
                            bool traced) {
    const vjp_program_options options = {.struct_size = sizeof options, .unplanned = unplanned};
    vjp_program *program;
    setenv("VJP_REWRITES", rewrites, 1);
    if (vjp_compile(device, r->graph, r->result, r->results, &options, &program) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    unsetenv("VJP_REWRITES");
    vjp_tensor x;
    assert_int_equal(vjp_program_tensor(program, r->x, &x), VJP_OK);
    for (int64_t i = 0; i < count_of(&x); i++)
        put(&x, i, random_of(5, 0, (uint64_t)i));
    for (size_t i = 0; i < r->parameters; i++)
        if (vjp_program_tensor(program, r->parameter[i], &x) == VJP_OK)
            assert_int_equal(vjp_program_init_normal(program, r->parameter[i], 0, 0.5, i), VJP_OK);
    memset(program->arena, fill, program->report.arena_bytes);
    char found[256] = "";
    vjp_status status = traced ? vjp_program_trace(program, found, sizeof found) : vjp_program_run(program);
    if (status != VJP_OK || found[0]) fail_msg("%s", found[0] ? found : vjp_error(device));
    return program;
}

static int count_calls(const vjp_program *program, const vjp_op *op) {
    int found = 0;
    for (int32_t k = 0; k < program->calls; k++)
        found += program->call[k].work.op == op;
    return found;
}

static void compare(vjp_program *one, vjp_program *other, vjp_value value, double bound, int choice) {
    vjp_tensor a, b;
    assert_int_equal(vjp_program_tensor(one, value, &a), VJP_OK);
    assert_int_equal(vjp_program_tensor(other, value, &b), VJP_OK);
    double wrong = 0, norm = 0;
    for (int64_t i = 0; i < count_of(&a); i++) {
        wrong += (get(&a, i) - get(&b, i)) * (get(&a, i) - get(&b, i));
        norm += get(&a, i) * get(&a, i);
    }
    if (!(sqrt(wrong) <= bound * sqrt(norm)) || norm == 0)
        fail_msg("%d: value %d is off by %g of %g", choice, (int)value, sqrt(wrong), sqrt(norm));
}

static void one_product_is_three(void **unused) {
    (void)unused;
    static const char *const names[] = {"ref", "cpu", "cpu"};
    for (int n = 0; n < 3; n++) {
        vjp_device *device;
        vjp_backend merging;
        assert_int_equal(vjp_open(names[n], NULL, &device), VJP_OK);
        if (n == 2) merge_calls(device, &merging);
        for (int choice = 0; choice < QKV_CHOICES; choice++)
            for (int narrow = 0; narrow < 2; narrow++) {
                qkv_graph r = qkv_make((qkv_choice)choice, narrow ? VJP_BF16 : VJP_F32);
                vjp_program *off = qkv_run(device, &r, "-all", false, 0xff, false);
                vjp_program *on = qkv_run(device, &r, "-all,+qkv", false, 0xff, true);
                vjp_program *all = qkv_run(device, &r, "+all", false, 0x55, false);
                vjp_program *unplanned = qkv_run(device, &r, "-all,+qkv", true, 0x55, false);
                int saved = count_calls(off, &vjp_op_linear) - count_calls(on, &vjp_op_linear);
                int ropes = count_calls(off, &vjp_op_rope) - count_calls(on, &vjp_op_rope);
                if (ropes != (choice == QKV_NO_ROPE || choice == QKV_APART ? 0 : saved / 2))
                    fail_msg("%d, %s: %d ropes less", choice, narrow ? "bf16" : "f32", ropes);
                if (saved != products_saved((qkv_choice)choice, narrow))
                    fail_msg("%d, %s: %d products less instead of %d", choice, narrow ? "bf16" : "f32", saved,
                             products_saved((qkv_choice)choice, narrow));
                for (size_t i = 0; i < r.results; i++) {
                    compare(off, on, r.result[i], saved ? (narrow ? 0x1p-7 : 1e-6) : 0, choice);
                    compare(on, all, r.result[i], 0, choice);
                    compare(on, unplanned, r.result[i], 0, choice);
                }
                vjp_program_destroy(off);
                vjp_program_destroy(on);
                vjp_program_destroy(all);
                vjp_program_destroy(unplanned);
                vjp_graph_destroy(r.graph);
            }
        vjp_close(device);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_product_is_three)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
