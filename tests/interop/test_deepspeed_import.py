"""Checkpoints of a real DeepSpeed on two ranks become ours, bit for bit; what cannot be right is refused by name."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_model import HYSTERESIS, RUNS, UNSHARDED, WINDOW, Small, make_batch, make_optimizer
from helpers import masters
from ranks import run_ranks
from test_checkpoint import moments
from torch import Tensor
from torch.nn import functional as F

import shardmp
from shardmp.deepspeed_files import Saved
from shardmp.deepspeed_values import optimizer_name
from shardmp.exporting import Contents

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(random|torch.distributed is)"),
    pytest.mark.timeout(600),  # DeepSpeed's part takes 40 s alone, and many times that where other work goes on
]
MOMENTS = ("exp_avg", "exp_avg_sq")
LOCAL = ("params", "fused", "foreach")  # of a group, what is this process's own matter


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with every run, as two ranks of DeepSpeed have left it."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(HERE / "deepspeed_run.py"), str(folder), str(rank), "2"]
            with log.open("w") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        deadline = time.monotonic() + 500
        for process, log in zip(processes, logs, strict=True):
            code = process.wait(max(1, deadline - time.monotonic()))
            assert code == 0, log.read_text()[-6000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    yield folder
    shutil.rmtree(folder)


def held(saved: Path, name: str) -> dict[str, Any]:
    return torch.load(saved / name / "held.pt")


# -- the same bits


@pytest.mark.parametrize("name", RUNS)
def test_masters_and_moments_are_what_deepspeed_holds(saved: Path, name: str, tmp_path: Path) -> None:
    """Its own safe_get_full_fp32_param and safe_get_full_optimizer_state say so, and its zero_to_fp32 of the masters.

    With round_robin_gradients the first two give another parameter's values (its slice mappings are of another order);
    zero_to_fp32 is right.
    """
    made = shardmp.import_deepspeed(saved / name, tmp_path)
    contents, expected = Contents(tmp_path), held(saved, name)
    contents.verify()
    assert (made.stage, made.ranks, made.step, made.path) == (RUNS[name][0], 2, 4, contents.path)
    assert set(expected["masters"]) == {n for n, p in Small().named_parameters() if p.requires_grad}
    for parameter, master in expected["tool"].items():
        found = contents.reader.read_tensor(f"model.{parameter}")
        assert torch.equal(found, master)
        assert name == "round-robin" or torch.equal(found, expected["masters"][parameter])
        assert not torch.equal(found, found.bfloat16().float()), "not the rounded weights"
    for key, moment in expected["moments"].items():
        assert moment.abs().max() > 0
        assert name == "round-robin" or torch.equal(contents.reader.read_tensor(f"optim.state.{key}"), moment)
    assert contents.tied() == {"model.head.weight": "model.tokens.weight"}


def reference_step(state: dict[str, Any]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, masters and moments after one more step of plain AdamW in FP32, on tensors padded to whole vectors.

    Padded, because torch's fused kernel rounds differently in the last elements of a tensor.
    """
    model = Small()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["masters"].get(name, state["fixed"]))
    loss = model(*make_batch(1000))
    loss.backward()
    padded = Small()
    optimizer = make_optimizer(padded, fused=True)
    pads = {}
    for name, parameter in padded.named_parameters():
        if parameter.requires_grad:
            size = parameter.numel()
            pads[name] = (size, parameter.shape)

            def pad(value: Tensor, size: int = size) -> Tensor:
                return F.pad(value.detach().reshape(-1), (0, -size % 64))

            parameter.data, parameter.grad = pad(state["masters"][name]), None
            parameter.grad = pad(dict(model.named_parameters())[name].grad)
            own = {key: pad(state["moments"][f"{name}.{key}"]) for key in MOMENTS}
            optimizer.state[parameter] = {**own, "step": state["step"].clone()}
    for group, options in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(options)
    optimizer.step()
    named = dict(padded.named_parameters())
    weights = {name: named[name].detach()[:size].view(shape) for name, (size, shape) in pads.items()}
    found = {f"{n}.{k}": optimizer.state[named[n]][k][:size] for n, (size, _) in pads.items() for k in MOMENTS}
    return loss.item(), weights, found


