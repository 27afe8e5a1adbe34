"""Relax atoms and cell with MACE in ASE."""

from __future__ import annotations

import numpy as np
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE
from small_mace import crystal, small_mace

from autotune.models.mace.use import MACECalculator

atoms = crystal()
atoms.calc = MACECalculator(models=small_mace(), device="cpu", default_dtype="float64")
print(f"forces before: up to {np.abs(atoms.get_forces()).max():.4f} eV/angstrom")
energy = atoms.get_potential_energy()

FIRE(FrechetCellFilter(atoms), logfile=None).run(fmax=1e-3, steps=200)
print(f"relaxed: {np.abs(atoms.get_forces()).max() < 1e-3}")
print(f"energy fell: {atoms.get_potential_energy() < energy}")
