/* SPDX-License-Identifier: MIT */
/*
 * The WebGPU backend: its library, what it says where something is missing or broken, memory (parts of words, tensors
 * that share a buffer, arenas larger than a binding), shapes past what a grid dimension or a workgroup holds, and the
 * failures that a device can have. Runs on any adapter; without a GPU Mesa's lavapipe is one.
 */
#include "attributes.h"
#include "gpu/webgpu/device.h"
#include "proof/problem.h"
#include "proof_sink.h"

/* After them: it names a variable `device`. */
#include "device_tests.h"
#include "gpu_tests.h"
#include "rows_apart.h"

static size_t pipelines_of(const vjp_device *of) {
    return ((const webgpu_state *)of->state)->pipelines.count;
}

static int launches_of(const vjp_device *of) {
    return ((const webgpu_state *)of->state)->launches;
}

static void the_library_has_one_entry_and_knows_its_version(void **state) {
    (void)state;
    check_library(VJP_WEBGPU_LIBRARY, "webgpu");
}

static void every_pass_has_kernels_with_or_without_a_gpu(void **state) {
    (void)state;
    every_pass_has_kernels("webgpu");
}

/* ---- What is not there ------------------------------------------------------------------------------- */

static void refused(const char *name, const char *library, const char *words) {
    vjp_device *none;
    char *before = getenv("VJP_WEBGPU_LIB") ? strdup(getenv("VJP_WEBGPU_LIB")) : NULL;
    if (library) setenv("VJP_WEBGPU_LIB", library, 1);
    assert_int_equal(vjp_open(name, NULL, &none), VJP_NO_DEVICE);
    if (!strstr(vjp_error(none), words)) fail_msg("\"%s\" does not say \"%s\"", vjp_error(none), words);
    assert_int_equal(vjp_synchronize(none), VJP_NO_DEVICE);
    vjp_close(none);
    if (before)
        setenv("VJP_WEBGPU_LIB", before, 1);
    else
        unsetenv("VJP_WEBGPU_LIB");
    free(before);
}

static void what_is_missing_is_said(void **state) {
    (void)state;
    refused("webgpu:1", NULL, "unknown device \"webgpu:1\"");
    refused("webgpu", "/nonexistent/libwebgpu.so", "VJP_WEBGPU_LIB is \"/nonexistent/libwebgpu.so\"");
    refused("webgpu", "libm.so.6", "libm.so.6 has no wgpu");
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static void any_bytes_go_up_and_come_down(void **state) {
    (void)state;
    need_device();
    enum { BYTES = 64 };
    unsigned char host[BYTES], back[BYTES], expected[BYTES];
    void *data;
    assert_int_equal(vjp_alloc(device, BYTES, &data), VJP_OK);
    for (unsigned i = 0; i < BYTES; i++)
        host[i] = (unsigned char)(i + 1);
    for (size_t offset = 0; offset < 6; offset++)
        for (size_t bytes = 0; bytes < 12; bytes++) {
            memset(expected, 0xee, BYTES);
            assert_int_equal(vjp_upload(device, data, 0, expected, BYTES), VJP_OK);
            memcpy(expected + offset, host, bytes);
            assert_int_equal(vjp_upload(device, data, offset, host, bytes), VJP_OK);
            assert_int_equal(vjp_download(device, back, data, 0, BYTES), VJP_OK);
            assert_memory_equal(back, expected, BYTES);
            assert_int_equal(vjp_download(device, back, data, offset, bytes), VJP_OK);
            assert_memory_equal(back, expected + offset, bytes);
        }
    vjp_free(device, data);
}

static void memory_that_is_not_the_devices_is_refused(void **state) {
    (void)state;
    need_device();
    float host[4] = {0};
    void *data;
    vjp_tensor x = vjp_tensor_of(host, VJP_F32, 2, (int64_t[]){2, 2}), y = x;
    assert_int_equal(vjp_upload(device, host, 0, host, sizeof host), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "is not memory of this device"));
    assert_int_equal(vjp_layer_norm_forward(device, &y, NULL, NULL, &x, NULL, NULL, NULL), VJP_INVALID);
    assert_int_equal(vjp_alloc(device, 256, &data), VJP_OK);
    assert_int_equal(vjp_download(device, host, data, 250, 16), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "16 bytes at 250 run past a buffer of 256"));
    x.data = y.data = data;
    x.shape[0] = y.shape[0] = 1000; /* more than is there */
    assert_int_equal(vjp_layer_norm_forward(device, &y, NULL, NULL, &x, NULL, NULL, NULL), VJP_INVALID);
    /* The last of a call's launches would meet it: nothing is written before. */
    const float before[4] = {9, 9, 9, 9};
    float after[4];
    vjp_tensor dx = on_device(VJP_F32, 2, (int64_t[]){2, 2}, before, sizeof before);
    vjp_tensor dy = on_device(VJP_F32, 2, (int64_t[]){2, 2}, before, sizeof before);
    vjp_tensor dgamma = vjp_tensor_of(host, VJP_F32, 1, (int64_t[]){2});
    assert_int_equal(vjp_rms_norm_backward(device, &dx, &dgamma, NULL, NULL, &dy, &dy, NULL, NULL, NULL,
                                           WITH(rms_norm, .axes = 1, .eps = 1e-5)),
                     VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "dgamma does not lie in memory of this device"));
    assert_int_equal(vjp_download(device, after, dx.data, 0, sizeof after), VJP_OK);
    assert_memory_equal(after, before, sizeof after);
    vjp_free(device, dx.data);
    vjp_free(device, dy.data);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    vjp_free(device, data);
}

