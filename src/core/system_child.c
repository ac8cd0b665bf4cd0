/* SPDX-License-Identifier: MIT */
/*
 * A process that continues as a child of itself (system.h), by POSIX. The parent stays as it was at the call: it has
 * started no threads and uses next to no memory, so that what ends the child leaves it alone.
 */
#define _GNU_SOURCE /* strsignal() */
#include "core/system.h"

#if defined(_WIN32) || defined(__wasi__)

bool system_continue_as_child(system_ending *ending) {
    (void)ending;
    return false;
}

#else

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

/* Signals that ask a program to stop. A launcher may send them to the parent alone. */
static const int stops[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
enum { STOPS = sizeof stops / sizeof stops[0] };

static volatile sig_atomic_t child;

static void pass_on(int number) {
    int reason = errno;
    if (child > 0) kill((pid_t)child, number);
    errno = reason;
}

/* The child must not outlive the parent, which the launcher takes for it. Elsewhere the launcher ends both. */
static void end_with(pid_t parent) {
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) raise(SIGKILL);
#else
    (void)parent;
#endif
}

bool system_continue_as_child(system_ending *ending) {
    pid_t parent = getpid();
    sigset_t all, before;
    sigemptyset(&all);
    for (int i = 0; i < STOPS; i++)
        sigaddset(&all, stops[i]);
    sigprocmask(SIG_BLOCK, &all, &before); /* none may come between fork() and the handlers */
    pid_t made = fork();
    if (made <= 0) {
        if (made == 0) end_with(parent);
        sigprocmask(SIG_SETMASK, &before, NULL);
        return false;
    }
    child = (sig_atomic_t)made;
    struct sigaction action = {.sa_handler = pass_on, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < STOPS; i++)
        sigaction(stops[i], &action, NULL);
    sigprocmask(SIG_SETMASK, &before, NULL);
    int status = 0;
    while (waitpid(made, &status, 0) < 0 && errno == EINTR)
        continue;
    child = 0;
    *ending = (system_ending){.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1,
                              .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0};
    ending->aborted = ending->signal == SIGABRT;
    ending->reason = ending->signal ? strsignal(ending->signal) : "";
    return true;
}

#endif
