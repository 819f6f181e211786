"""Pipeline schedules: what they cost and hold, when torch refuses them, and what makes ranks wait for ever."""

import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from costmodels.schedules import (
    Action,
    Lending,
    Post,
    Queue,
    StageSeconds,
    Step,
    Table,
    Transfer,
    Wait,
    Work,
    check,
    held,
    simulate,
)
from gloo import Pool
from passes.schedules import SCHEDULES, _program, _schedule, _stages, rank_of, refusal, table
from test_imports import loaded_by

EQUAL = StageSeconds(forward=1, backward=2, input=1, weight=1)
SMALL = [  # of every schedule: name, ranks, stages per rank, microbatches
    ("gpipe", 3, 1, 4),
    ("1f1b", 3, 1, 4),
    ("interleaved", 3, 2, 6),
    ("interleaved", 2, 3, 3),
    ("zbv", 3, 2, 4),
    ("interleaved_zb", 3, 2, 6),
]


def bubble_s(one: Table, stage: StageSeconds = EQUAL) -> float:
    n = len(one.rank_of)
    return simulate(one, [stage] * n, [0.0] * (n - 1), Queue.FREE).bubble_s


def drawn(actions: Sequence[Action]) -> str:
    return " ".join(f"{a.stage}{a.work.value}{a.microbatch}" for a in actions)


def written(step: Step, rank: int) -> str:
    if isinstance(step, Action):
        return f"{step.work.value}{step.microbatch}"
    words = [f"{'to' if t.source == rank else 'from'} {t.work.value}{t.microbatch}" for t in step.transfers]
    return f"{'post' if isinstance(step, Post) else 'wait'} {' + '.join(words)}"


def test_the_cost_model_loads_no_torch() -> None:
    assert "torch" not in loaded_by("import costmodels.schedules")


def in_flight(table: Table) -> tuple[int, ...]:
    """Of every stage, the most microbatches that it holds at once."""
    now, most = ([0] * len(table.rank_of) for _ in range(2))
    for action in (action for actions in table.ranks for action in actions):
        now[action.stage] += action.work is Work.FORWARD
        most[action.stage] = max(most[action.stage], now[action.stage])
        now[action.stage] -= action.work in (Work.BACKWARD, Work.WEIGHT)
    return tuple(most)


# ---------------------------------------------------------------------------------------------------------- orders


def test_1f1b_on_two_ranks_is_drawn_right() -> None:
    first, second = table("1f1b", 2, 1, 3).ranks
    assert drawn(first) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert drawn(second) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_zbv_on_two_ranks_is_drawn_right() -> None:
    first, second = table("zbv", 2, 2, 3).ranks
    assert drawn(first) == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2"
    assert drawn(second) == "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"


