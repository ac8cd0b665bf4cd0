/* Failure sentences; see fail.h. */
#include "train/fail.h"

#include <stdarg.h>
#include <stdio.h>

bool train_fail(char error[TRAIN_ERROR], const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error, TRAIN_ERROR, format, list);
    va_end(list);
    for (char *c = error; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return false;
}
