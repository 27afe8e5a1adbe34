"""Spherical harmonics as something to tune: configs, spaces, checks, entries, lookups, a run as a whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from database_samples import HOST, entry, store

from autotune.bench.kernels import bench
from autotune.cli.show import show
from autotune.database import store as database
from autotune.database.entry import Entry
from autotune.database.lookup import find_schedule
from autotune.database.store import Database, database_path
from autotune.errors import ConfigError, DatabaseError, TuningMissError
from autotune.measure.kinds import measured_kind, space_of
from autotune.measure.trial import TrialJob, TrialSetting
from autotune.models.accelerate import accelerate
from autotune.modules import rows as harmonics
from autotune.modules.rows import SphericalHarmonics, spherical_harmonics
from autotune.replay.samplers import record
from autotune.report import summary_table, write_reports
from autotune.search.loop import compile_ahead
from autotune.search.study import study_name
from autotune.tune.run import tune
from autotune.workload.config import load_all, load_config, load_problems
from autotune.workload.graphs import EdgesAlone, GraphSpec, build_graph
from autotune.workload.workload import GraphClass, Workload
from kernelgen.arithmetic.directions import HARMONICS_DIRECTIONS
from kernelgen.device import cuda_facts, device_facts
from kernelgen.errors import ProblemError
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.spherical_harmonics import HarmonicsCudaSchedule, HarmonicsHostSchedule
from kernelgen.problem.other_kinds import HarmonicsProblem

L2 = HarmonicsProblem((0, 1, 2), "component", True)
FEW = GraphSpec("few", EdgesAlone(300))
CONFIG = """
problem = "sh-small"
graph = "few"
trials = 2
directions = ["forward"]
[harmonics.sh-small]
degrees = [1, 2]
normalize = true
normalization = "component"
[graphs.few]
edges = 300
"""


def workload(problem: HarmonicsProblem = L2, dtype: str = "float32", **changes: Any) -> Workload:
    return Workload("sh", problem, "harmonics", FEW, dtype, **changes)


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty database, for this machine too."""
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path / "shipped")
    monkeypatch.setattr(harmonics, "_MODULES", {})
    return tmp_path / "shipped"


def tuned(block_size: int, direction: str = "forward", count: int = 300, **changes: Any) -> Entry:
    """An entry of L2 on this machine."""
    given = {
        "problem": L2.key,
        "operation": "harmonics",
        "direction": direction,
        "graph_class": GraphClass.of("harmonics", count, 1).text,
        "graph": {"name": "few", "edges": count, "nodes": 0},
        "default": entry().to_dict()["default"] | {"schedule": HarmonicsHostSchedule().to_dict()},
    }
    return entry(HarmonicsHostSchedule(block_size=block_size), **given | changes)  # type: ignore[arg-type]


def test_a_config_names_harmonics_beside_products(tmp_path: Path) -> None:
    more = CONFIG.replace('problem = "sh-small"', 'problem = ["sh-small", "sh-l3"]')
    small, l3 = load_config(written(tmp_path, more), "cpu").workloads
    assert small.problem == HarmonicsProblem((1, 2), "component", True)
    assert l3.problem == load_all()["sh-l3"] == HarmonicsProblem((0, 1, 2, 3), "component", True)
    assert (small.operation, small.layout, small.directions) == ("harmonics", "mul_ir", ("forward",))
    assert workload().directions == tuple(HARMONICS_DIRECTIONS)
    assert small.num_edges == 300 and small.graph_class().text == "harmonics-e8"
    assert small.identity("forward") == (
        *("sh|1,2|component|normalize", "harmonics", "forward", "float32", "mul_ir", "harmonics-e8"),
        False,
    )
    assert "harmonics" not in load_problems()


