"""Some 600 generated kernels whose texts are pinned: every kind, direction, backend and knob value, without a device.

``tests/golden/kernel_texts.json`` holds the hash of each text, computed as in the tuned databases, and the
``GENERATOR_VERSION`` that wrote them. Schedules are explicit here, so that a better default changes nothing.

To change a text on purpose, change it and ``kernelgen.version.GENERATOR_VERSION``, then run

    python tests/support/golden_texts.py

which refuses to write changed texts under the old version. New cases need no new version.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import pair_problems
from contraction_texts import contractions
from places import ROOT

from autotune.database.maintenance import hash_of_text
from kernelgen import GENERATOR_VERSION
from kernelgen.arithmetic.directions import (
    DIRECTIONS,
    DOUBLE_BACKWARD,
    HARMONICS_DIRECTIONS,
    Direction,
    backward,
    double_backward,
    fixed_order_parts,
)
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.kernels.spec import AnySpec, Spec
from kernelgen.kernels.spherical_harmonics import HarmonicsCudaSchedule, HarmonicsHostSchedule, HarmonicsSpec
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem

PATH = ROOT / "tests" / "golden" / "kernel_texts.json"
FACTS = {"cuda": cuda_facts("sm_90"), "cpu": DeviceFacts("cpu", "a host", "x86_64", 8, vector_bytes=64)}

PRODUCTS = {
    "equal": TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e", "0e+1o+2e"),
    "unequal": TensorProductProblem.channelwise("64x0e+32x1e+8x2e", "0e+1e+2e", "0e+1e+2e"),
    "odd": TensorProductProblem.channelwise("89x1o+1x0e", "1o+2e", "1o+0e+2e"),
    "shared": TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o", shared_weights=True),
    # Each operand has a block that no path uses.
    "sparse": TensorProductProblem.from_instructions(
        *("16x0e+16x1o", "0e+1o", "16x0e+16x1o+16x1e"), [(1, 1, 0, "uvu", True), (1, 1, 2, "uvu", True, 0.5)]
    ),
}
HARMONICS = {
    "unit": HarmonicsProblem((0, 1, 2), "component", True),
    "raw": HarmonicsProblem((3, 1, 1), "integral", False),
    "high": HarmonicsProblem((0, 4, 12), "norm", True),
}
# All named directions, and choices of tangents and outputs that autograd makes.
EACH = (
    *DIRECTIONS.values(),
    *(
        backward("xw"),
        backward("w"),
        double_backward("y", "xw"),
        double_backward("xw", "yg"),
        double_backward("y", "g"),
    ),
)
KIND = ("float32", "ir_mul", "int64")
OTHER_KINDS = (("float64", "mul_ir", "int32"), ("float32", "mul_ir", "int64"), ("float64", "ir_mul", "int64"))

# The base for one knob at a time: with it, a knob's values are legal and change the text.
BASE = CudaSchedule(path_groups=4, stage_edges=8, edge_operand="shared")
BESIDE: dict[str, dict[str, Any]] = {
    "accumulate": {"block_size": 512, "warps_per_edge": 16},
    "edges_per_chunk": {"accumulate": "atomics"},
    "edges_per_warp": {"stage_edges": 4, "path_groups": 7},
    "channels_per_thread": {"path_groups": 7},
    "warps_per_edge": {"path_groups": 7, "block_size": 512},
    "teams_per_node": {"block_size": 512, "path_groups": 6},
    "prefetch": {"path_groups": 7},
    "stream": {"accumulate": "atomics"},
    "min_blocks": {"block_size": 64, "path_groups": 7},
    "block_size": {"path_groups": 6},
    "finish": {"teams_per_node": 4},
    "zeros": {"accumulate": "atomics"},
    "runs": {"accumulate": "atomics"},
}
# Knobs whose effect on forward and on second derivatives differs.
FETCHING = (
    "order",
    "path_groups",
    "teams_per_node",
    "edge_operand",
    "prefetch",
    "ahead",
    "finish",
    "writes",
    "channel_block",
)
# Values of knobs that have too many, or some that not every direction has.
SAMPLES = {"path_groups": (1, 2, 3, 4, 5, 7), "threads": (0, 1, 8), "zeros": ("apart", "inside")}


def cases() -> dict[str, AnySpec]:
    """The specs by name; all are legal."""
    every = [*_knobs(), *_channelwise(), *_permuted(), *_whole_rows(), *_fixed_order(), *_pairs()]
    every += [*_edge_vectors(), *_harmonics()]
    every += contractions(FACTS, _named, values_of)
    found = dict(every)
    assert len(found) == len(every), "two cases have one name"
    return found


def _product(
    name: str,
    direction: Direction,
    schedule: Any,
    operation: str = "conv",
    kind: tuple[str, str, str] = KIND,
    problem: TensorProductProblem | None = None,
    **options: Any,
) -> tuple[str, Spec]:
    backend = schedule.backend
    spec = Spec(problem or PRODUCTS[name], direction, schedule, operation, *kind, FACTS[backend], **options)
    words = [backend, name, operation, direction.text, *kind]
    words += [f"{key}={'yes' if value is True else value.key}" for key, value in options.items()]
    return f"{' '.join(words)} {_named(schedule)}", spec


def _named(schedule: Any) -> str:
    """The name of a schedule: its knobs that differ from the default."""
    changed = {f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
    return ",".join(f"{k}={v}" for k, v in changed.items() if v != getattr(type(schedule)(), k)) or "defaults"


def values_of(schedule: Any, knob: str) -> tuple:
    """The values of a knob that are pinned."""
    return SAMPLES.get(knob, schedule.choices[knob])


def _knobs() -> Iterator[tuple[str, AnySpec]]:
    """Every value of every knob: backward; also forward and double backward if these texts differ."""
    found: dict[str, AnySpec] = {}
    for name in ("backward", "forward", "joint_backward"):
        for base in (BASE, HostSchedule(path_groups=4)):
            for knob in base.choices:
                beside = BESIDE.get(knob, {}) if base is BASE else {}
                for value in values_of(base, knob) if name == "backward" or knob in FETCHING else ():
                    schedule = dataclasses.replace(base, **(beside | {knob: value}))
                    found |= [_product("equal", DIRECTIONS[name], schedule, "conv" if schedule.fuse else "plain")]
    yield from found.items()


def _channelwise() -> Iterator[tuple[str, AnySpec]]:
    """Every direction and problem on both backends, as convolution and edge by edge; other types."""
    gpu = CudaSchedule(path_groups=4, edge_operand="shared", stage_edges=4, edges_per_warp=4)
    few, host = dataclasses.replace(gpu, path_groups=2), HostSchedule(path_groups=4)
    for direction in EACH:
        yield _product("unequal", direction, gpu)
        yield _product("unequal", direction, dataclasses.replace(gpu, edge_operand="inline", prefetch="copy"), "plain")
        yield _product("unequal", direction, host)
        yield _product("unequal", direction, host, "plain")
    for name in ("odd", "shared", "sparse"):
        for direction in (DIRECTIONS["forward"], DIRECTIONS["backward"], DIRECTIONS["double_backward"]):
            for schedule in (few, dataclasses.replace(few, accumulate="atomics"), HostSchedule(path_groups=2)):
                yield _product(name, direction, schedule)
    ring = CudaSchedule(path_groups=7, prefetch="ring2", stage_edges=8)
    for kind in OTHER_KINDS:
        for name, schedule in (
            ("unequal", gpu),
            ("equal", ring),
            ("unequal", dataclasses.replace(host, order="sender")),
        ):
            yield _product(name, DIRECTIONS["backward"], schedule, "conv", kind)
            yield _product(name, DIRECTIONS["forward"], schedule, "plain", kind)


def _permuted() -> Iterator[tuple[str, AnySpec]]:
    """Runs of edges in the order of their receivers."""
    for name in ("forward", "backward", "joint_backward"):
        for prefetch in ("reload", "ring2"):
            schedule = dataclasses.replace(BASE, accumulate="atomics", path_groups=7, prefetch=prefetch)
            yield _product("equal", DIRECTIONS[name], schedule, permuted=True)


def _whole_rows() -> Iterator[tuple[str, AnySpec]]:
    """Runs of edges that store the rows of receivers whose edges they have all."""
    cut = dataclasses.replace(BASE, accumulate="atomics", zeros="cut")
    yield _product("equal", DIRECTIONS["forward"], dataclasses.replace(cut, runs="waves", path_groups=7))
    yield _product("equal", DIRECTIONS["forward"], dataclasses.replace(cut, writes="rows"), kind=OTHER_KINDS[0])
    yield _product("equal", DIRECTIONS["forward"], cut, harmonics=HARMONICS["unit"])
    yield _product("shared", DIRECTIONS["forward"], dataclasses.replace(cut, path_groups=1))


def _fixed_order() -> Iterator[tuple[str, AnySpec]]:
    """Sums in a fixed order: gradients of x by sender; of y by row, in a block, or as rows of partial sums."""
    joined = CudaSchedule(path_groups=2, warps_per_edge=8, block_size=256, edge_operand="shared", stage_edges=8)
    apart = CudaSchedule(path_groups=2, edges_per_warp=2, channels_per_thread=2, stage_edges=8)
    for name in ("forward", "backward", "edge_backward", "double_backward", "joint_backward"):
        for part in fixed_order_parts(DIRECTIONS[name]):
            order = "sender" if part.live_outputs == "x" else "receiver"
            for schedule in (joined, apart, HostSchedule(path_groups=2)):
                yield _product("equal", part, dataclasses.replace(schedule, order=order), deterministic=True)


def _pairs() -> Iterator[tuple[str, AnySpec]]:
    """Every connection mode with weights an edge and shared weights, and the special problems."""
    gpu, host = CudaSchedule(accumulate="atomics", edges_per_warp=4, stage_edges=8), HostSchedule(accumulate="atomics")
    problems = {
        f"{mode} shared={shared}": pair_problems.of_mode(mode, shared)
        for mode in pair_problems.MODES
        for shared in (False, True)
    }
    three = [DIRECTIONS[name] for name in ("forward", "backward", "joint_backward")]
    for name, problem in problems.items():
        for direction in three:
            schedule = gpu if problem.shared_weights else dataclasses.replace(gpu, edges_per_warp=1)
            yield _product(name, direction, schedule, problem=problem)
        yield _product(name, DIRECTIONS["backward"], host, problem=problem)
    for name in ("mixed", "single", "direct"):
        problem = getattr(pair_problems, name)()
        for direction in EACH if name == "mixed" else three:
            yield _product(name, direction, gpu, "plain", OTHER_KINDS[0], problem=problem)
            yield _product(name, direction, host, problem=problem)


def _edge_vectors() -> Iterator[tuple[str, AnySpec]]:
    """Harmonics computed inside a product's kernel, up to first derivatives."""
    for name in ("forward", "backward", "source_backward", "edge_backward"):
        for schedule in (BASE, dataclasses.replace(BASE, accumulate="atomics"), HostSchedule(path_groups=4)):
            yield _product("equal", DIRECTIONS[name], schedule, harmonics=HARMONICS["unit"])


