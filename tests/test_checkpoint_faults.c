/* SPDX-License-Identifier: MIT */
/*
 * Checkpoints whose save does not come to its end: one that is killed at any of its system calls, or at any moment, or
 * whose disk is full at any byte, leaves a whole checkpoint behind, with `latest` on it; and one that is read meanwhile
 * is whole.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#ifdef __linux__
#include <sched.h>
#include <sys/mount.h>

#include "killing.h"
#endif

#include "checkpoints.h"

/* ---- Killed ------------------------------------------------------------------------------------------ */

/* Every folder that calls itself a checkpoint is one. */
static void require_all_whole(const char *when) {
    char path[512], error[TRAIN_ERROR];
    checkpoint c;
    DIR *entries = opendir(folder);
    for (struct dirent *e; entries && (e = readdir(entries));) {
        if (strncmp(e->d_name, "checkpoint-", 11) != 0) continue;
        if (!checkpoint_open(path_of(e->d_name, path), &c, error)) fail_msg("%s: %s", when, error);
        if (!c.trainer.root || !c.optimizer.tensors.stream)
            fail_msg("%s: %s has some of its files only", when, e->d_name);
        checkpoint_close(&c);
    }
    if (entries) closedir(entries);
}

#ifdef PTRACE_GET_SYSCALL_INFO
static outcome kill_save(int64_t step, int calls) {
    pid_t child = fork();
    if (child == 0) {
        char error[TRAIN_ERROR];
        let_parent_kill();
        _exit(save(step, 1, error) ? 0 : 1);
    }
    return kill_at_call(child, calls);
}

/* Steps of their own, and the same step again and again. Each trial begins without leftovers, so that the calls are the
 * same each time and none of them is passed over. */
static void test_killed_at_each_call(void **state) {
    (void)state;
    enum { FEWEST_CALLS = 20, MAX_CALLS = 1000 };
    for (int same = 0; same < 2; same++) {
        int64_t last = 1;
        outcome how = KILLED;
        int calls = 0;
        for (; how == KILLED && calls < MAX_CALLS; calls++) {
            char when[64];
            best = last;
            require_saved(last, 1);
            assert_true(count_names(NULL) == 0 && count_names("checkpoint-") == 1);
            best = last + !same;
            how = kill_save(best, calls + 1);
            if (how == FORBIDDEN) skip(); /* the system allows no tracing */
            snprintf(when, sizeof when, "killed at call %d", calls + 1);
            require_whole(last, last + !same, when);
            require_all_whole(when);
            if (!exists("best/config.json")) fail_msg("%s: best leads nowhere", when);
            last += !same;
        }
        best = 0;
        assert_true(how == ENDED && calls > FEWEST_CALLS);
        remove_tree(folder);
    }
}
#endif

static void test_killed_at_any_moment(void **state) {
    (void)state;
    enum { KILLS = 40, LONGEST_MICROSECONDS = 20000 };
    char error[TRAIN_ERROR];
    uint64_t seed = 1;
    int64_t last = 1;
    require_saved(last, 2);
    for (int i = 0; i < KILLS; i++) {
        pid_t child = fork();
        if (child == 0)
            for (int64_t step = last + 1;; step++)
                if (!save(step, 2, error)) _exit(1);
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        nanosleep(&(struct timespec){.tv_nsec = (long)(seed >> 33) % LONGEST_MICROSECONDS * 1000}, NULL);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        assert_true(WIFSIGNALED(status));
        int64_t step = whole_step(error);
        if (step < last) fail_msg("step %lld after %lld: %s", (long long)step, (long long)last, error);
        last = step;
        require_all_whole("killed");
    }
    assert_true(last > 1); /* some saves came to their end */
}

/* A reader finds a whole checkpoint while another process replaces it as fast as it can, and not an older one. */
static void test_read_while_saving(void **state) {
    (void)state;
    enum { READS = 2000 };
    char error[TRAIN_ERROR];
    require_saved(1, 1);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* a failed check below must not leave it behind */
        best = 1;  /* which stays */
        for (int64_t step = 2;; step++)
            if (!save(step, 1, error)) _exit(1);
    }
    int64_t last = 1;
    for (int i = 0; i < READS; i++) {
        int64_t step = opened_step(error);
        if (step < last) fail_msg("read %d: step %lld after %lld: %s", i, (long long)step, (long long)last, error);
        last = step;
    }
    kill(child, SIGKILL);
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
}

