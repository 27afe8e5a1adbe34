"""The loops of ``equitune bench models`` and ``largest``.

Of steps: build every contender of a model, then time one process at a time.

All processes of a model (or of a few) start at once: imports, builds and compilations run in parallel. Then each waits
idle while one of them is warmed up, timed and, on a GPU, profiled. Rows are written as soon as they are measured, and
kept ones are not measured again, so the same command continues an interrupted run. All of a row is measured in one run:
if anything of it is missing, of other code or of another run, so is the rest again; but for contenders that are named.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate

import torch

from autotune.bench import session as measuring
from autotune.bench.contenders import SYMMETRIX, CapturedForm, chosen, contenders_of
from autotune.bench.model_rows import (
    LARGEST,
    ModelRow,
    Row,
    aligned,
    identity_of,
    is_current,
    row_lines,
    signed,
    store_rows,
    stored_rows,
    was_measured_alike,
    what_a_row_depends_on,
    what_ours_depend_on,
)
from autotune.bench.session import (
    PASSES,
    REFERENCE,
    Cell,
    Effort,
    Given,
    ModelSession,
    ModelSetting,
    answers,
    passes_of,
    wall_figures,
)
from autotune.database.maintenance import now_text
from autotune.errors import ConfigError, PeerError, WorkerError
from autotune.measure.timing import timed
from autotune.measure.trial import is_out_of_memory
from autotune.measure.worker import Worker
from autotune.models.package import Package
from autotune.models.whole_model import RATTLED, find_atoms, open_model, package_named, published_models
from autotune.text import DEFAULT, MISSING, STOCK, TF32, count, is_ours, path_and_form, path_name, ratio_text, time_text
from autotune.workload.graphs import Bulk
from kernelgen.device import DeviceFacts, device_facts

if TYPE_CHECKING:
    from ase import Atoms


JOB_LIMIT_S = 900.0


@dataclass(frozen=True)
class Request:
    """What to measure; an empty selection means all that there is."""

    models: tuple[str, ...] = ()
    structures: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    passes: tuple[str, ...] = PASSES
    device: str = "cpu"
    dtype: str = "float32"
    effort: Effort = field(default_factory=Effort)
    fresh: bool = False
    # Models whose processes are built together: faster to set up, but all of them hold memory.
    together: int = 1


# A structure and a pass.
Place = tuple[str, str]


@dataclass
class _Plan:
    """One model: its package, what its rows depend on, and the contenders to measure in each row.

    profiles: contenders that were timed earlier, but not profiled. kept: rows that stay, in which contenders may be
    missing.
    """

    model: str
    package: Package
    depends: dict[str, Any]
    todo: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    profiles: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    kept: dict[Place, Row] = field(default_factory=dict)

    @property
    def contenders(self) -> tuple[str, ...]:
        groups = (*self.todo.values(), *self.profiles.values())
        return tuple(dict.fromkeys(name for names in groups for name in names))


def bench_models(request: Request, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """Measure what is missing; returns all rows of the request, kept ones included."""
    # A molecule, a crystal, a protein and a liquid; what a CPU can take where there is no GPU.
    on_cpu = request.device.startswith("cpu")
    usual = ("aspirin", "mof") if on_cpu else ("aspirin", "carbon", "protein", "water-box")
    structures = sorted(request.structures or usual, key=lambda structure: len(find_atoms(structure)))
    plans = [_plan(name, structures, request, folder, say) for name in models_named(request.models, say)]
    todo = [plan for plan in plans if plan.contenders]
    for start in range(0, len(todo), request.together):
        _measure_together(todo[start : start + request.together], request, folder, say)
    stored = stored_rows(folder, device_facts(request.device).slug)
    keys = [(p.model, s, w, request.dtype) for p in plans for s in structures for w in request.passes]
    return [stored[key] for key in keys if key in stored]


def models_named(names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """These models, whose packages must be installed, or all models of the installed packages."""
    if names:
        return list(names)
    known, missing = published_models(), {}
    packages = [package_named(name) for name in dict.fromkeys(model.package for model in known.values())]
    for package in packages:
        try:
            package.require()
        except ConfigError as error:
            missing[package.name] = str(error)
    if len(missing) == len(packages):
        raise ConfigError("; ".join(missing.values()))
    for reason in missing.values():
        say(f"left out: {reason}")
    return [name for name, model in known.items() if model.package not in missing]


def package_of_model(model: str) -> Package:
    """ConfigError if it is not installed."""
    published = published_models().get(model)
    package = package_named(published.package) if published else open_model(model).package
    package.require()
    return package


def _plan(model: str, structures: Sequence[str], request: Request, folder: Path, say: Callable[[str], None]) -> _Plan:
    package, facts = package_of_model(model), device_facts(request.device)
    depends = what_a_row_depends_on(model, package, facts)
    wanted = chosen(package, request.contenders)
    stored = {} if request.fresh else stored_rows(folder, facts.slug)
    plan = _Plan(model, package, depends)
    for structure in structures:
        for which in passes_of(package, find_atoms(structure), request.passes):
            row = stored.get((model, structure, which, request.dtype))
            if row is not None and was_measured_alike(row, depends):
                plan.kept[structure, which] = row
                cells = row["contenders"]
                missing = tuple(one for one in wanted if one not in cells or not is_current(one, cells[one], facts))
                if not request.contenders and (missing or not ModelRow(row).of_one_run):
                    missing = wanted
            else:
                missing = wanted
            if missing:
                plan.todo[structure, which] = missing
            else:
                say(f"{model} on {structure}, {which}: kept")
            # A run may have ended between the timing and the profile, or the profile failed.
            cells = plan.kept.get((structure, which), {"contenders": {}})["contenders"]
            timed = (name for name in wanted if name in cells and "error" not in cells[name])
            unknown = tuple(name for name in timed if "device_ms" not in cells[name])
            if request.device.startswith("cuda") and unknown:
                plan.profiles[structure, which] = unknown
    return plan


def _measure_together(plans: Sequence[_Plan], request: Request, folder: Path, say: Callable[[str], None]) -> None:
    with ExitStack() as stack:
        exact = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="equitune-models-")))
        groups = []
        for plan in plans:
            workers = {
                name: stack.enter_context(Worker(ModelSetting(plan.model, name, request.device, request.dtype)))
                for name in (REFERENCE, *plan.contenders)
            }
            groups.append(_Group(plan, workers, request, folder, exact, say))
        say(f"building {', '.join(plan.model for plan in plans)}")
        # A job per process, side by side: build, read the structures, compile.
        _in_parallel([functools.partial(group.prepare, name) for group in groups for name in group.workers])
        for group in groups:
            group.time_rows()
        for group in groups:
            group.profile_rows()


def _in_parallel(jobs: Sequence[Callable[[], None]]) -> None:
    pool = ThreadPoolExecutor(max_workers=max(1, len(jobs)))
    try:
        for future in [pool.submit(job) for job in jobs]:
            future.result()
    finally:
        # Ctrl-C must not wait for builds: the processes are ended next, and their threads with them.
        pool.shutdown(wait=False, cancel_futures=True)


def answer_of(
    worker: Worker,
    limit_s: float,
    method: Callable[Concatenate[ModelSession, Given], Cell],
    *given: Given.args,
    **named: Given.kwargs,
) -> Cell:
    """A contender's answer; a lost process gives a reason, and the next job a new process."""
    try:
        answer = worker.ask(limit_s, method, *given, **named)
    except WorkerError as error:
        return {"error": str(error)}
    if answer.pop("device_lost", False):
        worker.close()
    return answer


