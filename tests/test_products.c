/* SPDX-License-Identifier: MIT */
/*
 * Matrix products that are split into several blocks, on several threads: every block and every edge is computed,
 * whatever the number of threads, and the bits are those of one thread.
 *
 * Integers show the first: their sums are exact, so a missing or repeated term cannot hide in a tolerance. They are
 * exact in any order, so bits are compared with numbers whose sums are rounded.
 *
 * All of it with each of vjp's own engines; AMX, where the processor has it, is also compared with the other: the bf16
 * terms that it splits a number into must add up to the number, and what is not finite must stay what it is.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/half.h"
#include "numbers.h"
#include "op/op.h"
#include "vjp.h"

/*
 * More than one block in each direction: a block is at most 1024 x 4096 with 1024 terms or 1024 x 1024 with 4096. With
 * relu the gradients are products of dpre, which is kept in the workspace in slabs: several of them, a last one that is
 * not full, items of a batch in one, and terms in several parts, of either gradient.
 */
typedef struct product {
    int64_t batch, m, k, n;
    bool transpose_b, relu;
    vjp_dtype storage;
} product;

static const product products[] = {
    {1, 1100, 1100, 4200, false, false, VJP_F32}, {1, 1100, 4300, 1050, true, false, VJP_BF16},
    {2, 400, 260, 700, false, true, VJP_F32},     {1, 1100, 4200, 1100, true, false, VJP_F32},
    {1, 2100, 300, 1300, false, false, VJP_BF16}, {5, 300, 1500, 200, false, false, VJP_F32},
    {1, 2100, 200, 9000, false, false, VJP_F32},  {1, 1100, 1300, 700, false, false, VJP_F16},
    {1, 300, 70, 45, true, false, VJP_F16},       {7, 33, 47, 65, false, false, VJP_BF16},
    {1, 900, 700, 4200, false, true, VJP_F32},    {3, 500, 300, 1300, true, true, VJP_F32},
    {1, 6000, 120, 480, false, true, VJP_F32},    {1, 200, 130, 9000, false, true, VJP_F32},
    {2, 300, 200, 700, false, true, VJP_F16},
};

static const char *const engines[] = {"builtin", "amx"};

enum { ENGINES = sizeof engines / sizeof engines[0] };

/* Under a sanitizer they take ten times as long: then only the first, in f32, in 16 bits and in slabs. */
enum { PRODUCTS = sizeof VJP_SANITIZE > 1 ? 3 : sizeof products / sizeof products[0] };

/* And not on one thread, where nothing can race; the comparison of bits does that too. */
enum { FEWEST_THREADS = sizeof VJP_SANITIZE > 1 ? 3 : 1 };

typedef struct matrices {
    vjp_tensor y, a, b, dy, da, db, pre;
} matrices;

static float to_float(vjp_dtype dtype, uint16_t bits) {
    return dtype == VJP_BF16 ? vjp_bf16_to_f32(bits) : vjp_f16_to_f32(bits);
}

static uint16_t to_bits(vjp_dtype dtype, float value) {
    return dtype == VJP_BF16 ? vjp_f32_to_bf16(value) : vjp_f32_to_f16(value);
}

static float stored(vjp_dtype dtype, float value) {
    return dtype == VJP_F32 ? value : to_float(dtype, to_bits(dtype, value));
}

static void write_at(const vjp_tensor *t, int64_t i, float value) {
    if (t->dtype == VJP_F32)
        ((float *)t->data)[i] = value;
    else
        ((uint16_t *)t->data)[i] = to_bits((vjp_dtype)t->dtype, value);
}

static float read_at(const vjp_tensor *t, int64_t i) {
    if (t->dtype == VJP_F32) return ((const float *)t->data)[i];
    return to_float((vjp_dtype)t->dtype, ((const uint16_t *)t->data)[i]);
}

static vjp_tensor make(const product *p, int64_t rows, int64_t columns) {
    const int64_t shape[3] = {p->batch, rows, columns};
    void *data = malloc((size_t)(p->batch * rows * columns) * vjp_dtype_size(p->storage));
    assert_non_null(data);
    return vjp_tensor_of(data, p->storage, 3, shape);
}

static size_t bytes_of(const vjp_tensor *t) {
    return (size_t)count_of(t) * vjp_dtype_size((vjp_dtype)t->dtype);
}

