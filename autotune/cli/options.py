"""Shared by the commands: option types and their values, output of results and pages, handling of Ctrl-C.

An invalid value raises a typed error that names its option.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from autotune.errors import ConfigError
from autotune.paths import reports_dir, typed
from kernelgen.errors import InputError, ToolMissingError

if TYPE_CHECKING:
    from autotune.report import LivePage

# The exit code after Ctrl-C.
INTERRUPTED = 130
# Seconds of a budget that the table and the pages at the end take.
PAGES_S = 4.0


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """names: of a flag, or of an option that its parameter does not name. panel: where it stands in the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def argument(name: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=name, help=help, **more)


search, sharing, output, measuring = (
    functools.partial(option, panel=panel) for panel in ("Search", "Sharing", "Output", "Measuring")
)

CONFIG_HELP = "A TOML file, or the name of one in configs/."
Config = Annotated[str, argument("CONFIG", CONFIG_HELP)]
Device = Annotated[str | None, option("cpu, cuda or cuda:N. By default the GPU if there is one.")]
ModelName = Annotated[
    str,
    argument(
        "MODEL",
        "A file of MACE, NequIP or SevenNet, the name of a published model, or module:function, which returns a "
        "model, or a model and its inputs.",
    ),
]
Structure = Annotated[str | None, option("The atoms on which it runs: a file that ase reads, or a name such as mof.")]
ModelDtype = Annotated[str | None, option("Run the model in float32 or float64. Default: as in the file.")]
Budget = Annotated[str | None, search("Time limit of the whole run, with units: 90s, 10m, 1h30m.")]
Trials = Annotated[int | None, search("Trials of each search. Trials of earlier runs count.")]
Peers = Annotated[
    str | None,
    output(
        "Also time peers, whatever it takes: all, none, or names: e3nn,e3nn-compiled. Default, of a config's "
        "workloads and of stale entries: those for which a third of the budget suffices."
    ),
]
NoPeers = Annotated[bool, output("The same as --peers none.", "--no-peers")]
Results = Annotated[Path | None, output("Folder of the tuned databases and raw trials.")]
Reports = Annotated[Path | None, output("Folder of the HTML pages.")]
Watch = Annotated[bool, output("Open the page in a browser while it grows.", "--watch")]
Json = Annotated[bool, option("Print a JSON list.", "--json")]


def examples(*lines: str) -> str:
    """The examples below a command's help: one command per line."""
    return "\n".join(["[bold]Examples[/]", *lines])


class Interrupts:
    """Records whether Ctrl-C was pressed; the tuner itself stops in order."""

    seen = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt


