"""Peers of the other kinds: spherical harmonics, products with harmonics of edge vectors, radial and symmetric ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.compare.peers import cuequivariance as cuequivariance_peer
from autotune.compare.peers import e3nn as e3nn_peer
from autotune.compare.peers import openequivariance as openequivariance_peer
from autotune.compare.peers.peer import Adapter, Product, Task, needs
from autotune.database.lookup import find_schedule
from autotune.errors import PeerError
from autotune.measure.kinds import Call, order_of
from autotune.measure.references import (
    EXACT,
    by_component,
    contract,
    contraction_of,
    e3nn_harmonics,
    from_component,
    radial_problem,
)
from autotune.models.package import default_dtype
from autotune.workload.known_kinds import RadialKind
from autotune.workload.workload import DTYPES, GraphClass
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import device_facts
from kernelgen.ops.product import Operator, build
from kernelgen.ops.radial_convolution import radial_product
from kernelgen.problem.other_kinds import ContractionProblem, HarmonicsProblem, VectorProblem

# Peers of spherical harmonics: e3nn (eager and compiled); cuEquivariance and sphericart where equivalent.


def eager(task: Task) -> Product:
    return Product(e3nn_harmonics(task.workload.harmonics))


def compiled(task: Task) -> Product:
    v = task.tensors.x
    return e3nn_peer.compiled_product(_compiled(task.workload.harmonics, v.dtype, task.device), v)


@functools.lru_cache(maxsize=1)
def _compiled(problem: HarmonicsProblem, dtype: torch.dtype, device: torch.device) -> Call:
    return e3nn_peer.compile_open(e3nn_harmonics(problem))


def cuequivariance_call(problem: HarmonicsProblem, method: str, like: torch.Tensor) -> Call:
    """cuEquivariance's harmonics: distinct ascending degrees in its only normalisation, ``component``."""
    import cuequivariance_torch as cuet

    degrees = list(problem.degrees)
    if problem.normalization != "component" or degrees != sorted(set(degrees)):
        raise PeerError(
            f"cuequivariance: it has harmonics of distinct rising degrees in normalization 'component', not {degrees} "
            f"in {problem.normalization!r}"
        )
    options = {"normalize": problem.normalize, "math_dtype": like.dtype, "device": like.device}
    return cuequivariance_peer.by_method(
        method, lambda: cuet.SphericalHarmonics(degrees, method=method, **options), lambda made: made.f
    )


def _sphericart(task: Task) -> Product:
    """sphericart in its fastest form: all degrees up to the highest, its own axes (e3nn's are y, z, x), no factor."""
    import sphericart.torch

    problem, v = task.workload.harmonics, task.tensors.x
    most = max(problem.degrees)
    if problem.degrees != tuple(range(most + 1)):
        raise PeerError(f"sphericart: it has all degrees up to one, in order, not {list(problem.degrees)}")
    kind = sphericart.torch.SphericalHarmonics if problem.normalize else sphericart.torch.SolidHarmonics
    lengths = {"integral": 1.0, "component": math.sqrt(4 * math.pi)}
    factors = [
        lengths.get(problem.normalization, math.sqrt(4 * math.pi / (2 * degree + 1)))
        for degree in problem.degrees
        for _ in range(2 * degree + 1)
    ]
    factor = torch.tensor(factors, dtype=v.dtype, device=v.device)
    # The factor applies to the value, and to the cotangent before it enters.
    into = {"x": lambda rows: rows[:, [2, 0, 1]], "g": lambda rows: rows * factor}
    back = {"x": lambda rows: rows[:, [1, 2, 0]], "g": lambda rows: rows * factor}
    return Product(kind(most), into=into, back=back)


HARMONICS_ADAPTERS = (
    *(
        dataclasses.replace(adapter, build=build, operations=("harmonics",), build_s=0.0)
        for adapter, build in zip(e3nn_peer.ADAPTERS, (eager, compiled), strict=True)
    ),
    *cuequivariance_peer.adapters_of(
        "harmonics",
        lambda method, task: Product(cuequivariance_call(task.workload.harmonics, method, task.tensors.x)),
    ),
    Adapter(
        *("sphericart", ("cpu", "cuda"), needs("sphericart.torch", "pip install sphericart-torch"), _sphericart),
        listed_if_absent=False, module="sphericart", operations=("harmonics",),
    ),
)  # fmt: skip


