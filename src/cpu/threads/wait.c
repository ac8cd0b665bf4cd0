/* SPDX-License-Identifier: MIT */
/*
 * Waiting (wait.h): futexes on Linux, their like on Windows and in WebAssembly, a mutex and a condition variable
 * elsewhere.
 */
#include "cpu/threads/wait.h"
#include "core/system.h"
#include "cpu/cpu.h"

#ifdef VJP_FUTEX

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

void vjp_cpu_gate_init(cpu_gate *gate) {
    atomic_init(&gate->word, 0);
}

void vjp_cpu_gate_destroy(cpu_gate *gate) {
    (void)gate;
}

void vjp_cpu_gate_sleep(cpu_gate *gate, uint32_t value) {
    syscall(SYS_futex, &gate->word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

void vjp_cpu_gate_wake(cpu_gate *gate) {
    syscall(SYS_futex, &gate->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

#elif defined VJP_ADDRESS_WAIT

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

void vjp_cpu_gate_init(cpu_gate *gate) {
    atomic_init(&gate->word, 0);
}

void vjp_cpu_gate_destroy(cpu_gate *gate) {
    (void)gate;
}

void vjp_cpu_gate_sleep(cpu_gate *gate, uint32_t value) {
    WaitOnAddress(&gate->word, &value, sizeof value, INFINITE);
}

void vjp_cpu_gate_wake(cpu_gate *gate) {
    WakeByAddressSingle((void *)&gate->word);
}

#elif defined VJP_MEMORY_WAIT

void vjp_cpu_gate_init(cpu_gate *gate) {
    atomic_init(&gate->word, 0);
}

void vjp_cpu_gate_destroy(cpu_gate *gate) {
    (void)gate;
}

/* A build without threads has no one to wait for. */
void vjp_cpu_gate_sleep(cpu_gate *gate, uint32_t value) {
#ifdef __wasm_atomics__
    __builtin_wasm_memory_atomic_wait32((int *)&gate->word, (int)value, -1);
#else
    (void)gate, (void)value;
#endif
}

void vjp_cpu_gate_wake(cpu_gate *gate) {
#ifdef __wasm_atomics__
    __builtin_wasm_memory_atomic_notify((int *)&gate->word, 1);
#else
    (void)gate;
#endif
}

#else

void vjp_cpu_gate_init(cpu_gate *gate) {
    atomic_init(&gate->word, 0);
    pthread_mutex_init(&gate->mutex, NULL);
    pthread_cond_init(&gate->changed, NULL);
}

void vjp_cpu_gate_destroy(cpu_gate *gate) {
    pthread_cond_destroy(&gate->changed);
    pthread_mutex_destroy(&gate->mutex);
}

void vjp_cpu_gate_sleep(cpu_gate *gate, uint32_t value) {
    pthread_mutex_lock(&gate->mutex);
    while (atomic_load(&gate->word) == value)
        pthread_cond_wait(&gate->changed, &gate->mutex);
    pthread_mutex_unlock(&gate->mutex);
}

/* The lock keeps the signal from falling between the sleeper's look at the word and its sleep. */
void vjp_cpu_gate_wake(cpu_gate *gate) {
    pthread_mutex_lock(&gate->mutex);
    pthread_cond_signal(&gate->changed);
    pthread_mutex_unlock(&gate->mutex);
}

#endif

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* "yield" does nothing on most cores; this takes about as long as x86's pause */
#endif
}

/*
 * A pause takes 15 to 50 ns: some 5 us of nothing else, then a system call every 16. Together they last about ten times
 * what waking a sleeping thread costs (20 to 50 us on a virtual machine), so that calls in a row find the threads
 * awake. A system call that took 30 us was another thread running on this core: two of the kernel's own tasks take
 * less.
 */
enum { PAUSES = 128, PAUSES_PER_YIELD = 16, SPIN_NS = 500000, BUSY_NS = 30000 };

bool vjp_cpu_spin(cpu_spin *spin) {
    if (++spin->rounds < PAUSES || spin->rounds % PAUSES_PER_YIELD) {
        pause_briefly();
        return true;
    }
    int64_t before = system_nanoseconds();
    system_yield();
    int64_t after = system_nanoseconds();
    if (!spin->begin) spin->begin = before;
    return after - before < BUSY_NS && after - spin->begin < SPIN_NS;
}

/* A task that is waited for wakes no thread when it is done, so the sleep is a short one: about one wake-up's cost. */
void vjp_cpu_wait(const _Atomic int64_t *count, int64_t min) {
    enum { NAP_NS = 50000 };
    cpu_spin spin = {0};
    while (atomic_load_explicit(count, memory_order_acquire) < min)
        if (!vjp_cpu_spin(&spin)) system_sleep(NAP_NS);
}
