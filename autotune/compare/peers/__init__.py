"""Peers that a tuned kernel is compared with in the same run; each is checked before it is timed.

:func:`peers_for` gives the :class:`Peer` values of a workload on a device. ``peer.prepare()`` gives the timed passes,
or raises PeerError with the reason why the peer has no time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

import torch

from autotune.compare.peers import cuequivariance, e3nn, openequivariance
from autotune.compare.peers.others import CONTRACTION_ADAPTERS, HARMONICS_ADAPTERS, RADIAL_ADAPTERS, VECTORS_ADAPTERS
from autotune.compare.peers.peer import Adapter, Peer, Task
from autotune.errors import ConfigError, unknown_name
from autotune.measure.references import Reference
from autotune.workload.workload import Tensors, Workload

# e3nn comes first in tables, since all others are proven by it. A new peer adds its line.
ADAPTERS: tuple[Adapter, ...] = (
    *e3nn.ADAPTERS,
    *cuequivariance.ADAPTERS,
    *VECTORS_ADAPTERS,
    *openequivariance.ADAPTERS,
    *RADIAL_ADAPTERS,
    *HARMONICS_ADAPTERS,
    *CONTRACTION_ADAPTERS,
)

__all__ = ["ADAPTERS", "Peer", "chosen_peers", "peer_names", "peers_for", "usable_peers"]


def peers_for(
    workload: Workload,
    device: torch.device | str,
    tensors: Tensors | None = None,
    reference: Reference | None = None,
) -> list[Peer]:
    """The peers to list for a device, usable or not (``prepare`` tells).

    A deterministic workload is compared only with peers that promise bitwise equal results.
    All peers share ``tensors`` and ``reference``, which are made on first use if not given.
    """
    device = torch.device(device)
    task = Task(workload, device, tensors, reference)
    kind = (workload.deterministic, workload.operation)
    return [Peer(adapter, task) for adapter in ADAPTERS if _is_listed(adapter, device, *kind)]


def usable_peers(device: torch.device | str) -> dict[str, str | None]:
    """Every product peer for a kind of device, by name, with the reason if it is unusable."""
    device = torch.device(device)
    chosen = (one for one in ADAPTERS if device.type in one.backends and "conv" in one.operations)
    return {adapter.name: adapter.unusable(device) for adapter in chosen}


def peer_names(
    device: torch.device | str, deterministic: bool = False, operation: str | None = None
) -> tuple[str, ...]:
    """Names of the peers listed for a device; only those of deterministic rows or of one operation, if given."""
    kind = (torch.device(device), deterministic, operation)
    return tuple(dict.fromkeys(adapter.name for adapter in ADAPTERS if _is_listed(adapter, *kind)))


def chosen_peers(names: Collection[str] | None, device: torch.device | str) -> tuple[str, ...]:
    """Names of peers in the order of tables, of all that are listed for a device by default; ConfigError if unknown."""
    known = peer_names(device)
    for name in names or ():
        if name not in known:
            raise ConfigError(unknown_name("peer", name, known))
    return known if names is None else tuple(name for name in known if name in names)


def _is_listed(
    adapter: Adapter, device: torch.device, deterministic: bool = False, operation: str | None = None
) -> bool:
    if (deterministic and not adapter.deterministic) or operation not in (None, *adapter.operations):
        return False
    installed = not adapter.module or importlib.util.find_spec(adapter.module) is not None
    return device.type in adapter.backends and (installed or adapter.listed_if_absent)
