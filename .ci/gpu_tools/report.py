# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks/gpu.md, from the result of .ci/gpu run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples/benchmark"))

import comparison_report

HEAD = """\
# On a GPU

Does the library work on a GPU, and how fast is it there? `.ci/gpu report` writes this page from
the result of one command, so it is not edited by hand.

```sh
.ci/gpu pack                       # with the CUDA toolkit: builds, and makes the folder .gpu
.gpu/.ci/gpu run --out results     # with a GPU: needs that folder alone
.ci/gpu report results/gpu.json    # writes this page
```

The GPU machine needs a Python with the PyTorch that `third_party/versions.env` names; no Bazel,
compiler or network. A step that fails leaves the others running, and a call goes on where the last
one stopped: `--minutes 9` bounds it, `--only trace` chooses steps.

| steps | what they show |
|---|---|
| `test` | tests tagged `gpu`: kernels have the CPU's bits, `ZeroOptimizer` follows the CPU |
| `graph` | a step in a CUDA graph has the bits of one without |
| `nccl` | processes over NCCL: random programs of calls, sums, capture, deaths, recovery |
| `trace` | waits of the host for the device in three traced steps: there should be none, but one a step for a class without kernels (Muon) that may leave a step out |
| `kernels` | each kernel beside a copy by the device, in turns; aligned, not aligned, and 1000 segments |
| `options` | what options that need less memory cost and save, with one rank |
| `training` | stages 1 and 2 beside PyTorch's DDP and fused AdamW: one rank, or two that share a GPU |
| `train_gpt` | training, checkpoints, and the same losses again on another number of ranks |
| `memcheck`, `racecheck` | compute-sanitizer on the tests of the kernels |

Where ranks share a GPU, each states a host of its own (`NCCL_HOSTID`), so that NCCL takes sockets
between them; their kernels take turns. The benchmark has one rank, which sends nothing, or two over
Gloo: times there show that it works, not how fast NCCL between GPUs is. The systems keep fp32
masters of bf16 parameters, DDP by hand, and read neither loss nor norm in a step. *fb*, *clip* and
*opt* are the time that the host needs to enqueue the work, *GPU MB* is what a step allocates beside
the model.
"""

_KERNEL_ROWS = ("| kernel, elements, offset | ms | GB/s | copy or read, GB/s | ratio | goal |",
                "|---|---:|---:|---:|---:|---:|")


def _about(result):
    facts, pack = result["machine"], result["pack"]
    return (f"Measured on {facts['date']}, {facts['gpus']} x {facts['gpu']}, driver "
            f"{facts['driver']}, PyTorch {facts['torch']}, NCCL {facts['nccl']}, {facts['cores']} "
            f"cores of {facts['cpu']}; zero at {pack['commit']} where a step has no other commit.")


def _steps(result):
    rows = ["| step | result | seconds | |", "|---|---|---:|---|"]
    for name, step in result["steps"].items():
        figures = step["figures"]
        # Whoever reads a result may add what is to be known about it, as "note" of the step.
        note = step.get("note", step["reason"])
        commit = step.get("commit", result["pack"]["commit"])
        if commit != result["pack"]["commit"]:
            note = f"at {commit}" + (f": {note}" if note else "")
        if "tests" in figures:
            note = ", ".join([*([note] if note else []), f"{figures['tests']} tests",
                              *([f"{figures['skipped']} skipped"] if figures["skipped"] else [])])
        rows.append(f"| {name} | {step['status']} | {step['seconds']:.0f} | "
                    f"{note.replace('|', '/')} |")
    return rows


# Arrays that no cache holds, and arrays of one small bucket. The result has more sizes.
_LARGE, _SMALL = "numel:134217728", "numel:1048576"


def _kernels(lines):
    rows = [*_KERNEL_ROWS]
    for name, line in lines.items():
        if _LARGE not in name and _SMALL not in name:
            continue
        goal = ""
        if "goal" in line and _LARGE in name and "off:0" in name:
            goal = f"{line['goal']:.2f}" + ("" if line["ratio"] >= line["goal"] else " missed")
        short = name.replace("/iterations:25/manual_time", "")
        rows.append(f"| {short} | {line['kernel_ms']:.3f} | {line['GBps']:.0f} | "
                    f"{line['other_GBps']:.0f} | {line['ratio']:.2f} | {goal} |")
    return rows


def _traces(result):
    for name, step in result["steps"].items():
        figures = step["figures"]
        if name.startswith("trace") and "waits" in figures:
            waits = ", ".join(f"{n} {what}" for what, n in figures["waits"].items()) or "none"
            calls = ", ".join(f"{n} {what}" for what, n in figures["allocations"].items()) or "none"
            launches = f"{figures['launches_per_step']:.0f} launches a step"
            yield (f"* `{name}`: waits of the host in {figures['steps']} steps: {waits}; calls "
                   f"that allocate: {calls}; {launches}.")


def _sums(result):
    for name, step in result["steps"].items():
        figures = step["figures"]
        if "calls_that_differ" in figures and figures["calls"]:
            different = max(figures["calls_that_differ"])
            yield (f"* `{name}`: on the worst rank {different:.0f} of {figures['calls'][0]:.0f} "
                   f"calls have other bits than the first; of {figures['sums'][0]:.0f} sums "
                   f"{max(figures['not_exact']):.0f} are not the exact ones rounded, "
                   f"{max(figures['not_in_rank_order']):.0f} not those in rank order; "
                   f"reduce-scatter {max(figures['reduce_scatter_ms']):.2f} ms, all-to-all "
                   f"{max(figures['all_to_all_ms']):.2f} ms.")


def _options(result):
    for name, step in result["steps"].items():
        for text, line in step["figures"].get("options", {}).items():
            yield (f"| {name.split(':')[1]} | `{text or 'none'}` | {line['median_ms']:.1f} | "
                   f"{line['device_mb']:.0f} | {line['loss']:.3f} |")


def _training(result):
    for name, step in result["steps"].items():
        found = step["figures"].get("training")
        if found:
            yield comparison_report.tables(found, comparison_report.GPU_COLUMNS)
        elif name.startswith("training") and "\n### " in step["tail"]:
            # It failed, and has printed what it measured.
            yield step["tail"].split("\n### ", 1)[1].join(("### ", "")).rstrip() + "\n"


def text(result):
    """The page. Without a result of a GPU it says so."""
    lines = [HEAD]
    if not result["machine"].get("gpu"):
        lines.append("**Nothing has been measured yet**: no machine with a GPU has run this.\n")
        return "\n".join(lines)
    lines += [_about(result), "", *_steps(result), ""]
    traces = list(_traces(result))
    if traces:
        lines += ["## Waits of the host", "", *traces, ""]
    kernels = result["steps"].get("kernels", {}).get("figures", {}).get("kernels")
    if kernels:
        lines += ["## Kernels", "", *_kernels(kernels), ""]
    sums = list(_sums(result))
    if sums:
        lines += ["## Sums of fp32 by NCCL", "", *sums, ""]
    options = list(_options(result))
    if options:
        lines += ["## Options", "", "| workload | options | ms | GPU MB | last loss |",
                  "|---|---|---:|---:|---:|", *options, ""]
    training = list(_training(result))
    if training:
        lines += ["## Training", "", *training]
    return "\n".join(lines).rstrip() + "\n"
