/* SPDX-License-Identifier: MIT */
/*
 * Tests of every GPU backend, on `device`: its list of kernels, errors that it finds while running (bad indices),
 * refusals that write nothing, and a graph's program on it. Included by one test file per backend, which opens the
 * device.
 */
#ifndef VJP_TESTS_DEVICE_TESTS_H
#define VJP_TESTS_DEVICE_TESTS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attributes.h"
#include "core/core.h"
#include "core/half.h"
#include "graph/program.h"
#include "halves.h"
#include "on_device.h"
#include "op/op.h"

/* By op: whether ops.def lists it for the backend `name`. */
static bool is_listed(const char *name, const vjp_op *op) {
    enum { no, yes };
    static const bool cuda_ops[] = {
#define OP(name, family, cuda, gpu) cuda,
#include "op/ops.def"
    };
    static const bool gpu_ops[] = {
#define OP(name, family, cuda, gpu) gpu,
#include "op/ops.def"
    };
    return strcmp(name, "cuda") == 0 ? cuda_ops[op->id] : gpu_ops[op->id];
}

static void every_pass_has_kernels(const char *name) {
    vjp_device *any;
    vjp_open(name, NULL, &any);
    for (size_t i = 0; i < vjp_op_count(); i++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(i))); pass++) {
            if (!is_listed(name, vjp_op_at(i))) {
                assert_int_equal(vjp_supports(any, vjp_op_at(i), (vjp_pass)pass, VJP_F32), VJP_UNSUPPORTED);
                continue;
            }
            assert_int_equal(vjp_supports(any, vjp_op_at(i), (vjp_pass)pass, VJP_F32), VJP_OK);
            assert_int_equal(vjp_supports(any, vjp_op_at(i), (vjp_pass)pass, VJP_BF16), VJP_OK);
            assert_int_equal(vjp_supports(any, vjp_op_at(i), (vjp_pass)pass, VJP_F16), VJP_OK);
            assert_int_equal(vjp_supports(any, vjp_op_at(i), (vjp_pass)pass, VJP_F64), VJP_UNSUPPORTED);
        }
    vjp_close(any);
}

/* ---- With a device ----------------------------------------------------------------------------------- */

static void a_bad_index_is_reported_at_the_next_synchronise(void **state) {
    (void)state;
    need_device();
    const float table[3 * 2] = {1, 2, 3, 4, 5, 6}, before[4 * 2] = {9, 9, 9, 9, 9, 9, 9, 9};
    const int32_t index[4] = {2, 0, 7, -1};
    vjp_tensor t = on_device(VJP_F32, 2, (int64_t[]){3, 2}, table, sizeof table);
    vjp_tensor i = on_device(VJP_I32, 1, (int64_t[]){4}, index, sizeof index);
    vjp_tensor y = on_device(VJP_F32, 2, (int64_t[]){4, 2}, before, sizeof before);
    assert_int_equal(vjp_gather_forward(device, &y, &t, &i, NULL), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "gather.forward: index[2] is 7, outside [0, 3)"));
    float after[4 * 2];
    assert_int_equal(vjp_download(device, after, y.data, 0, sizeof after), VJP_OK);
    const float expected[4 * 2] = {5, 6, 1, 2, 9, 9, 9, 9};
    assert_memory_equal(after, expected, sizeof after);
    assert_int_equal(vjp_synchronize(device), VJP_OK); /* reported once */

    const float dy[4 * 2] = {1, 1, 2, 2, 3, 3, 4, 4};
    vjp_tensor d = on_device(VJP_F32, 2, (int64_t[]){4, 2}, dy, sizeof dy);
    assert_int_equal(vjp_gather_backward(device, &t, &d, &i, NULL), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "gather.backward: index[2] is 7, outside [0, 3)"));
    float gradient[3 * 2];
    assert_int_equal(vjp_download(device, gradient, t.data, 0, sizeof gradient), VJP_OK);
    const float wanted[3 * 2] = {2, 2, 0, 0, 1, 1};
    assert_memory_equal(gradient, wanted, sizeof gradient);

    const float fractions[4] = {0, 1.5f, 2, 1};
    vjp_tensor f = on_device(VJP_F32, 1, (int64_t[]){4}, fractions, sizeof fractions);
    assert_int_equal(vjp_gather_forward(device, &y, &t, &f, NULL), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "index[1] is 1.5, which is not an integer"));
    vjp_free(device, t.data), vjp_free(device, i.data), vjp_free(device, y.data);
    vjp_free(device, d.data), vjp_free(device, f.data);
}

