/* SPDX-License-Identifier: MIT */
/*
 * The system (system.h) by Windows. Paths are converted to UTF-16, which is what Windows has; where a function of the C
 * library sets errno it is used, elsewhere the error of Windows is translated.
 *
 * There are no links by name here, since creating one needs a privilege that few accounts have, and a folder cannot be
 * synced: the names of files are in the journal of the file system, which is written in order.
 */
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include "core/system.h"

#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <malloc.h>
#include <process.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <wchar.h>
#include <windows.h>
/* After windows.h. */
#include <psapi.h>
#include <shellapi.h>

enum { PATH_UNITS = 4096 };

static bool fail_with(int reason) {
    errno = reason;
    return false;
}

/* The error of the last call of Windows, as the C library would give it. */
static bool failed(void) {
    static const struct {
        DWORD error;
        int reason;
    } reasons[] = {
        {ERROR_FILE_NOT_FOUND, ENOENT},      {ERROR_PATH_NOT_FOUND, ENOENT},
        {ERROR_INVALID_NAME, ENOENT},        {ERROR_BAD_NETPATH, ENOENT},
        {ERROR_ACCESS_DENIED, EACCES},       {ERROR_SHARING_VIOLATION, EACCES},
        {ERROR_LOCK_VIOLATION, EACCES},      {ERROR_ALREADY_EXISTS, EEXIST},
        {ERROR_FILE_EXISTS, EEXIST},         {ERROR_DISK_FULL, ENOSPC},
        {ERROR_HANDLE_DISK_FULL, ENOSPC},    {ERROR_NOT_ENOUGH_MEMORY, ENOMEM},
        {ERROR_OUTOFMEMORY, ENOMEM},         {ERROR_DIRECTORY, ENOTDIR},
        {ERROR_DIR_NOT_EMPTY, ENOTEMPTY},    {ERROR_INVALID_HANDLE, EBADF},
        {ERROR_TOO_MANY_OPEN_FILES, EMFILE}, {ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG},
        {ERROR_NOT_SAME_DEVICE, EXDEV},      {ERROR_BROKEN_PIPE, EPIPE},
        {ERROR_WRITE_PROTECT, EROFS},        {ERROR_CANT_RESOLVE_FILENAME, ELOOP},
    };
    DWORD error = GetLastError();
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        if (reasons[i].error == error) return fail_with(reasons[i].reason);
    return fail_with(EIO);
}

/* False: the path is no UTF-8, or too long. */
static bool to_wide(const char *path, wchar_t wide[PATH_UNITS]) {
    if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, PATH_UNITS) > 0) return true;
    return fail_with(GetLastError() == ERROR_INSUFFICIENT_BUFFER ? ENAMETOOLONG : ENOENT);
}

/* NULL: out of memory. */
static char *from_wide(const wchar_t *wide) {
    int bytes = WideCharToMultiByte(CP_UTF8, 0, wide, -1, NULL, 0, NULL, NULL);
    char *text = bytes > 0 ? malloc((size_t)bytes) : NULL;
    if (text) WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, bytes, NULL, NULL);
    if (!text) errno = ENOMEM;
    return text;
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

void *system_alloc(size_t alignment, size_t bytes) {
    return _aligned_malloc(bytes, alignment);
}

void system_free(void *data) {
    _aligned_free(data);
}

/* They need a privilege here. */
void system_prefer_large_pages(void *data, size_t bytes) {
    (void)data, (void)bytes;
}

/* ---- Libraries --------------------------------------------------------------------------------------- */

const char SYSTEM_LIBRARY_FORMAT[] = "lib%s.dll";

static _Thread_local char library_error[256];

void *system_library_open(const char *name) {
    wchar_t wide[PATH_UNITS];
    HMODULE library = to_wide(name, wide) ? LoadLibraryW(wide) : NULL;
    DWORD error = GetLastError();
    if (library) return (void *)library;
    int length = snprintf(library_error, sizeof library_error, "%.100s: ", name);
    DWORD added = FormatMessageA(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, NULL, error, 0,
                                 library_error + length, (DWORD)sizeof library_error - (DWORD)length, NULL);
    if (!added) snprintf(library_error + length, sizeof library_error - (size_t)length, "error %lu", error);
    library_error[strcspn(library_error, "\r\n")] = 0;
    return NULL;
}

const char *system_library_error(void) {
    return library_error;
}

void *system_library_find(void *library, const char *symbol) {
    return (void *)(uintptr_t)GetProcAddress((HMODULE)library, symbol);
}

