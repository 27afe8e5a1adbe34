"""Writes the kernels of calls as a pack: for processors of a level, and for each architecture of GPUs that is named.

The calls are those of an exported model, of problems, or of all kernels that a process runs while it records. What each
needs is data that programs without Python can read: ``operators`` of the pack's index. An entry has the operator's
``text``, by which exported models name it, and ``calls``: by op and outputs (such as ``tp_backward xy`` or
``tp_double_backward y xwg``) the kernels to launch, one after the other. A family has ``members`` (places in the list)
and ``classes`` instead, see ``kernelgen.ops.base``. ``needs``: whether ``receiver`` and ``sender`` must be ordered
before a call. Each launch of a call has

    outputs     slots that get a gradient; those that ``writes`` lacks are zero
    writes      by slot ``zero`` (the kernel adds to zeros), ``inside`` (it zeroes itself) or ``empty`` (it overwrites)
    reads       places of its operands in ``kernelgen.arithmetic.directions.OPERANDS``
    order       ``receiver`` or ``sender``: the end by which the edges must be in order, for workers that own its nodes
                or store its rows; ``element`` or ``given``: of a contraction
    gathers     whether rows of nodes are gathered and summed outside of the kernel
    partial_y   rows of partial sums of dF/dy, 0 for none
    task_nodes  nodes of a contraction's task, else 0
    widths      elements of a row of x, y, w and g; weights: their shape if they do not have a row an edge
    matrix      shape of the matrix that forms a fused convolution's weights, in the place of tangents of w
    marks       rows of marks [rows, nodes] that such a kernel has in the place of an output y; zero before
    kernels     places in the index's ``kernels``, by dtype of the indices and target, such as ``int64 cpu``
    permuted    the same, of kernels that run instead if the edges' order by receiver is known (GPUs)

A kernel for a GPU has a rule for its ``launch``: ``kernelgen.kernels.source.LaunchRule``.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernelgen.arithmetic.contraction import FORWARD as CONTRACTION
from kernelgen.arithmetic.contraction import contraction_backward, contraction_double_backward
from kernelgen.arithmetic.directions import (
    BACKWARD,
    DOUBLE_BACKWARD,
    FORWARD,
    OPERANDS,
    Direction,
    backward,
    double_backward,
    forward,
)
from kernelgen.compile.compiler import RECORDERS, compile_by
from kernelgen.compile.gpu import cuda_job, ptx_job
from kernelgen.compile.host import default_level, features_of, portable_job
from kernelgen.compile.job import Job
from kernelgen.compile.pack_file import PTX, source_digest, target_of, write_pack
from kernelgen.device import DeviceFacts, arch_number, assumed, cuda_facts
from kernelgen.errors import InputError, PackError, UnsupportedError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.dispatch import AnyPlan, emit, launch_rule, make_plan
from kernelgen.kernels.radial.plan import operands_of
from kernelgen.kernels.source import LaunchRule, Source
from kernelgen.ops.base import resolve
from kernelgen.ops.edge_networks import SILU_GRADIENT, Network, network_sources
from kernelgen.ops.harmonics import HarmonicsOperator
from kernelgen.ops.node_kernels import GATES, ROWS, WEIGHTS
from kernelgen.ops.product import Operator
from kernelgen.ops.radial_convolution import FusedRadial
from kernelgen.ops.symmetric_contraction import SUMS, ContractionOperator
from kernelgen.ops.tall_products import product_sources
from kernelgen.runtime import graph as index_check
from kernelgen.runtime.call import recipe_of
from kernelgen.runtime.kernel import host_threads
from kernelgen.version import GENERATOR_VERSION, __version__

INDICES = {"int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class Call:
    """An op of ``equitune::`` with its operator's text, and the slots of its tangents and outputs where it has them."""

    op: str
    text: str
    tangents: str = ""
    outputs: str = ""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.op, self.tangents, self.outputs) if part)


@dataclass(frozen=True)
class Launch:
    """One launch of a call: its description without kernels, and the plan of its kernel by dtype of the indices.

    permuted: of the kernels that take edges by receiver, where those are better than edges in a graph's own order.
    fixed: of rows without indices, a source that no plan makes, and how it is launched.
    """

    facts: dict[str, Any]
    plans: dict[str, AnyPlan]
    permuted: dict[str, AnyPlan] = field(default_factory=dict)
    fixed: tuple[Source, LaunchRule] | None = None


