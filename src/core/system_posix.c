/* SPDX-License-Identifier: MIT */
/*
 * The system (system.h) by POSIX, and by what Linux and macOS add to it.
 */
#if !defined(_WIN32) && !defined(__wasi__)
#define _GNU_SOURCE /* nftw(), renameat2(), sched_getaffinity() with masks of any size */
#include "core/system.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

/* ---- Memory ------------------------------------------------------------------------------------------ */

void *system_alloc(size_t alignment, size_t bytes) {
    return aligned_alloc(alignment, bytes);
}

void system_free(void *data) {
    free(data);
}

void system_prefer_large_pages(void *data, size_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(data, bytes, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

/* ---- Libraries --------------------------------------------------------------------------------------- */

/* macOS searches the program's own paths only with @rpath. */
#ifdef __APPLE__
const char SYSTEM_LIBRARY_FORMAT[] = "@rpath/lib%s.dylib";
#else
const char SYSTEM_LIBRARY_FORMAT[] = "lib%s.so";
#endif

void *system_library_open(const char *name) {
    return dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

const char *system_library_error(void) {
    return dlerror();
}

void *system_library_find(void *library, const char *symbol) {
    return dlsym(library, symbol);
}

void system_library_close(void *library) {
    dlclose(library);
}

/* ---- Processors and memory of the machine ------------------------------------------------------------ */

int64_t system_processors(void) {
    long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 1 ? count : 1;
}

int64_t system_allowed_processors(void) {
#ifdef __linux__
    enum { MAX_PROCESSORS = 1 << 16 };
    /* The call fails as long as the mask is smaller than the kernel's. */
    for (int bits = 1024; bits <= MAX_PROCESSORS; bits *= 2) {
        cpu_set_t *mask = CPU_ALLOC((size_t)bits);
        if (!mask) break;
        size_t bytes = CPU_ALLOC_SIZE((size_t)bits);
        int count = sched_getaffinity(0, bytes, mask) == 0 ? CPU_COUNT_S(bytes, mask) : 0;
        CPU_FREE(mask);
        if (count > 0) return count;
    }
#endif
    return system_processors();
}

#ifdef __APPLE__

static double number_of(const char *name) {
    int64_t value = 0;
    size_t bytes = sizeof value;
    return sysctlbyname(name, &value, &bytes, NULL, 0) == 0 ? (double)value : 0;
}

bool system_processor_name(char *text, size_t bytes) {
    return sysctlbyname("machdep.cpu.brand_string", text, &bytes, NULL, 0) == 0;
}

double system_cache_bytes(int level) {
    static const char *const names[] = {"hw.l1dcachesize", "hw.l2cachesize", "hw.l3cachesize"};
    return number_of(names[level - 1]);
}

int64_t system_last_cache_bytes(void) {
    double third = system_cache_bytes(3);
    return (int64_t)(third > 0 ? third : system_cache_bytes(2));
}

double system_memory_bytes(void) {
    return number_of("hw.memsize");
}

double system_available_bytes_of(const char *root) {
    (void)root;
    return 0;
}

double system_unused_bytes(void) {
    return 0;
}

#else

/* What stands behind the colon of a line of /proc/cpuinfo that begins with `key`; NULL: it is another line. */
static const char *value_of(char *line, const char *key) {
    char *value = strncmp(line, key, strlen(key)) == 0 ? strchr(line, ':') : NULL;
    if (!value) return NULL;
    line[strcspn(line, "\n")] = 0;
    return value + 1 + strspn(value + 1, " ");
}

/* Linux names an ARM processor by two numbers. */
static void name_arm(unsigned long implementer, unsigned long part, char *text, size_t bytes) {
    static const struct {
        unsigned part;
        const char *name;
    } arm[] = {
        {0xd03, "Cortex-A53"},  {0xd05, "Cortex-A55"},  {0xd08, "Cortex-A72"},  {0xd0b, "Cortex-A76"},
        {0xd0c, "Neoverse N1"}, {0xd40, "Neoverse V1"}, {0xd41, "Cortex-A78"},  {0xd49, "Neoverse N2"},
        {0xd4f, "Neoverse V2"}, {0xd84, "Neoverse V3"}, {0xd8e, "Neoverse N3"},
    };
    enum { ARM = 0x41 };
    for (size_t i = 0; implementer == ARM && i < sizeof arm / sizeof arm[0]; i++)
        if (arm[i].part == part) {
            snprintf(text, bytes, "ARM %s", arm[i].name);
            return;
        }
    snprintf(text, bytes, "ARM, implementer 0x%02lx, part 0x%03lx", implementer, part);
}

bool system_processor_name(char *text, size_t bytes) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) return false;
    char line[256];
    bool found = false;
    unsigned long implementer = 0;
    while (!found && fgets(line, sizeof line, file)) {
        const char *name = value_of(line, "model name"), *maker = value_of(line, "CPU implementer"),
                   *part = value_of(line, "CPU part");
        found = name || part;
        if (name) snprintf(text, bytes, "%s", name);
        if (maker) implementer = strtoul(maker, NULL, 0);
        if (part) name_arm(implementer, strtoul(part, NULL, 0), text, bytes);
    }
    fclose(file);
    return found;
}

/* The first line of a file, without the newline. */
static bool read_line(const char *path, char *line, size_t bytes) {
    FILE *file = fopen(path, "r");
    if (!file) return false;
    bool ok = fgets(line, (int)bytes, file) != NULL;
    fclose(file);
    if (ok) line[strcspn(line, "\n")] = 0;
    return ok;
}

static double cache_from_sys(int level) {
    for (int index = 0; index < 8; index++) {
        char path[96], text[64];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", index);
        if (!read_line(path, text, sizeof text)) return 0;
        if (atoi(text) != level) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/type", index);
        if (!read_line(path, text, sizeof text) || strcmp(text, "Instruction") == 0) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        if (!read_line(path, text, sizeof text)) continue;
        char *unit;
        double size = strtod(text, &unit);
        return *unit == 'K' ? size * 1024 : *unit == 'M' ? size * 1024 * 1024 : size;
    }
    return 0;
}

static long cache_from_library(int level) {
    long bytes = 0;
#ifdef _SC_LEVEL1_DCACHE_SIZE
    static const int names[] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
    bytes = sysconf(names[level - 1]);
#else
    (void)level;
#endif
    return bytes > 0 ? bytes : 0;
}

double system_cache_bytes(int level) {
    double bytes = cache_from_sys(level);
    return bytes != 0 ? bytes : (double)cache_from_library(level);
}

int64_t system_last_cache_bytes(void) {
    long third = cache_from_library(3);
    return third ? third : cache_from_library(2);
}

double system_memory_bytes(void) {
#ifdef _SC_PHYS_PAGES
    return (double)sysconf(_SC_PAGESIZE) * (double)sysconf(_SC_PHYS_PAGES);
#else
    return 0;
#endif
}

enum { SYSTEM_PATH = 4096 };

/* The number in a file, or after `key` in one of its lines. -1: there is none ("max" is no limit). */
static double number_in(const char *folder, const char *name, const char *key) {
    char path[SYSTEM_PATH + 64], line[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    double number = -1;
    for (bool found = false; file && !found && fgets(line, sizeof line, file);) {
        size_t length = strlen(key);
        found = strncmp(line, key, length) == 0 && sscanf(line + length, "%lf", &number) == 1;
    }
    if (file) fclose(file);
    return number;
}

/* What a control group and those above it leave, up to the folder `top`. The cache of files that it can drop counts as
 * free. */
static double group_room(const char *top, const char *group, const char *limit, const char *used, const char *cache) {
    char folder[SYSTEM_PATH];
    double room = HUGE_VAL;
    int length = snprintf(folder, sizeof folder, "%s%s", top, group);
    if (length < 0 || length >= (int)sizeof folder) return room;
    for (size_t base = strlen(top); strlen(folder) >= base;) {
        double most = number_in(folder, limit, ""), has = number_in(folder, used, "");
        double droppable = number_in(folder, "memory.stat", cache);
        if (most >= 0 && has >= 0) room = fmin(room, fmax(1, most - has + fmax(0, droppable)));
        char *end = strrchr(folder, '/');
        if (!end) break;
        *end = 0;
    }
    return room;
}

double system_available_bytes_of(const char *root) {
    char path[SYSTEM_PATH], line[SYSTEM_PATH], top[SYSTEM_PATH];
    snprintf(path, sizeof path, "%s/proc", root);
    double kib = number_in(path, "meminfo", "MemAvailable:"), bytes = kib > 0 ? kib * 1024 : 0;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *second = strchr(line, ':'), *third = second ? strchr(second + 1, ':') : NULL;
        if (!third) continue;
        *third = 0; /* "0::GROUP" of version 2, "9:memory:GROUP" of version 1 */
        bool whole = !second[1], memory = strcmp(second + 1, "memory") == 0;
        double room = HUGE_VAL;
        snprintf(top, sizeof top, "%.4000s/sys/fs/cgroup%s", root, memory ? "/memory" : "");
        if (whole) room = group_room(top, third + 1, "memory.max", "memory.current", "inactive_file ");
        if (memory)
            room = group_room(top, third + 1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ");
        if (bytes > 0) bytes = fmin(bytes, room);
    }
    if (file) fclose(file);
    return bytes;
}

double system_unused_bytes(void) {
    long pages = 0, size = sysconf(_SC_PAGESIZE);
#ifdef _SC_AVPHYS_PAGES
    pages = sysconf(_SC_AVPHYS_PAGES);
#endif
    return pages > 0 && size > 0 ? (double)pages * (double)size : 0;
}

#endif

double system_available_bytes(void) {
    return system_available_bytes_of("");
}

double system_peak_bytes(void) {
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
#ifdef __APPLE__
    return (double)usage.ru_maxrss;
#else
    return (double)usage.ru_maxrss * 1024;
#endif
}

bool system_allow_amx(void) {
#ifdef SYS_arch_prctl
    enum { ASK_FOR_STATE = 0x1023, TILE_STATE = 18 }; /* the numbers of Linux */
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_STATE) == 0;
#else
    return false;
#endif
}

/* ---- Time -------------------------------------------------------------------------------------------- */

int64_t system_nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

double system_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void system_yield(void) {
    sched_yield();
}

void system_sleep(int64_t nanoseconds) {
    enum { SECOND = 1000000000 };
    const struct timespec time = {.tv_sec = (time_t)(nanoseconds / SECOND), .tv_nsec = (long)(nanoseconds % SECOND)};
    nanosleep(&time, NULL);
}

/* ---- Threads ----------------------------------------------------------------------------------------- */

bool system_thread_start(system_thread *thread, size_t stack_bytes, void *(*entry)(void *), void *argument) {
    pthread_attr_t attributes;
    bool sized = pthread_attr_init(&attributes) == 0;
    if (sized) pthread_attr_setstacksize(&attributes, stack_bytes);
    bool started = pthread_create(thread, sized ? &attributes : NULL, entry, argument) == 0;
    if (sized) pthread_attr_destroy(&attributes);
    return started;
}

void system_thread_join(system_thread thread) {
    pthread_join(thread, NULL);
}

static atomic_uint forks;
static pthread_once_t forks_once = PTHREAD_ONCE_INIT;
static bool forks_counted;

static void count_fork(void) {
    atomic_fetch_add(&forks, 1);
}

static void begin_counting(void) {
    forks_counted = pthread_atfork(NULL, NULL, count_fork) == 0;
}

bool system_count_forks(void) {
    pthread_once(&forks_once, begin_counting);
    return forks_counted;
}

unsigned system_forks(void) {
    return atomic_load_explicit(&forks, memory_order_relaxed);
}

/* ---- Files ------------------------------------------------------------------------------------------- */

#ifdef __APPLE__
#define CHANGED st_mtimespec
#else
#define CHANGED st_mtim
#endif

static bool take_status(int result, const struct stat *from, system_status *to) {
    if (result != 0) return false;
    mode_t mode = from->st_mode;
    *to = (system_status){.kind = S_ISREG(mode)    ? SYSTEM_FILE
                                  : S_ISDIR(mode)  ? SYSTEM_FOLDER
                                  : S_ISLNK(mode)  ? SYSTEM_LINK
                                  : S_ISFIFO(mode) ? SYSTEM_PIPE
                                  : S_ISSOCK(mode) ? SYSTEM_SOCKET
                                                   : SYSTEM_DEVICE,
                          .bytes = from->st_size,
                          .volume = (uint64_t)from->st_dev,
                          .number = (uint64_t)from->st_ino,
                          .changed = (int64_t)from->CHANGED.tv_sec * 1000000000 + from->CHANGED.tv_nsec};
    return true;
}

bool system_status_of(const char *path, system_status *status) {
    struct stat found;
    return take_status(stat(path, &found), &found, status);
}

bool system_status_of_link(const char *path, system_status *status) {
    struct stat found;
    return take_status(lstat(path, &found), &found, status);
}

bool system_status_of_open(int file, system_status *status) {
    struct stat found;
    return take_status(fstat(file, &found), &found, status);
}

int system_open_to_read(const char *path) {
    return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

int system_open_to_write(const char *path) {
    return open(path, O_WRONLY | O_CLOEXEC);
}

int system_create(const char *path) {
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

int system_open_to_lock(const char *path) {
    return open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
}

bool system_close(int file) {
    return close(file) == 0;
}

enum { MAX_MOVED = 1 << 30 }; /* some systems refuse to move 2 GiB or more at once */

int64_t system_write(int file, const void *data, size_t bytes) {
    ssize_t wrote;
    do {
        wrote = write(file, data, bytes < MAX_MOVED ? bytes : MAX_MOVED);
    } while (wrote < 0 && errno == EINTR);
    return wrote;
}

int64_t system_write_at(int file, const void *data, size_t bytes, int64_t offset) {
    ssize_t wrote;
    do {
        wrote = pwrite(file, data, bytes < MAX_MOVED ? bytes : MAX_MOVED, (off_t)offset);
    } while (wrote < 0 && errno == EINTR);
    return wrote;
}

int64_t system_read_at(int file, void *data, size_t bytes, int64_t offset) {
    ssize_t got;
    do {
        got = pread(file, data, bytes < MAX_MOVED ? bytes : MAX_MOVED, (off_t)offset);
    } while (got < 0 && errno == EINTR);
    return got;
}

const void *system_map(int file, size_t bytes) {
    void *data = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
    return data == MAP_FAILED ? NULL : data;
}

void system_unmap(const void *data, size_t bytes) {
    if (data) munmap((void *)(uintptr_t)data, bytes);
}

bool system_sync(int file) {
    return fsync(file) == 0;
}

bool system_sync_folder(const char *path) {
    int file = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return errno == EACCES;
    /* Some file systems cannot sync a folder, and say so with EINVAL. */
    bool ok = fsync(file) == 0 || errno == EINVAL;
    int reason = errno;
    close(file);
    errno = reason;
    return ok;
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
#ifdef RENAME_EXCHANGE
    return renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0;
#else
    (void)one, (void)other;
    errno = ENOSYS;
    return false;
#endif
}

bool system_remove_file(const char *path) {
    return unlink(path) == 0;
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *where) {
    (void)status, (void)kind, (void)where;
    return remove(path);
}

void system_remove_tree(const char *path) {
    enum { OPEN_FOLDERS = 8 };
    nftw(path, remove_one, OPEN_FOLDERS, FTW_DEPTH | FTW_PHYS);
}

bool system_make_folder(const char *path) {
    return mkdir(path, 0777) == 0;
}

bool system_make_link(const char *target, const char *path) {
    return symlink(target, path) == 0;
}

bool system_read_link(const char *path, char *target, size_t bytes) {
    ssize_t length = readlink(path, target, bytes - 1);
    if (length < 0) return false;
    target[length] = 0;
    return true;
}

char *system_absolute_path(const char *path) {
    return realpath(path, NULL);
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
    struct flock lock;
    do {
        lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
        if (fcntl(file, F_SETLK, &lock) == 0 || (errno != EACCES && errno != EAGAIN)) return true;
        /* Unlocked by now: the other process has just ended. */
    } while (fcntl(file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
    *holder = lock.l_pid;
    return false;
}

/* ---- The program ------------------------------------------------------------------------------------- */

bool system_begin_program(int *argc, char ***argv) {
    (void)argc, (void)argv;
    /* The replacements are opened the wrong way round, so that printing still fails. */
    for (int file = STDIN_FILENO; file <= STDERR_FILENO; file++)
        if (fcntl(file, F_GETFD) < 0 && errno == EBADF && open("/dev/null", file ? O_RDONLY : O_WRONLY) != file)
            return false;
    signal(SIGPIPE, SIG_IGN);
    setenv("XDG_RUNTIME_DIR", "/tmp", 0); /* some Vulkan drivers complain if it is unset */
    return true;
}

void system_discard_closed_output(void) {
    int mode = fcntl(STDOUT_FILENO, F_GETFL);
    bool closed = mode >= 0 && (mode & O_ACCMODE) == O_RDONLY; /* as system_begin_program() replaces a closed one */
    int nowhere = closed ? open("/dev/null", O_WRONLY | O_CLOEXEC) : -1;
    if (nowhere >= 0) {
        dup2(nowhere, STDOUT_FILENO);
        close(nowhere);
    }
}

bool system_output_is_terminal(void) {
    return isatty(STDOUT_FILENO);
}

int system_output_width(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

static void (*on_stop)(void);

static void stop_by_signal(int signal) {
    (void)signal;
    on_stop();
}

void system_on_stop(void (*stop)(void)) {
    /* Restarting: a signal must not make a write of a checkpoint or of a line fail. */
    struct sigaction action = {.sa_handler = stop_by_signal, .sa_flags = SA_RESTART}, before;
    on_stop = stop;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    /* The terminal was closed; under nohup, which ignores this signal, the run continues. */
    if (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, NULL);
}

int64_t system_process(void) {
    return getpid();
}

#endif
