# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Reads an exported model as a user of transformers would, and writes it as transformers does.

read_weights.py <folder>

<folder>/model.safetensors is a Llama of the sizes below, and <folder>/several has it in several
files. Writes it to <folder>/float32 and
<folder>/bfloat16, each an index of several files.
"""

import sys
from pathlib import Path

import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
for place in folder, folder / "several":
    config.save_pretrained(place)
model, found = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    assert not found[kind], (kind, found[kind])
# Versions of transformers before 5 refuse a file that does not say for whom it is.
with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
    assert file.metadata() == {"format": "pt"}, file.metadata()
exported = safetensors.torch.load_file(folder / "model.safetensors")
state = model.state_dict()
assert exported.keys() == state.keys()
for name, tensor in exported.items():
    assert torch.equal(tensor, state[name]), name
for name, tensor in LlamaForCausalLM.from_pretrained(folder / "several").state_dict().items():
    assert torch.equal(tensor, state[name]), name
assert model(torch.arange(8)[None]).logits.isfinite().all()

for dtype in torch.float32, torch.bfloat16:
    written = folder / str(dtype).removeprefix("torch.")
    model.to(dtype).save_pretrained(written, max_shard_size="4KB")
    assert (written / "model.safetensors.index.json").exists()
print("transformers read", len(exported), "tensors")
