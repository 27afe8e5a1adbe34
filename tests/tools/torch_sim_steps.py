"""Times steps of torch-sim (0.6 or later) with a model of MACE, and of the model alone with the inputs of one step.

    PYTHONPATH=. python tests/tools/torch_sim_steps.py --structure aspirin --systems 1 8 --device cuda --out steps.json

``equitune`` is ``accelerate_torch_sim(capture=True)``; other contenders are what MACE's own class offers: ``stock``,
``cuequivariance``. Velocity Verlet, steps of 0.1 fs from 300 K; random weights have large forces. model_ms: of the
captured model on the inputs of one step. integrator_ms: of the same steps with results that are known. Prints a line
for each contender, and compares its forces with stock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch_sim as ts
from mace.calculators.mace_torchsim import MaceTorchSimModel
from torch_sim.integrators.nve import nve_init, nve_step
from torch_sim.units import MetalUnits

from autotune.measure.timing import synchronize, timed
from autotune.models.torch_sim import accelerate_torch_sim
from autotune.models.whole_model import find_atoms, open_model

OPTIONS = {"stock": {}, "equitune": {}, "cuequivariance": {"enable_cueq": True}}


def wrapped(name: str, given: argparse.Namespace) -> Any:
    dtype = getattr(torch, given.dtype)
    module = open_model(given.model, device=given.device, dtype=given.dtype).module
    model = MaceTorchSimModel(module, device=torch.device(given.device), dtype=dtype, **OPTIONS[name])
    if name == "equitune":
        accelerate_torch_sim(model, capture=True)
    return model


def samples_ms(call: Callable[[], object], given: argparse.Namespace) -> list[float]:
    for _ in range(given.warm_up):
        timed(call, given.device)
    return [timed(call, given.device) * 1e3 for _ in range(given.steps)]


def measure(name: str, systems: int, given: argparse.Namespace, forces: list[torch.Tensor]) -> dict[str, Any]:
    model = wrapped(name, given)
    state = ts.io.atoms_to_state([find_atoms(given.structure)] * systems, model.device, model.dtype)
    state.rng = 0
    found = model(state.clone())["forces"]
    forces.append(found)
    moving = nve_init(state, model, kT=300 * MetalUnits.temperature)

    def step(model: Any = model) -> None:
        nonlocal moving
        moving = nve_step(moving, model, dt=1e-4 * MetalUnits.time)

    row: dict[str, Any] = {"contender": name, "structure": given.structure, "systems": systems, "atoms": len(found)}
    row["force_difference"] = float((found - forces[0]).abs().max() / forces[0].abs().max())
    if name == "equitune":
        searches = model.neighbors.searches
    samples = samples_ms(step, given)
    row |= {"step_ms": round(statistics.median(samples), 4), "samples_ms": [round(one, 4) for one in samples]}
    if name == "equitune":
        kept, package = model._kept.inputs, model._package
        of_model = samples_ms(lambda: package.evaluate(model.model, kept, training=False, stress=True), given)
        row |= {"searches": model.neighbors.searches - searches, "replays": model.model.replays}
        results = model(moving)
        of_integrator = samples_ms(lambda: step(lambda _: results), given)
        row |= {"model_ms": round(statistics.median(of_model), 4), "inputs": model.step}
        row |= {"integrator_ms": round(statistics.median(of_integrator), 4)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="mace-mp-0-medium")
    parser.add_argument("--structure", default="aspirin")
    parser.add_argument("--systems", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--contender", action="append", choices=list(OPTIONS), help="default: all; stock is the reference"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    software = {name: version(name) for name in ("torch", "torch-sim-atomistic", "mace-torch")}
    device = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
    rows = []
    for systems in given.systems:
        forces: list[torch.Tensor] = []
        for name in given.contender or OPTIONS:
            row = measure(name, systems, given, forces) | {"device": device, "software": software}
            synchronize(given.device)
            print({key: value for key, value in row.items() if key not in ("samples_ms", "software")}, flush=True)
            rows.append(row | {"model": given.model, "dtype": given.dtype, "weights": "random"})
            if given.out:
                given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
