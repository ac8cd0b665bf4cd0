#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the PNG files beside it, which test_pictures.c reads. Channel c of the pixel at row y, column x is
(37 y + 11 x + 71 c) mod 251 in all of them; a palette's entry i is (i, 255 - i, 7 i mod 256).
"""
import os
import struct
import zlib

HEIGHT, WIDTH = 10, 7
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# First row and column of each pass of an interlaced file, and the steps to the next.
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def row(y, first, step, channels, depth):
    values = ((37 * y + 11 * x + 71 * c) % 251 for x in range(first, WIDTH, step) for c in range(channels))
    return b"".join(bytes([v]) if depth == 8 else bytes([v, v]) for v in values)


def write(name, colour, depth=8, interlaced=False):
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    rows = (row(y, x, dx, CHANNELS[colour], depth) for y0, x, dy, dx in passes for y in range(y0, HEIGHT, dy))
    data = zlib.compress(b"".join(b"\0" + r for r in rows if r), 9)
    out = b"\x89PNG\r\n\x1a\n"
    out += chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colour, 0, 0, interlaced))
    out += chunk(b"tEXt", b"Comment\0made by make.py")
    if colour == 3:
        out += chunk(b"PLTE", bytes(v for i in range(256) for v in (i, 255 - i, 7 * i % 256)))
    out += chunk(b"IDAT", data) + chunk(b"IEND", b"")
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".png"), "wb") as file:
        file.write(out)


write("grey", 0)
write("grey_alpha", 4)
write("colours", 2)
write("colours_alpha", 6)
write("palette", 3)
write("deep", 2, depth=16)
write("interlaced", 2, interlaced=True)
