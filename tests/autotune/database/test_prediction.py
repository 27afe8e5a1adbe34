"""Schedules for problems without an entry: legal, the same every time, cheap to find, and said where they are from."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from database_samples import entry, store
from places import ROOT

from autotune import paths
from autotune.database import model_of_time as table
from autotune.database import model_of_time as work
from autotune.database import nearest as query
from autotune.database import predicted
from autotune.database import predicted as pool
from autotune.database.lookup import Finder, find_schedule
from autotune.database.model_of_time import FEATURES, Features, Trees
from autotune.database.predicted import TRIED, by_predicted_time, predict, shortlist
from autotune.database.store import DatabaseWarning
from autotune.measure.space import search_space
from autotune.search.starting_points import starting_points
from autotune.workload.config import load_problems
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

H200 = cuda_facts("sm_90", "NVIDIA H200", 132)
OTHERS = [cuda_facts("sm_80", "NVIDIA A100", 108), cuda_facts("sm_86", "NVIDIA A10", 72), cuda_facts("sm_120")]
NEW = TensorProductProblem.channelwise("89x0e+37x1o+11x2e", "0e+1o+2e", "0e+1o+2e")
DIRECTIONS = ("forward", "backward", "edge_backward", "joint_backward")
CLASSES = ("conv-e8-d4", "conv-e17-d7", "plain-e16")


def problems() -> dict[str, TensorProductProblem]:
    return {name: problem for name, problem in load_problems().items() if problem.is_channelwise} | {"new": NEW}


def spec_of(problem: TensorProductProblem, direction: str, facts: DeviceFacts = H200, **changes: Any) -> Spec:
    options: dict[str, Any] = {"operation": "conv", "dtype": "float32", "layout": "ir_mul"} | changes
    kernel = (problem, options["operation"], direction, options["dtype"], options["layout"], facts)
    return kernel_kind("conv").spec(*kernel)


def find(graph_class: str | None = "conv-e17-d7", facts: DeviceFacts = H200, **options: Any) -> Any:
    return find_schedule(NEW, "conv", "backward", "float32", "ir_mul", facts, graph_class, **options)


@pytest.fixture
def shipped_with_table(shipped: Path) -> Path:
    """No entry is known, but the fitted model is."""
    target = table.table_path(shipped, "nvidia-h200")
    target.parent.mkdir(parents=True)
    target.write_bytes(table.table_path(ROOT / "results", "nvidia-h200").read_bytes())
    return shipped


@pytest.mark.covering(2)
@pytest.mark.parametrize("text", CLASSES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", problems())
def test_predicted_schedules_are_legal(name: str, direction: str, text: str) -> None:
    graph_class, place = GraphClass.parse(text), DIRECTIONS.index(direction) + CLASSES.index(text)
    options = {"operation": graph_class.operation, "layout": ("ir_mul", "mul_ir")[place % 2]}
    spec = spec_of(problems()[name], direction, dtype=("float32", "float64")[place // 2 % 2], **options)
    found = predict(spec, graph_class)
    assert found is not None
    made = make_plan(dataclasses.replace(spec, schedule=found.schedule))
    assert made.spec.schedule == found.schedule


@pytest.mark.parametrize("facts", OTHERS, ids=lambda facts: facts.name)
def test_on_another_gpu_it_is_legal_there_and_called_a_transfer(facts: DeviceFacts) -> None:
    for problem in (NEW, problems()["nequip-benzene"]):
        for direction in DIRECTIONS:
            spec = spec_of(problem, direction, facts)
            found = predict(spec, GraphClass.parse("conv-e17-d7"))
            assert found is not None and f"for {facts.name} this is a transfer, an estimate" in found.reason
            make_plan(dataclasses.replace(spec, schedule=found.schedule))


def test_it_is_the_same_every_time_and_for_every_size_near_a_recorded_one() -> None:
    spec = spec_of(NEW, "forward")
    first = predict(spec, GraphClass.parse("conv-e17-d7"))
    table._nearest.cache_clear()
    table._read.cache_clear()
    assert predict(spec, GraphClass.parse("conv-e17-d7")) == first == predict(spec, GraphClass.parse("conv-e17-d8"))
    known = table.table_for(H200)
    assert known is not None
    for text, near in (("conv-e12-d2", "conv-e8-d4"), ("conv-e13-d5", "conv-e16-d5"), ("conv-e22-d6", "conv-e19-d6")):
        found = pool.nearest_class(GraphClass.parse(text), known.classes["conv"])
        assert found is not None and found.text == near
    assert pool.nearest_class(None, known.classes["conv"]) == GraphClass.parse("conv-e19-d6")


def test_a_kernel_is_ranked_once_for_all_graphs_near_a_recorded_class(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Spec] = []
    plan = pool.product_plan
    monkeypatch.setattr(pool, "product_plan", lambda spec: planned.append(spec) or plan(spec))
    predicted._order.cache_clear()
    for classes in (("conv-e17-d7", "conv-e17-d7"), ("conv-e17-d8",)):
        finder = Finder(kernel_kind("conv").spec(NEW, "conv", "forward", "float32", "ir_mul", H200))
        assert len({finder.find(text).schedule for text in classes}) == 1
        assert 20 < len(planned) <= 200


def test_a_tuned_entry_goes_first_and_strictness_stays(shipped_with_table: Path) -> None:
    assert find().origin == "predicted"
    tuned = entry(
        CudaSchedule(path_groups=3, block_size=64),
        problem=NEW.key,
        direction="backward",
        layout="ir_mul",
        graph_class="conv-e17-d7",
    )
    store(shipped_with_table, H200, tuned)
    assert find().entry == tuned and find("conv-e19-d7").origin == "nearest"
    assert find("conv-e8-d4").origin == "predicted", "nothing is learned from large graphs"


def test_the_reason_says_what_it_costs_and_where_that_is_from(shipped_with_table: Path) -> None:
    found = find()
    record = json.loads((ROOT / "results" / "replay" / "defaults-nvidia-h200.json").read_text())
    loss = record["choices"][record["chosen"]]["by size"]["conv large"]
    assert (found.origin, found.entry) == ("predicted", None)
    assert "nothing is tuned" in found.reason and "NVIDIA H200" in found.reason and "transfer" not in found.reason
    assert f"expected {loss['mean']:.2f} times the tuned time on the mean, {loss['worst']:.2f} at worst" in found.reason
    assert f"{loss['measured']:.0%} of its choices were measured, others estimated" in found.reason


def test_what_the_model_was_not_fitted_to_keeps_its_default(shipped_with_table: Path) -> None:
    host = DeviceFacts("cpu", "Test CPU 4 cores", "x86_64", 4, vector_bytes=32)
    pairs = TensorProductProblem.fully_connected("8x0e+8x1o", "0e+1o", "8x0e+8x1o")
    assert find(facts=host).origin == find(deterministic=True).origin == "default"
    assert find_schedule(pairs, "conv", "forward", "float32", "mul_ir", H200).origin == "default"
    assert find_schedule(NEW, "conv", "source_backward", "float32", "ir_mul", H200).origin == "default"


def test_a_schedule_that_failed_here_is_passed_over(shipped_with_table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find().schedule
    monkeypatch.setattr(query, "quarantined", lambda lists, spec: {first.key: "wrong"})
    second = find()
    assert second.origin == "predicted" and second.schedule != first


@pytest.mark.parametrize(
    ("times_us", "believed"),
    [
        ([None, 5.0], (1, (math.inf, 5.0))),
        ([5.0, 7.0], (0, (5.0, 7.0))),
        *(([None, None], None), ([0.0, 5.0], None), ([5.0], None), ("5.0", None)),
    ],
)
def test_a_kept_choice_is_believed_if_its_times_are_times(
    times_us: Any, believed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted, "_choices_in", lambda path: {"of these": {"times_us": times_us}})
    monkeypatch.setattr(predicted, "_digest", lambda *given: "of these")
    schedules, kernel = (CudaSchedule(), CudaSchedule(block_size=64)), ()
    assert predicted.chosen_before(kernel, GraphClass.parse("conv-e17-d7"), H200, schedules) == believed  # type: ignore[arg-type]


def test_an_unreadable_table_is_ignored_with_a_warning(shipped_with_table: Path) -> None:
    path = table.table_path(shipped_with_table, "nvidia-h200")
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"names": data["names"][1:]}))
    with pytest.warns(DatabaseWarning, match="defaults come from rules"):
        found = find()
    spec = spec_of(NEW, "backward")
    assert (found.origin, found.schedule) == ("default", default_schedule(spec))


def test_a_table_without_graphs_of_an_operation_predicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "table_for", lambda facts: types.SimpleNamespace(classes={}))
    assert predict(spec_of(NEW, "forward"), None) is None


def test_a_search_starts_with_the_predicted_order_of_other_problems() -> None:
    graph_class = GraphClass.parse("conv-e17-d7")
    space = search_space(NEW, "conv", "forward", "float32", H200, "ir_mul", num_edges=2**17)
    others = [
        entry(
            CudaSchedule(block_size=block, prefetch=prefetch),
            problem=problems()["mace-mp-large"].key,
            layout="ir_mul",
            graph_class="conv-e17-d7",
        )
        for block in (32, 64, 128, 256)
        for prefetch in ("none", "reload", "copy")
    ]
    found, before = (starting_points(space, graph_class, others, by_time=order) for order in (True, False))
    assert found == by_predicted_time(space.spec, graph_class, found) != before
    assert len({start.path_groups for start in found}) > 1 == len({start.path_groups for start in before})
    own = entry(CudaSchedule(block_size=512), problem=NEW.key, layout="ir_mul", graph_class="conv-e19-d6")
    assert starting_points(space, graph_class, [*others, own])[0] == space.nearest(own.tuned_schedule)


def test_trees_ask_one_question_a_level() -> None:
    trees = Trees(np.array([[0, 1], [1, 1]]), np.array([[0.5, 2.0], [1.0, 3.0]]), np.arange(8).reshape(2, 4), 100)
    rows = [[0.0, 0.0], [1.0, 0.0], [0.0, 2.5], [1.0, 4.0]]
    # First tree: bit 0 is row[0] > 0.5, bit 1 is row[1] > 2; second: row[1] > 1 and row[1] > 3.
    expected = [100 + 0 + 4, 100 + 1 + 4, 100 + 2 + 5, 100 + 3 + 7]
    assert trees.predict(rows).tolist() == pytest.approx([value * 1e-5 for value in expected])
    again = Trees.from_dict(json.loads(json.dumps(trees.to_dict())))
    assert again.predict(rows).tolist() == trees.predict(rows).tolist()
    with pytest.raises(ValueError, match="shapes"):
        Trees.from_dict(trees.to_dict() | {"values": [[1, 2, 3]]})


def test_features_have_their_names_and_tell_knobs_apart() -> None:
    spec = spec_of(NEW, "joint_backward")
    features = Features(spec, GraphClass.parse("conv-e17-d7"))
    plain, other = (features.of(plan_with(spec, **knobs)) for knobs in ({}, {"prefetch": "copy", "block_size": 256}))
    assert len(plain) == len(FEATURES)
    changed = {name for name, a, b in zip(FEATURES, plain, other, strict=True) if a != b}
    assert (
        {"prefetch=copy", "block_size", "teams_per_block"}
        <= changed
        <= {
            *("prefetch=copy", "block_size", "teams_per_block", "pressure", "blocks_held", "warps_held", "warps_busy"),
            *("waves", "tail", "in_flight", "code_held", "groups_held", "registers", "spilled"),
        }
    )


def numbers(spec: Spec, edges: float = 2.0**17, nodes: float = 2.0**10, **knobs: Any) -> dict[str, float]:
    return dict(zip(work.WORK_NAMES, work.work_of(plan_with(spec, **knobs), edges, nodes), strict=True))


def plan_with(spec: Spec, **knobs: Any) -> Any:
    groups = knobs.pop("path_groups", 6)
    plan = pool.plan_of(spec, CudaSchedule(path_groups=groups, **knobs))
    assert plan is not None
    return plan


def test_work_counts_traffic_and_additions_by_hand() -> None:
    """32 channels, x: 0e (32 elements a row), y: 0e+1o, results 0e+1o (128); two paths, 64 weights an edge."""
    problem = TensorProductProblem.channelwise("32x0e", "0e+1o", "0e+1o")
    spec = spec_of(problem, "forward")
    owned = numbers(spec, path_groups=1, edge_operand="shared")
    # A row of results is written once for 128 edges: no additions. Read: 64 weights, 4 of y, 32 of x.
    assert owned["edge_bytes"] == pytest.approx(math.log2(4 * (64 + 4 + 32)))
    assert owned["traffic"] == pytest.approx(0.0) and owned["added"] == 0.0
    assert owned["waves"] == pytest.approx(math.log2(2**10 / 4 / (132 * 2 ** owned["blocks_held"])))
    # Of 1,024 blocks with 4 warps each, 7.8 would be a multiprocessor's: all that it holds may be busy.
    assert owned["warps_held"] == pytest.approx(owned["blocks_held"] + 2)
    assert owned["warps_busy"] == pytest.approx(min(owned["warps_held"], math.log2(2**10 / 132)))
    # Each path by itself reads x for itself.
    assert numbers(spec, path_groups=2)["edge_bytes"] == pytest.approx(math.log2(4 * (64 + 2 * 4 + 2 * 32)))
    # Runs of 32 edges add a row of 128 each.
    added = numbers(spec, path_groups=1, accumulate="atomics", edges_per_chunk=32)
    assert added["added_bytes"] == pytest.approx(math.log2(4 * 128 / 32))
    # A multiprocessor with less than one block to do still holds the code of one.
    assert numbers(spec, 4.0, 2.0, path_groups=1)["code_held"] == owned["code_held"] == pytest.approx(2.0)
    # One product for 0e, three for 1o; all in one group, which all blocks share.
    assert added["products"] == pytest.approx(2.0) and added["groups_held"] == 0.0


# Of each plan the direction, what else is its kernel's, and the schedule.
PINNED_PLANS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("joint_backward", {}, {"block_size": 64}),
    (
        "forward",
        {},
        {
            **{"path_groups": 4, "channels_per_thread": 2, "min_blocks": 6},
            **{"edge_operand": "shared", "prefetch": "copy"},
        },
    ),
    (
        "backward",
        {"dtype": "float64", "layout": "mul_ir"},
        {
            **{"path_groups": 5, "accumulate": "atomics", "edges_per_chunk": 32, "order": "sender"},
            **{"edge_operand": "basis", "prefetch": "reload"},
        },
    ),
    (
        "edge_backward",
        {},
        {"path_groups": 4, "accumulate": "owners", "channels_per_thread": 2, "min_blocks": 2, "warps_per_edge": 4},
    ),
)
PINNED_WORK = {
    "registers": (-1.435168, -1.544792, -0.871681, -1.642972),
    "pressure": (-1.435168, 0.04017, -0.871681, -1.642972),
    "spilled": (0.0, 0.0375, 0.0, 0.0),
    "blocks_held": (3.321928, 2.584963, 1.584963, 2.321928),
    "warps_held": (4.321928, 4.584963, 3.584963, 4.321928),
    "warps_busy": (4.321928, 3.955606, 3.584963, 3.955606),
    "waves": (0.955606, -0.629357, 1.370643, -0.366322),
    "tail": (1.03125, 1.546875, 1.160156, 1.289062),
    "traffic": (0.11268, 0.247093, -0.000704, 0.192645),
    "edge_bytes": (13.152285, 12.214319, 14.0, 12.238405),
    "added": (0.524068, 0.0, 0.49565, 0.048318),
    "added_bytes": (11.848623, -9.965784, 12.714246, 7.169925),
    "near_rows": (0.037879, 0.078533, 0.0389, 0.074478),
    "values_per_path": (2.710493, 2.095157, 2.710493, 2.095157),
    "values_per_product": (3.0, -1.749192, -0.662965, 3.0),
    "in_flight": (9.152285, 9.799282, 9.584963, 9.560333),
    "sums": (3.807355, 4.584963, 4.807355, 4.584963),
    "weights_held": (1.584963, 3.0, 2.584963, 3.0),
    "useful_lanes": (1.0, 0.75, 1.0, 0.75),
    "products": (6.83289, 7.303781, 6.83289, 7.303781),
    "largest_share": (1.0126, 0.396659, 0.690672, 0.396659),
    "largest_group": (4.523562, 5.70044, 4.523562, 5.70044),
    "largest_paths": (0.272727, 0.363636, 0.272727, 0.363636),
    "intensity": (1.60064, 0.336554, -0.582852, 0.258021),
    "code_held": (9.111136, 7.259387, 8.002815, 7.303781),
    "code_of_group": (6.526173, 5.303781, 6.566815, 5.303781),
    "groups_held": (2.584963, 2.0, 1.584963, 2.0),
}


def test_the_numbers_that_stored_trees_were_fitted_to_stay_as_they_are() -> None:
    """Of four plans. If one changes, the trees in results/ are wrong without a word: fit them again."""
    problem = TensorProductProblem.channelwise("64x0e+64x1o+32x2e", "0e+1o+2e", "0e+1o+2e")
    found = [
        numbers(spec_of(problem, direction, **kernel), 2.0**14, 2.0**9, **knobs)
        for direction, kernel, knobs in PINNED_PLANS
    ]
    for name, values in PINNED_WORK.items():
        assert [each[name] for each in found] == pytest.approx(values, abs=1e-6), name
    assert list(PINNED_WORK) == list(work.WORK_NAMES)


def test_the_largest_of_two_groups_by_hand() -> None:
    """Of x's 0e two paths, with 1 and 3 products; of its 1o three, with 3, 3 and 6."""
    problem = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o+1e")
    found = numbers(spec_of(problem, "forward"), path_groups=2)
    assert found["largest_paths"] == pytest.approx(3 / 5) and found["weights_held"] == pytest.approx(math.log2(3))
    assert found["products"] == pytest.approx(math.log2(4 + 12))
    assert found["largest_group"] == pytest.approx(math.log2(12))
    assert found["largest_share"] == pytest.approx(math.log2(12 * 2 / 16))
    twice = numbers(spec_of(problem, "forward"), path_groups=2, channels_per_thread=2)
    assert twice["largest_group"] == pytest.approx(math.log2(24)) and twice["weights_held"] == pytest.approx(
        math.log2(6)
    )


