"""One rank of a multi-rank test: the process that `ranks.py` starts, and the messages between the two.

Owns   the process's output, stack dumps and torch state; a process group per call: gloo over the loopback interface, or
       with SHARDMP_TEST_DEVICE=cuda NCCL, one GPU for each rank.
Takes  calls: a function by name, pickled arguments, rank and world size.
Gives  an outcome per call (value, skip or error), then, when the process group is gone, the word that it is idle. A
       rank that is done keeps its group until the pool releases it: its peers may still read what it has sent.
Invariant: a call finds the process as the first one did, and the process ends when pytest does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest

# Where tests run: "" for the CPU, as `make test` does; "cuda" for `make test-gpu`; "cpu" goes the way of "cuda" on the CPU.
DEVICE = os.environ.get("SHARDMP_TEST_DEVICE", "")
IDLE = b"idle"
RELEASE = b"release"
# Imported once by the fork server. torch._dynamo is what the first torch.optim.Optimizer of a process imports, and
# takes longer than torch itself.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "numpy", "pytest"]


@dataclass(frozen=True)
class Function:
    """A module-level function by name. A test made by `on_ranks` stands for the body that it wraps."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, function: Callable) -> Function:
        if not inspect.isfunction(function) or function.__qualname__ != function.__name__:
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(f"ranks find a function by its name: expected a module-level function, got {name}")
        module = sys.modules[function.__module__]
        return cls(function.__module__, os.path.realpath(str(module.__file__)), function.__name__)

    def find(self) -> Callable:
        module = importlib.import_module(self.module)
        if os.path.realpath(str(module.__file__)) != self.file:
            raise ImportError(f"a rank found {module.__file__} for module {self.module!r}, the test is in {self.file}")
        function = getattr(module, self.name)
        return getattr(function, "body_on_ranks", function)


@dataclass(frozen=True)
class Call:
    """What one rank is asked to do. The arguments stay pickled until `path` lets their classes be imported."""

    function: Function
    arguments: bytes
    rank: int
    world_size: int
    store: str
    group_timeout: float
    path: list[str]
    directory: str


@dataclass(frozen=True)
class Outcome:
    """How a rank's call ended: kind is value, skip, error, or dead (written by the pool); text is the traceback."""

    kind: str
    when: float
    text: str = ""
    value: bytes = b""

    @property
    def failed(self) -> bool:
        return self.kind in ("error", "dead")


def serve(channel: Connection, log: str, stacks: str, environment: dict[str, str]) -> None:
    """The worker's main: answers calls inside a configured pytest, so that a failed assert shows its values."""
    _become_rank(log, stacks, environment)

    class Serve:
        @pytest.hookimpl(tryfirst=True)
        def pytest_cmdline_main(self) -> int:
            _answer_calls(channel)
            return 0

    options = ["-c", os.devnull, "--rootdir", os.path.dirname(log), "--noconftest", "--capture=no"]
    unwanted = ["cacheprovider", "faulthandler", "terminal"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    pytest.main([*options, *(f"-pno:{name}" for name in unwanted)], plugins=[Serve()])
    _end(os.path.dirname(log))  # the channel ends with pytest alone: a pool kills its ranks


def _become_rank(log: str, stacks: str, environment: dict[str, str]) -> None:
    os.setsid()  # Ctrl-C is for pytest, which then kills the ranks
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # appending: the pool truncates it before each call
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    dumps = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=dumps, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(os.path.dirname(log),), daemon=True).start()
    for loopback in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # gloo else resolves the host's name, which may need a network
    os.environ.update(environment)


def _end_with_parent(directory: str) -> None:
    """A rank that hangs in a collective never reads its channel, so a thread watches for pytest's end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _end(directory)


def _end(directory: str) -> NoReturn:
    """A pytest that was killed has left the pool's directory to its ranks, some of which may still write there."""
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            break
        time.sleep(0.01)
    os._exit(1)


def _answer_calls(channel: Connection) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    import torch.distributed

    gc.freeze()  # torch's own objects: collecting them takes 0.2 s after each call and frees nothing
    environment = dict(os.environ)
    channel.send_bytes(IDLE)
    while True:
        try:
            call = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            outcome = _answer(call)
        channel.send_bytes(pickle.dumps(outcome))
        released = channel.recv_bytes()
        assert released == RELEASE
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
        channel.send_bytes(IDLE)


def _answer(call: Call) -> Outcome:
    try:
        value = pickle.dumps(_run(call))
        return Outcome("value", time.time(), value=value)
    except pytest.skip.Exception as skip:
        return Outcome("skip", time.time(), str(skip))
    except BaseException as error:
        when = time.time()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return Outcome("error", when, "".join(traceback.format_exception(type(error), error, frames)))


def _run(call: Call) -> Any:
    import torch.distributed

    sys.path[:] = call.path
    os.chdir(call.directory)
    function = call.function.find()
    args, kwargs = pickle.loads(call.arguments)
    _reset_torch()
    with _on_device(call.rank) as options:
        torch.distributed.init_process_group(
            **options,
            store=torch.distributed.FileStore(call.store, call.world_size),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.group_timeout),
        )
        torch.distributed.barrier()  # a rank that fails at once must not take its sockets from peers that still connect
        return function(*args, **kwargs)


@contextlib.contextmanager
def _on_device(rank: int) -> Iterator[dict[str, Any]]:
    """What the call makes lies on DEVICE; gives the options of the process group there."""
    if not DEVICE:
        yield {"backend": "gloo"}
        return
    import torch
    from helpers import OnDevice

    options: dict[str, Any] = {"backend": "gloo"}
    if DEVICE == "cuda":
        os.environ["LOCAL_RANK"] = str(rank)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        # Bits are compared, so kernels must add in one order; cuBLAS wants the variable for that.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        options = {"backend": "nccl", "device_id": device}
    with OnDevice(DEVICE):
        yield options


def _reset_torch() -> None:
    """What an earlier test may have set. All ranks start from one seed; a test that needs others seeds itself."""
    import numpy
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def run_body(body: Function, named: frozenset[str], kwargs: dict[str, Any]) -> None:
    """The body of an `on_ranks` test, with what it names of rank and world size."""
    import torch.distributed

    own = {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}
    body.find()(**{name: own[name] for name in own if name in named}, **kwargs)