# Peers of convolutions of edge vectors: a library's convolution applied to its harmonics.
#
# OpenEquivariance has no harmonics, and e3nn's are already compiled by TorchScript: both use e3nn's module.

OPERATIONS = ("vectors",)


def _parts(task: Task) -> VectorProblem:
    assert isinstance(task.workload.problem, VectorProblem)
    return task.workload.problem


def _both(product: Adapter) -> Adapter:
    """The adapter of a convolution preceded by harmonics, its own library's if that has some."""
    method = cuequivariance_peer.METHODS.get(product.name)

    def build(task: Task) -> Product:
        harmonics, tensors = _parts(task).harmonics, task.tensors
        to_y = cuequivariance_call(harmonics, method, tensors.y) if method else e3nn_harmonics(harmonics)
        workload = dataclasses.replace(task.workload, problem=_parts(task).product, operation="conv")
        with torch.no_grad():
            inner = Task(workload, task.device, dataclasses.replace(tensors, y=to_y(tensors.y), ty=to_y(tensors.ty)))
        made = product.build(inner)
        return dataclasses.replace(made, call=lambda x, v, w: made.call(x, to_y(v), w))

    return dataclasses.replace(product, build=build, operations=OPERATIONS)


VECTORS_ADAPTERS = tuple(
    _both(adapter) for adapter in (*e3nn_peer.ADAPTERS, *openequivariance_peer.ADAPTERS, *cuequivariance_peer.ADAPTERS)
)


# What convolutions with weights formed in registers are compared with: torch's product, and our own convolution.
#
# ``product-ieee`` and ``product-tf32`` form all weights in memory, with torch's product in float32 or TF32,
# ``product-fp16x3`` with ours in float32's accuracy; ``streamed`` forms them by parts of the edges, with ours too. The
# convolution has the schedules known for it.

# Bytes of the weights that exist at a time when they are streamed.
PART_BYTES = 256 << 20


def _operator(task: Task) -> Operator:
    """The convolution with weights in memory, with the schedules known for the workload's graph."""
    work, product = task.workload, radial_problem(task.workload).product
    where = GraphClass.of("conv", task.tensors.num_edges, task.tensors.num_nodes)
    kernel = (work.dtype, work.layout, device_facts(task.device), where, False)
    known: dict[str, Any] = {name: find_schedule(product, "conv", name, *kernel).schedule for name in DIRECTIONS}
    dtype: Any = getattr(torch, work.dtype)
    return build(product, known, operation="conv", dtype=dtype, layout=work.layout, device=task.device)


