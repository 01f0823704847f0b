"""Devices that a plan can be made for without having one: speed, memory and links, from a file of data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from partita.errors import PlanError
from partita.planning._check import require_amount, require_bandwidth, require_count, require_rate
from partita.planning.hardware.links import LinkLevel

__all__ = ["DTYPES", "Device", "counted_devices", "devices", "get_device", "parse_devices"]

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
"""What a device may have a number of operations per second for."""

_NEXT_WIDER = {"float8": "bfloat16", "int8": "float32", "float16": "float32", "bfloat16": "float32"} | {
    "tf32": "float32",
    "float32": "float64",
}
_OTHER_NAMES = {"half": "float16", "float": "float32", "double": "float64", "complex128": "float64"}
_COUNTED = re.compile(r"\s*(?:([0-9]{1,9})\s*[xX×*]\s*)?(?![0-9.]+\s*[xX×*])([^\W_][^\s,+]*)\s*")
_MOST_DEVICES = 100_000
"""More than any pipeline has ranks."""
_FILE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True)
class Device:
    """What a kind of device can do at most, and how a machine full of them is wired.

    Attributes:
        name: as `get_device` takes it.
        flops_per_s: pairs (dtype, operations per second of dense products of matrices), dtypes of `DTYPES`.
        bytes_per_s: how fast its memory is read and written.
        memory_bytes: how much memory it has.
        ranks_per_node: how many of them a machine has.
        within_node: how those of one machine are joined; its groups are the machines.
        between_nodes: how machines are joined.
        link_names: what the two kinds of links are called.
        source: where the figures are from.

    Raises:
        PlanError: a number that is out of range, a dtype that is unknown, or no dtype at all.
    """

    name: str
    flops_per_s: tuple[tuple[str, float], ...]
    bytes_per_s: float
    memory_bytes: int
    ranks_per_node: int
    within_node: LinkLevel
    between_nodes: LinkLevel
    link_names: tuple[str, str] = ("", "")
    source: str = ""

    def __post_init__(self) -> None:
        of = f"of device {self.name!r}"
        require_bandwidth(self.bytes_per_s, f"bytes_per_s {of}")
        require_amount(self.memory_bytes, f"memory_bytes {of}")
        require_count(self.ranks_per_node, f"ranks_per_node {of}")
        for dtype, speed in self.flops_per_s:
            if dtype not in DTYPES:
                raise PlanError(f"flops_per_s {of} names the dtype {dtype!r}: use {', '.join(DTYPES)}")
            require_rate(speed, f"flops_per_s for {dtype} {of}")
        if not self.flops_per_s:
            raise PlanError(f"flops_per_s {of} is empty: give a number for one of {', '.join(DTYPES)}")

    def flops(self, dtype: str) -> float:
        """Operations per second with numbers of a dtype, by torch's name for it or one of `DTYPES`.

        What the device has no figure for runs as the next wider dtype that it has one for, or as slow as any
        where there is none; other whole numbers and complex ones as float32 (complex128 as float64).

        Raises:
            PlanError: a name that no dtype has.

        >>> get_device("A100").flops("torch.float8_e4m3fn") == get_device("A100").flops("bfloat16")
        True
        """
        kind: str | None = _dtype_kind(dtype)
        speeds = dict(self.flops_per_s)
        while kind is not None and kind not in speeds:
            kind = _NEXT_WIDER.get(kind)
        return min(speeds.values()) if kind is None else speeds[kind]


def devices(path: str | PathLike[str] | None = None) -> dict[str, Device]:
    """The devices that are known, by name.

    Args:
        path: a TOML file of your own, whose tables add devices to those that come with partita or, under the
            same name, change what they say of one. ``partita/planning/hardware/devices.toml`` is an example.

    Raises:
        PlanError: a file that can't be read, or that has a wrong value; the message says where.

    >>> sorted(devices())
    ['A100', 'B200', 'CPU', 'H100', 'H100-PCIe', 'H200', 'MI300X']
    """
    tables = dict(_shipped())
    if path is not None:
        for name, table in _read(Path(path)).items():
            own_name = _same_name(name, tables)
            tables[own_name or name] = _changed(tables[own_name], table) if own_name else table
    return {name: _device(name, table) for name, table in tables.items()}


def get_device(name: str, path: str | PathLike[str] | None = None) -> Device:
    """The device of that name, in capital or small letters.

    Args:
        name: as it stands in the file.
        path: as in `devices`.

    Raises:
        PlanError: a name that is unknown.

    >>> get_device("h100").memory_bytes
    80000000000
    """
    table = devices(path)
    own_name = _same_name(name, table)
    if own_name is None:
        raise PlanError(
            f"there is no device {name!r:.60}: use {', '.join(sorted(table))}, or add a table for it to a "
            "file of your own and give that to devices(path)"
        )
    return table[own_name]


def parse_devices(text: str, path: str | PathLike[str] | None = None) -> tuple[Device, ...]:
    """The device of each rank, from text such as ``"16xH100"`` or ``"8xH100,8xA100"``.

    Raises:
        PlanError: other text, or a name that is unknown.

    >>> [device.name for device in parse_devices("2xH100,A100")]
    ['H100', 'H100', 'A100']
    """
    return tuple(
        device for count, name in counted_devices(text) for device in [get_device(name, path)] * count
    )


def counted_devices(text: str) -> list[tuple[int, str]]:
    """How many of which name, from text as `parse_devices` takes it; the names need not be known.

    Raises:
        PlanError: other text, or more than 100,000 devices.

    >>> counted_devices("2xH100,A100")
    [(2, 'H100'), (1, 'A100')]
    """
    counts = []
    for part in re.split(r"[,+]", text) if isinstance(text, str) else [""]:
        counted = _COUNTED.fullmatch(part)
        count = int(counted[1] or 1) if counted else 0
        if counted is None or count < 1:
            raise PlanError(f"devices are {text!r:.60}: write them like 16xH100, or 8xH100,8xA100")
        counts.append((count, counted[2]))
    number = sum(count for count, _ in counts)
    if number > _MOST_DEVICES:
        raise PlanError(f"devices are {text!r:.60}, that is {number}: give at most {_MOST_DEVICES}")
    return counts


def _dtype_kind(dtype: str) -> str:
    """Which of `DTYPES` a dtype of torch counts as."""
    name = str(dtype).removeprefix("torch.").lower()
    name = _OTHER_NAMES.get(name, name)
    if name in DTYPES:
        return name
    if name.startswith(("float8", "float4")):
        return "float8"
    if name in {"qint8", "quint8", "uint8"}:
        return "int8"
    if name == "bool" or re.fullmatch(r"complex\d+|q?u?int\d+\w*|short|long", name):
        return "float32"
    raise PlanError(f"there is no dtype {dtype!r:.60}: use {', '.join(DTYPES)}, or a name of torch's")


def _same_name(name: str, names: Iterable[str]) -> str | None:
    return next((own_name for own_name in names if own_name.lower() == str(name).lower()), None)


@cache
def _shipped() -> Mapping[str, Mapping[str, Any]]:
    return _read(_FILE)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the file of devices {str(path)!r} can't be read ({error}): give one that can"
        ) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"the file of devices {str(path)!r} is not TOML: {error}") from error
    for name, table in data.items():
        if not isinstance(table, dict):
            raise PlanError(f"{name} in {str(path)!r} is {table!r:.60}: give one table a device, [{name}]")
    return data


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What a table says where a second one changes some of its entries, or entries of its tables."""
    inner = {
        entry: {**before[entry], **value}
        for entry, value in after.items()
        if isinstance(value, dict) and isinstance(before.get(entry), dict)
    }
    return {**before, **after, **inner}


