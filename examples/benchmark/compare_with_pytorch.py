#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a training step of zero with PyTorch's own systems on the same workload.

  ./bazelw build //examples:benchmark
  python3 examples/benchmark/compare_with_pytorch.py --workloads mlp25m,gpt10m --worlds 2 --repeats 7

Systems take turns, so that a neighbour's load hits all of them, and every ratio is of two runs
of the same turn. Ranks are processes with one thread each over Gloo on 127.0.0.1. All systems
train the same numbers; their losses, norms and parameters are compared with one plain process.
With --device cuda, ranks have a GPU each and NCCL; with --transport gloo they may share one.
The Python that runs this needs torch; DeepSpeed takes part where that Python has it. Installs
nothing.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import comparison_report
import comparison_runs

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
    # With several micro batches only: what DeepSpeed always does.
    "FSDP2, no resharding, every batch": ("fsdp2_zero2", None, []),
    "zero stage 2, every batch": ("zero", None, ["--stage", "2"]),
}


def arguments(system, workload):
    """What to pass for this workload; None where the system does not take part."""
    if workload.endswith("muon") and SYSTEMS[system][0] not in ("alone", "ddp", "zero"):
        return None
    return SYSTEMS[system][2 if workload.endswith("accum4") else 1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(command, world, timeout):
    """Starts `command` once per rank; rank 0's output is the result."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    environment.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
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
    if kind == "zero":
        command = comparison_runs.command(kind, workload, ["--nproc", str(world), *extra], args)
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        done = subprocess.run(command, env=environment, capture_output=True, text=True,
                              timeout=args.timeout)
        out, err = done.stdout, done.stderr
    elif kind in ("alone", "plain"):
        emulated = ["--emulate", str(world if kind == "plain" else 1)]
        command = comparison_runs.command("plain", workload, emulated, args)
        out, err = run_ranks(command, 1, args.timeout)
    else:
        command = comparison_runs.command(kind, workload, extra, args)
        out, err = run_ranks(command, world, args.timeout)
    about = f"{kind} {' '.join(extra)} on {workload}, {world} ranks"
    return comparison_runs.result(out, err, about)


def taking_part(args, workload):
    return [n for n in comparison_runs.chosen(SYSTEMS, args.systems)
            if arguments(n, workload) is not None
            and (SYSTEMS[n][0] != "deepspeed" or comparison_runs.has_deepspeed())]


def measure(args, results, save):
    for workload in args.workloads.split(","):
        for world in (int(w) for w in args.worlds.split(",")):
            cell = {"workload": workload, "world": world, "runs": [], "errors": []}
            if args.device == "cuda":
                cell.update(device="cuda", transport=args.transport)
            results["cells"].append(cell)
            cell["plain"] = run("plain", [], workload, world, args)

            def one(name):
                return run(SYSTEMS[name][0], arguments(name, workload), workload, world, args)

            comparison_runs.take_turns(cell, taking_part(args, workload), one,
                                       f"{workload} W={world}", args, save)


def main():
    parser = comparison_runs.parser(__doc__, comparison_runs.WORKLOADS, repeats=7)
    parser.add_argument("--worlds", default="2", help="numbers of ranks, for example 2,4")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--transport", default="nccl", choices=["nccl", "gloo"],
                        help="between GPUs; gloo also where ranks share a GPU")
    args = parser.parse_args()
    results = comparison_runs.measured(args, lambda *found: measure(args, *found))
    print(comparison_report.tables(results, comparison_report.columns_of(results)))
    if args.chart:
        Path(args.chart).write_text(comparison_report.chart(results))
    sys.exit(0 if comparison_report.agrees(results) else 1)


if __name__ == "__main__":
    main()
