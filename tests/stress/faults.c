/* SPDX-License-Identifier: MIT */
/*
 * Makes the k-th call of one kind fail: preloaded (LD_PRELOAD) into an unchanged program by tests/stress/faults.
 *
 *     VJP_FAULT_KIND     what fails: a name of the two tables below
 *     VJP_FAULT_AT       which call, from 1; absent: none fails, all are counted
 *     VJP_FAULT_LASTING  set: all later calls fail too, as on a disk that stays full
 *     VJP_FAULT_REPORT   a file that gets the number of calls, and of those that failed, when the program exits
 *
 * Memory and threads are intercepted by name. Files are not, since the C library opens and writes its streams by
 * internal functions: a seccomp filter turns the system calls of the kind into a signal, and its handler repeats the
 * call from the one address that the filter lets through, or returns an error in its place. Only calls after main()
 * has begun count. Not counted are writes to standard error, where the sentence about the failure goes, and the memory
 * of a BLAS and its threads: BLIS ends the process when it gets none.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define VISIBLE __attribute__((visibility("default")))

typedef enum by_name { NOTHING, MALLOC, CALLOC, REALLOC, ALIGNED_ALLOC, POSIX_MEMALIGN, MMAP, PTHREAD_CREATE } by_name;

static const char *const names[] = {
    [MALLOC] = "malloc",
    [CALLOC] = "calloc",
    [REALLOC] = "realloc",
    [ALIGNED_ALLOC] = "aligned_alloc",
    [POSIX_MEMALIGN] = "posix_memalign",
    [MMAP] = "mmap",
    [PTHREAD_CREATE] = "pthread_create",
};

/* What a call of a kind does when it fails. */
typedef enum outcome { REFUSED, DONE_BUT_REFUSED, SHORT } outcome;

enum { MAX_CALLS = 4, ABSENT = -1 };

/* Calls that an architecture does not have. */
#ifndef SYS_open
#define SYS_open    ABSENT
#define SYS_rename  ABSENT
#define SYS_mkdir   ABSENT
#define SYS_symlink ABSENT
#define SYS_unlink  ABSENT
#define SYS_rmdir   ABSENT
#define SYS_stat    ABSENT
#endif
#ifndef SYS_renameat
#define SYS_renameat ABSENT
#endif

static const struct system_kind {
    const char *name;
    int error;
    outcome outcome;
    long call[MAX_CALLS];
} system_kinds[] = {
    {"open", EMFILE, REFUSED, {SYS_open, SYS_openat, ABSENT, ABSENT}},
    {"read", EIO, REFUSED, {SYS_read, SYS_readv, ABSENT, ABSENT}},
    {"short_read", 0, SHORT, {SYS_read, SYS_pread64, ABSENT, ABSENT}},
    {"pread", EIO, REFUSED, {SYS_pread64, SYS_preadv, ABSENT, ABSENT}},
    {"write", ENOSPC, REFUSED, {SYS_write, SYS_writev, ABSENT, ABSENT}},
    {"short_write", 0, SHORT, {SYS_write, SYS_pwrite64, ABSENT, ABSENT}},
    {"pwrite", ENOSPC, REFUSED, {SYS_pwrite64, SYS_pwritev, ABSENT, ABSENT}},
    {"fsync", EIO, REFUSED, {SYS_fsync, SYS_fdatasync, ABSENT, ABSENT}},
    {"rename", EACCES, REFUSED, {SYS_rename, SYS_renameat, SYS_renameat2, ABSENT}},
    {"mkdir", ENOSPC, REFUSED, {SYS_mkdir, SYS_mkdirat, ABSENT, ABSENT}},
    {"symlink", ENOSPC, REFUSED, {SYS_symlink, SYS_symlinkat, ABSENT, ABSENT}},
    {"unlink", EACCES, REFUSED, {SYS_unlink, SYS_unlinkat, SYS_rmdir, ABSENT}},
    {"close", EIO, DONE_BUT_REFUSED, {SYS_close, ABSENT, ABSENT, ABSENT}},
    {"ftruncate", ENOSPC, REFUSED, {SYS_ftruncate, ABSENT, ABSENT, ABSENT}},
    {"flock", ENOLCK, REFUSED, {SYS_flock, ABSENT, ABSENT, ABSENT}},
    {"fcntl", ENOLCK, REFUSED, {SYS_fcntl, ABSENT, ABSENT, ABSENT}},
    {"stat", EIO, REFUSED, {SYS_stat, SYS_fstat, SYS_newfstatat, SYS_statx}},
    {"lseek", EINVAL, REFUSED, {SYS_lseek, ABSENT, ABSENT, ABSENT}},
    {"getdents", EIO, REFUSED, {SYS_getdents64, ABSENT, ABSENT, ABSENT}},
};

