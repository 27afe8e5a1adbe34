"""What tests of operators share."""

from __future__ import annotations

import pytest
from fixed_kernels import watched_launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, device: str) -> list[str]:
    """Entries of hand-written kernels as they are launched, on the test file's ``device``."""
    return watched_launches(monkeypatch)
