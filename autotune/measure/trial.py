"""One trial in a worker: build the operator, check it against float64 e3nn, time it.

A :class:`TrialSetting` (what stays between trials) and a :class:`TrialJob` give an :class:`Outcome`: a failure of a
schedule is data, never an exception.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.database.entry import what_is_wrong
from autotune.measure import timing
from autotune.measure.kinds import Run, guarded, measured_kind, order_of
from autotune.measure.worker import Worker, WorkerLost
from autotune.workload.objective import FIGURES, TIME
from autotune.workload.workload import Tensors, Workload
from kernelgen.compat import o3
from kernelgen.device import device_facts
from kernelgen.errors import CacheError, CompileError, ScheduleError, ToolMissingError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.plan import small_graph_edges

# Whose energy is measured: a kernel that takes so many times the least time would have to draw as much less power.
ENERGY_WITHIN = 1.5
STATES = ("ok", "pruned", "illegal", "compile", "launch", "memory", "wrong", "timeout", "crashed")


@dataclass(frozen=True)
class Outcome:
    """``state`` is one of :data:`STATES`; times in microseconds, None unless the state is ok and a time was asked for.

    compile_s, measure_s: seconds of compilation, and of the rest of the trial.
    cut: given up after a few samples because it is far slower than the best, so its median is imprecise.
    conditions: of the machine while it was timed, see :mod:`autotune.measure.timing`.
    errors: largest relative error against float64 by output slot. certificate: see
    :meth:`WorkloadSession.check`; empty unless it was asked for. device_lost: nothing more can run in
    that process. figures: what else was asked for and found of a call, by the keys of
    :data:`autotune.workload.objective.FIGURES`.
    """

    state: str
    reason: str = ""
    time_us: float | None = None
    q1_us: float | None = None
    q3_us: float | None = None
    samples_us: tuple[float, ...] = ()
    cut: bool = False
    errors: Mapping[str, float] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    clocks: Mapping[str, Any] | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)
    compile_s: float | None = None
    measure_s: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    device_lost: bool = False

    @property
    def ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class TrialJob:
    """Measure ``schedule`` for one direction. ``best_us``: the study's least time so far, to give up slow candidates.

    max_seconds: of timing; None: no time is taken. certifies: measure the certificate too. figures: of a call, by
    name; energy takes a second, so only schedules within :data:`ENERGY_WITHIN` of ``best_us`` get it.
    """

    direction: str
    schedule: Knobs
    best_us: float | None = None
    max_seconds: float | None = 1.0
    certifies: bool = False
    figures: tuple[str, ...] = TIME.figures


@dataclass(frozen=True)
class TrialSetting:
    """Opened in the worker: tensors, reference and device stay between trials."""

    workload: Workload
    device: str

    def open(self) -> TrialSession:
        free_memory(self.device)
        return TrialSession(self)


class WorkloadSession:
    """The tensors of one workload on its device, the float64 reference of its outputs, and kernels held to it."""

    def __init__(self, workload: Workload, device: str, guards: bool = False) -> None:
        self.workload, self.device, self.kind = workload, device, measured_kind(workload.operation)
        tensors = self.kind.tensors(workload, device)
        self.tensors = guarded(tensors) if guards else tensors
        self.reference = self.kind.reference(workload, device, self.tensors)
        self.order = order_of(self.tensors)

    @property
    def is_small(self) -> bool:
        """Whether its graph is one of those that launches decide, not bytes."""
        return self.tensors.num_edges <= small_graph_edges(device_facts(self.device))

    def build(self, schedules: Mapping[str, Knobs]) -> Any:
        """The operator with these schedules by direction."""
        return self.kind.build(self.workload, schedules, self.device)

    def run(self, operator: Any, direction: str) -> Run:
        """One direction of an operator, to be timed."""
        return self.kind.run(operator, direction, self.tensors, self.order, poison=False)

    def check(self, operator: Any, direction: str, certifies: bool) -> tuple[dict[str, float], dict[str, Any]]:
        """Errors against float64 by slot, and the certificate of a direction if it is asked for.

        ``bitwise``: whether two runs gave the same bits; errors are those of both. ``equivariance``: relative error
        under a rotation with inversion. ``edges``: number of edges checked for errors.
        """

        def run(tensors: Tensors) -> dict[str, Any]:
            return self.kind.run(operator, direction, tensors, self.order, poison=True)()

        first = run(self.tensors)
        errors = self.reference.check(direction, first)
        if not certifies:
            return errors, {}
        second = run(self.tensors)
        for slot, error in self.reference.check(direction, second).items():
            errors[slot] = max(error, errors[slot])
        bitwise = all(torch.equal(first[slot], second[slot]) for slot in first)
        del first, second
        equivariance = equivariance_error(self.workload, self.tensors, run)
        return errors, {"bitwise": bitwise, "equivariance": equivariance, "edges": self.reference.checked_edges}


class TrialSession(WorkloadSession):
    """Trials of one workload; its operands lie between NaN."""

    def __init__(self, setting: TrialSetting) -> None:
        super().__init__(setting.workload, setting.device, guards=True)

    def measure(self, job: TrialJob) -> Outcome:
        """Build, check and time one schedule."""
        stage = "compile"
        try:
            begin = time.perf_counter()
            operator = self.build({job.direction: job.schedule})
            resources = operator.resources(job.direction)
            compile_s = time.perf_counter() - begin
            stage = "launch"
            known = {"resources": resources, "compile_s": round(compile_s, 3)}
            errors, certificate = self.check(operator, job.direction, job.certifies)
            if (wrong := what_is_wrong(errors, self.workload.tolerance, certificate)) is not None:
                return Outcome("wrong", wrong, errors=finite(errors), **known)
            if job.max_seconds is None:
                return Outcome("ok", errors=errors, certificate=certificate, **known)
            timed = self._timing(operator, job)
            figures = self._figures(operator, job, timed)
            later, _ = self.check(operator, job.direction, certifies=False)
            errors = {slot: max(error, later[slot]) for slot, error in errors.items()}
            if (wrong := what_is_wrong(later, self.workload.tolerance)) is not None:
                why = f"right at its first launch, not at a later one: {wrong}"
                return Outcome("wrong", why, errors=finite(errors))
            return Outcome("ok", **vars(timed), errors=errors, certificate=certificate, figures=figures, **known)
        except ScheduleError as error:
            return Outcome("illegal", str(error))
        except CompileError as error:
            return Outcome("compile", str(error)[-2000:])
        except (CacheError, ToolMissingError):
            raise  # the machine is at fault, not the schedule: it must not get into quarantine
        except Exception as error:  # CUDA errors have torch's or the driver's own type
            lost, state = device_is_lost(self.device), "memory" if is_out_of_memory(error) else stage
            reason = f"{type(error).__name__}: {error}"[:2000]
        if state == "memory" and not lost:
            free_memory(self.device)
        return Outcome(state, reason, device_lost=lost)

    def _timing(self, operator: Any, job: TrialJob) -> timing.Timing:
        assert job.max_seconds is not None
        hopeless = None if job.best_us is None else timing.HOPELESS_RATIO * job.best_us
        options: dict[str, Any] = {"max_seconds": job.max_seconds, "hopeless_us": hopeless}
        # Of small graphs, where loading the code matters: a long kernel loads its code once.
        return timing.time_callable(self.run(operator, job.direction), self.device, cold_code=self.is_small, **options)

    def _figures(self, operator: Any, job: TrialJob, timed: timing.Timing) -> dict[str, float]:
        """What the job asks for besides time, as far as it is known here."""
        run, found = self.run(operator, job.direction), dict[str, float | None]()
        if "memory" in job.figures:
            found["memory"] = timing.Sampler(run, self.device, cold_cache=False).peak_bytes()
        is_near = job.best_us is None or timed.time_us <= ENERGY_WITHIN * job.best_us
        if "energy" in job.figures and is_near and not timed.cut:
            found["energy"] = timing.joules_a_call(run, self.device, timing.ENERGY_ROUND_S)
        return {FIGURES[name]: value for name, value in found.items() if value is not None}


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error is a failed allocation, of whatever type."""
    # On a CPU torch raises a plain RuntimeError.
    words = ("can't allocate memory", "not enough memory", "out of memory", "Invalid buffer size")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


