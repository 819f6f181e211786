import textwrap
from types import SimpleNamespace

import pytest

from costmodels.cluster import Cluster, Link
from costmodels.devices import CATALOGUE, GIB
from costmodels.errors import BadInput

FULL = """
    name: two-nodes
    nodes: 2
    devices_per_node: 8
    device: h100-sxm-80
    memory_limit_gib: 72
    links:
      intra_node: {gb_per_s: 400, latency_us: 9}
      inter_node: {gb_per_s: 25}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Cluster of a text, read from a file that errors call `c.yaml`."""
    monkeypatch.chdir(tmp_path)

    def from_text(text: str) -> Cluster:
        (tmp_path / "c.yaml").write_text(textwrap.dedent(text))
        return Cluster.from_yaml("c.yaml")

    return from_text


def test_file_gives_every_number_in_si_units(load) -> None:
    cluster = load(FULL)
    assert (cluster.name, cluster.nodes, cluster.devices_per_node, cluster.devices) == ("two-nodes", 2, 8, 16)
    assert cluster.device is CATALOGUE["h100-sxm-80"]
    assert cluster.memory_limit_bytes == 72 * GIB
    assert cluster.intra_node == Link(400e9, pytest.approx(9e-6))


def test_file_takes_what_it_leaves_out_from_the_catalogue(load) -> None:
    assert load(FULL).inter_node == Link(25e9, 14e-6)
    small = load("{devices_per_node: 4, device: a100-80}")
    assert (small.name, small.nodes, small.intra_node) == ("c", 1, Link(300e9, 24e-6))


