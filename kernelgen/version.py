"""Version of the package and of the generator: results record which generator made the kernel they describe."""

from __future__ import annotations

__version__ = "0.2.0"

# Which texts are generated. It changes when a text changes, and with nothing else: ``tests/golden_texts.py`` pins both.
GENERATOR_VERSION = "0.1.0+e8e37b9c22"
