/* SPDX-License-Identifier: MIT */
/* Kills a child process before one of its system calls that change the disk. Linux only; include it after cmocka.h. */
#ifndef VJP_TESTS_KILLING_H
#define VJP_TESTS_KILLING_H

#include <signal.h>
#include <stdbool.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef PTRACE_GET_SYSCALL_INFO
/* How many other calls there are depends on the state of malloc(). */
static inline bool changes_disk(uint64_t call) {
    static const long calls[] = {
        SYS_write,    SYS_pwrite64,  SYS_openat,    SYS_fsync,  SYS_mkdirat, SYS_unlinkat,
        SYS_renameat, SYS_renameat2, SYS_symlinkat,
#ifdef SYS_rename
        SYS_open,     SYS_mkdir,     SYS_rmdir,     SYS_unlink, SYS_rename,  SYS_symlink,
#endif
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        if (call == (uint64_t)calls[i]) return true;
    return false;
}

typedef enum outcome { KILLED, ENDED, FORBIDDEN } outcome;

enum { TRACING_NOT_ALLOWED = 77 };

/* For the child, before what is to be killed. */
static inline void let_parent_kill(void) {
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(TRACING_NOT_ALLOWED);
    raise(SIGSTOP);
}

/* Kills it before the n-th call that changes the disk. One that makes fewer must end with status 0. */
static inline outcome kill_at_call(pid_t child, int calls) {
    for (int status, seen = 0;;) {
        assert_int_equal(waitpid(child, &status, 0), child);
        if (WIFEXITED(status) && WEXITSTATUS(status) == TRACING_NOT_ALLOWED) return FORBIDDEN;
        if (!WIFSTOPPED(status)) {
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            return ENDED;
        }
        struct __ptrace_syscall_info info = {0};
        bool known = ptrace(PTRACE_SETOPTIONS, child, NULL, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL) == 0 &&
                     ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof info, &info) > 0;
        seen += known && info.op == PTRACE_SYSCALL_INFO_ENTRY && changes_disk(info.entry.nr);
        if (known && seen < calls && ptrace(PTRACE_SYSCALL, child, NULL, NULL) == 0) continue;
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        return known ? KILLED : FORBIDDEN;
    }
}
#endif

#endif
