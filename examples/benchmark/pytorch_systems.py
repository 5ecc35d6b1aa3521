# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's ways to train data-parallel, behind one interface.

A system has backward(data, parts, last), clip(max_norm), step(), checksums() and extra(). What
backward() and clip() return, the loss and the norm, is not read yet where the model is on a GPU.
Each is set up as its documentation advises for speed. bf16 means bf16 parameters and gradients
with fp32 masters and states.
"""

import contextlib
import importlib.util

import torch
import torch.distributed as dist

import pytorch_workload

ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


class MuonAndAdamW:
    """torch.optim.Muon for the matrices of the blocks, and AdamW for the rest."""

    def __init__(self, model):
        hidden = pytorch_workload.hidden_matrices(model)
        known = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in known]
        self.parts = [torch.optim.Muon(hidden, lr=0.02),
                      torch.optim.AdamW(others, fused=True, **ADAMW)]

    def step(self):
        for part in self.parts:
            part.step()


class Plain:
    """One process, no communication."""

    muon = False  # for workloads that train hidden matrices by Muon

    def __init__(self, model, bf16, no_sync):
        self.model, self.no_sync = model, no_sync
        self.forward = model
        self.parameters = [p for _, p in pytorch_workload.numbered(model)]
        self.updated = self.parameters
        if bf16:
            # No system below keeps masters of bf16 parameters: done by hand, as trainers do.
            self.updated = [p.detach().float().requires_grad_() for p in self.parameters]
        self.optimizer = self.make_optimizer()
        self.norm_fp64 = None

    def make_optimizer(self):
        if self.muon:
            return MuonAndAdamW(self.model)
        return torch.optim.AdamW(self.updated, fused=True, **ADAMW)

    def silent(self):
        """A context in which backward passes send nothing."""
        return contextlib.nullcontext()

    def backward(self, data, parts, last):
        with self.silent() if self.no_sync and not last else contextlib.nullcontext():
            loss = self.forward(*data) / parts
            loss.backward()
        if type(self) is Plain:
            # This process stands for several ranks: a sum of theirs in a bf16 p.grad would be
            # rounded once more than the fp32 sums that it is to check.
            self.move_gradients()
        return loss.detach()

    def move_gradients(self):
        """What 16-bit parameters have in p.grad is added to their masters' gradients."""
        if self.updated is self.parameters:
            return
        for master, p in zip(self.updated, self.parameters):
            if p.grad is not None:
                gradient, p.grad = p.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def clip(self, max_norm):
        self.move_gradients()
        if type(self) is Plain and self.norm_fp64 is None:
            squares = [float(p.grad.double().square().sum()) for p in self.updated]
            self.norm_fp64 = sum(squares) ** 0.5
        return torch.nn.utils.clip_grad_norm_(self.updated, max_norm, foreach=True)

    def step(self):
        self.optimizer.step()
        if self.updated is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.updated)
        for p in (*self.parameters, *self.updated):
            p.grad = None

    def checksums(self):
        return pytorch_workload.checksums(self.parameters)

    def extra(self):
        return {"norm_first_fp64": self.norm_fp64} if self.norm_fp64 is not None else {}


class Ddp(Plain):
    """DistributedDataParallel and fused AdamW: nothing is sharded."""

    def __init__(self, model, bf16, no_sync):
        super().__init__(model, bf16, no_sync)
        self.forward = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True)

    def silent(self):
        return self.forward.no_sync()


class ZeroRedundancy(Ddp):
    """ZeroRedundancyOptimizer over DDP: ZeRO-1, with whole masters where there are any."""

    def make_optimizer(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(
            self.updated, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW)


class Fsdp2(Plain):
    """fully_shard per layer or block, as it comes: parameters are sharded as well."""

    reshard_after_forward = True

    def __init__(self, model, bf16, no_sync):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if bf16:
            # Masters are what FSDP2 shards; it casts to bf16 when it gathers. They begin with
            # the values that bf16 parameters have.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            model.to(torch.bfloat16).to(torch.float32)
        for block in model.blocks():
            fully_shard(block, mesh=mesh, mp_policy=policy,
                        reshard_after_forward=self.reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=policy,
                    reshard_after_forward=self.reshard_after_forward)
        super().__init__(model, False, no_sync)

    def silent(self):
        @contextlib.contextmanager
        def guard():
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        return guard()

    def backward(self, data, parts, last):
        # Without new parameters there is nothing to gather again for the next micro batch.
        self.model.set_reshard_after_backward(last or self.reshard_after_forward)
        return super().backward(data, parts, last)

    def clip(self, max_norm):
        norm = torch.nn.utils.clip_grad_norm_(self.updated, max_norm, foreach=True)
        return norm.full_tensor()

    def checksums(self):
        return pytorch_workload.checksums([p.full_tensor() for p in self.parameters])


class Fsdp2KeepParameters(Fsdp2):
    """The same without resharding between forward and backward: what ZeRO-2 does."""

    reshard_after_forward = False


class DeepSpeed(Plain):
    """DeepSpeed ZeRO-2, where it is installed. It reduces in every micro batch."""

    def __init__(self, model, bf16, no_sync):
        import deepspeed
        self.model, self.no_sync = model, no_sync
        self.parameters = [p for _, p in pytorch_workload.numbered(model)]
        self.norm_fp64 = None
        deepspeed.init_distributed("gloo", verbose=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "overlap_comm": False},
            "bf16": {"enabled": bf16},
            "steps_per_print": 1 << 30,
        })
        self.norm = 0.0

    def backward(self, data, parts, last):
        loss = self.engine(*data) / parts
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)
        return loss.detach()

    def clip(self, max_norm):
        self.engine.step()  # clips, and knows the norm afterwards only
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None else 0.0

    def step(self):
        pass


SYSTEMS = {"plain": Plain, "ddp": Ddp, "zero_redundancy": ZeroRedundancy, "fsdp2": Fsdp2,
           "fsdp2_zero2": Fsdp2KeepParameters, "deepspeed": DeepSpeed}
NAMES = list(SYSTEMS)


def available(name):
    return name != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def make(name, model, bf16, no_sync, muon=False):
    system = SYSTEMS[name]
    if muon:
        if system not in (Plain, Ddp):
            raise ValueError(f"{name}: expected plain or ddp with Muon, which nothing else has")
        system.muon = True
    return system(model, bf16, no_sync)