/* y = factor x on the device, and y on its way to `host`. */
static void scale_and_download(vjp_tensor *y, const vjp_tensor *x, float factor, float *host, size_t bytes) {
    const vjp_scale_attributes a = {.struct_size = sizeof a, .factor = factor};
    assert_int_equal(vjp_scale_forward(device, y, x, &a), VJP_OK);
    assert_int_equal(vjp_download_async(device, host, y->data, 0, bytes), VJP_OK);
}

/* Memory of the host, of the kind that the device copies to without a detour, where it has one. */
static void *host_memory(size_t bytes) {
    void *data = NULL;
    if (device->backend->alloc_host)
        assert_int_equal(device->backend->alloc_host(device, bytes, &data), VJP_OK);
    else
        data = malloc(bytes);
    assert_non_null(data);
    return data;
}

static void free_host_memory(void *data) {
    if (device->backend->alloc_host)
        device->backend->free_host(device, data);
    else
        free(data);
}

/* Each download has what its value was when it was enqueued, once its event or a later one has been waited for. */
static void downloads_come_with_their_event(void **state) {
    (void)state;
    need_device();
    enum { MANY = 100, LARGE = 1 << 15 };
    static float large[LARGE], back[LARGE], x[MANY];
    float(*y)[MANY] = host_memory(MANY * sizeof *y);
    for (int i = 0; i < MANY; i++)
        x[i] = (float)(i + 1);
    vjp_tensor from = on_device(VJP_F32, 1, (int64_t[]){MANY}, x, sizeof x), to = from;
    assert_int_equal(vjp_alloc(device, sizeof x, &to.data), VJP_OK);
    vjp_event *first, *second, *third;
    scale_and_download(&to, &from, 2, y[0], sizeof x);
    assert_int_equal(vjp_event_record(device, &first), VJP_OK);
    scale_and_download(&to, &from, 3, y[1], sizeof x);
    assert_int_equal(vjp_event_record(device, &second), VJP_OK);
    assert_int_equal(vjp_event_wait(device, first), VJP_OK);
    assert_true(y[0][0] == 2 && y[0][MANY - 1] == 2 * MANY);
    assert_int_equal(vjp_event_wait(device, second), VJP_OK);
    assert_true(y[1][0] == 3 && y[1][MANY - 1] == 3 * MANY);
    vjp_event_destroy(device, first);
    vjp_event_destroy(device, second);

    /* More than an event has room for, bytes that are no words, and an event that nobody waits for. */
    unsigned char odd[3];
    for (int i = 0; i < LARGE; i++)
        large[i] = (float)i;
    vjp_tensor wide = on_device(VJP_F32, 1, (int64_t[]){LARGE}, large, sizeof large);
    assert_int_equal(vjp_download_async(device, odd, to.data, 5, sizeof odd), VJP_OK);
    assert_int_equal(vjp_download_async(device, back, wide.data, 0, sizeof back), VJP_OK);
    for (int i = 0; i < MANY; i++)
        scale_and_download(&to, &from, (float)i, y[i], sizeof x);
    assert_int_equal(vjp_event_record(device, &third), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_memory_equal(odd, (char *)&(float){6} + 1, sizeof odd);
    assert_memory_equal(back, large, sizeof large);
    for (int i = 0; i < MANY; i++)
        assert_true(y[i][6] == (float)(7 * i));
    assert_int_equal(vjp_event_wait(device, third), VJP_OK);
    vjp_event_destroy(device, third);
    scale_and_download(&to, &from, 5, y[0], sizeof x);
    assert_int_equal(vjp_event_record(device, &third), VJP_OK);
    vjp_event_destroy(device, third);

    /* A bad index is reported by the event that comes after it, and once. */
    vjp_tensor index = on_device(VJP_I32, 1, (int64_t[]){1}, &(int32_t){MANY}, 4);
    vjp_tensor table = vjp_tensor_of(from.data, VJP_F32, 2, (int64_t[]){MANY, 1});
    vjp_tensor row = vjp_tensor_of(to.data, VJP_F32, 2, (int64_t[]){1, 1});
    assert_int_equal(vjp_gather_forward(device, &row, &table, &index, NULL), VJP_OK);
    assert_int_equal(vjp_event_record(device, &first), VJP_OK);
    assert_int_equal(vjp_event_wait(device, first), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "index[0] is 100, outside [0, 100)"));
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    vjp_event_destroy(device, first);
    vjp_free(device, from.data), vjp_free(device, to.data), vjp_free(device, wide.data), vjp_free(device, index.data);
    free_host_memory(y);
}