def _device(name: str, table: Mapping[str, Any]) -> Device:
    """A device from its table; PlanError names the entry that is missing, unknown or wrong."""
    of = f"device {name!r}"
    entries = {field.name: field.default is MISSING for field in fields(Device)}
    entries = {entry: needed for entry, needed in entries.items() if entry not in {"name", "link_names"}}
    _require_entries(table, entries, of)
    flops = _table(table["flops_per_s"], f"flops_per_s of {of}")
    within, between = (_link(table[entry], f"{entry} of {of}") for entry in ("within_node", "between_nodes"))
    require_count(table["ranks_per_node"], f"ranks_per_node of {of}")
    source = table.get("source", "")
    if not isinstance(source, str):
        raise PlanError(f"source of {of} is {source!r:.60}: give text")
    return Device(
        name=name,
        flops_per_s=tuple(flops.items()),
        bytes_per_s=table["bytes_per_s"],
        memory_bytes=table["memory_bytes"],
        ranks_per_node=table["ranks_per_node"],
        within_node=_level(within, table["ranks_per_node"]),
        between_nodes=_level(between, None),
        link_names=(str(within.get("name", "")), str(between.get("name", ""))),
        source=source,
    )


def _link(value: Any, where: str) -> dict[str, Any]:
    link = _table(value, where)
    _require_entries(link, {"bytes_per_s": True, "latency_s": True, "ports": False, "name": False}, where)
    return link


def _level(link: Mapping[str, Any], ranks: int | None) -> LinkLevel:
    return LinkLevel(ranks, link["bytes_per_s"], link["latency_s"], link.get("ports"))


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} is {value!r:.60}: give a table")
    return value


def _require_entries(table: Mapping[str, Any], entries: Mapping[str, bool], where: str) -> None:
    """Raise PlanError unless the table has every entry that is needed, and none that is unknown."""
    unknown = [entry for entry in table if entry not in entries]
    if unknown:
        raise PlanError(f"{where} has the unknown entry {unknown[0]!r}: use {', '.join(entries)}")
    missing = [entry for entry, needed in entries.items() if needed and entry not in table]
    if missing:
        raise PlanError(f"{where} has no {missing[0]}: give it")
