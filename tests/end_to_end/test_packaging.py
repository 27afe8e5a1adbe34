"""The wheel: what it carries, and that it works where it is unpacked, away from the tree that it was built from."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from places import ROOT, SUPPORT

from autotune.cli.packing import Kernels, suite, write_suite
from autotune.workload.toml_tables import read_toml
from kernelgen.compile.host import default_level
from kernelgen.version import __version__

ARCHS = ("sm_80",) if importlib.util.find_spec("cuda") else ()
BUILD_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, so that the tree stays as it is; with a database, whether or not the tree has one."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, tree / name)
    for name in ("kernelgen", "autotune", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "results" / "trials").mkdir(parents=True)
    (tree / "results" / "test-device.json").write_text('{"schema": 1, "device": {}, "entries": []}\n')
    (tree / "results" / "test-device.corrupt-1.json").write_text("{")
    (tree / "results" / "predicted").mkdir()
    for path in (*(ROOT / "results").glob("*.json"), *(ROOT / "results" / "predicted").glob("*.json")):
        shutil.copy(path, tree / path.relative_to(ROOT))  # kernels are found by the schedules of the same database
    (tree / "results" / "predicted" / "test-device.json").write_text("{}\n")
    (tree / "results" / "trials" / "raw.jsonl").write_text("{}\n")
    some = [Kernels("tiny", "conv", "float32", "mul_ir"), *suite("nodes")]
    for _ in write_suite(tree / "packs", some, ARCHS, [default_level()]):
        pass
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", "dist", ".", cwd=tree)
    (built,) = (tree / "dist").glob("equitune-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(folder), str(wheel), cwd=folder)
    return folder


DATA = {f"autotune/_data/results/{folder}test-device.json" for folder in ("", "predicted/")}


@pytest.mark.slow
def test_wheel_carries_every_module_and_all_data(wheel: Path) -> None:
    carried = set(zipfile.ZipFile(wheel).namelist())
    sources = [
        path.relative_to(ROOT).as_posix().removeprefix("autotune/" if "equitune" in path.parts[-2] else "")
        for package in ("kernelgen", "autotune")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    configs = [f"autotune/_data/configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")]
    assert configs
    assert {*sources, *configs, *DATA, "kernelgen/_packs/index.json"} - carried == set()


@pytest.mark.slow
def test_wheel_carries_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kernelgen", "autotune", "equitune"}
    assert not [name for name in names if "corrupt" in name or "trials/" in name or "tests/" in name]


@pytest.mark.slow
def test_a_wheel_without_packs_stays_below_two_megabytes(wheel: Path) -> None:
    carried = [entry for entry in zipfile.ZipFile(wheel).infolist() if "/_packs/" not in entry.filename]
    assert 500_000 < sum(entry.compress_size for entry in carried) < 2_000_000


@pytest.fixture(scope="module")
def index_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where there is no package index."""
    asked = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "0", "filelock")
    if subprocess.run(asked, cwd=tmp_path_factory.mktemp("asked"), capture_output=True).returncode:
        pytest.skip("no package index answers")


# `.ci/models` installs the others, and what is in `test`, from a wheel too.
@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize("extra", ["audit", "peers-gpu", "test"])
def test_each_extra_can_be_installed_in_a_clean_environment(
    wheel: Path, extra: str, index_answers: None, tmp_path: Path
) -> None:
    """Resolved by pip as for an empty environment, not installed: torch alone takes gigabytes."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-")
    report = json.loads(run(*pip, f"{wheel}[{extra}]", cwd=tmp_path))
    chosen = {part["metadata"]["name"].lower().replace("_", "-") for part in report["install"]}
    assert {"equitune", "torch", "e3nn", *(wanted.name for wanted in requirements()[extra])} <= chosen


@pytest.mark.slow
def test_wheel_declares_command_extras_and_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert "equitune = equitune:main" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: BSD-3-Clause" in metadata
    for extra in ("tune", "test", "gpu", "peers", "docs"):
        assert f"Provides-Extra: {extra}\n" in metadata
    assert f"{info}/licenses/LICENSE" in archive.namelist()


@pytest.mark.slow
def test_installed_package_finds_its_configs_and_database(installed: Path, tmp_path: Path) -> None:
    code = (
        "from autotune import paths\n"
        "from autotune.workload.config import load_config\n"
        "print(paths.configs_dir(), paths.results_dir(), load_config('mace-mp-medium').workloads[0].label, sep='\\n')"
    )
    configs, results, label = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert Path(configs) == installed / "autotune" / "_data" / "configs"
    assert Path(results) == installed / "autotune" / "_data" / "results"
    assert (Path(results) / "test-device.json").is_file()
    assert label == "mace-mp-medium"


USERS_SCRIPT = """
import equitune
import torch
from autotune import TensorProductConv, accelerate, capture, restore
from kernelgen import TensorProductProblem, build

