"""What Equitune knows of SevenNet, without importing it.

Which of its modules are replaced, how its node features change their layout, what is captured, and how its models are
built, loaded, fed and called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotune.errors import PeerError
from autotune.models.capture import along_x
from autotune.models.layout import IrMulGate, ModelLayout, Part, check_same, outline
from autotune.models.linear import AcceleratedLinear
from autotune.models.neighbors import AtomicGraph
from autotune.models.package import (
    Outputs,
    Package,
    Parameters,
    converted,
    default_dtype,
    dtype_of,
    numbers_of,
    quietly,
)
from autotune.models.padding import Counts, Field, Fields, ghost_ends, triple_product
from autotune.models.radial import AcceleratedCutoff, AcceleratedRadial, RadialBlock, is_cutoff
from autotune.models.replace import RetypedBlock, check_e3nn, e3nn_class, home_of, retype, take_type_back
from autotune.models.species import SpeciesProduct
from autotune.models.stand_ins import (
    ARRANGEMENTS,
    CONVOLUTIONS,
    CUTOFFS,
    LINEARS,
    PRODUCTS,
    RADIALS,
    AcceleratedConvolution,
    has_hooks,
)
from kernelgen.compat import FullyConnectedNet, o3
from kernelgen.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from ase import Atoms

# SevenNet's ``IrrepsConvolution``. Read in sevenn 0.13.0, ``sevenn/nn/convolution.py``.


class IrrepsConvolution(RetypedBlock):
    """The block with the radial network, the product and the sum over a node's edges."""

    module = "sevenn.nn.convolution"
    names = ("IrrepsConvolution",)
    product = "convolution"
    fused = "autotune.models.sevennet.patched:FusedIrrepsConvolution"


_CONVOLUTION = IrrepsConvolution()


# SevenNet's models in layout ``ir_mul``: every module that takes or gives node features.
#
# Read in sevenn 0.13.0, ``sevenn/model_build.py`` and ``sevenn/nn/``. A model is a sequence of modules that pass on a
# dictionary; node features are scalars before the first layer and after the last.

_HOME = "sevenn.nn."
_COMPILABLE = "autotune.models.sevennet.patched:CompilableSequential"
# Modules that hold no node features, or scalars alone.
_INDIFFERENT = (
    *("EdgePreprocess", "EdgeEmbedding", "OnehotEmbedding", "FCN_e3nn", "AtomReduce", "Rescale", "SpeciesWiseRescale"),
    *("ModalWiseRescale", "ForceOutput", "ForceStressOutput", "ForceStressOutputFromEdge", "_ModalInputPrepare"),
    "MLIAPGhostExchangeModule",
)


class SevenNetLayout(ModelLayout):
    """SevenNet's sequence of modules."""

    def matches(self, model: torch.nn.Module) -> bool:
        kind = f"{home_of(type(model))}:{type(model).__qualname__}"
        return kind in (f"{_HOME}sequential:AtomGraphSequential", _COMPILABLE)

    def parts(self, model: Any) -> Iterator[Part]:
        walk = _Walk()
        for name, module in model._modules.items():
            yield from walk.parts(name, module)
        if any(degree > 0 for degree, _ in outline(walk.features)):
            raise UnsupportedError(f"the model gives features {walk.features}, which users may read")

    def finish(self, model: Any) -> None:
        """What users see are scalars."""
        if "forward" not in model.__dict__:
            retype(model, _COMPILABLE)

    def undo(self, model: torch.nn.Module) -> None:
        take_type_back(model, _COMPILABLE)


