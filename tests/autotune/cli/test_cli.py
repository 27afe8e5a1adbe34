"""The command: what it prints, one line for a mistake, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from places import ROOT

from autotune import paths
from autotune.cli import bench as cli_bench
from autotune.cli import commands, doctor
from autotune.cli import pack as cli_pack
from autotune.cli import tune as cli_tune
from autotune.cli.options import Group
from kernelgen.device import device_facts
from kernelgen.errors import CompileError
from kernelgen.version import __version__

COMMANDS = ("doctor", "tune", "bench", "record", "replay", "explain-defaults", "pack", "report", "show", "db")


class Command:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            commands.main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    def refused(self, *arguments: str | Path) -> str:
        """The one line of a call that must end with exit code 2."""
        code, out, err = self(*arguments)
        assert (code, out) == (2, ""), (code, out, err)
        assert err.startswith("equitune: error: ") and err.endswith("\n") and err.count("\n") == 1, err
        return err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def write_config(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def test_no_arguments_and_help_list_the_commands(command: Command) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = command(*arguments)
        assert (code, err) == (0, "")
        for name in COMMANDS:
            assert f" {name} " in out


def test_help_of_a_command_lists_its_options(command: Command) -> None:
    code, out, _ = command("tune", "--help")
    assert code == 0
    for shown in (" model ", " misses ", "--device", "--budget", "--trials", "--sampler", "--storage", "--seed"):
        assert shown in out
    for panel in ("Search", "Sharing", "Output"):
        assert f"\u256d\u2500 {panel} " in out
    assert "\n Examples " in out and "\n equitune tune quick " in out


def test_help_keeps_square_brackets(command: Command) -> None:
    _, out, _ = command("record", "--help")
    assert "[record.BACKEND]" in out


def test_help_and_mistakes_are_answered_without_anything_heavy() -> None:
    code = """
import sys
from autotune.cli.commands import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit as ended:
        heavy = [name for name in ("torch", "e3nn", "optuna", "pandas", "matplotlib") if name in sys.modules]
        print(line, ended.code, heavy, sep=": ")
