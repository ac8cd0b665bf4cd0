/* SPDX-License-Identifier: MIT */
/*
 * Tests of what the backends that share src/gpu promise: vjp_warm() and vjp_compile() make every pipeline that a call
 * needs and run nothing; norms are accurate at the end of f32's range. Included after device_tests.h; the file that
 * includes it has a function pipelines_of().
 */
#ifndef VJP_TESTS_GPU_TESTS_H
#define VJP_TESTS_GPU_TESTS_H

#include "backend_here.h"
#include "gpu/gpu.h"
#include "numbers.h"
#include "parts.h"
#include "sample.h"

/* How many pipelines a device has made, and how many launches wait to be submitted. */
static size_t pipelines_of(const vjp_device *of);
static int launches_of(const vjp_device *of);

/* A call with its tensors on the device. */
typedef struct placed_call {
    call host;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    const vjp_tensor *pointer[VJP_MAX_SLOTS];
    void *block[VJP_MAX_SLOTS];
} placed_call;

/* Puts the tensors on the device: each in its own buffer, or all in one, as close together as dtypes allow. */
static void place(placed_call *p, bool together) {
    const call *c = &p->host;
    size_t at = 6; /* not on a word, so that two-byte elements are odd ones */
    memset(p->block, 0, sizeof p->block);
    if (together) assert_int_equal(vjp_alloc(device, c->block_bytes + 1024, &p->block[0]), VJP_OK);
    for (size_t i = 0; i < c->count; i++) {
        p->pointer[i] = NULL;
        if (!c->pointer[i]) continue;
        vjp_tensor *t = &p->tensor[i];
        *t = c->tensor[i];
        size_t bytes = call_bytes(t), size = vjp_dtype_size((vjp_dtype)t->dtype);
        at = (at + size - 1) / size * size;
        if (!together) assert_int_equal(vjp_alloc(device, bytes, &p->block[i]), VJP_OK);
        t->data = p->block[together ? 0 : i];
        t->offset = together ? at : 0;
        const char *host = (const char *)c->tensor[i].data + c->tensor[i].offset;
        assert_int_equal(vjp_upload(device, t->data, t->offset, host, bytes), VJP_OK);
        at += bytes;
        p->pointer[i] = t;
    }
    size_t workspace;
    assert_int_equal(vjp_workspace_size(device, c->op, c->pass, p->pointer, c->count, c->attributes, &workspace),
                     VJP_OK);
    assert_int_equal(vjp_reserve(device, workspace), VJP_OK);
}

static void release(placed_call *p) {
    for (int i = 0; i < VJP_MAX_SLOTS; i++)
        vjp_free(device, p->block[i]);
}

static vjp_status call_on_device(const placed_call *p) {
    return vjp_call(device, p->host.op, p->host.pass, p->pointer, p->host.count, p->host.attributes);
}

/* Whether the outputs on the device are those of the host, byte by byte. */
static bool outputs_are_untouched(const placed_call *p) {
    bool same = true;
    for (size_t i = 0; i < p->host.info->pass[p->host.pass].outputs; i++) {
        if (!p->pointer[i]) continue;
        size_t bytes = call_bytes(&p->tensor[i]);
        char *back = malloc(bytes);
        assert_int_equal(vjp_download(device, back, p->tensor[i].data, p->tensor[i].offset, bytes), VJP_OK);
        same = same && memcmp(back, (char *)p->host.tensor[i].data + p->host.tensor[i].offset, bytes) == 0;
        free(back);
    }
    return same;
}

/* Calls test(call) for every op and pass that these backends have, in `count` dtypes of f32 and bf16. */
static void for_every_call(int count, bool large, void (*test)(placed_call *p)) {
    static const vjp_dtype storage[] = {VJP_F32, VJP_BF16};
    for (size_t op = 0; op < vjp_op_count(); op++) {
        const char *name = vjp_op_describe(vjp_op_at(op))->name;
        for (int i = 0; i < 2 * count; i++) {
            placed_call p;
            const vjp_kernel *kernel = gpu_kernel(vjp_op_at(op), (vjp_pass)(i % 2));
            if (!kernel || !kernel->run) continue;
            vjp_dtype dtype = storage[i / 2];
            assert_true(call_make(&p.host, device, large ? sample_find_large(name) : sample_find(name),
                                  (vjp_pass)(i % 2), (sample_types){dtype, dtype, VJP_I32}, 7));
            test(&p);
            call_free(&p.host);
        }
    }
}

