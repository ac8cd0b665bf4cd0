#!/usr/bin/env python3
"""Writes the PNG files beside it, which test_pictures.c reads. Channel c of the pixel at row y, column x is
(37 y + 11 x + 71 c) mod 251 in all of them; a palette's entry i is (i, 255 - i, 7 i mod 256). Every kind of filter,
of compression and of colour is in one of them.
"""
import os
import struct
import zlib

HEIGHT, WIDTH = 10, 7
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def nearest(left, up, corner):
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def filtered(rows, step, kinds):
    above, out = bytes(len(rows[0])), b""
    for y, row in enumerate(rows):
        kind = kinds[y % len(kinds)]
        out += bytes([kind])
        for x, value in enumerate(row):
            left = row[x - step] if x >= step else 0
            corner = above[x - step] if x >= step else 0
            expected = [0, left, above[x], (left + above[x]) // 2, nearest(left, above[x], corner)][kind]
            out += bytes([(value - expected) % 256])
        above = row
    return out


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def write(name, colour, kinds=(0, 1, 2, 3, 4), level=9, strategy=zlib.Z_DEFAULT_STRATEGY, height=HEIGHT, width=WIDTH, parts=1):
    step = CHANNELS[colour]
    rows = [bytes((37 * y + 11 * x + 71 * c) % 251 for x in range(width) for c in range(step)) for y in range(height)]
    packer = zlib.compressobj(level, zlib.DEFLATED, 15, 9, strategy)
    data = packer.compress(filtered(rows, step, kinds)) + packer.flush()
    out = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    out += chunk(b"tEXt", b"Comment\0made by make.py")
    if colour == 3:
        out += chunk(b"PLTE", bytes(v for i in range(256) for v in (i, 255 - i, 7 * i % 256)))
    for part in range(parts):
        out += chunk(b"IDAT", data[len(data) * part // parts : len(data) * (part + 1) // parts])
    out += chunk(b"IEND", b"")
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".png"), "wb") as file:
        file.write(out)


write("grey", 0)
write("grey_alpha", 4)
write("colours", 2)
write("colours_alpha", 6)
write("palette", 3, kinds=(0,))
write("stored", 2, level=0)
write("fixed", 2, strategy=zlib.Z_FIXED)
write("own_code", 0, kinds=(0,), height=60, width=50)
write("repeats", 0, kinds=(2,), height=60, width=50)
write("parts", 2, parts=5)
