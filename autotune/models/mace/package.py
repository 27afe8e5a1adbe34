"""What Equitune knows of MACE, without importing it.

Which of its modules are replaced, how its node features change their layout, what is captured, and how its models are
built, loaded, fed and called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as outside_of_traces

from autotune.models.capture import along_x, cube
from autotune.models.layout import (
    FlatFeatures,
    ModelLayout,
    Part,
    TaughtGate,
    TransposedContraction,
    with_users_descriptors,
)
from autotune.models.linear import AcceleratedLinear
from autotune.models.neighbors import AtomicGraph
from autotune.models.package import Outputs, Package, Parameters, converted, default_dtype, dtype_of, numbers_of
from autotune.models.padding import Counts, Field, Fields, ghost_ends, ghost_pointer
from autotune.models.radial import AcceleratedCutoff, AcceleratedRadial, RadialBlock, is_cutoff
from autotune.models.replace import (
    ConvolutionBlock,
    Exchange,
    ExchangedConvolution,
    PackageProduct,
    PackageStandIn,
    check_e3nn,
    e3nn_class,
    full_name,
    home_of,
)
from autotune.models.species import SpeciesProduct, elements_of, types_of
from autotune.models.stand_ins import (
    ARRANGEMENTS,
    CONTRACTIONS,
    CONVOLUTIONS,
    CUTOFFS,
    LINEARS,
    PRODUCTS,
    RADIALS,
    AcceleratedConvolution,
    has_hooks,
)
from autotune.modules.rows import TunedContraction
from autotune.workload.workload import relayout
from kernelgen.arithmetic.contraction_couplings import fitted, polynomials
from kernelgen.compat import o3, runs_eagerly, without_autocast
from kernelgen.errors import UnsupportedError
from kernelgen.problem.other_kinds import ContractionProblem

if TYPE_CHECKING:
    from ase import Atoms

# MACE's symmetric contraction by a generated kernel, in place of the package's einsums.
#
# Read in mace-torch 0.3.16, ``mace/modules/symmetric_contraction.py``. MACE's weights belong to linearly dependent
# polynomials, the kernel's to a basis of them: each call multiplies the weights by a small matrix first.

# Couplings that are exact in float64 leave less than this of themselves (`fitted`). MACE's are float32's, though stored
# as float64, in a model converted from float32; and in part in one that was built after another in float32 by the same
# process, for cuequivariance keeps what it made of e3nn's default dtype.
EXACT = 1e-13


class AcceleratedContraction(PackageStandIn):
    """Replaces one ``SymmetricContraction`` of MACE.

    layout: ``mul_ir``, MACE's own, x [nodes, channels, components]; or ``ir_mul``, x [nodes, components * channels] and
    the result with components before channels too.
    """

    original: Any
    contraction: TunedContraction
    computed_by = "contraction"

    def __init__(
        self, original: Any, *, strict: bool | None = None, deterministic: bool = False, layout: str = "mul_ir"
    ) -> None:
        super().__init__()
        self.problem, self.layout = _problem_of(original), layout
        contraction = TunedContraction(self.problem, layout=layout, strict=strict)
        self._matrices: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._to_basis, self._inexact = _to_basis(original, self.problem)
        self._take_place_of(original)
        self._keep_children_of(original)
        # Not registered: parameters and names in checkpoints stay MACE's.
        self.__dict__["contraction"] = contraction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """y: one-hot rows [nodes, elements], as MACE's node attributes are, or the number of each node's element."""
        elements = y if y.dim() == 1 else elements_of(y)
        if elements is None or any(map(has_hooks, _holders(self.original))):
            return self._of_original(x, y)
        given = [weight for weight, _, _ in _parts(self.original)]
        if elements.is_cpu and runs_eagerly(x, elements, *given):
            # A structure has few of a model's elements: 4 of 89 take a fifteenth of the time.
            species, members = types_of(elements, len(given[0]))
            if len(members) < len(given[0]):
                occurring = elements.index_select(0, members)
                given, elements = [weight.index_select(0, occurring) for weight in given], species.elements
        # MACE's weights, of all blocks and degrees, as weights of the basis.
        weights = torch.cat(given, dim=1)
        with without_autocast(weights):
            weights = torch.matmul(self._matrix(weights), weights)
        return self.contraction.contract(x, weights, elements)

    def _of_original(self, x: Tensor, y: Tensor) -> Tensor:
        """What MACE's own module gives: for node attributes of which it weighs several elements, and where calling its
        parts makes their weights (pruning).
        """
        if y.dim() == 1:
            y = torch.nn.functional.one_hot(y.long(), len(next(_parts(self.original))[0])).to(x)
        if self.layout == "mul_ir":
            return self.original.forward(x, y)
        components = x.view(x.shape[0], self.problem.dim_in, self.problem.channels)
        out = self.original.forward(components.transpose(1, 2).contiguous(), y)
        return relayout(out, str(self.original.irreps_out), "mul_ir", "ir_mul")

    def _matrix(self, like: Tensor) -> Tensor:
        """[polynomials of the basis, MACE's]."""
        key = (like.device, like.dtype)
        if key not in self._matrices:
            with contextlib.nullcontext() if torch.compiler.is_compiling() else _for_later():
                self._matrices[key] = self._to_basis.to(*key)
        return self._matrices[key]

    def both_results(self, normal: Callable[..., list[Tensor]]) -> tuple[Tensor, Tensor]:
        nodes, like = 8, next(_parts(self.original))[0]
        (x,) = normal(like, (nodes, self.problem.channels, self.problem.dim_in))
        elements = torch.arange(nodes, device=like.device) * 3 % like.shape[0]
        attributes = torch.nn.functional.one_hot(elements, like.shape[0]).to(like)
        wanted = self.original.forward(x, attributes)
        if self.layout == "ir_mul":
            wanted = self._of_original(x := x.transpose(1, 2).flatten(1), attributes)
        found = self.forward(x, elements)
        # The kernel's couplings are not rounded: they differ from MACE's as much as these from exact ones.
        return (found.float(), wanted.float()) if self._inexact > EXACT else (found, wanted)

    def __getstate__(self) -> dict[str, Any]:
        # Matrices can be made again.
        return {**self.__dict__, "_matrices": {}}


@contextlib.contextmanager
def _for_later() -> Iterator[None]:
    """What is made in here serves calls with gradients too, though this one may be in inference mode, or be traced."""
    with outside_of_traces(), torch.inference_mode(False), torch.no_grad():
        yield


def _problem_of(original: Any) -> ContractionProblem:
    """The problem that MACE's module solves; UnsupportedError for other multiplicities than one for all irreps."""
    irreps_in, irreps_out = o3.Irreps(str(original.irreps_in)), o3.Irreps(str(original.irreps_out))
    channels = {mul for mul, _ in (*irreps_in, *irreps_out)}
    if len(channels) != 1:
        raise UnsupportedError(f"its irreps have different multiplicities: {irreps_in} and {irreps_out}")
    correlation = max(contraction.correlation for contraction in original.contractions)
    one_in, one_out = ("+".join(str(ir) for _, ir in irreps) for irreps in (irreps_in, irreps_out))
    return ContractionProblem(one_in, one_out, correlation, channels.pop())


def _holders(original: Any) -> Iterator[torch.nn.Module]:
    """The parts of MACE's module that hold its weights."""
    for contraction in original.contractions:
        yield from (contraction, contraction.weights)


def _parts(original: Any) -> Iterator[tuple[Tensor, int, int]]:
    """MACE's weights [elements, polynomials, channels], each with the output block and degree that it belongs to."""
    for block, contraction in enumerate(original.contractions):
        for place, weight in enumerate((contraction.weights_max, *contraction.weights)):
            yield weight, block, contraction.correlation - place


def _to_basis(original: Any, problem: ContractionProblem) -> tuple[Tensor, float]:
    """The matrix [polynomials of the basis, MACE's] that turns MACE's weights into the basis's; what `fitted` left."""
    basis = polynomials(problem)
    columns, inexact = [], 0.0
    for _, block, degree in _parts(original):
        tensor = original.contractions[block].U_tensors(degree)
        dim = problem.out[block].dim
        tensor = tensor.reshape(dim, *(problem.dim_in,) * degree, tensor.shape[-1])
        column = torch.zeros(len(basis), tensor.shape[-1], dtype=torch.float64)
        rows = [r for r, one in enumerate(basis) if (one.block, one.degree) == (block, degree)]
        column[rows], left = fitted(problem, block, degree, tensor)
        columns.append(column)
        inexact = max(inexact, left)
    return torch.cat(columns, dim=1), inexact


# MACE's interaction blocks: with the attribute ``conv_fusion`` they call ``conv_tp`` with the graph.
#
# Read in mace-torch 0.3.16, ``mace/modules/blocks.py``. Without the attribute a block gathers and sums itself.

# The value of ``conv_fusion`` that says whose convolution it is.
_OURS = "equitune"


class MaceConvolution(AcceleratedConvolution):
    """The convolution as MACE calls it."""

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        """``edge_index`` [2, edges]: senders, then receivers."""
        return super().forward(node_feats, edge_attrs, tp_weights, edge_index[0], edge_index[1])


class ConvertedConvolution(ExchangedConvolution):
    """The same, in the place of a library's that a conversion of MACE's put there."""

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(node_feats, edge_attrs, tp_weights, edge_index[0], edge_index[1])


class InteractionBlock(ConvolutionBlock):
    """All of MACE's interaction blocks."""

    module = "mace.modules.blocks"
    names = (
        "RealAgnosticInteractionBlock",
        "RealAgnosticResidualInteractionBlock",
        "RealAgnosticDensityInteractionBlock",
        "RealAgnosticDensityResidualInteractionBlock",
        "RealAgnosticAttResidualInteractionBlock",
        "RealAgnosticResidualNonLinearInteractionBlock",
    )
    product = "conv_tp"
    stand_in = MaceConvolution

    def matches(self, block: torch.nn.Module) -> bool:
        return super().matches(block) and not hasattr(block, "conv_fusion")

    def fuse(self, block: torch.nn.Module) -> None:
        block.conv_fusion = _OURS  # type: ignore[assignment]

    def unfuse(self, block: torch.nn.Module) -> bool:
        if block.__dict__.get("conv_fusion") != _OURS:
            return False
        del block.conv_fusion
        return True


class ConvertedBlock(Exchange):
    """An interaction block after ``convert_e3nn_cueq``, ``convert_e3nn_oeq`` or both: no weights are in its product."""

    product = InteractionBlock.product
    _LIBRARIES = {"cuequivariance_torch": "cuEquivariance", "openequivariance": "OpenEquivariance"}

    def library(self, block: torch.nn.Module) -> str:
        if not ConvolutionBlock.matches(_INTERACTION, block):
            return ""
        return self._LIBRARIES.get(type(getattr(block, self.product)).__module__.split(".")[0], "")

    def stand_in(self, block: Any, **options: Any) -> ExchangedConvolution:
        from mace.modules.irreps_tools import tp_out_irreps_with_instructions
        from mace.modules.wrapper_ops import get_layout

        irreps = (block.edge_irreps, block.edge_attrs_irreps)
        out, instructions = tp_out_irreps_with_instructions(*irreps, block.target_irreps)
        options["layout"] = get_layout(block.cueq_config)
        return ConvertedConvolution(
            getattr(block, self.product),
            **{"irreps_in1": irreps[0], "irreps_in2": irreps[1], "irreps_out": out, "instructions": instructions},
            **options,
        )

    def convolved(self, block: Any, x: Tensor, y: Tensor, weights: Tensor, edges: Tensor) -> Tensor:
        product = getattr(block, self.product)
        if hasattr(block, "conv_fusion"):
            return product(x, y, weights, edges)
        messages = product(x[edges[0]], y, weights)
        return messages.new_zeros(len(x), messages.shape[1]).index_add(0, edges[1], messages)

    def fuse(self, block: torch.nn.Module) -> None:
        if not hasattr(block, "conv_fusion"):  # the conversion's own value stays
            _INTERACTION.fuse(block)


_INTERACTION = InteractionBlock()


def contraction_of_mace(module: torch.nn.Module) -> str | None:
    """Empty for MACE's symmetric contraction, the reason for one that must stay; None for any other module."""
    if full_name(type(module)) != "mace.modules.symmetric_contraction.SymmetricContraction":
        return None
    if "forward" in module.__dict__:
        return "it has a forward of its own"
    return "its parts have hooks, which may make their weights" if any(map(has_hooks, _holders(module))) else ""


# MACE's models in layout ``ir_mul``: every module between two convolutions, and the descriptors that a model gives.
#
# Read in mace-torch 0.3.16, ``mace/modules/models.py``, ``blocks.py`` and ``gate.py``.

_HOME = "mace.modules"
_PATCHED = "autotune.models.mace.patched"
_MODELS = ("MACE", "ScaleShiftMACE", "AtomicDipolesMACE", "AtomicDielectricMACE", "EnergyDipolesMACE")
_READOUTS = (
    *("LinearReadoutBlock", "NonLinearReadoutBlock", "NonLinearBiasReadoutBlock", "GeneralNonLinearBiasReadoutBlock"),
    *("LinearDipoleReadoutBlock", "NonLinearDipoleReadoutBlock"),
    *("LinearDipolePolarReadoutBlock", "NonLinearDipolePolarReadoutBlock"),
)
# Modules of e3nn and MACE in these blocks that act on scalars alone, or hold no features.
_INDIFFERENT = ("Activation", "RadialMLP")


class MaceLayout(ModelLayout):
    """All of MACE's own models."""

    def matches(self, model: torch.nn.Module) -> bool:
        homes = (f"{_HOME}.models", _PATCHED)
        return home_of(type(model)) in homes and type(model).__qualname__ in _MODELS

    def parts(self, model: Any) -> Iterator[Part]:
        embedding = model.node_embedding.linear
        yield Part(model.node_embedding, "linear", "node_embedding.linear", LINEARS, _linear(embedding))
        radial = model.radial_embedding
        if is_cutoff(getattr(radial, "cutoff_fn", None)) and "forward" not in radial.__dict__:
            yield Part(radial, "cutoff_fn", "radial_embedding.cutoff_fn", CUTOFFS, AcceleratedCutoff)
        for number, (interaction, product) in enumerate(zip(model.interactions, model.products, strict=True)):
            yield from _parts_of_interaction(interaction, f"interactions.{number}.")
            yield from _parts_of_product(product, interaction.irreps_out, f"products.{number}.")
        for number, readout in enumerate(model.readouts):
            _check_class(readout, _READOUTS)
            last = getattr(readout, "linear_2", None) or readout.linear
            if any(mul > 1 and ir.l > 0 for mul, ir in last.irreps_out):
                raise UnsupportedError(f"readouts.{number} gives several copies of an irrep: {last.irreps_out}")
            yield from _other_parts(readout, f"readouts.{number}.")

    def finish(self, model: Any) -> None:
        has_vectors = any(ir.l > 0 for product in model.products for _, ir in product.linear.irreps_out)
        if not _take_patched_class(model) and has_vectors:
            model.register_forward_hook(descriptors_for_users)
        for readout in model.readouts:
            if getattr(readout, "num_heads", 1) > 1:
                _take_patched_class(readout)

    def undo(self, model: Any) -> None:
        for module in (model, *model.readouts):
            if home_of(type(module)) == _PATCHED:
                module.__class__ = type(module).__mro__[1]
        for key, hook in list(model._forward_hooks.items()):
            if hook is descriptors_for_users:
                del model._forward_hooks[key]


def _take_patched_class(module: torch.nn.Module) -> bool:
    """Whether there is one for it. A model of a torch.package has classes of its own; a forward of its own stays."""
    kind = type(module)
    patched = getattr(importlib.import_module(_PATCHED), kind.__qualname__, None)
    if patched is None or patched.__mro__[1] is not kind or "forward" in module.__dict__:
        return False
    module.__class__ = patched
    return True


def descriptors_for_users(model: Any, _: Any, out: dict[str, Tensor]) -> dict[str, Tensor]:
    """The hook of a model in ``ir_mul`` whose class stays."""
    return with_users_descriptors(model, out)


def _check_class(block: torch.nn.Module, names: tuple[str, ...]) -> None:
    kind = type(block)
    is_maces = home_of(kind) in (f"{_HOME}.blocks", _PATCHED) and kind.__qualname__ in names
    if not is_maces or "forward" in block.__dict__:
        raise UnsupportedError(f"{kind.__module__}.{kind.__qualname__} is no block of MACE that Equitune knows")
    if any(map(has_hooks, block.modules())):
        raise UnsupportedError(f"a {kind.__qualname__} has hooks, which would see the other layout")
    config = getattr(block, "cueq_config", None)
    if config is not None and config.enabled:
        raise UnsupportedError("MACE converted the model for cuEquivariance")


def _linear(module: torch.nn.Module) -> type[AcceleratedLinear]:
    check_e3nn(module, o3.Linear)
    return AcceleratedLinear


def _parts_of_interaction(block: Any, prefix: str) -> Iterator[Part]:
    if not _INTERACTION.matches(block):
        raise UnsupportedError(f"{prefix.rstrip('.')} is a {type(block).__name__}, or its product is not e3nn's")
    _check_class(block, _INTERACTION.names)
    convolution = functools.partial(MaceConvolution, layout="ir_mul")
    check_e3nn(block.conv_tp, o3.TensorProduct)
    yield Part(block, "conv_tp", f"{prefix}conv_tp", CONVOLUTIONS, convolution, _INTERACTION)
    yield Part(block, "reshape", f"{prefix}reshape", ARRANGEMENTS, FlatFeatures)
    yield from _other_parts(block, prefix, ("conv_tp", "reshape"))


def _parts_of_product(block: Any, irreps_in: Any, prefix: str) -> Iterator[Part]:
    _check_class(block, ("EquivariantProductBasisBlock",))
    irreps = {"irreps_in": str(irreps_in), "irreps_out": str(block.linear.irreps_in)}
    contraction = functools.partial(_contraction, **irreps)
    name = "symmetric_contractions"
    yield Part(block, name, prefix + name, CONTRACTIONS, contraction)
    yield from _other_parts(block, prefix, (name,))


def _contraction(
    original: Any, irreps_in: str, irreps_out: str, **options: Any
) -> AcceleratedContraction | TransposedContraction:
    """The generated kernel; MACE's own where there is none, and where MACE has prepared the model for torch.compile."""
    if contraction_of_mace(original) == "":
        try:
            return AcceleratedContraction(original, layout="ir_mul", **options)
        except UnsupportedError:
            pass
    return TransposedContraction(original, irreps_in, irreps_out)


def _other_parts(block: torch.nn.Module, prefix: str, done: tuple[str, ...] = ()) -> Iterator[Part]:
    """Linear layers, products with species and gates; UnsupportedError for what may depend on the layout."""
    for attribute, child in block._modules.items():
        if child is None or attribute in done:
            continue
        name = prefix + attribute
        if e3nn_class(child, o3.Linear) is not None:
            yield Part(block, attribute, name, LINEARS, _linear(child))
        elif e3nn_class(child, o3.TensorProduct) is not None:
            check_e3nn(child, o3.TensorProduct)
            yield Part(block, attribute, name, PRODUCTS, SpeciesProduct)
        elif type(child).__name__ == "GatedEquivariantBlock" and hasattr(child, "_layout_is_ir_mul"):
            yield Part(block, attribute, name, ARRANGEMENTS, TaughtGate)
        elif home_of(type(child)) == "e3nn.nn._fc" and type(child).__name__ == "FullyConnectedNet":
            yield Part(block, attribute, name, RADIALS, AcceleratedRadial)
        elif type(child).__name__ not in _INDIFFERENT:
            raise UnsupportedError(f"{name} is a {type(child).__name__}, which takes e3nn's layout")


# MACE's models of energies. Read in mace-torch 0.3.16, ``mace/modules/models.py`` and ``utils.py``.

_CAPTURED_HOME = "mace.modules.models"
# Options of a call that a captured step follows; with others the model itself is called.
_OPTIONS = ("training", "compute_force", "compute_virials", "compute_stress", "compute_displacement")
# MACE's calculator names these in every call.
_OPTIONS_THAT_MAY_BE_OFF = ("compute_hessian", "compute_edge_forces", "compute_atomic_stresses", "lammps_mliap")


@functools.cache
def _first(length: int) -> Tensor:
    """A row that is one at its first place, which for MACE is an atom of the first element."""
    return torch.nn.functional.one_hot(torch.tensor(0), length)


def extended_cell(graph: AtomicGraph, cutoff: float | Tensor) -> Tensor:
    """The cell [3, 3] by which MACE divides stress: in directions that are not periodic longer than anything in it.

    Read in mace 0.3.16, ``mace/data/neighborhood.py``.
    """
    cell, identity = graph.cell, torch.eye(3, dtype=graph.cell.dtype, device=graph.cell.device)
    given = torch.where((cell != 0).any(), cell, identity)
    width = (graph.positions.abs().amax() + 1) * 5 * cutoff
    return torch.where(graph.pbc[:, None], given, width * identity)


# MACE: ``ScaleShiftMACE`` and its conversions to cuEquivariance and OpenEquivariance, one at a time or both.

# Hyperparameters that all packages have, by MACE's names.
_MACES_NAMES = {
    "cutoff": "r_max",
    "interaction": "interaction_cls",
    "interaction_first": "interaction_cls_first",
    "mlp_irreps": "MLP_irreps",
    "radial_mlp": "radial_MLP",
    "scale": "atomic_inter_scale",
    "shift": "atomic_inter_shift",
}


class Mace(Package):
    name = "mace"
    title = "MACE"
    modules = ("mace",)
    install = "mace-torch==0.3.16"
    excludes = ("nequip", "sevenn")
    peers = ("cuequivariance", "openequivariance", "cuequivariance+openequivariance")
    joined = ("cuequivariance",)
    compiled: ClassVar[Mapping[str, tuple[str, ...]]] = {"compiled": ("stock", "cuequivariance")}
    stress_is_apart = True
    neighbor_function = ("mace.data.atomic_data", "get_neighborhood")

    blocks = (_INTERACTION,)
    exchanges = (ConvertedBlock(),)
    # MACE multiplies what the network gives by a cutoff, which may as well multiply what goes into its last layer.
    radial_blocks = (RadialBlock(InteractionBlock.module, InteractionBlock.names, "conv_tp_weights", "conv_tp"),)
    products = (PackageProduct(contraction_of_mace, AcceleratedContraction, CONTRACTIONS),)
    layouts = (MaceLayout(),)

    classes = (f"{_CAPTURED_HOME}.MACE", f"{_CAPTURED_HOME}.ScaleShiftMACE")
    results = {
        **dict.fromkeys(("energy", "interaction_energy", "virials", "stress", "displacement"), "graphs"),
        "contributions": "graphs",
        **dict.fromkeys(("node_energy", "forces", "node_feats"), "atoms"),
        # None in every answer that a captured step gives.
        **dict.fromkeys(("edge_forces", "atomic_virials", "atomic_stresses", "hessian"), "atoms"),
    }

    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        from mace import modules

        given = {_MACES_NAMES.get(name, name): value for name, value in parameters.items()}
        numbers, heads = numbers_of(given.pop("species")), len(given.get("heads", ()))
        for name in ("interaction_cls", "interaction_cls_first"):
            given[name] = modules.interaction_classes[given[name]]
        for name in given.keys() & {"hidden_irreps", "MLP_irreps", "edge_irreps"}:
            given[name] = o3.Irreps(given[name])
        if heads:
            given |= {name: [given[name]] * heads for name in ("atomic_inter_scale", "atomic_inter_shift")}
        torch.manual_seed(seed)
        return modules.ScaleShiftMACE(
            num_elements=len(numbers),
            atomic_energies=np.zeros((heads, len(numbers)) if heads else len(numbers)),
            atomic_numbers=list(numbers),
            gate=torch.nn.functional.silu,
            **given,
        )

    def load(self, path: Path) -> torch.nn.Module:
        import mace.modules  # noqa: F401  (the file names its classes)

        return torch.load(path, map_location="cpu", weights_only=False)

    def owns(self, model: torch.nn.Module) -> bool:
        return type(model).__module__.startswith("mace.")

    def cutoff(self, model: Any) -> float:
        return float(model.r_max)

    def species(self, model: Any) -> tuple[int, ...]:
        return tuple(int(number) for number in model.atomic_numbers)

    def inputs(self, model: Any, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        from mace import data
        from mace.tools import torch_geometric, utils

        table = utils.AtomicNumberTable(list(self.species(model)))
        # What is embedded beside the elements, such as a structure's charge, by its name in ``info``.
        embedded = tuple(getattr(model, "embedding_specs", None) or ())
        keys = data.KeySpecification(info_keys={name: name for name in embedded})
        heads = getattr(model, "heads", None) or ["Default"]
        with default_dtype(dtype_of(model)):
            graphs = [
                data.AtomicData.from_config(
                    data.config_from_atoms(one, key_specification=keys, head_name=one.info.get("head", heads[0])),
                    z_table=table,
                    cutoff=self.cutoff(model),
                    heads=heads,
                )
                for one in atoms
            ]
            batch = torch_geometric.Batch.from_data_list(graphs)
        # A model reads no labels; absent ones are zeros of no use.
        read = ("batch", "cell", "edge_index", "head", "node_attrs", "pbc", "positions", "ptr", "shifts", "unit_shifts")
        found = {name: value for name, value in batch.to_dict().items() if name in (*read, *embedded)}
        return converted(found, device, dtype_of(model))

    def calculator(self, model: Any, device: str) -> Any:
        from mace.calculators import MACECalculator

        name = str(dtype_of(model)).removeprefix("torch.")
        head = getattr(model, "heads", [None])[0]
        made = MACECalculator(models=model, device=device, default_dtype=name, head=head)
        made.use_compile = _is_compiled(model)  # it pads the inputs then
        return made

    def evaluate(self, model: torch.nn.Module, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        # The model writes into the dictionary, and positions must not keep what an earlier call recorded.
        given = inputs | {"positions": inputs["positions"].detach()}
        if _is_compiled(model):  # as its calculator calls it
            given["positions"].requires_grad_()
            training = True
        out = model(given, training=training, compute_force=True, compute_stress=stress)
        return Outputs(out["energy"], out["forces"], out["stress"] if stress else None, out.get("node_energy"))

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        # Without the number: its conversion to cuEquivariance fuses the convolution only for "cuda".
        kind = torch.device(device).type
        with default_dtype(dtype_of(model)):
            if peer == "cuequivariance":
                from mace.cli.convert_e3nn_cueq import run
            elif peer == "openequivariance":
                from mace.cli.convert_e3nn_oeq import run
            else:
                from mace.cli.convert_e3nn_hybrid import run
            return run(model, device=kind)

    def in_compiled_form(self, model: torch.nn.Module, form: str, device: str) -> torch.nn.Module:
        """As ``MACECalculator(compile_mode="default")``: forces are a part of the compiled graph."""
        from mace.tools.compile import configure_autograd_for_compile, disable_e3nn_codegen, prepare, simplify
        from mace.tools.scripts_utils import extract_model

        is_converted = any(getattr(getattr(m, "cueq_config", None), "enabled", False) for m in model.modules())
        with default_dtype(dtype_of(model)):
            if is_converted:
                configure_autograd_for_compile(allow_autograd=True)
                with disable_e3nn_codegen():
                    made = simplify(model)
            else:
                made = prepare(extract_model)(model=model, map_location=device)
        made.compile(mode="default", fullgraph=not is_converted)
        return made

    # Ghosts are in a cubic cell of twice the cutoff; each of their edges goes from an atom to its next image.

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        if options.get("training"):
            return "training"
        if "displacement" in inputs:
            return "displacement"
        if not (torch.is_grad_enabled() or options.get("compute_force", True)):
            return "no gradients"  # parts such as MACE's adapters compute in another way then
        asked = (name for name, value in options.items() if value and name not in _OPTIONS)
        unknown = (name for name in options if name not in (*_OPTIONS, *_OPTIONS_THAT_MAY_BE_OFF))
        return next(asked, "") or next(unknown, "")

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        edges, positions, pointer = inputs["edge_index"], inputs["positions"].detach(), inputs["ptr"]
        counts = Counts(positions.shape[0], edges.shape[-1], pointer.numel() - 1)
        elements = len(model.atomic_numbers)
        fields = {
            "positions": Field(positions, "atoms", 0.0, each=(3,)),
            "node_attrs": Field(inputs["node_attrs"].detach(), "atoms", _first(elements), each=(elements,)),
            "batch": Field(inputs["batch"], "atoms", counts.graphs, below="graphs"),
            "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
            "shifts": Field(inputs["shifts"].detach(), "edges", along_x(2 * cutoff), each=(3,)),
            "unit_shifts": Field(inputs["unit_shifts"].detach(), "edges", along_x(1.0), each=(3,)),
            "cell": Field(inputs["cell"].detach().reshape(-1, 3), "graphs", cube(2 * cutoff), rows=3, each=(3,)),
            "ptr": Field(pointer, "graphs", ghost_pointer, extra=1),
        }
        if "head" in inputs:
            fields["head"] = Field(inputs["head"], "graphs", 0)
        for name, spec in getattr(model, "embedding_specs", {}).items():
            fields[name] = Field(inputs[name].detach(), "graphs" if spec["per"] == "graph" else "atoms", 0)
        return fields, counts

    def training_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**options, "training": True}

    def moving(self, model: Any, graph: AtomicGraph) -> dict[str, Tensor]:
        return {
            "positions": graph.positions,
            "edge_index": graph.edge_index,
            "shifts": graph.offsets,
            "unit_shifts": graph.unit_shifts,
            "cell": graph.cell.reshape(-1, 3) if graph.cell.ndim == 3 else extended_cell(graph, model.r_max),
        }


def _is_compiled(model: torch.nn.Module) -> bool:
    return getattr(model, "_compiled_call_impl", None) is not None


PACKAGE = Mace()
