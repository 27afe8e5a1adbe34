"""Certificates: what is right passes, planted faults are found, a refusal is neither, what was measured is kept."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from certified_net import CRASHES, CUTOFF, FAULTS, SPECIES, around, net, net_for_commands

import autotune
from autotune.certification import certificate as certificates
from autotune.certification import checks
from autotune.certification import observations as asked
from autotune.certification.certificate import FAIL, PASS, REFUSED, Certificate, certify
from autotune.certification.checks import CHECKS, NAMES
from autotune.certification.structures import as_record, draw, from_record, read, smallest
from autotune.errors import ConfigError, PeerError
from autotune.models.package import Outputs
from autotune.models.whole_model import WholeModel
from autotune.report.certificate import page_name
from kernelgen.errors import InputError

RIGHT = "another order of the edges"


def reordered(model: WholeModel) -> WholeModel:
    """The same potential with sums in another order: rounding differs, nothing else."""
    package = model.package
    inputs = package.inputs

    def turned_around(*given: Any) -> dict[str, Any]:
        found = inputs(*given)
        return found | {name: found[name].flip(0) for name in ("edges", "shifts")}

    other = copy.copy(package)
    other.inputs = turned_around  # type: ignore[method-assign]
    return WholeModel(model.name, model.module, other)


# Those that all faults together need, the cheaper ones.
SHOWN = ("molecule", "tiny cell", "skewed cell", "isolated atom", "no edges")
# In float32 those that only a tight limit finds.
IN_FLOAT32 = ("TF32", "noise", "one component of a harmonic", "a shorter cutoff")
EACH = [(fault, "float64") for fault in FAULTS if fault != "TF32"] + [(fault, "float32") for fault in IN_FLOAT32]
FEW = [("a coupling's sign", "float64"), ("TF32", "float32")]


def with_faults(faults: list[tuple[str, str]]) -> Certificate:
    """Faults, each in its precision, and a path that is right."""
    drawn = draw(SPECIES, CUTOFF, 0)
    structures = {name: drawn[name] for name in SHOWN}
    in_float64, in_float32 = (
        {name: FAULTS[name][0] for name, kind in faults if kind == dtype} | {RIGHT: reordered}
        for dtype in ("float64", "float32")
    )
    found = certify(net(), structures, paths=in_float64 | CRASHES, dtypes=("float64",), effort="quick")
    single = certify(net(torch.float32), structures, paths=in_float32, dtypes=("float32",), effort="quick")
    found.record["paths"] += single.record["paths"]
    return found


@pytest.fixture(scope="module")
def planted() -> Certificate:
    return with_faults(FEW)


@pytest.fixture(scope="module")
def all_planted() -> Certificate:
    return with_faults(EACH)


@pytest.mark.parametrize(("fault", "dtype"), FEW)
def test_a_planted_fault_is_found(planted: Certificate, fault: str, dtype: str) -> None:
    assert_found(planted, fault, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "dtype"), EACH)
def test_each_planted_fault_is_found(all_planted: Certificate, fault: str, dtype: str) -> None:
    assert_found(all_planted, fault, dtype)


def assert_found(certificate: Certificate, fault: str, dtype: str) -> None:
    found = certificate.path(fault, dtype)
    wrong = [name for name, cell in found["checks"].items() if cell["verdict"] == FAIL]
    assert found["verdict"] == FAIL and set(FAULTS[fault][1]) & set(wrong), (wrong, found["checks"])
    assert all(f"{name} is wrong on " in found["reason"] for name in wrong)


def test_what_is_right_passes(planted: Certificate) -> None:
    for dtype in ("float32", "float64"):
        for path in ("stock", RIGHT):
            found = planted.path(path, dtype)
            assert found["verdict"] == PASS, found["reason"]
    # What a table says of it: every check that applies, each with a figure below its limit.
    assert set(planted.path(RIGHT, "float64")["checks"]) == set(NAMES)
    assert not planted.passed


def test_a_class_has_limits_of_its_own_and_is_asked_in_float32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails as float32 passes as TF32; a fault fails in any class."""
    monkeypatch.setattr(certificates._Run, "_smallest", lambda *_: {})  # a search that is tested elsewhere
    structures = {"molecule": draw(SPECIES, CUTOFF, 0)["molecule"]}
    paths = {"equitune-tf32": FAULTS["TF32"][0], "equitune-tf32-captured": FAULTS["a coupling's sign"][0]}
    found = certify(net(torch.float32), structures, paths=paths, effort="quick").record
    rows = [row for row in found["paths"] if row["path"] != "stock"]
    assert [(row["dtype"], row["verdict"]) for row in rows] == [("float32", PASS), ("float32", FAIL)]
    assert found["limits"]["floor"]["tf32"] == checks.FLOOR["tf32"]


