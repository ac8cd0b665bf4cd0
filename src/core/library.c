/* SPDX-License-Identifier: MIT */
/* Finds the separate libraries of backends and of group engines: libvjp-NAME.so in the usual places. */
#include <stdio.h>
#include <string.h>

#include "core/core.h"
#include "core/system.h"

bool vjp_library_kind(const char *name, char kind[VJP_KIND_BYTES]) {
    size_t length = name ? strcspn(name, ":") : 0;
    if (!length || length >= VJP_KIND_BYTES) return false;
    if (strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") < length) return false;
    memcpy(kind, name, length);
    kind[length] = 0;
    return true;
}

void *vjp_library_open(const char *kind, char file[VJP_LIBRARY_FILE]) {
    char name[VJP_KIND_BYTES + 8];
    snprintf(name, sizeof name, "vjp-%s", kind);
    snprintf(file, VJP_LIBRARY_FILE, SYSTEM_LIBRARY_FORMAT, name);
    return system_library_open(file);
}
