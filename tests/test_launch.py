"""The launch configuration that is packed by hand is the one that the driver's own bindings make."""

from __future__ import annotations

import ctypes

import pytest

from kernelgen.launch import _Arguments

driver = pytest.importorskip("cuda.bindings.driver")


def test_packed_configuration_is_the_drivers() -> None:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 7, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
    config.sharedMemBytes, config.hStream = 4096, driver.CUstream(0x1234)
    config.attrs, config.numAttrs = [attribute], 1
    theirs = ctypes.string_at(config.getPtr(), 52)
    attributes_at = int.from_bytes(theirs[40:48], "little")

    ours = _Arguments()
    ours.config_packer.pack_into(ours.config, 0, 7, 1, 1, 128, 1, 1, 4096, 0x1234, attributes_at, 1)
    assert ours.config.raw[:28] == theirs[:28], "grid, block, shared memory"
    assert ours.config.raw[32:52] == theirs[32:52], "stream, attributes and their number"
    assert ours.attribute.raw[:12] == ctypes.string_at(attributes_at, 12)