conv = TensorProductConv("4x0e", "0e", filter_irreps_out="0e")
out: torch.Tensor = conv.forward(torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1))
count: int = restore(conv)
table: str = str(accelerate(conv, strict=True))
text: str = build(TensorProductProblem.channelwise("4x0e", "0e", "0e"), device="cpu").source("forward")
captured = capture(conv, growth="much")
same: str = str(equitune.accelerate(conv))
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_types(installed: Path, tmp_path: Path) -> None:
    """mypy takes types of an installed package only if it says ``py.typed``; one argument of the script is wrong."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env"), cwd=tmp_path)
    (libraries,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (libraries / "places.pth").write_text(f"{installed}\n{Path(pytest.__file__).parents[1]}\n")
    (tmp_path / "script.py").write_text(USERS_SCRIPT)
    python = str(tmp_path / "env" / "bin" / "python")
    command = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python, "script.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    (only, _) = done.stdout.splitlines()
    assert "script.py:12" in only and 'Argument "growth" to "capture"' in only


@pytest.mark.slow
def test_the_package_has_its_own_name(installed: Path, tmp_path: Path) -> None:
    code = (
        "import equitune, autotune\n"
        "print(equitune.accelerate is autotune.accelerate, equitune.__version__, autotune.__version__, *dir(equitune))"
    )
    said = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert said[:3] == ["True", __version__, __version__] and {"TensorProduct", "build", "InputError"} <= set(said)


@pytest.mark.slow
def test_another_projects_autotune_is_named(installed: Path, tmp_path: Path) -> None:
    """One of the same name that was installed over Equitune asks for what is not there."""
    shutil.copytree(installed, tmp_path / "site")
    (tmp_path / "site" / "autotune" / "__init__.py").write_text("import GPUtil_of_another_project\n")
    with pytest.raises(AssertionError, match="the package autotune that is installed here is another project's"):
        run(sys.executable, "-c", "import equitune", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))


@pytest.mark.slow
def test_the_first_calls_need_no_compiler_and_no_cache(installed: Path, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    environment = {"PATH": nowhere, "HOME": nowhere, "EQUITUNE_CACHE": nowhere, "PYTHONPATH": str(installed)}
    said = run(sys.executable, str(SUPPORT / "first_call.py"), "tiny", "cpu", cwd=tmp_path, **environment)
    print(said)
    assert "nothing was compiled" in said and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not ARCHS, reason="NVRTC is not installed")
def test_kernels_for_gpus_need_no_compiler_either(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cuda.core'] = None\n"
        "from autotune import find_schedule\n"
        "from autotune.database.maintenance import source_text\n"
        "from autotune.workload.config import find_problem\n"
        "from autotune.workload.known_kinds import kernel_kind\n"
        "from kernelgen import compile_source\n"
        "from kernelgen.device import cuda_facts, representative\n"
        "from kernelgen.kernels.source import Source\n"
        "facts, kernel = representative('sm_80'), (find_problem('tiny'), 'conv', 'forward', 'float32', 'mul_ir')\n"
        "schedule = find_schedule(*kernel, facts, 'conv-e17-d5').schedule\n"
        "source = Source(source_text(kernel_kind('conv').spec(*kernel, facts), schedule), 'cuda')\n"
        "for arch in ('sm_80', 'sm_89', 'sm_120'):\n"
        "    print(compile_source(source, cuda_facts(arch)).path.read_bytes()[:4])\n"
        "import torch\n"
        "from kernelgen.ops.node_kernels import GATES, ROWS\n"
        "for source in (GATES.source(torch.float64), ROWS.source(torch.float32)):\n"
        "    print(compile_source(source, cuda_facts('sm_86')).path.read_bytes()[:4])\n"
    )
    environment = {"EQUITUNE_CACHE": str(tmp_path / "none"), "PYTHONPATH": str(installed)}
    found = run(sys.executable, "-c", code, cwd=tmp_path, **environment).split()
    elf = "b'\\x7fELF'"
    assert found == [elf, elf, "b'//\\n/'", elf, elf] and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_installed_command_answers(installed: Path, tmp_path: Path) -> None:
    from kernelgen.version import __version__

    shown = run(sys.executable, "-m", "autotune", "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    assert shown == f"equitune {__version__}\n"


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        name.lower().replace("_", "-"): version
        for name, _, version in (line.partition("==") for line in lines if not line.startswith("#"))
    }


def requirements() -> dict[str, list[Requirement]]:
    """By extra, ``""`` for what is always installed; without Equitune itself."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    parsed = {extra: [Requirement(text) for text in texts] for extra, texts in extras.items()}
    return {extra: [r for r in wanted if r.name != project["name"]] for extra, wanted in parsed.items()}


