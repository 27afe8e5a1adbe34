"""Base class of the modules: looks up schedules and builds one operator per (device, dtype).

Lookup and build happen at the first call with a (device, dtype). Later calls cost two comparisons.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes as outside_of_traces

from autotune.database.lookup import Tuning, check_tolerance, find_schedule
from autotune.database.misses import asked
from autotune.errors import TuningMissError
from autotune.workload.graph_class import GraphClass
from autotune.workload.workload import LAYOUTS
from kernelgen.device import check_cuda, device_facts
from kernelgen.e3nn_import import o3
from kernelgen.errors import InputError, ProblemError, ToolMissingError, UnsupportedError
from kernelgen.ops.operator import Operator, build
from kernelgen.ops.registry import OPERATORS
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.tensor_product import Schedule
from kernelgen.terms.directions import DIRECTIONS

Schedules = Schedule | Mapping[str, Schedule]
_HALVES = (torch.float16, torch.bfloat16)
_NO_TORCHSCRIPT = (
    "TorchScript cannot hold generated kernels; take torch.compile or torch.export, or put e3nn's modules back first "
    "(autotune.restore)"
)


class NoTorchScript(torch.nn.Module):
    """A module that refuses TorchScript and says what to use instead."""

    def __prepare_scriptable__(self) -> NoReturn:
        """``torch.jit.script`` calls this first."""
        raise UnsupportedError(_NO_TORCHSCRIPT)

    def _slow_forward(self, *_: Any, **__: Any) -> NoReturn:
        """Replaces ``forward`` under ``torch.jit.trace``, and only there."""
        raise UnsupportedError(_NO_TORCHSCRIPT)


class TunedModule(NoTorchScript):
    """Common part of the modules: the problem, and the operators built per (device, dtype)."""

    operation: str

    def __init__(
        self,
        problem: TensorProductProblem,
        *,
        layout: str,
        graph_class: GraphClass | str | None,
        schedule: Schedules | None,
        strict: bool | None,
        deterministic: bool,
        tolerance: float | None = None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ProblemError(f"layout is {layout!r}; expected one of {LAYOUTS}")
        self.problem = problem
        self.layout = layout
        self.graph_class = GraphClass.parse(graph_class) if isinstance(graph_class, str) else graph_class
        if self.graph_class is not None and self.graph_class.operation != self.operation:
            raise ProblemError(f"graph_class is {self.graph_class.text!r}; expected one of a {self.operation} product")
        check_tolerance(tolerance)
        self.schedule = schedule
        self.strict = strict
        self.deterministic = deterministic
        self.tolerance = tolerance
        self.irreps_in1 = o3.Irreps(problem.irreps_in1)
        self.irreps_in2 = o3.Irreps(problem.irreps_in2)
        self.irreps_out = o3.Irreps(problem.irreps_out)
        self.weight_numel = problem.weight_numel
        # Computed here, because torch.compile would trace a computation in forward.
        self._dims = (problem.dim_in1, problem.dim_in2, problem.dim_out)
        self.shared_weights = problem.shared_weights
        # e3nn's instruction records, with path shapes and normalised path weights.
        self.instructions = problem.reference(compile_left_right=False, compile_right=False).instructions
        if not isinstance(schedule, Knobs | Mapping | None):
            raise ProblemError(f"schedule is {schedule!r}; expected a Schedule, or some by the direction's name")
        unknown = sorted(set(schedule) - set(DIRECTIONS)) if isinstance(schedule, Mapping) else []
        if unknown:
            raise ProblemError(f"schedule has the directions {unknown}; expected some of {tuple(DIRECTIONS)}")
        self._key = self._text_of(schedule)
        self._forget_operators()
        if device is not None or dtype is not None:
            device, dtype = or_default(device, dtype)
            self._operator_for(device, dtype)

    def _text_of(self, given: Schedules | None) -> str:
        """Everything that determines this module's operators."""
        by_name = given if isinstance(given, Mapping) else {"": given} if given is not None else {}
        schedules = sorted(f"{name} {schedule.key}" for name, schedule in by_name.items())
        graph_class = self.graph_class.text if self.graph_class else ""
        asked = f"{self.deterministic} {self.tolerance}"
        return f"{self.problem.key} {self.operation} {self.layout} {graph_class} {asked} {schedules}"

    @property
    def tuning(self) -> dict[str, Tuning]:
        """By direction: schedule, origin, database entry and reason, for the operator built last.

        Before the first build: what would be loaded on torch's default device and dtype.
        """
        if self._tuning:
            return dict(self._tuning)
        return self._look_up(*or_default(None, None), refused={})

    def _forget_operators(self) -> None:
        self._operators: dict[tuple[torch.device, torch.dtype], tuple[Operator, dict[str, Tuning]]] = {}
        self._operator: Operator | None = None
        self._met: tuple[torch.device, torch.dtype] | None = None
        self._tuning: dict[str, Tuning] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Loaded kernels belong to this process. A copy builds its own from the compile cache at its first call.
        state = dict(self.__dict__)
        for name in ("_operators", "_operator", "_met", "_tuning"):
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_operators()

    def _look_up(
        self, device: torch.device, dtype: torch.dtype, refused: dict[str, str] | None = None
    ) -> dict[str, Tuning]:
        """By direction. ``refused`` receives directions other than forward without a suitable schedule: few are called.

        TuningMissError if forward has none, or if ``refused`` is not given.
        """
        given = {} if self.schedule is None else self.schedule
        if isinstance(given, Schedule):
            given = dict.fromkeys(DIRECTIONS, given)
        facts, name = device_facts(device), str(dtype).removeprefix("torch.")
        found = {}
        for direction in DIRECTIONS:
            if direction in given:
                found[direction] = Tuning(given[direction], "given", None, "given by the caller")
                continue
            kernel = (self.problem, self.operation, direction, name, self.layout, facts, self.graph_class)
            kind: dict[str, Any] = {"deterministic": self.deterministic}
            try:
                found[direction] = find_schedule(*kernel, self.strict, **kind, tolerance=self.tolerance)
            except TuningMissError as error:
                if refused is None or direction == "forward":
                    raise
                refused[direction] = str(error)
                found[direction] = dataclasses.replace(find_schedule(*kernel, False, **kind), reason=str(error))
        return found

    @torch.compiler.assume_constant_result
    def _operator_text(self, key: str, device: torch.device, dtype: torch.dtype) -> str:
        """The name under which the operator is registered. Lookup and build happen here, untraced.

        key: identifies this module, so that torch.compile does not reuse its code for another module.
        """
        return self._operator_for(device, dtype).text

    def _operator_for(self, device: torch.device, dtype: torch.dtype) -> Operator:
        key = (device, dtype)
        if key not in self._operators:
            check_dtype("inputs are", dtype)
            with outside_of_traces():
                self._operators[key] = self._build(device, dtype)
        self._operator, self._tuning = self._operators[key]
        self._met = key
        return self._operator

    def _build(self, device: torch.device, dtype: torch.dtype) -> tuple[Operator, dict[str, Tuning]]:
        refused: dict[str, str] = {}
        tuning = self._look_up(device, dtype, refused)
        schedules: Any = {direction: found.schedule for direction, found in tuning.items()}
        operator = build(
            *(self.problem, schedules),
            operation=self.operation,
            dtype=dtype,
            layout=self.layout,
            device=device,
            deterministic=self.deterministic,
            refused=refused,
        )
        if self.schedule is None:
            asked(operator)
        return operator, tuning

    def _operator_of(self, x: torch.Tensor) -> Operator:
        if torch.compiler.is_compiling():
            return OPERATORS[self._operator_text(self._key, x.device, x.dtype)]
        met = self._met
        if met is not None and met[1] is x.dtype and met[0] == x.device:
            assert self._operator is not None
            return self._operator
        return self._operator_for(x.device, x.dtype)

    def extra_repr(self) -> str:
        # As in e3nn, every combination of copies counts as a path.
        paths = sum(math.prod(instruction.path_shape) for instruction in self.instructions)
        first, second, out = (i.simplify() for i in (self.irreps_in1, self.irreps_in2, self.irreps_out))
        return f"{first} x {second} -> {out} | {paths} paths | {self.weight_numel} weights"


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert half precision tensors to float32 under ``torch.autocast``, as torch does for its float32 operations."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(
        tensor.float() if tensor.dtype in _HALVES and torch.is_autocast_enabled(tensor.device.type) else tensor
        for tensor in tensors
    )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise InputError for a dtype without kernels."""
    if dtype not in (torch.float32, torch.float64):
        hint = ", or call it under torch.autocast, which computes it in float32" if dtype in _HALVES else ""
        raise InputError(f"{name} {dtype}; expected torch.float32 or torch.float64: convert to one of them{hint}")


def or_default(device: torch.device | str | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Device (with index) and dtype, torch's defaults for None; ToolMissingError for a GPU that torch does not see."""
    if not isinstance(dtype, torch.dtype | None):
        raise InputError(f"dtype is {dtype!r}; expected torch.float32 or torch.float64")
    try:
        if device is not None and torch.device(device).type == "cuda":
            check_cuda()
        # An empty tensor shows how torch resolves "cuda" and its defaults: the device with its index.
        probe = torch.empty(0, device=device, dtype=dtype or torch.get_default_dtype())
    except ToolMissingError:
        raise
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            f"device is {device!r}; expected a device of torch such as 'cpu' or 'cuda' ({str(error).splitlines()[0]})"
        ) from error
    return probe.device, probe.dtype
