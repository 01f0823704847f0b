from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from partita.errors import PlanError
from partita.planning import Cluster, Device, LinkLevel, devices, get_device, parse_devices
from partita.planning.hardware.devices import DTYPES

ROOT = Path(__file__).parents[3]
MINE = """
[mine]
memory_bytes = 1000
bytes_per_s = 10.0
ranks_per_node = 2
flops_per_s = { bfloat16 = 100.0, float32 = 50 }
within_node = { bytes_per_s = 5.0, latency_s = 0.5 }
between_nodes = { bytes_per_s = 1, latency_s = 1, ports = 2 }
"""


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_device_says_where_its_figures_are_from() -> None:
    assert {"A100", "B200", "CPU", "H100", "H200", "MI300X"} <= set(devices())
    assert all(len(device.source) > 20 and all(device.link_names) for device in devices().values())


@pytest.mark.parametrize(
    ("name", "dense", "printed_with_sparsity"),
    [("H100", "bfloat16", 1979e12), ("H200", "float8", 3958e12), ("A100", "tf32", 312e12)],
)
def test_figures_are_those_without_sparsity(name: str, dense: str, printed_with_sparsity: float) -> None:
    assert get_device(name).flops(dense) == printed_with_sparsity / 2


@pytest.mark.parametrize("device", devices().values(), ids=lambda device: device.name)
def test_narrower_numbers_are_never_slower_and_nodes_never_closer_than_devices(device: Device) -> None:
    chain = [device.flops(dtype) for dtype in ("float64", "float32", "tf32", "bfloat16", "float8")]
    assert chain == sorted(chain)
    assert device.between_nodes.latency_s > device.within_node.latency_s
    assert device.bytes_per_s > device.within_node.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("dtype", "same"),
    [
        ("torch.float8_e5m2", "bfloat16"),
        ("half", "float16"),
        ("double", "float64"),
        ("complex128", "float64"),
        ("int64", "float32"),
        ("torch.bool", "float32"),
        ("uint8", "int8"),
        ("TF32", "tf32"),
    ],
)
def test_a_dtype_without_a_figure_runs_as_the_next_wider_one(dtype: str, same: str) -> None:
    device = get_device("A100")
    assert device.flops(dtype) == dict(device.flops_per_s)[same]


def test_without_a_wider_dtype_the_slowest_figure_counts() -> None:
    device = replace(get_device("CPU"), flops_per_s=(("bfloat16", 4.0), ("int8", 8.0)))
    assert device.flops("float64") == 4.0


def test_a_name_that_no_dtype_has_is_refused() -> None:
    with pytest.raises(PlanError, match=r"there is no dtype 'fp8': use float64, .*, or a name of torch's"):
        get_device("H100").flops("fp8")


def test_an_unknown_device_names_the_known_ones_and_says_how_to_add_one() -> None:
    with pytest.raises(PlanError) as caught:
        get_device("H1000")
    assert str(caught.value) == (
        "there is no device 'H1000': use A100, B200, CPU, H100, H100-PCIe, H200, MI300X, or add a table for "
        "it to a file of your own and give that to devices(path)"
    )


def test_a_file_of_ones_own_adds_a_device(tmp_path: Path) -> None:
    device = get_device("MINE", file_of(tmp_path, MINE))
    assert (device.flops("float32"), device.memory_bytes) == (50, 1000)
    assert device.within_node == LinkLevel(2, 5.0, 0.5)
    assert device.between_nodes == LinkLevel(None, 1, 1, ports=2)
    assert "mine" not in devices()


def test_a_file_of_ones_own_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text("[H100]\nmemory_bytes = 94\n", encoding="utf-8-sig")
    assert get_device("H100", path).memory_bytes == 94