@pytest.mark.parametrize("backend, most", [("cpu", 100_000), ("cuda", 1_000_000)])
def test_the_config_of_harmonics(backend: str, most: int) -> None:
    config = load_config("harmonics", backend)
    large = [w for w in config.workloads if w.num_edges == most and w.dtype == "float32"]
    assert [w.label for w in large] == ["sh-l1", "sh-l2", "sh-l3", "sh-l4", "sh-l6"]
    assert sum(w.dtype == "float64" for w in config.workloads) == 1
    assert all(w.directions == tuple(HARMONICS_DIRECTIONS) for w in config.workloads)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("degrees = [1, 2]", 'degrees = "1..2"', "degrees are '1..2'; expected for example '0-3'"),
        ("degrees = [1, 2]", "degrees = [1, 13]", "degrees is .1, 13.; expected one or more integers of 0..12"),
        ("normalize = true", "normalise = true", "unknown key 'normalise'; did you mean 'normalize'"),
        ("trials = 2", 'layout = "ir_mul"', "have layout 'ir_mul' and deterministic = false; leave both out"),
        ("trials = 2", "deterministic = true", "deterministic = true; leave both out"),
        ("trials = 2", 'operation = "conv"', "operation is 'conv'; expected one of ..harmonics"),
        ("trials = 2", 'directions = ["edge_backward"]', "expected some of ..forward', 'backward', 'double_backward'"),
        ("edges = 300", "edges = 0", "edges is 0; expected a positive integer"),
        ("edges = 300", "edges = 300\ncutoff = 2", "unknown key 'cutoff'"),
        ('"sh-small"', '"tiny"', "graph 'few' has edges alone, and a convolution needs nodes"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, CONFIG.replace(old, new).replace('directions = ["forward"]\n', "", 1)))


def test_records_are_of_products(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, CONFIG + "[record.cpu]\nthreads = [0]"), "cpu")
    with pytest.raises(ConfigError, match="a search times all schedules of harmonics already; leave out sh-small"):
        record(config, "cpu", tmp_path, None)  # type: ignore[arg-type]


def test_graph_classes_of_harmonics() -> None:
    kind = GraphClass.of("harmonics", 1_000_000, 0)
    assert kind.text == "harmonics-e20" and GraphClass.parse(kind.text) == kind
    assert kind.distance(GraphClass.parse("harmonics-e17")) == 3
    assert kind.distance(GraphClass.parse("plain-e20")) == float("inf")
    assert build_graph(FEW).num_edges == 300 and build_graph(FEW).num_nodes == 0


@pytest.mark.parametrize("direction", HARMONICS_DIRECTIONS)
def test_the_space_has_every_knob_of_the_schedule(direction: str) -> None:
    for facts, kind in ((cuda_facts("sm_90"), HarmonicsCudaSchedule), (HOST, HarmonicsHostSchedule)):
        space = space_of(workload(), direction, facts)
        assert set(space.knobs) == {field.name for field in dataclasses.fields(kind)}
        assert space.values(space.default) is not None and space.broken_limit(space.default) is None
        assert all(set(choices) <= set(kind.choices[knob]) for knob, choices in space.knobs.items())
        assert space.knobs.get("threads", (0, 2)) == (0, 2)
        legal = {schedule for schedule in space.shuffled(0) if space.broken_limit(schedule) is None}
        assert len(legal) == space.count_legal(10_000) > 4
        assert all(space.nearest(schedule) == schedule for schedule in legal)
    assert study_name(workload(), direction) == f"sh-harmonics-{direction}-float32-mul_ir-harmonics-e8"


def test_stages_count_where_rows_are_read_ahead() -> None:
    space = space_of(workload(), "forward", cuda_facts("sm_90"))
    two = {staging: space.schedule({"staging": staging, "stages": 2}) for staging in ("vectors", "ahead")}
    one = {staging: space.schedule({"staging": staging, "stages": 1}) for staging in ("vectors", "ahead")}
    assert two["vectors"] == one["vectors"] and two["ahead"] != one["ahead"]


def test_compulsory_bytes() -> None:
    work, dim = workload(dtype="float64"), 9
    moved = [work.compulsory_bytes(direction, 10, 0) for direction in HARMONICS_DIRECTIONS]
    assert moved == [8 * 10 * number for number in (3 + dim, 3 + dim + 3, 3 + dim + 3 + 3 + dim)]


