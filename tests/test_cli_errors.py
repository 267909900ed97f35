"""No command ends with a traceback, whatever it is given: every option of every command, found by introspection.

A command that is new is tried without a word here; one that blocks or starts something needs a stand-in in `harmless`.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn
from typer.testing import CliRunner

import shardmp
from shardmp import cli, command_line, launch

COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
BAD = (
    *("", " ", "-1", "0", "1", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30, "9" * 5000, "0x10", "1.5", "½", "٣"),
    *(
        "a b",
        "ключ",
        "../../x",
        "/",
        "/dev/null",
        "/dev/full",
        ".",
        "~",
        "x" * 5000,
        "[::1]:1",
        "127.0.0.1:99999",
        "%s%n{}",
    ),
    *(
        "1:2:3",
        "1x2x3",
        "4x128:int64",
        "os:getcwd",
        "models:broken",
        "models:nothing",
        "models:leaves",
        "models:encoder",
    ),
    *(
        "syntax:x",
        "raises:x",
        "leaves:x",
        ":",
        "a:",
        "..:x",
        "fp16",
        "exact",
        "1GiB",
        "7B",
        "[red]",
        "\x1b[31m",
        "true",
    ),
)
MODULES = {
    "models": """
import sys
from torch import nn
def broken(): raise KeyError("no\\nline")
def nothing(): return None
def leaves(): sys.exit("I leave")
def encoder(): return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
""",
    "syntax": "def x(:\n",
    "raises": "raise OSError('at import')\n",
    "leaves": "import sys; sys.exit(3)\n",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch` starts nothing, and `rendezvous` opens its store and ends."""
    over = types.SimpleNamespace(Event=lambda: types.SimpleNamespace(wait=lambda: None, set=lambda: None))
    monkeypatch.setattr(launch, "start", lambda command: None)
    monkeypatch.setattr(launch, "threading", over)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch.network, "RESOLVE_LIMIT", 0.0)
    monkeypatch.setattr(launch.network, "resolve", lambda name, limit=0.0: [name] if name[:1].isdigit() else [])


def check(arguments: list[str]) -> Any:
    """The command leaves with a code of its own; what it says of an error is one line, with nothing of Python's."""
    done = CliRunner().invoke(cli.app, arguments)
    what = f"shardmp {shlex.join(arguments)[:300]}\n{done.output[-3000:]}"
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{what}\n{done.exception!r}"
    assert done.exit_code in (0, 1, 2), what
    assert "Traceback" not in done.output, what
    assert "error: unexpected" not in done.output, what
    if done.exit_code:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert lines, what
        ours = [line for line in lines if line.startswith(f"shardmp {arguments[0]}: ")]
        assert len(ours) == 1 or lines[0].startswith("Usage: "), what
    return done


def example_of(name: str) -> list[str]:
    """The arguments of the command's own example, without what starts it."""
    words = shlex.split(COMMANDS[name].epilog.removeprefix("Example: "))
    return words[words.index("shardmp") + 1 :]


def options_of(name: str) -> list[Any]:
    return [option for option in COMMANDS[name].params if option.name != "help"]


def given(option: Any, value: str) -> list[str]:
    if option.param_type_name == "argument":
        return [value]
    return [option.opts[-1]] if getattr(option, "is_flag", False) else [option.opts[-1], value]


CASES = [(name, option.name) for name in COMMANDS for option in options_of(name)]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example_that_it_understands(name: str) -> None:
    words = example_of(name)
    assert words[0] == name
    with COMMANDS[name].make_context(name, words[1:]) as context:  # raises on what it does not know
        assert context.params


