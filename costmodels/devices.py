"""The catalogue of devices: one entry per device, every number with its source.

Sources, by the letters used below:
  [ml-eng]    stas00/ml-engineering, compute/accelerator/README.md and network/README.md (744d01e, 2026-08)
  [xformers]  the peak table of facebookresearch/xformers, as kept in meta-pytorch/autoparallel
  [simumax]   SimuMax 4dcaae5 (2026-05): per-shape operator and collective tables measured on A100-PCIe and B200
  [autopar.]  meta-pytorch/autoparallel a54c252 (2026-06), cost_models/nccl_cost_model.py: fits to nccl-tests on H100
  [driver]    what the driver or torch reported to a user, see the issue named there
  [spec]      vendor data sheet, read through third-party tables
  [assumed]   no measurement known to us; a prior, to be replaced by a measurement
Data sheets print duplex links and sparse FLOP/s; everything here is one direction, and dense.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from costmodels.errors import BadInput

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Link:
    """What one device can send over one level of the network, in one direction."""

    bytes_per_s: float
    latency_s: float  # the least a collective of two neighbours takes


@dataclass(frozen=True)
class Saturation:
    """How a message of S bytes fills a link: fraction * S^q / (S^q + h^q), h = half_bytes * pipeline depth."""

    fraction: float
    half_bytes: float
    sharpness: float  # q


@dataclass(frozen=True)
class Fabric:
    """What collectives make of the links of a device."""

    intra_node: Saturation
    inter_node: Saturation
    nvls_fraction: float | None = None  # all-reduce inside NVSwitch
    nvls_ranks: int = 0  # ... used from this group size on
    pair_bytes_per_s: float | None = None  # point-to-point wiring: what two neighbours share; None = switched


@dataclass(frozen=True)
class Coefficients:
    """seconds = fixed_s + FLOP / (peak_fraction * peak) + bytes / (bandwidth_fraction * bandwidth)"""

    peak_fraction: float
    bandwidth_fraction: float  # above 1 where part of the bytes comes from a cache
    fixed_s: float

    def slower(self, factor: float) -> "Coefficients":
        """The operator takes so many times as long."""
        return Coefficients(self.peak_fraction / factor, self.bandwidth_fraction / factor, self.fixed_s * factor)


@dataclass(frozen=True)
class Efficiencies:
    """The coefficients of every operator class on one device."""

    matmul: Coefficients
    attention: Coefficients
    attention_tail_waves: float  # an attention kernel runs this many waves of tiles longer than its FLOP say
    unaligned: float  # times the speed of a matmul whose rows are no multiples of 16 bytes
    unaligned_batched: float  # ... of one in batches
    conv: Coefficients
    pointwise: Coefficients
    norm: Coefficients
    embedding: Coefficients
    loss: Coefficients
    other: Coefficients

    def slower(self, factor: float) -> "Efficiencies":
        """Every operator takes so many times as long."""
        return self.changed(lambda one: one.slower(factor))

    def changed(self, change: Callable[[Coefficients], Coefficients]) -> "Efficiencies":
        """With other coefficients of every class."""
        every: dict[str, Any] = {n: change(one) for n, one in vars(self).items() if isinstance(one, Coefficients)}
        return replace(self, **every)


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process, with every number that a price needs."""

    name: str
    kind: str  # "cuda" or "cpu"
    flop_per_s: tuple[tuple[str, float], ...]  # dense peak by dtype name
    memory_bytes: int  # as the driver reports it
    memory_bytes_per_s: float
    sms: int
    intra_node: Link  # typical; a cluster may say otherwise
    inter_node: Link
    fabric: Fabric
    efficiency: Efficiencies
    launch_s: float  # the host cannot start eager kernels faster
    fixed_overhead_bytes: int  # context, outside the allocator
    communicator_bytes: tuple[int, int]  # outside the allocator: the first process group, each further one
    fragmentation: float  # the allocator reserves (1 + fragmentation) times the live bytes
    overlap_slowdown: float  # compute takes this many times longer while a collective runs
    driver_names: tuple[str, ...]  # as torch.cuda.get_device_name() prints it
    source: str
    unit_s: float = 0.0  # of a sharded unit in a microbatch: hooks, where they run on the core that computes
    measured: tuple[tuple[str, str, Coefficients], ...] = ()  # operator class, dtype name: in place of `efficiency`

    @cached_property
    def measured_of(self) -> Mapping[tuple[str, str], Coefficients]:
        """The same by operator class and dtype name; a class alone, with dtype "", as it was measured first."""
        firsts = {(operator, ""): one for operator, _, one in reversed(self.measured)}
        return firsts | {(operator, dtype): one for operator, dtype, one in self.measured}

    def peak_flop_per_s(self, dtype_name: str) -> float:
        """Dense FLOP/s of matrix units at one dtype: "bf16", "fp16", "fp32" (without TF32), "tf32"."""
        for name, peak in self.flop_per_s:
            if name == dtype_name:
                return peak
        known = ", ".join(name for name, _ in self.flop_per_s)
        raise BadInput(f"{self.name} has no {dtype_name} arithmetic; use one of {known}")


