"""Check this machine: software, compilers, files, devices and peers, one row each.

It must work on broken machines: a probe that fails becomes a row, and does not stop the others. What needs no torch
comes first, so it is there at once, and even if torch cannot be imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from autotune.paths import TUNE, installed_version, lacking, missing_packages, typed, user_data_dir
from kernelgen.errors import CacheError, EquituneError, ToolMissingError
from kernelgen.version import GENERATOR_VERSION, __version__

if TYPE_CHECKING:
    from rich.table import Table


NEEDED = ("torch", "e3nn", "numpy", "filelock", "platformdirs")
OPTIONAL = ("equitune", *TUNE, "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
MARKS = {"ok": "[green]ok[/]", "absent": "[dim]-[/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True)
class Finding:
    """One row. ``state``: ``ok``, ``absent`` (optional and not installed) or ``problem`` (a probe failed)."""

    section: str
    name: str
    value: str
    state: str = "ok"


Probe = Callable[[], Iterator[tuple[str, str, str]]]


def examine() -> Iterator[Finding]:
    """Every probe's rows, in the order of :data:`PROBES`, as they are found."""
    for section, probe in PROBES:
        try:
            for row in probe():
                yield Finding(section, *row)
        except Exception as error:  # any failure of a probe is a finding
            text = " ".join(str(error).split()) or type(error).__name__
            yield Finding(section, probe.__name__.strip("_"), text, "problem")