def test_a_failure_has_the_smallest_structure_that_shows_it(planted: Certificate) -> None:
    cell = planted.path("a coupling's sign", "float64")["checks"]["energy"]
    assert cell["smallest"]["atoms"] <= min(
        len(planted.record["structures"][name]["numbers"]) for name in cell["failed_on"]
    )
    again = certify(
        net(),
        {"smallest": from_record(cell["smallest"])},
        paths={"a coupling's sign": FAULTS["a coupling's sign"][0]},
        dtypes=("float64",),
        effort="quick",
    )
    assert again.path("a coupling's sign", "float64")["checks"]["energy"]["verdict"] == FAIL


def test_a_path_that_raises_names_the_structures_and_keeps_the_others(planted: Certificate) -> None:
    found = planted.path("no edges", "float64")
    assert found["verdict"] == FAIL
    assert set(found["failed"]) == {"isolated atom", "no edges"}
    assert "IndexError: index 0 is out of bounds" in found["reason"]
    assert "no edges in float64 fails on isolated atom, no edges: IndexError" in str(planted)
    assert found["checks"]["energy"]["verdict"] == PASS


def test_the_record_is_json_with_provenance(planted: Certificate, tmp_path: Path) -> None:
    record = json.loads(planted.save(tmp_path / "record.json").read_text())
    assert record == planted.record
    assert record["schema"] == 1 and record["model"]["species"] == list(SPECIES)
    assert {"torch", "python", "compiler"} <= set(record["software"])
    assert len(record["model"]["weights"]) == 16 and record["device"]["backend"] == "cpu"
    assert record["seed"] == 0 and record["effort"] == "quick" and record["reference"] == "stock in float64"


def test_the_table_says_what_fails_and_on_what(planted: Certificate) -> None:
    lines = str(planted).splitlines()
    line = next(line for line in lines if line.strip().startswith("a coupling's sign") and "float64" in line)
    assert "fail" in line and " atoms: " in str(planted)
    assert "eV/atom" in str(planted) and "made-up net" in lines[0]


def test_the_table_says_how_far_a_path_is_from_the_reference(planted: Certificate) -> None:
    right, wrong = (planted.path(path, "float64")["differences"] for path in (RIGHT, "a coupling's sign"))
    for quantity in ("energy", "forces"):
        assert wrong[quantity] >= planted.path("a coupling's sign", "float64")["checks"][quantity]["value"]
        assert right[quantity] < 1e-10
    assert planted.path("stock", "float64")["differences"] == {"energy": 0.0, "forces": 0.0}
    line = next(line for line in str(planted).splitlines() if "a coupling's sign" in line)
    assert f"{1e3 * wrong['energy']:.1e}" in line and f"{wrong['forces']:.1e}" in line


def refused(model: WholeModel) -> WholeModel:
    raise PeerError("it has no kernel for this model")


def raises_later(model: WholeModel) -> WholeModel:
    raise RuntimeError("out of order")


def test_a_refusal_is_neither_a_pass_nor_a_failure() -> None:
    paths = {"refused": refused, "broken": raises_later, "a module": lambda model: model.module, RIGHT: reordered}
    seen: list[str] = []
    molecule = {"molecule": draw(SPECIES, CUTOFF, 0)["molecule"]}
    found = certify(
        net(),
        molecule,
        paths=paths,
        dtypes=("float64",),
        effort="quick",
        on_path=lambda c: seen.append(c.record["paths"][-1]["path"]),
    )
    assert seen == ["stock", "refused", "broken", "a module", RIGHT]
    assert found.path("refused", "float64")["verdict"] == REFUSED
    assert found.path("refused", "float64")["reason"] == "it has no kernel for this model"
    assert found.path("broken", "float64")["verdict"] == FAIL
    assert found.path("broken", "float64")["reason"] == "RuntimeError: out of order"
    assert "'a module' returned a Net; expected a WholeModel" in found.path("a module", "float64")["reason"]
    table = str(found)
    assert "fail (error)" in table and "broken in float64 cannot be opened: RuntimeError: out of order" in table
    assert "refused in float64 is refused: it has no kernel for this model" in table and ": 1 structure, " in table
    assert found.path(RIGHT, "float64")["verdict"] == PASS
    only = certify(net(), molecule, paths={"refused": refused}, dtypes=("float64",), effort="quick")
    assert not only.passed, "nothing was certified"


