"""Tests on several ranks: `run_ranks` runs a function on N ranks, `@on_ranks` makes a pytest test of one.

Owns   a pool of worker processes that lives as long as pytest (importing torch takes seconds), and their directory.
Takes  a module-level function, which travels by name, and arguments, which travel pickled.
Gives  what each rank returned, in rank order, or one error that shows the first rank's failure and what the others did.
Invariant: a call ends on all ranks together, in bounded time, and no process outlives pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import rank_worker
import torch
from rank_worker import DEVICE, IDLE, PRELOADED, RELEASE, Call, Function, Outcome, run_body

# Ranks that are still busy this long after the first failure hang in a collective, most likely, and are killed.
GRACE = 1.5
STARTUP_TIMEOUT = 90.0
SHOWN_OUTPUT = 4000


class RankError(RuntimeError):
    """A call failed on one rank or more; `first` is the rank that failed first, None where the time was up."""

    def __init__(self, message: str, first: int | None) -> None:
        super().__init__(message)
        self.first = first


class _Worker:
    """One process and what the pool knows of it: whether it is idle, and how its call ended so far."""

    def __init__(self, context: Any, directory: Path, index: int, environment: dict[str, str]) -> None:
        self.log = directory / f"rank{index}.log"
        self.stacks = directory / f"rank{index}.stacks"
        self.channel, theirs = context.Pipe()
        arguments = (theirs, str(self.log), str(self.stacks), environment)
        self.process = context.Process(target=rank_worker.serve, args=arguments)
        self.process.start()
        theirs.close()
        self.idle = False
        self.released = False
        self.outcome: Outcome | None = None

    def start(self, call: Call) -> None:
        os.truncate(self.log, 0)
        self.idle, self.released, self.outcome = False, False, None
        self._send(pickle.dumps(call))

    def release(self) -> None:
        """Let it end its process group, now or when it is done."""
        if not self.released:
            self.released = True
            self._send(RELEASE)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead: receive() will say so
            self.channel.send_bytes(message)

    def receive(self) -> None:
        try:
            message = self.channel.recv_bytes()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            text = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            self.idle, self.outcome = True, Outcome("dead", time.time(), text)
            return
        if message == IDLE:
            self.idle = True
        else:
            self.outcome = pickle.loads(message)

    def stack(self) -> str:
        """Where the worker's threads are now: faulthandler answers the signal even inside a C++ call."""
        os.truncate(self.stacks, 0)
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and not self.stacks.stat().st_size:
            time.sleep(0.01)
        time.sleep(0.05)
        threads = []
        for thread in self.stacks.read_text(errors="replace").split("\n\n"):
            lines = thread.splitlines()
            own = [i for i, line in enumerate(lines) if rank_worker.__file__ in line]
            if "_end_with_parent" not in thread:
                threads.append("\n".join(lines[: own[0] if own else None]))
        return "\n\n".join(threads)

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-SHOWN_OUTPUT:].strip() if self.log.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.channel.close()


