"""Time to save and to load a checkpoint, beside writing and reading the same bytes, FSDP2 with plain DCP, and DeepSpeed.

    python benchmarks/checkpoint.py                        # 63M parameters, 2 ranks, 3 interleaved rounds
    python benchmarks/checkpoint.py --ranks 4 --directory /fast/disk

`raw` writes, on each rank, the bytes of that rank's file in one go from memory that is there already, and syncs them:
what the disk can do. Rounds are interleaved, medians are quoted, times are those of the slowest rank. Files are dropped
from the page cache before each read ("cold": what a restart meets); "warm" reads what is still in memory.

What a save costs the training is measured over steps: the time of so many steps with a save, less their time without.
A save in the background ends within them. Beside it stands a thread that does nothing but write the same bytes past the page
cache: what the disk alone costs the training, which on a virtual machine is much (its host copies the bytes on the same
cores, and Linux counts that as stolen time). The models' parameters: 15 residual Linear(2048, 2048), AdamW, FP16.
DeepSpeed (ZeRO-2, FP16) takes part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def build(width: int) -> Any:
    """The model."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(15))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + F.gelu(layer(x))
            return x

    torch.manual_seed(0)
    return Wide()


class Timer:
    """Seconds of the slowest rank, by what was done, a list of all rounds."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self.cpu = 0.0  # of this rank's last background save, after its call

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        import torch
        import torch.distributed as dist

        dist.barrier()
        start = time.perf_counter()
        result = work()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.found.setdefault(name, []).append(seconds.item())
        return result

    def median(self, name: str) -> float:
        return statistics.median(self.found[name])


def drop_from_cache(directory: Path) -> None:
    """Let the next read of these files come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# -- contestants


