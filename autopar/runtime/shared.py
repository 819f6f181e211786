"""Parameters that several stages of a pipeline hold (tied weights): one logical parameter, whose copies stay equal.

Their gradients are summed over the ranks that hold a copy, in the same order on each of them; the same optimizer
makes the same of the same sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor, nn

from autopar.runtime import gradients, mesh
from autopar.runtime.program import Program


class Shared:
    """The shared parameters of one pp rank. All ranks construct it together."""

    def __init__(self, program: Program, rank: int, parameters: Mapping[str, nn.Parameter]) -> None:
        self.elsewhere: set[str] = set()  # counted by an earlier rank
        found: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, stages in program.shared.items():
            ranks = tuple(sorted({program.rank_of(stage) for stage in stages}))
            if len(ranks) > 1:
                found[ranks].append(name)
                if rank in ranks[1:]:
                    self.elsewhere.add(name)
        groups = {ranks: mesh.along("pp", ranks) for ranks in found}  # made by all ranks
        self.groups = [
            (group, [parameters[name] for name in found[ranks]]) for ranks, group in groups.items() if group is not None
        ]

    def sum_gradients(self) -> None:
        """Sum the gradients of every copy, in place: of this rank's part, which is the same part on each rank."""
        for group, held in self.groups:
            gradients.all_reduce([p.grad for p in held if p.grad is not None], group)

    def counted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Without those that another rank counts."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.elsewhere}
