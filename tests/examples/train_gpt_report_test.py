#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""train_gpt --report writes a page that needs nothing else, and shows what the run logged."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", "examples/train_gpt/train_gpt"))
STEPS = 30
# Large enough for several buckets.
SMALL = ["--data", "examples/train_gpt", "--layers", "2", "--width", "64", "--context", "32",
         "--batch", "12", "--validation-sequences", "4", "--nproc", "2"]
XHTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"


def new_folder():
    return Path(tempfile.mkdtemp(dir=os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")))


def train(folder, *options):
    """The page and the logged steps of a run."""
    subprocess.run([PROGRAM, *SMALL, "--report", str(folder / "run.html"), "--log",
                    str(folder / "log"), *options], check=True, capture_output=True, timeout=150,
                   env=dict(os.environ, OMP_NUM_THREADS="1"))
    entries = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return ElementTree.parse(folder / "run.html"), [e for e in entries if "step" in e]


def text_of(page):
    return " ".join("".join(page.getroot().itertext()).split())


def fit(values, positions):
    """The largest distance of `positions` from a straight line over `values`, and its slope."""
    low, high = min(values), max(values)
    at_low, at_high = positions[values.index(low)], positions[values.index(high)]
    slope = (at_high - at_low) / (high - low)
    return max(abs(at_low + slope * (v - low) - p) for v, p in zip(values, positions)), slope


class ReportTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = new_folder()
        cls.page, cls.steps = train(cls.folder, "--steps", str(STEPS), "--validate-every", "5",
                                    "--sample-bytes", "40", "--trace", str(cls.folder / "trace"))

    def curve(self, name):
        """The points of a curve in the page, from left to right."""
        found = [line for line in self.page.iter(SVG + "polyline")
                 if line.get("data-curve") == name]
        self.assertEqual(len(found), 1, name)
        return [tuple(map(float, pair.split(","))) for pair in found[0].get("points").split()]

    def check_curve(self, name, steps, values):
        points = self.curve(name)
        self.assertEqual(len(points), len(values), name)
        for axis, expected in ((0, steps), (1, values)):
            distance, slope = fit(expected, [point[axis] for point in points])
            self.assertLess(distance, 0.05, name)  # of a pixel
            self.assertLess(slope * (-1) ** (1 - axis), 0, f"{name} goes the wrong way")

    def test_the_curves_are_those_of_the_log(self):
        numbers = [entry["step"] for entry in self.steps]
        self.assertEqual(numbers, list(range(1, STEPS + 1)))
        for name, field in (("training", "loss"), ("norm", "gradient_norm"),
                            ("rate", "learning_rate"), ("tokens", "tokens_per_second")):
            self.check_curve(name, numbers, [entry[field] for entry in self.steps])
        measured = [entry for entry in self.steps if "validation_loss" in entry]
        self.assertEqual(len(measured), STEPS // 5)
        self.check_curve("validation", [entry["step"] for entry in measured],
                         [entry["validation_loss"] for entry in measured])

    def bar_widths(self):
        return {(box.get("data-bar"), box.get("data-part")): float(box.get("width"))
                for box in self.page.iter(SVG + "rect") if box.get("data-bar")}

    def check_bar_of_a_process_alone(self):
        # Two moments in fp32 for parameters in fp32.
        widths, alone = self.bar_widths(), "one process alone"
        self.assertAlmostEqual(widths[alone, "optimizer state"] / widths[alone, "parameters"], 2,
                               delta=1e-3)

    def test_the_bars_are_the_memory_beside_that_of_a_process_alone(self):
        widths = self.bar_widths()
        memory = self.steps[-1]["memory"]
        scale = widths["rank 0", "parameters"] / memory["working_parameters"]
        for part, sizes in (("optimizer state", ["optimizer_state"]), ("buckets", ["buckets"]),
                            ("gradients", ["gradient_shards", "full_gradients"])):
            expected = sum(memory[size] for size in sizes)
            self.assertGreater(expected, 0)
            self.assertAlmostEqual(widths["rank 0", part] / scale / expected, 1, delta=1e-3)
        self.check_bar_of_a_process_alone()

    def test_the_owners_share_all_parameters(self):
        table = next(t for t in self.page.iter(XHTML + "table") if t.get("id") == "owners")
        rows = [[cell.text for cell in row] for row in table]
        self.assertEqual(rows[0], ["elements", "rank 0", "rank 1"])
        self.assertEqual([row[0] for row in rows[1:]],
                         ["token_embedding", "position_embedding", "blocks.0", "blocks.1", "norm",
                          "head", "sharded MB"])
        owned = [sum(int(row[rank]) for row in rows[1:-1]) for rank in (1, 2)]
        self.assertIn(f"{sum(owned)} parameters in float32", text_of(self.page))
        self.assertLess(abs(owned[0] - owned[1]), 0.1 * sum(owned))
        memory = self.steps[-1]["memory"]
        sharded = memory["optimizer_state"] + memory["gradient_shards"] + memory["master_parameters"]
        self.assertAlmostEqual(float(rows[-1][1]), sharded / 1e6, delta=0.02)

    def test_the_time_line_has_the_parts_of_a_step(self):
        picture = next(p for p in self.page.iter(SVG + "svg") if p.get("id") == "timeline")
        names = [box.get("data-range") for box in picture if box.get("data-range")]
        for name in ("train_gpt::forward", "zero::pack bucket 0", "zero::reduce bucket 0",
                     "zero::clip", "zero::update bucket 0", "zero::gather bucket 0"):
            self.assertIn(name, names)
        width = float(picture.get("viewBox").split()[2])
        for box in picture.iter(SVG + "rect"):
            self.assertLessEqual(float(box.get("x")) + float(box.get("width")), width)

    def test_samples_options_and_versions_are_there(self):
        text = text_of(self.page)
        for steps in (STEPS // 10, STEPS // 2, STEPS):
            self.assertIn(f"after {steps} steps", text)
        samples = [block.text for block in self.page.iter(XHTML + "pre") if not block.get("id")]
        self.assertEqual([sample.startswith("#include <") for sample in samples], [True] * 3)
        for part in (f"steps={STEPS}", "width=64", "libtorch", "zero", "sequences in a step"):
            self.assertIn(part, text)

    def test_the_page_needs_nothing_else(self):
        content = (self.folder / "run.html").read_text()
        for outside in ("<script", "<link", "<img", "@import", "url(", " src=", " href="):
            self.assertNotIn(outside, content)

    def test_a_browser_shows_the_curves(self):
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if browser is None:
            self.skipTest("chromium is not installed (apt-get install chromium)")
        profile = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             f"--screenshot={self.folder}/run.png", "--window-size=1240,2400", "--dump-dom",
             f"file://{self.folder}/run.html"], capture_output=True, text=True, timeout=120,
            env=dict(os.environ, HOME=profile))
        shown = re.findall(r'<polyline data-curve="(\w+)"', done.stdout)
        self.assertEqual(sorted(shown), ["norm", "rate", "tokens", "training", "validation"],
                         done.stderr[-2000:])

    def test_a_short_run_without_trace_and_samples_has_a_page(self):
        folder = new_folder()
        short = ("--steps", "1", "--sample-bytes", "0", "--checkpoints", str(folder / "saved"))
        page, steps = train(folder, *short)
        self.assertEqual(len(steps), 1)
        self.assertIn("No trace was recorded", text_of(page))
        # Nothing is left to be trained or traced, and the log stays.
        page, again = train(folder, *short, "--resume", "--trace", str(folder / "trace"))
        self.assertEqual(again, steps)
        self.assertIn("No trace was recorded", text_of(page))

    def test_a_run_that_is_stopped_has_a_page(self):
        folder = new_folder()
        job = subprocess.Popen([PROGRAM, *SMALL, "--steps", "1000000", "--sample-bytes", "0",
                                "--checkpoints", str(folder / "saved"), "--report",
                                str(folder / "run.html"), "--log", str(folder / "log")],
                               stdout=subprocess.DEVNULL)
        try:
            while job.poll() is None and '"step":3' not in (
                    (folder / "log").read_text() if (folder / "log").exists() else ""):
                time.sleep(0.02)
            job.send_signal(signal.SIGTERM)
            self.assertEqual(job.wait(timeout=150), 0)
        finally:
            job.kill()
        self.page = ElementTree.parse(folder / "run.html")
        self.assertGreaterEqual(len(self.curve("training")), 3)
        self.check_bar_of_a_process_alone()

    def test_a_page_that_cannot_be_written_is_refused_at_the_start(self):
        done = subprocess.run([PROGRAM, *SMALL, "--report", "/no/such/folder/run.html"],
                              capture_output=True, text=True, timeout=150)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--report: cannot write /no/such/folder/run.html", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
