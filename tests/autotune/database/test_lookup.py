"""Lookup: the order of preference, what is skipped and why, the user's overlay, strictness."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from database_samples import GPU, HOST, PROBLEM, entry, store

from autotune.database import lookup
from autotune.database import nearest as query
from autotune.database import store as database
from autotune.database.lookup import Tuning, find_schedule
from autotune.database.nearest import is_legal
from autotune.database.store import Database, DatabaseWarning, database_path, device_record, load_table
from autotune.errors import TuningMissError
from autotune.measure.space import search_space
from autotune.search.starting_points import known_entries, starting_points
from autotune.workload import known_kinds as product_kind
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import ProblemError
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

SCHEDULES = [HostSchedule(path_groups=2, channel_block=block) for block in (4, 8, 16, 32)]


@pytest.fixture
def user(shipped: Path) -> Path:
    return shipped.parent / "user"


def find(
    graph_class: GraphClass | str | None = "conv-e14-d5",
    *,
    problem: TensorProductProblem = PROBLEM,
    direction: str = "forward",
    dtype: str = "float32",
    layout: str = "mul_ir",
    facts: DeviceFacts = HOST,
    strict: bool | None = None,
) -> Tuning:
    return find_schedule(problem, "conv", direction, dtype, layout, facts, graph_class, strict)


def default(facts: DeviceFacts = HOST, direction: str = "forward", dtype: str = "float32") -> object:
    unset = CudaSchedule() if facts.backend == "cuda" else HostSchedule()
    return default_schedule(Spec(PROBLEM, DIRECTIONS[direction], unset, "conv", dtype, "mul_ir", "int64", facts))


def test_without_a_database_it_is_the_default(shipped: Path) -> None:
    for facts in (HOST, GPU):
        for direction in DIRECTIONS:
            found = find(facts=facts, direction=direction)
            assert (found.origin, found.entry) == ("default", None)
            assert found.schedule == default(facts, direction)
            assert "nothing is tuned" in found.reason


def test_an_exact_entry_wins(shipped: Path) -> None:
    exact, near = entry(SCHEDULES[0]), entry(SCHEDULES[1], graph_class="conv-e14-d4")
    store(shipped, HOST, near, exact)
    found = find()
    assert (found.schedule, found.origin, found.entry) == (SCHEDULES[0], "exact", exact)
    assert found == find(GraphClass("conv", 14, 5)) == find(dtype="torch.float32")


def test_the_nearest_graph_class_comes_next_and_larger_wins_a_tie(shipped: Path) -> None:
    store(
        shipped,
        HOST,
        entry(SCHEDULES[0], graph_class="conv-e10-d5"),
        entry(SCHEDULES[1], graph_class="conv-e13-d5"),
        entry(SCHEDULES[2], graph_class="conv-e15-d5"),
    )
    found = find("conv-e14-d5")
    assert (found.schedule, found.origin) == (SCHEDULES[2], "nearest")
    assert "conv-e15-d5" in found.reason and "conv-e14-d5" in found.reason
    assert find("conv-e11-d5").schedule == SCHEDULES[0]


def test_of_a_gpus_large_graphs_nothing_is_learned_about_small_ones(shipped: Path) -> None:
    large, small = (CudaSchedule(stage_edges=stage, block_size=64) for stage in (8, 16))
    store(shipped, GPU, entry(large, graph_class="conv-e13-d5"))
    assert find("conv-e13-d9", facts=GPU).schedule == large and find(None, facts=GPU).schedule == large
    found = find("conv-e12-d5", facts=GPU)
    assert found.origin == "default" and "about this size" in found.reason
    store(shipped, GPU, entry(large, graph_class="conv-e13-d5"), entry(small, graph_class="conv-e8-d4"))
    assert find("conv-e12-d5", facts=GPU).schedule == small and find("conv-e13-d4", facts=GPU).schedule == large
    store(shipped, HOST, entry(SCHEDULES[0], graph_class="conv-e19-d5"))
    assert find("conv-e8-d4").origin == "nearest", "a host launches nothing"


def test_a_record_of_another_size_is_better_than_an_error(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = entry(CudaSchedule(stage_edges=8, block_size=64), graph_class="conv-e13-d5", errors={"g": 2e-7})
    store(shipped, GPU, large)
    kernel = (PROBLEM, "conv", "forward", "float32", "mul_ir", GPU, "conv-e8-d5")
    assert find_schedule(*kernel).origin == "default"
    assert find_schedule(*kernel, True).entry == large == find_schedule(*kernel, tolerance=1e-6).entry
    with pytest.raises(TuningMissError):
        find_schedule(*kernel, tolerance=1e-8)
    faults = {find_schedule(*kernel).schedule.key: "wrong"}
    monkeypatch.setattr(query, "quarantined", lambda lists, spec: faults)
    assert find_schedule(*kernel).entry == large, "its default failed here"


def test_without_a_graph_class_it_is_the_largest_graph(shipped: Path) -> None:
    store(
        shipped,
        HOST,
        entry(SCHEDULES[0], graph_class="conv-e10-d5"),
        entry(SCHEDULES[1], graph_class="conv-e17-d7"),
        entry(SCHEDULES[2], graph_class="conv-e19-d7", layout="ir_mul"),
    )
    found = find(None)
    assert (found.schedule, found.origin) == (SCHEDULES[1], "nearest")
    assert "largest tuned graph" in found.reason and "no graph class" in found.reason


def test_another_layout_comes_after_every_graph_class_of_this_one(shipped: Path) -> None:
    other = entry(SCHEDULES[0], layout="ir_mul")
    store(shipped, HOST, other)
    found = find()
    assert (found.schedule, found.origin) == (SCHEDULES[0], "nearest")
    assert "layout ir_mul" in found.reason
    store(shipped, HOST, entry(SCHEDULES[1], graph_class="conv-e25-d9"))
    assert find().schedule == SCHEDULES[1]
    assert find(layout="ir_mul").origin == "exact"


def test_other_problems_directions_dtypes_and_operations_do_not_count(shipped: Path) -> None:
    store(
        shipped,
        HOST,
        entry(direction="backward"),
        entry(dtype="float64"),
        entry(operation="plain", graph_class="plain-e14"),
        entry(problem=TensorProductProblem.channelwise("4x0e", "0e", "0e").key),
    )
    assert find().origin == "default"


def test_an_illegal_schedule_is_skipped_and_the_reason_says_so(shipped: Path) -> None:
    too_many = HostSchedule(path_groups=2, threads=64)
    store(shipped, HOST, entry(too_many), entry(SCHEDULES[1], graph_class="conv-e17-d6"))
    found = find()
    assert (found.schedule, found.origin) == (SCHEDULES[1], "nearest")
    assert "skipped" in found.reason and "threads=64 exceeds the 4 cores" in found.reason
    store(shipped, HOST, entry(too_many, graph_class="conv-e17-d6"))
    found = find()
    assert (found.schedule, found.origin) == (default(), "default")
    assert found.reason.count("threads=64") == 2


def test_a_schedule_in_quarantine_is_skipped_and_the_reason_says_so(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(shipped, HOST, entry(SCHEDULES[0]))
    monkeypatch.setattr(query, "quarantined", lambda lists, spec: {SCHEDULES[0].key: "wrong values"})
    found = find()
    assert (found.schedule, found.origin) == (default(), "default")
    assert "conv-e14-d5 mul_ir: its schedule is in quarantine here, wrong values" in found.reason


def test_an_unfused_schedule_is_judged_as_the_plain_kernel_it_runs(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(shipped, HOST, entry(HostSchedule(path_groups=2, fuse=False)))
    judged = []
    make_plan = product_kind.make_plan
    monkeypatch.setattr(product_kind, "make_plan", lambda spec: judged.append(spec.operation) or make_plan(spec))
    assert find().origin == "exact"
    assert judged == ["plain"]


def test_a_schedule_of_another_backend_is_skipped(shipped: Path) -> None:
    store(shipped, HOST, entry(CudaSchedule()))
    found = find()
    assert found.origin == "default"
    assert "cuda schedule cannot run" in found.reason


@pytest.mark.parametrize(
    ("changes", "origin"),
    [
        ({}, "other-device"),
        ({"arch": "aarch64"}, "default"),
        ({"vector_bytes": 64}, "default"),
        ({"units": 64}, "other-device"),
    ],
)
def test_another_cpu_counts_where_machine_and_vectors_agree(shipped: Path, changes: dict, origin: str) -> None:
    other = dataclasses.replace(HOST, name="Other CPU", **changes)
    store(shipped, other, entry(SCHEDULES[3]))
    found = find()
    assert found.origin == origin
    if origin == "other-device":
        assert found.schedule == SCHEDULES[3]
        assert "Other CPU" in found.reason


def test_another_gpu_counts_where_the_architecture_agrees_and_the_nearest_in_size_wins(shipped: Path) -> None:
    small = cuda_facts("sm_90", "A small one", 66)
    large = cuda_facts("sm_90", "B large one", 130)
    blackwell = cuda_facts("sm_100", "C other one", 132)
    for facts, stage in ((small, 8), (large, 16), (blackwell, 4)):
        store(shipped, facts, entry(CudaSchedule(stage_edges=stage, block_size=64)))
    found = find(facts=GPU)
    assert (found.origin, found.schedule) == ("other-device", CudaSchedule(stage_edges=16, block_size=64))
    ampere = find(facts=cuda_facts("sm_80", "Ampere"))
    assert (ampere.origin, ampere.schedule) == ("other-device", CudaSchedule(stage_edges=4, block_size=64))
    assert "C other one (sm_100, this is sm_80: never measured here)" in ampere.reason
    assert find(facts=HOST).origin == "default", "a host's kernels are others"


def test_this_device_comes_before_another_one(shipped: Path) -> None:
    store(shipped, dataclasses.replace(HOST, name="Other CPU"), entry(SCHEDULES[0]))
    store(shipped, HOST, entry(SCHEDULES[1], graph_class="conv-e2-d1"))
    assert (find().origin, find().schedule) == ("nearest", SCHEDULES[1])


def test_files_kept_aside_are_no_devices(shipped: Path) -> None:
    path = store(shipped, dataclasses.replace(HOST, name="Other CPU"), entry(SCHEDULES[0]))
    path.rename(path.with_name("other-cpu.corrupt-20261120T120000Z.json"))
    assert find().origin == "default"


def test_the_users_entries_lie_over_the_shipped_ones(shipped: Path, user: Path) -> None:
    store(shipped, HOST, entry(SCHEDULES[0]), entry(SCHEDULES[1], graph_class="conv-e17-d6"))
    assert find().schedule == SCHEDULES[0]
    store(user, HOST, entry(SCHEDULES[2]))
    assert find().schedule == SCHEDULES[2]
    assert find("conv-e17-d6").schedule == SCHEDULES[1]


@pytest.mark.parametrize("damaged", ["shipped", "user"])
def test_a_damaged_database_never_breaks_lookup(shipped: Path, user: Path, damaged: str) -> None:
    sound = {"shipped": user, "user": shipped}[damaged]
    store(sound, HOST, entry(SCHEDULES[0]))
    directory = sound.parent / damaged
    directory.mkdir()
    database_path(directory, HOST.slug).write_text('{"schema": 1, "entries": [')
    with pytest.warns(DatabaseWarning, match=HOST.slug):
        assert find().schedule == SCHEDULES[0]
    # A directory where the file should be: it cannot even be opened.
    database_path(directory, HOST.slug).unlink()
    database_path(directory, HOST.slug).mkdir()
    with pytest.warns(DatabaseWarning, match="cannot be read") as warned:
        assert find().schedule == SCHEDULES[0]
    assert [str(told.message).count(str(directory)) for told in warned] == [1], "a path is named once"


def test_a_damaged_database_of_another_device_never_breaks_lookup(shipped: Path) -> None:
    shipped.mkdir()
    (shipped / "broken.json").write_text("{")
    (shipped / "odd.json").write_text(json.dumps({"schema": 1, "device": {"units": "many"}, "entries": []}))
    with pytest.warns(DatabaseWarning, match="broken"):
        assert find().origin == "default"


def test_strict_lookup_accepts_this_device_only(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(shipped, dataclasses.replace(HOST, name="Other CPU"), entry(SCHEDULES[0]))
    with pytest.raises(TuningMissError, match="equitune tune") as caught:
        find(strict=True)
    assert isinstance(caught.value, LookupError)
    assert find().origin == "other-device"
    monkeypatch.setenv("EQUITUNE_STRICT", "1")
    with pytest.raises(TuningMissError):
        find()
    assert find(strict=False).origin == "other-device"
    store(shipped, HOST, entry(SCHEDULES[1], graph_class="conv-e2-d1"))
    assert find().origin == "nearest"
    monkeypatch.setenv("EQUITUNE_STRICT", "0")
    assert find(direction="backward").origin == "default"


def test_an_unknown_direction_is_an_error(shipped: Path) -> None:
    with pytest.raises(ProblemError, match="sideways"):
        find(direction="sideways")


def test_a_warm_lookup_among_many_entries_neither_parses_nor_walks_them(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database_path(shipped, HOST.slug)
    many = Database.load(path, device_record(HOST))
    for number in range(1000):
        many.put(entry(problem=f"{PROBLEM.key}{number}"))
    many.put(entry(SCHEDULES[0]))
    many.save()
    find()

    def forbidden(*_: object) -> None:
        raise AssertionError("a warm lookup must not parse a file or build a table")

    monkeypatch.setattr(database, "read_table", forbidden)
    monkeypatch.setattr(database.Table, "of", forbidden)
    ranked = []
    by_nearness = lookup.by_nearness
    monkeypatch.setattr(lookup, "by_nearness", lambda q, e: ranked.append(len(e)) or by_nearness(q, e))
    assert find().origin == "exact"
    assert find("conv-e3-d1").origin == "nearest"
    assert find(direction="backward").origin == "default"
    assert sum(ranked) == 1


def test_the_shipped_databases_are_sound() -> None:
    for path in sorted(database.paths.results_dir().glob("*.json")):
        if "." not in path.stem:
            assert load_table(path).flaws == (), path


def test_deterministic_kernels_take_deterministic_entries_only(shipped: Path) -> None:
    schedule = HostSchedule(path_groups=2)
    store(shipped, HOST, entry(schedule), entry(HostSchedule(), deterministic=True, graph_class="conv-e9-d4"))
    given = (PROBLEM, "conv", "forward", "float32", "mul_ir", HOST, "conv-e14-d5")
    normal, fixed = find_schedule(*given), find_schedule(*given, deterministic=True)
    assert (normal.origin, normal.schedule) == ("exact", schedule)
    assert (fixed.origin, fixed.schedule) == ("nearest", HostSchedule())
    assert fixed.entry is not None and fixed.entry.deterministic
    backward = find_schedule(PROBLEM, "conv", "backward", "float32", "mul_ir", HOST, deterministic=True)
    assert backward.origin == "default", "its parts are what must be legal"


@pytest.mark.parametrize(("degree", "teams"), [(3, 1), (6, 4), (9, 8)])
def test_a_schedule_of_another_degree_keeps_the_edges_of_a_team(shipped: Path, degree: int, teams: int) -> None:
    """Eight teams shared a node's 128 edges; more than eight are not formed."""
    tuned = CudaSchedule(teams_per_node=8, block_size=256)
    store(shipped, GPU, entry(tuned, graph_class="conv-e17-d7"))
    found = find(f"conv-e17-d{degree}", facts=GPU)
    assert found.schedule == dataclasses.replace(tuned, teams_per_node=teams)
    assert (found.origin, "with teams_per_node=" in found.reason) == ("nearest", teams != 8)
    assert find("conv-e19-d7", facts=GPU).schedule == find(None, facts=GPU).schedule == tuned