def launches(operator: Any, call: Call, indices: tuple[str, ...]) -> list[Launch]:
    """The launches of a call of an operator that is no family. UnsupportedError for sums that only training needs."""
    if isinstance(operator, HarmonicsOperator):
        return [_of_harmonics(operator, call)]
    if isinstance(operator, Network):
        outputs, widths = ("g", {"g": operator.hidden}) if call.op == "en_forward" else ("x", {})
        facts = _facts(outputs, (), widths, "float32")
        return [Launch(facts, {}, fixed=(operator.kernel(call.op).source, operator.launch))]
    if isinstance(operator, FusedRadial):
        return [_of_radial(operator, call, indices)]
    if isinstance(operator, ContractionOperator):
        return [_of_contraction(operator, call, indices)]
    return list(_of_product(operator, call, indices))


def _of_product(operator: Operator, call: Call, indices: tuple[str, ...]) -> Iterator[Launch]:
    problem, direction = operator.problem, _direction(call, forward(), backward, double_backward)
    for part in operator.parts(direction):
        by_index = {
            index: recipe_of(operator.spec(part, INDICES[index]), operator.is_conv)
            for index in (indices if operator.is_conv else ("int64",))
        }
        recipe = next(iter(by_index.values()))
        if recipe.plan is not None and recipe.gathers:
            by_index = {"int64": recipe}
        widths = {"x": problem.dim_in1, "y": problem.dim_in2, "w": problem.weight_numel, "g": problem.dim_out}
        facts = _facts(part.outputs, recipe.reads, widths, recipe.spec.dtype) | {
            "writes": recipe.writes,
            "order": recipe.order,
            "gathers": recipe.gathers,
            "partial_y": recipe.partial_y,
            "weights": [problem.weight_numel] if problem.shared_weights else None,
        }
        plans = {index: one.plan for index, one in by_index.items() if one.plan is not None}
        permuted = {index: make_plan(one.permuted) for index, one in by_index.items() if one.permuted is not None}
        yield Launch(facts, plans, permuted)


def _direction(call: Call, value: Direction, first: Callable[..., Any], second: Callable[..., Any]) -> Any:
    """The direction of a call, of its kind's own; first, second: by outputs, and by tangents and outputs."""
    if call.op.endswith("_double_backward"):
        return second(call.tangents, call.outputs)
    return first(call.outputs) if call.op.endswith("_backward") else value


def _of_harmonics(operator: HarmonicsOperator, call: Call) -> Launch:
    direction = {"sh_forward": FORWARD, "sh_backward": BACKWARD}.get(call.op) or DOUBLE_BACKWARD[call.outputs]
    plan = make_plan(operator.spec(direction))
    facts = _facts(direction.outputs, direction.operands, operator.widths, plan.spec.dtype)
    return Launch(facts, {"int64": plan})


def _of_radial(operator: FusedRadial, call: Call, indices: tuple[str, ...]) -> Launch:
    direction = forward() if call.op == "rc_forward" else backward(call.outputs)
    plans = {index: make_plan(operator.spec(direction, INDICES[index])) for index in indices}
    plan = next(iter(plans.values()))
    widths = {slot: width for slot, (_, width) in operator.shapes(0, 0, 0).items() if slot != "tw"}
    facts = _facts(direction.outputs, operands_of(direction), widths, "float32") | {
        "writes": {slot: "zero" if f"out_{slot}" in plan.zeroed else "empty" for slot in direction.outputs},
        "order": "receiver",
        "marks": plan.marks,
        "matrix": list(operator.shapes(0, 0, 0)["tw"]),
    }
    return Launch(facts, plans)


def _of_contraction(operator: ContractionOperator, call: Call, indices: tuple[str, ...]) -> Launch:
    direction = _direction(call, CONTRACTION, contraction_backward, contraction_double_backward)
    if "w" in direction.outputs:
        raise UnsupportedError(
            "gradients of a contraction's weights are not for packs: call model.requires_grad_(False) before exporting"
        )
    plans = {index: make_plan(operator.spec(direction, index)) for index in indices}
    plan = next(iter(plans.values()))
    facts = _facts(direction.outputs, direction.operands, operator.widths, plan.spec.dtype) | {
        "order": plan.schedule.order,
        "weights": [-1, operator.num_weights, operator.problem.channels],
        "task_nodes": plan.schedule.nodes_per_task or 1,
    }
    return Launch(facts, plans)


def _facts(outputs: str, reads: tuple[str, ...], widths: dict[str, int], dtype: str) -> dict[str, Any]:
    """A launch that overwrites all of its outputs, row by row."""
    return {
        "outputs": outputs,
        "writes": dict.fromkeys(outputs, "empty"),
        "reads": [OPERANDS.index(name) for name in reads],
        "order": "",
        "gathers": False,
        "partial_y": 0,
        "task_nodes": 0,
        "dtype": dtype,
        "widths": widths,
        "weights": None,
    }


