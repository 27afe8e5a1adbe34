"""Who takes part in a row, and how each is built: stock, the package's own fast paths, Equitune, and both together.

Stock and fast paths take part in every form that is faster than eager: ``PATH-captured``, by ``autotune.capture``, and
those in which the package compiles them, such as ``PATH-aotinductor``.

A fast path that silently computes as stock would give a figure of stock under another name. So after it is built, the
model must contain modules of the peer's package; else there is a reason in the place of a figure.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autotune.errors import ConfigError, PeerError, unknown_name
from autotune.models.capture import capture, capture_training
from autotune.models.package import Package, dtype_of
from autotune.models.stand_ins import CONVOLUTIONS, KIND_NAMES
from autotune.models.whole_model import PACKAGES, WholeModel
from autotune.text import CAPTURED, DEFAULT, FUSED, STOCK, STREAMED, TF32, TUNED, path_and_form

if TYPE_CHECKING:
    from autotune.models.capture import CapturedTraining

SYMMETRIX = "symmetrix"
# The module of each peer, and what to install for it.
_PEERS = {
    "cuequivariance": ("cuequivariance_torch", "equitune[peers-gpu]"),
    "openequivariance": ("openequivariance", "openequivariance"),
    "flashtp": ("flashTP_e3nn", "flashTP, from its repository"),
    "triton": ("triton", "triton"),
}
_JOINT = f"{TUNED}+"
_CAPTURED = "captured"
_WITHOUT_KERNEL = ("Linear", "FullyConnectedTensorProduct")
# Peers that choose kernels during their first calls get so many before they are timed; others settle in a few.
TUNING_CALLS, WARM_UP_CALLS = 60, 3


def contenders_of(package: Package) -> tuple[str, ...]:
    """All contenders of a package's models, Equitune first, then its other forms and inside another library's model."""
    together = (_JOINT + peer for peer in package.joined)
    others = (STOCK, *package.peers)
    return (
        TUNED,
        *((CAPTURED,) if package.captured else ()),
        STREAMED,
        FUSED,
        TF32,
        *((f"{TF32}-{_CAPTURED}",) if package.captured else ()),
        *together,
        DEFAULT,
        *others,
        *(f"{path}-{_CAPTURED}" for path in others if package.captured),
        *(f"{path}-{form}" for form, paths in package.compiled.items() for path in paths),
        *((SYMMETRIX,) if package.name == "mace" else ()),
    )


def chosen(
    package: Package, wanted: tuple[str, ...], known_of: Callable[[Package], tuple[str, ...]] = contenders_of
) -> tuple[str, ...]:
    """The contenders named, in their order, but for those of other packages; all if none is named."""
    known = known_of(package)
    anywhere = {name for one in (package, *PACKAGES) for name in known_of(one)}
    for name in wanted:
        if name not in anywhere:
            raise ConfigError(unknown_name("contender", name, known))
    return tuple(name for name in known if name in wanted or not wanted)


def warm_up_calls(contender: str, device: str) -> int:
    """Calls before timing; on a CPU a second call warms nothing more."""
    if torch.device(device).type == "cpu":
        return 1
    return TUNING_CALLS if "cuequivariance" in contender else WARM_UP_CALLS


def build(contender: str, model: WholeModel) -> tuple[WholeModel, str]:
    """The contender made of the stock model, and what is to be said of it. PeerError if it would be another."""
    if contender == STOCK:
        return model, ""
    path, form = path_and_form(contender)
    if form:
        require_usable(contender, model.device)
        eager, said = build(path, model)
        if form == _CAPTURED:
            return captured_form(eager), said
        return eager.with_module(model.package.in_compiled_form(eager.module, form, model.device)), said
    if contender in (TUNED, DEFAULT):
        return model, _accelerated(model.module, KIND_NAMES)
    if contender in (STREAMED, FUSED):
        return model, _with_weights_inside(contender, model)
    if contender == TF32:
        require_usable(contender, model.device)
        if dtype_of(model.module) is not torch.float32:
            raise PeerError(f"TF32 is for models in float32; this one is in {dtype_of(model.module)}")
        return model, _accelerated(model.module, KIND_NAMES, precision="tf32")
    if contender.startswith(_JOINT):
        converted, _ = build(contender.removeprefix(_JOINT), model)
        return converted, _accelerated(converted.module, (CONVOLUTIONS,))
    require_usable(contender, model.device)
    if contender == SYMMETRIX:  # has a calculator, and no model of torch's
        return model, f"symmetrix-xl {importlib.metadata.version('symmetrix-xl')}, with its own neighbor list"
    names = contender.split("+")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = model.package.accelerated(model.module, contender, model.device)
    for name in names:
        _require_kernels(name, made, caught)
    return model.with_module(made), ""


# Names of energies and forces in the results of each package's models.
RESULTS = {
    "mace": ("energy", "forces"),
    "nequip": ("total_energy", "forces"),
    "allegro": ("total_energy", "forces"),
    "sevennet": ("inferred_total_energy", "inferred_force"),
}


@dataclass(frozen=True, eq=False)
class CapturedForm(WholeModel):
    """A model whose steps are captured, those of training by ``capture_training``, with the loss of other models."""

    @functools.cached_property
    def training(self) -> CapturedTraining:
        captured: Any = self.module
        return capture_training(captured.model, self._loss)

    def _loss(self, out: Any, labels: Any, real: Any) -> torch.Tensor:
        energy, forces = (out[name] for name in RESULTS[self.package.name])
        energies = real.mean((energy.view(-1) / labels["atoms"]).square(), "graphs")
        return energies + real.mean(forces.square(), "atoms")

    def training_step(self, inputs: dict[str, Any]) -> torch.Tensor:
        self._prepare(training=True)
        _, counts = self.training.package.fields(self.training.model, inputs, 1.0)
        atoms = torch.full((counts.graphs,), counts.atoms / counts.graphs, device=self.device)
        return self.training.forward(inputs, {"atoms": atoms})

    def uncaptured_step(self, inputs: dict[str, Any], *, training: bool, stress: bool) -> None:
        """Who chooses kernels in its first calls has done so before it is captured."""
        self._prepare(training)
        captured: Any = self.module
        self.package.evaluate(captured.model, inputs, training=training, stress=stress)

    def forget(self) -> None:
        """Free what was captured."""
        both: tuple[Any, Any] = self.module, self.__dict__.get("training")
        for captured in both:
            if captured is not None:
                captured.forget()


def captured_form(model: WholeModel) -> CapturedForm:
    """Of a model, accelerated or not."""
    return CapturedForm(model.name, capture(model.module), model.package, model.device, model.published)


def _with_weights_inside(contender: str, model: WholeModel) -> str:
    """What was replaced; PeerError unless convolutions form the weights of their edges, the way that was asked."""
    how: dict[str, str]
    how, mark = {
        STREAMED: ({"memory": "low"}, "always_streamed"),
        FUSED: ({"edge_weights": "fused"}, "is_fused"),
    }[contender]
    if contender == FUSED and torch.device(model.device).type != "cuda":
        raise PeerError("weights are formed in registers on a GPU only")
    with warnings.catch_warnings():  # what forms them everywhere is an old option
        warnings.simplefilter("ignore", FutureWarning)
        said = _accelerated(model.module, KIND_NAMES, **how)
    if not any(getattr(module, mark, False) for module in model.module.modules()):
        raise PeerError(f"no convolution forms the weights of its edges itself: {said}")
    return said


def _accelerated(model: torch.nn.Module, kinds: tuple[str, ...], **options: Any) -> str:
    """What was replaced, in a line; PeerError if nothing of these kinds was."""
    from autotune.models.accelerate import accelerate

    done = accelerate(model, **options)
    if not any(place.replaced and place.kind in kinds for place in done.places):
        raise PeerError(f"nothing of the model was replaced: {str(done).splitlines()[0]}")
    kept: dict[str, list[str]] = {}
    for place in done.places:
        if not place.replaced:
            kept.setdefault(place.detail, []).append(place.name)
    return "; ".join((str(done).splitlines()[0], *(f"stock: {', '.join(kept[why])}, as {why}" for why in kept)))


def require_usable(contender: str, device: str) -> None:
    """PeerError if what the contender needs is not installed, or does not run on the device."""
    from autotune.compare.peers import ADAPTERS

    of_kernels = {adapter.name: adapter for adapter in ADAPTERS}
    if contender == SYMMETRIX and importlib.util.find_spec("symmetrix") is None:
        raise PeerError("not installed; pip install symmetrix-xl-cuda13-sm90, or what fits the device")
    path, form = path_and_form(contender)
    if path == TF32 and (torch.device(device).type != "cuda" or torch.version.hip):
        raise PeerError("TF32 needs an NVIDIA GPU")
    if form == _CAPTURED and torch.device(device).type != "cuda":
        raise PeerError("CUDA graphs need a GPU")
    for name in (name for name in path.removeprefix(_JOINT).split("+") if name in _PEERS):
        module, install = _PEERS[name]
        if name in of_kernels:
            reason = of_kernels[name].unusable(torch.device(device))
        elif name == "triton" and torch.device(device).type != "cuda":
            reason = "its kernels need a CUDA device"
        else:
            reason = None if importlib.util.find_spec(module) else f"not installed; install {install}"
        if reason:
            raise PeerError(reason)


def _require_kernels(name: str, model: torch.nn.Module, caught: list[Any]) -> None:
    """PeerError unless the model contains modules of the peer that run by its own kernels."""
    if name not in _PEERS:
        return
    package = _PEERS[name][0]
    found = [module for module in model.modules() if type(module).__module__.split(".")[0] == package]
    if name == "cuequivariance":
        found = _polynomials(model)
    if name == "triton":
        found = [module for module in model.modules() if type(module).__name__ == "TritonContracter"]
    naive = [module for module in found if "Naive" in type(getattr(module, "m", module)).__name__]
    if not found or naive:
        said = "; ".join(dict.fromkeys(str(warning.message)[:200] for warning in caught)) or "and it says nothing"
        where = f"would not run in {len(naive)} of {len(found)} places" if naive else "are nowhere in the model"
        raise PeerError(f"{name}: its own kernels {where}, {said}")


def _polynomials(model: torch.nn.Module) -> list[torch.nn.Module]:
    """cuEquivariance's products, but for those that MACE asks it to compute by matrix products, without a kernel."""
    asked = {
        id(inner)
        for module in model.modules()
        if type(module).__module__.startswith("cuequivariance_torch") and type(module).__name__ in _WITHOUT_KERNEL
        for inner in module.modules()
    }
    return [
        module
        for module in model.modules()
        if type(module).__name__ == "SegmentedPolynomial" and id(module) not in asked
    ]


