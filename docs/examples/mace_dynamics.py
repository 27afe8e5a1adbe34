"""Molecular dynamics with MACE in ASE: the same trajectory by the stock calculator and by Equitune's."""

from __future__ import annotations

import copy

import numpy as np
from ase import units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from mace.calculators import MACECalculator as StockCalculator
from small_mace import crystal, small_mace

from autotune.models.mace.use import MACECalculator

model = small_mace()  # in its place: models="..." or model_paths="my.model"
positions = []
for kind in (StockCalculator, MACECalculator):
    atoms = crystal()
    # On a GPU device="cuda", and for Equitune's capture=True if the system is small.
    atoms.calc = kind(models=copy.deepcopy(model), device="cpu", default_dtype="float64")
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(0))
    before = atoms.get_total_energy()
    VelocityVerlet(atoms, timestep=1 * units.fs).run(20)
    drift = abs(atoms.get_total_energy() - before) / len(atoms)
    print(f"energy is kept to 1 meV an atom over 20 fs: {drift < 1e-3}")
    positions.append(atoms.positions)

print(f"both end in the same place: {np.abs(positions[0] - positions[1]).max() < 1e-8}")
print(str(atoms.calc.acceleration).splitlines()[0])
print(atoms.calc.step)
