"""Base classes of the modules: look up schedules and build one operator per device, dtype and size class of graphs.

Lookup and build happen at the first call with a (device, dtype, size class). A module that was told its graph class, or
all its schedules, has one size class. Later calls cost a few comparisons of integers.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes as outside_of_traces

from autotune.database.lookup import Finder, Tuning, check_tolerance
from autotune.database.misses import asked
from autotune.errors import TuningMissError
from autotune.workload.kind import Problem
from autotune.workload.known_kinds import CONVOLUTIONS, kernel_kind
from autotune.workload.workload import LAYOUTS, GraphClass
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.compat import constant_result, is_transforming, o3
from kernelgen.device import check_cuda, device_facts
from kernelgen.errors import InputError, ProblemError, ToolMissingError, UnsupportedError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import Schedule
from kernelgen.ops.base import OPERATORS, build_family
from kernelgen.ops.product import Operator, build
from kernelgen.problem.product import TensorProductProblem, size_class

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


# Rounded logarithms of a graph's edges and edges a node; None for a module that was told its graph class.
Size = tuple[int, int] | None


class Built(NamedTuple):
    """What was built for a device, dtype and size class. run: what calls use, the operator or what is made of it."""

    size: Size
    operator: Any
    tuning: dict[str, Tuning]
    run: Any


class TunedModule(NoTorchScript):
    """A module with a problem: looks up schedules, and has operators for each device, dtype and size class of calls.

    operation: as the kind of kernel names it. graph_class: the class that the module was told, which serves all calls.
    ``_key`` is all that determines its operators: torch.compile compares it before it takes one module's code for
    another.
    """

    operation: str
    problem: Any
    layout: str = "mul_ir"
    graph_class: GraphClass | None = None
    schedule: Schedules | None = None
    strict: bool | None = None
    deterministic: bool = False
    tolerance: float | None = None
    _key: Any
    # How errors about the tensors of a call begin.
    _inputs = "inputs are"

    @property
    def tuning(self) -> dict[str, Tuning]:
        """By direction: schedule, origin, database entry and reason, for the operator used last.

        Before the first call: what would be loaded on torch's default device and dtype, without a graph's size for the
        largest graph.
        """
        if not self._met:
            return self.tuning_for(self.graph_class)
        built = self._met[4]
        # First runs may have chosen since.
        chosen = getattr(built.operator, "chosen", {})
        return {
            name: found.after_first_run(*chosen[name]) if name in chosen else found
            for name, found in built.tuning.items()
        }

    def tuning_for(self, graph_class: GraphClass | str | None) -> dict[str, Tuning]:
        """The same for graphs of a class such as ``conv-e14-d5``, on the device and dtype used last."""
        device, dtype = self._met[:2] if self._met else or_default(None, None)
        return self._lookup(device, dtype).find(self._parsed(graph_class)).tuning

    def _parsed(self, graph_class: GraphClass | str | None) -> GraphClass | None:
        parsed = GraphClass.parse(graph_class) if isinstance(graph_class, str) else graph_class
        if parsed is not None and parsed.operation != self.operation:
            is_product = isinstance(self.problem, TensorProductProblem)
            kind = f"a {self.operation} product" if is_product else self.operation
            raise ProblemError(f"graph_class is {parsed.text!r}; expected one of {kind}")
        return parsed

    def _forget_operators(self) -> None:
        self._operators: dict[tuple[torch.device, torch.dtype], dict[Size, Built]] = {}
        self._families: dict[tuple[torch.device, torch.dtype], str] = {}
        # Device, dtype, edges and nodes of a call, what it used, and what other sizes use: one attribute, so that
        # threads never see one of another call's.
        self._met: tuple[torch.device, torch.dtype, int, int, Built, dict[Size, Built]] | None = None
        given = dict.fromkeys(DIRECTIONS) if isinstance(self.schedule, Knobs) else self.schedule or {}
        self._has_one_size = self.graph_class is not None or set(given) == set(DIRECTIONS)

    def __getstate__(self) -> dict[str, Any]:
        # Loaded kernels belong to this process. A copy builds its own from the compile cache at its first call.
        return {name: it for name, it in self.__dict__.items() if name not in ("_operators", "_families", "_met")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_operators()

    def _lookup(self, device: torch.device, dtype: torch.dtype) -> Lookup:
        if dtype not in (torch.float32, torch.float64):
            hint = ", or call it under torch.autocast, which computes it in float32" if dtype in _HALVES else ""
            expected = "expected torch.float32 or torch.float64: convert to one of them"
            raise InputError(f"{self._inputs} {dtype}; {expected}{hint}")
        given = dict.fromkeys(DIRECTIONS, self.schedule) if isinstance(self.schedule, Schedule) else self.schedule
        asked: dict[str, Any] = {"deterministic": self.deterministic, "tolerance": self.tolerance}
        return Lookup(self.problem, self.operation, self.layout, device, dtype, self.strict, given=given, **asked)

    @abstractmethod
    def _build(self, device: torch.device, dtype: torch.dtype, found: Found) -> Any:
        """The operator with these schedules."""

    @constant_result
    def _operator_text(self, key: Any, device: torch.device, dtype: torch.dtype) -> str:
        """The name under which the operator is registered: of a family, if schedules depend on a call's size.

        Lookup and build happen here, untraced. key: this module's.
        """
        if self._has_one_size:
            return self._use(device, dtype, None).operator.text
        if (device, dtype) not in self._families:
            with outside_of_traces():
                family = self._lookup(device, dtype).family(lambda found: self._build(device, dtype, found))
            self._families[device, dtype] = family.text
        return self._families[device, dtype]

    def _use(
        self,
        device: torch.device,
        dtype: torch.dtype,
        size: Size,
        num_edges: int = -1,
        num_nodes: int = -1,
        receiver: torch.Tensor | None = None,
    ) -> Built:
        """What a size class uses, built if needed; the next call on as many edges and nodes finds it at once.

        size: None for the module's own graph class, or the largest graph. receiver: of the graph, for its skew.
        """
        by_size = self._operators.setdefault((device, dtype), {})
        built = by_size.get(size)
        if built is None:
            with outside_of_traces():
                lookup, own = self._lookup(device, dtype), self.graph_class
                graph_class = own if size is None else class_of_call(self.operation, size, receiver, num_nodes)
                found = lookup.find(graph_class)
                operator = self._build(device, dtype, found)
                built = Built(size, operator, found.tuning, self._run_by(operator, graph_class, device))
            by_size[size] = built
        self._meet(device, dtype, num_edges, num_nodes, built, by_size)
        return built

    def _meet(self, *met: Any) -> None:
        # Without the search for parameters and modules that torch does for each attribute that is set.
        self.__dict__["_met"] = met

    @property
    def _operator(self) -> Any:
        return self._met[4].operator if self._met else None

    def _run_by(self, operator: Any, graph_class: GraphClass | None, device: torch.device) -> Any:
        """What calls use: the operator, or what is made of it for graphs of this class."""
        return operator

    def _operator_of(
        self, x: torch.Tensor, num_edges: int, num_nodes: int, receiver: torch.Tensor | None = None
    ) -> Any:
        """What runs a call on a graph of this size; of rows without edges, both numbers are theirs."""
        if torch.compiler.is_compiling() or type(num_edges) is not int:
            return OPERATORS[self._operator_text(self._key, x.device, x.dtype)]
        met, size = self._met, None
        if met is not None and met[1] is x.dtype and met[0] == x.device:
            if (met[2] == num_edges and met[3] == num_nodes) or self._has_one_size:
                return met[4].run
            size = size_class(num_edges, num_nodes)
            if size == met[4].size:
                return met[4].run
            built = met[5].get(size)
            if built is not None:
                self._meet(met[0], met[1], num_edges, num_nodes, built, met[5])
                return built.run
        elif not self._has_one_size:
            size = size_class(num_edges, num_nodes)
        return self._use(x.device, x.dtype, size, num_edges, num_nodes, receiver).run


class TunedProduct(TunedModule):
    """Common part of the modules of tensor products."""

    problem: TensorProductProblem

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
        self.graph_class = self._parsed(graph_class)
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
        by_name = schedule if isinstance(schedule, Mapping) else {"": schedule} if schedule is not None else {}
        if unknown := sorted(set(by_name) - {"", *DIRECTIONS}):
            raise ProblemError(f"schedule has the directions {unknown}; expected some of {tuple(DIRECTIONS)}")
        schedules = sorted(f"{name} {knobs.key}" for name, knobs in by_name.items())
        own = self.graph_class.text if self.graph_class else ""
        asked = f"{deterministic} {tolerance}"
        self._key = f"{problem.key} {self.operation} {layout} {own} {asked} {schedules}"
        self._forget_operators()
        self._build_for(device, dtype)

    def _build_for(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Build the operator now if the caller named a device or a dtype."""
        if device is not None or dtype is not None:
            self._use(*or_default(device, dtype), None)

    def _build(self, device: torch.device, dtype: torch.dtype, found: Found) -> Operator:
        operator = build(
            *(self.problem, found.schedules),
            operation=self.operation,
            dtype=dtype,
            layout=self.layout,
            device=device,
            deterministic=self.deterministic,
            refused=found.refused,
            shortlists=found.shortlists,
        )
        if self.schedule is None:
            asked(operator)
        return operator

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


