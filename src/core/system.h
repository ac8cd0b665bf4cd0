/* SPDX-License-Identifier: MIT */
/*
 * What the library and the program need of the operating system. system_posix.c has it for Linux, macOS and the like,
 * system_windows.c for Windows, system_wasi.c for WebAssembly; all other files are C11. (Two exceptions:
 * cpu/threads/wait.c puts threads to sleep, and the backends of GPUs load their drivers.)
 *
 * Paths are UTF-8 on every system. A function that fails leaves the reason in errno, for strerror().
 */
#ifndef VJP_SYSTEM_H
#define VJP_SYSTEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef _WIN32
typedef void *system_thread;
#elif defined(__wasi__)
typedef int system_thread; /* the number of a worker */
#else
#include <pthread.h>
typedef pthread_t system_thread;
#endif

/* ---- Memory ------------------------------------------------------------------------------------------ */

/* `bytes` must be a multiple of `alignment`, a power of two. NULL: out of memory. Only system_free() frees it. */
void *system_alloc(size_t alignment, size_t bytes);
void system_free(void *data);

/* Asks for large pages, where the system has them: a hint. */
void system_prefer_large_pages(void *data, size_t bytes);

/* ---- Libraries --------------------------------------------------------------------------------------- */

/* How the file of the library NAME is called, for printf() with NAME. */
extern const char SYSTEM_LIBRARY_FORMAT[];

/* NULL: system_library_error() says why, until the next call by the same thread. */
void *system_library_open(const char *name);
const char *system_library_error(void);
void *system_library_find(void *library, const char *symbol);
void system_library_close(void *library);

/* ---- Processors and memory of the machine ------------------------------------------------------------ */

int64_t system_processors(void);         /* all of the machine, at least 1 */
int64_t system_allowed_processors(void); /* those that the process may run on, at least 1 */
bool system_processor_name(char *text, size_t bytes);

/* Bytes of the data cache of level 1, 2 or 3, and of the last one as the C library reports it; 0: unknown. */
double system_cache_bytes(int level);
int64_t system_last_cache_bytes(void);

/*
 * Of the machine; what can be used without swapping, including what the system holds in caches, and within the limits
 * of the process's control groups (a container's memory); 0: unknown. With a `root`, for tests, the second reads the
 * files under that folder instead of the machine's.
 */
double system_memory_bytes(void);
double system_available_bytes(void);
double system_available_bytes_of(const char *root);
double system_unused_bytes(void); /* without what is in caches */
double system_peak_bytes(void);   /* the most that the process had in memory */

/* Asks for leave to use AMX, which holds for the whole process. False: refused, or a system without it. */
bool system_allow_amx(void);

/* ---- Time -------------------------------------------------------------------------------------------- */

/* From some beginning, never set back. */
int64_t system_nanoseconds(void);
double system_seconds(void);

void system_yield(void);                /* offers the core to other threads */
void system_sleep(int64_t nanoseconds); /* about; less than a millisecond may only offer the core to others */

/* ---- Threads ----------------------------------------------------------------------------------------- */

bool system_thread_start(system_thread *thread, size_t stack_bytes, void *(*entry)(void *), void *argument);
void system_thread_join(system_thread thread);

/*
 * How often this process was made by fork() from one that had begun to count. system_count_forks() begins; false if the
 * system refuses. 0 for ever where there is no fork().
 */
bool system_count_forks(void);
unsigned system_forks(void);

/* How a process ended: with a status, or by a signal, its own abort() included; `reason` is the signal's name. */
typedef struct system_ending {
    int status, signal;
    bool aborted;
    const char *reason;
} system_ending;

/*
 * Continues in a child process, before any thread is started. True: this is the parent, and the child has ended; the
 * parent passes on to it what asks a program to stop. False: this is the child, or the system cannot do that.
 */
bool system_continue_as_child(system_ending *ending);

/* ---- Files ------------------------------------------------------------------------------------------- */

