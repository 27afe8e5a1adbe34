"""A contender's process: its session builds the model, waits idle, and is asked one thing at a time.

Nothing raises for a contender's failure: the answer says ``error``. ``device_lost`` in it means that nothing more can
run in that process.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autotune.bench.contenders import (
    SYMMETRIX,
    CapturedForm,
    build,
    milliseconds_by_group,
    require_usable,
    warm_up_calls,
)
from autotune.errors import PeerError
from autotune.measure.timing import joules_a_call, synchronize, timed
from autotune.models.package import Package
from autotune.models.step import PATIENCE
from autotune.models.whole_model import WholeModel, find_atoms, open_model
from autotune.text import DEFAULT, is_ours, precision_of

if TYPE_CHECKING:
    from ase import Atoms

    from autotune.bench.dynamics import Dynamics

Cell = dict[str, Any]
Given = ParamSpec("Given")
# The contender that gives exact values; it is not timed.
REFERENCE = "reference"
# Energies and forces; also stress, of periodic structures; gradients of a loss on them; a step of ASE.
PASSES = (ENERGY_FORCES, STRESS, TRAINING, MD_STEP) = ("energy_forces", "energy_forces_stress", "training", "md_step")


def passes_of(package: Package, atoms: Atoms, passes: Sequence[str]) -> tuple[str, ...]:
    """Those of the passes that differ for a structure.

    Where a package's models compute a periodic structure's stress in every call, energies and forces include it.
    """
    return tuple(which for which in passes if which != STRESS or (atoms.pbc.all() and package.stress_is_apart))


@dataclass(frozen=True)
class ModelSetting:
    """A contender of a model: ``model`` is a name, a file or ``module:function``."""

    model: str
    contender: str
    device: str
    dtype: str

    def open(self) -> ModelSession:
        # What a benchmark runs is not what a user's models miss.
        os.environ["EQUITUNE_MISSES"] = "0"
        if self.contender == DEFAULT:
            os.environ["EQUITUNE_UNTUNED"] = "1"
        return ModelSession(self)


def answers(
    method: Callable[Concatenate[ModelSession, Given], Cell],
) -> Callable[Concatenate[ModelSession, Given], Cell]:
    """A method, or a function of a session, whose failure is an answer too, and leaves the memory free for others."""

    @functools.wraps(method)
    def answer(session: ModelSession, /, *given: Given.args, **named: Given.kwargs) -> Cell:
        from autotune.measure.trial import device_is_lost

        if session.error:
            return {"error": session.error}
        try:
            found = method(session, *given, **named)
        except Exception as error:
            found = {"error": text_of(error)}
            if device_is_lost(session.device):
                return found | {"device_lost": True}
        session.release()
        return found

    return answer


class ModelSession:
    """The contender's model, and its inputs by structure."""

    def __init__(self, setting: ModelSetting) -> None:
        self.setting, self.device = setting, setting.device
        self.error = self.note = ""
        self.first_calls: dict[tuple[str, str], float] = {}
        self._inputs: dict[str, tuple[Atoms, dict[str, Any]]] = {}
        self._dynamics: dict[str, Dynamics] = {}
        self.names: dict[int, str] = {}
        self.warmed: set[str] = set()
        self.captured_for = ""
        try:
            require_usable(setting.contender, self.device)  # before the model is built in vain
            exact = setting.contender == REFERENCE
            stock = open_model(setting.model, device=self.device, dtype="float64" if exact else setting.dtype)
            self.names = {id(weight): name for name, weight in stock.module.named_parameters()}
            self.model, self.note = stock, ""
            if not exact:
                self.model, self.note = build(setting.contender, stock)
        except Exception as error:
            self.error = text_of(error)
        self.release()
        gc.freeze()  # later collections need not scan the model

    def facts(self) -> Cell:
        """What the contender's process says of itself: why it cannot take part, or a note."""
        return {"error": self.error} if self.error else {"note": self.note}

    def release(self) -> None:
        from autotune.measure.trial import free_memory

        if not self.error:
            self.model.module.zero_grad(set_to_none=True)
        free_memory(self.device)

    def inputs(self, structure: str) -> dict[str, Any]:
        return self._given(structure)[1]

    def _given(self, structure: str) -> tuple[Atoms, dict[str, Any]]:
        if structure not in self._inputs:
            atoms = find_atoms(structure)
            self._inputs[structure] = atoms, self.model.inputs([atoms])
        return self._inputs[structure]

    def dynamics(self, structure: str) -> Dynamics:
        """The simulation of a structure, one at a time: SevenNet's calculator changes the model for its inputs."""
        from autotune.bench.dynamics import Dynamics

        if structure not in self._dynamics:
            self._dynamics = {
                structure: Dynamics(self.model, self._given(structure)[0], contender=self.setting.contender)
            }
        return self._dynamics[structure]

    def step(self, structure: str, which: str) -> Callable[[], object]:
        inputs = self.inputs(structure)
        if self.setting.contender == SYMMETRIX and which != MD_STEP:
            raise PeerError("it computes by an ASE calculator of its own, without torch: md_step alone")
        if isinstance(self.model, CapturedForm) and structure != self.captured_for:
            self.model.forget()  # its graph is no part of this row's memory
            self.captured_for = structure
            if not is_ours(self.setting.contender):
                how = {"training": which == TRAINING, "stress": self.has_stress(structure, which)}
                warm = functools.partial(self.model.uncaptured_step, inputs, **how)
                warm_up(warm, self.device, warm_up_calls(self.setting.contender, self.device), Effort.tuning_s)
        if which == TRAINING:
            self._dynamics.clear()
            return lambda: self.model.training_step(inputs)
        if which == MD_STEP:
            return self.dynamics(structure).step
        stress = self.has_stress(structure, which)
        return lambda: self.model.energies_and_forces(inputs, stress=stress)

    def has_stress(self, structure: str, which: str) -> bool:
        """Whether stress is asked for: where the pass is for it, and where models compute it anyway."""
        is_asked = which in (STRESS, MD_STEP) or (which == ENERGY_FORCES and not self.model.package.stress_is_apart)
        return is_asked and bool(self._given(structure)[0].pbc.all())

    @answers
    def sizes(self, structure: str) -> Cell:
        """Numbers of a structure's atoms and edges."""
        atoms, inputs = self._given(structure)
        return {"atoms": len(atoms), "edges": int(self.model.edges(inputs).shape[1])}

    def values(self, structure: str, which: str) -> Values:
        if which == MD_STEP and self.setting.contender != REFERENCE:
            return self.dynamics(structure).values()
        return values_of(self.model, self.inputs(structure), which, self.names, self.has_stress(structure, which))

    @answers
    def write_exact(self, structure: str, which: str, path: Path) -> Cell:
        """Write the exact values of a pass to a file."""
        save(self.values(structure, which), path)
        return {}

    @answers
    def compile(self, structure: str, which: str) -> Cell:
        """Run once, beside others, so that kernels are compiled and cached; the answer says how long it took."""
        return {"first_call_s": self.first_call(structure, which)}

    def first_call(self, structure: str, which: str) -> float:
        """Seconds of the pass's first call."""
        seconds = timed(self.step(structure, which), self.device)
        # A later first call on the same structure finds everything compiled.
        return self.first_calls.setdefault((structure, which), round(seconds, 3))

    @answers
    def measure(self, structure: str, which: str, exact: Path | None, effort: Effort) -> Cell:
        """Check and time one pass, alone on the host. ``exact``: the file of the exact values, None without them."""
        first_call_s = self.first_call(structure, which)
        cell: Cell = {}
        if exact:
            errors, compared = errors_of(self.values(structure, which), load(exact))
            if wrong := wrong_values(errors, precision_of(self.setting.contender, self.setting.dtype)):
                return {"error": wrong}
            cell = {"errors": errors} | ({"gradients_of": compared} if compared else {})
        if getattr(self.model.module, "eager_calls", 0):
            raise PeerError("its step was not captured: the call is left to the model itself")
        step = self.step(structure, which)
        calls = warm_up_calls(self.setting.contender, self.device)
        if which == MD_STEP:
            calls = max(calls, PATIENCE + 2)
        # Who tunes itself does so on the first, smallest structure, whatever time it takes.
        limit_s = effort.warm_up_s if which in self.warmed else effort.tuning_s
        warm_up(step, self.device, calls, limit_s)
        self.warmed.add(which)
        # Symmetrix-XL's memory is not torch's, which counts it.
        peak = None if self.setting.contender == SYMMETRIX else peak_mib(step, self.device)
        warm_up(step, self.device, 1, 0.0)  # the allocator starts anew after the line above
        samples = wall_samples_ms(step, self.device, effort)
        cell |= wall_figures(samples, len(self._given(structure)[0])) | {"first_call_s": first_call_s}
        cell |= {} if peak is None else {"peak_mib": peak}
        if torch.device(self.device).type == "cuda":
            cell["host_ms"] = host_ms(step, self.device)
        joules = joules_a_call(step, self.device)
        cell |= {} if joules is None else {"joules": round(joules, 4)}
        return cell | ({"note": self.note} if self.note else {})

    @answers
    def measure_again(self, structure: str, which: str, effort: Effort) -> Cell:
        """More samples of a measured pass: contenders take turns, since a host's speed changes with time."""
        step = self.step(structure, which)
        warm_up(step, self.device, 3, effort.warm_up_s)
        return {"wall_samples_ms": wall_samples_ms(step, self.device, effort)}

    @answers
    def profile(self, structure: str, which: str) -> Cell:
        """Kernel time and launches of one pass, and what it keeps for its gradients."""
        step = self.step(structure, which)
        warm_up(step, self.device, 1, 0.0)
        if which == MD_STEP:
            dynamics = self.dynamics(structure)
            return profile(step, self.device) | {"parts_ms": dynamics.parts_ms(), "inputs": dynamics.how}
        # Apart, because compiled models may refuse the hooks that count what is kept.
        return profile(step, self.device) | self.held(step)

    @answers
    def held(self, step: Callable[[], object]) -> Cell:
        return {"held_parts_mib": held_mib(step, self.model.module)}


