"""A pack of what a MACE model runs serves a process without compiler and cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ase.io
import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from mace_cases import batch_of, imidazole, model_of, numbers_in
from places import ROOT, SUPPORT


def run(folder: Path, *command: str, **more: str) -> str:
    """The last line that a process of its own prints: kernels that this one has loaded would not be in a pack."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))} | more
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_runs_from_its_pack(device: str, tmp_path: Path) -> None:
    atoms = imidazole()
    model = model_of(numbers_in(atoms), dtype=torch.float32).eval()
    torch.save(model, tmp_path / "my.model")
    ase.io.write(tmp_path / "box.xyz", atoms)
    arch = () if device == "cpu" else ("--arch", "sm_{}{}".format(*torch.cuda.get_device_capability()))
    options = ("model", "my.model", "--structure", "box.xyz", "--dtype", "float32", "--out", "my.pack")
    assert "my.pack" in run(tmp_path, "-m", "autotune", "pack", *options, *arch)

    batch = {name: tensor.to(device) for name, tensor in batch_of(model, atoms).items()}
    torch.save((model.to(device), batch), tmp_path / "given.pt")
    nowhere = {"PATH": "", "EQUITUNE_CACHE": str(tmp_path / "none" / "cache"), "EQUITUNE_PACK": "my.pack"}
    loaded, at_nodes = map(
        int, run(tmp_path, str(SUPPORT / "packed_model.py"), "given.pt", "found.pt", **nowhere).split()
    )
    assert loaded and (at_nodes > 0) == (device == "cuda")
    wanted = model(batch, training=False)
    for name, found in zip(("energy", "forces"), torch.load(tmp_path / "found.pt"), strict=True):
        exact = wanted[name].detach().cpu()
        assert float((found - exact).abs().max()) < 1e-5 * float(exact.abs().max()), name
