/* SPDX-License-Identifier: MIT */
/* Conversions of 16-bit numbers, and vec.h on every instruction set that this processor has. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/half.h"
#include "cpu/cpu.h"
#include "vec_probe.h"

/* ---- Conversions ------------------------------------------------------------------------------------- */

/* A 16-bit format, described by its parameters; the slow rounding uses nothing but these and exact doubles. */
typedef struct format {
    const char *name;
    int mantissa_bits, min_exponent; /* 2^min_exponent is the smallest normal number */
    double largest;
    float (*widen)(uint16_t);
    uint16_t (*narrow)(float);
} format;

static const format formats[] = {
    {"bf16", 7, -126, 0x1.fep127, vjp_bf16_to_f32, vjp_f32_to_bf16},
    {"f16", 10, -14, 65504, vjp_f16_to_f32, vjp_f32_to_f16},
};

static double exact_value(const format *f, uint16_t bits) {
    int exponent = bits >> f->mantissa_bits & (0x7fff >> f->mantissa_bits);
    int mantissa = bits & ((1 << f->mantissa_bits) - 1);
    int most = 0x7fff >> f->mantissa_bits;
    double value;
    if (exponent == most)
        value = mantissa ? NAN : INFINITY;
    else if (exponent == 0)
        value = ldexp(mantissa, f->min_exponent - f->mantissa_bits);
    else
        value = ldexp(mantissa + (1 << f->mantissa_bits), exponent - 1 + f->min_exponent - f->mantissa_bits);
    return bits >> 15 ? -value : value;
}

/* Round to nearest even: in units of the last place, which rint() then rounds exactly. */
static double exact_round(const format *f, double value) {
    if (isnan(value) || isinf(value) || value == 0) return value;
    int exponent;
    frexp(value, &exponent);
    exponent -= 1;
    if (exponent < f->min_exponent) exponent = f->min_exponent;
    double rounded = ldexp(rint(ldexp(value, f->mantissa_bits - exponent)), exponent - f->mantissa_bits);
    return fabs(rounded) > f->largest ? copysign(INFINITY, value) : rounded;
}

static void halves_widen(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++)
        for (uint32_t bits = 0; bits < 65536; bits++) {
            const format *f = &formats[k];
            double value = exact_value(f, (uint16_t)bits);
            float wide = f->widen((uint16_t)bits);
            if (isnan(value)) {
                assert_true(isnan(wide));
                assert_true(isnan(f->widen(f->narrow(wide))));
                continue;
            }
            if ((double)wide != value || !signbit(wide) != !signbit(value)) print_error("%s 0x%04x\n", f->name, bits);
            assert_true((double)wide == value && !signbit(wide) == !signbit(value));
            assert_int_equal(f->narrow(wide), bits); /* round trip */
        }
}

static void check_narrow(const format *f, float value) {
    double expected = exact_round(f, value), have = f->widen(f->narrow(value));
    bool same = isnan(expected) ? isnan(have) : have == expected && signbit(have) == signbit(expected);
    if (!same) print_error("%s: %a became %a, not %a\n", f->name, (double)value, have, expected);
    assert_true(same);
}

/* Each representable number, the midpoints to its neighbour, the f32s beside those; and a sweep over all bits. */
static void halves_round(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        const format *f = &formats[k];
        for (uint32_t bits = 0; bits < 65535; bits++) {
            double low = exact_value(f, (uint16_t)bits), high = exact_value(f, (uint16_t)(bits + 1));
            check_narrow(f, (float)low);
            if (isnan(low) || isnan(high) || isinf(high) || isinf(low) || (low < 0) != (high < 0)) continue;
            float middle = (float)((low + high) / 2);
            check_narrow(f, middle);
            check_narrow(f, nextafterf(middle, INFINITY));
            check_narrow(f, nextafterf(middle, -INFINITY));
        }
        for (uint64_t bits = 0; bits < 0x100000000u; bits += 4093)
            check_narrow(f, vjp_bits_to_f32((uint32_t)bits));
        float edges[] = {65519.996f, 65520.0f, 3.3895314e38f, 3.4e38f, 0x1p-25f, 0x1.000002p-25f, 0x1p-149f, 0x1p-133f};
        for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
            check_narrow(f, edges[i]);
            check_narrow(f, -edges[i]);
        }
    }
}

/* ---- vec.h ------------------------------------------------------------------------------------------- */

static const vec_probe *const probes[] = {
#ifdef HAVE_SET_PLAIN
    &vjp_cpu_vec_probe_plain,
#endif
#ifdef HAVE_SET_AVX2
    &vjp_cpu_vec_probe_avx2,
#endif
#ifdef HAVE_SET_AVX512
    &vjp_cpu_vec_probe_avx512,
#endif
#ifdef HAVE_SET_NEON
    &vjp_cpu_vec_probe_neon,
#endif
};

