import pytest

from costmodels.cluster import Cluster, Link
from costmodels.collectives import collective_seconds
from costmodels.devices import device_named
from costmodels.groups import Collective, Group

MIB = 2**20
GIB = 2**30

# Bus bandwidth of all-reduce in GB/s by MiB of tensor: stas00/ml-engineering (744d01e), network/README.md.
# The highest: the plateau at 16 GiB.
CURVES = {
    "8xa100-80": {1: 18, 4: 72, 16: 106, 64: 172, 256: 194, 1024: 229, 16384: 234.9},
    "8xh200": {1: 40, 4: 107, 16: 220, 64: 347, 256: 436, 1024: 464, 16384: 481},
    "8xb200": {1: 36, 16: 255, 64: 401, 256: 646, 1024: 723, 16384: 842},
    "4x8xb200": {1: 5.4, 16: 64, 64: 157, 256: 229, 1024: 362, 16384: 382},
}


def whole(cluster: Cluster) -> Group:
    return Group.of_axis(cluster, cluster.devices, 1)


@pytest.mark.parametrize(("preset", "mib"), [(preset, mib) for preset, curve in CURVES.items() for mib in curve])
def test_all_reduce_is_within_20_percent_of_the_measured_curve(preset: str, mib: int) -> None:
    cluster = Cluster.preset(preset)
    n = cluster.devices
    measured_s = mib * MIB * 2 * (n - 1) / n / (CURVES[preset][mib] * 1e9)
    predicted_s = collective_seconds(Collective.ALL_REDUCE, mib * MIB, whole(cluster), cluster)
    assert predicted_s == pytest.approx(measured_s, rel=0.20)


@pytest.mark.parametrize(
    ("kind", "gb_per_s"),
    [(Collective.ALL_GATHER, 361), (Collective.REDUCE_SCATTER, 363)],  # the same source: 8 H200
)
def test_gather_and_scatter_reach_the_measured_plateau(kind: Collective, gb_per_s: float) -> None:
    cluster = Cluster.preset("8xh200")
    seconds = collective_seconds(kind, 16 * GIB, whole(cluster), cluster)
    assert 16 * GIB * 7 / 8 / seconds / 1e9 == pytest.approx(gb_per_s, rel=0.05)


@pytest.mark.parametrize(("ranks", "gb_per_s"), [(4, 363), (8, 481)])  # the same source: ring below 5 ranks
def test_h200_all_reduce_leaves_the_ring_for_nvls(ranks: int, gb_per_s: float) -> None:
    cluster = Cluster.preset("8xh200")
    group = Group.of_axis(cluster, ranks, 1)
    seconds = collective_seconds(Collective.ALL_REDUCE, 16 * GIB, group, cluster)
    assert 16 * GIB * 2 * (ranks - 1) / ranks / seconds / 1e9 == pytest.approx(gb_per_s, rel=0.08)


@pytest.mark.parametrize("kind", list(Collective))
def test_one_rank_costs_nothing(kind: Collective) -> None:
    cluster = Cluster.preset("2x8xh100")
    assert collective_seconds(kind, GIB, Group.of_axis(cluster, 1, 4), cluster) == 0.0


@pytest.mark.parametrize("kind", list(Collective))
def test_a_small_message_costs_the_latency_of_its_link(kind: Collective) -> None:
    # 8 us inside a node; 14 us and the network's poor use of small messages between nodes
    cluster = Cluster.preset("2x8xh100")
    assert collective_seconds(kind, 8, Group(2, 1, 4), cluster) == pytest.approx(8e-6)
    assert 14e-6 <= collective_seconds(kind, 8, Group(1, 2, 8), cluster) < 50e-6