def test_1f1b_posts_a_send_and_a_receive_as_one_batch() -> None:
    last, next_to_last = (
        [written(step, rank) for step in table("1f1b", 3, 1, 3).programs[rank]][:12] for rank in (2, 1)
    )
    assert last == [
        *("post from F0", "wait from F0", "F0", "B0", "post to B0 + from F1", "wait to B0 + from F1", "F1", "B1"),
        *("post to B1 + from F2", "wait to B1 + from F2", "F2", "B2"),
    ]
    assert next_to_last == [
        *("post from F0", "wait from F0", "F0", "post to F0", "post from F1", "wait from F1", "F1", "wait to F0"),
        *("post to F1 + from B0", "wait to F1 + from B0", "B0", "post to B0 + from F2"),
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "per_rank", "places"),
    [
        ("gpipe", 3, 1, (0, 1, 2)),
        ("interleaved", 2, 3, (0, 1, 0, 1, 0, 1)),
        ("interleaved_zb", 3, 2, (0, 1, 2, 0, 1, 2)),
        ("zbv", 3, 2, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_stages_lie_on_ranks_in_a_loop_or_a_v(name: str, ranks: int, per_rank: int, places: tuple[int, ...]) -> None:
    assert rank_of(name, ranks, per_rank) == table(name, ranks, per_rank, 2 * ranks).rank_of == places


@pytest.mark.parametrize("args", SMALL)
def test_every_stage_works_once_on_every_microbatch(args: tuple[str, int, int, int]) -> None:
    name, ranks, per_rank, microbatches = args
    one = table(*args)
    works = (Work.FORWARD, Work.INPUT, Work.WEIGHT) if SCHEDULES[name].split else (Work.FORWARD, Work.BACKWARD)
    for rank, actions in enumerate(one.ranks):
        mine = [stage for stage in range(ranks * per_rank) if one.rank_of[stage] == rank]
        assert len(actions) == len(works) * per_rank * microbatches
        assert set(actions) == {Action(*each) for each in product(mine, works, range(microbatches))}


class Recorded(PipelineStage):
    """A real stage that writes down what it does."""

    def __init__(self, stage: int, places: Sequence[int], seen: list[str]) -> None:
        self.seen = seen
        example = torch.ones(1, 2, requires_grad=True)
        super().__init__(
            nn.Linear(2, 2), stage, len(places), torch.device("cpu"), input_args=(example,), output_args=(example,)
        )

    def forward_one_chunk(self, chunk: int, *args: object, **kwargs: object) -> object:
        self.seen.append(f"F{chunk}")
        return super().forward_one_chunk(chunk, *args, **kwargs)  # type: ignore[arg-type]

    def backward_one_chunk(self, chunk: int, *args: object, full_backward: bool = True, **kwargs: object) -> None:
        self.seen.append(f"{'B' if full_backward else 'I'}{chunk}")
        super().backward_one_chunk(chunk, *args, full_backward=full_backward, **kwargs)  # type: ignore[arg-type]

    def backward_weight_one_chunk(self, chunk: int, *args: object, **kwargs: object) -> None:
        self.seen.append(f"W{chunk}")
        super().backward_weight_one_chunk(chunk, *args, **kwargs)  # type: ignore[arg-type]


def steps_of_a_real_run(name: str, places: Sequence[int], microbatches: int) -> list[str]:
    seen: list[str] = []
    stages = [Recorded(stage, places, seen) for stage, rank in enumerate(places) if rank == dist.get_rank()]
    build = getattr(torch_schedules, SCHEDULES[name].torch_name)
    given = stages[0] if SCHEDULES[name].single else stages
    schedule = build(given, microbatches, loss_fn=lambda output, target: output.sum())
    batch = [torch.ones(microbatches, 2)] if dist.get_rank() == 0 else []
    target = torch.ones(microbatches, 2)
    schedule.step(*batch, target=target)  # the first step infers shapes, and sends them
    seen.clear()
    post = torch_schedules._batch_p2p

    def recorded(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        if ops:
            seen.append("post " + " + ".join("to" if op.op is dist.isend else "from" for op in ops))
        return post(ops, desc)

    torch_schedules._batch_p2p = recorded
    try:
        schedule.step(*batch, target=target)
    finally:
        torch_schedules._batch_p2p = post
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_real_run_does_what_the_table_says(gloo: Pool, name: str) -> None:
    one = table(name, 2, 1 if SCHEDULES[name].single else 2, 4)
    for rank, seen in enumerate(gloo.run(2, steps_of_a_real_run, name, one.rank_of, 4)):
        told = [written(step, rank) for step in one.programs[rank] if not isinstance(step, Wait)]
        assert seen == [re.sub(r"(to|from) \w+", r"\1", step) for step in told]


# ---------------------------------------------------------------------------------------------------------- seconds


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 16), (8, 32)])
@pytest.mark.parametrize("stage", [EQUAL, StageSeconds(forward=1.5, backward=2.5, input=1.5, weight=1)])
def test_bubbles_of_equal_stages_follow_the_formulas(p: int, m: int, stage: StageSeconds) -> None:
    # (p - 1) (F + B), and with v stages per rank (p - 1) (F + B) / v of the rank's F and B (Narayanan et al. 2021,
    # 2104.04473), which is that of one stage; (p - 1) (F + B - 2 W) for ZB1P, W <= I (deepseek-ai/DualPipe, README)
    whole_s = (p - 1) * (stage.forward + stage.backward)
    assert bubble_s(table("gpipe", p, 1, m), stage) == pytest.approx(whole_s)
    assert bubble_s(table("1f1b", p, 1, m), stage) == pytest.approx(whole_s)
    assert bubble_s(table("interleaved", p, 2, m), stage) == pytest.approx(whole_s)
    assert bubble_s(table("interleaved", p, 4, m), stage) == pytest.approx(whole_s)
    assert bubble_s(table("interleaved_zb", p, 2, m), stage) == pytest.approx(whole_s - 2 * (p - 1) * stage.weight)


