#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""How far Adam's moments are from fp32 ones after some thousand steps, in several formats.

  pip install torch numpy bitsandbytes
  python3 examples/benchmark/compare_moments.py

Each format stores both moments after each step, of the same gradients. "zero" is Moments::kInt8, by
the formulas of kernels/stored_state.h and of its noise; "nearest" is the same rounded to nearest;
"bitsandbytes" are its dynamic codes in blocks of 256, by its own functions for the CPU; "bf16" is
Moments::kBFloat16. Prints relative errors: of exp_avg, of exp_avg_sq, of the update
exp_avg / (sqrt(exp_avg_sq) + eps), each of its root mean square; and the sum of exp_avg_sq beside
that of fp32.
"""

import torch

BLOCKS, BLOCK, EPS = 64, 256, 1e-8


def noise(step, second_moment):
    """In [0, 1), spread evenly over a block and over 16 steps: kernels/detail/state_noise.h."""
    generator = torch.Generator().manual_seed(step // 16 * 2 + second_moment)
    multiples = (torch.arange(BLOCK) + step % 16) * (0x9e37 / 65536)
    return (torch.rand(BLOCKS, 1, generator=generator) + multiples) % 1


def rounded_codes(values, top, second_moment, u):
    """Averages, or roots of second moments, as kInt8 stores them."""
    squares = float(top * top)
    largest = values.abs().amax(1, keepdim=True)
    t = values.abs() * torch.where(largest > 2**-100, squares / largest, 0.0)
    q = t.sqrt().floor()
    q = q + ((t - q * q) > u * (2 * q + 1))
    q = torch.where(values.abs() == largest, float(top), q).clamp(max=top)
    if second_moment:
        q = torch.where(values > 0, q.clamp(min=1), q)
    return torch.sign(values) * ((q * q) / squares) * largest


def rounded_bf16(values, u):
    return ((values.view(torch.int32) + (u * 65536).int()) & -65536).view(torch.float32)


def in_codes(nearest):
    def store(step, m, v):
        u = [0.5, 0.5] if nearest else [noise(step, False), noise(step, True)]
        return (rounded_codes(m, 127, False, u[0]), rounded_codes(v.sqrt(), 255, True, u[1])**2)
    return store


def of_bitsandbytes():
    from bitsandbytes import functional
    maps = [functional.create_dynamic_map(True), functional.create_dynamic_map(False)]

    def store(_, *moments):
        stored = []
        for values, code in zip(moments, maps):
            codes, state = functional.quantize_blockwise(values.flatten(), code=code,
                                                         blocksize=BLOCK)
            stored.append(functional.dequantize_blockwise(codes, state).view_as(values))
        return stored
    return store


def run(store, gradient, beta2, steps):
    m, v = torch.zeros(BLOCKS, BLOCK), torch.zeros(BLOCKS, BLOCK)
    for step in range(steps):
        g = gradient(step)
        m, v = store(step, 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g)
    return m, v


def relative(a, b):
    return ((a - b).square().sum() / b.square().sum()).sqrt().item()


def gradients(spread, falls):
    """Noise around a mean; sizes within a block differ by factors of about exp(spread)."""
    scale = torch.exp(spread * torch.randn(BLOCKS, BLOCK))
    mean = 0.2 * torch.randn(BLOCKS, BLOCK)
    smaller = torch.where(torch.arange(BLOCK) % 2 == 0, 0.1, 1.0)

    def gradient(step):
        noise = torch.randn(BLOCKS, BLOCK, generator=torch.Generator().manual_seed(step))
        return scale * (mean + noise) * (smaller if falls and step > 1500 else 1.0)
    return gradient


def main():
    torch.manual_seed(0)
    formats = {"zero": in_codes(False), "nearest": in_codes(True),
               "bitsandbytes": of_bitsandbytes(),
               "bf16": lambda step, m, v: (rounded_bf16(m, noise(step, False)),
                                           rounded_bf16(v, noise(step, True)))}
    print("gradients of a block    beta2  format          exp_avg  exp_avg_sq  update  sum")
    for name, spread, falls, steps in [("about as large", 0.3, False, 3000),
                                       ("of many sizes", 1.5, False, 3000),
                                       ("half fall to a tenth", 1.0, True, 4000)]:
        for beta2 in (0.95, 0.999):
            gradient = gradients(spread, falls)
            m, v = run(lambda _, m, v: (m, v), gradient, beta2, steps)
            for label, store in formats.items():
                m2, v2 = run(store, gradient, beta2, steps)
                update = relative(m2 / (v2.sqrt() + EPS), m / (v.sqrt() + EPS))
                print(f"{name:22}  {beta2:<5}  {label:14}  {relative(m2, m):7.3f}  "
                      f"{relative(v2, v):10.3f}  {update:6.3f}  {(v2.sum() / v.sum()).item():.3f}",
                      flush=True)


if __name__ == "__main__":
    main()