@pytest.mark.parametrize(("ranks", "hops"), [(2, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.ALL_REDUCE])
def test_latency_grows_with_the_ring(kind: Collective, ranks: int, hops: int) -> None:
    # 2, 4, 8 H100: all-gather 8, 17, 30 us, all-reduce 10, 15, 31 us measured (meta-pytorch/autoparallel a54c252)
    cluster = Cluster.preset("8xh100")
    group = Group.of_axis(cluster, ranks, 1)
    assert collective_seconds(kind, 8, group, cluster) == pytest.approx(hops * 8e-6)


def test_all_reduce_over_many_nodes_walks_a_tree() -> None:
    # 64 nodes, one rank each: log2(64) + 1 = 7 hops, not the 32 of a ring
    cluster = Cluster.of(device_named("h100"), nodes=64, devices_per_node=1, inter_node=Link(1e15, 14e-6))
    assert collective_seconds(Collective.ALL_REDUCE, 8, whole(cluster), cluster) == pytest.approx(7 * 14e-6)
    assert collective_seconds(Collective.ALL_GATHER, 8, whole(cluster), cluster) == pytest.approx(32 * 14e-6)


@pytest.mark.parametrize(
    ("size", "stride", "group"),
    [
        (8, 1, Group(8, 1, 1)),  # tensor parallel fills a node
        (4, 1, Group(4, 1, 2)),
        (2, 4, Group(2, 1, 4)),  # strided, still inside a node
        (4, 4, Group(2, 2, 4)),
        (4, 8, Group(1, 4, 8)),  # one rank per node: eight sisters share the NICs
        (32, 1, Group(8, 4, 1)),
        (3, 1, Group(1, 3, 8)),  # ranks 6, 7, 8 lie on two nodes: one of them has no neighbour
    ],
)
def test_group_of_an_axis_on_4_nodes_of_8(size: int, stride: int, group: Group) -> None:
    assert Group.of_axis(Cluster.preset("4x8xh100"), size, stride) == group
    assert group.size == size


def test_any_axis_of_one_node_stays_inside() -> None:
    assert Group.of_axis(Cluster.preset("7xh100"), 3, 2) == Group(3, 1, 2)


def test_a_group_of_full_nodes_uses_all_nics() -> None:
    # 2 (k-1)/k F over 8 NICs against 1: the strided group is about 8 times slower, not equally fast
    cluster = Cluster.preset("4x8xh100")
    full, strided = Group.of_axis(cluster, 32, 1), Group.of_axis(cluster, 4, 8)
    ratio = collective_seconds(Collective.ALL_REDUCE, 8 * GIB, strided, cluster) / collective_seconds(
        Collective.ALL_REDUCE, 8 * GIB, full, cluster
    )
    assert ratio == pytest.approx(8, rel=0.1)


def test_siblings_beyond_the_nics_share_them() -> None:
    cluster = Cluster.preset("2x8xh100")
    alone, crowded = Group(1, 2, 8), Group(1, 2, 16)
    seconds = collective_seconds(Collective.SEND, 16 * GIB, alone, cluster)
    assert collective_seconds(Collective.SEND, 16 * GIB, crowded, cluster) == pytest.approx(2 * seconds, rel=0.01)


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    cluster = Cluster.preset("2x8xa100-80")
    reduce, scatter, gather = (
        collective_seconds(kind, GIB, whole(cluster), cluster)
        for kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    )
    assert reduce == pytest.approx(scatter + gather)


def test_all_to_all_moves_an_nth_of_an_all_gather() -> None:
    # F is the tensor of all ranks together; each keeps an 8th of its 8th. Links 0.9 as full as by the gather.
    cluster = Cluster.preset("8xa100-80")
    gather = collective_seconds(Collective.ALL_GATHER, 8 * GIB, whole(cluster), cluster)
    exchange = collective_seconds(Collective.ALL_TO_ALL, 64 * GIB, whole(cluster), cluster)
    assert exchange == pytest.approx(gather / 0.9)


def test_pairs_of_mi300x_have_one_link_of_seven() -> None:
    cluster = Cluster.preset("8xmi300x")
    pair, all_eight = (
        collective_seconds(Collective.ALL_GATHER, GIB, Group.of_axis(cluster, n, 1), cluster) for n in (2, 8)
    )
    assert pair > 3 * all_eight


def test_gloo_is_slow() -> None:
    cluster = Cluster.preset("cpu:2")
    # 64 MB between two processes: 96 ms measured, torch 2.13, shared 2.8 GHz Xeon
    assert collective_seconds(Collective.ALL_REDUCE, 64 * MIB, whole(cluster), cluster) == pytest.approx(0.084, rel=0.1)