/* The outputs, one after another; freed by the caller. */
static char *results_of(const call *c, bool together, size_t *bytes) {
    placed_call p = {.host = *c};
    char *results = malloc(c->block_bytes);
    place(&p, together);
    if (call_on_device(&p) != VJP_OK) fail_msg("%s", vjp_error(device));
    *bytes = 0;
    for (size_t i = 0; i < c->info->pass[c->pass].outputs; i++) {
        if (!p.pointer[i]) continue;
        size_t size = call_bytes(&p.tensor[i]);
        assert_int_equal(vjp_download(device, results + *bytes, p.tensor[i].data, p.tensor[i].offset, size), VJP_OK);
        *bytes += size;
    }
    release(&p);
    return results;
}

static void check_one_buffer(placed_call *p) {
    static size_t number;
    if (!in_part(number++, 3)) return;
    size_t apart_bytes, together_bytes;
    char *apart = results_of(&p->host, false, &apart_bytes), *together = results_of(&p->host, true, &together_bytes);
    assert_int_equal(apart_bytes, together_bytes);
    assert_true(apart_bytes > 0);
    if (memcmp(apart, together, apart_bytes) != 0)
        fail_msg("%s pass %d differs in one buffer", p->host.info->name, (int)p->host.pass);
    free(apart);
    free(together);
}

static void tensors_in_one_buffer_give_the_same_bits(void **state) {
    (void)state;
    need_device();
    for_every_call(2, false, check_one_buffer);
}

/* An arena of which a binding sees a part: tensors at its two ends. */
static void an_arena_may_be_larger_than_a_binding(void **state) {
    (void)state;
    need_device();
    const webgpu_state *inside = device->state;
    uint64_t most = inside->limits.maxStorageBufferBindingSize, arena = most + (8 << 20);
    if (arena > inside->limits.maxBufferSize || arena > (uint64_t)1 << 30) skip();
    const float host[6] = {1, 2, 4, 3, 3, 3};
    float near[6], far[6];
    void *data;
    assert_int_equal(vjp_alloc(device, arena, &data), VJP_OK);
    vjp_tensor x = vjp_tensor_of(data, VJP_F32, 2, (int64_t[]){2, 3}), y = x, z = x;
    y.offset = 256;
    z.offset = arena - 256;
    assert_int_equal(vjp_upload(device, data, 0, host, sizeof host), VJP_OK);
    assert_int_equal(vjp_rms_norm_forward(device, &y, NULL, &x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-5)),
                     VJP_OK);
    assert_int_equal(vjp_rms_norm_forward(device, &z, NULL, &x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-5)),
                     VJP_OK);
    assert_int_equal(vjp_download(device, near, data, y.offset, sizeof near), VJP_OK);
    assert_int_equal(vjp_download(device, far, data, z.offset, sizeof far), VJP_OK);
    assert_memory_equal(near, far, sizeof near);
    assert_true(fabs((double)near[3] - 1) < 1e-5);

    /* A tensor that no binding holds is refused with the number. */
    vjp_tensor wide = vjp_tensor_of(data, VJP_F32, 2, (int64_t[]){(int64_t)(most / 1024) + 1, 256});
    char words[64];
    snprintf(words, sizeof words, "binds at most %llu", (unsigned long long)most);
    assert_int_equal(
        vjp_rms_norm_forward(device, &wide, NULL, &wide, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-5)),
        VJP_UNSUPPORTED);
    if (!strstr(vjp_error(device), words)) fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    vjp_free(device, data);
}

/*
 * As if a binding held 3072 bytes: x and y, whose rows lie between each other's, go into one window together, though x
 * alone would fit into that of the tables before it. Where no binding holds both, they are refused.
 */
static void slices_of_one_tensor_share_a_binding(void **state) {
    (void)state;
    need_device();
    enum { TIME = 7, DIM = 32, STEP = 96, TABLES = 512, BOTH = TABLES / 4 + TIME * STEP };
    webgpu_state *inside = device->state;
    uint64_t max_bytes = inside->limits.maxStorageBufferBindingSize;
    float host[BOTH], back[BOTH];
    for (int i = 0; i < BOTH; i++)
        host[i] = (float)i;
    vjp_tensor cosine = on_device(VJP_F32, 2, (int64_t[]){TIME, 2}, host, sizeof host), sine = cosine;
    vjp_tensor x = vjp_tensor_of(cosine.data, VJP_F32, 4, (int64_t[]){1, TIME, 1, DIM});
    sine.offset = TABLES / 2;
    x.offset = TABLES;
    x.stride[1] = STEP;
    vjp_tensor y = x;
    y.offset += 64 * sizeof(float);
    for (int fits = 0; fits < 2; fits++) {
        inside->limits.maxStorageBufferBindingSize = fits ? 3072 : 2560;
        vjp_status status = vjp_rope_forward(device, &y, &x, &cosine, &sine, NULL, WITH(rope, .n_rot = 4));
        inside->limits.maxStorageBufferBindingSize = max_bytes;
        if (status != (fits ? VJP_OK : VJP_UNSUPPORTED) ||
            !(fits || strstr(vjp_error(device), "lies between its rows")))
            fail_msg("%s", vjp_error(device));
        assert_int_equal(vjp_download(device, back, cosine.data, 0, sizeof back), VJP_OK);
        for (int i = 0; i < BOTH; i++) {
            int row = (i - TABLES / 4) / STEP, column = (i - TABLES / 4) % STEP - 64;
            if (i >= TABLES / 4 && column >= 0) {
                const float *from = host + TABLES / 4 + row * STEP;
                float a = from[column % 2], b = from[column % 2 + 2];
                float c = host[2 * row + column % 2], d = host[TABLES / 8 + 2 * row + column % 2];
                float rotated = column < 2 ? a * c - b * d : b * c + a * d;
                assert_true((double)back[i] == (double)(!fits ? host[i] : column < 4 ? rotated : from[column]));
            } else {
                assert_true((double)back[i] == (double)host[i]);
            }
        }
    }
    vjp_free(device, cosine.data);
}

