#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws recovery.svg: a recovery as a time line, from a protected step over a death to the next step.

Times are not to scale; docs/recovery.md has measured ones.
"""

from drawing import (BLUE, GREEN, GREY, LIGHT_BLUE, LIGHT_GREEN, LIGHT_GREY, LIGHT_ORANGE, ORANGE,
                     Picture, RED, write)

LEFT, TOP, LANE, HEIGHT = 96, 78, 62, 30
RANKS = 3
DEAD = 2
DEATH = 398  # where rank 2 ends
# label, from, to, fill, edge
STEPS = [("step 10", 96, 166, LIGHT_BLUE, BLUE), ("step 11", 170, 240, LIGHT_BLUE, BLUE),
         ("step 12", 244, 314, LIGHT_BLUE, BLUE), ("step 13", 318, DEATH, LIGHT_BLUE, BLUE)]
PHASES = [("error", 402, 478, LIGHT_GREY, RED), ("1  roll call", 482, 578, LIGHT_ORANGE, ORANGE),
          ("2-3  new group", 582, 688, LIGHT_ORANGE, ORANGE),
          ("4  pieces", 692, 766, LIGHT_ORANGE, ORANGE),
          ("5  protect", 770, 850, LIGHT_GREEN, GREEN), ("step 11", 854, 924, LIGHT_BLUE, BLUE)]


def lane(rank):
    return TOP + rank * LANE


def bar(picture, rank, label, begin, end, fill, edge):
    picture.rect(begin, lane(rank), end - begin, HEIGHT, fill, edge, radius=3)
    picture.text((begin + end) / 2, lane(rank) + 20, label, 11.5, anchor="middle")


def copies(picture):
    """The copies of step 10, in the background: each rank's shard in the next rank's memory."""
    for rank in range(RANKS):
        y = lane(rank) + HEIGHT + 4
        picture.rect(170, y, 104, 9, LIGHT_GREEN, GREEN, radius=2)
        picture.text(280, y + 9, f"a copy to rank {(rank + 1) % RANKS}", 10.5, GREY)


def main():
    picture = Picture(1000, 360)
    picture.text(20, 30, "A recovery: three ranks with protect(10), and rank 2 is killed", 16,
                 bold=True)
    picture.text(980, 30, "time runs to the right, not to scale", 12, GREY, anchor="end")
    for rank in range(RANKS):
        picture.text(20, lane(rank) + 20, f"rank {rank}", 13.5, bold=True)
        for step in STEPS:
            bar(picture, rank, *step)
        if rank != DEAD:
            for phase in PHASES:
                bar(picture, rank, *phase)
    copies(picture)
    picture.text(131, TOP - 10, "protected", 11.5, GREEN, anchor="middle", bold=True)
    picture.text(889, TOP - 10, "two ranks", 11.5, GREY, anchor="middle")
    picture.line([(DEATH, TOP - 20), (DEATH, lane(DEAD) + HEIGHT + 6)], RED, 1.5, dash="4 3")
    picture.text(DEATH + 8, lane(DEAD) + 20, "killed: shard 2 and the copy of shard 1 are lost;", 12,
                 RED)
    picture.text(DEATH + 8, lane(DEAD) + 36, "rank 0 has the copy of shard 2", 12, RED)
    lines = ["error: the launcher sees the end, or a connection closes; each rank's next call throws "
             "CommunicationError, and the loop calls recover().",
             "1 to 5: the steps of recover() in the list below. Those present are written down once; "
             "a rank that wakes up later finds itself left behind.",
             "Steps 11 to 13 are repeated by two ranks, from the state after step 10: the bits are "
             "those of a checkpoint of that step."]
    for i, line in enumerate(lines):
        picture.text(20, 300 + 19 * i, line, 12.5)
    write(picture, __file__)


if __name__ == "__main__":
    main()
