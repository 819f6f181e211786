"""Measures the devices and links that a plan is made for: alone on one device, or under torchrun on all of them.

    operators     autopar/timing.py
    collectives   each kind on each kind of group that a mesh axis may be, from 4 KiB to 256 MiB
    overlap       matmuls beside an all-reduce, against each of them alone
    memory        what the context and each process group take beside the allocator (CUDA)
    hooks         small layers under fully_shard, against the same without (CPUs)

All ranks measure the same at the same time, as they do in training, and the slowest counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autopar.runtime import collectives as run
from autopar.runtime import mesh
from autopar.timing import LAYER_LAUNCHES, LAYER_OPS, SMALL_LAYERS, Clock, Progress, operator_rates, small_step_s
from costmodels.cluster import Cluster
from costmodels.errors import BadInput
from costmodels.groups import Collective, Group
from costmodels.profile import Profile, Sweep
from passes.plan import Plan

SHARE_S = 0.5  # of products, to see who else computes
WARM_UP_S = 2.0  # of matmuls, until a GPU's clock is that of training
SIZES = tuple(4**n * 4096 for n in range(9))  # bytes of the full tensor, to 256 MiB
LONG_COLLECTIVE_S = 0.5  # messages that would take longer are left out
BETWEEN_S = 1e-3  # of compute before each
OVERLAPPED_BYTES = 16 * 2**20


# -- collectives ------------------------------------------------------------------------------------------------------


def groups(cluster: Cluster) -> dict[Group, tuple[int, int]]:
    """Every kind of group that an axis of a mesh over all devices may be, with the size and stride of one such axis."""
    found: dict[Group, tuple[int, int]] = {}
    world = cluster.devices
    sizes = [n for n in range(2, world + 1) if world % n == 0]
    for size, stride in product(sizes, [1, *sizes]):
        if world % (size * stride) == 0:
            found.setdefault(Group.of_axis(cluster, size, stride), (size, stride))
    return found


def sweeps(cluster: Cluster, clock: Clock, progress: Progress) -> tuple[Sweep, ...]:
    """Every collective on every kind of group, all groups of a kind at once."""
    found = []
    for group, (size, stride) in groups(cluster).items():
        shape = {"outer": cluster.devices // size // stride, "axis": size, "inner": stride}
        with mesh.using(mesh.init(shape, clock.device.type)):
            for kind in Collective:
                if kind is Collective.BROADCAST:
                    continue  # no program runs it in a step
                progress(f"{kind.value} of {size} ranks, {stride} apart")
                sizes, seconds = zip(*_sweep(kind, size, clock), strict=True)
                found.append(Sweep(kind, group.ranks_per_node, group.nodes, group.siblings, sizes, seconds))
    return tuple(found)


def _sweep(kind: Collective, size: int, clock: Clock) -> Iterator[tuple[int, float]]:
    """Seconds by bytes: what a collective adds to compute before it, at least what it takes alone.

    One after the other finds the ranks in step and the message in the caches. Between the products of a layer, ranks
    come at different times and wait for the last: a gather of 1 MiB takes 3.3 ms there, alone 1.4 (gloo, two ranks).
    """
    compute = products(clock, BETWEEN_S)
    alone = clock.seconds(compute)
    for full in SIZES:
        action = _action(kind, full // 4, size, clock.device)

        def after_compute(action: Callable[[], object] = action) -> None:
            compute()
            action()

        taken = max(clock.seconds(action), clock.seconds(after_compute) - alone)
        yield full, taken
        if 4 * taken > LONG_COLLECTIVE_S:
            return


def products(clock: Clock, seconds: float) -> Callable[[], None]:
    """Matrix products that take about so long."""
    cuda = clock.device.type == "cuda"
    width, dtype = (4096, torch.bfloat16) if cuda else (256, torch.float32)
    x = torch.randn(width, width, dtype=dtype, device=clock.device)
    count = max(1, math.ceil(seconds / clock.seconds(lambda: x @ x)))

    def compute() -> None:
        for _ in range(count):
            x @ x

    return compute


def _action(kind: Collective, elements: int, size: int, device: torch.device) -> Callable[[], object]:
    """One collective over the axis as a program runs it; `elements` are those of its full tensor."""
    on = mesh.axis("axis")
    share = -(-elements // size)
    match kind:
        case Collective.ALL_REDUCE:
            whole = torch.zeros(elements, device=device)
            return lambda: dist.all_reduce(whole, group=on.group)
        case Collective.ALL_GATHER:
            part = torch.zeros(share, device=device)
            return lambda: run.all_gather(part, 0, "axis")
        case Collective.REDUCE_SCATTER:
            whole = torch.zeros(share * size, device=device)
            return lambda: run.reduce_scatter(whole, 0, "axis")
        case Collective.ALL_TO_ALL:  # the full tensor is all ranks' inputs together
            cut = -(-share // size)
            matrix = torch.zeros(cut, size, device=device)
            return lambda: run.all_to_all(matrix, 0, 1, "axis")
        case Collective.SEND:  # each rank to the next, all at once: some of them to the next node
            given, taken = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
            peers = [dist.get_global_rank(on.group, rank) for rank in range(size)]
            ops = [dist.P2POp(dist.isend, given, peers[on.rank + 1], on.group)] if on.rank + 1 < size else []
            ops += [dist.P2POp(dist.irecv, taken, peers[on.rank - 1], on.group)] if on.rank else []

            def sent() -> None:
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

            return sent
        case _:
            raise AssertionError(f"{kind} is not measured")


def overlap_slowdown(cluster: Cluster, clock: Clock) -> float:
    """How many times longer compute takes beside a collective: 1 / (1 - what the collective adds / its own time).

    Infinite where it adds all its time: on CPUs gloo runs on the cores that compute.
    """
    message = torch.zeros(OVERLAPPED_BYTES // 4, device=clock.device)
    collective = clock.seconds(lambda: dist.all_reduce(message))
    compute = products(clock, 2 * collective)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        assert work is not None, "an asynchronous collective gives its handle"
        work.wait()

    added = clock.seconds(both) - clock.seconds(compute)
    share = min(1.0, max(0.0, added / collective))
    return math.inf if share == 1 else 1 / (1 - share)


def unit_s(clock: Clock, plain_s: float, collectives: Sequence[Sweep], ranks: int) -> float:
    """Seconds that fully_shard takes for a unit in a microbatch beside its two gathers and its reduction.

    `plain_s`: of the same small layers without it.
    """

    def sharded(model: nn.Sequential) -> None:
        whole = init_device_mesh(clock.device.type, (ranks,))
        for one in (*model, model):
            unit = fully_shard(one, mesh=whole)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    least = {s.kind: s.seconds[0] for s in collectives if s.ranks_per_node * s.nodes == ranks}
    inside = 2 * least.get(Collective.ALL_GATHER, 0.0) + least.get(Collective.REDUCE_SCATTER, 0.0)
    return max(0.0, (small_step_s(clock, sharded) - plain_s) / SMALL_LAYERS - inside)


# -- memory -----------------------------------------------------------------------------------------------------------


def taken_outside() -> int:
    """Bytes of this CUDA device that are taken and not the allocator's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def communicator_bytes(ranks: int, context: int) -> tuple[int, int]:
    """What the first process group takes, the world's, beside the context that was there before it, and one more."""
    found = [context]
    for group in (None, dist.new_group(list(range(ranks)))):
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        torch.cuda.synchronize()
        found.append(taken_outside())
    return max(0, found[1] - found[0]), max(0, found[2] - found[1])