def load_and_step(roots: list[Path]) -> list[dict[str, Any]]:
    """What each holds after the load, and after one more step whose only micro-batch rank 0 has."""
    told = []
    for root in roots:
        plain = Small()
        options = {"precision": "fp32", "average": "micro_batches"}
        model, optimizer = shardmp.shard(plain, make_optimizer(plain), **options)
        loaded = shardmp.load(root, model, optimizer, cast=True)
        before = {"masters": masters(optimizer), "moments": moments(optimizer), "fixed": plain.fixed.weight.clone()}
        before["step"] = next(value for key, value in before["moments"].items() if key.endswith(".step"))
        before["groups"] = [{k: v for k, v in group.items() if k not in LOCAL} for group in optimizer.param_groups]
        before["buffers"] = {key: value.clone() for key, value in plain.named_buffers()}
        before["extra"] = loaded.extra
        rank = torch.distributed.get_rank()
        optimizer.backward(model(*make_batch(1000)) if rank == 0 else None)
        optimizer.step()
        told.append({"before": before, "masters": masters(optimizer), "moments": moments(optimizer)})
    return told


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_at_any_number_of_ranks_the_next_step_is_that_of_plain_adamw(saved: Path, ranks: int, tmp_path: Path) -> None:
    """What a user of the import wants: the run goes on, on other hardware."""
    names = ["bf16-1", "fp16-2", "bf16-3", "sub-groups"]
    for name in names:
        shardmp.import_deepspeed(saved / name, tmp_path / name)
    for told in run_ranks(load_and_step, ranks, [tmp_path / name for name in names], timeout=120):
        for name, found in zip(names, told, strict=True):
            expected, before = held(saved, name), found["before"]
            assert before["step"].item() == (3 if RUNS[name][1] == "fp16" else 4), "one of FP16's four was skipped"
            for parameter, master in expected["masters"].items():
                assert torch.equal(before["masters"][parameter], master)
                for key in MOMENTS:
                    moment = before["moments"][f"{parameter}.{key}"]
                    assert torch.equal(moment, expected["moments"][f"{parameter}.{key}"].view(-1))
            assert [group["weight_decay"] for group in before["groups"]] == [0.1, 0.0]
            assert before["groups"][1]["lr"] == 0.02 * before["groups"][0]["lr"] / 0.01 < 0.02, "its scheduler's"
            _, weights, states = reference_step(before)
            for parameter, weight in weights.items():
                assert torch.equal(found["masters"][parameter], weight)
                assert not torch.equal(weight, expected["masters"][parameter])
            for key, state in states.items():
                assert torch.equal(found["moments"][key], state)


def load_with_scale(root: Path) -> Any:
    plain = Small()
    policy = shardmp.Precision("fp16", growth_interval=WINDOW, hysteresis=HYSTERESIS)
    model, optimizer = shardmp.shard(plain, make_optimizer(plain), precision=policy)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loaded = shardmp.load(root, model, optimizer, cast=True, extra={"lr_scheduler": schedule})
    counters = optimizer.counters()
    optimizer.backward(model(*make_batch(1000)))
    optimizer.step()
    buffers = {key: value.clone() for key, value in plain.named_buffers()}
    return counters, optimizer.loss_scale, schedule.last_epoch, buffers, plain.fixed.weight.clone(), loaded.extra