# Launch of an eager kernel: the floor measured in [autopar.].
LAUNCH_S = 7e-6
# What the host takes for it with autograd, modules and hooks around: 30 to 40 us [simumax]; 75 us in nanotron's layers
# of one and two rows (1B grid: 6 to 8 ms a layer, whatever the GPU has to do).
HOST_S = 35e-6

# Matmuls with rows that are no multiples of 16 bytes, times the speed of others. In batches: attention with heads of
# 108, 150 and 225 beside 144, 216 and 224 runs at 9 to 16 of 240 TFLOP/s (A100, fp16, cuBLAS 11: bigscience,
# tr11-176B-ml/chronicles-prequel.md). By themselves: nanoGPT takes a quarter less time with a vocabulary of 50,304 than
# with 50,257 (A100). On an H100 the last of nanotron's 8 stages, a head of 50,257 and the loss alone, takes 111 ms of
# 16,384 tokens: 106 TFLOP/s beside what the loss moves. Its matrix units need aligned rows: such products run as on an
# A100, on more and faster units (0.25 * 240 TFLOP/s * 1.5 = 90).
UNALIGNED_AMPERE = 0.25
UNALIGNED_HOPPER = 0.16
UNALIGNED_BATCHED = 0.05

# NVIDIA. Context: A100 with lazy loading 0.47 GiB, rounded up for libraries ([ml-eng] training/performance).
CONTEXT_BYTES = round(0.6 * GIB)
# First communicator +1.45 GiB on 2 GPUs ([ml-eng] training/performance), each further one 544 to 688 MiB on
# A100 (NVIDIA/nccl issue 964).
COMMUNICATOR_BYTES = (round(1.5 * GIB), round(0.6 * GIB))
# reserved / allocated of 43 training runs on B200: median 1.040, highest 1.093 ([simumax]).
FRAGMENTATION = 0.04
# Average of measurements on A100, H100, MI210 and MI250: arXiv 2507.03114 (highest: 1.40).
OVERLAP_SLOWDOWN = 1.19

# Shares of the link at 8 ranks, half sizes and sharpness: fitted (2026-11) to the all-reduce curves of [ml-eng],
# network/README.md; the curves are in tests/test_costmodels_collectives.py.
NETWORK = Saturation(fraction=0.72, half_bytes=3 * MIB, sharpness=0.9)  # 4 nodes of 8 B200, 8x400G EFA
AMPERE = Fabric(Saturation(fraction=0.82, half_bytes=2.5 * MIB, sharpness=0.6), NETWORK)  # 8 A100
HOPPER = Fabric(  # 8 H200: 367 GB/s by ring, 481 by NVLS, of 450; ring below 5 ranks
    Saturation(fraction=0.82, half_bytes=2.5 * MIB, sharpness=0.8), NETWORK, nvls_fraction=1.07, nvls_ranks=5
)
BLACKWELL = Fabric(  # 8 B200: 682 GB/s by ring of 900; ring below 6 ranks
    Saturation(fraction=0.76, half_bytes=6 * MIB, sharpness=0.8), NETWORK, nvls_fraction=0.88, nvls_ranks=6
)
PCIE = Fabric(Saturation(fraction=0.6, half_bytes=1 * MIB, sharpness=0.9), NETWORK)  # [assumed]

