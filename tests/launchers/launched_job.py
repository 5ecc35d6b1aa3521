# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""A small train_gpt under a launcher: its ranks, its output, and what it has logged."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
from pathlib import Path

PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT", "examples/train_gpt/train_gpt"))
TEXT = os.path.abspath("examples/train_gpt")
RANKS = 2
MARK = "ZERO_LAUNCHED_JOB"
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LONG = 1_000_000  # steps of a job that ends by a signal


def skip(reason):
    """Ends this program, with success and a sentence, where a launcher is missing."""
    assert os.access(PROGRAM, os.X_OK), f"cannot run {PROGRAM}"
    print("skipped:", reason)
    sys.exit(0)


def run_cases_at_once(suite):
    """unittest.main() for cases that wait most of their time: each in a process of its own, forked
    from this one, all of them at once. What they print comes case by case."""
    cases = unittest.TestLoader().getTestCaseNames(suite)
    if len(sys.argv) > 1:
        unittest.main(verbosity=2)
    folder = new_folder()
    sys.stdout.flush()
    processes = []
    for case in cases:
        process = os.fork()
        if process == 0:
            with open(folder / case, "w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            unittest.main(argv=[sys.argv[0], f"{suite.__name__}.{case}"], verbosity=2)
        processes.append(process)
    codes = [os.waitpid(process, 0)[1] for process in processes]
    for case in cases:
        print((folder / case).read_text(errors="replace"), flush=True)
    sys.exit(1 if any(codes) or not cases else 0)


def new_folder():
    return Path(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))


def trainer(folder, steps, *options, save_every=LONG):
    """The command line of a rank, which saves to `folder`."""
    return [PROGRAM, "--data", TEXT, "--steps", str(steps), "--layers", "1", "--width", "32",
            "--context", "32", "--batch", "12", "--sample-bytes", "0", "--validate-every",
            str(LONG), "--validation-sequences", "4", "--checkpoints", str(folder / "saved"),
            "--save-every", str(save_every), "--metrics", str(folder / "metrics"), *options]


def steps_of(folder, first_step=0):
    """The steps logged by a run that began at `first_step`, a dictionary each."""
    path = folder / "metrics" / f"steps-{first_step}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if "step" in entry]


def bits_of(steps):
    """Step, loss and norm, which JSON has with all digits."""
    return [(entry["step"], entry["loss"], entry["gradient_norm"]) for entry in steps]


def saved_in(folder):
    return sorted(int(path.parent.name.removeprefix("step-"))
                  for path in (folder / "saved").glob("step-*/manifest.json"))


class Job:
    """A launcher and the ranks it starts, in a process group of its own."""

    def __init__(self, command, folder, environment=None, name="job"):
        self.output = folder / f"{name}.out"
        self.mark = uuid.uuid4().hex
        environment = dict(environment or os.environ, OMP_NUM_THREADS="1", ZERO_TIMEOUT="2min")
        environment[MARK] = self.mark
        # A shell may have made this process ignore SIGINT, and launchers would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(self.output, "w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out,
                                            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                            start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pid in self.processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def text(self):
        return self.output.read_text(errors="replace")

    def processes(self):
        """The living ranks: rank to process."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, StopIteration):
                pid = int(entry.name)
                variables = dict(variable.split("=", 1) for variable in
                                 (entry / "environ").read_text(errors="replace").split("\0")
                                 if "=" in variable)
                program = (entry / "cmdline").read_text(errors="replace").split("\0")[0]
                if variables.get(MARK) == self.mark and program == PROGRAM:
                    found[next(int(variables[v]) for v in RANK_VARIABLES if v in variables)] = pid
        return found

    def wait(self, seconds=150):
        """The exit code of the launcher."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.text()}") from None

    def wait_until(self, condition, what, seconds=150):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"{what}: not within {seconds} s, or the job ended before "
                                     f"({self.process.poll()})\n{self.text()}")
            time.sleep(0.05)

    def wait_for_ranks_to_end(self, seconds=30):
        deadline = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks are left behind: {self.processes()}\n{self.text()}")
            time.sleep(0.05)
