"""Measurements in place of the catalogue's priors."""

import math
import textwrap
from dataclasses import replace
from itertools import pairwise

import pytest

from costmodels import profile
from costmodels.cluster import Cluster
from costmodels.collectives import collective_seconds, prior_seconds
from costmodels.devices import device_named
from costmodels.errors import BadInput
from costmodels.groups import Collective, Group
from costmodels.operators import OperatorClass, operator_seconds, optimizer_seconds
from costmodels.profile import Profile, Rates, Sweep
from test_costmodels_collectives import CURVES, GIB, MIB, whole

SWEEP = Sweep(Collective.ALL_REDUCE, 4, 1, 2, (MIB, 16 * MIB), (3e-4, 6e-4))
PROFILE = Profile(
    device="h100-sxm-80",
    measured_on="NVIDIA H100 80GB HBM3",
    date="2026-11-30T12:00:00+00:00",
    torch="2.13.0",
    backend="nccl 2.28.9",
    ranks=8,
    operators=(
        Rates(OperatorClass.MATMUL, "bf16", 1e13, 5e-6, 5e14),
        Rates(OperatorClass.MATMUL, "fp32", math.inf, 0.0, 3e13),
        Rates(OperatorClass.POINTWISE, "bf16", 2e12, 4e-6),
        Rates(OperatorClass.OPTIMIZER, "fp32", 1e12, 1e-3),
    ),
    collectives=(SWEEP,),
    attention_tail_waves=2.0,
    launch_s=2e-5,
    unit_s=1e-3,
    overlap_slowdown=math.inf,
    fixed_overhead_bytes=GIB,
    communicator_bytes=(2 * GIB, GIB),
)
H100 = PROFILE.applied_to(device_named("h100"))