/* As if a binding held a kilobyte: every op refuses larger tensors, with both numbers, before it runs anything. */
static void check_refused(placed_call *p) {
    if (p->host.op == vjp_op_find("clip")) return; /* has no large tensor */
    place(p, false);
    vjp_status status = call_on_device(p);
    if (status != VJP_UNSUPPORTED || !strstr(vjp_error(device), " bytes; this device binds at most 1024"))
        fail_msg("%s pass %d: %s", p->host.info->name, (int)p->host.pass, status == VJP_OK ? "" : vjp_error(device));
    assert_int_equal(launches_of(device), 0);
    assert_true(outputs_are_untouched(p));
    release(p);
}

static void a_tensor_past_a_binding_is_refused_before_any_work(void **state) {
    (void)state;
    need_device();
    webgpu_state *inside = device->state;
    uint64_t max_bytes = inside->limits.maxStorageBufferBindingSize;
    inside->limits.maxStorageBufferBindingSize = 1024;
    for_every_call(1, true, check_refused);
    inside->limits.maxStorageBufferBindingSize = max_bytes;
}

/* Batches past 2^24 elements of k are a launch of their own; a sum of 16384 equal terms is right. */
static void attention_splits_its_batches_at_2_to_24(void **state) {
    (void)state;
    need_device();
    enum { BATCH = 17, KEYS = 16384, DIM = 64, EACH = KEYS * DIM };
    const int64_t q_shape[] = {BATCH, 1, 1, DIM}, k_shape[] = {BATCH, KEYS, 1, DIM}, lse_shape[] = {BATCH, 1, 1};
    static float zero[BATCH * DIM], y[BATCH * DIM], lse[BATCH];
    float *values = malloc(BATCH * EACH * sizeof *values);
    for (int i = 0; i < BATCH * EACH; i++)
        values[i] = 0.1f * (float)(1 + i / EACH);
    vjp_tensor q = on_device(VJP_F32, 4, q_shape, zero, sizeof zero),
               out = on_device(VJP_F32, 4, q_shape, zero, sizeof zero);
    vjp_tensor k = on_device(VJP_F32, 4, k_shape, values, BATCH * EACH * sizeof *values);
    vjp_tensor statistic = on_device(VJP_F32, 3, lse_shape, zero, sizeof lse);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    if (vjp_attention_forward(device, &out, &statistic, &q, &k, &k, NULL, WITH(attention, .causal = 0)) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), 2);
    assert_int_equal(vjp_download(device, y, out.data, 0, sizeof y), VJP_OK);
    assert_int_equal(vjp_download(device, lse, statistic.data, 0, sizeof lse), VJP_OK);
    for (int i = 0; i < BATCH * DIM; i++) {
        double want = (double)(0.1f * (float)(1 + i / DIM));
        if (!(fabs((double)y[i] - want) <= 1e-6 * want)) fail_msg("y[%d] is %.9g, not %.9g", i, (double)y[i], want);
    }
    for (int i = 0; i < BATCH; i++)
        assert_true(fabs((double)lse[i] - log(KEYS)) <= 1e-6 * log(KEYS));

    /* With first batch b sees its last b + 1 keys, in either launch; before them the limits, after them the report. */
    int32_t from[BATCH];
    for (int i = 0; i < BATCH; i++)
        from[i] = KEYS - 1 - i;
    vjp_tensor first = on_device(VJP_I32, 2, (int64_t[]){BATCH, 1}, from, sizeof from);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    if (vjp_attention_forward(device, &out, &statistic, &q, &k, &k, &first, WITH(attention, .causal = 1)) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), 4);
    assert_int_equal(vjp_download(device, lse, statistic.data, 0, sizeof lse), VJP_OK);
    for (int i = 0; i < BATCH; i++)
        assert_true(fabs((double)lse[i] - log(i + 1)) <= 1e-6 * log(KEYS));
    vjp_free(device, first.data);
    webgpu_state *inside = device->state;
    int64_t max = inside->max_iterations;
    inside->max_iterations = 40000; /* as on a software GPU with more keys: refused, not wrong */
    assert_int_equal(vjp_attention_forward(device, &out, NULL, &q, &k, &k, NULL, WITH(attention, .causal = 0)),
                     VJP_UNSUPPORTED);
    assert_non_null(strstr(vjp_error(device), "iterations"));
    inside->max_iterations = max;
    vjp_free(device, q.data), vjp_free(device, out.data), vjp_free(device, k.data), vjp_free(device, statistic.data);
    free(values);
}

/* Rows so far apart that two of them span 2^24 elements: the third has a launch of its own. */
static void rows_far_apart_are_split_at_2_to_24(void **state) {
    (void)state;
    need_device();
    enum { BATCH = 3, DIM = 4, STEP = 1 << 23 };
    const int64_t shape[] = {BATCH, 1, 1, DIM};
    const float host[BATCH][DIM] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}}, angles[4] = {0, 0, 1, 1};
    float y[BATCH][DIM] = {{0}};
    vjp_tensor cosine = on_device(VJP_F32, 2, (int64_t[]){1, 2}, angles, sizeof angles), sine = cosine;
    vjp_tensor q = on_device(VJP_F32, 4, shape, host, sizeof host), out = on_device(VJP_F32, 4, shape, y, sizeof y);
    vjp_tensor x = vjp_tensor_of(NULL, VJP_F32, 4, shape);
    sine.offset = 2 * sizeof(float);
    x.stride[0] = STEP;
    assert_int_equal(vjp_alloc(device, ((BATCH - 1) * (size_t)STEP + DIM) * sizeof(float), &x.data), VJP_OK);
    for (size_t i = 0; i < BATCH; i++)
        assert_int_equal(vjp_upload(device, x.data, i * STEP * sizeof(float), host[i], sizeof host[i]), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    if (vjp_rope_forward(device, &x, &x, &cosine, &sine, NULL, NULL) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), 2);
    /* With one key y is its value. */
    if (vjp_attention_forward(device, &out, NULL, &q, &x, &x, NULL, NULL) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), 4);
    assert_int_equal(vjp_download(device, y, out.data, 0, sizeof y), VJP_OK);
    for (int i = 0; i < BATCH; i++)
        for (int k = 0; k < DIM; k++)
            assert_true((double)y[i][k] == (double)(k < 2 ? -host[i][k + 2] : host[i][k - 2]));
    vjp_free(device, cosine.data), vjp_free(device, q.data), vjp_free(device, out.data), vjp_free(device, x.data);
}

