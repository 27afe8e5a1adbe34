"""The first screen: the sentence and the picker, of models if a record of them exists, else of kernels."""

from __future__ import annotations

from autotune.report.data.device_data import DeviceData
from autotune.report.html.bars import picker
from autotune.report.html.markup import Markup, join, tag
from autotune.report.sections.first_screen import kernels, models

MODEL_ROWS, KERNEL_ROWS = "model-rows", "kernel-rows"


def first_screen(data: DeviceData) -> Markup:
    """The whole of it."""
    device = str(data.device["name"])
    if not data.models:
        return join((_lead(kernels.sentence(kernels.kernel_rows(data), device)), kernel_picker(data)))
    drawn = picker(MODEL_ROWS, models.AXES, models.choices(data.models), "peak memory", models.first_of(data.models))
    note = tag("p", models.RANDOM, class_="hint") if any(row.random for row in data.models) else None
    joint = models.joint_sentence(data.models)
    return join((_lead(models.sentence(data.models, device)), drawn, tag("p", joint, class_="hint") if joint else None,
                 note))  # fmt: skip


def kernel_picker(data: DeviceData) -> Markup | None:
    """Kernels to pick from; None without any."""
    rows = kernels.kernel_rows(data)
    if not rows:
        return None
    chosen = kernels.choices(rows, str(data.device.get("backend") or "cpu"))
    return picker(KERNEL_ROWS, kernels.AXES, chosen, "extra memory", kernels.first_of(rows))


def _lead(text: str) -> Markup:
    return tag("p", text, class_="lead")
