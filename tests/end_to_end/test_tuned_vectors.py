"""Products of harmonics of vectors as something to tune: what is decided, checked, stored and loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from database_samples import entry, store

from autotune.cli.show import show
from autotune.compare.peers import peers_for
from autotune.database import store as database
from autotune.database.lookup import directions_inside, find_schedule
from autotune.errors import ConfigError, TuningMissError
from autotune.measure.kinds import measured_kind, space_of
from autotune.measure.trial import TrialJob, TrialSetting
from autotune.modules.rows import SphericalHarmonics, SphericalHarmonicsConv
from autotune.workload.config import load_all, load_config
from autotune.workload.graphs import GraphSpec, Points
from autotune.workload.known_kinds import VectorsKind, product_schedule
from autotune.workload.workload import GraphClass, Workload
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import cuda_facts, device_facts
from kernelgen.errors import ProblemError
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.spec import Spec
from kernelgen.kernels.spherical_harmonics import VectorHostSchedule
from kernelgen.ops.harmonics import FUSED, HarmonicsOperator
from kernelgen.problem.other_kinds import HarmonicsProblem, VectorProblem
from kernelgen.problem.product import TensorProductProblem

L1 = HarmonicsProblem((0, 1), "component", True)
PROBLEM = VectorProblem(TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o"), L1)
FEW = GraphSpec("few", Points(30, 0.1), 3.0)
APART = VectorHostSchedule("apart")
FACTS = device_facts("cpu")


def workload(**changes: Any) -> Workload:
    return Workload("small", PROBLEM, "vectors", FEW, **changes)


def module(**options: Any) -> SphericalHarmonicsConv:
    harmonics = SphericalHarmonics([0, 1], True, "component")
    return SphericalHarmonicsConv("4x0e+4x1o", harmonics, filter_irreps_out="0e+1o", **options)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty database, for this machine too."""
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path / "shipped")
    return tmp_path / "shipped"


def test_keys_come_back() -> None:
    assert VectorProblem.from_key(PROBLEM.key) == PROBLEM
    with pytest.raises(ProblemError, match="is not a key of a product of vectors"):
        VectorProblem.from_key(PROBLEM.product.key)
    with pytest.raises(ProblemError, match=r"degrees \(0,\) have 1 components; the second input .* has 4"):
        VectorProblem(PROBLEM.product, HarmonicsProblem((0,), "norm", True))


def test_a_config_names_product_and_harmonics(tmp_path: Path) -> None:
    path, text = (
        tmp_path / "own.toml",
        'graph = "molecule"\n[vectors.v]\nproduct = "nequip-water"\nharmonics = "sh-l1"\n',
    )
    path.write_text(text)
    (found,) = load_config(path, "cpu").workloads
    assert found.problem == load_all()["nequip-water-vectors"] and found.operation == "vectors"
    assert found.directions == tuple(VectorsKind.directions) and found.graph_class().text.startswith("vectors-e")
    for old, new, message in (
        ("sh-l1", "sh-l9", "harmonics 'sh-l9' is not known|unknown harmonics|no harmonics"),
        ("sh-l1", "sh-l3", "have 16 components"),
        ("nequip-water", "sh-l1", "product"),
        ("[vectors", 'directions = ["joint_backward"]\n[vectors', "joint_backward"),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=message):
            load_config(path, "cpu")


def test_graph_classes_have_a_degree() -> None:
    assert GraphClass.parse("vectors-e9-d3") == GraphClass("vectors", 9, 3)


def test_vectors_are_read_and_written_in_the_place_of_harmonics() -> None:
    work, edges, nodes = workload(), 100, 10
    product = PROBLEM.product
    rows = nodes * (product.dim_in1 + product.dim_out)
    moved = 4 * (rows + edges * (3 + product.weight_numel)) + 8 * edges
    assert work.compulsory_bytes("forward", edges, nodes) == moved