def _whole(allow_tf32: bool, task: Task) -> Product:
    operator, order = _operator(task), order_of(task.tensors)
    edges, nodes, matrix = task.edges, task.tensors.num_nodes, task.tensors.tw

    def call(x: torch.Tensor, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        weights = _Multiply.apply(h, matrix, allow_tf32)
        return operator(x, y, weights, *edges, num_out=nodes, order=order)

    return Product(call, task.workload.layout)


def _by_parts(part_bytes: int, task: Task) -> Product:
    problem, operator, tensors = radial_problem(task.workload), _operator(task), task.tensors
    most = max(1, part_bytes // (problem.product.weight_numel * tensors.w.element_size()))
    rest = (tensors.tw, *task.edges, tensors.num_nodes, operator, most)
    return Product(lambda x, y, h: radial_product(x, y, h, *rest), task.workload.layout)


class _Multiply(torch.autograd.Function):
    """``h @ matrix``, and the gradient of h, with or without TF32."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, matrix: torch.Tensor, allow_tf32: bool) -> torch.Tensor:
        ctx.matrix, ctx.allow_tf32 = matrix, allow_tf32
        with _tf32(allow_tf32):
            return h @ matrix

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with _tf32(ctx.allow_tf32):
            return gradients[0] @ ctx.matrix.t(), None, None


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


_HOW: dict[str, Any] = {"module": "torch", "operations": RadialKind.operations}
RADIAL_ADAPTERS = (
    Adapter("product-ieee", ("cpu", "cuda"), lambda _: None, functools.partial(_whole, False), **_HOW),
    Adapter("product-tf32", ("cuda",), lambda _: None, functools.partial(_whole, True), **_HOW),
    Adapter("product-fp16x3", ("cuda",), lambda _: None, functools.partial(_by_parts, sys.maxsize), **_HOW),
    Adapter("streamed", ("cpu", "cuda"), lambda _: None, functools.partial(_by_parts, PART_BYTES), **_HOW),
)


# Peers of symmetric contractions: MACE's own module, and cuEquivariance's polynomial.
#
# Each has weights of its own: of other polynomials, in another order. How many there are and what they mean is found by
# evaluating a peer at random points with one weight at a time, in float64: the basis polynomials must be combinations
# of the peer's. The weights are converted by these before any timed call.

# Values [nodes, components, channels] of x [nodes, components, channels] and weights [nodes, peer's weights, channels].
Evaluate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def product(task: Task, call: Call, layout: str, meaning: torch.Tensor) -> Product:
    """A peer's ``call(x, w)`` with features in ``layout``; ``meaning`` [weights, peer's weights]: see ``fitted``."""
    problem, own = contraction_of(task.workload), task.workload.layout

    def relaid(slot: str, source: str, target: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: from_component(problem, slot, by_component(problem, slot, rows, source), target)

    matrix = meaning.to(task.device, DTYPES[task.workload.dtype])
    into = {slot: relaid(slot, own, layout) for slot in "xg"}
    back = {slot: relaid(slot, layout, own) for slot in "xg"}
    into["w"] = lambda w: torch.einsum("erc,rk->ekc", w, matrix)
    # Gradients go back by the chain rule.
    back["w"] = lambda w: torch.einsum("ekc,rk->erc", w, matrix)
    return Product(call, own, into, back)


def fitted(problem: ContractionProblem, count: int, evaluate: Evaluate) -> torch.Tensor:
    """The combinations [weights, count] of a peer's polynomials that the basis polynomials are; PeerError for none."""
    basis = len(polynomials(problem))
    points = 1 + -(-2 * max(basis, count) // problem.channels)  # in each channel of each row
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, problem.dim_in, problem.channels, generator=generator, dtype=torch.float64)

    def values(number: int, of: Evaluate) -> torch.Tensor:
        """[number, values]: of each weight alone."""
        ones = torch.eye(number, dtype=torch.float64)[:, None, :, None]
        weights = ones.expand(number, points, number, problem.channels).flatten(0, 1)
        found = of(x.expand(number, *x.shape).flatten(0, 1), weights)
        return found.unflatten(0, (number, points)).flatten(1)

    theirs, ours = values(count, evaluate), values(basis, functools.partial(contract, problem))
    found = ours @ torch.linalg.pinv(theirs)
    rest = float((found @ theirs - ours).norm() / ours.norm())
    if not rest < EXACT:
        raise PeerError(f"its polynomials are not those of {problem.key}: they differ by {rest:.1e}")
    return found


def _narrow(problem: ContractionProblem) -> ContractionProblem:
    """The problem with few channels: polynomials do not depend on their number."""
    return dataclasses.replace(problem, channels=min(8, problem.channels))


# ---- MACE


def _mace(task: Task) -> Product:
    problem, elements = contraction_of(task.workload), task.tensors.sender
    assert elements is not None
    rows = task.tensors.w.shape[0]
    module = mace_module(problem, rows).to(task.device, DTYPES[task.workload.dtype])
    attributes = torch.nn.functional.one_hot(elements, rows).to(task.tensors.x.dtype)
    run = _mace_call(module, problem, attributes)
    return product(task, run, "mul_ir", _mace_meaning(_narrow(problem)))


def mace_module(problem: ContractionProblem, elements: int) -> torch.nn.Module:
    """MACE's module with constants in float64."""
    from mace.modules.symmetric_contraction import SymmetricContraction

    irreps = ("+".join(f"{problem.channels}x{irrep}" for irrep in text.split("+"))
              for text in (problem.irreps_in, problem.irreps_out))  # fmt: skip
    with default_dtype(torch.float64):
        return SymmetricContraction(*irreps, problem.correlation, num_elements=elements)


def _mace_call(module: torch.nn.Module, problem: ContractionProblem, attributes: torch.Tensor) -> Call:
    """The module as a function of features [nodes, channels * dim_in] and weights [elements, all of them, channels]."""
    parameters = dict(module.named_parameters())
    sizes = [parameter.shape[1] for parameter in parameters.values()]

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        given = dict(zip(parameters, w.split(sizes, dim=1), strict=True))
        features = x.view(len(x), problem.channels, problem.dim_in)
        return torch.func.functional_call(module, given, (features, attributes))

    return call


@functools.lru_cache(maxsize=4)
def _mace_meaning(problem: ContractionProblem) -> torch.Tensor:
    count = sum(parameter.shape[1] for parameter in mace_module(problem, 1).parameters())
    module = mace_module(problem, count)

    def evaluate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # Of each run of nodes with equal weights, the first node's are those of an element.
        table, elements = _table_of(w)
        attributes = torch.nn.functional.one_hot(elements, count).double()
        call = _mace_call(module, problem, attributes)
        with torch.no_grad():
            return by_component(problem, "g", call(from_component(problem, "x", x, "mul_ir"), table), "mul_ir")

    return fitted(problem, count, evaluate)


def _table_of(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of each run of nodes with equal weights, and the nodes' rows in it."""
    runs = w.shape[0] // w.shape[1]
    return w[::runs].contiguous(), torch.arange(w.shape[1]).repeat_interleave(runs)


# ---- cuEquivariance


def _segmented(method: str, task: Task) -> Product:
    problem, elements = contraction_of(task.workload), task.tensors.sender
    assert elements is not None
    made = cuequivariance_module(problem, method, task.workload.dtype, task.device)
    # As MACE gives them.
    indices = elements.int()

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return made([w.flatten(1), x], {0: indices})[0]

    return product(task, call, "ir_mul", _segmented_meaning(_narrow(problem)))


@functools.lru_cache(maxsize=2)
def polynomial(problem: ContractionProblem) -> Any:
    """The polynomial that ``cuequivariance_torch.SymmetricContraction`` evaluates, by its descriptor.

    The module itself also emulates MACE's weights, which takes minutes to find for MACE's large model.
    """
    import cuequivariance as cue

    irreps = (cue.Irreps("O3", "+".join(f"{problem.channels}x{irrep}" for irrep in text.split("+")))
              for text in (problem.irreps_in, problem.irreps_out))  # fmt: skip
    return cue.descriptors.symmetric_contraction(*irreps, tuple(range(1, problem.correlation + 1))).polynomial


@functools.lru_cache(maxsize=2)
def cuequivariance_module(problem: ContractionProblem, method: str, dtype: str, device: torch.device) -> Any:
    """The polynomial as a module; PeerError unless it runs by the requested method."""
    import cuequivariance_torch as cuet

    cuequivariance_peer.keep_compiled()
    how = {"method": method, "math_dtype": getattr(torch, dtype)}
    return cuequivariance_peer.by_method(
        method, lambda: cuet.SegmentedPolynomial(polynomial(problem), **how).to(device)
    )


@functools.lru_cache(maxsize=4)
def _segmented_meaning(problem: ContractionProblem) -> torch.Tensor:
    terms = polynomial(problem)

    def evaluate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # In numpy, term by term: a module for it takes minutes to build.
        (values,) = terms(w.flatten(1).numpy(), x.flatten(1).numpy())
        return by_component(problem, "g", torch.from_numpy(values), "ir_mul")

    return fitted(problem, terms.inputs[0].size // problem.channels, evaluate)


_MACE_REMEDY = "install equitune[models-mace] in an environment of its own"
CONTRACTION_ADAPTERS = (
    Adapter(
        *("mace", ("cpu", "cuda"), needs("mace.modules.symmetric_contraction", _MACE_REMEDY), _mace),
        module="mace", operations=("contraction",),
    ),
    *cuequivariance_peer.adapters_of("contraction", _segmented),
)  # fmt: skip