/* Elements past 2^24 are a launch of their own, and so are their terms of a sum. */
static void elementwise_ops_and_sums_are_split_at_2_to_24(void **state) {
    (void)state;
    need_device();
    enum { WIDTH = 3, HEIGHT = 5592407, COUNT = WIDTH * HEIGHT, BEYOND = COUNT - GPU_CHUNK };
    const float row[WIDTH] = {1, 2, 4}, zero[WIDTH] = {0};
    const int64_t counter[2] = {7, 11};
    const int64_t shape[2] = {HEIGHT, WIDTH}, columns[1] = {WIDTH}, two[1] = {2};
    uint16_t *bits = calloc(COUNT, sizeof *bits);
    float squares, means[WIDTH];
    assert_true(BEYOND > 0);
    vjp_tensor x = on_device(VJP_BF16, 2, shape, bits, COUNT * sizeof *bits);
    vjp_tensor b = on_device(VJP_F32, 1, columns, row, sizeof row), y = x;
    vjp_tensor sum = on_device(VJP_F32, 0, NULL, zero, sizeof *zero);
    vjp_tensor db = on_device(VJP_F32, 1, columns, zero, sizeof zero);
    vjp_tensor key = on_device(VJP_I64, 1, two, counter, sizeof counter);
    assert_int_equal(vjp_reserve(device, 1 << 20), VJP_OK);

    assert_int_equal(vjp_synchronize(device), VJP_OK);
    if (vjp_add_forward(device, &y, &x, &b, NULL) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), 2);
    assert_int_equal(vjp_add_backward(device, NULL, &db, &y, NULL), VJP_OK);
    assert_int_equal(vjp_sum_squares_forward(device, &sum, &y), VJP_OK);
    assert_int_equal(vjp_download(device, means, db.data, 0, sizeof means), VJP_OK);
    assert_int_equal(vjp_download(device, &squares, sum.data, 0, sizeof squares), VJP_OK);
    for (int i = 0; i < WIDTH; i++)
        assert_true(fabs((double)means[i] - (double)row[i] * HEIGHT) <= 1e-7 * (double)row[i] * HEIGHT);
    assert_true(fabs((double)squares - 21.0 * HEIGHT) <= 1e-7 * 21 * HEIGHT);

    if (vjp_dropout_forward(device, &y, &y, &key, WITH(dropout, .p = 0.5, .stream = 3)) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_download(device, bits, y.data, 0, COUNT * sizeof *bits), VJP_OK);
    const vjp_dropout_key words_of = vjp_dropout_key_of(7, 11, 3);
    static const uint16_t doubled[WIDTH] = {0x4000, 0x4080, 0x4100}; /* 2, 4, 8 */
    for (int64_t i = GPU_CHUNK - 64; i < COUNT; i++) {
        vjp_philox words = vjp_dropout_words(&words_of, (uint64_t)i / 4);
        assert_int_equal(bits[i], words.word[i % 4] < 0x80000000u ? 0 : doubled[i % WIDTH]);
    }
    vjp_free(device, x.data), vjp_free(device, b.data), vjp_free(device, sum.data);
    vjp_free(device, db.data), vjp_free(device, key.data);
    free(bits);
}

