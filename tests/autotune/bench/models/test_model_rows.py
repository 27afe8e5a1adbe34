"""Rows of whole models: every contender in its process; what fails costs its own cell, and what is kept stays."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from ase.io import read
from tiny_model import EXCHANGE, PairModel, TinyPackage

from autotune.bench import model_rows
from autotune.bench import session as measuring
from autotune.bench import session as session_module
from autotune.bench import whole_models as run
from autotune.bench.contenders import _require_kernels, build, chosen, contenders_of, require_usable, warm_up_calls
from autotune.bench.model_rows import (
    ModelRow,
    row_lines,
    rows_path,
    signed,
    store_rows,
    stored_rows,
    table_lines,
    was_measured_alike,
)
from autotune.bench.session import (
    PASSES,
    REFERENCE,
    Effort,
    ModelSession,
    ModelSetting,
    errors_of,
    load,
    passes_of,
    wall_figures,
    wrong_values,
)
from autotune.bench.whole_models import Request, bench_models
from autotune.database.maintenance import statements_of
from autotune.errors import ConfigError, DatabaseError, PeerError
from autotune.models import replace as exchange
from autotune.models.package import Outputs
from autotune.models.whole_model import open_model, package_named
from kernelgen.device import device_facts

TINY = "tiny_model:tiny_model"
QUICK = Effort(seconds=0.0, warm_up_s=0.0, most=3, least=3)
# Each is a process, which takes seconds to start; what fails inside one is tested without it.
CONTENDERS = ("stock", "refuses", "dies")
PASSES_OF_A_MOLECULE = ("energy_forces", "training", "md_step")


@pytest.fixture(scope="module")
def structure(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("structures") / "four.xyz"
    Atoms("HCHN", positions=[[0, 0, 0], [0, 0, 1], [0, 1, 1], [1, 0, 1]]).write(path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def request(structure: str, **changes: Any) -> Request:
    given = {"models": (TINY,), "structures": (structure,), "contenders": CONTENDERS, "effort": QUICK}
    return Request(**given | changes)


@pytest.fixture(scope="module")
def measured(structure: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of one run, by pass."""
    return {row["pass"]: row for row in bench_models(request(structure), folder, lambda text: None)}


def test_a_row_has_figures_and_reasons(measured: dict[str, dict[str, Any]]) -> None:
    assert tuple(measured) == PASSES_OF_A_MOLECULE
    for which, row in measured.items():
        assert (row["atoms"], row["edges"], row["package"]) == (4, 12, "tiny")
        cells = row["contenders"]
        stock = cells["stock"]
        assert len(stock["wall_samples_ms"]) == 6  # two turns of three
        assert {cell["host"] for cell in cells.values()} == {model_rows.host_now()} and ModelRow(row).of_one_run
        assert stock["us_per_atom"] == pytest.approx(stock["wall_ms"] * 1e3 / 4, rel=1e-3)  # both are rounded
        assert set(stock["errors"]) == ({"gradients"} if which == "training" else {"energy", "forces"})
        assert max(stock["errors"].values()) < 1e-5
        if which == "md_step":
            parts = stock["parts_ms"]
            assert set(parts) == {"neighbors", "model", "rest"} and min(parts.values()) > 0
            assert stock["inputs"] == "the package's own calculator"
        else:
            assert sum(stock["held_parts_mib"].values()) > 0
        assert cells["refuses"]["error"] == "refuses: it does not want to"
        assert "exit code 3" in cells["dies"]["error"]


