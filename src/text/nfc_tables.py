#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes nfc_tables.h, the Unicode data of nfc.c, from this Python's unicodedata:

    python3 src/text/nfc_tables.py

Normal forms of assigned characters never change; a newer Unicode only adds characters.
"""
import os
import unicodedata

CHARACTERS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xAC00 + 11172)


def decomposition(c):
    """Of one step: one or two characters, or none."""
    text = unicodedata.decomposition(chr(c))
    return [] if not text or text[0] == "<" else [int(word, 16) for word in text.split()]


def changes(c):
    return unicodedata.normalize("NFC", chr(c)) != chr(c)


def rows(items, width=120):
    lines, line = [], "   "
    for item in items:
        if len(line) + len(item) + 2 > width:
            lines.append(line)
            line = "   "
        line += " " + item + ","
    return "\n".join(lines + [line])


def main():
    apart = [(c, decomposition(c)) for c in CHARACTERS if c not in HANGUL and decomposition(c)]
    pairs = sorted((d[0], d[1], c) for c, d in apart if len(d) == 2 and not changes(c))
    classes = []
    for c in CHARACTERS:
        k = unicodedata.combining(chr(c))
        if not k:
            continue
        if classes and classes[-1][1] == c - 1 and classes[-1][2] == k:
            classes[-1][1] = c
        else:
            classes.append([c, c, k])
    # Characters that may change, or join the one before them.
    seconds = {second for _, second, _ in pairs} | set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    pages, index = [], []
    for page in range(0x1100):
        words = [0] * 8
        for c in range(page << 8, (page + 1) << 8):
            if 0xD800 <= c < 0xE000:
                continue
            if unicodedata.combining(chr(c)) or c in seconds or changes(c):
                words[c >> 5 & 7] |= 1 << (c & 31)
        if words not in pages:
            pages.append(words)
        index.append(pages.index(words))
    assert len(pages) < 256
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "nfc_tables.h"), "w") as out:
        out.write(f"""/* SPDX-License-Identifier: MIT */
/* Unicode {unicodedata.unidata_version}: what nfc.c needs. Written by nfc_tables.py. */
/* clang-format off */

/* A character, and the one or two (0: one) that it decomposes into in one step. */
static const uint32_t decompositions[][3] = {{
{rows(f"{{{c:#x}, {d[0]:#x}, {d[1] if len(d) > 1 else 0:#x}}}" for c, d in apart)}
}};

/* Two characters, and the one that they compose. */
static const uint32_t compositions[][3] = {{
{rows(f"{{{a:#x}, {b:#x}, {c:#x}}}" for a, b, c in pairs)}
}};

/* The first and the last of some characters, and their combining class, where it is not 0. */
static const uint32_t combining[][3] = {{
{rows(f"{{{a:#x}, {b:#x}, {k}}}" for a, b, k in classes)}
}};

/* One bit per character: whether it may change, or join the character before it. */
static const uint32_t special_pages[][8] = {{
{rows("{" + ", ".join(f"{w:#x}" for w in words) + "}" for words in pages)}
}};
static const uint8_t special_page[0x1100] = {{
{rows(str(i) for i in index)}
}};
""")


if __name__ == "__main__":
    main()
