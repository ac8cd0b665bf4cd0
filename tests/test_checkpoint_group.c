/* SPDX-License-Identifier: MIT */
/*
 * A checkpoint that several processes write together: the bytes are those of one process, for any number of them and
 * any split of the tensors; a process that is killed at any of its system calls, or whose disk is full, leaves the last
 * checkpoint whole, and all others learn of it.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/system.h"
#ifdef __linux__
#include "killing.h"
#endif
#include "train/files/checkpoint.h"

/* ---- Processes that agree over sockets --------------------------------------------------------------- */

enum { MAX_RANKS = 4, TENSORS = 6, NUMBERS = 700 };

typedef struct word {
    int32_t ok;
    char sentence[TRAIN_ERROR];
} word;

/* Every rank but 0 has a socket to rank 0. */
typedef struct ranks {
    int count, rank;
    int end[MAX_RANKS][2]; /* [rank]: of rank 0, of the other */
} ranks;

static bool tell(int socket, const word *w) {
    return send(socket, w, sizeof *w, MSG_NOSIGNAL) == sizeof *w;
}

static bool hear(int socket, word *w) {
    return recv(socket, w, sizeof *w, MSG_WAITALL) == sizeof *w;
}

static bool agree(void *context, bool ok, char error[TRAIN_ERROR]) {
    const ranks *r = context;
    word own = {.ok = ok}, all;
    if (!ok) snprintf(own.sentence, sizeof own.sentence, "%s", error);
    if (r->rank) {
        if (!tell(r->end[r->rank][1], &own) || !hear(r->end[r->rank][1], &all))
            return train_fail(error, "rank 0 is gone");
    } else {
        all = own;
        for (int i = 1; i < r->count; i++)
            if (!hear(r->end[i][0], &own)) {
                all = (word){.ok = false};
                snprintf(all.sentence, sizeof all.sentence, "rank %d is gone", i);
            } else if (all.ok && !own.ok) {
                all = own;
            }
        for (int i = 1; i < r->count; i++)
            (void)tell(r->end[i][0], &all);
    }
    return all.ok || train_fail(error, "%s", all.sentence);
}

/* ---- A checkpoint of several dtypes ------------------------------------------------------------------ */

/* Saves as one of some processes; tensor i belongs to process `owner[i] % count`. */
static bool save(const char *folder, int64_t step, ranks *r, const int *owner, char error[TRAIN_ERROR]) {
    static const vjp_dtype dtypes[TENSORS] = {VJP_F32, VJP_BF16, VJP_F64, VJP_F32, VJP_BF16, VJP_F32};
    static const int64_t lengths[TENSORS] = {NUMBERS, 3, 5, 0, NUMBERS - 1, 1};
    static double numbers[NUMBERS];
    safetensors_tensor tensor[TENSORS];
    char name[TENSORS][16];
    for (int i = 0; i < NUMBERS; i++)
        numbers[i] = (double)(step * 1000 + i) / 7;
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name[i], sizeof name[i], "t%d", i);
        bool own = !r || owner[i] % r->count == r->rank;
        tensor[i] = (safetensors_tensor){.name = name[i],
                                         .dtype = (int)dtypes[i],
                                         .ndim = 1,
                                         .shape = {lengths[i]},
                                         .data = own ? numbers + i : NULL};
    }
    checkpoint_group group = {.rank = r ? r->rank : 0, .context = r, .agree = agree};
    char trainer[64];
    snprintf(trainer, sizeof trainer, "{\"step\": %lld}\n", (long long)step);
    const checkpoint_content content = {.step = step,
                                        .config = "{\"model_type\": \"test\"}\n",
                                        .trainer = trainer,
                                        .model = tensor,
                                        .model_count = 4,
                                        .optimizer = tensor + 4,
                                        .optimizer_count = 2,
                                        .group = r ? &group : NULL};
    return checkpoint_save(folder, 1, &content, error);
}

