#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Draws what train_gpt --metrics DIR wrote: losses, gradient norm, learning rate, speed, step time
and memory. Several runs share the pictures.

  python3 examples/train_gpt/plot_metrics.py DIR [DIR ...] --out run.png
  python3 examples/train_gpt/plot_metrics.py DIR [DIR ...] --tensorboard EVENTS

Needs matplotlib. --tensorboard writes TensorBoard's event files instead, a folder for each run, and
needs tensorboardX.
"""

import argparse
import json
import sys
from pathlib import Path


class Run:
    """The steps of one folder, where a later start overrides what it repeats. One from the first
    step on begins another run, of which alone the steps are."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        self.name = self.folder.name
        self.steps = {}
        self.restarts = []
        self.configuration = {}
        files = sorted(Path(folder).glob("steps-*.jsonl"), key=lambda path: int(path.stem[6:]))
        if not files:
            sys.exit(f"plot_metrics: expected steps-*.jsonl in {folder}, as train_gpt --metrics "
                     f"{folder} writes them")
        starts = []  # of the program: its line of what is run, and its steps
        for path in files:
            with open(path) as file:
                for line in file:
                    if line.endswith("\n"):  # a run that was killed may leave half a line
                        entry = json.loads(line)
                        if "run" in entry:
                            starts.append([])
                        starts[-1].append(entry)
        for start in sorted(starts, key=lambda entries: entries[0]["run"].get("started", 0)):
            for entry in start:
                self._add(entry)
        self.steps = dict(sorted(self.steps.items()))
        if not self.steps:
            sys.exit(f"plot_metrics: expected at least one step in {folder}, got none")

    def _add(self, entry):
        if "run" in entry:
            first = entry["run"]["first_step"]
            self.steps = {step: line for step, line in self.steps.items() if step <= first}
            self.restarts = [*self.restarts, first] if first else []
            self.configuration = (self.configuration or entry["run"]) if first else entry["run"]
        else:
            self.steps[entry["step"]] = entry

    def label(self):
        c = self.configuration
        if not c:
            return self.name
        return f"{self.name}: {c['world_size']} ranks, stage {c['stage']}, {c['dtype']}"

    def series(self, field):
        found = [(step, line[field]) for step, line in self.steps.items()
                 if line.get(field) is not None]
        return [step for step, _ in found], [value for _, value in found]


def name_apart(runs):
    """Adds the parent to names of which two are equal, such as "metrics"."""
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = "-".join(run.folder.parts[-2:])


def smooth(values):
    """A running mean over a fiftieth of the run, so that curves of several runs can be told apart."""
    width = max(1, len(values) // 50)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / min(i + 1, width)
            for i in range(len(values))]


def draw_run(run, color, alone, panels):
    loss, norm, rate, speed, time, _ = panels
    at, losses = run.series("loss")
    loss.plot(at, losses, linewidth=0.5, color=color, alpha=0.3)
    loss.plot(at, smooth(losses), linewidth=1, color=color, label=run.label())
    validation = run.series("validation_loss")
    loss.plot(*validation, marker=".", linestyle=":", color=color,
              label="validation" if alone and validation[0] else None)
    averaged = run.series("ema_validation_loss")
    loss.plot(*averaged, marker="x", linestyle=":", color=color,
              label="averaged" if alone and averaged[0] else None)
    norm.plot(*run.series("gradient_norm"), linewidth=0.8, color=color)
    rate.plot(*run.series("learning_rate"), linewidth=0.8, color=color)
    at, speeds = run.series("tokens_per_second")
    speed.plot(at, smooth(speeds), linewidth=0.8, color=color)
    at, seconds = run.series("seconds")
    time.plot(at, [1e3 * value for value in seconds], linewidth=0.8, color=color)
    skipped = [step for step, line in run.steps.items() if line.get("skipped")]
    for axes in (loss, norm):
        for step in run.restarts:
            axes.axvline(step, color=color, linestyle="--", linewidth=0.8)
    if skipped:
        norm.plot(skipped, [0] * len(skipped), "x", color=color, label="skipped steps")
        norm.legend(fontsize="small")


def draw_memory(runs, axes):
    """By kind for one run, in total for several."""
    if len(runs) > 1:
        for i, run in enumerate(runs):
            totals = [sum(line["memory"].values()) / 1e6 for line in run.steps.values()]
            axes.plot(list(run.steps), totals, color=f"C{i}")
        return
    steps = runs[0].steps
    kinds = [kind for kind in next(iter(steps.values()))["memory"]
             if any(line["memory"][kind] for line in steps.values())]
    stacked = [[line["memory"][kind] / 1e6 for line in steps.values()] for kind in kinds]
    axes.stackplot(list(steps), stacked, labels=[kind.replace("_", " ") for kind in kinds])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def plot(runs, out):
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_metrics: needs matplotlib: apt-get install python3-matplotlib, or "
                 "pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, grid = pyplot.subplots(2, 3, figsize=(16, 8))
    panels = list(grid.flat)
    for i, run in enumerate(runs):
        draw_run(run, f"C{i}", len(runs) == 1, panels)
    draw_memory(runs, panels[5])
    panels[0].legend(fontsize="small")
    titles = ("loss, nats per byte (dashed line: restart)", "gradient norm before clipping",
              "learning rate", "tokens/s", "time of a step, ms", "memory of rank 0, MB")
    for axes, title in zip(panels, titles):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[3].set_ylim(bottom=0)
    panels[4].set_yscale("log")  # one slow step must not flatten the others
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def write_events(runs, folder):
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        sys.exit("plot_metrics: --tensorboard needs tensorboardX: pip install tensorboardX")
    for run in runs:
        with SummaryWriter(str(Path(folder) / run.name)) as writer:
            writer.add_text("run", json.dumps(run.configuration, indent=1))
            for step, line in run.steps.items():
                scalars = {name: value for name, value in line.items()
                           if name not in ("step", "memory", "masters", "masters_hash")
                           and value is not None}
                scalars.update((f"memory/{kind}", size) for kind, size in line["memory"].items())
                for name, value in scalars.items():
                    writer.add_scalar(name, value, step)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="folder",
                        help="a folder given to train_gpt --metrics")
    parser.add_argument("--out", default="metrics.png")
    parser.add_argument("--tensorboard", metavar="EVENTS", help="a folder for event files")
    args = parser.parse_args()
    runs = [Run(folder) for folder in args.folders]
    name_apart(runs)
    if args.tensorboard:
        write_events(runs, args.tensorboard)
    else:
        plot(runs, args.out)
    print(args.tensorboard or args.out)


if __name__ == "__main__":
    main()