def run_trial(worker: Worker, job: TrialJob, limit_s: float) -> Outcome:
    """Measure one schedule, even if the process dies; after a lost device the next trial gets a new process."""
    begin = time.monotonic()
    try:
        outcome = worker.ask(limit_s, TrialSession.measure, job)
    except WorkerLost as lost:
        return Outcome(lost.state, f"{lost.reason} (after {time.monotonic() - begin:.1f} s)")
    if outcome.device_lost:
        worker.close()
    return outcome


def finite(errors: Mapping[str, float]) -> dict[str, float]:
    """Replace infinity by 1e308, because JSON has none; the error of an output with NaN is infinite."""
    return {slot: error if error < 1e308 else 1e308 for slot, error in errors.items()}


def device_is_lost(device: str) -> bool:
    """Whether the process's CUDA context is corrupted, so that every later call fails too."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1).item()
    except Exception:
        return True
    return False


def free_memory(device: str) -> None:
    """Release unused device memory: first garbage cycles, then the allocator's cache."""
    gc.collect()
    if torch.device(device).type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# The equivariance error of a kernel under a random rotation with inversion.
#
# ``f(D x)`` is compared with ``D f(x)``, both computed by the kernel; only the representation matrices ``D`` come from
# e3nn. This error adds to the one against float64, which every kernel has to pass.