/* As many images as have 2^24 elements are a launch: here one, of every 29th row and column. */
static void images_of_conv2d_are_split_at_2_to_24(void **state) {
    (void)state;
    need_device();
    enum { IMAGES = 2, SIDE = 2900, STRIDE = 29, OUT = SIDE / STRIDE, OUTS = 8, PLANE = SIDE * SIDE };
    const int64_t x_shape[4] = {IMAGES, 1, SIDE, SIDE}, y_shape[4] = {IMAGES, OUTS, OUT, OUT};
    const int64_t weight_shape[4] = {OUTS, 1, 1, 1}, bias_shape[1] = {OUTS};
    const float weight[OUTS] = {1, 2, 3, 4, 5, 6, 7, 8}, zero[OUTS] = {0};
    enum { Y_COUNT = IMAGES * OUTS * OUT * OUT };
    uint16_t *bits = malloc((size_t)IMAGES * PLANE * sizeof *bits), *ys = malloc(Y_COUNT * sizeof *ys), weights[OUTS];
    float sums[OUTS];
    assert_true((int64_t)IMAGES * PLANE > GPU_CHUNK);
    for (int64_t i = 0; i < (int64_t)IMAGES * PLANE; i++)
        bits[i] = i < PLANE ? 0x3f80 : 0x4000; /* 1, 2 */
    for (int i = 0; i < OUTS; i++) {
        uint32_t word;
        memcpy(&word, &weight[i], sizeof word);
        weights[i] = (uint16_t)(word >> 16);
    }
    for (int i = 0; i < Y_COUNT; i++)
        ys[i] = 0x3f80;
    vjp_tensor x = on_device(VJP_BF16, 4, x_shape, bits, (size_t)IMAGES * PLANE * sizeof *bits);
    vjp_tensor y = on_device(VJP_BF16, 4, y_shape, ys, Y_COUNT * sizeof *ys), dy = y;
    vjp_tensor w = on_device(VJP_BF16, 4, weight_shape, weights, sizeof weights);
    vjp_tensor dw = on_device(VJP_F32, 4, weight_shape, zero, sizeof zero);
    vjp_tensor db = on_device(VJP_F32, 1, bias_shape, zero, sizeof zero);
    dy.data = NULL;
    assert_int_equal(vjp_alloc(device, Y_COUNT * sizeof *ys, &dy.data), VJP_OK);
    assert_int_equal(vjp_upload(device, dy.data, 0, ys, Y_COUNT * sizeof *ys), VJP_OK);
    vjp_conv2d_attributes every =
        *WITH(conv2d, .stride_h = STRIDE, .stride_w = STRIDE, .dilation_h = 1, .dilation_w = 1, .groups = 1);
    assert_int_equal(vjp_reserve(device, 1 << 20), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    if (vjp_conv2d_forward(device, &y, &x, &w, NULL, &every) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), IMAGES);
    if (vjp_conv2d_backward(device, NULL, &dw, &db, &dy, &x, &w, &every) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_download(device, ys, y.data, 0, Y_COUNT * sizeof *ys), VJP_OK);
    for (int i = 0; i < Y_COUNT; i++) { /* weight, and twice that: the next exponent */
        int channel = i / (OUT * OUT) % OUTS;
        assert_int_equal(ys[i], weights[channel] + (i < Y_COUNT / IMAGES ? 0 : 0x80));
    }
    assert_int_equal(vjp_download(device, sums, dw.data, 0, sizeof sums), VJP_OK);
    for (int i = 0; i < OUTS; i++)
        assert_true(sums[i] == (float)(3 * OUT * OUT));
    assert_int_equal(vjp_download(device, sums, db.data, 0, sizeof sums), VJP_OK);
    for (int i = 0; i < OUTS; i++)
        assert_true(sums[i] == (float)(IMAGES * OUT * OUT));
    if (vjp_conv2d_backward(device, &x, NULL, NULL, &dy, NULL, &w, &every) != VJP_OK) fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_download(device, bits, x.data, 0, (size_t)IMAGES * PLANE * sizeof *bits), VJP_OK);
    for (int64_t i = 0; i < (int64_t)IMAGES * PLANE; i++) {
        bool reached = i % SIDE % STRIDE == 0 && i / SIDE % SIDE % STRIDE == 0;
        if (bits[i] != (reached ? 0x4210 : 0)) fail_msg("dx[%lld] is %x", (long long)i, bits[i]); /* 36 */
    }
    vjp_free(device, x.data), vjp_free(device, y.data), vjp_free(device, dy.data);
    vjp_free(device, w.data), vjp_free(device, dw.data), vjp_free(device, db.data);
    free(bits), free(ys);
}