# The pack.


@dataclass(frozen=True)
class Written:
    """A pack that was written: its file, and the numbers of its kernels, operators and bytes.

    certified: kernels with a certificate.
    """

    path: Path
    kernels: int
    certified: int
    operators: int
    size: int


def write_calls(
    calls: Iterable[Call],
    path: str | os.PathLike[str],
    *,
    cpu: str | None = None,
    archs: Sequence[str] = (),
    indices: Sequence[str] = ("int64",),
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
    nodes: Sequence[str] = (),
) -> Written:
    """Compile all kernels of some calls and write them to a pack.

    cpu: the level of processors, see ``kernelgen.compile.host.LEVELS``, or ``native``. archs: architectures of GPUs
    such as ``sm_90``, for operators on GPUs; the newest is also written as PTX, for later ones. indices: dtypes of
    sender and receiver. certificates: see :class:`Content`. nodes: dtypes of features whose kernels at nodes of GPUs
    are also written, for programs in Python. Raises CompileError, ToolMissingError without g++ or NVRTC, ScheduleError
    for a schedule that an architecture cannot run, and PackError if the file cannot be written.
    """
    unknown = sorted(set(indices) - set(INDICES))
    if unknown or not indices:
        raise InputError(f"indices are {tuple(indices)}; expected some of {tuple(INDICES)}")
    gpus = tuple(cuda_facts(arch) for arch in sorted(archs, key=arch_number))
    content = Content(tuple(indices), gpus, certificates=certificates or {})
    for call in calls:
        content.add(call)
    for dtype in nodes:
        content.add_for_nodes(dtype)
    return write_content(content, Path(path), cpu)


def write_content(content: Content, path: Path, cpu: str | None) -> Written:
    """Compile the kernels of a pack and write it."""
    level = cpu or default_level()
    features = features_of(level)
    codes = content.compiled(level)
    on_cpu = any(kernel["target"] == "cpu" for kernel in content.kernels)
    index = {
        "equitune": __version__,
        "generator": GENERATOR_VERSION,
        "torch": torch.__version__,
        "machine": os.uname().machine if on_cpu else "",
        "cpu": level if on_cpu else "",
        "features": features if on_cpu else (),
        "kernels": content.kernels,
        "operators": content.operators,
    }
    write_pack(path, json.loads(json.dumps(index)), codes)
    certified = sum("certificate" in kernel for kernel in content.kernels)
    return Written(path, len(content.kernels), certified, len(content.operators), path.stat().st_size)


# What a pack will have: operators with their calls, and the sources of kernels, in the order in which they are met.