INFINIBAND_LATENCY_S = 14e-6  # one network hop: NCCL src/graph/tuning.cc (5067397), protocol Simple
ETHERNET_LATENCY_S = 30e-6  # [assumed]
PCIE4_X16 = Link(31e9, 10e-6)  # [ml-eng]; latency [assumed]


def efficiencies(
    matmul: Coefficients,
    *,
    attention: float,
    tail_waves: float,
    bandwidth: float,
    loss_bandwidth: float,
    unaligned: float = UNALIGNED_AMPERE,
) -> Efficiencies:
    """The coefficients of a GPU, from the few that are measured on it.

    Vector operators count their FLOP at half of the fp32 peak and move `bandwidth` of the memory's rate; a
    convolution is a matmul on im2col that reaches 0.8 of it [assumed]; attention streams q, k, v like vectors.
    """
    vector = Coefficients(peak_fraction=0.5, bandwidth_fraction=bandwidth, fixed_s=LAUNCH_S)
    return Efficiencies(
        matmul=matmul,
        attention=Coefficients(attention, bandwidth, LAUNCH_S),
        attention_tail_waves=tail_waves,
        unaligned=unaligned,
        unaligned_batched=UNALIGNED_BATCHED,
        conv=Coefficients(0.8 * matmul.peak_fraction, matmul.bandwidth_fraction, matmul.fixed_s),
        pointwise=vector,
        norm=vector,
        embedding=vector,
        loss=Coefficients(0.5, loss_bandwidth, LAUNCH_S),
        other=vector,
    )


def gpu(
    name: str,
    *,
    flop_per_s: dict[str, float],
    memory_bytes: float,
    memory_bytes_per_s: float,
    sms: int,
    intra_node: Link,
    inter_node: Link,
    fabric: Fabric,
    efficiency: Efficiencies,
    driver_names: tuple[str, ...],
    source: str,
) -> Device:
    """A GPU with the overheads that all of them share."""
    return Device(
        name=name,
        kind="cuda",
        flop_per_s=tuple(flop_per_s.items()),
        memory_bytes=round(memory_bytes),
        memory_bytes_per_s=memory_bytes_per_s,
        sms=sms,
        intra_node=intra_node,
        inter_node=inter_node,
        fabric=fabric,
        efficiency=efficiency,
        launch_s=HOST_S,
        fixed_overhead_bytes=CONTEXT_BYTES,
        communicator_bytes=COMMUNICATOR_BYTES,
        fragmentation=FRAGMENTATION,
        overlap_slowdown=OVERLAP_SLOWDOWN,
        driver_names=driver_names,
        source=source,
    )


# Matmul: least squares of 183 (A100) and 514 (B200) GEMM shapes timed in training, error 3.1 % and 10.3 % [simumax].
# B200 fits best without a fixed time; it still pays a launch.
# Attention: true causal FLOP, head dim 128, forward and backward together, 4 to 128 heads at 4,096 tokens [simumax];
# the fit is within 3 % (A100) and 15 % (B200).
# Vectors: 0.91 of 1,600 GB/s on A100-PCIe (1,935), 0.666 of 8,000 on B200; cross-entropy 0.81 of 1,600 and 0.30 of
# 8,000 [simumax].
A100_EFFICIENCY = efficiencies(
    Coefficients(peak_fraction=0.769, bandwidth_fraction=2.16, fixed_s=18e-6),
    attention=0.54,
    tail_waves=0.9,
    bandwidth=0.75,
    loss_bandwidth=0.67,
)
B200_EFFICIENCY = efficiencies(
    Coefficients(peak_fraction=0.505, bandwidth_fraction=2.22, fixed_s=LAUNCH_S),
    attention=0.46,
    tail_waves=1.8,
    bandwidth=0.666,
    loss_bandwidth=0.30,
    unaligned=UNALIGNED_HOPPER,
)
# H100: a flat 0.63 reproduces Llama-3.1 405B, 70B and Nemotron on 16 to 2,304 GPUs within 2.3 % on average
# (NVIDIA/dgxc-benchmarking, branch support/25.05); 0.66 beside a bytes term, as A100 and B200 show.
# FlashAttention-2, which torch calls, reaches 0.35 of an H100 (arXiv 2407.08608), 0.40 on long rows.
# Vectors: 0.70 [autopar.]; the rest between A100 and B200 [assumed].
H100_EFFICIENCY = efficiencies(
    Coefficients(peak_fraction=0.66, bandwidth_fraction=2.2, fixed_s=LAUNCH_S),
    attention=0.40,
    tail_waves=1.3,
    bandwidth=0.70,
    loss_bandwidth=0.45,
    unaligned=UNALIGNED_HOPPER,
)


