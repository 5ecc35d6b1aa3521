#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws rooms.svg: the folders of zero/, kernels/ and bookkeeping/, and which includes which.

A room is a folder with sources; that of the public headers, zero/ itself, may be included by every
room and is drawn without arrows. An arrow stands for at least one #include. Arrows that follow from
others are left out. A circle of includes is an error, and so is a room that the table of rooms in
CONTRIBUTING.md lacks, or lists above a room that includes it.
"""

import os
import re
import sys

from drawing import (BLUE, GREEN, GREY, LIGHT_BLUE, LIGHT_GREEN, LIGHT_ORANGE, ORANGE,
                     Picture, REPOSITORY, table_below, write)

ABOUT = {
    "optimizer": "ZeroOptimizer, checkpoints",
    "training": "one iteration",
    "checkpoint": "saves by all ranks",
    "checkpoint/match": "who needs which tensors",
    "checkpoint/format": "files, folders, manifest",
    "recovery": "copies, and who is left",
    "agreement": "what ranks agree on first",
    "update": "masters and their update",
    "norm": "gradient norms",
    "gradients": "gradients to shards",
    "memory": "arena and buckets",
    "comm": "groups and communicators",
    "comm/exchange": "all that is sent",
    "comm/backends": "Gloo, NCCL, shared memory",
    "rendezvous": "ranks find each other",
    "inner_optimizers": "Muon, Lion, torch's",
    "base": "errors, waits, processes",
    "kernels": "arithmetic, CPU and CUDA",
    "bookkeeping": "plan and memory formulas",
}
BOX_WIDTH, BOX_HEIGHT, FLOOR, TOP, WIDTH = 172, 44, 86, 132, 1000


def room_of(path):
    """The room of a file, by its path from the repository's root."""
    parts = path.split("/")[:-1]
    return parts[0] if parts[0] != "zero" else "/".join(parts[1:]) or "public"


def includes():
    """{room: rooms that its files include}, and the names of the public headers."""
    below, public = {}, []
    for top in ("zero", "kernels", "bookkeeping"):
        for folder, _, files in os.walk(os.path.join(REPOSITORY, top)):
            for name in files:
                if not name.endswith((".h", ".cc", ".cu", ".cuh")):
                    continue
                path = os.path.relpath(os.path.join(folder, name), REPOSITORY)
                room = room_of(path)
                if room == "public" and name.endswith(".h"):
                    public.append(name)
                with open(os.path.join(REPOSITORY, path), encoding="utf-8") as file:
                    found = re.findall(r'^#include "((?:zero|kernels|bookkeeping)/[^"]+)"',
                                       file.read(), re.MULTILINE)
                below.setdefault(room, set()).update(room_of(other) for other in found)
    for room, others in below.items():
        others -= {room, "public"}
    below.pop("public", None)
    return below, sorted(public)


def check_table(below):
    """Ends the program unless CONTRIBUTING.md lists all rooms, each above those that it includes."""
    names = [cells[0].strip("`/") for cells in table_below("CONTRIBUTING.md", "| room |")[1:]]
    listed = [name.removeprefix("zero/") for name in names]
    for room, others in below.items():
        if room not in listed:
            sys.exit(f"CONTRIBUTING.md: expected a row for the room {room}, got none")
        for other in others:
            if other in listed and listed.index(other) < listed.index(room):
                sys.exit(f"CONTRIBUTING.md: expected {room} above {other}, which it includes")


def floors(below):
    """{room: floor}: 0 at the bottom, every arrow one floor down or more."""
    floor = {}

    def visit(room, path):
        if room in path:
            sys.exit("expected rooms without a circle of includes, got "
                     + " > ".join(path[path.index(room):] + [room]))
        if room not in floor:
            floor[room] = max((visit(other, path + [room]) + 1 for other in sorted(below[room])),
                              default=0)
        return floor[room]

    for room in sorted(below):
        visit(room, [])
    return floor


def needed(below):
    """Arrows that do not follow from others."""
    def reach(room):
        return set().union(below[room], *(reach(other) for other in below[room]))
    return {room: {other for other in others
                   if not any(other in reach(third) for third in others if third != other)}
            for room, others in below.items()}


