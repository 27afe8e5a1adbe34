"""The pages of the documentation that need a model package, and the examples with MACE, run where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import EXAMPLES, name_of, package_of, pages, run_python
from lammps_runs import needs_lammps
from model_cases import case_of, imidazole, needs, small_model
from places import ROOT

PAGES = [pytest.param(page, id=f"{package_of(page)}-{page.stem}", marks=needs(package_of(page)))
         for page in pages() if package_of(page)]  # fmt: skip


def model_files(package: str, folder: Path) -> None:
    """What a page's reader has: a model file of the package."""
    model = small_model(package, torch.float32)
    if package == "mace":
        torch.save(model, folder / "my.model")
    elif package == "sevennet":
        import sevenn._keys as KEY

        case: Any = case_of(package)
        small = {"num_convolution_layer": 2, "irreps_manual": ["8x0e", "8x0e+4x1e", "8x0e"], "lmax": 1}
        configuration = case.configuration(imidazole(), **small)
        configuration |= {"version": "0.13.0", KEY.MODEL_TYPE: "E3_equivariant_model"}
        saved = {"model_state_dict": model.state_dict(), "config": configuration, "epoch": 1}
        torch.save(saved, folder / "checkpoint.pth")


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_of(page)
    monkeypatch.chdir(tmp_path)
    imidazole().write("box.xyz")
    model_files(package, tmp_path)
    if package in ("nequip", "allegro"):
        from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
        from nequip.integrations.ase import NequIPCalculator

        def from_file(kind: Any, path: str, device: str, **options: Any) -> Any:
            # A package file takes a minute to write; test_nequip_workflows.py writes and loads one.
            assert path == "model.nequip.zip"
            transforms = [ChemicalSpeciesToAtomTypeMapper(["C", "H", "N"]), NeighborListTransform(r_max=4.0)]
            return kind(small_model(package).eval(), device, transforms=transforms, **options)

        monkeypatch.setattr(NequIPCalculator, "_from_saved_model", classmethod(from_file))
    was = torch.get_default_dtype()
    try:
        assert run_python(page, {}) > 0, name_of(page)
    finally:
        torch.set_default_dtype(was)


EXAMPLE_NAMES = [path.stem for path in sorted(EXAMPLES.glob("mace_*.py"))]


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.timeout(1200)
@needs("mace")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_lammps] if "lammps" in name else []) for name in EXAMPLE_NAMES]
)
def test_an_example_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (EXAMPLES / f"{name}.txt").read_text()
