"""The command without extra ``tune``: ``doctor`` and ``--version`` work, others name the missing packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from autotune.extras import lacking, typed


def main(words: Sequence[str]) -> NoReturn:
    """Answer and exit: 0, or 2 with one line on standard error."""
    if list(words) == ["--version"]:
        from kernelgen.version import __version__

        print(f"equitune {__version__}")
        sys.exit(0)
    if list(words) in (["doctor"], ["doctor", "--json"]):
        from autotune.cli.doctor import as_data, as_lines, examine, next_step

        findings = tuple(examine())
        if "--json" in words:
            print(json.dumps(as_data(findings), indent=1))
        else:
            print(*as_lines(findings), f"next: {next_step(findings)}", sep="\n")
        sys.exit(0)
    reason = lacking(" ".join(["equitune", *words[:1]]))
    print(f"equitune: error: {reason} ({typed('doctor')} works without)", file=sys.stderr)
    sys.exit(2)
