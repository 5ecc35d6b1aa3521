#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws memory.svg: bytes per parameter on a rank, against the number of ranks.

The curves are the formulas of the table in docs/training.md, whose numbers are checked on the way.
They are those of bookkeeping/memory.h without padding and buckets.
"""

import math
import re
import sys

from drawing import (BLUE, GREEN, GREY, INK, LIGHT_GREY, ORANGE, RED, Picture, table_below, write)

TABLE = "docs/training.md"
WORLDS = [1, 2, 4, 8, 16, 32, 64]
# By the beginnings of names, the longest first; None: not drawn.
LINES = {"one process": (RED, "DDP"), "stage 1": (ORANGE, "stage 1"),
         "stage 2 with bf16 moments": None, "stage 2 with 8-bit moments and split masters":
         (GREEN, "small"), "stage 2 with 8-bit moments": None, "stage 2 with these": None,
         "stage 2": (BLUE, "stage 2")}
PLOT_WIDTH, PLOT_HEIGHT, TOP, MOST = 325, 250, 84, 20


def evaluate(formula, world):
    """The value of a formula such as 2 + (4 + 4 + 8) / W."""
    if not re.fullmatch(r"[\d.W+/() ]+", formula):
        sys.exit(f"{TABLE}: expected sums and quotients of numbers and W, got {formula}")
    return eval(formula, {"__builtins__": {}}, {"W": world})  # digits, W and + / ( ) alone


def formulas():
    """{dtype: {kind of LINES: formula}}, each compared with the numbers beside it."""
    heading, *rows = table_below(TABLE, "working dtype, AdamW")
    found = {}
    for name, formula, *numbers in rows:
        dtype, what = [part.strip() for part in name.split(",")]
        for column, number in zip(heading[2:], numbers):
            value = evaluate(formula, int(column.replace("W =", "")))
            if number and abs(float(number) - value) > 0.005:
                sys.exit(f"{TABLE}: {name}, W = {column}: expected {value:g}, got {number}")
        kind = next(kind for kind in LINES if what.startswith(kind))
        found.setdefault(dtype, {})[kind] = formula
    return found


def x_of(left, world):
    return left + PLOT_WIDTH * math.log2(world) / math.log2(WORLDS[-1])


def y_of(value):
    return TOP + PLOT_HEIGHT * (1 - value / MOST)


def panel(picture, left, dtype, lines):
    picture.text(left, TOP - 24, f"{dtype} parameters, AdamW", 14, bold=True)
    for value in range(0, MOST + 1, 4):
        picture.line([(left, y_of(value)), (left + PLOT_WIDTH, y_of(value))], LIGHT_GREY, 1)
        picture.text(left - 8, y_of(value) + 4, str(value), 12, GREY, anchor="end")
    for world in WORLDS:
        picture.text(x_of(left, world), TOP + PLOT_HEIGHT + 18, str(world), 12, GREY,
                     anchor="middle")
    picture.text(left + PLOT_WIDTH / 2, TOP + PLOT_HEIGHT + 36, "ranks", 12, GREY, anchor="middle")
    fine = [2 ** (i / 10) for i in range(0, 61)]
    for kind, formula in lines.items():
        if LINES[kind] is None:
            continue
        colour, label = LINES[kind]
        picture.line([(x_of(left, w), y_of(evaluate(formula, w))) for w in fine], colour, 2.5)
        for world in WORLDS:
            x, y = x_of(left, world), y_of(evaluate(formula, world))
            picture.rect(x - 3, y - 3, 6, 6, colour, radius=3)
        last = evaluate(formula, WORLDS[-1])
        # 2.25 and 2.13 are one label's height apart from each other.
        shift = 16 if label == "small" else 0
        picture.text(left + PLOT_WIDTH + 10, y_of(last) + 4 + shift, f"{label}: {last:.3g}", 13, colour,
                     bold=True)


def main():
    picture = Picture(1000, 412)
    picture.text(20, 32, "Memory of a rank, in GB per billion parameters", 16, bold=True)
    for i, (dtype, lines) in enumerate(formulas().items()):
        panel(picture, 60 + 480 * i, dtype, lines)
    picture.text(20, 398, "Calculated, not measured: parameters, gradients, fp32 masters and both "
                 "moments; small: stage 2 with 8-bit moments and split masters.", 12, INK)
    write(picture, __file__)


if __name__ == "__main__":
    main()
