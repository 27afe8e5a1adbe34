"""Equitune as a kernel backend of MACE version 1: what MACE's conformance suite asks of each operation.

Every operation is built as a descriptor of ``mace_core`` says and compared with dense sums that are written here from
the contract: canonical weights both ways, values, derivatives, rotations, one compilation for all sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import mace_contract as contract
import numpy as np
import pytest
import torch
from places import ROOT
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from autotune.measure.trial import random_rotation, turned
from autotune.workload.toml_tables import read_toml
from autotune.workload.workload import relayout
from kernelgen.compat import o3
from kernelgen.errors import InputError

CHANNELS = 4
NODE, EDGE, TARGET = "0e+1o", "0e+1o+2e+3o", "0e+1o+2e+3o"
NODES = "4x0e+4x1o"
PATHS = "+".join(f"{CHANNELS}x{path.irrep}" for path in contract.channelwise_paths(NODE, EDGE, TARGET))
CASES = {
    "linear": contract.LinearDescriptor(irreps_in=NODES, irreps_out=NODES),
    "linear of paths": contract.LinearDescriptor(irreps_in=PATHS, irreps_out="4x0e+4x1o+4x2e+4x3o"),
    "linear with a bias": contract.LinearDescriptor(irreps_in=NODES, irreps_out="4x0e+2x0e", has_bias=True),
    "linear between some": contract.LinearDescriptor(
        irreps_in="2x1o+3x0o+5x1o", irreps_out="3x1o+1x0e+2x0o", has_bias=True
    ),
    "convolution": contract.ChannelwiseTPConvDescriptor(
        irreps_node=NODE, irreps_edge=EDGE, irreps_out=TARGET, num_features=CHANNELS
    ),
    "contraction": contract.SymmetricContractionDescriptor(
        irreps_in=TARGET, irreps_out=NODE, correlation=3, num_elements=2, num_features=CHANNELS
    ),
    "contraction, full": contract.SymmetricContractionDescriptor(
        irreps_in="0e+1o+2e", irreps_out="0e+1o+2e", correlation=2, num_elements=3, num_features=3, basis="full"
    ),
    "skip": contract.FullyConnectedTPDescriptor(irreps_in1=NODES, irreps_in2="2x0e", irreps_out=NODES),
    "skip of neighbours": contract.FullyConnectedTPDescriptor(
        irreps_in1="2x0e+3x0e+2x1o", irreps_in2="3x0e", irreps_out="2x1o+4x0e"
    ),
}
ALL = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def backend() -> Iterator[Any]:
    """As MACE's registry makes it, from the entry point that the package declares."""
    points = read_toml(ROOT / "pyproject.toml")["project"]["entry-points"]["mace.kernel_backends.torch"]
    home, _, name = points["equitune"].partition(":")
    with contract.installed():
        yield getattr(import_module(home), name)()


class Built(NamedTuple):
    """An operation, the dense form of the same, its arguments, and which of them have gradients.

    Features are in e3nn's layout outside. irreps: of each argument that turns with space, and of the result.
    """

    module: torch.nn.Module
    call: Callable[..., Tensor]
    dense: Callable[..., Tensor]
    state: dict[str, Tensor]
    arguments: list[Any]
    differentiable: list[int]
    irreps: tuple[dict[int, str], str]


def built(backend: Any, case: str, precision: str = "float64", copies: int = 1) -> Built:
    descriptor = dataclasses.replace(CASES[case], layout="ir_mul", precision=precision)
    dtype = getattr(torch, precision)
    kind = {"linear": _linear, "convolution": _convolution, "contraction": _contraction, "skip": _skip}
    module, dense, state, arguments, differentiable, irreps = kind[case.replace(",", "").split()[0]](
        backend, descriptor, copies
    )
    if state:
        module.load_canonical({name: _to(value, dtype) for name, value in state.items()})

    def call(*given: Any) -> Tensor:
        moved = [
            relayout(value, irreps[0][place], "mul_ir", "ir_mul") if place in irreps[0] else value
            for place, value in enumerate(given)
        ]
        return relayout(module(*moved), irreps[1], "ir_mul", "mul_ir")

    arguments = [_to(value, dtype) if torch.is_tensor(value) else value for value in arguments]
    return Built(module, call, dense, state, arguments, differentiable, irreps)