def test_a_symmetry_that_the_model_itself_lacks_is_said() -> None:
    """A path of it passes if it differs as stock does."""
    chiral = FAULTS["a chiral energy"][0](net())
    liquid = {"liquid": draw(SPECIES, CUTOFF, 0)["liquid"]}
    found = certify(chiral, liquid, paths={RIGHT: reordered}, dtypes=("float64",), effort="quick")
    assert found.passed, str(found)
    note = found.path("stock", "float64")["note"]
    assert note.startswith("inversion changes forces of the model itself by ") and note in str(found)
    assert not certify(net(), liquid, paths={RIGHT: reordered}, dtypes=("float64",)).path("stock", "float64")["note"]


@pytest.mark.slow
def test_equitunes_path_passes() -> None:
    found = certify(net(), paths=("equitune",), effort="quick")
    assert found.passed, str(found)
    assert found.path("equitune", "float64")["note"]
    assert autotune.certify is certify and autotune.Certificate is Certificate


@pytest.mark.slow
def test_a_process_that_ends_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path is asked in a process of its own; this one ends at the third structure."""
    monkeypatch.setattr(certificates, "PathSetting", EndingSetting)
    found = certify("certified_net:net_for_commands", paths=("equitune",), dtypes=("float32",), effort="quick")
    row = found.path("equitune", "float32")
    assert row["verdict"] == FAIL
    assert row["failed"] == {"slab": "the process ended with exit code 3"}
    assert row["checks"]["energy"]["verdict"] == PASS
    assert found.path("stock", "float32")["verdict"] == PASS


def ends_at_the_slab(right: Any, inputs: dict[str, Any]) -> Outputs:
    if inputs["volume"].tolist() == [1.0] and inputs["shifts"].any():
        os._exit(3)
    return right(inputs)


class EndingSetting(certificates.PathSetting):
    def open(self) -> certificates.PathSession:
        own = around(ends_at_the_slab) if self.path == "equitune" else None
        return certificates.PathSession(net_for_commands, self.path, "cpu", own)


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock on which each evaluation takes a second: an electronvolt an atom, two of a model called wrong."""
    now = [0.0]

    def values_of(model: WholeModel, structures: Any) -> Any:
        now[0] += 1.0
        each = -2.0 if model.name == "wrong" else -1.0
        return [{"energy": np.full((1, 1), each * len(atoms)), "forces": 0 * atoms.positions} for atoms in structures]

    def total_energies(model: WholeModel, questions: Any) -> np.ndarray:
        now[0] += questions.dynamics
        return np.zeros(questions.dynamics + 1)

    monkeypatch.setattr(asked, "values_of", values_of)
    monkeypatch.setattr(asked, "total_energies", total_energies)
    for module in (asked, certificates):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_what_a_budget_does_not_suffice_for_is_cut_and_not_passed(evaluations: list[float]) -> None:
    structures = {name: draw(SPECIES, CUTOFF, 0)[name] for name in ("molecule", "isolated atom")}
    model = net()

    def within(budget: float, *names: str) -> Certificate:
        evaluations[0] = 0.0
        paths = {name: lambda stock, name=name: WholeModel(name, stock.module, stock.package) for name in names}
        return certify(model, structures, paths=paths, dtypes=("float64",), effort="quick", budget=budget)

    whole = within(1e6, "right")
    assert whole.passed and whole.record["not_asked"] == {} and whole.path("right", "float64")["not_asked"] == {}
    one_path = evaluations[0]
    # Time for a path and the first parts of another, which come first because they are cheap.
    cut = within(one_path + 25.0, "right", "again")
    again = cut.path("again", "float64")
    assert cut.passed and cut.path("right", "float64")["verdict"] == PASS
    assert again["verdict"] == "cut" and again["checks"]["energy"]["verdict"] == PASS
    assert {"molecule, displaced", "molecule, dynamics"} <= set(again["not_asked"])
    assert "the budget was over" in again["reason"]
    assert "again in float64 was not asked about molecule" in str(cut)
    found = within(one_path + 25.0, "right", "wrong").path("wrong", "float64")
    assert found["verdict"] == FAIL and found["not_asked"], "what is found to be wrong is wrong"
    # The reference's values take a part of it at most; then nothing passes.
    spent = within(17.5, "right")
    assert list(spent.record["structures"]) == ["isolated atom"], "the smallest comes first"
    assert "molecule" in spent.record["not_asked"] and "isolated atom, displaced" in spent.record["not_asked"]
    assert spent.path("right", "float64")["verdict"] == "cut" and not spent.passed
    assert "no path was asked about" in str(spent)
    assert page_name(spent.record) != page_name(spent.record | {"budget_s": 60.0})


