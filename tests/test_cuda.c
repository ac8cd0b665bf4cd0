/* SPDX-License-Identifier: MIT */
/*
 * The CUDA backend as a library of its own. What needs no GPU runs everywhere: its entry, the kernels it lists, and the
 * sentence that says why there is no device. With a GPU: every pass recorded in a CUDA graph and replayed, bad indices
 * found on the device, and refusals that write nothing. Where there is none, those are skipped, and it says so.
 */
#include <fnmatch.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device_tests.h"

#include "attention_accuracy.h"
#include "convolutions.h"

static void the_library_has_one_entry_and_knows_its_version(void **state) {
    (void)state;
    check_library(VJP_CUDA_LIBRARY, "cuda");
}

static void every_pass_has_kernels_with_or_without_a_gpu(void **state) {
    (void)state;
    every_pass_has_kernels("cuda");
}

static void a_name_that_is_none_is_refused_with_a_sentence(void **state) {
    (void)state;
    static const char *const names[] = {"cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda:99999"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        vjp_device *none;
        assert_int_equal(vjp_open(names[i], NULL, &none), VJP_NO_DEVICE);
        assert_non_null(strstr(vjp_error(none), names[i]));
        vjp_close(none);
    }
}

static void without_a_gpu_the_sentence_says_why(void **state) {
    (void)state;
    if (device) skip();
    assert_true(strstr(why_none, "NVIDIA") || strstr(why_none, "CUDA"));
    vjp_device *none;
    assert_int_equal(vjp_open("cuda:0", NULL, &none), VJP_NO_DEVICE);
    assert_int_equal(vjp_synchronize(none), VJP_NO_DEVICE);
    void *data;
    assert_int_equal(vjp_alloc(none, 64, &data), VJP_NO_DEVICE);
    vjp_close(none);
}

/* An element of a b, where a is 1 + 2^-12 throughout and b is 1: all of it is exact in f32. */
static float sum_with(const char *products) {
    enum { SIDE = 256, COUNT = SIDE * SIDE };
    static float a[COUNT], b[COUNT], y[COUNT];
    static const int64_t shape[2] = {SIDE, SIDE};
    vjp_device *own;
    for (int i = 0; i < COUNT; i++) {
        a[i] = 1 + 0x1p-12f;
        b[i] = 1;
    }
    vjp_tensor on[3] = {on_device(VJP_F32, 2, shape, y, sizeof y), on_device(VJP_F32, 2, shape, a, sizeof a),
                        on_device(VJP_F32, 2, shape, b, sizeof b)};
    assert_int_equal(
        vjp_open("cuda", &(vjp_options){.struct_size = sizeof(vjp_options), .matrix_products = products}, &own),
        VJP_OK);
    char used[8];
    assert_int_equal(vjp_device_property(own, "matrix_products", used, sizeof used), VJP_OK);
    assert_string_equal(used, products ? products : "f32");
    const vjp_tensor *tensors[LINEAR_GATE + 1] = {[LINEAR_Y] = &on[0], [LINEAR_A] = &on[1], [LINEAR_B] = &on[2]};
    assert_int_equal(vjp_call(own, &vjp_op_linear, VJP_FORWARD, tensors, LINEAR_GATE + 1, NULL), VJP_OK);
    assert_int_equal(vjp_download(own, y, on[0].data, 0, sizeof y), VJP_OK);
    vjp_close(own);
    for (int i = 0; i < 3; i++)
        vjp_free(device, on[i].data);
    for (int i = 1; i < COUNT; i++)
        assert_true(y[i] == y[0]);
    return y[0];
}

/* TF32 has ten bits of fraction: it takes 1 + 2^-12 for 1. */
static void products_are_f32_unless_tf32_is_asked_for(void **state) {
    (void)state;
    need_device();
    assert_true(sum_with(NULL) == 256.0625f);
    assert_true(sum_with("f32") == 256.0625f);
    assert_true(sum_with("tf32") == 256);
    vjp_device *none;
    assert_int_equal(
        vjp_open("cuda", &(vjp_options){.struct_size = sizeof(vjp_options), .matrix_products = "f16"}, &none),
        VJP_INVALID);
    assert_non_null(strstr(vjp_error(none), "f32 or tf32"));
    vjp_close(none);
}