# What the kernels of a step are for, by their names: what limits a model next.

OTHER = "other kernels"
# Words for a group, and what names of its kernels contain. The first that fits counts: copies are elementwise too.
GROUPS = (
    ("Equitune's contractions", r"equitune_contraction"),
    ("Equitune's products and harmonics", r"equitune_kernel|equitune_radial"),
    ("Equitune's matrix products", r"equitune_tall|equitune_block_matrices"),
    ("cuEquivariance's", r"cuequivariance|segmented|uniform_1d|fused_tp|tp_channel"),
    ("matrix products", r"gemm|gemv|cutlass|cublas|nvjet|splitk|xmma|dot_kernel"),
    ("copies and fills", r"copy|catarray|fill|memcpy|memset|transpose"),
    ("gathers and sums by index", r"index|scatter|gather|segment_reduce|embedding"),
    ("sorting", r"sort|radix|scan|searchsorted|unique|histogram"),
    ("sums", r"reduce"),
    ("elementwise", r"elementwise|vectorized|triton_poi|softmax"),
)


def group_of(name: str) -> str:
    """The group of a kernel."""
    lower = name.lower()
    return next((words for words, pattern in GROUPS if re.search(pattern, lower)), OTHER)


def milliseconds_by_group(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of (name, microseconds) the milliseconds of each group, largest first."""
    found: dict[str, float] = {}
    for name, time_us in kernels:
        group = group_of(name)
        found[group] = found.get(group, 0.0) + time_us / 1e3
    return {group: round(time_ms, 4) for group, time_ms in sorted(found.items(), key=lambda item: -item[1])}


def shares_text(parts: dict[str, float]) -> str:
    """Such as ``matrix products 45%, copies and fills 20%``; groups of less than a hundredth are left out."""
    total = sum(parts.values())
    return ", ".join(f"{part} {size / total:.0%}" for part, size in parts.items() if size >= 0.01 * total)