def wall_figures(samples: list[float], atoms: int) -> Cell:
    """Of wall times of single steps in milliseconds."""
    wall = statistics.median(samples)
    return {
        "wall_ms": round(wall, 4),
        "wall_samples_ms": samples,
        "us_per_atom": round(wall * 1e3 / atoms, 4),
    }


def text_of(error: Exception) -> str:
    """One line on a failure."""
    from autotune.measure.trial import is_out_of_memory

    if is_out_of_memory(error):
        return "out of memory"
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, PeerError) else f"{type(error).__name__}: {text}"


# One figure at a time: wall time of a step, its peak memory, and what the device did.

MIB = 1 << 20


@dataclass(frozen=True)
class Effort:
    """How long to measure half a cell: about ``seconds`` of samples, within these numbers; slow steps get fewer.

    So a cell has ten samples or more, but for steps of seconds.

    warm_up_s: at most so long are warm-up calls, however many were asked for; tuning_s: in a process's first row of a
    pass. slow_s: a step that takes longer gets ``slow_samples``.
    """

    seconds: float = 1.0
    warm_up_s: float = 4.0
    tuning_s: float = 10.0
    most: int = 10
    least: int = 5
    slow_s: float = 1.5
    slow_samples: int = 2


def warm_up(step: Callable[[], object], device: str, calls: int, limit_s: float) -> None:
    begin = time.perf_counter()
    for _ in range(calls):
        timed(step, device)
        if time.perf_counter() - begin > limit_s:
            break


