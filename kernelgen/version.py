"""Versions of the package and of the generator. Results record the generator that made their kernel."""

from __future__ import annotations

__version__ = "0.2.0"

# Changes when, and only when, a generated text changes: ``tests/support/golden_texts.py`` pins both.
GENERATOR_VERSION = "0.1.0+6c8d2a991e"
