"""The checks of a certificate: from a path's answers a figure, its limit, and what it means for an atom.

A figure is the largest difference of one quantity. Its limit is the largest of

- ``FLOOR`` of the path's dtype times the size of the quantity on this structure,
- ``FACTOR`` (2 of NVE drift) times the same figure of stock in the path's dtype on this structure,
- as many times that of stock on the median structure, by size.

So a path in float32 may be as far from stock in float64 as stock in float32 is, some times, and no further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.certification import observations as asked
from autotune.certification.observations import Answers, Questions, Values

PASS, FAIL, REFUSED, CUT = "pass", "fail", "refused", "cut"
# By class of errors, relative to a quantity's size. With the 11 bits of TF32 a product is some 2e-4 off.
FLOOR = {"tf32": 2e-3, "float32": 2e-6, "float64": 1e-10}
FACTOR = 8.0
# A quantity is of this size at least: an isolated atom has a small energy, whose parts are as large as any.
_SMALLEST = {"energy": 1.0, "forces": 1e-1, "stress": 1e-3, "stiffness": 1e-1}
UNITS = {
    "energy": "eV/atom",
    "node_energy": "eV",
    "forces": "eV/Å",
    "stress": "eV/Å³",
    "stiffness": "eV/Å²",
    "drift": "eV/atom",
}
# A force's error is felt along a thermal displacement, in angstrom; that of stress along a strain.
_DISPLACEMENT, _STRAIN = 0.1, 0.01


@dataclass(frozen=True)
class Figure:
    """The difference of a quantity, in its unit, and the size that rounding is relative to, in the same unit."""

    quantity: str
    value: float
    size: float


@dataclass(frozen=True)
class Case:
    """A path's answers about a structure, beside those of stock in float64."""

    questions: Questions
    found: Answers
    exact: Answers

    @property
    def volume_per_atom(self) -> float:
        atoms = self.questions.atoms
        return float(atoms.get_volume() / len(atoms)) if atoms.pbc.all() else math.inf


@dataclass(frozen=True)
class Check:
    """name: in tables. says: what holds if it passes. parts: what the path must have answered.

    exact: what stock in float64 must have answered. factor: how many times stock's own figure is allowed. compares:
    with stock in float64, whose own figure is zero.
    """

    name: str
    says: str
    parts: tuple[str, ...]
    figures: Callable[[Case], list[Figure]]
    exact: tuple[str, ...] = (asked.GIVEN,)
    factor: float = FACTOR
    compares: bool = False


def sizes(case: Case) -> dict[str, float]:
    """Of each quantity, by stock in float64: what its rounding errors are relative to."""
    exact = case.exact.of(asked.GIVEN)
    atoms = len(exact["forces"])
    nodes = exact.get("node_energy", np.zeros(1))
    energy = max(float(np.abs(exact["energy"]).max()) / atoms, float(np.abs(nodes).max()), _SMALLEST["energy"])
    forces = max(float(np.abs(exact["forces"]).max()), _SMALLEST["forces"])
    stress = float(np.abs(exact["stress"]).max()) if "stress" in exact else 0.0
    if math.isfinite(case.volume_per_atom):
        forces = max(forces, stress * case.volume_per_atom)  # where forces cancel, by symmetry
        stress = max(stress, forces / case.volume_per_atom, _SMALLEST["stress"])
    return {"energy": energy, "node_energy": energy, "forces": forces, "stress": stress or _SMALLEST["stress"]}


def _largest(difference: np.ndarray) -> float:
    """Infinite if a value is not finite."""
    if not np.isfinite(difference).all():
        return math.inf
    return float(np.abs(difference).max(initial=0.0))


