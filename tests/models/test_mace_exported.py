"""An accelerated MACE model, exported with its forces, gives the same from a C++ program without Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from exported import check_errors_are_said, check_without_python, have_the_compiler_link_its_own_library
from mace_cases import imidazole
from mace_exported import exported_mace
from model_cases import two_molecules


@pytest.mark.slow
@pytest.mark.timeout(1800)  # AOTInductor takes one to two minutes of a core, and shares it with other tests
def test_energies_and_forces_of_a_program_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that links its own C++ library; NequIP's and SevenNet's are built with the system's."""
    have_the_compiler_link_its_own_library(tmp_path, monkeypatch)
    export = partial(exported_mace, tmp_path, imidazole(), "cpu", torch.float64)
    check_without_python(tmp_path, export, (imidazole(), two_molecules()), 1e-9)
    check_errors_are_said(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_program_without_python_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    export = partial(exported_mace, tmp_path, imidazole(), "cuda:0", dtype)
    tolerance = 1e-9 if dtype is torch.float64 else 1e-6
    check_without_python(tmp_path, export, (imidazole(), two_molecules()), tolerance)
