"""The kinds of kernels that there are: what is needed to choose and store their schedules, a class for each.

In: a problem, a direction and facts of a device. Out: a spec, its default schedule, its plan. The table of all kinds is
at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from autotune.errors import ConfigError, check_known
from autotune.workload.graphs import NodesAlone
from autotune.workload.kind import FindSchedule, KernelKind, Problem, SourceOfSize, StoredKernel
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.arithmetic.directions import DIRECTIONS, HARMONICS_DIRECTIONS, fixed_order_parts
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.knobs import Knobs, read_schedule
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import SCHEDULES, Schedule, schedule_from_dict
from kernelgen.kernels.radial.plan import RadialPlan, RadialSchedule, RadialSpec, default_radial_schedule, radial_plan
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.kernels.spherical_harmonics import (
    HARMONICS_SCHEDULES,
    VECTOR_SCHEDULES,
    HarmonicsPlan,
    HarmonicsSchedule,
    HarmonicsSpec,
    default_harmonics_schedule,
    harmonics_plan,
)
from kernelgen.kernels.symmetric_contraction import (
    CONTRACTION_SCHEDULES,
    ContractionPlan,
    ContractionSchedule,
    ContractionSpec,
    contraction_plan,
    default_contraction_schedule,
)
from kernelgen.ops.harmonics import FUSED
from kernelgen.problem.other_kinds import SEPARATOR, ContractionProblem, HarmonicsProblem, VectorProblem
from kernelgen.problem.product import PRODUCTS, RadialProblem, TensorProductProblem

# Of a sender, a receiver, or a node's element.
INDEX_BYTES = 4
SomeProblem = TypeVar("SomeProblem", bound=Problem)
NORMALIZATION_KEYS = ("shared_weights", "irrep_normalization", "path_normalization")


class ProductKind(KernelKind):
    """Tensor products, as convolutions or edge by edge."""

    problem_type: ClassVar[type[Problem]] = TensorProductProblem
    operations: ClassVar[tuple[str, ...]] = ("conv", "plain")
    convolutions: ClassVar[tuple[str, ...]] = ("conv",)
    table: ClassVar[str] = "problems"
    groups: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "float32 convolutions": "float32",
            "float64 convolutions": "float64",
            "plain products": "plain",
            "fully connected products": "connected",
        }
    )
    directions: ClassVar[Mapping[str, Any]] = DIRECTIONS
    inputs = tangents = "xyw"
    instead_of_edges: ClassVar[str] = "operation = 'plain', or another graph"
    read: ClassVar[staticmethod[[Mapping[str, Any]], Knobs]] = staticmethod(schedule_from_dict)

    @staticmethod
    def product_of(problem: Any) -> TensorProductProblem:
        """The product that its convolutions compute."""
        return problem

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> Problem:
        """A problem from a table: in1, in2 and filter (channelwise), out (fully connected), or out and instructions."""
        make: Callable[..., Problem] = TensorProductProblem.channelwise
        required: tuple[str, ...] = ("in1", "in2", "filter")
        options: tuple[str, ...] = ("shared_weights",)
        if isinstance(table, Mapping) and "instructions" in table:
            make = TensorProductProblem.from_instructions
            required, options = ("in1", "in2", "out", "instructions"), NORMALIZATION_KEYS
        elif isinstance(table, Mapping) and "out" in table:
            make, required = TensorProductProblem.fully_connected, ("in1", "in2", "out")
        check_table(table, f"problem {name!r}", (*required, *options), required)
        return make(*(table[key] for key in required), **{key: table[key] for key in options if key in table})

    def owns_key(self, key: str) -> bool:
        return True  # that no other kind claims

    def check(self, workload: Any) -> None:
        if workload.is_conv and not workload.graph.has_nodes:
            raise ConfigError(
                f"graph {workload.graph.name!r} has edges alone, and a convolution needs nodes; "
                f"expected {self.instead_of_edges}"
            )

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        if deterministic and operation == "conv":
            # Several kernels share the work; this one uses the direction's schedule.
            asked = fixed_order_parts(asked)[-1]
        blank = SCHEDULES[facts.backend]()
        return Spec(problem, asked, blank, operation, dtype, layout, "int64", facts, deterministic)

    def default(self, spec: Spec, num_edges: int | None) -> Schedule:
        return default_schedule(spec, num_edges)

    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        plan = make_plan(spec)
        if plan.spec.schedule != spec.schedule:
            raise ScheduleError(f"{spec.schedule.key} makes the kernel of {plan.spec.schedule.key}")
        return plan

    def kernel_spec(self, spec: Spec, schedule: Knobs) -> Spec:
        """The spec of the compiled kernel: a plain one without fusion, as torch then gathers and sums around it."""
        assert isinstance(schedule, Schedule)
        return dataclasses.replace(spec, schedule=schedule, operation=spec.operation if schedule.fuse else "plain")

    def describe(self, problem: Any) -> tuple[str, ...]:
        product = self.product_of(problem)
        return (
            f"{product.irreps_in1} x {product.irreps_in2} -> {product.irreps_out}",
            f"{len(product.paths)} paths, {product.weight_numel:,} weights, {product.dim_out:,} outputs",
        )

    def group(self, key: str, operation: str, dtype: str) -> str:
        if ":uvw" in key:
            return "fully connected products"
        return "plain products" if operation == "plain" else f"{dtype} convolutions"

    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        product = self.product_of(problem)
        return {"x": product.irreps_in1, "y": product.irreps_in2, "g": product.irreps_out}

    def elements(self, work: Any, num_edges: int, num_nodes: int) -> dict[str, int]:
        """Elements of each operand as a kernel reads it."""
        product, rows = self.product_of(work.problem), num_edges if work.operation == "plain" else num_nodes
        return {
            "x": rows * product.dim_in1,
            "y": num_edges * product.dim_in2,
            "w": (1 if product.shared_weights else num_edges) * product.weight_numel,
            "g": rows * product.dim_out,
        }

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        asked, elements = DIRECTIONS[direction], self.elements(work, num_edges, num_nodes)
        moved = sum(elements[name[-1]] for name in (*asked.operands, *asked.outputs))
        return moved * BYTES[work.dtype] + (0 if work.operation == "plain" else 2 * INDEX_BYTES * num_edges)


class OfProductKind(ProductKind):
    """The base of kinds whose kernels are convolutions with a ``product``, and form one of its inputs themselves."""

    kernel_spec, group = KernelKind.kernel_spec, KernelKind.group
    instead_of_edges = "a graph with nodes"

    @staticmethod
    def product_of(problem: Any) -> TensorProductProblem:
        return problem.product


def _problem_named(
    what: str, key: str, table: Mapping[str, Any], others: Mapping[str, Problem], kind: type[SomeProblem]
) -> SomeProblem:
    """The problem of a kind that a table names under a key."""
    known = {name: problem for name, problem in others.items() if isinstance(problem, kind)}
    check_known(key, str(table[key]), known, f"{what}: ")
    return known[str(table[key])]


# The slots that each direction reads.
HARMONICS_OPERANDS = {"forward": ("x",), "backward": ("x", "g"), "double_backward": ("x", "g", "tx")}


class HarmonicsKind(KernelKind):
    """Spherical harmonics: from vectors [n, 3] to harmonics [n, dim_out].

    Vectors are operand ``x``, their tangents ``tx``, harmonics (and their cotangents) ``g``. Directions are named as
    for products, and both layouts have the same rows.
    """

    problem_type = HarmonicsProblem
    operations = (HarmonicsSpec.operation,)
    directions = HARMONICS_DIRECTIONS
    inputs = tangents = "x"
    rows = ("vectors", "nodes")
    table = "harmonics"
    groups = MappingProxyType({"spherical harmonics": "harmonics"})
    read = staticmethod(functools.partial(read_schedule, kinds=HARMONICS_SCHEDULES))

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> HarmonicsProblem:
        """From a table with degrees (``"0-3"``, or a list), normalize and normalization, as of e3nn's function."""
        keys = ("degrees", "normalize", "normalization")
        check_table(table, f"harmonics {name!r}", keys, required=keys)
        degrees = table["degrees"]
        if isinstance(degrees, str) and (span := re.fullmatch(r"(\d+)-(\d+)", degrees)):
            degrees = list(range(int(span[1]), int(span[2]) + 1))
        if not isinstance(degrees, list):
            raise ConfigError(f"harmonics {name!r}: degrees are {degrees!r}; expected for example '0-3' or [0, 2]")
        return HarmonicsProblem(tuple(degrees), table["normalization"], table["normalize"])

    def owns_key(self, key: str) -> bool:
        return key.startswith("sh|")

    def check(self, workload: Any) -> None:
        layout, deterministic = workload.layout, workload.deterministic
        if layout != HarmonicsSpec.layout or deterministic:
            raise ConfigError(
                f"harmonics {workload.label!r} have layout {layout!r} and deterministic = "
                f"{str(deterministic).lower()}; leave both out: harmonics have one layout and are always deterministic"
            )

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        return HarmonicsSpec(problem, asked, HARMONICS_SCHEDULES[facts.backend](), dtype, facts)

    def default(self, spec: HarmonicsSpec, num_edges: int | None) -> HarmonicsSchedule:
        return default_harmonics_schedule(spec.problem, spec.direction, spec.dtype, spec.facts)

    def plan(self, spec: HarmonicsSpec, find_schedule: FindSchedule) -> HarmonicsPlan:
        return harmonics_plan(spec)

    def describe(self, problem: HarmonicsProblem) -> tuple[str, ...]:
        degrees = ", ".join(map(str, problem.degrees))
        vectors = "normalized" if problem.normalize else "raw"
        return (
            f"spherical harmonics of degrees {degrees}",
            f"{vectors} vectors, normalization {problem.normalization}, {problem.dim_out} outputs",
        )

    def irreps(self, problem: HarmonicsProblem, layout: str) -> dict[str, str]:
        parity = "eo"
        return {"x": "1o", "g": "+".join(f"{degree}{parity[degree % 2]}" for degree in problem.degrees)}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        elements = {"x": 3, "tx": 3, "g": work.problem.dim_out}
        moved = (*HARMONICS_OPERANDS[direction], *HARMONICS_DIRECTIONS[direction].outputs)
        return num_edges * sum(elements[name] for name in moved) * BYTES[work.dtype]


