"""Tune what a model runs on a batch, or what earlier models missed: :func:`tune_model` and :func:`tune_misses`."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.database.misses import keep_misses, read_misses
from autotune.database.store import database_dirs, writable_results_dir
from autotune.measure.timing import timed
from autotune.paths import require_tune
from autotune.text import direction_name, interval_text, time_text
from autotune.tune.model_passes import (
    ENOUGH_ROUNDS,
    FEWEST_ROUNDS,
    Loaded,
    Need,
    Passes,
    PassTimes,
    Source,
    compare,
    label_of,
    needs_of,
    passes_of,
    places_of,
    recorded,
    sources_of,
    workloads_for,
)
from autotune.tune.run import tune
from autotune.workload.config import TuneConfig, load_all
from autotune.workload.known_kinds import kernel_kind, problem_from_key
from autotune.workload.objective import Objective
from autotune.workload.toml_tables import parse_duration
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

# Of the whole run, which ends within ten minutes with the pages that it writes.
DEFAULT_BUDGET_S = 540.0
# A run ends this much later than planned: the last trials, processes, and the compiler for the new schedules.
_OVERRUN_S = 20.0
# A direction is tuned after at least as many trials: the default, and the best schedules of similar kernels. Among them
# is what the model loads already. On an idle CPU they take a dozen seconds.
FEWEST_TRIALS = 8
# Share of the budget for timing the model before and after, at most.
_MOST_TIMING = 0.2
# What the searches get at least, however slow the model is.
_FEWEST_S = 10.0


@dataclass(frozen=True)
class ModelTuning:
    """What a model runs here and how it is tuned; prints as a table.

    before, after: every kernel that the model runs, with what it loaded then and loads now. places: by problem, names
    of the modules. times: of the model's passes; empty if nothing was tuned or the run was interrupted. note: what was
    left out, and why.
    """

    name: str
    device: str
    before: tuple[Need, ...]
    after: tuple[Need, ...]
    places: Mapping[str, Sequence[str]]
    times: tuple[PassTimes, ...] = ()
    note: str = ""

    @property
    def left(self) -> int:
        """Number of kernels that are not tuned, or that a search should go on with."""
        return sum(bool(need.why_left) for need in self.after)

    def __str__(self) -> str:
        tuned = sum(need.is_tuned for need in self.before)
        now = sum(need.is_tuned for need in self.after) - tuned
        left = len(self.after) - tuned - now
        again = sum(old.is_tuned and _is_new(old, need) for old, need in zip(self.before, self.after, strict=True))
        unfinished = sum(need.is_tuned and bool(need.why_left) for need in self.after)
        counts = f"{len(self.after)} kernels: {tuned} tuned before, {now} tuned now, {left} not tuned"
        counts += f"; {again} gone on with" if again else ""
        counts += f"; {unfinished} not finished" if unfinished else ""
        table = _kernels(self.before, self.after, self.places)
        shown = [line for line in opaque_names(self.after) if any(line.split()[0] in row for row in table)]
        lines = [f"{self.name} on {self.device}", *table, *shown, counts, *map(str, self.times)]
        lines += [] if left or unfinished else ["nothing is left to tune here"]
        return "\n".join([*lines, self.note] if self.note else lines)


def tune_model(
    model: torch.nn.Module,
    batch: Any,
    *,
    budget: float | str | None = None,
    training: bool = False,
    results: str | os.PathLike[str] | None = None,
    trials: int | None = None,
    sampler: str | None = None,
    patience: int | None = None,
    seed: int = 0,
    with_peers: bool = False,
    objective: str = "time",
    name: str = "model",
    graph: str = "batch",
    console: Console | None = None,
) -> ModelTuning:
    """Find out which kernels an accelerated model runs on a batch, and tune those that are not tuned on its device.

        >>> accelerate(model)
        >>> print(tune_model(model, batch, budget="10m"))

    batch: a tensor or a dict, the model's only argument; a tuple of its arguments; or a function without arguments that
    calls the model (``lambda: model(positions, cell)``, or a whole training step). Floating inputs that require
    gradients get them, as in a model whose forces are computed outside. training: also tune a step of a loss on all
    outputs. budget: seconds, or a text such as ``"10m"``, for all of it; default nine minutes. results: the folder of
    the database, by default the user's; lookups see it during the call. name, graph: of the model and of the batch's
    graph, for the table and the records. trials, sampler, patience, seed, with_peers, objective: as for
    ``equitune tune``.

    The model has the new schedules afterwards, as every model of this device will. Raises InputError if the model runs
    no kernel of Equitune, ToolMissingError without the packages of extra ``tune``. Ctrl-C ends the search, and a second
    call goes on.
    """
    require_tune("tune_model")
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is of type {type(model).__name__}; expected a torch.nn.Module, accelerated")
    passes = passes_of(model, batch, training)
    search: dict[str, Any] = {"trials": trials, "sampler": sampler, "patience": patience, "seed": seed}
    search |= {"with_peers": with_peers, "objective": str(Objective.parse(objective)), "console": console}
    seconds = DEFAULT_BUDGET_S if budget is None else parse_duration(budget)
    return tune_passes(model, passes, seconds, search, results, name=name, graph=graph)


def tune_passes(
    model: torch.nn.Module,
    passes: Passes,
    seconds: float,
    search: Mapping[str, Any],
    results: str | os.PathLike[str] | None = None,
    *,
    name: str,
    graph: str,
    stopped: Callable[[], bool] = lambda: False,
    on_found: Callable[[ModelTuning], None] = lambda found: None,
) -> ModelTuning:
    """:func:`tune_model` of passes that are functions, within ``seconds``.

    search: options of ``tune``. stopped: whether the user wants to stop; then nothing more is timed. on_found: called
    before the searches, with what is tuned already.
    """
    begin = time.monotonic()
    with looked_up_in(results):
        with recorded() as recording:
            for call in passes.values():
                call()
        device = recording.device
        if device is None:
            raise InputError("the model ran no kernel of Equitune on this batch; call autotune.accelerate(model) first")
        facts = device_facts(device)
        wants = search.get("trials"), search.get("objective")
        before = needs_of(recording.requests, facts, *wants)
        found = ModelTuning(name, facts.name, before, before, places_of(model))
        on_found(found)
        workloads = workloads_for(before, graph)
        if not workloads:
            return found
        of_passes = sum(timed(call, device) for call in passes.values())
        loaded = Loaded(model)
        # Rounds, and the first call with the new schedules.
        wanted, fewest = ((2 * rounds + 1) * of_passes for rounds in (ENOUGH_ROUNDS, FEWEST_ROUNDS))
        kept = max(fewest, min(wanted, _MOST_TIMING * seconds))
        left = max(_FEWEST_S, seconds - (time.monotonic() - begin) - kept - _OVERRUN_S)
        _search(workloads, device, left, results, search)
        keep_misses(facts, lock_s=1.0)
        after = needs_of(recording.requests, facts, *wants)
        found = replace(found, after=after)
        if stopped() or not any(_is_new(old, need) for old, need in zip(before, after, strict=True)):
            return found
        if time.monotonic() - begin + fewest > seconds:
            return replace(found, note="the model was not timed again: the budget is used up")
        return replace(found, times=tuple(compare(passes, model, loaded, device, kept / len(passes))))


def tune_misses(
    device: str,
    seconds: float,
    search: Mapping[str, Any],
    results: str | os.PathLike[str] | None = None,
    on_found: Callable[[ModelTuning], None] = lambda found: None,
) -> ModelTuning:
    """Tune what running models missed on a device, on random graphs of the sizes that they had.

    The arguments are those of :func:`tune_passes`.
    """
    facts = device_facts(device)
    with looked_up_in(results):
        before = missed(facts)
        found = ModelTuning("what models missed", facts.name, before, before, {})
        on_found(found)
        if workloads := workloads_for(before, "random"):
            _search(workloads, torch.device(device), seconds, results, search)
        keep_misses(facts, lock_s=1.0)
        requests: dict[Any, Source] = {need.request: need.source for need in before}
        return replace(found, after=needs_of(requests, facts, 0))  # what has an entry is no miss any more


def missed(facts: DeviceFacts) -> tuple[Need, ...]:
    """What running models missed on a device and has not been tuned since."""
    return needs_of(sources_of(read_misses(facts)), facts)


def _search(
    workloads: tuple[Any, ...],
    device: torch.device,
    seconds: float,
    results: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
) -> None:
    folder = writable_results_dir() if results is None else Path(results)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the searching processes need the memory
    config = TuneConfig(folder / "a model", workloads)
    tune(config, str(device), seconds, results_dir=folder, fewest_trials=FEWEST_TRIALS, **options)


@contextlib.contextmanager
def looked_up_in(results: str | os.PathLike[str] | None) -> Iterator[None]:
    """Let lookups see a results folder in the block: in place of the user's own, if it is neither that nor shipped."""
    before = os.environ.get("EQUITUNE_DATABASE")
    if results is None or Path(results).resolve() in [folder.resolve() for folder in database_dirs()]:
        yield
        return
    os.environ["EQUITUNE_DATABASE"] = str(results)
    try:
        yield
    finally:
        if before is None:
            del os.environ["EQUITUNE_DATABASE"]
        else:
            os.environ["EQUITUNE_DATABASE"] = before


