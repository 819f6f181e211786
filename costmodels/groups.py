"""What a group of ranks does together, and how the group lies on the nodes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a cluster holds what was measured of its groups
    from costmodels.cluster import Cluster


class Collective(Enum):
    """What a group of ranks does together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"  # from each rank of the group to the next


@dataclass(frozen=True)
class Group:
    """The geometry of one process group, as its worst-placed sister sees it."""

    ranks_per_node: int
    nodes: int
    siblings: int  # groups of the same kind that share each node's NICs at the same time

    @property
    def size(self) -> int:
        return self.ranks_per_node * self.nodes

    @classmethod
    def of_axis(cls, cluster: Cluster, size: int, stride: int) -> Group:
        """The group of a mesh axis of `size` ranks, `stride` apart in the row-major grid of ranks (1 = neighbours).

        Runs of g ranks stay inside a node when g divides the axis and g * stride divides the node. An axis that
        does not fit evenly has some group with fewer neighbours, and that one sets the pace.
        """
        assert size >= 1 and stride >= 1, f"axis of {size} ranks with stride {stride}"
        assert size * stride <= cluster.devices, f"axis of {size} x stride {stride} on {cluster.devices} devices"
        local = cluster.devices_per_node
        if cluster.nodes == 1:
            together = size
        else:
            together = max(g for g in range(1, min(size, local) + 1) if g == 1 or size % g == local % (g * stride) == 0)
        return cls(together, size // together, max(1, local // together))
