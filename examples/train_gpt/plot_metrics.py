#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws what train_gpt --metrics DIR wrote: loss, gradient norm, step time and memory.

  python3 examples/train_gpt/plot_metrics.py DIR --out run.png

Needs matplotlib.
"""

import argparse
import json
import sys
from pathlib import Path


def read(folder):
    """{step: line}, where a later start of the run overrides what it repeats."""
    files = sorted(Path(folder).glob("steps-*.jsonl"), key=lambda path: int(path.stem[6:]))
    if not files:
        sys.exit(f"plot_metrics: expected steps-*.jsonl in {folder}, as train_gpt --metrics "
                 f"{folder} writes them")
    steps = {}
    for path in files:
        with open(path) as file:
            for line in file:
                if line.endswith("\n"):  # a run that was killed may leave half a line
                    entry = json.loads(line)
                    steps[entry["step"]] = entry
    return dict(sorted(steps.items()))


def series(steps, field):
    found = [(step, line[field]) for step, line in steps.items() if line.get(field) is not None]
    return [step for step, _ in found], [value for _, value in found]


def plot(steps, out):
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_metrics: needs matplotlib: apt-get install python3-matplotlib, or "
                 "pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, ((loss, norm), (time, memory)) = pyplot.subplots(2, 2, figsize=(11, 7))
    loss.plot(*series(steps, "loss"), linewidth=0.8, label="training")
    validation = series(steps, "validation_loss")
    if validation[0]:
        loss.plot(*validation, marker=".", label="validation")
    loss.set_title("loss, nats per byte")
    loss.legend()
    norm.plot(*series(steps, "gradient_norm"), linewidth=0.8)
    norm.set_title("gradient norm before clipping")
    at, seconds = series(steps, "seconds")
    time.plot(at, [1e3 * value for value in seconds], linewidth=0.8)
    time.set_title("time of a step, ms")
    time.set_ylim(bottom=0)
    kinds = list(next(iter(steps.values()))["memory"])
    stacked = [[line["memory"][kind] / 1e6 for line in steps.values()] for kind in kinds]
    memory.stackplot(list(steps), stacked, labels=[kind.replace("_", " ") for kind in kinds])
    memory.set_title("memory of rank 0 by kind, MB")
    memory.legend(loc="lower right", fontsize="small")
    for axes in (loss, norm, time, memory):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the folder given to train_gpt --metrics")
    parser.add_argument("--out", default="metrics.png")
    args = parser.parse_args()
    plot(read(args.folder), args.out)
    print(args.out)


if __name__ == "__main__":
    main()