@pytest.mark.parametrize("direction", HARMONICS_DIRECTIONS)
def test_cuda_kernels_compile(direction: str) -> None:
    space = space_of(workload(), direction, cuda_facts("sm_90"))
    assert compile_ahead(space, space.default).resources["registers"] > 0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_output_is_held_to_e3nn(dtype: str, normalize: bool) -> None:
    work = workload(HarmonicsProblem((0, 1, 4, 1), "norm", normalize), dtype)
    kind, tolerance = measured_kind(work.operation), {"float32": 1e-6, "float64": 1e-14}[dtype]
    tensors = kind.tensors(work, "cpu")
    reference, operator = kind.reference(work, "cpu", tensors), kind.build(work, {}, "cpu")
    for name, direction in HARMONICS_DIRECTIONS.items():
        outputs = kind.run(operator, name, tensors, None, poison=True)()
        errors = reference.check(name, outputs)
        assert list(errors) == list(direction.outputs) and max(errors.values()) < tolerance
        for slot, output in outputs.items():
            wrong = output.clone()
            wrong[-1, -1] += 1.0
            assert reference.check(name, {slot: wrong})[slot] > 1e-4, "one element of the last row"
            wrong[-1, -1] = torch.nan
            assert reference.check(name, {slot: wrong})[slot] == float("inf")


def test_a_trial_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    session = TrialSetting(workload(), "cpu").open()
    job = TrialJob("double_backward", HarmonicsHostSchedule(block_size=16), max_seconds=0.01)
    outcome = session.measure(job)
    assert outcome.ok and outcome.time_us and set(outcome.errors) == {"x", "g"}, outcome.reason
    with monkeypatch.context() as patched:
        patched.setattr("kernelgen.ops.harmonics.load_kernel", lambda spec: SimpleNamespace(run=lambda *_: None))
        other = dataclasses.replace(job, schedule=HarmonicsHostSchedule(block_size=32))
        assert session.measure(other).state == "wrong", "outputs that no kernel wrote are full of NaN"
    too_many = HarmonicsHostSchedule(threads=256)
    assert session.measure(TrialJob("forward", too_many)).state == "illegal"


def test_entries_are_checked_by_their_operation() -> None:
    good = tuned(64)
    assert Entry.from_dict(good.to_dict()) == good and good.tuned_schedule == HarmonicsHostSchedule(block_size=64)
    assert good.default["schedule"] == HarmonicsHostSchedule().to_dict()
    with pytest.raises(DatabaseError, match="schedule: unknown knob 'accumulate'"):
        Entry.from_dict(good.to_dict() | {"schedule": HostSchedule().to_dict()})
    with pytest.raises(DatabaseError, match="schedule: unknown knob 'block_size'"):
        Entry.from_dict(good.to_dict() | {"operation": "plain"})


def test_lookup_exact_nearest_default(shipped: Path) -> None:
    here = device_facts("cpu")
    store(shipped, here, *(tuned(size, count=count) for size, count in ((16, 300), (64, 10_000), (256, 1_000_000))))

    def found(graph_class: str | None, direction: str = "forward", dtype: str = "float32") -> tuple[int, str]:
        tuning = find_schedule(L2, "harmonics", direction, dtype, "mul_ir", here, graph_class)
        return tuning.schedule.block_size, tuning.origin  # type: ignore[attr-defined]

    assert found("harmonics-e8") == (16, "exact")
    assert found("harmonics-e12") == (64, "nearest") and found(None) == (256, "nearest")
    assert found(None, "backward") == found("harmonics-e8", dtype="float64") == (32, "default")
    with pytest.raises(ProblemError, match="direction is 'edge_backward'"):
        found(None, "edge_backward")


