"""The pipeline schedules of torch.distributed.pipelining, as tables for the cost model.

No order is written here again: torch's own step runs on stages that only write down what they are asked for, one rank
after the other, without a process group.

What torch does (2.13):

    single     gpipe and 1f1b run one stage per rank. They wait for a receive right after posting it; 1f1b posts the
               send of one microbatch and the receive of another as one batch, and waits for both.
    multi      The others post a receive about when its sender computes, and wait for it where it is needed. Where
               both share a queue, it holds up the sends that come later. The option `defer_pp_recv` is no way out:
               it has neighbours post in different orders, so that they wait for each other.
    split      zbv and interleaved_zb split the backward, which torch.compile does not allow. On stage 0, I does
               nothing and W is the whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from inspect import signature
from types import FunctionType
from typing import Any, cast

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from costmodels.schedules import Action, Post, Step, Table, Transfer, Wait, Work


@dataclass(frozen=True)
class TorchSchedule:
    """One of torch's schedules."""

    torch_name: str  # in torch.distributed.pipelining
    single: bool = False  # takes one stage per rank
    split: bool = False  # computes the gradients of weights apart
    lingers: bool = False  # holds the gradients that it sent and received last until the next backward
    hoards: bool = False  # holds the works of all its sends until the end
    rounds: bool = False  # goes through the microbatches in rounds of equal size
    style: str = "loop"  # how stages are laid on ranks: loop 0 1 0 1, v 0 1 1 0


SCHEDULES: Mapping[str, TorchSchedule] = {
    "gpipe": TorchSchedule("ScheduleGPipe", single=True, hoards=True),
    "1f1b": TorchSchedule("Schedule1F1B", single=True, lingers=True),
    "interleaved": TorchSchedule("ScheduleInterleaved1F1B", rounds=True),
    "zbv": TorchSchedule("ScheduleZBVZeroBubble", split=True, style="v"),
    "interleaved_zb": TorchSchedule("ScheduleInterleavedZeroBubble", split=True, rounds=True),
}


