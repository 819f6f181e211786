"""What was measured on a cluster, in place of the catalogue's priors: read from and written to profile.yaml.

    autopar: 0.1.0
    device: h100-sxm-80              # the catalogue's name, or the cluster file's own
    measured_on: NVIDIA H100 80GB HBM3
    date: "2026-11-30T12:00:00+00:00"
    torch: 2.13.0
    backend: nccl 2.28.9
    ranks: 16
    processor_share: 0.99            # of the processor time that the processes asked for, before and after
    concurrent: 4                    # processes of a node, on CPUs, that its cores run at once
    operators:                       # seconds = fixed_s + FLOP / flop_per_s + bytes / bytes_per_s
    - {operator: matmul, dtype: bf16, flop_per_s: 6.5e+14, bytes_per_s: 7.3e+12, fixed_s: 7.0e-06}
    collectives:                     # seconds by bytes of the full tensor
    - kind: all_reduce
      ranks_per_node: 8
      nodes: 2
      siblings: 1
      bytes: [4096, 65536]
      seconds: [0.0001, 0.00012]
    attention_tail_waves: 1.3
    launch_s: 7.0e-06                # the host starts an operator
    unit_s: 0.0008                   # hooks of a sharded unit in a microbatch, on CPUs
    overlap_slowdown: 1.2
    fixed_overhead_bytes: 515899392  # of a process, outside the allocator
    communicator_bytes: [1556925645, 644245094]  # the first process group, each further one
    compute_factor: 1.08             # seconds of a step's compute, measured over predicted (calibrate --from-step)

What is left out stays as the catalogue has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from costmodels.devices import Coefficients, Device
from costmodels.errors import BadInput
from costmodels.files import Unlike, read_mapping, typed
from costmodels.groups import Collective, Group
from costmodels.operators import OperatorClass, coefficients

QUIET = 0.9  # share of the processor time asked for; alone on a machine processes get 0.99


@dataclass(frozen=True)
class Rates:
    """One operator class in one dtype; an infinite rate costs nothing, without flop_per_s the catalogue's holds."""

    operator: OperatorClass
    dtype: str
    bytes_per_s: float
    fixed_s: float
    flop_per_s: float | None = None

    def coefficients(self, device: Device) -> Coefficients:
        """The same as shares of what the device can do at best."""
        share = coefficients(self.operator, self.dtype, device).peak_fraction
        if self.flop_per_s is not None:
            share = self.flop_per_s / device.peak_flop_per_s(self.dtype)
        return Coefficients(share, self.bytes_per_s / device.memory_bytes_per_s, self.fixed_s)


@dataclass(frozen=True)
class Sweep:
    """One collective on one kind of group: seconds by bytes of the full logical tensor, in rising order."""

    kind: Collective
    ranks_per_node: int
    nodes: int
    siblings: int
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def group(self) -> Group:
        return Group(self.ranks_per_node, self.nodes, self.siblings)

    def distance(self, group: Group) -> float:
        """How far a group is from the measured one; infinite where it uses other links."""
        if (self.nodes > 1, self.ranks_per_node > 1) != (group.nodes > 1, group.ranks_per_node > 1):
            return math.inf
        pairs = (
            (self.nodes, group.nodes),
            (self.ranks_per_node, group.ranks_per_node),
            (self.siblings, group.siblings),
        )
        return sum(abs(math.log(a / b)) for a, b in pairs)