def lanes(floor, arrows):
    """Rows of rooms from the top; an arrow that skips a floor has a place in it too."""
    rows = [[] for _ in range(max(floor.values()) + 1)]
    for room in sorted(floor):
        rows[floor[room]].append(room)
    paths = []
    for room in sorted(arrows):
        for other in sorted(arrows[room]):
            path = [room]
            for level in range(floor[room] - 1, floor[other], -1):
                path.append((room, other, level))
                rows[level].append(path[-1])
            paths.append(path + [other])
    return rows[::-1], paths


def crossings(rows, links):
    """How many pairs of neighbouring links cross, and how far all links reach sideways."""
    place = {node: spread(row)[i] for row in rows for i, node in enumerate(row)}
    count = 0
    for pairs in links:
        ends = [(place[a], place[b]) for a, b in pairs]
        count += sum((p[0] - q[0]) * (p[1] - q[1]) < 0
                     for i, p in enumerate(ends) for q in ends[:i])
    width = sum(abs(place[a] - place[b]) for pairs in links for a, b in pairs)
    return count, width


def spread(row):
    """The middle of each node of a row."""
    sizes = [BOX_WIDTH if isinstance(node, str) else 24 for node in row]
    gap = (WIDTH - 40 - sum(sizes)) / (len(row) + 1)
    places, x = [], 20
    for size in sizes:
        x += gap
        places.append(x + size / 2)
        x += size
    return places


def arrange(rows, paths):
    """Orders each row so that few arrows cross: exchanges any two while that helps."""
    level = {node: i for i, row in enumerate(rows) for node in row}
    links = [[] for _ in rows]
    for path in paths:
        for a, b in zip(path, path[1:]):
            links[level[a]].append((a, b))
    best = crossings(rows, links)
    better = True
    while better:
        better = False
        for row in rows:
            for i in range(len(row)):
                for j in range(i):
                    row[i], row[j] = row[j], row[i]
                    now = crossings(rows, links)
                    if now < best:
                        best, better = now, True
                    else:
                        row[i], row[j] = row[j], row[i]
    return rows


def draw_room(picture, room, x, y):
    fill, edge = (LIGHT_BLUE, BLUE)
    if room in ("kernels", "bookkeeping"):
        fill, edge = (LIGHT_GREEN, GREEN)
    picture.rect(x - BOX_WIDTH / 2, y, BOX_WIDTH, BOX_HEIGHT, fill, edge, radius=4)
    name = room if room in ("kernels", "bookkeeping") else f"zero/{room}"
    picture.text(x, y + 19, name, 13.5, anchor="middle", bold=True)
    picture.text(x, y + 35, ABOUT.get(room, ""), 11.5, anchor="middle")


def main():
    below, public = includes()
    check_table(below)
    floor = floors(below)
    arrows = needed(below)
    rows, paths = lanes(floor, arrows)
    rows = arrange(rows, paths)
    picture = Picture(WIDTH, TOP + FLOOR * len(rows) - 22)
    picture.text(20, 30, "Rooms: a folder includes those below it", 16, bold=True)
    total = sum(len(others) for others in below.values())
    picture.text(980, 30, f"{len(below)} rooms, {total} arrows, {len(rows)} floors; arrows that "
                 "follow from others are left out", 12, GREY, anchor="end")
    picture.rect(20, 44, 960, 64, LIGHT_ORANGE, ORANGE, radius=4)
    picture.text(32, 63, "zero/*.h: the public headers, which every room may include", 13,
                 bold=True)
    half = (len(public) + 1) // 2
    picture.text(32, 81, ", ".join(public[:half]) + ",", 11.5)
    picture.text(32, 98, ", ".join(public[half:]), 11.5)
    place = {}
    for i, row in enumerate(rows):
        for node, x in zip(row, spread(row)):
            place[node] = (x, TOP + FLOOR * i)
    for path in paths:
        # Straight down beside the rooms of a floor, in a curve from floor to floor.
        x, y = place[path[0]]
        curve = f"M{x:.1f},{y + BOX_HEIGHT}"
        for node in path[1:]:
            from_x, from_y = x, y + BOX_HEIGHT
            x, y = place[node]
            half = (from_y + y) / 2
            curve += f" C{from_x:.1f},{half} {x:.1f},{half} {x:.1f},{y - 1}"
            if node != path[-1]:
                curve += f" V{y + BOX_HEIGHT}"
        picture.curve(curve, GREY, 1.3)
    for room in sorted(below):
        draw_room(picture, room, *place[room])
    write(picture, __file__)


if __name__ == "__main__":
    main()
