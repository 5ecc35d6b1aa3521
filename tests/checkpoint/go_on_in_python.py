# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Goes on with an exported run in plain torch, by the functions of docs/checkpoints.md.

go_on_in_python.py <folder> <state> [like libtorch]

<folder>/model.safetensors and <state> are the run, and <folder>/gradients.safetensors has the
gradients "<step>/<parameter>". Writes python_model.safetensors and python_state.safetensors. With a third
argument, averages are made as libtorch makes them, which rounds twice.
"""

import json
import re
import sys
from pathlib import Path

import safetensors.torch
import torch

folder, state = Path(sys.argv[1]), sys.argv[2]
blocks = re.findall(r"^```python\n(.*?)^```", Path("docs/checkpoints.md").read_text(), re.M | re.S)
exec("".join(block for block in blocks if "\ndef " in block))

if len(sys.argv) > 3:
    torch.Tensor.lerp_ = lambda self, end, weight: self.mul_(1 - weight).add_(end, alpha=weight)

# What a user opens is the model: its names and its shapes.
exported = safetensors.torch.load_file(folder / "model.safetensors")
shapes = {"trunk.weight": (23, 17), "trunk.bias": (23,), "left.weight": (11, 23), "left.bias": (11,),
          "right.weight": (11, 23), "right.bias": (11,), "never.weight": (3, 5), "never.bias": (3,),
          "scale": (1,), "empty": (0,), "last": (1, 11, 1, 2), "frozen": (7,), "counter": (1,)}
assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == shapes


class OddModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(17, 23)
        self.left = torch.nn.Linear(23, 11)
        self.right = torch.nn.Linear(23, 11)
        self.never = torch.nn.Linear(5, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.empty = torch.nn.Parameter(torch.zeros(0))
        self.last = torch.nn.Parameter(torch.zeros(1, 11, 1, 2).contiguous(memory_format=torch.channels_last))
        self.frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
        self.register_buffer("counter", torch.zeros(1, dtype=torch.long))


model = OddModel()
model.load_state_dict(exported)
first = state
if state.endswith(".json"):
    with open(state) as index:
        first = folder / next(iter(json.load(index)["weight_map"].values()))
with safetensors.safe_open(first, "pt") as file:
    optimizer_class = getattr(torch.optim, file.metadata()["optimizer"])
parameters = list(model.parameters())
optimizer = optimizer_class([{"params": [p for p in parameters if p.dim() == 2]},
                             {"params": [p for p in parameters if p.dim() != 2]}],
                            lr=1.0, foreach=False)  # none of the options of the file
load_optimizer_state(optimizer, model, state)

gradients = safetensors.torch.load_file(folder / "gradients.safetensors")
for step in range(3):
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(f"{step}/{name}")
    optimizer.step()

contiguous = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
safetensors.torch.save_file(contiguous, folder / "python_model.safetensors")
save_optimizer_state(optimizer, model, str(folder / "python_state.safetensors"))
print("torch", torch.__version__ + ":", optimizer_class.__name__, "went on with", len(optimizer.state), "states")