/* ---- Devices, streams, events, forks ----------------------------------------------------------------- */

static void devices_are_counted_and_described(void **state) {
    (void)state;
    size_t count = vjp_device_count("cuda");
    char text[VJP_SUMMARY_BYTES] = "", little[5] = "....";
    assert_int_equal(count > 0, device != NULL);
    assert_int_equal(vjp_device_describe("cuda", count, text, sizeof text), VJP_NO_DEVICE);
    assert_non_null(strstr(text, device ? "numbered from 0" : "NVIDIA"));
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(vjp_device_describe("cuda", i, text, sizeof text), VJP_OK);
        assert_non_null(strstr(text, "compute capability"));
    }
    vjp_device_describe("cuda", count, little, sizeof little);
    assert_int_equal(strlen(little), sizeof little - 1);
}

/* CUDA's handle of the calling thread's default stream, which needs no creating. */
#define THREAD_STREAM ((void *)2)

/* A bad index is reported by the wait for an event, also from another stream, and copies follow the calls on theirs. */
static void calls_run_on_the_stream_that_was_set(void **state) {
    (void)state;
    need_device();
    const float table[2] = {3, 4}, zeros[3] = {0};
    const int32_t index[3] = {1, 5, 0};
    vjp_tensor t = on_device(VJP_F32, 2, (int64_t[]){2, 1}, table, sizeof table);
    vjp_tensor i = on_device(VJP_I32, 1, (int64_t[]){3}, index, sizeof index);
    vjp_tensor y = on_device(VJP_F32, 2, (int64_t[]){3, 1}, zeros, sizeof zeros);
    const vjp_tensor *tensors[] = {[GATHER_Y] = &y, [GATHER_TABLE] = &t, [GATHER_INDEX] = &i};
    for (int own = 0; own < 2; own++) {
        vjp_event *done = NULL;
        float result[3] = {9, 9, 9};
        assert_int_equal(vjp_set_stream(device, THREAD_STREAM), VJP_OK);
        assert_int_equal(vjp_upload_async(device, y.data, 0, zeros, sizeof zeros), VJP_OK);
        assert_int_equal(vjp_call(device, &vjp_op_gather, VJP_FORWARD, tensors, GATHER_INDEX + 1, NULL), VJP_OK);
        assert_int_equal(vjp_download_async(device, result, y.data, 0, sizeof result), VJP_OK);
        assert_int_equal(vjp_event_record(device, &done), VJP_OK);
        if (own) assert_int_equal(vjp_set_stream(device, NULL), VJP_OK);
        assert_int_equal(vjp_event_wait(device, done), VJP_INVALID);
        assert_non_null(strstr(vjp_error(device), "gather.forward: index[1] is 5, outside [0, 2)"));
        vjp_event_destroy(device, done);
        assert_memory_equal(result, ((float[]){4, 0, 3}), sizeof result);
        assert_int_equal(vjp_synchronize(device), VJP_OK);
    }
    vjp_free(device, t.data), vjp_free(device, i.data), vjp_free(device, y.data);
}

/* ---- Several calls at once --------------------------------------------------------------------------- */

enum { ROPES = 11, MOST_HEADS = 32, HEAD = 64, ROPE_TIME = 48, ROPE_ELEMENTS = 2 * ROPE_TIME * MOST_HEADS * HEAD };

typedef struct rope_case {
    vjp_dtype storage, table;
    int32_t pairing;
    int64_t n_rot;
    bool positions;
} rope_case;