/* Rows past 2^23 are counted, and logits past 2^24 read and written, by launches of their own. */
static void cross_entropy_is_split_at_2_to_24(void **state) {
    (void)state;
    need_device();
    enum { HEIGHT = (1 << 23) + 1, CLASSES = 2, COUNT = HEIGHT * CLASSES, BEYOND = COUNT - GPU_CHUNK };
    const float zero = 0, one = 1;
    uint16_t *logits = calloc(COUNT, sizeof *logits);
    int32_t *targets = malloc(HEIGHT * sizeof *targets);
    float loss;
    assert_true(BEYOND > 0);
    for (int i = 0; i < HEIGHT; i++)
        targets[i] = -100;
    targets[0] = targets[HEIGHT - 2] = 1; /* three rows take part; the last one has logits 0 and 2 */
    targets[HEIGHT - 1] = 0;
    logits[COUNT - 1] = 0x4000;
    vjp_tensor z = on_device(VJP_BF16, 2, (int64_t[]){HEIGHT, CLASSES}, logits, COUNT * sizeof *logits);
    vjp_tensor target = on_device(VJP_I32, 1, (int64_t[]){HEIGHT}, targets, HEIGHT * sizeof *targets);
    vjp_tensor to_loss = on_device(VJP_F32, 0, NULL, &zero, sizeof zero);
    vjp_tensor dloss = on_device(VJP_F32, 0, NULL, &one, sizeof one);
    assert_int_equal(vjp_reserve(device, 1 << 20), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    if (vjp_cross_entropy_forward(device, &to_loss, NULL, &z, &target, NULL) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), 4); /* rows twice, the sum, and the value of a bad target */
    assert_int_equal(vjp_download(device, &loss, to_loss.data, 0, sizeof loss), VJP_OK);
    double right = (2 * log(2) + 2 + log1p(exp(-2))) / 3, p = 1 / (1 + exp(-2));
    assert_true(fabs((double)loss - right) <= 1e-6 * right);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    if (vjp_cross_entropy_backward(device, &z, &dloss, &z, &target, NULL, NULL) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(launches_of(device), 5); /* rows are counted by two more, and there is no sum */
    assert_int_equal(vjp_download(device, logits, z.data, 0, COUNT * sizeof *logits), VJP_OK);
    const double expected[] = {1.0 / 6, -1.0 / 6, 0, 0, 1.0 / 6, -1.0 / 6, -p / 3, p / 3};
    for (int i = 0; i < 8; i++) {
        uint32_t bits = (uint32_t)logits[i < 4 ? i : COUNT - 8 + i] << 16;
        float d;
        memcpy(&d, &bits, sizeof d);
        assert_true(fabs((double)d - expected[i]) <= 4e-3 * fabs(expected[i]));
    }
    vjp_free(device, z.data), vjp_free(device, target.data), vjp_free(device, to_loss.data);
    vjp_free(device, dloss.data);
    free(logits);
    free(targets);
}

/* The positions of targets are those of all rows, not of a chunk: with 2053 classes a chunk has 384 rows. */
static void a_bad_target_of_a_later_chunk_has_its_position(void **state) {
    (void)state;
    need_device();
    enum { HEIGHT = 600, CLASSES = 2053, BAD = 500 };
    static float x[HEIGHT], weight[CLASSES];
    static int64_t targets[HEIGHT];
    const float zero = 0;
    float loss;
    targets[BAD] = CLASSES;
    vjp_tensor tx = on_device(VJP_F32, 2, (int64_t[]){HEIGHT, 1}, x, sizeof x);
    vjp_tensor w = on_device(VJP_F32, 2, (int64_t[]){CLASSES, 1}, weight, sizeof weight);
    vjp_tensor target = on_device(VJP_I64, 1, (int64_t[]){HEIGHT}, targets, sizeof targets);
    vjp_tensor to_loss = on_device(VJP_F32, 0, NULL, &zero, sizeof zero);
    assert_int_equal(vjp_reserve(device, 8 << 20), VJP_OK);
    if (vjp_linear_cross_entropy_forward(device, &to_loss, NULL, &tx, &w, &target, NULL) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_synchronize(device), VJP_INVALID);
    if (!strstr(vjp_error(device), "target[500] is 2053, outside [0, 2053)")) fail_msg("%s", vjp_error(device));
    assert_int_equal(vjp_download(device, &loss, to_loss.data, 0, sizeof loss), VJP_OK);
    assert_true(fabs((double)loss - log(CLASSES)) <= 1e-6 * log(CLASSES));
    vjp_free(device, tx.data), vjp_free(device, w.data), vjp_free(device, target.data), vjp_free(device, to_loss.data);
}

/* ---- Submissions and pipelines ----------------------------------------------------------------------- */

static void calls_share_a_submission_and_no_pipeline_is_made_twice(void **state) {
    (void)state;
    need_device();
    const webgpu_state *inside = device->state;
    const float host[8] = {1, 2, 3, 4, 5, 6, 7, 9};
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, host, sizeof host);
    vjp_tensor y = on_device(VJP_F32, 2, (int64_t[]){2, 4}, host, sizeof host);
    assert_int_equal(vjp_layer_norm_forward(device, &y, NULL, NULL, &x, NULL, NULL, NULL), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    size_t pipelines = inside->pipelines.count, buffers = inside->buffers.count;
    for (int i = 0; i < 40; i++)
        assert_int_equal(vjp_layer_norm_forward(device, &y, NULL, NULL, &x, NULL, NULL, NULL), VJP_OK);
    assert_int_equal(inside->launches, 40); /* all of them wait together */
    for (int i = 0; i < 3 * WEBGPU_LAUNCHES; i++)
        assert_int_equal(vjp_layer_norm_forward(device, &y, NULL, NULL, &x, NULL, NULL, NULL), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_int_equal(inside->launches, 0);
    assert_int_equal(inside->pipelines.count, pipelines);
    assert_int_equal(inside->buffers.count, buffers);
    vjp_free(device, x.data);
    vjp_free(device, y.data);
}

/* The first bad index is the one of the lowest position, with its own value, over several calls. */
static void bad_indices_of_several_calls_keep_position_and_value_together(void **state) {
    (void)state;
    need_device();
    const float table[2] = {1, 2}, zero[8] = {0};
    const int32_t late[8] = {0, 0, 0, 0, 0, 0, 50, 0}, early[8] = {0, 0, -7, 0, 0, 60, 0, 0};
    vjp_tensor t = on_device(VJP_F32, 2, (int64_t[]){2, 1}, table, sizeof table);
    vjp_tensor a = on_device(VJP_I32, 1, (int64_t[]){8}, late, sizeof late);
    vjp_tensor b = on_device(VJP_I32, 1, (int64_t[]){8}, early, sizeof early);
    vjp_tensor y = on_device(VJP_F32, 2, (int64_t[]){8, 1}, zero, sizeof zero);
    for (int order = 0; order < 2; order++) {
        assert_int_equal(vjp_gather_forward(device, &y, &t, order ? &a : &b, NULL), VJP_OK);
        assert_int_equal(vjp_gather_forward(device, &y, &t, order ? &b : &a, NULL), VJP_OK);
        assert_int_equal(vjp_synchronize(device), VJP_INVALID);
        if (!strstr(vjp_error(device), "index[2] is -7")) fail_msg("%s", vjp_error(device));
        assert_int_equal(vjp_synchronize(device), VJP_OK);
    }
    vjp_free(device, t.data), vjp_free(device, a.data), vjp_free(device, b.data), vjp_free(device, y.data);
}

/* ---- Failures of the device -------------------------------------------------------------------------- */

/* A device of the backend's files that are linked here, so that its inside can be called. */
static vjp_device *open_inside(void) {
    vjp_device *own;
    assert_int_equal(vjp_device_create("webgpu", &own), VJP_OK);
    if (vjp_device_start(own, backend_here(), NULL) != VJP_OK) fail_msg("%s", vjp_error(own));
    return own;
}

static void a_shader_that_does_not_compile_says_why(void **state) {
    (void)state;
    need_device();
    vjp_device *own = open_inside();
    gpu_launch l = {.shader = "tools", .kernel = "no_such_kernel"};
    assert_int_equal(webgpu_enqueue(own, &l, 1), VJP_DEVICE_FAILED);
    assert_non_null(strstr(vjp_error(own), "tools.wgsl, no_such_kernel():"));
    assert_non_null(strstr(strstr(vjp_error(own), "():"), "no_such_kernel"));
    assert_int_equal(vjp_synchronize(own), VJP_OK); /* and the device still works */
    vjp_close(own);
}

static void a_lost_device_is_a_status_everywhere(void **state) {
    (void)state;
    need_device();
    vjp_device *own = open_inside();
    webgpu_state *inside = own->state;
    float host[4] = {1, 2, 3, 4};
    void *data, *more;
    assert_int_equal(vjp_alloc(own, sizeof host, &data), VJP_OK);
    vjp_tensor x = vjp_tensor_of(data, VJP_F32, 2, (int64_t[]){2, 2});
    assert_int_equal(vjp_rms_norm_forward(own, &x, NULL, &x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-5)),
                     VJP_OK);
    inside->api.DeviceDestroy(inside->device);
    for (int i = 0; i < 100 && !inside->lost; i++)
        inside->api.InstanceProcessEvents(inside->instance);
    assert_int_equal(vjp_download(own, host, data, 0, sizeof host), VJP_DEVICE_FAILED);
    if (!strstr(vjp_error(own), "lost")) fail_msg("%s", vjp_error(own));
    assert_int_equal(vjp_synchronize(own), VJP_DEVICE_FAILED);
    assert_int_equal(vjp_upload(own, data, 0, host, sizeof host), VJP_DEVICE_FAILED);
    assert_int_equal(vjp_alloc(own, 64, &more), VJP_DEVICE_FAILED);
    assert_int_equal(vjp_rms_norm_forward(own, &x, NULL, &x, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-5)),
                     VJP_DEVICE_FAILED);
    assert_int_equal(host[0], 1);
    vjp_free(own, data);
    vjp_close(own);
}