def refusal(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> str:
    """Why torch cannot run the schedule with these counts; "" if it can."""
    schedule = SCHEDULES[name]
    if schedule.single and stages_per_rank != 1:
        return f"{name} runs 1 stage per rank, not {stages_per_rank}"
    if name == "zbv" and stages_per_rank != 2:
        return f"{name} runs 2 stages per rank, not {stages_per_rank}"
    if microbatches < 1:
        return f"{name} needs a microbatch"
    if name == "1f1b" and microbatches < ranks:
        return f"{name} on {ranks} ranks needs {ranks} microbatches or more, not {microbatches}"
    if schedule.rounds and _left_over(ranks, microbatches):
        below, above = (
            next(m for m in range(microbatches, last, step) if not _left_over(ranks, m))
            for last, step in ((0, -1), (2 * microbatches, 1))
        )
        rounds = f"{microbatches // ranks} equal rounds"
        return f"{name} on {ranks} ranks cannot run {microbatches} microbatches in {rounds}; use {below} or {above}"
    return ""


def round_size(ranks: int, microbatches: int) -> int:
    """Microbatches of a round, where a schedule goes through them in rounds: as many as ranks, or a few more."""
    return microbatches // max(1, microbatches // ranks)


def _left_over(ranks: int, microbatches: int) -> int:
    return microbatches % max(1, microbatches // ranks)


@cache
def rank_of(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The pp rank of every stage."""
    places = generate_stage_to_rank_mapping(ranks, ranks * stages_per_rank, SCHEDULES[name].style)
    return tuple(places[stage] for stage in range(ranks * stages_per_rank))


@cache
def least_in_flight(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[float, ...]:
    """Of every rank, how many microbatches of all its stages it holds when it holds most, or a few less.

    A microbatch in one of v stages counts as 1 / v. From the orders of torch 2.13, without playing them.
    """
    m, p, v = microbatches, ranks, stages_per_rank
    round_ = round_size(p, m)
    of_rank: Mapping[str, Callable[[int], float]] = {
        "gpipe": lambda r: m,
        "1f1b": lambda r: p - r,
        "interleaved": lambda r: ((v - 1) * round_ + 2 * (p - 1 - r) + 1) / v,
        "interleaved_zb": lambda r: p,
        "zbv": lambda r: min(p, (m + 1 + r) / 2),
    }
    return tuple(min(m, of_rank[name](rank)) for rank in range(p))


@lru_cache(maxsize=64)
def table(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Table:
    """What torch does on every rank. The counts must not be refused."""
    fault = refusal(name, ranks, stages_per_rank, microbatches)
    assert not fault, fault
    places = rank_of(name, ranks, stages_per_rank)
    schedule = _schedule(SCHEDULES[name], _stages(places, 0), microbatches)
    assert SCHEDULES[name].single or schedule.stage_index_to_group_rank == dict(enumerate(places))
    return Table(tuple(_program(schedule, _stages(places, rank), microbatches) for rank in range(ranks)), places)


# What is private in torch and used below, all of it in 2.13's schedules.py: the names in _quick and _program, the
# attributes of a schedule that _program sets, and what its steps ask of a stage, which is what _Stage has.


class _Stage:
    """Stands in for a PipelineStage: computes and sends nothing, and writes down in `steps` what it is asked for."""

    submod = None
    has_backward = True

    def __init__(self, stage: int, places: Sequence[int], steps: list[Step]) -> None:
        self.stage_index, self.num_stages = stage, len(places)
        self.group_rank, self.group_size = places[stage], max(places) + 1
        self.is_first, self.is_last = stage == 0, stage == len(places) - 1
        self.places, self.steps = places, steps

    def transfer(self, source: int, target: int, work: Work, microbatch: int) -> list[Transfer]:
        if min(source, target) < 0 or max(source, target) == self.num_stages:
            return []
        return [Transfer(source, work, microbatch, self.places[source], self.places[target])]

    def get_fwd_recv_ops(self, microbatch: int) -> list[Transfer]:
        return self.transfer(self.stage_index - 1, self.stage_index, Work.FORWARD, microbatch)

    def get_fwd_send_ops(self, microbatch: int) -> list[Transfer]:
        return self.transfer(self.stage_index, self.stage_index + 1, Work.FORWARD, microbatch)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Transfer]:
        return self.transfer(self.stage_index + 1, self.stage_index, Work.BACKWARD, microbatch)

    def get_bwd_send_ops(self, microbatch: int) -> list[Transfer]:
        return self.transfer(self.stage_index, self.stage_index - 1, Work.BACKWARD, microbatch)

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.steps.append(Action(self.stage_index, Work.FORWARD, microbatch))

    def backward_one_chunk(self, microbatch: int, *, full_backward: bool = True, **_: object) -> None:
        self.steps.append(Action(self.stage_index, Work.BACKWARD if full_backward else Work.INPUT, microbatch))

    def backward_weight_one_chunk(self, microbatch: int, **_: object) -> None:
        self.steps.append(Action(self.stage_index, Work.WEIGHT, microbatch))

    def nothing(self, *_: object) -> None: ...

    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = perform_reduce_grad = nothing


def _stages(places: Sequence[int], rank: int) -> list[_Stage]:
    """The stages of one rank, which write into one list."""
    steps: list[Step] = []
    return [_Stage(stage, places, steps) for stage, place in enumerate(places) if place == rank]


def _schedule(kind: TorchSchedule, stages: list[_Stage], microbatches: int) -> Any:
    of_torch = getattr(torch_schedules, kind.torch_name)
    schedule = _quick(of_torch, len(stages))
    return schedule(stages[0] if kind.single else stages, microbatches, loss_fn=lambda output, target: None)


def _quick(of_torch: type, stages_per_rank: int) -> type:
    """The same class, where the search for stages to prefetch ends when it has met all stages of the rank.

    torch's looks for three; where there are two it goes to the end of the step for every action, which takes seconds.
    """
    prepare = getattr(of_torch, "_prepare_schedule_with_comms", None)
    prefetch = torch_schedules._add_unshard_reshard
    if prepare is None or stages_per_rank >= signature(prefetch).parameters["max_active_stages"].default:
        return of_torch
    quick = _rebound(prepare, _add_unshard_reshard=partial(prefetch, max_active_stages=stages_per_rank))
    return type(of_torch.__name__, (of_torch,), {"_prepare_schedule_with_comms": quick})


def _program(schedule: Any, stages: list[_Stage], microbatches: int) -> tuple[Step, ...]:
    """What a step of the schedule does on the rank of these stages."""
    steps = stages[0].steps

    def post(transfers: list[Transfer], desc: str = "") -> list[Transfer]:
        steps.extend([Post(tuple(transfers))] if transfers else [])
        return transfers

    def post_by_peer(transfers: list[Transfer], desc: str = "") -> dict[int, list[Transfer]]:
        return {0: post(transfers)}  # a stand-in has one neighbour on each side

    def wait(transfers: list[Transfer]) -> None:
        steps.extend([Wait(tuple(transfers))] if transfers else [])

    schedule._stage, schedule._stages, schedule.rank = stages[0], stages, stages[0].group_rank
    for side in ("forward", "backward"):  # what they are for is inference of shapes
        setattr(schedule, f"_stage_{side}_initialized", True)
        setattr(schedule, f"_stages_{side}_initialized", True)
    step = _rebound(
        type(schedule)._step_microbatches,
        _batch_p2p=post,
        _sorted_batch_p2p=post_by_peer,
        _wait_batch_p2p=wait,
        record_function=nullcontext,
    )
    step(schedule, target_mbs=[None] * microbatches)
    return tuple(steps)


def _rebound(function: FunctionType, **names: object) -> Callable[..., None]:
    """A function of torch in which these global names mean something else; torch itself stays as it is."""
    unknown = names.keys() - function.__globals__.keys()
    assert not unknown, f"torch's {function.__name__} does not know {sorted(unknown)}: its schedules have changed"
    changed = function.__globals__ | names
    return cast(
        Callable[..., None],
        FunctionType(function.__code__, changed, function.__name__, function.__defaults__, function.__closure__),
    )