# Schedules by the size class of a graph: looked up direction by direction, and as a family of operators.
#
# In eager mode a module builds the operator of a class when it meets one. A traced module needs all classes at once, as
# data: :meth:`Lookup.family` asks for each of them and builds an operator for each different answer. Nothing is
# compiled.

Kind = TypeVar("Kind")
# An order counts edges in 32 bits. Larger graphs take the schedules of this class.
_MOST_LOG2_EDGES = 31


def class_of_call(operation: str, size: tuple[int, int], receiver: torch.Tensor | None, num_nodes: int) -> GraphClass:
    """The class of a call's graph by its size, and by its skew, for which a GPU is waited for.

    receiver: None without edges between nodes. A graph that cannot be looked at (traced, transformed, captured) or has
    no valid one counts as even.
    """
    even = GraphClass(operation, *size)
    if type(receiver) is not torch.Tensor or receiver.dim() != 1 or not len(receiver) or is_transforming(receiver):
        return even
    if not receiver.is_cpu and (not receiver.is_cuda or torch.cuda.is_current_stream_capturing()):
        return even
    return dataclasses.replace(even, log2_skew=GraphClass.of_graph(operation, receiver, num_nodes).log2_skew)


class Found(NamedTuple):
    """By direction, what a lookup found; and why directions are refused, each with the text of its TuningMissError."""

    tuning: dict[str, Tuning]
    refused: dict[str, str]

    @property
    def schedules(self) -> dict[str, Any]:
        return {direction: found.schedule for direction, found in self.tuning.items()}

    @property
    def shortlists(self) -> dict[str, Any]:
        """What first runs try beside the schedules."""
        return {direction: found.others for direction, found in self.tuning.items() if found.others}