def test_every_document_names_the_version() -> None:
    from kernelgen.version import __version__

    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [__version__]
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == __version__


def test_constraints_allow_what_pyproject_asks_for() -> None:
    """What is tested is inside the bounds; and everything that the tests install has its version pinned."""
    wanted = requirements()
    for requirement in itertools.chain.from_iterable(
        wanted[extra] for extra in ("", "tune", "gpu", "peers", "docs", "test")
    ):
        assert requirement.specifier.contains(pins()[requirement.name]), requirement


def test_every_dependency_is_bounded_from_below_and_above_the_tested_version() -> None:
    for requirement in itertools.chain.from_iterable(requirements().values()):
        operators = {bound.operator for bound in requirement.specifier}
        assert operators == {">=", "<"}, requirement


def test_every_dependency_is_listed_with_its_licence() -> None:
    rows = (line.split("|")[1:3] for line in (ROOT / "DEPENDENCIES.md").read_text().splitlines() if line[:2] == "| ")
    listed = {name.strip(): licence.strip() for name, licence in rows if name.strip() != "package"}
    direct = {requirement.name for wanted in requirements().values() for requirement in wanted}
    assert set(listed) == direct
    for name, licence in listed.items():
        words = [
            re.sub("[^a-z]", "", word.lower())
            for word in re.findall(r"BSD|MIT|ISC|Apache|LGPL|MPL|PSF|NVIDIA", licence)
        ]
        assert words, name
        try:
            told = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        said = " ".join(
            (told.get("License-Expression") or "", told.get("License") or "", *told.get_all("Classifier", []))
        )
        said = said.lower().replace("python software foundation", "psf")
        assert any(word in said for word in words), (name, licence, said[:200])


@pytest.mark.parametrize(
    ("cases", "code"),
    [
        ('<testcase name="a"/>', 0),
        ('<testcase name="a"/><testcase name="b"><skipped message="could not import"/></testcase>', 1),
        ('<testcase name="a"><skipped message="could not import"/></testcase>', 1),
        ("", 1),
    ],
)
def test_a_package_that_is_not_installed_fails_ci(cases: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert runpy.run_path(str(ROOT / ".ci" / "none_skipped"))["main"](str(file)) == code


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, "0 known vulnerabilities in 1 of 1"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}], 1, "a 1: X-1, fixed in 2"),
        ([{"name": "a", "version": "1", "skip_reason": "not found"}], 0, "nothing was looked up"),
    ],
)
def test_the_audit_fails_for_what_is_known_to_be_vulnerable(
    packages: list[dict], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = runpy.run_path(str(ROOT / ".ci" / "audit"))
    assert audit["verdict"](packages) == code
    assert said in capsys.readouterr().out
