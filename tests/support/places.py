"""Paths of the checkout and of its test helpers."""

import importlib.util
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
TOOLS = ROOT / "tests" / "tools"


def shipped(files: Iterable[Path]) -> list[Path]:
    """The files that git keeps, not what a run wrote beside them, such as this machine's results. Without git all."""
    if not (ROOT / ".git").exists():
        return list(files)
    git = ("git", "-C", str(ROOT), "ls-files", "-z")
    kept = set(subprocess.run(git, check=True, capture_output=True, text=True).stdout.split("\0"))
    return [file for file in files if file.relative_to(ROOT).as_posix() in kept]


def load_tests(path: str) -> ModuleType:
    """The module of a test file, by its ``path`` below tests/, for reuse of its cases."""
    file = ROOT / "tests" / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