@dataclass
class _Group:
    """The processes of one model, by contender."""

    plan: _Plan
    workers: Mapping[str, Worker]
    request: Request
    folder: Path
    exact: Path
    say: Callable[[str], None]
    rows: dict[Place, Row] = field(default_factory=dict)

    @property
    def facts(self) -> DeviceFacts:
        return device_facts(self.request.device)

    def ask(
        self,
        contender: str,
        method: Callable[Concatenate[ModelSession, Given], Cell],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Cell:
        return answer_of(self.workers[contender], JOB_LIMIT_S, method, *given, **named)

    def prepare(self, contender: str) -> None:
        structures = dict.fromkeys(structure for structure, _ in self.plan.todo)
        if "error" in self.ask(contender, ModelSession.facts):
            return
        for index, structure in enumerate(structures):
            self.ask(contender, ModelSession.sizes, structure)
            # Ours compile for each size of graph, and what stock and others keep of a large graph leaves no memory.
            if is_ours(contender) or (index == 0 and contender != REFERENCE):
                for which in dict.fromkeys(which for of, which in self.plan.todo if of == structure):
                    self.ask(contender, ModelSession.compile, structure, which)

    def time_rows(self) -> None:
        for (structure, which), contenders in self.plan.todo.items():
            row = self._row(structure, which)
            # The file with the values of stock in float64, if it can run.
            path = self.exact / f"{self.plan.model}-{structure}-{which}.pt".replace("/", "_")
            answer = self.ask(REFERENCE, ModelSession.write_exact, structure, which, path)
            exact = None if "error" in answer else path
            row |= {"no_exact_values": answer["error"]} if "error" in answer else {}
            for contender in contenders:
                cell = self.ask(contender, ModelSession.measure, structure, which, exact, self.request.effort)
                row["contenders"][contender] = signed(contender, cell, self.facts)
            self._store(structure, which, row)
            # The second half of the samples, in reverse order, each with its profile.
            for contender in (name for name in reversed(contenders) if "error" not in row["contenders"][name]):
                more = self.ask(contender, ModelSession.measure_again, structure, which, self.request.effort)
                cell = row["contenders"][contender]
                samples = [*cell["wall_samples_ms"], *more.get("wall_samples_ms", [])]
                row["contenders"][contender] = cell | wall_figures(samples, row["atoms"])
                self._profile(contender, structure, which, row)
                self._store(structure, which, row)
            for line in row_lines(row):
                self.say(line)

    def profile_rows(self) -> None:
        """Profile what an earlier run left without."""
        for (structure, which), contenders in self.plan.profiles.items():
            row = self.rows.get((structure, which)) or self.plan.kept[structure, which]
            for contender in contenders:
                self._profile(contender, structure, which, row)
            self._store(structure, which, row)

    def _profile(self, contender: str, structure: str, which: str, row: Row) -> None:
        """Add device time, launches, and the memory that parts of the model keep."""
        found = self.ask(contender, ModelSession.profile, structure, which)
        row["contenders"][contender] |= {key: value for key, value in found.items() if key != "error"}

    def _row(self, structure: str, which: str) -> Row:
        kept = self.plan.kept.get((structure, which), {"contenders": {}})
        sizes = self.ask(REFERENCE, ModelSession.sizes, structure)
        command = f"equitune bench models --model {self.plan.model} --structure {structure}"
        return {
            "model": self.plan.model,
            **self.plan.depends,
            **what_ours_depend_on(self.facts),
            "structure": structure,
            "atoms": sizes.get("atoms"),
            "edges": sizes.get("edges"),
            "pass": which,
            "dtype": self.request.dtype,
            "command": command + (f" --dtype {self.request.dtype}" if self.request.dtype != "float32" else ""),
            "contenders": dict(kept["contenders"]),
        }

    def _store(self, structure: str, which: str, row: Row) -> None:
        row["date"] = now_text()
        self.rows[structure, which] = row
        store_rows(self.folder, device_facts(self.request.device), [row])


# ``equitune bench largest``: the largest diamond crystal that a device can take, by each contender.
#
# Contenders follow each other, so that each has the device to itself, in a process of its own. There the crystal is
# doubled, one direction after the other, until energies, forces and stress fail or a limit of time or atoms is reached.
# Every size is stored at once. A contender that was interrupted starts again; finished ones are kept.

CELL = Bulk("C", "diamond", 3.567)
CELL_ATOMS = 8
FIRST = (2, 2, 2)
# Seconds of doubling for each contender, the building of its model not counted.
LIMIT_S = 240.0
# Copies of a cell have equal forces. In float32, positions of hundreds of angstrom are off by 1e-5, and displacements
# are RATTLED; kernels that address too much memory are off by everything.
MOST_UNLIKE = 0.05

Repeats = tuple[int, int, int]


@dataclass(frozen=True)
class LargestRequest:
    """What to measure; an empty selection means all. most_atoms: the doubling stops there; a CPU needs it."""

    models: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    fresh: bool = False
    most_atoms: int | None = None
    limit_s: float = LIMIT_S


def largest_crystals(request: LargestRequest, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """Measure what is missing; returns the row of each model, kept contenders included."""
    least, _ = next(crystals())
    if request.most_atoms is None and torch.device(request.device).type == "cpu":
        raise ConfigError(
            "on a CPU the crystal would be doubled until the host's memory is full, and the host may not survive that; "
            "expected a ceiling, such as --most-atoms 512"
        )
    if request.most_atoms is not None and request.most_atoms < least:
        raise ConfigError(f"--most-atoms is {request.most_atoms}; expected at least {least}, the smallest crystal")
    return [_measured(model, request, folder, say) for model in models_named(request.models, say)]


def contenders_for(package: Package) -> tuple[str, ...]:
    """Those of a package's models that can run on any number of atoms.

    The captured forms of others need their memory and that of a graph: nobody captures where memory ends. Forms in TF32
    need the memory of those in float32.
    """
    captured = {f"{path}-captured" for path in (STOCK, *package.peers)}
    left_out = {SYMMETRIX, TF32, *captured}
    return tuple(name for name in contenders_of(package) if not {name, path_and_form(name)[0]} & left_out)


def crystals() -> Iterator[tuple[int, Repeats]]:
    """Numbers of atoms and repeats, each with twice the atoms of the last, without end."""
    repeats, direction = list(FIRST), 0
    while True:
        yield CELL_ATOMS * math.prod(repeats), (repeats[0], repeats[1], repeats[2])
        repeats[direction] *= 2
        direction = (direction + 1) % 3


def crystal(repeats: Repeats) -> Atoms:
    """Equal cells whose atoms are slightly displaced, as otherwise forces would be zero."""
    cell = CELL.atoms()
    cell.rattle(RATTLED, seed=0)
    return cell.repeat(repeats)


@answers
def step_on_crystal(session: ModelSession, repeats: Repeats) -> Cell:
    """Atoms, edges, memory and the time of one step after a warm-up, on a crystal of so many cells."""
    if isinstance(session.model, CapturedForm):
        session.model.forget()  # the last size's graph is no part of this one's memory
    atoms = crystal(repeats)
    inputs = _inputs(session, atoms)
    forces: list[torch.Tensor] = []

    def step() -> None:
        forces[:] = [session.model.energies_and_forces(inputs, stress=True).forces.detach()]

    measuring.warm_up(step, session.device, 1, 0.0)
    peak = measuring.peak_mib(step, session.device)
    seconds = timed(step, session.device)
    _require_alike(forces[0])
    figures: Cell = {"atoms": len(atoms), "edges": int(session.model.edges(inputs).shape[1])}
    figures |= {} if peak is None else {"peak_mib": peak}
    return figures | {"wall_ms": round(seconds * 1e3, 4)}


def _inputs(session: ModelSession, atoms: Atoms) -> dict[str, Any]:
    """The package's own; a host without the memory for its list of neighbours is not the device's fault."""
    try:
        return session.model.inputs([atoms])
    except Exception as error:
        of_device = isinstance(error, torch.OutOfMemoryError) or "CUDA" in str(error)
        if torch.device(session.device).type == "cuda" and is_out_of_memory(error) and not of_device:
            raise PeerError("the host has no memory for the list of neighbours") from error
        raise


def _require_alike(forces: torch.Tensor) -> None:
    """PeerError unless all copies of the cell have the same forces [atoms, 3], which are not zero."""
    copies = forces.reshape(-1, CELL_ATOMS, 3)
    largest = float(copies[0].abs().max())
    unlike = float((copies - copies[0]).abs().max()) / largest if largest > 0 else math.nan
    if not unlike <= MOST_UNLIKE:
        raise PeerError(f"wrong values: forces of equal cells differ by {unlike:.1e} of the largest")


def _measured(model: str, request: LargestRequest, folder: Path, say: Callable[[str], None]) -> Row:
    package, facts = package_of_model(model), device_facts(request.device)
    depends = what_a_row_depends_on(model, package, facts)
    command = f"equitune bench largest --model {model}"
    command += f" --dtype {request.dtype}" if request.dtype != "float32" else ""
    command += f" --most-atoms {request.most_atoms}" if request.most_atoms is not None else ""
    row: Row = {"model": model, "structure": STRUCTURE, "pass": LARGEST, "dtype": request.dtype}
    row |= {"atoms": None, "edges": None, "command": command, "contenders": {}}
    row |= depends | what_ours_depend_on(facts)
    wanted = chosen(package, request.contenders, contenders_for)
    if not request.contenders:
        wanted = tuple(name for name in wanted if name != DEFAULT)  # it takes the memory of the tuned one
    kept = stored_rows(folder, facts.slug).get(identity_of(row))
    if kept is not None and was_measured_alike(kept, depends):
        row["contenders"] = dict(kept["contenders"])
        row["atoms"], row["edges"] = kept["atoms"], kept["edges"]
    run = _Run(row, request, folder, say)
    for contender in wanted:
        cell = row["contenders"].get(contender, {})
        if request.fresh or not (finished(cell, request.most_atoms) and is_current(contender, cell, facts)):
            run.double(contender)
        else:
            say(f"{model}, {contender}: kept")
    return row


@dataclass
class _Run:
    """The row of one model while it is measured."""

    row: Row
    request: LargestRequest
    folder: Path
    say: Callable[[str], None]

    def double(self, contender: str) -> None:
        """Ask one contender for ever larger crystals, and keep its cell after each."""
        given = self.request
        setting = ModelSetting(self.row["model"], contender, given.device, given.dtype)
        self.say(f"{setting.model}, {contender}: building")
        with Worker(setting) as worker:
            # A note, or the reason for which it cannot take part.
            cell = {key: value for key, value in answer_of(worker, JOB_LIMIT_S, ModelSession.facts).items() if value}
            end = time.monotonic() + given.limit_s
            sizes = crystals()
            if stopped(cell):
                self._keep(contender, cell)
            while not stopped(cell):
                atoms, repeats = next(sizes)
                answer = self._answer(worker, atoms, repeats, end)
                if "error" not in answer:
                    cell |= {"largest": answer}
                else:
                    why = answer.pop("error")
                    cell |= {"ended": {"atoms": atoms, "why": why} | answer}
                    cell |= {} if "largest" in cell else {"error": why}
                self._keep(contender, cell)
        self.say(f"  {why_ended(cell)}")

    def _answer(self, worker: Worker, atoms: int, repeats: Repeats, end: float) -> Cell:
        """A step's figures; or why there are none, such as that the clock shows ``end``."""
        most, left = self.request.most_atoms, end - time.monotonic()
        if most is not None and atoms > most:
            return {"error": f"more than --most-atoms {most}", "ceiling": most}
        answer: Cell = answer_of(worker, left, step_on_crystal, repeats) if left > 0 else {"error": ""}
        if "error" not in answer:
            self.say(f"  {count(atoms)} atoms: {time_text(answer['wall_ms'] * 1e3)}")
        elif time.monotonic() >= end:
            return {"error": f"time limit of {self.request.limit_s:.0f} s"}
        return answer

    def _keep(self, contender: str, cell: Cell) -> None:
        self.row["contenders"][contender] = signed(contender, cell, device_facts(self.request.device))
        most = max(self.row["contenders"].values(), key=atoms_of).get("largest", {})
        self.row |= {"atoms": most.get("atoms"), "edges": most.get("edges"), "date": now_text()}
        store_rows(self.folder, device_facts(self.request.device), [self.row])


# Rows of the largest crystals: beside those of times in ``results/models/DEVICE.json``, as a pass of its own.
#
# A cell is ``{"largest": {atoms, edges, wall_ms, peak_mib}, "ended": {atoms, why}}``: what fitted, and the first that
# did not. Without ``largest`` it has the reason as ``error``. Without ``ended`` the run was interrupted. No figure is
# where those of times are: contenders took different numbers of atoms, so their times must not be compared. The row's
# own numbers of atoms and edges are the largest of all.

STRUCTURE = "diamond"
StoredCell = Mapping[str, Any]


def stopped(cell: StoredCell) -> bool:
    """Whether the doubling came to an end, or could not begin."""
    return "error" in cell or "ended" in cell


def finished(cell: StoredCell, most_atoms: int | None) -> bool:
    """Whether measuring again with this ceiling would say no more."""
    ended = cell.get("ended", {})
    below = "ceiling" in ended and (most_atoms is None or most_atoms >= ended["atoms"])
    return stopped(cell) and not below


def atoms_of(cell: StoredCell) -> int:
    """Atoms of the largest crystal that fitted; 0 if none did."""
    return int(cell.get("largest", {}).get("atoms", 0))


def largest_other(cells: Mapping[str, StoredCell]) -> int:
    """The most atoms that a contender without Equitune took; 0 if none took any."""
    return max((atoms_of(cell) for name, cell in cells.items() if not is_ours(name)), default=0)


def why_ended(cell: StoredCell) -> str:
    """``131,072 atoms: out of memory``, the reason for which nothing fitted, or that the run was interrupted."""
    ended = cell.get("ended")
    if ended:
        return f"{count(ended['atoms'])} atoms: {ended['why']}"
    return str(cell.get("error", "interrupted"))


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per model and contender, Equitune first."""
    heads = ("model", "dtype", "path", "atoms", "over largest other", "edges", "memory", "a step", "ended by")
    return aligned([heads, *(_line(row, name) for row in rows for name in row["contenders"])])


def _line(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    cell = row["contenders"][name]
    head = (row["model"], row["dtype"], path_name(name))
    if not atoms_of(cell):
        return (*head, *[MISSING] * 5, why_ended(cell))
    found, other = cell["largest"], largest_other(row["contenders"])
    ratio = ratio_text(found["atoms"] / other) if other else MISSING
    memory = f"{found['peak_mib'] / 1024:.2f} GiB" if "peak_mib" in found else MISSING
    return (
        *head,
        count(found["atoms"]),
        ratio,
        count(found["edges"]),
        memory,
        time_text(found["wall_ms"] * 1e3),
        why_ended(cell),
    )
