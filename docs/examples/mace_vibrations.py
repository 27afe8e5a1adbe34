"""Vibrations of a crystal by the Hessian of an accelerated MACE model, one force call for each displacement.

The same loop by phonopy works too: it asks the calculator for the forces of displaced structures.
"""

from __future__ import annotations

import numpy as np
from ase.optimize import BFGS
from ase.units import fs
from small_mace import crystal, small_mace

from autotune.models.mace.use import MACECalculator

STEP = 0.005  # angstrom

atoms = crystal()
atoms.calc = MACECalculator(models=small_mace(), device="cpu", default_dtype="float64")
BFGS(atoms, logfile=None).run(fmax=1e-4, steps=300)

rows, place = [], atoms.positions.copy()
for atom in range(len(atoms)):
    for axis in range(3):
        forces = []
        for sign in (-1, 1):
            atoms.positions[:] = place
            atoms.positions[atom, axis] += sign * STEP
            forces.append(atoms.get_forces().ravel())
        rows.append((forces[0] - forces[1]) / (2 * STEP))
hessian = np.array(rows)
print(f"the Hessian is symmetric to 0.1%: {np.abs(hessian - hessian.T).max() < 1e-3 * np.abs(hessian).max()}")

masses = np.repeat(atoms.get_masses(), 3)
squared = np.linalg.eigvalsh((hessian + hessian.T) / 2 / np.sqrt(np.outer(masses, masses)))
frequencies = np.sign(squared) * np.sqrt(np.abs(squared)) * fs * 1000 / (2 * np.pi)  # THz
print(f"{len(frequencies)} frequencies, of which {np.sum(np.abs(frequencies) < 0.05)} are of the crystal as a whole")