@dataclass
class Content:
    """indices: dtypes of edge indices. gpus: the devices to compile for, from the oldest architecture to the newest.

    ptx: also the newest one's PTX. certificates: what is known of a kernel's errors, by the first 16 digits of the
    hash of its source; written with it as ``certificate``.
    """

    indices: tuple[str, ...] = ("int64",)
    gpus: tuple[DeviceFacts, ...] = ()
    ptx: bool = True
    certificates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    _sources: list[Source] = field(default_factory=list)
    _places: dict[Any, int] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        """A call with all of its kernels; of a family with those of each member."""
        with assumed(self.gpus[-1]) if self.gpus else contextlib.nullcontext():
            operator = resolve(call.text)
        if operator.device.type == "cuda" and not self.gpus:
            raise InputError("the model runs on a GPU; name architectures to compile for, such as --arch sm_90")
        if not operator.members:
            self._add_to(operator, call)
            return
        places = [
            self._add_to(member, Call(call.op, member.text, call.tangents, call.outputs)) for member in operator.members
        ]
        entry = self.operators[self._operator(operator)]
        entry |= {"members": places, "classes": [list(row) for row in operator.classes]}

    def add_for_nodes(self, dtype: str) -> None:
        """The kernels that Python launches at nodes and for the edges' weights, on each architecture.

        dtype: float32 or float64, in which products of edges with the last matrix of a radial network, and its hidden
        layers, stay torch's.
        """
        kernels = (ROWS, WEIGHTS, GATES, SUMS, SILU_GRADIENT)
        sources = [kernel.source(getattr(torch, dtype)) for kernel in kernels]
        if dtype == "float32":
            sources += (*product_sources(HIDDEN), *network_sources(NETWORKS))
        for source in sources:
            self.on_gpus(source)

    def on_gpus(self, source: Source) -> None:
        """A source's kernel, on each architecture."""
        for facts in self.gpus:
            for target in self._targets(facts):
                if has_target(source, target):
                    self.kernel(source, target)

    def kernel(self, source: Source, target: str, about: Mapping[str, Any] | None = None) -> int:
        """The place of a source's kernel. about: more to write of it."""
        key = (source_digest(source), source.entry, target)
        if key not in self._places:
            self._places[key] = len(self.kernels)
            self._sources.append(source)
            known = self.certificates.get(key[0][:16])
            told = {"certificate": known} if known else {}
            self.kernels.append({"source": key[0], "entry": key[1], "target": target, **(about or {}), **told})
        return self._places[key]

    def compiled(self, level: str) -> list[bytes]:
        """The code of each kernel, compiled at the same time on all cores. level: of processors."""

        def job_of(target: str, source: Source) -> Job:
            if target == "cpu":
                return portable_job(level)
            return ptx_job(self.gpus[-1].arch) if target == PTX else cuda_job(target + source.arch_suffix)

        kernels = zip(self.kernels, self._sources, strict=True)
        jobs = [job_of(kernel["target"], source) for kernel, source in kernels]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            binaries = list(pool.map(compile_by, jobs, self._sources))
        for facts, job, binary in zip(self.kernels, jobs, binaries, strict=True):
            facts |= {"resources": binary.resources, "compiler": job.identity}
        return [binary.path.read_bytes() for binary in binaries]

    def _operator(self, operator: Any) -> int:
        if operator.text not in self._places:
            self._places[operator.text] = len(self.operators)
            # The ends by which its kernels need the edges in order.
            needs = {end: getattr(operator, f"by_{end}", False) for end in ("receiver", "sender")}
            self.operators.append({"text": operator.text, "needs": needs, "calls": {}})
        return self._places[operator.text]

    def _add_to(self, operator: Any, call: Call) -> int:
        place = self._operator(operator)
        known = self.operators[place]["calls"]
        if call.op != "tp_order" and call.name not in known:
            if operator.device.type == "cuda":
                known[call.name] = self._on_gpus(operator, call)
            else:
                known[call.name] = [self._launch(one, ("cpu",)) for one in launches(operator, call, self.indices)]
        return place

    def _on_gpus(self, operator: Any, call: Call) -> list[dict[str, Any]]:
        """A call's launches, with the kernels of all architectures."""
        found: list[dict[str, Any]] = []
        for index in self.indices:  # what Python checks the indices of a graph with
            self.on_gpus(index_check.CHECK.source(INDICES[index]))
        for facts in self.gpus:
            with assumed(facts):
                made = [self._launch(one, self._targets(facts)) for one in launches(operator, call, self.indices)]
            for first, more in zip(found or made, made, strict=True):
                if {**first, "kernels": 0, "permuted": 0} != {**more, "kernels": 0, "permuted": 0}:
                    raise PackError(f"{call.name} is launched otherwise on {facts.arch}; write a pack for it alone")
                first["kernels"] |= more["kernels"]
                first["permuted"] |= more["permuted"]
            found = found or made
        return found

    def _targets(self, facts: DeviceFacts) -> tuple[str, ...]:
        return (facts.arch, PTX) if self.ptx and facts is self.gpus[-1] else (facts.arch,)

    def _launch(self, launch: Launch, targets: tuple[str, ...]) -> dict[str, Any]:
        def places(plans: dict[str, AnyPlan]) -> dict[str, int]:
            found = {(index, target): self._of_plan(plans[index], target) for index in plans for target in targets}
            return {" ".join(key): place for key, place in found.items() if place is not None}

        kernels = places(launch.plans)
        if launch.fixed is not None:
            source, rule = launch.fixed
            about = {"launch": rule.to_dict()}
            kernels |= {f"int64 {target}": self.kernel(source, target, about) for target in targets}
        return launch.facts | {"kernels": kernels, "permuted": places(launch.permuted)}

    def _of_plan(self, plan: AnyPlan, target: str) -> int | None:
        """The place of its kernel; None if it has none for the target."""
        spec, source = plan.spec, emit(plan)
        if not has_target(source, target):
            return None
        about: dict[str, Any] = {
            "problem": spec.problem.key,
            "direction": spec.direction.text,
            "schedule": spec.schedule.key,
            "dtype": spec.dtype,
        }
        if spec.facts.backend == "cuda":
            about["launch"] = launch_rule(plan).to_dict()
        else:
            fixed, rows = host_threads(spec)
            about["threads"] = {"fixed": fixed, "rows_of_each": rows}
        return self.kernel(source, target, about)


