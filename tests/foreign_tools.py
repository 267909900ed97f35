"""Checkpoints to be damaged, odd values to put in, and what reading them may cost."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import pickletools
import random
import resource
import struct
import sys
import time
import types
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from helpers import sharded
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata

import shardmp
from shardmp.checksum import crc32
from shardmp.exporting import Contents
from shardmp.manifest import _canonical

SECONDS, MEGABYTES = 1.0, 100
OURS = (shardmp.CheckpointError, ValueError, TypeError, FileNotFoundError)  # the errors that a bad file may end in


class Small(nn.Module):
    """A tied weight, a buffer, shapes that two ranks cut into several boxes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3, 4]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens)).float()).float().square().mean()


def build() -> Any:
    return sharded(Small(), torch.optim.AdamW, 0.01, bucket_mb=0.0001)


def save_small(root: Path) -> None:
    model, optimizer = build()
    optimizer.backward(model(torch.tensor([1, 2, 3])))
    optimizer.step()
    shardmp.save(root, model, optimizer, extra={"note": "n" * 400, "order": torch.arange(3)})


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Everything that can be read of a checkpoint without a model."""
    contents = Contents(path)
    contents.tied()
    if contents.manifest is not None:
        contents.verify()
    return {entry.name: contents.reader.read_tensor(entry.name) for entry in contents.entries()}


# -- what reading may cost


_CLASSES = (
    pathlib.PurePath, pathlib.PurePosixPath, pathlib.PosixPath, OrderedDict, Counter, torch.Size, torch.Tensor,
    metadata.Metadata, metadata.MetadataIndex, metadata.TensorProperties, metadata.TensorStorageMetadata,
    metadata.ChunkStorageMetadata, metadata.BytesStorageMetadata, metadata.StorageMeta, filesystem._StorageInfo,
)  # fmt: skip


def state_of_the_process() -> dict[str, Any]:
    """What a file could change for everybody: attributes of classes, modules that only a file asks for."""
    asked = ("this", "antigravity", "deepspeed")
    state: dict[str, Any] = {f"{kind}.{name}": value for kind in _CLASSES for name, value in vars(kind).items()}
    state = {name: value for name, value in state.items() if not name.endswith("__slotnames__")}  # what pickle caches
    state.update((name, name in sys.modules) for name in asked)
    return {**state, "directory": os.getcwd()}


def peak() -> int:
    """Bytes of memory that this process has had at most, since `cheap` began."""
    if not os.access("/proc/self/clear_refs", os.W_OK):  # not Linux: since it was started
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@contextmanager
def cheap() -> Iterator[None]:
    """Fails where what is inside takes more than a second of CPU time or 100 MB, or changes the process."""
    if os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")
    before, memory, start = state_of_the_process(), peak(), time.process_time()
    yield
    assert time.process_time() - start < SECONDS
    assert peak() - memory < MEGABYTES << 20
    after = state_of_the_process()
    changed = {
        name: value for name, value in after.items() if value is not before.get(name) and value != before.get(name)
    }
    assert not changed, changed
    assert after.keys() == before.keys()


def ends_well(read: Callable[[], Any]) -> Any:
    """What was read, or the error that it ended in, which is one of ours."""
    with cheap():
        try:
            return read()
        except OURS as error:
            return error


# -- odd values


_ODD = [
    None, True, -1, 0, 1, 7, 2**31, 2**32 - 1, 2**40, 2**63, 2**70, -(2**40), 1.5, float("nan"), float("inf"), "", "x", "..",
    "../x", "/etc/passwd", "a/b", "a\0b", "\ud800", "\x1b[2J", "n" * 9000, [0], [2**40, 2**40], {"a": 1},
]  # fmt: skip


def odd(generator: random.Random) -> Any:
    """A value that does not belong there, of any kind."""
    deep: Any = 1
    for _ in range(generator.choice((5, 500))):
        deep = [deep]
    return generator.choice([*_ODD, [], {}, deep])


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Each (container, key) in a tree of dicts and lists."""
    found = []
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        found.append((value, key))
        found += places_in(value[key])
    return found


def mutate_tree(tree: Any, generator: random.Random, value: Callable[[random.Random], Any] = odd) -> str:
    """Change, remove, repeat or rename one thing in a tree; says what."""
    container, key = generator.choice(places_in(tree))
    kind = generator.choice(("change", "change", "change", "remove", "repeat", "rename"))
    if kind == "remove":
        del container[key]
    elif kind == "repeat" and isinstance(container, list):
        container.insert(key, container[key])
    elif kind == "rename" and isinstance(container, dict):
        name = generator.choice(("..", "../x", "/x", "", "a\0", "other", "n" * 300, "\x1b[2J"))
        container[name] = container.pop(key)
    else:
        container[key] = value(generator)
    return f"{kind} {key!r:.40}"


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    """With a checksum that is right."""
    path.write_bytes(b'{"crc32":%d,"body":%s}\n' % (crc32(_canonical(body)), _canonical(body)))


# -- pickles


ODD_OPCODES = [
    b"b", b"R", b"\x81", b"0", b"2", b"(", b"1", b"s", b"a", b"e", b"u", b"t", b"Q", b"]", b"}", b"\x8f", b"\x94", b"N",
    b"cposix\nsystem\n", b"cpathlib\nPosixPath\n", b"cthis\nthis\n", b"ctorch\nSize\n", b"cbuiltins\ngetattr\n",
    b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x8e" + struct.pack("<Q", 2**40), b"\x8d" + struct.pack("<Q", 2**62),
    b"\x8b" + struct.pack("<L", 2**31 - 1), b"\x95" + struct.pack("<Q", 2**63), b"X" + struct.pack("<L", 2**32 - 1),
    b"I" + b"9" * 5000 + b"\n", b"V\\ud800\n", b"\x8c\x02..", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\x7f" * 9, b")R",
    b")\x81}b",
]  # fmt: skip


