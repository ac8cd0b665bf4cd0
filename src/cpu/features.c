/* SPDX-License-Identifier: MIT */
/*
 * Reading the features of a processor (features.h). An x86-64 processor says with the instruction cpuid what it has,
 * and the system with xgetbv which registers it saves when it switches threads: an instruction may be used only if both
 * agree. On aarch64 the system says it.
 */
#include "cpu/features.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#ifdef __x86_64__

#include <cpuid.h>
#include <stdint.h>

/* Bits, by the register of cpuid that they are in. */
enum { FMA = 1 << 12, MOVBE = 1 << 22, OSXSAVE = 1 << 27, AVX = 1 << 28, F16C = 1 << 29 }; /* leaf 1, ecx */
enum { BMI1 = 1 << 3, AVX2 = 1 << 5, BMI2 = 1 << 8 };                                      /* leaf 7, ebx */
enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };                                           /* leaf 7, edx */
enum { LZCNT = 1 << 5 };                                                                   /* leaf 0x80000001, ecx */
static const uint32_t AVX512 =
    1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31; /* f, dq, cd, bw, vl: leaf 7, ebx */

/* Groups of registers, by their bits in xgetbv. */
enum { VECTORS = 3 << 1, WIDE_VECTORS = 7 << 5, TILES = 3 << 17 };

typedef struct registers {
    uint32_t a, b, c, d;
} registers;

/* All zero: the processor does not have this leaf. */
static registers read_leaf(uint32_t leaf) {
    registers r = {0};
    if (!__get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d)) r = (registers){0};
    return r;
}

static bool has(uint32_t word, uint32_t bits) {
    return (word & bits) == bits;
}

static bool system_saves(uint32_t groups) {
    if (!has(read_leaf(1).c, OSXSAVE)) return false;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
#ifdef __APPLE__
    /* macOS begins to save the wide registers of a thread when the thread first uses them, and shows them only then. */
    if (has(low, VECTORS)) low |= WIDE_VECTORS;
#endif
    return has(low, groups);
}

bool vjp_cpu_has_avx2(void) {
    return has(read_leaf(1).c, FMA | MOVBE | AVX | F16C) && has(read_leaf(7).b, BMI1 | AVX2 | BMI2) &&
           has(read_leaf(0x80000001).c, LZCNT) && system_saves(VECTORS);
}

bool vjp_cpu_has_avx512(void) {
    return vjp_cpu_has_avx2() && has(read_leaf(7).b, AVX512) && system_saves(VECTORS | WIDE_VECTORS);
}

bool vjp_cpu_has_amx(void) {
    return has(read_leaf(7).d, AMX_BF16 | AMX_TILE) && system_saves(TILES);
}

#else

bool vjp_cpu_has_avx2(void) {
    return false;
}

bool vjp_cpu_has_avx512(void) {
    return false;
}

bool vjp_cpu_has_amx(void) {
    return false;
}

#endif

bool vjp_cpu_has_bf16(void) {
#if defined(__aarch64__) && defined(__linux__)
    static const unsigned long BF16 = 1ul << 14; /* HWCAP2_BF16, which older headers do not have */
    return getauxval(AT_HWCAP2) & BF16;
#elif defined(__aarch64__) && defined(__APPLE__)
    int value = 0;
    size_t bytes = sizeof value;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &value, &bytes, NULL, 0) == 0 && value;
#else
    return false;
#endif
}
