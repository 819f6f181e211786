"""What a pipeline schedule costs and holds, and whether one of its ranks would wait for ever.

A schedule is one program per pp rank: actions on microbatches, transfers posted, transfers waited for.

    check      A rank that posts goes no further until the other side has posted the same. Nothing real is stricter:
               NCCL holds the host only when two ranks first meet, and its streams keep the order of posts, per rank
               at most. So what passes runs on every backend; all orders of torch 2.13 pass.
    simulate   Actions in order, each after what it waits for. A post stops nothing: its transfer starts once both
               ranks have got there and their queues are free, and takes its seconds.
    held       A microbatch from its forward to the end of its backward, of the weights where that is split off.

        seconds = compute + bubble + exposed

    compute    the actions of the busiest rank
    bubble     what the order of the actions alone adds: transfers instant, nobody queues
    exposed    the rest: transfers that are waited for, and queues
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

ROUNDING = 1e-12  # of a clock


class Work(Enum):
    """What is done to one microbatch in one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # whole
    INPUT = "I"  # the gradients of the stage's inputs
    WEIGHT = "W"  # the gradients of its weights


class Queue(Enum):
    """Which transfers wait for each other, though they could run at once.

    In ProcessGroupNCCL a communicator has one stream, and a stream keeps its order. "In eager initialization mode,
    unbatched P2P ops are [...] serialized with all other ops on this ProcessGroup" (its own warning).
    """

    FREE = "free"  # none: gloo
    PAIR = "pair"  # those of two ranks, and all batches of a rank: NCCL without device_id
    RANK = "rank"  # all of a rank: NCCL with device_id at init_process_group


@dataclass(frozen=True, slots=True)
class Action:
    stage: int
    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.work.value}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a stage made of a microbatch, on its way to the stage after (FORWARD) or before (BACKWARD) it."""

    stage: int
    work: Work
    microbatch: int
    source: int  # rank
    target: int

    def __str__(self) -> str:
        return f"{self.work.value}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Post:
    """Sends and receives that start together. Both kinds in one post: a batch, in a communicator of its own."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    transfers: tuple[Transfer, ...]


Step = Action | Post | Wait


