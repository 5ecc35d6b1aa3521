#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of one PyTorch system on one workload; rank 0 prints a JSON line.

  torchrun --standalone --nproc-per-node 2 examples/benchmark/pytorch_benchmark.py --system ddp \
      --workload mlp25m

examples/benchmark/compare_with_pytorch.py runs this beside the C++ benchmark. The fields mean what they
mean there, but bytes_sent is the part of one rank in host_bytes, headers included. On a GPU the
host reads neither loss nor norm in a step, as there.
"""

import argparse
import ctypes
import gc
import json
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist

import pytorch_systems
import pytorch_workload

WARM_UP = 3


def status_mb(field):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return 0.0


def cpu_ms():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def interface_bytes():
    """What the interface that connects ranks has sent, for whichever program."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or "lo"
    with open("/proc/self/net/dev") as file:
        for line in file:
            name, _, counts = line.partition(":")
            if name.strip() == interface:
                return int(counts.split()[8])
    return 0


def over_ranks(value, op):
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor, op)
    return tensor.item()


class StepClock:
    """The times between the starts of steps: of the host, or of a GPU's events."""

    def __init__(self, on_gpu):
        self.on_gpu, self.marks = on_gpu, []

    def mark(self):
        if not self.on_gpu:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def times_ms(self):
        pairs = list(zip(self.marks, self.marks[1:]))
        if not self.on_gpu:
            return [1e3 * (end - begin) for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


class Run:
    def __init__(self, args):
        self.args = args
        self.on_gpu = args.device == "cuda"
        self.micro_batches = pytorch_workload.MICRO_BATCHES[args.workload]
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        # One process that stands for several ranks has the data of all of them.
        ranks = range(args.emulate) if args.system == "plain" else [self.rank]
        with torch.device(args.device):
            model = pytorch_workload.make_model(args.workload)
            self.data = [model.make_data(r, m) for r in ranks for m in range(self.micro_batches)]
        bf16 = args.workload.endswith("bf16")
        if bf16 and not args.system.startswith("fsdp2"):
            model.to(torch.bfloat16)  # FSDP2 keeps fp32 and casts by itself
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.anon_before = status_mb("RssAnon")
        self.peak_before = status_mb("VmHWM")
        if self.on_gpu:
            self.device_before = torch.cuda.memory_allocated()
        self.system = pytorch_systems.make(args.system, model, bf16, args.no_sync,
                                           args.workload.endswith("muon"))
        self.line = {}
        self.clock = StepClock(self.on_gpu)
        self.phases = {"fb_ms": [], "clip_ms": [], "opt_ms": []}

    def one_step(self, step):
        last = step == WARM_UP + self.args.steps - 1
        if step == WARM_UP:
            self.cpu_before, self.sent_before = cpu_ms(), interface_bytes()
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
        self.clock.mark()
        start = time.perf_counter()
        losses = [self.system.backward(data, len(self.data), last=i + 1 == len(self.data))
                  for i, data in enumerate(self.data)]
        backward_end = time.perf_counter()
        norm = self.system.clip(1.0)
        clip_end = time.perf_counter()
        self.system.step()
        if step >= WARM_UP:
            ends = (backward_end - start, clip_end - backward_end, time.perf_counter() - clip_end)
            for name, seconds in zip(self.phases, ends):
                self.phases[name].append(1e3 * seconds)
        if step == 0 or last:
            suffix = "first" if step == 0 else "last"
            loss = sum(float(part) for part in losses)
            self.line["loss_" + suffix] = over_ranks(loss, dist.ReduceOp.SUM) / self.world
            self.line["norm_" + suffix] = float(norm)
        if step in (0, 2):
            self.line[f"l2_{step + 1}"], self.line[f"dot_{step + 1}"] = self.system.checksums()

    def measure(self):
        args, line = self.args, self.line
        for step in range(WARM_UP + args.steps):
            self.one_step(step)
        self.clock.mark()
        times = self.clock.times_ms()[WARM_UP:]
        cpu = (cpu_ms() - self.cpu_before) / args.steps
        sent = (interface_bytes() - self.sent_before) / args.steps
        anon, peak = status_mb("RssAnon"), status_mb("VmHWM")
        largest = dist.ReduceOp.MAX
        line.update(system=args.system, workload=args.workload, device=args.device,
                    steps=args.steps)
        if self.on_gpu:
            growth = torch.cuda.max_memory_allocated() - self.device_before
            line["device_growth_mb"] = over_ranks(growth / 2**20, largest)
        line.update(world=args.emulate if args.system == "plain" else self.world)
        line["median_ms"] = over_ranks(statistics.median_high(times), largest)
        line["min_ms"] = over_ranks(min(times), largest)
        for name, numbers in self.phases.items():
            line[name] = over_ranks(statistics.median_high(numbers), largest)
        line["cpu_ms"] = over_ranks(cpu, largest)
        line["anon_growth_mb"] = over_ranks(anon - self.anon_before, largest)
        line["rss_growth_mb"] = over_ranks(peak - self.peak_before, largest)
        line["host_bytes"] = over_ranks(sent, dist.ReduceOp.SUM) / self.world
        line["bytes_sent"] = round(
            line["host_bytes"] / int(os.environ.get("LOCAL_WORLD_SIZE", self.world)))
        line["param_l2"], line["param_dot"] = self.system.checksums()
        line.update(self.system.extra())
        return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--system", required=True, choices=pytorch_systems.NAMES)
    parser.add_argument("--workload", required=True, choices=pytorch_workload.MICRO_BATCHES)
    parser.add_argument("--steps", type=int, default=12, help="timed steps, after 3 that are not")
    parser.add_argument("--no-sync", action="store_true", help="send in the last micro batch only")
    parser.add_argument("--emulate", type=int, default=1,
                        help="plain: train on the data of this many ranks in one process")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--transport", default="nccl", choices=["nccl", "gloo"],
                        help="between GPUs; gloo also where ranks share a GPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: expected a GPU and a torch built for it")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    if args.system != "plain":
        dist.init_process_group("gloo" if args.device == "cpu" or args.transport == "gloo"
                                else "cpu:gloo,cuda:nccl")
    line = Run(args).measure()
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(line))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
