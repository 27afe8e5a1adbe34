"""A contender's process: it builds its model, waits idle, and answers one job at a time.

A job is picklable and never raises for a contender's failure: its answer says ``error``. ``device_lost`` in an answer
means that nothing more can run in that process.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autotune.bench.models.contenders import build, require_usable, warm_up_calls
from autotune.bench.models.measuring import Effort
from autotune.bench.rows import DEFAULT
from autotune.errors import PeerError
from autotune.text import CAPTURED

if TYPE_CHECKING:
    from ase import Atoms

    from autotune.bench.models.values import Values
    from autotune.captured.capture import CapturedModel

Cell = dict[str, Any]
# The contender that gives exact values; it is not timed.
REFERENCE = "reference"
PASSES = ("energy_forces", "training")


@dataclass(frozen=True)
class ModelSetting:
    """A contender of a model: ``model`` is a name, a file or ``module:function``."""

    model: str
    contender: str
    device: str
    dtype: str

    def open(self) -> Callable[[Any], Any]:
        # What a benchmark runs is not what a user's models miss.
        os.environ["EQUITUNE_MISSES"] = "0"
        if self.contender == DEFAULT:
            os.environ["EQUITUNE_UNTUNED"] = "1"
        session = ModelSession(self)
        return lambda job: job(session)


@dataclass(frozen=True)
class Facts:
    """What the contender's process says of itself: why it cannot take part, or a note."""

    def __call__(self, session: ModelSession) -> Cell:
        return {"error": session.error} if session.error else {"note": session.note}


@dataclass(frozen=True)
class Sizes:
    """Numbers of a structure's atoms and edges."""

    structure: str

    def __call__(self, session: ModelSession) -> Cell:
        return session.guarded(lambda: session.sizes(self.structure))


@dataclass(frozen=True)
class Exact:
    """Write the exact values of a pass to a file."""

    structure: str
    which: str
    path: str

    def __call__(self, session: ModelSession) -> Cell:
        return session.guarded(lambda: session.write_exact(self.structure, self.which, Path(self.path)))


@dataclass(frozen=True)
class Compile:
    """Run once, beside others, so that kernels are compiled and cached; the answer says how long it took."""

    structure: str
    which: str

    def __call__(self, session: ModelSession) -> Cell:
        return session.guarded(lambda: session.first_call(self.structure, self.which))


@dataclass(frozen=True)
class Measure:
    """Check and time one pass, alone on the host. ``exact``: the file of the exact values, empty if there is none."""

    structure: str
    which: str
    exact: str
    effort: Effort

    def __call__(self, session: ModelSession) -> Cell:
        return session.guarded(lambda: session.measure(self))


@dataclass(frozen=True)
class Again:
    """More samples of a pass that was measured: contenders take turns, since a host's speed changes with time."""

    structure: str
    which: str
    effort: Effort

    def __call__(self, session: ModelSession) -> Cell:
        return session.guarded(lambda: session.measure_again(self))


@dataclass(frozen=True)
class Profile:
    """Kernel time and launches of one pass, and what it keeps for its gradients."""

    structure: str
    which: str

    def __call__(self, session: ModelSession) -> Cell:
        return session.guarded(lambda: session.profile(self.structure, self.which))