/* Finite numbers of that dtype. */
static void fill_finite(vjp_dtype dtype, size_t count, uint32_t seed, void *to) {
    for (size_t i = 0; i < count; i++) {
        uint32_t random = (uint32_t)(i * 2654435761u + seed * 40503u);
        if (dtype == VJP_F32)
            ((float *)to)[i] = (float)(random >> 8) * 0x1p-24f - 0.5f;
        else
            ((uint16_t *)to)[i] = (uint16_t)(0x3800 | (random >> 20 & 0x83ff));
    }
}

static void check_ropes(const rope_case *c, vjp_pass pass) {
    static float content[ROPE_ELEMENTS + 1], one[ROPE_ELEMENTS + 1], many[ROPE_ELEMENTS + 1];
    static const int64_t heads[ROPES] = {32, 8, 8, 1, 3, 32, 16, 2, 8, 4, 7};
    size_t size = vjp_dtype_size(c->storage), bytes = (ROPE_ELEMENTS + 1) * size;
    int32_t positions[ROPE_TIME];
    for (int i = 0; i < ROPE_TIME; i++)
        positions[i] = i * 5 % ROPE_TIME;
    vjp_tensor table[2], place = on_device(VJP_I32, 1, (int64_t[]){ROPE_TIME}, positions, sizeof positions);
    for (int i = 0; i < 2; i++) {
        const int64_t shape[] = {ROPE_TIME, c->n_rot / 2};
        size_t count = (size_t)(ROPE_TIME * c->n_rot / 2);
        fill_finite(c->table, count, 99 + (uint32_t)i, content);
        table[i] = on_device(c->table, 2, shape, content, count * vjp_dtype_size(c->table));
    }
    vjp_tensor x[ROPES], y[2][ROPES];
    const vjp_tensor *list[2][ROPES * (ROPE_POSITIONS + 1)];
    for (int k = 0; k < ROPES; k++) {
        const int64_t shape[] = {2, c->positions ? ROPE_TIME : ROPE_TIME - k, heads[k], HEAD};
        fill_finite(c->storage, ROPE_ELEMENTS + 1, (uint32_t)k, content);
        x[k] = on_device(c->storage, 4, shape, content, bytes);
        if (k == 4) x[k].offset = size; /* not aligned: it runs alone */
        for (int i = 0; i < 2; i++) {
            memset(one, 0x55, bytes);
            y[i][k] = on_device(c->storage, 4, shape, one, bytes);
            if (k == 9) y[i][k].flags = VJP_ACCUMULATE; /* so does this one */
            const vjp_tensor *row[] = {[ROPE_Y] = &y[i][k],
                                       [ROPE_X] = &x[k],
                                       [ROPE_COSINE] = &table[0],
                                       [ROPE_SINE] = &table[1],
                                       [ROPE_POSITIONS] = c->positions ? &place : NULL};
            memcpy(list[i] + k * (ROPE_POSITIONS + 1), row, sizeof row);
        }
    }
    const vjp_rope_attributes attributes = {
        .struct_size = sizeof attributes, .n_rot = c->n_rot, .pairing = (vjp_pairing)c->pairing};
    for (int k = 0; k < ROPES; k++)
        assert_int_equal(
            vjp_call(device, &vjp_op_rope, pass, list[0] + k * (ROPE_POSITIONS + 1), ROPE_POSITIONS + 1, &attributes),
            VJP_OK);
    assert_int_equal(vjp_call_many(device, &vjp_op_rope, pass, list[1], ROPE_POSITIONS + 1, ROPES, &attributes),
                     VJP_OK);
    for (int k = 0; k < ROPES; k++) {
        assert_int_equal(vjp_download(device, one, y[0][k].data, 0, bytes), VJP_OK);
        assert_int_equal(vjp_download(device, many, y[1][k].data, 0, bytes), VJP_OK);
        assert_memory_equal(one, many, bytes);
        vjp_free(device, x[k].data), vjp_free(device, y[0][k].data), vjp_free(device, y[1][k].data);
    }
    vjp_free(device, table[0].data), vjp_free(device, table[1].data), vjp_free(device, place.data);
}

