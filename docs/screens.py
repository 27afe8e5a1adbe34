"""Pictures of a terminal for the documentation: what commands print, as SVG in ``docs/screens/``.

``python docs/screens.py [NAME...]`` runs the commands and writes the pictures. Where MACE is not installed,
``accelerate`` and ``certify`` are left out. Each is run on the CPU of this machine, so times are this machine's.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "screens"


@dataclass(frozen=True)
class Screen:
    """shown: the command as a reader types it. run: the same for a shell here. most: lines to keep. width: columns."""

    shown: str
    run: str
    needs: str = "typer"
    most: int = 40
    width: int = 110


PYTHON, EXAMPLES = shlex.quote(sys.executable), shlex.quote(str(DOCS / "examples"))
SCREENS = {
    "tune": Screen(
        "equitune tune quick --device cpu --budget 2m --no-peers",
        f"{PYTHON} -m autotune tune quick --device cpu --budget 2m --no-peers --results results --reports reports",
    ),
    "show": Screen(
        "equitune show mace-mp-medium --device cpu",
        f"{PYTHON} -m autotune show mace-mp-medium --device cpu",
        most=20,
    ),
    "certify": Screen(
        "equitune certify my.model --quick --paths equitune --dtype float64 --device cpu",
        f"{PYTHON} -W ignore {EXAMPLES}/small_mace.py my.model && PYTHONPATH={EXAMPLES}:$PYTHONPATH "
        f"{PYTHON} -W ignore -m autotune certify my.model --quick --paths equitune --dtype float64 --device cpu "
        "--results results --reports reports",
        needs="mace",
        width=162,
    ),
    "accelerate": Screen(
        "python -c 'from autotune import accelerate; ...; print(accelerate(model))'",
        f"PYTHONPATH={EXAMPLES}:$PYTHONPATH {PYTHON} -W ignore -c "
        "'from small_mace import small_mace; from autotune import accelerate; print(accelerate(small_mace()))'",
        needs="mace",
    ),
}


def output_of(screen: Screen) -> str:
    """What the command prints, without the last states of lines that were rewritten."""
    environment = os.environ | {"COLUMNS": str(screen.width), "NO_COLOR": "1", "PYTHONPATH": str(DOCS.parent)}
    with tempfile.TemporaryDirectory() as folder:
        whole = f"({screen.run}) 2>&1"
        done = subprocess.run(whole, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)
        text = done.stdout.replace(folder, "~").replace(str(DOCS.parent), "~/equitune").replace(str(Path.home()), "~")
    if done.returncode != 0:
        raise SystemExit(f"{screen.shown} failed:\n{text}")
    lines = [line.rstrip() for line in text.splitlines()]
    kept = lines[: screen.most] + ["..."] * (len(lines) > screen.most)
    return "\n".join(kept)


def picture_of(screen: Screen) -> str:
    """An SVG that asks no other host for a font."""
    console = Console(width=screen.width, record=True, file=io.StringIO())
    console.print(Text(f"$ {screen.shown}", style="bold"))
    console.print(Text(output_of(screen)), soft_wrap=False)
    svg = console.export_svg(title="", unique_id="screen")
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or SCREENS:
        screen = SCREENS[name]
        if importlib.util.find_spec(screen.needs) is None:
            print(f"{name} is left out: {screen.needs} is not installed")
            continue
        (FOLDER / f"{name}.svg").write_text(picture_of(screen))
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
