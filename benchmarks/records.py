"""Published training runs, as records in YAML tell of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from decoder import Shape
from stacks import Stack, stack_of

from costmodels.cluster import Cluster
from costmodels.devices import GIB, LAUNCH_S, device_named

# catalogue names; NVLink of an A800 or H800 is cut to 400 GB/s both ways (NVIDIA A800 data sheet)
DEVICES: Mapping[str, tuple[str, float | None]] = {
    "A100-80GB-SXM": ("a100-80", None),
    "A100-40GB-SXM": ("a100-40", None),
    "A800-80GB-SXM": ("a100-80", 200e9),
    "H100-80GB-SXM": ("h100", None),
    "H100-96GB-HBM2e-500W": ("h100-hbm2e-96", None),
    "H800-80GB": ("h100", 200e9),
    "H200-141GB-SXM": ("h200", None),
    "B200": ("b200", None),
    "GB200": ("gb200", None),
}
MEMORY_KINDS = ("allocated", "reserved", "smi")


@dataclass(frozen=True)
class Run:
    """A record that can be priced."""

    id: str
    source: str
    gpu: str
    parameters_b: float
    shape: Shape
    stack: Stack
    cluster: Cluster
    global_batch: int
    precision: str
    fix: tuple[tuple[str, int | str], ...]
    measured_s: float | None
    measured_gib: float | None
    memory_kind: str
    first_rank: bool  # the memory is that of the first stage, not of the fullest
    out_of_memory: bool
    sequence_parallel: bool | None
    core_again: bool  # attention is not fused, and its core recomputed
    stated: bool  # nothing of it is unknown or flagged
    flagged: bool  # the data doubt it
    topology: str  # runs of one model on one cluster are ranked among themselves
    grid: str  # and those of one model on all of one GPU, where no doubt is cast on them


class Skipped(Exception):
    """Why a record is not priced."""


class Fields(dict[str, Any]):
    """Of a record or a part of it; what is left out is not stated."""

    def __missing__(self, name: str) -> None:
        return None


# what must be a whole number, and what any number, if it is stated; both above 0
COUNTS = ("global_batch", "micro_batch", "dp", "tp", "pp", "cp", "vpp", "num_gpus", "gpus_per_node", "zero_group")
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "seq_len")
MEASURES = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s_total", "peak_memory_gib")


def checked(fields: Fields, whole: tuple[str, ...] = (), measures: tuple[str, ...] = ()) -> Fields:
    """The same fields. Raises Skipped where one is no such number."""
    for names, kinds, what in ((whole, int, "a whole number"), (measures, int | float, "a number")):
        for name in names:
            value = fields[name]
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or not value > 0):
                raise Skipped(f"{name} is {value!r}, not {what} above 0")
    return fields


def read(fields: Mapping[str, Any]) -> Run:
    """Raises Skipped with the reason."""
    record = checked(Fields(fields), COUNTS)
    model = checked(Fields(record["model"] or {}), SIZES, ("params_b",))
    measured = checked(Fields(record["measured"] or {}), measures=MEASURES)
    record |= {"model": model, "measured": measured}
    if record["zero_stage"] not in (None, 0, 1, 2, 3):
        raise Skipped(f"zero_stage is {record['zero_stage']!r}")
    if model["experts"]:
        raise Skipped("mixture of experts")
    if model["mla"]:
        raise Skipped("latent attention")
    if record["precision"] not in ("bf16", "fp16"):
        raise Skipped(f"precision {record['precision'] or 'not stated'}")
    if (record.get("cp") or 1) > 1:
        raise Skipped("context parallelism")
    if record.get("offload") not in (None, "none"):
        raise Skipped("offload")
    for name in ("global_batch", "micro_batch", "dp", "tp", "pp", "num_gpus", "zero_stage", "recompute"):
        if record.get(name) is None:
            raise Skipped(f"{name} not stated")
    for name in ("layers", "hidden", "heads", "ffn_hidden", "vocab", "seq_len"):
        if model.get(name) is None:
            raise Skipped(f"{name} of the model not stated")
    dp, tp, pp = record["dp"], record["tp"], record["pp"]
    if dp * tp * pp != record["num_gpus"]:
        raise Skipped("dp * tp * pp is not the number of GPUs")
    if record["global_batch"] % (dp * record["micro_batch"]):
        raise Skipped("the microbatch does not divide the batch")
    recompute, fused = str(record["recompute"]), record.get("flash_attention")
    core_again = False
    if recompute.startswith("selective (attention core)"):
        core_again = fused is False
        recompute, fused = "none", True  # what is recomputed is what fused attention never keeps
    if recompute not in ("none", "full"):
        raise Skipped(f"recompute {recompute}")
    fix: dict[str, int | str] = {"pp": pp, "dp": dp, "tp": tp, "zero": record["zero_stage"], "recompute": recompute}
    fix["microbatch"] = record["micro_batch"]
    if fix["zero"] and dp == 1:
        fix["zero"] = 0
    elif record.get("zero_group") and fix["zero"]:
        fix["zero_group"] = record["zero_group"]
    if pp > 1:
        if record.get("vpp") is None:
            raise Skipped("virtual stages not stated")
        fix["virtual_stages"] = record["vpp"]
        fix["schedule"] = "1f1b" if record["vpp"] == 1 else "interleaved"
    stack = stack_of(record)
    kv_heads, heads = model.get("kv_heads") or model["heads"], model["heads"]
    shape = Shape(
        layers=model["layers"],
        hidden=model["hidden"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.get("head_dim") or model["hidden"] // heads,
        ffn=model["ffn_hidden"],
        vocab=-(-model["vocab"] // (stack.vocabulary_multiple * tp)) * stack.vocabulary_multiple * tp,
        sequence=model["seq_len"],
        gated=bool(model.get("gated_mlp")),
        tied=bool(model.get("tied_embeddings")),
        learned_positions=model.get("learned_pos") or 0,
        fused=fused is not False,
        fused_gate=stack.fused_gate,
        loss=stack.loss,
        composite_norm=stack.composite_norm,
    )
    if shape.hidden % heads and not model.get("head_dim"):
        raise Skipped("heads do not divide the hidden size")
    kind, gpu = str(measured.get("memory_kind") or ""), str(record["gpu"]).partition("-SXM")[0]
    # what the record is in doubt about is not compared
    doubted = "memory" in (doubts := str(record.get("known_issues"))) and "memory is fine" not in doubts
    measured_gib = None if doubted else measured.get("peak_memory_gib")
    return Run(
        id=record["id"],
        source=record["source"],
        gpu=record["gpu"],
        parameters_b=model.get("params_b") or 0.0,
        shape=shape,
        stack=stack,
        cluster=cluster_of(record, stack),
        global_batch=record["global_batch"],
        precision="bf16",  # fp16 moves and holds as much
        fix=tuple(fix.items()),
        measured_s=seconds_of(record),
        measured_gib=measured_gib,
        memory_kind=next((k for k in MEMORY_KINDS if k in kind.replace("nvidia-smi", "smi")), ""),
        first_rank="rank 0" in kind,
        out_of_memory=bool(measured.get("oom")),
        sequence_parallel=record.get("sequence_parallel") if tp > 1 else None,
        core_again=core_again,
        stated=fused is not None and not record.get("known_issues"),
        flagged=bool(record.get("known_issues")),
        topology=f"{record['source']} {model['layers']}x{model['hidden']}, {heads} heads, {record['num_gpus']} {gpu}",
        grid=f"{record['source']} {model['layers']}x{model['hidden']}, {model['seq_len']} tokens, any number of {gpu}",
    )


def seconds_of(record: Mapping[str, Any]) -> float | None:
    """Of a step, as published or from the published throughput."""
    measured, model = record["measured"], record["model"]
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    tokens = record["global_batch"] * model["seq_len"]
    if measured.get("tokens_per_s_per_gpu"):
        return float(tokens / measured["tokens_per_s_per_gpu"] / record["num_gpus"])
    if measured.get("tokens_per_s_total"):
        return float(tokens / measured["tokens_per_s_total"])
    return None


def cluster_of(record: Mapping[str, Any], stack: Stack) -> Cluster:
    gpu, local = record["gpu"], min(record["gpus_per_node"] or 8, record["num_gpus"])
    if gpu not in DEVICES:
        raise Skipped(f"{gpu} is not in the catalogue")
    name, within = DEVICES[gpu]
    device = device_named(name)
    table = device.efficiency
    kernel = replace(table.attention, peak_fraction=table.attention.peak_fraction * stack.attention)
    device = replace(device, efficiency=replace(table, attention=kernel))
    if record.get("torch_compile"):
        device = replace(device, launch_s=LAUNCH_S)
    if not stack.overlaps:
        device = replace(device, overlap_slowdown=math.inf)
    if context := re.search(r"CUDA context, about ([\d.]+) GiB", str(record["measured"].get("memory_kind"))):
        device = replace(device, fixed_overhead_bytes=round(float(context[1]) * GIB))
    nodes, left = divmod(record["num_gpus"], local)
    if left:
        raise Skipped("the GPUs do not fill their nodes")
    intra = replace(device.intra_node, bytes_per_s=within) if within else None
    between = inter_node_bytes_per_s(str(record["interconnect"] or ""), local)
    inter = replace(device.inter_node, bytes_per_s=between) if between else None
    return Cluster.of(device, nodes=nodes, devices_per_node=local, intra_node=intra, inter_node=inter)


def inter_node_bytes_per_s(text: str, local: int) -> float | None:
    """What a GPU has of its node's network, from words such as `4x100 Gb/s RoCE per node`; None where it says nothing.

    Omni-Path is 100 Gb/s a link (Intel), HDR InfiniBand 200.
    """
    if found := re.search(r"(?:(\d+)x)?(\d+) Gb/s.*per (node|GPU)", text):
        links, gigabits, per = int(found[1] or 1), int(found[2]), found[3]
        return links * gigabits * 1e9 / 8 / (local if per == "node" else 1)
    if found := re.search(r"Omni-Path, (\d+) links per node", text):
        return int(found[1]) * 100e9 / 8 / local
    if found := re.search(r"(\d+)x HDR", text):
        return int(found[1]) * 200e9 / 8 / local
    return None
