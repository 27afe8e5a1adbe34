"""What Equitune builds for MACE, and what it leaves to MACE's reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from mace_core.clebsch_gordan import reduced_basis
from mace_core.clebsch_gordan.irreps import Irreps
from mace_core.clebsch_gordan.real_basis import wigner_3j_real
from mace_core.kernels.canonical import (
    KERNEL_SPEC_VERSION,
    contraction_path_labels,
    fully_connected_tp_weight_scale,
    linear_weight_scale,
    symmetric_contraction_weight_scale,
)
from mace_core.kernels.capabilities import BackendCapabilities, UnsupportedDescriptorError
from mace_core.kernels.descriptors import (
    ChannelwiseTPConvDescriptor,
    FullyConnectedTPDescriptor,
    LinearDescriptor,
    SymmetricContractionDescriptor,
)
from mace_core.kernels.paths import channelwise_paths
from torch import Tensor

from autotune.models.linear import BlockMatrices
from autotune.models.linear import Path as LinearPath
from autotune.models.species import ByElement, MatricesByElement, by_element, dense, species_of
from autotune.models.species import Path as SpeciesPath
from autotune.modules.convolution import TensorProductConv
from autotune.modules.rows import TunedContraction
from kernelgen.arithmetic.contraction_couplings import coordinates, polynomials
from kernelgen.compat import o3, without_autocast
from kernelgen.errors import InputError
from kernelgen.problem.irreps import Block, blocks_of
from kernelgen.problem.other_kinds import ContractionProblem

# A sum by index is torch's own; harmonics and radial functions are MACE's.
_OPERATIONS = ("linear", "channelwise_tp_conv", "symmetric_contraction", "fully_connected_tp")
_MOST_DEGREE, _MOST_CORRELATION = 6, 4


class EquituneCapabilities(BackendCapabilities):
    """MACE's coarse answer, and the shapes that kernels are generated for."""

    def supports(self, descriptor: Any) -> bool:
        if not super().supports(descriptor):
            return False
        if isinstance(descriptor, LinearDescriptor):
            return True
        if isinstance(descriptor, ChannelwiseTPConvDescriptor):
            irreps = descriptor.irreps_node, descriptor.irreps_edge, descriptor.irreps_out
            return all(map(_is_known, irreps)) and len(channelwise_paths(*irreps)) > 0
        if isinstance(descriptor, SymmetricContractionDescriptor):
            both = descriptor.irreps_in, descriptor.irreps_out
            return all(map(_is_known, both)) and 1 <= descriptor.correlation <= _MOST_CORRELATION
        if isinstance(descriptor, FullyConnectedTPDescriptor):
            scalars = Irreps.parse(descriptor.irreps_in2).terms
            has_pairs = bool(pairs_of(descriptor.irreps_in1, descriptor.irreps_out))
            return has_pairs and all((irrep.degree, irrep.parity) == (0, 1) for _, irrep in scalars)
        return False


def _is_known(irreps: str) -> bool:
    """Whether these are one copy of each irrep, up to the highest degree of a kernel."""
    terms = Irreps.parse(irreps).terms
    kinds = {str(irrep) for _, irrep in terms}
    return len(kinds) == len(terms) and all(mul == 1 and irrep.degree <= _MOST_DEGREE for mul, irrep in terms)


