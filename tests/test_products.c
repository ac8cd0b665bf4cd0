/*
 * Matrix products that are cut into several blocks, on several threads: every block and every edge arrives, whatever
 * the threads, and the bits are those of one thread.
 *
 * Whole numbers show the first: their sums are exact, so a term too few or too many cannot hide in a tolerance. They
 * would be exact in any order; so bits are compared with numbers whose sums are rounded.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "numbers.h"
#include "op/op.h"
#include "vjp.h"

/* More than one block each way: a block is at most 1024 x 4096 with 1024 terms or 1024 x 1024 with 4096. */
typedef struct product {
    int64_t batch, m, k, n;
    bool transpose_b;
    vjp_dtype storage;
} product;

static const product products[] = {
    {1, 1100, 1100, 4200, false, VJP_F32}, {1, 1100, 4300, 1050, true, VJP_BF16}, {1, 1100, 4200, 1100, true, VJP_F32},
    {1, 2100, 300, 1300, false, VJP_BF16}, {5, 300, 1500, 200, false, VJP_F32},   {1, 2100, 200, 9000, false, VJP_F32},
};

/* A sanitizer makes them ten times as long: then the first, in f32 and in 16 bits. */
enum { PRODUCTS = sizeof VJP_SANITIZE > 1 ? 2 : sizeof products / sizeof products[0] };

typedef struct matrices {
    vjp_tensor y, a, b, dy, da, db;
} matrices;

static float stored(vjp_dtype dtype, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == VJP_BF16) bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

static void write_at(const vjp_tensor *t, int64_t i, float value) {
    if (t->dtype == VJP_F32) {
        ((float *)t->data)[i] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)t->data)[i] = (uint16_t)(bits >> 16);
}

static float read_at(const vjp_tensor *t, int64_t i) {
    if (t->dtype == VJP_F32) return ((const float *)t->data)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)t->data)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
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
    matrices x = {make(p, p->m, p->n), make(p, p->m, p->k), {0}, make(p, p->m, p->n), make(p, p->m, p->k), {0}};
    int64_t rows = p->transpose_b ? p->n : p->k, columns = p->transpose_b ? p->k : p->n;
    x.b = make(p, rows, columns);
    x.db = make(p, rows, columns);
    fill(&x.a, 1, whole);
    fill(&x.b, 2, whole);
    fill(&x.dy, 3, whole);
    return x;
}

static void free_matrices(matrices *x) {
    void *const data[] = {x->y.data, x->a.data, x->b.data, x->dy.data, x->da.data, x->db.data};
    for (size_t i = 0; i < sizeof data / sizeof data[0]; i++)
        free(data[i]);
}

static void run(const product *p, matrices *x, int32_t threads) {
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", &(vjp_options){.threads = threads, .matrix_products = "builtin"}, &device),
                     VJP_OK);
    const vjp_linear_attributes attributes = {.transpose_b = p->transpose_b};
    const vjp_tensor *forward[LINEAR_BIAS + 1] = {[LINEAR_Y] = &x->y, [LINEAR_A] = &x->a, [LINEAR_B] = &x->b};
    const vjp_tensor *backward[LINEAR_B_PRE + 1] = {[LINEAR_B_DA] = &x->da,
                                                    [LINEAR_B_DB] = &x->db,
                                                    [LINEAR_B_DY] = &x->dy,
                                                    [LINEAR_B_A] = &x->a,
                                                    [LINEAR_B_B] = &x->b};
    const vjp_op *linear = vjp_op_find("linear");
    assert_int_equal(vjp_call(device, linear, VJP_FORWARD, forward, LINEAR_BIAS + 1, &attributes), VJP_OK);
    assert_int_equal(vjp_call(device, linear, VJP_BACKWARD, backward, LINEAR_B_PRE + 1, &attributes), VJP_OK);
    vjp_close(device);
}

static float b_at(const product *p, const vjp_tensor *b, int64_t item, int64_t k, int64_t j) {
    return read_at(b, p->transpose_b ? (item * p->n + j) * p->k + k : (item * p->k + k) * p->n + j);
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
            da += (double)read_at(&x->dy, (item * p->m + i) * p->n + t) * (double)b_at(p, &x->b, item, k, t);
        for (int64_t t = 0; t < p->m; t++)
            db += (double)read_at(&x->a, (item * p->m + t) * p->k + k) *
                  (double)read_at(&x->dy, (item * p->m + t) * p->n + j);
        wrong += read_at(&x->y, (item * p->m + i) * p->n + j) != stored(p->storage, (float)y);
        wrong += read_at(&x->da, (item * p->m + i) * p->k + k) != stored(p->storage, (float)da);
        wrong += b_at(p, &x->db, item, k, j) != stored(p->storage, (float)db);
    }
    return wrong;
}

static void sums_of_whole_numbers_are_exact(void **unused) {
    (void)unused;
    for (int i = 0; i < PRODUCTS; i++)
        for (int32_t threads = 1; threads <= 3; threads += 2) {
            matrices x = make_matrices(&products[i], true);
            run(&products[i], &x, threads);
            int wrong = count_wrong(&products[i], &x);
            if (wrong) print_error("product %d with %d threads\n", i, threads);
            assert_int_equal(wrong, 0);
            free_matrices(&x);
        }
}

static void bits_do_not_depend_on_threads(void **unused) {
    (void)unused;
    static const int32_t threads[] = {2, 5};
    for (int i = 0; i < PRODUCTS; i++) {
        matrices one = make_matrices(&products[i], false), other = make_matrices(&products[i], false);
        run(&products[i], &one, 1);
        for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
            run(&products[i], &other, threads[t]);
            assert_memory_equal(other.y.data, one.y.data, bytes_of(&one.y));
            assert_memory_equal(other.da.data, one.da.data, bytes_of(&one.da));
            assert_memory_equal(other.db.data, one.db.data, bytes_of(&one.db));
        }
        free_matrices(&one);
        free_matrices(&other);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_of_whole_numbers_are_exact),
        cmocka_unit_test(bits_do_not_depend_on_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