def test_entries_of_the_nearest_device_come_first(shipped: Path) -> None:
    """Where a search starts on a device without records: this one's own, then its architecture's by size."""
    devices = [
        (cuda_facts("sm_90", "NVIDIA Small", 60), 1),
        (cuda_facts("sm_80", "NVIDIA Old", 132), 2),
        (cuda_facts("sm_90", "NVIDIA Twin", 114), 4),
        (GPU, 8),
    ]
    for facts, chunk in devices:
        store(shipped, facts, entry(CudaSchedule(edges_per_chunk=chunk, accumulate="atomics")))
    store(shipped, HOST, entry(SCHEDULES[0]))
    found = [getattr(known.tuned_schedule, "edges_per_chunk", None) for known in known_entries(GPU)]
    assert found[:4] == [8, 4, 1, 2]
    new = cuda_facts("sm_80", "NVIDIA New", 108)
    space = search_space(PROBLEM, "conv", "forward", "float32", new)
    starts = starting_points(space, GraphClass("conv", 14, 5), known_entries(new))
    assert starts[0] == space.nearest(CudaSchedule(edges_per_chunk=2, accumulate="atomics"))
    assert not starting_points(space, GraphClass("conv", 8, 5), known_entries(new)), "all of them won on large graphs"


def test_a_warm_lookup_reads_and_parses_nothing(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many entries there are: 10,000 took 0.7 ms a lookup on two cores of 2.5 GHz."""
    plain = PROBLEM.key
    crowd = [
        entry(problem=plain.replace("8x0e", f"{8 + number}x0e", 1), graph_class=f"conv-e{10 + size}-d5")
        for number in range(2000)
        for size in range(5)
    ]
    store(shipped, HOST, *crowd)
    first = find("conv-e13-d5")
    assert first.origin == "exact"
    met: list[object] = []
    legal = lookup.is_legal
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("read a file again"))
    monkeypatch.setattr(
        lookup, "is_legal", lambda query, found, skipped: met.append(found) or legal(query, found, skipped)
    )
    assert find("conv-e13-d5") == first
    assert find("conv-e17-d5").origin == "nearest"
    assert len(met) == 2, "one entry looked at in each"


def test_legality_is_known_again_by_the_schedule_and_not_by_an_entry_that_is_gone() -> None:
    spec = kernel_kind("conv").spec(PROBLEM, "conv", "forward", "float32", "mul_ir", HOST)
    asked, good, bad = query.Query(spec, find_schedule), entry(SCHEDULES[0]), entry(HostSchedule(threads=64))
    for number in range(20):
        # A copy that is dropped at once, as one is for another layout: the next often has its place in memory.
        kept = good if number % 2 else bad
        assert is_legal(asked, dataclasses.replace(kept), []) is (kept is good)