VECTORS = "vectors"


class VectorsKind(OfProductKind):
    """Convolutions of harmonics of edge vectors ``y`` [edges, 3]; and first gradients.

    The schedule decides, for each direction, whether harmonics are formed inside the product's kernel or in a separate
    one. The kernels use the schedules known for product and harmonics.
    """

    problem_type = VectorProblem
    operations = convolutions = (VECTORS,)
    table = "vectors"
    groups = MappingProxyType({"convolutions of edge vectors": "vectors"})
    directions = MappingProxyType({name: DIRECTIONS[name] for name in ("forward", "backward", "edge_backward")})
    read = staticmethod(functools.partial(read_schedule, kinds=VECTOR_SCHEDULES))

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> VectorProblem:
        """A product of harmonics from a table: names of the ``product`` and of the ``harmonics``, its second input."""
        keys = ("product", "harmonics")
        check_table(table, f"vectors {name!r}", keys, required=keys)
        what = f"vectors {name!r}"
        product = _problem_named(what, "product", table, others, TensorProductProblem)
        return VectorProblem(product, _problem_named(what, "harmonics", table, others, HarmonicsProblem))

    def owns_key(self, key: str) -> bool:
        return SEPARATOR in key

    def check(self, workload: Any) -> None:
        super().check(workload)
        if not workload.problem.product.is_channelwise:
            raise ConfigError(
                f"{workload.label!r} has paths that cannot be fused with harmonics; tune its product and its harmonics "
                "separately"
            )

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        blank = VECTOR_SCHEDULES[facts.backend]()
        return StoredKernel(problem, operation, asked, blank, dtype, layout, facts, deterministic)

    def default(self, spec: Any, num_edges: int | None) -> Any:
        return VECTOR_SCHEDULES[spec.facts.backend]()

    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        """The plan of the product's kernel, with the schedule known for it."""
        kernel = (spec.dtype, spec.layout, spec.facts)
        place, name = spec.schedule.harmonics, spec.direction.name
        known = product_schedule(find_schedule, spec.problem, name, place, *kernel, None, spec.deterministic)
        harmonics = spec.problem.harmonics if place == "inside" else None
        asked = (spec.problem.product, spec.direction, known, "conv", spec.dtype, spec.layout, "int64", spec.facts)
        whole = Spec(*asked, deterministic=spec.deterministic, harmonics=harmonics)
        return make_plan(ProductKind.kernel_spec(self, whole, known))

    def describe(self, problem: Any) -> tuple[str, ...]:
        vectors = f"of harmonics of degrees {', '.join(map(str, problem.harmonics.degrees))} of edge vectors"
        return (*super().describe(problem), vectors)

    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        return super().irreps(problem, layout) | {"y": problem.irrep}

    def elements(self, work: Any, num_edges: int, num_nodes: int) -> dict[str, int]:
        return super().elements(work, num_edges, num_nodes) | {"y": 3 * num_edges}