SKEWED = StageSeconds(forward=1, backward=2, input=1.2, weight=0.8)


@pytest.mark.parametrize(
    ("name", "per_rank", "p4", "p8", "p4_skewed", "p8_skewed"),
    [  # bubble / compute for (p, m) = (4, 16) and (8, 32). zbv would have none in its paper, with F = I = W
        ("interleaved", 2, 0.094, 0.109, 0.094, 0.109),
        ("interleaved", 4, 0.047, 0.055, 0.047, 0.055),
        ("interleaved_zb", 2, 0.031, 0.036, 0.044, 0.051),
        ("zbv", 2, 0.031, 0.036, 0.037, 0.044),
    ],
)
def test_shares_of_bubbles(name: str, per_rank: int, p4: float, p8: float, p4_skewed: float, p8_skewed: float) -> None:
    for (p, m), stage, share in [
        ((4, 16), EQUAL, p4),
        ((8, 32), EQUAL, p8),
        ((4, 16), SKEWED, p4_skewed),
        ((8, 32), SKEWED, p8_skewed),
    ]:
        compute_s = 3 * m * per_rank
        assert bubble_s(table(name, p, per_rank, m), stage) / compute_s == pytest.approx(share, abs=0.0005)


def test_two_ranks_with_transfers_by_hand() -> None:
    # F 1, B 2, a transfer 10. Rank 0 waits for its first send before it posts the second, with the receive of B0.
    #   rank 0   F0 0-1   F1 1-2                                                 B0 24-26                B1 37-39
    #   between           F0 1-11                        F1 and B0 14-24                       B1 27-37
    #   rank 1                     F0 11-12   B0 12-14                     F1 24-25   B1 25-27
    timeline = simulate(table("1f1b", 2, 1, 2), [EQUAL] * 2, [10.0])
    assert timeline.finished_s == (39, 37)
    assert timeline.busy_s == (6, 6)
    assert (timeline.compute_s, timeline.bubble_s, timeline.exposed_s) == (6, 3, 30)


def relaxed(one: Table, stages: Sequence[StageSeconds], transfer_s: Sequence[float], queue: Queue) -> list[float]:
    """When each rank is done: times grow from 0 until all rules hold."""
    ended: dict[Transfer, float] = defaultdict(float)
    while True:
        reached: dict[tuple[Transfer, int], float] = {}
        clocks = []
        for rank, program in enumerate(one.programs):
            clock, free_at = 0.0, defaultdict[object, float](float)
            for step in program:
                if isinstance(step, Action):
                    stage = stages[step.stage]
                    clock += getattr(stage, step.work.name.lower())
                elif isinstance(step, Wait):
                    clock = max([clock, *(ended[t] for t in step.transfers)])
                else:
                    peers = {t.source + t.target - rank for t in step.transfers}
                    batch = len({t.source for t in step.transfers}) == 2
                    name = {Queue.RANK: 0, Queue.PAIR: "batch" if batch else min(peers), Queue.FREE: step}[queue]
                    for t in step.transfers:
                        reached[t, rank] = max(clock, free_at[name])
                    free_at[name] = max([free_at[name], *(ended[t] for t in step.transfers)])
            clocks.append(clock)
        now = {
            t: max(reached[t, t.source], reached[t, t.target])
            + transfer_s[t.stage if t.work is Work.FORWARD else t.stage - 1]
            for t, _ in reached
        }
        if now == ended:
            return clocks
        ended = defaultdict(float, now)


