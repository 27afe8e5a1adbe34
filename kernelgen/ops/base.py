"""The base of operators of every kind: a schedule for each direction, sources of kernels, texts, copies and pickles.

Operators are found by their text, in a table that this file keeps. A family has several, for graphs of any size.
"""

from __future__ import annotations

import base64
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from kernelgen.errors import InputError, ProblemError, ScheduleError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.knobs import Knobs, read_schedule
from kernelgen.kernels.spec import AnySpec
from kernelgen.problem.product import size_class
from kernelgen.runtime.call import aligned
from kernelgen.runtime.kernel import load_kernel

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
INDEX_DTYPES = {torch.int32: "int32", torch.int64: "int64"}
# Kinds that texts do not name: an operation tells products, and nothing harmonics.
_OLDEST = ("product", "harmonics")
# One for every direction, or by direction name.
Schedules = Knobs | Mapping[str, Any] | None


class RegisteredOperator(ABC):
    """An operator of a problem, with its schedules.

    text: the operator as JSON, from which any process can rebuild it. device: kernels are for its type. schedules: by
    direction name; constructors take one for every direction, or by name, and complete them with defaults.
    kind: its name in the text; the two oldest kinds have none there. directions: by name, each with all of its outputs.
    schedule_types: by backend. options: further arguments of the constructor, which are attributes and in the text.
    members, classes: of a family, see :func:`build_family`.
    """

    text: str
    kind: ClassVar[str]
    directions: ClassVar[Mapping[str, Any]]
    problem_type: ClassVar[Any]
    schedule_types: ClassVar[Mapping[str, type[Knobs]]]
    options: ClassVar[tuple[str, ...]] = ()
    members: tuple[Any, ...] = ()
    classes: Sequence[Sequence[int]] = ()

    def __init__(
        self, problem: Any, schedule: Schedules, dtype: torch.dtype, device: torch.device, **options: Any
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
        self.problem, self.dtype, self.device = problem, dtype, device
        for name, value in options.items():
            setattr(self, name, value)
        self._on_gpu = device.type == "cuda"
        self.schedules = self._complete(schedule)
        self.text = json.dumps(self._facts(), sort_keys=True)

    def _facts(self) -> dict[str, Any]:
        """What the text says."""
        return {
            **({} if self.kind in _OLDEST else {"kind": self.kind}),
            "problem": self.problem.key,
            "dtype": DTYPES[self.dtype],
            "device": self.device.type,
            "schedules": {name: schedule.to_dict() for name, schedule in self.schedules.items()},
            **{name: getattr(self, name) for name in self.options},
        }

    @classmethod
    def rebuild(cls, text: str) -> Self:
        data = json.loads(text)
        schedules = {name: read_schedule(knobs, cls.schedule_types) for name, knobs in data["schedules"].items()}
        where = {"dtype": getattr(torch, data["dtype"]), "device": torch.device(data["device"])}
        return register(cls(cls.problem_type.from_key(data["problem"]), schedules, **where, **cls._options(data)))

    @classmethod
    def _options(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {name: data[name] for name in cls.options}

    def __repr__(self) -> str:
        options = "".join(f", {name}={getattr(self, name)!r}" for name in self.options)
        return f"{type(self).__name__}({self.problem.key!r}, {self.dtype}, {self.device}{options})"

    def as_family(self, members: Sequence[Self], classes: Sequence[Sequence[int]], text: str) -> Self:
        """A family with this operator's facts."""
        options = {name: getattr(self, name) for name in self.options}
        family = type(self)(self.problem, self.schedules, dtype=self.dtype, device=self.device, **options)
        family.members, family.classes, family.text = tuple(members), classes, text
        return family

    def for_size(self, num_edges: int, num_nodes: int | None = None) -> Any:
        """The operator for a graph, or for a number of rows: this one, unless it is a family."""
        if not self.members:
            return self
        log2_edges, log2_degree = size_class(num_edges, num_edges if num_nodes is None else num_nodes)
        row = self.classes[min(log2_edges, len(self.classes) - 1)]
        return self.members[row[min(log2_degree, len(row) - 1)]]

    def specs(self, direction_name: str) -> Sequence[AnySpec]:
        """Specs of a direction's kernels, with all outputs; the last one has the schedule of that name."""
        return [self.spec(self._direction(direction_name))]

    @abstractmethod
    def spec(self, direction: Any) -> AnySpec:
        """Spec of a direction's kernel."""

    @abstractmethod
    def _kernel_spec(self, direction: Any, schedule: Any) -> AnySpec:
        """Spec of the kernel that uses a direction's schedule."""

    @abstractmethod
    def _default_schedule(self, direction: Any) -> Any:
        """The default schedule of a direction."""

    def source(self, direction_name: str = "forward") -> str:
        """The generated source of a direction with all outputs; that of the last kernel if there are several."""
        return emit(make_plan(self.specs(direction_name)[-1])).text

    def resources(self, direction_name: str = "forward") -> dict[str, Any]:
        """Resource usage of a direction's compiled kernel; compiles it if needed."""
        return load_kernel(self.specs(direction_name)[-1]).resources

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """Copies and pickles hold only the text, because kernels belong to a process."""
        return resolve, (self.text,)

    def _direction(self, name: str) -> Any:
        if name not in self.directions:
            raise ProblemError(f"direction is {name!r}; expected one of {tuple(self.directions)}")
        return self.directions[name]

    def _complete(self, given: Schedules) -> dict[str, Any]:
        """A legal schedule for each direction: the given one, or the default."""
        names = tuple(self.directions)
        by_name = dict.fromkeys(names, given) if given is None or isinstance(given, Knobs) else dict(given)
        if not set(by_name) <= set(names):
            raise ScheduleError(f"schedules are named {sorted(by_name)}; expected names from {names}")
        schedules = {}
        for name, direction in self.directions.items():
            schedules[name] = by_name.get(name) or self._default_schedule(direction)
            make_plan(self._kernel_spec(direction, schedules[name]))
        return schedules

    def _is_here(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of the operator's type."""
        return tensor.is_cuda if self._on_gpu else tensor.is_cpu

    def _ready(self, name: str, tensor: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
        """The tensor, copied if it is not contiguous and aligned; InputError if it does not fit."""
        if (
            tensor is None
            or tensor.shape != shape
            or tensor.dtype is not self.dtype
            or tensor.get_device() != like.get_device()
            or not self._is_here(tensor)
        ):
            raise self._mismatch(name, tensor, str(tuple(shape)), like.device)
        return aligned(tensor)

    def _mismatch(self, name: str, tensor: Tensor | None, shape: str, device: torch.device | None = None) -> InputError:
        given = "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        where = self.device.type if device is None or device.type != self.device.type else device
        return InputError(
            f"{name} is {given}; expected {self.dtype} {shape} on {where}: convert it, or build an operator for its "
            "dtype and device"
        )


# Operators by their text, so that a traced, exported or pickled graph finds its operator or rebuilds it.
#
# An operator's text is JSON that determines it. Each operator module registers with :func:`rebuilds` how to rebuild its
# kind from a text; ``import kernelgen`` imports them all.


Kind = TypeVar("Kind", bound=RegisteredOperator)

# Every operator of this process.
OPERATORS: dict[str, Any] = {}
_REBUILD: dict[str, Callable[[str], Any]] = {}


def register(operator: Kind) -> Kind:
    """The first operator with the same text, if it is for the same device; else this one."""
    known = OPERATORS.setdefault(operator.text, operator)
    return known if known.device == operator.device else operator


def rebuilds(kind: str, function: Callable[[str], Any]) -> None:
    """Register ``function``, which rebuilds operators of a kind from their text."""
    _REBUILD[kind] = function


def resolve(text: str) -> Any:
    """The operator of a text, rebuilt if this process does not have it."""
    found = OPERATORS.get(text)
    if found is None:
        data = json.loads(text)
        # The two oldest kinds name none: products have an operation, harmonics do not.
        kind = data.get("kind", "product" if "operation" in data else "harmonics")
        found = OPERATORS[text] = _REBUILD[kind](text)
    return found


# Families: the same kernels with different schedules, one for each size class of graphs.
#
# In eager mode a module picks the operator itself. What torch traces, compiles or exports holds an operator's text as a
# constant while the number of edges may vary, so there the text is a family's: each op picks the member at run time, by
# the sizes of its own tensors. All ops of a call see the same sizes, so derivatives take the value's choice.

# For each rounded log2 of the number of edges, and in it for each of the edges a node, the place of a member.
Classes = Sequence[Sequence[int]]


def build_family(members: Sequence[Any], classes: Classes) -> Any:
    """The family of some operators of one kind, problem, dtype, layout and device; a single one is its own family.

    members: the first one is for large graphs; it tells what does not depend on the size. classes: a graph beyond the
    last row or column takes the last one.
    """
    if len(members) == 1:
        return members[0]
    data = {"members": [member.text for member in members], "classes": [list(row) for row in classes]}
    # Packed, because members differ in few knobs, and each call of an op looks its text up.
    packed = base64.b85encode(zlib.compress(json.dumps(data).encode(), 9)).decode()
    return register(members[0].as_family(members, classes, json.dumps({"kind": "family", "packed": packed})))


def rebuild_family(text: str) -> Any:
    data = json.loads(zlib.decompress(base64.b85decode(json.loads(text)["packed"])))
    return build_family([resolve(member) for member in data["members"]], data["classes"])


rebuilds("family", rebuild_family)
