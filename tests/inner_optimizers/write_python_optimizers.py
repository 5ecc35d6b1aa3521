# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Writes what torch.optim.Muon and torch.optim.Adafactor of Python compute.

    python tests/inner_optimizers/write_python_optimizers.py tests/inner_optimizers/python_optimizers.json

tests/inner_optimizers/python_optimizers_test.cc repeats every case in C++. A case is a parameter, its options
and its steps; the file has samples of the parameter and of its state. Start values and gradients
are hashes of their index, which both languages compute exactly.
"""

import json
import sys
import warnings

warnings.filterwarnings("ignore")  # of a torch without numpy

import torch  # noqa: E402

STEPS = 8
SAMPLES = 40
DTYPES = {"float": torch.float32, "bfloat16": torch.bfloat16, "double": torch.float64}


def hashed(shape, seed):
    """Uniform in [-1, 1) in fp32: a hash of seed and index, as in the test."""
    numel = 1
    for size in shape:
        numel *= size
    x = torch.arange(numel, dtype=torch.int64) + seed * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    x = (x ^ x >> 16) >> 8
    return (x.to(torch.float32) * 2.0**-23 - 1.0).reshape(shape)


def samples(tensor):
    flat = tensor.detach().to(torch.float64).flatten()
    step = max(1, flat.numel() // SAMPLES)
    return [float("%.9g" % value) for value in flat[::step].tolist()]


def run(optimizer, shape, dtype, options):
    p = torch.nn.Parameter(hashed(shape, 1).to(DTYPES[dtype]))
    made = getattr(torch.optim, optimizer)([p], **options)
    case = {"optimizer": optimizer, "shape": shape, "dtype": dtype, "options": options}
    case["parameter"] = {}
    for step in range(1, STEPS + 1):
        if step != 3:  # without a gradient, the optimizer leaves the parameter out
            p.grad = hashed(shape, 10 + step).to(DTYPES[dtype])
        else:
            p.grad = None
        made.step()
        if step in (1, STEPS):
            case["parameter"][str(step)] = samples(p)
    case["state"] = {n: samples(t) for n, t in made.state[p].items() if torch.is_tensor(t)}
    return case


MATRICES = ([48, 20], [20, 48], [32, 32], [1, 7], [7, 1], [1, 1], [128, 300], [260, 270])
MUON = (
    {},
    {"lr": 0.02, "momentum": 0.0, "weight_decay": 0.0},
    {"lr": 0.02, "nesterov": False, "ns_steps": 3},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "eps": 1e-3},
    {"lr": 0.02, "ns_coefficients": [2.0, -1.5, 0.5], "ns_steps": 8, "adjust_lr_fn": "original"},
)
SHAPES = ([], [1], [37], [48, 20], [20, 48], [16, 16], [3, 5, 7], [2, 3, 4, 5], [1, 9], [9, 1])
ADAFACTOR = (
    {},
    {"lr": 0.1, "weight_decay": 0.125, "maximize": True},
    {"lr": 1.0, "beta2_decay": -0.5, "eps": [0.5, 0.8], "d": 2.0},
)


def main(path):
    cases = []
    for options in MUON:
        for shape in MATRICES:
            cases.append(run("Muon", shape, "float", {"lr": 1e-3, **options}))
    cases.append(run("Muon", [48, 20], "bfloat16", {"lr": 0.2}))
    cases.append(run("Muon", [20, 48], "double", {"lr": 0.02}))
    for options in ADAFACTOR:
        for shape in SHAPES:
            cases.append(run("Adafactor", shape, "float", {"lr": 1e-2, **options}))
    for dtype in ("bfloat16", "double"):
        for shape in ([37], [20, 48]):
            cases.append(run("Adafactor", shape, dtype, {"lr": 0.2, "weight_decay": 0.125}))
    with open(path, "w", encoding="ascii") as file:
        file.write('{"torch": "%s", "steps": %d, "cases": [\n' % (torch.__version__, STEPS))
        file.write(",\n".join(json.dumps(case) for case in cases))
        file.write("\n]}\n")


if __name__ == "__main__":
    main(sys.argv[1])
