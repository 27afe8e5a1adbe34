"""A page of the report: templates make HTML of what it shows.

Enter frozen data, leaves a Page: the HTML, what opens in it on demand (``NAME.details.js``), and the kernels' sources
(``NAME.sources/``). Scripts may not read files beside a page that was opened from a disk, but may be loaded from there:
so these files are scripts that hand over data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from autotune import text
from autotune.bench.contenders import shares_text
from autotune.report.devices import PANELS
from autotune.report.models import PACKAGES, gains
from autotune.report.rows import MIN_TRIALS, knob_names, plain_names, value_text
from kernelgen.version import GENERATOR_VERSION


class Section(NamedTuple):
    """A part of a page. summary: what stands beside the title while the section is closed; None for an open one."""

    anchor: str
    title: str
    template: str
    summary: str | None = None


@dataclass(frozen=True)
class Page:
    """name: without a suffix. parts: HTML that opens on demand, by id. sources: text by hash."""

    name: str
    text: str
    parts: Mapping[str, str]
    sources: Mapping[str, str]

    def files(self) -> dict[str, str]:
        """Text by name of file, the page itself last."""
        files = {f"{self.name}.sources/{name}.js": _call("source", name, text.split("\n"))
                 for name, text in self.sources.items()}  # fmt: skip
        if self.parts:
            files[f"{self.name}.details.js"] = _call("details", dict(self.parts))
        return files | {f"{self.name}.html": self.text}


def _call(function: str, *arguments: Any) -> str:
    """A script that hands data to a function of the page, a line a value."""
    return f"{function}({', '.join(json.dumps(value, indent=0, ensure_ascii=False) for value in arguments)});\n"


@dataclass
class Details:
    """Collects what opens on demand while a page is rendered."""

    parts: dict[str, str] = field(default_factory=dict)

    def fold(self, caller: Callable[[], str]) -> Markup:
        """The content of a ``call`` block is put aside; leaves a paragraph that the script replaces by it."""
        key = str(len(self.parts))
        self.parts[key] = ""  # its number is taken, for parts within this one
        self.parts[key] = str(caller())
        return Markup('<p class="hint" data-part="{}">It unfolds where scripts are allowed.</p>').format(key)

    def keep(self, key: str, content: str) -> str:
        """Content that the script asks for by a key of its own."""
        self.parts[key] = str(content)
        return ""


@cache
def environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("autotune.report")
    made = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {
        "binary": text.binary_text,
        "bytes": text.bytes_text,
        "contender": text.contender_name,
        "counted": text.counted,
        "direction": text.direction_name,
        "error": text.error_text,
        "floored": text.floored_ratio,
        "gains": gains,
        "grouped": text.count,
        "knob_names": knob_names,
        "joules": text.joules_text,
        "mean": text.geometric_mean,
        "path": text.path_name,
        "plain_names": plain_names,
        "percent": lambda share: text.MISSING if math.isnan(share) else f"{share:.0%}",
        "ratio": text.ratio_text,
        "shares": shares_text,
        "significant": text.significant,
        "time": text.time_text,
        "value": value_text,
        "without_time": text.without_time,
        # A name in snake case may break after each underscore.
        "breaks": lambda name: Markup(str(escape(name)).replace("_", "_<wbr>")),
    }
    made.tests["nan"] = lambda value: value != value
    names = ("MISSING", "TUNED", "DEFAULT", "STOCK", "JOINT", "CAPTURED")
    made.globals |= {name: getattr(text, name) for name in names} | {"infinity": math.inf}
    made.globals |= {
        "GENERATOR": GENERATOR_VERSION,
        "PANELS": PANELS,
        "MIN_TRIALS": MIN_TRIALS,
        "MODEL_PACKAGES": PACKAGES,
    }
    made.globals["asset"] = lambda name: Markup(loader.get_source(made, name)[0])
    return made


def render(template: str, name: str, sources: Mapping[str, str], **shown: Any) -> Page:
    """shown: what the template names."""
    details = Details()
    html = environment().get_template(template).render(name=name, fold=details.fold, keep=details.keep, **shown)
    return Page(name, html, details.parts, sources)