def assumed_efficiency(peak_fraction: float) -> Efficiencies:
    """A GPU without training measurements: only the share of peak that its matmuls reach is its own."""
    return efficiencies(
        Coefficients(peak_fraction=peak_fraction, bandwidth_fraction=2.0, fixed_s=10e-6),
        attention=0.6 * peak_fraction,
        tail_waves=1.3,
        bandwidth=0.70,
        loss_bandwidth=0.45,
    )


V100 = gpu(
    "v100-sxm-32",
    flop_per_s={"fp16": 125e12, "fp32": 15.7e12},  # [xformers]; no bf16
    memory_bytes=31.74 * GIB,  # [driver] liucongg/ChatGLM-Finetuning issue 73
    memory_bytes_per_s=0.90e12,  # [spec]
    sms=80,  # [spec]
    intra_node=Link(150e9, 24e-6),  # NVLink2 [ml-eng]; latency as on A100 [assumed]
    inter_node=Link(6.25e9, INFINIBAND_LATENCY_S),  # 100 Gb/s for two GPUs, typical [ml-eng]
    fabric=AMPERE,  # [assumed]
    efficiency=assumed_efficiency(0.70),
    driver_names=("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"),
    source="data sheet; efficiencies assumed",
)
A100_40 = gpu(
    "a100-sxm-40",
    flop_per_s={"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},  # [ml-eng]
    memory_bytes=39.5 * GIB,  # [driver] TianheWu/CoSeR issue 10
    memory_bytes_per_s=1.555e12,  # [spec]
    sms=108,  # [ml-eng]
    intra_node=Link(300e9, 24e-6),  # NVLink3; 8 ranks take 102 us at 1 and at 4 MiB [ml-eng]
    inter_node=Link(6.25e9, INFINIBAND_LATENCY_S),  # P4d: 4x100G EFA for 8 GPUs [ml-eng]
    fabric=AMPERE,
    efficiency=A100_EFFICIENCY,
    driver_names=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    source="ml-engineering; efficiencies from SimuMax tables of A100-PCIe",
)
A100_80 = gpu(
    "a100-sxm-80",
    flop_per_s={"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},  # [ml-eng]
    memory_bytes=79.15 * GIB,  # [ml-eng]
    memory_bytes_per_s=2.0e12,  # [ml-eng]
    sms=108,  # [ml-eng]
    intra_node=Link(300e9, 24e-6),  # as a100-sxm-40
    inter_node=Link(25e9, INFINIBAND_LATENCY_S),  # DGX: 8x200G HDR for 8 GPUs
    fabric=AMPERE,
    efficiency=A100_EFFICIENCY,
    driver_names=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    source="ml-engineering; efficiencies from SimuMax tables of A100-PCIe",
)
H100 = gpu(
    "h100-sxm-80",
    flop_per_s={"bf16": 989e12, "fp16": 989e12, "tf32": 494.5e12, "fp32": 67e12},  # [ml-eng]
    memory_bytes=79.15 * GIB,  # as a100-sxm-80
    memory_bytes_per_s=3.35e12,  # [ml-eng]
    sms=132,  # [ml-eng]
    intra_node=Link(450e9, 8e-6),  # NVLink4 [ml-eng]; 2, 4, 8 ranks: 8, 17, 30 us [autopar.]
    inter_node=Link(50e9, INFINIBAND_LATENCY_S),  # 8x400G NDR [ml-eng]
    fabric=HOPPER,
    efficiency=H100_EFFICIENCY,
    driver_names=("NVIDIA H100 80GB HBM3",),
    source="ml-engineering; matmul share from NVIDIA/dgxc-benchmarking, links from nccl-tests fits",
)
# Clocks under load go by the cube root of the power that a chip may draw [assumed]: power is capacitance x clock x
# voltage^2, and voltage goes with the clock.
H100_500W = gpu(
    "h100-hbm2e-96",
    flop_per_s={"bf16": 989e12, "fp16": 989e12, "tf32": 494.5e12, "fp32": 67e12},  # as h100-sxm-80
    memory_bytes=95 * GIB,  # torchtitan, benchmarks/llama3_h100_202412: 95 GiB
    memory_bytes_per_s=2.4e12,  # HBM2e, the same page
    sms=132,  # as h100-sxm-80
    intra_node=Link(450e9, 8e-6),  # as h100-sxm-80
    inter_node=Link(50e9, INFINIBAND_LATENCY_S),
    fabric=HOPPER,
    efficiency=efficiencies(  # of h100-sxm-80, whose 700 W are 500 here
        Coefficients(peak_fraction=0.66 * (500 / 700) ** (1 / 3), bandwidth_fraction=2.2, fixed_s=LAUNCH_S),
        attention=0.40 * (500 / 700) ** (1 / 3),
        tail_waves=1.3,
        bandwidth=0.70,
        loss_bandwidth=0.45,
        unaligned=UNALIGNED_HOPPER,
    ),
    driver_names=(),
    source="torchtitan's H100 of 500 W with 96 GB of HBM2e; efficiencies from H100",
)
H200 = gpu(
    "h200-sxm-141",
    flop_per_s={"bf16": 989e12, "fp16": 989e12, "tf32": 494.5e12, "fp32": 67e12},  # [ml-eng]
    memory_bytes=143156 * MIB,  # [driver]
    memory_bytes_per_s=4.8e12,  # [ml-eng]
    sms=132,  # [driver]
    intra_node=Link(450e9, 8e-6),  # as h100-sxm-80
    inter_node=Link(50e9, INFINIBAND_LATENCY_S),  # P5en: 16x200G for 8 GPUs [ml-eng]
    fabric=HOPPER,
    efficiency=H100_EFFICIENCY,  # same chip, same best matmul [ml-eng]
    driver_names=("NVIDIA H200",),
    source="ml-engineering; efficiencies as H100",
)
B200 = gpu(
    "b200-sxm-180",
    flop_per_s={"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 80e12},  # [ml-eng]
    memory_bytes=182631 * MIB,  # [driver]
    memory_bytes_per_s=8.0e12,  # [ml-eng]; the shares above refer to it
    sms=148,  # [driver] pytorch/ao pull request 4002
    intra_node=Link(900e9, 8e-6),  # NVLink5 [ml-eng]; latency as h100-sxm-80
    inter_node=Link(50e9, INFINIBAND_LATENCY_S),  # P6-B200: 8x400G for 8 GPUs [ml-eng]
    fabric=BLACKWELL,
    efficiency=B200_EFFICIENCY,
    driver_names=("NVIDIA B200",),
    source="ml-engineering; efficiencies from SimuMax tables of B200",
)
GB200 = gpu(  # a node is one NVLink domain, up to 72 devices
    "gb200",
    flop_per_s={"bf16": 2500e12, "fp16": 2500e12, "tf32": 1250e12, "fp32": 80e12},  # [ml-eng]
    memory_bytes=0.99 * 186 * GIB,  # the share of the printed size that B200 and H200 show [assumed]
    memory_bytes_per_s=8.0e12,  # [ml-eng]
    sms=148,  # as b200-sxm-180 [assumed]
    intra_node=Link(900e9, 8e-6),  # NVLink5 [ml-eng]
    inter_node=Link(50e9, INFINIBAND_LATENCY_S),  # [ml-eng]
    fabric=BLACKWELL,  # [assumed]
    efficiency=efficiencies(  # 0.505 of B200 times the ratio of best matmuls, 0.729 / 0.776 [ml-eng]
        Coefficients(peak_fraction=0.475, bandwidth_fraction=2.22, fixed_s=LAUNCH_S),
        attention=0.43,
        tail_waves=1.8,
        bandwidth=0.666,
        loss_bandwidth=0.30,
        unaligned=UNALIGNED_HOPPER,
    ),
    driver_names=("NVIDIA GB200",),
    source="ml-engineering; efficiencies from B200",
)
MI300X = gpu(
    "mi300x",
    flop_per_s={"bf16": 1307e12, "fp16": 1307e12, "tf32": 653.7e12, "fp32": 163.4e12},  # [xformers]
    memory_bytes=0.99 * 192 * GIB,  # as gb200 [assumed]
    memory_bytes_per_s=5.3e12,  # [ml-eng]
    sms=304,  # compute units [ml-eng]
    intra_node=Link(448e9, 8e-6),  # xGMI to seven peers [ml-eng]; latency [assumed]
    inter_node=Link(50e9, INFINIBAND_LATENCY_S),  # [ml-eng]
    fabric=Fabric(  # 64 GB/s for each pair [ml-eng]; the rest as on A100 [assumed]
        AMPERE.intra_node, NETWORK, pair_bytes_per_s=64e9
    ),
    efficiency=assumed_efficiency(0.42),  # best matmul 0.514 [ml-eng], times 0.82 as on H100
    driver_names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
    source="ml-engineering; efficiencies assumed from its best matmul",
)
L4 = gpu(
    "l4",
    flop_per_s={"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},  # [spec]
    memory_bytes=22.03 * GIB,  # [driver] ArcInstitute/evo2 issue 190
    memory_bytes_per_s=0.30e12,  # [spec]
    sms=58,  # [spec]
    intra_node=PCIE4_X16,
    inter_node=Link(1.56e9, ETHERNET_LATENCY_S),  # 100G for 8 GPUs, as A10G [assumed]
    fabric=PCIE,
    efficiency=assumed_efficiency(0.50),  # 72 W
    driver_names=("NVIDIA L4",),
    source="data sheet; efficiencies assumed",
)
L40S = gpu(
    "l40s",
    flop_per_s={"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},  # [ml-eng]
    memory_bytes=44.42 * GIB,  # [driver] stepfun-ai/Step-Video-T2V issue 8
    memory_bytes_per_s=0.864e12,  # [ml-eng]
    sms=142,  # [spec]
    intra_node=PCIE4_X16,
    inter_node=Link(6.25e9, ETHERNET_LATENCY_S),  # 400G for 8 GPUs [assumed]
    fabric=PCIE,
    efficiency=assumed_efficiency(0.60),
    driver_names=("NVIDIA L40S",),
    source="ml-engineering; efficiencies assumed",
)
RTX4090 = gpu(
    "rtx4090",
    flop_per_s={"bf16": 165e12, "fp16": 165e12, "tf32": 82.6e12, "fp32": 82.6e12},  # [spec]; 165.5 measured
    memory_bytes=23.68 * GIB,  # [driver] zai-org/CogVideo issue 36
    memory_bytes_per_s=1.008e12,  # [spec]
    sms=128,  # [driver]
    intra_node=PCIE4_X16,
    inter_node=Link(1.56e9, ETHERNET_LATENCY_S),  # 100G for 8 GPUs [assumed]
    fabric=Fabric(  # no peer-to-peer: every message crosses the host twice [assumed]
        Saturation(fraction=0.4, half_bytes=1 * MIB, sharpness=0.9), NETWORK
    ),
    efficiency=assumed_efficiency(0.80),
    driver_names=("NVIDIA GeForce RTX 4090",),
    source="data sheet; efficiencies assumed",
)
A10G = gpu(
    "a10g",
    flop_per_s={"bf16": 70e12, "fp16": 70e12, "tf32": 35e12, "fp32": 35e12},  # [spec]; 125 is the A10
    memory_bytes=22587 * MIB,  # [driver]
    memory_bytes_per_s=0.600e12,  # [spec]
    sms=80,  # [driver]
    intra_node=PCIE4_X16,
    inter_node=Link(1.56e9, ETHERNET_LATENCY_S),  # G5: 100G for 8 GPUs
    fabric=PCIE,
    efficiency=assumed_efficiency(0.70),
    driver_names=("NVIDIA A10G",),
    source="data sheet; efficiencies assumed",
)

# One process, one thread, gloo. FLOP/s and bytes/s: torch 2.13, 512 x 512 matmul and a 64 MB add on one core of a
# 2.8 GHz Xeon with AVX-512 (2026-11); gloo between two such processes: 0.7 to 0.9 GB/s.
CPU_COEFFICIENTS = Coefficients(peak_fraction=0.9, bandwidth_fraction=0.9, fixed_s=LAUNCH_S)
CPU = Device(
    name="cpu",
    kind="cpu",
    flop_per_s=(("fp32", 100e9), ("bf16", 30e9), ("fp16", 2e9)),
    memory_bytes=4 * GIB,  # of one process, unless the user says otherwise
    memory_bytes_per_s=12e9,
    sms=1,
    intra_node=Link(1e9, 150e-6),
    inter_node=Link(1e9, 150e-6),
    fabric=Fabric(Saturation(1.0, 0.0, 1.0), Saturation(1.0, 0.0, 1.0)),
    efficiency=Efficiencies(
        matmul=CPU_COEFFICIENTS,
        attention=CPU_COEFFICIENTS,
        attention_tail_waves=0.0,
        unaligned=1.0,
        unaligned_batched=1.0,
        conv=CPU_COEFFICIENTS,
        pointwise=CPU_COEFFICIENTS,
        norm=CPU_COEFFICIENTS,
        embedding=CPU_COEFFICIENTS,
        loss=CPU_COEFFICIENTS,
        other=CPU_COEFFICIENTS,
    ),
    launch_s=0.0,  # the host is the device; 6.5 us for an add of four numbers, same machine, are in every operator
    fixed_overhead_bytes=0,
    communicator_bytes=(0, 0),
    fragmentation=0.0,
    overlap_slowdown=math.inf,  # gloo runs on the core that computes
    driver_names=(),
    source="one core of a 2.8 GHz Xeon, torch 2.13, gloo, November 2026",
    unit_s=0.8e-3,  # fully_shard, one rank, torch 2.13: steps of a tiny model with and without it, November 2026
)

CATALOGUE: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (V100, A100_40, A100_80, H100, H100_500W, H200, B200, GB200, MI300X, L4, L40S, RTX4090, A10G, CPU)
    }
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "v100": "v100-sxm-32",
        "a100-40": "a100-sxm-40",
        "a100-80": "a100-sxm-80",
        "h100": "h100-sxm-80",
        "h200": "h200-sxm-141",
        "b200": "b200-sxm-180",
        # the short name of these is their only one
        "h100-hbm2e-96": "h100-hbm2e-96",
        "gb200": "gb200",
        "mi300x": "mi300x",
        "l4": "l4",
        "l40s": "l40s",
        "rtx4090": "rtx4090",
        "a10g": "a10g",
    }
)


def device_named(name: str) -> Device:
    """The catalogue entry of a canonical or a short name, in any case."""
    low = name.lower()
    canonical = ALIASES.get(low, low)
    if canonical in CATALOGUE:
        return CATALOGUE[canonical]
    known = sorted({*CATALOGUE, *ALIASES})
    near = difflib.get_close_matches(low, known, n=3, cutoff=0.4)
    if near:
        raise BadInput(f"unknown device '{name}'; the nearest known: {', '.join(near)}")
    raise BadInput(f"unknown device '{name}'; known: {', '.join(known)}")