def has_target(source: Source, target: str) -> bool:
    """Whether a source can be compiled for a target: PTX is for all later GPUs, which one architecture's is not."""
    return target != PTX or not source.arch_suffix


# Kernels for GPUs whose text no schedule decides, which Python launches beside those of operators.

# Features of an edge at which the packages' radial networks end.
HIDDEN = (8, 16, 32, 64, 128)
# Hidden features and layers of the packages' radial networks: MACE's three, SevenNet's two, NequIP's one or two.
NETWORKS = ((64, 1), (64, 2), (64, 3), (128, 1))


# The calls of Equitune's operators in an exported model, read from its file without loading it.
#
# A package of AOTInductor names them in the JSON of the calls that it leaves to torch's dispatcher; a program of
# ``torch.export.save`` names them in its graph. Both are zip archives, and both write a call as a ``target`` and its
# ``inputs`` by name.

_TANGENTS = ("tx", "ty", "tw")


def calls_in(path: str | os.PathLike[str]) -> list[Call]:
    """The different calls of a ``.pt2`` file, in their order. PackError if it is none, or has no such calls."""
    found: dict[Call, None] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    found |= dict.fromkeys(_calls(parse_json(archive.read(name))))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise PackError(
            f"{Path(path)} cannot be read ({cause_of(error)}); expected a .pt2 file of torch.export.save or "
            "torch._inductor.aoti_compile_and_package"
        ) from error
    if not found:
        raise PackError(f"{Path(path)} calls no operator of Equitune; export the model after accelerate(model)")
    return list(found)


def _calls(data: Any) -> Iterator[Call]:
    """All calls in the JSON of a file, at whatever depth."""
    if isinstance(data, list):
        for one in data:
            yield from _calls(one)
    elif isinstance(data, dict):
        target = data.get("target")
        if isinstance(target, str) and "equitune" in target and isinstance(data.get("inputs"), list):
            yield _call(target, data["inputs"])
        else:
            for one in data.values():
                yield from _calls(one)


def _call(target: str, inputs: list[dict[str, Any]]) -> Call:
    """The call of ``torch.ops.equitune.tp_forward.default`` or ``equitune::tp_forward``."""
    op = target.replace("::", ".").split("equitune.")[-1].split(".")[0]
    arguments = {given["name"]: given["arg"] for given in inputs}
    tangents = "".join(name[1] for name in _TANGENTS if _is_given(arguments.get(name)))
    outputs = arguments.get("outputs", {}).get("as_string", "")
    return Call(op, arguments["spec"]["as_string"], tangents, outputs)


def _is_given(argument: dict[str, Any] | None) -> bool:
    """Whether an optional tensor is there: neither left out nor None."""
    if argument is None or "as_none" in argument:
        return False
    inner = argument.get("as_optional_tensor")
    return inner is None or "as_none" not in inner


# A pack of the kernels that this process compiles or finds while it records.


class Recording:
    """``written``: what :func:`recording` wrote at its end."""

    written: Written


@contextmanager
def recording(
    path: str | os.PathLike[str],
    *,
    cpu: str | None = None,
    archs: Sequence[str] = (),
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Recording]:
    """Write a pack of the kernels that are loaded inside of the ``with``.

        with recording("my.pack"):
            model(batch)

    Kernels that the process loaded before are not in it: record in a new process. A GPU's kernels are compiled for its
    own architecture and for ``archs``, the newest also as PTX. Another card finds them if it would run the same
    schedules. cpu: as of ``equitune pack``. certificates: see ``kernelgen.packs.write.Content``. Raises
    InputError if no kernel was loaded, and what ``write_calls`` raises.
    """
    recorded = Recording()
    noted: list[tuple[Source, DeviceFacts]] = []

    def note(source: Source, facts: DeviceFacts) -> None:
        if not facts.is_hip:
            noted.append((source, facts))

    RECORDERS.append(note)
    try:
        yield recorded
    finally:
        RECORDERS.remove(note)
    if not noted:
        raise InputError("no kernel was loaded: run the model inside of recording, in a new process")
    own = {target_of(facts) for _, facts in noted if facts.backend == "cuda"}
    gpus = tuple(cuda_facts(arch) for arch in sorted({*archs, *own}, key=arch_number)) if own else ()
    content = Content(gpus=gpus, certificates=certificates or {})
    for source, facts in noted:
        if facts.backend == "cuda":
            content.on_gpus(source)
        else:
            content.kernel(source, target_of(facts))
    recorded.written = write_content(content, Path(path), cpu)
