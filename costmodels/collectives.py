"""The seconds of one collective over one process group.

    seconds = max(sum of latencies, transfer inside the node, transfer between nodes)
    transfer = traffic / (fraction * B * S^q / (S^q + h^q))

The levels of a hierarchical collective overlap, their latencies add up. Per level, S is the message, B the link and
(fraction, h, q) its Saturation. `full_bytes` is always the FULL logical tensor, F, on n = g * k ranks: g in each of
k nodes:

    all-reduce       F = the tensor           each device moves 2 F (g-1)/g, each node 2 F (k-1)/k
    all-gather       F = the gathered result                      F (g-1)/g                F (k-1)/k
    reduce-scatter   F = the input of a rank                      F (g-1)/g                F (k-1)/k
    broadcast        F = the tensor                               F                        F
    all-to-all       F = the inputs of all ranks together       F/n (g-1)/n            g F/n (k-1)/k
    send             F = the message                              F                        F (over one NIC)

What a node moves is spread over the NICs that the group may use: one per rank, fewer if siblings compete.
Checked on 4 GiB over 4 nodes of 8 B200: 22 ms measured, 16.1 for the network alone, 26.3 for one level after the
other; one NIC for everything would take 86 (stas00/ml-engineering, network/README.md).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from costmodels.cluster import Cluster
from costmodels.devices import Saturation
from costmodels.groups import Collective, Group

# NCCL runs these over a tree where that is faster; the others go round a ring (src/graph/tuning.cc, 5067397).
TREE_KINDS = (Collective.ALL_REDUCE, Collective.BROADCAST)
# All-to-all reaches 0.597 of a B200's link where all-gather reaches 0.674 (SimuMax 4dcaae5), 0.74 against 0.77 on
# H100 (meta-pytorch/autoparallel a54c252).
ALL_TO_ALL_SHARE = 0.9

GRID_BYTES = tuple(2.0**n for n in range(8, 41))  # where a measured curve is drawn


def collective_seconds(kind: Collective, full_bytes: float, group: Group, cluster: Cluster) -> float:
    """The seconds of one collective: by the table above, or as a profile has it; a group of one rank costs nothing."""
    if group.size == 1 or full_bytes == 0:
        return 0.0
    curve = None if cluster.profile is None else measured_curve(kind, group, cluster)
    if curve is None:
        return prior_seconds(kind, full_bytes, group, cluster)
    sizes, seconds = curve
    if full_bytes <= sizes[0]:
        return seconds[0]
    if full_bytes >= sizes[-1]:
        return seconds[-1] * full_bytes / sizes[-1]
    at = bisect_right(sizes, full_bytes)
    return _between(full_bytes, sizes[at - 1 : at + 1], seconds[at - 1 : at + 1])


@lru_cache(maxsize=4096)
def measured_curve(kind: Collective, group: Group, cluster: Cluster) -> tuple[Sequence[float], Sequence[float]] | None:
    """Sizes and seconds of a collective, after the profile's sweep over such a group or the nearest; None without one.

    The prior of a size times measured / prior of the sizes measured around it. The prior knows how latency turns into
    bandwidth: where every second point of published curves is left out, this predicts it within 18 %, straight lines
    between the times themselves within 65 %. Proofs rest on economies of scale, and noise has none: a larger message
    takes no less, and no more a byte. Measured times that do not are evened out with their neighbours.
    """
    assert cluster.profile is not None, "there is a profile"
    if (sweep := cluster.profile.sweep(kind, group)) is None:
        return None
    priors = [prior_seconds(kind, size, sweep.group, cluster) for size in sweep.bytes]
    ratios = [seconds / prior for seconds, prior in zip(sweep.seconds, priors, strict=True)]
    points = [ratio * prior_seconds(kind, x, group, cluster) for ratio, x in zip(ratios, sweep.bytes, strict=True)]
    points = _with_economies_of_scale(sweep.bytes, points)
    ratios = [point / prior_seconds(kind, x, group, cluster) for point, x in zip(points, sweep.bytes, strict=True)]
    sizes = sorted({*map(float, sweep.bytes), *GRID_BYTES})
    found: list[float] = []
    for number, size in enumerate(sizes):
        at = bisect_left(sweep.bytes, size)
        low, high = max(0, at - 1), min(at, len(sweep.bytes) - 1)
        ratio = ratios[high]
        if low < high:
            ratio = _between(max(size, sweep.bytes[0]), sweep.bytes[low : high + 1], ratios[low : high + 1])
        taken = ratio * prior_seconds(kind, size, group, cluster)
        if at < len(points):  # the next point is not to be missed
            taken = min(max(taken, points[at] * size / sweep.bytes[at]), points[at])
        if found:
            taken = min(max(taken, found[-1]), found[-1] * size / sizes[number - 1])
        found.append(taken)
    return sizes, found


def _with_economies_of_scale(sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """The seconds evened out, in logarithms, such that they fall by the byte, then such that they rise with the size.

    The second keeps the first: in a pool of seconds, which are equal, none rises faster than the size.
    """
    logs = [math.log(x) for x in sizes]
    by_byte = _rising([x - math.log(taken) for x, taken in zip(logs, seconds, strict=True)])
    return [math.exp(one) for one in _rising([x - rate for x, rate in zip(logs, by_byte, strict=True)])]


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest values, by least squares, none of which is below the one before: neighbours that fall are pooled."""
    pools: list[tuple[float, int]] = []  # mean and members
    for value in values:
        mean, members = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, members = (before * more + mean * members) / (more + members), more + members
        pools.append((mean, members))
    return [mean for mean, members in pools for _ in range(members)]


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Straight between two points, all in logarithms."""
    share = math.log(x / xs[0]) / math.log(xs[1] / xs[0])
    return float(ys[0] * (ys[1] / ys[0]) ** share)


def prior_seconds(kind: Collective, full_bytes: float, group: Group, cluster: Cluster) -> float:
    """By the table above alone."""
    if kind is Collective.SEND:
        return _send_seconds(full_bytes, group, cluster)
    g, k = group.ranks_per_node, group.nodes
    seconds = [cluster.intra_node.latency_s * _hops(kind, g) + cluster.inter_node.latency_s * _hops(kind, k)]
    message = full_bytes / group.size if kind is Collective.ALL_TO_ALL else full_bytes
    if g > 1:
        # of its all-to-all buffer, a rank sends only the neighbours' part inside the node
        traffic = message * _share(kind, g) * (1 / k if kind is Collective.ALL_TO_ALL else 1)
        seconds.append(traffic / _intra_bytes_per_s(kind, message, group, cluster))
    if k > 1:
        node_message = g * message if kind is Collective.ALL_TO_ALL else message
        nics = _nics(g, group, cluster)
        bytes_per_s = cluster.inter_node.bytes_per_s * (ALL_TO_ALL_SHARE if kind is Collective.ALL_TO_ALL else 1)
        bytes_per_s *= _filled(cluster.device.fabric.inter_node, node_message / nics, k)
        seconds.append(node_message * _share(kind, k) / (nics * bytes_per_s))
    return max(seconds)


def _send_seconds(full_bytes: float, group: Group, cluster: Cluster) -> float:
    """A message to the next rank; between nodes if any rank of the group has its next one there."""
    fabric = cluster.device.fabric
    if group.nodes > 1:
        streams = _nics(1, group, cluster)
        bytes_per_s = streams * cluster.inter_node.bytes_per_s * _filled(fabric.inter_node, full_bytes / streams, 2)
        return max(cluster.inter_node.latency_s, full_bytes / bytes_per_s)
    bytes_per_s = min(cluster.intra_node.bytes_per_s, fabric.pair_bytes_per_s or math.inf)
    bytes_per_s *= _filled(fabric.intra_node, full_bytes, 2)
    return max(cluster.intra_node.latency_s, full_bytes / bytes_per_s)


def _share(kind: Collective, n: int) -> float:
    """Traffic of each member, in messages, when n members of one level take part."""
    match kind:
        case Collective.ALL_REDUCE:
            return 2 * (n - 1) / n
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
            return (n - 1) / n
        case Collective.BROADCAST | Collective.SEND:
            return 1.0


def _hops(kind: Collective, n: int) -> float:
    """Latency in units of what two neighbours need: H100 all-gathers of 2, 4, 8 take 8, 17, 30 us (autoparallel)."""
    if n == 1:
        return 0.0
    return (_depth(n) if kind in TREE_KINDS else n) / 2


def _depth(n: int) -> float:
    """Steps of the shorter of a ring, and a tree walked up and down."""
    return min(n, 2 * (math.log2(n) + 1))


def _filled(saturation: Saturation, message: float, n: int) -> float:
    """The share of the link that a message reaches among n members."""
    half = saturation.half_bytes * _depth(n)
    return saturation.fraction / (1 + math.pow(half / message, saturation.sharpness))


def _nics(wanted: int, group: Group, cluster: Cluster) -> float:
    """NICs that one group keeps busy in each node."""
    return min(wanted, cluster.devices_per_node / group.siblings)


def _intra_bytes_per_s(kind: Collective, message: float, group: Group, cluster: Cluster) -> float:
    """What each device of a group reaches inside its node."""
    fabric, g = cluster.device.fabric, group.ranks_per_node
    nvls = kind is Collective.ALL_REDUCE and group.nodes == 1 and g >= fabric.nvls_ranks
    if nvls and fabric.nvls_fraction is not None:
        saturation = replace(fabric.intra_node, fraction=fabric.nvls_fraction)
        return cluster.intra_node.bytes_per_s * _filled(saturation, message, g)
    link = min(cluster.intra_node.bytes_per_s, (g - 1) * (fabric.pair_bytes_per_s or math.inf))
    # Short rings reach less: 268, 325, 345 GB/s by 2, 4, 8 H100 (all-gather, autoparallel a54c252); 1 at g = 8.
    short = min(1.0, (1 - 1 / (2 * g)) / (1 - 1 / 16))
    share = ALL_TO_ALL_SHARE if kind is Collective.ALL_TO_ALL else 1.0
    return link * _filled(fabric.intra_node, message, g) * short * share
