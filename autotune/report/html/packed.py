"""What a page holds packed until a reader opens it: markup and sources enter, inert script elements leave.

A page has thousands of tables, strips of samples and sources that few readers open. They are compressed (deflate) and
written in base 85 into the page, whose script unpacks them. So the page stays one file that loads nothing.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

from autotune.report.html.markup import FOLD, Markup, tag

# The id of the element with all folded parts of a page.
PARTS = "parts"
WAITING = "It unfolds where scripts are allowed."
_FOLDED = re.compile(f"<{FOLD}>(.*?)</{FOLD}>", re.DOTALL)
# Python's alphabet but for what could end or begin an element.
_ALPHABET = str.maketrans("<", ",")


def block(name: str, data: Any) -> Markup:
    """An inert element whose text is ``data``, packed."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    packed = zlib.compress(text.encode(), 9)
    written = base64.b85encode(packed, pad=True).decode().translate(_ALPHABET)
    return tag("script", Markup(written), type="text/plain", id=name, data_bytes=len(packed))


def unfolding(markup: Markup) -> tuple[Markup, Markup | None]:
    """Markup with a numbered place for each folded part, and the block of these parts; None where there are none."""
    parts: list[str] = []

    def place(match: re.Match[str]) -> str:
        parts.append(match[1])
        return tag("p", WAITING, class_="hint", data_part=len(parts) - 1)

    visible = Markup(_FOLDED.sub(place, markup))
    return visible, block(PARTS, parts) if parts else None
