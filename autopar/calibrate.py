"""Measures the devices and links that a plan is made for: alone on one device, or under torchrun on all of them.

    launches      a network of operators that have next to nothing to do
    operators     each class, its forward alone and with its backward, in several shapes; coefficients by least squares
    collectives   each kind on each kind of group that a mesh axis may be, from 4 KiB to 256 MiB
    overlap       matmuls beside an all-reduce, against each of them alone
    memory        what the context and each process group take beside the allocator (CUDA)

All ranks measure the same at the same time, as they do in training, and the slowest counts.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations, product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autopar.runtime import collectives as run
from autopar.runtime import mesh
from costmodels.cluster import Cluster
from costmodels.devices import Device
from costmodels.errors import BadInput
from costmodels.groups import Collective, Group
from costmodels.operators import OperatorClass, operator_seconds
from costmodels.profile import Profile, Rates, Sweep
from passes.plan import Plan

ROUNDS, FEW_ROUNDS = 5, 3  # few of what fills a round alone
ROUND_S = 0.05
LONG_S = 0.2  # cases that take longer by the priors are left out
MEMORY_SHARE = 0.1  # of a device, that a case may take
WARM_UP_S = 2.0  # of matmuls, until a GPU's clock is that of training
DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = tuple(4**n * 4096 for n in range(9))  # bytes of the full tensor, to 256 MiB
LONG_COLLECTIVE_S = 0.5  # messages that would take longer are left out
OVERLAPPED_BYTES = 16 * 2**20

Progress = Callable[[str], None]


# -- the clock --------------------------------------------------------------------------------------------------------


class Clock:
    """Times on this device; of several ranks all at once, the slowest counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1

    def seconds(self, action: Callable[[], object]) -> float:
        """Median of a few rounds, each of as many repetitions as fill it."""
        self.round(action, 1)
        once = self.round(action, 1)
        repetitions = max(1, min(1000, int(ROUND_S / max(1e-6, once))))
        return statistics.median(
            self.round(action, repetitions) for _ in range(ROUNDS if once < ROUND_S else FEW_ROUNDS)
        )

    def round(self, action: Callable[[], object], repetitions: int) -> float:
        """Seconds of one repetition; the same number on every rank."""
        self.synchronize()
        if self.ranks > 1:
            dist.barrier()
        began = time.perf_counter()
        for _ in range(repetitions):
            action()
        self.synchronize()
        return self.slowest((time.perf_counter() - began) / repetitions)

    def slowest(self, value: float) -> float:
        if self.ranks == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# -- operators --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An operator to be timed on random numbers of these shapes, then so many ids below a number."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    ids: tuple[int, int] | None = None
    flop: tuple[float, float] = (0.0, 0.0)  # of the forward and of the backward
    tiles: int | None = None  # of attention, see costmodels.operators

    def operands(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        floats = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in self.shapes]
        return (*floats, *([torch.randint(self.ids[1], self.ids[:1], device=device)] if self.ids else []))

    def moved(self, dtype: torch.dtype) -> tuple[float, float]:
        """Bytes of the forward and of the backward, as a price counts them (passes/price.py)."""
        given = self.operands(dtype, torch.device("meta"))
        read = sum(one.nbytes for one in given)
        written = self.function(*given).nbytes
        return read + written, written + 2 * read


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight)


