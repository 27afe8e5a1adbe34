"""Where the checkout and the helpers of its tests are."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def load_tests(path: str) -> ModuleType:
    """The module of a file of tests, ``path`` from tests/ on, for those who go over its cases."""
    file = ROOT / "tests" / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
