/* SPDX-License-Identifier: MIT */
/*
 * UTF-8. What is encoded must be valid; text that is not is repaired first: each longest sequence of bytes that begins
 * a character and does not finish it, and each byte that cannot begin one, becomes U+FFFD. Python's
 * bytes.decode("utf-8", "replace") and Unicode's recommendation do the same.
 */
#ifndef VJP_TEXT_UTF8_H
#define VJP_TEXT_UTF8_H

#include "text/list.h"

/* How many bytes of the text are valid: `length` if all are. */
size_t utf8_valid(const char *text, size_t length);

/* Adds the repaired text. False: there is no memory. */
bool utf8_repair(const char *text, size_t length, byte_list *to);

/* The character that a valid text begins with, and its length in bytes. */
static inline uint32_t utf8_first(const char *text, size_t *bytes) {
    const unsigned char *c = (const unsigned char *)text;
    if (c[0] < 0x80) return *bytes = 1, c[0];
    if (c[0] < 0xe0) return *bytes = 2, (uint32_t)(c[0] & 0x1f) << 6 | (c[1] & 0x3f);
    if (c[0] < 0xf0) return *bytes = 3, (uint32_t)(c[0] & 0x0f) << 12 | (uint32_t)(c[1] & 0x3f) << 6 | (c[2] & 0x3f);
    *bytes = 4;
    return (uint32_t)(c[0] & 0x07) << 18 | (uint32_t)(c[1] & 0x3f) << 12 | (uint32_t)(c[2] & 0x3f) << 6 | (c[3] & 0x3f);
}

/* The length in bytes of a character that begins with this byte, in a valid text. */
static inline size_t utf8_length(char first) {
    unsigned char c = (unsigned char)first;
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

/* Writes a character; returns its length. */
size_t utf8_write(uint32_t character, char to[4]);

/* Unicode's property White_Space. */
bool utf8_is_space(uint32_t character);

#endif
