#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Compares a training step of zero with PyTorch's own systems on simulated hosts.

  ./bazelw build //examples:benchmark
  python3 examples/benchmark/compare_hosts.py --shapes 2x1,2x2 --rates 1gbit,none

Hosts are namespaces of this machine whose links are limited (tests/hosts/simulated_hosts.py). All
of them share its cores: with more ranks than cores a step takes longer than on real hosts, and a
rate that the cores cannot fill limits nothing. Systems take turns, and every ratio is of two runs
of the same turn. Losses, norms and parameters are compared with one plain process. The Python that
runs this needs torch; installs nothing.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import comparison_report
import comparison_runs

sys.path.insert(0, str(comparison_runs.ROOT / "tests" / "hosts"))
import host_traffic  # noqa: E402
import simulated_hosts  # noqa: E402

# name: (what runs, its arguments).
SYSTEMS = {
    "DDP": ("ddp", []),
    "ZeroRedundancyOptimizer": ("zero_redundancy", []),
    "FSDP2": ("fsdp2", []),
    "FSDP2, no resharding": ("fsdp2_zero2", []),
    "zero stage 2": ("zero", ["--stage", "2"]),
    "zero stage 2, overlapped gather": ("zero", ["--stage", "2", "--overlap-gather"]),
    "zero stage 2, flat": ("zero", ["--stage", "2", "--flat"]),
    "zero stage 2, bf16 wire": (
        "zero",
        ["--stage", "2", "--reduce-dtype", "bf16", "--encoded-sums"],
    ),
    "zero stage 2, int8 wire": ("zero", ["--stage", "2", "--wire", "int8"]),
    "zero stage 2, changes": ("zero", ["--stage", "2", "--gather-wire", "changes"]),
    "zero stage 2, changes, overlapped gather": (
        "zero",
        ["--stage", "2", "--gather-wire", "changes", "--overlap-gather"],
    ),
    "zero stage 2, changes, bf16 wire": (
        "zero",
        ["--stage", "2", "--gather-wire", "changes", "--reduce-dtype", "bf16", "--encoded-sums"],
    ),
    "zero stage 2, changes, int8 wire": (
        "zero",
        ["--stage", "2", "--gather-wire", "changes", "--wire", "int8"],
    ),
}

ELEMENTS = {"mlp": 25_190_400, "gpt": 10_893_312}
# Of one element on the wire; 256 elements of int8 have one fp32 scale.
BYTES = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}
PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}


def formula(cell, name):
    """The bytes that a host has to send in a step; None where the backend chooses the algorithm."""
    workload, hosts, local = cell["workload"], cell["hosts"], cell["ranks_per_host"]
    elements = ELEMENTS[workload[:3]]
    own = "bf16" if workload.endswith("bf16") else "fp32"
    if name == "DDP":
        # Gloo's ring, in which one rank of each host sends to another host.
        world = hosts * local
        return 2 * (world - 1) / world * elements * BYTES[own]
    # What has changed depends on the values.
    if SYSTEMS[name][0] != "zero" or "changes" in name:
        return None
    wire = name.split()[-2] if name.endswith(" wire") else own
    flat = "--flat" in SYSTEMS[name][1]
    bytes_of = host_traffic.flat_bytes if flat else host_traffic.expected_bytes
    return bytes_of(hosts, local, elements * BYTES[wire], elements * BYTES[own])


def bytes_per_second(rate):
    """Of a rate as tc writes it, such as 1gbit; None for "none"."""
    if rate == "none":
        return None
    number = rate.removesuffix("bit")
    factor = PREFIXES.get(number[-1:], 1)
    return float(number.rstrip("kmg")) * factor / 8


def _host_mb(cell, name, lines):
    return f"{comparison_report.median(lines, 'host_bytes') / 1e6:.1f}"


def _formula_mb(cell, name, lines):
    expected = formula(cell, name)
    return "" if expected is None else f"{expected / 1e6:.1f}"


def _link_use(cell, name, lines):
    rate = bytes_per_second(cell["rate"])
    if rate is None:
        return ""
    use = statistics.median(1e3 * line["host_bytes"] / line["median_ms"] / rate for line in lines)
    return f"{use:.0%}"


COLUMNS = {**comparison_report.PHASES, "MB per host": _host_mb, "formula": _formula_mb,
           "link use": _link_use, **comparison_report.MEMORY}


def run(kind, extra, cell, args):
    """One run of one system. Throws RuntimeError with the end of its output."""
    if cell["workload"].endswith("accum4"):
        extra = [*extra, "--no-sync"]
    command = comparison_runs.command(kind, cell["workload"], extra, args)
    with tempfile.TemporaryDirectory() as folder, simulated_hosts.SimulatedHosts(
            cell["hosts"], cell["ranks_per_host"], cell["rate"]) as hosts:
        job = hosts.start(command, folder)
        job.wait(args.timeout, grace=60)
        about = f"{kind} {' '.join(extra)} on {comparison_report.title(cell)}"
        if not job.succeeded():
            raise RuntimeError(f"{about}:\n{job.failures()}")
        first = job.ranks[0]
        return comparison_runs.result(first.output.read_text(), first.last_errors(8), about)


def run_plain(workload, world, args):
    """The same training in one process without hosts."""
    command = comparison_runs.command("plain", workload, ["--emulate", str(world)], args)
    with tempfile.TemporaryDirectory() as folder:
        rank = simulated_hosts.Rank(command, {"RANK": "0", "OMP_NUM_THREADS": "1"}, folder)
        simulated_hosts.Job([rank]).wait(args.timeout)
        return comparison_runs.result(rank.output.read_text(), rank.last_errors(8),
                                      f"plain on {workload}")


def measure(args, results, save):
    plain = {}
    names = comparison_runs.chosen(SYSTEMS, args.systems)
    for workload in args.workloads.split(","):
        for shape in args.shapes.split(","):
            hosts, local = (int(number) for number in shape.split("x"))
            world = hosts * local
            if (workload, world) not in plain:
                plain[workload, world] = run_plain(workload, world, args)
            for rate in args.rates.split(","):
                cell = {"workload": workload, "world": world, "hosts": hosts,
                        "ranks_per_host": local, "rate": rate, "runs": [], "errors": [],
                        "plain": plain[workload, world]}
                results["cells"].append(cell)
                comparison_runs.take_turns(
                    cell, names, lambda name: run(*SYSTEMS[name], cell, args),
                    comparison_report.title(cell), args, save)


def main():
    parser = comparison_runs.parser(__doc__, ["mlp25m"], repeats=4)
    parser.add_argument("--shapes", default="2x1,2x2,2x4,4x1", help="hosts x ranks of each")
    parser.add_argument("--rates", default="1gbit,10gbit,none", help="of a link, as tc writes them")
    args = parser.parse_args()
    if not args.source:
        reason = simulated_hosts.unavailable()
        if reason is not None:
            sys.exit(f"hosts cannot be simulated here: {reason}")
    results = comparison_runs.measured(args, lambda *found: measure(args, *found))
    print(comparison_report.tables(results, COLUMNS))
    if args.chart:
        Path(args.chart).write_text(comparison_report.chart(results))
    sys.exit(0 if comparison_report.agrees(results) else 1)


if __name__ == "__main__":
    main()
