"""Peers of convolutions of edge vectors: a library's convolution applied to its harmonics.

OpenEquivariance has no harmonics, and e3nn's are already compiled by TorchScript: both use e3nn's module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from autotune.compare.peers import cuequivariance as cuequivariance_peer
from autotune.compare.peers import e3nn as e3nn_peer
from autotune.compare.peers import openequivariance as openequivariance_peer
from autotune.compare.peers import spherical_harmonics as harmonics_peers
from autotune.compare.peers.peer import Adapter, Product, Task
from autotune.measure.operations import Call
from autotune.measure.references import e3nn_harmonics
from kernelgen.problem.harmonics import VectorProblem

OPERATIONS = ("vectors",)
Harmonics = Callable[[Task], Call]
_METHODS = {"cuequivariance": "uniform_1d", "cuequivariance-naive": "naive"}


def _parts(task: Task) -> VectorProblem:
    assert isinstance(task.workload.problem, VectorProblem)
    return task.workload.problem


def _eager(task: Task) -> Call:
    return e3nn_harmonics(_parts(task).harmonics)


def _cuequivariance(method: str) -> Harmonics:
    return lambda task: harmonics_peers.cuequivariance_call(_parts(task).harmonics, method, task.tensors.y)


def _both(product: Adapter, harmonics: Harmonics) -> Adapter:
    """The adapter of a convolution preceded by harmonics."""

    def build(task: Task) -> Product:
        to_y, tensors = harmonics(task), task.tensors
        workload = dataclasses.replace(task.workload, problem=_parts(task).product, operation="conv")
        with torch.no_grad():
            inner = Task(workload, task.device, dataclasses.replace(tensors, y=to_y(tensors.y), ty=to_y(tensors.ty)))
        made = product.build(inner)
        return dataclasses.replace(made, call=lambda x, v, w: made.call(x, to_y(v), w))

    return dataclasses.replace(product, build=build, operations=OPERATIONS)


ADAPTERS = (
    *(_both(a, _eager) for a in (*e3nn_peer.ADAPTERS, *openequivariance_peer.ADAPTERS)),
    *(_both(a, _cuequivariance(_METHODS[a.name])) for a in cuequivariance_peer.ADAPTERS),
)
