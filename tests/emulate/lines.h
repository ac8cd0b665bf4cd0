/* SPDX-License-Identifier: MIT */
/*
 * Names of places in the code, such as "norm.metal:120", from addresses in this program or shared library.
 */
#ifndef VJP_TESTS_EMULATE_LINES_H
#define VJP_TESTS_EMULATE_LINES_H

#include <cstdint>
#include <cstdio>
#include <cstring>

#include <dlfcn.h>

// The program's or library's first and last byte, which the linker defines.
extern "C" {
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));
}

static uintptr_t emulate_first_byte() {
    return reinterpret_cast<uintptr_t>(__ehdr_start);
}

static const char *emulate_file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// The innermost line that is not in a file whose path contains `hidden`. `place` is relative to the first byte.
static void emulate_line_of(unsigned place, const char *hidden, char *text, size_t room) {
    Dl_info self;
    char command[1024], line[512];
    snprintf(text, room, "code + 0x%x", place);
    if (!dladdr(__ehdr_start, &self)) return;
    snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%x 2>/dev/null", self.dli_fname, place - 1);
    FILE *said = popen(command, "r");
    if (!said) return;
    bool found = false;
    while (fgets(line, sizeof line, said)) {
        line[strcspn(line, " \n")] = 0;
        if (found || line[0] == '?' || strstr(line, hidden)) continue;
        snprintf(text, room, "%.*s", static_cast<int>(room - 1), emulate_file_name(line));
        found = true;
    }
    pclose(said);
}

#endif
