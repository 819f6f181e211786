"""What a search found: the plans it priced, the best of them, and what is said of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodels.cluster import Cluster
from passes.cutting import Uncut
from passes.memory import StepBytes
from passes.step import StepSeconds
from passes.variant import Variant


@dataclass(frozen=True)
class Candidate:
    """A priced variant; `why_not` says why it was not chosen."""

    variant: Variant
    seconds: StepSeconds
    bytes: StepBytes | None
    why_not: str = ""
    played: bool = True  # of a pipeline, whether its schedule was; else the seconds are a bound
    own: bool = True  # whether the sharding was solved for its mesh
    recompute_s: float = 0.0  # beside them, what memory asks for at least
    uncut: Uncut | None = None  # what a pipeline was cut from


@dataclass(frozen=True)
class Found:
    """The best variant, what nearly won, and how the search went."""

    best: Candidate
    by_rank: tuple[StepBytes, ...]  # of the best one, on every pp rank
    others: tuple[Candidate, ...]
    enumerated: int
    visited: int  # of those, whose price was worked out
    unvisited: int  # of those, which might be faster, but the search was stopped
    solved: int  # sharding programmes
    bound_s: float
    proved: bool


def nearly(best: Candidate, runners: Sequence[Candidate], rejected: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """What is told beside the best plan: those that fit with why they are slower, and faster ones that do not fit."""
    said = [replace(c, why_not=reason(best, c)) for c in runners]
    shown = {(c.variant.settled.pair, c.variant.zero, c.variant.group) for c in (best, *runners)}
    for one in sorted(rejected, key=lambda c: c.seconds.total):
        key = (one.variant.settled.pair, one.variant.zero, one.variant.group)
        if key not in shown and one.seconds.total < best.seconds.total:
            shown.add(key)
            said.append(one)
    return tuple(said[:5])


def closest(cluster: Cluster, rejected: Sequence[Candidate]) -> str:
    """The sentence for "nothing fits": which constraint binds and by how much."""
    head = (
        f"no plan fits {cluster.devices} {cluster.device.name} ({for_people(cluster.memory_limit_bytes)} usable each)"
    )
    one = min(rejected, key=lambda c: c.bytes.peak if c.bytes else 0)
    assert one.bytes is not None
    variant, held = one.variant, one.bytes
    recompute = ", full recompute" if any(variant.recompute) else ""
    zero = f", ZeRO-{variant.zero} over {variant.group}" if variant.zero else ""
    pair = variant.settled.pair
    pp = f"pp {pair.pp} ({variant.schedule}), " if variant.staging else ""
    named = {
        "parameters": held.static.parameters,
        "gradients": held.static.gradients,
        "optimizer": held.static.optimizer,
        "activations": held.activations,
        "transients": held.logits + held.transient + held.static.buffers + held.inputs,
    }
    parts = ", ".join(f"{k} {for_people(v)}" for k, v in named.items() if v)
    return (
        f"{head}.\n  The closest ({pp}dp {pair.dp}, tp {pair.tp}{zero}{recompute}, microbatch {pair.microbatch}) "
        f"needs {for_people(held.peak)} on {'the fullest' if pp else 'every'} device: {parts}."
    )


def reason(best: Candidate, other: Candidate) -> str:
    """Why a plan that fits is slower: where it loses most."""
    names = {
        "compute": "more compute per device",
        "tp_comm": "more tp communication",
        "dp_comm": "dp communication not hidden",
        "pp_comm": "more pp communication",
        "bubble": "a longer bubble",
        "recompute": "more recompute",
        "optimizer": "a longer optimizer step",
    }
    lost = {k: getattr(other.seconds, k) - getattr(best.seconds, k) for k in names}
    if max(lost.values()) < 1e-3 * best.seconds.total:
        return (
            "as fast, with more memory"
            if other.bytes and best.bytes and other.bytes.peak > best.bytes.peak
            else "as fast"
        )
    return names[max(lost, key=lambda k: lost[k])]


def for_people(bytes_: float) -> str:
    """Bytes for people, three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if bytes_ >= 0.1 * unit or unit == 2**10:
            return f"{bytes_ / unit:.3g} {name}"
    raise AssertionError("unreachable")
