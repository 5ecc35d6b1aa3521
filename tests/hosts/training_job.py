# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""A small train_gpt on simulated hosts, as the tests of this folder start it."""

import concurrent.futures
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import simulated_hosts

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", "examples/train_gpt/train_gpt"))
TEXT = os.path.abspath("examples/train_gpt")


def skip_unless_available():
    """Ends this program, with success and a sentence, where hosts cannot be simulated."""
    reason = simulated_hosts.unavailable()
    if reason is not None:
        print("skipped: hosts cannot be simulated here:", " ".join(reason.split()))
        sys.exit(0)


def new_folder():
    """A folder for outputs, which `bazel test` keeps."""
    return Path(tempfile.mkdtemp(dir=os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")))


def command(folder, steps, *, width=128, layers=2):
    return [PROGRAM, "--data", TEXT, "--steps", str(steps), "--layers", str(layers),
            "--width", str(width), "--context", "16", "--batch", "12", "--sample-bytes", "0",
            "--validate-every", "1000000", "--validation-sequences", "4",
            "--nproc", "1", "--log", str(folder / "log")]


def log(folder):
    """The steps that have been logged, a dictionary each."""
    path = folder / "log"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if "step" in entry]


@functools.cache
def train_on_one_rank(steps, *arguments):
    """The log of the same training without namespaces."""
    folder = new_folder()
    subprocess.run([*command(folder, steps), *arguments], check=True, capture_output=True,
                   env=dict(os.environ, OMP_NUM_THREADS="1"), timeout=60)
    return log(folder)


class TwoAtOnce:
    """A runner for unittest.main(): half of each test is waiting."""

    @staticmethod
    def run(tests):
        def run_alone(test):
            stream = io.StringIO()
            result = unittest.TextTestRunner(stream, verbosity=2).run(test)
            print(stream.getvalue(), file=sys.stderr, flush=True)
            return result

        found = [test for suite in tests for test in suite]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results = list(pool.map(run_alone, found))
        both = unittest.TestResult()
        for result in results:
            both.testsRun += result.testsRun
            both.failures += result.failures
            both.errors += result.errors
        return both
