#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws arena.svg: five small parameters in an arena, two buckets and the rows of three ranks.

The plan is made by the rules of bookkeeping/plan.h for the contiguous layout.
"""

from drawing import (BLUE, GREY, INK, LIGHT_BLUE, LIGHT_GREY, LIGHT_ORANGE, ORANGE, Picture, write)

WORLD, ALIGNMENT, ROW = 3, 16, 80  # in elements: 64 bytes of fp32; bucket_bytes = 960
SIZES = [("p0", 128), ("p1", 24), ("p2", 140), ("p3", 20), ("p4", 104)]  # as registered
FILL = {"p0": LIGHT_BLUE, "p1": LIGHT_ORANGE, "p2": LIGHT_BLUE, "p3": LIGHT_ORANGE,
        "p4": LIGHT_BLUE}
EDGE = {LIGHT_BLUE: BLUE, LIGHT_ORANGE: ORANGE}


def place():
    """[(name, begin, numel)] in the arena, and its size."""
    places, end = [], 0
    for name, numel in reversed(SIZES):
        places.append((name, end, numel))
        end += -(-numel // ALIGNMENT) * ALIGNMENT
    unit = WORLD * ROW
    return places, -(-end // unit) * unit


def segments(places, begin, end):
    """[(name, from, to, offset)]: the parts of parameters between two places of the arena."""
    found = []
    for name, at, numel in places:
        low, high = max(at, begin), min(at + numel, end)
        if low < high:
            found.append((name, low - at, high - at, low - begin))
    return found


def strip(picture, x, y, scale, height, places, begin, end, ranges):
    picture.hatched(x, y, (end - begin) * scale, height)
    for name, low, high, offset in segments(places, begin, end):
        left, width = x + offset * scale, (high - low) * scale
        picture.rect(left, y, width, height, FILL[name], EDGE[FILL[name]])
        label = f"{name}[{low}:{high}]" if ranges and width > 80 else name
        picture.text(left + width / 2, y + height / 2 + 5, label, 13, anchor="middle",
                     mono=ranges)


def main():
    places, numel = place()
    picture = Picture(1000, 400)
    left, width = 118, 860
    scale = width / numel
    picture.text(20, 30, "From parameters to segments: three ranks", 16, bold=True)
    picture.text(left + width, 30, "one element is one fp32 value; hatched: padding", 12, GREY,
                 anchor="end")

    picture.text(20, 75, "arena", 14, bold=True)
    picture.text(20, 92, "last layer first", 11, GREY)
    strip(picture, left, 58, scale, 36, places, 0, numel, ranges=False)

    buckets = numel // (WORLD * ROW)
    gap, top, row_height = 36, 190, 50
    row_scale = (width - gap * (buckets - 1)) / buckets / ROW
    for b in range(buckets):
        begin = b * WORLD * ROW
        x = left + b * (ROW * row_scale + gap)
        right = x + ROW * row_scale
        from_x, to_x = left + begin * scale, left + (begin + WORLD * ROW) * scale
        picture.area([(from_x + 2, 96), (to_x - 2, 96), (right, top - 34), (x, top - 34)],
                     LIGHT_GREY, 0.55)
        picture.line([(from_x + 2, 98), (to_x - 2, 98)], INK, 2)
        picture.text((from_x + to_x) / 2, 116, f"bucket {b}", 14, anchor="middle", bold=True)
        picture.text((x + right) / 2, top - 14,
                     f"as a matrix [{WORLD}, {ROW}]; each box is a segment", 12, GREY,
                     anchor="middle")
        for r in range(WORLD):
            start = begin + r * ROW
            strip(picture, x, top + r * row_height, row_scale, 36, places, start, start + ROW,
                  ranges=True)
    for r in range(WORLD):
        y = top + r * row_height
        picture.text(20, y + 16, f"rank {r}", 14, bold=True)
        picture.text(20, y + 32, f"owns row {r}", 11, GREY)

    notes = ["Each rank holds fp32 masters, the gradient shard and the optimizer's state for its "
             "rows only: 1/3 of each.",
             "Backward: each rank sends row r of a full bucket to rank r, which sums the rows in "
             "rank order.",
             "Step: each rank updates its segments and sends the new rows back, so the working "
             "parameters are whole everywhere."]
    for i, note in enumerate(notes):
        picture.text(20, 352 + 17 * i, note, 12.5)
    write(picture, __file__)


if __name__ == "__main__":
    main()