def product_schedule(
    find_schedule: FindSchedule,
    problem: VectorProblem,
    direction: str,
    place: str,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: Any,
    deterministic: bool,
) -> Any:
    """The product's schedule in a direction: that of the convolution, or of the plain product if unfused.

    graph_class: a ``GraphClass`` of this kind, or None; that module needs the kinds, so this one cannot import it.
    """
    unfused = place == "unfused"
    where = graph_class
    if where is not None:
        other = {"operation": "plain", "log2_degree": 0} if unfused else {"operation": "conv"}
        where = dataclasses.replace(where, **other)
    kernel = (problem.product, "plain" if unfused else "conv", direction, dtype, layout, facts, where, False)
    schedule: Any = find_schedule(*kernel, deterministic=deterministic).schedule
    return dataclasses.replace(schedule, fuse=False) if unfused else schedule


assert set(VectorsKind.directions) <= set(FUSED)


RADIAL = "radial"
# Largest relative error against float64 that a kernel may have, by accuracy class.
LARGEST_ERROR = {"ieee": 1e-5, "tf32": 2e-3}
assert set(LARGEST_ERROR) == set(PRODUCTS)
# Other forms with float32's accuracy: with all weights in memory, and with some at a time.
WHOLE, STREAMED = ("product-ieee", "product-fp16x3"), ("streamed",)