def test_default_limit_is_what_context_nccl_and_fragmentation_leave() -> None:
    # 79.15 GiB visible, 0.6 context, 1.5 + 3 x 0.6 process groups, 4 % fragmentation
    assert Cluster.preset("8xh100").memory_limit_bytes / GIB == pytest.approx((79.15 - 0.6 - 3.3) / 1.04)
    assert Cluster.preset("1xh100").memory_limit_bytes / GIB == pytest.approx((79.15 - 0.6) / 1.04)
    assert Cluster.preset("cpu:2").memory_limit_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("8xh100", (1, 8, "h100-sxm-80")),
        ("2x8xH100", (2, 8, "h100-sxm-80")),
        ("128x8xa100-80", (128, 8, "a100-sxm-80")),
        ("3xrtx4090", (1, 3, "rtx4090")),
        ("2x8xmi300x", (2, 8, "mi300x")),
        ("cpu:3", (1, 3, "cpu")),
    ],
)
def test_preset(text: str, shape: tuple[int, int, str]) -> None:
    cluster = Cluster.preset(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == shape
    assert cluster.name == text


def test_load_takes_a_file_or_a_preset(load) -> None:
    load(FULL)
    assert Cluster.load("c.yaml").name == "two-nodes"
    assert Cluster.load("2x8xh100").devices == 16


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8h100", "'8h100' is neither a file nor a preset such as 8xh100, 2x8xh100 or cpu:4"),
        ("8xh10", "preset '8xh10': unknown device 'h10'; the nearest known: h100, v100, h200"),
        ("0xh100", "nodes: 1, devices on each: 0; a cluster has at least one device"),
        ("none.yaml", "none.yaml: cannot be read: No such file or directory"),
    ],
)
def test_bad_preset_says_what_is_wrong(load, text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as error:
        Cluster.load(text)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nodes: [", "c.yaml: not valid YAML in line 1: expected the node content, but found '<stream end>'"),
        ("[]", "c.yaml: expected a mapping with devices_per_node and device, got []"),
        ("{device: h100}", "c.yaml: devices_per_node: missing; expected a positive whole number"),
        ("{devices_per_node: 8}", "c.yaml: device: expected a name, got None"),
        (
            "{devices_per_node: 8, device: h10}",
            "c.yaml: device: unknown device 'h10'; the nearest known: h100, v100, h200",
        ),
        (
            "{devices_per_node: -1, device: h100}",
            "c.yaml: devices_per_node: expected a positive whole number, got -1",
        ),
        ("{devices_per_node: 8, device: h100, node: 2}", "c.yaml: node: not known; did you mean nodes?"),
        (
            "{devices_per_node: 8, device: h100, links: {intra_node: {gb_per_s: 0}}}",
            "c.yaml: links.intra_node.gb_per_s: expected a positive number, got 0",
        ),
        (
            "{devices_per_node: 8, device: h100, links: {intra: {}}}",
            "c.yaml: links.intra: not known; did you mean intra_node?",
        ),
        (
            "{devices_per_node: 8, device: h100, profile: p.yaml}",
            "p.yaml: cannot be read: No such file or directory",
        ),
        (
            "{devices_per_node: 8, device: h100, memory_limit_gib: 90}",
            "c.yaml: memory_limit_gib: a memory limit of 90.0 GiB is more than the 79.2 GiB of h100-sxm-80",
        ),
        (
            "{devices_per_node: 2, device: {name: x, sms: 9}}",
            "c.yaml: device: tflop_per_s, memory_gib, memory_gb_per_s missing; or name a catalogue device with `like`",
        ),
    ],
)
def test_bad_file_says_where_and_what(load, text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as error:
        load(text)
    assert str(error.value) == sentence


def test_device_may_differ_from_a_catalogue_entry(load) -> None:
    cluster = load("{devices_per_node: 8, device: {name: h100-96, like: h100, memory_gib: 93.1}}")
    assert cluster.device.name == "h100-96"
    assert cluster.device.memory_bytes == round(93.1 * GIB)
    assert cluster.device.peak_flop_per_s("bf16") == 989e12


def test_device_may_be_given_by_its_numbers(load) -> None:
    cluster = load("""
        devices_per_node: 4
        device: {name: x, tflop_per_s: {bf16: 400, fp32: 50}, memory_gib: 64, memory_gb_per_s: 2000, sms: 100}
        links: {intra_node: {gb_per_s: 200, latency_us: 10}}
    """)
    assert cluster.device.peak_flop_per_s("bf16") == 400e12
    assert cluster.device.memory_bytes_per_s == 2e12
    assert cluster.intra_node == Link(200e9, pytest.approx(1e-5))


def test_device_whose_memory_is_gone_before_the_first_tensor_is_refused(load) -> None:
    with pytest.raises(BadInput, match=r"^tiny has 3.0 GiB: context and NCCL leave nothing of it$"):
        load("{devices_per_node: 2, device: {name: tiny, like: l4, memory_gib: 3}}")


def test_memory_limit_is_positive_and_at_most_the_memory() -> None:
    cluster = Cluster.preset("8xh100")
    assert cluster.with_memory_limit(GIB).memory_limit_bytes == GIB
    with pytest.raises(BadInput, match=r"^a memory limit of 0 bytes: it must be positive$"):
        cluster.with_memory_limit(0)
    assert Cluster.preset("cpu:2").with_memory_limit(64 * GIB).memory_limit_bytes == 64 * GIB


def test_detect_without_gpu_counts_the_processes(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Cluster.detect() == Cluster.preset("cpu:1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Cluster.detect() == Cluster.preset("cpu:4")


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(total_memory=79 * GIB))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def test_detect_takes_the_memory_from_the_driver(eight_gpus) -> None:
    cluster = Cluster.detect()
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (1, 8, "h100-sxm-80")
    assert cluster.device.memory_bytes == 79 * GIB


def test_detect_counts_nodes_as_torchrun_does(eight_gpus) -> None:
    eight_gpus.setenv("WORLD_SIZE", "12")
    eight_gpus.setenv("LOCAL_WORLD_SIZE", "4")
    assert (Cluster.detect().nodes, Cluster.detect().devices_per_node) == (3, 4)


def test_detect_refuses_a_gpu_that_it_does_not_know(eight_gpus) -> None:
    eight_gpus.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA H100 PCIe")
    with pytest.raises(BadInput, match=r"^the GPU 'NVIDIA H100 PCIe' is not in the catalogue: describe it in"):
        Cluster.detect()


def test_detect_refuses_more_processes_than_gpus(eight_gpus) -> None:
    eight_gpus.setenv("LOCAL_WORLD_SIZE", "9")
    with pytest.raises(BadInput, match=r"^LOCAL_WORLD_SIZE=9, but this machine has 8 GPUs: start fewer processes$"):
        Cluster.detect()