class _Pool:
    """Workers that share a start method and an environment; it grows to the largest world size asked for."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # A fork server imports torch once and forks each worker from there, so that a killed pool is back within a
        # second. macOS has frameworks that do not survive a fork, nor does CUDA.
        forks = sys.platform == "linux" and DEVICE != "cuda"
        self.context = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            self.context.set_forkserver_preload(PRELOADED)
        self.environment = dict(environment)
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[_Worker] = []
        self.num_calls = 0
        self.owner = os.getpid()
        atexit.register(self.close)  # runs before multiprocessing's own, which would wait for the processes

    def grow(self, size: int) -> list[_Worker]:
        if not all(worker.process.is_alive() for worker in self.workers):  # killed from outside between two calls
            self.kill()
        missing = range(len(self.workers), size)
        with _one_thread():
            started = [_Worker(self.context, self.directory, index, self.environment) for index in missing]
        self.workers += started
        self.wait(started, STARTUP_TIMEOUT)
        if not all(worker.idle and worker.outcome is None for worker in started):
            outputs = "\n".join(worker.output() for worker in started)
            self.kill()
            raise RankError(f"the ranks' processes did not start within {STARTUP_TIMEOUT} s:\n{outputs}", None)
        return self.workers[:size]

    def call(self, function: Function, arguments: bytes, size: int, timeout: float, group_timeout: float) -> list[Any]:
        workers = self.grow(size)
        self.num_calls += 1
        store = self.directory / f"store{self.num_calls}"
        start = time.time()
        for rank, worker in enumerate(workers):
            worker.start(Call(function, arguments, rank, size, str(store), group_timeout, sys.path, os.getcwd()))
        self.wait(workers, timeout)
        store.unlink(missing_ok=True)
        outcomes = [worker.outcome for worker in workers if worker.outcome]
        clean = all(worker.idle and worker.process.is_alive() for worker in workers)
        bad = _by_time([outcome for outcome in outcomes if outcome.kind != "value"])
        skipped = bool(bad) and bad[0].kind == "skip"  # what failed afterwards failed because a peer was gone
        error = None if skipped or (clean and not bad) else _describe(workers, start, timeout)
        if not clean:
            self.kill()
        if error:
            raise error
        if skipped:
            pytest.skip(bad[0].text)
        return [pickle.loads(outcome.value) for outcome in outcomes]

    def wait(self, workers: list[_Worker], timeout: float) -> None:
        """Until all are idle or the time is up, which the first rank that fails or skips brings near."""
        deadline = time.monotonic() + timeout
        while busy := [worker for worker in workers if not worker.idle]:
            ready = connection.wait([worker.channel for worker in busy], max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for worker in busy:
                if worker.channel in ready:
                    worker.receive()
            bad = any(worker.outcome and worker.outcome.kind != "value" for worker in workers)
            if bad:
                deadline = min(deadline, time.monotonic() + GRACE)
            if bad or all(worker.outcome for worker in workers):
                for worker in workers:
                    worker.release()

    def kill(self) -> None:
        if os.getpid() == self.owner:  # a fork of pytest must not kill its parent's ranks
            for worker in self.workers:
                worker.kill()
            self.workers.clear()

    def close(self) -> None:
        self.kill()
        if os.getpid() == self.owner:
            shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.close)


def _by_time(outcomes: list[Outcome]) -> list[Outcome]:
    """Earliest first. A death comes before all else: the pool sees it later than its peers fail over it."""
    return sorted(outcomes, key=lambda outcome: (outcome.kind != "dead", outcome.when))


def _describe(workers: list[_Worker], start: float, timeout: float) -> RankError:
    """One text for all ranks: the first failure whole, the others in brief."""
    size = len(workers)
    failed = _by_time([worker.outcome for worker in workers if worker.outcome and worker.outcome.failed])
    rank_of = {id(worker.outcome): rank for rank, worker in enumerate(workers)}
    first = rank_of[id(failed[0])] if failed else None
    parts = [] if failed else [f"{size} ranks did not all finish within the timeout of {timeout} s"]
    for outcome in failed:
        rank = rank_of[id(outcome)]
        verb = "died" if outcome.kind == "dead" else "failed"
        when = outcome.when - (start if rank == first else failed[0].when)
        if rank == first:
            parts.append(f"rank {rank} of {size} {verb} first, after {when:.2f} s:\n\n{outcome.text.rstrip()}")
        else:
            parts.append(f"rank {rank} {verb} {when:+.2f} s from then: {outcome.text.strip().splitlines()[-1][:500]}")
    for rank, worker in enumerate(workers):
        if not worker.idle:
            what = "had returned" if worker.outcome else "was still running"
            parts.append(f"rank {rank} {what}; it was killed:\n{worker.stack()}")
        elif worker.outcome and not worker.outcome.failed:
            parts.append(f"rank {rank} finished")
    parts += [f"--- output of rank {rank} ---\n{out}" for rank, w in enumerate(workers) if (out := w.output())]
    return RankError("\n\n".join(parts), first)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Numpy's BLAS starts its threads at import, and a process with threads is no good to fork from."""
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@functools.cache
def _shared_pool() -> _Pool:
    return _Pool({})


def close_pool() -> None:
    """Kills the shared workers and the fork server; the next call starts new ones."""
    if _shared_pool.cache_info().currsize:
        _shared_pool().close()
        _shared_pool.cache_clear()
    # Left alone, the server ends when pytest does, but takes seconds to tear torch's modules down. Unreaped, it is found
    # dead and started anew by multiprocessing.
    server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    if server is not None and sys.platform == "linux":
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def run_ranks(
    function: Callable,
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 15.0,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """`function(*args, **kwargs)` on each rank, with torch.distributed set up; the returned values in rank order.

    `group_timeout` is the process group's. `fresh` takes new processes for this call alone (for a test that kills
    ranks, or changes what cannot be reset); so does `env`, variables to set. Those that torch reads when it is imported
    come too late: torch is there before the fork.
    """
    __tracebackhide__ = True
    if DEVICE == "cuda" and world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs, one for each rank; here are {torch.cuda.device_count()}")
    reference = Function.of(function)
    arguments = _pickled(args, kwargs)
    alone = fresh or env is not None
    pool = _Pool(env or {}) if alone else _shared_pool()
    try:
        return pool.call(reference, arguments, world_size, timeout, group_timeout)
    except (RankError, pytest.skip.Exception):
        raise
    except BaseException:  # Ctrl-C or pytest's own timeout: the ranks are somewhere in the call
        pool.kill()
        raise
    finally:
        if alone:
            pool.close()


def _pickled(args: tuple, kwargs: dict[str, Any]) -> bytes:
    for name, value in [*enumerate(args), *kwargs.items()]:
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(f"argument {name!r} ({type(value).__name__}) cannot travel to a rank: {error}") from error
    return pickle.dumps((args, kwargs))


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Callable], Callable]:
    """`def test_x(rank, world_size, ...)` becomes a test that runs its body on all ranks, once per world size.

    The body names what it wants of `rank` and `world_size`; its other parameters come from `pytest.mark.parametrize`
    or from fixtures, and travel by value. Options are those of `run_ranks`.
    """

    def decorate(body: Callable) -> Callable:
        reference = Function.of(body)
        parameters = inspect.signature(body).parameters
        named = frozenset(parameters) & {"rank", "world_size"}

        @functools.wraps(body)
        def test(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            failure = ""
            try:
                run_ranks(run_body, world_size, reference, named, kwargs, **options)
            except RankError as error:
                failure = str(error)
            if failure:  # outside of the handler, where pytest would show the error twice
                pytest.fail(failure, pytrace=False)

        others = [parameter for name, parameter in parameters.items() if name not in ("rank", "world_size")]
        sizes = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([sizes, *others])
        test.body_on_ranks = body
        return pytest.mark.parametrize("world_size", world_sizes, ids=lambda size: f"{size}ranks")(test)

    return decorate
