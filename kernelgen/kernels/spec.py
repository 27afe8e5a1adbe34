"""A spec determines one kernel: its problem, direction, schedule, dtype and device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kernelgen.arithmetic.directions import OPERANDS, Direction
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.kernels.source import ENTRY
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem

BYTES = {"float32": 4, "float64": 8}
# In kernels for GPUs.
C_TYPES = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}
LAYOUTS = ("mul_ir", "ir_mul")
# After the name of a knob's value.
ORDER_OF_BLOCKS = "relies on the order in which blocks start, which an AMD GPU does not keep to"
# Pointer arguments of every kernel, in this order; null if unused.
BUFFERS = (
    *OPERANDS,
    *("out_x", "out_y", "out_w", "out_g"),
    *("sender", "receiver", "spans", "perm"),
)


def check_fields(spec: AnySpec) -> None:
    """ScheduleError for a dtype, a layout or indices that no kernel has, or a schedule for another backend."""
    for name, allowed in (("dtype", tuple(BYTES)), ("layout", LAYOUTS), ("index", ("int32", "int64"))):
        if (value := getattr(spec, name, allowed[0])) not in allowed:
            raise ScheduleError(f"{name} is {value!r}; expected one of {allowed}")
    if spec.schedule.backend != spec.facts.backend:
        raise ScheduleError(f"a {spec.schedule.backend or 'plain'} schedule cannot run on {spec.facts.name}")


class AnySpec(Protocol):
    """What the specs of all kinds have; each is frozen, and determines one kernel's source.

    row_work: how much there is to do for an edge (or vector), in elements.
    """

    @property
    def problem(self) -> Any: ...
    @property
    def direction(self) -> Any: ...
    @property
    def schedule(self) -> Knobs: ...
    @property
    def dtype(self) -> str: ...
    @property
    def facts(self) -> DeviceFacts: ...
    @property
    def row_work(self) -> int: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Spec:
    """Everything that determines the source of one kernel.

    operation: ``conv`` (gather by sender, product, sum by receiver) or ``plain`` (edge by edge).
    layout: of node features and outputs, ``mul_ir`` (e3nn's: channel, then component) or ``ir_mul``.
    index: dtype of sender and receiver. facts: the target device. deterministic: no sum may depend on the order in
    which workers run. harmonics: if given, the kernel computes y as these harmonics of vectors [rows, 3], and y's
    buffers hold the vectors and their gradients. Not for second derivatives. permuted: workers that take runs of edges
    take them in the order ``perm`` (by receiver), not as they lie in memory.
    """

    problem: TensorProductProblem
    direction: Direction
    schedule: Schedule
    operation: str
    dtype: str
    layout: str
    index: str
    facts: DeviceFacts
    deterministic: bool = False
    harmonics: HarmonicsProblem | None = None
    permuted: bool = False

    def __post_init__(self) -> None:
        if self.operation not in ("conv", "plain"):
            raise ScheduleError(f"operation is {self.operation!r}; expected one of {('conv', 'plain')}")
        check_fields(self)
        if self.harmonics is not None and (self.direction.tangents or not self.problem.is_channelwise):
            raise UnsupportedError(
                "harmonics are formed inside kernels of first derivatives of weighted uvu products with one copy of "
                "the second input; run the kernels of harmonics and of the product one after the other"
            )
        if self.permuted and not self.takes_runs:
            raise ScheduleError("permuted is for the runs of edges of a weighted uvu convolution on a GPU")

    @property
    def cuda(self) -> CudaSchedule:
        """Its schedule, which must be a GPU's."""
        assert isinstance(self.schedule, CudaSchedule)
        return self.schedule

    @property
    def takes_runs(self) -> bool:
        """Whether workers of this convolution on a GPU own no nodes, but take runs of edges (of channelwise paths)."""
        fused = self.operation == "conv" and self.problem.is_channelwise and self.facts.backend == "cuda"
        return fused and self.schedule.accumulate == "atomics"

    @property
    def dim_y(self) -> int:
        """Elements in a row of y's buffers."""
        return self.problem.dim_in2 if self.harmonics is None else 3

    @property
    def row_work(self) -> int:
        """The work of an edge, measured in weights."""
        return self.problem.weight_numel

    @property
    def operands(self) -> tuple[str, ...]:
        """Buffers that the kernel reads: those of the direction, and vectors if their gradient is wanted."""
        direct = self.direction.operands
        vectors = self.harmonics is not None and "y" in self.direction.live_outputs and "y" not in direct
        return (*direct, "y") if vectors else direct


def with_knobs(plan: Any, **knobs: Any) -> Any:
    """The plan with some knobs of its schedule changed."""
    schedule = dataclasses.replace(plan.spec.schedule, **knobs)
    return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, schedule=schedule))


# The signature that all kernels share, as C++ text: pointers (``BUFFERS`` of the spec), then sizes.
#
# The text around it defines ``Real`` and ``index_t``.

INDENT = "    "


def indented(lines: Iterable[str], depth: int = 1) -> Iterator[str]:
    return (INDENT * depth + line for line in lines)


def braced(head: str, lines: Iterable[str], end: str = "}") -> Iterator[str]:
    """A block of C++: its head, the lines inside of its braces, and its end."""
    yield head + " {"
    yield from indented(lines)
    yield end


def element(name: str) -> str:
    """The element type of a buffer, const if kernels only read it."""
    kind = "index_t" if name in ("sender", "receiver") else "int" if name in ("spans", "perm") else "Real"
    return f"{'' if name.startswith('out_') else 'const '}{kind}"


def buffers() -> list[str]:
    """The declaration of each buffer, without semicolon."""
    return [f"{element(name)}* __restrict__ {name}" for name in BUFFERS]


def buffers_struct(*more: str) -> str:
    """A struct ``Buffers`` of all buffers. more: declarations after them."""
    return "struct Buffers {\n" + "\n".join(f"{INDENT}{field};" for field in (*buffers(), *more)) + "\n};\n"


def buffers_line(*more: str) -> str:
    """The statement that defines the struct ``b`` of all buffers. more: names after them."""
    return f"{INDENT}const Buffers b = {{{', '.join((*BUFFERS, *more))}}};"


def gpu_entry(block_size: int, min_blocks: int, *more: str, entry: str = ENTRY) -> Iterator[str]:
    """The head of a kernel, up to its opening brace. more: declarations of extra arguments. entry: its name."""
    bounds = f"{block_size}, {min_blocks}" if min_blocks else f"{block_size}"
    yield f'extern "C" __global__ void __launch_bounds__({bounds}) {entry}('
    yield ",\n".join(f"{INDENT}{field}" for field in buffers()) + ","
    yield f"{INDENT}{', '.join(('long long num_edges, long long num_in, long long num_out', *more))})"
    yield "{"


def host_entry() -> Iterator[str]:
    """The head of a host function, with untyped pointers, up to its opening brace."""
    pointers = ", ".join(f"{'' if name.startswith('out_') else 'const '}void* {name}" for name in BUFFERS)
    yield f'extern "C" void {ENTRY}({pointers},'
    yield f"{INDENT}long long num_edges, long long num_in, long long num_out, int threads) {{"
