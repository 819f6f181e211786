"""The machines that a plan is made for: from a file, a preset, or the machine itself.

    name: two-nodes                # optional
    nodes: 2                       # optional, 1; a node is what the intra_node links connect
    devices_per_node: 8
    device: h100-sxm-80            # a catalogue name, or a mapping with the numbers, see below
    memory_limit_gib: 72           # optional: what live tensors may fill; default: what is usable
    links:                         # optional: default from the catalogue; per device, one direction
      intra_node: {gb_per_s: 450, latency_us: 8}
      inter_node: {gb_per_s: 50, latency_us: 14}
    profile: profile.yaml          # optional: what `autopar calibrate` wrote; a path from this file

A device of one's own starts from the catalogue with `like`, or gives every number and the links:

    device:
      name: my-gpu
      like: h100-sxm-80                       # what is not given is as there
      tflop_per_s: {bf16: 400, fp32: 50}      # dense peaks, per dtype
      memory_gib: 64                          # as the driver reports it
      memory_gb_per_s: 2000
      sms: 100
"""

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from costmodels.devices import CATALOGUE, GIB, PCIE, Device, Link, assumed_efficiency, device_named, gpu
from costmodels.errors import BadInput
from costmodels.memory import usable_bytes
from costmodels.profile import Profile

__all__ = ["Cluster", "Link"]

