"""Schedules and spec of kernels that form a convolution's edge weights, ``h @ matrix``, in registers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from kernelgen.arithmetic.directions import Direction
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs
from kernelgen.problem.product import PRODUCTS, TensorProductProblem

# Hidden features are multiplied in steps of this many.
STEP = 16
MOST_HIDDEN = 128


@dataclass(frozen=True)
class RadialSchedule(Knobs):
    """Knobs of a CUDA kernel: a warp takes 16 channels of a share of all edges, by tiles of 8 edges, 16 for gradients.

    path_groups: parts of the paths; a block has one part, and keeps its slice of the matrix in shared memory.
    warps: of a block. min_blocks: blocks that share a multiprocessor; so many are started.
    tiles: of a value's 8 edges that are multiplied by one load of the matrix from shared memory; four with ``wgmma``.
    order: of paths; by the block of the first input, or of the second, whose gradient holds registers meanwhile.
    edge_values: whether lanes keep an edge's values from path to path, or reload them from shared memory for each path
        or ``four`` of them.
    slices: of 16 channels that a warp takes one after the other for the same edges, whose gradients it adds once.
    coupled: from how many terms for each component of x tensor cores form a path's gradients; 0: no path's.
    ahead: ``hidden`` if a value's hidden features are loaded during the step before the one that splits them.
    products: what multiplies hidden features by the matrix, and gradients of weights by its transpose: ``mma`` of each
        warp, or ``wgmma`` of four warps at a time, which Hopper alone has: of a value they have 64 channels of the
        same edges; gradients are those with coupled cotangents.
    paths_at_once: whose weights ``wgmma`` forms, while lanes multiply those of the paths before.
    """

    path_groups: int = 1
    warps: int = 8
    min_blocks: int = 1
    tiles: int = 1
    order: str = "in1"
    edge_values: str = "kept"
    slices: int = 1
    coupled: int = 0
    ahead: str = "none"
    products: str = "mma"
    paths_at_once: int = 4

    backend: ClassVar[str] = "cuda"
    choices: ClassVar[dict[str, tuple]] = {
        "path_groups": tuple(range(1, 129)),
        "warps": (2, 4, 8, 12, 16),
        "min_blocks": (1, 2, 3, 4),
        "tiles": (1, 2, 4),
        "order": ("in1", "in2"),
        "edge_values": ("kept", "four", "reloaded"),
        "slices": (1, 2, 4, 8),
        "coupled": (0, 1, 2, 4),
        "ahead": ("none", "hidden"),
        "products": ("mma", "wgmma"),
        "paths_at_once": (1, 2, 3, 4, 5, 6, 8, 10),
    }
    younger: ClassVar[tuple[str, ...]] = ("coupled", "ahead", "products", "paths_at_once")

    @property
    def canonical(self) -> RadialSchedule:
        if self.products == "wgmma":
            return self
        return dataclasses.replace(self, paths_at_once=RadialSchedule.paths_at_once)

    def by_single_warps(self) -> RadialSchedule:
        """The nearest form without ``wgmma``: a value has two tiles at most, which leave no room for loads ahead."""
        form = dataclasses.replace(self, products="mma", paths_at_once=RadialSchedule.paths_at_once)
        if self.tiles == 1:
            return form
        return dataclasses.replace(form, tiles=2, ahead="none", edge_values="four")


def operands_of(direction: Direction) -> tuple[str, ...]:
    """Buffers that a direction's kernel reads: the product's, where ``w`` is h, and the matrix ``tw``."""
    return (*direction.operands, "tw")


@dataclass(frozen=True)
class RadialSpec:
    """Everything that determines one kernel's source.

    Buffers: ``w`` is h [edges, hidden], ``tw`` the matrix [hidden, weights], ``out_w`` the gradient of h; the others
    are those of a convolution. direction: forward, or backward with outputs of ``xyw``, without tangents. accuracy: a
    name of ``PRODUCTS``. layout, index, facts: as in ``Spec``.
    """

    problem: TensorProductProblem
    hidden: int
    direction: Direction
    schedule: RadialSchedule
    accuracy: str
    layout: str
    index: str
    facts: DeviceFacts
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.accuracy not in PRODUCTS:
            raise ScheduleError(f"accuracy is {self.accuracy!r}; expected one of {tuple(PRODUCTS)}")
        if self.dtype != "float32":
            raise ScheduleError(f"dtype is {self.dtype!r}; weights are formed in registers for float32 alone")
        if self.direction.tangents:
            raise ScheduleError(f"{self.direction.text} has tangents; expected a value or first gradients")

    @property
    def is_gradient(self) -> bool:
        """Whether the kernel has gradients, not the value."""
        return "g" not in self.direction.outputs

    @property
    def row_work(self) -> int:
        """The work of an edge, measured in weights."""
        return self.problem.weight_numel

    @property
    def operands(self) -> tuple[str, ...]:
        """Buffers that the kernel reads."""
        return operands_of(self.direction)

    @property
    def steps(self) -> int:
        """Steps of the product over hidden features, padded."""
        return -(-self.hidden // STEP)


# Which problems have a kernel that forms edge weights in registers, and which knobs it may have on which devices.

# Warps that multiply together by ``wgmma``, and architectures that have it.
WARPGROUP, WITH_WGMMA = 4, ("sm_90",)


def refusal(problem: TensorProductProblem, hidden: int) -> str:
    """Why no such kernel exists for a problem and a number of hidden features; empty if one does."""
    if not problem.is_channelwise or problem.shared_weights or not problem.paths:
        return "expected weighted uvu paths with one copy of the second input, and weights of each edge"
    if hidden % 4 or not 4 <= hidden <= MOST_HIDDEN:
        return f"{hidden} hidden features; expected a multiple of 4 up to {MOST_HIDDEN}"
    if any(block.mul % 2 for block in (*problem.in1, *problem.out)):
        return "an odd number of channels; expected even ones"
    return ""


def check_form(spec: RadialSpec) -> None:
    """Raise ScheduleError for knobs of the other kind of kernel: a value's, or gradients'."""
    schedule = spec.schedule
    if spec.is_gradient and schedule.tiles > 1:
        raise ScheduleError(f"{schedule.tiles} tiles; expected 1, because a product of gradients has 16 edges")
    if schedule.tiles > 2 and schedule.products != "wgmma":
        raise ScheduleError(f"{schedule.tiles} tiles; expected at most 2: only products=wgmma has registers left")
    if not spec.is_gradient and schedule.slices > 1:
        raise ScheduleError(
            f"{schedule.slices} slices; expected 1, because a warp keeps sums of a receiver in registers"
        )
    if schedule.ahead == "hidden" and (spec.is_gradient or (schedule.tiles > 1 and schedule.products == "mma")):
        raise ScheduleError(
            "ahead=hidden; expected none: only a value's kernel with one tile, or with wgmma, has registers left"
        )
    if not spec.is_gradient and schedule.coupled:
        raise ScheduleError(f"coupled={schedule.coupled}; expected 0, because a value has no cotangents")
    if schedule.products == "wgmma":
        _check_warpgroups(spec)
    elif schedule.paths_at_once != RadialSchedule.paths_at_once:
        raise ScheduleError(
            f"paths_at_once={schedule.paths_at_once}; expected {RadialSchedule.paths_at_once}: without products=wgmma "
            "it has no effect"
        )


def _check_warpgroups(spec: RadialSpec) -> None:
    """Raise ScheduleError where four warps cannot multiply together."""
    schedule, arch = spec.schedule, spec.facts.arch
    if arch not in WITH_WGMMA:
        raise ScheduleError(
            f"products=wgmma; expected mma, because {arch} has no wgmma: only compute capability 9.0 has"
        )
    if spec.is_gradient and not schedule.coupled:
        raise ScheduleError("products=wgmma; expected mma: only gradients with coupled cotangents, and values, have it")
    if schedule.warps % WARPGROUP:
        raise ScheduleError(f"{schedule.warps} warps; expected a multiple of {WARPGROUP}: so many multiply together")