static void fill(const vjp_tensor *t, uint32_t stream, bool whole) {
    uint32_t state = 12345 + stream;
    for (int64_t i = 0; i < count_of(t); i++) {
        state = state * 1664525u + 1013904223u;
        float value = whole ? (float)(state >> 16) / 16384 : (float)(int32_t)state * 0x1p-31f;
        write_at(t, i, whole ? (float)(int)value - 1 : stored((vjp_dtype)t->dtype, value));
    }
}

static matrices make_matrices(const product *p, bool whole) {
    matrices x = {.y = make(p, p->m, p->n), .a = make(p, p->m, p->k), .dy = make(p, p->m, p->n)};
    int64_t rows = p->transpose_b ? p->n : p->k, columns = p->transpose_b ? p->k : p->n;
    x.b = make(p, rows, columns);
    x.da = make(p, p->m, p->k);
    x.db = make(p, rows, columns);
    x.pre = make(p, p->m, p->n);
    fill(&x.a, 1, whole);
    fill(&x.b, 2, whole);
    fill(&x.dy, 3, whole);
    return x;
}

static void free_matrices(matrices *x) {
    void *const data[] = {x->y.data, x->a.data, x->b.data, x->dy.data, x->da.data, x->db.data, x->pre.data};
    for (size_t i = 0; i < sizeof data / sizeof data[0]; i++)
        free(data[i]);
}

/* NULL: this machine has no such engine. */
static vjp_device *open_engine(const char *engine, int32_t threads) {
    vjp_device *device;
    vjp_status status = vjp_open(
        "cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = threads, .matrix_products = engine},
        &device);
    if (status == VJP_OK) return device;
    assert_int_equal(status, VJP_UNSUPPORTED);
    vjp_close(device);
    return NULL;
}

static bool run(const char *engine, const product *p, matrices *x, int32_t threads) {
    vjp_device *device = open_engine(engine, threads);
    if (!device) return false;
    const vjp_linear_attributes attributes = {.struct_size = sizeof(vjp_linear_attributes),
                                              .transpose_b = p->transpose_b,
                                              .activation = p->relu ? VJP_ACTIVATION_RELU : VJP_ACTIVATION_NONE};
    const vjp_tensor *forward[LINEAR_GATE + 1] = {[LINEAR_Y] = &x->y, [LINEAR_A] = &x->a, [LINEAR_B] = &x->b};
    const vjp_tensor *backward[LINEAR_B_GATE + 1] = {[LINEAR_B_DA] = &x->da,
                                                     [LINEAR_B_DB] = &x->db,
                                                     [LINEAR_B_DY] = &x->dy,
                                                     [LINEAR_B_A] = &x->a,
                                                     [LINEAR_B_B] = &x->b};
    if (p->relu) forward[LINEAR_PRE] = backward[LINEAR_B_PRE] = &x->pre;
    const vjp_op *linear = vjp_op_find("linear");
    assert_int_equal(vjp_call(device, linear, VJP_FORWARD, forward, LINEAR_GATE + 1, &attributes), VJP_OK);
    assert_int_equal(vjp_call(device, linear, VJP_BACKWARD, backward, LINEAR_B_GATE + 1, &attributes), VJP_OK);
    vjp_close(device);
    return true;
}

static float b_at(const product *p, const vjp_tensor *b, int64_t item, int64_t k, int64_t j) {
    return read_at(b, p->transpose_b ? (item * p->n + j) * p->k + k : (item * p->k + k) * p->n + j);
}

static double dpre_at(const product *p, const matrices *x, int64_t item, int64_t i, int64_t j) {
    int64_t at = (item * p->m + i) * p->n + j;
    return p->relu && !(read_at(&x->pre, at) > 0) ? 0 : (double)read_at(&x->dy, at);
}