def impatient(one: Table) -> Table:
    """The table in which no rank waits for what it sends, so that more is under way at once."""

    def steps(program: Sequence[Step], rank: int) -> Iterator[Step]:
        for step in program:
            if not isinstance(step, Wait):
                yield step
            elif received := tuple(t for t in step.transfers if t.target == rank):
                yield Wait(received)

    return replace(one, programs=tuple(tuple(steps(program, rank)) for rank, program in enumerate(one.programs)))


def unequal(name: str, ranks: int, per_rank: int, m: int) -> Iterator[tuple[Table, list[StageSeconds], list[float]]]:
    """A schedule as it is and without waiting for what is sent, with stages and transfers of all lengths."""
    numbers, patient = random.Random(0), table(name, ranks, per_rank, m)
    for one, longest_s in product((patient, impatient(patient)), (0.0, 0.3, 3.0)):
        stages = [StageSeconds(*(numbers.uniform(0.5, 2) for _ in range(4))) for _ in one.rank_of]
        yield one, stages, [numbers.uniform(0, longest_s) for _ in one.rank_of[1:]]


@pytest.mark.parametrize("queue", Queue)
@pytest.mark.parametrize("args", SMALL)
def test_unequal_stages_take_what_a_relaxation_finds(args: tuple[str, int, int, int], queue: Queue) -> None:
    for one, stages, transfer_s in unequal(*args):
        timeline = simulate(one, stages, transfer_s, queue)
        assert timeline.finished_s == pytest.approx(relaxed(one, stages, transfer_s, queue))
        instant = simulate(one, stages, [0.0] * len(transfer_s), Queue.FREE)
        assert timeline.bubble_s == pytest.approx(instant.seconds - max(instant.busy_s))
        assert timeline.exposed_s >= 0


@pytest.mark.parametrize("lending", [Lending(1.0, 3), Lending(2.0, 1)], ids=["nothing", "nobody near"])
@pytest.mark.parametrize("args", SMALL)
def test_where_nothing_is_lent_a_step_takes_the_same(args: tuple[str, int, int, int], lending: Lending) -> None:
    for one, stages, transfer_s in unequal(*args):
        alone, lent = (simulate(one, stages, transfer_s, Queue.FREE, lends) for lends in (None, lending))
        assert lent.busy_s == pytest.approx(alone.busy_s)
        assert lent.bubble_s == pytest.approx(alone.bubble_s)
        assert (lent.seconds, lent.exposed_s) == pytest.approx((alone.seconds, alone.exposed_s))


@pytest.mark.parametrize("args", SMALL)
def test_lent_processors_are_never_faster_than_all_of_them_at_work(args: tuple[str, int, int, int]) -> None:
    numbers = random.Random(1)
    for _ in range(20):
        one = table(*args)
        stages = [StageSeconds(*(numbers.uniform(0.5, 2) for _ in range(4))) for _ in one.rank_of]
        ranks, most = len(one.programs), numbers.uniform(1, 4)
        alone = simulate(one, stages, [0.0] * len(one.rank_of[1:]), Queue.FREE)
        lent = simulate(one, stages, [0.0] * len(one.rank_of[1:]), Queue.FREE, Lending(most, ranks))
        assert max(sum(alone.busy_s) / ranks, alone.seconds / most) <= lent.seconds * (1 + 1e-9)
        assert lent.seconds <= alone.seconds * (1 + 1e-9)


