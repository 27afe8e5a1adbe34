"""NVRTC, the driver and the GPU must fit each other; what does not says so, and what to install."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from autotune.cli.doctor import nvrtc_flaws
from kernelgen.compile import gpu as nvrtc
from kernelgen.compile.job import Binary
from kernelgen.errors import LaunchError, ToolMissingError
from kernelgen.runtime import kernel as cuda_driver

NEW, OLD = (13, 0), (12, 2)


@pytest.mark.parametrize(("driver", "version"), [(NEW, "13.5"), (NEW, "12.9"), (OLD, "12.9"), (OLD, "12.0")])
def test_kernels_run_on_drivers_of_their_major_version_and_later(driver: tuple[int, int], version: str) -> None:
    assert nvrtc.misfit(driver, version) == ""


def test_an_older_driver_names_the_extra_for_it() -> None:
    said = nvrtc.misfit(OLD, "13.5")
    assert "NVRTC 13.5" in said and "supports CUDA 12.2" in said and "pip install 'equitune[gpu-cu12]'" in said


def test_an_architecture_that_nvrtc_does_not_know_is_named() -> None:
    assert nvrtc.unknown_arch("sm_90") == ""
    assert "does not know sm_990" in nvrtc.unknown_arch("sm_990")


@pytest.mark.parametrize(("version", "known"), [("12.1", False), ("12.8", False), ("12.9", True), ("13.5", True)])
def test_older_compilers_are_given_no_option_that_they_refuse(version: str, known: bool) -> None:
    assert nvrtc.has_cache(version) is known


class Library:
    """A driver that only tells its version."""

    def __init__(self, version: int, status: int = 0) -> None:
        self.version, self.status = version, status

    def cuDriverGetVersion(self, target: object) -> int:  # noqa: N802  (the driver's name)
        ctypes.cast(target, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return self.status


class Refusing(Library):
    """A driver that loads no code."""

    def cuLibraryLoadData(self, *_: object) -> int:  # noqa: N802
        return 209

    def cuGetErrorName(self, status: int, target: object) -> int:  # noqa: N802
        ctypes.cast(target, ctypes.POINTER(ctypes.c_char_p))[0] = b"NO_BINARY"
        return 0 if status == 209 else 1


def test_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_library", lambda: Library(12020))
    assert cuda_driver.driver_cuda() == OLD
    monkeypatch.setattr(cuda_driver, "_library", lambda: Library(0, status=3))
    with pytest.raises(ToolMissingError, match="does not tell its version"):
        cuda_driver.driver_cuda()


def test_the_doctor_says_which_pair_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "driver_cuda", lambda: OLD)
    assert nvrtc_flaws("13.5") == [nvrtc.misfit(OLD, "13.5")]
    monkeypatch.setattr(cuda_driver, "driver_cuda", lambda: NEW)
    assert nvrtc_flaws("13.5") == []


@pytest.mark.parametrize(("driver", "error"), [(OLD, ToolMissingError), (NEW, LaunchError)])
def test_a_kernel_that_cannot_be_loaded_says_why(
    driver: tuple[int, int], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_library", lambda: Refusing(0))
    monkeypatch.setattr(cuda_driver, "driver_cuda", lambda: driver)
    monkeypatch.setattr(cuda_driver, "has_nvrtc", lambda: True)
    monkeypatch.setattr(cuda_driver, "nvrtc_version", lambda: "13.5")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(b"no kernel")
    with pytest.raises(error, match=r"equitune\[gpu-cu12\]" if driver == OLD else "cannot be loaded: NO_BINARY"):
        cuda_driver.load_entry(Binary(path, {}), "entry")