/* Memory that the implementation does not map: its own message comes back, and the device still works. */
static void a_mapping_that_fails_is_a_status(void **state) {
    (void)state;
    need_device();
    vjp_device *own = open_inside();
    webgpu_state *inside = own->state;
    float host[4] = {1, 2, 3, 4}, back[4];
    void *data;
    assert_int_equal(vjp_alloc(own, sizeof host, &data), VJP_OK);
    assert_int_equal(vjp_upload(own, data, 0, host, sizeof host), VJP_OK);
    /* A buffer that may be copied to and not mapped. */
    WGPUBufferDescriptor descriptor = {.usage = WGPUBufferUsage_CopyDst, .size = 65536};
    inside->read_back = inside->api.DeviceCreateBuffer(inside->device, &descriptor);
    inside->read_back_bytes = 65536;
    assert_int_equal(vjp_download(own, back, data, 0, sizeof back), VJP_DEVICE_FAILED);
    assert_true(strlen(vjp_error(own)) > strlen("webgpu: mapping: "));
    inside->api.BufferRelease(inside->read_back);
    inside->read_back = NULL;
    inside->read_back_bytes = 0;
    assert_int_equal(vjp_download(own, back, data, 0, sizeof back), VJP_OK);
    assert_memory_equal(back, host, sizeof host);
    vjp_free(own, data);
    vjp_close(own);
}

/* ---- Proof ------------------------------------------------------------------------------------------- */

/* Rows past a grid dimension, and columns past a workgroup: what has broken others. */
static const struct {
    const char *op, *text;
} shapes[] = {
    {"layer_norm", "x=[65537,3]"},
    {"layer_norm", "x=[3,4097]"},
    {"layer_norm", "x=[5,9001]"},
    {"rms_norm", "x=[70001,2]"},
    {"rms_norm", "x=[2,257] gamma=f32"},
    {"rms_norm", "x=[9,1000]"},
    {"group_norm", "x=[2,12,65] groups=3"},
    {"group_norm", "x=[1,4,4097] groups=2"},
    {"group_norm", "x=[1100,64,3] groups=64"},
    {"group_norm", "x=[3,257,10] groups=1 layout=channels_last"},
    {"rope", "x=[70001,1,2] cosine=[70001,1]"},
    {"rope", "x=[65,3,130] cosine=[65,65]"},
    {"cumsum", "x=[65537,3]"},
    {"cumsum", "x=[3,4097]"},
    {"cumsum", "x=[2,1000,65] axis=1"},
    {"gather", "table=[11,257] index=[1000]"},
    {"gather", "table=[70001,2] index=[65537]"},
    {"maxpool2d", "x=[1,65,17,33] kernel_h=3 kernel_w=3 stride_h=2 stride_w=2 padding_h=1 padding_w=1"},
    {"maxpool2d", "x=[1,9,257,257]"},
    {"linear", "a=[65,257] b=[257,130] activation=gelu_erf"},
    {"linear", "a=[70001,3] b=[3,2]"},
    {"linear", "a=[64,100,70] b=[64,70,100]"},
    {"linear", "a=[64,100,70] b=[64,100,70] transpose_b=1"},
    {"conv2d", "x=[1,640,10,10] weight=[6400,10,1,1] groups=64"},
    {"conv2d", "x=[1,10,10,640] weight=[6400,1,1,10] groups=64 layout=channels_last"},
    {"conv2d", "x=[1,70,9,8] weight=[66,70,3,3] padding_h=1 padding_w=1"},
    {"conv2d", "x=[1,9,8,70] weight=[66,3,3,70] padding_h=1 padding_w=1 layout=channels_last"},
    {"conv2d", "x=[3,18,15,16] weight=[20,9,3,2] groups=2 stride_h=3 stride_w=2 padding_h=2 dilation_h=2"},
    {"conv2d", "x=[3,15,16,18] weight=[20,3,2,9] groups=2 stride_h=3 stride_w=2 padding_h=2 layout=channels_last"},
    {"conv2d", "x=[5,8,21,20] weight=[9,8,1,1]"},
    {"conv2d", "x=[3,70,71,2] weight=[2,2,2,1] groups=2 stride_w=2 layout=channels_last"},
    {"add", "a=[70001,3] b=[3] param=f32"},
    {"mul", "a=[70,4097] b=[4097]"},
    {"mean", "x=[3,70001] axis=1"},
    {"attention", "q=[1,3,1,7] k=[1,4200,1,7] causal=0"},
    {"attention", "q=[1,6,1,300] k=[1,7,1,300]"},
    {"attention", "q=[1,2200,1,3] k=[1,9,1,3] causal=0"},
    {"attention", "q=[3,70,4,8] k=[3,90,2,8] first=i32"},
    {"attention", "q=[2,140,2,65] k=[2,140,1,65] first=i64 window=30"},
    {"cross_entropy", "logits=[70001,2] target=[70001] data=ignored label_smoothing=0.1"},
    {"cross_entropy", "logits=[5,9001] target=[5] label_smoothing=0.1"},
    {"linear_cross_entropy", "x=[600,2] weight=[2053,2] target=[600]"},
};