@pytest.mark.parametrize(("min_blocks", "held"), [(0, 10), (4, 10), (12, 12)])
def test_blocks_that_a_multiprocessor_holds_by_hand(min_blocks: int, held: int) -> None:
    """Of 35 registers the compiler takes 40.25; they come in eights: 48, of 65,536 that 128 threads a block share."""
    spec = spec_of(TensorProductProblem.channelwise("32x0e", "0e+1o", "0e+1o"), "forward")
    plan = plan_with(spec, path_groups=1, block_size=128, min_blocks=min_blocks, prefetch="none", edge_operand="inline")
    found = work.Occupancy.of(plan, 0)
    limit = 65536 // (128 * max(1, min_blocks))
    assert (found.registers, found.limit, found.blocks) == (pytest.approx(35 * 1.15), min(255, limit), held)
    assert work.Occupancy.of(plan, 40 * 1024).blocks == (228 * 1024) // (41 * 1024), "with shared memory"


def test_blocks_of_one_group_hold_less_code_than_several_small_ones() -> None:
    spec = spec_of(problems()["nequip-benzene"], "joint_backward")
    knobs = {"path_groups": 7, "stage_edges": 16, "prefetch": "copy", "edge_operand": "shared"}
    large, small = (numbers(spec, **knobs, block_size=size, teams_per_node=2) for size in (256, 128))
    assert large["warps_held"] == small["warps_held"] and large["registers"] == small["registers"]
    assert (large["groups_held"], small["groups_held"]) == (0.0, 1.0) and large["code_held"] < small["code_held"]


