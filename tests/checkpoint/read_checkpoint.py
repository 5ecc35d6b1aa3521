# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint and its exported model as a Python user would.

read_checkpoint.py <folder> <exported file> <sum of all parameters>

Writes <exported file>.python: a torch.nn.Module's state_dict() after it has
loaded the exported model.
"""

import glob
import json
import sys

import safetensors.torch
import torch

folder, model_file, expected_sum = sys.argv[1], sys.argv[2], float(sys.argv[3])
with open(folder + "/manifest.json") as file:
    manifest = json.load(file)

# Master pieces, put together by their ranges, are the exported model.
pieces = {}
for path in glob.glob(folder + "/rank-*.safetensors"):
    pieces.update(safetensors.torch.load_file(path))
exported = safetensors.torch.load_file(model_file)
for p in manifest["parameters"]:
    numel = torch.Size(p["shape"]).numel()
    flat = torch.full((numel,), float("nan"))
    for t in manifest["tensors"]:
        if t["of"] == p["name"] and "master" in t["kinds"]:
            for begin, numel in zip(t["pieces"][1::3], t["pieces"][2::3]):
                end = begin + numel
                flat[begin:end] = pieces[f"{p['name']}[{begin}:{end}].master"]
    full = flat.as_strided(p["shape"], p["strides"]).to(exported[p["name"]].dtype)
    assert torch.equal(full, exported[p["name"]]), p["name"]

names = [p["name"] for p in manifest["parameters"] + manifest["frozen"]]
total = sum(exported[name].double().sum().item() for name in names)
assert abs(total - expected_sum) < 1e-4, (total, expected_sum)



# And a module of the same names takes it, and gives back the same file.
class OddModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(17, 23)
        self.left = torch.nn.Linear(23, 11)
        self.right = torch.nn.Linear(23, 11)
        self.never = torch.nn.Linear(5, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.empty = torch.nn.Parameter(torch.zeros(0))
        self.last = torch.nn.Parameter(torch.zeros(1, 11, 1, 2))
        self.frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
        self.register_buffer("counter", torch.zeros(1))


model = OddModel().to(exported["trunk.weight"].dtype)
model.load_state_dict(exported, strict=True)
for name, tensor in model.state_dict().items():
    assert tensor.dtype == exported[name].dtype and torch.equal(tensor, exported[name]), name
safetensors.torch.save_file(model.state_dict(), model_file + ".python")
print("python read", len(pieces), "pieces and", len(exported), "tensors")