def test_a_file_of_ones_own_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    path = file_of(tmp_path, "[h100]\nmemory_bytes = 94_000_000_000\nflops_per_s = { bfloat16 = 7e14 }\n")
    before, after = get_device("H100"), get_device("H100", path)
    assert (after.memory_bytes, after.flops("bfloat16")) == (94 * 10**9, 7e14)
    assert after.flops("float8") == before.flops("float8")
    assert after.within_node == before.within_node
    assert set(devices(path)) == set(devices())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine", "is not TOML"),
        ("mine = 3", "mine in .* is 3: give one table a device, "),
        ("[mine]\nspeed = 3", "device 'mine' has the unknown entry 'speed': use flops_per_s, bytes_per_s, "),
        ("[mine]\nbytes_per_s = 3", "device 'mine' has no flops_per_s: give it"),
        (MINE.replace("bfloat16", "fp16"), "names the dtype 'fp16': use float64, float32"),
        (MINE.replace("{ bfloat16 = 100.0, float32 = 50 }", "{}"), "flops_per_s of device 'mine' is empty"),
        (
            MINE.replace("{ bfloat16 = 100.0, float32 = 50 }", "5"),
            "flops_per_s of device 'mine' is 5: give a",
        ),
        (MINE.replace("50", "-1"), "flops_per_s for float32 of device 'mine' is -1: give a finite number"),
        (MINE.replace("50", '"x"'), "flops_per_s for float32 of device 'mine' is 'x': give a finite number"),
        (MINE.replace("= 1000", "= 1.5"), "memory_bytes of device 'mine' is 1.5: give a whole number"),
        (MINE.replace("node = 2", "node = 0"), "ranks_per_node of device 'mine' is 0: give a whole number"),
        (MINE.replace("s = 5.0", "s = 0"), "bandwidth_bytes_per_s of a link level is 0"),
        (
            MINE.replace("latency_s = 0.5", "delay = 1"),
            "within_node of device 'mine' has the unknown entry 'd",
        ),
        (MINE.replace(", latency_s = 0.5", ""), "within_node of device 'mine' has no latency_s: give it"),
        (MINE.replace("[mine]", "[mine]\nsource = 3"), "source of device 'mine' is 3: give text"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        devices(file_of(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the file of devices '.*none.toml' can't be read \("):
        devices(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"can't be read \("):
        devices(tmp_path / "bytes.toml")


def test_the_file_ships_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "planning/hardware/devices.toml" in settings["tool"]["setuptools"]["package-data"]["partita"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("3xh100", ["H100"] * 3),
        ("2XH100", ["H100"] * 2),
        ("H200", ["H200"]),
        ("1 x A100, 2*CPU", ["A100", "CPU", "CPU"]),
    ],
)
def test_devices_are_written_with_their_number(text: str, names: list[str]) -> None:
    assert [device.name for device in parse_devices(text)] == names


@pytest.mark.parametrize(
    "text", ["", "0xH100", "x", "16x", "2xH100,", "-2xH100", "2xH100 3", None, "1.5xH100", "2x2xH100"]
)
def test_text_that_names_no_devices_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"write them like 16xH100, or 8xH100,8xA100|there is no device"):
        parse_devices(text)


def test_a_cluster_of_devices_has_their_memory_and_links() -> None:
    cluster = Cluster.of_devices("16xH100", nodes=2)
    assert (cluster.ranks, cluster.memory_bytes, cluster.speeds) == (16, 80 * 10**9, None)
    assert cluster.transfer_s(450_000_000, 0, 7) == pytest.approx(1.0034e-3)
    assert cluster.transfer_s(50_000_000, 7, 8) == pytest.approx(1.014e-3)
    assert cluster.link(0, 8) != cluster.link(1, 8)  # a network card each


def test_a_machine_with_half_of_its_devices_has_half_of_its_cards() -> None:
    cluster = Cluster.of_devices("8xH100-PCIe", nodes=2)
    assert cluster.link(0, 4) == cluster.link(1, 4) != cluster.link(2, 4)


def test_as_many_machines_as_it_takes() -> None:
    assert Cluster.of_devices("20xA100") == Cluster.of_devices(list(parse_devices("20xA100")))
    assert Cluster.of_devices("20xA100").transfer_s(0, 0, 19) == 14e-6
    assert Cluster.of_devices("4xA100").transfer_s(0, 0, 3) == 3.4e-6


def test_memory_that_is_given_goes_before_the_devices() -> None:
    assert Cluster.of_devices("2xH100", memory="64GB").memory_bytes == 64 * 10**9
    assert Cluster.of_devices("H200,H100", memory="94GB").memory_bytes == 94 * 10**9


def test_unequal_devices_have_speeds_relative_to_the_first_and_the_slower_links() -> None:
    cluster = Cluster.of_devices("8xH100,8xA100", memory="80GB")
    assert cluster.speed(0) == 1.0
    assert cluster.speed(8) == pytest.approx(312 / 989.5)
    assert cluster.transfer_s(300_000_000, 0, 1) == pytest.approx(1.0034e-3)
    assert Cluster.of_devices("H200,H100").memories == (141 * 10**9, 80 * 10**9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": "16xH100", "nodes": 3}, "there are 16 devices for 3 nodes: give a multiple"),
        ({"devices": "16xH100", "nodes": 0}, "nodes is 0: give a whole number of at least 1"),
        ({"devices": "16xH100", "memory": "much"}, "memory is 'much': write it like 80GB"),
        ({"devices": "16xV100"}, "there is no device 'V100'"),
        ({"devices": []}, "the number of devices is 0"),
    ],
)
def test_a_cluster_that_can_t_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cluster.of_devices(**arguments)  # type: ignore[arg-type]


def test_the_names_of_dtypes_are_all_known() -> None:
    assert all(get_device("CPU").flops(dtype) > 0 for dtype in DTYPES)