@pytest.mark.parametrize("name", [*COMMANDS, None])
def test_help_is_whole_and_ends_with_the_example(name: str | None) -> None:
    shown = CliRunner().invoke(cli.app, ["--help"] if name is None else [name, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    words = " ".join(shown.stdout.split())
    for each in [name] if name else COMMANDS:
        assert " ".join(COMMANDS[each].help.split()) in words
        for option in options_of(each) if name else ():
            assert " ".join(option.help.split()) in words
            assert option.help.endswith((".", "?")), option.help
        if name:
            assert f"Example: {COMMANDS[each].epilog.removeprefix('Example: ')}" in words


@pytest.mark.parametrize(("name", "option"), CASES, ids=str)
def test_no_value_of_an_option_gives_a_traceback(name: str, option: str) -> None:
    """The values that people and fuzzers type, alone and beside the example's options."""
    (tried,) = (each for each in options_of(name) if each.name == option)
    values = ("",) if getattr(tried, "is_flag", False) else BAD
    draw = random.Random(f"{name} {option}")
    values = draw.sample(values, min(len(values), 5 if name == "doctor" else 14))  # the doctor measures for a while
    for value in values:
        others = [] if name == "doctor" else example_of(name)[1:]
        check([name, *given(tried, value), *(others if draw.random() < 0.5 else [])])


@pytest.mark.parametrize("name", COMMANDS)
def test_no_mixture_of_options_gives_a_traceback(name: str) -> None:
    draw = random.Random(name)
    for _ in range(2 if name == "doctor" else 20):
        options = options_of(name)
        chosen = draw.sample(options, draw.randint(0, min(5, len(options))))
        words = [word for option in chosen for word in given(option, draw.choice(BAD))]
        check([name, *words, *draw.choices(BAD, k=draw.randint(0, 3))])


# -- what was found


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("syntax:x", "--model syntax:x: the import of syntax raised SyntaxError: invalid syntax"),
        ("raises:x", "--model raises:x: the import of raises raised OSError: at import"),
        ("leaves:x", "--model leaves:x: the import of leaves raised SystemExit: 3"),
        ("models:broken", "KeyError"),
        ("models:leaves", "SystemExit: I leave"),
        ("models:nothing", "expected an nn.Module, got NoneType"),
    ],
)
@pytest.mark.parametrize("batch", [[], ["--batch", "2x4x16"]])
def test_a_model_that_cannot_be_made_is_told_in_one_line(model: str, says: str, batch: list[str]) -> None:
    done = check(["budget", "--model", model, *batch])
    assert done.exit_code == 2
    assert says in done.stderr


def test_models_that_deep_copy_their_layers_are_traced(place: Path) -> None:
    """Every `nn.TransformerEncoder` does; the copies' fake tensors had a mode of their own. As large as layers by hand."""
    (place / "copies.py").write_text(
        "import copy\nfrom torch import nn\n"
        "def copied():\n    one = nn.Linear(64, 64)\n    return nn.Sequential(one, nn.ReLU(), copy.deepcopy(one))\n"
        "def made():\n    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))\n"
    )
    found = [
        json.loads(
            check(["budget", "--model", f"copies:{name}", "--batch", "8x64", "--device", "cpu", "--json"]).stdout
        )
        for name in ("copied", "made")
    ]
    assert found[0] == found[1]
    done = check(["budget", "--model", "models:encoder", "--batch", "2x4x16", "--device", "cpu", "--json"])
    assert json.loads(done.stdout)["activations"]["memory"]["shardmp, stage 2"]["kept_for_backward"] > 0


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "0", "1e9"])
@pytest.mark.parametrize("option", ["--timeout", "--arrival-timeout"])
def test_a_time_that_is_none_is_refused_by_name(option: str, value: str) -> None:
    done = check(["doctor", option, value])
    assert done.exit_code == 2
    assert option in done.stderr


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1, 0, 1e300, True, "10"])
def test_init_refuses_a_time_that_is_none(seconds: Any) -> None:
    for name in ("timeout", "arrival_timeout"):
        with pytest.raises((ValueError, TypeError), match=rf"init\({name}=\.\.\.\): expected"):
            shardmp.init(**{name: seconds})


@pytest.fixture
def checkpoint(place: Path) -> Path:
    model = nn.Linear(3, 2)
    model, optimizer = shardmp.shard(model, torch.optim.AdamW(model.parameters()))
    return shardmp.save(place / "checkpoint", model, optimizer).path


HOSTILE: tuple[Any, ...] = (None, 0, -1, 1e999, "", "x", [], [[]], {}, {"x": {}}, True, 2**70, [None], "../../x")


