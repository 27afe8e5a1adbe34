"""The documentation as its tests see it: pages, their code blocks, and why a block is not run.

A block of Python runs with the blocks before it on its page, and so does a block of ``sh`` marked ``<!-- run -->``;
``<!-- not run: WHY -->`` in the line before says why another does not. A page that begins with
``<!-- page needs: PACKAGE -->`` runs where that package is installed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from places import ROOT

DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
BLOCK = re.compile(r"(?:^<!-- (run|not run: [^\n]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"\A<!-- page needs: (\w+) -->\n")


@dataclass(frozen=True)
class Block:
    """language: of the fence. mark: ``run``, ``not run: WHY`` or empty."""

    page: str
    language: str
    text: str
    mark: str

    @property
    def is_run(self) -> bool:
        return self.mark == "run" or (self.language == "python" and not self.mark)


def pages() -> list[Path]:
    """README and all pages of the site."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def package_of(page: Path) -> str:
    """The package that a page's blocks need; empty for none."""
    found = NEEDS.match(page.read_text())
    return found[1] if found else ""


def blocks_of(page: Path) -> list[Block]:
    """Code blocks, but those that show a program of ``docs/examples``."""
    found = [Block(name_of(page), block[2], block[3], block[1] or "") for block in BLOCK.finditer(page.read_text())]
    return [block for block in found if not block.text.startswith("--8<-- ")]


def commands_in(page: Path) -> list[str]:
    """Every ``equitune ...`` in blocks of ``sh``, on one line each, without what a comment says."""
    text = "\n".join(block.text for block in blocks_of(page) if block.language == "sh").replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
    return [found[1] for line in lines if (found := re.match(r"(?:srun )?(equitune .*)", line))]


def run_python(page: Path, space: dict[str, object]) -> int:
    """Run a page's Python in one namespace, a GPU's device being the CPU; how many blocks there were."""
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.is_run]
    for number, block in enumerate(blocks):
        code = compile(block.text.replace('"cuda"', '"cpu"'), f"{block.page}, block {number}", "exec")
        exec(code, space)
    return len(blocks)
