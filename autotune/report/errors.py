"""Errors while building a report."""

from __future__ import annotations

from kernelgen.errors import EquituneError


class ReportError(EquituneError, ValueError):
    """A results file that the report cannot read."""