@pytest.mark.parametrize(
    ("contender", "reason"),
    [
        ("same", ""),
        ("wrong", "wrong values: energy differ by 5.0e-01"),
        ("refuses", "refuses: it does not want to"),
        ("breaks", "RuntimeError: out of order"),
        ("equitune", "nothing of the model was replaced"),
    ],
)
def test_what_fails_is_the_answer(
    contender: str, reason: str, structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUITUNE_MISSES", "0")
    exact = tmp_path / "exact.pt"
    ModelSetting(TINY, REFERENCE, "cpu", "float32").open().write_exact(structure, "energy_forces", exact)
    session = ModelSetting(TINY, contender, "cpu", "float32").open()
    answer = session.measure(structure, "energy_forces", exact, QUICK)
    if reason:
        assert reason in answer["error"] and "wall_ms" not in answer
    else:
        assert "error" not in answer and answer["wall_ms"] > 0
    assert session.facts().get("error", "") == (answer["error"] if contender in ("refuses", "equitune") else "")


@pytest.fixture(scope="module")
def crystal(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("structures") / "crystal.xyz"
    cell = [[4.2, 0, 0], [0.5, 4.7, 0], [0, 0.25, 5.1]]  # no pair at the cutoff
    Atoms("HCHN", positions=[[0, 0, 0], [0, 0, 1], [0, 1, 1], [1, 0, 1]], cell=cell, pbc=True).write(path)
    return str(path)


def test_a_crystals_stress_is_computed_in_every_step_of_its_pass_alone(
    crystal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUITUNE_MISSES", "0")
    exact, asked, evaluate = tmp_path / "exact.pt", [], TinyPackage.evaluate
    ModelSetting(TINY, REFERENCE, "cpu", "float32").open().write_exact(crystal, "energy_forces_stress", exact)
    assert set(load(exact)) == {"energy", "forces", "stress"}

    def watched(package: TinyPackage, *given: Any, training: bool, stress: bool) -> Outputs:
        asked.append((training, stress))
        return evaluate(package, *given, training=training, stress=stress)

    monkeypatch.setattr(TinyPackage, "evaluate", watched)
    session = ModelSetting(TINY, "same", "cpu", "float32").open()
    cell = session.measure(crystal, "energy_forces_stress", exact, QUICK)
    session.measure_again(crystal, "energy_forces_stress", QUICK)
    assert set(cell["errors"]) == {"energy", "forces", "stress"} and max(cell["errors"].values()) < 1e-5
    assert len(asked) >= 8 and set(asked) == {(False, True)}, "those that are timed too"
    asked.clear()
    ModelSetting(TINY, REFERENCE, "cpu", "float32").open().write_exact(crystal, "energy_forces", exact)
    assert set(session.measure(crystal, "energy_forces", exact, QUICK)["errors"]) == {"energy", "forces"}
    assert set(asked) == {(False, False)}
    monkeypatch.setattr(TinyPackage, "stress_is_apart", False)
    assert session.has_stress(crystal, "energy_forces"), "these models compute it anyway"


def test_stress_is_a_pass_where_it_costs_something(crystal: str, structure: str) -> None:
    package = open_model(TINY).package
    assert passes_of(package, read(crystal), PASSES) == PASSES
    assert "energy_forces_stress" not in passes_of(package, read(structure), PASSES)
    assert "energy_forces_stress" not in passes_of(package_named("sevennet"), read(crystal), PASSES)


def test_a_contender_that_leaves_the_stress_out_gets_no_figure(
    crystal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, evaluate = tmp_path / "exact.pt", TinyPackage.evaluate
    ModelSetting(TINY, REFERENCE, "cpu", "float32").open().write_exact(crystal, "energy_forces_stress", exact)
    without = lambda *given, **how: dataclasses.replace(evaluate(*given, **how), stress=None)  # noqa: E731
    monkeypatch.setattr(TinyPackage, "evaluate", without)
    cell = ModelSetting(TINY, "same", "cpu", "float32").open().measure(crystal, "energy_forces_stress", exact, QUICK)
    assert "stress differ by inf from stock" in cell["error"] and "wall_ms" not in cell


def test_a_stress_is_the_slope_of_the_energy(crystal: str) -> None:
    model, step, energies = open_model(TINY, dtype="float64"), 1e-6, []
    atoms = read(crystal)
    for sign in (1, -1):
        strained = atoms.copy()
        strained.set_cell(atoms.cell.array * (1 + sign * step), scale_atoms=True)
        energies.append(float(model.energies_and_forces(model.inputs([strained])).energy.detach()))
    stress = model.energies_and_forces(model.inputs([atoms]), stress=True).stress
    assert stress is not None and model.energies_and_forces(model.inputs([atoms])).stress is None
    slope = (energies[0] - energies[1]) / (2 * step) / atoms.cell.volume
    assert float(stress[0].detach().trace()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    ("contender", "device", "calls"),
    [
        ("cuequivariance", "cuda", 60),
        ("equitune+cuequivariance", "cuda", 60),
        ("stock", "cuda", 3),
        ("openequivariance", "cuda", 3),
        ("cuequivariance", "cpu", 1),
    ],
)
def test_who_tunes_itself_is_called_more_often_before_it_is_timed(contender: str, device: str, calls: int) -> None:
    assert warm_up_calls(contender, device) == calls


def test_steps_are_warm_before_they_are_timed(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    effort = Effort(warm_up_s=4.0, tuning_s=10.0)
    monkeypatch.setattr(session_module, "warm_up_calls", lambda contender, device: 7)
    monkeypatch.setattr(measuring, "warm_up", lambda step, device, *limits: done.append(limits))
    monkeypatch.setattr(measuring, "peak_mib", lambda step, device: done.append("peak"))
    monkeypatch.setattr(measuring, "wall_samples_ms", lambda step, device, effort: done.append("samples") or [1.0])
    session = ModelSetting(TINY, "same", "cpu", "float32").open()
    for _ in range(2):
        assert session.measure(structure, "energy_forces", None, effort)["wall_ms"] == 1.0
    session.measure_again(structure, "energy_forces", effort)
    later = [(1, 0.0), "samples"]
    assert done == [(7, 10.0), "peak", *later, (7, 4.0), "peak", *later, (3, 4.0), "samples"]


def test_equitune_joins_another_librarys_model(structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_MISSES", "0")
    exact = tmp_path / "exact.pt"
    ModelSetting(TINY, REFERENCE, "cpu", "float32").open().write_exact(structure, "training", exact)
    job = (structure, "training", exact, QUICK)
    alone = ModelSetting(TINY, "equitune+same", "cpu", "float32").open().measure(*job)
    assert "nothing of the model was replaced" in alone["error"]
    monkeypatch.setattr(exchange, "of_packages", lambda name: (EXCHANGE,) if name == "exchanges" else ())
    session = ModelSetting(TINY, "equitune+same", "cpu", "float32").open()
    cell = session.measure(*job)
    assert cell["note"].startswith("1 of 1 convolutions") and cell["wall_ms"] > 0
    assert cell["gradients_of"] == "1 of 1 parameters" and cell["errors"]["gradients"] < 1e-5


def test_kept_rows_start_no_process(
    measured: dict[str, dict[str, Any]], structure: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.bench.whole_models.Worker", None)
    said: list[str] = []
    assert {row["pass"]: row for row in bench_models(request(structure), folder, said.append)} == measured
    assert [line for line in said if "kept" in line]


def test_other_software_or_another_contender_is_measured_again(
    measured: dict[str, dict[str, Any]], structure: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.bench.whole_models import _plan

    def todo(**changes: Any) -> dict[tuple[str, str], tuple[str, ...]]:
        return _plan(TINY, [structure], request(structure, **changes), folder, lambda text: None).todo

    assert todo() == {}
    assert todo(contenders=("stock", "equitune-default"))[structure, "training"] == ("equitune-default",)
    assert set(todo(fresh=True)) == {(structure, which) for which in PASSES_OF_A_MOLECULE}
    monkeypatch.setattr(model_rows, "software_versions", lambda *_: {"torch": "another"})
    assert todo()[structure, "training"] == chosen(open_model(TINY).package, CONTENDERS)


def test_a_row_whose_cells_are_of_several_runs_is_measured_again(
    measured: dict[str, dict[str, Any]], structure: str, tmp_path: Path
) -> None:
    """All of it, and so is a row that lacks a cell, but for contenders that are named."""
    row, facts = json.loads(json.dumps(measured["training"])), device_facts("cpu")
    names = contenders_of(open_model(TINY).package)

    def todo(**changes: Any) -> dict[str, Any]:
        store_rows(tmp_path, facts, [row])
        asked = request(structure, passes=("training",), **{"contenders": ()} | changes)
        return run._plan(TINY, [structure], asked, tmp_path, lambda text: None).todo

    cells = row["contenders"] = {name: signed(name, {"wall_ms": 1.0, "us_per_atom": 1.0}, facts) for name in names}
    assert todo() == {} and "several runs" not in row_lines(row)[0] and "*" not in table_lines([row])[1]
    for change in ({"host": "another"}, {"date": "2026-01-01T00:00:00+00:00"}):
        before, cells["same"] = cells["same"], cells["same"] | change
        assert todo() == {(structure, "training"): names}
        assert "several runs" in row_lines(row)[0] and "*" in table_lines([row])[1]
        assert todo(contenders=("stock", "same")) == {}
        cells["same"] = before
    del cells["same"]
    assert todo() == {(structure, "training"): names}
    assert todo(contenders=("stock", "same")) == {(structure, "training"): ("same",)}


def test_a_cell_says_what_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = device_facts("cpu")
    monkeypatch.setattr(model_rows, "installed_version", {"openequivariance": "0.6.9"}.get)
    assert signed("openequivariance-captured", {}, facts)["versions"] == {"openequivariance": "0.6.9"}
    assert "versions" not in signed("stock", {}, facts) and "code" in signed("equitune-captured", {}, facts)


def test_packages_that_a_model_does_not_run_may_come_and_go() -> None:
    depends = {"package": "mace", "weights": "random", "software": {"torch": "2.11.0", "mace-torch": "0.3.16"}}
    beside = {"torch": "2.11.0", "mace-torch": "0.3.16", "nequip-allegro": "0.8.3", "sevenn": "0.12.1"}
    assert was_measured_alike({**depends, "software": beside}, depends)
    for other in ({"torch": "2.10.0"}, {"mace-torch": "0.3.15"}, {"symmetrix-xl": "1.0"}):
        assert not was_measured_alike({**depends, "software": depends["software"] | other}, depends)
    assert not was_measured_alike({**depends, "weights": "the model's own"}, depends)
    allegro = depends | {"package": "allegro", "software": {"torch": "2.11.0", "nequip": "0.19.1"}}
    assert not was_measured_alike({**allegro, "software": allegro["software"] | {"nequip-allegro": "0.8.3"}}, allegro)


@pytest.mark.parametrize(
    "change",
    [("own_code", lambda: "another"), ("GENERATOR_VERSION", "another"), ("_database_hash", lambda slug: "another")],
    ids=lambda change: change[0],
)
def test_other_code_or_schedules_of_ours_are_measured_again(
    measured: dict[str, dict[str, Any]],
    structure: str,
    change: tuple[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours alone: the others do not run it, and their figures stay."""
    from autotune.bench.whole_models import _plan

    def todo() -> dict[tuple[str, str], tuple[str, ...]]:
        given = request(structure, contenders=("equitune", "equitune-default", "stock"), passes=("training",))
        return _plan(TINY, [structure], given, tmp_path, lambda text: None).todo

    row = json.loads(json.dumps(measured["training"]))
    facts, names = device_facts("cpu"), ("equitune", "equitune-default", "stock")
    row["contenders"] = {name: signed(name, {"wall_ms": 1.0}, facts) for name in names}
    store_rows(tmp_path, device_facts("cpu"), [row])
    assert todo() == {}
    del row["contenders"]["equitune-default"]["code"]  # as in records from before cells named it
    store_rows(tmp_path, device_facts("cpu"), [row])
    assert todo() == {(structure, "training"): ("equitune-default",)}
    row["contenders"]["equitune-default"] = row["contenders"]["equitune"]
    store_rows(tmp_path, device_facts("cpu"), [row])
    assert todo() == {}
    name, value = change
    monkeypatch.setattr(model_rows, name, value)
    assert todo() == {(structure, "training"): ("equitune", "equitune-default")}


def test_allegros_own_forms_of_its_product_are_contenders() -> None:
    names = contenders_of(package_named("allegro"))
    assert names == (
        *(
            "equitune",
            "equitune-captured",
            "equitune-streamed",
            "equitune-fused",
            "equitune-tf32",
            "equitune-tf32-captured",
            "equitune-default",
            "stock",
            "cuequivariance",
            "triton",
            *(
                f"{path}-{form}"
                for form in ("captured", "aotinductor")
                for path in ("stock", "cuequivariance", "triton")
            ),
        ),
    )
    with pytest.raises(PeerError, match="its kernels need a CUDA device"):
        require_usable("triton", "cpu")
    with pytest.raises(PeerError, match="triton: its own kernels are nowhere in the model"):
        _require_kernels("triton", PairModel(), [])


def test_only_what_runs_counts_as_code() -> None:
    source = '"""What it is."""\ndef f(x):\n    """Twice."""\n    return 2 * x\n'
    same = "def f(x):\n\n    # in other words\n    return 2 * x\n"
    assert statements_of(source) == statements_of(same) != statements_of(source.replace("2 * x", "3 * x"))
    assert statements_of('class A:\n    """Nothing else."""\n') != ""


def test_the_table_names_the_fastest_other_path(measured: dict[str, dict[str, Any]]) -> None:
    row = json.loads(json.dumps(measured["training"]))
    row["contenders"] = {
        "equitune": {
            **{"wall_ms": 2.0, "us_per_atom": 500.0, "peak_mib": 1024.0},
            "held_parts_mib": {"products.contraction": 600.0, "readouts": 200.0},
        },
        "equitune-default": {"wall_ms": 1.0, "us_per_atom": 250.0},
        "stock": {"wall_ms": 8.0, "us_per_atom": 2000.0, "peak_mib": 2048.0},
        "same": {"wall_ms": 4.0, "us_per_atom": 1000.0},
        "wrong": {"error": "wrong values"},
    }
    assert (ModelRow(row).fastest, ModelRow(row).time_us("same")) == ("same", 4000.0)
    (heads, line) = table_lines([row])
    assert "2.00x same" in line and "4.00x" in line and "0.50x" in line and "1.00 GiB" in line and "2.00 GiB" in line
    assert heads.index("fastest other") == line.index("2.00x same")
    assert row_lines(row)[-1].endswith("- wrong values")
    assert row_lines(row)[2].strip() == "kept for gradients 800 MiB: products.contraction 75%, readouts 25%"
    sampled = {"equitune": [2.0] * 9, "same": [3.9, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.1], "stock": [8.0] * 3}
    for name, samples in sampled.items():
        row["contenders"][name]["wall_samples_ms"] = samples
    assert "2.00x (2.00 to 2.00) same" in table_lines([row])[1] and "4.00x  " in table_lines([row])[1]
    row["contenders"]["equitune+cuequivariance"] = {"wall_ms": 0.5, "us_per_atom": 125.0}
    assert ModelRow(row).fastest == "same", "Equitune takes part in it"
    (heads, line, without) = table_lines([row, measured["training"]])
    place = heads.index("with cuEquivariance")
    assert line[place:].startswith("0.25x") and without[place:].startswith("-")
    assert line[heads.index("stock") :].startswith("4.00x")


def test_a_damaged_record_is_not_overwritten(folder: Path, measured: dict[str, dict[str, Any]]) -> None:
    facts = device_facts("cpu")
    path = rows_path(folder, facts.slug)
    before = path.read_text()
    path.write_text(before[:-20])
    try:
        with pytest.raises(DatabaseError, match="move it away"):
            store_rows(folder, facts, [])
    finally:
        path.write_text(before)
    assert len(stored_rows(folder, facts.slug)) == len(PASSES_OF_A_MOLECULE)


def test_gradients_are_compared_by_name_and_size() -> None:
    exact = {"gradients": {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2), "zero": torch.zeros(1)}}
    found = {"gradients": {"a": torch.tensor([[3.0, 4.5]]), "c": torch.ones(2), "zero": torch.tensor([1e-9])}}
    errors, compared = errors_of(found, exact)
    assert errors == {"gradients": pytest.approx(0.1)} and compared == "2 of 3 parameters"


def test_a_value_that_is_no_number_is_wrong() -> None:
    assert wrong_values({"forces": 1e-6}, "float32") == ""
    assert "forces" in wrong_values({"energy": 0.0, "forces": float("nan")}, "float32")
    assert "energy" in wrong_values({"energy": 1e-6}, "float64")


def test_a_fast_path_without_its_kernels_is_refused() -> None:
    class SegmentedPolynomial(torch.nn.Module):
        __module__ = "cuequivariance_torch.primitives"

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.m = type(kind, (torch.nn.Module,), {})()

    class Linear(torch.nn.Sequential):
        __module__ = "cuequivariance_torch.operations.linear"

    kernel, naive = SegmentedPolynomial("Uniform1d"), SegmentedPolynomial("NaivePolynomial")
    _require_kernels("cuequivariance", torch.nn.Sequential(kernel, Linear(naive)), [])
    with pytest.raises(PeerError, match="would not run in 1 of 2 places"):
        _require_kernels("cuequivariance", torch.nn.Sequential(kernel, naive), [])
    with pytest.raises(PeerError, match="nowhere in the model"):
        _require_kernels("cuequivariance", Linear(naive), [])
    with pytest.raises(PeerError, match="nowhere in the model"):
        _require_kernels("openequivariance", PairModel(), [])


def test_peers_that_need_a_gpu_say_so_on_a_cpu() -> None:
    model = open_model(TINY)
    with pytest.raises(PeerError):
        build("cuequivariance", model)
    with pytest.raises(PeerError, match="weights are formed in registers on a GPU only"):
        build("equitune-fused", model)
    for form in ("", "-captured"):
        with pytest.raises(PeerError, match="TF32 needs an NVIDIA GPU"):
            build(f"equitune-tf32{form}", model)
    for path in ("equitune", "stock"):
        with pytest.raises(PeerError, match="CUDA graphs need a GPU"):
            build(f"{path}-captured", model)
    with pytest.raises(PeerError, match="symmetrix"):
        build("symmetrix", model)


def test_contenders_are_chosen_by_name() -> None:
    mace = package_named("mace")
    assert contenders_of(mace)[:6] == (
        *("equitune", "equitune-captured", "equitune-streamed", "equitune-fused"),
        *("equitune-tf32", "equitune-tf32-captured"),
    )
    assert contenders_of(mace)[6:9] == ("equitune+cuequivariance", "equitune-default", "stock")
    assert chosen(mace, ("stock", "equitune")) == ("equitune", "stock")
    with pytest.raises(ConfigError, match="did you mean 'stock'"):
        chosen(mace, ("stok",))
    sevennet = package_named("sevennet")  # it has no such path, and others of the same run have
    assert chosen(sevennet, ("equitune", "equitune+cuequivariance")) == ("equitune",)


def test_untuned_modules_take_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.database.store import tuned_dirs

    assert tuned_dirs()
    monkeypatch.setenv("EQUITUNE_UNTUNED", "1")
    from autotune.modules.convolution import TensorProductConv

    conv = TensorProductConv("128x0e+128x1o", "0e+1o+2e+3o", filter_irreps_out="0e+1o+2e+3o")
    assert tuned_dirs() == () and {tuning.origin for tuning in conv.tuning.values()} == {"default"}


def test_a_profile_directly_follows_its_timing_and_outlives_an_interruption(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = run._Plan(TINY, open_model(TINY).package, {"package": "tiny", "weights": "random"})
    plan.todo[structure, "training"] = ("stock", "same")
    group = run._Group(plan, {}, request(structure), tmp_path, tmp_path, lambda text: None)
    asked = []

    def answer(contender: str, method: Any, *given: Any) -> dict[str, Any]:
        asked.append((contender, method))
        if asked[-1] == ("stock", ModelSession.measure_again):
            raise KeyboardInterrupt
        figures = wall_figures([2.0, 3.0], 4) if method is ModelSession.measure else {"wall_samples_ms": [4.0]}
        known = {
            ModelSession.profile: {"device_ms": 0.25, "launches": 7},
            ModelSession.sizes: {"atoms": 4, "edges": 12},
        }
        return known.get(method, figures)

    monkeypatch.setattr(group, "ask", answer)
    with pytest.raises(KeyboardInterrupt):
        group.time_rows()
    assert asked[-5:] == [
        *(("stock", ModelSession.measure), ("same", ModelSession.measure)),
        *(("same", ModelSession.measure_again), ("same", ModelSession.profile)),
        ("stock", ModelSession.measure_again),
    ]
    (row,) = stored_rows(tmp_path, device_facts("cpu").slug).values()
    same = row["contenders"]["same"]
    assert (same["wall_ms"], same["device_ms"], same["launches"]) == (3.0, 0.25, 7)
    assert "device_ms" not in row["contenders"]["stock"] and row["contenders"]["stock"]["wall_ms"] == 2.5


def test_a_run_that_ended_before_its_profiles_makes_them_up(
    measured: dict[str, dict[str, Any]], structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(json.dumps([measured[name] for name in PASSES_OF_A_MOLECULE[:2]]))
    rows[0]["contenders"]["stock"]["device_ms"] = 0.5
    asked = request(structure, device="cuda", passes=PASSES_OF_A_MOLECULE[:2])
    monkeypatch.setattr(run, "device_facts", lambda device: device_facts("cpu"))
    store_rows(tmp_path, device_facts("cpu"), rows)
    plan = run._plan(TINY, [structure], asked, tmp_path, lambda text: None)
    assert plan.todo == {} and plan.profiles == {(structure, rows[1]["pass"]): ("stock",)}
    group = run._Group(plan, {}, asked, tmp_path, tmp_path, lambda text: None)
    monkeypatch.setattr(group, "ask", lambda contender, *given: {"device_ms": 0.25, "launches": 7})
    group.profile_rows()
    found = stored_rows(tmp_path, device_facts("cpu").slug).values()
    assert {row["pass"]: row["contenders"]["stock"]["device_ms"] for row in found} == {
        rows[0]["pass"]: 0.5,
        rows[1]["pass"]: 0.25,
    }


def test_what_ends_the_builds_does_not_wait_for_them() -> None:
    from autotune.bench.whole_models import _in_parallel

    begun, may_end = threading.Event(), threading.Event()

    def fails() -> None:
        begun.wait()
        raise KeyboardInterrupt

    def builds() -> None:
        begun.set()
        may_end.wait()  # for ever, if the line below had to wait for this

    with pytest.raises(KeyboardInterrupt):
        _in_parallel([fails, builds])
    may_end.set()
