"""Run by torchrun on two ranks: each framework wraps or shards the model as it does, and ends with the weights of `prepare`."""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from tests.integrations import loops
from tests.integrations.loops import BATCH
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import mezzo
from mezzo.integrations.accelerate import Accelerator
from mezzo.integrations.lightning import MezzoPrecision

MAX_NORM = 0.1
Batch = tuple[Tensor, Tensor]


def batches(rank: int, is_interleaved: bool) -> Iterator[Batch]:
    """What a rank sees: every other row (Lightning), or every other batch (Accelerate)."""
    x, y = loops.make_data().tensors
    if is_interleaved:
        x, y = x[rank::2], y[rank::2]
    else:
        x, y = (torch.cat(t.split(BATCH)[rank::2]) for t in (x, y))
    yield from zip(x.split(BATCH), y.split(BATCH), strict=True)


def by_prepare(policy: str, is_interleaved: bool) -> nn.Module:
    model = loops.make_model()
    amp = mezzo.prepare(model, loops.make_optimizer(model)[0], policy)
    wrapped = DistributedDataParallel(model)
    for x, y in batches(dist.get_rank(), is_interleaved):
        amp.backward(F.cross_entropy(wrapped(x), y))
        amp.step(max_norm=MAX_NORM)
        amp.zero_grad()
    return model


def by_accelerate(policy: str) -> nn.Module:
    accelerator = Accelerator(cpu=True, policy=policy)
    assert accelerator.num_processes == 2
    model = loops.make_model()
    optimizer = loops.make_optimizer(model)[0]
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(loops.make_data(), batch_size=BATCH))
    assert isinstance(wrapped, DistributedDataParallel)
    for x, y in loader:
        accelerator.backward(F.cross_entropy(wrapped(x), y))
        accelerator.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_transformers(policy: str) -> nn.Module:
    from tests.integrations.test_transformers import Classifier, InOrder, arguments, rows

    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, num_train_epochs=1, max_grad_norm=MAX_NORM, lr_scheduler_type="constant")
        optimizer = loops.make_optimizer(model)[0]
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer = InOrder(model, args, train_dataset=rows(), optimizers=(optimizer, constant), policy=policy)
        trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return model.net


def by_fabric(policy: str) -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=MezzoPrecision(policy))
    fabric.launch()
    model = loops.make_model()
    wrapped, optimizer = fabric.setup(model, loops.make_optimizer(model)[0])
    for x, y in fabric.setup_dataloaders(DataLoader(loops.make_data(), batch_size=BATCH)):
        fabric.backward(F.cross_entropy(wrapped(x), y))
        fabric.clip_gradients(wrapped, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_lightning(policy: str) -> nn.Module:
    from tests.integrations.test_lightning import Module

    class Constant(Module):
        def configure_optimizers(self) -> Any:
            return loops.make_optimizer(self)[0]

    return fit_by_lightning(Constant(policy), policy, "ddp")


def fit_by_lightning(module: Any, policy: str, strategy: Any) -> nn.Module:
    from tests.integrations.test_lightning import trainer

    with tempfile.TemporaryDirectory() as folder:
        options = {"max_epochs": 1, "gradient_clip_val": MAX_NORM, "enable_checkpointing": False}
        fit = trainer(policy, folder, devices=2, strategy=strategy, use_distributed_sampler=False, **options)
        data = loops.make_data()
        fit.fit(module, DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False)))
    return module.net


def by_prepare_sharded(policy: str, is_interleaved: bool) -> nn.Module:
    model = loops.shard(loops.make_model(), policy)
    amp = mezzo.prepare(model, loops.make_optimizer(model)[0], policy)
    for x, y in batches(dist.get_rank(), is_interleaved):
        amp.backward(F.cross_entropy(model(x), y))
        amp.step(max_norm=MAX_NORM)
        amp.zero_grad()
    return model


def by_accelerate_sharded(policy: str) -> nn.Module:
    """Killed after its first step, and resumed."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        accelerate_sharded(policy, stop=1, save=folder[0])
        model = accelerate_sharded(policy, load=folder[0])
        dist.barrier()
    return model


def accelerate_sharded(policy: str, stop: int | None = None, save: str = "", load: str = "") -> nn.Module:
    from tests.integrations.test_accelerate import sharding

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = sharding(policy)
    model = loops.make_model()
    optimizer = loops.make_optimizer(model)[0]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(loops.make_data(), batch_size=BATCH))
    if load:
        accelerator.load_state(load)
    for x, y in list(loader)[1 if load else 0 : stop]:
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    if save:
        accelerator.save_state(save)
    return model


def by_fabric_sharded(policy: str) -> nn.Module:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        lambda model, mesh: loops.shard(model, policy, mesh["data_parallel"]),
        data_parallel_size=2,
        tensor_parallel_size=1,
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=MezzoPrecision(policy))
    fabric.launch()
    model = fabric.setup_module(loops.make_model())
    optimizer = fabric.setup_optimizers(loops.make_optimizer(model)[0])
    for x, y in batches(dist.get_rank(), is_interleaved=True):
        fabric.backward(F.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.module


def by_lightning_sharded(policy: str) -> nn.Module:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from tests.integrations.test_lightning import Module

    class Sharded(Module):
        def configure_model(self) -> None:
            if not isinstance(self.net, FSDPModule):
                loops.shard(self.net, policy, self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            return loops.make_optimizer(self)[0]

    return fit_by_lightning(
        Sharded(policy), policy, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    )


COPIES = {by_accelerate: False, by_transformers: False, by_fabric: True, by_lightning: True}
SHARDS = {by_accelerate_sharded: False, by_fabric_sharded: True, by_lightning_sharded: True}


def main(how: str, policies: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    dist.init_process_group("gloo")
    by_hand, frameworks = (by_prepare, COPIES) if how == "copies" else (by_prepare_sharded, SHARDS)
    for policy in policies:
        for framework, is_interleaved in frameworks.items():
            wanted, found = loops.copied(by_hand(policy, is_interleaved)), loops.copied(framework(policy))
            different = [n for n, w in wanted.items() if w.dtype is not found[n].dtype or not torch.equal(w, found[n])]
            assert not different, (policy, framework.__name__, different)
            print(f"equal: {policy}: {framework.__name__}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
