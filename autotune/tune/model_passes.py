"""A model that a command line names, with its passes on a structure."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.database.lookup import Tuning
from autotune.database.misses import Request, requests_of
from autotune.errors import ConfigError
from autotune.measure.timing import Watch, ratio_interval, timed, verdict
from autotune.models.accelerate import accelerate
from autotune.models.whole_model import find_atoms, open_made, open_model, returned_by
from autotune.modules.base import TunedModule
from autotune.text import time_text
from autotune.tune.publish import why_unfinished
from autotune.workload.config import load_all
from autotune.workload.graphs import GivenEdges, GraphSpec
from autotune.workload.kind import Problem, SourceOfSize
from autotune.workload.known_kinds import CONTRACTION, CONVOLUTIONS, kernel_kind, problem_from_key
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.errors import InputError
from kernelgen.runtime.call import WATCHERS


@dataclass(frozen=True)
class Opened:
    """An accelerated model. graph: a name for the structure's graph. replaced: what was replaced, in a line.

    dtype: such as float64; empty if a function gave the inputs too.
    """

    name: str
    model: torch.nn.Module
    passes: Passes
    graph: str
    replaced: str
    dtype: str = ""


def open_named(text: str, structure: str | None, device: str, dtype: str | None, training: bool) -> Opened:
    """Open a model, accelerate it, and make its inputs.

    text: see ``autotune.models.whole_model.open_model``; a function may also return a model and its inputs (as for
    ``autotune.tune_model``), both on the device that they shall run on. structure: a name or a file of atoms, for
    models of a known package. ConfigError if something is missing or does not fit.
    """
    if ":" in text and not Path(text).is_file():
        made = returned_by(text)
        if isinstance(made, tuple):
            return _with_inputs(text, made, structure, training)
        whole = open_made(text, made, device=device, dtype=dtype)
    else:
        whole = open_model(text, device=device, dtype=dtype)
    if structure is None:
        raise ConfigError("--structure is missing; expected a file of atoms, or a name such as mof")
    inputs = whole.inputs([find_atoms(structure)])
    passes: Passes = {ENERGIES: lambda: whole.energies_and_forces(inputs)}
    if training:
        passes[TRAINING] = lambda: whole.training_step(inputs)
    replaced, dtype = _accelerated(whole.module), str(whole.dtype).removeprefix("torch.")
    return Opened(whole.name, whole.module, passes, Path(structure).stem, replaced, dtype)


def _with_inputs(text: str, made: tuple[Any, ...], structure: str | None, training: bool) -> Opened:
    if len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        kinds = ", ".join(type(part).__name__ for part in made)
        raise ConfigError(f"{text} returned ({kinds}); expected a torch.nn.Module, or one and its inputs")
    if structure is not None:
        raise ConfigError(f"{text} returned a model and its inputs; leave --structure {structure} out")
    model, batch = made
    replaced = _accelerated(model)
    return Opened(text, model, passes_of(model, batch, training), text.rpartition(":")[2], replaced)


def _accelerated(model: torch.nn.Module) -> str:
    """Replace what can be replaced, and say what was; empty for a model of Equitune's own modules.

    InputError with the cause if nothing could be, such as a missing compiler.
    """
    found = accelerate(model)
    own = any(isinstance(module, TunedModule) for _, module in every_module(model))
    if found.places and not found.replaced and not own:
        raise InputError(f"no part of the model is Equitune's: {found.places[0].detail}")
    return "" if own and not found.places else str(found).splitlines()[0]


ENERGIES, TRAINING, CALL = "energies and forces", "training step", "the given call"
Passes = dict[str, Callable[[], Any]]


def passes_of(model: torch.nn.Module, batch: Any, training: bool = False) -> Passes:
    """The passes of a model on a batch.

    batch: a tensor or a dict, the model's only argument; a tuple, its arguments; or a function of none that runs all
    that is wanted, such as a step of an optimizer. The model's own outputs count as its forces. If it has outputs that
    can be differentiated and floating inputs that require gradients, their gradients are computed too.
    training: also a step of a loss, the sum of squares of all outputs, with the model in training mode.
    """
    if callable(batch) and not isinstance(batch, Tensor):
        return {CALL: batch}
    arguments = batch if isinstance(batch, tuple) else (batch,)
    found: Passes = {ENERGIES: lambda: _evaluate(model, arguments)}
    if training:
        found[TRAINING] = lambda: _train(model, arguments)
    return found


def _called(model: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The model's outputs and its inputs, as far as they take part in gradients."""
    given = _fresh(arguments)
    outputs = [out for out in _tensors(model(*given)) if out.requires_grad]
    return outputs, [tensor for tensor in _tensors(given) if tensor.requires_grad]