typedef enum system_kind {
    SYSTEM_FILE,
    SYSTEM_FOLDER,
    SYSTEM_LINK,
    SYSTEM_PIPE,
    SYSTEM_SOCKET,
    SYSTEM_DEVICE
} system_kind;

typedef struct system_status {
    system_kind kind;
    int64_t bytes;
    uint64_t volume, number; /* together they name a file */
    int64_t changed;         /* when it was last written, in the system's own unit */
} system_status;

/* Links are followed, but not by system_status_of_link(). */
bool system_status_of(const char *path, system_status *status);
bool system_status_of_link(const char *path, system_status *status);
bool system_status_of_open(int file, system_status *status);

/*
 * Open files have numbers; -1: failed. None is passed on to other programs. The first does not wait for the other end
 * of a pipe, the second writes into what is there, the third fails if the name is taken, the fourth opens or creates.
 */
int system_open_to_read(const char *path);
int system_open_to_write(const char *path);
int system_create(const char *path);
int system_open_to_lock(const char *path);
bool system_close(int file);

/* These move at most 2^30 bytes and return how many, -1: failed. Interrupted calls are repeated. */
int64_t system_write(int file, const void *data, size_t bytes);
int64_t system_write_at(int file, const void *data, size_t bytes, int64_t offset);
int64_t system_read_at(int file, void *data, size_t bytes, int64_t offset);

/*
 * The first bytes of an open file, at least one, as memory that can be read; the file can then be closed. A file that
 * is made shorter meanwhile ends the process when that memory is read. NULL: failed.
 */
const void *system_map(int file, size_t bytes);
void system_unmap(const void *data, size_t bytes);

/* Waits until what was written is on the disk. */
bool system_sync(int file);

/* The names in a folder, too. True where the file system or the folder's permissions do not allow it. */
bool system_sync_folder(const char *path);

/* As fopen(), fdopen() and fileno(); the bytes of text are never converted. */
FILE *system_stream(const char *path, const char *mode);
FILE *system_stream_of(int file, const char *mode);
int system_number_of(FILE *stream);

/* An existing file of that name is replaced. */
bool system_rename(const char *from, const char *to);
bool system_exchange(const char *one, const char *other); /* both names at once; many systems cannot */
bool system_remove_file(const char *path);
void system_remove_tree(const char *path); /* what cannot be removed remains */
bool system_make_folder(const char *path);

/* Links by name. A system or file system without them fails with EPERM, ENOTSUP or ENOSYS. */
bool system_make_link(const char *target, const char *path);
bool system_read_link(const char *path, char *target, size_t bytes);

/* The absolute path without links, which must exist; free() it. NULL: failed. */
char *system_absolute_path(const char *path);
bool system_is_absolute(const char *path);
bool system_is_separator(char c); /* of folders in a path */

/*
 * The names in a folder, in no order, with "." and "..", each valid until the next call. No name: the end with errno 0,
 * or a failure.
 */
typedef struct system_folder system_folder;
system_folder *system_folder_open(const char *path);
const char *system_folder_next(system_folder *folder);
void system_folder_close(system_folder *folder);

/*
 * Locks an open file until it is closed, for this process. False: another process has it; *holder is its number, 0 if
 * unknown. True as well where the file system has no locks.
 */
bool system_lock(int file, int64_t *holder);

/* ---- The program ------------------------------------------------------------------------------------- */

/*
 * For main(), before anything else: the arguments as UTF-8; closed standard streams replaced, so that no file that is
 * opened later gets their numbers, and writing to them still fails; a closed pipe is a write error, not a signal.
 * False: do not continue.
 */
bool system_begin_program(int *argc, char ***argv);

/* Whether stdout was replaced so; writing to it then succeeds from now on, and goes nowhere. */
void system_discard_closed_output(void);
bool system_output_is_terminal(void);
int system_output_width(void); /* of that terminal, in characters; 80 where it does not say */

/* Calls stop() when the user or the system asks the program to end; from a signal handler or another thread. */
void system_on_stop(void (*stop)(void));
int64_t system_process(void);

#endif