static void require_same_bytes(const char *one, const char *other, const char *when) {
    static const char *const files[] = {"config.json", "trainer.json", "model.safetensors", "optimizer.safetensors"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[2][512];
        snprintf(path[0], sizeof path[0], "%s/latest/%s", one, files[i]);
        snprintf(path[1], sizeof path[1], "%s/latest/%s", other, files[i]);
        FILE *in[2] = {fopen(path[0], "rb"), fopen(path[1], "rb")};
        if (!in[0] || !in[1]) fail_msg("%s: %s is missing", when, files[i]);
        for (int a = 0, b = 0; a != EOF;) {
            a = fgetc(in[0]);
            b = fgetc(in[1]);
            if (a != b) fail_msg("%s: other bytes in %s at %ld", when, files[i], ftell(in[0]));
        }
        fclose(in[0]);
        fclose(in[1]);
    }
}

/* The same as one process saved in `alone` for that step, and nothing else in the folder. */
static void require_whole(const char *folder, const char *alone, int64_t step, const char *when) {
    char error[TRAIN_ERROR];
    if (!save(alone, step, NULL, NULL, error)) fail_msg("%s", error);
    require_same_bytes(alone, folder, when);
}

static int64_t newest(const char *folder) {
    char path[CHECKPOINT_PATH], error[TRAIN_ERROR];
    checkpoint c;
    if (!checkpoint_open_newest(folder, path, &c, error)) fail_msg("%s", error);
    int64_t step = c.step;
    checkpoint_close(&c);
    return step;
}

/* What is wrong with one of the processes. */
typedef enum fault { NO_FAULT, TRACED, FULL_DISK, OTHER_FOLDER } fault;

static pid_t start(const char *folder, int64_t step, ranks r, int rank, const int *owner, fault wrong,
                   const char *says) {
    pid_t child = fork();
    if (child != 0) return child;
    alarm(60); /* the others of a failed test end, too */
    for (int i = 1; i < r.count; i++)
        for (int side = 0; side < 2; side++)
            if (side == 0 ? rank != 0 : rank != i) close(r.end[i][side]);
    r.rank = rank;
    char error[TRAIN_ERROR] = "", elsewhere[512];
    if (wrong == OTHER_FOLDER) {
        snprintf(elsewhere, sizeof elsewhere, "%s-elsewhere", folder);
        folder = elsewhere;
    }
    if (wrong == FULL_DISK) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){1000, 1000});
    }
#ifdef PTRACE_GET_SYSCALL_INFO
    if (wrong == TRACED) let_parent_kill();
#endif
    bool ok = save(folder, step, &r, owner, error);
    if (!ok && says && !strstr(error, says)) {
        fprintf(stderr, "rank %d: \"%s\" does not say \"%s\"\n", rank, error, says);
        _exit(2);
    }
    _exit(ok ? 0 : 1);
}

/* Starts all; the faulty one, `victim`, is started last. */
static void start_all(const char *folder, int64_t step, int count, const int *owner, int victim, fault wrong,
                      const char *says, pid_t child[MAX_RANKS]) {
    ranks r = {.count = count};
    for (int i = 1; i < count; i++)
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, r.end[i]), 0);
    for (int i = 0; i < count; i++)
        if (i != victim) child[i] = start(folder, step, r, i, owner, NO_FAULT, says);
    child[victim] = start(folder, step, r, victim, owner, wrong, says);
    for (int i = 1; i < count; i++)
        for (int side = 0; side < 2; side++)
            close(r.end[i][side]);
}