/* One launch has the bits of a launch for each tensor, whatever path they take. */
static void ropes_of_several_tensors_are_those_of_each(void **state) {
    (void)state;
    need_device();
    static const vjp_dtype storages[] = {VJP_F32, VJP_BF16, VJP_F16};
    for (size_t t = 0; t < 3; t++)
        for (int bits = 0; bits < 32; bits++) {
            rope_case c = {.storage = storages[t],
                           .table = bits & 1 ? VJP_F32 : storages[t],
                           .pairing = bits & 2 ? VJP_PAIRING_INTERLEAVED : VJP_PAIRING_HALF,
                           .n_rot = bits & 4 ? HEAD / 2 : HEAD,
                           .positions = bits & 8};
            check_ropes(&c, bits & 16 ? VJP_BACKWARD : VJP_FORWARD);
        }
}

enum { UPDATES = 7, MOST_UPDATED = 5000 };

/* Steps whose gradients have two types, in turn, are merged by type, and have the bits of a step of each tensor. */
static void steps_of_several_kinds_are_those_of_each(void **state) {
    (void)state;
    need_device();
    static const int64_t counts[UPDATES] = {4096, 64, 5000, 3, 1, 2048, 7};
    const float rate = 0.125f;
    const int64_t number = 3;
    vjp_tensor lr = on_device(VJP_F32, 0, NULL, &rate, sizeof rate);
    vjp_tensor step = on_device(VJP_I64, 0, NULL, &number, sizeof number);
    float content[MOST_UPDATED], one[MOST_UPDATED], many[MOST_UPDATED];
    for (int is_adamw = 0; is_adamw < 2; is_adamw++) {
        vjp_tensor w[2][UPDATES], m[2][UPDATES], v[2][UPDATES], g[UPDATES];
        const vjp_tensor *adamw[2][UPDATES][ADAMW_SCALE + 1] = {0}, *sgd[2][UPDATES][SGD_SCALE + 1] = {0};
        for (int k = 0; k < UPDATES; k++) {
            size_t bytes = (size_t)counts[k] * sizeof(float);
            vjp_dtype type = k % 2 ? VJP_F32 : VJP_BF16;
            fill_finite(type, (size_t)counts[k], 7 + (uint32_t)k, content);
            g[k] = on_device(type, 1, &counts[k], content, (size_t)counts[k] * vjp_dtype_size(type));
            for (int i = 0; i < 2; i++) {
                fill_finite(VJP_F32, (size_t)counts[k], 70 + (uint32_t)k, content);
                w[i][k] = on_device(VJP_F32, 1, &counts[k], content, bytes);
                memset(content, 0, bytes);
                m[i][k] = on_device(VJP_F32, 1, &counts[k], content, bytes);
                v[i][k] = on_device(VJP_F32, 1, &counts[k], content, bytes);
                const vjp_tensor *of_adamw[] = {
                    [ADAMW_W_OUT] = &w[i][k], [ADAMW_M_OUT] = &m[i][k], [ADAMW_V_OUT] = &v[i][k], [ADAMW_W] = &w[i][k],
                    [ADAMW_M] = &m[i][k],     [ADAMW_V] = &v[i][k],     [ADAMW_G] = &g[k],        [ADAMW_LR] = &lr,
                    [ADAMW_STEP] = &step,     [ADAMW_SCALE] = NULL};
                const vjp_tensor *of_sgd[] = {
                    [SGD_W_OUT] = &w[i][k], [SGD_W] = &w[i][k], [SGD_G] = &g[k], [SGD_LR] = &lr, [SGD_SCALE] = NULL};
                memcpy(adamw[i][k], of_adamw, sizeof of_adamw);
                memcpy(sgd[i][k], of_sgd, sizeof of_sgd);
            }
        }
        const vjp_op *op = is_adamw ? &vjp_op_adamw : &vjp_op_sgd;
        size_t slots = is_adamw ? ADAMW_SCALE + 1 : SGD_SCALE + 1;
        for (int k = 0; k < UPDATES; k++)
            assert_int_equal(vjp_call(device, op, VJP_FORWARD, is_adamw ? adamw[0][k] : sgd[0][k], slots, NULL),
                             VJP_OK);
        assert_int_equal(
            vjp_call_many(device, op, VJP_FORWARD, is_adamw ? adamw[1][0] : sgd[1][0], slots, UPDATES, NULL), VJP_OK);
        for (int k = 0; k < UPDATES; k++) {
            size_t bytes = (size_t)counts[k] * sizeof(float);
            fill_finite(VJP_F32, (size_t)counts[k], 70 + (uint32_t)k, content);
            assert_int_equal(vjp_download(device, one, w[0][k].data, 0, bytes), VJP_OK);
            assert_int_equal(vjp_download(device, many, w[1][k].data, 0, bytes), VJP_OK);
            assert_memory_equal(one, many, bytes);
            assert_memory_not_equal(one, content, bytes); /* it took a step */
            for (int i = 0; i < 2; i++)
                vjp_free(device, w[i][k].data), vjp_free(device, m[i][k].data), vjp_free(device, v[i][k].data);
            vjp_free(device, g[k].data);
        }
    }
    vjp_free(device, lr.data), vjp_free(device, step.data);
}

