#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws comparison.svg: step time and memory beside PyTorch's systems.

The numbers are those of the tables in docs/benchmarks/README.md, which also says how they were
measured. examples/benchmark/compare_with_pytorch.py measures and makes those tables.
"""

import re
import sys

from drawing import BLUE, GREY, INK, LIGHT_GREY, Picture, REPOSITORY, table_below, write

SOURCE = "docs/benchmarks/README.md"
SYSTEMS = ["zero stage 2", "zero stage 2, sockets", "zero stage 1", "DDP",
           "ZeroRedundancyOptimizer", "DeepSpeed ZeRO-2", "FSDP2, no resharding", "FSDP2"]
TITLES = {"mlp25m": "MLP, 25 M", "mlp25m_accum4": "MLP, 4 batches", "gpt10m": "GPT, 10 M",
          "gpt10m_bf16": "GPT, bf16", "kept MB, mlp25m": "memory, MB"}
LEFT, TOP, COLUMN, BAR, GAP = 200, 92, 158, 104, 28


def hardware():
    """The line of the report that names date, machine and versions."""
    with open(f"{REPOSITORY}/{SOURCE}", encoding="utf-8") as file:
        for line in file:
            if re.match(r"\d{4}-\d\d-\d\d, ", line):
                return line.strip().rstrip(".")
    sys.exit(f"{SOURCE}: expected a line with date and hardware, got none")


def main():
    heading, *rows = table_below(SOURCE, "kept MB, mlp25m |")
    by_name = {name: dict(zip(heading[1:], cells)) for name, *cells in rows}
    by_name["DDP"] = {column: "1.00" for column in heading[1:-1]}
    by_name["DDP"][heading[-1]] = by_name["DDP, ms"][heading[-1]]

    picture = Picture(1000, TOP + GAP * len(SYSTEMS) + 52)
    picture.text(20, 30, "Time of a training step, DDP = 1, and memory of a rank: shorter is better",
                 16, bold=True)
    for i, column in enumerate(heading[1:]):
        x = LEFT + COLUMN * i
        picture.text(x, 60, TITLES[column], 13, bold=True)
        unit = "MLP, 25 M" if column.startswith("kept") else f"DDP: {by_name['DDP, ms'][column]} ms"
        picture.text(x, 77, unit, 11.5, GREY)
        values = {name: float(by_name[name][column]) for name in SYSTEMS}
        scale = BAR / max(values.values())
        base = x + values["DDP"] * scale
        picture.line([(base, TOP - 6), (base, TOP + GAP * len(SYSTEMS) - 4)], INK, 1, dash="3 3",
                     opacity=0.55)
        for row, name in enumerate(SYSTEMS):
            y = TOP + GAP * row
            colour = BLUE if name.startswith("zero") else "#a7b0b8"
            picture.rect(x, y, values[name] * scale, 19, colour)
            picture.text(x + values[name] * scale + 5, y + 14, by_name[name][column], 12.5,
                         halo=True)
    for row, name in enumerate(SYSTEMS):
        picture.text(LEFT - 10, TOP + GAP * row + 14, name, 13, anchor="end",
                     bold=name.startswith("zero"))
    y = TOP + GAP * len(SYSTEMS) + 18
    picture.line([(20, y - 12), (980, y - 12)], LIGHT_GREY, 1)
    picture.text(20, y + 4, hardware() + ".", 11.5, GREY)
    picture.text(20, y + 20, "Two ranks on one machine; medians, good to about 10 %. zero passes "
                 "rows through shared memory, except in the line \"sockets\".", 11.5, GREY)
    write(picture, __file__)


if __name__ == "__main__":
    main()