static void check_warm(placed_call *p) {
    const call *c = &p->host;
    place(p, false);
    int launches = launches_of(device);
    if (vjp_warm(device, c->op, c->pass, p->pointer, c->count, c->attributes) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    size_t warm = pipelines_of(device);
    assert_int_equal(launches_of(device), launches);
    if (!outputs_are_untouched(p)) fail_msg("%s: warming wrote an output", c->info->name);
    if (call_on_device(p) != VJP_OK || vjp_synchronize(device) != VJP_OK) fail_msg("%s", vjp_error(device));
    if (pipelines_of(device) != warm) fail_msg("%s: a warmed call makes a pipeline", c->info->name);
    if (outputs_are_untouched(p)) fail_msg("%s: the call after warming wrote nothing", c->info->name);
    release(p);
}

static void a_warmed_call_makes_no_pipeline(void **state) {
    (void)state;
    need_device();
    size_t before = pipelines_of(device);
    for_every_call(2, false, check_warm);
    assert_true(pipelines_of(device) > before + 8); /* this device had none of them before */
}

static void the_first_run_of_a_program_makes_no_pipeline(void **state) {
    (void)state;
    need_device();
    vjp_value index, weight[3], result[4];
    vjp_graph *g = build_model(&index, weight, result);
    size_t before = pipelines_of(device);
    vjp_program *program = start_program(device, g, index, weight, result);
    size_t compiled = pipelines_of(device);
    assert_true(compiled > before);
    if (vjp_program_run(program) != VJP_OK || vjp_synchronize(device) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(pipelines_of(device), compiled);
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
}

/* Fails unless every element of a device's tensor is within 1e-5 of `even` or `odd`, by its index. */
static void expect_alternating(const char *what, const vjp_tensor *t, double even, double odd) {
    size_t count = call_bytes(t) / sizeof(float);
    float *back = malloc(count * sizeof *back);
    assert_int_equal(vjp_download(device, back, t->data, 0, count * sizeof *back), VJP_OK);
    for (size_t i = 0; i < count; i++)
        if (!(fabs((double)back[i] - (i % 2 ? odd : even)) <= 1e-5 * fabs(even)))
            fail_msg("%s of %zu elements: element %zu is %g", what, count, i, (double)back[i]);
    free(back);
}

/* Rows of +-5e37: sums of such values leave f32's range, xh is still +-1. Short rows, and rows that are split.
 */
static void norms_are_right_near_the_largest_number(void **state) {
    (void)state;
    need_device();
    enum { MAX_COUNT = 9002 };
    static const int64_t counts[] = {66, MAX_COUNT};
    static float x[MAX_COUNT], zero[MAX_COUNT], one[MAX_COUNT];
    const double size = 5e37;
    for (int i = 0; i < MAX_COUNT; i++) {
        x[i] = (float)(i % 2 ? -size : size);
        one[i] = 1;
    }
    assert_int_equal(vjp_reserve(device, 1 << 20), VJP_OK);
    for (int k = 0; k < 2; k++) {
        const int64_t row[] = {1, counts[k]}, planes[] = {1, 2, counts[k] / 2}, group[] = {1, 1};
        size_t bytes = (size_t)counts[k] * sizeof *x;
        vjp_tensor tx = on_device(VJP_F32, 2, row, x, bytes), dy = on_device(VJP_F32, 2, row, one, bytes);
        vjp_tensor y = on_device(VJP_F32, 2, row, zero, bytes), dgamma = on_device(VJP_F32, 1, row + 1, zero, bytes);
        vjp_tensor rstd = on_device(VJP_F32, 1, row, zero, sizeof *zero), mean = rstd;
        mean.data = NULL;
        assert_int_equal(vjp_alloc(device, sizeof *zero, &mean.data), VJP_OK);
        assert_int_equal(vjp_layer_norm_forward(device, &y, &mean, &rstd, &tx, NULL, NULL, NULL), VJP_OK);
        expect_alternating("y of layer_norm", &y, 1, -1);
        expect_alternating("rstd of layer_norm", &rstd, 1 / size, 0);
        assert_int_equal(vjp_layer_norm_backward(device, NULL, &dgamma, NULL, &dy, &tx, NULL, NULL, NULL, NULL),
                         VJP_OK);
        expect_alternating("dgamma of layer_norm", &dgamma, 1, -1);
        assert_int_equal(vjp_layer_norm_backward(device, NULL, &dgamma, NULL, &dy, &tx, NULL, &mean, &rstd, NULL),
                         VJP_OK);
        expect_alternating("dgamma of layer_norm with statistics", &dgamma, 1, -1);
        assert_int_equal(vjp_rms_norm_forward(device, &y, &rstd, &tx, NULL, NULL, NULL), VJP_OK);
        expect_alternating("y of rms_norm", &y, 1, -1);
        expect_alternating("rstd of rms_norm", &rstd, 1 / size, 0);
        vjp_tensor gx = vjp_tensor_of(tx.data, VJP_F32, 3, planes), gy = vjp_tensor_of(y.data, VJP_F32, 3, planes);
        vjp_tensor grstd = vjp_tensor_of(rstd.data, VJP_F32, 2, group);
        assert_int_equal(vjp_upload(device, y.data, 0, zero, bytes), VJP_OK);
        if (vjp_group_norm_forward(device, &gy, NULL, &grstd, &gx, NULL, NULL, NULL) != VJP_OK)
            fail_msg("%s", vjp_error(device));
        expect_alternating("y of group_norm", &y, 1, -1);
        expect_alternating("rstd of group_norm", &rstd, 1 / size, 0);
        vjp_free(device, tx.data), vjp_free(device, dy.data), vjp_free(device, y.data);
        vjp_free(device, dgamma.data), vjp_free(device, rstd.data), vjp_free(device, mean.data);
    }
}

/* The f32 of a counter may have been rounded, or is no integer: nothing is written, and both are reported. */
static void a_bad_counter_of_dropout_is_reported_and_writes_nothing(void **state) {
    (void)state;
    need_device();
    const float values[5] = {1, 2, 3, 4, 5}, bad[][2] = {{1.5f, 0}, {3, -33554432.0f}, {-3, 16777216.0f}};
    static const char *const sentences[] = {"dropout.forward: counter[0] is 1.5, which is not an integer",
                                            "dropout.forward: counter[1] is -33554432, which is not an integer", NULL};
    for (int c = 0; c < 3; c++) {
        float back[5];
        vjp_tensor x = on_device(VJP_F32, 1, (int64_t[]){5}, values, sizeof values);
        vjp_tensor counter = on_device(VJP_F32, 1, (int64_t[]){2}, bad[c], sizeof bad[c]);
        assert_int_equal(vjp_dropout_forward(device, &x, &x, &counter, WITH(dropout, .p = 0.5)), VJP_OK);
        assert_int_equal(vjp_synchronize(device), sentences[c] ? VJP_INVALID : VJP_OK);
        if (sentences[c] && !strstr(vjp_error(device), sentences[c])) fail_msg("%s", vjp_error(device));
        assert_int_equal(vjp_download(device, back, x.data, 0, sizeof back), VJP_OK);
        assert_int_equal(memcmp(back, values, sizeof back) == 0, sentences[c] != NULL);
        vjp_free(device, x.data);
        vjp_free(device, counter.data);
    }
}

/* A device may take such a number for 0; clip reads its bits. */
static void clip_takes_the_root_of_a_square_below_1e_38(void **state) {
    (void)state;
    need_device();
    const float square = 1e-44f, zero = 0, max_norm = 1e-25f;
    float norm, scale;
    vjp_tensor squares = on_device(VJP_F32, 0, NULL, &square, sizeof square);
    vjp_tensor a = on_device(VJP_F32, 0, NULL, &zero, sizeof zero), b = on_device(VJP_F32, 0, NULL, &zero, sizeof zero);
    assert_int_equal(vjp_clip_forward(device, &a, &b, &squares, WITH(clip, .max_norm = (double)max_norm)), VJP_OK);
    assert_int_equal(vjp_download(device, &scale, a.data, 0, sizeof scale), VJP_OK);
    assert_int_equal(vjp_download(device, &norm, b.data, 0, sizeof norm), VJP_OK);
    double root = sqrt((double)square);
    assert_true(fabs((double)norm - root) <= 1e-6 * root);
    assert_true(fabs((double)scale - (double)max_norm / root) <= 1e-6 * (double)max_norm / root);
    vjp_free(device, squares.data), vjp_free(device, a.data), vjp_free(device, b.data);
}

/*
 * A target that is neither a class nor ignore_index: its row counts as an ignored one, also in the mean, and its
 * position and value are reported. Both losses of the backward are those of the forward, bit by bit.
 */
static void a_bad_target_is_reported_and_its_row_ignored(void **state) {
    (void)state;
    need_device();
    const float x[5] = {0, 2, 1, 0, 3}, weight[3] = {1, 0, -1}, one = 1, zero[5] = {0};
    const int32_t targets[5] = {0, 7, -100, -3, 1};
    float loss[2], lse[2][5], dx[5];
    double sum = 0, slope[5] = {0};
    for (int i = 0; i < 5; i++) {
        double e[3] = {exp((double)x[i]), 1, exp(-(double)x[i])}, all = e[0] + e[1] + e[2];
        if (i != 0 && i != 4) continue;
        sum += (log(all) - log(e[targets[i]])) / 2;
        slope[i] = ((e[0] - e[2]) / all - (double)weight[targets[i]]) / 2;
    }
    vjp_tensor tx = on_device(VJP_F32, 2, (int64_t[]){5, 1}, x, sizeof x);
    vjp_tensor w = on_device(VJP_F32, 2, (int64_t[]){3, 1}, weight, sizeof weight);
    vjp_tensor target = on_device(VJP_I32, 1, (int64_t[]){5}, targets, sizeof targets);
    vjp_tensor dloss = on_device(VJP_F32, 0, NULL, &one, sizeof one), to_loss[2], to_lse[2];
    vjp_tensor to_dx = on_device(VJP_F32, 2, (int64_t[]){5, 1}, zero, sizeof zero);
    for (int i = 0; i < 2; i++) {
        to_loss[i] = on_device(VJP_F32, 0, NULL, zero, sizeof *zero);
        to_lse[i] = on_device(VJP_F32, 1, (int64_t[]){5}, zero, sizeof zero);
    }
    assert_int_equal(vjp_reserve(device, 1 << 20), VJP_OK);
    for (int i = 0; i < 2; i++) {
        vjp_status status =
            i == 0 ? vjp_linear_cross_entropy_forward(device, &to_loss[0], &to_lse[0], &tx, &w, &target, NULL)
                   : vjp_linear_cross_entropy_backward(device, &to_dx, NULL, &to_loss[1], &to_lse[1], &dloss, &tx, &w,
                                                       &target, NULL);
        if (status != VJP_OK) fail_msg("%s", vjp_error(device));
        assert_int_equal(vjp_synchronize(device), VJP_INVALID);
        if (!strstr(vjp_error(device), "target[1] is 7, outside [0, 3); it was left out"))
            fail_msg("%s", vjp_error(device));
        assert_int_equal(vjp_download(device, &loss[i], to_loss[i].data, 0, sizeof loss[i]), VJP_OK);
        assert_int_equal(vjp_download(device, lse[i], to_lse[i].data, 0, sizeof lse[i]), VJP_OK);
        vjp_free(device, to_loss[i].data), vjp_free(device, to_lse[i].data);
    }
    assert_int_equal(vjp_download(device, dx, to_dx.data, 0, sizeof dx), VJP_OK);
    assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
    assert_memory_equal(lse[0], lse[1], sizeof lse[0]);
    assert_true(fabs((double)loss[0] - sum) <= 1e-6 * sum);
    for (int i = 0; i < 5; i++)
        assert_true(fabs((double)dx[i] - slope[i]) <= 1e-6);
    vjp_free(device, tx.data), vjp_free(device, w.data), vjp_free(device, target.data);
    vjp_free(device, dloss.data), vjp_free(device, to_dx.data);
}

/* Every class has a share of a smoothed target, also one that is impossible; the target here is another one. */
static void a_smoothed_loss_with_an_impossible_class_is_infinite(void **state) {
    (void)state;
    need_device();
    const float logits[3] = {1, -INFINITY, 0}, zero = 0;
    const int32_t first = 0;
    vjp_tensor z = on_device(VJP_F32, 2, (int64_t[]){1, 3}, logits, sizeof logits);
    vjp_tensor target = on_device(VJP_I32, 1, (int64_t[]){1}, &first, sizeof first);
    vjp_tensor to_loss = on_device(VJP_F32, 0, NULL, &zero, sizeof zero);
    for (int smooth = 0; smooth < 2; smooth++) {
        float loss;
        assert_int_equal(
            vjp_cross_entropy_forward(device, &to_loss, NULL, &z, &target,
                                      WITH(cross_entropy, .ignore_index = -100, .label_smoothing = 0.1 * smooth)),
            VJP_OK);
        assert_int_equal(vjp_download(device, &loss, to_loss.data, 0, sizeof loss), VJP_OK);
        assert_true(smooth ? (double)loss == INFINITY : fabs((double)loss - log1p(exp(-1))) <= 1e-6);
    }
    vjp_free(device, z.data), vjp_free(device, target.data), vjp_free(device, to_loss.data);
}

/* Classes whose p is below f32's range have gradients that f32 holds, where dloss is large. */
static void gradients_of_improbable_classes_are_not_lost(void **state) {
    (void)state;
    need_device();
    enum { CLASSES = 3 };
    const float logits[CLASSES] = {1, -94, -119}, zero[CLASSES] = {0}, dloss = 1e37f;
    const int32_t first = 0;
    float d[CLASSES];
    vjp_tensor z = on_device(VJP_F32, 2, (int64_t[]){1, CLASSES}, logits, sizeof logits);
    vjp_tensor target = on_device(VJP_I32, 1, (int64_t[]){1}, &first, sizeof first);
    vjp_tensor from = on_device(VJP_F32, 0, NULL, &dloss, sizeof dloss);
    vjp_tensor lse = on_device(VJP_F32, 1, (int64_t[]){1}, logits, sizeof *logits); /* 1, of the first class alone */
    vjp_tensor dlogits = on_device(VJP_F32, 2, (int64_t[]){1, CLASSES}, zero, sizeof zero);
    for (int saved = 0; saved < 2; saved++) {
        assert_int_equal(
            vjp_cross_entropy_backward(device, &dlogits, &from, &z, &target, saved ? &lse : NULL,
                                       WITH(cross_entropy, .ignore_index = -100, .reduction = VJP_REDUCTION_SUM)),
            VJP_OK);
        assert_int_equal(vjp_download(device, d, dlogits.data, 0, sizeof d), VJP_OK);
        for (int i = 1; i < CLASSES; i++) {
            double right = exp((double)logits[i] - 1) * (double)dloss;
            assert_true(fabs((double)d[i] - right) <= 1e-5 * right);
        }
    }
    vjp_free(device, z.data), vjp_free(device, target.data), vjp_free(device, from.data);
    vjp_free(device, lse.data), vjp_free(device, dlogits.data);
}

/* A target that is certain: the loss is what the other classes leave, 1e-5 of the largest term and less. */
static void the_loss_of_a_certain_target_keeps_its_digits(void **state) {
    (void)state;
    need_device();
    enum { CLASSES = 4 };
    const float logits[CLASSES] = {12, 0, -1, 20.5f}, zero[CLASSES] = {0}, one = 1;
    const int32_t last = CLASSES - 1;
    float loss, d[CLASSES];
    double others = 0;
    for (int i = 0; i < last; i++)
        others += exp((double)logits[i] - (double)logits[last]);
    vjp_tensor z = on_device(VJP_F32, 2, (int64_t[]){1, CLASSES}, logits, sizeof logits);
    vjp_tensor target = on_device(VJP_I32, 1, (int64_t[]){1}, &last, sizeof last);
    vjp_tensor to_loss = on_device(VJP_F32, 0, NULL, zero, sizeof *zero);
    vjp_tensor dloss = on_device(VJP_F32, 0, NULL, &one, sizeof one);
    vjp_tensor dlogits = on_device(VJP_F32, 2, (int64_t[]){1, CLASSES}, zero, sizeof zero);
    assert_int_equal(vjp_cross_entropy_forward(device, &to_loss, NULL, &z, &target, NULL), VJP_OK);
    assert_int_equal(vjp_cross_entropy_backward(device, &dlogits, &dloss, &z, &target, NULL, NULL), VJP_OK);
    assert_int_equal(vjp_download(device, &loss, to_loss.data, 0, sizeof loss), VJP_OK);
    assert_int_equal(vjp_download(device, d, dlogits.data, 0, sizeof d), VJP_OK);
    assert_true(fabs((double)loss - log1p(others)) <= 1e-6 * log1p(others));
    assert_true(fabs((double)d[last] + others / (1 + others)) <= 1e-6 * others);
    vjp_free(device, z.data), vjp_free(device, target.data), vjp_free(device, to_loss.data);
    vjp_free(device, dloss.data), vjp_free(device, dlogits.data);
}

/* ---- The raw product of vjp bench -------------------------------------------------------------------- */

enum { RAW_ROWS = 256, RAW_COLUMNS = 256, RAW_DEPTH = 48 };

/* Small integers, so that every product and every sum is exact, in 16 bits too. */
static int raw_element(int operand, int64_t i) {
    return (int)((i * 7 + i / 11 + operand) % 5) - 2;
}

static int raw_sum(int64_t row, int64_t column) {
    int sum = 0;
    for (int64_t k = 0; k < RAW_DEPTH; k++)
        sum += raw_element(1, row * RAW_DEPTH + k) * raw_element(2, k * RAW_COLUMNS + column);
    return sum;
}

static void compare_raw_product(vjp_dtype dtype) {
    const int64_t size[3][2] = {{RAW_ROWS, RAW_COLUMNS}, {RAW_ROWS, RAW_DEPTH}, {RAW_DEPTH, RAW_COLUMNS}};
    vjp_tensor t[3], on_host[3];
    for (int i = 0; i < 3; i++) {
        int64_t count = size[i][0] * size[i][1];
        size_t bytes = (size_t)count * vjp_dtype_size(dtype);
        void *data;
        assert_int_equal(vjp_alloc(device, bytes, &data), VJP_OK);
        t[i] = vjp_tensor_of(data, dtype, 2, size[i]);
        on_host[i] = vjp_tensor_of(malloc(bytes), dtype, 2, size[i]);
        for (int64_t k = 0; k < count; k++)
            put(&on_host[i], k, i ? raw_element(i, k) : 99);
        assert_int_equal(vjp_upload(device, data, 0, on_host[i].data, bytes), VJP_OK);
    }
    if (device->backend->raw_product(device, &t[0], &t[1], &t[2]) != VJP_OK) fail_msg("%s", vjp_error(device));
    size_t bytes = RAW_ROWS * RAW_COLUMNS * vjp_dtype_size(dtype);
    assert_int_equal(vjp_download(device, on_host[0].data, t[0].data, 0, bytes), VJP_OK);
    for (int64_t i = 0; i < RAW_ROWS * RAW_COLUMNS; i++)
        if (get(&on_host[0], i) != raw_sum(i / RAW_COLUMNS, i % RAW_COLUMNS))
            fail_msg("%s: element %lld is %g instead of %d", vjp_dtype_name(dtype), (long long)i, get(&on_host[0], i),
                     raw_sum(i / RAW_COLUMNS, i % RAW_COLUMNS));
    for (int i = 0; i < 3; i++) {
        vjp_free(device, t[i].data);
        free(on_host[i].data);
    }
}

/* A product of `rows` rows is refused with this sentence. */
static void refuse_raw_product(int64_t rows, const char *why) {
    vjp_tensor t = vjp_tensor_of(NULL, VJP_F32, 2, (int64_t[]){rows, RAW_COLUMNS});
    assert_int_equal(device->backend->raw_product(device, &t, &t, &t), VJP_UNSUPPORTED);
    if (!strstr(vjp_error(device), why)) fail_msg("%s", vjp_error(device));
}

static void raw_products_are_right(void **state) {
    (void)state;
    need_device();
    refuse_raw_product(RAW_ROWS - 1, "multiples of 128 rows");
    compare_raw_product(VJP_F32);
    compare_raw_product(VJP_BF16);
    compare_raw_product(VJP_F16);
}

/* ---- swiglu in a product ----------------------------------------------------------------------------- */

enum { GATE_A, GATE_B, GATE_BIAS, GATE_GATE, GATE_UP, GATE_TWO, GATE_PRE, GATE_ONE, GATE_TENSORS };

/* y of linear with a gate has the bits of linear and swiglu, and so has pre. */
static void compare_gate(vjp_dtype dtype, int64_t rows, int64_t columns, int64_t depth) {
    vjp_tensor t[GATE_TENSORS];
    size_t bytes = (size_t)(rows * columns) * vjp_dtype_size(dtype);
    for (int i = 0; i < GATE_TENSORS; i++) {
        int64_t shape[2] = {i == GATE_B ? depth : rows, i == GATE_A ? depth : columns};
        int ndim = i == GATE_BIAS ? 1 : 2;
        int64_t count = ndim == 1 ? columns : shape[0] * shape[1];
        vjp_tensor host =
            vjp_tensor_of(malloc((size_t)count * vjp_dtype_size(dtype)), dtype, ndim, ndim == 1 ? &columns : shape);
        for (int64_t k = 0; k < count; k++)
            put(&host, k, random_of(3, (uint64_t)i, (uint64_t)k) * (i == GATE_GATE ? 8 : 1));
        t[i] = on_device(dtype, host.ndim, host.shape, host.data, (size_t)count * vjp_dtype_size(dtype));
        free(host.data);
    }
    vjp_status status =
        vjp_linear_forward(device, &t[GATE_UP], NULL, &t[GATE_A], &t[GATE_B], &t[GATE_BIAS], NULL, NULL, NULL);
    if (status == VJP_OK) status = vjp_swiglu_forward(device, &t[GATE_TWO], &t[GATE_GATE], &t[GATE_UP]);
    if (status == VJP_OK)
        status = vjp_linear_forward(device, &t[GATE_ONE], &t[GATE_PRE], &t[GATE_A], &t[GATE_B], &t[GATE_BIAS], NULL,
                                    &t[GATE_GATE], NULL);
    if (status != VJP_OK) fail_msg("%s", vjp_error(device));
    static const int pairs[][2] = {{GATE_TWO, GATE_ONE}, {GATE_UP, GATE_PRE}};
    for (int i = 0; i < 2; i++) {
        char *want = malloc(bytes), *got = malloc(bytes);
        assert_int_equal(vjp_download(device, want, t[pairs[i][0]].data, 0, bytes), VJP_OK);
        assert_int_equal(vjp_download(device, got, t[pairs[i][1]].data, 0, bytes), VJP_OK);
        if (memcmp(want, got, bytes) != 0)
            fail_msg("%s [%lld, %lld] of depth %lld: %s has other bits", vjp_dtype_name(dtype), (long long)rows,
                     (long long)columns, (long long)depth, i ? "pre" : "y");
        free(want);
        free(got);
    }
    for (int i = 0; i < GATE_TENSORS; i++)
        vjp_free(device, t[i].data);
}

static void a_gate_gives_the_bits_of_swiglu(void **state) {
    (void)state;
    need_device();
    static const vjp_dtype dtypes[] = {VJP_F32, VJP_BF16, VJP_F16};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        compare_gate(dtypes[i], 70, 90, 33);
        compare_gate(dtypes[i], 5, 7, 3000); /* parts of the depth, joined */
    }
}

#endif