class EquituneBackend:
    """The object that MACE's registry makes of the name ``equitune``."""

    name = "equitune"

    def capabilities(self) -> EquituneCapabilities:
        return EquituneCapabilities(
            ops=frozenset(_OPERATIONS),
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float32", "float64"}),
            activation_layouts=frozenset({"ir_mul"}),
            native_layout="ir_mul",
            bases=frozenset({"reduced", "full"}),
            supports_double_backward=True,
            spec_version=KERNEL_SPEC_VERSION,
        )

    def make_linear(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendLinear, descriptor)

    def make_channelwise_tp_conv(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendConvolution, descriptor)

    def make_symmetric_contraction(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendContraction, descriptor)

    def make_fully_connected_tp(self, descriptor: Any) -> torch.nn.Module:
        return self._made(BackendSkip, descriptor)

    def make_segment_reduce(self, descriptor: Any) -> torch.nn.Module:
        """Always declined: see ``capabilities``."""
        raise UnsupportedDescriptorError(f"Equitune leaves {descriptor} to MACE's reference backend")

    def make_spherical_harmonics(self, descriptor: Any) -> None:
        """None: MACE's own."""

    def make_radial_basis(self, descriptor: Any) -> None:
        """None: MACE's own."""

    def make_interaction_layer(self, descriptors: Any) -> None:
        """None: operation by operation."""

    def _made(self, kind: type[torch.nn.Module], descriptor: Any) -> torch.nn.Module:
        if not self.capabilities().supports(descriptor):
            raise UnsupportedDescriptorError(
                f"Equitune builds nothing for {descriptor}: it takes features in layout ir_mul, one copy of each irrep "
                f"up to degree {_MOST_DEGREE} in convolutions and contractions, a correlation up to "
                f"{_MOST_CORRELATION}, and even scalars in skip connections"
            )
        return kind(descriptor)


# The order of MACE's canonical weights of linear maps, and their random draw.

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Pair(NamedTuple):
    """Two blocks of one irrep, and the canonical numbers of the weights between their copies.

    weights: [copies of x, copies of y]. irrep: mace_core's, of both.
    """

    x: Block
    y: Block
    weights: Tensor
    irrep: Any


def pairs_of(irreps_in: str, irreps_out: str) -> list[Pair]:
    """All pairs of blocks that a linear map connects.

    A copy of the output has one weight for each copy of the input of its irrep. Canonical order: copies of the output
    outermost, and for each of them those of the input, both as the irreps are written.
    """
    inputs, outputs = list(_terms(irreps_in)), list(_terms(irreps_out))
    found, begin = [], 0
    for y, irrep in outputs:
        matching = [x for x, other in inputs if other == irrep]
        width = sum(x.mul for x in matching)
        numbers = torch.arange(begin, begin + y.mul * width).view(y.mul, width)
        for x, part in zip(matching, numbers.split([x.mul for x in matching], 1), strict=True):
            found.append(Pair(x, y, part.t(), irrep))
        begin += y.mul * width
    return found