/* ---- Which call fails ---------------------------------------------------------------------------------- */

static by_name chosen_name;
static const struct system_kind *chosen_system;
static unsigned long at; /* 0: none fails */
static bool lasting, counting;
static atomic_ulong calls, failed;

static bool fails(void) {
    unsigned long call = atomic_fetch_add(&calls, 1) + 1;
    if (!at || (lasting ? call < at : call != at)) return false;
    atomic_fetch_add(&failed, 1);
    return true;
}

/* Where the code of libraries that are not ours begins and ends. */
enum { MAX_FOREIGN = 8 };
static struct range { uintptr_t begin, end; } foreign[MAX_FOREIGN];
static int foreign_count;

static int note_foreign(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    if (!strstr(info->dlpi_name, "blis") && !strstr(info->dlpi_name, "blas") && !strstr(info->dlpi_name, "gomp"))
        return 0;
    for (int i = 0; i < info->dlpi_phnum && foreign_count < MAX_FOREIGN; i++) {
        uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X))
            foreign[foreign_count++] = (struct range){begin, begin + info->dlpi_phdr[i].p_memsz};
    }
    return 0;
}

static bool name_fails(by_name name, const void *caller) {
    if (!counting || chosen_name != name) return false;
    for (int i = 0; i < foreign_count; i++)
        if ((uintptr_t)caller >= foreign[i].begin && (uintptr_t)caller < foreign[i].end) return false;
    return fails();
}

#define FAILS(name) name_fails(name, __builtin_return_address(0))

/* ---- By name --------------------------------------------------------------------------------------------- */

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

static void *no_memory(void) {
    errno = ENOMEM;
    return NULL;
}

VISIBLE void *malloc(size_t bytes) {
    return FAILS(MALLOC) ? no_memory() : __libc_malloc(bytes);
}

VISIBLE void *calloc(size_t count, size_t bytes) {
    return FAILS(CALLOC) ? no_memory() : __libc_calloc(count, bytes);
}

VISIBLE void *realloc(void *old, size_t bytes) {
    return FAILS(REALLOC) ? no_memory() : __libc_realloc(old, bytes);
}

VISIBLE void *aligned_alloc(size_t alignment, size_t bytes) {
    return FAILS(ALIGNED_ALLOC) ? no_memory() : __libc_memalign(alignment, bytes);
}

VISIBLE int posix_memalign(void **data, size_t alignment, size_t bytes) {
    void *made = FAILS(POSIX_MEMALIGN) ? NULL : __libc_memalign(alignment, bytes);
    if (!made) return ENOMEM;
    *data = made;
    return 0;
}

VISIBLE void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (FAILS(MMAP)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}

typedef void *(*thread_start)(void *);
typedef int create_function(pthread_t *thread, const pthread_attr_t *attributes, thread_start start, void *argument);
static create_function *real_create;

VISIBLE int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, thread_start start, void *argument) {
    return FAILS(PTHREAD_CREATE) ? EAGAIN : real_create(thread, attributes, start, argument);
}

/* ---- By system call ---------------------------------------------------------------------------------------- */

/* A system call whose last instruction is at a known address, which the filter lets through. Both names are global
 * symbols: with two local ones the linker of aarch64 gives both the first one's address. */
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN long faults_call(long number, long a, long b, long c, long d, long e, long f);
HIDDEN extern const char faults_call_end[];

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl faults_call, faults_call_end\n"
        "faults_call:\n"
        "mov %rdi, %rax\n"
        "mov %rsi, %rdi\n"
        "mov %rdx, %rsi\n"
        "mov %rcx, %rdx\n"
        "mov %r8, %r10\n"
        "mov %r9, %r8\n"
        "mov 8(%rsp), %r9\n"
        "syscall\n"
        "faults_call_end:\n"
        "ret\n");
#define RESULT(context)      ((context)->uc_mcontext.gregs[REG_RAX])
#define ARGUMENT(context, i) ((long)(context)->uc_mcontext.gregs[argument_register[i]])
static const int argument_register[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9};
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl faults_call, faults_call_end\n"
        "faults_call:\n"
        "mov x8, x0\n"
        "mov x0, x1\n"
        "mov x1, x2\n"
        "mov x2, x3\n"
        "mov x3, x4\n"
        "mov x4, x5\n"
        "mov x5, x6\n"
        "svc #0\n"
        "faults_call_end:\n"
        "ret\n");