def _harmonics() -> Iterator[tuple[str, AnySpec]]:
    """Kernels of harmonics alone."""
    directions = {d.text: d for d in (*HARMONICS_DIRECTIONS.values(), *DOUBLE_BACKWARD.values())}
    beside: dict[str, dict[str, Any]] = {"stages": {"staging": "ahead", "block_size": 32}}
    schedules: dict[str, Any] = {}
    for base in (HarmonicsCudaSchedule(block_size=64), HarmonicsHostSchedule()):
        for knob in base.choices:
            for value in values_of(base, knob):
                schedule = dataclasses.replace(base, **(beside.get(knob, {}) | {knob: value}))
                schedules[f"{base.backend} {_named(schedule)}"] = schedule
    plain = {key: schedules[key] for key in ("cuda block_size=64", "cuda block_size=64,staging=ahead", "cpu defaults")}
    for name, problem in HARMONICS.items():
        for label, schedule in (schedules if name == "unit" else plain).items():
            for text, direction in directions.items():
                if label in plain or direction.name == "backward":
                    facts = FACTS[schedule.backend]
                    yield f"{label} {name} {text}", HarmonicsSpec(problem, direction, schedule, "float32", facts)
    for label, schedule in plain.items():
        kind = (directions["harmonics backward -> x"], schedule, "float64", FACTS[schedule.backend])
        spec = HarmonicsSpec(HARMONICS["unit"], *kind)
        yield f"{label} unit backward float64", spec


