#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws two_levels.svg: a reduction in two levels on two machines with two ranks each.

Rank (h, l) is rank l of machine h. The picture follows the rows for the ranks l = 0.
"""

from drawing import (BLUE, GREEN, GREY, LIGHT_BLUE, LIGHT_GREEN, LIGHT_GREY, LIGHT_ORANGE, ORANGE,
                     Picture, write)

MACHINES, LOCAL = 2, 2
CELL, ROW = 58, 34
LEFT, TOP = 40, 96


def bucket(picture, x, y, rank):
    """A bucket of one rank: a row for each rank, those for l = 0 in colour."""
    picture.text(x, y - 8, f"rank {rank}", 12.5, bold=True)
    for owner in range(MACHINES * LOCAL):
        kept = owner % LOCAL == 0
        fill, edge = (LIGHT_BLUE, BLUE) if owner < LOCAL else (LIGHT_ORANGE, ORANGE)
        picture.rect(x + owner * CELL, y, CELL - 4, ROW, fill if kept else LIGHT_GREY,
                     edge if kept else GREY, radius=3)
        picture.text(x + owner * CELL + (CELL - 4) / 2, y + 22, f"row {owner}", 11.5,
                     anchor="middle")


def sums(picture, x, y, machine):
    picture.text(x, y - 8, f"rank {machine * LOCAL}: fp32 sums of machine {machine}", 12.5,
                 bold=True)
    for owner, (fill, edge) in ((0, (LIGHT_BLUE, BLUE)), (2, (LIGHT_ORANGE, ORANGE))):
        left = x + owner * (CELL + 22)
        picture.rect(left, y, 142, ROW, fill, edge, radius=3)
        a, b = machine * LOCAL, machine * LOCAL + 1
        picture.text(left + 71, y + 22, f"row {owner} of {a} + of {b}", 12, anchor="middle")


def result(picture, x, y, owner, fill, edge):
    picture.text(x, y - 8, f"rank {owner}", 12.5, bold=True)
    picture.rect(x, y, 222, ROW, fill, edge, radius=3)
    picture.text(x + 111, y + 22, f"shard {owner}: machine 0 + machine 1", 12, anchor="middle")


def main():
    picture = Picture(1000, 446)
    picture.text(20, 30, "A reduction in two levels: the rows for ranks 0 and 2", 16, bold=True)
    picture.text(980, 30, "two machines, two ranks each", 12, GREY, anchor="end")
    for machine in range(MACHINES):
        x = LEFT + machine * 520
        picture.rect(x - 20, 46, 440, 270, "none", GREY, radius=8, dash="5 4")
        picture.text(x - 6, 66, f"machine {machine}", 12, GREY)
        for local in range(LOCAL):
            bucket(picture, x, TOP + local * 64, machine * LOCAL + local)
        for column in (0, 2):
            at = x + column * CELL + 27
            to = x + column * (CELL + 22) + 71
            picture.curve(f"M{at},{TOP + ROW + 64 + 2} C{at},{TOP + 140} {to},{TOP + 140} "
                          f"{to},{TOP + 156}", GREY, 1.5)
        sums(picture, x, TOP + 176, machine)
        for i, line in enumerate((f"1  rank {machine * LOCAL} adds up the", "rows of its machine,",
                                  "in rank order")):
            picture.text(x + 266, TOP + 44 + 16 * i, line, 12)
    low = TOP + 176 + ROW + 3
    # What stays, and what crosses the link.
    picture.curve(f"M111,{low} V374", GREEN, 1.5)
    picture.curve(f"M791,{low} V374", GREEN, 1.5)
    picture.curve(f"M271,{low} C271,356 680,330 700,374", GREY, 1.8)
    picture.curve(f"M631,{low} C631,356 220,330 200,374", GREY, 1.8)
    picture.text(461, 402, "2  each sum crosses a link once;", 12, anchor="middle")
    picture.text(461, 418, "owners add in machine order", 12, anchor="middle")
    result(picture, LEFT, 390, 0, LIGHT_GREEN, GREEN)
    result(picture, 660, 390, 2, LIGHT_GREEN, GREEN)
    write(picture, __file__)


if __name__ == "__main__":
    main()