void system_library_close(void *library) {
    FreeLibrary((HMODULE)library);
}

/* ---- Processors and memory of the machine ------------------------------------------------------------ */

int64_t system_processors(void) {
    DWORD count = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    return count > 1 ? count : 1;
}

int64_t system_allowed_processors(void) {
    DWORD_PTR mask, machine;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &mask, &machine)) return system_processors();
    /* A mask of the whole group, of at most 64, is no restriction: the machine may have other groups. */
    if (mask == machine) return system_processors();
    int count = __builtin_popcountll(mask);
    return count > 1 ? count : 1;
}

bool system_processor_name(char *text, size_t bytes) {
    const char *name = getenv("PROCESSOR_IDENTIFIER");
    if (!name) return false;
    snprintf(text, bytes, "%s", name);
    return true;
}

double system_cache_bytes(int level) {
    enum { MAX_RECORDS = 1024 };
    double bytes = 0;
    DWORD room = MAX_RECORDS * (DWORD)sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION);
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION *record = malloc(room);
    if (record && GetLogicalProcessorInformation(record, &room))
        for (size_t i = 0; i < room / sizeof *record; i++)
            if (record[i].Relationship == RelationCache && record[i].Cache.Level == level &&
                record[i].Cache.Type != CacheInstruction)
                bytes = record[i].Cache.Size;
    free(record);
    return bytes;
}

int64_t system_last_cache_bytes(void) {
    double third = system_cache_bytes(3);
    return (int64_t)(third > 0 ? third : system_cache_bytes(2));
}

double system_memory_bytes(void) {
    MEMORYSTATUSEX status = {.dwLength = sizeof status};
    return GlobalMemoryStatusEx(&status) ? (double)status.ullTotalPhys : 0;
}

double system_available_bytes(void) {
    MEMORYSTATUSEX status = {.dwLength = sizeof status};
    return GlobalMemoryStatusEx(&status) ? (double)status.ullAvailPhys : 0;
}

double system_available_bytes_of(const char *root) {
    (void)root;
    return system_available_bytes();
}

/* Windows counts its cache of files as available, and does not tell it apart. */
double system_unused_bytes(void) {
    return system_available_bytes();
}

double system_peak_bytes(void) {
    PROCESS_MEMORY_COUNTERS counters = {.cb = sizeof counters};
    return K32GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof counters)
               ? (double)counters.PeakWorkingSetSize
               : 0;
}

bool system_allow_amx(void) {
    return false;
}

/* ---- Time -------------------------------------------------------------------------------------------- */

int64_t system_nanoseconds(void) {
    enum { SECOND = 1000000000 };
    LARGE_INTEGER ticks, rate;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&rate);
    /* In two parts: the product of both would overflow after some days. */
    return ticks.QuadPart / rate.QuadPart * SECOND + ticks.QuadPart % rate.QuadPart * SECOND / rate.QuadPart;
}

double system_seconds(void) {
    return 1e-9 * (double)system_nanoseconds();
}

void system_yield(void) {
    SwitchToThread();
}

void system_sleep(int64_t nanoseconds) {
    Sleep((DWORD)(nanoseconds / 1000000));
}

/* ---- Threads ----------------------------------------------------------------------------------------- */

typedef struct beginning {
    void *(*entry)(void *);
    void *argument;
} beginning;

static unsigned __stdcall begin_thread(void *data) {
    beginning b = *(beginning *)data;
    free(data);
    b.entry(b.argument);
    return 0;
}

