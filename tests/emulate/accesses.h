/* SPDX-License-Identifier: MIT */
/*
 * Memory accesses of emulated kernels: they are compiled with the compiler's instrumentation for the thread sanitizer
 * (-fsanitize=thread), whose calls land here in the place of its runtime. To be included once in a program, by the
 * emulator, which defines emulate_access() before.
 */
#ifndef VJP_TESTS_EMULATE_ACCESSES_H
#define VJP_TESTS_EMULATE_ACCESSES_H

#include <cstddef>
#include <cstdint>

// `place` is where in the code: an address behind the access.
static void emulate_access(const void *address, size_t bytes, bool write, uintptr_t place);

#define ACCESS(name, bytes, write)                                                                                     \
    void __tsan_##name(void *address) {                                                                                \
        emulate_access(address, bytes, write, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));               \
    }
extern "C" {
ACCESS(read1, 1, false)
ACCESS(read2, 2, false)
ACCESS(read4, 4, false)
ACCESS(read8, 8, false)
ACCESS(read16, 16, false)
ACCESS(write1, 1, true)
ACCESS(write2, 2, true)
ACCESS(write4, 4, true)
ACCESS(write8, 8, true)
ACCESS(write16, 16, true)
ACCESS(unaligned_read2, 2, false)
ACCESS(unaligned_read4, 4, false)
ACCESS(unaligned_read8, 8, false)
ACCESS(unaligned_read16, 16, false)
ACCESS(unaligned_write2, 2, true)
ACCESS(unaligned_write4, 4, true)
ACCESS(unaligned_write8, 8, true)
ACCESS(unaligned_write16, 16, true)

void __tsan_read_range(void *address, size_t bytes) {
    emulate_access(address, bytes, false, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}
void __tsan_write_range(void *address, size_t bytes) {
    emulate_access(address, bytes, true, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}
void __tsan_init(void) {
}
void __tsan_func_entry(void *) {
}
void __tsan_func_exit(void) {
}
}
#undef ACCESS

#endif