/* Elements near every edge of every matrix and all over it: how many are wrong. */
static int count_wrong(const product *p, const matrices *x) {
    enum { PLACES = 400 };
    int wrong = 0;
    uint32_t state = 99;
    for (int q = 0; q < PLACES; q++) {
        int64_t at[3], size[3] = {p->m, p->k, p->n}, item = q % p->batch;
        for (int d = 0; d < 3; d++) {
            state = state * 1664525u + 1013904223u;
            int64_t near = (int64_t)(state >> 20) % 20;
            at[d] = state % 3 == 0 ? near : state % 3 == 1 ? size[d] - 1 - near : (int64_t)(state >> 8) % size[d];
        }
        int64_t i = at[0], k = at[1], j = at[2];
        double y = 0, da = 0, db = 0;
        for (int64_t t = 0; t < p->k; t++)
            y += (double)read_at(&x->a, (item * p->m + i) * p->k + t) * (double)b_at(p, &x->b, item, t, j);
        for (int64_t t = 0; t < p->n; t++)
            da += dpre_at(p, x, item, i, t) * (double)b_at(p, &x->b, item, k, t);
        for (int64_t t = 0; t < p->m; t++)
            db += (double)read_at(&x->a, (item * p->m + t) * p->k + k) * dpre_at(p, x, item, t, j);
        wrong += p->relu && read_at(&x->pre, (item * p->m + i) * p->n + j) != stored(p->storage, (float)y);
        if (p->relu) y = fmax(y, 0);
        wrong += read_at(&x->y, (item * p->m + i) * p->n + j) != stored(p->storage, (float)y);
        wrong += read_at(&x->da, (item * p->m + i) * p->k + k) != stored(p->storage, (float)da);
        wrong += b_at(p, &x->db, item, k, j) != stored(p->storage, (float)db);
    }
    return wrong;
}

static void sums_of_whole_numbers_are_exact(void **unused) {
    (void)unused;
    for (int i = 0; i < PRODUCTS * ENGINES; i++)
        for (int32_t threads = FEWEST_THREADS; threads <= 3; threads += 2) {
            const product *p = &products[i / ENGINES];
            matrices x = make_matrices(p, true);
            int wrong = run(engines[i % ENGINES], p, &x, threads) ? count_wrong(p, &x) : 0;
            if (wrong) print_error("product %d by %s with %d threads\n", i / ENGINES, engines[i % ENGINES], threads);
            assert_int_equal(wrong, 0);
            free_matrices(&x);
        }
}

static void bits_do_not_depend_on_threads(void **unused) {
    (void)unused;
    static const int32_t threads[] = {2, 5};
    for (int i = 0; i < PRODUCTS * ENGINES; i++) {
        const product *p = &products[i / ENGINES];
        matrices one = make_matrices(p, false), other = make_matrices(p, false);
        bool runs = run(engines[i % ENGINES], p, &one, 1);
        for (size_t t = 0; runs && t < sizeof threads / sizeof threads[0]; t++) {
            run(engines[i % ENGINES], p, &other, threads[t]);
            assert_memory_equal(other.y.data, one.y.data, bytes_of(&one.y));
            assert_memory_equal(other.da.data, one.da.data, bytes_of(&one.da));
            assert_memory_equal(other.db.data, one.db.data, bytes_of(&one.db));
        }
        free_matrices(&one);
        free_matrices(&other);
    }
}

/* ---- AMX beside the other engine ---------------------------------------------------------------------- */

enum { M = 70, K = 90, N = 100 };

/* A layer whose dpre has all bits of f32 and whose db is f32; with numbers here and there that are not finite. */
typedef struct layer {
    vjp_tensor a, b, dy, pre, y, da, db;
} layer;

static layer make_layer(vjp_dtype storage) {
    const product p = {1, M, K, N, false, false, storage}, wide = {1, M, K, N, false, false, VJP_F32};
    layer x = {make(&p, M, K), make(&p, K, N), make(&p, M, N),   make(&p, M, N),
               make(&p, M, N), make(&p, M, K), make(&wide, K, N)};
    x.b = vjp_tensor_of(x.b.data, storage, 2, (int64_t[]){K, N});
    x.db = vjp_tensor_of(x.db.data, VJP_F32, 2, (int64_t[]){K, N});
    fill(&x.a, 1, false);
    fill(&x.b, 2, false);
    fill(&x.dy, 3, false);
    return x;
}

static void free_layer(layer *x) {
    void *const data[] = {x->a.data, x->b.data, x->dy.data, x->pre.data, x->y.data, x->da.data, x->db.data};
    for (size_t i = 0; i < sizeof data / sizeof data[0]; i++)
        free(data[i]);
}

