"""Molecular dynamics at constant energy with MACE's calculators: drift, memory, captured graphs. Run it on a GPU.

    python long_dynamics.py captured --steps 10000 --out captured.json
    python long_dynamics.py stock --steps 3000 --out stock.json

Every ``--sample`` steps forces are compared with an eager
evaluation of the same positions by the same weights. Prints one line, and writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary, ZeroRotation
from ase.md.verlet import VelocityVerlet
from ase.optimize import FIRE
from mace.calculators import MACECalculator as Stock

from autotune.models.mace.use import MACECalculator
from autotune.models.package import default_dtype
from autotune.models.whole_model import DTYPES, find_atoms, open_model

# Steps in which sizes are captured and torch's libraries take their memory.
SETTLED = 1000
# Of each squeeze: the cell's edges shrink, so that the atoms have more neighbours.
SQUEEZED, STEPS_BETWEEN = 0.985, 50


def structure_of(name: str) -> Atoms:
    """``aspirin``, or ``diamond``: 16 displaced atoms in a periodic cell."""
    if name == "diamond":
        atoms = bulk("C", "diamond", a=3.57).repeat(2)
        atoms.rattle(0.02, seed=0)
        return atoms
    return find_atoms(name)


def calculator_of(kind: str, given: argparse.Namespace, atoms: Atoms) -> Any:
    """``captured``: Equitune's with CUDA graphs; ``stock``: MACE's own. Both have the same weights."""
    with default_dtype(DTYPES[given.dtype]):
        model = open_model(given.model, device=given.device, dtype=given.dtype).module
    with torch.no_grad():
        model.scale_shift.scale.mul_(given.stiffness)
    options = {"models": model, "device": given.device, "default_dtype": given.dtype}
    return MACECalculator(capture=True, **options) if kind == "captured" else Stock(**options)


def resident_mib() -> float:
    """This process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def reserved_mib() -> float:
    return torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_available() else 0.0


def start(given: argparse.Namespace) -> Atoms:
    """The structure at rest in the model, then with velocities of the temperature; alike for all calculators."""
    atoms = structure_of(given.structure)
    if given.start.exists():
        found = np.load(given.start)
        atoms.positions, momenta = found["positions"], found["momenta"]
    else:
        atoms.calc = calculator_of("captured", given, atoms)
        FIRE(atoms, logfile=None, maxstep=0.05).run(fmax=0.02, steps=given.relax)
        MaxwellBoltzmannDistribution(atoms, temperature_K=given.temperature, rng=np.random.default_rng(0))
        Stationary(atoms)
        if not atoms.pbc.any():
            ZeroRotation(atoms)
        momenta = atoms.get_momenta()
        np.savez(given.start, positions=atoms.positions, momenta=momenta)
    atoms.set_momenta(momenta)
    return atoms


def drift(times_ps: np.ndarray, energies: np.ndarray, atoms: int) -> dict[str, float]:
    """The total energy an atom: slope of a line through it, and largest distance from its first value."""
    each = (energies - energies[0]) / atoms * 1e3
    slope = float(np.polyfit(times_ps, each, 1)[0]) if len(each) > 1 else 0.0
    return {"slope_mev_atom_ps": slope, "largest_mev_atom": float(np.abs(each).max())}


