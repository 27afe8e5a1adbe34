"""The main loop of ``equitune bench models``: build every contender of a model, then time one process at a time.

All processes of a model (or of a few) start at once: imports, builds and compilations run in parallel. Then each waits
idle while one of them is warmed up, timed and, on a GPU, profiled. Rows are written as soon as they are measured, and
kept ones are not measured again, so the same command continues an interrupted run. All of a row is measured in one run:
if anything of it is missing, of other code or of another run, so is the rest again; but for contenders that are named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate

from autotune.bench.contenders import chosen
from autotune.bench.model_rows import (
    Row,
    is_current,
    is_of_one_run,
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
    passes_of,
    wall_figures,
)
from autotune.database.maintenance import now_text
from autotune.errors import ConfigError, WorkerError
from autotune.measure.worker import Worker
from autotune.models.package import Package
from autotune.models.whole_model import PACKAGES, find_atoms, open_model, package_named, published_models
from autotune.text import is_ours
from kernelgen.device import DeviceFacts, device_facts

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
    structures = sorted(request.structures or default_structures(request.device), key=lambda one: len(find_atoms(one)))
    plans = [_plan(name, structures, request, folder, say) for name in models_named(request.models, say)]
    todo = [plan for plan in plans if plan.contenders]
    for start in range(0, len(todo), request.together):
        _measure_together(todo[start : start + request.together], request, folder, say)
    stored = stored_rows(folder, device_facts(request.device).slug)
    keys = [(p.model, s, w, request.dtype) for p in plans for s in structures for w in request.passes]
    return [stored[key] for key in keys if key in stored]


def default_structures(device: str) -> tuple[str, ...]:
    """A molecule, a crystal, a protein and a liquid; what a CPU can take where there is no GPU."""
    return ("aspirin", "mof") if device.startswith("cpu") else ("aspirin", "carbon", "protein", "water-box")


def models_named(names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """These models, whose packages must be installed, or all models of the installed packages."""
    if names:
        return list(names)
    known, missing = published_models(), {}
    for package in PACKAGES:
        try:
            package.require()
        except ConfigError as error:
            missing[package.name] = str(error)
    if len(missing) == len(PACKAGES):
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
                if not request.contenders and (missing or not is_of_one_run(row)):
                    missing = wanted
            else:
                missing = wanted
            if missing:
                plan.todo[structure, which] = missing
            else:
                say(f"{model} on {structure}, {which}: kept")
            cells = plan.kept.get((structure, which), {"contenders": {}})["contenders"]
            unknown = tuple(name for name in wanted if name in cells and _lacks_profile(cells[name]))
            if request.device.startswith("cuda") and unknown:
                plan.profiles[structure, which] = unknown
    return plan


def _lacks_profile(cell: Cell) -> bool:
    """Whether a run ended between the timing and the profile, or the profile failed."""
    return "error" not in cell and "device_ms" not in cell


def _measure_together(plans: Sequence[_Plan], request: Request, folder: Path, say: Callable[[str], None]) -> None:
    with ExitStack() as stack:
        exact = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="equitune-models-")))
        groups = []
        for plan in plans:
            settings = {
                name: ModelSetting(plan.model, name, request.device, request.dtype) for name in _processes(plan)
            }
            workers = {name: stack.enter_context(Worker(setting)) for name, setting in settings.items()}
            groups.append(_Group(plan, workers, request, folder, exact, say))
        say(f"building {', '.join(plan.model for plan in plans)}")
        _in_parallel([job for group in groups for job in group.preparations()])
        for group in groups:
            group.time_rows()
        for group in groups:
            group.profile_rows()


def _processes(plan: _Plan) -> tuple[str, ...]:
    return (REFERENCE, *plan.contenders)


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

    def preparations(self) -> list[Callable[[], None]]:
        """One job per process, to run side by side: build, read the structures, compile."""
        return [lambda name=name: self._prepare(name) for name in self.workers]  # type: ignore[misc]

    def _prepare(self, contender: str) -> None:
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
            exact = self._exact(structure, which, row)
            for contender in contenders:
                cell = self.ask(contender, ModelSession.measure, structure, which, exact, self.request.effort)
                row["contenders"][contender] = signed(contender, cell, self.facts)
            self._store(structure, which, row)
            # The second half of the samples, in reverse order, each with its profile.
            for contender in reversed(contenders):
                if "error" not in row["contenders"][contender]:
                    self._measure_again(contender, structure, which, row)
                    self._profile(contender, structure, which, row)
                    self._store(structure, which, row)
            for line in row_lines(row):
                self.say(line)

    def _measure_again(self, contender: str, structure: str, which: str, row: Row) -> None:
        more = self.ask(contender, ModelSession.measure_again, structure, which, self.request.effort)
        cell = row["contenders"][contender]
        samples = [*cell["wall_samples_ms"], *more.get("wall_samples_ms", [])]
        row["contenders"][contender] = cell | wall_figures(samples, row["atoms"])

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

    def _exact(self, structure: str, which: str, row: Row) -> Path | None:
        """The file with the values of stock in float64; None, with the reason in the row, if it cannot run."""
        path = self.exact / f"{self.plan.model}-{structure}-{which}.pt".replace("/", "_")
        answer = self.ask(REFERENCE, ModelSession.write_exact, structure, which, path)
        if "error" in answer:
            row["no_exact_values"] = answer["error"]
            return None
        return path

    def _store(self, structure: str, which: str, row: Row) -> None:
        row["date"] = now_text()
        self.rows[structure, which] = row
        store_rows(self.folder, device_facts(self.request.device), [row])