def _differences(case: Case, found: Values, wanted: Values, only: Iterable[str] = ()) -> list[Figure]:
    """Of all quantities of ``wanted``; infinite for one that the path does not give."""
    size, figures = sizes(case), []
    for name in only or wanted:
        if name not in wanted:
            continue
        each = len(case.questions.atoms) if name == "energy" else 1
        value = _largest(found[name] - wanted[name]) / each if name in found else math.inf
        figures.append(Figure(name, value, size[name]))
    return figures


def _same(name: str) -> Callable[[Case], list[Figure]]:
    return lambda case: _differences(case, case.found.of(asked.GIVEN), case.exact.of(asked.GIVEN), (name,))


def _transformed(part: str, back_of: Callable[[Case], np.ndarray]) -> Callable[[Case], list[Figure]]:
    """back_of: the matrix that turns forces back."""

    def figures(case: Case) -> list[Figure]:
        values, back = dict(case.found.of(part)), back_of(case)
        values["forces"] = values["forces"] @ back.T
        if "stress" in values:
            values["stress"] = back @ values["stress"] @ back.T
        return _differences(case, values, case.found.of(asked.GIVEN))

    return figures


_translation = _transformed(asked.TRANSLATED, lambda case: np.eye(3))
_rotation = _transformed(asked.ROTATED, lambda case: case.questions.rotation.T)
_inversion = _transformed(asked.INVERTED, lambda case: -np.eye(3))


def _permutation(case: Case) -> list[Figure]:
    order = case.questions.permutation
    given = {
        name: value[order] if name in ("forces", "node_energy") else value
        for name, value in case.found.of(asked.GIVEN).items()
    }
    return _differences(case, case.found.of(asked.PERMUTED), given)


def _determinism(case: Case) -> list[Figure]:
    """The spread over the runs."""
    runs = case.found.values[asked.REPEATED]
    worst: dict[str, Figure] = {}
    for run in runs:
        for figure in _differences(case, run, runs[0]):
            if figure.quantity not in worst or figure.value > worst[figure.quantity].value:
                worst[figure.quantity] = figure
    return list(worst.values())


def _changed_graph(case: Case) -> list[Figure]:
    """The structure with atoms moved, and then the first again."""
    moved = _differences(case, case.found.of(asked.MOVED), case.exact.of(asked.MOVED))
    largest = float(np.abs(case.exact.of(asked.MOVED)["forces"]).max(initial=0.0))
    by = max(1.0, largest / sizes(case)["forces"])
    moved = [Figure(one.quantity, one.value, one.size * by) for one in moved]
    return moved + _differences(case, case.found.of(asked.AGAIN), case.found.of(asked.GIVEN))


# Difference quotients. Along each direction d the atoms are at +h d and at -h d.


def _quotients(answers: Answers) -> np.ndarray:
    """-J d for each direction [directions, atoms, 3], by central differences of forces."""
    runs = answers.values[asked.DISPLACED]
    pairs = zip(runs[0::2], runs[1::2], strict=True)
    return np.stack([(ahead["forces"] - behind["forces"]) / (2 * answers.step) for ahead, behind in pairs])


def _stiffness_size(case: Case) -> float:
    """Rounding of forces is divided by the step."""
    largest = float(np.abs(_quotients(case.exact)).max(initial=0.0))
    return max(largest, sizes(case)["forces"] / case.questions.step, _SMALLEST["stiffness"])


def _jacobian(case: Case) -> list[Figure]:
    difference = _quotients(case.found) - _quotients(case.exact)
    return [Figure("stiffness", _largest(difference), _stiffness_size(case))]


def _conservative(case: Case) -> list[Figure]:
    """The Jacobian of forces is symmetric: d J e = e J d for each two directions, a component."""
    quotients, ways = _quotients(case.found), case.questions.directions
    products = np.einsum("inx,jnx->ij", ways, quotients) / ways[0].size
    return [Figure("stiffness", _largest(products - products.T), _stiffness_size(case))]


