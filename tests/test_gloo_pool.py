import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gloo import Pool

TESTS = Path(__file__).parent


def sum_of_ranks(scale: int) -> int:
    x = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(x)
    return int(x)


def worker_pid() -> int:
    return os.getpid()


def launch_environment() -> list[str]:
    return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]


def set_a_variable() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def variable_left_behind() -> str | None:
    return os.environ.get("LEFT_BEHIND")


def sum_of_sharded_ones(groups_before: int) -> float:
    for _ in range(groups_before):  # so that the mesh's own groups get other names in each call
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    return float(x.sum().full_tensor())


def tensor_of(x: torch.Tensor) -> torch.Tensor:
    return x + dist.get_rank()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("rank 1 lost its key")
    dist.barrier()  # would wait for rank 1 for ever


class NotPicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_not_picklable() -> None:
    raise NotPicklable(1, 2)


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def say_so_and_hang() -> None:
    print("busy", flush=True)
    time.sleep(1000)


def test_all_reduce_of_two(gloo: Pool) -> None:
    assert gloo.run(2, sum_of_ranks, 10) == [10, 10]


def test_all_reduce_of_four(gloo: Pool) -> None:
    assert gloo.run(4, sum_of_ranks, 1) == [6, 6, 6, 6]


def test_processes_are_reused(gloo: Pool) -> None:
    four = gloo.run(4, worker_pid)
    assert len(set(four)) == 4
    assert gloo.run(2, worker_pid) == four[:2]
    assert gloo.run(4, worker_pid) == four


def test_ranks_see_what_torchrun_sets(gloo: Pool) -> None:
    assert gloo.run(2, launch_environment) == [["0", "0", "2", "2", "127.0.0.1"], ["1", "1", "2", "2", "127.0.0.1"]]


def test_environment_is_restored_after_a_call(gloo: Pool) -> None:
    gloo.run(1, set_a_variable)
    assert gloo.run(1, variable_left_behind) == [None]


def test_meshes_of_one_call_do_not_reach_the_next(gloo: Pool) -> None:
    assert gloo.run(4, sum_of_sharded_ones, 3) == [16.0] * 4
    assert gloo.run(4, sum_of_sharded_ones, 0) == [16.0] * 4


def test_tensors_travel_by_value(gloo: Pool) -> None:
    zeros, ones = gloo.run(2, tensor_of, torch.zeros(3))
    assert zeros.tolist() == [0.0, 0.0, 0.0]
    assert ones.tolist() == [1.0, 1.0, 1.0]


def test_world_larger_than_the_pool_is_rejected(gloo: Pool) -> None:
    with pytest.raises(ValueError, match="world size 5"):
        gloo.run(5, worker_pid)


def test_exception_of_a_rank_is_raised_with_its_traceback(gloo: Pool) -> None:
    before = gloo.run(2, worker_pid)
    with pytest.raises(KeyError, match="rank 1 lost its key") as caught:
        gloo.run(2, raise_on_rank_1)
    assert "on rank 1 of 2:" in caught.value.__notes__[0]
    assert "in raise_on_rank_1" in caught.value.__notes__[0]
    assert not set(before) & set(gloo.run(2, worker_pid))


def test_exception_that_does_not_pickle_arrives_as_its_text(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match="NotPicklable: 1 and 2"):
        gloo.run(1, raise_not_picklable)


def test_dead_rank_is_named(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 died, exit code 3"):
        gloo.run(2, die_on_rank_1)


def test_hang_is_killed_and_names_function_and_ranks(gloo: Pool) -> None:
    before = gloo.run(2, worker_pid)
    with pytest.raises(TimeoutError, match=r"hang_on_rank_1 on 2 ranks: no answer after 1 s from ranks \[0, 1\]"):
        gloo.run(2, hang_on_rank_1, timeout_s=1)
    assert not set(before) & set(gloo.run(2, worker_pid))


@pytest.mark.slow
def test_busy_worker_dies_with_its_killed_parent() -> None:
    script = "import gloo, test_gloo_pool as t; gloo.Pool().run(1, t.say_so_and_hang)"
    with subprocess.Popen([sys.executable, "-c", script], cwd=TESTS, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "busy\n"
        parent.kill()
        assert parent.stdout.read() == ""  # the end of file comes when the last process holding the pipe is gone