/* Of either pass. */
static bool run_layer(const char *engine, vjp_pass pass, layer *x) {
    vjp_device *device = open_engine(engine, 2);
    if (!device) return false;
    const vjp_linear_attributes attributes = {.struct_size = sizeof(vjp_linear_attributes),
                                              .activation = VJP_ACTIVATION_SIGMOID};
    const vjp_tensor *forward[LINEAR_GATE + 1] = {
        [LINEAR_Y] = &x->y, [LINEAR_PRE] = &x->pre, [LINEAR_A] = &x->a, [LINEAR_B] = &x->b};
    const vjp_tensor *backward[LINEAR_B_GATE + 1] = {
        [LINEAR_B_DA] = &x->da, [LINEAR_B_DB] = &x->db, [LINEAR_B_DY] = &x->dy,
        [LINEAR_B_A] = &x->a,   [LINEAR_B_B] = &x->b,   [LINEAR_B_PRE] = &x->pre};
    vjp_status status = vjp_call(device, vjp_op_find("linear"), pass, pass == VJP_FORWARD ? forward : backward,
                                 pass == VJP_FORWARD ? LINEAR_GATE + 1 : LINEAR_B_GATE + 1, &attributes);
    if (status != VJP_OK) print_error("%s\n", vjp_error(device));
    assert_int_equal(status, VJP_OK);
    vjp_close(device);
    return true;
}

/* Both passes by both engines, the backward of the same pre: rounded to 16 bits it may differ in the last place. */
static bool run_both(layer *x, layer *other) {
    run_layer("builtin", VJP_FORWARD, other);
    run_layer("builtin", VJP_BACKWARD, other);
    if (!run_layer("amx", VJP_FORWARD, x)) return false;
    layer same = *x;
    same.pre = other->pre;
    return run_layer("amx", VJP_BACKWARD, &same);
}

static double distance(const vjp_tensor *t, const vjp_tensor *from) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count_of(t); i++) {
        double d = (double)read_at(t, i) - (double)read_at(from, i);
        difference += d * d;
        size += (double)read_at(from, i) * (double)read_at(from, i);
    }
    return sqrt(difference / size);
}

/* db without the third term of dpre would be 2e-6 off; in 16 bits a few sums are rounded differently. */
static void limbs_add_up_to_the_number(void **unused) {
    (void)unused;
    for (vjp_dtype storage = VJP_BF16; storage <= VJP_F16; storage++) {
        layer x = make_layer(storage), other = make_layer(storage);
        if (run_both(&x, &other)) {
            double some = storage == VJP_BF16 ? 2e-4 : 1e-4;
            assert_true(distance(&x.pre, &other.pre) < some);
            assert_true(distance(&x.da, &other.da) < some);
            assert_true(distance(&x.db, &other.db) < 3e-7);
        }
        free_layer(&x);
        free_layer(&other);
    }
}

static int kind_of(float x) {
    return isnan(x) ? 2 : isinf(x) ? (x > 0 ? 1 : -1) : 0;
}

static int count_other_kinds(const vjp_tensor *t, const vjp_tensor *from, int *not_finite) {
    int other = 0;
    for (int64_t i = 0; i < count_of(t); i++) {
        other += kind_of(read_at(t, i)) != kind_of(read_at(from, i));
        *not_finite += kind_of(read_at(from, i)) != 0;
    }
    return other;
}

/* Inf times a number of one bf16 term, times zero, times Inf; NaN; and an Inf that affects only one of the gradients.
 */
static void put_not_finite(layer *x) {
    write_at(&x->a, 3 * K + 5, INFINITY);
    write_at(&x->a, 7 * K + 6, -INFINITY);
    write_at(&x->a, 8 * K + 11, INFINITY);
    write_at(&x->a, 20 * K + 11, 0);
    write_at(&x->a, 30 * K + 11, 1);
    write_at(&x->a, 40 * K + 9, NAN);
    write_at(&x->b, 11 * N + 13, INFINITY);
    write_at(&x->b, 5 * N + 60, -0.0f);
    write_at(&x->dy, 50 * N + 17, INFINITY);
    write_at(&x->dy, 51 * N + 18, -1);
    write_at(&x->dy, 52 * N + 19, NAN);
}

static void what_is_not_finite_stays(void **unused) {
    (void)unused;
    for (vjp_dtype storage = VJP_BF16; storage <= VJP_F16; storage++) {
        layer x = make_layer(storage), other = make_layer(storage);
        put_not_finite(&x);
        put_not_finite(&other);
        if (run_both(&x, &other)) {
            int pre = 0, da = 0, db = 0;
            assert_int_equal(count_other_kinds(&x.pre, &other.pre, &pre), 0);
            assert_int_equal(count_other_kinds(&x.da, &other.da, &da), 0);
            assert_int_equal(count_other_kinds(&x.db, &other.db, &db), 0);
            assert_true(pre > 300 && da > 300 && db > 300);
        }
        free_layer(&x);
        free_layer(&other);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_of_whole_numbers_are_exact),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(limbs_add_up_to_the_number),
        cmocka_unit_test(what_is_not_finite_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