static void a_position_past_the_tables_leaves_its_row_alone(void **state) {
    (void)state;
    need_device();
    const float x[2 * 1 * 2] = {1, 2, 3, 4}, cosine[1] = {0}, sine[1] = {1};
    const float before[4] = {9, 9, 9, 9};
    const int64_t positions[2] = {0, 1};
    vjp_tensor tx = on_device(VJP_F32, 3, (int64_t[]){2, 1, 2}, x, sizeof x);
    vjp_tensor c = on_device(VJP_F32, 2, (int64_t[]){1, 1}, cosine, sizeof cosine);
    vjp_tensor s = on_device(VJP_F32, 2, (int64_t[]){1, 1}, sine, sizeof sine);
    vjp_tensor p = on_device(VJP_I64, 1, (int64_t[]){2}, positions, sizeof positions);
    vjp_tensor y = on_device(VJP_F32, 3, (int64_t[]){2, 1, 2}, before, sizeof before);
    assert_int_equal(vjp_rope_forward(device, &y, &tx, &c, &s, &p, NULL), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "rope.forward: positions[1] is 1, outside [0, 1)"));
    float after[4];
    assert_int_equal(vjp_download(device, after, y.data, 0, sizeof after), VJP_OK);
    const float expected[4] = {-2, 1, 9, 9};
    assert_memory_equal(after, expected, sizeof after);
    vjp_free(device, tx.data), vjp_free(device, c.data), vjp_free(device, s.data);
    vjp_free(device, p.data), vjp_free(device, y.data);
}

static void an_argmax_outside_the_plane_is_reported_and_left_out(void **state) {
    (void)state;
    need_device();
    const float dy[2] = {1, 2}, before[8] = {9, 9, 9, 9, 9, 9, 9, 9};
    const int32_t argmax[2] = {1, 400};
    vjp_tensor d = on_device(VJP_F32, 4, (int64_t[]){1, 1, 1, 2}, dy, sizeof dy);
    vjp_tensor a = on_device(VJP_I32, 4, (int64_t[]){1, 1, 1, 2}, argmax, sizeof argmax);
    vjp_tensor dx = on_device(VJP_F32, 4, (int64_t[]){1, 1, 2, 4}, before, sizeof before);
    assert_int_equal(vjp_maxpool2d_backward(device, &dx, &d, NULL, &a, NULL), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "maxpool2d.backward: argmax[1] is 400, outside [0, 8)"));
    float after[8];
    assert_int_equal(vjp_download(device, after, dx.data, 0, sizeof after), VJP_OK);
    const float expected[8] = {0, 1, 0, 0, 0, 0, 0, 0};
    assert_memory_equal(after, expected, sizeof after);
    vjp_free(device, d.data), vjp_free(device, a.data), vjp_free(device, dx.data);
}

