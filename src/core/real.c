/* SPDX-License-Identifier: MIT */
/* Real numbers as text; see real.h. */
#include "core/real.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *text_real(double value, char text[REAL_TEXT]) {
    if (isnan(value)) value = NAN; /* printf() would show a NaN's sign */
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, REAL_TEXT, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    /* "1e-05" and "1e+20" become "1e-5" and "1e20". */
    char *exponent = strchr(text, 'e');
    if (!exponent) return text;
    char *to = exponent + 1, *from = to;
    if (*from == '-') to++, from++;
    while (*from == '+' || *from == '0')
        from++;
    memmove(to, from, strlen(from) + 1);
    return text;
}
