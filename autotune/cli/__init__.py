"""The command ``equitune``.

Read ``commands`` (``tune``, ``report`` and others), ``options``, ``bench``, ``database`` (``equitune db``), ``show``,
``doctor`` and ``replay``.
"""

from autotune.cli.commands import main

__all__ = ["main"]