# -- all of it --------------------------------------------------------------------------------------------------------


def calibrate(cluster: Cluster, progress: Progress = lambda text: None) -> Profile:
    """The profile of this machine's devices, as `cluster` names them; every rank has the same numbers.

    Raises BadInput where the processes are not as many as the cluster's devices.
    """
    kind = cluster.device.kind
    if (started := mesh.world_size()) != cluster.devices:
        were = "process was" if started == 1 else "processes were"
        raise BadInput(
            f"{cluster.name} has {cluster.devices} devices, {started} {were} started: "
            f"torchrun --nproc-per-node {cluster.devices_per_node} -m autopar calibrate"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"no GPU is here; the cluster has {cluster.device.name}")
    own = mesh.own_device(kind)
    context, groups_bytes = 0, (0, 0)
    if kind == "cuda":
        torch.zeros(1, device=own)
        context = taken_outside()
    if cluster.devices > 1:
        mesh.init({"world": cluster.devices}, kind)
        groups_bytes = communicator_bytes(cluster.devices, context) if kind == "cuda" else groups_bytes
    clock = Clock(own)
    share = processor_share(clock)
    context, first, further = (int(clock.slowest(size)) for size in (context, *groups_bytes))  # of the fullest rank
    if kind == "cuda":
        _warm_up(clock)
    progress("eager launches")
    small_s = small_step_s(clock)
    # a GPU works on one operator while the host starts the next
    least_fixed_s = small_s / (2 * LAYER_OPS * SMALL_LAYERS) if kind == "cpu" else 0.0
    operators, waves = operator_rates(cluster, clock, least_fixed_s, progress)
    collectives = sweeps(cluster, clock, progress) if cluster.devices > 1 else ()
    progress("fully_shard, overlap")
    unit = unit_s(clock, small_s, collectives, cluster.devices) if kind == "cpu" and cluster.devices > 1 else None
    slowdown = overlap_slowdown(cluster, clock) if cluster.devices > 1 else None
    return Profile(
        device=cluster.device.name,
        measured_on=torch.cuda.get_device_name() if kind == "cuda" else _processor(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        backend="gloo" if kind == "cpu" else "nccl " + ".".join(map(str, torch.cuda.nccl.version())),
        ranks=cluster.devices,
        processor_share=min(share, processor_share(clock)),
        concurrent=concurrent() if kind == "cpu" else None,
        operators=operators,
        collectives=collectives,
        attention_tail_waves=waves,
        launch_s=small_s / (LAYER_LAUNCHES * SMALL_LAYERS) if kind == "cuda" else None,
        unit_s=unit,
        overlap_slowdown=slowdown,
        fixed_overhead_bytes=context if kind == "cuda" else None,
        communicator_bytes=(first, further) if kind == "cuda" and cluster.devices > 1 else None,
    )


def processor_share(clock: Clock) -> float:
    """Of the processor time that a process asks for, what the one with least gets: less where others compute too."""
    x = torch.randn(512, 512)
    began, before = time.perf_counter(), time.process_time()
    while (taken := time.perf_counter() - began) < SHARE_S:
        x @ x
    lacking = clock.slowest(1 - (time.process_time() - before) / (taken * torch.get_num_threads()))
    return 1 - max(0.0, lacking)


def concurrent() -> int:
    """How many such processes the cores of this machine run at once, or as many as its container may use."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: microseconds that it may run of each so many, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, float(quota) / float(period))
    return max(1, round(cores / torch.get_num_threads()))


def _warm_up(clock: Clock) -> None:
    until, compute = time.monotonic() + WARM_UP_S, products(clock, BETWEEN_S)
    while time.monotonic() < until:
        compute()
        clock.synchronize()


def _processor() -> str:
    """What Linux calls the processor, or else what Python does."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def corrected(profile: Profile, plan: Plan, measured_s: float) -> Profile:
    """The profile with one more factor on all compute, such that the plan's step takes as long as measured.

    Compute, recompute, updates and bubbles grow with the factor; what communication shows is taken to stay, though a
    little more of it is hidden then. Raises BadInput where a measured step is shorter than its communication.
    """
    spent = plan.time_s
    computing = spent.compute + spent.recompute + spent.optimizer + spent.bubble
    left = measured_s - (spent.total - computing)
    if left <= 0:
        raise BadInput(
            f"--measured {measured_s:g}: the plan spends {spent.total - computing:.3g} s in communication alone; "
            "no speed of compute explains that: calibrate the links"
        )
    return replace(profile, compute_factor=profile.compute_factor * left / computing)


def without_measurements(plan: Plan) -> Profile:
    """A profile that leaves everything as the catalogue has it, for the devices of a plan."""
    cluster, now = plan.cluster, datetime.now(UTC).isoformat(timespec="seconds")
    return Profile(cluster.device, "catalogue priors", now, str(torch.__version__), "no backend", cluster.devices)