/* ---- Gradients of weights over many rows --------------------------------------------------------------- */

enum { SAMPLES = 4096, MOST_EMULATED = 1000000000 /* products */ };

/* Random numbers of 16 bits between `low` and low + 2, on the device; *host gets them in f32. */
static vjp_tensor random_rows(vjp_dtype dtype, int64_t rows, int64_t columns, uint32_t seed, float low, float **host) {
    size_t count = (size_t)(rows * columns);
    uint16_t *bits = malloc(count * 2);
    *host = malloc(count * sizeof **host);
    assert_true(bits && *host);
    for (size_t i = 0; i < count; i++) {
        float value = random_number(i, seed, low);
        bits[i] = dtype == VJP_BF16 ? vjp_f32_to_bf16(value) : vjp_f32_to_f16(value);
        (*host)[i] = dtype == VJP_BF16 ? vjp_bf16_to_f32(bits[i]) : vjp_f16_to_f32(bits[i]);
    }
    vjp_tensor t = on_device(dtype, 2, (int64_t[]){rows, columns}, bits, count * 2);
    free(bits);
    return t;
}

/* The relative error of db = dy^T a, which began as `old` throughout, in its corners and at places spread over it. */
static double sampled_error(const float *db, const float *dy, const float *a, int64_t rows, int64_t m, int64_t n,
                            double old) {
    double wrong = 0, right = 0;
    for (int64_t i = 0; i < SAMPLES && i < m * n; i++) {
        int64_t row = i < 4 ? i / 2 * (m - 1) : i * 7919 % m, column = i < 4 ? i % 2 * (n - 1) : i * 104729 % n;
        double sum = old;
        for (int64_t r = 0; r < rows; r++)
            sum += (double)dy[r * m + row] * (double)a[r * n + column];
        double off = (double)db[row * n + column] - sum;
        wrong += off * off;
        right += sum * sum;
    }
    return sqrt(wrong / right);
}

/* f32 gradients of 16-bit tensors are within 1e-5 of the sums over all rows, in every way that these are divided, and
 * have the same bits each time. */