@dataclass(frozen=True)
class Profile:
    """A cluster's measurements, and what they were made with."""

    device: str
    measured_on: str
    date: str
    torch: str
    backend: str
    ranks: int
    processor_share: float | None = None
    concurrent: int | None = None
    operators: tuple[Rates, ...] = ()
    collectives: tuple[Sweep, ...] = ()
    attention_tail_waves: float | None = None
    launch_s: float | None = None
    unit_s: float | None = None
    overlap_slowdown: float | None = None
    fixed_overhead_bytes: int | None = None
    communicator_bytes: tuple[int, ...] | None = None
    compute_factor: float = 1.0
    name: str = "profile"  # of its file

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        step = "" if self.compute_factor == 1 else f", compute x {self.compute_factor:.3g} after a measured step"
        return f"{self.name} of {self.date[:19].replace('T', ' ')} ({ranks}, torch {self.torch}, {self.backend}{step})"

    def lent(self, devices: int, per_node: int) -> float:
        """How many times faster one of so many processes is, at most, while the others of its node wait."""
        return max(1.0, per_node / self.concurrent) if self.concurrent and self.ranks == devices else 1.0

    def doubts(self, device: Device, devices: int, per_node: int) -> tuple[str, ...]:
        """Why its times may not be those of a step on so many devices, of which a node has `per_node`."""
        found, lent = [], self.lent(devices, per_node)
        if self.processor_share is not None and self.processor_share * lent < QUIET:
            share = f"{100 * self.processor_share:.0f} %"
            found.append(f"{self.name} had {share} of the processor time that it asked for: others ran, or cores lack")
        if device.kind == "cpu" and self.ranks == 1 < devices:
            found.append(f"{self.name} was measured on one process, which has all cores; {devices} share them")
        return tuple(found)

    def applied_to(self, device: Device) -> Device:
        """The device with what was measured. Raises BadInput where it is another one."""
        if device.name != self.device:
            raise BadInput(f"{self.name} was measured on {self.device}, the cluster has {device.name}")
        measured = tuple(
            (one.operator.value, one.dtype, one.coefficients(device).slower(self.compute_factor))
            for one in self.operators
        )
        efficiency = device.efficiency.slower(self.compute_factor)
        if self.attention_tail_waves is not None:
            efficiency = replace(efficiency, attention_tail_waves=self.attention_tail_waves)
        names = ("launch_s", "unit_s", "overlap_slowdown", "fixed_overhead_bytes", "communicator_bytes")
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        changed = replace(device, efficiency=efficiency, measured=measured, **given)
        factor = self.compute_factor
        return replace(changed, launch_s=changed.launch_s * factor, unit_s=changed.unit_s * factor)

    def sweep(self, kind: Collective, group: Group) -> Sweep | None:
        """The sweep of a collective on the nearest group over the same links, if there is one."""
        found = min((s for s in self.collectives if s.kind is kind), key=lambda s: s.distance(group), default=None)
        return None if found is None or found.distance(group) == math.inf else found

    def to_yaml(self, version: str) -> str:
        """The text of profile.yaml; `version` of autopar."""
        given = {name: _plain(value) for name, value in vars(self).items() if value not in (None, ())}
        del given["name"]
        text = ""
        for name, value in {"autopar": version, **given}.items():  # one by one: scalars alone would become {..}
            style = None if isinstance(value, list) else False
            text += yaml.safe_dump({name: value}, default_flow_style=style, width=math.inf)
        return text

    @classmethod
    def from_yaml(cls, path: str | Path) -> Profile:
        """The profile that a file holds. Raises BadInput, with the place, where it is none."""
        values = read_mapping(Path(path), "a profile")
        try:
            if strange := sorted(map(str, values.keys() - cls.__dataclass_fields__.keys() - {"autopar"})):
                raise Unlike(f"{strange[0]} is not known")
            found = replace(typed(cls, values, ""), name=Path(path).name)
            _check(found)
        except Unlike as fault:
            raise BadInput(f"{path}: not what `autopar calibrate` writes: {fault}") from None
        return found


def _check(profile: Profile) -> None:
    """What types do not say. Raises Unlike."""
    for i, rate in enumerate(profile.operators):
        rates = [rate.bytes_per_s, *([] if rate.flop_per_s is None else [rate.flop_per_s])]
        if rate.operator is OperatorClass.VIEW or not all(one > 0 for one in rates) or not 0 <= rate.fixed_s < math.inf:
            raise Unlike(f"operators[{i}] needs an operator that costs something, rates above 0, fixed_s of at least 0")
    for i, sweep in enumerate(profile.collectives):
        rising = all(a < b for a, b in pairwise((0, *sweep.bytes)))
        positive = all(0 < one < math.inf for one in sweep.seconds)
        if not sweep.bytes or len(sweep.bytes) != len(sweep.seconds) or not rising or not positive:
            raise Unlike(f"collectives[{i}] needs as many seconds, above 0, as bytes, which rise")
        if min(sweep.ranks_per_node, sweep.nodes, sweep.siblings) < 1:
            raise Unlike(f"collectives[{i}] is on a group of no ranks")
    if not 0 < profile.compute_factor < math.inf:
        raise Unlike("compute_factor is not above 0")
    if profile.processor_share is not None and not 0 < profile.processor_share <= 1:
        raise Unlike("processor_share is not between 0 and 1")
    if profile.concurrent is not None and profile.concurrent < 1:
        raise Unlike("concurrent is below 1")
    if profile.overlap_slowdown is not None and not profile.overlap_slowdown >= 1:
        raise Unlike("overlap_slowdown is below 1")
    for name in ("attention_tail_waves", "launch_s", "unit_s"):
        if not 0 <= (getattr(profile, name) or 0.0) < math.inf:
            raise Unlike(f"{name} is below 0")
    groups = (0, 0) if profile.communicator_bytes is None else profile.communicator_bytes
    overheads = (profile.fixed_overhead_bytes or 0, *groups)
    if len(overheads) != 3 or min(overheads) < 0:
        raise Unlike("fixed_overhead_bytes and the two communicator_bytes are not counts of bytes")


def _plain(value: Any) -> Any:
    """Mappings, lists and scalars only; numbers in four digits."""
    if isinstance(value, OperatorClass | Collective):
        return value.value
    if is_dataclass(value):
        return {name: _plain(one) for name, one in vars(value).items() if one is not None}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