def _evaluate(model: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    outputs, inputs = _called(model, arguments)
    if outputs and inputs:
        torch.autograd.grad([out.sum() for out in outputs], inputs, allow_unused=True)


def _train(model: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    before = model.training
    model.train()
    try:
        outputs, inputs = _called(model, arguments)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not outputs or not weights:
            raise InputError("the model has no output that depends on a weight; expected one, or training=False")
        if inputs:
            forces = torch.autograd.grad([out.sum() for out in outputs], inputs, create_graph=True, allow_unused=True)
            outputs += [force for force in forces if force is not None and force.requires_grad]
        # Not backward(): the user's own gradients stay as they are.
        torch.autograd.grad(torch.stack([out.square().sum() for out in outputs]).sum(), weights, allow_unused=True)
    finally:
        model.train(before)


def _fresh(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without what an earlier call recorded or wrote into a dictionary."""

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().requires_grad_(value.requires_grad)
        return {key: fresh(item) for key, item in value.items()} if type(value) is dict else value

    return tuple(fresh(value) for value in arguments)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors in nested outputs, each once."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


Source = GivenEdges | SourceOfSize
TUNED = "exact"


@dataclass(frozen=True)
class Need:
    """One request, the graph to tune it on, and what a model would load for it now.

    trials: how many the user wants, if given, see ``why_unfinished``; 0: any entry will do. objective: by which the
    entry should be; None: any.
    """

    request: Request
    source: Source
    found: Tuning
    trials: int | None = None
    objective: str | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether the database of this device has an entry for exactly this."""
        return self.found.origin == TUNED

    @property
    def why_left(self) -> str:
        """Why a search has something to do here, in words; empty if it is done."""
        if self.found.entry is None or not self.is_tuned:
            return "not tuned"
        if self.objective not in (None, self.found.entry.objective):
            return f"by {self.found.entry.objective}"
        return "" if self.trials == 0 else why_unfinished(self.found.entry, self.trials)


def needs_of(
    requests: Mapping[Request, Source], facts: DeviceFacts, trials: int | None = None, objective: str | None = None
) -> tuple[Need, ...]:
    """Look every request up; of those that one entry answers, only the first counts. Problems stay together."""
    first: dict[Any, Need] = {}
    for request, source in requests.items():
        if request.identity not in first:
            first[request.identity] = Need(request, source, request.look_up(facts), trials, objective)
    problems = list(dict.fromkeys(need.request.problem for need in first.values()))
    return tuple(sorted(first.values(), key=lambda need: problems.index(need.request.problem)))


def sources_of(requests: Iterable[Request]) -> dict[Request, Source]:
    """Graphs for requests of which only the size is known."""
    found: dict[Request, Source] = {}
    for request in requests:
        nodes = max(1, request.num_nodes) if request.operation in CONVOLUTIONS else 0
        found[request] = kernel_kind(request.operation).graph_of_size(request.num_edges, nodes)
    return found


def workloads_for(needs: Iterable[Need], graph: str) -> tuple[Workload, ...]:
    """Workloads of what is not tuned or not finished: those that differ in direction only are one.

    graph: a name for the graphs.

    Convolutions and contractions come first: they take most of a model's time, and a run may end before the last
    workload.
    """
    grouped: dict[tuple[Any, ...], list[Need]] = {}
    for need in needs:
        if need.why_left:
            asked = need.request
            kind = (asked.problem, asked.operation, asked.dtype, asked.layout, asked.deterministic)
            grouped.setdefault((*kind, asked.graph_class.text), []).append(need)
    names = {problem: name for name, problem in load_all().items()}
    found = []
    for same in grouped.values():
        asked, problem = same[0].request, problem_from_key(same[0].request.problem)
        spec = GraphSpec(graph, same[0].source)
        kernel = (label_of(problem, asked.operation, names), problem, asked.operation, spec, asked.dtype, asked.layout)
        directions = {need.request.direction for need in same}
        workload = Workload(*kernel, deterministic=asked.deterministic)
        # In the order of a whole search, where earlier directions give later ones their first schedules.
        ordered = tuple(name for name in workload.directions if name in directions)
        found.append(Workload(*kernel, directions=ordered, deterministic=asked.deterministic))
    return tuple(sorted(found, key=lambda workload: workload.operation not in (*CONVOLUTIONS, CONTRACTION)))


def label_of(problem: Problem, operation: str, names: Mapping[Problem, str]) -> str:
    """The problem's name in ``problems.toml``, else one from its key: trials are kept by it, whatever the model."""
    return names.get(problem) or f"{operation}-{hashlib.sha256(problem.key.encode()).hexdigest()[:8]}"


def places_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """By a problem's key, the names of the modules of a model that have it."""
    found: dict[str, list[str]] = {}
    for name, module in every_module(model):
        key = getattr(getattr(module, "problem", None), "key", None)
        if isinstance(key, str) and name not in found.setdefault(key, []):
            found[key].append(name)
    return found


def every_module(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """A model's modules with their names, also those that another keeps without registering them."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = (name, module)
        children = {key: child for key, child in module._modules.items() if child is not None}
        waiting += [(f"{name}.{key}".lstrip("."), child) for key, child in reversed(children.items())]
        # A hidden one has its owner's name, by which a user knows it.
        waiting += [(name, value) for value in vars(module).values() if isinstance(value, torch.nn.Module)]
    return list(found.values())


@dataclass
class Recording:
    """requests: what ran, in the order of its first run, each with the graph of that run. device: where it ran."""

    requests: dict[Request, GivenEdges | SourceOfSize] = field(default_factory=dict)
    device: torch.device | None = None
    # By number of edges and nodes: graphs that agree in both are of one class, and the first stands for all.
    _graphs: dict[tuple[int, int], GivenEdges] = field(default_factory=dict)

    def note(
        self,
        operator: Any,
        direction: Any,
        num_edges: int,
        num_nodes: int,
        sender: Tensor | None,
        receiver: Tensor | None,
    ) -> None:
        """A watcher: see :mod:`kernelgen.runtime.call`."""
        if num_edges == 0:
            return
        self.device = operator.device if receiver is None or operator.device.index is not None else receiver.device
        for request in requests_of(operator, direction, num_edges, num_nodes):
            if request not in self.requests:
                self.requests[request] = self._graph(request, sender, receiver)

    def _graph(self, request: Request, sender: Tensor | None, receiver: Tensor | None) -> GivenEdges | SourceOfSize:
        if sender is None or receiver is None:
            return kernel_kind(request.operation).graph_of_size(request.num_edges, 0)
        size = (request.num_edges, request.num_nodes)
        if size not in self._graphs:
            self._graphs[size] = GivenEdges.of(sender, receiver, request.num_nodes)
        return self._graphs[size]


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record every kernel that this process runs in the block, in backward passes too."""
    recording = Recording()
    WATCHERS.append(recording.note)
    try:
        yield recording
    finally:
        WATCHERS.remove(recording.note)


# Rounds of one call before and one after, at least and at most; between them the time decides.
FEWEST_ROUNDS, MOST_ROUNDS = 2, 50
# So many give an interval; a model of which this many take no more than SECONDS gets more.
ENOUGH_ROUNDS = 6
SECONDS = 5.0


@dataclass(frozen=True)
class PassTimes:
    """Medians in ms. low, high: 95% interval of ``before_ms / after_ms``, (0, inf) if there are too few ``rounds``.

    noise: what disturbed the machine meanwhile, in words.
    """

    name: str
    before_ms: float
    after_ms: float
    low: float
    high: float
    rounds: int
    noise: str = ""

    @property
    def ratio(self) -> float:
        return self.before_ms / self.after_ms

    def __str__(self) -> str:
        times = f"{self.name}: {time_text(1e3 * self.before_ms)} before, {time_text(1e3 * self.after_ms)} after"
        noise = f"; not at rest: {self.noise}" if self.noise else ""
        if not math.isfinite(self.high):
            return f"{times}: unclear, {self.rounds} rounds are too few for an interval{noise}"
        measured = f"{self.ratio:.2f} times as fast ({self.low:.2f} to {self.high:.2f}, {self.rounds} rounds)"
        return f"{times}: {verdict((self.low, self.high))}, {measured}{noise}"


class Loaded:
    """The operators that a model's modules have loaded: kept here while others are loaded in their place."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = (module for _, module in every_module(model))
        self._modules = [module for module in modules if isinstance(module, TunedModule)]
        self._states = [dict(vars(module)) for module in self._modules]

    def forget(self) -> None:
        """Make the modules look their schedules up again at the next call."""
        for module in self._modules:
            module._forget_operators()

    def put_back(self) -> None:
        """Give the modules the operators kept here."""
        for module, state in zip(self._modules, self._states, strict=True):
            vars(module).update(state)


def compare(
    passes: Mapping[str, Callable[[], Any]],
    model: torch.nn.Module,
    before: Loaded,
    device: torch.device,
    seconds: float = SECONDS,
) -> list[PassTimes]:
    """Time each pass in turn with the operators of ``before`` and with those that the model loads now, which it keeps.

    Only the schedules differ: both sides are one model, in one process, on the same inputs. The passes have run with
    ``before``. seconds: for each pass, if ENOUGH_ROUNDS take longer than SECONDS.
    """
    before.forget()
    for call in passes.values():
        call()
    after = Loaded(model)
    found = []
    for name, call in passes.items():
        samples: dict[str, list[float]] = {"before": [], "after": []}
        begin, watch = time.monotonic(), Watch(device)
        for rounds in range(MOST_ROUNDS):
            limit = math.inf if rounds < FEWEST_ROUNDS else seconds if rounds < ENOUGH_ROUNDS else min(seconds, SECONDS)
            if time.monotonic() - begin >= limit:
                break
            for side, loaded in (("before", before), ("after", after)):
                loaded.put_back()
                samples[side].append(timed(call, device))
        low, high = ratio_interval(samples["after"], samples["before"], paired=True)
        old, new = (1e3 * statistics.median(samples[side]) for side in ("before", "after"))
        found.append(PassTimes(name, old, new, low, high, len(samples["after"]), watch.read().noise))
    return found