@pytest.mark.timeout(20)
def test_what_is_left_by_rounding_does_not_keep_a_step_from_its_end() -> None:
    stages = [StageSeconds(0.003, 2 * 0.003, 0.003, 0.003)] * 8
    transfer_s = [0.001, 0.003, 0.0003, 0.0003, 0.0003, 0.003, 0.0021]
    timeline = simulate(table("interleaved", 4, 2, 16), stages, transfer_s, Queue.FREE, Lending(4.0, 4))
    assert timeline.seconds >= sum(timeline.busy_s) / 4


def test_two_ranks_that_share_a_processor_by_hand() -> None:
    # F 1, B 2 with both at work, half of that alone; a transfer 1, once both have got there
    #   rank 0   F0 0-0.5  F1 0.5-1                                          B0 5.5-6.5             B1 7.5-8.5
    #   between         F0 0.5-1.5          F1 2-3              B0 4.5-5.5               B1 6.5-7.5
    #   rank 1                     F0 1.5-2        F1 3-3.5  B0 3.5-4.5  B1 4.5-5.5
    timeline = simulate(table("gpipe", 2, 1, 2), [EQUAL] * 2, [1.0], Queue.FREE, Lending(2.0, 2))
    assert timeline.finished_s == pytest.approx((8.5, 7.5))
    assert timeline.busy_s == (6, 6)
    assert timeline.seconds - timeline.exposed_s == pytest.approx(6)  # 12 of work on one processor, at twice the speed
    assert timeline.bubble_s == pytest.approx(0)


def test_one_queue_per_rank_makes_sends_wait_for_receives_that_were_posted_too_early() -> None:
    # torch posts the receives of a rank's later stage when they are sent, among the sends of its first one
    one = table("interleaved", 4, 2, 16)
    free, pair, rank = (simulate(one, [EQUAL] * 8, [0.0] * 7, queue) for queue in (Queue.FREE, Queue.PAIR, Queue.RANK))
    assert free.seconds == pair.seconds == 105
    assert rank.seconds == 118
    assert (rank.compute_s, rank.bubble_s, rank.exposed_s) == (96, 9, 13)


def test_without_one_queue_per_rank_a_batch_overtakes_single_transfers() -> None:
    # F 1, B 2, a transfer 10: F1 and the batch both start at 14, when rank 1 has computed B0
    sends = [Transfer(0, Work.FORWARD, m, source=0, target=1) for m in range(3)]
    back = Transfer(1, Work.BACKWARD, 0, source=1, target=0)
    forward = [Action(0, Work.FORWARD, m) for m in range(3)]
    batch = Post((sends[2], back))
    first = (forward[0], Post((sends[0],)), forward[1], Post((sends[1],)), forward[2], batch, Wait((back,)))
    second = (
        *(Post((sends[0],)), Wait((sends[0],)), Action(1, Work.FORWARD, 0), Action(1, Work.BACKWARD, 0)),
        *(Post((sends[1],)), batch),
    )
    one = Table((first, second), (0, 1))
    seconds = {queue: simulate(one, [EQUAL] * 2, [10.0], queue).seconds for queue in Queue}
    assert seconds == {Queue.FREE: 24, Queue.PAIR: 24, Queue.RANK: 34}


@pytest.mark.parametrize("queue", Queue)
def test_1f1b_pays_the_same_whatever_the_queues(queue: Queue) -> None:
    timeline = simulate(table("1f1b", 4, 1, 16), [EQUAL] * 4, [0.1] * 3, queue)
    assert timeline.seconds == pytest.approx(48 + 9 + 35 * 0.1)


@pytest.mark.slow
def test_64_stages_of_512_microbatches_are_quick() -> None:
    one = table("1f1b", 64, 1, 512)
    check(one)
    started = time.process_time()
    seconds = simulate(one, [EQUAL] * 64, [0.0] * 63).seconds
    assert time.process_time() - started < 0.5
    assert seconds == 3 * 512 + 3 * 63


# ----------------------------------------------------------------------------------------------------------- memory