# Process groups of more than one rank that a plan is expected to open: the world, data, tensor, pipeline.
EXPECTED_COMMUNICATORS = 4


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices, the links between them, and the bytes that a plan may fill on each device."""

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link
    memory_limit_bytes: int  # for live tensors: what the context, NCCL and fragmentation leave
    profile: Profile | None = None  # None: not calibrated, the catalogue's priors hold

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def of(
        cls,
        device: Device,
        *,
        nodes: int = 1,
        devices_per_node: int,
        name: str | None = None,
        intra_node: Link | None = None,
        inter_node: Link | None = None,
    ) -> "Cluster":
        """A cluster with what is not given taken from the device."""
        if nodes < 1 or devices_per_node < 1:
            raise BadInput(f"nodes: {nodes}, devices on each: {devices_per_node}; a cluster has at least one device")
        return cls(
            name=name or f"{nodes}x{devices_per_node}x{device.name}",
            nodes=nodes,
            devices_per_node=devices_per_node,
            device=device,
            intra_node=intra_node or device.intra_node,
            inter_node=inter_node or device.inter_node,
            memory_limit_bytes=_usable(device, nodes * devices_per_node),
        )

    @classmethod
    def load(cls, text: str, *, calibrated: bool = True) -> "Cluster":
        """A cluster from what a command line takes: a file or a preset; without its profile unless `calibrated`."""
        path = Path(text)
        if path.is_file() or path.suffix in (".yaml", ".yml") or os.sep in text:
            return cls.from_yaml(path, calibrated=calibrated)
        return cls.preset(text)

    @classmethod
    def preset(cls, text: str) -> "Cluster":
        """`[NODESx]DEVICESxNAME` of a catalogue device, such as 8xh100 or 2x8xa100-80; or `cpu:N`."""
        if local := re.fullmatch(r"cpu:(\d+)", text):
            return cls.of(device_named("cpu"), devices_per_node=int(local[1]), name=text)
        if not (parts := re.fullmatch(r"(?:(\d+)x)?(\d+)x(\D.*)", text)):
            raise BadInput(f"'{text}' is neither a file nor a preset such as 8xh100, 2x8xh100 or cpu:4")
        try:
            device = device_named(parts[3])
        except BadInput as error:
            raise BadInput(f"preset '{text}': {error}") from None
        return cls.of(device, nodes=int(parts[1] or 1), devices_per_node=int(parts[2]), name=text)

    @classmethod
    def detect(cls) -> "Cluster":
        """The cluster that this process runs on, counted by torchrun's variables; CPU processes if there is no GPU."""
        import torch  # here: a plan for a cluster elsewhere needs no torch

        world = _environment("WORLD_SIZE")
        if not torch.cuda.is_available():
            return cls.preset(f"cpu:{world or 1}")
        visible = torch.cuda.device_count()
        local = _environment("LOCAL_WORLD_SIZE") or min(world or visible, visible)
        world = world or local
        if local > visible:
            raise BadInput(f"LOCAL_WORLD_SIZE={local}, but this machine has {visible} GPUs: start fewer processes")
        if world % local:
            raise BadInput(f"WORLD_SIZE={world} is not a multiple of {local} processes per node")
        title = torch.cuda.get_device_name(0)
        found = [device for device in CATALOGUE.values() if title in device.driver_names]
        if not found:
            raise BadInput(f"the GPU '{title}' is not in the catalogue: describe it in a cluster file (device: ...)")
        device = replace(found[0], memory_bytes=torch.cuda.get_device_properties(0).total_memory)
        return cls.of(device, nodes=world // local, devices_per_node=local)

    @classmethod
    def from_yaml(cls, path: str | Path, *, calibrated: bool = True) -> "Cluster":
        """The cluster that a file describes, see the top of this module; without its profile unless `calibrated`."""
        table = _read(path)
        nodes = table.whole("nodes", 1)
        links = table.table("links", optional=True)
        links.allow("intra_node", "inter_node")
        table.allow("name", "nodes", "devices_per_node", "device", "memory_limit_gib", "links", "profile")
        device = _device(table, links, nodes)
        limit_gib = table.number("memory_limit_gib", None)
        cluster = cls.of(
            device,
            nodes=nodes,
            devices_per_node=table.whole("devices_per_node"),
            name=table.text("name", Path(path).stem),
            intra_node=_link(links, "intra_node", device.intra_node),
            inter_node=_link(links, "inter_node", device.inter_node),
        )
        if calibrated and "profile" in table.values:
            cluster = cluster.with_profile(Profile.from_yaml(Path(path).parent / table.text("profile")))
        if limit_gib is None:
            return cluster
        try:
            return cluster.with_memory_limit(round(limit_gib * GIB))
        except BadInput as error:
            raise BadInput(f"{table.where}memory_limit_gib: {error}") from None

    @property
    def lent(self) -> float:
        """How many times faster a device is, at most, while the others of its node wait; GPUs share nothing."""
        if self.profile is None or self.device.kind != "cpu":
            return 1.0
        return self.profile.lent(self.devices, self.devices_per_node)

    def with_profile(self, profile: Profile) -> "Cluster":
        """The same cluster with what was measured on it, and the memory limit that this leaves.

        Raises BadInput where that was another device.
        """
        device = profile.applied_to(self.device)
        return replace(self, device=device, memory_limit_bytes=_usable(device, self.devices), profile=profile)

    def with_memory_limit(self, memory_limit_bytes: int) -> "Cluster":
        """The same cluster where live tensors may fill this many bytes of each device."""
        if memory_limit_bytes <= 0:
            raise BadInput(f"a memory limit of {memory_limit_bytes} bytes: it must be positive")
        if self.device.kind == "cuda" and memory_limit_bytes > self.device.memory_bytes:
            raise BadInput(
                f"a memory limit of {memory_limit_bytes / GIB:.1f} GiB is more than the "
                f"{self.device.memory_bytes / GIB:.1f} GiB of {self.device.name}"
            )
        return replace(self, memory_limit_bytes=memory_limit_bytes)


def _usable(device: Device, devices: int) -> int:
    usable = usable_bytes(device, EXPECTED_COMMUNICATORS if devices > 1 else 0)
    if usable <= 0:
        raise BadInput(f"{device.name} has {device.memory_bytes / GIB:.1f} GiB: context and NCCL leave nothing of it")
    return usable


def _environment(variable: str) -> int | None:
    """A count that torchrun sets, None where it has not."""
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise BadInput(f"{variable}={text}: expected a positive whole number")
    return int(text)


@dataclass(frozen=True)
class _Table:
    """A mapping of a cluster file, with the place that an error should name: "cluster.yaml: links." """

    where: str
    values: Mapping[str, object]

    def allow(self, *known: str) -> None:
        unknown = [str(key) for key in self.values if key not in known]
        if not unknown:
            return
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise BadInput(f"{self.where}{', '.join(unknown)}: not known; {hint}")

    def table(self, key: str, *, optional: bool = False) -> "_Table":
        value = self.values.get(key, {} if optional else None)
        if not isinstance(value, dict):
            raise BadInput(f"{self.where}{key}: expected a mapping, got {value!r}")
        return _Table(f"{self.where}{key}.", value)

    def number(self, key: str, default: float | None) -> float | None:
        value = self.values.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadInput(f"{self.where}{key}: expected a positive number, got {value!r}")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise BadInput(f"{self.where}{key}: missing; expected a positive whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{self.where}{key}: expected a positive whole number, got {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value:
            raise BadInput(f"{self.where}{key}: expected a name, got {value!r}")
        return value


def _read(path: str | Path) -> _Table:
    """The top mapping of a YAML file."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise BadInput(f"{path}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise BadInput(f"{path}: not valid YAML{line}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{path}: expected a mapping with devices_per_node and device, got {values!r}")
    return _Table(f"{path}: ", values)


def _link(links: _Table, key: str, default: Link) -> Link:
    """A link of the file; what it leaves out is the device's."""
    link = links.table(key, optional=True)
    link.allow("gb_per_s", "latency_us")
    gb_per_s, latency_us = link.number("gb_per_s", None), link.number("latency_us", None)
    return Link(
        bytes_per_s=default.bytes_per_s if gb_per_s is None else gb_per_s * 1e9,
        latency_s=default.latency_s if latency_us is None else latency_us * 1e-6,
    )


def _device(table: _Table, links: _Table, nodes: int) -> Device:
    """The device of a file: a catalogue entry, one with changes, or one given by its numbers."""
    if not isinstance(table.values.get("device"), dict):
        return _catalogued(table, "device")
    own = table.table("device")
    own.allow("name", "like", "tflop_per_s", "memory_gib", "memory_gb_per_s", "sms")
    name = own.text("name")
    peaks = own.table("tflop_per_s", optional=True)
    peaks.allow("bf16", "fp16", "tf32", "fp32")
    flop_per_s = {key: value * 1e12 for key in peaks.values if (value := peaks.number(key, None)) is not None}
    memory_gib, memory_gb_per_s = own.number("memory_gib", None), own.number("memory_gb_per_s", None)
    if "like" in own.values:
        base = _catalogued(own, "like")
        return replace(
            base,
            name=name,
            flop_per_s=tuple((dict(base.flop_per_s) | flop_per_s).items()),
            memory_bytes=base.memory_bytes if memory_gib is None else round(memory_gib * GIB),
            memory_bytes_per_s=base.memory_bytes_per_s if memory_gb_per_s is None else memory_gb_per_s * 1e9,
            sms=own.whole("sms", base.sms),
            driver_names=(),
            source=f"{own.where}: numbers of the user, the rest as {base.name}",
        )
    missing = [key for key in ("tflop_per_s", "memory_gib", "memory_gb_per_s", "sms") if key not in own.values]
    if missing:
        raise BadInput(f"{own.where[:-1]}: {', '.join(missing)} missing; or name a catalogue device with `like`")
    if "fp32" not in flop_per_s:
        raise BadInput(f"{peaks.where[:-1]}: fp32 missing; vector operators run at it")
    assert memory_gib is not None and memory_gb_per_s is not None, "checked above"
    given = {}
    for key in ("intra_node", "inter_node") if nodes > 1 else ("intra_node",):
        link = links.table(key, optional=True)
        if not {"gb_per_s", "latency_us"} <= link.values.keys():
            raise BadInput(f"{link.where[:-1]}: gb_per_s and latency_us are needed beside a device given by numbers")
        given[key] = _link(links, key, Link(1.0, 1.0))
    return gpu(
        name,
        flop_per_s=flop_per_s,
        memory_bytes=memory_gib * GIB,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        sms=own.whole("sms"),
        intra_node=given["intra_node"],
        inter_node=given.get("inter_node", given["intra_node"]),
        fabric=PCIE,
        efficiency=assumed_efficiency(0.65),  # between A100 and B200
        driver_names=(),
        source=f"{own.where}: numbers of the user; efficiencies assumed",
    )


def _catalogued(table: _Table, key: str) -> Device:
    name = table.text(key)
    try:
        return device_named(name)
    except BadInput as error:
        raise BadInput(f"{table.where}{key}: {error}") from None
