"""Paths of the checkout and of its test helpers."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def load_tests(path: str) -> ModuleType:
    """The module of a test file, by its ``path`` below tests/, for reuse of its cases."""
    file = ROOT / "tests" / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
