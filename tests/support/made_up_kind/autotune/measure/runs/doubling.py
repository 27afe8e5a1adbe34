"""How kernels of a made-up kind are run: as those of harmonics, which is never tried."""

from __future__ import annotations

from autotune.measure.runs.spherical_harmonics import HarmonicsRuns


class DoublingRuns(HarmonicsRuns):
    operations = ("doubling",)


RUNS = DoublingRuns()