"""
    helped = ["--help", "tune --help"]
    refused = [
        *("tune nothing", "tune", "tune tiny --trials 0", "tune tiny --budget 3", "tune tiny --sampler tpf"),
        *("bench nothing", "bench", "show nothing", "tune tiny --seed -1", "tune misses --devices cpu", "tuna"),
    ]
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, input="\n".join(helped + refused), cwd=ROOT, capture_output=True, text=True, check=True)
    expected = [*(f"{line}: 0: []" for line in helped), *(f"{line}: 2: []" for line in refused)]
    assert [line for line in done.stdout.splitlines() if line.endswith("]") and ": " in line] == expected, done.stderr


def test_version(command: Command) -> None:
    assert command("--version") == (0, f"equitune {__version__}\n", "")


def test_module_and_mistake_in_a_process_of_its_own() -> None:
    call = [sys.executable, "-m", "autotune", "show", "mace-mp-mediun"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "equitune: error: unknown problem 'mace-mp-mediun'; did you mean 'mace-mp-medium'?\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tuna",), "No such command 'tuna'"),
        (("tune",), "equitune tune: no CONFIG is given; name one, or a command: model, misses"),
        (("tune", "misses", "quick"), "unexpected extra argument"),
        (("tune", "misses", "--structure", "mof"), "No such option: --structure"),
        (("tune", "quick", "--training"), "No such option: --training"),
        (("tune", "model", "m:f", "--devices", "all"), "No such option: --devices"),
        (("tune", "model", "no.model", "--structure", "mof"), "model file no.model does not exist"),
        (("tune", "model", "mace-mp-0-mediun", "--structure", "mof"), "did you mean 'mace-mp-0-medium'?"),
        (("tune", "model", "README.md", "--structure", "mof"), "README.md ends in '.md'; expected a file of a model"),
        (
            ("tune", "model", "no_module:f", "--structure", "mof"),
            "No module named 'no_module'; expected module:function",
        ),
        (("tune", "model", "json:no_function"), "has no attribute 'no_function'; expected module:function"),
        (("tune", "model", "os:getcwd"), "os:getcwd returned a str; expected a torch.nn.Module or a WholeModel"),
        (("tune", "model", "os:times"), "returned"),
        (("tune", "model", "small_net:net_for_commands", "--structure", "mof"), "leave --structure mof out"),
        (("tune", "quick", "--trails", "3"), "--trails"),
        (("tune", "quick", "--trials", "many"), "'--trials'"),
        (("tune", "quick", "--trials", "0"), "--trials is 0; expected a positive integer"),
        (("tune", "quick", "--budget", "10 minutes"), "--budget: '10 minutes' is not a duration; expected a number"),
        (("tune", "quick", "--budget", "10"), "--budget: '10' has no unit; type 10m for minutes or 10s for seconds"),
        (("db", "retune", "--budget", "10"), "--budget: '10' has no unit"),
        (("tune", "quick", "--seed", "-1"), "seed is -1; expected an integer from 0 to 4294967295"),
        (("tune", "quick", "--seed", "4294967296"), "seed is 4294967296; expected"),
        (("tune", "quick", "--sampler", "tpi"), "unknown sampler 'tpi'; did you mean 'tpe'?"),
        (("tune", "quick", "--objective", "speed"), "objective 'speed': 'speed' does not fit there; expected time,"),
        (("tune", "quick", "--objective", "energy", "--device", "cpu"), "objective energy: the energy of device 'cpu'"),
        (("tune", "misses", "--objective", "memory", "--device", "cpu"), "has times alone; expected a GPU"),
        (("tune", "quick", "--device", "gpu"), "device 'gpu' is not known; expected cpu, cuda or cuda:N"),
        (("tune", "quick", "--device", "mps"), "device mps is not supported"),
        (("tune", "quik"), "did you mean 'quick'?"),
        (("bench", "no/such/file.toml"), "no/such/file.toml"),
        (("bench",), "equitune bench: no CONFIG is given; name one, or a command: again, orders, models, largest"),
        (("bench", "quick", "suite"), "unexpected extra argument"),
        (("bench", "again", "yesterday"), "is no date; expected one such as 2026-11-26"),
        (("bench", "quick", "--export-json", "no/such/folder/x.json"), "--export-json no/such/folder/x.json: expected"),
        (("bench", "quick", "--device", "cpu", "--peers", "e3n"), "unknown peer 'e3n'; did you mean 'e3nn'?"),
        (("tune", "quick", "--device", "cpu", "--peers", "e3n"), "unknown peer 'e3n'; did you mean 'e3nn'?"),
        (("bench", "radial", "--device", "cpu"), 'accelerate(model, memory="low")'),
        (("bench", "quick", "--seconds", "-1"), "--seconds is -1.0"),
        (("show", "uvu|1x0e|1x0e"), "is not a problem key"),
        (("show", "8x0e", "0e"), "2 texts name the problem; expected a name, a key, or the irreps of in1, in2 and out"),
        (("show", "mace-mp-medium", "--layout", "ir-mul"), "--layout"),
        (("show", "mace-mp-medium", "--graph-class", "large"), "'large' is not a graph class"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(command: Command, arguments: tuple[str, ...], said: str) -> None:
    assert said in command.refused(*arguments)


@pytest.mark.parametrize(
    ("group", "old", "present"),
    [
        (cli_bench.BenchGroup, "--models --model a", "models --model a"),
        (
            cli_bench.BenchGroup,
            "--device cpu --models --most-atoms 64 --largest",
            "largest --device cpu --most-atoms 64",
        ),
        (cli_bench.BenchGroup, "--models --reports pages --peers=all --fresh", "models --fresh"),
        (cli_bench.BenchGroup, "--orders", "orders"),
        (cli_bench.BenchGroup, "--peers none --older-than 2026-11-26", "again 2026-11-26 --peers none"),
        (cli_bench.BenchGroup, "--older-than=2026-11-26", "again 2026-11-26"),
        (cli_bench.BenchGroup, "--suite --devices all", "suite --devices all"),
        (cli_tune.TuneGroup, "--model my.model --structure mof", "model my.model --structure mof"),
        (commands.ReplayGroup, "--defaults a.jsonl.gz --measure 2m", "defaults a.jsonl.gz --measure 2m"),
        (cli_tune.TuneGroup, "--misses --budget 1h", "misses --budget 1h"),
        (cli_pack.PackGroup, "--out a.pack --model=my.model", "model my.model --out a.pack"),
        (cli_pack.PackGroup, "--suite mace-mp-medium", "suite mace-mp-medium"),
        (cli_pack.PackGroup, "--library x.so", "library x.so"),
        (cli_pack.PackGroup, "model.pt2 --out a.pack", "exported model.pt2 --out a.pack"),
        (cli_pack.PackGroup, "mace-mp-medium", "problem mace-mp-medium"),
    ],
)
def test_old_spellings_are_the_present_ones(
    group: type[Group], old: str, present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ("problem", "exported", "model", "models", "suite", "library", "config", "kernels")
    words = group(name="group", commands=dict.fromkeys(known)).in_present_words("equitune group", old.split())
    assert words == present.split()
    assert capsys.readouterr().err == f"equitune: note: this is now spelled equitune group {present}\n"


def test_present_spellings_are_taken_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {name: typer.main.get_command(module.app) for name, module in (("bench", cli_bench), ("tune", cli_tune))}
    for name, words, present in (
        ("bench", "models --model a", "models --model a"),
        ("bench", "quick --seconds 1", "kernels quick --seconds 1"),
        ("tune", "misses", "misses"),
        ("tune", "--budget 1h quick", "config --budget 1h quick"),
        ("tune", "--help", "--help"),
    ):
        assert groups[name].in_present_words(name, words.split()) == present.split()
    assert capsys.readouterr().err == ""


def test_an_old_spelling_says_the_present_one_and_works(command: Command) -> None:
    code, out, err = command("bench", "--models", "--dtype", "float16")
    assert (code, out) == (2, "")
    said, refused = err.splitlines()
    assert said == "equitune: note: this is now spelled equitune bench models --dtype float16"
    assert refused.startswith("equitune: error: unknown dtype 'float16'")


def test_tuning_a_model_says_in_which_dtype_and_how_to_change_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from autotune.tune import model, model_passes

    opened = model_passes.Opened("m", torch.nn.Identity(), {}, "box", "", "float64")
    monkeypatch.setattr(model_passes, "open_named", lambda *_: opened)
    monkeypatch.setattr(model, "tune_passes", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "in float64, as in the file; for another: --dtype float32\n" in command("tune", "model", "m")[1]
    assert "in float64, as given\n" in command("tune", "model", "m", "--dtype", "float64")[1]


def test_show_without_a_problem_lists_names(command: Command) -> None:
    code, out, _ = command("show")
    assert code == 0 and {"mace-mp-medium", "nequip-oam-l"} <= set(out.split())


def test_doctor_names_another_projects_autotune(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same name as Equitune's package: whose files win depends on the order of installation."""
    monkeypatch.setattr(doctor, "installed_version", lambda name: {"autotune": "0.0.3"}.get(name))
    (row,) = (row for row in json.loads(command("doctor", "--json")[1]) if row["name"] == "autotune")
    assert row["state"] == "problem" and row["value"].startswith("0.0.3, another project")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("problm = 'mace-mp-medium'\n", "unknown key 'problm'; did you mean 'problem'?"),
        ("problem = 'mace-mp-medium'\ngraph = 'mog'\n", "unknown graph 'mog'; did you mean 'mof'?"),
        ("problem = \n", "own.toml"),
        ("graph = 'mof'\n[problems.a]\nin1 = '9999999999x0e'\nin2 = '0e'\nfilter = '0e'\n", "has 9999999999 features"),
        ("graph = 'mof'\n[problems.a]\nin1 = '1x9999999999e'\nin2 = '0e'\nfilter = '0e'\n", "degree 9999999999;"),
        ("[graphs.a]\ncutoff = 5.0\npoints = { number = 'x', density = 0.1 }\n", "points.number is 'x'"),
        ("[graphs.a]\ncutoff = 5.0\npoints = { number = 9, density = 0.1, seed = -1 }\n", "points.seed is -1"),
        ("graph = 'mof'\n[problems.a]\nin1 = '8x0q'\nin2 = '0e'\nfilter = '0e'\n", "'8x0q' is not an irreps string"),
    ],
)
def test_mistakes_in_a_config_name_the_file(command: Command, tmp_path: Path, text: str, said: str) -> None:
    config = write_config(tmp_path, text)
    for name in ("tune", "bench"):
        line = command.refused(name, config, "--results", tmp_path / "results")
        assert said in line and str(config) in line
    assert not (tmp_path / "results").exists()