class ModelSession:
    """The contender's model, and its inputs by structure."""

    def __init__(self, setting: ModelSetting) -> None:
        from autotune.models.whole_model import open_model

        self.setting, self.device = setting, setting.device
        self.error = self.note = ""
        self.first_calls: dict[tuple[str, str], float] = {}
        self._inputs: dict[str, tuple[Atoms, dict[str, Any]]] = {}
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

    def guarded(self, job: Callable[[], Cell]) -> Cell:
        """The job's answer; a failure is an answer too, and leaves the memory free for others."""
        from autotune.measure.trial import device_is_lost

        if self.error:
            return {"error": self.error}
        answer: Cell = {}
        try:
            answer = job()
        except Exception as error:
            answer = {"error": text_of(error)}
            if device_is_lost(self.device):
                return answer | {"device_lost": True}
        self.release()
        return answer

    def release(self) -> None:
        from autotune.measure.trial import free_memory

        if not self.error:
            self.model.module.zero_grad(set_to_none=True)
        free_memory(self.device)

    def inputs(self, structure: str) -> dict[str, Any]:
        return self._given(structure)[1]

    def _given(self, structure: str) -> tuple[Atoms, dict[str, Any]]:
        from autotune.models.atoms import find_atoms

        if structure not in self._inputs:
            atoms = find_atoms(structure)
            self._inputs[structure] = atoms, self.model.inputs([atoms])
        return self._inputs[structure]

    def step(self, structure: str, which: str) -> Callable[[], object]:
        inputs = self.inputs(structure)
        if self.setting.contender == CAPTURED:
            if which == "training":
                raise PeerError("a captured step gives energies, forces and stress, no gradients of weights")
            if structure != self.captured_for:  # whose graph is no part of this row's memory
                cast("CapturedModel", self.model.module).forget()
                self.captured_for = structure
        if which == "training":
            return lambda: self.model.training_step(inputs)
        stress = self.has_stress(structure)
        return lambda: self.model.energies_and_forces(inputs, stress=stress)

    def has_stress(self, structure: str) -> bool:
        """A periodic structure's stress is computed too, as the packages' calculators do."""
        return bool(self._given(structure)[0].pbc.all())

    def sizes(self, structure: str) -> Cell:
        atoms, inputs = self._given(structure)
        return {"atoms": len(atoms), "edges": int(self.model.edges(inputs).shape[1])}

    def values(self, structure: str, which: str) -> Values:
        from autotune.bench.models.values import values_of

        return values_of(self.model, self.inputs(structure), which, self.names, self.has_stress(structure))

    def write_exact(self, structure: str, which: str, path: Path) -> Cell:
        from autotune.bench.models.values import save

        save(self.values(structure, which), path)
        return {}

    def first_call(self, structure: str, which: str) -> Cell:
        from autotune.bench.models.measuring import timed

        seconds = timed(self.step(structure, which), self.device)
        # A later first call on the same structure finds everything compiled.
        return {"first_call_s": self.first_calls.setdefault((structure, which), round(seconds, 3))}

    def measure(self, job: Measure) -> Cell:
        from autotune.bench.models import measuring

        self.first_call(job.structure, job.which)
        cell = self._errors(job) if job.exact else {}
        if "error" in cell:
            return cell
        step = self.step(job.structure, job.which)
        calls = warm_up_calls(self.setting.contender, self.device)
        # Who tunes itself does so on the first, smallest structure, whatever time it takes.
        limit_s = job.effort.warm_up_s if job.which in self.warmed else job.effort.tuning_s
        measuring.warm_up(step, self.device, calls, limit_s)
        self.warmed.add(job.which)
        peak = measuring.peak_mib(step, self.device)
        measuring.warm_up(step, self.device, 1, 0.0)  # the allocator starts anew after the line above
        samples = measuring.wall_samples_ms(step, self.device, job.effort)
        return cell | self._figures(job, samples, peak)

    def measure_again(self, job: Again) -> Cell:
        from autotune.bench.models import measuring

        step = self.step(job.structure, job.which)
        measuring.warm_up(step, self.device, 3, job.effort.warm_up_s)
        return {"wall_samples_ms": measuring.wall_samples_ms(step, self.device, job.effort)}

    def _errors(self, job: Measure) -> Cell:
        from autotune.bench.models.values import errors_of, load, wrong_values

        errors, compared = errors_of(self.values(job.structure, job.which), load(Path(job.exact)))
        if wrong := wrong_values(errors, self.setting.dtype):
            return {"error": wrong}
        return {"errors": errors} | ({"gradients_of": compared} if compared else {})

    def _figures(self, job: Measure, samples: list[float], peak: float | None) -> Cell:
        figures = wall_figures(samples, len(self._given(job.structure)[0]))
        figures["first_call_s"] = self.first_calls[job.structure, job.which]
        if peak is not None:
            figures["peak_mib"] = peak
        return figures | ({"note": self.note} if self.note else {})

    def profile(self, structure: str, which: str) -> Cell:
        from autotune.bench.models import measuring
        from autotune.bench.models.held_memory import held_mib

        step = self.step(structure, which)
        measuring.warm_up(step, self.device, 1, 0.0)
        found = measuring.profile(step, self.device)
        # Apart, because compiled models may refuse the hooks that count it.
        return found | self.guarded(lambda: {"held_parts_mib": held_mib(step, self.model.module)})


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