class _Walk:
    """Goes through the modules of a model in their order. features: irreps of the node features there."""

    def __init__(self) -> None:
        self.features = ""
        self.connection = ""

    def parts(self, name: str, module: Any) -> Iterator[Part]:
        kind = type(module)
        if not home_of(kind).startswith(_HOME) or "forward" in module.__dict__:
            raise UnsupportedError(f"{name} is a {kind.__name__}, or has a forward, that Equitune does not know")
        if kind.__name__ in _INDIFFERENT:
            if is_cutoff(getattr(module, "cutoff_function", None)):
                yield Part(module, "cutoff_function", f"{name}.cutoff_function", CUTOFFS, AcceleratedCutoff)
            return
        if any(map(has_hooks, module.modules())):
            raise UnsupportedError(f"{name} has hooks, which would see the other layout")
        known = {
            "IrrepsLinear": self._linear,
            "SelfConnectionLinearIntro": self._linear,
            "SelfConnectionIntro": self._product,
            "SelfConnectionOutro": self._sum,
            "IrrepsConvolution": self._convolution,
            "EquivariantGate": self._gate,
        }
        if kind.__name__ not in known:
            raise UnsupportedError(f"{name} is a {kind.__name__}, which takes e3nn's layout")
        yield from known[kind.__name__](name, module)

    def _linear(self, name: str, module: Any) -> Iterator[Part]:
        linear = module.linear
        check_e3nn(linear, o3.Linear)
        given = self.features or str(linear.irreps_in)
        if getattr(module, "num_modalities", 0) > 1 and self.features:
            given += f"+{module.num_modalities}x0e"
        kind = functools.partial(AcceleratedLinear, irreps_in=given)
        yield Part(module, "linear", f"{name}.linear", LINEARS, kind)
        if type(module).__name__ == "IrrepsLinear":
            self.features = str(linear.irreps_out)
        else:
            self.connection = str(linear.irreps_out)

    def _product(self, name: str, module: Any) -> Iterator[Part]:
        product = module.fc_tensor_product
        check_e3nn(product, o3.TensorProduct)
        check_same(self.features, product.irreps_in1, name)
        yield Part(module, "fc_tensor_product", f"{name}.fc_tensor_product", PRODUCTS, SpeciesProduct)
        self.connection = str(product.irreps_out)

    def _sum(self, name: str, module: Any) -> Iterator[Part]:
        check_same(self.connection, self.features, name)
        yield from ()

    def _convolution(self, name: str, module: Any) -> Iterator[Part]:
        product = module.convolution
        check_e3nn(product, o3.TensorProduct)
        check_same(self.features, product.irreps_in1, name)
        kind = functools.partial(AcceleratedConvolution, layout="ir_mul")
        yield Part(module, "convolution", f"{name}.convolution", CONVOLUTIONS, kind, _CONVOLUTION)
        if e3nn_class(module.weight_nn, FullyConnectedNet) is None:
            raise UnsupportedError(f"{name} has a radial network that is a {type(module.weight_nn).__name__}")
        yield Part(module, "weight_nn", f"{name}.weight_nn", RADIALS, AcceleratedRadial)
        self.features = str(product.irreps_out)

    def _gate(self, name: str, module: Any) -> Iterator[Part]:
        check_same(self.features, module.gate.irreps_in, name)
        yield Part(module, "gate", f"{name}.gate", ARRANGEMENTS, IrMulGate)
        self.features = str(module.gate.irreps_out)


# SevenNet's models. Read in sevenn 0.13.0, ``sevenn/nn/sequential.py``, ``linear.py`` and ``force_output.py``.
#
# The last two modules of a model wait for the device, to know how many structures there are; here it is known.

_CAPTURED_HOME = "sevenn.nn.sequential.AtomGraphSequential"
# SevenNet's smallest volume, for structures without a cell.
_LEAST_VOLUME = 1e-3
_OVERWRITTEN = ("x", "node_attr")
_OF_A_GRAPH = ("inferred_total_energy", "inferred_stress")


# SevenNet: its sequential model, and the convolutions that it can take from other packages.

# The switch of the configuration that takes a convolution from another package.
_SWITCH: dict[str, dict[str, Any]] = {
    "cuequivariance": {"cuequivariance_config": {"use": True}},
    "openequivariance": {"use_oeq": True},
    "flashtp": {"use_flash_tp": True},
}
# The name under which a model remembers what it was built from: a fast path builds it again.
ORIGIN = "_equitune_configuration"
# Order of its six stress components in the symmetric matrix.
VOIGT = [[0, 3, 5], [3, 1, 4], [5, 4, 2]]


