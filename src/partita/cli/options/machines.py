"""The machines that ``partita plan`` plans for, as its options name them, and how they name more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from partita.cli.options.quantities import parse_bytes
from partita.errors import UsageError
from partita.planning import Cluster, Device, devices, parse_devices
from partita.planning.hardware.devices import counted_devices

__all__ = ["Machines"]

_BARE_BYTES = 10**6
"""Whoever types a number without a unit below this has likely forgotten the unit."""


@dataclass(frozen=True)
class Machines:
    """The options.

    Attributes:
        devices: such as ``16xH100``.
        ranks: of this machine's kind, in place of devices.
        nodes: how many machines the devices are in.
        memory: what a rank may hold, such as ``80GB``.
        device_file: a table of devices of the user's own.
        dtype: the one that devices of different kinds are compared by.
    """

    devices: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    memory: str | None = None
    device_file: Path | None = None
    dtype: str = "bfloat16"

    def cluster(self) -> tuple[Cluster, Device | None]:
        """The cluster, and the device that costs are worked out for; None where they are measured here.

        Raises:
            UsageError: both or none of devices and ranks, an option without the one that it belongs to, a
                device that is unknown, or no memory at all.
            PlanError: text that names no devices, or devices that can't be shared out among the nodes.
        """
        if self.devices is None and self.ranks is None:
            raise UsageError(
                "there is neither --devices nor --ranks: give --devices, such as 16xH100, or --ranks, to "
                "measure on this machine"
            )
        if self.devices is not None and self.ranks is not None:
            raise UsageError(f"--ranks is {self.ranks}, and --devices say it too: leave one of them out")
        size = self.memory_bytes
        if self.devices is not None:
            kinds = self._kinds()
            cluster = Cluster.of_devices(
                self.devices, nodes=self.nodes, memory=size, dtype=self.dtype, path=self.device_file
            )
            return cluster, kinds[0]
        if self.nodes is not None or self.device_file is not None:
            raise UsageError("--nodes and --device-file go with --devices: give these, or leave them out")
        if self.ranks is None or self.ranks < 1:
            raise UsageError(f"--ranks is {self.ranks}: give 1 or more")
        return Cluster(self.ranks, memory_bytes=size), None

    @property
    def memory_bytes(self) -> int | None:
        """What ``--memory`` says, in bytes."""
        size = None if self.memory is None else parse_bytes(self.memory, "--memory")
        if size == 0:
            raise UsageError(
                f"--memory is {self.memory!r:.40}: give what a rank may hold, such as 80GB, or leave it out"
            )
        return size

    @property
    def device_memory_bytes(self) -> int | None:
        """What the smallest of the devices has, whatever ``--memory`` says; None for this machine."""
        return None if self.devices is None else min(kind.memory_bytes for kind in self._kinds())

    @property
    def forgotten_unit(self) -> str:
        """``80GB``, where ``--memory`` is a bare 80; empty where it has a unit, or is large enough."""
        bare = (self.memory or "").strip()
        if not bare.replace(".", "", 1).isdecimal() or (self.memory_bytes or 0) >= _BARE_BYTES:
            return ""
        return f"{bare}GB"

    def refuse_forgotten_unit(self, holder: str, parameter_bytes: int, copies: float = 1.0) -> None:
        """Refuse a ``--memory`` without a unit that, as bytes, is less than the parameters of one part take.

        Args:
            holder: the part: ``stage 3``.
            parameter_bytes: of that part.
            copies: how often they count.

        Raises:
            UsageError: says what may be meant.
        """
        size = self.memory_bytes or 0
        if self.forgotten_unit and copies * parameter_bytes > size:
            raise UsageError(
                f"--memory is {self.memory!r:.40}, that is {size} bytes, and the parameters of {holder} "
                f"alone are {parameter_bytes}: did you mean {self.forgotten_unit}?"
            )

    def with_ranks(self, ranks: int) -> Machines | None:
        """The options for so many ranks of the same devices; None where a machine would not be full."""
        if self.devices is None:
            return replace(self, ranks=ranks)
        kinds = self._kinds()
        if len({kind.name for kind in kinds}) > 1:
            return self._repeated(ranks, len(kinds))
        text, most = f"{ranks}x{kinds[0].name}", kinds[0].ranks_per_node
        if self.nodes in (None, 1):
            a_node = most if self.nodes is None else max(most, len(kinds))
            if ranks <= a_node:
                return replace(self, devices=text)
        else:
            a_node = len(kinds) // (self.nodes or 1)
        if ranks % a_node:
            return None
        return replace(self, devices=text, nodes=None if self.nodes is None else ranks // a_node)

    def _repeated(self, ranks: int, count: int) -> Machines | None:
        times, rest = divmod(ranks, count)
        if rest or not times:
            return None
        nodes = None if self.nodes is None else self.nodes * times
        return replace(self, devices=",".join([self.devices or ""] * times), nodes=nodes)

    def larger(self, ranks: int) -> Cluster | None:
        """The cluster of so many ranks, where there is one."""
        machines = self.with_ranks(ranks)
        return None if machines is None else machines.cluster()[0]

    def in_options(self) -> str:
        """What to type for these devices, without ``--memory`` and ``--device-file``."""
        if self.devices is None:
            return f"--ranks {self.ranks}"
        return f"--devices {self.devices}{'' if self.nodes is None else f' --nodes {self.nodes}'}"

    def _kinds(self) -> tuple[Device, ...]:
        described = devices(self.device_file)
        for _, name in counted_devices(self.devices or ""):
            if name.lower() not in {one.lower() for one in described}:
                raise UsageError(
                    f"there is no device {name!r:.60}: use {', '.join(sorted(described))}, or describe it in "
                    "a file and give that as --device-file"
                )
        return parse_devices(self.devices or "", self.device_file)
