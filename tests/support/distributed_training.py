"""One process of a training that torchrun starts: the gradients of an accelerated model under DistributedDataParallel.

    torchrun --nproc-per-node 2 tests/support/distributed_training.py PACKAGE DEVICE FILE

Each process has its own structures. The first one writes what all of them found: the relative error of the gradients
against stock's of all structures in one process, the choices of first runs, and the kernels that each compiled.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from captured_cases import PACKAGES, in_a_box
from model_cases import gradients, imidazole, small_model
from torch.nn.parallel import DistributedDataParallel

from autotune import accelerate
from autotune.bench.contenders import RESULTS
from kernelgen.compile import compiler
from kernelgen.ops import first_run


def structures_of(rank: int) -> list[Any]:
    found = [imidazole(), in_a_box()]
    for atoms in found:
        atoms.rattle(0.02, seed=rank)
    return found


def loss_of(model: torch.nn.Module, package: str, inputs: dict[str, Any]) -> torch.Tensor:
    out = model(inputs, training=True) if package == "mace" else model(inputs)
    energy, forces = (out[name] for name in RESULTS[package])
    return energy.square().mean() + 10 * forces.square().mean()


def main(package: str, device: str, file: str) -> None:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    compiled: list[str] = []
    publish = compiler.publish
    compiler.publish = lambda key, *given: compiled.append(key) or publish(key, *given)
    chosen: list[str] = []
    first_run.LISTENERS.append(
        lambda one: chosen.append(f"{one.operator.problem.key} {one.direction.name} {one.schedules[one.place].key}")
    )

    torch.manual_seed(0)
    model = small_model(package).to(place).train()
    stock = copy.deepcopy(model)
    assert accelerate(model).replaced
    parallel = DistributedDataParallel(model, device_ids=[rank] if device == "cuda" else None)
    for _ in range(2):
        model.zero_grad()
        loss_of(parallel, package, PACKAGES[package].inputs(model, *structures_of(rank))).backward()
    both = [atoms for each in range(world) for atoms in structures_of(each)]
    wanted = gradients(loss_of(stock, package, PACKAGES[package].inputs(stock, *both)), stock)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    largest = max(float(one.abs().max()) for one in wanted.values())
    error = max(float((found[name] - one).abs().max()) / largest for name, one in wanted.items())

    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, {"error": error, "chosen": sorted(chosen), "compiled": compiled})
    if rank == 0:
        Path(file).write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