def _terms(irreps: str) -> Iterator[tuple[Block, Any]]:
    return zip(blocks_of(irreps), (irrep for _, irrep in Irreps.parse(irreps).terms), strict=True)


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal numbers in float64 that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def checked(state: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a canonical state; InputError if it is not there or has another shape."""
    found = state.get(name)
    if found is None or tuple(found.shape) != shape:
        given = "is not there" if found is None else f"has shape {tuple(found.shape)}"
        raise InputError(f"canonical weights: {name!r} {given}; expected {shape}. They belong to another operation")
    return found


# MACE's equivariant linear map: products of blocks with matrices, and a bias of even scalars.


class BackendLinear(torch.nn.Module):
    """Features ``[nodes, irreps_in]`` in ``ir_mul`` -> ``[nodes, irreps_out]``.

    ``weight`` holds the matrix of each pair of blocks, [copies of the input, copies of the output], one after the
    other: the canonical weights in another order.
    """

    form: Any  # BlockMatrices
    order: Tensor
    scales: Tensor
    bias_places: Tensor

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        dtype, pairs = DTYPES[descriptor.precision], pairs_of(descriptor.irreps_in, descriptor.irreps_out)
        paths, at = [], 0
        for pair in pairs:
            paths.append(LinearPath(pair.x.offset, pair.y.offset, at, pair.x.mul, pair.y.mul, pair.y.dim, 1.0))
            at += paths[-1].numel
        outputs = blocks_of(descriptor.irreps_out)
        sides = (Irreps.parse(irreps).dimension for irreps in (descriptor.irreps_in, descriptor.irreps_out))
        self.__dict__["form"] = BlockMatrices(paths, tuple(sides))
        order = [pair.weights.flatten() for pair in pairs]
        self._keep("order", torch.cat(order) if order else torch.empty(0, dtype=torch.int64))
        self._keep("scales", _scales(descriptor.irreps_in, pairs))
        places = [
            place
            for block in outputs
            if descriptor.has_bias and block.text.endswith("x0e")
            for place in range(block.offset, block.offset + block.mul)
        ]
        self._keep("bias_places", torch.tensor(places, dtype=torch.int64))
        self.weight = torch.nn.Parameter(torch.zeros(at, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(len(places), dtype=dtype)) if places else None

    def _keep(self, name: str, table: Tensor) -> None:
        self.register_buffer(name, table, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        form: BlockMatrices = self.form
        found = form(features, self.weight) if form.paths else features.new_zeros(len(features), form.dims["y"])
        if self.bias is None:
            return found
        return found + self.bias.new_zeros(form.dims["y"]).index_copy(0, self.bias_places, self.bias)

    def to_canonical(self) -> dict[str, Tensor]:
        """``weight`` and ``bias``, empty without one."""
        weight = self.weight.detach()
        bias = weight.new_empty(0) if self.bias is None else self.bias.detach()
        return {"weight": torch.empty_like(weight).index_copy_(0, self.order, weight), "bias": bias}

    def load_canonical(self, state: dict[str, Tensor]) -> None:
        """Take over such weights; InputError for others."""
        weight = checked(state, "weight", tuple(self.weight.shape))
        with torch.no_grad():
            self.weight.copy_(weight.to(self.order.device).index_select(0, self.order))
            if self.bias is not None:
                self.bias.copy_(checked(state, "bias", tuple(self.bias.shape)))

    def initialize_weights(self, seed: int) -> None:
        """Normal numbers at MACE's scales, a bias of zeros."""
        values = drawn(tuple(self.weight.shape), seed) * self.scales.cpu()
        self.load_canonical({"weight": values, "bias": self.to_canonical()["bias"] * 0})


def _scales(irreps_in: str, pairs: list[Any]) -> Tensor:
    """MACE's scale of each canonical weight, float64."""
    found = torch.ones(sum(pair.weights.numel() for pair in pairs), dtype=torch.float64)
    for pair in pairs:
        found[pair.weights] = linear_weight_scale(irreps_in, pair.irrep)
    return found


# MACE's skip connection: a linear map for each element, weighted by the element attributes.


class BackendSkip(torch.nn.Module):
    """Features ``[nodes, irreps_in1]`` in ``ir_mul`` and scalars ``[nodes, scalars]`` -> ``[nodes, irreps_out]``.

    One-hot rows of scalars, as MACE has them, take a matrix product for each element that occurs; others a dense one.
    ``weight`` holds [copies of the input, scalars, copies of the output] for each pair of blocks.
    """

    product: Any  # ByElement
    order: Tensor
    scales: Tensor

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        pairs = pairs_of(descriptor.irreps_in1, descriptor.irreps_out)
        scalars = Irreps.parse(descriptor.irreps_in2).dimension
        count = sum(pair.weights.numel() for pair in pairs)
        paths, order, at = [], [], 0
        scales = torch.ones(scalars, count, dtype=torch.float64)
        for pair in pairs:
            paths.append(SpeciesPath(pair.x, pair.y, at, scalars, 1.0))
            at += paths[-1].numel
            order.append((pair.weights[:, None] + count * torch.arange(scalars)[:, None]).flatten())
            scales[:, pair.weights.flatten()] = fully_connected_tp_weight_scale(pair.x.mul, scalars)
        dims = {"x": Irreps.parse(descriptor.irreps_in1).dimension, "y": Irreps.parse(descriptor.irreps_out).dimension}
        self.__dict__["product"] = by_element(paths, dims)
        self.register_buffer("order", torch.cat(order), persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.weight = torch.nn.Parameter(torch.zeros(at, dtype=DTYPES[descriptor.precision]))

    def forward(self, features: Tensor, attributes: Tensor) -> Tensor:
        product: ByElement = self.product
        species = species_of(attributes)
        if species is None:
            return dense(product.paths, product.dims, attributes, "y", features, self.weight)
        return MatricesByElement(product, species)(features, self.weight)

    def to_canonical(self) -> dict[str, Tensor]:
        """``weight`` [scalars, pairs of copies]."""
        weight = self.weight.detach()
        return {"weight": torch.empty_like(weight).index_copy_(0, self.order, weight).view(self.scales.shape)}

    def load_canonical(self, state: dict[str, Tensor]) -> None:
        """Take over such weights; InputError for others."""
        weight = checked(state, "weight", tuple(self.scales.shape)).to(self.order.device)
        with torch.no_grad():
            self.weight.copy_(weight.flatten().index_select(0, self.order))

    def initialize_weights(self, seed: int) -> None:
        """Normal numbers at MACE's scales."""
        self.load_canonical({"weight": drawn(tuple(self.scales.shape), seed) * self.scales.cpu()})


# MACE's convolution: gather by sender, product with edges' attributes, sum by receiver; a block for each path.


class BackendConvolution(torch.nn.Module):
    """Node features, edge attributes, weights ``[edges, paths, channels]``, senders, receivers, number of nodes ->
    ``[nodes, paths' components * channels]``; features in ``ir_mul``.
    """

    signs: Tensor | None

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        channels = descriptor.num_features
        nodes, edges = (Irreps.parse(irreps).terms for irreps in (descriptor.irreps_node, descriptor.irreps_edge))
        paths = channelwise_paths(descriptor.irreps_node, descriptor.irreps_edge, descriptor.irreps_out)
        # With a block of its own for each path, e3nn's normalisation is MACE's: the root of the block's dimension.
        self.convolution = TensorProductConv(
            "+".join(f"{channels}x{irrep}" for _, irrep in nodes),
            descriptor.irreps_edge,
            "+".join(f"{channels}x{path.irrep}" for path in paths),
            [(path.node_term, path.edge_term, place, "uvu", True) for place, path in enumerate(paths)],
            layout="ir_mul",
        )
        signs = [
            _sign(path.irrep.degree, nodes[path.node_term][1].degree, edges[path.edge_term][1].degree) for path in paths
        ]
        rows = [channels * path.irrep.dimension for path in paths]
        row = torch.tensor(signs, dtype=torch.float64).repeat_interleave(torch.tensor(rows))
        # Multiplied into the sums over edges, which are fewer than the weights.
        self.register_buffer("signs", None if all(sign > 0 for sign in signs) else row, persistent=False)

    def forward(
        self, features: Tensor, attributes: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor, num_nodes: int
    ) -> Tensor:
        found = self.convolution(features, attributes, weights.flatten(1), sender, receiver, num_nodes=num_nodes)
        return found if self.signs is None else found * self.signs.to(found.dtype)

    @property
    def num_paths(self) -> int:
        """Weights of an edge and channel."""
        return len(self.convolution.problem.paths)


def _sign(out: int, node: int, edge: int) -> int:
    """Of MACE's coupling against e3nn's, which the kernels have: each is free to choose it."""
    mine = o3.wigner_3j(node, edge, out, dtype=torch.float64)
    theirs = torch.from_numpy(wigner_3j_real(out, node, edge)).permute(1, 2, 0)
    ratio = float((mine * theirs).sum())
    if abs(abs(ratio) - 1) > 1e-8:
        raise UnsupportedDescriptorError(
            f"mace_core couples degrees {node} and {edge} to {out} in another basis than e3nn's (overlap {ratio:.3g}, "
            "expected 1 or -1); build this model with MACE's reference backend"
        )
    return 1 if ratio > 0 else -1


# MACE's symmetric contraction, with weights of MACE's basis of polynomials.


class Piece(NamedTuple):
    """Canonical weights that are neighbours: those of a block of the output and a degree."""

    block: int
    degree: int
    polynomials: Tensor  # [2l+1, inputs ** degree, number]


class BackendContraction(torch.nn.Module):
    """Features ``[nodes, inputs * channels]`` in ``ir_mul``, elements ``[nodes]`` -> ``[nodes, outputs * channels]``.

    ``weight`` [elements, polynomials, channels] is canonical. A small matrix product turns it into weights of the
    kernel's basis, in each call: the two bases span the same polynomials.
    """

    to_basis: Tensor
    path_counts: Tensor

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        irreps = descriptor.irreps_in, descriptor.irreps_out
        problem = ContractionProblem(*irreps, descriptor.correlation, descriptor.num_features)
        pieces, dtype = _pieces(descriptor), DTYPES[descriptor.precision]
        self.contraction = TunedContraction(problem, layout="ir_mul")
        self.register_buffer("to_basis", _to_basis(problem, pieces).to(dtype), persistent=False)
        counts = [piece.polynomials.shape[2] for piece in pieces]
        self.register_buffer("path_counts", torch.tensor(counts), persistent=False)
        shape = (descriptor.num_elements, sum(counts), descriptor.num_features)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, features: Tensor, elements: Tensor) -> Tensor:
        with without_autocast(self.weight):
            weight = torch.matmul(self.to_basis, self.weight)
        return self.contraction.contract(features, weight, elements)

    def to_canonical(self) -> dict[str, Tensor]:
        """``weight``, and ``path_counts``: how many polynomials each piece has."""
        return {"weight": self.weight.detach(), "path_counts": self.path_counts.clone()}

    def load_canonical(self, state: dict[str, Tensor]) -> None:
        """Take over such weights; InputError for others."""
        weight = checked(state, "weight", tuple(self.weight.shape))
        with torch.no_grad():
            self.weight.copy_(weight)

    def initialize_weights(self, seed: int) -> None:
        """Normal numbers at MACE's scale."""
        self.load_canonical({"weight": drawn(tuple(self.weight.shape), seed) * symmetric_contraction_weight_scale()})


def _pieces(descriptor: Any) -> list[Piece]:
    """In canonical order, which the labels of the weights tell: by block, then degree, or the other way."""
    build = getattr(reduced_basis, f"{descriptor.basis}_symmetric_tensor_product_basis")
    blocks = [str(irrep) for _, irrep in Irreps.parse(descriptor.irreps_out).terms]
    degrees = range(1, descriptor.correlation + 1)
    found = {}
    for number, block in enumerate(blocks):
        for degree in degrees:
            array = torch.from_numpy(build(descriptor.irreps_in, degree, block)[block].copy())
            found[number, degree] = Piece(number, degree, array.reshape(*array.shape[:2], -1).permute(1, 2, 0))
    labels = contraction_path_labels(
        descriptor.irreps_in, descriptor.irreps_out, descriptor.correlation, basis=descriptor.basis
    )
    told = [(label.rpartition(":")[2], label.count("|") + 1) for label in labels]
    for order in (sorted(found), sorted(found, key=lambda key: (key[1], key[0]))):
        if [(blocks[b], d) for b, d in order for _ in range(found[b, d].polynomials.shape[2])] == told:
            return [found[key] for key in order]
    raise UnsupportedDescriptorError(
        f"mace_core names the weights of {descriptor} {told}, an order that Equitune does not know; build this model "
        "with MACE's reference backend"
    )


def _to_basis(problem: ContractionProblem, pieces: list[Piece]) -> Tensor:
    """[polynomials of the kernel's basis, canonical ones], float64."""
    basis = polynomials(problem)
    columns = []
    for block, degree, given in pieces:
        column = torch.zeros(len(basis), given.shape[2], dtype=torch.float64)
        rows = [row for row, one in enumerate(basis) if (one.block, one.degree) == (block, degree)]
        column[rows] = coordinates(problem, block, degree, given)
        columns.append(column)
    return torch.cat(columns, dim=1)
