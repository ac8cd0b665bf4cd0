/* SPDX-License-Identifier: MIT */
/*
 * What `vjp bench` and `vjp bench train` share: how much memory is moved, on how many threads, and how times and shares
 * look.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench.h"
#include "core/core.h"
#include "core/system.h"

/* "Several times": a cache that is shared with others holds at most a quarter of what passes through it. */
static const double CACHES = 4, QUICK_CACHES = 2, CARD_CACHES = 32;
static const double MAX_MEMORY_SHARE = 0.4, ASSUMED_CACHE = 32 << 20;

static double cache_bytes(const vjp_device *device) {
    if (device->backend->cache_bytes) return (double)device->backend->cache_bytes(device);
    int64_t bytes = system_last_cache_bytes();
    return bytes > 0 ? (double)bytes : ASSUMED_CACHE;
}

static double free_bytes(void) {
    double bytes = system_unused_bytes();
    return bytes > 0 ? bytes : 1e9;
}

/* Half of what may be used is the op's (its forward holds y beside what the backward moves), half the copy's. */
double bench_target_bytes(const vjp_device *device, bool quick) {
    if (!vjp_device_is_host(device)) return cache_bytes(device) * CARD_CACHES;
    double wanted = cache_bytes(device) * (quick ? QUICK_CACHES : CACHES);
    return fmin(wanted, free_bytes() * MAX_MEMORY_SHARE / 2);
}

int bench_threads(const char *device, int64_t asked) {
    if (strcmp(device, "cpu") != 0) return 1;
    const char *variable = getenv("VJP_THREADS");
    if (asked) return (int)asked;
    return variable && *variable ? atoi(variable) : (int)system_processors();
}

cli_colour bench_colour(double share) {
    return share >= 0.8 ? CLI_GREEN : share >= 0.5 ? CLI_YELLOW : CLI_RED;
}

void bench_milliseconds(double seconds, char text[BENCH_TEXT]) {
    if (isfinite(seconds))
        snprintf(text, BENCH_TEXT, seconds < 1e-5 ? "%.6f" : seconds < 1e-3 ? "%.4f" : "%.2f", seconds * 1e3);
    else
        snprintf(text, BENCH_TEXT, "-");
}

void bench_share(double share, char text[BENCH_TEXT]) {
    snprintf(text, BENCH_TEXT, isfinite(share) ? "%.2f" : "-", share);
}
