"""What Equitune knows of NequIP, without importing it.

Which of its modules are replaced, how its node features change their layout, what is captured, and how its models are
built, loaded, fed and called.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from autotune.errors import PeerError
from autotune.models.capture import along_x, cube
from autotune.models.layout import IrMulGate, ModelLayout, Part, check_same, outline
from autotune.models.linear import AcceleratedLinear
from autotune.models.neighbors import AtomicGraph
from autotune.models.package import Outputs, Package, Parameters, converted, default_dtype, numbers_of
from autotune.models.padding import Counts, Field, Fields, ghost_atoms, ghost_ends
from autotune.models.radial import AcceleratedCutoff, EdgeNetworks, RadialBlock, is_cutoff
from autotune.models.replace import (
    PackageProduct,
    PackageStandIn,
    RetypedBlock,
    check_e3nn,
    e3nn_class,
    full_name,
    home_of,
    retype,
    take_type_back,
)
from autotune.models.species import SpeciesProduct, TypedProduct
from autotune.models.stand_ins import (
    ARRANGEMENTS,
    CONVOLUTIONS,
    CUTOFFS,
    LINEARS,
    PRODUCTS,
    AcceleratedConvolution,
    has_hooks,
)
from autotune.modules.product import TensorProduct
from kernelgen.compat import Gate, o3, runs_eagerly
from kernelgen.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from ase import Atoms


# NequIP's ``TensorProductScatter``, and the block around it with the radial network.
#
# Read in nequip 0.19.1, ``nequip/nn/_tp_scatter_base.py`` and ``nequip/nn/interaction_block.py``.


class TensorProductScatter(RetypedBlock):
    """The block that gathers, multiplies and scatters."""

    module = "nequip.nn._tp_scatter_base"
    names = ("TensorProductScatter",)
    product = "tp"
    fused = "autotune.models.nequip.patched:FusedTensorProductScatter"


_SCATTER = TensorProductScatter()


# NequIP's models in layout ``ir_mul``: every module that takes or gives node features.
#
# Read in nequip 0.19.1, ``nequip/model/nequip_models.py``, ``nequip/nn/convnetlayer.py`` and ``interaction_block.py``.
# Node features are scalars before the first layer and after the last.

_HOME = "nequip.nn."
# Modules that need the edges' vectors, and whichever is first computes them; by name, what they become.
_OF_EDGES = {
    name: f"autotune.models.nequip.patched:Batched{name}"
    for name in ("SphericalHarmonicEdgeAttrs", "EdgeLengthNormalizer")
}
_SEQUENCE, _LAYER = f"{_HOME}_graph_mixin.SequentialGraphNetwork", f"{_HOME}convnetlayer.ConvNetLayer"
# Modules that hold no node features, or scalars alone.
_INDIFFERENT = (
    *("NodeTypeEmbed", "SphericalHarmonicEdgeAttrs", "EdgeLengthNormalizer", "BesselEdgeLengthEncoding", "ApplyFactor"),
    *("AddRadialCutoffToData", "ScalarMLP", "PerTypeScaleShift", "AtomwiseReduce", "LennardJones"),
    *("SimpleLennardJones", "ZBL"),
)


class InteractionBlock(RetypedBlock):
    """The block around the convolution, told to show the nodes' types to its self-connection."""

    module = f"{_HOME}interaction_block"
    names = ("InteractionBlock",)
    product = "sc"
    fused = "autotune.models.nequip.patched:TypedInteractionBlock"


_TYPED = InteractionBlock()


