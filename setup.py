"""Build hook: a wheel carries configs/, the tuned database and fitted models of results/, and compiled kernels.

They lie beside the packages in the tree. ``equitune pack suite --arch sm_90 --out packs`` makes the kernels; git
keeps none, and a wheel without them works where there is a compiler.

The package ``equitune`` lies in autotune/equitune. Everything else is in pyproject.toml. In an editable install nothing
is copied: the package finds both in the tree.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Folder and files in the tree, and the folder in the wheel.
CARRIED = (
    ("configs", "*.toml", "autotune/_data/configs"),
    ("results", "*.json", "autotune/_data/results"),
    ("results/predicted", "*.json", "autotune/_data/results/predicted"),
    ("packs", "index.json", "kernelgen/_packs"),
    ("packs", "*.pack.xz", "kernelgen/_packs"),
)


class BuildWithData(build_py):
    """``build_py`` that also puts what :data:`CARRIED` names into the packages."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, target in self.carried():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def carried(self) -> list[tuple[Path, Path]]:
        """Pairs of a file in the tree and its place in the build folder."""
        return [
            (source, Path(self.build_lib) / target / source.name)
            for folder, pattern, target in CARRIED
            for source in sorted((ROOT / folder).glob(pattern))
            if source.name.count(".") == pattern.count(".")  # NAME.corrupt-TIME.json is kept aside, not shipped
        ]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else outputs + [str(target) for _, target in self.carried()]


setup(
    packages=["equitune", *find_packages(include=["kernelgen*", "autotune*"], exclude=["autotune.equitune"])],
    package_dir={"equitune": "autotune/equitune"},
    cmdclass={"build_py": BuildWithData},
)