static void a_refused_call_writes_nothing(void **state) {
    (void)state;
    need_device();
    const float x[6] = {1, 2, 3, 4, 5, 6}, before[6] = {9, 9, 9, 9, 9, 9};
    vjp_tensor tx = on_device(VJP_F32, 2, (int64_t[]){2, 3}, x, sizeof x);
    vjp_tensor y = on_device(VJP_F32, 2, (int64_t[]){3, 2}, before, sizeof before);
    assert_int_equal(vjp_layer_norm_forward(device, &y, NULL, NULL, &tx, NULL, NULL, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "layer_norm.forward: y has shape [3, 2]; expected [2, 3]"));
    float after[6];
    assert_int_equal(vjp_download(device, after, y.data, 0, sizeof after), VJP_OK);
    assert_memory_equal(after, before, sizeof after);
    vjp_free(device, tx.data), vjp_free(device, y.data);
}

static void more_memory_than_there_is_is_refused(void **state) {
    (void)state;
    need_device();
    void *data;
    assert_int_equal(vjp_alloc(device, (size_t)1 << 50, &data), VJP_OUT_OF_MEMORY);
    assert_null(data);
    assert_non_null(strstr(vjp_error(device), "1125899906842624 bytes"));
    assert_int_equal(vjp_synchronize(device), VJP_OK); /* and the device still works */
}

/* ---- Programs ---------------------------------------------------------------------------------------- */

enum { ROWS = 48, COLUMNS = 64, VOCABULARY = 100 };

/* A scalar of a table, looked up, normalised and multiplied, and its gradients by two weights. */
static vjp_graph *build_model(vjp_value *index, vjp_value weight[3], vjp_value result[4]) {
    vjp_graph *g = vjp_graph_create();
    const int64_t rows[] = {ROWS}, table[] = {VOCABULARY, COLUMNS}, square[] = {COLUMNS, COLUMNS};
    const int64_t all[] = {ROWS * COLUMNS, 1};
    *index = vjp_graph_input(g, "index", VJP_I32, 1, rows);
    weight[0] = vjp_graph_parameter(g, "table", VJP_F32, 2, table);
    weight[1] = vjp_graph_parameter(g, "w", VJP_F32, 2, square);
    weight[2] = vjp_graph_parameter(g, "sum", VJP_F32, 2, all);
    vjp_value x = vjp_graph_rms_norm(g, vjp_graph_gather(g, weight[0], *index, NULL), 0, 0,
                                     WITH(rms_norm, .axes = 1, .eps = 1e-5));
    x = vjp_graph_linear(g, x, weight[1], 0, 0, 0,
                         WITH(linear, .activation = VJP_ACTIVATION_GELU_TANH, .transpose_b = 1));
    x = vjp_graph_layer_norm(g, x, 0, 0, NULL);
    x = vjp_graph_linear(g, vjp_graph_reshape(g, x, 2, (const int64_t[]){1, -1}), weight[2], 0, 0, 0,
                         WITH(linear, .activation = VJP_ACTIVATION_TANH, .transpose_b = 0));
    result[3] = vjp_graph_reshape(g, x, 0, NULL);
    vjp_graph_grad(g, result[3], weight, 3, NULL, 0, result);
    return g;
}