static void gradients_of_weights_over_many_rows(void **state) {
    (void)state;
    need_device();
    static const struct {
        vjp_dtype dtype;
        int64_t rows, m, n;
        float low;
        bool add;
    } cases[] = {{VJP_BF16, 3072, 512, 256, -1, false},   /* one product */
                 {VJP_BF16, 3072, 512, 256, 0, false},    /* all numbers of one sign: the drift is largest */
                 {VJP_BF16, 16384, 1024, 1024, 0, false}, /* a batch of parts */
                 {VJP_F16, 3072, 512, 256, 0, false},     /* f16 drifts more */
                 {VJP_F16, 9000, 1408, 1032, -1, true},   /* with a shorter one at its end */
                 {VJP_BF16, 40000, 96, 72, 0, false},     /* more than are added in registers */
                 {VJP_F16, 5000, 333, 129, -1, false},    /* rows that are not aligned */
                 {VJP_BF16, 8200, 2112, 2048, 0, false},  /* parts that are added one after the other */
                 {VJP_F16, 8200, 2112, 2048, -1, true},
                 {VJP_BF16, 16384, 2816, 1024, 0, false}, /* long sums on Hopper: the result is computed transposed */
                 {VJP_F16, 5000, 1016, 2840, -1, true},   /* not so, tiles reach over its end, it is added to */
                 {VJP_BF16, 32776, 768, 2048, 0, true},   /* in two parts, the second shorter */
                 {VJP_BF16, 16384, 1536, 512, -1, false}, /* in four */
                 {VJP_BF16, 3200, 560, 256, 0, false},    /* long sums on an emulated Hopper, which is small */
                 {VJP_F16, 5000, 248, 568, -1, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t rows = cases[i].rows, m = cases[i].m, n = cases[i].n;
        if (device_is("cuda", "emulated") && (rows * m * n > MOST_EMULATED || !in_part(i, 2))) continue;
        size_t bytes = (size_t)(m * n) * sizeof(float);
        float *dy_values, *a_values, *first = malloc(bytes), *db_values[2] = {malloc(bytes), malloc(bytes)};
        assert_true(first && db_values[0] && db_values[1]);
        vjp_tensor dy = random_rows(cases[i].dtype, rows, m, 1, cases[i].low, &dy_values);
        vjp_tensor a = random_rows(cases[i].dtype, rows, n, 2, cases[i].low, &a_values);
        for (int64_t j = 0; j < m * n; j++)
            first[j] = 2.5f;
        vjp_tensor db = on_device(VJP_F32, 2, (int64_t[]){m, n}, first, bytes);
        vjp_tensor b = on_device(cases[i].dtype, 2, (int64_t[]){m, n}, first, bytes / 2);
        if (cases[i].add) db.flags = VJP_ACCUMULATE;
        const vjp_tensor *tensors[LINEAR_B_GATE + 1] = {
            [LINEAR_B_DB] = &db, [LINEAR_B_DY] = &dy, [LINEAR_B_A] = &a, [LINEAR_B_B] = &b};
        const vjp_linear_attributes attributes = {.struct_size = sizeof attributes, .transpose_b = 1};
        for (int run = 0; run < 2; run++) {
            assert_int_equal(vjp_upload(device, db.data, 0, first, bytes), VJP_OK);
            assert_int_equal(vjp_call(device, &vjp_op_linear, VJP_BACKWARD, tensors, LINEAR_B_GATE + 1, &attributes),
                             VJP_OK);
            assert_int_equal(vjp_download(device, db_values[run], db.data, 0, bytes), VJP_OK);
        }
        double error = sampled_error(db_values[0], dy_values, a_values, rows, m, n, cases[i].add ? 2.5 : 0);
        printf("db [%lld, %lld] over %lld rows: error %.1e\n", (long long)m, (long long)n, (long long)rows, error);
        assert_true(error < 1e-5);
        assert_memory_equal(db_values[0], db_values[1], bytes);
        free(dy_values), free(a_values), free(db_values[0]), free(db_values[1]), free(first);
        vjp_free(device, dy.data), vjp_free(device, a.data), vjp_free(device, b.data), vjp_free(device, db.data);
    }
}

/*
 * The same of conv2d, whose 1 x 1 kernel is such a product of pixels. There are so many of them that Hopper's parts are
 * longer than what is summed in registers; an emulated one has time for fewer, which suffice in f16.
 */
static void gradients_of_weights_over_many_pixels(void **state) {
    (void)state;
    need_device();
    bool emulated = device_is("cuda", "emulated");
    if (emulated && !in_part(0, 2)) skip();
    const int64_t side = emulated ? 190 : 280, channels = 32, pixels = 8 * side * side;
    const int64_t picture[] = {8, side, side, channels}, kernel[] = {channels, 1, 1, channels};
    const vjp_conv2d_attributes attributes = CONV_ATTRIBUTES(1, 0, 1, LAST);
    size_t bytes = (size_t)(channels * channels) * sizeof(float);
    float *dweight_values = calloc(1, bytes);
    assert_non_null(dweight_values);
    for (vjp_dtype dtype = emulated ? VJP_F16 : VJP_BF16; dtype <= VJP_F16; dtype++) {
        float *dy_values, *x_values;
        vjp_tensor dy = random_rows(dtype, pixels, channels, 1, 0, &dy_values);
        vjp_tensor x = random_rows(dtype, pixels, channels, 2, 0, &x_values);
        vjp_tensor dweight = on_device(VJP_F32, 4, kernel, dweight_values, bytes);
        dy = vjp_tensor_of(dy.data, dtype, 4, picture);
        x = vjp_tensor_of(x.data, dtype, 4, picture);
        assert_int_equal(vjp_conv2d_backward(device, NULL, &dweight, NULL, &dy, &x, NULL, &attributes), VJP_OK);
        assert_int_equal(vjp_download(device, dweight_values, dweight.data, 0, bytes), VJP_OK);
        double error = sampled_error(dweight_values, dy_values, x_values, pixels, channels, channels, 0);
        printf("dweight over %lld pixels: error %.1e\n", (long long)pixels, error);
        assert_true(error < 1e-5);
        free(dy_values), free(x_values);
        vjp_free(device, dy.data), vjp_free(device, x.data), vjp_free(device, dweight.data);
    }
    free(dweight_values);
}

/* 0: the child was refused everything, with a sentence. */
static int use_after_fork(const vjp_tensor *y, const vjp_tensor *x) {
    const vjp_tensor *tensors[] = {[CUMSUM_Y] = y, [CUMSUM_X] = x};
    void *data;
    if (vjp_alloc(device, 64, &data) != VJP_DEVICE_FAILED || !strstr(vjp_error(device), "fork")) return 1;
    if (vjp_call(device, &vjp_op_cumsum, VJP_FORWARD, tensors, 2, NULL) != VJP_DEVICE_FAILED) return 2;
    if (!strstr(vjp_error(device), "cumsum.forward") || !strstr(vjp_error(device), "fork")) return 3;
    if (vjp_synchronize(device) != VJP_DEVICE_FAILED) return 4;
    vjp_free(device, x->data);
    vjp_close(device);
    return 0;
}

static void a_forked_child_is_refused_with_a_sentence(void **state) {
    (void)state;
    need_device();
    const float values[4] = {1, 2, 3, 4};
    vjp_tensor x = on_device(VJP_F32, 1, (int64_t[]){4}, values, sizeof values);
    vjp_tensor y = on_device(VJP_F32, 1, (int64_t[]){4}, values, sizeof values);
    pid_t child = fork();
    if (child == 0) _exit(use_after_fork(&y, &x));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    float back[4];
    assert_int_equal(vjp_download(device, back, x.data, 0, sizeof back), VJP_OK); /* the parent's is as before */
    assert_memory_equal(back, values, sizeof back);
    vjp_free(device, x.data), vjp_free(device, y.data);
}

/* ---- Numbers at the edge of f32 ---------------------------------------------------------------------- */

/* Elements of 1e38 to 3e38: their sum is beyond f32, their statistics are not. One size for each path of the kernels.
 */
static void group_norm_of_elements_near_1e38(void **state) {
    (void)state;
    need_device();
    enum { MAX = 1 << 19 };
    static const struct {
        int64_t shape[3], layout;
    } cases[] = {{{2, 2, 7}, VJP_LAYOUT_CHANNELS_FIRST},    {{2, 2, 512}, VJP_LAYOUT_CHANNELS_FIRST},
                 {{2, 2, 8192}, VJP_LAYOUT_CHANNELS_FIRST}, {{2, 2, 4095}, VJP_LAYOUT_CHANNELS_FIRST},
                 {{1, 1, MAX}, VJP_LAYOUT_CHANNELS_FIRST},  {{2, 4096, 2}, VJP_LAYOUT_CHANNELS_LAST}};
    float *values = malloc(MAX * sizeof *values);
    for (int i = 0; i < MAX; i++)
        values[i] = (float)(1 + i % 3) * 1e38f;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        const int64_t *shape = cases[c].shape;
        int64_t batch = shape[0], count = shape[1] * shape[2];
        vjp_group_norm_attributes attributes = VJP_GROUP_NORM_DEFAULTS;
        attributes.layout = cases[c].layout;
        float mean[2] = {0}, rstd[2] = {0};
        vjp_tensor x = on_device(VJP_F32, 3, shape, values, (size_t)(batch * count) * sizeof *values);
        vjp_tensor m = on_device(VJP_F32, 2, (int64_t[]){batch, 1}, mean, sizeof mean);
        vjp_tensor r = on_device(VJP_F32, 2, (int64_t[]){batch, 1}, rstd, sizeof rstd);
        if (vjp_group_norm_forward(device, NULL, &m, &r, &x, NULL, NULL, &attributes) != VJP_OK)
            fail_msg("%s", vjp_error(device));
        assert_int_equal(vjp_download(device, mean, m.data, 0, (size_t)batch * sizeof *mean), VJP_OK);
        assert_int_equal(vjp_download(device, rstd, r.data, 0, (size_t)batch * sizeof *rstd), VJP_OK);
        for (int64_t n = 0; n < batch; n++) {
            double sum = 0, squares = 0;
            for (int64_t i = 0; i < count; i++)
                sum += (double)values[n * count + i] / (double)count;
            for (int64_t i = 0; i < count; i++)
                squares +=
                    ((double)values[n * count + i] - sum) * ((double)values[n * count + i] - sum) / (double)count;
            assert_true(fabs((double)mean[n] / sum - 1) < 1e-5);
            assert_true(fabs((double)rstd[n] * sqrt(squares) - 1) < 1e-5);
        }
        vjp_free(device, x.data), vjp_free(device, m.data), vjp_free(device, r.data);
    }
    free(values);
}