def _slope(case: Case) -> list[Figure]:
    """Forces along each direction, by Simpson's rule, beside the difference of energies, a component."""
    step, ways = case.questions.step, case.questions.directions
    middle, runs = case.found.of(asked.GIVEN)["forces"], case.found.values[asked.DISPLACED]
    worst = 0.0
    for way, ahead, behind in zip(ways, runs[0::2], runs[1::2], strict=True):
        by_energy = -float((ahead["energy"] - behind["energy"]).sum()) / (2 * step)
        by_forces = float((way * (ahead["forces"] + 4 * middle + behind["forces"])).sum()) / 6
        worst = max(worst, abs(by_energy - by_forces)) if math.isfinite(by_energy - by_forces) else math.inf
    count, size = ways[0].size, sizes(case)
    return [Figure("forces", worst / count, max(size["forces"], size["energy"] * len(ways[0]) / (step * count)))]


def _drift(case: Case) -> list[Figure]:
    total = case.found.total
    assert total is not None
    size = sizes(case)["energy"]
    return [Figure("drift", _largest(total - total[0]) / len(case.questions.atoms), size)]


def _trajectory(case: Case) -> list[Figure]:
    """Total energies beside those of stock in float64, at each step."""
    assert case.found.total is not None and case.exact.total is not None
    difference = case.found.total - case.exact.total
    return [Figure("energy", _largest(difference) / len(case.questions.atoms), sizes(case)["energy"])]


_AT_REST, _PUSHED, _IN_TIME = (asked.GIVEN,), (asked.GIVEN, asked.DISPLACED), (asked.GIVEN, asked.DYNAMICS)
CHECKS = (
    Check("energy", "the energy is stock's", _AT_REST, _same("energy"), compares=True),
    Check("node energies", "the energy of each atom is stock's", _AT_REST, _same("node_energy"), compares=True),
    Check("forces", "forces are stock's", _AT_REST, _same("forces"), compares=True),
    Check("stress", "stress is stock's", _AT_REST, _same("stress"), compares=True),
    Check("force Jacobian", "derivatives of forces are stock's", _PUSHED, _jacobian, exact=_PUSHED, compares=True),
    Check("conservative", "the Jacobian of forces is symmetric", _PUSHED, _conservative, exact=_PUSHED),
    Check("slope of the energy", "forces are differences of the energy", _PUSHED, _slope),
    Check("translation", "values do not depend on the place", (asked.GIVEN, asked.TRANSLATED), _translation),
    Check("rotation", "values turn with the atoms", (asked.GIVEN, asked.ROTATED), _rotation),
    Check("inversion", "values are mirrored with the atoms", (asked.GIVEN, asked.INVERTED), _inversion),
    Check("permutation", "the order of atoms does not matter", (asked.GIVEN, asked.PERMUTED), _permutation),
    Check("determinism", "runs give the same values", (asked.GIVEN, asked.REPEATED), _determinism),
    Check(
        "changed graph",
        "moved atoms have stock's values, and the first ones have theirs again",
        (asked.GIVEN, asked.MOVED, asked.AGAIN),
        _changed_graph,
        exact=(asked.GIVEN, asked.MOVED),
        compares=True,
    ),
    Check("NVE drift", "the total energy is kept as well as by stock", _IN_TIME, _drift, factor=2.0),
    Check("NVE energies", "each step's total energy is stock's", _IN_TIME, _trajectory, exact=_IN_TIME, compares=True),
)
# Not of a single structure.
BATCH = Check("batch", "structures have the same values in a batch", (asked.GIVEN,), lambda case: [])
NAMES = tuple(check.name for check in (*CHECKS, BATCH))
OTHER_FACTORS = {check.name: check.factor for check in CHECKS if check.factor != FACTOR}
# The stock figures that say how exact stock is itself where it cannot be compared with a better one.
_NOISE = ("translation", "rotation", "permutation")
# Beyond it, relative to its size, a change is none of rounding.
_BROKEN = {"float32": 1e-3, "float64": 1e-6}


