/* SPDX-License-Identifier: MIT */
/* Checking and repairing UTF-8; see utf8.h. */
#include "text/utf8.h"

#include "files/json.h"

size_t utf8_valid(const char *text, size_t length) {
    size_t i = 0;
    while (i < length) {
        uint64_t eight;
        while (length - i >= 8 && (memcpy(&eight, text + i, 8), !(eight & 0x8080808080808080u)))
            i += 8;
        if (i == length) break;
        size_t bytes = json_character(text + i, length - i);
        if (!bytes) return i;
        i += bytes;
    }
    return length;
}

/* The bytes of a broken character that are replaced together: those that could begin a character, at least one. */
static size_t broken_length(const unsigned char *c, size_t length) {
    if (c[0] < 0xc2 || c[0] > 0xf4) return 1;
    /* The second byte has its own limits: not longer than needed, no surrogates, nothing above U+10FFFF. */
    unsigned low = c[0] == 0xe0 ? 0xa0 : c[0] == 0xf0 ? 0x90 : 0x80;
    unsigned high = c[0] == 0xed ? 0x9f : c[0] == 0xf4 ? 0x8f : 0xbf;
    if (length < 2 || c[1] < low || c[1] > high) return 1;
    size_t whole = c[0] < 0xf0 ? 3 : 4, i = 2;
    while (i < whole && i < length && (c[i] & 0xc0) == 0x80)
        i++;
    return i;
}

bool utf8_repair(const char *text, size_t length, byte_list *to) {
    for (size_t i = 0; i < length;) {
        size_t good = utf8_valid(text + i, length - i);
        if (!byte_list_add(to, text + i, good)) return false;
        i += good;
        if (i == length) break;
        if (!byte_list_add(to, "\xef\xbf\xbd", 3)) return false;
        i += broken_length((const unsigned char *)text + i, length - i);
    }
    return true;
}

size_t utf8_write(uint32_t character, char to[4]) {
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    size_t bytes = character < 0x80 ? 1 : character < 0x800 ? 2 : character < 0x10000 ? 3 : 4;
    for (size_t i = bytes - 1; i > 0; i--, character >>= 6)
        to[i] = (char)(0x80 | (character & 0x3f));
    to[0] = (char)(lead[bytes] | character);
    return bytes;
}

bool utf8_is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}
