"""How every operator is split over one mesh axis: a mixed-integer programme, solved to proven optimality.

    minimise    sum_o  w_o sum_s  time(o, s) x[o, s]   +   sum_t  w_t sum_{p, q}  time(t, p -> q) z[t, p, q]

    one strategy each       sum_s x[o, s] = 1                                  for every operator o
    wanted is routed        sum_p z[t, p, q] >= sum_{s wants q} x[c, s]        for every tensor t, its reader c, and q
    routed is produced      z[t, p, q] <= sum_{s gives p} x[producer(t), s]    for every tensor t, p and q
    layers chain            x[exit, p] = x[entry, p]                           where a layer feeds the next of its kind
    host keeps pace         time(layer) >= launch_s * (its operators and reshardings), forward and backward
    memory                  sum_o bytes(o, s) x[o, s] + sum_{t saved} bytes(t, q) z[t, p, q] <= budget

The time of a parameter is what holding its elements adds to a step: their update, their part in what data parallelism
cannot hide, and the sum over this axis where gradients are partial. Both are priced from below (`Terms`), so that the
objective, times the microbatches, is a bound on every step of the mesh.

x is binary, z continuous in [0, 1]; w counts the layers that share a block. One resharding z serves every consumer
that wants the same placement. Parameters are operators too (how they are stored), and so are a block's entries and
exits (how its inputs and outputs lie), so that what is priced inside a block is what every one of its layers runs.

Solved by SCIP through OR-Tools' MathOpt (docs/decisions.md has what else was tried). A block is solved once, whatever
its count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import product
from typing import TypeAlias

from ortools.math_opt.python import mathopt

from costmodels.groups import Collective
from passes.blocks import Blocked
from passes.graph import DTYPE_BYTES, FLOATS, Op, Value
from passes.placements import I, P, Placement, R, S, can_reshard, is_valid
from passes.price import Axis, Seconds, least_op_seconds, local_bytes, op_launches, op_seconds, reshard_seconds
from passes.rules import rule_of
from passes.rules.base import Rule, Site, Strategy, block_counts, strategies
from passes.saved import saved_operands, saved_results

ROOT = -1
SCALE = 1e3  # the objective in milliseconds: solvers' tolerances are absolute
MIB = 2**20
STARTED_BESIDE = 1.25  # times the launches of a layer's operators: what is likely started with its reshardings
GAP = 1e-4  # relative, at which an answer counts as optimal
TIE_BREAK_S_PER_BYTE = 1e-18
Region: TypeAlias = int  # ROOT, or the index of a block
Key: TypeAlias = tuple[str, Region, str]  # kind ("op", "parameter", "input", "entry", "exit"), region, name


@dataclass(frozen=True)
class Terms:
    """What the outer search knows: how often a resharding recurs, and what memory costs.

    `microbatches` per step: partial gradients of parameters are summed once per step, not once per microbatch.
    `shards`: the ZeRO group; a rank sums what it keeps of the partial gradients.
    `element_s`: seconds of a step for every trained parameter element on a rank (update, data parallelism).
    `state_bytes`: bytes per parameter element held on a rank (weights, gradients, optimizer), ZeRO included.
    `budget_bytes`: for parameters and the saved activations of one microbatch; None where memory is no concern.
    `keeps_activations`: False where blocks are recomputed (only their inputs are kept).
    """

    microbatches: int = 1
    shards: int = 1
    element_s: float = 0.0
    state_bytes: float = 16.0
    budget_bytes: float | None = None
    keeps_activations: bool = True


@dataclass(frozen=True)
class Sharding:
    """The decision: a strategy per operator, a placement per parameter, block entry and block exit."""

    axis: Axis
    chosen: Mapping[Key, Strategy]
    objective_s: float
    bound_s: float
    proved: bool

    def of(self, kind: str, region: Region, name: str) -> Strategy:
        return self.chosen[kind, region, name]

    def placement(self, kind: str, region: Region, name: str) -> Placement:
        return self.chosen[kind, region, name].results[0]


@dataclass(frozen=True, eq=False)
class Node:
    """A decision of the programme: an operator, or one of the pseudo-operators named above."""

    key: Key
    site: Site
    rule: Rule | None
    options: tuple[Strategy, ...]
    weight: int


End: TypeAlias = tuple[Node, int]  # a node and the position of a result or an operand


def wanted_cuts(program: Blocked, ranks: int) -> dict[str, frozenset[S]]:
    """Which cuts consumers would like of every value: one reverse walk, repeated until layers that chain agree."""
    wanted: dict[str, set[S]] = defaultdict(set)

    def ask(value: Value, cut: S | None) -> None:
        if cut is not None and is_valid(cut, value.sizes, ranks):
            wanted[value.name].add(cut)

    def walk(ops: Iterable[Op], values: Mapping[str, Value]) -> None:
        for op in reversed(tuple(ops)):
            rule = rule_of(op.target)
            if rule is None:
                continue
            site = Site.of(op, values)
            known = {v.name: frozenset(wanted[v.name]) for v in op.results}
            for factor in rule.factors(site):
                for blocks in block_counts(factor, site, known):
                    for value, dim in zip(site.operands, factor.operands, strict=True):
                        if dim is not None:
                            ask(value, dim.cut(blocks))

    count = -1
    while count != (count := sum(map(len, wanted.values()))):
        for statement in reversed(program.body):
            if isinstance(statement, Op):
                walk((statement,), program.values)
                continue
            block = program.blocks[statement.block]
            for result, output in zip(statement.results, block.outputs, strict=True):
                wanted[output] |= wanted[result.name]
            if statement.instance == 0:
                walk(block.ops, block.values)
            for arg, formal in zip(statement.args, block.inputs, strict=True):
                wanted[arg] |= wanted[formal.name]
    return {name: frozenset(cuts) for name, cuts in wanted.items()}


def shard(
    program: Blocked, axis: Axis, terms: Terms, rows: Mapping[str, S] | None = None, seconds_limit: float = 60.0
) -> Sharding | None:
    """The cheapest sharding of one microbatch of `program` over `axis`; None where the memory budget allows none.

    `rows` says how the rows of the batch lie in each value: splitting them is the data-parallel axis' business, so
    the strategies that would are left out here. Matrix work that can be split is never repeated.
    """
    return Programme(program, axis, rows or {}).solve(terms, seconds_limit)


def carried(program: Blocked) -> frozenset[tuple[int, int, int]]:
    """(block, output, input): results that one layer hands to the next layer of its own kind."""
    made = {v.name: (c.block, i) for c in program.calls for i, v in enumerate(c.results)}
    return frozenset(
        (call.block, made[arg][1], j)
        for call in program.calls
        for j, arg in enumerate(call.args)
        if arg in made and made[arg][0] == call.block
    )


@dataclass(frozen=True)
class Tensor:
    """A value with its producer and consumers; `weight` equal ones are routed alike."""

    value: Value
    producer: Node
    result: int
    consumers: tuple[End, ...]
    weight: int
    region: Region = ROOT

    @cached_property
    def saved(self) -> bool:
        """Whether some consumer keeps it for its backward; parameters are counted where they are stored."""
        if self.producer.key[0] == "parameter":
            return False
        return any(c.key[0] == "op" and i in saved_operands(c.site) for c, i in self.consumers)


Route: TypeAlias = tuple[int, Placement, Placement]  # of a tensor by its number, from and to
Added: TypeAlias = "mathopt.Variable | mathopt.LinearConstraint"


@dataclass(frozen=True)
class Frame:
    """The variables of a programme, and the constraints that hold whatever the terms."""

    model: mathopt.Model
    x: dict[tuple[Key, int], mathopt.Variable]  # whether a node takes that option
    z: dict[Route, mathopt.Variable]  # whether a tensor goes that way

    def total(
        self,
        plus: Iterable[mathopt.Variable],
        minus: Iterable[mathopt.Variable],
        lower: float,
        upper: float = math.inf,
    ) -> None:
        """lower <= sum(plus) - sum(minus) <= upper. Set directly: half the time of an expression taken apart."""
        constraint = self.model.add_linear_constraint(lb=lower, ub=upper)
        for coefficient, variables in ((1.0, plus), (-1.0, minus)):
            for variable in variables:
                constraint.set_coefficient(variable, coefficient)

    @contextmanager
    def beside(self) -> Iterator[list[Added]]:
        """Takes out of the model what is put into this list, in its order."""
        added: list[Added] = []
        try:
            yield added
        finally:
            for one in added:
                if isinstance(one, mathopt.Variable):
                    self.model.delete_variable(one)
                else:
                    self.model.delete_linear_constraint(one)


class Programme:
    """The programme of one microbatch over one axis: building, solving and reading back, in that order.

    Nodes and tensors depend on the program alone, so that one Programme serves several `Terms`.
    """

    def __init__(self, program: Blocked, axis: Axis, rows: Mapping[str, S]) -> None:
        self.program, self.axis, self.rows = program, axis, rows
        wanted = wanted_cuts(program, axis.ranks) if axis.ranks > 1 else {}
        self.wanted = {name: cuts - {rows[name]} if name in rows else cuts for name, cuts in wanted.items()}
        self.carried = carried(program)
        self.nodes: dict[Key, Node] = {}
        self.make_nodes()

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.make_tensors())

    # -- what there is to decide -----------------------------------------------------------------------------------

    def make_nodes(self) -> None:
        program = self.program
        for value in program.inputs:
            self.add("input", ROOT, value, (I,), 1)
        for parameter in program.parameters:
            self.add("parameter", ROOT, parameter.value, self.stored(parameter.value), 1)
        for index, block in enumerate(program.blocks):
            weight = len(block.paths)
            for parameter in block.parameters:
                self.add("parameter", index, parameter.value, self.stored(parameter.value), weight)
            for j, value in enumerate(block.inputs):
                outs = [block.values[block.outputs[o]] for b, o, i in sorted(self.carried) if (b, i) == (index, j)]
                self.add("entry", index, value, self.boundary(value, *outs), weight)
            self.add_ops(index, block.ops, block.values, weight)
            for o, name in enumerate(block.outputs):
                ins = [block.inputs[i] for b, out, i in sorted(self.carried) if (b, out) == (index, o)]
                self.add("exit", index, block.values[name], self.boundary(block.values[name], *ins), weight)
        self.add_ops(ROOT, (s for s in program.body if isinstance(s, Op)), program.values, 1)
        loss = program.values[program.loss]
        options = [I, P] if loss.grad and self.axis.ranks > 1 else [I]
        self.add("loss", ROOT, loss, tuple(options), 1)

    def add_ops(self, region: Region, ops: Iterable[Op], values: Mapping[str, Value], weight: int) -> None:
        for op in ops:
            rule = rule_of(op.target)
            site = Site.of(op, values)
            if self.axis.ranks == 1:
                options = strategies(site, None, 1, {})[:1]
            else:
                offered = strategies(site, rule, self.axis.ranks, self.wanted)
                options = tuple(s for s in offered if not self.cuts_rows(site, s))
            if rule is not None and rule.flop(site)[0] and any(s.split for s in options):
                options = tuple(s for s in options if s.split)
            self.nodes["op", region, op.name] = Node(("op", region, op.name), site, rule, options, weight)

    def cuts_rows(self, site: Site, strategy: Strategy) -> bool:
        pairs = (
            *zip(site.operands, strategy.operands, strict=True),
            *zip(site.results, strategy.results, strict=True),
        )
        return any(self.rows.get(value.name) == placement for value, placement in pairs)

    def add(self, kind: str, region: Region, value: Value, placements: tuple[Placement, ...], weight: int) -> None:
        """A pseudo-operator that hands a value on, lying the same way before and after."""
        op = Op(f"autopar.{kind}", (), (), (value,))
        options = tuple(Strategy(str(p), (p,), (p,), split=False) for p in placements)
        key = (kind, region, value.name)
        self.nodes[key] = Node(key, Site(op, (value,)), None, options, weight)

    def stored(self, value: Value) -> tuple[Placement, ...]:
        """How a parameter may be stored: whole with or without partial gradients, or cut."""
        whole: tuple[Placement, ...] = (I, R) if value.grad and self.axis.ranks > 1 else (I,)
        return (*whole, *sorted(self.wanted.get(value.name, ())))

    def boundary(self, *values: Value) -> tuple[Placement, ...]:
        """How a block's input or output may lie; values that are carried into each other share the choice."""
        first = values[0]
        cuts = {
            cut for v in values for cut in self.wanted.get(v.name, ()) if is_valid(cut, first.sizes, self.axis.ranks)
        }
        whole: tuple[Placement, ...] = (I,)
        if first.grad and first.dtype in FLOATS and self.axis.ranks > 1:
            whole = (I, R, P)
        return (*whole, *sorted(cuts))

    # -- what moves between decisions ------------------------------------------------------------------------------

    def make_tensors(self) -> Iterator[Tensor]:
        for index in range(len(self.program.blocks)):
            yield from self.block_tensors(index)
        yield from self.root_tensors()

    def block_tensors(self, index: int) -> Iterator[Tensor]:
        """What moves inside a block: every layer that shares it moves the same."""
        block = self.program.blocks[index]
        producers: dict[str, End] = {}
        consumers: dict[str, list[End]] = defaultdict(list)
        for parameter in block.parameters:
            producers[parameter.value.name] = (self.nodes["parameter", index, parameter.value.name], 0)
        for value in block.inputs:
            producers[value.name] = (self.nodes["entry", index, value.name], 0)
        self.wire(index, block.ops, producers, consumers)
        for name in block.outputs:
            consumers[name].append((self.nodes["exit", index, name], 0))
        for name, (node, result) in producers.items():
            yield Tensor(block.values[name], node, result, tuple(consumers[name]), len(block.paths), index)

    def root_tensors(self) -> Iterator[Tensor]:
        """What moves outside of blocks and between layers; equal wires are one tensor with their number as weight."""
        program = self.program
        producers: dict[str, End] = {}
        consumers: dict[str, list[End]] = defaultdict(list)
        for value in program.inputs:
            producers[value.name] = (self.nodes["input", ROOT, value.name], 0)
        for parameter in program.parameters:
            producers[parameter.value.name] = (self.nodes["parameter", ROOT, parameter.value.name], 0)
        self.wire(ROOT, (s for s in program.body if isinstance(s, Op)), producers, consumers)
        for call in program.calls:
            block = program.blocks[call.block]
            for returned, output in zip(call.results, block.outputs, strict=True):
                producers[returned.name] = (self.nodes["exit", call.block, output], 0)
            for j, arg in enumerate(call.args):
                consumers[arg].append((self.nodes["entry", call.block, block.inputs[j].name], 0))
        consumers[program.loss].append((self.nodes["loss", ROOT, program.loss], 0))
        equal: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
        for name, (node, result) in producers.items():
            # the next layer of the same kind takes its input as it lies: `layers_chain`
            readers = tuple(dict.fromkeys(end for end in consumers[name] if not self.is_carried(node, end[0])))
            key = (node.key, result, tuple((c.key, i) for c, i in readers))
            equal[key].append(Tensor(program.values[name], node, result, readers, 1))
        for tensors in equal.values():
            yield replace(tensors[0], weight=len(tensors))

    def is_carried(self, producer: Node, consumer: Node) -> bool:
        return producer.key[0] == "exit" and consumer.key[0] == "entry" and producer.key[1] == consumer.key[1]

    def wire(
        self,
        region: Region,
        ops: Iterable[Op],
        producers: dict[str, End],
        consumers: dict[str, list[End]],
    ) -> None:
        for op in ops:
            node = self.nodes["op", region, op.name]
            for i, name in enumerate(op.operands):
                consumers[name].append((node, i))
            for i, value in enumerate(op.results):
                producers[value.name] = (node, i)

    # -- the programme ---------------------------------------------------------------------------------------------

    def solve(self, terms: Terms, seconds_limit: float = 60.0) -> Sharding | None:
        """The best sharding; None where none keeps the budget.

        Layers that wait for the host in what was found, and were not thought to, are hosted from then on.
        """
        if self.axis.ranks == 1 and terms.budget_bytes is None:
            return self.alone(terms)
        found = self.solve_once(terms, seconds_limit)
        while found is not None and (waiting := self.waits(found.chosen).keys() - self.hosted):
            self.hosted |= waiting
            found = self.solve_once(terms, seconds_limit)
        return found

    def solve_once(self, terms: Terms, seconds_limit: float) -> Sharding | None:
        """The best where only the layers in `hosted` may wait for the host."""
        frame = self.frame
        spent = [
            (SCALE * node.weight * self.node_seconds(node, s, terms)) * frame.x[node.key, s]
            for node in self.nodes.values()
            if not self.is_hosted(node)
            for s in range(len(node.options))
        ]
        for (t, source, target), variable in frame.z.items():
            tensor, moved = self.tensors[t], self.moved[t, source, target].total
            if moved and tensor.region not in self.hosted:
                spent.append((SCALE * tensor.weight * moved) * variable)
        with frame.beside() as added:
            if terms.budget_bytes is not None:
                added.append(self.memory_is_kept(frame, terms, terms.budget_bytes))
            spent += self.host_keeps_pace(frame, added)
            frame.model.minimize(mathopt.fast_sum(spent))
            return self.answer(frame, seconds_limit)

    @cached_property
    def frame(self) -> Frame:
        """What is the same whatever the terms."""
        frame = Frame(mathopt.Model(name="sharding"), {}, {})
        for node in self.nodes.values():
            for s in range(len(node.options)):
                frame.x[node.key, s] = frame.model.add_binary_variable()
        for t, tensor in enumerate(self.tensors):
            for source, target in product(self.given(tensor), self.asked(tensor)):
                if self.may_reshard(tensor, source, target):
                    frame.z[t, source, target] = frame.model.add_variable(lb=0.0, ub=1.0)
        self.one_strategy_each(frame)
        self.wanted_is_routed(frame)
        self.routed_is_produced(frame)
        self.layers_chain(frame)
        return frame

    @cached_property
    def taken(self) -> dict[tuple[Key, int], Seconds]:
        """Of every operator under each of its strategies."""
        return {
            (node.key, s): op_seconds(node.site, node.rule, strategy, self.axis)
            for node in self.nodes.values()
            if node.key[0] == "op"
            for s, strategy in enumerate(node.options)
        }

    @cached_property
    def moved(self) -> dict[Route, Seconds]:
        """Of every resharding there may be."""
        return {
            (t, source, target): reshard_seconds(self.tensors[t].value, source, target, self.axis)
            for t, source, target in self.frame.z
        }

    def answer(self, frame: Frame, seconds_limit: float) -> Sharding | None:
        """What the solver finds."""
        # the relaxation is almost integral: cutting planes and presolve rounds only cost time (docs/decisions.md)
        parameters = mathopt.SolveParameters(
            threads=1,
            random_seed=1,
            relative_gap_tolerance=GAP,
            cuts=mathopt.Emphasis.OFF,
            presolve=mathopt.Emphasis.LOW,
            heuristics=mathopt.Emphasis.LOW,
            time_limit=timedelta(seconds=seconds_limit),
        )
        result = mathopt.solve(frame.model, mathopt.SolverType.GSCIP, params=parameters)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.NO_SOLUTION_FOUND):
            return None
        assert result.has_primal_feasible_solution(), f"the sharding programme ended with {result.termination}"
        picked = result.variable_values()
        chosen = {
            node.key: max(enumerate(node.options), key=lambda s: (picked[frame.x[node.key, s[0]]], -s[0]))[1]
            for node in self.nodes.values()
        }
        bounds = result.termination.objective_bounds
        return Sharding(
            self.axis,
            chosen,
            bounds.primal_bound / SCALE,
            bounds.dual_bound / SCALE / (1 + GAP * bool(self.hosted)),  # less what breaks ties there
            reason is mathopt.TerminationReason.OPTIMAL,
        )

    def alone(self, terms: Terms) -> Sharding:
        """One rank: there is nothing to decide."""
        chosen = {key: node.options[0] for key, node in self.nodes.items()}
        seconds = sum(node.weight * self.node_seconds(node, 0, terms) for node in self.nodes.values())
        seconds += sum(len(self.program.blocks[region].paths) * s for region, s in self.waits(chosen).items())
        return Sharding(self.axis, chosen, seconds, seconds, True)

    def held_bytes(self, chosen: Mapping[Key, Strategy], terms: Terms) -> float:
        """The left-hand side of the memory constraint for a decision."""
        held = sum(node.weight * self.node_bytes(node, chosen[node.key], terms) for node in self.nodes.values())
        for tensor in self.tensors:
            if terms.keeps_activations and tensor.saved:
                targets = {chosen[c.key].operands[i] for c, i in tensor.consumers}
                held += tensor.weight * sum(local_bytes(tensor.value, q, self.axis.ranks) for q in targets)
        return held

    def may_reshard(self, tensor: Tensor, source: Placement, target: Placement) -> bool:
        return can_reshard(source, target, tensor.value.grad)

    def given(self, tensor: Tensor) -> tuple[Placement, ...]:
        return tuple(dict.fromkeys(s.results[tensor.result] for s in tensor.producer.options))

    def asked(self, tensor: Tensor) -> tuple[Placement, ...]:
        return tuple(dict.fromkeys(s.operands[i] for c, i in tensor.consumers for s in c.options))

    def node_seconds(self, node: Node, number: int, terms: Terms) -> float:
        """Seconds per microbatch of an option; a tiny share of the bytes held breaks ties in favour of memory."""
        kind = node.key[0]
        if kind == "op":
            return self.taken[node.key, number].total
        if kind == "parameter":
            value, placement = node.site.results[0], node.options[number].results[0]
            held = local_bytes(value, placement, self.axis.ranks)
            seconds = 0.0
            if value.grad:
                seconds = terms.element_s * held / DTYPE_BYTES[value.dtype]
            if placement is R:
                seconds += self.sum_s_per_element(terms.shards) * value.elements
            return seconds / terms.microbatches + TIE_BREAK_S_PER_BYTE * held
        return 0.0

    def sum_s_per_element(self, shards: int) -> float:
        """What summing partial gradients over the axis takes at least: all are summed together, in fp32."""
        elements = self.trained_elements
        return self.axis.seconds(Collective.ALL_REDUCE, 4 * elements // shards) / elements

    @cached_property
    def trained_elements(self) -> int:
        nodes = (n for key, n in self.nodes.items() if key[0] == "parameter" and n.site.results[0].grad)
        return sum(n.weight * n.site.results[0].elements for n in nodes)

    @property
    def launch_s(self) -> float:
        return self.axis.cluster.device.launch_s

    @cached_property
    def hosted(self) -> set[Region]:
        """Layers that the programme lets wait for the host: those that likely do, and all that once did."""
        found = set()
        for index, block in enumerate(self.program.blocks):
            sites = [(Site.of(op, block.values), rule_of(op.target)) for op in block.ops]
            least = sum((least_op_seconds(site, rule, self.axis) for site, rule in sites), Seconds())
            started = sum((op_launches(site, rule) for site, rule in sites), Seconds())
            if least.waiting(started.times(STARTED_BESIDE * self.launch_s)).total > 0:
                found.add(index)
        return found

    def waits(self, chosen: Mapping[Key, Strategy]) -> dict[Region, float]:
        """Layers whose kernels are shorter than their launches under a decision, and the seconds that each waits."""
        busy: dict[Region, Seconds] = defaultdict(Seconds)
        started: dict[Region, Seconds] = defaultdict(Seconds)
        for node in self.nodes.values():
            kind, region, _ = node.key
            if kind == "op" and region != ROOT:
                busy[region] += op_seconds(node.site, node.rule, chosen[node.key], self.axis)
                started[region] += op_launches(node.site, node.rule, chosen[node.key])
        for tensor in self.tensors:
            source = chosen[tensor.producer.key].results[tensor.result]
            for target in {chosen[c.key].operands[i] for c, i in tensor.consumers} - {source}:
                moved = reshard_seconds(tensor.value, source, target, self.axis)
                busy[tensor.region] += moved
                started[tensor.region] += moved.launches
        layers = range(len(self.program.blocks))
        waits = {region: busy[region].waiting(started[region].times(self.launch_s)).total for region in layers}
        return {region: seconds for region, seconds in waits.items() if seconds > 0}

    def is_hosted(self, node: Node) -> bool:
        return node.key[0] == "op" and node.key[1] in self.hosted

    def host_keeps_pace(self, frame: Frame, added: list[Added]) -> list[mathopt.LinearExpression]:
        """What hosted layers take: the longer of what the device does and what the host starts, in each pass."""
        done: dict[tuple[Region, bool, bool], list[mathopt.LinearTerm]] = defaultdict(list)

        def add(region: Region, busy: Seconds, launches: Seconds, variable: mathopt.Variable) -> None:
            for by_host, seconds in ((False, busy), (True, launches.times(self.launch_s))):
                for backward, part in ((False, seconds.forward), (True, seconds.backward)):
                    if part:
                        done[region, by_host, backward].append((SCALE * part) * variable)

        for node in filter(self.is_hosted, self.nodes.values()):
            for s, strategy in enumerate(node.options):
                launches = op_launches(node.site, node.rule, strategy)
                add(node.key[1], self.taken[node.key, s], launches, frame.x[node.key, s])
        for (t, source, target), variable in frame.z.items():
            if self.tensors[t].region in self.hosted:
                moved = self.moved[t, source, target]
                add(self.tensors[t].region, moved, moved.launches, variable)
        spent = []
        for index in sorted(self.hosted):
            layers = len(self.program.blocks[index].paths)
            for backward in (False, True):
                taken = frame.model.add_variable(lb=0.0)
                for by_host in (False, True):
                    done_s = mathopt.fast_sum(done[index, by_host, backward])
                    added.append(frame.model.add_linear_constraint(done_s <= taken))
                added.append(taken)
                spent.append(layers * taken)
                spent.append(layers * GAP * mathopt.fast_sum(done[index, False, backward]))  # of equals, the least work
        return spent

    def one_strategy_each(self, frame: Frame) -> None:
        for node in self.nodes.values():
            frame.total([frame.x[node.key, s] for s in range(len(node.options))], [], 1.0, 1.0)

    def wanted_is_routed(self, frame: Frame) -> None:
        for t, tensor in enumerate(self.tensors):
            for consumer, operand in tensor.consumers:
                by_target: dict[Placement, list[mathopt.Variable]] = defaultdict(list)
                for s, strategy in enumerate(consumer.options):
                    by_target[strategy.operands[operand]].append(frame.x[consumer.key, s])
                for target, wanting in by_target.items():
                    routes = [frame.z[t, p, target] for p in self.given(tensor) if (t, p, target) in frame.z]
                    frame.total(routes, wanting, lower=0.0)

    def routed_is_produced(self, frame: Frame) -> None:
        for t, tensor in enumerate(self.tensors):
            giving: dict[Placement, list[mathopt.Variable]] = defaultdict(list)
            for s, strategy in enumerate(tensor.producer.options):
                giving[strategy.results[tensor.result]].append(frame.x[tensor.producer.key, s])
            for target in self.asked(tensor):
                for source, variables in giving.items():
                    if (t, source, target) in frame.z and len(giving) > 1:
                        frame.total(variables, [frame.z[t, source, target]], lower=0.0)

    def layers_chain(self, frame: Frame) -> None:
        for index, output, entry in sorted(self.carried):
            block = self.program.blocks[index]
            leaves = self.nodes["exit", index, block.outputs[output]]
            enters = self.nodes["entry", index, block.inputs[entry].name]
            places = {
                p: (ends_of(leaves, p), ends_of(enters, p)) for p in placements_of(leaves) | placements_of(enters)
            }
            for out, into in (places[p] for p in sorted(places, key=str)):
                frame.total([frame.x[leaves.key, s] for s in out], [frame.x[enters.key, s] for s in into], 0.0, 0.0)

    def memory_is_kept(self, frame: Frame, terms: Terms, budget_bytes: float) -> mathopt.LinearConstraint:
        held = [
            (node.weight * self.node_bytes(node, strategy, terms) / MIB) * frame.x[node.key, s]
            for node in self.nodes.values()
            for s, strategy in enumerate(node.options)
        ]
        for (t, _, target), variable in frame.z.items():
            tensor = self.tensors[t]
            if terms.keeps_activations and tensor.saved:
                held.append((tensor.weight * local_bytes(tensor.value, target, self.axis.ranks) / MIB) * variable)
        return frame.model.add_linear_constraint(mathopt.fast_sum(held) <= budget_bytes / MIB)

    def node_bytes(self, node: Node, strategy: Strategy, terms: Terms) -> float:
        """Bytes that a decision holds through the step: states of a parameter, results kept for the backward."""
        kind = node.key[0]
        if kind == "parameter":
            value = node.site.results[0]
            elements = local_bytes(value, strategy.results[0], self.axis.ranks) / DTYPE_BYTES[value.dtype]
            return elements * terms.state_bytes
        if kind == "op" and terms.keeps_activations:
            results = zip(node.site.results, strategy.results, strict=True)
            kept = saved_results(node.site)
            return sum(local_bytes(v, p, self.axis.ranks) for i, (v, p) in enumerate(results) if i in kept)
        if kind == "entry" and not terms.keeps_activations:
            return local_bytes(node.site.results[0], strategy.results[0], self.axis.ranks)
        return 0.0


def placements_of(node: Node) -> set[Placement]:
    return {s.results[0] for s in node.options}


def ends_of(node: Node, placement: Placement) -> list[int]:
    return [i for i, s in enumerate(node.options) if s.results[0] == placement]
