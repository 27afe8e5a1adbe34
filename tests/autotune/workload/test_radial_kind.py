"""Radial convolutions as a kind of workload: keys, configs, schedules, runs of emulated kernels against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_emulator import FACTS
from database_samples import GPU, entry, store
from emulated_radial import emulate_kernels

from autotune.compare.peers import ADAPTERS, Peer
from autotune.compare.peers.peer import Task
from autotune.database.entry import what_is_wrong
from autotune.database.lookup import find_schedule
from autotune.errors import ConfigError
from autotune.measure.kinds import guarded, measured_kind, space_of
from autotune.modules import convolution as tuned
from autotune.search.starting_points import starting_points
from autotune.workload.config import load_all
from autotune.workload.graphs import EdgesAlone, GraphSpec, RandomNeighbours, build_graph
from autotune.workload.known_kinds import problem_from_key
from autotune.workload.workload import GraphClass, Workload
from kernelgen.device import cuda_facts, device_facts
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.kernels.radial.plan import RadialSchedule, default_radial_schedule
from kernelgen.ops.product import build
from kernelgen.problem.product import RadialProblem, TensorProductProblem, size_class

PRODUCT = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")


def workload(accuracy: str = "ieee", **options: object) -> Workload:
    graph = GraphSpec("small", RandomNeighbours(7, 60))
    return Workload("small", RadialProblem(PRODUCT, 8, accuracy), "radial", graph, layout="ir_mul", **options)  # type: ignore[arg-type]


def test_problems_and_their_keys() -> None:
    for problem in load_all().values():
        assert problem_from_key(problem.key) == problem
    found = load_all()["mace-mp-medium-radial-tf32"]
    assert isinstance(found, RadialProblem) and (found.hidden, found.accuracy) == (64, "tf32")
    for wrong in (("ieee", 0), ("half", 8)):
        with pytest.raises(ProblemError):
            RadialProblem(PRODUCT, wrong[1], wrong[0])
    with pytest.raises(ProblemError, match="not a key of a radial convolution"):
        RadialProblem.from_key("rc|many|ieee|uvu")


def test_what_has_no_such_workload() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        workload(deterministic=True)
    with pytest.raises(ConfigError, match="needs nodes"):
        Workload("small", RadialProblem(PRODUCT, 8), "radial", GraphSpec("edges", EdgesAlone(10)))
    with pytest.raises(UnsupportedError, match="NVIDIA"):
        space_of(workload(), "forward", device_facts("cpu"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_space_and_lookup(direction: str) -> None:
    """Half of all random schedules or more are illegal here; the default is in the space, and is what lookups find."""
    given = workload()
    space = space_of(given, direction, FACTS)
    assert space.values(space.default) is not None and space.count_legal(50) == 50
    spec = space.spec.of_kernel
    assert space.default == default_radial_schedule(spec).schedule
    kernel = (given.problem, "radial", direction, "float32", "ir_mul", FACTS)
    assert find_schedule(*kernel, given.graph_class()).schedule == space.default


def test_products_of_four_warps_are_searched_where_they_are() -> None:
    """On Hopper alone; without them the number of paths that they take at once is no other schedule."""
    given, ampere = workload(), cuda_facts("sm_80")
    for direction, facts, is_there in (
        ("backward", FACTS, True),
        ("forward", FACTS, True),
        ("forward", ampere, False),
        ("backward", ampere, False),
    ):
        space = space_of(given, direction, facts)
        assert ({"products", "paths_at_once"} <= set(space.knobs)) == is_there
        assert is_there or not {"products", "paths_at_once"} & set(space.knobs)
    space = space_of(given, "backward", FACTS)
    default = space.values(space.default)
    assert default is not None
    apart = [space.schedule(default | {"products": "mma", "paths_at_once": count}) for count in (2, 5)]
    assert apart[0] == apart[1] and space.broken_limit(apart[0]) is None
    found = space.schedule(default | {"products": "wgmma", "paths_at_once": 2, "coupled": 1})
    assert space.broken_limit(found) is None and isinstance(found, RadialSchedule) and found.paths_at_once == 2


@pytest.mark.parametrize("accuracy", ["ieee", "tf32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_runs_are_checked_by_their_accuracy_class(
    direction: str, accuracy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_kernels(monkeypatch)
    given, device = workload(accuracy), "cpu"
    kind = measured_kind("radial")
    tensors = guarded(kind.tensors(given, device))
    reference = kind.reference(given, torch.device(device), tensors)
    operator = kind.build(given, {}, device)
    errors = reference.check(direction, kind.run(operator, direction, tensors, None, poison=True)())
    assert set(errors) == ({"g"} if direction == "forward" else set("xyw"))
    assert what_is_wrong(errors, given.tolerance) is None
    assert (what_is_wrong(errors, workload("ieee").tolerance) is None) == (accuracy == "ieee")
    leaf = [tensor.clone().requires_grad_() for tensor in (tensors.x, tensors.y, tensors.w)]
    out = kind.call(given, operator, tensors, None)(*leaf)
    gradients = dict(zip("xyw", torch.autograd.grad(out, leaf, tensors.g), strict=True))
    found = {"g": out} if direction == "forward" else gradients
    assert what_is_wrong(reference.check(direction, found), given.tolerance) is None


def test_contenders_agree_with_float64() -> None:
    task = Task(workload(), torch.device("cpu"))
    listed = [adapter for adapter in ADAPTERS if adapter.operations == ("radial",)]
    assert [adapter.name for adapter in listed] == ["product-ieee", "product-tf32", "product-fp16x3", "streamed"]
    for adapter in listed:
        passes = Peer(adapter, task).prepare()
        assert max(passes.errors["forward"].values()) < 1e-5
        assert max(passes.check("backward").values()) < 1e-5


def test_tuned_schedules_are_found_for_their_class_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By lookups, by searches of another graph, and by the module."""
    monkeypatch.setattr(tuned, "device_facts", lambda _: GPU)
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path))
    given, tuned_one = workload(), RadialSchedule(2, warps=4)
    table = {"schedule": tuned_one.to_dict(), "time_us": 20.0, "q1_us": 19.0, "q3_us": 21.0}
    known = entry(
        tuned_one,  # type: ignore[arg-type]
        problem=given.problem.key,
        operation="radial",
        layout="ir_mul",
        graph_class=given.graph_class().text,
        default=table,
        peers={},
    )
    store(tmp_path, GPU, known)
    kernel = ("radial", "forward", "float32", "ir_mul", GPU, given.graph_class())
    assert find_schedule(given.problem, *kernel).schedule == tuned_one
    other = workload("tf32")
    assert find_schedule(other.problem, *kernel).schedule != tuned_one
    starts = starting_points(space_of(given, "forward", GPU), GraphClass("radial", 12, 4), [known])
    assert starts == [tuned_one]
    asked = []
    monkeypatch.setattr(tuned, "fused_of", lambda *of: asked.append(of) or "kernels")
    operator = build(PRODUCT, operation="conv", layout="ir_mul", dtype=torch.float32, device="cpu")
    graph = build_graph(given.graph)
    assert tuned.tuned_fused(operator, 8, "float32", size_class(graph.num_edges, graph.num_nodes)) == "kernels"
    assert dict(asked[-1][3])["forward"] == tuned_one