class RadialKernel(StoredKernel):
    @property
    def of_kernel(self) -> RadialSpec:
        """The spec of the kernel that is compiled."""
        problem = self.problem
        kernel = (problem.product, problem.hidden, self.direction, self.schedule, problem.accuracy, self.layout)
        return RadialSpec(*kernel, "int64", self.facts, self.dtype)


class RadialKind(OfProductKind):
    """Convolutions that form their edge weights ``h @ matrix`` in registers; and first gradients of all but the matrix.

    Operand ``w`` is h [edges, hidden], ``tw`` the matrix [hidden, weights]; the gradient of ``w`` is that of h.
    """

    problem_type = RadialProblem
    operations = convolutions = (RADIAL,)
    table = "radial"
    groups = MappingProxyType({"radial convolutions": "radial"})
    directions = MappingProxyType({name: DIRECTIONS[name] for name in ("forward", "backward")})
    read = staticmethod(functools.partial(read_schedule, kinds={RadialSchedule.backend: RadialSchedule}))

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> RadialProblem:
        """From a table with the name of the ``product``, ``hidden`` and perhaps an ``accuracy``."""
        required = ("product", "hidden")
        check_table(table, f"radial {name!r}", (*required, "accuracy"), required=required)
        product = _problem_named(f"radial {name!r}", "product", table, others, TensorProductProblem)
        return RadialProblem(product, table["hidden"], table.get("accuracy", "ieee"))

    def owns_key(self, key: str) -> bool:
        return RadialProblem.owns_key(key)

    def tolerance(self, problem: Any, dtype: str) -> float:
        return LARGEST_ERROR[problem.accuracy]

    def check(self, workload: Any) -> None:
        if workload.deterministic:
            raise ConfigError(
                f"radial {workload.label!r} has deterministic = true; leave it out: "
                "its kernels add in the order of arrival"
            )
        super().check(workload)

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        return RadialKernel(problem, operation, asked, RadialSchedule(), dtype, layout, facts)

    def default(self, spec: Any, num_edges: int | None) -> Any:
        return default_radial_schedule(spec.of_kernel).schedule

    def plan(self, spec: Any, find_schedule: FindSchedule) -> RadialPlan:
        return radial_plan(spec.of_kernel)

    def describe(self, problem: Any) -> tuple[str, ...]:
        weights = f"weights from {problem.hidden} hidden features, accuracy of {problem.accuracy}"
        return (*super().describe(problem), weights)

    def elements(self, work: Any, num_edges: int, num_nodes: int) -> dict[str, int]:
        return super().elements(work, num_edges, num_nodes) | {"w": num_edges * work.problem.hidden}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        matrix = work.problem.hidden * work.problem.product.weight_numel * BYTES[work.dtype]
        return super().compulsory_bytes(work, direction, num_edges, num_nodes) + matrix


CONTRACTION = ContractionSpec.operation


