/* SPDX-License-Identifier: MIT */
/*
 * The characters that stand for bytes in the vocabulary of a byte-level model, as in GPT-2: bytes that print stand for
 * themselves as Latin-1 characters, the others are U+0100 and up in their order. A space is U+0120.
 */
#ifndef VJP_TEXT_BYTE_LEVEL_H
#define VJP_TEXT_BYTE_LEVEL_H

#include <stdint.h>

#include "text/utf8.h"

/* The regular expression that splits words before they are encoded, where a file does not have another: GPT-2's. */
#define BYTE_LEVEL_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

enum { BYTE_LEVEL_END = 0x144 }; /* behind the last of the characters */

static inline uint32_t byte_level_character(unsigned char byte) {
    if (byte <= 32) return 0x100u + byte;
    if (byte < 127) return byte;
    if (byte <= 160) return 0x121u + (byte - 127u);
    return byte == 173 ? 0x143 : byte;
}

/* -1: it stands for none. */
static inline int byte_level_byte(uint32_t character) {
    if (character >= 0x100 && character <= 0x120) return (int)(character - 0x100);
    if (character >= 0x121 && character <= 0x142) return (int)(character - 0x121 + 127);
    if (character == 0x143) return 173;
    bool itself = (character > 32 && character < 127) || (character > 160 && character < 256 && character != 173);
    return itself ? (int)character : -1;
}

/*
 * The bytes that a text in these characters stands for, never longer than the text. False: a character is none of them,
 * and `bytes` and `*count` have the beginning.
 */
static inline bool byte_level_bytes(const char *text, size_t length, char *bytes, size_t *count) {
    *count = 0;
    for (size_t i = 0, taken; i < length; i += taken) {
        int byte = byte_level_byte(utf8_first(text + i, &taken));
        if (byte < 0) return false;
        bytes[(*count)++] = (char)byte;
    }
    return true;
}

#endif