def _to(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _copies(irreps: str) -> list[tuple[slice, str]]:
    """The place of every copy of an irrep in a row of e3nn's layout."""
    found, at = [], 0
    for mul, ir in o3.Irreps(irreps):
        for _ in range(mul):
            found.append((slice(at, at + ir.dim), str(ir)))
            at += ir.dim
    return found


def _matrices(irreps_in: str, irreps_out: str) -> tuple[Tensor, int]:
    """[weights, outputs, inputs]: where each canonical weight of a linear map stands; and their number."""
    outputs, inputs = _copies(irreps_out), _copies(irreps_in)
    pairs = [(y, x) for y, kind in outputs for x, other in inputs if kind == other]
    found = torch.zeros(len(pairs), o3.Irreps(irreps_out).dim, o3.Irreps(irreps_in).dim, dtype=torch.float64)
    for number, (y, x) in enumerate(pairs):
        found[number, y, x] = torch.eye(y.stop - y.start, dtype=torch.float64)
    return found, len(pairs)


def _linear(backend: Any, descriptor: Any, copies: int) -> tuple:
    matrices, count = _matrices(descriptor.irreps_in, descriptor.irreps_out)
    places = [y.start for y, kind in _copies(descriptor.irreps_out) if kind == "0e" and descriptor.has_bias]
    state = {"weight": _random(count), "bias": _random(len(places))}

    def dense(x: Tensor, weight: Tensor = state["weight"], bias: Tensor = state["bias"]) -> Tensor:
        found = x @ torch.tensordot(weight, matrices, 1).T
        return found.index_add(1, torch.tensor(places, dtype=torch.long), bias.expand(len(found), -1))

    x = _random(5, o3.Irreps(descriptor.irreps_in).dim).repeat(copies, 1)
    irreps = ({0: descriptor.irreps_in}, descriptor.irreps_out)
    return backend.make_linear(descriptor), dense, state, [x], [0], irreps


def _skip(backend: Any, descriptor: Any, copies: int) -> tuple:
    matrices, count = _matrices(descriptor.irreps_in1, descriptor.irreps_out)
    scalars = o3.Irreps(descriptor.irreps_in2).dim
    state = {"weight": _random(scalars, count)}

    def dense(x: Tensor, y: Tensor, weight: Tensor = state["weight"]) -> Tensor:
        return torch.einsum("ns,sw,woi,ni->no", y, weight, matrices, x)

    x = _random(5, o3.Irreps(descriptor.irreps_in1).dim).repeat(copies, 1)
    irreps = ({0: descriptor.irreps_in1}, descriptor.irreps_out)
    y = _random(5, scalars).repeat(copies, 1)
    return backend.make_fully_connected_tp(descriptor), dense, state, [x, y], [0, 1], irreps


def _convolution(backend: Any, descriptor: Any, copies: int) -> tuple:
    paths = contract.channelwise_paths(descriptor.irreps_node, descriptor.irreps_edge, descriptor.irreps_out)
    node, edge = o3.Irreps(descriptor.irreps_node), o3.Irreps(descriptor.irreps_edge)
    channels = descriptor.num_features
    sender, receiver, nodes = [0, 1, 2, 3, 0, 2, 1], [1, 0, 3, 2, 2, 0, 3], 4

    def dense(x: Tensor, y: Tensor, w: Tensor, first: Tensor, second: Tensor, count: int) -> Tensor:
        found = []
        for number, path in enumerate(paths):
            mul = x[:, node[: path.node_term].dim * channels :][:, : node[path.node_term].dim * channels]
            one = mul.unflatten(1, (channels, -1))[first]
            other = y[:, edge[: path.edge_term].dim :][:, : edge[path.edge_term].dim]
            degrees = path.irrep.degree, node[path.node_term].ir.l, edge[path.edge_term].ir.l
            table = torch.from_numpy(contract.wigner_3j_real(*degrees)) * path.irrep.dimension**0.5
            of_edges = torch.einsum("oij,eci,ej,ec->eco", table, one, other, w[:, number])
            found.append(of_edges.new_zeros(count, *of_edges.shape[1:]).index_add(0, second, of_edges).flatten(1))
        return torch.cat(found, 1)

    offsets = [nodes * copy for copy in range(copies)]
    arguments = [
        _random(nodes, channels * node.dim).repeat(copies, 1),
        _random(len(sender), edge.dim).repeat(copies, 1),
        _random(len(sender), len(paths), channels).repeat(copies, 1, 1),
        torch.cat([torch.tensor(sender) + offset for offset in offsets]),
        torch.cat([torch.tensor(receiver) + offset for offset in offsets]),
        nodes * copies,
    ]
    irreps = ({0: NODES}, "+".join(f"{channels}x{path.irrep}" for path in paths))
    return backend.make_channelwise_tp_conv(descriptor), dense, {}, arguments, [0, 1, 2], irreps


def _contraction(backend: Any, descriptor: Any, copies: int) -> tuple:
    channels, spec = descriptor.num_features, (descriptor.irreps_in, descriptor.irreps_out)
    pieces = contract.pieces(*spec, descriptor.correlation, descriptor.basis)
    counts = [len(array) for _, _, array in pieces]
    state = {
        "weight": _random(descriptor.num_elements, sum(counts), channels),
        "path_counts": torch.tensor(counts),
    }
    several = [o3.Irreps([(channels, ir) for _, ir in o3.Irreps(irreps)]) for irreps in spec]

    def dense(x: Tensor, elements: Tensor, weight: Tensor = state["weight"]) -> Tensor:
        given = torch.cat([x[:, s].unflatten(1, (channels, -1)) for s in several[0].slices()], 2)
        found: dict[str, Tensor] = {}
        for (output, degree, array), part in zip(pieces, weight.split(counts, 1), strict=True):
            values = torch.from_numpy(array)[None, None]
            for _ in range(degree):
                values = torch.einsum("nc...i,nci->nc...", values.expand(*given.shape[:2], *values.shape[2:]), given)
            values = torch.einsum("ncpo,npc->nco", values, part[elements])
            found[output] = found.get(output, 0) + values
        return torch.cat([found[str(ir)].flatten(1) for _, ir in o3.Irreps(descriptor.irreps_out)], 1)

    x = _random(5, several[0].dim).repeat(copies, 1)
    elements = torch.tensor([0, 1, 1, 0, 1]).repeat(copies)
    irreps = ({0: str(several[0])}, str(several[1]))
    return backend.make_symmetric_contraction(descriptor), dense, state, [x, elements], [0], irreps


def _leaves(one: Built) -> list[Any]:
    return [
        value.clone().requires_grad_() if place in one.differentiable else value
        for place, value in enumerate(one.arguments)
    ]


def close(found: Tensor, wanted: Tensor, precision: str = "float64") -> None:
    """MACE's tolerances."""
    atol, rtol = {"float64": (1e-10, 1e-10), "float32": (5e-5, 1e-3)}[precision]
    torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=rtol)