class Raw:
    """One buffer a rank, written and read whole."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.directory = directory / "raw"
        self._path = self.directory / f"{rank}"
        self._data = memoryview(mmap.mmap(-1, -(-size // 4096) * 4096))  # whole pages, as O_DIRECT wants them
        self._data[:] = (os.urandom(2**20) * (size // 2**20 + 1))[: len(self._data)]

    def save(self, past_cache: bool = False) -> None:
        self.directory.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(self._path, flags | os.O_DIRECT if past_cache else flags)
        rest = self._data
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def load(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        done = 0
        while done < len(self._data):
            done += os.preadv(descriptor, [self._data[done:]], done)
        os.close(descriptor)


class Ours:
    """shardmp in FP16."""

    def __init__(self, directory: Path, width: int) -> None:
        import torch

        import shardmp

        self.directory = directory / "shardmp"
        plain = build(width)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
        self.model, self.optimizer = shardmp.shard(plain, optimizer)
        self._batch = torch.randn(1, width)

    def step(self) -> None:
        self.optimizer.backward((self.model(self._batch) - self._batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, background: bool = False) -> Any:
        import shardmp

        return shardmp.save(self.directory, self.model, self.optimizer, keep=1, background=background)

    def load(self) -> None:
        import shardmp

        shardmp.load(self.directory, self.model, self.optimizer)


class Fsdp2:
    """fully_shard in FP32 with plain `dcp.save` of its state: the same masters and moments."""

    def __init__(self, directory: Path, width: int) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        self.directory = directory / "fsdp2"
        self.model = build(width)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randn(1, width)

    def step(self) -> None:
        (self.model(self._batch) - self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=self.directory)

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=self.directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class DeepSpeed:
    """ZeRO-2 in FP16 with `save_checkpoint`."""

    def __init__(self, directory: Path, width: int) -> None:
        import deepspeed
        import torch
        from deepspeed.accelerator import get_accelerator

        # Else its all-reduce is compiled, under a lock file for which every later run waits where this one is killed.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # It refuses FP16 on a CPU without FP16 units, though torch has it.
        type(get_accelerator()).is_fp16_supported = lambda self: True
        self.directory = directory / "deepspeed"
        model = build(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._batch = torch.randn(1, width).half()

    def step(self) -> None:
        self.engine.backward((self.engine(self._batch) - self._batch).float().square().mean())
        self.engine.step()

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.directory), tag="it")

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.directory), tag="it")


# -- the measurement


def worker(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, directory = dist.get_rank(), Path(arguments.directory)
    timer = Timer()
    ours = Ours(directory, arguments.width)
    contestants: dict[str, Any] = {"shardmp": ours, "FSDP2 + DCP": Fsdp2(directory, arguments.width)}
    if importlib.util.find_spec("deepspeed"):
        contestants["DeepSpeed"] = DeepSpeed(directory, arguments.width)
    for contestant in contestants.values():
        for _ in range(3):
            contestant.step()
    path = ours.save().path
    contestants["raw"] = Raw(directory, rank, (path / f"__{rank}_0.distcp").stat().st_size)
    ours.save(background=True).wait()  # its snapshot's memory is there from now on
    for _ in range(arguments.rounds):
        for name, contestant in contestants.items():
            timer(f"{name} save", contestant.save)
            if rank == 0:
                drop_from_cache(contestant.directory)
            timer(f"{name} load cold", contestant.load)
            timer(f"{name} load warm", contestant.load)
        training(timer, ours, contestants["raw"], arguments.steps)
    if rank == 0:
        report(timer, list(contestants), arguments)
    dist.barrier()
    dist.destroy_process_group()


def training(timer: Timer, ours: Ours, raw: Raw, num_steps: int) -> None:
    """So many steps alone, with a blocking save, and with one in the background that ends within them."""

    def steps() -> None:
        for _ in range(num_steps):
            ours.step()
        ours.optimizer.synchronize()

    def with_save(background: bool) -> None:
        saving = ours.save(background)
        steps()
        saving.wait()

    def with_raw_writes() -> None:
        writing = threading.Thread(target=lambda: raw.save(past_cache=True))
        writing.start()
        steps()
        writing.join()

    for name, work in (
        ("steps", steps),
        ("steps with a save", lambda: with_save(False)),
        ("steps with a background save", lambda: with_save(True)),
        ("steps with raw writes", with_raw_writes),
    ):
        before = stolen()
        timer(name, work)
        timer.found.setdefault(f"stolen from {name}", []).append(stolen() - before)
    saving = timer("call of a background save", lambda: ours.save(True))
    before = time.process_time()
    saving.wait()
    timer.cpu = time.process_time() - before


def stolen() -> float:
    """Seconds since the start in which this machine's cores, each for its part, ran something outside of it."""
    ticks = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def report(timer: Timer, names: list[str], arguments: argparse.Namespace) -> None:
    print(f"{arguments.ranks} ranks, {15 * arguments.width * (arguments.width + 1) / 1e6:.0f}M parameters, medians of")
    print(f"{arguments.rounds} rounds; seconds, and the ratio to raw\n")
    print(f"{'':14}{'save':>16}{'load, cold':>16}{'load, warm':>16}")
    for name in names:
        cells = []
        for kind in ("save", "load cold", "load warm"):
            seconds = timer.median(f"{name} {kind}")
            cells.append(f"{seconds:8.2f} ({seconds / timer.median(f'raw {kind}'):.2f})")
        print(f"{name:14}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"\n{arguments.steps} steps{'seconds':>22}{'lost':>8}{'stolen from a core':>22}")
    for name in ("steps", "steps with a save", "steps with a background save", "steps with raw writes"):
        seconds, taken = timer.median(name), timer.median(f"stolen from {name}")
        lost = seconds - timer.median("steps")
        print(f"{name.removeprefix('steps ') if ' ' in name else 'alone':22}{seconds:7.2f}{lost:8.2f}{taken:22.2f}")
    blocking, background, raw = (
        timer.median(f"steps with {what}") - timer.median("steps")
        for what in ("a save", "a background save", "raw writes")
    )
    call = timer.median("call of a background save")
    print(
        f"\nOf what a blocking save costs the training, one in the background costs {100 * background / blocking:.0f} %, "
        f"{100 * (background - raw) / blocking:.0f} % beyond the disk's own\nshare. "
        f"Training waits {call:.2f} s for its call; its thread takes {timer.cpu:.2f} s of CPU time."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=2048, help="of the 15 layers")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps around a save; a background save must end within them"
    )
    parser.add_argument("--directory", help="where to write; a new one in the system's temporary directory by default")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which all is killed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    where = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.directory))
    options = [f"--{key}={getattr(arguments, key)}" for key in ("ranks", "rounds", "width", "steps")]
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.ranks}",
        __file__,
        "--worker",
    ]
    try:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(where / "extensions"),
        }
        command = [sys.executable, *launch, f"--directory={where}", *options]
        process = subprocess.Popen(command, env=environment)
        try:
            if process.wait(arguments.timeout):
                raise SystemExit("a rank has failed; its error is above")
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun passes it on, and kills its workers after 30 s
            process.wait(60)
            raise SystemExit(f"not done within {arguments.timeout} s (--timeout)") from None
        finally:
            process.kill()
    finally:
        shutil.rmtree(where, ignore_errors=True)


if __name__ == "__main__":
    main()