enum { PROBES = sizeof probes / sizeof probes[0], SWEEP = 1 << 16 };

static bool can_open(const char *set) {
    vjp_device *device;
    vjp_options options = {
        .struct_size = sizeof(vjp_options), .instruction_set = set, .threads = 1, .workspace_bytes = 64};
    vjp_status status = vjp_open("cpu", &options, &device);
    vjp_close(device);
    return status == VJP_OK;
}

/* Queried once and cached. */
static bool runs_here(const char *set) {
    static int answers[PROBES];
    for (int i = 0; i < PROBES; i++)
        if (strcmp(probes[i]->name, set) == 0) {
            if (!answers[i]) answers[i] = can_open(set) ? 1 : -1;
            return answers[i] > 0;
        }
    return false;
}

/* Every set of this processor can be chosen by name. */
static void sets_open(void **state) {
    (void)state;
    int ran = 0;
    for (int i = 0; i < PROBES; i++) {
        vjp_device *device;
        vjp_status status = vjp_open(
            "cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 1, .instruction_set = probes[i]->name},
            &device);
        if (status == VJP_OK) {
            assert_non_null(strstr(vjp_device_summary(device), probes[i]->name));
            ran++;
        } else {
            assert_int_equal(status, VJP_UNSUPPORTED);
            assert_non_null(strstr(vjp_error(device), probes[i]->name));
        }
        vjp_close(device);
    }
    assert_true(ran > 0);
}

static void vectors_convert(void **state) {
    (void)state;
    static uint16_t bits[SWEEP], by_vector[SWEEP], by_each[SWEEP];
    static float wide[SWEEP], narrow[SWEEP];
    int ran = 0;
    for (int i = 0; i < PROBES; i++) {
        const vec_probe *probe = probes[i];
        if (!runs_here(probe->name)) continue;
        ran++;
        for (int k = 0; k < 2; k++) {
            const format *f = &formats[k];
            vjp_dtype dtype = (vjp_dtype)vjp_dtype_find(f->name);
            for (uint32_t b = 0; b < SWEEP; b++)
                bits[b] = (uint16_t)b;
            probe->load(dtype, bits, SWEEP, wide);
            for (uint32_t b = 0; b < SWEEP; b++) {
                float expected = f->widen((uint16_t)b);
                if (memcmp(&wide[b], &expected, 4) != 0) print_error("%s loads %s 0x%04x\n", probe->name, f->name, b);
                assert_memory_equal(&wide[b], &expected, 4);
            }
            probe->load_each(dtype, bits, SWEEP, narrow);
            assert_memory_equal(narrow, wide, sizeof wide);

            /* Stores: four sweeps through all f32 bits, NaNs and denormals among them. */
            for (uint32_t start = 0; start < 4; start++) {
                for (uint32_t b = 0; b < SWEEP; b++)
                    wide[b] = vjp_bits_to_f32(b << 16 | (start * 0x5555u + b % 7 * 0x1249u) % 0x10000u);
                probe->store(dtype, by_vector, SWEEP, wide);
                probe->store_each(dtype, by_each, SWEEP, wide);
                for (uint32_t b = 0; b < SWEEP; b++) {
                    if (by_vector[b] != f->narrow(wide[b]))
                        print_error("%s stores %a as %s 0x%04x, not 0x%04x\n", probe->name, (double)wide[b], f->name,
                                    by_vector[b], f->narrow(wide[b]));
                    assert_int_equal(by_vector[b], f->narrow(wide[b]));
                }
                assert_memory_equal(by_each, by_vector, sizeof by_vector);
            }
        }
    }
    assert_true(ran > 0);
}

/* Parts of a vector touch nothing outside: the memory ends at a page that cannot be touched. */
static void vectors_stay_inside(void **state) {
    (void)state;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_int_equal(mprotect(memory, page, PROT_NONE), 0);
    assert_int_equal(mprotect(memory + 2 * page, page, PROT_NONE), 0);
    static const vjp_dtype types[] = {VJP_F32, VJP_BF16, VJP_F16};
    for (int i = 0; i < PROBES; i++) {
        if (!runs_here(probes[i]->name)) continue;
        for (int t = 0; t < 3; t++)
            for (int64_t n = 1; n <= 40; n++) {
                size_t bytes = (size_t)n * vjp_dtype_size(types[t]);
                float values[40], back[41];
                for (int k = 0; k < 40; k++)
                    values[k] = (float)(k + 1);
                for (int end = 0; end < 2; end++) {
                    char *at = end ? memory + 2 * page - bytes : memory + page;
                    memset(memory + page, 0x5a, page);
                    probes[i]->store(types[t], at, n, values);
                    back[n] = -7;
                    probes[i]->load(types[t], at, n, back);
                    assert_memory_equal(back, values, (size_t)n * 4);
                    assert_true(back[n] == -7);
                    for (size_t k = 0; k < page; k++)
                        if (memory + page + k < at || memory + page + k >= at + bytes)
                            assert_int_equal((unsigned char)memory[page + k], 0x5a);
                }
            }
    }
    munmap(memory, 3 * page);
}

