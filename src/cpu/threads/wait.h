/* SPDX-License-Identifier: MIT */
/*
 * How a thread of the pool waits: it pauses for a few microseconds, then offers its core to others between looks, and
 * at last sleeps until it is woken. On an idle machine the thread sees the news within a microsecond; on a busy one it
 * gives its core away almost at once, since what it waits for may need that core.
 */
#ifndef VJP_CPU_WAIT_H
#define VJP_CPU_WAIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* VJP_NO_FUTEX builds the portable gate on Linux too, for tests. */
#if defined(__linux__) && !defined(VJP_NO_FUTEX)
#define VJP_FUTEX 1
#elif defined(_WIN32)
#define VJP_ADDRESS_WAIT 1
#elif defined(__wasi__)
#define VJP_MEMORY_WAIT 1
#else
#include <pthread.h>
#define VJP_MUTEX 1
#endif

/* A word that a thread can sleep on. */
typedef struct cpu_gate {
    _Atomic uint32_t word;
#ifdef VJP_MUTEX
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} cpu_gate;

void vjp_cpu_gate_init(cpu_gate *gate);
void vjp_cpu_gate_destroy(cpu_gate *gate);

/* Sleeps while the word is `value`; it may return early, so the caller looks again. */
void vjp_cpu_gate_sleep(cpu_gate *gate, uint32_t value);

/* Wakes the thread that sleeps there, after the word was changed. */
void vjp_cpu_gate_wake(cpu_gate *gate);

/* One wait, from its beginning; all zero at first. */
typedef struct cpu_spin {
    int64_t rounds, begin; /* begin: nanoseconds, of the first offer of the core */
} cpu_spin;

/* Passes a moment. False when it is time to sleep: the wait was long, or the core is wanted by others. */
bool vjp_cpu_spin(cpu_spin *spin);

#endif