def figures_of(check: Check, case: Case) -> list[Figure]:
    """Empty if the check does not apply: a structure without stress, without a simulation, or that was not asked so."""
    if not (_has_answered(case.found, check.parts) and _has_answered(case.exact, check.exact)):
        return []
    return check.figures(case)


def _has_answered(answers: Answers, parts: Iterable[str]) -> bool:
    return all(answers.total is not None if part == asked.DYNAMICS else answers.values.get(part) for part in parts)


def batch_figures(case: Case, in_batch: Values) -> list[Figure]:
    """Of one structure of a batch, beside the same structure alone."""
    return _differences(case, in_batch, case.found.of(asked.GIVEN))


def all_figures(case: Case) -> dict[str, list[Figure]]:
    """By check; those that do not apply are left out."""
    found = {check.name: figures_of(check, case) for check in CHECKS}
    return {name: figures for name, figures in found.items() if figures}


# By check and quantity a figure, and that over its size.
Own = Mapping[tuple[str, str], tuple[float, float]]


def stocks_own(case: Case, in_batch: Sequence[Figure] = ()) -> Own:
    """Of stock on one structure.

    What compares with stock in float64 is at least what stock's own values change by when atoms are turned, moved or
    ordered anew, so that there is a measure of rounding where stock is what is compared with. Difference quotients
    divide this change by their step.
    """
    noise: dict[str, float] = {}
    figures = all_figures(case) | {BATCH.name: list(in_batch)}
    for name in _NOISE:
        for figure in figures.get(name, ()):
            noise[figure.quantity] = max(noise.get(figure.quantity, 0.0), figure.value)
    noise["stiffness"] = noise.get("forces", 0.0) / case.found.step
    compares = {check.name for check in CHECKS if check.compares}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name, several in figures.items():
        for figure in several:
            value = max(figure.value, noise.get(figure.quantity, 0.0)) if name in compares else figure.value
            before = found.get((name, figure.quantity), (0.0, 0.0))
            found[name, figure.quantity] = max(before[0], value), max(before[1], value / figure.size)
    return found


def not_symmetric(figures: Mapping[str, Mapping[str, list[Figure]]], dtype: str) -> str:
    """Which symmetries a model itself does not have, in words; figures: of stock, by structure and check.

    SevenNet's models without parity are no mirror images of themselves; a path must then differ as stock does.
    """
    texts = []
    for name in (*_NOISE, "inversion"):
        several = [figure for of in figures.values() for figure in of.get(name, ()) if figure.quantity == "forces"]
        worst = max(several, key=lambda figure: figure.value / figure.size, default=None)
        if worst is not None and worst.value > _BROKEN[dtype] * worst.size:
            texts.append(f"{name} changes forces of the model itself by {worst.value:.1e} eV/Å")
    return ", ".join(texts)


def limit_of(check: Check, figure: Figure, precision: str, own: Own, median: float) -> float:
    """precision: as in ``FLOOR``. own: as :func:`stocks_own`, of this structure.

    median: stock's figure over its size, of the median structure.
    """
    here = own.get((check.name, figure.quantity), (0.0, 0.0))[0]
    allowed = [value for value in (here, median * figure.size) if math.isfinite(value)]
    return max(FLOOR[precision] * figure.size, *(check.factor * value for value in allowed), 0.0)


def mev_per_atom(figure_quantity: str, value: float, volume_per_atom: float) -> float | None:
    """What a difference means for an atom: of forces along 0.1 angstrom, of stress along a strain of 1%.

    None for stress of a structure without a volume.
    """
    if figure_quantity == "stress":
        return 1e3 * value * volume_per_atom * _STRAIN if math.isfinite(volume_per_atom) else None
    along = {"forces": _DISPLACEMENT, "stiffness": 0.5 * _DISPLACEMENT**2}.get(figure_quantity, 1.0)
    return 1e3 * value * along
