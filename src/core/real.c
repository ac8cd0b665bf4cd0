/* SPDX-License-Identifier: MIT */
/* Real numbers as text; see real.h. */
#include "core/real.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool reads_back(double value, int digits) {
    char text[REAL_TEXT];
    snprintf(text, REAL_TEXT, "%.*g", digits, value);
    return strtod(text, NULL) == value;
}

/*
 * The fewest digits that read back. If some do, so do more of them, which are no farther from the value; this holds at
 * powers of two as well, where doubles are closer below than above (tests/test_text.c has all of them). 15 are tried
 * first: a number that was written with up to 15 needs no more, and most others need 16 or 17. A trial takes a
 * microsecond in a browser.
 */
static int shortest(double value) {
    enum { FIRST = 15, MAX = 17 };
    int low = 1, high = MAX;
    for (int digits = FIRST; low<high; digits = low> FIRST ? low : (low + high) / 2) {
        if (reads_back(value, digits))
            high = digits;
        else
            low = digits + 1;
    }
    return low;
}

const char *text_real(double value, char text[REAL_TEXT]) {
    if (isnan(value)) value = NAN; /* printf() would show a NaN's sign */
    snprintf(text, REAL_TEXT, "%.*g", shortest(value), value);
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