/* test_cuda [PATTERN]: the tests of such names, where * is anything. */
int main(int argc, char **argv) {
    const char *pattern = argc > 1 ? argv[1] : "*";
    int chosen = 0;
    device_start("cuda");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library_has_one_entry_and_knows_its_version),
        cmocka_unit_test(every_pass_has_kernels_with_or_without_a_gpu),
        cmocka_unit_test(a_name_that_is_none_is_refused_with_a_sentence),
        cmocka_unit_test(without_a_gpu_the_sentence_says_why),
        cmocka_unit_test(products_are_f32_unless_tf32_is_asked_for),
        cmocka_unit_test(attention_takes_tf32_where_asked),
        cmocka_unit_test(convolutions_are_f32_unless_tf32_is_asked_for),
        cmocka_unit_test(devices_are_counted_and_described),
        cmocka_unit_test(calls_run_on_the_stream_that_was_set),
        cmocka_unit_test(ropes_of_several_tensors_are_those_of_each),
        cmocka_unit_test(steps_of_several_kinds_are_those_of_each),
        cmocka_unit_test(gradients_of_weights_over_many_rows),
        cmocka_unit_test(gradients_of_weights_over_many_pixels),
        cmocka_unit_test(convolutions_of_many_tiles),
        cmocka_unit_test(attention_is_accurate_over_many_rows),
        cmocka_unit_test(a_forked_child_is_refused_with_a_sentence),
        cmocka_unit_test(group_norm_of_elements_near_1e38),
        DEVICE_TESTS,
    };
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
        chosen += fnmatch(pattern, tests[i].name, 0) == 0;
    if (!chosen) fprintf(stderr, "test_cuda: no test has a name like %s\n", pattern);
    cmocka_set_test_filter(pattern);
    int failed = chosen ? cmocka_run_group_tests_name("cuda", tests, NULL, NULL) : 1;
    vjp_close(device);
    return failed;
}
