/* SPDX-License-Identifier: MIT */
/* Real numbers as text. */
#ifndef VJP_CORE_REAL_H
#define VJP_CORE_REAL_H

enum { REAL_TEXT = 32 };

/* The shortest decimal that reads back as the same double: "0.1", "1e-5", "nan", "inf". */
const char *text_real(double value, char text[REAL_TEXT]);

#endif
