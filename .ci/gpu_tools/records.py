# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Runs steps one after another and keeps what they found in one JSON file.

A step is "passed", "failed", "skipped" or "stopped": cut off because the time of this call was up,
and so run again by the next. The file is written after every step.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

from gpu_tools import machine

_TAIL = 4000  # characters of a step's output that the JSON keeps


@dataclasses.dataclass
class Step:
    """`commands` run in turn, in a folder of their own, until one fails.

    read(output, folder) returns (figures, problem): what was found, and why the step failed after
    all, or "".
    """
    name: str
    what: str
    commands: list
    timeout: int = 300
    read: Callable = lambda output, folder: ({}, "")
    needs: str = ""  # a program of the CUDA toolkit, which every command begins with


def chosen(steps, beginnings):
    """The steps whose names begin with one of `beginnings`; all for none."""
    found = [step for step in steps
             if not beginnings or any(step.name.startswith(text) for text in beginnings)]
    if not found:
        sys.exit(f"no step begins with {' or '.join(beginnings)}; .ci/gpu steps shows them")
    return found


class Record:
    """The JSON file: facts of programs and machine, and a record for each step."""

    def __init__(self, path, pack, machine_facts):
        self.path, self.machine = path, machine_facts
        self.steps = {}
        self.pack = pack
        if path.exists():
            before = json.loads(path.read_text())
            if before["pack"] == pack:
                self.steps = before["steps"]

    @property
    def has_gpu(self):
        # A GPU that torch cannot use is no reason to skip.
        return bool(self.machine["gpu"] or self.machine["driver"])

    def has_passed(self, name):
        return self.steps.get(name, {}).get("status") == "passed"

    def add(self, name, found):
        self.steps[name] = {**found, "gpu": self.machine["gpu"], "date": self.machine["date"],
                            "commit": self.pack["commit"]}
        whole = {"pack": self.pack, "machine": self.machine, "steps": self.steps}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(whole, indent=1) + "\n")
        temporary.replace(self.path)

    def failures(self):
        return [name for name, step in self.steps.items() if step["status"] == "failed"]

    def table(self):
        lines = [f"{name:30} {step['status']:8} {step['seconds']:6.1f} s  {step['reason']}".rstrip()
                 for name, step in self.steps.items()]
        counts = {}
        for step in self.steps.values():
            counts[step["status"]] = counts.get(step["status"], 0) + 1
        return "\n".join([*lines, ", ".join(f"{n} {status}" for status, n in counts.items())])


def merged(paths):
    """One result of several runs, the oldest first, with the programs of the last; of a step that
    several have, the last that was not skipped."""
    whole = {"pack": {}, "machine": {}, "steps": {}}
    for path in paths:
        found = json.loads(Path(path).read_text())
        if not whole["machine"].get("gpu"):
            whole["machine"] = found["machine"]
        for fact in ("gpu", "torch"):
            here, before = found["machine"].get(fact), whole["machine"].get(fact)
            if here and before and here != before:
                sys.exit(f"{path} has {fact} {here}, and the results before it {before}")
        whole["pack"] = found["pack"]
        for name, step in found["steps"].items():
            if step["status"] in ("passed", "failed") or name not in whole["steps"]:
                whole["steps"][name] = step
    return whole


def _without_paths(output):
    """Programs and sources as in the folder of pack, wherever that is on this machine."""
    folder = str(Path(__file__).absolute().parents[2])
    return output.replace(folder + "/", "").replace(sys.executable, "python3")


def _last_line(output):
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else ""
    return "no output" if last.startswith("$ ") else last  # the command itself


def skipped_tests(output):
    """(number of passed tests, of skipped ones, the first reason) of GoogleTest's output."""
    passed = re.search(r"^\[  PASSED  \] (\d+) test", output, re.MULTILINE)
    skipped = re.search(r"^\[  SKIPPED \] (\d+) test", output, re.MULTILINE)
    reason = re.search(r": Skipped\n+(.+)", output)
    return (int(passed.group(1)) if passed else 0, int(skipped.group(1)) if skipped else 0,
            reason.group(1).strip() if reason else "")


class Runner:
    def __init__(self, record, out, environment, minutes=1e9):
        self.record, self.out, self.environment = record, out, environment
        self.end = time.monotonic() + 60 * minutes

    def run(self, steps, again=False):
        for step in steps:
            if self.record.has_passed(step.name) and not again:
                continue
            if time.monotonic() > self.end:
                break
            print(f"=== {step.name}: {step.what}", flush=True)
            found = self.run_step(step)
            print(f"    {found['status']} in {found['seconds']:.1f} s", found["reason"], flush=True)
            self.record.add(step.name, found)

    def run_step(self, step):
        begin = time.monotonic()
        status, reason, figures, output = "skipped", "", {}, ""
        tool = machine.find_tool(step.needs) if step.needs else ""
        if tool is None:
            reason = f"{step.needs} is not here"
        else:
            commands = [[tool, *command] if tool else command for command in step.commands]
            with tempfile.TemporaryDirectory() as folder:
                code, output = self._run_commands(step, commands, folder)
                try:
                    status, reason, figures = self._verdict(step, code, output, folder)
                except Exception as error:  # of a step's reader: the other steps go on
                    status, reason = "failed", f"its output cannot be read: {error!r}"
        with open(self.out / "log.txt", "a") as log:
            log.write(f"=== {step.name}: {status}\n{output}\n")
        return {"status": status, "reason": reason, "seconds": time.monotonic() - begin,
                "figures": figures,
                "tail": "" if status == "passed" else _without_paths(output)[-_TAIL:]}

    def _run_commands(self, step, commands, folder):
        """(exit status, or a text that says why there is none; the output)."""
        output = ""
        left = min(step.timeout, self.end - time.monotonic())
        cut = left < step.timeout
        end = time.monotonic() + left
        for command in commands:
            code, text = self._run_command(command, folder, end - time.monotonic())
            output += f"$ {' '.join(command)}\n{text}\n"
            if code is None:
                return ("stopped" if cut else f"not done after {step.timeout} s"), output
            if code != 0:
                return code, output
        return 0, output

    def _run_command(self, command, folder, seconds):
        """The output goes through a file: a child that outlives its parent blocks no pipe."""
        with open(Path(folder) / "output.txt", "w+", errors="replace") as file:
            try:
                process = subprocess.Popen(command, cwd=folder, env=self.environment, stdout=file,
                                           stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                           start_new_session=True)
            except OSError as error:
                return 127, str(error)
            try:
                code = process.wait(timeout=max(seconds, 0.1))
            except subprocess.TimeoutExpired:
                code = None
            try:
                os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
            except ProcessLookupError:
                pass
            process.wait()
            file.seek(0)
            return code, file.read()

    def _verdict(self, step, code, output, folder):
        """(status, reason, figures)."""
        if code == "stopped":
            return code, "the time of this call was up", {}
        if code != 0:
            if not self.record.has_gpu:
                return "skipped", f"no GPU: {_last_line(output)}", {}
            why = code if isinstance(code, str) else f"exit status {code}: {_last_line(output)}"
            return "failed", why, {}
        passed, skipped, reason = skipped_tests(output)
        if skipped and (passed == 0 or not self.record.has_gpu):
            return "skipped", reason, {}
        nothing = re.search(r"^nothing is measured: (.*)", output, re.MULTILINE)
        if nothing:
            return "skipped", nothing.group(1), {}
        figures, problem = step.read(output, Path(folder))
        if passed:
            figures = {"tests": passed, "skipped": skipped, **figures}
        return ("failed" if problem else "passed"), problem, figures