static vjp_program *start_program(vjp_device *on, vjp_graph *g, vjp_value index, const vjp_value weight[3],
                                  const vjp_value result[4]) {
    vjp_program *program;
    if (vjp_compile(on, g, result, 4, NULL, &program) != VJP_OK) fail_msg("%s", vjp_error(on));
    int32_t rows[ROWS];
    for (int i = 0; i < ROWS; i++)
        rows[i] = i * i % VOCABULARY;
    assert_int_equal(vjp_program_write(program, index, rows, sizeof rows), VJP_OK);
    for (int w = 0; w < 3; w++) {
        static float data[VOCABULARY * COLUMNS];
        vjp_tensor tensor = vjp_graph_describe(g, weight[w]);
        size_t count = (size_t)(tensor.shape[0] * tensor.shape[1]);
        for (size_t i = 0; i < count; i++)
            data[i] = (float)((double)((i * 2654435761u >> 5) % 1999) / 10000 - 0.1);
        assert_int_equal(vjp_program_write(program, weight[w], data, count * sizeof *data), VJP_OK);
    }
    return program;
}

/*
 * The first run makes the calls one by one; on a device that records, the second is recorded and the third replayed.
 * All give one result.
 */
static void a_program_gives_the_hosts_results_every_run(void **state) {
    (void)state;
    need_device();
    vjp_device *cpu;
    assert_int_equal(vjp_open("cpu", NULL, &cpu), VJP_OK);
    vjp_value index, weight[3], result[4];
    vjp_graph *g = build_model(&index, weight, result);
    vjp_program *there = start_program(device, g, index, weight, result),
                *here = start_program(cpu, g, index, weight, result);
    assert_int_equal(vjp_program_run(here), VJP_OK);
    static float first[VOCABULARY * COLUMNS], later[VOCABULARY * COLUMNS], host[VOCABULARY * COLUMNS];
    for (int run = 0; run < 3; run++) {
        if (vjp_program_run(there) != VJP_OK || vjp_synchronize(device) != VJP_OK) fail_msg("%s", vjp_error(device));
        assert_int_equal(there->recording != NULL, run > 0 && device->backend->record);
        for (int r = 0; r < 4; r++) {
            vjp_tensor tensor = vjp_graph_describe(g, result[r]);
            size_t count = tensor.ndim ? (size_t)(tensor.shape[0] * tensor.shape[1]) : 1;
            assert_int_equal(vjp_program_read(there, result[r], later, count * sizeof *later), VJP_OK);
            assert_int_equal(vjp_program_read(here, result[r], host, count * sizeof *host), VJP_OK);
            double error = 0, norm = 0;
            for (size_t i = 0; i < count; i++) {
                error += pow((double)later[i] - (double)host[i], 2);
                norm += pow((double)host[i], 2);
            }
            assert_true(norm > 0 && sqrt(error / norm) < 2e-5);
            if (r) continue;
            if (run == 0) memcpy(first, later, sizeof first);
            assert_memory_equal(first, later, sizeof first);
        }
    }
    vjp_program_destroy(there);
    vjp_program_destroy(here);
    vjp_graph_destroy(g);
    vjp_close(cpu);
}

enum { LAYERS = 5, NARROW = 12, STEPS = 3 };

/* Layers of f32 weights of different sizes, some with a bias that does not decay, cast down; AdamW or SGD, clipping. */
static vjp_graph *build_training(bool sgd, vjp_value *x, vjp_value weight[2 * LAYERS], vjp_minimize_result *made) {
    vjp_graph *g = vjp_graph_create();
    vjp_value y = *x = vjp_graph_input(g, "x", VJP_BF16, 2, (const int64_t[]){3, NARROW});
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        int64_t shape[] = {NARROW + 30 * i, NARROW + 30 * (i + 1)};
        snprintf(name, sizeof name, "w%d", i);
        weight[2 * i] = vjp_graph_parameter(g, name, VJP_F32, 2, shape);
        snprintf(name, sizeof name, "b%d", i);
        weight[2 * i + 1] = vjp_graph_parameter(g, name, VJP_F32, 1, shape + 1);
        y = vjp_graph_linear(g, y, vjp_graph_cast(g, weight[2 * i], VJP_BF16), 0, 0, 0, NULL);
        y = vjp_graph_add(g, y, vjp_graph_cast(g, weight[2 * i + 1], VJP_BF16), NULL);
    }
    y = vjp_graph_cast(g, vjp_graph_mul(g, y, y, NULL), VJP_F32);
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    const vjp_sgd_attributes momentum = {.struct_size = sizeof momentum, .weight_decay = 0.1, .beta = 0.9};
    if (sgd) options.sgd = &momentum;
    options.max_norm = 0.1;
    made->struct_size = sizeof *made;
    vjp_graph_minimize(g, vjp_graph_mean(g, y, WITH(mean, .axis = 0, .axes = 2)), &options, made);
    return g;
}

