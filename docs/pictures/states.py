#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws states.svg: the states of an optimizer, and the events that lead from one to another."""

from drawing import (BLUE, GREEN, GREY, LIGHT_BLUE, LIGHT_GREEN, LIGHT_GREY, LIGHT_ORANGE, ORANGE,
                     Picture, RED, write)

WIDTH, HEIGHT = 190, 62
# name: left, top, colours, what holds there
STATES = {
    "usable": (30, 210, LIGHT_GREEN, GREEN, "every call works"),
    "misuse": (410, 62, LIGHT_ORANGE, ORANGE, "this rank has thrown"),
    "refused": (780, 62, LIGHT_ORANGE, ORANGE, "all ranks have thrown"),
    "broken backward": (410, 210, LIGHT_BLUE, BLUE, "gradients are incomplete"),
    "failed": (410, 358, LIGHT_GREY, RED, "every call throws that failure"),
}


def box(picture, name):
    left, top, fill, edge, what = STATES[name]
    picture.rect(left, top, WIDTH, HEIGHT, fill, edge, radius=6)
    picture.text(left + WIDTH / 2, top + 26, name, 15, anchor="middle", bold=True)
    picture.text(left + WIDTH / 2, top + 46, what, 11, anchor="middle")


def event(picture, path, x, y, *lines, anchor="middle"):
    picture.curve(path, GREY, 1.5)
    for i, line in enumerate(lines):
        picture.text(x, y + 15 * i, line, 12, anchor=anchor, halo=True)


def main():
    picture = Picture(1000, 440)
    picture.text(20, 30, "The states of an optimizer, on one rank", 16, bold=True)
    event(picture, "M110,210 C110,120 240,86 408,86", 205, 100, "a local call finds misuse")
    event(picture, "M600,86 H778", 689, 72, "the next collective call")
    event(picture, "M170,210 C240,160 600,190 778,112", 480, 154,
          "a rank has a problem, or calls differ")
    event(picture, "M900,124 C900,320 700,300 222,264", 872, 226,
          "a collective call", "without an error")
    event(picture, "M220,228 H408", 314, 222, "a pass throws")
    event(picture, "M410,256 H222", 316, 250, "zero_grad() on all ranks")
    event(picture, "M90,272 C100,340 250,378 408,380", 180, 330,
          "a communicator fails, or this rank", "in an update or a reduction", anchor="start")
    event(picture, "M505,272 V356", 515, 330, "the same", anchor="start")
    event(picture, "M410,404 C200,412 55,390 50,274", 180, 424, "recover(), with protect(n)")
    picture.text(620, 386, "From every state a failure leads here; without recover()", 12)
    picture.text(620, 402, "it is final. Other ranks throw CommunicationError.", 12)
    for name in STATES:
        box(picture, name)
    write(picture, __file__)


if __name__ == "__main__":
    main()
