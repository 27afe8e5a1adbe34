"""Peers of symmetric contractions: MACE's own module, and cuEquivariance's polynomial.

Each has weights of its own: of other polynomials, in another order. How many there are and what they mean is found by
evaluating a peer at random points with one weight at a time, in float64: the basis polynomials must be combinations of
the peer's. The weights are converted by these before any timed call.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from autotune.compare.peers import cuequivariance as cuequivariance_peer
from autotune.compare.peers.peer import Adapter, Product, Task, needs
from autotune.errors import PeerError
from autotune.measure.operations import Call
from autotune.measure.references import EXACT, by_component, contract, contraction_of, from_component
from autotune.workload.workload import DTYPES
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.problem.other_kinds import ContractionProblem

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
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return SymmetricContraction(*irreps, problem.correlation, num_elements=elements)
    finally:
        torch.set_default_dtype(before)


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


def _cuequivariance(method: str, task: Task) -> Product:
    problem, elements = contraction_of(task.workload), task.tensors.sender
    assert elements is not None
    made = cuequivariance_module(problem, method, task.workload.dtype, task.device)
    # As MACE gives them.
    indices = elements.int()

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return made([w.flatten(1), x], {0: indices})[0]

    return product(task, call, "ir_mul", _cuequivariance_meaning(_narrow(problem)))


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = cuet.SegmentedPolynomial(polynomial(problem), method=method, math_dtype=getattr(torch, dtype)).to(device)
    cuequivariance_peer.check_method(made, method, caught)
    return made


@functools.lru_cache(maxsize=4)
def _cuequivariance_meaning(problem: ContractionProblem) -> torch.Tensor:
    terms = polynomial(problem)

    def evaluate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # In numpy, term by term: a module for it takes minutes to build.
        (values,) = terms(w.flatten(1).numpy(), x.flatten(1).numpy())
        return by_component(problem, "g", torch.from_numpy(values), "ir_mul")

    return fitted(problem, terms.inputs[0].size // problem.channels, evaluate)


_FAST, _NAIVE = (functools.partial(_cuequivariance, method) for method in ("uniform_1d", "naive"))
_OPERATIONS = ("contraction",)
_MACE_REMEDY = "install equitune[models-mace] in an environment of its own"
ADAPTERS = (
    Adapter(
        *("mace", ("cpu", "cuda"), needs("mace.modules.symmetric_contraction", _MACE_REMEDY), _mace),
        module="mace", operations=_OPERATIONS,
    ),
    Adapter(
        *("cuequivariance", ("cuda",), cuequivariance_peer.no_kernels, _FAST, cuequivariance_peer.WARM_UP_CALLS),
        module="cuequivariance_torch", operations=_OPERATIONS,
    ),
    Adapter(
        *("cuequivariance-naive", ("cpu",), cuequivariance_peer.no_module, _NAIVE),
        module="cuequivariance_torch", operations=_OPERATIONS,
    ),
)  # fmt: skip