class SevenNet(Package):
    name = "sevennet"
    title = "SevenNet"
    modules = ("sevenn",)
    install = "sevenn==0.13.0"
    peers = tuple(_SWITCH)
    neighbor_function = ("sevenn.train.dataload", "_graph_build_f")

    blocks = (_CONVOLUTION,)
    radial_blocks = (RadialBlock(_CONVOLUTION.module, _CONVOLUTION.names, "weight_nn", _CONVOLUTION.product),)
    layouts = (SevenNetLayout(),)

    classes = (_CAPTURED_HOME,)
    methods = ("forward", "__call__", "_preprocess")
    results = {
        **dict.fromkeys(_OF_A_GRAPH, "graphs"),
        **dict.fromkeys(("atomic_energy", "inferred_force", "inferred_atomic_virial"), "atoms"),
    }
    # What modules leave in the data beside their results, the first two in the place of inputs.
    left_out = frozenset(
        (
            *(*_OVERWRITTEN, "atom_type", "scaled_atomic_energy", "edge_length", "edge_embedding", "edge_attr"),
            *("modal_type", "modal_attr"),
        )
    )

    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        from ase.data import chemical_symbols
        from sevenn import _const, util

        given = dict(parameters)
        numbers = numbers_of(given.pop("species"))
        modalities = given.pop("modalities", ())
        configuration = {**_const.DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG, **given}
        if modalities:
            configuration |= _of_modalities(modalities, len(numbers), given["shift"])
        configuration |= util.chemical_species_preprocess([chemical_symbols[number] for number in numbers])
        torch.manual_seed(seed)
        return _built(configuration)

    def load(self, path: Path) -> torch.nn.Module:
        from sevenn.util import load_checkpoint

        checkpoint = load_checkpoint(str(path))
        model = checkpoint.build_model()
        setattr(model, ORIGIN, checkpoint.config)
        return model

    def in_dtype(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """Built again for float64 where its configuration is known: a cast would keep couplings rounded to float32."""
        configuration = getattr(model, ORIGIN, None)
        if dtype != torch.float64 or configuration is None:
            return encoded_in_dtype(model, dtype)
        with default_dtype(dtype):
            made = _built(configuration)
        _copy_weights(model, made)
        return made.train(model.training)

    def owns(self, model: torch.nn.Module) -> bool:
        return type(model).__module__.startswith("sevenn.")

    def cutoff(self, model: Any) -> float:
        return float(model.cutoff)

    def species(self, model: Any) -> tuple[int, ...]:
        return tuple(number for number in sorted(model.type_map) if number)

    def inputs(self, model: Any, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        from sevenn.atom_graph_data import AtomGraphData
        from sevenn.train.dataload import unlabeled_atoms_to_graph
        from torch_geometric.data import Batch

        graphs = []
        for one in atoms:
            arrays = unlabeled_atoms_to_graph(one.copy(), self.cutoff(model))
            vectors = torch.from_numpy(arrays["edge_vec"])
            graphs.append(AtomGraphData.from_numpy_dict(arrays))
            graphs[-1]["edge_vec"] = vectors  # which the package rounds to float32
            if model.modal_map:
                graphs[-1]["data_modality"] = one.info.get("data_modality", _first_modality(model))
        batch = Batch.from_data_list(graphs, exclude_keys=["data_info"])
        return converted(batch.to_dict(), device, dtype_of(model))

    def calculator(self, model: Any, device: str) -> Any:
        from sevenn.calculator import SevenNetCalculator

        with quietly():
            return SevenNetCalculator(model, file_type="model_instance", device=device, modal=_first_modality(model))

    def evaluate(self, model: Any, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        # Its calculator evaluates one structure without batches, its training loop batches.
        batched = training or inputs["num_atoms"].numel() > 1
        if model.is_batch_data != batched:
            model.set_is_batch_data(batched)
        given = {name: value.detach() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        if batched:
            given["cell_volume"] = given["cell_volume"].clone()  # it is written to
        elif "data_modality" in given:
            (given["data_modality"],) = given["data_modality"]
        if model.modal_map:  # read as attributes of the data
            from sevenn.atom_graph_data import AtomGraphData

            given = AtomGraphData(**given)
        out = model(given)
        # Of the other sign than ASE's.
        found = -out["inferred_stress"].reshape(-1, 6)[:, VOIGT] if stress else None
        nodes = out["atomic_energy"].reshape(-1)
        return Outputs(out["inferred_total_energy"].reshape(-1), out["inferred_force"], found, nodes)

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        configuration = getattr(model, ORIGIN, None)
        if configuration is None:
            raise PeerError(f"{peer}: SevenNet builds the model again for it, from hyperparameters that are not known")
        if torch.device(device).type != "cuda":
            raise PeerError(f"{peer}: SevenNet takes it on a CUDA device only")
        dtype = dtype_of(model)
        with default_dtype(dtype):
            made = _built({**configuration, **_SWITCH[peer]}).to(device, dtype)
        _copy_weights(model, made)
        made.train(model.training)
        return made

    # The edges of ghosts are vectors of twice the cutoff.

    def check_captured(self, model: Any) -> None:
        last = list(model)[-2:]
        if [type(module).__name__ for module in last] != ["AtomReduce", "ForceStressOutputFromEdge"]:
            names = " and ".join(type(module).__name__ for module in last)
            raise UnsupportedError(
                f"this SevenNet model ends in {names}; capture takes serial models, which end in AtomReduce and "
                "ForceStressOutputFromEdge"
            )

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        return "training" if model.training else next(iter(options), "")

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        edges, vectors, numbers = inputs["edge_index"], inputs["edge_vec"].detach(), inputs["atomic_numbers"]
        kinds = model._atomic_numbers_to_onehot(numbers) if model.eval_type_map else inputs["x"]
        volume = torch.as_tensor(inputs["cell_volume"]).reshape(-1)
        counts = Counts(numbers.shape[0], edges.shape[-1], volume.shape[0] if model.is_batch_data else 1)
        if "num_atoms" in inputs and model.is_batch_data and len(inputs["num_atoms"].reshape(-1)) != counts.graphs:
            raise InputError(
                f"cell_volume has {counts.graphs} numbers; expected {len(inputs['num_atoms'])} as num_atoms"
            )
        batch = inputs["batch"] if model.is_batch_data else edges.new_zeros(1).expand(counts.atoms)
        fields = {
            "x": Field(kinds, "atoms", 0),
            "batch": Field(batch, "atoms", counts.graphs, below="graphs"),
            "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
            "edge_vec": Field(vectors, "edges", along_x(2 * cutoff), each=(3,)),
            "cell_volume": Field(volume, "graphs", 1.0),
        }
        if model.modal_map:
            fields["modal_type"] = Field(_modal_types(model, inputs, counts.graphs, numbers.device), "graphs", 0)
        return fields, counts

    def compute(self, model: Any, given: dict[str, Tensor], size: Counts, options: Mapping[str, Any]) -> dict[str, Any]:
        given["edge_vec"].requires_grad_()
        if not model.is_batch_data and "modal_type" in given:
            # The real structure's, for all atoms; a number would be read on the host.
            given["modal_type"] = given["modal_type"][:1]
        data = with_energies(model, given, size.graphs)
        energy, vectors = data["inferred_total_energy"].sum(), data["edge_vec"]
        (by_edge,) = torch.autograd.grad(energy, vectors, create_graph=model.training)
        return data | forces_and_stress(model, data, by_edge, size)

    def moving(self, model: Any, graph: AtomicGraph) -> dict[str, Tensor]:
        return {
            "edge_index": graph.edge_index,
            "edge_vec": graph.vectors,
            "cell_volume": triple_product(graph.cell).abs().reshape(-1),
        }

    def answer(self, model: Any, inputs: Any, found: dict[str, Any]) -> dict[str, Any]:
        """With the inputs that SevenNet returns as they are; for a model that takes no batches without a structure's
        number.
        """
        if not model.is_batch_data:
            found |= {name: found[name][0] for name in _OF_A_GRAPH}
        to_dict: Callable[[], dict[str, Any]] | None = getattr(inputs, "to_dict", None)
        given = dict(inputs) if to_dict is None else to_dict()
        return {**{name: value for name, value in given.items() if name not in _OVERWRITTEN}, **found}


def _modal_types(model: Any, inputs: Mapping[str, Any], graphs: int, device: torch.device) -> Tensor:
    """The place of each structure's modality among the model's, int64 [graphs]."""
    if not model.eval_modal_map:
        return inputs["modal_type"].reshape(-1)
    named = inputs.get("data_modality")
    names = [named] if isinstance(named, str) else list(named or ())
    if len(names) != graphs or not set(names) <= set(model.modal_map):
        raise InputError(f"data_modality is {named!r}; expected {graphs} of {tuple(model.modal_map)}")
    return torch.tensor([model.modal_map[name] for name in names], device=device)


def with_energies(model: Any, given: dict[str, Tensor], graphs: int) -> dict[str, Any]:
    """What all modules but the last give, from the fields of a graph; the number of structures is known."""
    data: dict[str, Any] = given.copy()
    data["node_attr"] = data["x"]
    *layers, reduce, _ = model
    for layer in layers:
        data = layer(data)
    energies = data[reduce.key_input].squeeze(1)
    data[reduce.key_output] = energies.new_zeros(graphs).index_add(0, data["batch"], energies) * reduce.constant
    return data


def forces_and_stress(model: Any, data: Mapping[str, Tensor], by_edge: Tensor, size: Counts) -> dict[str, Tensor]:
    """As ``ForceStressOutputFromEdge``, from the gradient of the energy by every edge [edges, 3]."""
    (sender, receiver), edge = data["edge_index"], data["edge_vec"].detach()
    zeros = by_edge.new_zeros(size.atoms, 3)
    forces = zeros.index_add(0, sender, by_edge) - zeros.index_add(0, receiver, by_edge)
    # xx, yy, zz, xy, yz, zx
    virials = torch.cat((edge * by_edge, edge * by_edge.roll(-1, 1)), 1)
    of_atoms = by_edge.new_zeros(size.atoms, 6).index_add(0, receiver, virials)
    of_graphs = by_edge.new_zeros(size.graphs, 6).index_add(0, data["batch"], of_atoms)
    stress = -of_graphs / data["cell_volume"].clamp(min=_LEAST_VOLUME).unsqueeze(-1)
    found = {"inferred_force": forces, "inferred_stress": stress}
    *_, output = model
    return found | ({"inferred_atomic_virial": -of_atoms} if output.use_atomic_virial else {})


def _of_modalities(names: Sequence[str], elements: int, shift: float) -> dict[str, Any]:
    """What the package's training adds to the configuration of a model of several modalities, each with its shifts."""
    return {
        "use_modality": True,
        "use_modal_wise_shift": True,
        "use_modal_wise_scale": False,
        "_number_of_modalities": len(names),
        "_modal_map": {name: place for place, name in enumerate(names)},
        "shift": [[shift] * elements] * len(names),
    }


def _first_modality(model: Any) -> str | None:
    """That of a structure whose ``info`` names none."""
    return next(iter(model.modal_map or ()), None)


def _built(configuration: Mapping[str, Any]) -> torch.nn.Module:
    from sevenn.model_build import build_E3_equivariant_model

    model = build_E3_equivariant_model(dict(configuration))
    # Some of its constants are float32 whatever the default is.
    model = encoded_in_dtype(model, torch.get_default_dtype())
    setattr(model, ORIGIN, dict(configuration))
    return model


def encoded_in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """In place. Its one-hot encodings of elements and modalities are float32 in every model."""
    if dtype != torch.float32:
        for encoding in filter(
            None, (getattr(model, name, None) for name in ("onehot_idx_to_onehot", "one_hot_modality"))
        ):
            encoding.register_forward_hook(_in_double)
    return model.to(dtype)


def _in_double(encoding: Any, given: tuple[Any, ...], data: dict[str, Any]) -> None:
    """Cast the encodings, which the next layers multiply by weights."""
    for key in ("x", "node_attr", "modal_attr"):
        if key in data:
            data[key] = data[key].double()


def _copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy all parameters by name; their order is the same for all convolutions."""
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name not in weights:
                raise PeerError(f"the model's {name} has no counterpart in the stock model")
            weight.copy_(weights[name].reshape(weight.shape))


PACKAGE = SevenNet()
