"""Certify paths of a model: is each the same potential as the package's own model in float64?

    certificate = certify("checkpoint.pth")          # or a module, or a WholeModel
    print(certificate)                               # a table
    certificate.passed, certificate.record           # a verdict, and plain data with provenance

For each path and precision :mod:`observations` are made of all structures, in a process of its own, and judged by
:mod:`checks`. A path may pass, fail, or be refused: it says itself that it does not compute this model here.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.bench.contenders import build, contenders_of, require_usable
from autotune.bench.session import text_of
from autotune.certification import checks
from autotune.certification import observations as asked
from autotune.certification.checks import CHECKS, CUT, FAIL, PASS, REFUSED, Case, Check, Figure
from autotune.certification.observations import Answers, Questions, Values
from autotune.certification.structures import as_record, draw, smallest
from autotune.certification.table import table_of
from autotune.database.maintenance import driver_version, software_versions
from autotune.database.store import device_record, replace_file
from autotune.errors import ConfigError, WorkerError, unknown_name
from autotune.measure.worker import Worker
from autotune.models.package import dtype_of
from autotune.models.whole_model import DTYPES, WholeModel, open_made, open_model
from autotune.paths import installed_version
from autotune.text import CAPTURED, STOCK, TF32, TUNED, precision_of
from autotune.workload.toml_tables import parse_duration
from kernelgen.device import device_facts
from kernelgen.errors import EquituneError, InputError
from kernelgen.version import GENERATOR_VERSION, __version__

if TYPE_CHECKING:
    from ase import Atoms

SCHEMA = 1
# What a user calls the path whose steps are one launch.
_SHORT = {"captured": CAPTURED, "captured-tf32": f"{TF32}-captured"}
# Seconds that one structure may take; a path that hangs is then ended.
_LIMIT_S = 900.0
# A path that ended its process this often is asked nothing more.
_LOSSES = 3
# Most of a budget for the values of stock in float64, so that one path can be asked as much; the rest is not asked.
_EXACT_SHARE = 0.4
_NO_TIME = "the budget was over"
Record = dict[str, Any]
# A path of a user's own: the model by it, from a stock one that it may change.
BuildPath = Callable[[WholeModel], WholeModel]


@dataclass(frozen=True)
class Effort:
    """How much each structure is asked. dynamics: steps at constant energy. searched: of smaller structures, at most.

    large: structures with more atoms are only evaluated, turned and with atoms moved.
    """

    directions: int = 2
    repeats: int = 10
    dynamics: int = 20
    searched: int = 24
    large: int = 32


EFFORTS = {
    "quick": Effort(directions=2, repeats=3, dynamics=6, searched=12),
    "normal": Effort(),
    "thorough": Effort(directions=8, dynamics=500, searched=60, large=200),
}
# Of drawn structures, those that are simulated and run ten times; others run twice.
_SIMULATED = ("molecule", "crystal")
_FEW_REPEATS = 2
_OF_LARGE = (asked.GIVEN, asked.ROTATED, asked.MOVED, asked.AGAIN)


# A path in its process.


class PathSession:
    """A path's model, or why there is none. refused: the path itself says that it cannot be."""

    def __init__(
        self, open_stock: Callable[[], WholeModel], path: str, device: str, own: BuildPath | None = None
    ) -> None:
        # What a certificate runs is not what a user's models miss.
        os.environ["EQUITUNE_MISSES"] = "0"
        self.error = self.note = ""
        self.refused = False
        try:
            if own is None and path != CAPTURED:
                require_usable(path, device)  # before the model is opened in vain
            stock = open_stock()
            self.facts = _facts_of(stock)
            self.model, self.note = (own(stock), "") if own is not None else _built(path, stock)
            if not isinstance(self.model, WholeModel):
                raise TypeError(f"{path!r} returned a {type(self.model).__name__}; expected a WholeModel")
        except Exception as error:
            self.error, self.refused = text_of(error), isinstance(error, EquituneError)

    def opened(self) -> Record:
        if self.error:
            return {"error": self.error, "refused": self.refused}
        return self.facts | {"note": self.note}

    def answer(self, questions: Questions) -> Answers:
        return asked.answer(self.model, questions)

    def together(self, structures: Sequence[Atoms]) -> list[Values] | str:
        """The values of a batch, or why there are none."""
        try:
            return asked.values_of(self.model, structures)
        except Exception as error:
            return text_of(error)


