/* SPDX-License-Identifier: MIT */
/*
 * The system (system.h) of a WebAssembly module: files and the clock by WASI, which the page that loads the module
 * provides (web/wasi.js), and threads by the page's workers.
 *
 * A worker cannot be started from C: the page starts workers when it loads the module, each of which calls
 * vjp_web_worker() and waits there. system_thread_start() gives a waiting worker something to do.
 */
#ifdef __wasi__
#include "core/system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/arithmetic.h"

/* Pages of memory, and the most bytes that a module may have: the link's --max-memory. */
enum { PAGE_BYTES = 65536 };
static const double MAX_MEMORY = 2147483648.0;

/* ---- Memory ------------------------------------------------------------------------------------------ */

void *system_alloc(size_t alignment, size_t bytes) {
    return aligned_alloc(alignment, bytes);
}

void system_free(void *data) {
    free(data);
}

void system_prefer_large_pages(void *data, size_t bytes) {
    (void)data, (void)bytes;
}

/* ---- Libraries --------------------------------------------------------------------------------------- */

const char SYSTEM_LIBRARY_FORMAT[] = "lib%s.wasm";

void *system_library_open(const char *name) {
    (void)name;
    return NULL;
}

const char *system_library_error(void) {
    return "a browser loads no libraries";
}

void *system_library_find(void *library, const char *symbol) {
    (void)library, (void)symbol;
    return NULL;
}

void system_library_close(void *library) {
    (void)library;
}

/* ---- Processors and memory of the machine ------------------------------------------------------------ */

static atomic_int worker_count;

int64_t system_processors(void) {
    return 1 + (int64_t)atomic_load(&worker_count);
}

int64_t system_allowed_processors(void) {
    return system_processors();
}

bool system_processor_name(char *text, size_t bytes) {
    snprintf(text, bytes, "WebAssembly");
    return true;
}

double system_cache_bytes(int level) {
    (void)level;
    return 0;
}

int64_t system_last_cache_bytes(void) {
    return 0;
}

double system_memory_bytes(void) {
    return MAX_MEMORY;
}

/* What the memory can still grow by. The allocator may have more that was freed. */
double system_available_bytes_of(const char *root) {
    (void)root;
    return MAX_MEMORY - system_peak_bytes();
}

double system_available_bytes(void) {
    return system_available_bytes_of("");
}

double system_unused_bytes(void) {
    return system_available_bytes();
}

/* The memory of a module never shrinks. */
double system_peak_bytes(void) {
    return (double)__builtin_wasm_memory_size(0) * PAGE_BYTES;
}

bool system_allow_amx(void) {
    return false;
}

/* ---- Time -------------------------------------------------------------------------------------------- */

int64_t system_nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

double system_seconds(void) {
    return 1e-9 * (double)system_nanoseconds();
}

/* The page's threads are those of the system, which shares the cores among them. */
void system_yield(void) {
}

void system_sleep(int64_t nanoseconds) {
#ifdef __wasm_atomics__
    int never = 0;
    __builtin_wasm_memory_atomic_wait32(&never, 0, nanoseconds);
#else
    for (int64_t end = system_nanoseconds() + nanoseconds; system_nanoseconds() < end;) {
    }
#endif
}

/* ---- Threads ----------------------------------------------------------------------------------------- */

enum { MAX_WORKERS = 256 };

typedef struct worker {
    atomic_int busy; /* 1: it has an entry to call, or is inside it */
    void *(*entry)(void *);
    void *argument;
} worker;

static worker workers[MAX_WORKERS];

#ifdef __wasm_atomics__

/* Called once by the page, when that many workers are about to call vjp_web_worker(). */
void vjp_web_set_workers(int count);
__attribute__((export_name("vjp_web_set_workers"))) void vjp_web_set_workers(int count) {
    atomic_store(&worker_count, (int)vjp_min(count, MAX_WORKERS));
}

/* Called by each worker of the page, with numbers from 0 on. It never returns. */
void vjp_web_worker(int number);
__attribute__((export_name("vjp_web_worker"))) void vjp_web_worker(int number) {
    worker *own = &workers[number];
    for (;;) {
        while (!atomic_load(&own->busy))
            __builtin_wasm_memory_atomic_wait32((int *)&own->busy, 0, -1);
        own->entry(own->argument);
        atomic_store(&own->busy, 0);
        __builtin_wasm_memory_atomic_notify((int *)&own->busy, 1);
    }
}

/* The worker has the stack that the page gave it. */
bool system_thread_start(system_thread *thread, size_t stack_bytes, void *(*entry)(void *), void *argument) {
    (void)stack_bytes;
    for (int i = 0; i < atomic_load(&worker_count); i++) {
        if (atomic_load(&workers[i].busy)) continue;
        workers[i].entry = entry;
        workers[i].argument = argument;
        atomic_store(&workers[i].busy, 1);
        __builtin_wasm_memory_atomic_notify((int *)&workers[i].busy, 1);
        *thread = i;
        return true;
    }
    return false;
}

void system_thread_join(system_thread thread) {
    while (atomic_load(&workers[thread].busy))
        __builtin_wasm_memory_atomic_wait32((int *)&workers[thread].busy, 1, -1);
}

#else

bool system_thread_start(system_thread *thread, size_t stack_bytes, void *(*entry)(void *), void *argument) {
    (void)thread, (void)stack_bytes, (void)entry, (void)argument, (void)workers;
    return false;
}

void system_thread_join(system_thread thread) {
    (void)thread;
}

#endif

bool system_count_forks(void) {
    return true;
}

unsigned system_forks(void) {
    return 0;
}

/* ---- Files ------------------------------------------------------------------------------------------- */

