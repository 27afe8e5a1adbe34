"""A step of molecular dynamics by ASE, as a simulation's user runs it: integrator, inputs, model, results.

Atoms move by velocity Verlet with steps of 1 fs, from velocities of 300 K, through the package's own calculator around
a contender's model; with Equitune's model the calculator keeps its inputs between steps (``autotune.models.step``).
Weights may be random and forces large, so after some steps the atoms start again from where they were.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from ase import Atoms, units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from ase.stress import voigt_6_to_full_3x3_stress

from autotune.bench.contenders import SYMMETRIX
from autotune.measure.timing import synchronize
from autotune.models.capture import CapturedModel
from autotune.models.launch import OneLaunch
from autotune.models.neighbors import NeighborList
from autotune.models.package import default_dtype
from autotune.models.step import QuickSteps, quicken
from autotune.models.whole_model import WholeModel
from autotune.text import is_ours

TIMESTEP_FS, TEMPERATURE_K = 1.0, 300.0
STEPS_FROM_START = 20


class Dynamics:
    """A simulation of a structure by a contender's model."""

    def __init__(self, model: WholeModel, atoms: Atoms, *, contender: str) -> None:
        self.package, self.device = model.package, model.device
        if contender == SYMMETRIX:
            self.calculator = symmetrix_calculator(model)
        else:
            module = model.module
            inner = module.model if isinstance(module, CapturedModel) else module
            self.calculator = model.calculator(inner)
            self._replace_models(lambda _: module)
        if is_ours(contender):
            quicken(self.calculator)
        self.atoms = atoms.copy()
        MaxwellBoltzmannDistribution(self.atoms, temperature_K=TEMPERATURE_K, rng=np.random.default_rng(0))
        Stationary(self.atoms)
        self._start = self.atoms.positions.copy(), self.atoms.get_velocities()
        self.atoms.calc = self.calculator
        self._integrator = VelocityVerlet(self.atoms, TIMESTEP_FS * units.fs)
        self._steps = 0

    @property
    def how(self) -> str:
        """How the calculator makes its inputs, in words."""
        owner = "the package's" if hasattr(self.calculator, "models") or hasattr(self.calculator, "model") else "its"
        return getattr(self.calculator, "step", "") or f"{owner} own calculator"

    def _replace_models(self, replacement: Callable[[Any], Any]) -> None:
        if hasattr(self.calculator, "models"):  # MACE's takes a committee
            self.calculator.models = [replacement(model) for model in self.calculator.models]
        else:
            self.calculator.model = replacement(self.calculator.model)

    def step(self) -> None:
        """One step: the forces on the host are those of the new positions."""
        if self._steps == STEPS_FROM_START:
            self._steps = 0
            self.atoms.positions, velocities = (values.copy() for values in self._start)
            self.atoms.set_velocities(velocities)
        with default_dtype(self.package.dtype_of_data):
            self._integrator.run(1)
        self._steps += 1

    def values(self) -> dict[str, torch.Tensor]:
        """Energy [1], forces [atoms, 3] and, of a periodic structure, stress [1, 3, 3] where the structure starts."""
        self._steps = STEPS_FROM_START
        self.atoms.positions = self._start[0].copy()
        with default_dtype(self.package.dtype_of_data):
            values = {"energy": [self.atoms.get_potential_energy()], "forces": self.atoms.get_forces()}
            if self.atoms.pbc.all():
                values["stress"] = voigt_6_to_full_3x3_stress(self.atoms.get_stress())[None]
        return {name: torch.as_tensor(np.asarray(value), dtype=torch.float64) for name, value in values.items()}

    def parts_ms(self, steps: int = 5) -> dict[str, float]:
        """Milliseconds a step of finding neighbors, of the model, and of the rest, each waited for by itself.

        None of a calculator that does all of it in one library.
        """
        if self.how == "its own calculator":
            return {}
        with self._clocks() as seconds:
            began = time.perf_counter()
            for _ in range(steps):
                self.step()
            whole = time.perf_counter() - began
        seconds["rest"] = whole - sum(seconds.values())
        return {name: round(value / steps * 1e3, 4) for name, value in seconds.items()}

    @contextmanager
    def _clocks(self) -> Iterator[dict[str, float]]:
        """Within, the seconds of neighbors and of the model add up in what is yielded.

        One launch is the model's, though it drops the neighbors beyond the cutoff too.
        """
        seconds = {"neighbors": 0.0, "model": 0.0}
        running: list[str] = []

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if running:
                    return function(*arguments, **options)
                synchronize(self.device)
                running.append(name)
                began = time.perf_counter()
                try:
                    return function(*arguments, **options)
                finally:
                    synchronize(self.device)
                    seconds[name] += time.perf_counter() - began
                    running.clear()

            return call

        home, name = self.package.neighbor_function
        places = [(importlib.import_module(home), name), (NeighborList, "graph"), (NeighborList, "candidates")]
        models: list[Any] = []

        def with_clock(model: Any) -> Any:
            models.append(model)
            # A captured model's calculator launches it by itself.
            launches = isinstance(self.calculator, QuickSteps) and self.calculator.kept_inputs().launches
            return model if launches else _Called(model, timed("model", model))

        with ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, timed("neighbors", getattr(owner, name))))
            for owner, name in ((OneLaunch, "begin"), (OneLaunch, "end")):
                stack.enter_context(patch.object(owner, name, timed("model", getattr(owner, name))))
            self._replace_models(with_clock)
            try:
                yield seconds
            finally:
                given = iter(models)
                self._replace_models(lambda _: next(given))


class _Called:
    """A model with another call."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def symmetrix_calculator(model: WholeModel) -> Any:
    """Symmetrix-XL's calculator of a model of MACE, by its own converter, in its own default form."""
    from symmetrix import Symmetrix
    from symmetrix.extract_mace_data import extract_mace_data

    with tempfile.TemporaryDirectory() as folder:
        checkpoint, file = Path(folder) / "model.pt", Path(folder) / "model.json"
        torch.save(model.module, checkpoint)
        file.write_text(json.dumps(extract_mace_data(str(checkpoint))))
        return Symmetrix(str(file), dtype=str(model.dtype).removeprefix("torch."))


def nanoseconds_a_day(step_ms: float) -> float:
    """Simulated time in a day of such steps of wall time."""
    return TIMESTEP_FS * 1e-6 * 86_400e3 / step_ms