def test_gpipe_holds_all_microbatches() -> None:
    assert in_flight(table("gpipe", 4, 1, 6)) == (6, 6, 6, 6)


@pytest.mark.parametrize(("p", "m", "most"), [(4, 16, (4, 3, 2, 1)), (4, 4, (4, 3, 2, 1)), (2, 8, (2, 1))])
def test_1f1b_holds_as_many_as_stages_follow(p: int, m: int, most: tuple[int, ...]) -> None:
    assert in_flight(table("1f1b", p, 1, m)) == most


@pytest.mark.parametrize(
    ("name", "v", "p", "m", "first", "last"),
    [  # microbatches of one full stage. interleaved: p + (p - 1) / v, and ((v - 1) p + 1) / v
        ("interleaved", 2, 4, 16, 5.5, 2.5),
        ("interleaved", 4, 4, 16, 4.75, 3.25),
        ("interleaved", 2, 8, 32, 11.5, 4.5),
        ("interleaved", 4, 8, 32, 9.75, 6.25),
        ("interleaved_zb", 2, 4, 16, 4, 4),
        ("interleaved_zb", 2, 8, 32, 8, 8),
        ("zbv", 2, 4, 16, 4, 4),
        ("zbv", 2, 8, 32, 8, 8),
    ],
)
def test_ranks_hold_what_the_formulas_say(name: str, v: int, p: int, m: int, first: float, last: float) -> None:
    most = held(table(name, p, v, m), [1] * (p * v))
    assert (most[0] / v, most[-1] / v) == (first, last)
    assert max(most) / v == first


def test_the_stages_of_a_rank_are_not_at_their_peaks_together() -> None:
    # rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    one = table("zbv", 2, 2, 3)
    assert in_flight(one) == (3, 3, 2, 1)
    assert held(one, [0, 10, 7, 0]) == (0, 37)  # 3 and 1, at 1F2
    assert held(one, [0, 10, 10, 0]) == (0, 40)


def test_what_a_split_backward_keeps_between_its_halves_counts() -> None:
    one = table("zbv", 2, 2, 3)  # rank 1 as above
    assert held(one, [0, 10, 10, 0], [0, 1, 1, 0])[1] == 41  # 1F0 2F0 1F1 2F1, and 2I0
    assert held(one, [0, 10, 10, 0], [0, 100, 100, 0])[1] == 330  # 1I1 2I2 1I2 wait for their W


# --------------------------------------------------------------------------------------------------------- refusals


def torch_raises(name: str, ranks: int, per_rank: int, microbatches: int) -> bool:
    kind, places = SCHEDULES[name], rank_of(name, ranks, per_rank)
    stages = _stages(places, 0)
    try:
        if kind.single and per_rank != 1:  # given the list, since it is more than one
            getattr(torch_schedules, kind.torch_name)(stages, microbatches)
        _program(_schedule(kind, stages, microbatches), stages, microbatches)
    except (ValueError, AttributeError, AssertionError, IndexError):
        return True
    return False


@pytest.mark.parametrize("name", SCHEDULES)
def test_refused_is_what_torch_raises_on(name: str) -> None:
    counts = list(product(range(1, 6), range(1, 4), range(13)))
    refused = [args for args in counts if refusal(name, *args)]
    assert refused == [args for args in counts if torch_raises(name, *args)]
    assert 0 < len(refused) < len(counts)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("gpipe", 2, 2, 4), "gpipe runs 1 stage per rank, not 2"),
        (("1f1b", 4, 1, 3), "1f1b on 4 ranks needs 4 microbatches or more, not 3"),
        (("zbv", 2, 3, 4), "zbv runs 2 stages per rank, not 3"),
        (("gpipe", 2, 1, 0), "gpipe needs a microbatch"),
        (
            ("interleaved", 4, 2, 13),
            "interleaved on 4 ranks cannot run 13 microbatches in 3 equal rounds; use 12 or 15",
        ),
    ],
)
def test_a_refusal_says_why(args: tuple[str, int, int, int], sentence: str) -> None:
    assert refusal(*args) == sentence
    with pytest.raises(AssertionError, match=re.escape(sentence)):
        table(*args)