# Columns are as wide as needed: a narrower terminal wraps lines, but no number is truncated.
WIDE = 1000
# Longest text of a problem, in characters.
MOST_TEXT = 48


def opaque_names(needs: Iterable[Need]) -> list[str]:
    """What problems are that have no name but one made from their key: ``conv-e0609b66 is 32x0e x 1x0e -> 32x0e``."""
    names, found = {problem: name for name, problem in load_all().items()}, dict[str, None]()
    for need in needs:
        problem, operation = problem_from_key(need.request.problem), need.request.operation
        if problem not in names:
            found[f"{label_of(problem, operation, names)} is {kernel_kind(operation).describe(problem)[0]}"] = None
    return list(found)


def _kernels(before: Sequence[Need], after: Sequence[Need], places: Mapping[str, Sequence[str]]) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    # A kernel does not know its module; without a model, of misses, nobody does.
    for title in (*(["module"] if places else []), "kernel", "direction", "dtype, layout", "graph", "before", "now"):
        table.add_column(title, no_wrap=True)
    for title in ("time", "vs default"):
        table.add_column(title, no_wrap=True, justify="right")
    names = {problem: name for name, problem in load_all().items()}
    for old, new in zip(before, after, strict=True):
        asked, problem = old.request, problem_from_key(old.request.problem)
        first = kernel_kind(asked.operation).describe(problem)[0]
        what = names.get(problem) or (first if len(first) <= MOST_TEXT else label_of(problem, asked.operation, names))
        kind = f"{asked.dtype} {asked.layout}" + (" deterministic" if asked.deterministic else "")
        module, *others = places.get(asked.problem, ()) or ("",)
        place = [module + (f" and {len(others)} more" if others else "")] if places else []
        row = (*place, what, direction_name(asked.direction), kind, asked.graph_class.text, old.found.origin)
        now = ("tuned" if _is_new(old, new) else "tuned already") if new.is_tuned else "not tuned"
        left = f"{now}: {new.why_left}" if new.is_tuned and new.why_left else now
        # Time of a tuned kernel, and its speed-up over the default schedule.
        entry = new.found.entry if new.is_tuned else None
        gain = "" if entry is None else interval_text(entry.gain) + entry.by if entry.gain else "no gain"
        table.add_row(*row, left, time_text(entry.time_us) if entry else "", gain)
    out = io.StringIO()
    Console(file=out, width=WIDE, no_color=True, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def _is_new(old: Need, new: Need) -> bool:
    """Whether the kernel has another entry of its own now."""
    return new.is_tuned and not (old.is_tuned and old.found.entry == new.found.entry)