/* A program's weights after some steps, one after another; the caller frees them. */
static float *train(vjp_graph *g, bool unplanned, bool halves, vjp_value x, const vjp_value weight[2 * LAYERS],
                    const vjp_minimize_result *made, size_t *count) {
    const vjp_program_options options = {.struct_size = sizeof options, .unplanned = unplanned, .halves = halves};
    vjp_program *program;
    if (vjp_compile(device, g, made->results, made->count, &options, &program) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    uint16_t input[3 * NARROW];
    for (int i = 0; i < 3 * NARROW; i++)
        input[i] = vjp_f32_to_bf16((float)(i % 7 - 3));
    assert_int_equal(vjp_program_write(program, x, input, sizeof input), VJP_OK);
    for (int i = 0; i < 2 * LAYERS; i++)
        assert_int_equal(vjp_program_init_normal(program, weight[i], 0, 0.1, 1), VJP_OK);
    for (int step = 1; step <= STEPS; step++) {
        double loss;
        if (vjp_program_step(program, made, 0.01, step, &loss) != VJP_OK) fail_msg("%s", vjp_error(device));
        assert_true(loss > 0 && isfinite(loss));
    }
    float *result = malloc(1 << 20);
    *count = 0;
    for (int i = 0; i < 2 * LAYERS; i++) {
        vjp_tensor t = vjp_graph_describe(g, weight[i]);
        size_t own = (size_t)(t.shape[0] * (t.ndim > 1 ? t.shape[1] : 1));
        assert_int_equal(vjp_program_read(program, weight[i], result + *count, own * 4), VJP_OK);
        *count += own;
    }
    assert_true(*count * 4 <= 1 << 20);
    vjp_program_destroy(program);
    return result;
}

/* A program with a plan may run many calls as one. */
static void calls_that_run_as_one_have_the_same_bits(void **state) {
    (void)state;
    need_device();
    static const char *const kind[] = {"adamw", "sgd", "adamw in halves"};
    for (int i = 0; i < 3; i++) {
        vjp_value x, weight[2 * LAYERS];
        vjp_minimize_result made;
        vjp_graph *g = build_training(i == 1, &x, weight, &made);
        size_t count, others;
        long before = dispatches_so_far();
        float *planned = train(g, false, i == 2, x, weight, &made, &count);
        long between = dispatches_so_far();
        float *unplanned = train(g, true, i == 2, x, weight, &made, &others);
        assert_int_equal(count, others);
        /* In each step, of the optimizer's calls one or two are left, of the norm's two, of the casts fewer. */
        if (before && i < 2)
            assert_true(between - before + STEPS * (2 * LAYERS - 2 + 2 * LAYERS - 2) <= dispatches_so_far() - between);
        for (size_t k = 0; k < count; k++)
            if (memcmp(&planned[k], &unplanned[k], 4) != 0)
                fail_msg("%s: weight %zu is %.9g and %.9g", kind[i], k, (double)planned[k], (double)unplanned[k]);
        free(planned);
        free(unplanned);
        vjp_graph_destroy(g);
    }
}

/* A step that the host cannot read is checked by the kernel: reported, and the weights and moments stay. */
static void a_bad_step_of_adamw_is_reported_and_writes_nothing(void **state) {
    (void)state;
    need_device();
    const float values[5] = {1, 2, 3, 4, 5}, gradient[5] = {7, 7, 7, 7, 7}, rate = 0.5f, fraction = 1.5f;
    const int32_t zero = 0, good = 1;
    const int64_t negative = -3;
    const struct {
        vjp_dtype dtype;
        const void *step;
        const char *sentence; /* NULL: it is good */
    } cases[] = {{VJP_I32, &zero, "adamw.forward: step[0] is 0, outside [1, "},
                 {VJP_I64, &negative, "adamw.forward: step[0] is -3, outside [1, "},
                 {VJP_F32, &fraction, "adamw.forward: step[0] is 1.5, which is not an integer"},
                 {VJP_I32, &good, NULL}};
    vjp_tensor t[4]; /* w, m, v, g */
    for (int i = 0; i < 4; i++)
        t[i] = on_device(VJP_F32, 1, (int64_t[]){5}, i < 3 ? values : gradient, sizeof values);
    vjp_tensor lr = on_device(VJP_F32, 0, NULL, &rate, sizeof rate);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        bool is_good = !cases[c].sentence;
        size_t bytes = vjp_dtype_size(cases[c].dtype);
        vjp_tensor step = on_device(cases[c].dtype, 0, NULL, cases[c].step, bytes);
        assert_int_equal(
            vjp_adamw_forward(device, &t[0], &t[1], &t[2], &t[0], &t[1], &t[2], &t[3], &lr, &step, NULL, NULL), VJP_OK);
        assert_int_equal(vjp_synchronize(device), is_good ? VJP_OK : VJP_INVALID);
        if (!is_good && !strstr(vjp_error(device), cases[c].sentence)) fail_msg("%s", vjp_error(device));
        for (int i = 0; i < 3; i++) {
            float back[5];
            assert_int_equal(vjp_download(device, back, t[i].data, 0, sizeof back), VJP_OK);
            assert_int_equal(memcmp(back, values, sizeof back) != 0, is_good);
        }
        vjp_free(device, step.data);
    }
    for (int i = 0; i < 4; i++)
        vjp_free(device, t[i].data);
    vjp_free(device, lr.data);
}

