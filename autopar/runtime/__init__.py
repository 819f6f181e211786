"""What a generated program needs besides torch: layouts, collectives with gradients, and the loop that trains."""

from autopar.runtime.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    bias_on_one_rank,
    reduce_scatter,
    replicate,
    shard,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from autopar.runtime.launch import main
from autopar.runtime.layout import I, Layout, P, Placement, R, S
from autopar.runtime.mesh import Axis, Mesh, axis, init
from autopar.runtime.module import ShardedModule, recompute
from autopar.runtime.program import Edge, Input, Program, Stage
from autopar.runtime.trainer import Trainer

__all__ = [
    "Axis",
    "Edge",
    "I",
    "Input",
    "Layout",
    "Mesh",
    "P",
    "Placement",
    "Program",
    "R",
    "S",
    "ShardedModule",
    "Stage",
    "Trainer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis",
    "bias_on_one_rank",
    "init",
    "main",
    "recompute",
    "reduce_scatter",
    "replicate",
    "shard",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
]
