#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""train_gpt --same-bits keeps its bits through deaths and resumes.

Kills: --elastic on 3 ranks, where a rank dies by SIGKILL in the middle of the run, with and without
a process that joins in its place. Resumes: a run saves on one number of ranks and goes on on
another. Each has the log and the final hash of the masters of one rank that runs through.

    KILLS=n      how many ranks die in the middle of a run; default 1
    RESUMES=n    how many resumes; default 1
    SEED=n       of ranks, times and numbers of ranks; random by default, and printed
    LAST=time    seconds since 1970 after which no run begins

Each shard of a test has its part of them.
"""

import collections
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM = os.environ.get("TRAIN_GPT", "examples/train_gpt/train_gpt")
COMPARE = "examples/compare_logs.py"
MODEL = ("--data examples --validate-every 1000 --validation-sequences 4 --sample-bytes 0 --layers 1 --width 32"
         " --heads 2 --context 16 --batch 12 --same-bits --micro-batches 12 --dropout 0.2 --max-norm 0.5"
         " --threads 1").split()
KINDS = {
    "AdamW": [],
    "AdamW in bfloat16, stage 1": ["--dtype", "bfloat16", "--stage", "1"],
    "Lion with moments in int8": ["--optimizer", "lion", "--moments", "int8"],
    "Muon in bfloat16 with moments in int8": ["--optimizer", "muon", "--dtype", "bfloat16", "--moments", "int8"],
}
STEPS, REPLACED_STEPS, RESUMED_STEPS = 90, 300, 30
SHARD, SHARDS = int(os.environ.get("TEST_SHARD_INDEX", 0)), int(os.environ.get("TEST_TOTAL_SHARDS", 1))


def part(name):
    """How many of all are those of this shard."""
    whole = int(os.environ.get(name, 1))
    return whole * (SHARD + 1) // SHARDS - whole * SHARD // SHARDS


KILLS, RESUMES = part("KILLS"), part("RESUMES")
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6))) + SHARD
LAST = float(os.environ.get("LAST", "inf"))
ENVIRONMENT = {**os.environ, "ZERO_TIMEOUT": "60s", "OMP_NUM_THREADS": "1"}

work = pathlib.Path(tempfile.mkdtemp(prefix="faults.", dir=os.environ.get("TEST_TMPDIR")))
numbers = random.Random(SEED)
wholes = {}
problems = []


def start(name, *options):
    """Starts a run with a log and an output of this name."""
    for end in ("jsonl", "out"):
        (work / f"{name}.{end}").unlink(missing_ok=True)
    with open(work / f"{name}.out", "w", encoding="utf-8") as out:
        return subprocess.Popen([PROGRAM, *MODEL, "--log", work / f"{name}.jsonl", *map(str, options)],
                                stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT)


def wait(run):
    """The exit status of a run, which ends by itself."""
    try:
        return run.wait(timeout=240)
    except subprocess.TimeoutExpired:
        run.terminate()
        run.wait()
        return "it did not end"


def text(name, end="out"):
    file = work / f"{name}.{end}"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def final_hash(name):
    found = re.search(r"^hash of the masters: ([0-9a-f]{32})$", text(name), re.MULTILINE)
    return found and found.group(1)


def whole(kind, steps):
    """The name of a run on one rank that lost none."""
    name = f"whole-{list(KINDS).index(kind)}-{steps}"
    if name not in wholes:
        status = wait(start(name, *KINDS[kind], "--nproc", 1, "--steps", steps))
        if status != 0:
            sys.exit(f"one rank, {kind}: {status}\n{text(name)}")
        wholes[name] = final_hash(name)
        print(f"{kind}, {steps} steps on 1 rank: {wholes[name]}", flush=True)
    return name


def check(name, status, expected):
    """What is wrong with a run, or nothing."""
    if status != 0:
        return f"exit status {status}"
    if final_hash(name) != wholes[expected]:
        return f"hash {final_hash(name)} in place of {wholes[expected]}"
    said = subprocess.run([sys.executable, COMPARE, work / f"{expected}.jsonl", work / f"{name}.jsonl"],
                          capture_output=True, text=True, check=False)
    return None if said.returncode == 0 else said.stdout + said.stderr


def children(run):
    found = []
    for task in pathlib.Path(f"/proc/{run.pid}/task").glob("*/children"):
        found += map(int, task.read_text(encoding="utf-8").split())
    return found


def kill(kind, replaced):
    """One death. Returns what is counted, and what is wrong."""
    steps = REPLACED_STEPS if replaced else STEPS
    expected = whole(kind, steps)
    every = numbers.randint(1, 4)
    rank, step = numbers.randrange(3), numbers.randint(every + 1, (steps - 10) // (3 if replaced else 1))
    delay = numbers.random() * 0.02
    name = "killed"
    run = start(name, *KINDS[kind], "--steps", steps, "--nproc", 3, "--elastic", "--protect-every", every,
                *(["--replacements", 1] if replaced else []))
    while run.poll() is None and text(name, "jsonl").count("\n") <= step:
        time.sleep(0.005)
    time.sleep(delay)
    ranks = children(run) if run.poll() is None else []
    if len(ranks) == 3:
        os.kill(ranks[rank], signal.SIGKILL)
    status = wait(run)
    wrong = check(name, status, expected)
    if wrong:
        wrong = (f"{kind}, rank {rank} of 3 killed after step {step} and {1000 * delay:.1f} ms, --protect-every {every}"
                 f"{', --replacements 1' if replaced else ''}: {wrong}\n{text(name)}")
    went_on = re.findall(r"^went on with (\d) ranks after step", text(name), re.MULTILINE)
    if not went_on:
        return "late", wrong
    return ("replaced" if "3" in went_on else "fewer"), wrong


def resume(kind):
    expected = whole(kind, RESUMED_STEPS)
    before, after = numbers.sample(range(1, 5), 2)
    step = numbers.randint(1, RESUMED_STEPS - 1)
    folder = work / f"checkpoints-{step}-{before}-{after}-{numbers.randrange(10**9)}"
    name = "resumed"
    options = [*KINDS[kind], "--checkpoints", folder]
    said = f"{kind}, saved after step {step} on {before} and resumed on {after}"
    # What a job leaves that ends after this step: later checkpoints are removed. Its schedule is that of all steps.
    status = wait(start("saved", *options, "--nproc", before, "--steps", RESUMED_STEPS, "--save-every", step,
                        "--keep", RESUMED_STEPS))
    if status != 0:
        return said, f"{said}: exit status {status}\n{text('saved')}"
    for checkpoint in folder.glob("step-*"):
        if checkpoint.name != f"step-{step}":
            subprocess.run(["rm", "-r", checkpoint], check=True)
    wrong = check(name, wait(start(name, *options, "--nproc", after, "--steps", RESUMED_STEPS, "--resume")), expected)
    if not wrong and f"resumed after step {step}\n" not in text(name):
        wrong = "it did not resume"
    return said, wrong and f"{said}: {wrong}\n{text(name)}"


def main():
    if "TEST_SHARD_STATUS_FILE" in os.environ:
        pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
    print(f"SEED={SEED}", flush=True)
    counts = collections.Counter()
    tries = 0
    for i in range(RESUMES):
        if time.time() > LAST:
            break
        said, wrong = resume(numbers.choice(list(KINDS)))
        counts["resumes"] += 1
        print(f"{said}: {'DIFFERS' if wrong else 'equal'}", flush=True)
        problems.extend(filter(None, [wrong]))
    while counts["fewer"] + counts["replaced"] < KILLS and tries < 2 * KILLS + 10 and time.time() < LAST:
        # Each fifth run has a process that joins.
        kind, replaced = list(KINDS)[(SEED + tries) % len(KINDS)], tries % 5 == 3
        tries += 1
        result, wrong = kill(kind, replaced)
        counts[result] += 1
        problems.extend(filter(None, [wrong]))
        if wrong:
            print(f"DIFFERS: {wrong}", flush=True)
        if tries % 10 == 0:
            print(f"{tries} runs: {dict(counts)}, {len(problems)} differ", flush=True)
    done = counts["fewer"] + counts["replaced"]
    print(f"{done} kills in the middle of a run, {counts['replaced']} of them with a process that joined; "
          f"{counts['late']} others were late; {counts['resumes']} resumes; {len(problems)} runs differ")
    if problems or (done < KILLS and LAST == float("inf")):
        print("FAILED", *problems, sep="\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