static bool take_status(int result, const struct stat *from, system_status *to) {
    if (result != 0) return false;
    *to = (system_status){.kind = S_ISREG(from->st_mode)   ? SYSTEM_FILE
                                  : S_ISDIR(from->st_mode) ? SYSTEM_FOLDER
                                                           : SYSTEM_DEVICE,
                          .bytes = from->st_size,
                          .volume = (uint64_t)from->st_dev,
                          .number = (uint64_t)from->st_ino};
    return true;
}

bool system_status_of(const char *path, system_status *status) {
    struct stat found;
    return take_status(stat(path, &found), &found, status);
}

bool system_status_of_link(const char *path, system_status *status) {
    return system_status_of(path, status);
}

bool system_status_of_open(int file, system_status *status) {
    struct stat found;
    return take_status(fstat(file, &found), &found, status);
}

int system_open_to_read(const char *path) {
    return open(path, O_RDONLY);
}

int system_open_to_write(const char *path) {
    return open(path, O_WRONLY);
}

int system_create(const char *path) {
    return open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
}

int system_open_to_lock(const char *path) {
    return open(path, O_RDWR | O_CREAT, 0666);
}

bool system_close(int file) {
    return close(file) == 0;
}

enum { MAX_MOVED = 1 << 30 };

int64_t system_write(int file, const void *data, size_t bytes) {
    return write(file, data, bytes < MAX_MOVED ? bytes : MAX_MOVED);
}

int64_t system_write_at(int file, const void *data, size_t bytes, int64_t offset) {
    return pwrite(file, data, bytes < MAX_MOVED ? bytes : MAX_MOVED, (off_t)offset);
}

int64_t system_read_at(int file, void *data, size_t bytes, int64_t offset) {
    return pread(file, data, bytes < MAX_MOVED ? bytes : MAX_MOVED, (off_t)offset);
}

/* Files are in the page's memory. */
bool system_sync(int file) {
    (void)file;
    return true;
}

bool system_sync_folder(const char *path) {
    (void)path;
    return true;
}

FILE *system_stream(const char *path, const char *mode) {
    return fopen(path, mode);
}

FILE *system_stream_of(int file, const char *mode) {
    return fdopen(file, mode);
}

int system_number_of(FILE *stream) {
    return fileno(stream);
}

bool system_rename(const char *from, const char *to) {
    return rename(from, to) == 0;
}

bool system_exchange(const char *one, const char *other) {
    (void)one, (void)other;
    errno = ENOSYS;
    return false;
}

bool system_remove_file(const char *path) {
    return unlink(path) == 0;
}

/* A folder is read from its beginning after each name, since removing one may move the others. */
void system_remove_tree(const char *path) {
    enum { PATH_BYTES = 1024 };
    if (unlink(path) == 0 || rmdir(path) == 0) return;
    for (bool removed = true; removed;) {
        char inner[PATH_BYTES];
        DIR *folder = opendir(path);
        const struct dirent *entry = NULL;
        while (folder && (entry = readdir(folder)) && (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))) {
        }
        bool fits = entry && snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name) < PATH_BYTES;
        if (folder) closedir(folder);
        if (fits) system_remove_tree(inner);
        struct stat left;
        removed = fits && stat(inner, &left) != 0;
    }
    rmdir(path);
}

bool system_make_folder(const char *path) {
    return mkdir(path, 0777) == 0;
}

bool system_make_link(const char *target, const char *path) {
    (void)target, (void)path;
    errno = ENOTSUP;
    return false;
}

bool system_read_link(const char *path, char *target, size_t bytes) {
    (void)path, (void)target, (void)bytes;
    errno = EINVAL;
    return false;
}

/* The current folder is the root, and nothing is a link. */
char *system_absolute_path(const char *path) {
    struct stat found;
    if (stat(path, &found) != 0) return NULL;
    size_t bytes = strlen(path) + 2;
    char *absolute = malloc(bytes);
    if (absolute) snprintf(absolute, bytes, "%s%s", path[0] == '/' ? "" : "/", path);
    return absolute;
}

bool system_is_absolute(const char *path) {
    return path[0] == '/';
}

bool system_is_separator(char c) {
    return c == '/';
}

system_folder *system_folder_open(const char *path) {
    return (system_folder *)opendir(path);
}

const char *system_folder_next(system_folder *folder) {
    errno = 0;
    const struct dirent *entry = readdir((DIR *)folder);
    return entry ? entry->d_name : NULL;
}

void system_folder_close(system_folder *folder) {
    closedir((DIR *)folder);
}

bool system_lock(int file, int64_t *holder) {
    (void)file, (void)holder;
    return true;
}

/* ---- The program ------------------------------------------------------------------------------------- */

bool system_begin_program(int *argc, char ***argv) {
    (void)argc, (void)argv;
    return true;
}

void system_discard_closed_output(void) {
}

bool system_output_is_terminal(void) {
    return false;
}

int system_output_width(void) {
    return 80;
}

void system_on_stop(void (*stop)(void)) {
    (void)stop;
}

int64_t system_process(void) {
    return 1;
}

/* There are no maps: the bytes are read. */
const void *system_map(int file, size_t bytes) {
    char *data = malloc(bytes);
    size_t have = 0;
    if (!data || lseek(file, 0, SEEK_SET) != 0) {
        free(data);
        return NULL;
    }
    while (have < bytes) {
        ssize_t got = read(file, data + have, bytes - have);
        if (got <= 0) {
            if (got == 0) errno = EIO;
            free(data);
            return NULL;
        }
        have += (size_t)got;
    }
    return data;
}

void system_unmap(const void *data, size_t bytes) {
    (void)bytes;
    free((void *)(uintptr_t)data);
}

#endif