@dataclass(frozen=True)
class PathSetting:
    """Opens a path of a model that has a name: a file, a published model, or ``module:function``."""

    model: str
    path: str
    device: str
    dtype: str | None

    def open(self) -> PathSession:
        opening = functools.partial(open_model, self.model, device=self.device, dtype=self.dtype)
        return PathSession(opening, self.path, self.device)


class _Here:
    """Answers as a worker does, in this process: for models that are objects, and for paths that are functions."""

    def __init__(self, session: Callable[[], PathSession]) -> None:
        self._open = session
        self._session: PathSession | None = None

    def ask(self, limit_s: float, method: Callable[..., Any], *given: Any) -> Any:
        if self._session is None:
            self._session = self._open()
        return method(self._session, *given)

    def close(self) -> None:
        self._session = None


def _built(path: str, stock: WholeModel) -> tuple[WholeModel, str]:
    if path == CAPTURED and torch.device(stock.device).type == "cpu":
        from autotune.models.capture import capture

        model, note = build(TUNED, stock)
        return model.with_module(capture(model.module)), f"{note}; padded inputs, no graph on a CPU"
    return build(path, stock)


def _facts_of(model: WholeModel) -> Record:
    weights = hashlib.sha256()
    for name, tensor in model.module.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            weights.update(name.encode())
            weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {
        "package": model.package.name,
        "install": model.package.install,
        "class": f"{type(model.module).__module__}.{type(model.module).__qualname__}",
        "parameters": sum(weight.numel() for weight in model.module.parameters()),
        "weights": weights.hexdigest()[:16],
        "species": list(model.species),
        "cutoff": model.cutoff,
        "dtype": str(dtype_of(model.module)).removeprefix("torch."),
        "contenders": list(contenders_of(model.package)),
        "peers": list(model.package.peers),
        "captured": model.package.captured,
    }


@dataclass(frozen=True)
class _Subject:
    """What is certified, and how a path of it is opened."""

    name: str
    device: str
    model: WholeModel | None
    own: Mapping[str, BuildPath]

    def asker(self, path: str, dtype: str | None) -> Worker | _Here:
        if self.model is None and not self.own:
            return Worker(PathSetting(self.name, path, self.device, dtype))
        return _Here(lambda: PathSession(functools.partial(self._stock, dtype), path, self.device, self.own.get(path)))

    def _stock(self, dtype: str | None) -> WholeModel:
        if self.model is None:
            return open_model(self.name, device=self.device, dtype=dtype)
        return open_made(self.name, _copied(self.model), device=self.device, dtype=dtype)


def _subject(model: Any, device: str, own: Mapping[str, BuildPath]) -> _Subject:
    if isinstance(model, str | os.PathLike):
        return _Subject(os.fspath(model), device, None, own)
    whole = open_made(type(model).__name__, _copied(model), device=device)
    return _Subject(whole.name, device, whole, own)


def _copied(model: Any) -> Any:
    """Opening a module moves it to the device: the user's stays where it is."""
    if isinstance(model, WholeModel):
        return model.with_module(copy.deepcopy(model.module))
    return copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model


# The certificate.


