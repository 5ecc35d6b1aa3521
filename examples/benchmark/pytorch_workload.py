# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The models and data of the benchmark in Python: the same numbers as examples/benchmark/workload.cc.

Needs torch and nothing else.
"""

import torch
import torch.nn.functional as F
from torch import nn

MICRO_BATCHES = {"mlp25m": 1, "mlp25m_accum4": 4, "gpt10m": 1, "gpt10m_bf16": 1,
                 "gpt10m_muon": 1, "gpt350m_bf16": 1}

_MASK = 0xFFFFFFFF
_CHUNK = 1 << 16  # small temporaries, so that building the model does not show as peak memory
_GPU_CHUNK = 1 << 24


def _hash32(x):
    # int64 products wrap, and their low 32 bits are those of uint32 products.
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _raw(stream, begin, end):
    key = _hash32(torch.tensor((stream * 0x9E3779B9 + 0x85EBCA6B) & _MASK))
    return _hash32(torch.arange(begin, end) ^ key)


def values(stream, numel, dtype=torch.float32):
    """val(stream, 0..numel) in [-1, 1), exact in fp32, on torch's default device."""
    out = torch.empty(numel, dtype=dtype)
    chunk = _CHUNK if out.device.type == "cpu" else _GPU_CHUNK
    for begin in range(0, numel, chunk):
        end = min(begin + chunk, numel)
        out[begin:end] = (_raw(stream, begin, end) >> 8).to(torch.float32) * 2.0**-23 - 1.0
    return out


def filled(shape, stream, scale):
    """A tensor whose element i is scale * val(stream, i), rounded once to fp32."""
    numel = torch.Size(shape).numel()
    return values(stream, numel).mul_(torch.tensor(scale, dtype=torch.float32)).view(shape)


def input_stream(rank, micro):
    return 100000 + 64 * rank + micro


def target_stream(rank, micro):
    return 200000 + 64 * rank + micro


class Mlp(nn.Module):
    """24 layers of 1024 x 1024 with ReLU between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, 1024, 1024) for _ in range(24))
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                layer.weight.copy_(filled((1024, 1024), 2 * i, (6.0 / 1024) ** 0.5))
                layer.bias.copy_(filled((1024,), 2 * i + 1, 0.01))

    def blocks(self):
        """What is worth sharding by itself, for systems that shard modules."""
        return list(self.layers)

    def make_data(self, rank, micro):
        x = filled((8, 1024), input_stream(rank, micro), 1.0)
        return x, filled((8, 1024), target_stream(rank, micro), 0.5)

    def forward(self, x, target):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.mse_loss(self.layers[-1](x), target)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, h):
        batch, time, width = h.shape
        split = [
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(h)).split(width, dim=2)
        ]
        o = F.scaled_dot_product_attention(*split, is_causal=True)
        h = h + self.proj(o.transpose(1, 2).reshape(batch, time, width))
        return h + self.out(F.gelu(self.fc(self.ln2(h))))


class Gpt(nn.Module):
    """Pre-norm blocks with an untied head; by default six of width 384, over bytes."""

    def __init__(self, width=384, blocks=6, heads=6, time=128, vocabulary=256, sequences=2):
        super().__init__()
        self.time, self.vocabulary, self.sequences = time, vocabulary, sequences
        self.wte = nn.Parameter(torch.empty(vocabulary, width))
        self.wpe = nn.Parameter(torch.empty(time, width))
        self.block = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.lnf = nn.LayerNorm(width)
        self.head = nn.Parameter(torch.empty(vocabulary, width))
        wide, narrow = 0.02 * 3**0.5, 0.02 * 3**0.5 / (2 * blocks)**0.5
        with torch.no_grad():
            for t, (name, p) in enumerate(numbered(self)):
                if p.dim() == 1:
                    p.fill_(1.0 if ".ln" in "." + name and name.endswith("weight") else 0.0)
                else:
                    residual = name.endswith(("proj.weight", "out.weight"))
                    p.copy_(filled(p.shape, t, narrow if residual else wide))

    def blocks(self):
        return list(self.block)

    def make_data(self, rank, micro):
        shape = (self.sequences, self.time + 1)
        numbers = _raw(input_stream(rank, micro), 0, shape[0] * shape[1])
        tokens = (numbers % self.vocabulary).view(shape)
        return tokens[:, :-1], tokens[:, 1:]

    def forward(self, tokens, labels):
        h = F.embedding(tokens, self.wte) + self.wpe
        for block in self.block:
            h = block(h)
        logits = (self.lnf(h) @ self.head.t()).float()
        return F.cross_entropy(logits.reshape(-1, self.vocabulary), labels.reshape(-1))


def numbered(model):
    """(name, parameter) in the order in which the definition numbers them."""
    named = list(model.named_parameters())
    if not hasattr(model, "wte"):
        return named
    # torch lists a module's own parameters first; the head is the last one here.
    head = [item for item in named if item[0] == "head"]
    return [item for item in named if item[0] != "head"] + head


def hidden_matrices(model):
    """The matrices of a GPT's blocks."""
    return [p for block in model.blocks() for p in block.parameters() if p.dim() == 2]


def make_model(workload):
    """The model, on torch's default device."""
    if workload.startswith("gpt350m"):
        return Gpt(width=1024, blocks=24, heads=16, time=1024, vocabulary=24576, sequences=8)
    return Gpt() if workload.startswith("gpt") else Mlp()


def checksums(parameters):
    """L2 norm over all numbered parameters, and their dot product with fixed values, in fp64."""
    square = dot = 0.0
    for t, p in enumerate(parameters):
        flat = p.detach().double().flatten()
        square += float(flat @ flat)
        with p.device:
            dot += float(flat @ values(900000 + t, flat.numel(), torch.float64))
    return square**0.5, dot