def test_the_counts_that_a_refusal_offers_are_not_refused() -> None:
    offers = 0
    for ranks, microbatches in product(range(1, 9), range(1, 40)):
        for offer in re.findall(r"\d+", refusal("interleaved", ranks, 2, microbatches).partition("use")[2]):
            assert refusal("interleaved", ranks, 2, int(offer)) == ""
            offers += 1
    assert offers > 100


# --------------------------------------------------------------------------------------------------------- deadlock


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_own_orders_pass(name: str) -> None:
    for ranks, per_rank, microbatches in product(range(1, 6), range(1, 4), range(1, 12)):
        if refusal(name, ranks, per_rank, microbatches):
            continue
        one = table(name, ranks, per_rank, microbatches)
        check(one)
        borders = sum(a != b for a, b in zip(one.rank_of, one.rank_of[1:], strict=False))
        assert len(transfers(one)) == 2 * borders * microbatches


def transfers(one: Table) -> set[Transfer]:
    return {t for program in one.programs for step in program if isinstance(step, Post) for t in step.transfers}


def without(one: Table, transfer: Transfer, rank: int) -> Table:
    """The table in which one rank forgets one transfer."""

    def steps(program: Sequence[Step]) -> Iterator[Step]:
        for step in program:
            if isinstance(step, Action):
                yield step
            elif left := tuple(t for t in step.transfers if t != transfer):
                yield replace(step, transfers=left)

    programs = list(one.programs)
    programs[rank] = tuple(steps(programs[rank]))
    return replace(one, programs=tuple(programs))


@pytest.mark.parametrize("args", SMALL)
def test_every_send_that_is_missing_is_found(args: tuple[str, int, int, int]) -> None:
    one = table(*args)
    for transfer in transfers(one):
        with pytest.raises(AssertionError) as found:
            check(without(one, transfer, transfer.source))
        assert {f"rank {transfer.source}", f"rank {transfer.target}"} <= set(re.findall(r"rank \d+", str(found.value)))


@pytest.mark.parametrize("args", SMALL)
def test_every_receive_that_is_missing_is_found(args: tuple[str, int, int, int]) -> None:
    one = table(*args)
    for transfer in transfers(one):
        with pytest.raises(AssertionError, match=rf"rank ({transfer.source}|{transfer.target}) "):
            check(without(one, transfer, transfer.target))


def test_a_missing_send_is_named() -> None:
    one = without(table("gpipe", 2, 1, 2), Transfer(0, Work.FORWARD, 1, source=0, target=1), 0)
    with pytest.raises(AssertionError) as found:
        simulate(one, [EQUAL] * 2, [0.0])
    assert str(found.value) == "rank 1 waits for ever to receive F1 of stage 0 from rank 0, which never sends it"


def test_swapped_receives_are_named() -> None:
    one = table("gpipe", 2, 1, 2)
    first, second = one.programs
    swapped = (*second[3:5], second[2], *second[:2], *second[5:])  # post and wait of F0, and of F1
    assert [written(step, 1) for step in swapped[:4]] == ["post from F1", "wait from F1", "F0", "post from F0"]
    with pytest.raises(AssertionError) as found:
        check(replace(one, programs=(first, swapped)))
    assert str(found.value) == (
        "the ranks wait for each other: rank 0 to send F0 of stage 0 to rank 1, "
        "rank 1 to receive F1 of stage 0 from rank 0"
    )


def unbatched(one: Table, orders: Sequence[Sequence[str]]) -> Table:
    """Every batch posted one by one, on rank r in the order of orders[r % 2]."""

    def place(t: Transfer, rank: int) -> int:
        peer = t.source + t.target - rank
        return orders[rank % 2].index(f"{'send' if t.source == rank else 'recv'}_{'next' if peer > rank else 'prev'}")

    def steps(program: Sequence[Step], rank: int) -> Iterator[Step]:
        for step in program:
            if isinstance(step, Post):
                yield from (Post((t,)) for t in sorted(step.transfers, key=lambda t: place(t, rank)))
            else:
                yield step

    return replace(one, programs=tuple(tuple(steps(program, rank)) for rank, program in enumerate(one.programs)))


