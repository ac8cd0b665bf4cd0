/* SPDX-License-Identifier: MIT */
/* One sentence for one failure; see fail.h. */
#include "files/fail.h"

#include <stdarg.h>
#include <stdio.h>

bool file_fail(char error[FILE_ERROR], const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error, FILE_ERROR, format, list);
    va_end(list);
    for (char *c = error; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return false;
}