class NequIPLayout(ModelLayout):
    """NequIP's sequence of modules with convolution layers in it."""

    def matches(self, model: torch.nn.Module) -> bool:
        return full_name(type(model)) == _SEQUENCE and any(_is_layer(module) for module in model._modules.values())

    def parts(self, model: Any) -> Iterator[Part]:
        features, types = None, _types_of(model)
        for name, module in model._modules.items():
            if _is_layer(module):
                features = yield from _parts_of_layer(module, name, features, types)
            elif not _is_indifferent(module):
                raise UnsupportedError(f"{name} is a {type(module).__name__}, which may take node features")
            elif is_cutoff(getattr(module, "cutoff", None)):
                yield Part(module, "cutoff", f"{name}.cutoff", CUTOFFS, AcceleratedCutoff)
        if any(degree > 0 for degree, _ in outline(features or "")):
            raise UnsupportedError(f"the last layer gives features {features}, which users may read")

    def finish(self, model: Any) -> None:
        """What users see are scalars."""
        for module in model._modules.values():
            if type(module).__name__ in _OF_EDGES and _is_indifferent(module):
                retype(module, _OF_EDGES[type(module).__name__])

    def undo(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            _TYPED.unfuse(module)
            for place in _OF_EDGES.values():
                take_type_back(module, place)


def _is_layer(module: Any) -> bool:
    return full_name(type(module)) == _LAYER and "forward" not in module.__dict__


def _types_of(model: Any) -> int:
    embeddings = [module for module in model._modules.values() if type(module).__name__ == "NodeTypeEmbed"]
    if len(embeddings) != 1 or len(embeddings[0].categorical_graph_field_embed_modules):
        return 0
    return embeddings[0].num_types


def _is_indifferent(module: Any) -> bool:
    kind = type(module)
    return home_of(kind).startswith(_HOME) and kind.__name__ in _INDIFFERENT and "forward" not in module.__dict__


def _parts_of_layer(layer: Any, name: str, features: str | None, types: int) -> Any:
    """Yields the parts; returns the irreps of the node features after the layer, given those before it.

    types: the number of types on which alone a node's attributes depend, 0 if they depend on more.
    """
    block, gate = layer.conv, layer.equivariant_nonlin
    if not _TYPED.matches(block):
        raise UnsupportedError(f"{name}.conv is a {type(block).__name__}")
    if e3nn_class(gate, Gate) is None or "forward" in block.__dict__:
        raise UnsupportedError(f"{name} has a {type(gate).__name__} in the place of a gate, or a forward of its own")
    if any(map(has_hooks, layer.modules())):
        raise UnsupportedError(f"{name} has hooks, which would see the other layout")
    features = str(block.linear_1.irreps_in) if features is None else features
    scatter = block.tp_scatter
    for linear in (block.linear_1, block.linear_2):
        check_e3nn(linear, o3.Linear)
    check_e3nn(scatter.tp, o3.TensorProduct)
    if not _SCATTER.matches(scatter):
        raise UnsupportedError(f"{name}.conv.tp_scatter is a {type(scatter).__name__}")
    prefix = f"{name}.conv."
    if block.sc is not None:
        check_e3nn(block.sc, o3.TensorProduct)
        check_same(features, block.sc.irreps_in1, f"{prefix}sc")
        check_same(block.sc.irreps_out, block.linear_2.irreps_out, f"{prefix}sc")
        product = functools.partial(TypedProduct, types=types) if types else SpeciesProduct
        yield Part(block, "sc", f"{prefix}sc", PRODUCTS, product, _TYPED if types else None)
    first = functools.partial(AcceleratedLinear, irreps_in=features)
    yield Part(block, "linear_1", f"{prefix}linear_1", LINEARS, first)
    check_same(block.linear_1.irreps_out, scatter.tp.irreps_in1, f"{prefix}tp_scatter")
    convolution = functools.partial(AcceleratedConvolution, layout="ir_mul")
    yield Part(scatter, "tp", f"{prefix}tp_scatter.tp", CONVOLUTIONS, convolution, _SCATTER)
    second = functools.partial(AcceleratedLinear, irreps_in=str(scatter.tp.irreps_out))
    yield Part(block, "linear_2", f"{prefix}linear_2", LINEARS, second)
    check_same(block.linear_2.irreps_out, gate.irreps_in, f"{name}.equivariant_nonlin")
    yield Part(layer, "equivariant_nonlin", f"{name}.equivariant_nonlin", ARRANGEMENTS, IrMulGate)
    if layer.resnet:
        check_same(features, gate.irreps_out, name)
    return str(gate.irreps_out)


# NequIP's and Allegro's models. Read in nequip 0.19.1, ``nequip/nn/graph_model.py`` and ``grad_output.py``.

# Inputs that a captured step takes. A structure without a cell gets one of zeros.
_TAKEN = ("pos", "edge_index", "edge_cell_shift", "cell", "batch", "num_atoms", "atom_types")


# Allegro's ``Contracter``: a product of channels with the same number, with shared weights by path.
#
# Read in nequip-allegro 0.8.3, ``allegro/nn/_strided/_contract.py`` and ``allegro/nn/_allegro.py``. Its tensors are
# *strided*, ``[rows, channels, components of all irreps]``: the transpose of layout ``ir_mul``.

_AGAIN = object()
_OTHER_FORMS = {"TritonContracter": "Triton", "CuEquivarianceContracter": "cuEquivariance"}


class AcceleratedContracter(PackageStandIn):
    """Replaces one ``Contracter``."""

    original: Any
    product: TensorProduct
    computed_by = "product"

    def __init__(self, original: Any, *, strict: bool | None = None, deterministic: bool = False) -> None:
        super().__init__()
        irreps = (original.irreps_in1, original.irreps_in2, original.irreps_out)
        irreps_in1, irreps_in2, irreps_out = ("+".join(f"{original.mul}x{ir}" for _, ir in found) for found in irreps)
        product = TensorProduct(
            irreps_in1,
            irreps_in2,
            irreps_out,
            [(*path, "uuu", True) for path in _allegro_paths(original)],
            irrep_normalization="none" if original.irrep_normalization is None else original.irrep_normalization,
            path_normalization="none",
            internal_weights=False,
            shared_weights=True,
            layout="ir_mul",
            strict=strict,
            deterministic=deterministic,
        )
        # Not registered: parameters and names in checkpoints stay Allegro's.
        self.__dict__["product"] = product
        self._take_place_of(original)

    def forward(self, x1: Tensor, x2: Tensor, idxs: Tensor) -> Tensor:
        """x1 of edges, x2 of nodes, ``idxs``: the node of each edge. The result is a transposed view."""
        x1 = x1.reshape(-1, self.mul, self.base_dim1).transpose(1, 2).flatten(1)
        # A product's second input is in layout mul_ir whatever the layout of the first is: irrep, channel, component.
        parts = x2.reshape(-1, self.mul, self.base_dim2).split([ir.dim for _, ir in self.irreps_in2], dim=2)
        x2 = torch.cat([part.flatten(1) for part in parts], dim=1)
        gathered = torch.index_select(x2, 0, idxs)
        with _gathered_again(x2, idxs, gathered):
            # Allegro's weights, by channel and path or by path alone, as a row of channels for each path.
            weights = self.weights.reshape(-1, self.num_paths).expand(self.mul, self.num_paths).t().flatten()
            out = self.product(x1, gathered, weights)
        return out.view(-1, self.base_dim_out, self.mul).transpose(1, 2)

    def both_results(self, normal: Callable[..., list[Tensor]]) -> tuple[Tensor, Tensor]:
        rows, nodes = 16, 4
        x1, x2 = normal(self.w3j, (rows, self.mul, self.base_dim1), (nodes, self.mul, self.base_dim2))
        given = (x1, x2, torch.arange(rows, device=x1.device) % nodes)
        return self.forward(*given), self.original.forward(*given)


def _gathered_again(rows: Tensor, index: Tensor, gathered: Tensor) -> AbstractContextManager[Any]:
    """What is computed inside keeps ``rows`` for its gradients in the place of ``gathered``, the rows of ``index``.

    A node's rows are gathered for each of its edges: on diamond 273 times as many. Gradients gather them again.
    """
    if not runs_eagerly(rows, index, gathered):
        return nullcontext()
    kept, place, shape = rows.detach(), gathered.data_ptr(), gathered.shape
    # Torch asks the innermost hooks alone: what they leave is for those around them, if this torch tells them.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    pack, unpack = top(False) or (lambda given: given,) * 2

    def keep(tensor: Tensor) -> Any:
        return _AGAIN if tensor.data_ptr() == place and tensor.shape == shape else pack(tensor)

    def again(packed: Any) -> Tensor:
        return torch.index_select(kept, 0, index) if packed is _AGAIN else unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(keep, again)


def _why_contracter_stays(module: torch.nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if full_name(kind) == "allegro.nn._strided._contract.Contracter":
            name = type(module).__name__
            if kind is type(module):
                return ""
            form = _OTHER_FORMS.get(name)
            return f"it is Allegro's {form} form, put there by its modifier" if form else f"it is a {name}"
    return None


def _allegro_paths(original: Any) -> list[tuple[int, int, int]]:
    """Its paths in their order: first input, second input, output."""
    if original.instructions is not None:
        return [tuple(path) for path in original.instructions]
    return [
        (first, second, out)
        for out, (_, ir_out) in enumerate(original.irreps_out)
        for first, (_, ir1) in enumerate(original.irreps_in1)
        for second, (_, ir2) in enumerate(original.irreps_in2)
        if ir_out in ir1 * ir2
    ]


# NequIP: its GNN model and its modifiers for OpenEquivariance and cuEquivariance.


class NequIP(Package):
    """``modifiers``: those of the package that put its fast paths into a model, by peer."""

    name = "nequip"
    title = "NequIP"
    modules: ClassVar[tuple[str, ...]] = ("nequip", "lightning")
    install = "nequip==0.19.1"
    modifiers: ClassVar[Mapping[str, str]] = {
        "cuequivariance": "enable_CuEquivariance",
        "openequivariance": "enable_OpenEquivariance",
    }
    peers = tuple(modifiers)
    compiled: ClassVar[Mapping[str, tuple[str, ...]]] = {"aotinductor": ("stock", *modifiers)}
    neighbor_function = ("nequip.data.transforms.neighborlist", "compute_neighborlist_")
    dtype_of_data = torch.float64

    blocks = (_SCATTER,)
    radial_blocks = (RadialBlock("nequip.nn.interaction_block", ("InteractionBlock",), "edge_mlp", "tp_scatter.tp"),)
    edge_networks = (
        EdgeNetworks("allegro.nn._allegro", "Allegro_Module", ("first_layer_env_embed_projection", "latents")),
        EdgeNetworks("allegro.nn.tensorembed", "TwoBodySphericalHarmonicTensorEmbed", ("env_embed_linear",)),
        EdgeNetworks("allegro.nn._edgeembed", "ProductTypeEmbedding", ("basis_linear",)),
        EdgeNetworks("nequip.nn.mlp", "ScalarMLP", ("mlp_module",)),
    )
    products = (PackageProduct(_why_contracter_stays, AcceleratedContracter),)
    layouts = (NequIPLayout(),)

    classes = ("nequip.nn.graph_model.GraphModel",)
    results = {
        **dict.fromkeys(("total_energy", "stress", "virial"), "graphs"),
        **dict.fromkeys(("atomic_energy", "forces", "node_features"), "atoms"),
    }
    # What modules leave in the data beside their results.
    left_out = frozenset(
        (
            *("node_attrs", "feature_norm_factor", "edge_vectors", "edge_lengths", "normed_edge_lengths"),
            *("edge_cutoff", "edge_type_flat", "edge_attrs", "edge_embedding", "edge_features", "edge_energy"),
        )
    )

    def builder(self) -> Callable[..., torch.nn.Module]:
        """The package's function that makes a model of hyperparameters."""
        from nequip.model import NequIPGNNModel

        return NequIPGNNModel

    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        from ase.data import chemical_symbols
        from nequip.utils.global_state import set_global_state

        given = dict(parameters)
        names = [chemical_symbols[number] for number in numbers_of(given.pop("species"))]
        if given.pop("zbl"):
            given["pair_potential"] = {
                "_target_": "nequip.nn.pair_potential.ZBL",
                "units": "metal",
                "chemical_species": names,
            }
        dtype = torch.get_default_dtype()
        set_global_state()
        torch.set_default_dtype(dtype)  # the line above changes it
        return self.builder()(
            r_max=given.pop("cutoff"),
            type_names=names,
            per_type_energy_scales=given.pop("scale"),
            per_type_energy_shifts=given.pop("shift"),
            seed=seed,
            model_dtype=str(dtype).removeprefix("torch."),
            compile_mode="eager",
            **given,
        )

    def load(self, path: Path) -> torch.nn.Module:
        from nequip.model.saved_models import load_saved_model
        from nequip.utils.global_state import set_global_state

        set_global_state()
        return load_saved_model(str(path), compile_mode="eager")

    def owns(self, model: torch.nn.Module) -> bool:
        # A packaged model's classes are in modules like <torch_package_0>.nequip.nn.graph_model.
        return "nequip." in type(model).__module__

    def cutoff(self, model: Any) -> float:
        return float(model.metadata["r_max"])

    def species(self, model: Any) -> tuple[int, ...]:
        from ase.data import atomic_numbers

        return tuple(sorted(atomic_numbers[name] for name in model.metadata["type_names"].split()))

    def inputs(self, model: Any, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        from nequip.data import AtomicDataDict, from_ase

        transforms = self._transforms(model)
        frames = []
        # Geometry stays in float64, as its calculator passes it: the model casts what it derives from it.
        with default_dtype(torch.float64):
            for one in atoms:
                frame = from_ase(one)
                for transform in transforms:
                    frame = transform(frame)
                frames.append(frame)
            data = frames[0] if len(frames) == 1 else AtomicDataDict.batched_from_list(frames)
        return converted(data, device, torch.float64)

    def _transforms(self, model: Any) -> list[Any]:
        """Those of NequIP's own calculators."""
        from nequip.integrations.utils import basic_transforms

        names = model.metadata["type_names"].split()
        return basic_transforms(model.metadata, self.cutoff(model), names, {name: name for name in names})

    def calculator(self, model: Any, device: str) -> Any:
        from nequip.integrations.ase import NequIPCalculator

        return NequIPCalculator(model.eval(), device, transforms=self._transforms(model))

    def evaluate(self, model: torch.nn.Module, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        out = model({name: value.detach() for name, value in inputs.items()})
        found = out["stress"].reshape(-1, 3, 3) if stress else None
        return Outputs(out["total_energy"].reshape(-1), out["forces"], found, out["atomic_energy"].reshape(-1))

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        from nequip.model.modify_utils import modify

        # Without a dtype: parts of the model are float64 in every model.
        return modify(model, [{"modifier": self.modifiers[peer]}]).to(device)

    def in_compiled_form(self, model: torch.nn.Module, form: str, device: str) -> torch.nn.Module:
        """As ``nequip-compile --mode aotinductor --target ase``, on a small made-up crystal of the model's elements."""
        return AotInductorModel(model, self.inputs(model, [_small_crystal(self.species(model))], device), device)

    # Ghosts are in a cubic cell of twice the cutoff; each of their edges goes from an atom to its next image.

    def check_captured(self, model: Any) -> None:
        if model.is_compile_graph_model:
            raise UnsupportedError("this NequIP model compiles itself (compile_mode: compile); capture an eager one")

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        if model.training:
            return "training"
        return next((name for name in model.model_input_fields if name in inputs and name not in _TAKEN), "")

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        positions, edges = inputs["pos"].detach(), inputs["edge_index"]
        atoms, count = positions.shape[0], edges.shape[-1]
        numbers = inputs.get("num_atoms")
        if numbers is None:
            numbers = edges.new_full((1,), atoms)
        graphs = numbers.shape[0]
        batch, cell, shift = (inputs.get(name) for name in ("batch", "cell", "edge_cell_shift"))
        cells = positions.new_zeros(1, 3, 3) if cell is None else cell.detach().view(-1, 3, 3)
        if cells.shape[0] == 1:  # of all structures
            cells = cells.expand(graphs, 3, 3)
        if shift is None:
            if cell is not None:
                raise InputError("there is a cell and no edge_cell_shift; pass the cells between each edge's atoms")
            shift = positions.new_zeros(1, 3).expand(count, 3)
        if batch is None:
            if graphs != 1:
                raise InputError(
                    f"num_atoms is of {graphs} structures, and there is no batch; pass the structure of each atom"
                )
            batch = edges.new_zeros(1).expand(atoms)
        if len({positions.dtype, shift.dtype, cells.dtype}) > 1:
            raise InputError(
                f"pos is {positions.dtype}, edge_cell_shift {shift.dtype} and cell {cells.dtype}; expected one dtype"
            )
        fields = {
            "pos": Field(positions, "atoms", 0.0, each=(3,)),
            "atom_types": Field(inputs["atom_types"], "atoms", 0),
            "batch": Field(batch, "atoms", graphs, below="graphs"),
            "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
            "edge_cell_shift": Field(shift.detach(), "edges", along_x(1.0), each=(3,)),
            "cell": Field(cells, "graphs", cube(2 * cutoff), each=(3, 3)),
            "num_atoms": Field(numbers, "graphs", ghost_atoms),
        }
        return fields, Counts(atoms, count, graphs)

    def moving(self, model: Any, graph: AtomicGraph) -> dict[str, Tensor]:
        return {
            "pos": graph.positions,
            "edge_index": graph.edge_index,
            "edge_cell_shift": graph.unit_shifts,
            "cell": graph.cell.view(-1, 3, 3),
        }

    def answer(self, model: Any, inputs: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """With the inputs, as NequIP returns them; without a cell there is no stress."""
        if "cell" not in inputs and "stress" in found:
            found["stress"] = found["stress"].new_empty(0)
        return {**{name: inputs[name] for name in _TAKEN if name in inputs}, **found}


def _small_crystal(species: Sequence[int]) -> Atoms:
    from ase.build import bulk

    atoms = bulk("C", "diamond", 3.567, cubic=True)
    atoms.numbers = [species[place % len(species)] for place in range(len(atoms))]
    atoms.rattle(0.05, seed=0)
    return atoms


class AotInductorModel(torch.nn.Module):
    """NequIP's or Allegro's model as its compiled file computes it, for one structure a call and without training.

    Read in nequip 0.19.1, ``nequip/scripts/compile.py``. stock: the model that was compiled.
    """

    compiled: Any

    def __init__(self, stock: Any, data: dict[str, Any], device: str) -> None:
        from nequip.nn.compile import DictInputOutputWrapper
        from nequip.scripts._compile_utils import COMPILE_TARGET_DICT
        from nequip.utils.aot import aot_export_model

        super().__init__()
        self.stock, self.metadata = stock.eval(), stock.metadata
        target = COMPILE_TARGET_DICT["ase"]
        sizes = {of: torch.export.Dim(f"num_{of}s", min=2) for of in ("graph", "node", "edge")}
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.nequip.pt2")
            aot_export_model(
                model=self.stock,
                device=device,
                input_fields=target["input"],
                output_fields=target["output"],
                data=target["data_settings"](data),
                batch_map=target["batch_map_settings"](sizes),
                output_path=path,
            )
            # Not registered: its weights are in the file.
            loaded = torch._inductor.aoti_load_package(path)
        self.__dict__["compiled"] = DictInputOutputWrapper(loaded, target["input"], target["output"])

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.training:
            raise PeerError("a file of AOTInductor has no gradients of weights")
        return self.compiled(data)


# Allegro: its model, and its modifiers for the product's Triton and cuEquivariance forms. All else is NequIP's.
#
# Read in nequip-allegro 0.8.3, ``allegro/model/allegro_models.py`` and ``allegro/nn/_strided/_contract.py``.


class Allegro(NequIP):
    name = "allegro"
    modules = ("allegro", *NequIP.modules)
    install = "nequip-allegro==0.8.3"
    modifiers = {"cuequivariance": "enable_CuEquivarianceContracter", "triton": "enable_TritonContracter"}
    peers = tuple(modifiers)
    compiled: ClassVar[Mapping[str, tuple[str, ...]]] = {"aotinductor": ("stock", *modifiers)}

    def builder(self) -> Callable[..., torch.nn.Module]:
        from allegro.model import AllegroModel

        return AllegroModel

    def owns(self, model: torch.nn.Module) -> bool:
        """NequIP's class holds its modules."""
        return super().owns(model) and any("allegro." in type(module).__module__ for module in model.modules())


PACKAGE = NequIP()