def resolve_device(text: str | None) -> str:
    """The requested device, by default the GPU if torch sees one, else the CPU; a typed error if it is missing."""
    import torch

    from kernelgen.device import device_facts

    if text is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise InputError(f"device {text!r} is not known; expected cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.index is not None and 0 < count <= device.index:
        raise ToolMissingError(f"device {text!r} does not exist; torch sees {count} CUDA devices, numbered from 0")
    device_facts(device)
    return text


def devices_given(device: str | None, devices: str | None) -> list[str]:
    """The devices of ``--device`` or ``--devices``; an error if both are given."""
    from autotune.measure.worker import devices_named

    if device is not None and devices is not None:
        raise ConfigError(f"--device {device} and --devices {devices} exclude each other; leave one out")
    return [resolve_device(device)] if devices is None else devices_named(devices, resolve_device)


def budget_seconds(text: str | None, option: str = "--budget") -> float | None:
    from autotune.workload.toml_tables import parse_duration

    try:
        return None if text is None else parse_duration(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def peers_named(text: str) -> tuple[str, ...] | None:
    """Names of peers; None for all of them."""
    if text == "all":
        return None
    return () if text == "none" else tuple(name.strip() for name in text.split(",") if name.strip())


def peers_asked(text: str | None, no_peers: bool, usual: bool | None) -> bool | tuple[str, ...] | None:
    """What ``tune`` takes as ``with_peers``; ``usual``: if neither option is given."""
    if text is None or no_peers:
        return False if no_peers else usual
    names = peers_named(text)
    return True if names is None else names or False


def what_is_left(budget_s: float, begin: float) -> float:
    """What the tuner may use of a command's budget: less what passed since ``begin``, and its table and pages."""
    return max(1.0, budget_s - (time.monotonic() - begin) - PAGES_S)


def positive(option: str, number: int | None) -> None:
    if number is not None and number < 1:
        raise ConfigError(f"{option} is {number}; expected a positive integer")


def results_folder(given: Path | None) -> Path:
    from autotune.database.store import writable_results_dir

    return given or writable_results_dir()


def export_file(option: str, path: Path | None) -> Path | None:
    """A file to write at the end of a long run; a missing folder is an error at once."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"{option} {path}: expected a file in a folder that exists")
    return path


def write_pages(results: Path, reports: Path | None, only: str | None) -> bool:
    """Write the pages and print their paths; ``only``: that of this device. Returns whether there are any."""
    from autotune.report import write_reports

    folder = reports or reports_dir(results)
    pages = write_reports(results, folder, only)
    for page in pages:
        print(f"report: {page}")
    if not pages:
        print(f"no results in {results}; run `{typed('tune')}` first")
    return bool(pages)


@contextlib.contextmanager
def watched(results: Path, reports: Path | None, slug: str) -> Iterator[LivePage]:
    """The page that ``--watch`` shows: opened in a graphical browser, if there is one; its path is printed."""
    import webbrowser

    from autotune.report import LivePage

    with LivePage(results, reports or reports_dir(results), slug) as live:
        if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(live.path.resolve().as_uri())
        print(f"watch: {live.path}", flush=True)
        yield live


def print_rich(renderable: Any) -> None:
    from rich.console import Console

    Console(markup=False, emoji=False).print(renderable)


def print_next(step: str) -> None:
    """Print a command's last line: what to type next."""
    print(f"next: {step}")


# Groups of commands: ``equitune bench models``, and ``equitune bench CONFIG`` for the group's usual command.
#
# Flags that were commands before (``equitune bench --models``) work for one version: they are put into the present
# words, with a line on standard error that says so.

# Old flags with a value, which is the new command's first argument.
WITH_VALUE = ("--model", "--library", "--older-than")


class Group(TyperGroup):
    """usual: the command of words that name none, and its argument. old: by flags, the command that they mean.

    unread: by command, options with a value that its flags went with, and that said nothing.
    """

    usual: ClassVar[str]
    argument: ClassVar[str] = "CONFIG"
    old: ClassVar[Mapping[str, str]]
    unread: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            others = ", ".join(name for name in self.commands if name != self.usual)
            raise ConfigError(f"{ctx.command_path}: no {self.argument} is given; name one, or a command: {others}")
        return super().parse_args(ctx, self.in_present_words(ctx.command_path, list(args)))

    def in_present_words(self, path: str, words: list[str]) -> list[str]:
        """The words with the command in front; says so if they name it by flags."""
        if words[0] in (*self.commands, "--help", "-h"):
            return words
        for flags, command in self.old.items():
            if all(any(word.partition("=")[0] == flag for word in words) for flag in flags.split()):
                present = [command, *moved_ahead(flags.split(), words, self.unread.get(command, ()))]
                say_present(path, present)
                return present
        return [self.usual, *words]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The group's help, then that of its usual command."""
        super().format_help(ctx, formatter)
        usual = self.commands[self.usual]
        usual.format_help(usual.make_context(self.usual, [], parent=ctx, resilient_parsing=True), formatter)


def say_present(path: str, words: list[str]) -> None:
    """The present spelling of a command, on standard error."""
    print(f"equitune: note: this is now spelled {path} {shlex.join(words)}", file=sys.stderr)


def moved_ahead(flags: list[str], words: list[str], unread: tuple[str, ...] = ()) -> list[str]:
    """The words without flags and unread options; the values of flags that have one come first."""
    values, rest, left = [], [], iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag in unread:
            _ = equals or next(left, "")
        elif flag not in flags:
            rest.append(word)
        elif flag in WITH_VALUE:
            values.append(value if equals else next(left, ""))
    return values + rest