def wall_samples_ms(step: Callable[[], object], device: str, effort: Effort) -> list[float]:
    """Milliseconds of single steps."""
    gc.collect()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < effort.most:
        samples.append(timed(step, device) * 1e3)
        spent = time.perf_counter() - begin
        least = effort.slow_samples if statistics.median(samples) > effort.slow_s * 1e3 else effort.least
        if len(samples) >= least and spent > effort.seconds:
            break
    return [round(sample, 4) for sample in samples]


def host_ms(step: Callable[[], object], device: str, calls: int = 5) -> float:
    """Median milliseconds until a step returns, on a device with nothing else to do: the host's time to launch it."""
    taken = []
    for _ in range(calls):
        synchronize(device)
        begin = time.perf_counter()
        step()
        taken.append(1e3 * (time.perf_counter() - begin))
    synchronize(device)
    return round(statistics.median(taken), 4)


def peak_mib(step: Callable[[], object], device: str) -> float | None:
    """Largest device memory that a step needs, weights and inputs included; None on a CPU.

    Allocated during the step, or kept by captured graphs, whose memory is nobody else's between their steps either.
    """
    if torch.device(device).type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    index = torch.device(device).index or 0
    kept = kept_by_graphs(torch.cuda.memory_snapshot(), index)
    return round((torch.cuda.max_memory_allocated(device) + kept) / MIB, 1)