def test_cuda_without_a_device_is_a_mistake(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    # An index that no test has asked for: facts are remembered.
    assert "torch sees none" in command.refused("show", "mace-mp-medium", "--device", "cuda:77")


def test_device_index_beyond_those_there_are(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "torch sees 2 CUDA devices" in command.refused("show", "mace-mp-medium", "--device", "cuda:2")


def test_many_lines_of_a_compiler_become_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(*_: object, **__: object) -> str:
        raise CompileError("g++ failed:\n  kernel.cpp:1:\n\n  error: expected ';'")

    monkeypatch.setattr("autotune.cli.show.show", rejected)
    line = command.refused("show", "mace-mp-medium")
    assert line == "equitune: error: g++ failed: kernel.cpp:1: error: expected ';'\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("autotune.cli.show.show", broken)
    with pytest.raises(ZeroDivisionError):
        commands.main(["show", "mace-mp-medium"])


def test_file_in_the_way_of_the_reports(command: Command, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "reports").write_text("")
    line = command.refused("report", "--results", tmp_path / "results", "--reports", tmp_path / "reports")
    assert str(tmp_path / "reports") in line


def test_interrupt_is_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.cli.show.show", interrupted)
    assert command("show", "mace-mp-medium")[0] == 130


def test_interrupted_tuning_still_reports_and_ends_with_130(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def orderly(*_: object, **__: object) -> list:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return []

    monkeypatch.setattr("autotune.tune.run.tune", orderly)
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = command("tune", "quick", "--device", "cpu", "--results", tmp_path / "results")
    assert code == 130
    assert "no tuned entry yet" in out
    assert signal.getsignal(signal.SIGINT) is before


def test_watched_tuning_opens_a_page_and_leaves_none_that_loads_itself(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, opened = tmp_path / "pages" / f"{device_facts('cpu').slug}.html", list[str]()

    def tuned(*_: object, watch: Callable[[list[str], bool], None], **__: object) -> list:
        watch(["forward: 1 trial"], False)
        assert 'http-equiv="refresh"' in page.read_text() and "forward: 1 trial" in page.read_text()
        return []

    monkeypatch.setattr("autotune.tune.run.tune", tuned)
    monkeypatch.setattr("webbrowser.open", opened.append)
    words = ("tune", "quick", "--device", "cpu", "--watch", "--results", tmp_path / "results", "--reports", page.parent)
    for display, count in (("", 0), (":0", 1)):
        monkeypatch.setenv("DISPLAY", display)
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        code, out, err = command(*words)
        assert code == 0, err
        assert f"watch: {page}" in out and len(opened) == count and not page.exists()
    assert opened == [page.as_uri()]
    assert "--watch shows one tuner" in command.refused(*words, "--shared")


def test_tune_hands_its_options_on(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    received: list[tuple] = []
    monkeypatch.setattr("autotune.tune.run.tune", lambda *given, **search: received.append((*given, search)))
    options = (
        "--budget",
        "1m30s",
        "--trials",
        "7",
        "--sampler",
        "random",
        "--storage",
        "sqlite:///x.db",
        "--seed",
        "3",
        "--patience",
        "50",
    )
    code, _, _ = command("tune", "quick", "--device", "cpu", *options, "--results", tmp_path)
    ((config, device, search),) = received
    assert code == 0
    assert (config.workloads[0].label, device) == ("tiny", "cpu")
    assert 60 < search.pop("budget") <= 90, "what the command took before, and its pages, count"
    names = ("trials", "sampler", "storage", "seed", "results_dir", "with_peers", "patience", "objective", "counters")
    given = (7, "random", "sqlite:///x.db", 3, tmp_path, None, 50, "time", "auto")
    assert search == dict(zip(names, given, strict=True))


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (("suite",), {"peers": None, "seconds_each": 0.3, "fresh": False}),
        (("quick", "--peers", "e3nn, cuequivariance-naive", "--seconds", "1.5", "--fresh"),
         {"peers": ("e3nn", "cuequivariance-naive"), "seconds_each": 1.5, "fresh": True}),
        (("quick", "--no-peers"), {"peers": (), "seconds_each": 2.0, "fresh": False}),
        (("quick", "--peers", "none"), {"peers": (), "seconds_each": 2.0, "fresh": False}),
        (("quick", "--budget", "5m"), {"peers": None, "budget": 296.0}),
    ],
)  # fmt: skip
def test_bench_hands_its_options_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], given: dict
) -> None:
    received: list[tuple] = []
    monkeypatch.setattr("autotune.bench.kernels.bench", lambda *those, **named: received.append((those, named)))
    code, _, err = command("bench", *options, "--device", "cpu", "--results", tmp_path)
    assert code == 0, err
    (((config, device, folder), named),) = received
    assert config.path.stem == options[0]
    assert (device, folder) == ("cpu", tmp_path)
    assert {name: named[name] for name in given} == given


@pytest.mark.slow
def test_tune_bench_show_and_report_end_to_end(command: Command, tmp_path: Path) -> None:
    results = tmp_path / "results"
    config = write_config(tmp_path, "problem = 'tiny'\ngraph = 'carbon-small'\ndirections = ['forward']\n")
    own = ("--device", "cpu", "--results", results, "--no-peers")
    code, out, err = command("tune", config, *own, "--trials", "2")
    assert code == 0, err
    show = f"EQUITUNE_DATABASE={results} equitune show tiny --device cpu"
    assert out.splitlines()[-1] == f"next: open the report in a browser, or type {show}"
    (database,) = results.glob("*.json")
    page = results / "reports" / f"{database.stem}.html"
    assert f"report: {page}" in out and "tiny" in out
    (entry,) = json.loads(database.read_text())["entries"]
    assert entry["direction"] == "forward"

    written = page.read_bytes()
    page.unlink()
    code, out, _ = command("report", "--results", results)
    assert (code, out) == (0, f"report: {page}\n")
    assert page.read_bytes() == written

    markdown, record = tmp_path / "bench.md", tmp_path / "record.json"
    exports = ("--export-markdown", markdown, "--export-json", record)
    code, out, err = command("bench", config, *own, *exports)
    assert code == 0, err
    assert f"export: {markdown}\nexport: {record}\n" in out
    assert json.loads(record.read_text()) == json.loads((results / "bench" / database.name).read_text())
    assert "\n| tiny | carbon-small | conv float32 | forward | " in markdown.read_text()
    rows = json.loads((results / "bench" / database.name).read_text())["rows"]
    assert [row["pass"] for row in rows] == ["forward"]
    assert set(rows[0]["times"]) == {"equitune", "equitune-default"}
    assert rows[0]["origins"] == {"forward": "exact"}
    assert rows[0]["schedules"]["equitune"] == {"forward": entry["schedule"]}
    assert "tiny" in out and "forward" in out


def test_show_says_what_would_load(command: Command) -> None:
    code, out, _ = command("show", "mace-mp-medium", "--device", "cpu")
    assert code == 0
    assert "128x0e+128x1o" in out and "schedule" in out
    for direction in ("forward", "backward", "double backward"):
        assert f"\n{direction}: " in out


def test_report_without_results_says_what_to_do(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("report", "--results", tmp_path / "none")
    assert code == 0
    assert "run `equitune tune` first" in out


def test_report_compares_two_records(command: Command, tmp_path: Path) -> None:
    (record,) = (ROOT / "results" / "bench").glob("*cores.json")
    code, out, _ = command("report", "--compare", record, record, "--reports", tmp_path)
    page = tmp_path / f"compare-{record.stem}.html"
    assert code == 0 and out.endswith(f"\nreport: {page}\n") and "measured once" in page.read_text()
    assert out.startswith("Of ") and "after against before: 0 faster, 0 slower" in out
    line = command.refused("report", "--compare", record, tmp_path / "none", "--reports", tmp_path)
    assert f"{tmp_path / 'none'}: there is no such file or folder; expected a bench record" in line


def test_doctor_table_and_json_agree(command: Command) -> None:
    code, out, err = command("doctor", "--json")
    assert (code, err) == (0, "")
    findings = {(row["section"], row["name"]): row for row in json.loads(out)}
    assert {section for section, _ in findings} == {"device", "compilers", "software", "files", "peers"}
    assert {row["state"] for row in findings.values()} <= {"ok", "absent", "problem"}
    assert findings["software", "torch"]["state"] == "ok"
    assert findings["compilers", "C++"]["state"] == "ok"
    assert findings["peers", "e3nn (cpu)"]["value"] == "usable"

    code, table, _ = command("doctor")
    # In a file no path is broken. What is in parentheses may change between two calls: how many kernels the cache has.
    assert code == 0 and all(row["value"].partition(" (")[0] in table for row in findings.values())
    assert table.splitlines()[-1].startswith("next: ")
    for _, name in findings:
        assert name in table


def test_what_torch_says_of_packages_is_not_a_warning_of_equitune(capsys: pytest.CaptureFixture[str]) -> None:
    commands._show_warning("The TorchScript type system doesn't support instance-level annotations", UserWarning)
    commands._show_warning("the graph is empty", UserWarning)
    assert capsys.readouterr().err == "equitune: warning: the graph is empty\n"


def test_doctor_survives_a_failing_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = [finding for finding in doctor.examine() if finding.section == "compilers"]
    assert (found[0].name, found[0].state) == ("C++", "problem")
    assert "no-such-compiler" in found[0].value
    assert found[1].name == "NVRTC"
    assert doctor.next_step(tuple(found)) == "fix each row marked problem, then type equitune doctor"
    assert doctor.next_step(()).startswith("equitune tune quick")


@pytest.mark.parametrize("where", ["GPU", "pack"])
def test_no_compiler_is_no_problem_where_none_is_needed(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch.cuda.is_available", lambda: where == "GPU")
    if where == "pack":
        monkeypatch.setenv("EQUITUNE_PACK", "my.pack")
    ((name, value, state),) = doctor._host_compiler()
    assert (name, state) == ("C++", "absent") and "only kernels for a CPU are compiled by it" in value


def test_doctor_needs_no_torch_for_its_first_rows() -> None:
    """They are there at once, and where torch is broken: its import fails here."""
    program = "import sys; sys.modules['torch'] = None; from autotune.cli.commands import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    for name in ("torch", "C++", "NVRTC"):
        assert any(name in row[:2] and "ok" in row for row in rows), done.stdout
    assert any("problem" in row for row in rows)
    assert rows[-1][:4] == ["next:", "fix", "each", "row"]


def test_doctor_names_databases_and_their_flaws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "some-device.json").write_text("{")
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path))
    rows = [finding for finding in doctor.examine() if finding.name == "user"]
    assert [row.state for row in rows] == ["ok", "problem"]
    assert "not valid JSON" in rows[1].value


def test_reports_stand_beside_results_from_elsewhere(tmp_path: Path) -> None:
    assert paths.reports_dir(paths.results_dir()) == ROOT / "reports"
    assert paths.reports_dir(tmp_path) == tmp_path / "reports"