static int status_of(pid_t child) {
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* ---- Tests ------------------------------------------------------------------------------------------- */

static char scratch[64], together[256], alone[256];

static int begin(void **unused) {
    (void)unused;
    /* In memory, where there is such a place: a disk takes its time to be sure of hundreds of checkpoints. */
    bool memory = access("/dev/shm", W_OK) == 0;
    snprintf(scratch, sizeof scratch, "%s/vjp-test-XXXXXX", memory ? "/dev/shm" : "/tmp");
    if (!mkdtemp(scratch)) return 1;
    snprintf(together, sizeof together, "%s/together", scratch);
    snprintf(alone, sizeof alone, "%s/alone", scratch);
    return 0;
}

static int end(void **unused) {
    (void)unused;
    system_remove_tree(scratch);
    return 0;
}

static void the_bytes_of_one_process(void **unused) {
    (void)unused;
    static const int owners[][TENSORS] = {
        {0, 1, 2, 3, 0, 1}, {3, 3, 3, 3, 3, 3}, {0, 0, 0, 0, 1, 2}, {1, 0, 3, 2, 1, 0}};
    int64_t step = 1;
    for (int count = 1; count <= MAX_RANKS; count *= 2)
        for (size_t k = 0; k < sizeof owners / sizeof owners[0]; k++, step++) {
            pid_t child[MAX_RANKS];
            start_all(together, step, count, owners[k], 0, NO_FAULT, NULL, child);
            for (int i = 0; i < count; i++)
                assert_int_equal(status_of(child[i]), 0);
            require_whole(together, alone, step, "together");
        }
}

/* All processes fail with the sentence of the one that did, and nothing of the save is left. */
static void one_that_cannot_write(void **unused) {
    (void)unused;
    static const int owner[TENSORS] = {0, 1, 0, 1, 0, 1}, last[TENSORS] = {1, 0, 0, 0, 1, 0};
    const struct {
        int victim;
        fault wrong;
        const int *owner;
        const char *says;
    } rows[] = {
        {1, OTHER_FOLDER, owner, "it cannot be opened: No such file or directory; all processes write there"},
        {1, FULL_DISK, last, "it cannot be written: File too large"},
        {0, FULL_DISK, owner, "it cannot be written: File too large"},
    };
    int64_t step = newest(together);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        pid_t child[MAX_RANKS];
        start_all(together, step + 1, 2, rows[i].owner, rows[i].victim, rows[i].wrong, rows[i].says, child);
        for (int k = 0; k < 2; k++)
            assert_int_equal(status_of(child[k]), 1);
        require_whole(together, alone, step, rows[i].says);
        DIR *entries = opendir(together);
        for (struct dirent *e; (e = readdir(entries));)
            if (strstr(e->d_name, ".tmp")) fail_msg("%s: %s is left", rows[i].says, e->d_name);
        closedir(entries);
    }
}

#ifdef PTRACE_GET_SYSCALL_INFO
static void one_is_killed_at_each_call(void **unused) {
    (void)unused;
    enum { MAX_CALLS = 200 };
    static const int fewest[] = {20, 4}, owner[TENSORS] = {0, 1, 0, 1, 0, 1};
    int64_t step = newest(together);
    for (int victim = 0; victim < 2; victim++) {
        outcome how = KILLED;
        int calls = 0;
        for (; how == KILLED && calls < MAX_CALLS; calls++) {
            pid_t child[MAX_RANKS];
            char when[64];
            snprintf(when, sizeof when, "rank %d killed at call %d", victim, calls + 1);
            start_all(together, step + 1, 2, owner, victim, TRACED, NULL, child);
            how = kill_at_call(child[victim], calls + 1);
            int other = status_of(child[1 - victim]);
            if (how == FORBIDDEN) skip(); /* the system allows no tracing */
            int64_t now = newest(together);
            if (now != step && now != step + 1) fail_msg("%s: step %lld", when, (long long)now);
            /* Rank 0 says that it has saved only if it has. */
            if (victim == 1 && (other == 0) != (now == step + 1)) fail_msg("%s: status %d", when, other);
            step = now;
            require_whole(together, alone, step, when);
        }
        assert_true(how == ENDED && calls > fewest[victim]);
    }
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bytes_of_one_process),
        cmocka_unit_test(one_that_cannot_write),
#ifdef PTRACE_GET_SYSCALL_INFO
        cmocka_unit_test(one_is_killed_at_each_call),
#endif
    };
    return cmocka_run_group_tests(tests, begin, end);
}
