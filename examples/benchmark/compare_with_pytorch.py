#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a training step of zero with PyTorch's own systems on the same workload.

  ./bazelw build //examples:benchmark
  python3 examples/benchmark/compare_with_pytorch.py --workloads mlp25m,gpt10m --worlds 2 --repeats 7

Systems take turns, so that a neighbour's load hits all of them, and every ratio is of two runs
of the same turn. Ranks are processes with one thread each over Gloo on 127.0.0.1. All systems
train the same numbers; their losses, norms and parameters are compared with one plain process.
The Python that runs this needs torch; DeepSpeed takes part where that Python has it. Installs
nothing.
"""

import argparse
import datetime
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import comparison_report

HERE = Path(__file__).resolve().parent
WORKLOADS = ["mlp25m", "mlp25m_accum4", "gpt10m", "gpt10m_bf16"]

# name: (what runs, its arguments, the same for workloads with several micro batches).
SYSTEMS = {
    "one process": ("alone", [], []),
    "DDP": ("ddp", [], ["--no-sync"]),
    "ZeroRedundancyOptimizer": ("zero_redundancy", [], ["--no-sync"]),
    "FSDP2": ("fsdp2", [], ["--no-sync"]),
    "FSDP2, no resharding": ("fsdp2_zero2", [], ["--no-sync"]),
    "DeepSpeed ZeRO-2": ("deepspeed", [], []),
    "zero stage 2": ("zero", ["--stage", "2"], ["--stage", "2", "--no-sync"]),
    "zero stage 2, sockets": (
        "zero",
        ["--stage", "2", "--sockets"],
        ["--stage", "2", "--sockets", "--no-sync"],
    ),
    "zero stage 1": ("zero", ["--stage", "1"], ["--stage", "1", "--no-sync"]),
    "zero stage 1, reduce-scatter": (
        "zero",
        ["--stage", "1", "--no-full-gradients"],
        ["--stage", "1", "--no-full-gradients", "--no-sync"],
    ),
    # With several micro batches only: what DeepSpeed always does.
    "FSDP2, no resharding, every batch": ("fsdp2_zero2", None, []),
    "zero stage 2, every batch": ("zero", None, ["--stage", "2"]),
}


def arguments(system, workload):
    """What to pass for this workload; None where the system does not take part."""
    return SYSTEMS[system][2 if workload.endswith("accum4") else 1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def last_json_line(text):
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return None


def run_ranks(command, world, timeout):
    """Starts `command` once per rank; rank 0's output is the result."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    environment.update(WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    ranks = []
    for rank in range(world):
        environment.update(RANK=str(rank), LOCAL_RANK=str(rank))
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=environment, stdout=out,
                                      stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                                      text=True))
    try:
        out, err = ranks[0].communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        out, err = ranks[0].communicate()
    for rank in ranks[1:]:
        if ranks[0].returncode:
            rank.kill()
        rank.wait()
    return out, err


def run(kind, extra, workload, world, args):
    """One run of one system. Throws RuntimeError with the end of its output."""
    common = ["--workload", workload, "--steps", str(args.steps)]
    if kind == "zero":
        command = [args.zero, *common, "--nproc", str(world), "--json", *extra]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        done = subprocess.run(command, env=environment, capture_output=True, text=True,
                              timeout=args.timeout)
        out, err = done.stdout, done.stderr
    else:
        worker = [sys.executable, str(HERE / "pytorch_benchmark.py"), *common]
        if kind in ("alone", "plain"):
            emulated = world if kind == "plain" else 1
            worker += ["--system", "plain", "--emulate", str(emulated)]
            out, err = run_ranks(worker, 1, args.timeout)
        else:
            out, err = run_ranks([*worker, "--system", kind, *extra], world, args.timeout)
    line = last_json_line(out)
    if line is None:
        tail = "\n".join((out + err).splitlines()[-8:])
        raise RuntimeError(f"{kind} {' '.join(extra)} on {workload}, {world} ranks:\n{tail}")
    return line


def environment():
    cpu = platform.processor()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
    git = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"],
                         capture_output=True, text=True)
    import torch
    found = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zero": git.stdout.strip(),
    }
    if has_deepspeed():
        import importlib.metadata
        found["deepspeed"] = importlib.metadata.version("deepspeed")
    return found


def has_deepspeed():
    import pytorch_systems
    return pytorch_systems.available("deepspeed")


def taking_part(args, workload):
    names = args.systems.split(";") if args.systems else list(SYSTEMS)
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        sys.exit(f"--systems: expected some of {', '.join(SYSTEMS)}; got {', '.join(unknown)}")
    if "DDP" not in names:
        names.insert(0, "DDP")  # ratios need it
    return [n for n in names if arguments(n, workload) is not None
            and (SYSTEMS[n][0] != "deepspeed" or has_deepspeed())]


def measure(args, results):
    for workload in args.workloads.split(","):
        for world in (int(w) for w in args.worlds.split(",")):
            cell = {"workload": workload, "world": world, "runs": [], "errors": []}
            results["cells"].append(cell)
            cell["plain"] = run("plain", [], workload, world, args)
            names = taking_part(args, workload)
            for turn in range(args.repeats):
                # Every turn begins elsewhere, so that nobody always follows the same neighbour.
                for name in names[turn % len(names):] + names[:turn % len(names)]:
                    load = os.getloadavg()[0]
                    try:
                        line = run(SYSTEMS[name][0], arguments(name, workload), workload, world,
                                   args)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        cell["errors"].append(f"{name}: {error}")
                        print(f"FAILED {name}: {error}", file=sys.stderr)
                        continue
                    line.update(name=name, turn=turn, load=load)
                    cell["runs"].append(line)
                    print(f"{workload} W={world} turn {turn + 1}/{args.repeats} {name}: "
                          f"{line['median_ms']:.1f} ms", file=sys.stderr, flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--worlds", default="2", help="numbers of ranks, for example 2,4")
    parser.add_argument("--systems", default="", help="names as in the table, with ; between them")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a run, after 3")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    parser.add_argument("--zero", default=str(HERE.parent.parent / ".bazel/bin/examples/benchmark/benchmark"),
                        help="the program //examples:benchmark")
    parser.add_argument("--json", help="write all runs to this file, after every workload")
    parser.add_argument("--chart", help="write a bar chart, an SVG, to this file")
    parser.add_argument("--from", dest="source", help="measure nothing; report this --json file")
    args = parser.parse_args()
    if args.source:
        results = json.loads(Path(args.source).read_text())
    else:
        if not os.access(args.zero, os.X_OK):
            sys.exit(f"--zero: {args.zero} is missing; ./bazelw build //examples:benchmark")
        results = {"environment": environment(), "steps": args.steps, "cells": []}
        measure(args, results)
    print(comparison_report.tables(results))
    if args.chart:
        Path(args.chart).write_text(comparison_report.chart(results))
    sys.exit(0 if comparison_report.agrees(results) else 1)


if __name__ == "__main__":
    main()
