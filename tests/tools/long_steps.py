"""Long simulations by calculators that keep their inputs, beside their packages' own, in float64 (SevenNet: float32).

    PYTHONPATH=.:tests/support python tests/tools/long_steps.py mace --device cuda --steps 1000 --out mace.json

Each structure runs at constant energy; every 50th frame the stock calculator computes the same positions. ``npt``
scales the cell by 0.1% a step until its volume has doubled. Prints a line for each, and the worst at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk, fcc111
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from calculator_cases import calculators
from model_cases import MODULES, imidazole, two_molecules

from autotune.models.package import default_dtype

EVERY = 50
# eV and angstrom: values below are compared absolutely.
SCALE = 1.0


def slab() -> Atoms:
    atoms = fcc111("C", (3, 3, 3), a=3.6, vacuum=6.0)
    atoms.pbc = [True, True, False]
    return atoms


def gas() -> Atoms:
    """Six atoms in a cell of 20 angstrom: at times no two are neighbours."""
    positions = np.random.default_rng(3).uniform(0, 20, size=(6, 3))
    return Atoms("C2H2N2", positions, cell=[20.0] * 3, pbc=True)


def skewed() -> Atoms:
    atoms = two_molecules()
    atoms.set_cell([[11.0, 0, 0], [6.0, 9.0, 0], [-4.0, 5.0, 10.0]])
    return atoms


def left_handed() -> Atoms:
    atoms = skewed()
    atoms.set_cell(atoms.cell[[1, 0, 2]])
    return atoms


STRUCTURES = {
    "molecule": lambda: Atoms(imidazole().symbols, imidazole().positions),
    "diamond": lambda: bulk("C", "diamond", a=3.57, cubic=True).repeat(2),
    "slab": slab,
    "one atom": lambda: bulk("C", "fcc", a=3.3),
    "skewed": skewed,
    "left-handed": left_handed,
    "gas": gas,
    "npt": lambda: bulk("C", "diamond", a=3.3, cubic=True),
}


def difference(quick: Any, stock: Any, atoms: Atoms) -> float:
    """The largest of energy, forces and stress, over the larger of the largest value and ``SCALE``."""
    at = atoms.copy()
    at.calc = stock
    at.get_forces()
    worst = 0.0
    for name in ("energy", "forces", "stress"):
        found, wanted = np.asarray(quick.results[name]), np.asarray(stock.results[name])
        if not np.isnan(wanted).all():  # NequIP's stress of a molecule without a cell
            worst = max(worst, float(np.abs(found - wanted).max()) / max(SCALE, float(np.abs(wanted).max())))
    return worst


def resident_mib() -> float:
    """This process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def run(package: str, structure: str, steps: int, device: str) -> dict[str, Any]:
    stock, quick = calculators(package, device=device)
    atoms = STRUCTURES[structure]()
    atoms.rattle(0.05, seed=0)
    atoms.calc = quick
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    first, volume = atoms.get_total_energy(), atoms.get_volume() if atoms.pbc.any() else 0.0
    worst, drift, resident = 0.0, 0.0, []
    for step in range(1, steps + 1):
        dynamics.run(1)
        if structure == "npt" and atoms.get_volume() < 2 * volume:
            atoms.set_cell(atoms.cell * 1.001, scale_atoms=True)
        elif structure != "npt":
            drift = max(drift, abs(atoms.get_total_energy() - first) / len(atoms) * 1e3)
        if step in (steps // 2, steps):
            resident.append(resident_mib())
        if step % EVERY == 0:
            atoms.get_forces()
            worst = max(worst, difference(quick, stock, atoms))
    kept = quick.kept_inputs()
    return {
        "package": package,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "step": quick.step,
        "structure": structure,
        "atoms": len(atoms),
        "steps": steps,
        "searches": kept.searches,
        "inputs_made": kept.makes,
        "frames_compared": steps // EVERY,
        "worst_difference": worst,
        "largest_drift_mev_atom": drift,
        "resident_mib_halfway_and_at_the_end": resident,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", choices=list(MODULES))
    parser.add_argument("--structure", action="append", choices=list(STRUCTURES))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    rows = []
    with default_dtype(torch.float64 if given.package in ("nequip", "allegro") else torch.float32):
        for structure in given.structure or STRUCTURES:
            rows.append(run(given.package, structure, given.steps, given.device))
            print(json.dumps(rows[-1]), flush=True)
            if given.out:
                given.out.write_text(json.dumps(rows, indent=1))
    worst = max(row["worst_difference"] for row in rows)
    print(f"worst difference {worst:.1e}")
    return int(worst > (1e-4 if given.package == "sevennet" else 1e-10))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
