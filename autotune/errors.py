"""Errors of the tuning package: each says what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

from kernelgen.errors import EquituneError
from kernelgen.errors import TuningMissError as TuningMissError


class ConfigError(EquituneError, ValueError):
    """A config file, or something it names, is invalid: unknown key, problem or graph, or missing file."""


class PeerError(EquituneError, RuntimeError):
    """A peer cannot be compared: not installed, its own kernels did not run, or its results are wrong."""


class WorkerError(EquituneError, RuntimeError):
    """A worker process could not be set up, or a job raised an exception instead of answering."""


class StudyError(EquituneError, RuntimeError):
    """A search cannot run: another process uses its records, or its storage cannot be opened."""


class DatabaseError(EquituneError, RuntimeError):
    """A tuned database cannot be written, or an entry for it is malformed."""


def unknown_name(what: str, given: str, known: Iterable[str]) -> str:
    """``unknown key 'budgett'; did you mean 'budget'?``, or the list of valid names if none is similar."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, 1, cutoff=0.5)
    hint = (
        f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names) or 'nothing: there is none here'}"
    )
    return f"unknown {what} {given!r}; {hint}"


def check_known(what: str, given: Any, known: Collection[str], where: str = "") -> None:
    """ConfigError for a name that is none of the known ones, as :func:`unknown_name` says it, behind ``where``."""
    if given not in known:
        raise ConfigError(where + unknown_name(what, str(given), known))


class ReportError(EquituneError, ValueError):
    """A results file that the report cannot read."""