/* first[1] or first[4] is bad: reported once by each pass, and what is computed are averages of values that are there.
 */
static void a_bad_first_of_attention_is_reported(void **state) {
    (void)state;
    need_device();
    enum { COUNT = 2 * 3 };
    const int64_t shape[] = {2, 3, 1, 1}, rows[] = {2, 3}, lse_shape[] = {2, 1, 3};
    const int32_t late[COUNT] = {0, 2, 2, 0, 0, 0}, decreasing[COUNT] = {0, 1, 1, 0, 1, 0};
    const int32_t negative[COUNT] = {0, 0, 0, 0, -7, 0}, good[COUNT] = {0, 1, 1, 0, 0, 2};
    const int64_t far[COUNT] = {0, INT64_C(1) << 40, 0, 0, 0, 0};
    const float fraction[COUNT] = {0, 0, 0, 0, 0.5f, 1}, ones[COUNT] = {1, 1, 1, 1, 1, 1};
    const struct {
        vjp_dtype dtype;
        const void *data;
        const char *said; /* NULL: nothing is wrong */
    } cases[] = {{VJP_I32, late, "first[1] is 2, "},         {VJP_I32, decreasing, "first[5] is 0, "},
                 {VJP_I32, negative, "first[4] is -7, "},    {VJP_I64, far, "first[1] is 1099511627776, "},
                 {VJP_F32, fraction, "first[4] is 0.5, wh"}, {VJP_I32, good, NULL}};
    vjp_tensor one = on_device(VJP_F32, 4, shape, ones, sizeof ones),
               y = on_device(VJP_F32, 4, shape, ones, sizeof ones);
    vjp_tensor lse = on_device(VJP_F32, 3, lse_shape, ones, sizeof ones);
    vjp_tensor dk = on_device(VJP_F32, 4, shape, ones, sizeof ones),
               dv = on_device(VJP_F32, 4, shape, ones, sizeof ones);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t bytes = COUNT * (cases[i].dtype == VJP_I64 ? 8 : 4);
        vjp_tensor first = on_device(cases[i].dtype, 2, rows, cases[i].data, bytes);
        for (int backward = 0; backward < 2; backward++) {
            const vjp_attention_attributes *a = WITH(attention, .causal = 1);
            vjp_status status =
                backward ? vjp_attention_backward(device, NULL, &dk, &dv, &one, &one, &one, &one, &y, &lse, &first, a)
                         : vjp_attention_forward(device, &y, &lse, &one, &one, &one, &first, a);
            float after[COUNT];
            if (status != VJP_OK) fail_msg("%s", vjp_error(device));
            assert_int_equal(vjp_synchronize(device), cases[i].said ? VJP_INVALID : VJP_OK);
            if (cases[i].said) {
                assert_non_null(strstr(vjp_error(device), backward ? "attention.backward: " : "attention.forward: "));
                if (!strstr(vjp_error(device), cases[i].said)) fail_msg("%s", vjp_error(device));
                assert_non_null(strstr(vjp_error(device), "; the results are not valid"));
            }
            assert_int_equal(vjp_synchronize(device), VJP_OK);
            assert_int_equal(vjp_download(device, after, backward ? dv.data : y.data, 0, sizeof after), VJP_OK);
            /* Scores are all 1. Rows of the good one: queries 1 and 2 see keys 1 to 2; query 2 sees itself alone. */
            const float expected[COUNT] = {1, 1.5f, 0.5f, 1.5f, 0.5f, 1};
            for (int j = 0; j < COUNT; j++) {
                float want = backward && !cases[i].said ? expected[j] : 1;
                if (!backward || !cases[i].said) assert_true(fabsf(after[j] - want) < 1e-6f);
                assert_true(after[j] >= 0 && after[j] <= 3);
            }
        }
        vjp_free(device, first.data);
    }
    vjp_free(device, one.data), vjp_free(device, y.data), vjp_free(device, lse.data);
    vjp_free(device, dk.data), vjp_free(device, dv.data);
}