def test_crafted_manifests_are_told_in_one_line(checkpoint: Path) -> None:
    """Each value of the manifest, and of its parts, replaced by each of these; also with a checksum that is right."""
    from shardmp.manifest import _canonical, crc32

    path = checkpoint / "manifest.json"
    right = json.loads(path.read_text())
    draw = random.Random(0)
    texts = ["", "[]", "null", "{", '{"crc32": 1}', "[" * 100_000, '{"crc32":0,"body":{}}', "\x00", '"' + "9" * 10_000]
    for name in right["body"]:
        for value in HOSTILE:
            body = {**right["body"], name: value}
            texts.append(json.dumps({"crc32": crc32(_canonical(body)), "body": body}))
        body = {key: value for key, value in right["body"].items() if key != name}
        texts.append(json.dumps({"crc32": crc32(_canonical(body)), "body": body}))
    for text in texts:
        path.write_text(text)
        name = draw.choice(["inspect", "export"])
        done = CliRunner().invoke(cli.app, [name, str(checkpoint), *(["out.safetensors"] if name == "export" else [])])
        assert isinstance(done.exception, SystemExit | None), (text[:300], done.exception)
        assert done.exit_code in (0, 1, 2)
        assert len(done.stderr.splitlines()) == bool(done.exit_code), (text[:300], done.stderr)


def test_a_damaged_checkpoint_is_exit_code_1_and_a_missing_one_2(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{")
    done = check(["inspect", str(checkpoint)])
    assert (done.exit_code, "is truncated or altered" in done.stderr) == (1, True)
    assert check(["inspect", "nowhere"]).exit_code == 2


# -- the rule


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (ValueError("a\n  b"), "a b", 2),
        (ValueError(), "ValueError", 2),
        (RuntimeError("x"), "x", 2),
        (RecursionError("deep"), "unexpected RecursionError: deep (SHARDMP_TRACEBACK=1 shows where)", 1),
        (KeyError("x"), "unexpected KeyError: 'x' (SHARDMP_TRACEBACK=1 shows where)", 1),
        (AssertionError(), "unexpected AssertionError: AssertionError (SHARDMP_TRACEBACK=1 shows where)", 1),
        (MemoryError("x"), "not enough memory: x", 1),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device", 1),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), "[Errno 2] No such file: 'x'", 2),
        (shardmp.CheckpointError("x"), "x", 1),
    ],
)
def test_an_exception_is_one_line_and_a_code(error: Exception, text: str, code: int) -> None:
    assert command_line.told(error) == (text, code)


def test_a_fault_of_ours_is_one_line_and_a_traceback_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("shardmp.environment_report.report", fail)
    done = CliRunner().invoke(cli.app, ["env"])
    assert done.exit_code == 1
    assert done.stderr == "shardmp env: error: unexpected KeyError: 'a fault' (SHARDMP_TRACEBACK=1 shows where)\n"
    assert isinstance(CliRunner().invoke(cli.app, ["env"], env={"SHARDMP_TRACEBACK": "1"}).exception, KeyError)


def run(command: str) -> tuple[int, str, str]:
    """In a shell of its own, as only a process has pipes."""
    program = f"{shlex.quote(sys.executable)} -m shardmp.cli"
    environ = {**os.environ, "PYTHONPATH": str(Path(shardmp.__file__).parents[1])}
    shell = ["bash", "-c", "set -o pipefail; " + command.replace("shardmp", program)]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, env=environ, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_that_closes_ends_a_command_without_a_word() -> None:
    code, out, said = run("shardmp formats 0.1 --compare | { read -r line; exec 0<&-; sleep 0.1; echo read; }")
    assert (out, said) == ("read\n", "")
    code, out, said = run("shardmp budget --params 7B --json | true")
    assert (code in (0, 141), out, said) == (True, "", "")


def test_a_full_disk_is_one_line() -> None:
    code, _, said = run("shardmp formats > /dev/full")
    assert (code, said) == (1, "shardmp formats: error: [Errno 28] No space left on device\n")


def test_a_directory_that_may_not_be_read_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    for name in ("iterdir", "is_dir", "exists", "stat", "read_bytes", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, refuse)
            for arguments in (
                ["inspect", "folder"],
                ["export", "folder", "out"],
                ["import-deepspeed", "folder", "out"],
            ):
                done = CliRunner().invoke(cli.app, arguments)
                assert isinstance(done.exception, SystemExit), (name, arguments, done.exception)
                assert len(done.stderr.splitlines()) == 1