def mutate_pickle(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    """One opcode removed, repeated, replaced, or with another argument, or an odd one put before it."""
    starts = [at for _, _, at in pickletools.genops(content)] + [len(content)]
    number = generator.randrange(1, len(starts) - 1)
    begin, end = starts[number], starts[number + 1]
    own = content[begin:end]
    kind = generator.choice(("remove", "repeat", "put before", "replace", "argument", "swap", "truncate"))
    if kind == "truncate":
        return content[:begin], kind
    other = generator.randrange(1, len(starts) - 1)
    argument = bytes(own[:1]) + bytes(generator.choice((0, 1, 2, 127, 255)) for _ in own[1:])
    new = {
        "remove": b"",
        "repeat": own * 2,
        "put before": generator.choice(ODD_OPCODES) + own,
        "replace": generator.choice(ODD_OPCODES),
        "argument": argument,
        "swap": content[starts[other] : starts[other + 1]],
    }[kind]
    return content[:begin] + new + content[end:], f"{kind} of {own[:20]!r} at {begin}"


# -- archives


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, content in members.items():
            file.writestr(f"archive/{name}", content)
    return stream.getvalue()


_HEADERS = {b"PK\3\4": "HHHHHLLLHH", b"PK\1\2": "HHHHHHLLLHHHHHLL", b"PK\5\6": "HHHHLLH", b"PK\6\6": "QHHLLQQQQ"}


def zip_fields(content: bytes) -> list[tuple[int, str]]:
    """(offset, format) of each number in the headers, the directory and the end of an archive."""
    found = []
    for mark, letters in _HEADERS.items():
        at = content.find(mark)
        while at >= 0:
            offset = at + len(mark)
            for letter in letters:
                found.append((offset, letter))
                offset += struct.calcsize("<" + letter)
            at = content.find(mark, at + 4)
    return [(at, letter) for at, letter in found if at + 8 <= len(content)]


def mutate_archive(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    """One number of the zip format, one byte of its names or contents, or its length is another."""
    changed = bytearray(content)
    fields = zip_fields(content)
    kind = generator.choice(("field", "field", "field", "byte", "cut"))
    if kind == "field" and fields:
        at, letter = generator.choice(fields)
        most = 2 ** (8 * struct.calcsize("<" + letter)) - 1
        struct.pack_into("<" + letter, changed, at, generator.choice((0, 1, 8, most, most - 1, most // 2)))
        return bytes(changed), f"field {letter} at {at}"
    at = generator.randrange(len(content))
    if kind == "cut":
        return bytes(changed[:at]), f"cut at {at}"
    changed[at] ^= 1 << generator.randrange(8)
    return bytes(changed), f"bit at {at}"


# -- DeepSpeed


def _class(module: str, name: str) -> Any:
    return type(name, (), {"__module__": module, "__qualname__": name})


SCALER = _class("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")


@contextmanager
def deepspeed_there() -> Iterator[None]:
    """The names that its pickles ask for, while one is written."""
    parts = SCALER.__module__.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update((name, types.ModuleType(name)) for name in names)
    sys.modules[SCALER.__module__].DynamicLossScaler = SCALER  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def deepspeed_parts() -> dict[str, dict[str, Any]]:
    """What two ranks of DeepSpeed 0.19 save with ZeRO-2 and AdamW, by the files' names: 12 elements and their padding."""
    scaler = SCALER()
    scaler.__dict__ = {
        "dynamic": True, "cur_scale": 256.0, "cur_iter": 4, "last_overflow_iter": 1, "scale_window": 100,
        "cur_hysteresis": 1, "delayed_shift": 2, "min_scale": 1.0,
    }  # fmt: skip
    shapes = OrderedDict({"a.weight": torch.Size([3, 3]), "a.bias": torch.Size([3])})
    parts: dict[str, dict[str, Any]] = {
        "mp_rank_00_model_states.pt": {
            "module": {"a.weight": torch.ones(3, 3).half(), "a.bias": torch.ones(3).half(), "seen": torch.tensor([2])},
            "buffer_names": ["seen"], "param_shapes": [shapes], "shared_params": {"b.weight": "a.weight"},
            "lr_scheduler": {"last_epoch": 3}, "global_steps": 4, "skipped_steps": 1, "dp_world_size": 2,
            "mp_world_size": 1, "ds_config": {"fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}},
            "ds_version": "0.19.8", "epoch": 3,
        }
    }  # fmt: skip
    for rank in range(2):
        flat = torch.arange(6.0) + 6 * rank
        state = {"step": 3.0, "exp_avg": flat / 8, "exp_avg_sq": flat / 16}
        parts[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": {
                "loss_scaler": scaler, "zero_stage": 2, "partition_count": [2], "group_paddings": [0],
                "single_partition_of_fp32_groups": [flat], "clip_grad": 0.5,
                "base_optimizer_state": {
                    "state": {0: state},
                    "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.0, "params": [0]}],
                },
            },
            "ds_version": "0.19.8",
        }  # fmt: skip
    return parts


def write_deepspeed(folder: Path, parts: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    with deepspeed_there():
        for name, part in parts.items():
            torch.save(part, folder / name)


def rewrite_metadata(path: Path, change: Callable[[Any], None]) -> None:
    """Change the real object that DCP would read, and write it as DCP does."""
    found = pickle.loads((path / ".metadata").read_bytes())
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))


def change_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    body = json.loads((path / "manifest.json").read_bytes())["body"]
    change(body)
    write_manifest(path / "manifest.json", body)


def name_of(value: Any) -> str:
    """Of a case: what its error must say."""
    return value if isinstance(value, str) else ""