def as_data(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """The rows as plain data, for ``equitune doctor --json``."""
    return [dataclasses.asdict(finding) for finding in findings]


def as_table(findings: Iterable[Finding]) -> Table:
    """The rows of a section, which is named once, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for width in (9, 26, 7, None):
        table.add_column(overflow="fold", width=width)
    for number, finding in enumerate(findings):
        section = "" if number else finding.section
        table.add_row(section, finding.name, Text.from_markup(MARKS[finding.state]), finding.value)
    return table


def as_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """The rows as plain lines, for a machine without rich."""
    return (f"{f.section:10} {f.name:24} {f.state:8} {f.value}" for f in findings)


def next_step(findings: Iterable[Finding]) -> str:
    """The command to type next."""
    if any(finding.state == "problem" for finding in findings):
        return f"fix each row marked problem, then type {typed('doctor')}"
    if missing_packages():
        return "pip install 'equitune[tune]', to search for schedules; models run without"
    return f"{typed('tune quick')} (a first search, about a minute)"


def size_text(count: int) -> str:
    """A number of bytes in a readable unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _host() -> Iterator[tuple[str, str, str]]:
    from kernelgen.device import device_facts

    facts = device_facts("cpu")
    vector = f"{8 * facts.vector_bytes}-bit vectors" if facts.vector_bytes else "vector width unknown"
    yield "cpu", f"{facts.name} ({facts.arch}, {facts.units} cores, {vector})", "ok"


def _gpus() -> Iterator[tuple[str, str, str]]:
    import torch

    from autotune.database.maintenance import nvidia_driver

    driver = nvidia_driver()
    yield "driver", driver or "no NVIDIA driver found", "ok" if driver else "absent"
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        yield "cuda", f"torch sees no CUDA device (torch is {built})", "problem" if driver else "absent"
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        text = f"{found.name} (compute capability {found.major}.{found.minor}, {found.multi_processor_count} units, "
        yield f"cuda:{index}", text + f"{size_text(found.total_memory)})", "ok"


def _host_compiler() -> Iterator[tuple[str, str, str]]:
    from kernelgen.compile.host import try_host_compiler

    try:
        compiler = try_host_compiler()
    except EquituneError as error:
        state = "absent" if _runs_without_a_compiler() else "problem"
        yield "C++", f"{' '.join(str(error).split())} (only kernels for a CPU are compiled by it)", state
        return
    yield "C++", f"{compiler.path} {compiler.version}", "ok"


def _runs_without_a_compiler() -> bool:
    """Whether kernels run on a GPU here, or come from packs; a torch that cannot be imported has its own row."""
    if os.environ.get("EQUITUNE_PACK") or os.environ.get("EQUITUNE_PACKS"):
        return True
    with contextlib.suppress(Exception):
        import torch

        return torch.cuda.is_available()
    return False


def _nvrtc() -> Iterator[tuple[str, str, str]]:
    from kernelgen.compile.gpu import nvrtc_version

    try:
        version = nvrtc_version()
    except ToolMissingError as error:
        yield "NVRTC", str(error), "absent"
        return
    yield "NVRTC", version, "ok"
    yield from (("NVRTC", flaw, "problem") for flaw in nvrtc_flaws(version))


def nvrtc_flaws(version: str) -> list[str]:
    """Why kernels of this NVRTC do not run here: the driver is too old for them, or the GPU too new."""
    from kernelgen.compile.gpu import misfit, unknown_arch
    from kernelgen.runtime.kernel import driver_cuda

    try:
        flaws = [misfit(driver_cuda(), version)]
    except ToolMissingError:
        return []  # no driver: a machine that only compiles
    import torch

    from kernelgen.device import device_facts

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    flaws += [unknown_arch(device_facts(f"cuda:{index}").arch) for index in range(count)]
    return [flaw for flaw in dict.fromkeys(flaws) if flaw]


def _software() -> Iterator[tuple[str, str, str]]:
    yield "python", platform.python_version(), "ok"
    if other := installed_version("autotune"):
        text = (
            f"{other}, another project whose files have the names of Equitune's: uninstall both, then install equitune"
        )
        yield "autotune", text, "problem"
    for name in (*NEEDED, *OPTIONAL):
        version = installed_version(name)
        yield name, version or "not installed", "ok" if version else ("problem" if name in NEEDED else "absent")
    yield "generator", GENERATOR_VERSION, "ok"


def _cache() -> Iterator[tuple[str, str, str]]:
    from kernelgen.compile.compiler import cache_dir, require_private

    folder = cache_dir()
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    yield "compiled kernels", f"{folder} ({len(sizes)} files, {size_text(sum(sizes))})", "ok"
    try:
        require_private()
    except CacheError as error:
        yield "compiled kernels", str(error), "problem"


def _databases() -> Iterator[tuple[str, str, str]]:
    from autotune.database.store import database_dirs, device_files, read_table

    for folder in database_dirs():
        name = "user" if folder == user_data_dir() else "shipped"
        files = device_files(folder)
        if not files:
            yield name, f"{folder} (no database)", "absent"
        for file in files:
            table = read_table(file)
            yield name, f"{file} ({len(table.by_identity)} entries)", "ok"
            for flaw in table.flaws:
                yield name, f"{file}: {flaw}", "problem"


def _peers() -> Iterator[tuple[str, str, str]]:
    import torch

    from autotune.compare.peers import usable_peers

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name, reason in usable_peers(device).items():
            yield f"{name} ({device})", reason or "usable", "absent" if reason else "ok"


PROBES: tuple[tuple[str, Probe], ...] = (
    ("software", _software),
    ("files", _cache),
    ("compilers", _host_compiler),
    ("compilers", _nvrtc),
    ("device", _host),
    ("device", _gpus),
    ("files", _databases),
    ("peers", _peers),
)


# The command without extra ``tune``.


def answer_without_tune(words: Sequence[str]) -> NoReturn:
    """Answer and exit: 0, or 2 with one line on standard error."""
    if list(words) == ["--version"]:
        print(f"equitune {__version__}")
        sys.exit(0)
    if list(words) in (["doctor"], ["doctor", "--json"]):
        findings = tuple(examine())
        if "--json" in words:
            print(json.dumps(as_data(findings), indent=1))
        else:
            print(*as_lines(findings), f"next: {next_step(findings)}", sep="\n")
        sys.exit(0)
    reason = lacking(" ".join(["equitune", *words[:1]]))
    print(f"equitune: error: {reason} ({typed('doctor')} works without)", file=sys.stderr)
    sys.exit(2)