@pytest.mark.parametrize("name", ["fp16-1", "fp16-2", "fp16-3"])
def test_scale_counters_buffers_frozen_weights_and_the_users_values_come_along(
    saved: Path, name: str, tmp_path: Path
) -> None:
    """The next scale is DeepSpeed's own after its next step: it doubles there, two clean steps after the overflow."""
    made = shardmp.import_deepspeed(saved / name, tmp_path)
    assert made.options == (
        'precision=shardmp.Precision("fp16", init_scale=256.0, growth_interval=2, hysteresis=2, min_scale=1.0), '
        "max_grad_norm=0.5"
    )
    assert made.dropped == ["arguments"], "an object of a class is reported, not stored"
    torch.manual_seed(0)
    initial = Small()
    for counters, scale, epoch, buffers, fixed, extra in run_ranks(load_with_scale, 2, tmp_path):
        assert (counters["steps"], counters["skipped"]) == (4, 1)
        assert (counters["scaler"]["scale"], counters["scaler"]["hysteresis"]) == (256.0, 1)
        assert scale == held(saved, name)["next_scale"] == 512.0
        assert epoch == 3, "the scheduler's steps: it stood still at the skipped one"
        assert torch.equal(buffers["seen"], initial.seen)
        assert torch.equal(buffers["mean"], initial.mean)
        assert torch.equal(fixed, initial.fixed.weight.half().float()), "DeepSpeed has rounded what is frozen"
        assert extra["client_state"]["epoch"] == 3
        assert torch.equal(extra["client_state"]["order"], torch.arange(4))


# -- what is refused


def copy(saved: Path, name: str, target: Path) -> Path:
    shutil.copytree(saved / name / "global_step4", target)
    return target


def optimizer_file(path: Path, rank: int) -> Path:
    return next(path.glob(f"*zero_pp_rank_{rank}_*_optim_states.pt"))


def refusal(path: Path, target: Path, kind: type[Exception] = ValueError, **options: Any) -> str:
    with pytest.raises(kind) as error:
        shardmp.import_deepspeed(path, target, **options)
    assert not list(target.glob("*")), "nothing was written"
    return str(error.value)