def test_what_models_disagree_about_counts_as_slower() -> None:
    features, thresholds = np.zeros((2, 1), dtype=int), np.full((2, 1), 0.5)
    one, other = (Trees(features[:1], thresholds[:1], np.array([values]), 0) for values in ((10, 20), (10, 60)))
    trees = Trees.from_dict(json.loads(json.dumps(Trees.mean([one, other]).to_dict())))
    assert trees.predict([[0.0], [1.0]]) == pytest.approx([10e-5, 40e-5])
    assert trees.cautious([[0.0], [1.0]]) == pytest.approx([10e-5, 60e-5])


def test_the_table_is_small() -> None:
    path = table.table_path(paths.results_dir(), "nvidia-h200")
    assert path.stat().st_size < 700_000


def test_a_shortlist_has_likely_schedules_that_divide_the_work_in_other_ways_and_the_rules() -> None:
    wide, narrow = CudaSchedule(block_size=128), CudaSchedule(block_size=64)
    alike = [dataclasses.replace(wide, path_groups=2), dataclasses.replace(wide, stage_edges=8, stream=True)]
    rules, last = CudaSchedule(accumulate="atomics"), CudaSchedule(block_size=32)
    order = [wide, *alike, narrow, last, rules]
    assert shortlist(order, None, 3) == [wide, narrow, last]
    assert shortlist(order, rules, 3) == [wide, narrow, rules] == shortlist(order, rules, 3)
    assert shortlist(order, rules, 1) == [wide] and shortlist(order, rules, 9) == [wide, narrow, last, rules]
    assert shortlist(order[:-1], rules, 9) == [wide, narrow, last], "the rules' default is illegal or failed"


def test_the_runtime_offers_legal_others_and_the_rules(shipped_with_table: Path) -> None:
    for text in ("conv-e17-d7", "conv-e8-d4", "conv-e17-d5-s5"):
        found = find(text)
        assert found.origin == "predicted" and len(found.others) == TRIED - 1 and found.schedule not in found.others
        spec = spec_of(NEW, "backward")
        for schedule in found.others:
            make_plan(dataclasses.replace(spec, schedule=schedule))
        skewed = text.endswith("s5")
        assert all(schedule == schedule.for_skew() for schedule in found.others) or not skewed
        rules = default_schedule(spec, pool.edges_for_rules(H200, GraphClass.parse(text)))
        made = make_plan(dataclasses.replace(spec, schedule=rules.for_skew() if skewed else rules)).spec.schedule
        assert made in (found.schedule, *found.others)
        assert "the first run on a graph of this size tries it and the next likely schedules" in found.reason
