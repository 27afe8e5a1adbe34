"""Training steps of a model under DistributedDataParallel: milliseconds a step, and the losses on the way.

    torchrun --nproc-per-node 2 tests/tools/distributed_steps.py --model mace-mp-0-medium --frames 64 --out two.json

Each process has ``frames`` displaced copies of a structure, without labels: the loss is the mean square of energies an
atom and of forces. One process of twice the frames computes the same losses as two. Without torchrun one process runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autotune import accelerate
from autotune.bench.contenders import RESULTS
from autotune.models.whole_model import find_atoms, open_model
from kernelgen.device import device_facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mace-mp-0-medium")
    parser.add_argument("--structure", default="aspirin")
    parser.add_argument("--frames", type=int, default=64, help="structures of each process")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stock", action="store_true", help="without Equitune")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{rank}" if given.device == "cuda" else "cpu"
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    if world > 1:
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    model = open_model(given.model, device=device, dtype=given.dtype)
    said = "stock" if given.stock else str(accelerate(model.module)).splitlines()[0]
    module = model.module.train()
    parallel = module
    if world > 1:
        parallel = DistributedDataParallel(module, device_ids=[rank] if given.device == "cuda" else None)
    frames = [find_atoms(given.structure) for _ in range(given.frames)]
    for place, atoms in enumerate(frames):
        atoms.rattle(0.05, seed=rank * given.frames + place)
    inputs, optimizer = model.inputs(frames), torch.optim.Adam(module.parameters(), lr=1e-3)
    energy, forces = RESULTS[model.package.name]
    options = {"training": True} if model.package.name == "mace" else {}

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        out = parallel(dict(inputs), **options)
        loss = (out[energy] / len(frames[0])).square().mean() + out[forces].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, times = [], []
    for _ in range(given.steps):
        begin = time.perf_counter()
        loss = step()
        if given.device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        if world > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        losses.append(float(loss) / world)
    if rank == 0:
        half = times[len(times) // 2 :]
        found = {"device": device_facts(device).name, "processes": world, "frames": given.frames, "said": said}
        found |= {"ms": round(statistics.median(half), 3), "losses": losses, "times_ms": times}
        given.out.write_text(json.dumps(vars(given) | found, default=str, indent=1))
        print(f"{world} x {given.frames} frames: {found['ms']} ms a step, losses {losses[0]:.9g} to {losses[-1]:.9g}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