def kept_by_graphs(segments: Sequence[Mapping[str, Any]], index: int) -> int:
    """Bytes of a device that belong to captured graphs and are not allocated now, by torch's list of segments."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def profile(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Milliseconds of kernels, in all and by group, and their number in one step, warmed up before, by CUPTI; nothing
    on a CPU.

    A profiler that is left attached slows every later launch of the process, and other rows are still to be timed, so
    it is asked to detach.
    """
    if torch.device(device).type != "cuda":
        return {}
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity

    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # read when a profile ends
    synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    synchronize(device)  # it detaches during a later call of the driver
    kernels = [
        event
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    times = [(event.name, event.time_range.elapsed_us()) for event in kernels]
    return {
        "device_ms": round(sum(time_us for _, time_us in times) / 1e3, 4),
        "launches": len(kernels),
        "device_parts_ms": milliseconds_by_group(times),
    }


# Compare a contender's values with those of stock in float64, as relative errors.

Values = dict[str, Any]
# A contender that differs more from stock in float64 computes something else. Random weights make energies small and
# sums of many signs, so float32 itself is some 1e-5 off.
MOST_WRONG = {"tf32": 5e-3, "float32": 1e-3, "float64": 1e-8}
# Gradients of single parameters are sums over all edges, and each counts.
_GRADIENTS_TIMES = 30


def values_of(model: WholeModel, inputs: dict[str, Any], which: str, names: Mapping[int, str], stress: bool) -> Values:
    """Energy, forces and stress of a batch, or the loss's gradients by the names of the stock model's parameters."""
    if which != TRAINING:
        out = model.energies_and_forces(inputs, stress=stress)
        outputs = {"energy": out.energy, "forces": out.forces} | ({} if out.stress is None else {"stress": out.stress})
        return {name: value.detach().double() for name, value in outputs.items()}
    model.training_step(inputs)
    weights = model.module.named_parameters()
    gradients = {names.get(id(weight), name): weight.grad for name, weight in weights if weight.grad is not None}
    return {"gradients": {name: gradient.double() for name, gradient in gradients.items()}}


def errors_of(found: Values, exact: Values) -> tuple[dict[str, float], str]:
    """Relative errors by output, and of how many parameters gradients could be compared.

    Energy, forces, stress: largest difference over the largest exact value; infinite if it was not computed. Gradients:
    over the parameters of the same name and size, the largest ratio of norms, |difference| / |exact|.
    """
    errors = {}
    for name, value in exact.items():
        if name != "gradients" and name not in found:
            errors[name] = math.inf
        elif name != "gradients":
            difference = (found[name].cpu() - value.cpu()).abs().max()
            errors[name] = float(difference / value.abs().max().cpu().clamp_min(1e-300))
    if "gradients" not in exact:
        return errors, ""
    shared = {
        name: (found["gradients"][name].cpu().reshape(-1), value.cpu().reshape(-1))
        for name, value in exact["gradients"].items()
        if name in found["gradients"] and found["gradients"][name].numel() == value.numel()
    }
    total = sum(float(value.norm()) ** 2 for _, value in shared.values()) ** 0.5
    # A gradient that is zero but for rounding has no relative error.
    ratios = [
        float((given - value).norm() / value.norm())
        for given, value in shared.values()
        if float(value.norm()) > 1e-12 * total
    ]
    if ratios:
        errors["gradients"] = max(ratios)
    return errors, f"{len(shared)} of {len(exact['gradients'])} parameters"


def wrong_values(errors: Mapping[str, float], precision: str) -> str:
    """What is wrong about the values with these errors; empty if nothing is."""
    for name, error in errors.items():
        most = MOST_WRONG[precision] * (_GRADIENTS_TIMES if name == "gradients" else 1)
        if not error <= most:
            return f"wrong values: {name} differ by {error:.1e} from stock in float64, more than {most:.0e}"
    return ""


def save(values: Values, path: Path) -> None:
    moved = {
        name: {key: one.cpu() for key, one in value.items()} if isinstance(value, dict) else value.cpu()
        for name, value in values.items()
    }
    torch.save(moved, path)


def load(path: Path) -> Values:
    return torch.load(path, weights_only=True)


# What a model's forward pass keeps for its gradients, by the part of the model that keeps it.

# Keeps what no part does: inputs, and sums at the end.
REST = "the model itself"


def held_mib(step: Callable[[], object], model: torch.nn.Module) -> dict[str, float]:
    """Mebibytes that one step's forward pass keeps until its backward pass, by part of the model, largest first.

    A tensor counts once, for the part that kept it first; parameters and buffers do not count, nor does what a backward
    pass keeps or computes again. Nothing for a step that replays a captured graph.
    """
    held: dict[str, int] = {}
    seen = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
    inside: list[str] = []

    def keep(tensor: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1 and (place := _place(tensor)) not in seen:
            seen.add(place)
            part = inside[-1] if inside else REST
            held[part] = held.get(part, 0) + tensor.untyped_storage().nbytes()
        return tensor

    with _following(model, inside), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return {part: round(size / MIB, 4) for part, size in sorted(held.items(), key=lambda item: -item[1])}


def part_of(name: str) -> str:
    """The part that a module belongs to: two levels of its name, without the numbers of layers."""
    levels = (re.sub(r"\d+", "", level).strip("_") for level in name.split("."))
    return ".".join([level for level in levels if level][:2]) or REST


@contextmanager
def _following(model: torch.nn.Module, inside: list[str]) -> Iterator[None]:
    """Keep the parts whose modules are being called in ``inside``, the innermost last.

    Hooks for all modules of the process: compiled ones (TorchScript's) take no others.
    """
    parts = {module: part_of(name) for name, module in model.named_modules()}

    def enter(module: torch.nn.Module, *_: Any) -> None:
        inside.append(parts.get(module) or (inside[-1] if inside else REST))

    def leave(*_: Any) -> None:
        inside.pop()

    entering = register_module_forward_pre_hook(enter)
    leaving = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        leaving.remove()
        entering.remove()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