def test_a_profile_is_read_as_it_was_written(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(PROFILE.to_yaml("0.1.0"))
    assert Profile.from_yaml(file) == replace(PROFILE, name="mine.yaml")


@pytest.mark.parametrize(
    ("kind", "dtype", "seconds"),
    [
        (OperatorClass.MATMUL, "bf16", 5e-6 + 1e12 / 5e14 + 1e9 / 1e13),
        (OperatorClass.MATMUL, "fp32", 1e12 / 3e13),
        (OperatorClass.POINTWISE, "bf16", 4e-6 + 1e9 / 2e12 + 1e12 / (0.5 * 67e12)),  # FLOP as in the catalogue
        (OperatorClass.POINTWISE, "fp32", 4e-6 + 1e9 / 2e12 + 1e12 / (0.5 * 67e12)),  # as in the dtype measured
        (OperatorClass.NORM, "bf16", 7e-6 + 1e9 / (0.7 * 3.35e12) + 1e12 / (0.5 * 67e12)),  # not measured
    ],
)
def test_an_operator_takes_what_was_measured(kind: OperatorClass, dtype: str, seconds: float) -> None:
    assert operator_seconds(kind, 1e12, 1e9, dtype, H100) == pytest.approx(seconds)


def test_the_update_has_its_own_rate() -> None:
    assert optimizer_seconds(28e9, H100) == pytest.approx(1e-3 + 28e9 / 1e12)


def test_overheads_make_the_limit() -> None:
    cluster = Cluster.preset("8xh100").with_profile(PROFILE)
    taken = GIB + 2 * GIB + 3 * GIB  # context, the first of four process groups, the others
    assert cluster.memory_limit_bytes == int((cluster.device.memory_bytes - taken) / 1.04)
    device = cluster.device
    assert (device.overlap_slowdown, device.launch_s, device.unit_s) == (math.inf, 2e-5, 1e-3)


def test_overheads_that_leave_nothing_are_refused() -> None:
    with pytest.raises(BadInput, match="context and NCCL leave nothing of it"):
        Cluster.preset("8xh100").with_profile(replace(PROFILE, fixed_overhead_bytes=100 * GIB))


def test_the_example_of_the_module_is_a_profile(tmp_path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(textwrap.dedent((profile.__doc__ or "").split("\n\n")[1]))
    assert Profile.from_yaml(file).compute_factor == 1.08


def test_a_measured_step_makes_all_compute_slower() -> None:
    slower = replace(PROFILE, compute_factor=1.5).applied_to(device_named("h100"))
    assert (slower.launch_s, slower.unit_s) == pytest.approx((1.5 * H100.launch_s, 1.5 * H100.unit_s))
    for kind in (OperatorClass.MATMUL, OperatorClass.NORM, OperatorClass.ATTENTION):
        one, other = (operator_seconds(kind, 1e12, 1e9, "bf16", device) for device in (slower, H100))
        assert one == pytest.approx(1.5 * other)
    assert optimizer_seconds(28e9, slower) == pytest.approx(1.5 * optimizer_seconds(28e9, H100))


def test_noise_is_made_to_have_economies_of_scale() -> None:
    noisy = replace(SWEEP, bytes=tuple(4**n * 1024 for n in range(6)), seconds=(1e-4, 9e-5, 3e-3, 1e-3, 2e-2, 2e-3))
    cluster = Cluster.preset("8xh100").with_profile(replace(PROFILE, collectives=(noisy,)))
    sizes = [1.3**n for n in range(90)]
    taken = [collective_seconds(Collective.ALL_REDUCE, size, SWEEP.group, cluster) for size in sizes]
    for (a, first), (b, then) in pairwise(zip(sizes, taken, strict=True)):
        assert first * (1 - 1e-9) <= then <= first * b / a * (1 + 1e-9)


def test_a_link_that_is_slower_than_its_prior_is_as_slow_as_measured() -> None:
    # 200 Mb/s where the prior has 1 GB/s: it turns from latency to bandwidth elsewhere
    sizes = tuple(4**n * 4096 for n in range(6))
    seconds = (5.7e-4, 7.4e-4, 2.72e-3, 1.086e-2, 4.32e-2, 1.745e-1)
    slow = Sweep(Collective.SEND, 1, 2, 1, sizes, seconds)
    profile = Profile("cpu", "", "", "", "", 2, collectives=(slow,))
    cpu = Cluster.preset("cpu:1").device
    cluster = Cluster.of(cpu, nodes=2, devices_per_node=1).with_profile(profile)
    for size, expected in [*zip(sizes, seconds, strict=True), (2**17, 2**17 / 2.41e7), (2**30, 2**30 / 2.41e7)]:
        assert collective_seconds(Collective.SEND, size, slow.group, cluster) == pytest.approx(expected, rel=0.01)


def test_a_sweep_is_exact_where_it_was_measured_and_follows_the_prior_beside() -> None:
    cluster = Cluster.preset("8xh100").with_profile(PROFILE)

    def seconds(size: float, group: Group = SWEEP.group) -> float:
        return collective_seconds(Collective.ALL_REDUCE, size, group, cluster)

    def prior(size: float, group: Group = SWEEP.group) -> float:
        return prior_seconds(Collective.ALL_REDUCE, size, group, cluster)

    assert [seconds(size) for size in SWEEP.bytes] == pytest.approx(SWEEP.seconds)
    ends = [3e-4 / prior(MIB), 6e-4 / prior(16 * MIB)]
    assert seconds(4 * MIB) / prior(4 * MIB) == pytest.approx(math.sqrt(ends[0] * ends[1]))
    assert seconds(1024) / prior(1024) == pytest.approx(ends[0])
    assert seconds(GIB) / prior(GIB) == pytest.approx(ends[1])
    near, elsewhere = Group(8, 1, 1), Group(1, 2, 8)
    assert seconds(GIB, near) / prior(GIB, near) == pytest.approx(ends[1])
    with_nodes = Cluster.preset("2x8xh100").with_profile(PROFILE)
    assert collective_seconds(Collective.ALL_REDUCE, GIB, elsewhere, with_nodes) == prior_seconds(
        Collective.ALL_REDUCE, GIB, elsewhere, with_nodes
    )
    assert collective_seconds(Collective.ALL_GATHER, GIB, near, cluster) == prior_seconds(
        Collective.ALL_GATHER, GIB, near, cluster
    )


@pytest.mark.parametrize("preset", CURVES)
def test_a_stored_sweep_predicts_the_published_curves(preset: str) -> None:
    """Within 1 % where it is stored; else from its neighbours alone, though these are four times as far apart."""
    cluster, curve = Cluster.preset(preset), CURVES[preset]
    n = cluster.devices
    measured_s = {mib * MIB: mib * MIB * 2 * (n - 1) / n / (rate * 1e9) for mib, rate in curve.items()}

    def predicted(size: int, stored: dict[int, float]) -> float:
        group = whole(cluster)
        sweep = Sweep(Collective.ALL_REDUCE, *vars(group).values(), bytes=tuple(stored), seconds=tuple(stored.values()))
        profile = Profile(cluster.device.name, "", "", "", "", n, collectives=(sweep,))
        return collective_seconds(Collective.ALL_REDUCE, size, group, cluster.with_profile(profile))

    for size, seconds in measured_s.items():
        assert predicted(size, measured_s) == pytest.approx(seconds, rel=0.01)
        others = {other: s for other, s in measured_s.items() if other != size}
        assert predicted(size, others) == pytest.approx(seconds, rel=0.20)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "not a profile: expected a mapping, got [1]"),
        ("device: cpu", "not what `autopar calibrate` writes: measured_on is missing"),
        (
            "operators: [{operator: dance, dtype: bf16, bytes_per_s: 1.0, fixed_s: 0.0}]",
            "operators[0].operator is 'dance', none of matmul, ",
        ),
        (
            "operators: [{operator: matmul, dtype: bf16, bytes_per_s: -1.0, fixed_s: 0.0}]",
            "operators[0] needs an operator that costs something, rates above 0, fixed_s of at least 0",
        ),
        (
            "collectives: [{kind: send, ranks_per_node: 2, nodes: 1, siblings: 1, bytes: [8, 4], seconds: [1.0, 2.0]}]",
            "collectives[0] needs as many seconds, above 0, as bytes, which rise",
        ),
        (
            "collectives: [{kind: send, ranks_per_node: 0, nodes: 1, siblings: 1, bytes: [8], seconds: [1.0]}]",
            "collectives[0] is on a group of no ranks",
        ),
        ("compute_factor: 0.0", "compute_factor is not above 0"),
        ("overlap_slowdown: 0.5", "overlap_slowdown is below 1"),
        ("attention_tail_waves: -1.0", "attention_tail_waves is below 0"),
        ("launch_ss: 1.0", "launch_ss is not known"),
        ("communicator_bytes: []", "fixed_overhead_bytes and the two communicator_bytes are not counts of bytes"),
        ("communicator_bytes: [1]", "fixed_overhead_bytes and the two communicator_bytes are not counts of bytes"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_place(tmp_path, text: str, sentence: str) -> None:
    file = tmp_path / "p.yaml"
    head = "device: cpu\nmeasured_on: x\ndate: x\ntorch: x\nbackend: x\nranks: 1\n"
    file.write_text(text if text.startswith(("[", "device")) else head + text)
    with pytest.raises(BadInput) as error:
        Profile.from_yaml(file)
    assert sentence in str(error.value)


def test_a_cluster_file_names_its_profile(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text(PROFILE.to_yaml("0.1.0"))
    file = tmp_path / "c.yaml"
    file.write_text("{devices_per_node: 8, device: h100, profile: mine.yaml, memory_limit_gib: 40}")
    cluster = Cluster.from_yaml(file)
    assert cluster.profile == replace(PROFILE, name="mine.yaml")
    assert cluster.memory_limit_bytes == 40 * GIB
    assert cluster.device.measured
    file.write_text("{devices_per_node: 8, device: a100-80, profile: mine.yaml}")
    with pytest.raises(BadInput, match="was measured on h100-sxm-80, the cluster has a100-sxm-80"):
        Cluster.from_yaml(file)
