# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""How the comparisons of this folder run programs: one system after another, in turns."""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORKLOADS = ["mlp25m", "mlp25m_accum4", "gpt10m", "gpt10m_bf16"]  # gpt350m_bf16 is for a GPU
BASE = "DDP"


def command(kind, workload, extra, args):
    """One rank of a system: of zero, or of a name of pytorch_systems.py."""
    common = ["--workload", workload, "--steps", str(args.steps)]
    if getattr(args, "device", "cpu") == "cuda":
        common += ["--device", "cuda", "--transport", args.transport]
    if kind == "zero":
        return [args.zero, *common, "--json", *extra]
    return [sys.executable, str(HERE / "pytorch_benchmark.py"), *common, "--system", kind, *extra]


def result(out, err, about):
    """The JSON line of a run. Throws RuntimeError with the end of its output if there is none."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    tail = "\n".join((out + err).splitlines()[-8:])
    raise RuntimeError(f"{about}:\n{tail}")


def take_turns(cell, names, run, title, args, save):
    """Runs every system once per turn; run(name) returns its JSON line."""
    for turn in range(args.repeats):
        # Every turn begins elsewhere, so that no system always follows the same neighbour.
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            load = os.getloadavg()[0]
            try:
                line = run(name)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                cell["errors"].append(f"{name}: {error}")
                print(f"FAILED {name}: {error}", file=sys.stderr)
                continue
            line.update(name=name, turn=turn, load=load)
            cell["runs"].append(line)
            print(f"{title} turn {turn + 1}/{args.repeats} {name}: {line['median_ms']:.1f} ms",
                  file=sys.stderr, flush=True)
    save()


def chosen(systems, wanted):
    """The names of `wanted`, with ; between them; all for an empty text. Ratios need the base."""
    names = wanted.split(";") if wanted else list(systems)
    unknown = [name for name in names if name not in systems]
    if unknown:
        sys.exit(f"--systems: expected some of {', '.join(systems)}; got {', '.join(unknown)}")
    return names if BASE in names else [BASE, *names]


def has_deepspeed():
    import pytorch_systems
    return pytorch_systems.available("deepspeed")


def environment():
    cpu = platform.processor()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
    packed = HERE.parents[1] / "pack.json"  # of .ci/gpu pack
    if packed.exists():
        commit = json.loads(packed.read_text())["commit"]
    else:
        commit = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"],
                                capture_output=True, text=True).stdout.strip()
    import torch
    found = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zero": commit,
    }
    if has_deepspeed():
        import importlib.metadata
        found["deepspeed"] = importlib.metadata.version("deepspeed")
    return found


def parser(description, workloads, repeats):
    """The options that all comparisons have."""
    made = argparse.ArgumentParser(description=description,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--workloads", default=",".join(workloads))
    made.add_argument("--systems", default="", help="names as in the table, with ; between them")
    made.add_argument("--repeats", type=int, default=repeats)
    made.add_argument("--steps", type=int, default=12, help="timed steps of a run, after 3")
    made.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    made.add_argument("--zero", default=str(ROOT / ".bazel/bin/examples/benchmark/benchmark"),
                      help="the program //examples:benchmark")
    made.add_argument("--json", help="write all runs to this file, after every workload")
    made.add_argument("--chart", help="write a bar chart, an SVG, to this file")
    made.add_argument("--from", dest="source", help="measure nothing; report this --json file")
    return made


def measured(args, measure):
    """The results of measure(results, save), or those of an earlier run."""
    if args.source:
        return json.loads(Path(args.source).read_text())
    if not os.access(args.zero, os.X_OK):
        sys.exit(f"--zero: {args.zero} is missing; ./bazelw build //examples:benchmark")
    results = {"environment": environment(), "steps": args.steps, "cells": []}

    def save():
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1) + "\n")

    measure(results, save)
    return results