class Lookup:
    """The lookups of a module for one device and dtype, in any number of graph classes.

    given: schedules by direction that are not looked up.
    """

    def __init__(
        self,
        problem: Problem,
        operation: str,
        layout: str,
        device: torch.device,
        dtype: torch.dtype,
        strict: bool | None = None,
        *,
        given: Mapping[str, Knobs] | None = None,
        deterministic: bool = False,
        tolerance: float | None = None,
    ) -> None:
        facts, kind = device_facts(device), kernel_kind(operation)
        self.operation, self._given, self._directions = operation, given or {}, tuple(kind.directions)
        kernel = (str(dtype).removeprefix("torch."), layout, facts, deterministic)
        asked = (name for name in kind.directions if name not in self._given)
        specs = {name: kind.spec(problem, operation, name, *kernel) for name in asked}
        self._finders = {name: Finder(spec, strict, tolerance) for name, spec in specs.items()}
        self._lenient = {name: Finder(spec, strict=False) for name, spec in specs.items()}

    def find(self, graph_class: GraphClass | None) -> Found:
        """What would be loaded for a graph class; TuningMissError if forward has no suitable schedule.

        Other directions are refused instead: few of them are called.
        """
        found = Found({}, {})
        for name in self._directions:
            if name in self._given:
                found.tuning[name] = Tuning(self._given[name], "given", None, "given by the caller")
                continue
            try:
                found.tuning[name] = self._finders[name].find(graph_class)
            except TuningMissError as error:
                if name == "forward":
                    raise
                found.refused[name] = str(error)
                found.tuning[name] = dataclasses.replace(self._lenient[name].find(graph_class), reason=str(error))
        return found

    def family(self, build: Callable[[Found], Kind]) -> Kind:
        """The family of the operators for all size classes; classes with the same schedules share one."""
        members: list[Kind] = []
        places: dict[Any, int] = {}
        classes: list[list[int]] = []
        # From large to small, because the first member is for large graphs.
        for log2_edges in reversed(range(_MOST_LOG2_EDGES + 1)):
            row = []
            for log2_degree in range(log2_edges + 1) if self.operation in CONVOLUTIONS else (0,):
                found = self.find(GraphClass(self.operation, log2_edges, log2_degree))
                key = (*found.schedules.values(), *found.shortlists.items(), *found.refused)
                if key not in places:
                    places[key] = len(members)
                    members.append(build(found))
                row.append(places[key])
            classes.append(row)
        return build_family(members, classes[::-1])