@ALL
def test_canonical_weights_go_both_ways(backend: Any, case: str) -> None:
    one = built(backend, case)
    if not one.state:
        assert not list(one.module.parameters())
        return
    found = one.module.to_canonical()
    assert list(found) == list(one.state)
    assert all(torch.equal(found[name], value) for name, value in one.state.items())
    with pytest.raises(InputError, match="another operation"):
        one.module.load_canonical({**one.state, "weight": one.state["weight"][:-1]})
    width = sum(parameter.numel() for parameter in one.module.parameters())
    assert width == sum(value.numel() for value in one.state.values() if value.is_floating_point())


@ALL
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_values_and_gradients(backend: Any, case: str, precision: str) -> None:
    one = built(backend, case, precision)
    given = _leaves(one)
    wanted = [_to(value.detach(), torch.float64).clone() if torch.is_tensor(value) else value for value in given]
    wanted = [value.requires_grad_() if place in one.differentiable else value for place, value in enumerate(wanted)]
    canonical = {name: value.clone().requires_grad_() for name, value in one.state.items() if value.is_floating_point()}
    found, expected = one.call(*given), one.dense(*wanted, **canonical)
    close(found, expected, precision)
    direction = _random(*expected.shape)
    leaves = [[values[place] for place in one.differentiable] for values in (given, wanted)]
    parameters = list(one.module.parameters())
    ours = torch.autograd.grad((found * direction.to(found)).sum(), [*leaves[0], *parameters])
    used = [value for value in canonical.values() if value.numel()]
    theirs = torch.autograd.grad((expected * direction).sum(), [*leaves[1], *used])
    for mine, other in zip(ours[: len(leaves[0])], theirs, strict=False):
        close(mine, other, precision)
    if not parameters:
        return
    # Gradients by weights agree along directions of canonical weights.
    along = {name: _random(*value.shape) for name, value in canonical.items()}
    one.module.load_canonical({**one.state, **{name: value.to(found.dtype) for name, value in along.items()}})
    mine = zip(ours[-len(parameters) :], [parameter.detach() for parameter in parameters], strict=True)
    other = zip(theirs[-len(used) :], [along[name] for name in canonical if along[name].numel()], strict=True)
    close(*(sum((gradient * way).sum() for gradient, way in pairs) for pairs in (mine, other)), precision)


