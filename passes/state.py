"""What the passes hand on, and the one runner that applies them and keeps their promises."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from costmodels.cluster import Cluster
from passes.batch import BatchInfo
from passes.blocks import Blocked
from passes.capture import Captured
from passes.found import Found
from passes.graph import Graph, Op
from passes.lower import Lowered
from passes.plan import Fix, Plan


@dataclass(frozen=True)
class Task:
    """What the user asked for."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Any] | None
    cluster: Cluster
    global_batch: int
    precision: str
    optimizer: str
    fix: Fix
    target: str = ""
    seq_len: int | None = None
    memory_limit_gib: float | None = None
    fused: bool = True  # whether the optimizer is, so that it holds no temporaries


@dataclass(frozen=True)
class State:
    """Grows from pass to pass; None is what no pass has made yet."""

    task: Task
    progress: Callable[[str], None]
    deadline: Callable[[], bool]
    captured: Captured | None = None
    graph: Graph | None = None  # normalized, the normalizers taken out
    batch: BatchInfo | None = None
    prologue: tuple[Op, ...] = ()
    blocked: Blocked | None = None
    found: Found | None = None
    lowered: Lowered | None = None
    plan: Plan | None = None
    program: str | None = None
    notes: tuple[str, ...] = ()


Promise = Callable[[State], None]


@dataclass(frozen=True)
class Pass:
    """One step from state to state, and what holds from then on."""

    apply: Callable[[State], State]
    ensures: tuple[Promise, ...] = ()

    @property
    def name(self) -> str:
        return self.apply.__name__.rstrip("_").upper()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Python's cycle collector looks less often: many small objects are made here, and hardly any dropped."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run(
    passes: tuple[Pass, ...], state: State, watch: Callable[[str, State], None] = lambda name, state: None
) -> State:
    """Apply the passes in order; after each, check its promises and all earlier ones again."""
    held: tuple[Promise, ...] = ()
    with rare_collections():
        for one in passes:
            state = one.apply(state)
            held += one.ensures
            for check in held:
                try:
                    check(state)
                except AssertionError as broken:
                    raise AssertionError(f"after {one.name}: {check.__name__}: {broken}") from broken
            watch(one.name, state)
    return state


def made(value: Any, what: str) -> Any:
    """A part of the state that an earlier pass must have made."""
    assert value is not None, f"{what} is not there yet"
    return value
