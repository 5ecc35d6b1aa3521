#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws checkpoint.svg: the files of a checkpoint, and the four steps in which it is written."""

from drawing import (BLUE, GREEN, GREY, INK, LIGHT_BLUE, LIGHT_GREEN, LIGHT_GREY, LIGHT_ORANGE,
                     ORANGE, Picture, write)

FILES = [
    ("rank-00000.safetensors", "what rank 0 owns: weight[0:80].master,", LIGHT_BLUE, BLUE,
     "weight[0:80].exp_avg, ..., and included states"),
    ("rank-00001.safetensors", "what rank 1 owns", LIGHT_BLUE, BLUE, ""),
    ("rank-00002.safetensors", "what rank 2 owns", LIGHT_BLUE, BLUE, ""),
    ("frozen.safetensors, buffers.safetensors", "frozen parameters and buffers of rank 0", LIGHT_ORANGE,
     ORANGE, ""),
    ("manifest.json", "what the run was, and what is in every file;", LIGHT_GREEN, GREEN,
     "its last line is its own checksum"),
]
STEPS = [
    ("1", "Rank 0 makes the hidden folder", [".step-100.5f02c1d9e4b7a863.saving/",
                                             "Every rank reads a random number in it."]),
    ("2", "Every rank writes its file", ["rank-<n>.safetensors, hashed on the way,",
                                         "then fsync."]),
    ("3", "Rank 0 writes manifest.json", ["fsync of files and folder, then one rename",
                                          "to step-100/ makes it a checkpoint."]),
    ("4", "Rank 0 removes the old folder", ["if overwrite(true) exchanged one."]),
]


def files(picture):
    picture.text(20, 32, "A checkpoint of three ranks", 16, bold=True)
    picture.text(30, 66, "run/step-100/", 14, mono=True, bold=True)
    picture.line([(38, 76), (38, 323)], GREY, 1)
    y = 86
    for name, what, fill, edge, more in FILES:
        picture.line([(38, y + 17), (52, y + 17)], GREY, 1)
        picture.rect(54, y, 242, 34, fill, edge, radius=3)
        picture.text(64, y + 22, name, 12.5, mono=True)
        picture.text(308, y + (15 if more else 22), what, 12)
        if more:
            picture.text(308, y + 31, more, 12)
        y += 55


def steps(picture):
    left = 655
    picture.line([(630, 20), (630, 380)], LIGHT_GREY, 1.5)
    picture.text(left, 32, "How it is written", 16, bold=True)
    y = 72
    for number, title, lines in STEPS:
        picture.rect(left, y - 18, 26, 26, INK, radius=13)
        picture.text(left + 13, y, number, 13, "white", anchor="middle", bold=True)
        picture.text(left + 38, y, title, 13.5, bold=True)
        for i, line in enumerate(lines):
            picture.text(left + 38, y + 20 + 17 * i, line, 12, GREY)
        y += 76
    picture.text(left, 368, "Ranks agree after steps 1, 2 and 3:", 12)
    picture.text(left, 384, "an error on one rank is an error on all.", 12)


def main():
    picture = Picture(1000, 402)
    files(picture)
    steps(picture)
    picture.text(20, 384, "A folder without a valid manifest is no checkpoint.", 12)
    write(picture, __file__)


if __name__ == "__main__":
    main()