bool system_thread_start(system_thread *thread, size_t stack_bytes, void *(*entry)(void *), void *argument) {
    beginning *b = malloc(sizeof *b);
    if (!b) return false;
    *b = (beginning){entry, argument};
    *thread = (system_thread)_beginthreadex(NULL, (unsigned)stack_bytes, begin_thread, b,
                                            STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    if (!*thread) free(b);
    return *thread != NULL;
}

void system_thread_join(system_thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

bool system_count_forks(void) {
    return true;
}

unsigned system_forks(void) {
    return 0;
}

/* ---- Files ------------------------------------------------------------------------------------------- */

static bool status_of_handle(HANDLE handle, system_status *status) {
    BY_HANDLE_FILE_INFORMATION info;
    DWORD type = GetFileType(handle);
    if (type != FILE_TYPE_DISK) {
        *status = (system_status){.kind = type == FILE_TYPE_PIPE ? SYSTEM_PIPE : SYSTEM_DEVICE};
        return true;
    }
    if (!GetFileInformationByHandle(handle, &info)) return failed();
    *status = (system_status){
        .kind = info.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY ? SYSTEM_FOLDER : SYSTEM_FILE,
        .bytes = (int64_t)((uint64_t)info.nFileSizeHigh << 32 | info.nFileSizeLow),
        .volume = info.dwVolumeSerialNumber,
        .number = (uint64_t)info.nFileIndexHigh << 32 | info.nFileIndexLow,
        .changed = (int64_t)((uint64_t)info.ftLastWriteTime.dwHighDateTime << 32 | info.ftLastWriteTime.dwLowDateTime)};
    return true;
}

bool system_status_of(const char *path, system_status *status) {
    wchar_t wide[PATH_UNITS];
    if (!to_wide(path, wide)) return false;
    /* No access is needed to read attributes; the flag is for folders. */
    HANDLE handle = CreateFileW(wide, 0, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, OPEN_EXISTING,
                                FILE_FLAG_BACKUP_SEMANTICS, NULL);
    if (handle == INVALID_HANDLE_VALUE) return failed();
    bool ok = status_of_handle(handle, status);
    CloseHandle(handle);
    return ok;
}

/* A link that was made elsewhere; other kinds of reparse points, such as files that a cloud holds, are what they show.
 */
static bool is_link(const wchar_t *wide) {
    WIN32_FIND_DATAW found;
    DWORD attributes = GetFileAttributesW(wide);
    if (attributes == INVALID_FILE_ATTRIBUTES || !(attributes & FILE_ATTRIBUTE_REPARSE_POINT)) return false;
    HANDLE search = FindFirstFileW(wide, &found);
    if (search == INVALID_HANDLE_VALUE) return false;
    FindClose(search);
    return found.dwReserved0 == IO_REPARSE_TAG_SYMLINK || found.dwReserved0 == IO_REPARSE_TAG_MOUNT_POINT;
}

bool system_status_of_link(const char *path, system_status *status) {
    wchar_t wide[PATH_UNITS];
    if (!to_wide(path, wide)) return false;
    if (!is_link(wide)) return system_status_of(path, status);
    *status = (system_status){.kind = SYSTEM_LINK};
    return true;
}

bool system_status_of_open(int file, system_status *status) {
    return status_of_handle((HANDLE)_get_osfhandle(file), status);
}

static int open_with(const char *path, int flags) {
    wchar_t wide[PATH_UNITS];
    if (!to_wide(path, wide)) return -1;
    return _wopen(wide, flags | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
}

int system_open_to_read(const char *path) {
    system_status status;
    if (system_status_of(path, &status) && status.kind == SYSTEM_FOLDER) return errno = EISDIR, -1;
    return open_with(path, _O_RDONLY);
}

int system_open_to_write(const char *path) {
    return open_with(path, _O_WRONLY);
}

int system_create(const char *path) {
    return open_with(path, _O_WRONLY | _O_CREAT | _O_EXCL);
}

int system_open_to_lock(const char *path) {
    return open_with(path, _O_RDWR | _O_CREAT);
}

bool system_close(int file) {
    return _close(file) == 0;
}

enum { MAX_MOVED = 1 << 30 };

int64_t system_write(int file, const void *data, size_t bytes) {
    return _write(file, data, (unsigned)(bytes < MAX_MOVED ? bytes : MAX_MOVED));
}

int64_t system_write_at(int file, const void *data, size_t bytes, int64_t offset) {
    DWORD wrote = 0;
    OVERLAPPED at = {.Offset = (DWORD)offset, .OffsetHigh = (DWORD)((uint64_t)offset >> 32)};
    DWORD wanted = (DWORD)(bytes < MAX_MOVED ? bytes : MAX_MOVED);
    if (WriteFile((HANDLE)_get_osfhandle(file), data, wanted, &wrote, &at)) return wrote;
    failed();
    return -1;
}

int64_t system_read_at(int file, void *data, size_t bytes, int64_t offset) {
    DWORD got = 0;
    OVERLAPPED at = {.Offset = (DWORD)offset, .OffsetHigh = (DWORD)((uint64_t)offset >> 32)};
    DWORD wanted = (DWORD)(bytes < MAX_MOVED ? bytes : MAX_MOVED);
    if (ReadFile((HANDLE)_get_osfhandle(file), data, wanted, &got, &at) || GetLastError() == ERROR_HANDLE_EOF)
        return got;
    failed();
    return -1;
}

const void *system_map(int file, size_t bytes) {
    HANDLE mapping = CreateFileMappingW((HANDLE)_get_osfhandle(file), NULL, PAGE_READONLY, 0, 0, NULL);
    if (!mapping) return failed(), NULL;
    const void *data = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, bytes);
    if (!data) failed();
    CloseHandle(mapping);
    return data;
}

void system_unmap(const void *data, size_t bytes) {
    (void)bytes;
    if (data) UnmapViewOfFile(data);
}

bool system_sync(int file) {
    return _commit(file) == 0;
}

bool system_sync_folder(const char *path) {
    (void)path;
    return true;
}

/* The mode with a "b", which the C library of Windows needs to leave the ends of lines alone. */
static void binary_mode(const char *mode, wchar_t wide[8]) {
    size_t length = 0;
    bool binary = false;
    for (; mode[length] && length < 6; length++) {
        wide[length] = (wchar_t)mode[length];
        binary = binary || mode[length] == 'b';
    }
    if (!binary) wide[length++] = L'b';
    wide[length] = 0;
}

FILE *system_stream(const char *path, const char *mode) {
    wchar_t wide[PATH_UNITS], wide_mode[8];
    binary_mode(mode, wide_mode);
    return to_wide(path, wide) ? _wfopen(wide, wide_mode) : NULL;
}

FILE *system_stream_of(int file, const char *mode) {
    wchar_t wide_mode[8];
    binary_mode(mode, wide_mode);
    return _wfdopen(file, wide_mode);
}

int system_number_of(FILE *stream) {
    return _fileno(stream);
}

bool system_rename(const char *from, const char *to) {
    wchar_t wide_from[PATH_UNITS], wide_to[PATH_UNITS];
    if (!to_wide(from, wide_from) || !to_wide(to, wide_to)) return false;
    return MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH) || failed();
}

bool system_exchange(const char *one, const char *other) {
    (void)one, (void)other;
    return fail_with(ENOSYS);
}

bool system_remove_file(const char *path) {
    wchar_t wide[PATH_UNITS];
    return to_wide(path, wide) && _wunlink(wide) == 0;
}

/* `path` has room for PATH_UNITS; what is appended is removed again. */
static void remove_below(wchar_t *path) {
    DWORD attributes = GetFileAttributesW(path);
    if (attributes == INVALID_FILE_ATTRIBUTES) return;
    if (!(attributes & FILE_ATTRIBUTE_DIRECTORY)) {
        _wunlink(path);
        return;
    }
    size_t length = wcslen(path);
    if (!(attributes & FILE_ATTRIBUTE_REPARSE_POINT) && length + 3 < PATH_UNITS) {
        wcscpy(path + length, L"/*");
        WIN32_FIND_DATAW *found = malloc(sizeof *found);
        HANDLE search = found ? FindFirstFileW(path, found) : INVALID_HANDLE_VALUE;
        bool more = search != INVALID_HANDLE_VALUE;
        for (; more; more = FindNextFileW(search, found)) {
            const wchar_t *name = found->cFileName;
            if (wcscmp(name, L".") == 0 || wcscmp(name, L"..") == 0) continue;
            if (length + 2 + wcslen(name) > PATH_UNITS) continue;
            wcscpy(path + length + 1, name);
            remove_below(path);
        }
        if (search != INVALID_HANDLE_VALUE) FindClose(search);
        free(found);
        path[length] = 0;
    }
    RemoveDirectoryW(path);
}

void system_remove_tree(const char *path) {
    wchar_t wide[PATH_UNITS];
    if (to_wide(path, wide)) remove_below(wide);
}

bool system_make_folder(const char *path) {
    wchar_t wide[PATH_UNITS];
    system_status status;
    if (!to_wide(path, wide)) return false;
    if (CreateDirectoryW(wide, NULL)) return true;
    failed();
    /* The root of a drive is refused in other ways. */
    int reason = errno;
    return fail_with(system_status_of(path, &status) ? EEXIST : reason);
}

bool system_make_link(const char *target, const char *path) {
    (void)target, (void)path;
    return fail_with(ENOTSUP);
}

bool system_read_link(const char *path, char *target, size_t bytes) {
    (void)path, (void)target, (void)bytes;
    return fail_with(EINVAL);
}

char *system_absolute_path(const char *path) {
    wchar_t wide[PATH_UNITS], absolute[PATH_UNITS];
    system_status status;
    if (!system_status_of(path, &status) || !to_wide(path, wide)) return NULL;
    if (_wfullpath(absolute, wide, PATH_UNITS)) return from_wide(absolute);
    errno = ENAMETOOLONG;
    return NULL;
}

bool system_is_separator(char c) {
    return c == '/' || c == '\\';
}

bool system_is_absolute(const char *path) {
    return system_is_separator(path[0]) || (path[0] && path[1] == ':');
}

struct system_folder {
    HANDLE search;
    WIN32_FIND_DATAW found;
    bool begun;
    char *name;
};

system_folder *system_folder_open(const char *path) {
    wchar_t wide[PATH_UNITS];
    if (!to_wide(path, wide)) return NULL;
    if (wcslen(wide) + 3 > PATH_UNITS) return errno = ENAMETOOLONG, NULL;
    wcscat(wide, L"/*");
    system_folder *folder = calloc(1, sizeof *folder);
    if (!folder) return NULL;
    folder->search = FindFirstFileW(wide, &folder->found);
    if (folder->search != INVALID_HANDLE_VALUE) return folder;
    failed();
    int reason = errno;
    free(folder);
    errno = reason;
    return NULL;
}

const char *system_folder_next(system_folder *folder) {
    if (folder->begun && !FindNextFileW(folder->search, &folder->found)) {
        if (GetLastError() == ERROR_NO_MORE_FILES)
            errno = 0;
        else
            failed();
        return NULL;
    }
    folder->begun = true;
    free(folder->name);
    folder->name = from_wide(folder->found.cFileName);
    return folder->name;
}

void system_folder_close(system_folder *folder) {
    FindClose(folder->search);
    free(folder->name);
    free(folder);
}

bool system_lock(int file, int64_t *holder) {
    OVERLAPPED at = {0};
    *holder = 0;
    DWORD flags = LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY;
    if (LockFileEx((HANDLE)_get_osfhandle(file), flags, 0, 1, 0, &at)) return true;
    DWORD error = GetLastError();
    return error != ERROR_LOCK_VIOLATION && error != ERROR_IO_PENDING;
}

/* ---- The program ------------------------------------------------------------------------------------- */

/* The arguments in UTF-8; those that main() was given are in the code page of the system. They are never freed. */
static bool read_arguments(int *argc, char ***argv) {
    int count;
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), &count);
    char **texts = wide ? calloc((size_t)count + 1, sizeof *texts) : NULL;
    bool ok = texts != NULL;
    for (int i = 0; ok && i < count; i++)
        ok = (texts[i] = from_wide(wide[i])) != NULL;
    LocalFree(wide);
    if (!ok) return false;
    *argc = count;
    *argv = texts;
    return true;
}