def looked_up(weight: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, weight)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def cases(kind: OperatorClass) -> Iterator[Case]:
    """What is timed of an operator class, from small to large."""
    match kind:
        case OperatorClass.MATMUL:
            widths = ((64, 64), (256, 1024), (1024, 256), (1024, 1024), (4096, 1024), (4096, 4096), (4096, 14336))
            for rows, (k, n) in product((64, 512, 2048, 8192), widths):
                work = 2.0 * rows * k * n
                yield Case(F.linear, ((rows, k), (n, k)), flop=(work, 2 * work))
        case OperatorClass.ATTENTION:
            for b, h, s, d in (
                (4, 4, 64, 32), (4, 4, 128, 64), (8, 8, 128, 32), (1, 8, 512, 64), (1, 4, 2048, 128),
                (1, 16, 2048, 128), (1, 8, 4096, 128), (2, 32, 4096, 128), (1, 32, 8192, 128),
            ):  # fmt: skip
                work = 4.0 * b * h * s * s * d / 2
                yield Case(causal, ((b, h, s, d),) * 3, flop=(work, 2.5 * work), tiles=b * h * -(-s // 128))
        case OperatorClass.POINTWISE:
            for size in (2**10, 2**14, 2**17, 2**20, 2**23, 2**26):
                yield Case(F.gelu, ((size,),))
                yield Case(torch.mul, ((size,), (size,)))
        case OperatorClass.NORM:
            for rows, width in ((64, 64), (1024, 256), (1024, 1024), (4096, 4096), (16384, 4096)):
                yield Case(normalised, ((rows, width), (width,)))
        case OperatorClass.EMBEDDING:
            for count, rows, width in ((128, 512, 64), (1024, 2048, 256), (1024, 32768, 256), (8192, 32768, 4096)):
                yield Case(looked_up, ((rows, width),), ids=(count, rows))
        case OperatorClass.LOSS:
            for count, classes in ((128, 512), (1024, 2048), (1024, 32768), (8192, 65536)):
                yield Case(F.cross_entropy, ((count, classes),), ids=(count, classes))
        case OperatorClass.CONV:
            for n, c, size in ((2, 8, 16), (4, 32, 32), (16, 64, 56), (32, 256, 28)):
                work = 2.0 * n * c * size * size * c * 9
                yield Case(convolved, ((n, c, size, size), (c, c, 3, 3)), flop=(work, 2 * work))
        case _:
            raise AssertionError(f"{kind} is not timed by itself")


NOT_TIMED = (OperatorClass.VIEW, OperatorClass.OTHER, OperatorClass.OPTIMIZER)  # by themselves


@dataclass(frozen=True)
class Sample:
    """How long work took: so many fixed times, FLOP, FLOP that wait for the last tiles, and bytes."""

    fixed: int
    flop: float
    tail: float
    moved: float
    seconds: float


def samples(kind: OperatorClass, dtype: str, device: Device, clock: Clock) -> list[Sample]:
    """Every case that is small enough for the device, its forward alone and with its backward."""
    found = []
    for case in cases(kind):
        (forward, backward), moved = case.flop, case.moved(DTYPES[dtype])
        took = operator_seconds(kind, forward + backward, sum(moved), dtype, device)
        if took > LONG_S or sum(moved) > MEMORY_SHARE * device.memory_bytes:
            continue
        operands = case.operands(DTYPES[dtype], clock.device)
        upstream = torch.ones_like(case.function(*operands))

        def both(case: Case = case, operands: Sequence[Tensor] = operands, upstream: Tensor = upstream) -> None:
            case.function(*operands).backward(upstream)
            for one in operands:
                one.grad = None

        with torch.no_grad():
            alone = clock.seconds(lambda case=case, operands=operands: case.function(*operands))  # type: ignore[misc]
        tail = device.sms / case.tiles if case.tiles is not None else 0.0
        found.append(Sample(1, forward, forward * tail, moved[0], alone))
        total = forward + backward
        found.append(Sample(2, total, total * tail, sum(moved), clock.seconds(both)))
    return found


def fitted(found: Sequence[Sample]) -> tuple[float, ...]:
    """The coefficients, none negative, of fixed, flop, tail and moved with the least squares of relative errors.

    With so few of them, every choice of which are 0 is tried.
    """
    rows = torch.tensor([[s.fixed, s.flop, s.tail, s.moved] for s in found], dtype=torch.float64)
    rows /= torch.tensor([s.seconds for s in found], dtype=torch.float64).unsqueeze(1)
    scale = rows.abs().amax(0)
    used = [column for column in range(4) if scale[column] > 0]
    best, answer = math.inf, (0.0,) * 4
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            table = rows[:, chosen] / scale[list(chosen)]
            solved = torch.linalg.lstsq(table, torch.ones(len(found), 1, dtype=torch.float64), driver="gelsd").solution
            error = float(((table @ solved - 1) ** 2).sum())
            if bool((solved >= 0).all()) and error < best:
                values = (solved.squeeze(1) / scale[list(chosen)]).tolist()
                best, answer = error, tuple(dict(zip(chosen, values, strict=True)).get(c, 0.0) for c in range(4))
    return answer


def operator_rates(
    cluster: Cluster, clock: Clock, launch: float, progress: Progress
) -> tuple[tuple[Rates, ...], float]:
    """The rates of every class in every dtype, and attention's waves of the tail."""
    rates, waves = [], cluster.device.efficiency.attention_tail_waves
    least = launch if cluster.device.kind == "cpu" else 0.0  # a GPU works while the host starts the next
    known = dict(cluster.device.flop_per_s)
    for kind, dtype in product(OperatorClass, (name for name in DTYPES if name in known)):
        if kind in NOT_TIMED:
            continue
        progress(f"operators: {kind.value}, {dtype}")
        found = samples(kind, dtype, cluster.device, clock)
        fixed, flop, tail, moved = fitted(found)
        counted = any(one.flop for one in found)
        if kind is OperatorClass.ATTENTION and flop > 0 and dtype == next(name for name in DTYPES if name in known):
            waves = tail / flop
        rates.append(Rates(kind, dtype, _inverse(moved), max(least, fixed), _inverse(flop) if counted else None))
        if kind is OperatorClass.POINTWISE:
            rates.append(replace(rates[-1], operator=OperatorClass.OTHER))
    progress("operators: optimizer")
    return (*rates, optimizer_rate(cluster.device, clock)), waves


def _inverse(seconds: float) -> float:
    return math.inf if seconds == 0 else 1 / seconds


class SmallLayer(nn.Module):
    """A layer of a transformer whose operators have next to nothing to do: LAYER_OPS of them, and views."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # x [rows, sequence, width]
        rows, sequence, width = x.shape
        y = self.norm_1(x)
        q, k, v = (one(y).view(rows, sequence, 2, width // 2).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = causal(q, k, v).transpose(1, 2).reshape(rows, sequence, width)
        x = x + self.o(attended)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


LAYER_OPS = 12  # that are priced: 2 norms, 6 products, attention, gelu, 2 sums
SMALL_LAYERS = 8


def launch_s(clock: Clock) -> float:
    """Seconds in which the host starts an operator of a network, each once forward and once backward; views included.

    An operator that is repeated alone starts three times as fast: nothing but it is in the caches.
    """
    return small_step_s(clock, lambda model: None) / (2 * LAYER_OPS * SMALL_LAYERS)


def small_step_s(clock: Clock, wrap: Callable[[nn.Sequential], object]) -> float:
    """Seconds of a forward and a backward of a few small layers, after `wrap`."""
    with clock.device:
        model = nn.Sequential(*(SmallLayer() for _ in range(SMALL_LAYERS)))
        x = torch.randn(1, 4, 32)
    wrap(model)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return clock.seconds(step)


def unit_s(clock: Clock, launch: float, collectives: Sequence[Sweep], ranks: int) -> float:
    """Seconds that fully_shard takes for a unit in a microbatch beside its two gathers and its reduction."""

    def sharded(model: nn.Sequential) -> None:
        whole = init_device_mesh(clock.device.type, (ranks,))
        for one in (*model, model):
            unit = fully_shard(one, mesh=whole)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    least = {s.kind: s.seconds[0] for s in collectives if s.ranks_per_node * s.nodes == ranks}
    inside = 2 * least.get(Collective.ALL_GATHER, 0.0) + least.get(Collective.REDUCE_SCATTER, 0.0)
    plain = 2 * LAYER_OPS * SMALL_LAYERS * launch
    return max(0.0, (small_step_s(clock, sharded) - plain) / SMALL_LAYERS - inside)


def optimizer_rate(device: Device, clock: Clock) -> Rates:
    """Of fused AdamW, which touches 28 bytes an element (costmodels.operators.optimizer_seconds)."""
    found = []
    for elements in (2**12, 2**16, 2**20, 2**23):
        parameter = torch.nn.Parameter(torch.randn(elements, device=clock.device))
        parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        found.append(Sample(1, 0.0, 0.0, 28.0 * elements, clock.seconds(optimizer.step)))
    fixed, _, _, moved = fitted(found)
    return Rates(OperatorClass.OPTIMIZER, "fp32", _inverse(moved), fixed)


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
                taken = list(_sweep(kind, size, clock))
                sizes, seconds = zip(*taken, strict=True)
                found.append(Sweep(kind, group.ranks_per_node, group.nodes, group.siblings, sizes, seconds))
    return tuple(found)


def _sweep(kind: Collective, size: int, clock: Clock) -> Iterator[tuple[int, float]]:
    for full in SIZES:
        taken = clock.seconds(_action(kind, full // 4, size, clock.device))
        yield full, taken
        if 4 * taken > LONG_COLLECTIVE_S:
            return


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
        case Collective.SEND:
            message = torch.zeros(elements, device=device)
            peer = on.rank + 1 if on.rank % 2 == 0 else on.rank - 1
            if peer == size:  # an odd axis: the last one has nobody to send to
                return lambda: None
            there = dist.get_global_rank(on.group, peer)
            send = dist.P2POp(dist.isend if on.rank % 2 == 0 else dist.irecv, message, there, on.group)

            def sent() -> None:
                for work in dist.batch_isend_irecv([send]):
                    work.wait()

            return sent
        case _:
            raise AssertionError(f"{kind} is not measured")


def overlap_slowdown(cluster: Cluster, clock: Clock) -> float:
    """How many times longer compute takes beside a collective: 1 / (1 - what the collective adds / its own time).

    Infinite where it adds all its time: on CPUs gloo runs on the cores that compute.
    """
    width = 4096 if clock.device.type == "cuda" else 512
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    x = torch.randn(width, width, dtype=dtype, device=clock.device)
    message = torch.zeros(OVERLAPPED_BYTES // 4, device=clock.device)
    collective = clock.seconds(lambda: dist.all_reduce(message))
    one = clock.seconds(lambda: x @ x)
    count = max(1, math.ceil(2 * collective / one))

    def compute() -> None:
        for _ in range(count):
            x @ x

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        assert work is not None, "an asynchronous collective gives its handle"
        work.wait()

    added = clock.seconds(both) - clock.seconds(compute)
    share = min(1.0, max(0.0, added / collective))
    return math.inf if share == 1 else 1 / (1 - share)


# -- memory -----------------------------------------------------------------------------------------------------------


def taken_outside() -> int:
    """Bytes of this CUDA device that are taken and not the allocator's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def communicator_bytes(ranks: int) -> tuple[int, int]:
    """What the first process group takes, the world's, and one more."""
    found = [taken_outside()]
    for group in (None, dist.new_group(list(range(ranks)))):
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        torch.cuda.synchronize()
        found.append(taken_outside())
    return max(0, found[1] - found[0]), max(0, found[2] - found[1])


# -- all of it --------------------------------------------------------------------------------------------------------


def calibrate(cluster: Cluster, progress: Progress = lambda text: None) -> Profile:
    """The profile of this machine's devices, as `cluster` names them; the same on every rank.

    Raises BadInput where the processes are not as many as the cluster's devices.
    """
    kind = cluster.device.kind
    started = int(os.environ.get("WORLD_SIZE", 1)) if not dist.is_initialized() else dist.get_world_size()
    if started != cluster.devices:
        were = "process was" if started == 1 else "processes were"
        raise BadInput(
            f"{cluster.name} has {cluster.devices} devices, {started} {were} started: "
            f"torchrun --nproc-per-node {cluster.devices_per_node} -m autopar calibrate"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"no GPU is here; the cluster has {cluster.device.name}")
    began = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.zeros(1, device=began)
    context = taken_outside() if kind == "cuda" else None
    extra = None
    if cluster.devices > 1:
        mesh.init({"world": cluster.devices}, kind)
        extra = communicator_bytes(cluster.devices) if kind == "cuda" else None
    clock = Clock(mesh.current().device if cluster.devices > 1 else began)
    if kind == "cuda":
        _warm_up(clock)
    progress("eager launches")
    launch = launch_s(clock)
    operators, waves = operator_rates(cluster, clock, launch, progress)
    collectives = sweeps(cluster, clock, progress) if cluster.devices > 1 else ()
    progress("fully_shard, overlap")
    unit = unit_s(clock, launch, collectives, cluster.devices) if kind == "cpu" and cluster.devices > 1 else None
    slowdown = overlap_slowdown(cluster, clock) if cluster.devices > 1 else None
    return Profile(
        device=cluster.device.name,
        measured_on=torch.cuda.get_device_name() if kind == "cuda" else _processor(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=str(torch.__version__),
        backend="gloo" if kind == "cpu" else "nccl " + ".".join(map(str, torch.cuda.nccl.version())),
        ranks=cluster.devices,
        operators=operators,
        collectives=collectives,
        attention_tail_waves=waves,
        launch_s=launch,
        unit_s=unit,
        overlap_slowdown=slowdown,
        fixed_overhead_bytes=context,
        communicator_bytes=extra,
    )


def _warm_up(clock: Clock) -> None:
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=clock.device)
    until = time.monotonic() + WARM_UP_S
    while time.monotonic() < until:
        for _ in range(20):
            x @ x
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

    Compute, recompute, optimizer and bubbles grow with the factor, what communication shows does not. Raises BadInput
    where a measured step is shorter than the plan's communication alone.
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