def test_a_contractions_weights_may_be_ordered_by_output(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "BY_DEGREE", [False])
    for case in ("contraction", "contraction, full"):
        one = built(backend, case)
        assert torch.equal(one.module.to_canonical()["path_counts"], one.state["path_counts"])
        close(one.call(*one.arguments), one.dense(*one.arguments))


@ALL
def test_second_derivatives(backend: Any, case: str) -> None:
    one = built(backend, case)
    leaves = [value for place, value in enumerate(_leaves(one)) if place in one.differentiable]

    def function(*some: Tensor) -> Tensor:
        given = dict(zip(one.differentiable, some, strict=True))
        return one.call(*[given.get(place, value) for place, value in enumerate(one.arguments)])

    assert torch.autograd.gradgradcheck(function, tuple(leaves), atol=1e-6, fast_mode=True)


@ALL
def test_results_turn_with_space(backend: Any, case: str) -> None:
    one = built(backend, case)
    turn = random_rotation(1)
    with torch.no_grad():
        moved = list(one.arguments)
        for place, text in {**one.irreps[0], **({1: EDGE} if case == "convolution" else {})}.items():
            moved[place] = turned(moved[place], text, "mul_ir", turn)
        close(one.call(*moved), turned(one.call(*one.arguments), one.irreps[1], "mul_ir", turn))