/* ---- A full disk ------------------------------------------------------------------------------------- */

static void require_failed(bool ok, const char *error, const char *reason) {
    if (ok || !strstr(error, "/.checkpoint-") || !strstr(error, reason))
        fail_msg("%s instead of a file's name and \"%s\"", ok ? "success" : error, reason);
    require_whole(1, 1, "on a full disk");
    assert_int_equal(count_names(NULL), 0);
    assert_int_equal(count_names("checkpoint-"), 1);
}

/* Files that may not grow past a limit, for many limits. */
static void test_file_limits(void **state) {
    (void)state;
    enum { STRIDE = 13 };
    require_saved(1, 2);
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    bool ok = false;
    int failures = 0;
    for (rlim_t bytes = 0; !ok; bytes += STRIDE) {
        char error[TRAIN_ERROR] = "";
        limit = before;
        limit.rlim_cur = bytes;
        setrlimit(RLIMIT_FSIZE, &limit);
        ok = save(2, 2, error);
        setrlimit(RLIMIT_FSIZE, &before);
        if (ok) break;
        failures++;
        require_failed(ok, error, "File too large");
    }
    signal(SIGXFSZ, handler);
    assert_true(failures > PADDING / STRIDE);
    require_whole(2, 2, "after the limit was raised");
}

#ifdef __linux__
static bool write_line(const char *path, const char *line) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    bool ok = file >= 0 && write(file, line, strlen(line)) == (ssize_t)strlen(line);
    if (file >= 0) close(file);
    return ok;
}

/* Whether this process may mount from now on: as root, or as the only user of a namespace of its own. */
static bool own_mounts(void) {
    char user[64], group[64];
    snprintf(user, sizeof user, "0 %lld 1", (long long)geteuid());
    snprintf(group, sizeof group, "0 %lld 1", (long long)getegid());
    if (unshare(CLONE_NEWNS) == 0) return true;
    return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && write_line("/proc/self/setgroups", "deny") &&
           write_line("/proc/self/uid_map", user) && write_line("/proc/self/gid_map", group);
}

/* A small file system of our own that has room for some more pages, or files, than it holds now. */
static bool full_disk(void) {
    char options[64], error[TRAIN_ERROR] = "";
    if (!own_mounts() || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return false;
    if (mount("tmpfs", folder, "tmpfs", 0, "size=1m,nr_inodes=100") != 0) return false;
    require_saved(1, 2);
    for (int files = 0; files < 2; files++) {
        int failures = 0;
        for (int more = 0;; more++) {
            /* What is in use cannot be told beforehand; the first limit that is taken is the tightest. */
            snprintf(options, sizeof options, files ? "size=1m,nr_inodes=%d" : "size=%dk", files ? 1 + more : 4 * more);
            if (more == 0 || mount("tmpfs", folder, "tmpfs", MS_REMOUNT, options) != 0) continue;
            bool ok = save(2, 2, error);
            if (ok) break;
            failures++;
            require_failed(ok, error, "No space left");
        }
        assert_true(failures > 2);
        char path[512];
        remove_tree(path_of("checkpoint-00000002", path));
        mount("tmpfs", folder, "tmpfs", MS_REMOUNT, "size=1m,nr_inodes=100");
        require_saved(1, 2);
    }
    return true;
}

static void test_full_disk(void **state) {
    (void)state;
    enum { NOT_ALLOWED = 77 };
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(full_disk() ? 0 : NOT_ALLOWED); /* a failed check jumps out of here, to the end of the child's main() */
    }
    int status;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_ALLOWED) skip();
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_killed_at_any_moment), TEST(test_file_limits), TEST(test_read_while_saving),
#ifdef __linux__
        TEST(test_killed_at_each_call),  TEST(test_full_disk),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
