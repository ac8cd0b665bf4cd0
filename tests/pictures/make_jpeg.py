#!/usr/bin/env python3
"""Writes the JPEG files beside it, and for each the pixels that it holds as PGM or PPM; test_pictures.c reads both.

The files of FILES are written by the encoder here, which knows kinds that no common one makes: every factor of sampling,
scans of every kind, steps of 16 bits. Their pixels are computed from the coefficients: the transform in double, samples
rounded to bytes, channels stretched by linear interpolation, then colours, as JFIF says. Those called pillow_* are
written and read by Pillow (pip install pillow), which also reads the others, where it knows their kind, and must agree.
"""
import io
import math
import os
import sys

HEIGHT, WIDTH = 18, 21
FOLDER = os.path.dirname(os.path.abspath(__file__))
ZIGZAG = sorted(range(64), key=lambda k: (k // 8 + k % 8, k // 8 if (k // 8 + k % 8) % 2 else k % 8))
WAVES = [[(math.sqrt(0.125) if u == 0 else 0.5) * math.cos((2 * x + 1) * u * math.pi / 16) for x in range(8)] for u in range(8)]


def colour(y, x):
    """Smooth, with an edge: red, green, blue."""
    edge = 60 if x + 2 * y > 30 else 0
    return [min(255, max(0, round(110 + edge + 70 * math.sin(x / 4 + c) * math.cos(y / 5 - 2 * c)))) for c in range(3)]


def noise(y, x):
    """Every frequency, as large as it can be."""
    value = (y * 7919 + x * 104729 + 13) * 2654435761 % 2**32 >> 24
    return [value] * 3


def to_ycc(rgb):
    r, g, b = rgb
    y = 0.299 * r + 0.587 * g + 0.114 * b
    return [y, 128 + (b - y) / 1.772, 128 + (r - y) / 1.402]


def clamp(value):
    return min(255, max(0, math.floor(value + 0.5)))


def to_rgb(ycc):
    y, cb, cr = ycc[0], ycc[1] - 128, ycc[2] - 128
    return [clamp(y + 1.402 * cr), clamp(y - 0.344136286 * cb - 0.714136286 * cr), clamp(y + 1.772 * cb)]


class Channel:
    def __init__(self, name, h, v, most_h, most_v, plane, step, height=HEIGHT, width=WIDTH):
        self.name, self.h, self.v, self.most_h, self.most_v = name, h, v, most_h, most_v
        self.width, self.height = -(-width * h // most_h), -(-height * v // most_v)
        self.across, self.down = -(-self.width // 8), -(-self.height // 8)
        self.all_across = -(-width // (8 * most_h)) * h
        self.all_down = -(-height // (8 * most_v)) * v
        self.step = [step * (1 + (k // 8 + k % 8) / 4) // 1 for k in range(64)]
        self.blocks = {}
        for row in range(self.all_down):
            for column in range(self.all_across):
                block = [[plane[min(height - 1, (8 * row + y) * most_v // v)][min(width - 1, (8 * column + x) * most_h // h)] - 128
                          for x in range(8)] for y in range(8)]
                self.blocks[row, column] = [
                    int(round(sum(block[y][x] * WAVES[k // 8][y] * WAVES[k % 8][x] for y in range(8) for x in range(8))
                              / self.step[k])) for k in range(64)]

    def samples(self):
        """[height][width], bytes."""
        plane = [[0] * (8 * self.all_across) for _ in range(8 * self.all_down)]
        for (row, column), block in self.blocks.items():
            for y in range(8):
                for x in range(8):
                    plane[8 * row + y][8 * column + x] = clamp(128 + math.fsum(
                        block[k] * self.step[k] * WAVES[k // 8][y] * WAVES[k % 8][x] for k in range(64)))
        return plane

    def stretched(self, plane, y, x):
        def place(at, own, most, size):
            where = (at + 0.5) * own / most - 0.5
            low = math.floor(where)
            return min(max(low, 0), size - 1), min(low + 1, size - 1), where - low
        top, bottom, down = place(y, self.v, self.most_v, self.height)
        left, right, across = place(x, self.h, self.most_h, self.width)
        upper = plane[top][left] * (1 - across) + plane[top][right] * across
        lower = plane[bottom][left] * (1 - across) + plane[bottom][right] * across
        return math.floor(upper * (1 - down) + lower * down + 0.5)


# ---- Codes ----


class Codes:
    """Symbols and bits of a scan; the codes of the symbols are made when all are known, all of one length."""

    def __init__(self):
        self.items = []

    def symbol(self, table, value):
        self.items.append((table, value))

    def bits(self, value, count):
        self.items.append((None, [value >> i & 1 for i in reversed(range(count))]))

    def restart(self, number):
        self.items.append(("restart", number))

    def tables(self):
        return {t: sorted({v for table, v in self.items if table == t})
                for t in sorted({table for table, _ in self.items if table and table != "restart"})}

    def bytes(self):
        tables = self.tables()
        length = {t: len(symbols).bit_length() for t, symbols in tables.items()}  # never all ones
        out, line = bytearray(), []

        def flush():
            line.extend([1] * (-len(line) % 8))
            for i in range(0, len(line), 8):
                byte = int("".join(map(str, line[i:i + 8])), 2)
                out.extend([byte, 0] if byte == 255 else [byte])
            line.clear()

        for table, value in self.items:
            if table is None:
                line.extend(value)
            elif table == "restart":
                flush()
                out.extend([0xff, 0xd0 + value % 8])
            else:
                code = tables[table].index(value)
                line.extend(code >> i & 1 for i in reversed(range(length[table])))
        flush()
        return bytes(out)

    def segments(self):
        out = b""
        for (kind, number), symbols in self.tables().items():
            counts = [0] * 16
            counts[len(symbols).bit_length() - 1] = len(symbols)
            out += segment(0xc4, bytes([kind << 4 | number] + counts + symbols))
        return out

    def number(self, table, zeros, value):
        count = abs(value).bit_length()
        self.symbol(table, zeros << 4 | count)
        self.bits(value if value > 0 else value + (1 << count) - 1, count)


class Scan:
    """One scan over blocks, which `finish` ends; see T.81, figures F.2 and G.3 to G.9."""

    def __init__(self, first, last, high, low):
        self.first, self.last, self.high, self.low = first, last, high, low
        self.codes, self.before, self.run, self.kept = Codes(), {}, 0, []

    def flush(self, table):
        if self.run:
            count = self.run.bit_length() - 1
            self.codes.symbol(table, count << 4)
            self.codes.bits(self.run - (1 << count), count)
            for bit in self.kept:
                self.codes.bits(bit, 1)
        self.run, self.kept = 0, []

    def dc(self, channel, block, number):
        value = block[0] >> self.low
        if self.high:
            self.codes.bits(value & 1, 1)
            return
        self.codes.number((0, number), 0, value - self.before.get(channel.name, 0))
        self.before[channel.name] = value

    def ac(self, block, number, progressive):
        zeros = 0
        for k in range(max(1, self.first), self.last + 1):
            value = block[ZIGZAG[k]]
            value = abs(value) >> self.low if value > 0 else -(abs(value) >> self.low)
            if value == 0:
                zeros += 1
                continue
            self.flush((1, number))
            for _ in range(zeros // 16):
                self.codes.symbol((1, number), 0xf0)
            self.codes.number((1, number), zeros % 16, value)
            zeros = 0
        if zeros:
            self.run += 1
            if not progressive:
                self.flush((1, number))

    def ac_again(self, block, number):
        table, zeros, kept = (1, number), 0, []
        sizes = {k: abs(block[ZIGZAG[k]]) >> self.low for k in range(self.first, self.last + 1)}
        end = max([k for k, size in sizes.items() if size == 1], default=0)
        for k, size in sizes.items():
            if size == 0:
                zeros += 1
                continue
            while zeros > 15 and k <= end:
                self.flush(table)
                self.codes.symbol(table, 0xf0)
                zeros -= 16
                for bit in kept:
                    self.codes.bits(bit, 1)
                kept = []
            if size > 1:
                kept.append(size & 1)
                continue
            self.flush(table)
            self.codes.symbol(table, zeros << 4 | 1)
            self.codes.bits(int(block[ZIGZAG[k]] > 0), 1)
            for bit in kept:
                self.codes.bits(bit, 1)
            zeros, kept = 0, []
        if zeros or kept:
            self.run += 1
            self.kept += kept

    def block(self, channel, block, number, progressive):
        if self.first == 0:
            self.dc(channel, block, number)
        if self.last and self.high:
            self.ac_again(block, number)
        elif self.last:
            self.ac(block, number, progressive)


# ---- Files ----


def segment(kind, body):
    return bytes([0xff, kind]) + (len(body) + 2).to_bytes(2, "big") + body


def write_scan(channels, numbers, band, progressive, restart):
    scan = Scan(*band)
    if len(channels) == 1:
        c = channels[0]
        groups = [[(c, row, column)] for row in range(c.down) for column in range(c.across)]
    else:
        groups = [[(c, row * c.v + b // c.h, column * c.h + b % c.h) for c in channels for b in range(c.h * c.v)]
                  for row in range(channels[0].all_down // channels[0].v) for column in range(channels[0].all_across // channels[0].h)]
    for at, group in enumerate(groups):
        if restart and at and at % restart == 0:
            for number in set(numbers):
                scan.flush((1, number))
            scan.codes.restart(at // restart - 1)
            scan.before = {}
        for c, row, column in group:
            scan.block(c, c.blocks[row, column], numbers[channels.index(c)], progressive)
    for number in set(numbers):
        scan.flush((1, number))
    head = bytes([len(channels)]) + b"".join(bytes([c.name, n << 4 | n]) for c, n in zip(channels, numbers))
    head += bytes([band[0], band[1], band[2] << 4 | band[3]])
    return scan.codes.segments() + segment(0xda, head) + scan.codes.bytes()


WHOLE = (0, 63, 0, 0)


def make(factors, names=(1, 2, 3), scans=None, restart=0, wide=False, head=b"", colours=True, step=6, source=colour):
    """The bytes of a file, and its pixels. `scans`: (channels, first, last, high, low) each; None: one baseline scan."""
    most_h, most_v = max(h for h, _ in factors), max(v for _, v in factors)
    if len(factors) == 1:
        planes = [[[to_ycc(source(y, x))[0] for x in range(WIDTH)] for y in range(HEIGHT)]]
    else:
        change = to_ycc if colours else (lambda rgb: rgb)
        planes = [[[change(source(y, x))[c] for x in range(WIDTH)] for y in range(HEIGHT)] for c in range(3)]
    channels = [Channel(n, h, v, most_h, most_v, plane, step * (1 + (i > 0)))
                for i, (n, (h, v), plane) in enumerate(zip(names, factors, planes))]
    progressive = scans is not None and scans[0][1:] != WHOLE
    out = b"\xff\xd8" + head
    for number in range(min(2, len(factors))):
        steps = [int(channels[number].step[k]) for k in ZIGZAG]
        body = b"".join(s.to_bytes(2, "big") for s in steps) if wide else bytes(steps)
        out += segment(0xdb, bytes([wide << 4 | number]) + body)
    frame = bytes([8]) + HEIGHT.to_bytes(2, "big") + WIDTH.to_bytes(2, "big") + bytes([len(channels)])
    for i, c in enumerate(channels):
        frame += bytes([c.name, c.h << 4 | c.v, int(i > 0)])
    out += segment(0xc2 if progressive else 0xc0, frame)
    if restart:
        out += segment(0xdd, restart.to_bytes(2, "big"))
    for which, *band in scans or [(tuple(range(len(factors))), *WHOLE)]:
        out += write_scan([channels[i] for i in which], [int(i > 0) for i in which], tuple(band), progressive, restart)
    out += b"\xff\xd9"
    planes = [c.samples() for c in channels]
    pixels = []
    for y in range(HEIGHT):
        for x in range(WIDTH):
            values = [c.stretched(plane, y, x) for c, plane in zip(channels, planes)]
            pixels += to_rgb(values) if colours and len(values) == 3 else values
    return out, bytes(pixels)


JFIF = segment(0xe0, b"JFIF\0\1\1\0\0\1\0\1\0\0")
ADOBE_RGB = segment(0xee, b"Adobe\0\x64\0\0\0\0\0")
ALL, QUARTER = [(1, 1)] * 3, [(2, 2), (1, 1), (1, 1)]
STEPS = [((0, 1, 2), 0, 0, 0, 1), ((0,), 1, 5, 0, 2), ((2,), 1, 63, 0, 1), ((1,), 1, 63, 0, 1), ((0,), 6, 63, 0, 2),
         ((0,), 1, 63, 2, 1), ((0, 1, 2), 0, 0, 1, 0), ((2,), 1, 63, 1, 0), ((1,), 1, 63, 1, 0), ((0,), 1, 63, 1, 0)]
FILES = {
    "grey": dict(factors=[(1, 1)], head=JFIF),
    "grey_factors": dict(factors=[(2, 3)]),
    "noise": dict(factors=[(1, 1)], step=2, source=noise),
    "colours": dict(factors=ALL, head=JFIF),
    "half": dict(factors=[(2, 1), (1, 1), (1, 1)], head=JFIF),
    "quarter": dict(factors=QUARTER, head=JFIF),
    "tall": dict(factors=[(1, 2), (1, 1), (1, 1)]),
    "fourth": dict(factors=[(4, 1), (1, 1), (1, 1)]),
    "mixed": dict(factors=[(3, 2), (1, 2), (2, 1)]),
    "restart": dict(factors=QUARTER, restart=3),
    "apart": dict(factors=QUARTER, scans=[((i,), *WHOLE) for i in (2, 0, 1)], wide=True, restart=1),
    "progressive": dict(factors=QUARTER, scans=STEPS, head=JFIF, step=2),
    "progressive_restart": dict(factors=[(2, 1), (1, 1), (1, 1)], scans=STEPS, restart=2, step=2),
    "rgb": dict(factors=ALL, head=ADOBE_RGB, colours=False),
    "rgb_names": dict(factors=ALL, names=tuple(b"RGB"), colours=False),
}


def write(name, data, pixels, channels):
    with open(os.path.join(FOLDER, name + ".jpg"), "wb") as file:
        file.write(data)
    with open(os.path.join(FOLDER, "jpeg_" + name + (".pgm" if channels == 1 else ".ppm")), "wb") as file:
        file.write(b"P%d %d %d 255\n" % (5 if channels == 1 else 6, WIDTH, HEIGHT) + pixels)


def difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b))


def main():
    try:
        from PIL import Image
    except ImportError:
        Image = None
        print("there is no Pillow: its files stay as they are, and nobody else reads the others")
    for name, options in FILES.items():
        data, pixels = make(**options)
        write(name, data, pixels, len(options["factors"]))
        said = ""
        # libjpeg knows no factors that do not divide each other.
        if Image and name != "mixed":
            theirs = Image.open(io.BytesIO(data)).tobytes()
            said = f", Pillow differs by {difference(pixels, theirs)}"
        print(f"{name}: {len(data)} bytes{said}")
    if not Image:
        return
    picture = Image.new("RGB", (WIDTH, HEIGHT))
    picture.putdata([tuple(colour(y, x)) for y in range(HEIGHT) for x in range(WIDTH)])
    kinds = {"pillow": dict(quality=90, subsampling=2, optimize=True),
             "pillow_progressive": dict(quality=95, subsampling=1, progressive=True),
             "pillow_grey": dict(quality=80), "pillow_cmyk": dict(quality=50)}
    for name, options in kinds.items():
        mode = {"pillow_grey": "L", "pillow_cmyk": "CMYK"}.get(name, "RGB")
        file = io.BytesIO()
        picture.convert(mode).save(file, "JPEG", **options)
        data = file.getvalue()
        print(f"{name}: {len(data)} bytes")
        if mode == "CMYK":
            with open(os.path.join(FOLDER, name + ".jpg"), "wb") as out:
                out.write(data)
        else:
            write(name, data, Image.open(io.BytesIO(data)).tobytes(), 1 if mode == "L" else 3)


if __name__ == "__main__":
    sys.exit(main())
