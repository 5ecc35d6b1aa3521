# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of .ci/gpu run, in their order: what is most likely to be wrong is first."""

import json
import re
import sys

from gpu_tools import host_syncs
from gpu_tools.records import Step

_KERNEL_TESTS = ["cuda_kernels_test", "cuda_updates_test"]
_OTHER_TESTS = ["cuda_optimizer_test", "random_state_gpu_test"]
_SYSTEMS = "DDP;one process;zero stage 2;zero stage 1"


def _tests(pack):
    return [Step(f"test:{name}", "GoogleTest", [[pack.program(name)]], timeout=500)
            for name in _KERNEL_TESTS + _OTHER_TESTS]


def _graph(pack):
    return [Step("graph", "a step in a CUDA graph has the bits of one without",
                 [[pack.program("cuda_optimizer_test"), "--gtest_filter=*Graph*:*Capture*"]])]


def read_failure(survivors, longest=6):
    """Of nccl_program: each survivor has an error in time, ends, and lives on."""
    def read(output, folder):
        errors = [float(text) for text in re.findall(r"error after ([\d.]+) s", output)]
        ends = [float(text) for text in re.findall(r"ended in ([\d.]+) s", output)]
        # The rank that stands still has its own error when it wakes up.
        errors, ends = sorted(errors)[:survivors], sorted(ends)[:survivors]
        lives = len(re.findall(r" s later$", output, re.MULTILINE))
        figures = {"error_s": errors, "end_s": ends}
        if lives < survivors or len(errors) != survivors:
            return figures, f"{len(errors)} of {survivors} have an error, {lives} live on"
        if max(errors) > longest or max(ends) > longest:
            return figures, (f"errors after {errors} s, ends after {ends} s, at most {longest} "
                             "expected")
        return figures, ""
    return read


def read_sums(output, folder):
    """Of nccl_program: what NCCL's own sums of fp32 are. That their bits vary is a failure of the
    program, where NVLS is off."""
    found = re.findall(r"(\d+) of (\d+) calls have other bits; of (\d+) sums (\d+) are not exact, "
                       r"(\d+) not in rank order; reduce-scatter ([\d.]+) ms, all-to-all ([\d.]+) ms",
                       output)
    names = ("calls_that_differ", "calls", "sums", "not_exact", "not_in_rank_order",
             "reduce_scatter_ms", "all_to_all_ms")
    figures = {name: [float(rank[i]) for rank in found] for i, name in enumerate(names)}
    return figures, "" if found else "no rank has said what it found"


def _nccl(pack):
    """Ranks that are processes, on one GPU or more."""
    def step(name, ranks, what, *arguments, call=None, **more):
        return Step(f"nccl:{name}:{ranks}", f"{what}, {ranks} ranks over NCCL",
                    [[pack.program("nccl_program"), call or name, str(ranks), *arguments]],
                    timeout=120, **more)
    return [
        *[step("sequences", ranks, "random programs of calls equal plain torch", "1", "40")
          for ranks in (2, 3, 4)],
        *[step(name, 4, f"sums of fp32 by NCCL, {how} NVLS", read=read_sums)
          for name, how in (("sums", "without"), ("sums_nvls", "with"))],
        step("capture", 2, "a step in a CUDA graph has the bits of one without"),
        step("capture_levels", 4, "the same in two levels", "2", call="capture"),
        step("living_graph", 2, "the same, and the optimizer ends before the graph"),
        *[step(how, ranks, f"the last rank {'stands still' if how == 'stands' else 'dies'}",
               read=read_failure(ranks - 1))
          for how in ("dies", "dies_unseen", "dies_replayed", "stands", "recovers")
          for ranks in (2, 3)],
        step("stands_first", 2, "the last rank stands still before the first round",
             read=read_failure(1, longest=8)),
        step("breaks", 2, "connections end while all ranks live", read=read_failure(2)),
    ]


def read_sanitizer(output, folder):
    """compute-sanitizer exits with 0 when the program under it could not start, too."""
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    if not found:
        return {}, "compute-sanitizer printed no summary"
    count = int(found.group(1))
    return {"findings": count}, f"{count} findings" if count else ""


def _sanitizers(pack):
    return [Step(f"{tool}:{name}", f"compute-sanitizer --tool {tool}",
                 [["--tool", tool, "--error-exitcode", "86", "--print-limit", "20",
                   pack.program(name)]],
                 timeout=570, read=read_sanitizer, needs="compute-sanitizer")
            for tool in ("memcheck", "racecheck") for name in _KERNEL_TESTS]


def read_kernels(output, folder):
    """Every line of the benchmark. One below its goal is no failure; the report marks it."""
    found = json.loads((folder / "kernels.json").read_text())
    fields = ("kernel_ms", "GBps", "other_GBps", "ratio", "goal")
    lines = {line["name"]: {field: line[field] for field in fields if field in line}
             for line in found["benchmarks"]}
    return {"kernels": lines}, "" if lines else "no line was measured"


def _kernels(pack):
    return [Step("kernels", "GB/s of every kernel beside a device copy",
                 [[pack.program("cuda_kernels_benchmark"), "--benchmark_out=kernels.json",
                   "--benchmark_out_format=json"]],
                 timeout=400, read=read_kernels)]


def read_training(output, folder):
    """The runs of compare_with_pytorch.py. That they differ is a finding as well."""
    found = json.loads((folder / "training.json").read_text())
    errors = [error for cell in found["cells"] for error in cell["errors"]]
    return {"training": found}, errors[0].splitlines()[0] if errors else ""