#define RESULT(context)      ((context)->uc_mcontext.regs[0])
#define ARGUMENT(context, i) ((long)(context)->uc_mcontext.regs[i])
#else
#error "there is no code for system calls of this processor"
#endif

static void handle_call(int signal, siginfo_t *info, void *pointer) {
    (void)signal;
    ucontext_t *context = pointer;
    long a[6], number = info->si_syscall;
    for (int i = 0; i < 6; i++)
        a[i] = ARGUMENT(context, i);
    bool writes = number == SYS_write || number == SYS_writev;
    bool failing = !(writes && a[0] == STDERR_FILENO) && fails();
    if (failing && chosen_system->outcome == SHORT && a[2] > 1) a[2] /= 2;
    long result = -chosen_system->error;
    if (!failing || chosen_system->outcome != REFUSED) {
        result = faults_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
        if (failing && chosen_system->outcome == DONE_BUT_REFUSED) result = -chosen_system->error;
    }
    RESULT(context) = (__typeof__(RESULT(context)))result;
}

static bool filter_calls(void) {
    struct sigaction action = {.sa_sigaction = handle_call, .sa_flags = SA_SIGINFO | SA_NODEFER};
    uint64_t end = (uint64_t)(uintptr_t)faults_call_end;
    enum { LOW = offsetof(struct seccomp_data, instruction_pointer), FIRST_COMPARED = 6 };
    struct sock_filter filter[8 + MAX_CALLS];
    unsigned short count = 0;
    /* Calls from faults_call() pass. */
    filter[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, LOW);
    filter[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)end, 0, 3);
    filter[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, LOW + 4);
    filter[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(end >> 32), 0, 1);
    filter[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < MAX_CALLS; i++)
        if (chosen_system->call[i] != ABSENT)
            filter[count++] =
                (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)chosen_system->call[i], 0, 0);
    for (unsigned short i = FIRST_COMPARED; i < count; i++)
        filter[i].jt = (uint8_t)(count - i); /* to the last instruction, which is not there yet */
    filter[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    struct sock_fprog program = {.len = count, .filter = filter};
    return sigaction(SIGSYS, &action, NULL) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* ---- Before and after main() --------------------------------------------------------------------------------- */

static int report_file = -1;

static void report(void) {
    char text[64];
    int length = snprintf(text, sizeof text, "%lu %lu\n", atomic_load(&calls), atomic_load(&failed));
    faults_call(SYS_write, report_file, (long)(intptr_t)text, length, 0, 0, 0);
}

static bool choose(void) {
    const char *kind = getenv("VJP_FAULT_KIND"), *call = getenv("VJP_FAULT_AT"), *path = getenv("VJP_FAULT_REPORT");
    at = call ? strtoul(call, NULL, 10) : 0;
    lasting = getenv("VJP_FAULT_LASTING") != NULL;
    for (size_t i = MALLOC; kind && i < sizeof names / sizeof names[0]; i++)
        if (strcmp(kind, names[i]) == 0) chosen_name = (by_name)i;
    for (size_t i = 0; kind && i < sizeof system_kinds / sizeof system_kinds[0]; i++)
        if (strcmp(kind, system_kinds[i].name) == 0) chosen_system = &system_kinds[i];
    enum { NOT_CLOSED_BY_CHANCE = 900 };
    int file = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
    report_file = file >= 0 ? fcntl(file, F_DUPFD_CLOEXEC, NOT_CLOSED_BY_CHANCE) : -1;
    if (file >= 0) close(file);
    return (chosen_name != NOTHING || chosen_system) && report_file >= 0;
}

typedef int main_function(int argc, char **argv, char **environment);
typedef int start_function(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                           void (*loader_fini)(void), void *stack_end);

static main_function *real_main;

static int counted_main(int argc, char **argv, char **environment) {
    enum { CANNOT_INTERCEPT = 99 };
    real_create = (create_function *)dlsym(RTLD_NEXT, "pthread_create");
    if (!choose() || !real_create || (chosen_system && !filter_calls())) {
        fprintf(stderr, "faults: VJP_FAULT_KIND is unknown, or its calls cannot be intercepted here\n");
        return CANNOT_INTERCEPT;
    }
    dl_iterate_phdr(note_foreign, NULL);
    atexit(report);
    counting = true;
    return real_main(argc, argv, environment);
}

VISIBLE start_function __libc_start_main;

VISIBLE int __libc_start_main(main_function *main, int argc, char **argv, void (*init)(void), void (*fini)(void),
                              void (*loader_fini)(void), void *stack_end) {
    start_function *real = (start_function *)dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return real(counted_main, argc, argv, init, fini, loader_fini, stack_end);
}