def run(given: argparse.Namespace) -> dict[str, Any]:
    atoms = start(given)
    atoms.calc = calculator_of(given.kind, given, atoms)
    eager = calculator_of("stock", given, atoms) if given.kind == "captured" else None
    captured = atoms.calc.models[0] if given.kind == "captured" else None
    dynamics = VelocityVerlet(atoms, given.step_fs * units.fs)
    energies, temperatures, edges, errors, memory = [], [], set(), [], []
    began = time.perf_counter()
    for step in range(given.steps + 1):
        if step and time.perf_counter() - began > given.seconds:
            break
        if step:
            dynamics.run(1)
        if given.squeeze and step and step % STEPS_BETWEEN == 0:
            atoms.set_cell(atoms.cell * SQUEEZED, scale_atoms=True)
        energies.append(atoms.get_total_energy())
        temperatures.append(atoms.get_temperature())
        if step == min(SETTLED, given.steps // 2):
            memory.append((reserved_mib(), resident_mib()))
        if eager is not None and step % given.sample == 0:
            same = Atoms(atoms)
            same.calc = eager
            wanted, found = same.get_forces(), atoms.get_forces()
            scale = max(np.abs(wanted).max(), 0.1)  # eV/angstrom; forces are zero at rest
            errors.append((step, float(np.abs(found - wanted).max() / scale)))
            edges.add(edge_count(atoms, eager))
    memory.append((reserved_mib(), resident_mib()))
    (reserved, resident), (reserved_end, resident_end) = memory[0], memory[-1]
    steps = len(energies) - 1
    result: dict[str, Any] = {
        "kind": given.kind,
        "structure": given.structure,
        "steps": steps,
        "ms_a_step": (time.perf_counter() - began) / max(1, steps) * 1e3,
        "temperature_k": [float(np.mean(temperatures)), float(np.max(temperatures))],
        **drift(np.arange(len(energies)) * given.step_fs * 1e-3, np.array(energies), len(atoms)),
        "reserved_mib": [reserved, reserved_end],
        "resident_mib": [resident, resident_end],
    }
    if captured is not None:
        result |= {"captures": captured.captures, "replays": captured.replays, "eager_calls": captured.eager_calls}
        result |= {"sizes": [list(size) for size in captured.sizes], "edges": sorted(edges)}
        result["worst_error"] = max(errors, key=lambda one: one[1])
        result["compared"] = len(errors)
    return result


def edge_count(atoms: Atoms, calculator: Any) -> int:
    from matscipy.neighbours import neighbour_list

    wrapped = atoms.copy()
    if not wrapped.pbc.any():
        wrapped.set_cell(np.eye(3) * 1e3)
    return len(neighbour_list("i", wrapped, float(calculator.r_max)))


def line(result: dict[str, Any]) -> str:
    shown = [f"{result['kind']} {result['structure']}: {result['steps']} steps, {result['ms_a_step']:.2f} ms each"]
    shown.append("{:.0f} K on average, {:.0f} K at most".format(*result["temperature_k"]))
    shown.append(
        f"drift {result['slope_mev_atom_ps']:+.2e} meV/atom/ps, at most {result['largest_mev_atom']:.2e} meV/atom"
    )
    shown.append(
        "reserved {:.0f} -> {:.0f} MiB, process {:.0f} -> {:.0f} MiB".format(
            *result["reserved_mib"], *result["resident_mib"]
        )
    )
    if "captures" in result:
        step, error = result["worst_error"]
        shown.append(
            f"{result['captures']} captures, {result['replays']} replays, {result['eager_calls']} eager; "
            f"{result['compared']} compared with stock, worst {error:.1e} at step {step}; "
            f"edges {min(result['edges'])}..{max(result['edges'])}"
        )
    return "; ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("captured", "stock"))
    parser.add_argument("--model", default="mace-mp-0-medium")
    parser.add_argument("--structure", default="aspirin")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after that, with fewer steps")
    parser.add_argument("--step-fs", type=float, default=0.1)
    about = "factor of all energies: random weights bind atoms by some meV, a thousand times that holds a molecule"
    parser.add_argument("--stiffness", type=float, default=1000.0, help=about)
    parser.add_argument("--temperature", type=float, default=100.0)
    parser.add_argument("--relax", type=int, default=500, help="steps of relaxation at most, if --start is not there")
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--squeeze", action="store_true", help="compress the cell as time goes: no energy is conserved")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float64", choices=tuple(DTYPES))
    parser.add_argument(
        "--start", type=Path, default=Path("start.npz"), help="positions and momenta; written if missing"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = run(given)
    if given.out:
        given.out.write_text(json.dumps(result))
    print(line(result), flush=True)


if __name__ == "__main__":
    main()
