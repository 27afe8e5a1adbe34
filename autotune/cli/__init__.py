"""The command ``equitune``.

In: arguments. Out: what ``tune``, ``bench``, ``report`` and the others print. Read ``commands``, ``options``,
``database`` (``equitune db``), ``show`` and ``doctor``.
"""

from autotune.cli.commands import main

__all__ = ["main"]
