"""Pack content that is only shown on demand, as inert script elements.

A page has thousands of tables, strip plots and sources that few readers open. They are compressed (deflate) and stored
in base 85; the page's script unpacks them. So the page stays one file that loads nothing else.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

from autotune.report.html.markup import FOLD, Markup, tag

# Id of the element with all folded parts of a page.
PARTS = "parts"
WAITING = "It unfolds where scripts are allowed."
# The innermost: without another one inside.
_FOLDED = re.compile(f"<{FOLD}>((?:(?!<{FOLD}>).)*?)</{FOLD}>", re.DOTALL)
# Python's base 85 alphabet without the character that could begin or end an element.
_ALPHABET = str.maketrans("<", ",")


def block(name: str, data: Any) -> Markup:
    """An inert element with ``data`` as packed text."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    packed = zlib.compress(text.encode(), 9)
    written = base64.b85encode(packed, pad=True).decode().translate(_ALPHABET)
    return tag("script", Markup(written), type="text/plain", id=name, data_bytes=len(packed))


def unfolding(markup: Markup) -> tuple[Markup, Markup | None]:
    """Markup with a numbered placeholder for each folded part, and the block of these parts; None if there are none.

    A part within a part leaves a placeholder in the outer one.
    """
    parts: list[str] = []

    def place(match: re.Match[str]) -> str:
        parts.append(match[1])
        return tag("p", WAITING, class_="hint", data_part=len(parts) - 1)

    text, found = _FOLDED.subn(place, markup)
    while found:
        text, found = _FOLDED.subn(place, text)
    visible = Markup(text)
    return visible, block(PARTS, parts) if parts else None
