/* SPDX-License-Identifier: MIT */
/*
 * The yardstick of a GPU is a copy within its memory, timed by its own clock.
 *
 * The yardstick of the CPU: a copy in the device's own pool, with ordinary stores and with streaming stores. Which is
 * faster depends on the machine (ordinary ones first read the line that they overwrite, unless the processor avoids
 * that); the faster is the limit. Chunks are large enough to keep the prefetchers running and small enough to balance.
 */
#include "proof/yardstick.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "core/system.h"
#include "proof/values.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { CHUNK = 256 << 10 };

struct proof_yardstick {
    vjp_device *device;
    char *from, *to;
    size_t bytes; /* of each */
};

static void copy_plain(void *argument, size_t i) {
    const proof_yardstick *y = argument;
    memcpy(y->to + i * CHUNK, y->from + i * CHUNK, CHUNK);
}

/* Streaming stores, 64 bytes at a time; the memory is aligned to that. Where there is no such store: a plain copy. */
static void copy_streaming(void *argument, size_t i) {
    const proof_yardstick *y = argument;
#if defined(__x86_64__)
    const __m128i *from = (const __m128i *)(const void *)(y->from + i * CHUNK);
    __m128i *to = (__m128i *)(void *)(y->to + i * CHUNK);
    for (size_t k = 0; k < CHUNK / sizeof *to; k += 4) {
        __m128i a = _mm_load_si128(from + k), b = _mm_load_si128(from + k + 1);
        __m128i c = _mm_load_si128(from + k + 2), d = _mm_load_si128(from + k + 3);
        _mm_stream_si128(to + k, a);
        _mm_stream_si128(to + k + 1, b);
        _mm_stream_si128(to + k + 2, c);
        _mm_stream_si128(to + k + 3, d);
    }
    _mm_sfence();
#elif defined(__aarch64__)
    const char *from = y->from + i * CHUNK;
    char *to = y->to + i * CHUNK;
    for (size_t k = 0; k < CHUNK; k += 64)
        __asm__ volatile("ldp q0, q1, [%0]\n\tldp q2, q3, [%0, #32]\n\t"
                         "stnp q0, q1, [%1]\n\tstnp q2, q3, [%1, #32]" ::"r"(from + k),
                         "r"(to + k)
                         : "v0", "v1", "v2", "v3", "memory");
#else
    copy_plain(argument, i);
    (void)y;
#endif
}

/*
 * Reads a chunk in 16-byte vectors, of which the sums are of no use: one store of them keeps the compiler from leaving
 * the loads out.
 */
static void read_only(void *argument, size_t i) {
    typedef uint64_t words __attribute__((vector_size(16)));
    enum { SUMS = 8 };
    const proof_yardstick *y = argument;
    const words *from = (const words *)(const void *)(y->from + i * CHUNK);
    words sum[SUMS] = {{0}};
    for (size_t k = 0; k < CHUNK / sizeof *from; k += SUMS)
        for (size_t j = 0; j < SUMS; j++)
            sum[j] ^= from[k + j];
    for (size_t j = 1; j < SUMS; j++)
        sum[0] ^= sum[j];
    volatile uint64_t unused = sum[0][0] ^ sum[0][1];
    (void)unused;
}

static vjp_status enqueue_copy(void *argument) {
    const proof_yardstick *y = argument;
    return y->device->backend->copy(y->device, y->to, y->from, y->bytes);
}

static bool copies_by_itself(const vjp_device *device) {
    return device->backend->copy && device->backend->measure;
}

proof_yardstick *proof_yardstick_open(vjp_device *device, size_t bytes) {
    if (!device->backend->parallel && !copies_by_itself(device)) return NULL;
    proof_yardstick *y = proof_memory(sizeof *y);
    *y = (proof_yardstick){.device = device, .bytes = (bytes / 2 + CHUNK - 1) / CHUNK * CHUNK};
    void *from = NULL, *to = NULL;
    if (vjp_alloc(device, y->bytes, &from) != VJP_OK || vjp_alloc(device, y->bytes, &to) != VJP_OK) {
        vjp_free(device, from);
        free(y);
        return NULL;
    }
    y->from = from;
    y->to = to;
    if (!vjp_device_is_host(device)) return y;
    memset(from, 1, y->bytes); /* pages that were never written all map to one zero page */
    memset(to, 2, y->bytes);
    return y;
}

void proof_yardstick_close(proof_yardstick *y) {
    if (!y) return;
    vjp_free(y->device, y->from);
    vjp_free(y->device, y->to);
    free(y);
}

double proof_yardstick_copy(proof_yardstick *y) {
    static const vjp_task copies[] = {copy_plain, copy_streaming};
    double best = 0;
    if (copies_by_itself(y->device)) {
        double seconds;
        vjp_status status = y->device->backend->measure(y->device, enqueue_copy, y, 3, &seconds);
        return status == VJP_OK ? 2 * (double)y->bytes / seconds : 0;
    }
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) {
        double start = system_seconds();
        vjp_parallel(y->device, y->bytes / CHUNK, copies[i], y);
        double rate = 2 * (double)y->bytes / (system_seconds() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

double proof_yardstick_read(proof_yardstick *y) {
    if (!y->device->backend->parallel) return 0;
    double start = system_seconds();
    vjp_parallel(y->device, y->bytes / CHUNK, read_only, y);
    return (double)y->bytes / (system_seconds() - start);
}
