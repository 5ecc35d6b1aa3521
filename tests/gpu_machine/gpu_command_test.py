#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
""".ci/gpu with steps that pass, fail, hang or cannot run, and with figures that they found."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / ".ci"))

from gpu_tools import host_syncs, records, report, steps

PACK = {"commit": "abc", "torch": "2.11.0"}
WITH_GPU = {"gpu": "a GPU", "gpus": 1, "driver": "1", "torch": "2.11.0", "nccl": "2", "cores": 1,
            "cpu": "a CPU", "date": "2026-01-01"}
WITHOUT_GPU = {**WITH_GPU, "gpu": "", "gpus": 0, "driver": ""}

SKIPPING_TEST = """
a_test.cc:1: Skipped
no CUDA device
[  PASSED  ] 3 tests.
[  SKIPPED ] 2 tests, listed below:
"""


def python(name, code, **more):
    return records.Step(name, "", [[sys.executable, "-c", code]], **more)


class RunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name)

    def run_steps(self, chosen, machine=WITH_GPU, pack=PACK, again=False, minutes=1e9):
        """The records by name, as the file has them."""
        record = records.Record(self.out / "gpu.json", pack, machine)
        records.Runner(record, self.out, dict(os.environ), minutes).run(chosen, again)
        return json.loads((self.out / "gpu.json").read_text())["steps"]

    def test_a_step_that_fails_leaves_the_others_running(self):
        found = self.run_steps([
            python("fails", "import sys; print('why it fails'); sys.exit(3)"),
            records.Step("is_missing", "", [["/no/such/program"]]),
            python("cannot_be_read", "", read=lambda output, folder: json.loads(output)),
            python("finds_something", "", read=lambda output, folder: ({"n": 1}, "a problem")),
            python("passes", "print('fine')")])
        self.assertEqual({name: step["status"] for name, step in found.items()},
                         {"fails": "failed", "is_missing": "failed", "cannot_be_read": "failed",
                          "finds_something": "failed", "passes": "passed"})
        self.assertEqual(found["fails"]["reason"], "exit status 3: why it fails")
        self.assertEqual(found["finds_something"]["figures"], {"n": 1})
        self.assertTrue(found["fails"]["tail"].startswith("$ python3 -c"))

    def test_a_step_that_hangs_ends_with_everything_that_it_started(self):
        hangs = records.Step("hangs", "", [["sh", "-c", "sleep 600 & echo $!; wait"]], timeout=2)
        found = self.run_steps([hangs, python("passes", "")])
        self.assertEqual(found["hangs"]["status"], "failed")
        self.assertEqual(found["hangs"]["reason"], "not done after 2 s")
        self.assertEqual(found["passes"]["status"], "passed")
        child = int(found["hangs"]["tail"].splitlines()[1])
        status = Path(f"/proc/{child}/stat")
        self.assertTrue(not status.exists() or status.read_text().split()[2] == "Z")

    def test_without_a_gpu_steps_are_skipped_for_their_own_reasons(self):
        chosen = [python("program", "import sys; sys.exit('expected a GPU')"),
                  python("test", f"print('''{SKIPPING_TEST}''')"),
                  python("benchmark", "print('nothing is measured: no CUDA device')"),
                  python("tool", "", needs="no-such-tool")]
        found = self.run_steps(chosen, WITHOUT_GPU)
        self.assertEqual({name: (step["status"], step["reason"]) for name, step in found.items()},
                         {"program": ("skipped", "no GPU: expected a GPU"),
                          "test": ("skipped", "no CUDA device"),
                          "benchmark": ("skipped", "no CUDA device"),
                          "tool": ("skipped", "no-such-tool is not here")})

    def test_with_a_gpu_that_programs_do_not_see_they_fail(self):
        machine = {**WITHOUT_GPU, "driver": "1"}
        found = self.run_steps([python("program", "import sys; sys.exit('no GPU')")], machine)
        self.assertEqual(found["program"]["status"], "failed")

    def test_a_call_goes_on_where_the_last_one_stopped(self):
        counter = self.out / "runs"
        counted = python("counted", f"open('{counter}', 'a').write('x')")
        fails = python("fails", f"open('{counter}', 'a').write('y'); exit(1)")
        for _ in range(2):
            self.run_steps([counted, fails])
        self.assertEqual(counter.read_text(), "xyy")
        self.run_steps([counted], again=True)
        self.assertEqual(counter.read_text(), "xyyx")
        self.run_steps([counted], pack={**PACK, "commit": "other programs"})
        self.assertEqual(counter.read_text(), "xyyxx")

    def test_a_call_ends_in_time_and_the_next_one_runs_the_rest(self):
        hangs = records.Step("hangs", "", [["sleep", "600"]])
        found = self.run_steps([hangs, python("later", "")], minutes=1 / 60)
        self.assertEqual(found["hangs"]["status"], "stopped")
        self.assertNotIn("later", found)
        self.assertEqual(self.run_steps([python("hangs", "")])["hangs"]["status"], "passed")

    def test_results_of_several_calls_are_one(self):
        self.run_steps([python("a", ""), python("b", "exit(1)")], WITHOUT_GPU)
        first = self.out / "first.json"
        (self.out / "gpu.json").rename(first)
        self.run_steps([python("b", "")], pack={**PACK, "commit": "def"})
        whole = records.merged([first, self.out / "gpu.json"])
        self.assertEqual({name: step["status"] for name, step in whole["steps"].items()},
                         {"a": "passed", "b": "passed"})
        self.assertEqual(whole["machine"], WITH_GPU)
        page = report.text(whole)
        self.assertIn("zero at def where", page)
        self.assertRegex(page, r"\| a \| passed \| \d+ \| at abc \|")
        self.assertRegex(page, r"\| b \| passed \| \d+ \|  \|")


def event(name, ts, dur=1, cat="cuda_runtime"):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat}


class ReadTest(unittest.TestCase):
    STEPS = [event("benchmark::step", 100, 50, "cpu_op"),
             event("benchmark::step", 200, 50, "cpu_op"),
             event("benchmark::step", 300, 500, "gpu_user_annotation")]

    def test_waits_count_inside_steps_only(self):
        trace = {"traceEvents": [
            *self.STEPS, event("cudaLaunchKernel", 110), event("cudaLaunchKernel", 210),
            event("cudaStreamSynchronize", 90), event("cudaStreamSynchronize", 120),
            event("cudaEventSynchronize", 220), event("cudaDeviceSynchronize", 400),
            event("cudaEventQuery", 130), event("cudaMalloc", 140)]}
        figures, problem = host_syncs.read(trace)
        self.assertEqual(figures["waits"], {"cudaStreamSynchronize": 1, "cudaEventSynchronize": 1})
        self.assertEqual(figures["allocations"], {"cudaMalloc": 1})
        self.assertEqual(figures["launches_per_step"], 1)
        self.assertIn("1 cudaStreamSynchronize", problem)
        self.assertIn("1 cudaStreamSynchronize", host_syncs.read(trace, waits_a_step=0.5)[1])
        self.assertEqual(host_syncs.read(trace, waits_a_step=1)[1], "")

    def test_copies_to_memory_that_is_not_pinned_count(self):
        copies = [event("Memcpy DtoH (Device -> Pageable)", 260, cat="gpu_memcpy"),
                  event("Memcpy DtoD (Device -> Device)", 260, cat="gpu_memcpy"),
                  event("Memcpy DtoH (Device -> Pinned)", 260, cat="gpu_memcpy")]
        figures, problem = host_syncs.read(
            {"traceEvents": [*self.STEPS, event("cudaLaunchKernel", 110), *copies]})
        self.assertEqual(figures["waits"], {"Memcpy DtoH (Device -> Pageable)": 1})
        self.assertTrue(problem)

    def test_a_trace_that_shows_nothing_is_no_proof(self):
        launch = event("cudaLaunchKernel", 110)
        self.assertEqual(host_syncs.read({"traceEvents": [*self.STEPS, launch]})[1], "")
        self.assertIn("no range", host_syncs.read({"traceEvents": [launch]})[1])
        self.assertIn("no calls", host_syncs.read({"traceEvents": self.STEPS})[1])

    def test_a_sanitizer_without_a_summary_fails(self):
        summary = "========= {} SUMMARY: {}"
        self.assertEqual(steps.read_sanitizer(summary.format("ERROR", "0 errors"), None)[1], "")
        racecheck = "0 hazards displayed (0 errors, 0 warnings)"
        self.assertEqual(steps.read_sanitizer(summary.format("RACECHECK", racecheck), None)[1], "")
        self.assertEqual(steps.read_sanitizer(summary.format("ERROR", "2 errors"), None)[1],
                         "2 findings")
        self.assertIn("no summary", steps.read_sanitizer("Device not supported", None)[1])

    def test_survivors_have_an_error_in_time_and_live_on(self):
        def read(*ranks, survivors=2):
            lines = [line for rank, (error, end, lives) in enumerate(ranks) for line in
                     (f"rank {rank}: error after {error:.2f} s: lost rank 2",
                      f"rank {rank}: ended in {end:.2f} s",
                      *([f"rank {rank}: lives 12 s later"] if lives else []))]
            return steps.read_failure(survivors)("\n".join(lines), None)[1]

        fine = (0.3, 1.2, True)
        self.assertEqual(read(fine, fine), "")
        self.assertEqual(read(fine, fine, (10.0, 0.1, True)), "")  # that stood still itself
        self.assertIn("1 of 2 have an error", read(fine))
        self.assertIn("1 live on", read(fine, (0.3, 1.2, False)))
        self.assertIn("at most 6", read(fine, (7.5, 0.1, True)))
        self.assertIn("at most 6", read(fine, (0.3, 10.0, True)))

    def test_a_failed_step_shows_what_it_measured(self):
        step = {"status": "failed", "reason": "exit status 1", "seconds": 1, "figures": {},
                "tail": "a log\n### a workload\n\n| a table |\n"}
        page = report.text({"pack": PACK, "machine": WITH_GPU, "steps": {"training:a": step}})
        self.assertIn("### a workload\n\n| a table |", page)
        self.assertNotIn("a log", page)

    def test_on_a_gpu_ddp_is_the_measure(self):
        sys.path.insert(0, str(ROOT / "examples/benchmark"))
        import comparison_report
        values = {"loss_last": 1, "l2_1": 1, "dot_1": 1, "norm_first": 1, "param_l2": 1}
        plain = {**values, "norm_first_fp64": 1}

        def marked(device, ddp, ours):
            runs = [{**values, "name": "DDP", "dot_1": 1 + ddp},
                    {**values, "name": "zero stage 2", "dot_1": 1 + ours}]
            cell = {"workload": "gpt350m_bf16", "device": device, "runs": runs, "plain": plain}
            return [name for name, _, worst, allowed in comparison_report.differences(cell, 12)
                    if worst > allowed]

        self.assertEqual(marked("cuda", 0.5, 1.5), [])
        self.assertEqual(marked("cuda", 0.5, 2.5), ["zero stage 2"])
        self.assertEqual(marked("cpu", 0.5, 1.5), ["DDP", "zero stage 2"])

    def test_sums_of_nccl_are_figures_of_each_rank(self):
        line = ("rank {}: 2 of 1000 calls have other bits; of 64 sums 3 are not exact, 5 not in "
                "rank order; reduce-scatter 1.500 ms, all-to-all 2.000 ms of 16 MiB\n")
        figures, problem = steps.read_sums(line.format(0) + line.format(1), None)
        self.assertEqual(problem, "")
        self.assertEqual(figures["calls_that_differ"], [2, 2])
        self.assertEqual(figures["not_exact"], [3, 3])
        self.assertEqual(figures["all_to_all_ms"], [2, 2])
        self.assertIn("no rank", steps.read_sums("Killed", None)[1])

    def test_each_option_has_the_figures_of_its_run(self):
        line = '$ benchmark --json\n{{"median_ms": {0}, "device_growth_mb": {0}, "loss_last": 1}}\n'
        output = "".join(line.format(i) for i in range(len(steps._OPTIONS)))
        figures, problem = steps.read_options(output, None)
        self.assertEqual(problem, "")
        self.assertEqual(figures["options"]["--split-masters"]["device_mb"], 3)
        self.assertIn("no result", steps.read_options(output + line.format(9), None)[1])
        self.assertIn("no result", steps.read_options("", None)[1])

    def test_training_has_to_learn_and_to_go_on(self):
        def read(whole, part):
            with tempfile.TemporaryDirectory() as folder:
                for name, losses in (("whole.jsonl", whole), ("part.jsonl", part)):
                    lines = [{"run": {}}, *({"step": s, "loss": x} for s, x in losses.items())]
                    (Path(folder) / name).write_text("\n".join(map(json.dumps, lines)))
                return steps.read_losses("", Path(folder))[1]

        self.assertEqual(read({1: 5, 2: 4, 3: 3}, {3: 3.01}), "")
        self.assertIn("did not fall", read({1: 5, 2: 5, 3: 5}, {3: 5}))
        self.assertIn("other losses", read({1: 5, 2: 4, 3: 3}, {3: 4}))
        self.assertIn("had the steps", read({1: 5, 2: 4, 3: 3}, {1: 5, 2: 4, 3: 3}))


class ReportTest(unittest.TestCase):
    def test_the_page_is_what_the_report_of_its_results_is(self):
        pages = ROOT / "docs/benchmarks"
        results = [path for path in [pages / "gpu.json"] if path.exists()]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, str(ROOT / ".ci/gpu"), "report", *map(str, results),
                            "--file", f"{folder}/gpu.md"], check=True)
            self.assertEqual((Path(folder) / "gpu.md").read_text(), (pages / "gpu.md").read_text())

    def test_figures_are_on_the_page_and_a_missed_goal_is_marked(self):
        def line(ratio):
            return {"kernel_ms": 1.5, "GBps": 2000, "other_GBps": 2500, "ratio": ratio,
                    "goal": 0.85}

        run = {"name": "DDP", "turn": 0, "median_ms": 12.25, "load": 1.0, "fb_ms": 1, "clip_ms": 1,
               "opt_ms": 1, "cpu_ms": 1, "device_growth_mb": 7, "loss_last": 1, "l2_1": 1,
               "dot_1": 1, "norm_first": 1, "param_l2": 1}
        ours = {**run, "name": "zero stage 2", "median_ms": 9.8}
        cell = {"workload": "gpt350m_bf16", "world": 1, "device": "cuda", "transport": "nccl",
                "runs": [run, ours], "errors": [], "plain": {**run, "norm_first_fp64": 1}}
        training = {"environment": {"cores": 1}, "steps": 12, "cells": [cell]}
        found = {
            "trace:stage2": {"waits": {"cudaStreamSynchronize": 3}, "steps": 3, "allocations": {},
                             "launches_per_step": 100},
            "kernels": {"kernels": {"adamw/numel:134217728/off:0": line(0.9),
                                    "lion/numel:134217728/off:0": line(0.8)}},
            "nccl:sums:4": {"calls_that_differ": [2, 0], "calls": [9, 9], "sums": [64, 64],
                            "not_exact": [3, 4], "not_in_rank_order": [5, 6],
                            "reduce_scatter_ms": [1, 1.5], "all_to_all_ms": [2, 2]},
            "options:gpt350m": {"options": {"--no-clip": {"median_ms": 2.5, "device_mb": 77,
                                                          "loss": 1.25}}},
            "training:gpt350m": {"training": training}}
        made = {name: {"status": "passed", "reason": "", "seconds": 1.0, "figures": figures}
                for name, figures in found.items()}
        page = report.text({"pack": PACK, "machine": WITH_GPU, "steps": made})
        self.assertIn("1 x a GPU", page)
        self.assertIn("3 cudaStreamSynchronize", page)
        self.assertIn("| 0.90 | 0.85 |", page)
        self.assertIn("| 0.80 | 0.85 missed |", page)
        self.assertIn("| zero stage 2 | 9.8 | 0.80 |", page)
        self.assertIn("2 of 9 calls have other bits", page)
        self.assertIn("4 are not the exact ones rounded, 6 not those in rank order", page)
        self.assertIn("| gpt350m | `--no-clip` | 2.5 | 77 | 1.250 |", page)
        self.assertNotIn("Nothing has been measured", page)


if __name__ == "__main__":
    unittest.main()
