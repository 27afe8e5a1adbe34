"""Times steps of LAMMPS by compiled models on GPUs, and compares forces with the model in one process of Python.

    PYTHONPATH=.:tests/support python tests/tools/lammps_steps.py mace-mp-0-medium --structure water --ranks 1 2 \
        --out lammps.json

Compiles the model, packs its kernels, builds the library and the plugin, and runs LAMMPS on each number of ranks, which
take the host's GPUs in turns. LAMMPS makes its list anew every ten steps, whether atoms moved far or not. Models with
random weights have large forces, so atoms move by steps of ``--timestep`` fs. Prints one line for each run; the record
has LAMMPS's own breakdown. ``--every 50`` compares each 50th step in place of the last.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from lammps_runs import build, lammps, write_atoms

import autotune
from autotune.models.package import default_dtype
from autotune.models.whole_model import WholeModel, find_atoms, open_model

INPUT = """
units metal
atom_style atomic
boundary p p p
processors {grid}
plugin load ../equituneplugin.so
read_data atoms.data
pair_style equitune ../libequitune.so
pair_coeff * * ../model.pt2 {elements}
neighbor 1.0 bin
neigh_modify every 10 delay 0 check no
velocity all create 300 1 mom yes
{drift}
fix move all nve
timestep {timestep}
thermo 1000000
run {warm_up}
dump frames all custom {every} frames.txt id proc x y z fx fy fz
dump_modify frames sort id format float %.15g first yes
run {steps}
"""
INTEGRATIONS = {"mace": "mace.use", "sevennet": "sevennet.use", "nequip": "nequip.use", "allegro": "nequip.use"}


def run(folder: Path, atoms: Atoms, ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run, with its time a step and LAMMPS's breakdown in ms a step."""
    place = folder / f"{len(atoms)} on {ranks}"
    place.mkdir(exist_ok=True)
    write_atoms(atoms, place)
    symbols = [Atoms([number])[0].symbol for number in sorted(set(atoms.numbers))]
    text = INPUT.format(
        grid="* * *" if ranks == 1 else "1 1 *",
        elements=" ".join(symbols),
        drift="" if given.drift == 0 else f"velocity all set NULL NULL {given.drift} sum yes",
        timestep=given.timestep * 1e-3,
        warm_up=given.warm_up,
        steps=given.steps,
        every=given.every or given.steps,
    )
    (place / "in.lammps").write_text(text)
    environment = {"PATH": "", "HOME": str(place), "EQUITUNE_PACK": str(folder / "model.pack"), "OMP_NUM_THREADS": "1"}
    environment |= {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "TMPDIR") if name in os.environ}
    told = lammps(place, ranks, environment, timeout_s=given.limit)
    seconds = re.findall(r"Loop time of (\S+) on", told)[-1]
    parts = re.findall(r"^(Pair|Neigh|Comm|Output|Modify|Other)\s*\|[^|]*\|\s*([\d.e+-]+)\s*\|", told, re.M)
    per_step = 1e3 / given.steps
    found = {"ranks": ranks, "atoms": len(atoms), "step_ms": float(seconds) * per_step}
    return found | {"parts_ms": {name.lower(): float(each) * per_step for name, each in parts[-6:]}}


def compare(model: WholeModel, exact: WholeModel, place: Path, atoms: Atoms) -> dict[str, Any]:
    """What LAMMPS wrote after the warm-up, beside the model in this process and the same in float64.

    The largest difference of a force relative to the largest force, of each two of the three; and the atoms that were
    on more than one rank.
    """
    frames = [text.split("fz", 1)[1].splitlines() for text in (place / "frames.txt").read_text().split("TIMESTEP")[1:]]
    rows = np.array([[line.split() for line in frame if line and not line.startswith("ITEM")] for frame in frames])
    ranks, positions, forces = (rows[..., part].astype(float) for part in (slice(1, 2), slice(2, 5), slice(5, 8)))
    moved, worst = atoms.copy(), dict.fromkeys(("force_difference", "force_error", "force_error_in_one_process"), 0.0)
    for at, found in list(zip(positions, forces, strict=True))[1:]:
        moved.positions = at
        alone, wanted = forces_of(model, moved), forces_of(exact, moved)
        for name, (one, other) in zip(worst, ((found, alone), (found, wanted), (alone, wanted)), strict=True):
            worst[name] = max(worst[name], float(np.abs(one - other).max() / np.abs(wanted).max()))
    changed = int((np.ptp(ranks, axis=0) > 0).sum())
    return {"atoms_that_changed_rank": changed, "frames_compared": len(frames) - 1} | worst


def forces_of(model: WholeModel, atoms: Atoms) -> np.ndarray:
    with default_dtype(model.package.dtype_of_data):
        return model.energies_and_forces(model.inputs([atoms])).forces.detach().cpu().double().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--structure", default="water")
    parser.add_argument("--repeat", type=int, nargs=3, default=[1, 1, 1])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--every", type=int, default=0, help="steps between frames that are compared")
    parser.add_argument("--timestep", type=float, default=0.1)
    parser.add_argument("--drift", type=float, default=0.0, help="velocity of all atoms along z, in angstrom per ps")
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--folder", type=Path, help="of a compiled model that is there already")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = open_model(given.model, device=given.device, dtype=given.dtype)
    atoms = find_atoms(given.structure).repeat(given.repeat)
    folder = given.folder or Path(tempfile.mkdtemp())
    began = time.perf_counter()
    if not (folder / "model.pack").exists():
        folder.mkdir(exist_ok=True)
        on_gpu = given.device.startswith("cuda")
        archs = ["sm_{}{}".format(*torch.cuda.get_device_capability())] if on_gpu else []
        edges = model.edges(model.inputs([find_atoms(given.structure)])).shape[1]
        integration = importlib.import_module(f"autotune.models.{INTEGRATIONS[model.package.name]}")
        size = (edges, len(find_atoms(given.structure)))
        compile_model = partial(integration.compile_for_lammps, device=given.device, size=size)
        build(folder, model.module, compile_model, archs)
    else:
        autotune.accelerate(model.module)
    exact = open_model(given.model, device=given.device, dtype="float64")
    autotune.accelerate(exact.module)
    print(f"compiled in {time.perf_counter() - began:.0f} s, in {folder}", flush=True)
    rows = []
    for ranks in given.ranks:
        row = {"model": given.model, "structure": given.structure, **run(folder, atoms, ranks, given)}
        row["device"] = torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device
        row |= {"torch": torch.__version__, "dtype": given.dtype, "timestep_fs": given.timestep, "steps": given.steps}
        try:
            row |= compare(model, exact, folder / f"{len(atoms)} on {ranks}", atoms)
        except torch.OutOfMemoryError as error:
            row["force_difference"] = str(error)[:80]
        rows.append(row)
        print(json.dumps(row), flush=True)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
