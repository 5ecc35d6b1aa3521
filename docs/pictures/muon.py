#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws muon.svg: the validation loss of train_gpt with AdamW and with Muon, from the table of
docs/benchmarks/muon.md.
"""

from drawing import BLUE, GREY, INK, LIGHT_GREY, ORANGE, Picture, table_below, write

TABLE = "docs/benchmarks/muon.md"
COLOURS = {"AdamW": ORANGE, "Muon": BLUE}
LEFT, TOP, WIDTH, HEIGHT = 60, 60, 720, 280
LEAST, MOST, STEPS = 1.5, 3.75, 400


def x_of(step):
    return LEFT + WIDTH * step / STEPS


def y_of(loss):
    return TOP + HEIGHT * (MOST - loss) / (MOST - LEAST)


def curves():
    """{name: [(step, loss)]}"""
    heading, *rows = table_below(TABLE, "step")
    steps = [int(row[0]) for row in rows]
    return {name: list(zip(steps, (float(row[i + 1]) for row in rows)))
            for i, name in enumerate(heading[1:])}


def step_of(curve, loss):
    """The step at which a curve first has this loss, between two of its points."""
    for (s, a), (t, b) in zip(curve, curve[1:]):
        if b <= loss:
            return s + (t - s) * (a - loss) / (a - b)
    return None


def main():
    picture = Picture(900, 400)
    picture.text(20, 32, "Validation loss of train_gpt, nats per byte, against steps", 16, bold=True)
    for loss in (1.5, 2.0, 2.5, 3.0, 3.5):
        picture.line([(LEFT, y_of(loss)), (LEFT + WIDTH, y_of(loss))], LIGHT_GREY, 1)
        picture.text(LEFT - 8, y_of(loss) + 4, f"{loss:.1f}", 12, GREY, anchor="end")
    for step in range(0, STEPS + 1, 100):
        picture.text(x_of(step), TOP + HEIGHT + 18, str(step), 12, GREY, anchor="middle")
    lines = curves()
    for name, curve in lines.items():
        points = [(x_of(s), y_of(loss)) for s, loss in curve]
        picture.line(points, COLOURS[name], 2.5)
        picture.text(points[-1][0] + 10, points[-1][1] + 4, f"{name}: {curve[-1][1]:.2f}", 13,
                     COLOURS[name], bold=True)
    last = lines["AdamW"][-1][1]
    step = step_of(lines["Muon"], last)
    picture.line([(x_of(step), y_of(last)), (x_of(STEPS), y_of(last))], GREY, 1)
    picture.text(x_of(STEPS) - 6, y_of(last) + 18,
                 f"AdamW's last loss after {step:.0f} steps of Muon", 12, INK, anchor="end")
    write(picture, __file__)


if __name__ == "__main__":
    main()