# Operands by slot; tangents transform like their operands.
SLOTS = ("x", "y", "g")


def random_rotation(seed: int = 0) -> torch.Tensor:
    """A rotation with inversion, [3, 3] in float64, of determinant -1, so that parities are tested too."""
    generator = torch.Generator().manual_seed(seed)
    turned, upper = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    turned = turned * upper.diagonal().sign()
    return turned * -torch.linalg.det(turned).sign()


def turned(rows: torch.Tensor, irreps: str, layout: str, rotation: torch.Tensor) -> torch.Tensor:
    """Rows [n, dim] of irreps, transformed by ``rotation`` in float64 and returned in their own dtype."""
    parts = []
    for part, (mul, irrep) in zip(rows.split([m.dim for m in o3.Irreps(irreps)], -1), o3.Irreps(irreps), strict=True):
        matrix = _matrix(irrep.l, irrep.p, tuple(rotation.flatten().tolist())).to(rows.device)
        if layout == "mul_ir":
            made = part.double().view(len(rows), mul, irrep.dim) @ matrix.T
        else:
            made = matrix @ part.double().view(len(rows), irrep.dim, mul)
        parts.append(made.reshape(len(rows), -1).to(rows.dtype))
    return torch.cat(parts, -1) if parts else rows


@functools.lru_cache(maxsize=64)
def _matrix(degree: int, parity: int, elements: tuple[float, ...]) -> torch.Tensor:
    """``D`` of an irrep for a rotation with inversion, from ``Y(R v) = D Y(v)``; ``elements``: of the rotation's rows.

    e3nn's ``D_from_matrix`` uses generators in torch's default dtype, so it is accurate to float32 only.
    """
    rotation = torch.tensor(elements, dtype=torch.float64).view(3, 3)
    generator = torch.Generator().manual_seed(degree)
    points = torch.randn(4 * (2 * degree + 1), 3, generator=generator, dtype=torch.float64)
    here, there = (o3.spherical_harmonics(degree, v, True) for v in (points, points @ rotation.T))
    matrix = torch.linalg.lstsq(here, there).solution.T
    return matrix * (parity * (-1) ** degree)


def equivariance_error(
    workload: Workload,
    tensors: Tensors,
    run: Callable[[Tensors], Mapping[str, torch.Tensor]],
) -> float:
    """The largest relative error (Euclidean norm over all rows) of the outputs of ``run``, by slot.

    run: outputs (``x``, ``y``, ``w``, ``g``) for given tensors, of one direction.
    """
    irreps, rotation = workload.kind.irreps(workload.problem, workload.layout), random_rotation()
    layouts = {"x": workload.layout, "y": "mul_ir", "g": workload.layout}

    def turn(slot: str, rows: torch.Tensor) -> torch.Tensor:
        return turned(rows, irreps[slot], layouts[slot], rotation) if slot in irreps else rows

    before = {slot: turn(slot, value.double()) for slot, value in run(tensors).items()}
    names = [name for slot in SLOTS if slot in irreps for name in (slot, "t" + slot) if getattr(tensors, name).numel()]
    changed = {name: turn(name[-1], getattr(tensors, name)) for name in names}
    after = run(dataclasses.replace(tensors, **changed))  # type: ignore[arg-type]
    worst = 0.0
    for slot, expected in before.items():
        size, difference = float(expected.norm()), float((after[slot].double() - expected).norm())
        worst = max(worst, difference / size if size else (torch.inf if difference else 0.0))
    return worst
