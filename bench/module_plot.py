#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draws the tables that bench/torch_module.py prints: for each row, how many times as long the others take as vjp.

    bench/module_plot.py docs/python.md >docs/python-speed.svg

Needs only the standard library.
"""
import sys

from plot import BAR, BARS, DIM, EDGE, GRID, INK, LABEL, OURS, PAPER, THEIRS, bar, text

HEAD, ROW, GAP, MOST = 44, 16, 10, 4  # a bar may be MOST times as long as vjp's time
LIGER = "#e0a458"
TITLES = ("CPU, 1 thread: a Llama", "CPU, 1 thread: its parts, torch's compiled", "H200: a Llama", "H200: parts of a layer, torch's compiled")  # of the tables there


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_tables(lines):
    """[(names of the others, [(label, {name: time / vjp's})])]"""
    tables = []
    inside = False
    for line in lines:
        if line.startswith("| | dtype |"):
            names = [name.removesuffix(" / vjp") for name in cells(line) if name.endswith(" / vjp")]
            tables.append((names, []))
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            row = cells(line)
            shares = {name: float(value) for name, value in zip(names, row[-len(names):]) if value}
            tables[-1][1].append((f"{row[0]}, {row[1]}", shares))
    return tables


def draw(tables, titles):
    colours = {"torch": THEIRS, "Liger": LIGER}
    height = 64 + sum(HEAD + sum(GAP + ROW * len(shares) for _, shares in rows) for _, rows in tables) + EDGE
    width = LABEL + BARS + 110
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">',
           f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
           text(EDGE, 30, "Forward and backward: time of the others / time of vjp", 17, weight="600")]
    for i, (name, colour) in enumerate(colours.items()):
        out.append(f'<rect x="{EDGE + 70 * i}" y="42" width="11" height="11" rx="2" fill="{colour}"/>' + text(EDGE + 16 + 70 * i, 52, name))
    out.append(f'<line x1="{EDGE + 146}" y1="47" x2="{EDGE + 160}" y2="47" stroke="{OURS}" stroke-width="2"/>' + text(EDGE + 166, 52, "vjp"))
    y = 64
    for (_, rows), title in zip(tables, titles):
        bottom = y + HEAD + sum(GAP + ROW * len(shares) for _, shares in rows)
        out.append(text(EDGE, y + 28, title, 13, weight="600"))
        for tick in range(MOST + 1):
            x = LABEL + tick / MOST * BARS
            line, thick = (OURS, 2) if tick == 1 else (GRID, 1)
            out.append(f'<line x1="{x:.1f}" y1="{y + 34}" x2="{x:.1f}" y2="{bottom}" stroke="{line}" stroke-width="{thick}"/>')
            out.append(text(f"{x:.1f}", y + 28, f"{tick}", 10, DIM, "middle"))
        y += HEAD
        for label, shares in rows:
            out.append(text(EDGE, y + 10, label, 12, INK))
            for name, share in shares.items():
                out.append(bar(LABEL, y, share / MOST, colours[name]) + text(f"{LABEL + share / MOST * BARS + 6:.1f}", y + BAR - 1, f"{share:.2f}", 10, DIM))
                y += ROW
            y += GAP
    return "\n".join([*out, "</svg>"])


def main():
    if len(sys.argv) != 2:
        sys.exit("module_plot.py: name a file with the tables")
    with open(sys.argv[1], encoding="utf-8") as file:
        tables = read_tables(file)
    if len(tables) != len(TITLES):
        sys.exit(f"module_plot.py: {sys.argv[1]} has {len(tables)} such tables, not {len(TITLES)}")
    print(draw(tables, TITLES))


if __name__ == "__main__":
    main()