@dataclass(frozen=True)
class Table:
    """What each pp rank does, in order."""

    programs: tuple[tuple[Step, ...], ...]
    rank_of: tuple[int, ...]  # of every stage

    @cached_property
    def ranks(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank computes, in order."""
        return tuple(tuple(step for step in program if isinstance(step, Action)) for program in self.programs)

    @cached_property
    def events(self) -> _Events:
        """One order of all that happens, which keeps the order of every rank; AssertionError where there is none."""
        return _Walk(self).events()


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch in one stage; input + weight may take longer than the whole backward."""

    forward: float
    backward: float
    input: float
    weight: float

    def of(self, work: Work) -> float:
        match work:
            case Work.FORWARD:
                return self.forward
            case Work.BACKWARD:
                return self.backward
            case Work.INPUT:
                return self.input
            case Work.WEIGHT:
                return self.weight


@dataclass(frozen=True)
class Lending:
    """Of ranks that share processors, those that wait lend them to those that compute.

    Neighbours on pp share, so many `together`. With all of them at work each takes the seconds of its stage; with
    fewer it is as much faster, up to `most` times.
    """

    most: float
    together: int


@dataclass(frozen=True)
class Timeline:
    """How long a step takes on the pp ranks."""

    seconds: float
    exposed_s: float  # of it, what transfers and their queues add
    busy_s: tuple[float, ...]  # of every rank
    finished_s: tuple[float, ...]  # when each rank is done, its sends included

    @property
    def compute_s(self) -> float:
        return max(self.busy_s)

    @property
    def bubble_s(self) -> float:
        """Below 0 where ranks that wait lend more than the busiest waits."""
        return self.seconds - self.exposed_s - self.compute_s


def check(table: Table) -> None:
    """AssertionError that says which rank would wait for what, or computes what it cannot have."""
    assert table.events  # building them is the check


def simulate(
    table: Table,
    stages: Sequence[StageSeconds],
    transfer_s: Sequence[float],
    queue: Queue = Queue.RANK,
    lending: Lending | None = None,
) -> Timeline:
    """The seconds of one step.

    stages: one per stage. transfer_s[i]: from stage i to i + 1, and back; not asked for where one rank has both.
    AssertionError where `check` raises it.
    """
    assert len(stages) == len(table.rank_of) == len(transfer_s) + 1, (len(stages), len(transfer_s), table.rank_of)
    if lending is not None:
        assert queue is Queue.FREE, "who lends a processor is on CPUs, where no transfer waits for another"
        busy_s = tuple(sum(stages[action.stage].of(action.work) for action in actions) for actions in table.ranks)
        finished, instant = (_Lent(table, stages, sent, lending).play() for sent in (transfer_s, [0.0] * len(stages)))
        return Timeline(max(finished), max(0.0, max(finished) - max(instant)), busy_s, finished)
    seconds_of = [stage.of(work) for work in Work for stage in stages]
    per_rank, queues = queue is Queue.RANK, queue is not Queue.FREE
    ranks = range(len(table.programs))
    busy, clock, reached = ([0.0 for _ in ranks] for _ in range(3))
    ordered = [0.0 for _ in ranks]  # the clocks if transfers were instant and nobody queued
    free_at = [0.0] * table.events.queues
    done = [0.0] * table.events.transfers
    ordered_done = list(done)
    for kind, rank, a, peer, b, transfer, boundary in table.events.order:
        if kind == _COMPUTE:
            seconds = seconds_of[a]
            busy[rank] += seconds
            clock[rank] += seconds
            ordered[rank] += seconds
        elif kind == _POST:
            reached[rank] = max(clock[rank], free_at[rank if per_rank else a]) if queues else clock[rank]
        elif kind == _TRANSFER:
            end = max(reached[rank], reached[peer]) + transfer_s[boundary]
            done[transfer], ordered_done[transfer] = end, ordered[rank]
            for q in (rank, peer) if per_rank else (a, b):
                free_at[q] = max(free_at[q], end)
        else:
            clock[rank] = max(clock[rank], done[transfer])
            ordered[rank] = max(ordered[rank], ordered_done[transfer])
    return Timeline(max(clock), max(clock) - max(ordered), tuple(busy), tuple(clock))


def least_seconds(stages: Sequence[StageSeconds], rank_of: Sequence[int], microbatches: int, *, split: bool) -> float:
    """What no order of the work beats: a rank starts when the first microbatch has come to it through all stages
    before its own, does all its work, and its last gradients go back through them.

    Where the backward is split, the gradients of its weights may wait until these have gone. With one stage per rank,
    what comes after the last forward (GPipe) or between two (1F1B) can only add to it.
    """
    ranks = max(rank_of) + 1
    busy, urgent, there, back = ([0.0] * ranks for _ in range(4))
    seen: set[int] = set()
    forward = backward = 0.0
    for stage, rank in zip(stages, rank_of, strict=True):
        if rank not in seen:
            seen.add(rank)
            there[rank], back[rank] = forward, backward
        urgent[rank] += stage.forward + (stage.input if split else stage.backward)
        busy[rank] += stage.forward + (stage.input + stage.weight if split else stage.backward)
        forward += stage.forward
        backward += stage.input if split else stage.backward
    return max(
        max(microbatches * busy[rank] + there[rank], microbatches * urgent[rank] + there[rank] + back[rank])
        for rank in range(ranks)
    )


def held(table: Table, bytes_per_stage: Sequence[int], split_bytes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Of every rank, the most bytes that the microbatches of all its stages hold at one moment.

    bytes_per_stage: of one microbatch, from its F to its B or W. split_bytes: of one more, from I to W.
    """
    further = split_bytes or [0] * len(bytes_per_stage)
    assert len(bytes_per_stage) == len(further) == len(table.rank_of), (bytes_per_stage, split_bytes, table.rank_of)
    most = []
    for actions in table.ranks:
        now = peak = 0
        for action in actions:
            whole, split = bytes_per_stage[action.stage], further[action.stage]
            now += {Work.FORWARD: whole, Work.INPUT: split}.get(action.work, 0)
            peak = max(peak, now)
            now -= {Work.BACKWARD: whole, Work.WEIGHT: whole + split}.get(action.work, 0)
        most.append(peak)
    return tuple(most)


class _Lent:
    """A step of ranks that share processors, from one end of an action or a transfer to the next."""

    def __init__(
        self, table: Table, stages: Sequence[StageSeconds], transfer_s: Sequence[float], lending: Lending
    ) -> None:
        self.programs, self.stages, self.transfer_s, self.lending = table.programs, stages, transfer_s, lending
        self.at = [0 for _ in self.programs]  # the step that each rank is at
        self.left = [0.0 for _ in self.programs]  # of the action that it is in
        self.finished = [0.0 for _ in self.programs]
        self.posted: set[Transfer] = set()  # on one side
        self.arrives: dict[Transfer, float] = {}
        self.under_way: list[float] = []  # when these arrive that are not there yet
        self.now = 0.0

    def play(self) -> tuple[float, ...]:
        """When each rank is done."""
        while True:
            while any([self.advance(rank) for rank, _ in enumerate(self.programs)]):
                pass
            pace = [self.pace(rank) for rank, _ in enumerate(self.programs)]
            ends = {rank: self.now + left / pace[rank] for rank, left in enumerate(self.left) if left}
            self.under_way = [arrives for arrives in self.under_way if arrives > self.now]
            upcoming = [*ends.values(), *self.under_way]
            if not upcoming:
                assert all(at == len(program) for at, program in zip(self.at, self.programs, strict=True)), self.at
                return tuple(self.finished)
            end = min(upcoming)
            for rank, own in ends.items():
                over = own <= end * (1 + ROUNDING)
                self.left[rank] = 0.0 if over else self.left[rank] - (end - self.now) * pace[rank]
                self.finished[rank] = end
            self.now = end

    def pace(self, rank: int) -> float:
        """How much faster a rank computes now than with all at work."""
        first = rank - rank % self.lending.together
        neighbours = self.left[first : first + self.lending.together]
        return min(self.lending.most, len(neighbours) / max(1, sum(left > 0 for left in neighbours)))

    def advance(self, rank: int) -> bool:
        """Go on to the next action that takes time, or transfer that is not there yet; whether there was any step."""
        program, before = self.programs[rank], self.at[rank]
        while self.at[rank] < len(program) and not self.left[rank]:
            step = program[self.at[rank]]
            if isinstance(step, Action):
                self.left[rank] = self.stages[step.stage].of(step.work)
            elif isinstance(step, Post):
                for transfer in step.transfers:
                    if transfer in self.posted:
                        boundary = transfer.stage - (transfer.work is not Work.FORWARD)
                        self.arrives[transfer] = self.now + self.transfer_s[boundary]
                        self.under_way.append(self.arrives[transfer])
                    self.posted.add(transfer)
            elif any(self.arrives.get(transfer, self.now + 1) > self.now for transfer in step.transfers):
                break
            self.at[rank] += 1
        if before < self.at[rank]:
            self.finished[rank] = self.now
        return before < self.at[rank]


# An event is seven numbers: kind, rank, a, peer, b, transfer, boundary.
#   _COMPUTE   a = row in the seconds of all works and stages
#   _POST      a = queue
#   _TRANSFER  from rank and its queue a to peer and its queue b; boundary = the stage before it
#   _WAIT      of rank for transfer
_COMPUTE, _POST, _TRANSFER, _WAIT = range(4)
_ROWS = {work: row for row, work in enumerate(Work)}
_Event = tuple[int, int, int, int, int, int, int]
_Product = tuple[int, bool, int]  # stage, whether activations (else gradients), microbatch


@dataclass(frozen=True)
class _Events:
    order: tuple[_Event, ...]
    transfers: int
    queues: int  # queue r, for r < ranks: all of rank r, or all its batches


class _Walk:
    """All programs played to their ends, where each rank stops at its posts until they are met."""

    def __init__(self, table: Table) -> None:
        self.programs, self.stages = table.programs, len(table.rank_of)
        self.at = [0 for _ in self.programs]  # the step that each rank is at
        self.unmet: list[dict[_Product, Transfer]] = [{} for _ in self.programs]  # of the post that each stops at
        self.batched = [False for _ in self.programs]  # whether that post is a batch
        self.has: list[set[_Product]] = [set() for _ in self.programs]  # computed there, or received
        self.split: set[tuple[int, int]] = set()  # stage and microbatch, between I and W
        self.order: list[_Event] = []
        self.met: dict[_Product, int] = {}
        self.queues = {(rank, rank): rank for rank, _ in enumerate(self.programs)}

    def events(self) -> _Events:
        going = list(range(len(self.programs)))
        while going:
            going += self.advance(going.pop())
        stuck = [rank for rank, unmet in enumerate(self.unmet) if unmet]
        if stuck:
            raise AssertionError(self.why(stuck))
        return _Events(tuple(self.order), len(self.met), len(self.queues))

    def advance(self, rank: int) -> list[int]:
        """Play a rank up to a post that is not met. Gives the others that may go on because of that."""
        released: list[int] = []
        program = self.programs[rank]
        while self.at[rank] < len(program) and not self.unmet[rank]:
            step = program[self.at[rank]]
            if isinstance(step, Action):
                self.compute(rank, step)
            elif isinstance(step, Wait):
                self.wait(rank, step)
            else:
                released += self.post(rank, step)
            self.at[rank] += not self.unmet[rank]
        return released

    def compute(self, rank: int, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if action.work is Work.FORWARD:
            needs = [(stage - 1, True, microbatch)] if stage > 0 else []
        elif action.work is Work.WEIGHT:
            needs = []
            assert (stage, microbatch) in self.split, f"rank {rank} computes {action} before its I"
        else:
            needs = [(stage, True, microbatch)]
            needs += [(stage + 1, False, microbatch)] if stage + 1 < self.stages else []
        for product in needs:
            assert product in self.has[rank], f"rank {rank} computes {action} before it has {_named(product)}"
        if action.work is Work.INPUT:
            self.split.add((stage, microbatch))
        if action.work is not Work.WEIGHT:
            self.has[rank].add(_product(action))
        self.order.append((_COMPUTE, rank, _ROWS[action.work] * self.stages + stage, 0, 0, 0, 0))

    def wait(self, rank: int, step: Wait) -> None:
        for transfer in step.transfers:
            product = _product(transfer)
            assert product in self.met, f"rank {rank} waits for {transfer}, which it has not posted"
            if transfer.target == rank:
                self.has[rank].add(product)
            self.order.append((_WAIT, rank, 0, 0, 0, self.met[product], 0))

    def post(self, rank: int, step: Post) -> list[int]:
        """Meet what the others have posted. Gives those whose posts are met by that."""
        released = []
        for transfer in step.transfers:
            has = transfer.source != rank or _product(transfer) in self.has[rank]
            assert has, f"rank {rank} sends {transfer} before it has computed it"
        self.unmet[rank] = {_product(transfer): transfer for transfer in step.transfers}
        self.batched[rank] = _is_batch(step)
        self.order.append((_POST, rank, self.queue(rank, step.transfers[0]), 0, 0, 0, 0))
        for product, transfer in list(self.unmet[rank].items()):
            source, target = transfer.source, transfer.target
            peer = target if source == rank else source
            if self.unmet[peer].get(product) != transfer or self.batched[peer] != self.batched[rank]:
                continue
            self.met[product] = number = len(self.met)
            queues = self.queue(source, transfer), self.queue(target, transfer)
            boundary = transfer.stage - (transfer.work is not Work.FORWARD)
            self.order.append((_TRANSFER, source, queues[0], target, queues[1], number, boundary))
            del self.unmet[rank][product], self.unmet[peer][product]
            if not self.unmet[peer]:
                self.at[peer] += 1
                released.append(peer)
        return released

    def queue(self, rank: int, transfer: Transfer) -> int:
        """The queue of what a rank posts now, if there is one for each pair of ranks and one for batches."""
        peer = transfer.target if transfer.source == rank else transfer.source
        return self.queues.setdefault((rank, rank if self.batched[rank] else peer), len(self.queues))

    def why(self, stuck: Sequence[int]) -> str:
        for rank in stuck:
            for product, transfer in self.unmet[rank].items():
                sends = transfer.source == rank
                peer = transfer.target if sends else transfer.source
                if product in self.unmet[peer]:
                    batch, alone = (rank, peer) if self.batched[rank] else (peer, rank)
                    return (
                        f"rank {batch} posts {transfer} in a batch of sends and receives, rank {alone} by itself: "
                        "over NCCL these are in different communicators and never meet"
                    )
                rest = self.programs[peer][self.at[peer] :]
                if not any(isinstance(step, Post) and transfer in step.transfers for step in rest):
                    never = f"rank {peer}, which never {'receives' if sends else 'sends'} it"
                    return f"rank {rank} waits for ever to {_towards(transfer, rank)} {never}"
        chain = [stuck[0]]
        while chain[-1] not in chain[:-1]:
            transfer = next(iter(self.unmet[chain[-1]].values()))
            chain.append(transfer.target if transfer.source == chain[-1] else transfer.source)
        return "the ranks wait for each other: " + ", ".join(
            f"rank {rank} to {_towards(next(iter(self.unmet[rank].values())), rank)} rank {peer}"
            for rank, peer in itertools.pairwise(chain[chain.index(chain[-1]) :])
        )


def _product(of: Action | Transfer) -> _Product:
    return of.stage, of.work is Work.FORWARD, of.microbatch


def _named(product: _Product) -> str:
    stage, forward, microbatch = product
    return f"{'F' if forward else 'B'}{microbatch} of stage {stage}"


def _towards(transfer: Transfer, rank: int) -> str:
    return f"send {transfer} to" if transfer.source == rank else f"receive {transfer} from"


def _is_batch(step: Post) -> bool:
    return len({transfer.source for transfer in step.transfers}) > 1
