#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws one step of a trace that train_gpt --trace wrote as an SVG: a picture for documents.

  python3 examples/train_gpt/draw_trace.py trace.json --step 2 --out step.svg

To look around in a trace, open it at https://ui.perfetto.dev instead. A row is a thread; under
its outermost ranges are those inside them. Of autograd and of single operations only the time
that they take is shown, in grey.
"""

import argparse
import html
import json
import re
import sys

STEP = "train_gpt::step"
WIDTH, LEFT, ROW = 1100, 90, 24
COLOURS = {"forward": "#4f86a8", "backward": "#c3d9e6", "pack": "#e0a458", "reduce": "#c8553d", "clip": "#8f6bb3",
           "norm": "#b28fd0", "update": "#4f9d69", "gather": "#1f6f8b", "step": "#7d8790"}


def ranges(trace):
    """Complete events by thread, by time."""
    threads = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(event["tid"], []).append(event)
    for events in threads.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return threads


def is_named(event):
    return event["name"].startswith(("train_gpt::", "zero::"))


def kind(name):
    """forward, pack, reduce, ...: the word behind the prefix."""
    return re.split(r"[ :]", name.split("::", 1)[1])[0]


def merged(events, gap):
    """The outermost of `events` as [begin, end], joined where less than `gap` lies between."""
    spans = []
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        if spans and begin - spans[-1][1] < gap:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end])
    return spans


def with_depth(events):
    """Named events with how many named ones they lie in."""
    open_ends, found = [], []
    for event in events:
        while open_ends and event["ts"] >= open_ends[-1]:
            open_ends.pop()
        found.append((event, len(open_ends)))
        open_ends.append(event["ts"] + event["dur"])
    return found


def backward_span(named):
    """[begin, end] from the end of the forward pass to the next range that is no packing."""
    forward = [e for e in named if kind(e["name"]) == "forward"]
    if not forward:
        return None
    begin = forward[-1]["ts"] + forward[-1]["dur"]
    after = [e["ts"] for e in named if e["ts"] >= begin and kind(e["name"]) != "pack"]
    return [begin, min(after)] if after else None


def draw_thread(events, begin, end, y):
    """(shapes, height) of one thread between two times."""
    scale = (WIDTH - LEFT - 20) / (end - begin)
    shapes = []

    def box(start, stop, row, colour, title, label=""):
        x, width = LEFT + (start - begin) * scale, max((stop - start) * scale, 1)
        top = y + row * ROW
        shapes.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 4}" '
                      f'fill="{colour}"><title>{html.escape(title)}</title></rect>')
        if label and width > 8 * len(label):
            shapes.append(f'<text x="{x + 4:.1f}" y="{top + 14}" fill="white">'
                          f'{html.escape(label)}</text>')

    inside = [e for e in events if e["ts"] < end and e["ts"] + e["dur"] > begin]
    for start, stop in merged([e for e in inside if not is_named(e)], (end - begin) / 2000):
        box(max(start, begin), min(stop, end), 0, "#c9ced2", "operations and autograd")
    depth = 0
    named = [e for e in inside if is_named(e) and e["name"] != STEP]
    backward = backward_span(named)
    if backward:
        box(*backward, 1, COLOURS["backward"], "backward")
    for event, level in with_depth(named):
        depth = max(depth, level + 1)
        word = kind(event["name"])
        box(event["ts"], event["ts"] + event["dur"], level + 1, COLOURS.get(word, "#666"),
            f"{event['name']}: {event['dur'] / 1e3:.3f} ms", event["name"].split("::", 1)[1])
    if backward:
        x = LEFT + (backward[0] - begin) * scale + 4
        shapes.append(f'<text x="{x:.1f}" y="{y + ROW + 14}" stroke="{COLOURS["backward"]}" '
                      'stroke-width="4" paint-order="stroke">backward</text>')
    return shapes, (depth + 1) * ROW + 10


def draw(trace, number):
    threads = ranges(trace)
    steps = sorted((e for events in threads.values() for e in events if e["name"] == STEP),
                   key=lambda event: event["ts"])
    if number >= len(steps):
        sys.exit(f"draw_trace: --step: expected below {len(steps)}, got {number}")
    begin, end = steps[number]["ts"], steps[number]["ts"] + steps[number]["dur"]
    body, y = [], 34
    main = steps[number]["tid"]
    for thread in sorted(threads, key=lambda tid: (tid != main, str(tid))):
        if thread != main and not any(is_named(event) for event in threads[thread]):
            continue  # of OpenMP
        shapes, height = draw_thread(threads[thread], begin, end, y)
        if not shapes:
            continue
        name = "training" if thread == main else "worker"
        body.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
        body += shapes
        y += height
    x = LEFT
    for word, colour in [*COLOURS.items(), ("operations and autograd", "#c9ced2")]:
        body.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>'
                    f'<text x="{x + 16}" y="{y + 10}">{word}</text>')
        x += 90
    y += 18
    milliseconds = (end - begin) / 1e3
    title = f"one step on rank 0, {milliseconds:.1f} ms"
    body.append(f'<text x="{LEFT}" y="20" font-weight="bold">{title}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 6}" '
            'font-family="sans-serif" font-size="12.5">\n'
            '<rect width="100%" height="100%" rx="6" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="the file given to train_gpt --trace")
    parser.add_argument("--step", type=int, default=1, help="which of its steps, from 0")
    parser.add_argument("--out", default="step.svg")
    args = parser.parse_args()
    with open(args.trace) as file:
        picture = draw(json.load(file), args.step)
    with open(args.out, "w") as file:
        file.write(picture)
    print(args.out)


if __name__ == "__main__":
    main()