class ContractionKind(KernelKind):
    """Symmetric contractions: from features [nodes, dim_in * channels] to values [nodes, dim_out * channels].

    Features are operand ``x``, weights ``w`` [elements, weights, channels], values (and their cotangents) ``g``. Rows
    of a graph are nodes: see :class:`autotune.workload.graphs.NodesAlone`.
    """

    problem_type = ContractionProblem
    operations = (CONTRACTION,)
    directions = CONTRACTION_DIRECTIONS
    inputs = "xw"
    forces = tangents = "x"
    # A loss on values and on forces: their gradients are one kernel each.
    combined = MappingProxyType(
        {
            "forward+backward": ("forward", "backward"),
            "force_step": ("forward", "feature_backward", "double_backward", "backward"),
        }
    )
    table = "contractions"
    groups = MappingProxyType({"symmetric contractions": "contractions"})
    rows = ("nodes", "elements")
    read = staticmethod(functools.partial(read_schedule, kinds=CONTRACTION_SCHEDULES))

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> ContractionProblem:
        """From a table with irreps_in and irreps_out (of one channel), correlation and channels."""
        keys = ("irreps_in", "irreps_out", "correlation", "channels")
        check_table(table, f"contraction {name!r}", keys, required=keys)
        return ContractionProblem(*(table[key] for key in keys))

    def owns_key(self, key: str) -> bool:
        return key.startswith("sc|")

    def check(self, workload: Any) -> None:
        graph, label = workload.graph, workload.label
        if workload.deterministic:
            raise ConfigError(
                f"contraction {label!r} has deterministic = true; leave it out, and use "
                "torch.use_deterministic_algorithms(True) where a model runs: it has no schedules of its own"
            )
        if not isinstance(graph.source, NodesAlone):
            raise ConfigError(
                f"graph {graph.name!r} has edges, and contraction {label!r} needs nodes alone; expected a graph with "
                "nodes = a number, such as 'thousand-nodes'"
            )

    def graph_of_size(self, num_edges: int, num_nodes: int) -> SourceOfSize:
        return NodesAlone(num_edges, occurring=num_nodes) if num_nodes else NodesAlone(num_edges)

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        blank = default_contraction_schedule(problem, asked, dtype, facts)
        return ContractionSpec(problem, asked, blank, dtype, layout, "int64", facts)

    def default(self, spec: ContractionSpec, num_edges: int | None) -> ContractionSchedule:
        return default_contraction_schedule(spec.problem, spec.direction, spec.dtype, spec.facts)

    def plan(self, spec: ContractionSpec, find_schedule: FindSchedule) -> ContractionPlan:
        return contraction_plan(spec)

    def describe(self, problem: ContractionProblem) -> tuple[str, ...]:
        weights = len(polynomials(problem))
        return (
            f"symmetric contraction of {problem.irreps_in} to {problem.irreps_out}, correlation {problem.correlation}",
            f"{problem.channels} channels, {weights} weights a channel, {problem.channels * problem.dim_out:,} outputs",
        )

    def irreps(self, problem: ContractionProblem, layout: str) -> dict[str, str]:
        inside, out = problem.irreps_in.split("+"), problem.irreps_out.split("+")
        channels = [f"{problem.channels}x{irrep}" for irrep in inside]
        # In mul_ir the features of a channel are together, and the values of an irrep.
        given = inside * problem.channels if layout == "mul_ir" else channels
        return {"x": "+".join(given), "g": "+".join(f"{problem.channels}x{irrep}" for irrep in out)}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        problem, asked = work.problem, CONTRACTION_DIRECTIONS[direction]
        numbers = {
            "x": num_edges * problem.dim_in,
            "w": num_nodes * len(polynomials(problem)),
            "g": num_edges * problem.dim_out,
        }
        moved = sum(numbers[name[-1]] for name in (*asked.operands, *asked.outputs))
        return moved * problem.channels * BYTES[work.dtype] + INDEX_BYTES * num_edges


# All kinds. A key is of the first that owns it; a kind stands before those whose problems its own contain.
# A new one adds its line.

_KINDS: tuple[KernelKind, ...] = (
    RadialKind(),
    ContractionKind(),
    VectorsKind(),
    HarmonicsKind(),
    ProductKind(),
)
KINDS = _KINDS[::-1]
_BY_OPERATION = {operation: kind for kind in KINDS for operation in kind.operations}
OPERATIONS = tuple(_BY_OPERATION)
# Those that have nodes.
CONVOLUTIONS = tuple(operation for kind in KINDS for operation in kind.convolutions)


def kernel_kind(operation: str) -> KernelKind:
    """The kind of an operation; ConfigError for an unknown operation."""
    if operation not in _BY_OPERATION:
        raise ConfigError(f"operation is {operation!r}; expected one of {OPERATIONS}")
    return _BY_OPERATION[operation]


def operations_of(problem: Problem) -> tuple[str, ...]:
    """The operations of a problem, the usual one first."""
    return next(kind.operations for kind in KINDS if isinstance(problem, kind.problem_type))


def problem_from_key(key: str) -> Problem:
    """The problem with a key; ProblemError for a text that is none."""
    kind = next(kind for kind in _KINDS if kind.owns_key(key))
    return kind.problem_type.from_key(key)