def _training(pack, name, workloads, world, transport, steps, repeats):
    command = [sys.executable, pack.source("examples/benchmark/compare_with_pytorch.py"),
               "--zero", pack.program("benchmark"), "--device", "cuda", "--transport", transport,
               "--workloads", workloads, "--worlds", str(world), "--systems", _SYSTEMS,
               "--steps", str(steps), "--repeats", str(repeats), "--timeout", "200",
               "--json", "training.json"]
    return Step(f"training:{name}", f"{workloads} beside DDP, {world} rank(s) over {transport}",
                [command], timeout=590, read=read_training)


def _all_training(pack):
    return [
        # From its 15th step on, any two runs of this model differ, of one process without zero too.
        _training(pack, "gpt350m", "gpt350m_bf16", 1, "nccl", steps=9, repeats=4),
        _training(pack, "gpt10m", "gpt10m_bf16", 1, "nccl", steps=50, repeats=2),
        # Ranks that share a GPU cannot use NCCL: this says that it works, not how fast it is.
        _training(pack, "gpt10m_shared", "gpt10m_bf16", 2, "gloo", steps=10, repeats=2),
        _training(pack, "gpt350m_shared", "gpt350m_bf16", 2, "gloo", steps=5, repeats=1),
    ]


# What an option costs and saves. An update in the backward pass does not clip.
_OPTIONS = ["", "--no-clip", "--no-clip --update-in-backward", "--split-masters", "--moments bfloat16",
            "--moments int8", "--bf16-shards", "--split-masters --moments int8 --bf16-shards",
            "--split-masters --moments int8 --no-clip --update-in-backward"]


def read_options(output, folder):
    """Of each run of the benchmark, in the order of _OPTIONS."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    figures = {text: {"median_ms": line["median_ms"], "device_mb": line["device_growth_mb"],
                      "loss": line["loss_last"]}
               for text, line in zip(_OPTIONS, lines)}
    whole = len(lines) == len(_OPTIONS)
    return {"options": figures if whole else {}}, "" if whole else "a run has no result"


def _options(pack):
    common = [pack.program("benchmark"), "--device", "cuda", "--nproc", "1", "--workload",
              "gpt350m_bf16", "--steps", "20", "--json"]
    return [Step("options:gpt350m", "time and memory of a step with options that need less memory",
                 [[*common, *text.split()] for text in _OPTIONS], timeout=400, read=read_options)]


def _traces(pack):
    def step(name, *options, workload="gpt10m_bf16", waits=0):
        def read(output, folder):
            return host_syncs.read(json.loads((folder / "trace.json").read_text()), waits)

        return Step(f"trace:{name}", "waits of the host in three steps, by a trace",
                    [[pack.program("benchmark"), "--device", "cuda", "--nproc", "1", "--workload",
                      workload, "--steps", "4", "--trace", "trace.json", *options]], read=read)
    return [step("stage2", "--stage", "2"), step("stage1", "--stage", "1"),
            step("small", "--split-masters", "--moments", "int8", "--bf16-shards"),
            step("update_in_backward", "--update-in-backward"),
            # Without kernels of its own a class cannot take a step back: the host reads, before it,
            # whether the step is left out.
            step("muon", workload="gpt10m_muon", waits=1),
            step("muon_no_clip", "--no-clip", workload="gpt10m_muon")]


def _losses(path):
    """Loss by step of a file of train_gpt --log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "step" in line}


def read_losses(output, folder):
    """A run that learns, and a part of it again from a checkpoint, with the same losses."""
    whole, part = _losses(folder / "whole.jsonl"), _losses(folder / "part.jsonl")
    first, last = whole[min(whole)], whole[max(whole)]
    apart = max(abs(part[step] - whole[step]) / whole[step] for step in part)
    figures = {"loss_first": first, "loss_last": last, "largest_difference": apart}
    if min(part) == 1 or max(part) != max(whole):
        return figures, f"the second run had the steps {min(part)} to {max(part)}"
    if not last < 0.8 * first:
        return figures, "the loss did not fall by a fifth"
    return figures, "" if apart < 0.05 else "the second run has other losses"


def _nccl_ranks(ranks, command):
    """Runs `command` as ranks that NCCL takes for ranks on machines of their own, on one GPU."""
    environment = (f"WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={ranks} MASTER_ADDR=127.0.0.1 "
                   "MASTER_PORT=29617")
    start = (f'for r in $(seq 0 {ranks - 1}); do RANK=$r LOCAL_RANK=$r NCCL_HOSTID=host-$r '
             f'{environment} "$@" & all="$all $!"; done; for p in $all; do wait $p || exit 1; done')
    return ["sh", "-c", start, "sh", *command]


def _train_gpt(pack):
    common = [pack.program("train_gpt"), "--device", "cuda", "--data", pack.source("zero"),
              "--dtype", "bfloat16", "--sample-bytes", "0", "--checkpoints", "checkpoints",
              "--steps", "200", "--save-every", "50", "--keep", "9"]
    whole = _nccl_ranks(2, [*common, "--log", "whole.jsonl"])
    part = [*common, "--nproc", "2", "--transport", "gloo", "--resume", "--log", "part.jsonl"]
    return [Step("train_gpt", "two ranks train with NCCL; their last steps again from a checkpoint, "
                 "over Gloo",
                 [whole, ["rm", "-r", "checkpoints/step-200"], part], read=read_losses)]


def all_steps(pack, out):
    return [*_tests(pack), *_graph(pack), *_nccl(pack), *_traces(pack), *_kernels(pack),
            *_options(pack), *_all_training(pack), *_train_gpt(pack), *_sanitizers(pack)]