/* A closed stream has no number here, so none is given to a file that is opened later. */
bool system_begin_program(int *argc, char ***argv) {
    for (int file = 0; file <= 2; file++)
        _setmode(file, _O_BINARY);
    SetConsoleOutputCP(CP_UTF8);
    HANDLE console = GetStdHandle(STD_OUTPUT_HANDLE);
    DWORD mode;
    if (GetConsoleMode(console, &mode)) SetConsoleMode(console, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING);
    return read_arguments(argc, argv);
}

void system_discard_closed_output(void) {
    if (_get_osfhandle(1) < 0) (void)freopen("NUL", "w", stdout);
}

bool system_output_is_terminal(void) {
    return _isatty(1);
}

int system_output_width(void) {
    CONSOLE_SCREEN_BUFFER_INFO info;
    if (!GetConsoleScreenBufferInfo(GetStdHandle(STD_OUTPUT_HANDLE), &info)) return 80;
    int width = info.srWindow.Right - info.srWindow.Left + 1;
    return width > 0 ? width : 80;
}

static void (*on_stop)(void);

static BOOL WINAPI stop_by_event(DWORD event) {
    on_stop();
    /* When this returns after one of these, Windows ends the process; it waits some seconds for it to end itself. */
    if (event == CTRL_CLOSE_EVENT || event == CTRL_LOGOFF_EVENT || event == CTRL_SHUTDOWN_EVENT) Sleep(INFINITE);
    return TRUE;
}

void system_on_stop(void (*stop)(void)) {
    on_stop = stop;
    SetConsoleCtrlHandler(stop_by_event, TRUE);
}

int64_t system_process(void) {
    return _getpid();
}

#endif
