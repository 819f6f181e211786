"""Groups of a mesh, and of parts of its axes."""

import torch
import torch.distributed as dist

from autopar.runtime import mesh

PIPELINES = ({"pp": 4, "dp": 1}, {"pp": 2, "dp": 2}, {"pp": 4, "tp": 1}, {"dp": 2, "pp": 2}, {"pp": 4, "dp": 1})


def sums_over_ends() -> list[float]:
    """On each mesh in turn, the sum of the ranks at both ends of the pipeline; -1 where this is none of them."""
    found = []
    for shape in PIPELINES:
        mesh.init(shape, "cpu")
        group = mesh.along("pp", (0, shape["pp"] - 1))
        total = torch.tensor(float(dist.get_rank()))
        if group is not None:
            dist.all_reduce(total, group=group)
        found.append(total.item() if group is not None else -1.0)
    return found


def test_ends_of_pipelines_on_several_meshes_find_each_other(gloo) -> None:
    """Only ranks 0 and 3 have a group for the first mesh, and all have one for the next."""
    assert gloo.run(4, sums_over_ends, timeout_s=30) == [
        [3.0, 2.0, 3.0, 1.0, 3.0],
        [-1.0, 4.0, -1.0, 1.0, -1.0],
        [-1.0, 2.0, -1.0, 5.0, -1.0],
        [3.0, 4.0, 3.0, 5.0, 3.0],
    ]