static void vectors_add_alike(void **state) {
    (void)state;
    uint32_t seed = 1;
    for (int round = 0; round < 1000; round++) {
        float sixteen[16];
        for (int k = 0; k < 16; k++) {
            seed = seed * 1664525u + 1013904223u;
            sixteen[k] = (float)(int32_t)seed * powf(2, (float)(seed >> 8 & 31) - 40);
        }
        /* The order of addition that vec.h promises: (i, i+8), (i, i+4), (i, i+2), (i, i+1). */
        float tree[16];
        memcpy(tree, sixteen, sizeof tree);
        for (int half = 8; half > 0; half /= 2)
            for (int k = 0; k < half; k++)
                tree[k] = tree[k] + tree[k + half];
        for (int i = 0; i < PROBES; i++) {
            if (!runs_here(probes[i]->name)) continue;
            float sum = probes[i]->sum(sixteen);
            assert_memory_equal(&sum, &tree[0], 4);
            float fused = fmaf(sixteen[0], sixteen[1], sixteen[2]);
            float have = probes[i]->fma(sixteen[0], sixteen[1], sixteen[2]);
            if (strcmp(probes[i]->name, "plain") != 0) assert_memory_equal(&have, &fused, 4);
        }
    }
}

static void vectors_stream(void **state) {
    (void)state;
    static const vjp_dtype types[] = {VJP_F32, VJP_BF16, VJP_F16};
    _Alignas(64) unsigned char streamed[256 * 4], stored[256 * 4];
    float values[256];
    for (int k = 0; k < 256; k++)
        values[k] = (float)k * 1.37f - 100;
    for (int i = 0; i < PROBES; i++)
        for (int t = 0; t < 3 && runs_here(probes[i]->name); t++) {
            memset(streamed, 0, sizeof streamed);
            memset(stored, 0, sizeof stored);
            probes[i]->stream(types[t], streamed, 256, values);
            probes[i]->store(types[t], stored, 256, values);
            assert_memory_equal(streamed, stored, sizeof stored);
        }
}

/*
 * rope streams results too large for the cache, in vectors that must be aligned: of rows that lie an odd number of
 * elements apart only the first is. A device whose cache is empty streams every result.
 */
static void rows_apart_stream(void **state) {
    (void)state;
    enum { TIMES = 9, DIM = 64, STEP = 3 * DIM + 1 };
    vjp_device *cpu;
    assert_int_equal(vjp_open("cpu", NULL, &cpu), VJP_OK);
    ((cpu_state *)cpu->state)->cache_bytes = 0;
    const int64_t shape[] = {TIMES, 1, DIM}, angles[] = {TIMES, DIM / 2};
    static _Alignas(64) float y[TIMES * STEP], x[TIMES * DIM], table[TIMES * DIM / 2];
    for (int i = 0; i < TIMES * DIM; i++)
        x[i] = (float)i;
    for (int i = 0; i < TIMES * DIM / 2; i++)
        table[i] = 2;
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 3, shape), ty = vjp_tensor_of(y, VJP_F32, 3, shape);
    vjp_tensor angle = vjp_tensor_of(table, VJP_F32, 2, angles);
    for (int64_t step = STEP - 1; step <= STEP; step++) {
        ty.stride[0] = step;
        memset(y, 0, sizeof y);
        assert_int_equal(vjp_rope_forward(cpu, &ty, &tx, &angle, &angle, NULL, NULL), VJP_OK);
        for (int64_t i = 0; i < (TIMES - 1) * step; i++) {
            const float *row = x + i / step * DIM;
            int64_t k = i % step;
            float expected = k < DIM / 2 ? 2 * row[k] - 2 * row[k + DIM / 2] : 0;
            if (k >= DIM / 2 && k < DIM) expected = 2 * row[k] + 2 * row[k - DIM / 2];
            assert_true(y[i] == expected);
        }
    }
    vjp_close(cpu);
}

int main(void) {
    unsetenv("VJP_THREADS");
    unsetenv("VJP_ISA");
    unsetenv("VJP_GEMM");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_widen),    cmocka_unit_test(halves_round),        cmocka_unit_test(sets_open),
        cmocka_unit_test(vectors_convert), cmocka_unit_test(vectors_stay_inside), cmocka_unit_test(vectors_add_alike),
        cmocka_unit_test(vectors_stream),  cmocka_unit_test(rows_apart_stream),
    };
    return cmocka_run_group_tests_name("vectors", tests, NULL, NULL);
}