def text_of(spec: AnySpec) -> str:
    """The source text of a spec's kernel."""
    return emit(make_plan(spec)).text


def hashes() -> dict[str, str]:
    """Hashes of the texts by case, computed as in the databases."""
    return {name: hash_of_text(text_of(spec)) for name, spec in cases().items()}


def read_golden() -> dict[str, Any]:
    """``generator`` and ``texts`` of the file."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def refusal(golden: dict[str, Any], found: dict[str, str], version: str) -> str:
    """Why ``found`` may not replace the pinned texts; empty if it may."""
    changed = sorted(name for name, text in golden["texts"].items() if found.get(name, text) != text)
    if changed and version == golden["generator"]:
        return (
            f"{len(changed)} texts changed, such as that of {changed[0]!r}, and GENERATOR_VERSION is still {version}; "
            "give it a new value in kernelgen/version.py: tuned databases and quarantines name it"
        )
    return ""


def main() -> int:
    """Write the golden file again."""
    found = hashes()
    why = refusal(read_golden(), found, GENERATOR_VERSION) if PATH.exists() else ""
    if why:
        print(why, file=sys.stderr)
        return 1
    PATH.parent.mkdir(exist_ok=True)
    data = {"generator": GENERATOR_VERSION, "texts": dict(sorted(found.items()))}
    PATH.write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")
    print(f"{PATH}: {len(found)} texts of generator {GENERATOR_VERSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
