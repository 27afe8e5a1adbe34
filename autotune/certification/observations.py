"""What a path is asked about a structure, and what it answers: values of the structure and of what it is turned into.

A path answers in numbers alone, in a process of its own; what they mean is decided elsewhere (``checks``). So what was
answered before a path crashed is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet

from autotune.bench.session import text_of
from autotune.models.whole_model import WholeModel
from kernelgen.errors import EquituneError

# By name: energy [1], node_energy [atoms], forces [atoms, 3] and, of a periodic structure, stress [3, 3].
Values = dict[str, np.ndarray]
# Difference quotients, by dtype: angstrom that each coordinate moves, times a normal random number.
STEPS = {"float32": 1e-2, "float64": 1e-3}
# The parts of the questions, in the order in which they are asked.
GIVEN, TRANSLATED, ROTATED, INVERTED, PERMUTED = "given", "translated", "rotated", "inverted", "permuted"
MOVED, AGAIN, DISPLACED, REPEATED, DYNAMICS = "moved", "again", "displaced", "repeated", "dynamics"
PARTS = (GIVEN, TRANSLATED, ROTATED, INVERTED, PERMUTED, MOVED, AGAIN, REPEATED, DISPLACED, DYNAMICS)
_STARTING_K = 300.0


@dataclass(frozen=True)
class Questions:
    """About one structure. Lengths in angstrom.

    rotation [3, 3], without reflection; permutation [atoms]; directions [number, atoms, 3], along which atoms are
    displaced by ``step`` and its opposite; moved [atoms, 3]: displacements that give another graph. repeats: how often
    the same is computed. dynamics: steps of a simulation at constant energy, of ``timestep_fs`` each. seconds: no part
    but the first is begun that would take longer.
    """

    atoms: Atoms
    rotation: np.ndarray
    translation: np.ndarray
    permutation: np.ndarray
    directions: np.ndarray
    moved: np.ndarray
    step: float
    repeats: int
    dynamics: int
    timestep_fs: float
    parts: tuple[str, ...] = PARTS
    seconds: float = math.inf


@dataclass
class Answers:
    """values: by part, as many as were asked for. step: by which atoms were displaced, in angstrom.

    total: energies of the simulation [steps + 1], kinetic included.
    errors: why a part has no values; refused: whether the path itself said that it does not compute this. not_asked:
    parts for which the time was too short.
    """

    step: float
    values: dict[str, list[Values]] = field(default_factory=dict)
    total: np.ndarray | None = None
    errors: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    not_asked: tuple[str, ...] = ()

    def of(self, part: str) -> Values:
        """The only values of a part."""
        return self.values[part][0]


def questions_about(atoms: Atoms, dtype: str, seed: int, *, directions: int, repeats: int, dynamics: int) -> Questions:
    """Drawn at random; equal arguments give equal ones. The time step is for the caller to shorten."""
    random = np.random.default_rng([seed, len(atoms)])
    rotation, _ = np.linalg.qr(random.normal(size=(3, 3)))
    return Questions(
        atoms=atoms,
        rotation=rotation * np.linalg.det(rotation),
        translation=random.uniform(-5.0, 5.0, size=3),
        permutation=random.permutation(len(atoms)),
        directions=random.normal(size=(directions, len(atoms), 3)),
        moved=0.35 * random.normal(size=(len(atoms), 3)),
        step=STEPS[dtype],
        repeats=repeats,
        dynamics=dynamics,
        timestep_fs=1.0,
    )


def answer(model: WholeModel, questions: Questions) -> Answers:
    """All values; a part that fails has its error instead, and the others are asked all the same."""
    found, begin, each_s = Answers(questions.step), time.monotonic(), 0.0

    def is_late(part: str, evaluations: int) -> bool:
        late = part != GIVEN and time.monotonic() - begin + evaluations * each_s > questions.seconds
        found.not_asked += (part,) if late else ()
        return late

    for part in (part for part in questions.parts if part != DYNAMICS):
        structures = _structures_of(questions, part)
        if is_late(part, len(structures)):
            continue
        began = time.monotonic()
        try:
            found.values[part] = [values_of(model, [atoms])[0] for atoms in structures]
            each_s = (time.monotonic() - began) / max(1, len(structures))
        except Exception as error:  # whatever a path raises is an answer too
            found.errors[part] = text_of(error)
            if part == GIVEN:
                found.refused = isinstance(error, EquituneError)
                return found
    if DYNAMICS in questions.parts and questions.dynamics and not is_late(DYNAMICS, questions.dynamics):
        try:
            found.total = total_energies(model, questions)
        except Exception as error:
            found.errors[DYNAMICS] = text_of(error)
    return found


def values_of(model: WholeModel, structures: Sequence[Atoms]) -> list[Values]:
    """Of each structure of a batch, in float64 on the host; all are periodic, or stress is left out."""
    stress = all(atoms.pbc.all() for atoms in structures)
    out = model.energies_and_forces(model.inputs(structures), stress=stress)
    of_structures = {"energy": out.energy.reshape(-1, 1)}
    of_atoms = {"forces": out.forces}
    if out.node_energy is not None:
        of_atoms["node_energy"] = out.node_energy
    if out.stress is not None:
        of_structures["stress"] = out.stress
    sizes = [len(atoms) for atoms in structures]
    values: list[Values] = [{} for _ in structures]
    for name, tensor in (of_structures | of_atoms).items():
        rows = tensor.detach().cpu().double()
        each = rows.split(sizes) if name in of_atoms else rows
        for one, part in zip(values, each, strict=True):
            one[name] = part.numpy().copy()
    return values


def _structures_of(questions: Questions, part: str) -> list[Atoms]:
    """What is evaluated for a part, one after the other."""
    atoms = questions.atoms
    if part == REPEATED:
        return [atoms] * questions.repeats
    if part == TRANSLATED:
        moved = atoms.copy()
        moved.translate(questions.translation)
        if moved.pbc.any():
            moved.wrap()
        return [moved]
    if part in (ROTATED, INVERTED):
        matrix = questions.rotation if part == ROTATED else -np.eye(3)
        turned = atoms.copy()
        turned.set_cell(atoms.cell.array @ matrix.T)
        turned.positions = atoms.positions @ matrix.T
        return [turned]
    if part == PERMUTED:
        return [atoms[questions.permutation.tolist()]]
    if part == MOVED:
        return [displaced(atoms, questions.moved)]
    if part == DISPLACED:
        ways = [questions.step * sign * way for way in questions.directions for sign in (1, -1)]
        return [displaced(atoms, way) for way in ways]
    return [atoms]


def displaced(atoms: Atoms, by: np.ndarray) -> Atoms:
    """by: [atoms, 3] in angstrom."""
    moved = atoms.copy()
    moved.positions += by
    return moved


class ModelCalculator(Calculator):
    """ASE's calculator of a whole model in any dtype, by the package's own inputs."""

    implemented_properties = ["energy", "forces"]

    def __init__(self, model: WholeModel) -> None:
        super().__init__()
        self.model = model

    def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        out = self.model.energies_and_forces(self.model.inputs([atoms]), stress=False)
        forces = out.forces.detach().cpu().double().numpy()
        self.results = {"energy": float(out.energy.detach().double()), "forces": forces}


def total_energies(model: WholeModel, questions: Questions) -> np.ndarray:
    """In eV, before the first step of a simulation at constant energy and after each."""
    atoms = questions.atoms.copy()
    atoms.calc = ModelCalculator(model)
    MaxwellBoltzmannDistribution(atoms, temperature_K=_STARTING_K, rng=np.random.default_rng(0))
    Stationary(atoms)
    integrator = VelocityVerlet(atoms, questions.timestep_fs * units.fs)
    energies = [atoms.get_total_energy()]
    for _ in range(questions.dynamics):
        integrator.run(1)
        energies.append(atoms.get_total_energy())
    return np.array(energies)


def timestep_fs(atoms: Atoms, forces: np.ndarray) -> float:
    """At most 1 fs, so short that no force of these moves an atom by more than 0.002 angstrom in it.

    Random weights give forces of thousands of eV/angstrom.
    """
    pushed = np.abs(forces).max(axis=1, initial=0.0) / atoms.get_masses()
    largest = float(np.nan_to_num(pushed).max(initial=0.0))
    return min(1.0, (2 * 0.002 / largest) ** 0.5 / units.fs) if largest > 0 else 1.0
