/* SPDX-License-Identifier: MIT */
/*
 * Switching between stacks, for the emulators alone: fiber_stack() prepares one that begins with a function, and
 * fiber_switch() continues on another. swapcontext() makes a system call for signals each time, which would be most of
 * a run.
 */
#ifndef VJP_TESTS_EMULATE_FIBER_H
#define VJP_TESTS_EMULATE_FIBER_H

#include <cstring>

// Saves what a callee must keep and continues on the other stack.
extern "C" void fiber_switch(void **from, void *to);
#if defined __x86_64__
asm(R"(
    .text
    .globl fiber_switch
    .type fiber_switch, @function
fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fiber_switch, . - fiber_switch
)");
static void *fiber_stack(char *top, void (*start)()) {
    void **sp = reinterpret_cast<void **>(top);
    *--sp = nullptr; // as after a call: the stack is 8 off a multiple of 16
    *--sp = reinterpret_cast<void *>(start);
    for (int i = 0; i < 6; i++)
        *--sp = nullptr;
    return sp;
}
#elif defined __aarch64__
asm(R"(
    .text
    .globl fiber_switch
    .type fiber_switch, %function
fiber_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size fiber_switch, . - fiber_switch
)");
static void *fiber_stack(char *top, void (*start)()) {
    void **sp = reinterpret_cast<void **>(top - 160);
    memset(sp, 0, 160);
    sp[11] = reinterpret_cast<void *>(start);
    return sp;
}
#else
#error "emulation knows no way to switch stacks on this processor"
#endif

#endif
