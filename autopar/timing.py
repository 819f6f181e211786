"""How long operators take on this device: each class, its forward alone and with its backward, in several shapes.

Coefficients (costmodels/operators.py) are those with the least squares of relative errors. Of several ranks all time
the same at once, as they train, and the slowest counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels.cluster import Cluster
from costmodels.devices import Device
from costmodels.operators import OperatorClass, operator_seconds
from costmodels.profile import Rates

ROUNDS, FEW_ROUNDS = 5, 3  # few of what fills a round alone
ROUND_S = 0.05
LONG_S = 0.2  # cases that take longer by the priors are left out
MEMORY_SHARE = 0.1  # of a device, that a case may take
DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}

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


FLOP = 1  # its place among the coefficients


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
    found: list[Sample] = []
    for case in cases(kind):
        moved = case.moved(DTYPES[dtype])
        took = operator_seconds(kind, sum(case.flop), sum(moved), dtype, device)
        if took > LONG_S or sum(moved) > MEMORY_SHARE * device.memory_bytes:
            continue
        found += timed(case, moved, case.operands(DTYPES[dtype], clock.device), device.sms, clock)
    return found


def timed(
    case: Case, moved: tuple[float, float], operands: Sequence[Tensor], sms: int, clock: Clock
) -> tuple[Sample, Sample]:
    """The forward of a case alone, and with its backward."""
    upstream = torch.ones_like(case.function(*operands))

    def both() -> None:
        case.function(*operands).backward(upstream)
        for one in operands:
            one.grad = None

    with torch.no_grad():
        alone = clock.seconds(lambda: case.function(*operands))
    forward, total = case.flop[0], sum(case.flop)
    tail = sms / case.tiles if case.tiles is not None else 0.0
    return (
        Sample(1, forward, forward * tail, moved[0], alone),
        Sample(2, total, total * tail, sum(moved), clock.seconds(both)),
    )


def fitted(found: Sequence[Sample]) -> tuple[float, ...]:
    """The coefficients, none negative, of fixed, flop, tail and moved with the least squares of relative errors.

    With so few of them, every choice of which are 0 is tried; but FLOP are never free where something else is not.
    """
    rows = torch.tensor([[s.fixed, s.flop, s.tail, s.moved] for s in found], dtype=torch.float64)
    rows /= torch.tensor([s.seconds for s in found], dtype=torch.float64).unsqueeze(1)
    scale = rows.abs().amax(0)
    used = [column for column in range(4) if scale[column] > 0]
    best, answer = (True, math.inf), (0.0,) * 4
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            table = rows[:, chosen] / scale[list(chosen)]
            solved = torch.linalg.lstsq(table, torch.ones(len(found), 1, dtype=torch.float64), driver="gelsd").solution
            error = float(((table @ solved - 1) ** 2).sum())
            values = dict(zip(chosen, (solved.squeeze(1) / scale[list(chosen)]).tolist(), strict=True))
            free = FLOP in used and not values.get(FLOP, 0.0) > 0
            if min(values.values()) >= 0 and (free, error) < best:
                best, answer = (free, error), tuple(values.get(column, 0.0) for column in range(4))
    return answer


def operator_rates(
    cluster: Cluster, clock: Clock, least_fixed_s: float, progress: Progress
) -> tuple[tuple[Rates, ...], float]:
    """The rates of every class in every dtype, no fixed time below that given, and attention's waves of the tail."""
    rates, waves = [], cluster.device.efficiency.attention_tail_waves
    known = [name for name in DTYPES if name in dict(cluster.device.flop_per_s)]
    if cluster.device.kind == "cpu":
        known.reverse()  # what is trained in comes first: it says how long the tails of attention are
    for kind, dtype in product(OperatorClass, known):
        if kind in NOT_TIMED:
            continue
        progress(f"operators: {kind.value}, {dtype}")
        found = samples(kind, dtype, cluster.device, clock)
        if kind is OperatorClass.ATTENTION and dtype != known[0]:
            found = [replace(one, flop=one.flop + waves * one.tail, tail=0.0) for one in found]
        fixed, flop, tail, moved = fitted(found)
        if kind is OperatorClass.ATTENTION and dtype == known[0] and flop > 0:
            waves = tail / flop
        flop_per_s = 1 / flop if flop > 0 else None
        rates.append(Rates(kind, dtype, _inverse(moved), max(least_fixed_s, fixed), flop_per_s))
        if kind is OperatorClass.POINTWISE:
            rates.append(replace(rates[-1], operator=OperatorClass.OTHER))
    progress("operators: optimizer")
    return (*rates, optimizer_rate(cluster.device, clock)), waves


def _inverse(seconds: float) -> float:
    return math.inf if seconds == 0 else 1 / seconds


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


# -- launches ---------------------------------------------------------------------------------------------------------


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
LAYER_LAUNCHES = 2 * LAYER_OPS + 7  # forward and backward; the gradients of a product are two (passes/price.py)
SMALL_LAYERS = 8


def small_step_s(clock: Clock, wrap: Callable[[nn.Sequential], object] = lambda model: None) -> float:
    """Seconds of a forward and a backward of a few small layers, after `wrap`: the host's, views included.

    An operator that is repeated alone starts three times as fast: nothing but it is in the caches.
    """
    with clock.device:
        model = nn.Sequential(*(SmallLayer() for _ in range(SMALL_LAYERS)))
        x = torch.randn(1, 4, 32)
    wrap(model)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return clock.seconds(step)