def test_mistakes_say_what_was_given() -> None:
    with pytest.raises(ConfigError, match="unknown path 'equitunne'; did you mean 'equitune'"):
        certify(net(), paths=("equitunne",), effort="quick")
    with pytest.raises(ConfigError, match="unknown dtype 'float16'"):
        certify(net(), dtypes=("float16",))
    with pytest.raises(ConfigError, match="unknown effort 'hasty'"):
        certify(net(), effort="hasty")
    with pytest.raises(ConfigError, match=r"model file no\.model does not exist"):
        certify("no.model")
    unknown = draw((79,), CUTOFF, 0)["crystal"]
    with pytest.raises(InputError, match="stock computes none of the structures: .*does not know the elements Au;"):
        certify(net(), {"gold": unknown}, paths=("equitune",))
    molecule = {"molecule": draw(SPECIES, CUTOFF, 0)["molecule"]}
    found = certify(net(), molecule, paths={RIGHT: reordered}, dtypes=("float64",), effort="quick")
    with pytest.raises(InputError, match="has no path 'equitune' in 'float64'; it has stock in float64"):
        found.path("equitune", "float64")


def test_a_users_module_stays_on_its_device() -> None:
    whole = net()
    assert certificates._subject(whole, "meta", {}).model is not None
    assert {weight.device.type for weight in whole.module.parameters()} == {"cpu"}


def test_structures_have_all_elements_and_the_shapes_that_they_are_named_after() -> None:
    drawn = draw(SPECIES, CUTOFF, 0)
    assert set().union(*(set(one.numbers) for name, one in drawn.items() if "elements" in name)) == set(SPECIES)
    assert drawn["slab"].pbc.tolist() == [True, True, False]
    assert not drawn["molecule"].pbc.any() and len(drawn["isolated atom"]) == 1
    assert np.linalg.det(drawn["skewed cell"].cell.array) < 0
    assert drawn["tiny cell"].cell.lengths().min() < CUTOFF
    assert drawn["no edges"].get_all_distances(mic=True)[np.triu_indices(3, 1)].min() > CUTOFF
    for first, second in zip(drawn.values(), draw(SPECIES, CUTOFF, 0).values(), strict=True):
        assert first == second and from_record(as_record(first)) == first
    two = draw((3, 17), 6.0, 1)
    assert set(two["molecule"].numbers) <= {3, 17} and set(two["liquid"].numbers) == {3, 17}
    many = draw(range(1, 90), 5.0, 0)
    assert {int(number) for name, one in many.items() if "elements" in name for number in one.numbers} == {
        *range(1, 90)
    }


def test_a_users_structures(tmp_path: Path) -> None:
    path = tmp_path / "box.xyz"
    draw(SPECIES, CUTOFF, 0)["liquid"].write(path)
    assert list(read([str(path), "mof"])) == ["box.xyz", "mof"]
    with pytest.raises(ConfigError, match="two structures are called 'mof'"):
        read(["mof", "mof"])


def test_structures_shrink_to_what_a_failure_needs() -> None:
    atoms = draw(SPECIES, CUTOFF, 0)["liquid"]
    found = smallest(atoms, lambda one: 14 in one.numbers and (one.numbers == 1).sum() >= 2, tries=200)
    assert sorted(found.numbers) == [1, 1, 14]
    assert len(smallest(atoms, lambda one: False)) == len(atoms)
    asked: list[int] = []
    smallest(atoms, lambda one: bool(asked.append(len(one))), tries=5)
    assert len(asked) == 5


def test_every_check_says_what_holds() -> None:
    assert len(NAMES) == len(set(NAMES)) == 16
    assert all(check.says and check.parts for check in CHECKS)
    assert checks.mev_per_atom("forces", 1.0, 10.0) == pytest.approx(100.0)
    assert checks.mev_per_atom("stress", 1.0, float("inf")) is None
