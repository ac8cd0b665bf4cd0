/* SPDX-License-Identifier: MIT */
// One shader, compiled unchanged: SHADER is its name, SHADER_FILE the file. The emulator reads its lists of operands,
// numbers and kernels; a template calls each kernel.
#include <utility>

#include "emulate.h"

#include <metal_stdlib>

#define THREADGROUP_MEMORY(type, name, count)                                                                          \
    alignas(16) static char name##_bytes[sizeof(type) * (count)];                                                      \
    type *name = reinterpret_cast<type *>(name##_bytes);                                                               \
    emulate_shared(name, sizeof name##_bytes)

namespace SHADER {

#include SHADER_FILE

// The value behind an argument's address: a pointer, a builtin, or for a reference what it refers to.
template <class... A, size_t... I>
static void call(void (*kernel)(A...), void *const *arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A> *>(arguments[I])...);
}
template <class... A> static void call(void (*kernel)(A...), void *const *arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

#define OPERAND_CONSTANT(kind, n, name) {#name, n, &name##_type},
#define NUMBER_CONSTANT(n, name)        {#name, 32 + n, &name},
#define COUNT_OPERAND(kind, n, name)    +1
#define KERNEL_CALL(name)               {#name, [](void *const *arguments) { call(run_##name, arguments); }},
#define NAME_OF(name)                   NAME_OF_TEXT(name)
#define NAME_OF_TEXT(name)              #name

static const emulate_constant constants[] = {OPERANDS(OPERAND_CONSTANT) NUMBERS(NUMBER_CONSTANT){"MERGED", 48, &MERGED},
                                             {nullptr, 0, nullptr}};
static const emulate_kernel kernels[] = {KERNELS(KERNEL_CALL)};
static emulate_shader self = {NAME_OF(SHADER),
                              constants,
                              sizeof constants / sizeof constants[0] - 1,
                              0 OPERANDS(COUNT_OPERAND),
                              kernels,
                              sizeof kernels / sizeof kernels[0],
                              nullptr};
static const bool entered = (self.next = emulate_shaders, emulate_shaders = &self, true);

} // namespace SHADER