/* adamw has the bits of whole weights; a program may round a few weights otherwise than cast does. */
static void weights_in_halves_take_the_same_steps(void **state) {
    (void)state;
    need_device();
    check_halves(device);
    vjp_value x, weight[2 * LAYERS];
    vjp_minimize_result made;
    vjp_graph *g = build_training(false, &x, weight, &made);
    size_t count, far = 0;
    float *whole = train(g, false, false, x, weight, &made, &count),
          *halves = train(g, false, true, x, weight, &made, &count);
    for (size_t k = 0; k < count; k++)
        far += fabsf(whole[k] - halves[k]) > 1e-4f;
    if (far > count / 100) fail_msg("%zu of %zu weights differ", far, count);
    free(whole);
    free(halves);
    vjp_graph_destroy(g);
}

/* What needs a device, as cmocka lists it. */
#define DEVICE_TESTS                                                                                                   \
    cmocka_unit_test(a_bad_index_is_reported_at_the_next_synchronise),                                                 \
        cmocka_unit_test(downloads_come_with_their_event), cmocka_unit_test(calls_that_run_as_one_have_the_same_bits), \
        cmocka_unit_test(a_position_past_the_tables_leaves_its_row_alone),                                             \
        cmocka_unit_test(an_argmax_outside_the_plane_is_reported_and_left_out),                                        \
        cmocka_unit_test(a_bad_step_of_adamw_is_reported_and_writes_nothing),                                          \
        cmocka_unit_test(a_bad_first_of_attention_is_reported), cmocka_unit_test(a_refused_call_writes_nothing),       \
        cmocka_unit_test(weights_in_halves_take_the_same_steps),                                                       \
        cmocka_unit_test(more_memory_than_there_is_is_refused),                                                        \
        cmocka_unit_test(a_program_gives_the_hosts_results_every_run)

#endif