static void compare(const char *op, const char *text, vjp_dtype dtype) {
    proof_tally tally = {0};
    proof_plan plan = {.dtype = (int)dtype, .row = proof_sink, .context = &tally};
    proof_setup setup;
    char error[TEXT_ERROR];
    if (!proof_setup_read(&setup, vjp_op_find(op), text, error)) fail_msg("%s", error);
    proof_compare_setup(&plan, device, &setup);
    assert_true(tally.rows > 0);
    assert_int_equal(tally.failed, 0);
}

static void shapes_that_have_broken_others(void **state) {
    (void)state;
    need_device();
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (in_part(i / 2, 16)) compare(shapes[i].op, shapes[i].text, i % 2 ? VJP_BF16 : VJP_F32);
}

/* As if a grid dimension held seven workgroups: what a real one holds would take a software GPU minutes to pass. */
static void more_groups_than_a_grid_dimension_holds_use_a_second_one(void **state) {
    (void)state;
    need_device();
    webgpu_state *inside = device->state;
    uint32_t most = inside->limits.maxComputeWorkgroupsPerDimension;
    assert_true(most >= 65535);
    inside->limits.maxComputeWorkgroupsPerDimension = 7;
    compare("layer_norm", "x=[61,257]", VJP_F32);
    compare("gather", "table=[11,257] index=[100]", VJP_F32);
    compare("linear", "a=[130,17] b=[17,130]", VJP_F32);
    compare("conv2d", "x=[3,8,15,16] weight=[9,8,2,2] stride_h=2 stride_w=2", VJP_F32);
    compare("attention", "q=[5,9,2,8] k=[5,9,2,8]", VJP_F32);
    compare("cross_entropy", "logits=[61,257] target=[61]", VJP_F32);
    inside->limits.maxComputeWorkgroupsPerDimension = most;
}

int main(void) {
    device_start("webgpu");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library_has_one_entry_and_knows_its_version),
        cmocka_unit_test(every_pass_has_kernels_with_or_without_a_gpu),
        cmocka_unit_test(what_is_missing_is_said),
        cmocka_unit_test(a_warmed_call_makes_no_pipeline), /* before others have made them */
        cmocka_unit_test(the_first_run_of_a_program_makes_no_pipeline),
        cmocka_unit_test(norms_are_right_near_the_largest_number),
        cmocka_unit_test(a_bad_counter_of_dropout_is_reported_and_writes_nothing),
        cmocka_unit_test(clip_takes_the_root_of_a_square_below_1e_38),
        cmocka_unit_test(a_bad_target_is_reported_and_its_row_ignored),
        cmocka_unit_test(the_loss_of_a_certain_target_keeps_its_digits),
        cmocka_unit_test(gradients_of_improbable_classes_are_not_lost),
        cmocka_unit_test(a_smoothed_loss_with_an_impossible_class_is_infinite),
        cmocka_unit_test(slices_of_one_tensor_give_the_bits_of_packed_ones),
        cmocka_unit_test(raw_products_are_right),
        cmocka_unit_test(a_gate_gives_the_bits_of_swiglu),
        DEVICE_TESTS,
        cmocka_unit_test(any_bytes_go_up_and_come_down),
        cmocka_unit_test(memory_that_is_not_the_devices_is_refused),
        cmocka_unit_test(tensors_in_one_buffer_give_the_same_bits),
        cmocka_unit_test(an_arena_may_be_larger_than_a_binding),
        cmocka_unit_test(slices_of_one_tensor_share_a_binding),
        cmocka_unit_test(a_tensor_past_a_binding_is_refused_before_any_work),
        cmocka_unit_test(elementwise_ops_and_sums_are_split_at_2_to_24),
        cmocka_unit_test(images_of_conv2d_are_split_at_2_to_24),
        cmocka_unit_test(attention_splits_its_batches_at_2_to_24),
        cmocka_unit_test(rows_far_apart_are_split_at_2_to_24),
        cmocka_unit_test(cross_entropy_is_split_at_2_to_24),
        cmocka_unit_test(a_bad_target_of_a_later_chunk_has_its_position),
        cmocka_unit_test(calls_share_a_submission_and_no_pipeline_is_made_twice),
        cmocka_unit_test(bad_indices_of_several_calls_keep_position_and_value_together),
        cmocka_unit_test(a_shader_that_does_not_compile_says_why),
        cmocka_unit_test(a_lost_device_is_a_status_everywhere),
        cmocka_unit_test(a_mapping_that_fails_is_a_status),
        cmocka_unit_test(shapes_that_have_broken_others),
        cmocka_unit_test(more_groups_than_a_grid_dimension_holds_use_a_second_one),
    };
    int failed = cmocka_run_group_tests_name("webgpu", tests, NULL, NULL);
    vjp_close(device);
    return failed;
}