def test_modules_load_what_was_tuned(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, x = tuple(HARMONICS_DIRECTIONS), torch.randn(5, 3)
    default = SphericalHarmonics([0, 1, 2], True, "component")
    wanted = default(x)
    assert {tuning.origin for tuning in default.tuning.values()} == {"default"}
    store(shipped, device_facts("cpu"), *(tuned(64, name, 300) for name in names), tuned(128, "forward", 100_000))
    for given, block_size, origin in ((300, 64, "exact"), (100_000, 128, "exact"), (900, 64, "nearest")):
        module = SphericalHarmonics([0, 1, 2], True, "component", num_vectors=given, strict=True)
        before = module.tuning
        assert torch.equal(module(x), wanted) and module.tuning == before
        forward = module.tuning["forward"]
        assert (forward.schedule.block_size, forward.origin) == (block_size, origin)  # type: ignore[attr-defined]
        assert forward.entry is not None and "tuned on this device" in forward.reason
        assert module._operator is not None and module._operator.schedules["forward"] == forward.schedule
    module = SphericalHarmonics([0, 1, 2], True, "component", strict=True)
    assert module.tuning["forward"].schedule.block_size == 128, "before the first call: of many vectors"  # type: ignore[attr-defined]
    for count, block_size in ((5, 64), (100_000, 128), (5, 64)):
        module(torch.randn(count, 3))
        assert module.tuning["forward"].schedule.block_size == block_size  # type: ignore[attr-defined]
    monkeypatch.setenv("EQUITUNE_STRICT", "1")
    assert torch.equal(spherical_harmonics([0, 1, 2], x, True, "component"), wanted)
    with pytest.raises(TuningMissError, match="no tuned harmonics forward float32 for sh.0,1,2.norm.normalize"):
        spherical_harmonics([0, 1, 2], x, True, "norm")
    with pytest.raises(TuningMissError, match="float64"):
        SphericalHarmonics([0, 1, 2], True, "component")(x.double())
    with pytest.raises(ProblemError, match="num_vectors is 0; expected a positive integer"):
        SphericalHarmonics(2, True, num_vectors=0)


def test_accelerated_harmonics_load_what_was_tuned(shipped: Path) -> None:
    from e3nn import o3

    store(shipped, device_facts("cpu"), *(tuned(64, name) for name in HARMONICS_DIRECTIONS))
    model = torch.nn.ModuleList(
        [o3.SphericalHarmonics([0, 1, 2], True, "component"), o3.SphericalHarmonics([0, 1, 2], True, "norm")]
    )
    first, second = accelerate(model, strict=True).places
    assert first.replaced and first.detail.startswith("schedule nearest: tuned on this device")
    assert not second.replaced and "TuningMissError" in second.detail


def test_compiled_code_takes_the_tuned_schedule(shipped: Path) -> None:
    store(shipped, device_facts("cpu"), tuned(64))
    torch.compiler.reset()
    modules = [SphericalHarmonics([0, 1, 2], True, "component", num_vectors=n) for n in (300, None)]
    x = torch.randn(7, 3)
    for module in modules:
        assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))


def test_show_tells_what_would_be_loaded(shipped: Path) -> None:
    store(shipped, device_facts("cpu"), tuned(64, graph_class="harmonics-e17"))
    for name in ("sh-l2", L2.key):
        text = show(name, layout="ir_mul")
        assert "spherical harmonics of degrees 0, 1, 2" in text and "9 outputs" in text
        assert "forward: nearest" in text and "double backward: default" in text and "joint" not in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tuned_benched_and_reported(tmp_path: Path, shipped: Path) -> None:
    """A run as a whole, its entries loaded, compared and shown."""
    config = load_config(written(tmp_path, CONFIG), "cpu")
    results = shipped
    entries = tune(config, device="cpu", results_dir=results, with_peers=False)
    (found,) = entries
    assert found.time_us <= found.default["time_us"] and max(found.errors.values()) < found.tolerance
    assert (results / found.trials["file"]).is_file() and found.trials["count"] == 2
    again = Database.load(database_path(results, device_facts("cpu").slug))
    assert [e.identity for e in again.entries] == [found.identity]
    module = SphericalHarmonics([1, 2], True, "component", num_vectors=300)
    assert {name: tuning.origin for name, tuning in module.tuning.items()} == {
        **dict.fromkeys(HARMONICS_DIRECTIONS, "default"),
        "forward": "exact",
    }
    (row,) = bench(config, "cpu", results, peers=("e3nn",), seconds_each=0.0)
    assert (row["pass"], row["origins"]) == ("forward", {"forward": "exact"})
    assert set(row["times"]) == {"equitune", "equitune-default", "e3nn"}
    assert all("time_us" in timing for timing in row["times"].values())
    assert row["bytes"] == config.workloads[0].compulsory_bytes("forward", 300, 0)
    assert bench(config, "cpu", results, peers=("e3nn",)) == [row], "known already"
    assert "sh-small on few" in summary_table(results)
    (page,) = write_reports(results, tmp_path / "reports")
    text = page.read_text()
    assert "sh-small · few · forward · harmonics, float32, mul_ir" in text and "300 vectors" in text
