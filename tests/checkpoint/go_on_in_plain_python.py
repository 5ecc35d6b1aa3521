# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Goes on with an exported run where Python has no torch, by the functions of docs/checkpoints.md.

go_on_in_plain_python.py <folder> <state>

The files are those of go_on_in_python.py. What stands in for safetensors reads and writes files by
their format, and what stands in for torch has the names, types and formulas of torch.optim.
"""

import array
import json
import math
import re
import struct
import sys
import types
from pathlib import Path

SHAPES = {"trunk.weight": (23, 17), "trunk.bias": (23,), "left.weight": (11, 23), "left.bias": (11,),
          "right.weight": (11, 23), "right.bias": (11,), "never.weight": (3, 5), "never.bias": (3,),
          "scale": (1,), "empty": (0,), "last": (1, 11, 1, 2), "frozen": (7,), "counter": (1,)}


class Tensor:
    def __init__(self, dtype, shape, values):
        assert dtype == "F32"
        self.dtype, self.shape, self.values = dtype, tuple(shape), array.array("f", values)
        assert len(self.values) == math.prod(self.shape), (self.shape, len(self.values))

    def contiguous(self):
        return self


class File:
    def __init__(self, path, framework):
        content = Path(path).read_bytes()
        begin = 8 + struct.unpack_from("<Q", content)[0]
        self.header = json.loads(content[8:begin])
        self.about = self.header.pop("__metadata__", {})
        self.data = content[begin:]
        end = 0
        for entry in sorted(self.header.values(), key=lambda entry: entry["data_offsets"]):
            assert entry["data_offsets"][0] == end, "expected bytes without holes"
            end = entry["data_offsets"][1]
        assert end == len(self.data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def metadata(self):
        return self.about

    def keys(self):
        return self.header.keys()

    def get_tensor(self, key):
        entry = self.header[key]
        begin, end = entry["data_offsets"]
        return Tensor(entry["dtype"], entry["shape"], array.array("f", self.data[begin:end]))


def load_file(path):
    with File(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def save_file(tensors, path, metadata=None):
    header, data = {"__metadata__": metadata or {}}, b""
    for key, tensor in tensors.items():
        begin, data = len(data), data + tensor.values.tobytes()
        header[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


class Optimizer:
    def __init__(self, groups):
        self.param_groups = [{**self.OPTIONS, "params": params} for params in groups]
        self.state = {}

    def parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self):
        number = {parameter: n for n, parameter in enumerate(self.parameters())}
        return {"state": {}, "param_groups": [{**group, "params": [number[p] for p in group["params"]]}
                                              for group in self.param_groups]}

    def load_state_dict(self, new):
        parameters = self.parameters()
        self.state = {parameters[n]: state for n, state in new["state"].items()}
        for group, options in zip(self.param_groups, new["param_groups"], strict=True):
            for name, value in self.OPTIONS.items():
                assert type(options[name]) is type(value), (name, options[name])
                group[name] = options[name]

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = {kind: tensor.values for kind, tensor in self.state[parameter].items()}
                assert state.keys() == self.STATE, state.keys()
                if "step" in state:
                    state["step"][0] += 1
                for i, gradient in enumerate(parameter.grad.values):
                    self.update(types.SimpleNamespace(**group), state, parameter.values, i, gradient)


class SGD(Optimizer):
    OPTIONS = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    STATE = {"momentum_buffer"}

    def update(self, o, state, p, i, g):
        buffer = state["momentum_buffer"]
        buffer[i] = o.momentum * buffer[i] + (1 - o.dampening) * (g + o.weight_decay * p[i])
        p[i] -= o.lr * buffer[i]


class AdamW(Optimizer):
    OPTIONS = {"lr": 1.0, "betas": [], "eps": 0.0, "weight_decay": 0.0, "amsgrad": False}
    STATE = {"step", "exp_avg", "exp_avg_sq"}

    def update(self, o, state, p, i, g):
        p[i] *= 1 - o.lr * o.weight_decay
        m, v, (beta1, beta2), step = state["exp_avg"], state["exp_avg_sq"], o.betas, state["step"][0]
        m[i] = beta1 * m[i] + (1 - beta1) * g
        v[i] = beta2 * v[i] + (1 - beta2) * g * g
        p[i] -= o.lr / (1 - beta1**step) * m[i] / (math.sqrt(v[i] / (1 - beta2**step)) + o.eps)


class RMSprop(Optimizer):
    OPTIONS = {"lr": 1.0, "alpha": 0.0, "eps": 0.0, "weight_decay": 0.0, "momentum": 0.0,
               "centered": False}
    STATE = {"step", "square_avg", "momentum_buffer"}

    def update(self, o, state, p, i, g):
        average, buffer = state["square_avg"], state["momentum_buffer"]
        g += o.weight_decay * p[i]
        average[i] = o.alpha * average[i] + (1 - o.alpha) * g * g
        buffer[i] = o.momentum * buffer[i] + g / (math.sqrt(average[i]) + o.eps)
        p[i] -= o.lr * buffer[i]


class Adagrad(Optimizer):
    OPTIONS = {"lr": 1.0, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 0.0,
               "initial_accumulator_value": 0.0}
    STATE = {"step", "sum"}

    def update(self, o, state, p, i, g):
        g += o.weight_decay * p[i]
        state["sum"][i] += g * g
        rate = o.lr / (1 + (state["step"][0] - 1) * o.lr_decay)
        p[i] -= rate * g / (math.sqrt(state["sum"][i]) + o.eps)


safetensors, torch = types.ModuleType("safetensors"), types.ModuleType("torch")
safetensors.torch = types.ModuleType("safetensors.torch")
safetensors.safe_open = File
safetensors.torch.save_file = save_file
torch.as_tensor = lambda tensor: tensor
sys.modules |= {"safetensors": safetensors, "safetensors.torch": safetensors.torch, "torch": torch}

folder, state = Path(sys.argv[1]), sys.argv[2]
blocks = re.findall(r"^```python\n(.*?)^```", Path("docs/checkpoints.md").read_text(), re.M | re.S)
exec("".join(block for block in blocks if "\ndef " in block))

# What a user opens is the model: its names, shapes and dtype.
tensors = load_file(folder / "model.safetensors")
assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
trained = {name: tensors[name] for name in SHAPES if name not in ("frozen", "counter")}
model = types.SimpleNamespace(named_parameters=trained.items)
first = state
if state.endswith(".json"):
    first = folder / next(iter(json.loads(Path(state).read_text())["weight_map"].values()))
about = File(first, "pt").metadata()
optimizer = globals()[about["optimizer"]]([[p for p in trained.values() if len(p.shape) == 2],
                                           [p for p in trained.values() if len(p.shape) != 2]])
for group in json.loads(about["param_groups"]):
    assert group.keys() == optimizer.OPTIONS.keys() | {"params"}, group.keys()
load_optimizer_state(optimizer, model, state)  # noqa: F821

gradients = load_file(folder / "gradients.safetensors")
for step in range(3):
    for name, parameter in trained.items():
        parameter.grad = gradients.get(f"{step}/{name}")
    optimizer.step()

save_file(tensors, folder / "python_model.safetensors")
save_optimizer_state(optimizer, model, str(folder / "python_state.safetensors"))  # noqa: F821
print("plain Python:", type(optimizer).__name__, "went on with", len(optimizer.state), "states")