@pytest.mark.parametrize("name", ["bf16-1", "fp16-3"])
def test_a_missing_damaged_or_foreign_rank_file_is_named(saved: Path, name: str, tmp_path: Path) -> None:
    """A part of a model is worse than none."""
    path, target = copy(saved, name, tmp_path / "a"), tmp_path / "out"
    first, second = optimizer_file(path, 0), optimizer_file(path, 1)
    content = second.read_bytes()
    second.unlink()
    assert f"{second} is missing" in refusal(path, target, shardmp.CheckpointError)
    second.write_bytes(content[: len(content) // 2])
    assert f"{second} was not read" in refusal(path, target, shardmp.CheckpointError)
    shutil.copy(saved / name / "early" / second.name, second)
    assert "rank 1 has made" in refusal(path, target, shardmp.CheckpointError)
    second.write_bytes(content)
    third = second.with_name(second.name.replace("rank_1", "rank_2"))
    third.write_bytes(content)
    assert "files of 3 ranks" in refusal(path, target, shardmp.CheckpointError)
    third.unlink()
    model = next(path.glob("*rank_0*_model_states.pt" if name == "fp16-3" else "mp_rank_00_model_states.pt"))
    model.rename(path / "elsewhere")
    assert f"{model} is missing" in refusal(path, target, shardmp.CheckpointError)
    (path / "elsewhere").rename(model)
    with zipfile.ZipFile(first) as file:
        members = {name: file.read(name).replace(b"0.19.8", b"0.99.8") for name in file.namelist()}
    with zipfile.ZipFile(first, "w") as file:  # with checksums that are right
        for member, content in members.items():
            file.writestr(member, content)
    assert "DeepSpeed 0.14 to 0.19, found version '0.99.8'" in refusal(path, target)


def test_other_kinds_of_checkpoints_are_refused_by_name(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for number, (file, told) in enumerate(
        {
            "mp_rank_01_model_states.pt": "tensor-parallel",
            "layer_00-model_00-model_states.pt": "pipeline-parallel",
            "layer_0_expert_0_mp_rank_00_model_states.pt": "MoE",
            "expp_rank_0_mp_rank_00_optim_states.pt": "MoE",
            "offloaded_tensors": "NVMe",
        }.items()
    ):
        path = copy(saved, "bf16-2", tmp_path / str(number))
        (path / file).touch()
        message = refusal(path, target)
        assert told in message
        assert str(path / file) in message
    assert "ZeRO stage 1, 2 or 3" in refusal(saved / UNSHARDED, target)
    assert "'Adam' or 'AdamW', got 'SGD'" in refusal(saved / "bf16-2", target, optimizer="SGD")
    assert "no DeepSpeed checkpoint" in refusal(tmp_path / "nowhere", target, FileNotFoundError)
    assert "there are early, global_step4" in refusal(saved / "bf16-2", target, FileNotFoundError, tag="global_step9")


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ({"type": "AdamW"}, "AdamW"),
        ({"type": "Adam"}, "AdamW"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"),
        ({"type": "Lamb"}, "expected Adam or AdamW, the configuration has 'Lamb'"),
        (None, "give optimizer="),
    ],
    ids=str,
)
def test_which_adam_deepspeeds_own_was_is_in_its_configuration(configured: Any, expected: str) -> None:
    """FusedAdam has the same state for both; "Adam" is AdamW unless adam_w_mode says otherwise (runtime/engine.py)."""
    inner = {"base_optimizer_state": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}}
    found = Saved(Path("there"), "0.19.8", 2, [{"ds_config": {"optimizer": configured}}], [inner])
    if expected.startswith("Adam"):
        assert optimizer_name(found, None) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            optimizer_name(found, None)
        assert optimizer_name(found, "Adam") == "Adam"


class Evil:
    """Makes a directory when it is unpickled, by a function that torch itself blocks or by one that it does not know."""

    def __init__(self, marker: Path, function: Any = os.mkdir) -> None:
        self.marker, self.function = marker, function

    def __reduce__(self) -> Any:
        return self.function, (str(self.marker),)


def make_directory(path: str) -> None:
    Path(path).mkdir()


def test_a_crafted_file_runs_no_code(saved: Path, tmp_path: Path) -> None:
    """DeepSpeed's own reader unpickles whatever stands there."""
    path, marker = copy(saved, "bf16-2", tmp_path / "a"), tmp_path / "marker"
    first = optimizer_file(path, 0)
    for function in (os.mkdir, os.makedirs, make_directory):
        whole = {"optimizer_state_dict": {"partition_count": Evil(marker, function)}, "ds_version": "0.19.8"}
        torch.save(whole, first)
        assert first.name in refusal(path, tmp_path / "out", Exception)
    first.write_bytes(pickle.dumps(Evil(marker)))
    assert f"{first} was not read" in refusal(path, tmp_path / "out", shardmp.CheckpointError)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker, make_directory)))
    assert marker.exists(), "it would have"


# -- the command


def test_the_command_needs_no_deepspeed_and_says_how_the_run_was_made(saved: Path, tmp_path: Path) -> None:
    """The extra is for this test alone: who imports has often left the old environment behind."""
    program = "import sys; sys.modules['deepspeed'] = None; from shardmp.cli import main; main()"

    def command(*arguments: object) -> subprocess.CompletedProcess:
        whole = [sys.executable, "-c", program, "import-deepspeed", *map(str, arguments)]
        return subprocess.run(whole, capture_output=True, text=True, timeout=240, check=False)

    done = command(saved / "fp16-2", tmp_path, "--tag", "early")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(tmp_path / "step-000000003.1")
    assert lines[1].startswith("step 3; DeepSpeed 0.")
    assert "init_scale=256.0" in lines[2]
    failed = command(saved / UNSHARDED, tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.startswith("shardmp import-deepspeed: error: ")