@pytest.mark.parametrize("harmonics", VectorHostSchedule.choices["harmonics"])
@pytest.mark.parametrize("direction", VectorsKind.directions)
def test_all_ways_are_checked_and_timed(direction: str, harmonics: str, shipped: Path) -> None:
    work, schedule = workload(dtype="float64"), VectorHostSchedule(harmonics)
    space = space_of(work, direction, FACTS)
    assert space.size == 3 and space.broken_limit(schedule) is None
    built = measured_kind(work.operation).build(work, {direction: schedule}, "cpu")
    assert (direction in built.inside) is (harmonics == "inside")
    assert built.product.schedules[direction].fuse is (harmonics != "unfused")
    outcome = TrialSetting(work, "cpu").open().measure(TrialJob(direction, schedule, max_seconds=0.01))
    assert outcome.state == "ok", outcome
    assert set(outcome.errors) == set(DIRECTIONS[direction].outputs) and max(outcome.errors.values()) < 1e-13


@pytest.mark.parametrize("graph_class", ["vectors-e8-d4", "vectors-e16-d5", "vectors-e17-d7"])
def test_unfused_takes_no_schedule_that_needs_fusion(graph_class: str) -> None:
    """Of one that splits nodes, say: the shipped database has some, and steps by themselves own no node."""
    problem, kernel = load_all()["batmobile-l3-vectors"], ("float32", "ir_mul", cuda_facts("sm_90", "NVIDIA H200"))
    for direction in VectorsKind.directions:
        schedule = product_schedule(
            find_schedule, problem, direction, "unfused", *kernel, GraphClass.parse(graph_class), False
        )
        spec = Spec(problem.product, DIRECTIONS[direction], schedule, "plain", *kernel[:2], "int64", kernel[2])
        assert make_plan(spec).spec.schedule == schedule and not schedule.fuse


def test_a_wrong_gradient_is_found(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = TrialSetting(workload(), "cpu").open()
    right = HarmonicsOperator.run

    def run(*given: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {slot: (1.001 if slot == "x" else 1) * out for slot, out in right(*given, **options).items()}

    monkeypatch.setattr(HarmonicsOperator, "run", run)
    outcome = session.measure(TrialJob("edge_backward", APART, max_seconds=0.01))
    assert outcome.state == "wrong" and 9e-4 < outcome.errors["y"] < 1.1e-3


def test_modules_do_what_was_measured(shipped: Path) -> None:
    facts = ("float32", "mul_ir", FACTS, None)
    assert set(directions_inside(PROBLEM, *facts, False)) == set(FUSED), "inside where nothing was measured"
    with pytest.raises(TuningMissError, match="no tuned vectors forward"):
        directions_inside(PROBLEM, *facts, True)
    times = {"time_us": 2.0, "q1_us": 2.0, "q3_us": 2.0}
    tuned = entry(
        APART,  # type: ignore[arg-type]
        problem=PROBLEM.key,
        operation="vectors",
        direction="edge_backward",
        graph_class="vectors-e9-d4",
        default={"schedule": VectorHostSchedule().to_dict(), **times},
    )
    store(shipped, FACTS, tuned)
    x, v, w, edges = torch.randn(5, 16), torch.randn(9, 3), None, torch.randint(0, 5, (2, 9))
    for fuse, inside in ((None, set(FUSED) - {"edge_backward"}), (True, set(FUSED)), (False, set())):
        made = module(fuse=fuse)
        w = torch.randn(9, made.weight_numel)
        made(x, v, w, *edges)
        both = made._met[4].run
        assert both.inside == inside


@pytest.mark.parametrize("name", ["e3nn", "cuequivariance-naive"])
def test_peers_agree(name: str) -> None:
    (peer,) = (peer for peer in peers_for(workload(layout="ir_mul"), "cpu") if peer.name == name)
    passes = peer.prepare()
    assert max(passes.check("backward").values()) < 1e-4


def test_show_names_product_and_vectors(shipped: Path) -> None:
    text = show("nequip-water-vectors")
    assert "32x0o+32x0e+32x1o+32x1e" in text and "of edge vectors" in text and "harmonics=inside" in text
    assert show(dataclasses.replace(PROBLEM).key).count("default") >= 3