FIXED = ("send_prev", "recv_prev", "send_next", "recv_next")
EVEN = ("send_next", "recv_prev", "send_prev", "recv_next")
ODD = ("recv_prev", "send_next", "recv_next", "send_prev")


def test_the_same_order_of_sends_and_receives_on_all_ranks_is_a_deadlock() -> None:
    # NVIDIA/Megatron-LM#5100: 4 ranks hang in [send_prev, recv_prev, send_next, recv_next]
    with pytest.raises(AssertionError) as found:
        check(unbatched(table("1f1b", 4, 1, 8), (FIXED, FIXED)))
    assert str(found.value) == (
        "the ranks wait for each other: rank 2 to send F1 of stage 2 to rank 3, rank 3 to send B0 of stage 3 to rank 2"
    )


def test_even_and_odd_ranks_in_opposite_orders_pass() -> None:
    opposite = unbatched(table("1f1b", 4, 1, 8), (EVEN, ODD))
    check(opposite)
    assert opposite != table("1f1b", 4, 1, 8)


def test_receives_that_torch_defers_wait_for_each_other() -> None:
    # why the option is not used: rank 0 posts 0 sends F1, then receives B0; rank 1 sends B0 before it receives F1
    places = rank_of("interleaved", 2, 2)
    stages = [_stages(places, rank) for rank in range(2)]
    deferred = torch_schedules.ScheduleInterleaved1F1B(
        stages[0], 2, loss_fn=lambda output, target: None, defer_pp_recv=True
    )
    one = Table(tuple(_program(deferred, each, 2) for each in stages), places)
    with pytest.raises(AssertionError) as found:
        check(one)
    assert str(found.value) == (
        "the ranks wait for each other: rank 0 to send F1 of stage 2 to rank 1, rank 1 to send B0 of stage 3 to rank 0"
    )


def test_a_batch_on_one_side_only_is_found() -> None:
    one = table("1f1b", 2, 1, 2)
    apart = unbatched(one, (EVEN, ODD)).programs
    with pytest.raises(AssertionError) as found:
        check(replace(one, programs=(one.programs[0], apart[1])))
    assert str(found.value) == (
        "rank 0 posts F1 of stage 0 in a batch of sends and receives, rank 1 by itself: "
        "over NCCL these are in different communicators and never meet"
    )


@pytest.mark.parametrize(
    ("name", "rank", "dropped", "sentence"),
    [
        ("gpipe", 0, "F0", "rank 0 sends F0 of stage 0 before it has computed it"),
        ("gpipe", 1, "wait from F0", "rank 1 computes F0 of stage 1 before it has F0 of stage 0"),
        ("gpipe", 1, "F0", "rank 1 computes B0 of stage 1 before it has F0 of stage 1"),
        ("gpipe", 0, "wait from B0", "rank 0 computes B0 of stage 0 before it has B0 of stage 1"),
        ("gpipe", 0, "post to F0", "rank 0 waits for F0 of stage 0, which it has not posted"),
        ("interleaved_zb", 0, "I0", "rank 0 computes W0 of stage 0 before its I"),
    ],
)
def test_what_a_rank_cannot_have_yet_is_named(name: str, rank: int, dropped: str, sentence: str) -> None:
    one = table(name, 2, 1, 1)
    programs = list(one.programs)
    programs[rank] = tuple(step for step in programs[rank] if written(step, rank) != dropped)
    assert len(programs[rank]) == len(one.programs[rank]) - 1
    with pytest.raises(AssertionError) as found:
        check(replace(one, programs=tuple(programs)))
    assert str(found.value) == sentence
