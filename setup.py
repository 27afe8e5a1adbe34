"""Build hook: a wheel carries configs/, and the tuned database and fitted models of results/.

They lie beside the packages in the tree.

Everything else is in pyproject.toml. In an editable install nothing is copied: the package finds both in the tree.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CARRIED = (("configs", "*.toml"), ("results", "*.json"), ("results/predicted", "*.json"))


class BuildWithData(build_py):
    """``build_py`` that also puts what :data:`CARRIED` names under ``autotune/_data``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, target in self.carried():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def carried(self) -> list[tuple[Path, Path]]:
        """Pairs of a file in the tree and its place in the build folder."""
        data = Path(self.build_lib) / "autotune" / "_data"
        return [
            (source, data / folder / source.name)
            for folder, pattern in CARRIED
            for source in sorted((ROOT / folder).glob(pattern))
            if "." not in source.stem  # NAME.corrupt-TIME.json is kept aside, not shipped
        ]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else outputs + [str(target) for _, target in self.carried()]


setup(cmdclass={"build_py": BuildWithData})
