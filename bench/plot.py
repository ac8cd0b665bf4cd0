#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draws what bench/vs_torch.py --json printed: for each row the share of the limit that vjp and PyTorch reach.

    bench/vs_torch.py --device cuda --json >rows; bench/vs_torch.py --device cuda --dtype bf16 --json >>rows
    bench/plot.py rows [--pass backward] >docs/cuda-speed.svg

One picture, one block per dtype, two bars per row. Needs only the standard library.
"""

import argparse
import html
import json
import sys

OURS, THEIRS, INK, DIM, GRID, PAPER = "#0b7a75", "#c9ced6", "#1c2430", "#6b7685", "#e3e6ea", "#ffffff"
LABEL, BARS, ROW, BAR, TOP, EDGE = 340, 480, 30, 11, 84, 24


def text(x, y, words, size=12, colour=INK, anchor="start", weight="normal"):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{html.escape(words)}</text>"
    )


def bar(x, y, share, colour):
    return f'<rect x="{x}" y="{y}" width="{max(1, share * BARS):.1f}" height="{BAR}" rx="2" fill="{colour}"/>'


def draw(rows, which):
    most = max(max(r["limit_ms"] / r["vjp_ms"], r["limit_ms"] / r["torch_ms"]) for r in rows)
    scale = max(1.0, most)
    dtypes = list(dict.fromkeys(r["dtype"] for r in rows))
    height = TOP + len(dtypes) * 34 + len(rows) * ROW + EDGE
    width = LABEL + BARS + 110
    one = rows[0]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        text(EDGE, 30, f"{which.capitalize()}: share of the limit on {one['machine']}", 17, weight="600"),
        text(EDGE, 50, f"limit: minimum bytes over the rate of a copy; linear: its products and the pass between. {one['date']}", 11, DIM),
        f'<rect x="{EDGE}" y="60" width="11" height="11" rx="2" fill="{OURS}"/>' + text(EDGE + 16, 70, "vjp"),
        f'<rect x="{EDGE + 54}" y="60" width="11" height="11" rx="2" fill="{THEIRS}"/>'
        + text(EDGE + 70, 70, f"PyTorch {one['torch']}"),
    ]
    y = TOP
    for dtype in dtypes:
        mine = [r for r in rows if r["dtype"] == dtype]
        bottom = y + 34 + len(mine) * ROW
        for tick in (0, 0.25, 0.5, 0.75, 1):
            x = LABEL + tick / scale * BARS
            out.append(f'<line x1="{x:.1f}" y1="{y + 22}" x2="{x:.1f}" y2="{bottom - 6}" stroke="{GRID}"/>')
            out.append(text(f"{x:.1f}", y + 18, f"{tick:g}", 10, DIM, "middle"))
        out.append(text(EDGE, y + 20, dtype, 13, weight="600"))
        y += 34
        for r in mine:
            ours, theirs = r["limit_ms"] / r["vjp_ms"], r["limit_ms"] / r["torch_ms"]
            out.append(text(EDGE, y + 14, r["op"], 12, weight="600") + text(EDGE + 90, y + 14, r["shape"], 11, DIM))
            out.append(bar(LABEL, y + 1, ours / scale, OURS) + bar(LABEL, y + 13, theirs / scale, THEIRS))
            out.append(text(LABEL + ours / scale * BARS + 6, y + 11, f"{ours:.2f}", 11))
            out.append(text(LABEL + theirs / scale * BARS + 6, y + 23, f"{theirs:.2f}", 10, DIM))
            y += ROW
    out.append("</svg>")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--pass", choices=["forward", "backward"], default="backward", dest="which")
    args = parser.parse_args()
    rows = [json.loads(line) for name in args.files for line in open(name, encoding="utf-8") if line.startswith("{")]
    rows = [r for r in rows if r["pass"] == args.which and r.get("agrees")]
    if not rows:
        sys.exit("plot.py: there is no such row in what was given")
    print(draw(rows, args.which))
    return 0


if __name__ == "__main__":
    sys.exit(main())
