"""Long-lived worker processes that run test functions as the ranks of a gloo world.

Importing torch costs seconds per process, so one pool serves every test:

    def sum_of_ranks(scale):
        x = torch.tensor(scale * dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    def test_sum(gloo):
        assert gloo.run(2, sum_of_ranks, 10) == [10, 10]
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

MAX_WORKERS = 4
START_TIMEOUT_S = 100.0
HOST = "127.0.0.1"


class Pool:
    """Up to four workers, started when first needed and replaced when killed."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """What `function(*args)` returns on each rank of a fresh gloo world, by rank.

        The first exception of a rank is raised here, with that rank's traceback as a note. It, and a
        timeout, kill every rank: none is left waiting for another.
        """
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world size {world_size}: the pool has 1 to {MAX_WORKERS} workers")
        task = pickle.dumps((function, args))
        where = f"{function.__module__}.{function.__qualname__} on {world_size} ranks"

        from torch.distributed import TCPStore

        try:
            workers = self._ready(world_size)
            store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            for rank, worker in enumerate(workers):
                worker.send((_environment(rank, world_size, store.port), timeout_s, task))
            return _collect(workers, time.monotonic() + timeout_s, f"{where}: no answer after {timeout_s:g} s")
        except BaseException:  # also what pytest-timeout or Ctrl-C raise in here
            self.kill(world_size)
            raise

    def kill(self, world_size: int = MAX_WORKERS) -> None:
        """End the first `world_size` workers at once; the next run starts others in their place."""
        doomed, self._workers = self._workers[:world_size], self._workers[world_size:]
        for worker in doomed:
            worker.process.kill()
        for worker in doomed:
            worker.process.join()
            worker.pipe.close()

    def _ready(self, world_size: int) -> list["_Worker"]:
        # A worker that died between two runs (out of memory, say) is no reason to fail the next one.
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        new = [_start() for _ in range(world_size - len(self._workers))]
        self._workers += new
        _collect(new, time.monotonic() + START_TIMEOUT_S, f"no gloo worker after {START_TIMEOUT_S:g} s")
        return self._workers[:world_size]


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: Connection

    def send(self, message: object) -> None:
        # Plain pickle copies tensors; Connection.send would share their memory.
        with contextlib.suppress(BrokenPipeError):  # a dead worker is reported where its answer is awaited
            self.pipe.send_bytes(pickle.dumps(message))


@dataclass(frozen=True)
class _Returned:
    value: Any


@dataclass(frozen=True)
class _Raised:
    error: BaseException | None  # None where the exception itself cannot be pickled
    traceback: str


def _start() -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), name="gloo-worker", daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _collect(workers: list[_Worker], deadline: float, too_late: str) -> list[Any]:
    """One answer of every worker, in their order; the first that failed is raised."""
    answers: dict[int, Any] = {}
    while len(answers) < len(workers):
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _print_stacks([workers[rank] for rank in waiting.values()])
            raise TimeoutError(f"{too_late} from ranks {sorted(waiting.values())}; their stacks are on stderr")
        for rank in sorted(waiting[pipe] for pipe in ready):
            answers[rank] = _answer(workers[rank], rank, len(workers))
    return [answers[rank] for rank in range(len(workers))]


def _answer(worker: _Worker, rank: int, world_size: int) -> Any:
    try:
        answer = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        worker.process.join()
        raise RuntimeError(f"rank {rank} of {world_size} died, exit code {worker.process.exitcode}") from None
    if isinstance(answer, _Returned):
        return answer.value
    error = answer.error or RuntimeError(answer.traceback.splitlines()[-1])
    error.add_note(f"on rank {rank} of {world_size}:\n{answer.traceback}")
    raise error


def _print_stacks(workers: list[_Worker]) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.2)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets; the agent's store is the one that the parent holds."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


# In the worker


def _work(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may resolve to nothing

    import torch.distributed  # noqa: F401

    message = pickle.dumps(_Returned("ready"))
    while True:
        pipe.send_bytes(message)
        try:
            environment, timeout_s, task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        message = _run_rank(environment, timeout_s, task)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a gloo worker is started by a Pool"
    wait([parent.sentinel])
    os._exit(1)


def _run_rank(environment: dict[str, str], timeout_s: float, task: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    saved = dict(os.environ)
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        # Longer than the parent waits: it is the parent that reports a hang.
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s + 60))
        function, args = pickle.loads(task)
        answer = pickle.dumps(_Returned(function(*args)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still receives from him
            dist.destroy_process_group()
    except BaseException as error:
        return pickle.dumps(_Raised(_if_it_pickles(error), traceback.format_exc()))
    finally:
        os.environ.clear()
        os.environ.update(saved)
        _forget_meshes()
    return answer


def _if_it_pickles(error: BaseException) -> BaseException | None:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error if isinstance(copy, BaseException) else None


def _forget_meshes() -> None:
    """DTensor's caches hold device meshes, whose process groups are gone after the call."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