@dataclass
class Certificate:
    """record: plain data, which grows while paths are measured.

    ``model``, ``device``, ``software``, ``seed``, ``asked`` and others say what was certified, where. ``structures``
    are complete, by name; ``left_out`` says why stock does not compute others. Each of ``paths`` has a ``verdict``
    (pass, fail, refused, or cut: a budget ended before it was asked all), a ``reason``, ``refused`` and ``failed``
    (structures without values, and why), ``not_asked`` (for want of time), ``seconds``, ``differences`` from the
    reference (the largest ``energy`` in eV/atom and ``forces`` in eV/Å), ``checks``: by name the ``value`` that is
    closest to its ``limit``, ``stock``'s own figure, ``mev_per_atom``, the ``structure``, and of a failure
    ``failed_on``; the first that fails has the ``smallest`` structure that shows it. None stands for what is not
    finite.
    """

    record: Record

    @property
    def passed(self) -> bool:
        """Whether a path besides stock passed, and none failed; paths that are refused or cut do not count."""
        verdicts = [path["verdict"] for path in self.record["paths"]]
        besides_stock = [path["verdict"] for path in self.record["paths"] if path["path"] != STOCK]
        return FAIL not in verdicts and PASS in besides_stock

    def path(self, path: str, dtype: str) -> Record:
        """What was found of a path; InputError if it was not asked."""
        for found in self.record["paths"]:
            if (found["path"], found["dtype"]) == (_SHORT.get(path, path), dtype):
                return found
        known = ", ".join(f"{found['path']} in {found['dtype']}" for found in self.record["paths"])
        raise InputError(f"the certificate has no path {path!r} in {dtype!r}; it has {known}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the record as JSON, a path a line."""
        paths = ",\n".join(_line(path) for path in self.record["paths"])
        rest = "".join(f"{_line(name)}: {_line(value)},\n" for name, value in self.record.items() if name != "paths")
        replace_file(Path(path), f'{{{rest}"paths": [\n{paths}\n]}}\n')
        return Path(path)

    def __str__(self) -> str:
        return table_of(self.record)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def certify(
    model: Any,
    structures: Mapping[str, Atoms] | Sequence[Atoms] | None = None,
    *,
    paths: Sequence[str] | Mapping[str, BuildPath | None] = (),
    dtypes: Sequence[str] = ("float64", "float32"),
    device: str = "cpu",
    seed: int = 0,
    effort: str = "normal",
    budget: float | str | None = None,
    on_path: Callable[[Certificate], None] | None = None,
) -> Certificate:
    """Measure each path of a model against the package's own model in float64.

    model: a checkpoint's path, the name of a published model, ``module:function``, a module, or a WholeModel; modules
    are copied. structures: by name, or in their order; None draws them from the model's elements.
    paths: names (``equitune``, ``captured``, ``cuequivariance``, ``openequivariance``, other contenders), also
    ``equitune-tf32`` and ``captured-tf32``, which are asked in float32 alone and have limits of their class; or by name
    a function that makes the model by a path of your own from a stock WholeModel, None for a known path. All known
    ones if none is named. Named models are opened in a process for each path, objects and functions in this.
    dtypes: precisions of the paths. device: cpu, cuda or cuda:N; unlike the command, a GPU is not taken unasked.
    seed: of structures, rotations and displacements. effort: quick, normal or thorough.
    budget: seconds, or a text such as ``"10m"``, for all of it. What is cheapest and tells most comes first; what it
    does not suffice for is in ``not_asked`` of the record and of its path, which is cut and has not passed.
    on_path: called with the growing certificate after each path.

    Nothing is written: ``certificate.save`` writes the record, ``autotune.report.write_certificate`` the page.

    Raises ConfigError for a model that cannot be opened, or unknown names; InputError for structures that stock refuses
    all.
    """
    own = {name: make for name, make in paths.items() if make is not None} if isinstance(paths, Mapping) else {}
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ConfigError(unknown_name("dtype", dtype, DTYPES))
    if effort not in EFFORTS:
        raise ConfigError(unknown_name("effort", effort, EFFORTS))
    given: Mapping[str, Atoms] | None
    if structures is None or isinstance(structures, Mapping):
        given = structures
    else:
        given = {f"{place}: {atoms.get_chemical_formula()}": atoms for place, atoms in enumerate(structures, 1)}
    seconds = None if budget is None else parse_duration(budget)
    run = _Run(_subject(model, device, own), tuple(dtypes), seed, EFFORTS[effort], seconds)
    try:
        run.begin(given, [_SHORT.get(name, name) for name in paths], effort)
        certificate = Certificate(run.record)
        todo = run.order()
        for place, (path, dtype) in enumerate(todo):
            for after in todo[place + 1 : place + 2]:
                if not run.is_late(run.opened_s):
                    run.prepare(*after)
            run.measure(path, dtype)
            if on_path is not None:
                on_path(certificate)
    finally:
        run.close()
    return certificate


@dataclass
class _Run:
    """What is known so far. own: of stock, by dtype, structure, check and quantity; medians: over the structures."""

    subject: _Subject
    dtypes: tuple[str, ...]
    seed: int
    effort: Effort
    seconds: float | None = None
    begun: float = field(default_factory=lambda: time.monotonic())
    # What it took to open stock; by dtype, what stock was not asked for want of time.
    opened_s: float = 0.0
    unasked: dict[str, dict[str, str]] = field(default_factory=dict)
    record: Record = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    structures: dict[str, Atoms] = field(default_factory=dict)
    is_drawn: bool = True
    exact: dict[str, Answers] = field(default_factory=dict)
    timesteps: dict[str, float] = field(default_factory=dict)
    own: dict[str, dict[str, checks.Own]] = field(default_factory=dict)
    askers: dict[tuple[str, str], Worker | _Here] = field(default_factory=dict)
    reference_dtype: str = "float64"

    def begin(self, given: Mapping[str, Atoms] | None, paths: Sequence[str], effort: str) -> None:
        """Open the reference, choose paths and structures, and see which of them stock computes."""
        opened = self._ask(STOCK, self.reference_dtype, PathSession.opened)
        self.opened_s = time.monotonic() - self.begun
        if "error" in opened:
            # Files of NequIP keep their dtype.
            in_single = self._ask(STOCK, "float32", PathSession.opened)
            if "error" in in_single or "float32" not in self.dtypes:
                raise ConfigError(opened["error"].removeprefix("ConfigError: "))
            opened, self.reference_dtype, self.dtypes = in_single, "float32", ("float32",)
        self.paths = _chosen(opened, paths, self.subject.own)
        self.is_drawn = given is None
        self.structures = dict(given or draw(opened["species"], opened["cutoff"], self.seed))
        self.record |= _provenance(self.subject, opened, self.seed, effort, self.reference_dtype)
        if self.seconds is not None:
            self.record |= {"budget_s": self.seconds, "not_asked": {}}
            self.structures = dict(sorted(self.structures.items(), key=lambda item: len(item[1])))
        left_out: Record = {}
        for name in list(self.structures):
            if self.exact and self.left(_EXACT_SHARE) <= 0:
                self.record["not_asked"][name] = _NO_TIME
                del self.structures[name]
                continue
            try:
                self._add_exact(name)
            except (InputError, WorkerError) as error:
                left_out[name] = str(error)
                del self.structures[name]
        if not self.structures:
            raise InputError(f"stock computes none of the structures: {left_out}")
        self.record["structures"] = {name: as_record(atoms) for name, atoms in self.structures.items()}
        self.record["left_out"] = left_out
        self.record["asked"] = {"paths": list(self.paths), "dtypes": list(self.dtypes)}
        self.record["paths"] = []

    def _add_exact(self, name: str) -> None:
        """Stock's answers in float64: what others are compared with, and no more."""
        questions = self.questions(name, self.reference_dtype)
        first = self._ask(STOCK, self.reference_dtype, PathSession.answer, replace(questions, parts=(asked.GIVEN,)))
        if asked.GIVEN in first.errors:
            raise InputError(f"stock: {first.errors[asked.GIVEN]}")
        self.timesteps[name] = asked.timestep_fs(questions.atoms, first.of(asked.GIVEN)["forces"])
        # Once more is enough to see whether it repeats itself.
        questions = replace(self.questions(name, self.reference_dtype), repeats=_FEW_REPEATS)
        rest = tuple(part for part in questions.parts if part != asked.GIVEN)
        questions = replace(questions, parts=rest, seconds=self.left(_EXACT_SHARE))
        found = self._ask(STOCK, self.reference_dtype, PathSession.answer, questions)
        if found.not_asked:
            self.record["not_asked"] |= {f"{name}, {part}": _NO_TIME for part in found.not_asked}
        self.exact[name] = replace(found, values=first.values | found.values)

    def questions(self, name: str, dtype: str, atoms: Atoms | None = None) -> Questions:
        effort, known = self.effort, self.structures.get(name)
        atoms = known if atoms is None else atoms
        assert atoms is not None
        often = name in _SIMULATED or not self.is_drawn
        made = asked.questions_about(
            atoms,
            dtype,
            self.seed,
            directions=effort.directions,
            repeats=effort.repeats if often else _FEW_REPEATS,
            dynamics=effort.dynamics if often else 0,
        )
        if len(atoms) > effort.large:
            made = replace(made, parts=_OF_LARGE)
        return replace(made, timestep_fs=self.timesteps.get(name, 1.0), seconds=self.left())

    def left(self, share: float = 1.0) -> float:
        """Seconds that are left of a share of the budget; infinite without one."""
        return math.inf if self.seconds is None else share * self.seconds - (time.monotonic() - self.begun)

    def is_late(self, needed_s: float = 0.0) -> bool:
        return self.left() <= needed_s

    def order(self) -> list[tuple[str, str]]:
        """Paths and precisions. Within a budget the first path comes before stock in another precision."""
        if self.seconds is None:
            order = [(path, dtype) for path in (STOCK, *self.paths) for dtype in self.dtypes]
        else:
            order = [(path, dtype) for dtype in self.dtypes for path in (STOCK, *self.paths[:1])]
            order += [(path, dtype) for path in self.paths[1:] for dtype in self.dtypes]
        # A class below float32 is asked in float32 alone.
        return [(path, dtype) for path, dtype in order if dtype in (precision_of(path, dtype), "float32")]

    def _ask(self, path: str, dtype: str, method: Callable[..., Any], *given: Any) -> Any:
        asker = self.askers.setdefault((path, dtype), self.subject.asker(path, dtype))
        return asker.ask(_LIMIT_S, method, *given)

    def prepare(self, path: str, dtype: str) -> None:
        """Have a path's process open its model while another is measured."""
        asker = self.askers.setdefault((path, dtype), self.subject.asker(path, dtype))
        if isinstance(asker, Worker):
            asker.launch()

    def close(self) -> None:
        for asker in self.askers.values():
            asker.close()
        self.askers.clear()

    # One path in one precision.

    def measure(self, path: str, dtype: str) -> None:
        """Add what is found of a path to the record."""
        began = time.monotonic()
        row: Record = {"path": path, "dtype": dtype, "verdict": REFUSED, "reason": "", "note": "", "checks": {}}
        self.record["paths"].append(row)
        if self.is_late(0.0 if (path, dtype) in self.askers else self.opened_s):
            row |= {"verdict": CUT, "reason": f"not asked: {_NO_TIME}", "seconds": 0.0}
            if path == STOCK:
                self.unasked[dtype] = dict.fromkeys(self.structures, _NO_TIME)
            return
        try:
            opened = self._ask(path, dtype, PathSession.opened)
        except WorkerError as error:
            opened = {"error": str(error), "refused": False}
        if "error" in opened:
            row |= {"verdict": REFUSED if opened["refused"] else FAIL, "reason": opened["error"]}
        else:
            row["note"] = opened["note"]
            cases = self._cases(path, dtype, row)
            self._judge(path, dtype, cases, row)
        if path != STOCK:
            self.askers.pop((path, dtype)).close()
        row["seconds"] = round(time.monotonic() - began, 1)

    def _cases(self, path: str, dtype: str, row: Record) -> dict[str, Case]:
        """A path's answers by structure; what it refuses, and what ends its process, is in the row."""
        cases: dict[str, Case] = {}
        refused: dict[str, str] = {}
        failed: dict[str, str] = {}
        # What stock in this precision was not asked has no limit.
        not_asked = self.unasked.setdefault(dtype, {}) if path == STOCK else dict(self.unasked.get(dtype, {}))
        losses = 0
        for name in self.structures:
            questions = self.questions(name, dtype)
            parts = tuple(part for part in questions.parts if f"{name}, {part}" not in not_asked)
            if losses >= _LOSSES:
                failed[name] = "not asked: the path ended its process before"
                continue
            is_reference = (path, dtype) == (STOCK, self.reference_dtype)
            if name in not_asked or (self.is_late() and not is_reference):
                not_asked[name] = _NO_TIME
                continue
            try:
                if is_reference:
                    found = self.exact[name]
                else:
                    found = self._ask(path, dtype, PathSession.answer, replace(questions, parts=parts))
            except WorkerError as error:
                losses += 1
                failed[name] = str(error)
                continue
            if asked.GIVEN in found.errors:
                (refused if found.refused else failed)[name] = found.errors[asked.GIVEN]
                continue
            cases[name] = Case(questions, found, self.exact[name])
            not_asked |= {f"{name}, {part}": _NO_TIME for part in found.not_asked}
            wrong = {part: text for part, text in found.errors.items() if part not in self.exact[name].errors}
            failed |= {f"{name}, {part}": text for part, text in wrong.items()}
        row |= {"refused": refused, "failed": failed} | ({} if self.seconds is None else {"not_asked": not_asked})
        return cases

    def _judge(self, path: str, dtype: str, cases: Mapping[str, Case], row: Record) -> None:
        worst: dict[str, tuple[float, Record]] = {}
        wrong: dict[str, list[str]] = {}
        figures = {name: checks.all_figures(case) for name, case in cases.items()}
        row["differences"] = {
            quantity: _plain(max((one.value for of in figures.values() for one in of[quantity]), default=math.nan))
            for quantity in ("energy", "forces")
        }
        in_batch = self._in_batch(path, dtype, cases, row)
        if path == STOCK:
            self.own[dtype] = {name: checks.stocks_own(case, in_batch.get(name, ())) for name, case in cases.items()}
            row["note"] = "; ".join(filter(None, (row["note"], checks.not_symmetric(figures, dtype))))
        for name, several in in_batch.items():
            figures[name]["batch"] = several
        for name, of_checks in figures.items():
            for check in (*CHECKS, checks.BATCH):
                for figure in of_checks.get(check.name, ()):
                    limit = self._limit(check, figure, path, dtype, self.own.get(dtype, {}).get(name, {}))
                    ratio = figure.value / limit
                    if not ratio <= 1.0 and name not in wrong.setdefault(check.name, []):
                        wrong[check.name].append(name)
                    if check.name not in worst or not ratio <= worst[check.name][0]:
                        worst[check.name] = ratio, self._cell(check, figure, limit, dtype, name, cases[name])
        for check_name, (ratio, cell) in worst.items():
            failed_on = wrong.get(check_name, [])
            row["checks"][check_name] = {"verdict": FAIL if failed_on else PASS, "of_limit": _plain(ratio)} | cell
            if failed_on:
                row["checks"][check_name]["failed_on"] = failed_on
        self._conclude(path, dtype, row, wrong)

    def _conclude(self, path: str, dtype: str, row: Record, wrong: Mapping[str, list[str]]) -> None:
        """The verdict, and the smallest structure that shows the first failure."""
        failures = {check: names for check, names in wrong.items() if names}
        if failures or row["failed"]:
            row["verdict"] = FAIL
            said = [f"{check} is wrong on {', '.join(names)}" for check, names in failures.items()]
            said += [f"{name}: {text}" for name, text in row["failed"].items()]
            row["reason"] = "; ".join(said)
            first = next((check for check in CHECKS if check.name in failures), None)
            if first is not None:
                row["checks"][first.name]["smallest"] = self._smallest(path, dtype, first, failures[first.name])
        elif row.get("not_asked") or self.record.get("not_asked"):
            row |= {"verdict": CUT, "reason": f"what was asked passed; {_NO_TIME}"}
        elif row["checks"]:
            row["verdict"] = PASS
        else:
            row["reason"] = "; ".join(f"{name}: {text}" for name, text in row["refused"].items())

    def _limit(self, check: Check, figure: Figure, path: str, dtype: str, own: checks.Own) -> float:
        """own: stock's figures on this structure."""
        key = (check.name, figure.quantity)
        sizes = [of[key][1] for of in self.own.get(dtype, {}).values() if key in of]
        return checks.limit_of(check, figure, precision_of(path, dtype), own, statistics.median(sizes or [0.0]))

    def _cell(self, check: Check, figure: Figure, limit: float, dtype: str, name: str, case: Case) -> Record:
        own = self.own.get(dtype, {}).get(name, {}).get((check.name, figure.quantity))
        meaning = checks.mev_per_atom(figure.quantity, figure.value, case.volume_per_atom)
        return {
            "quantity": figure.quantity,
            "unit": checks.UNITS[figure.quantity],
            "value": _plain(figure.value),
            "limit": _plain(limit),
            "stock": None if own is None else _plain(own[0]),
            "structure": name,
            "mev_per_atom": None if meaning is None else _plain(meaning),
        }

    def _in_batch(self, path: str, dtype: str, cases: Mapping[str, Case], row: Record) -> dict[str, list[Figure]]:
        """Figures of the periodic structures that are evaluated as one batch; none if stock takes no batches."""
        names = [name for name, case in cases.items() if case.questions.atoms.pbc.all()]
        names = [name for name in names if len(self.structures[name]) <= self.effort.large]
        if len(names) < 2:
            return {}
        if self.is_late():
            row["not_asked"]["a batch"] = _NO_TIME
            return {}
        structures = [self.structures[name] for name in names]
        found = self._batch_answer(path, dtype, structures)
        if isinstance(found, str):
            by_stock = found if path == STOCK else self._batch_answer(STOCK, dtype, structures)
            if isinstance(by_stock, str):
                row["note"] = f"{row['note']}; no batches: {found}".removeprefix("; ")
            else:
                row["failed"]["a batch"] = found
            return {}
        return {name: checks.batch_figures(cases[name], values) for name, values in zip(names, found, strict=True)}

    def _batch_answer(self, path: str, dtype: str, structures: Sequence[Atoms]) -> list[Values] | str:
        try:
            return self._ask(path, dtype, PathSession.together, structures)
        except WorkerError as error:
            return str(error)

    def _smallest(self, path: str, dtype: str, check: Check, names: Sequence[str]) -> Record:
        """Of the structures on which a check fails the smallest, with atoms taken away while it fails."""
        name = min(names, key=lambda one: len(self.structures[one]))

        def fails(atoms: Atoms) -> bool:
            try:
                return not self.is_late() and self._fails_on(path, dtype, check, name, atoms)
            except (WorkerError, EquituneError):
                return False

        simulates = asked.DYNAMICS in check.parts
        found = self.structures[name] if simulates else smallest(self.structures[name], fails, self.effort.searched)
        return {"structure": name, "atoms": len(found)} | as_record(found)

    def _fails_on(self, path: str, dtype: str, check: Check, name: str, atoms: Atoms) -> bool:
        questions = replace(self.questions(name, dtype, atoms), parts=check.parts)
        exact = self._ask(STOCK, self.reference_dtype, PathSession.answer, questions)
        own = self._ask(STOCK, dtype, PathSession.answer, questions)
        found = self._ask(path, dtype, PathSession.answer, questions)
        if exact.errors or own.errors or found.errors:
            return False
        of_stock = checks.stocks_own(Case(questions, own, exact))
        figures = checks.figures_of(check, Case(questions, found, exact))
        return any(not figure.value <= self._limit(check, figure, path, dtype, of_stock) for figure in figures)


def _plain(value: float) -> float | None:
    """To four digits; None, as JSON has no infinity, for what is not finite."""
    return float(f"{value:.4g}") if value == value and abs(value) != float("inf") else None


def _chosen(opened: Mapping[str, Any], named: Sequence[str], own: Mapping[str, BuildPath]) -> tuple[str, ...]:
    """The paths named, or all that matter; ConfigError for an unknown one."""
    known = (*opened["contenders"], CAPTURED)
    for name in named:
        if name not in known and name not in own:
            raise ConfigError(unknown_name("path", name, [*known, *_SHORT]))
    usual = [TUNED, *([CAPTURED] if opened["captured"] else []), *opened["peers"]]
    return tuple(name for name in dict.fromkeys(named or usual) if name != STOCK)


def _provenance(subject: _Subject, opened: Mapping[str, Any], seed: int, effort: str, reference: str) -> Record:
    facts = device_facts(subject.device)
    distribution = opened["install"].partition("==")[0]
    file = Path(subject.name)
    model = {name: opened[name] for name in ("package", "class", "parameters", "weights", "species", "cutoff", "dtype")}
    if subject.model is None and file.is_file():
        model |= {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    if version := installed_version(distribution):
        model["package_version"] = version
    return {
        "schema": SCHEMA,
        "model": {"name": file.name if file.is_file() else subject.name} | model,
        "device": device_record(facts, driver_version(facts)),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "equitune": __version__,
        "generator": GENERATOR_VERSION,
        "software": software_versions(facts, (distribution, "numpy", "ase", "vesin-torch")),
        "seed": seed,
        "effort": effort,
        "reference": f"stock in {reference}",
        "limits": {"floor": checks.FLOOR, "factor": checks.FACTOR, "other_factors": checks.OTHER_FACTORS},
    }
