#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Usage: compare_logs.py <log> <log>

Compares the bits of two runs by what train_gpt --same-bits --log FILE wrote in the steps that both
logs have: a hash of each master in some of them, loss and gradient norm in all. Prints in how many
steps the runs are equal, or how many masters differ in the first step whose hashes differ, and since
when a loss or a norm differs. Those masters may differ since any step behind the last one whose
hashes are equal, which is printed too.

The exit code is 0 when the runs are equal, 1 when they differ, and 2 when they cannot be compared.
"""

import json
import sys

NUMBERS = ("loss", "gradient_norm", "validation_loss", "ema_validation_loss")


def steps_of(path):
    """{step: its entry}; the last entry of a step that was made again after a recovery."""
    steps = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if "step" in entry:
                steps[entry["step"]] = entry
    return steps


def compare(a, b):
    """What to print, and the exit code."""
    steps = sorted(a.keys() & b.keys())
    hashed = [step for step in steps if "masters" in a[step] and "masters" in b[step]]
    if not hashed:
        return "expected hashes of masters in a step of both logs, got none; train with --same-bits", 2
    masters = {step: (a[step]["masters"], b[step]["masters"]) for step in hashed}
    differ = {step: [name for name in {**x, **y} if x.get(name) != y.get(name)]
              for step, (x, y) in masters.items()}
    first = next((step for step in hashed if differ[step]), None)
    number = next(((step, name) for step in steps for name in NUMBERS
                   if name in a[step] and name in b[step] and a[step][name] != b[step][name]), None)
    since = f"{number[1]} differs since step {number[0]}" if number else ""
    if first is None:
        if number:
            return f"{since}; all hashes of masters are equal", 1
        return f"equal in {len(steps)} steps, of which {len(hashed)} have hashes of masters", 0
    equal = [step for step in hashed if step < first]
    names = {**masters[first][0], **masters[first][1]}
    text = (f"{len(differ[first])} of {len(names)} masters differ in step {first},"
            f" the first in the model is {differ[first][0]}; "
            + (f"all are equal in step {equal[-1]}" if equal else "no step before it has hashes"))
    return text + (f"; {since}" if since else ""), 1


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        text, code = compare(*map(steps_of, sys.argv[1:]))
    except (OSError, ValueError, TypeError) as error:
        text, code = str(error), 2
    print(text if code < 2 else f"compare_logs: {text}", file=sys.stderr if code == 2 else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