@ALL
def test_one_compilation_serves_all_sizes(backend: Any, case: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    one = built(backend, case)
    compiled = torch.compile(one.module, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for copies in (2, 3, 5):
            given = built(backend, case, copies=copies).arguments
            close(compiled(*given), one.module(*given))
    torch._dynamo.reset()
    assert counter.frame_count <= 2


@pytest.mark.gpu
@ALL
def test_replays_from_a_captured_graph(backend: Any, case: str) -> None:
    one = built(backend, case)
    module = one.module.to("cuda")
    given = [value.to("cuda") if torch.is_tensor(value) else value for value in one.arguments]
    wanted = built(backend, case).module(*one.arguments).detach()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            close(module(*given).cpu(), wanted)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = module(*given)
    found.zero_()
    graph.replay()
    close(found.cpu(), wanted)


def test_a_structure_without_edges_has_zeros(backend: Any) -> None:
    one = built(backend, "convolution")
    x, y, w, sender, receiver, nodes = one.arguments
    found = one.module(x, y[:0], w[:0], sender[:0], receiver[:0], nodes)
    assert found.shape == one.module(*one.arguments).shape and not found.any()


def test_one_hot_attributes_take_products_by_element(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = built(backend, "skip of neighbours")
    kinds = torch.tensor([2, 0, 0, 2, 1])
    attributes = torch.nn.functional.one_hot(kinds, 3).double()
    wanted = one.dense(one.arguments[0], attributes)
    monkeypatch.setattr("autotune.models.mace.backend.dense", None)
    close(one.call(one.arguments[0], attributes), wanted)


def test_fresh_weights_have_maces_scales(backend: Any) -> None:
    make = backend.make_linear
    wide = contract.LinearDescriptor(irreps_in="64x0e+64x0e+8x1o", irreps_out="64x0e+64x1o", layout="ir_mul")
    first, second = make(wide), make(wide)
    first.initialize_weights(1)
    second.initialize_weights(2)
    weights = first.to_canonical()["weight"]
    assert not torch.equal(weights, second.to_canonical()["weight"])
    assert float(weights[: 64 * 128].std()) == pytest.approx(128**-0.5, rel=0.05)
    assert float(weights[64 * 128 :].std()) == pytest.approx(8**-0.5, rel=0.15)
    skip = backend.make_fully_connected_tp(
        contract.FullyConnectedTPDescriptor(irreps_in1="32x0e", irreps_in2="8x0e", irreps_out="32x0e", layout="ir_mul")
    )
    skip.initialize_weights(3)
    assert float(skip.to_canonical()["weight"].std()) == pytest.approx(256**-0.5, rel=0.05)
    contraction = built(backend, "contraction").module
    contraction.initialize_weights(4)
    assert float(contraction.to_canonical()["weight"].std()) == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize(
    "descriptor",
    [
        contract.LinearDescriptor(layout="mul_ir"),
        contract.LinearDescriptor(layout="ir_mul", precision="bfloat16"),
        contract.ChannelwiseTPConvDescriptor(irreps_node="2x0e", irreps_edge="0e", layout="ir_mul"),
        contract.ChannelwiseTPConvDescriptor(irreps_node="0e", irreps_edge="1o", irreps_out="2e", layout="ir_mul"),
        contract.SymmetricContractionDescriptor(irreps_in="0e+0e", layout="ir_mul"),
        contract.SymmetricContractionDescriptor(correlation=5, layout="ir_mul"),
        contract.FullyConnectedTPDescriptor(irreps_in2="1o", layout="ir_mul"),
        contract.SegmentReduceDescriptor(layout="ir_mul"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_declined_is_refused(backend: Any, descriptor: Any) -> None:
    names = ("linear", "channelwise_tp_conv", "symmetric_contraction", "fully_connected_tp", "segment_reduce")
    kinds = dict(zip(("Lin", "Cha", "Sym", "Ful", "Seg"), names, strict=True))
    name = kinds[type(descriptor).__name__[:3]]
    capabilities = backend.capabilities()
    assert not capabilities.supports(descriptor)
    with pytest.raises(contract.UnsupportedDescriptorError, match="Equitune"):
        getattr(backend, f"make_{name}")(descriptor)


def test_the_chain_of_operations_has_one_layout(backend: Any) -> None:
    capabilities = backend.capabilities()
    assert capabilities.native_layout in capabilities.activation_layouts
    assert capabilities.supports_double_backward and "segment_reduce" not in capabilities.ops
    assert backend.make_spherical_harmonics(None) is backend.make_radial_basis(None) is None
    assert backend.make_interaction_layer(()) is None


def test_other_couplings_than_e3nns_are_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = import_module("autotune.models.mace.backend")
    monkeypatch.setattr(home, "wigner_3j_real", lambda *degrees: contract.wigner_3j_real(*degrees)[::-1].copy())
    with pytest.raises(contract.UnsupportedDescriptorError, match="another basis"):
        built(backend, "convolution")


def test_an_unknown_order_of_weights_is_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = import_module("autotune.models.mace.backend")
    labels = contract.contraction_path_labels
    monkeypatch.setattr(home, "contraction_path_labels", lambda *spec, basis: labels(*spec, basis=basis)[::-1])
    with pytest.raises(contract.UnsupportedDescriptorError, match="order"):
        built(backend, "contraction")


def test_the_stand_in_of_the_contract_is_other_than_e3nn() -> None:
    """Else a backend that assumed e3nn's signs, or Equitune's basis, would pass."""
    triples = [t for t in itertools.product(range(4), repeat=3) if abs(t[0] - t[1]) <= t[2] <= t[0] + t[1]]
    differ = [t for t in triples if not np.allclose(contract.wigner_3j_real(*t), o3.wigner_3j(*t).numpy())]
    assert 0 < len(differ) < len(triples)
