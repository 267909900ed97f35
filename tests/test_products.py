"""Whose 16-bit products a CPU trains with: a function of its flags, of torch's version and of one variable."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import masters, products_apart, same_on_all_ranks, sharded
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import shardmp
from shardmp import products, tensorcore
from shardmp.cli import app
from shardmp.products import (
    ASSUMED,
    ATTENTION,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    KINDS,
    MATRIX,
    MEASURED,
    OWN,
    RECURRENT,
    REPORTED,
    TABLE,
    TORCH,
    Entry,
    Row,
)

ROOT = Path(__file__).resolve().parent.parent
FP16, BF16 = torch.float16, torch.bfloat16
both = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])

# CPUs by their flags.
EPYC_3: frozenset[str] = frozenset()
SKYLAKE = frozenset({"avx512f", "onednn_bf16"})
EPYC_4 = frozenset({"avx512f", "avx512_bf16", "onednn_bf16"})
XEON = frozenset({"avx512f", "avx512_bf16", "avx512_fp16", "onednn_bf16", "onednn_fp16"})
XEON_AMX = XEON | {"amx_bf16"}
XEON_6 = XEON_AMX | {"amx_fp16"}
SIERRA = frozenset({"avx_ne_convert", "onednn_bf16", "onednn_fp16"})
GRAVITON = frozenset({"bf16", "asimdhp", "onednn_bf16", "onednn_fp16"})
CPUS = [EPYC_3, SKYLAKE, EPYC_4, XEON, XEON_AMX, XEON_6, SIERRA, GRAVITON]


def torchs(dtype: torch.dtype, has: frozenset[str], setting: str | None = None) -> list[str]:
    """The kinds of operator that torch computes there."""
    choice = products.choose(dtype, has, torch.__version__, setting)
    assert list(choice) == list(KINDS)
    return [kind for kind, who in choice.items() if who == TORCH]


# -- the choice


@pytest.mark.parametrize(
    ("has", "fp16", "bf16"),
    [
        (EPYC_3, [], []),
        (SKYLAKE, [], []),
        (EPYC_4, [], [MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION]),
        (XEON, [MATRIX], []),
        (XEON_AMX, [MATRIX], [MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION]),
        (XEON_6, [MATRIX], [MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION]),
        (SIERRA, [], []),
        (GRAVITON, [], [MATRIX]),
    ],
    ids=["EPYC 3", "Skylake", "EPYC 4", "Xeon", "Xeon with AMX", "Xeon 6", "Sierra Forest", "Graviton"],
)
def test_each_kind_of_cpu_has_its_choice(has: frozenset[str], fp16: list[str], bf16: list[str]) -> None:
    assert torchs(FP16, has) == fp16
    assert torchs(BF16, has) == bf16


@both
def test_a_cpu_whose_products_torch_emulates_takes_ours_for_every_kind(dtype: torch.dtype) -> None:
    """Whatever else its flags say: oneDNN may be missing, or kept from instructions by ONEDNN_MAX_CPU_ISA."""
    for has in CPUS:
        assert torchs(dtype, has - {"onednn_fp16", "onednn_bf16"}) == []


@both
@pytest.mark.parametrize("has", CPUS)
def test_the_variable_overrides_the_table(dtype: torch.dtype, has: frozenset[str]) -> None:
    assert torchs(dtype, has, OWN) == []
    recurrent = [RECURRENT] if dtype is BF16 and "onednn_bf16" in has else []
    assert torchs(dtype, has, TORCH) == [MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION, *recurrent]


def test_a_row_is_read_from_its_version_of_torch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    mended = Row("AVX512-FP16", FP16, frozenset({"avx512_fp16"}), (2, 15), dict.fromkeys(KINDS, Entry(TORCH, ASSUMED)))
    table = (mended, *TABLE)
    for version, mine in [("2.11.0", False), ("2.14.1+cpu", False), ("2.15.0a0+git1", True), ("3.0.0", True)]:
        choice = products.choose(FP16, XEON, version, None, table)
        assert (choice[CONVOLUTION_BACKWARD] == TORCH) is mine, version
    assert products.choose(FP16, EPYC_3, "2.15.0", None, table)[CONVOLUTION_BACKWARD] == OWN


def test_every_row_has_every_kind_and_says_from_where() -> None:
    for row in TABLE:
        assert list(row.entries) == list(KINDS), row.cpu
        assert row.needs == frozenset() or row.needs & {"onednn_fp16", "onednn_bf16"}, row.cpu
        for entry in row.entries.values():
            assert entry.whence in (MEASURED, REPORTED, ASSUMED)
            if entry.whence == MEASURED:
                assert entry.torch is not None
                assert entry.own is not None
            if entry.torch is not None and entry.own is not None:
                assert entry.who == (TORCH if entry.torch < entry.own else OWN), row.cpu
            if entry.torch == math.inf:
                assert entry.who == OWN, row.cpu
    for dtype in (FP16, BF16):  # no CPU is without a row, whatever its torch
        assert products.row_for(dtype, frozenset({"unheard of"}), "2.11.0").needs == frozenset()


def test_a_special_cpu_comes_before_a_general_one() -> None:
    """A row below one that asks for fewer flags would never be read."""
    for index, row in enumerate(TABLE):
        for earlier in TABLE[:index]:
            if earlier.dtype is row.dtype:
                assert not earlier.needs <= row.needs, (earlier.cpu, row.cpu)


def test_another_value_of_the_variable_is_refused_by_name() -> None:
    for value in ("", "ours", "Torch", "0"):
        with pytest.raises(ValueError, match=rf"SHARDMP_PRODUCTS={value}: expected 'torch' .* or 'own'"):
            products.setting({"SHARDMP_PRODUCTS": value})
    assert products.setting({}) is None


def test_flags_are_what_linux_and_torch_say(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "processor : 0\nmodel name : Xeon\nflags\t\t: fpu avx512f amx_tile amx_bf16 avx512_fp16\n"
    monkeypatch.setattr(Path, "read_text", lambda path: said if str(path) == "/proc/cpuinfo" else "")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    assert products.flags.__wrapped__() == {"avx512f", "amx_bf16", "avx512_fp16", "onednn_fp16"}


def test_a_system_without_cpuinfo_has_what_torch_says_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert products.flags.__wrapped__() == products.flags() & {"onednn_fp16", "onednn_bf16"}


@both
def test_units_are_what_onednn_says(dtype: torch.dtype) -> None:
    says = bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{products.NAMES[dtype]}_supported")())
    assert (f"onednn_{products.NAMES[dtype]}" in products.flags()) is says
    if not says:
        assert torchs(dtype, products.flags()) == []


# -- the operators that are called


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often each of our products was called, by operator; all are torch's at first."""
    calls: dict[str, int] = {}

    def counting(name: str, emulation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return emulation(*args, **kwargs)

        return call

    for emulations in tensorcore._EMULATIONS.values():
        for name, (decisive, emulation) in list(emulations.items()):
            monkeypatch.setitem(emulations, name, (decisive, counting(name, emulation)))
    with products_apart():
        yield calls


def on_cpu(monkeypatch: pytest.MonkeyPatch, has: frozenset[str]) -> None:
    monkeypatch.setattr(products, "flags", lambda: has)


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_d31_fp16_convolutions_go_backward_in_ours_on_avx512_fp16(
    make: Callable[..., nn.Module], counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch/examples' dcgan: torch's take 150 times FP32's there, which looks like a hang."""
    on_cpu(monkeypatch, XEON)
    model, optimizer = sharded(make(4, 4, 3))
    optimizer.backward(model(torch.ones(1, 4, 5, 5)).mean())
    assert counted["convolution_backward"] == 1
    assert not optimizer.step().skipped


def test_fp16_matrix_products_are_torchs_on_avx512_fp16_and_bf16_ones_ours(
    counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch, XEON)
    for precision, mine in [("fp16", False), ("bf16", True)]:
        model, optimizer = sharded(nn.Linear(4, 4), precision=precision)
        optimizer.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        assert bool(counted) is mine, precision


@pytest.mark.parametrize("setting", [None, TORCH, OWN])
@pytest.mark.parametrize("has", [EPYC_3, XEON, XEON_6], ids=["EPYC 3", "Xeon", "Xeon 6"])
def test_an_fp16_lstm_under_autocast_is_ours_whatever_was_chosen(
    has: frozenset[str], setting: str | None, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN says "could not create a primitive descriptor for the LSTM forward propagation primitive"."""
    on_cpu(monkeypatch, has)
    if setting is not None:
        monkeypatch.setenv("SHARDMP_PRODUCTS", setting)
    model, optimizer = sharded(nn.LSTM(4, 4))
    optimizer.backward(model(torch.ones(3, 2, 4))[0].mean())
    assert not optimizer.step().skipped
    assert counted["mkldnn_rnn_layer"] == counted["mkldnn_rnn_layer_backward"] == 1


@both
def test_torchs_own_products_are_within_rounding_of_ours(dtype: torch.dtype) -> None:
    """In every kind of operator that torch has here; small, because a CPU without units emulates them."""
    torch.manual_seed(0)
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    image, kernel = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    q = torch.randn(1, 2, 7, 8)
    lstm = nn.LSTM(4, 4)
    cases: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        MATRIX: (torch.mm, (x, w)),
        CONVOLUTION: (F.conv2d, (image, kernel)),
        ATTENTION: (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (q,)),
        RECURRENT: (lambda x, *p: torch.func.functional_call(lstm, dict(zip(NAMES, p, strict=True)), x)[0],
                    (torch.randn(3, 2, 4), *lstm.parameters())),
    }  # fmt: skip
    found: dict[str, dict[str, list[Tensor]]] = {}
    for who in (OWN, TORCH):
        with products_apart(who):
            tensorcore.enable(dtype)
            found[who] = {kind: there_and_back(*case, dtype) for kind, case in cases.items()}
    for kind in cases:
        for theirs, ours in zip(found[TORCH][kind], found[OWN][kind], strict=True):
            assert theirs.dtype == ours.dtype
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(theirs.float(), ours.float(), rtol=4 * eps, atol=8 * eps, msg=kind)


NAMES = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]


def there_and_back(operator: Callable[..., Tensor], args: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in args]
    with torch.autocast("cpu", dtype):
        y = operator(*leaves)
    return [y.detach(), *torch.autograd.grad(y.float().sum(), leaves)]


# -- ranks


class Small(nn.Module):
    """A convolution, a matrix product, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3)
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(self.conv(x).transpose(1, 2)).unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h)


def trained(precision: str = "fp16") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, optimizer = sharded(Small(), lr=0.125, precision=precision)
    for step in range(2):
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(x).square().mean())
        assert not optimizer.step().skipped
    return model, optimizer


OFFERS = [
    # rank 0's CPU and variable, the others', the kinds that are torch's in FP16 on all
    ((XEON, None), (XEON, None), [MATRIX]),
    ((XEON, None), (EPYC_3, None), []),
    ((EPYC_3, None), (XEON, None), []),
    ((XEON_6, None), (XEON, None), [MATRIX]),
    ((XEON, TORCH), (XEON, None), [MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION]),
    ((XEON, TORCH), (EPYC_3, None), []),
    ((EPYC_3, TORCH), (EPYC_3, TORCH), [MATRIX, CONVOLUTION, CONVOLUTION_BACKWARD, ATTENTION]),
    ((XEON, None), (XEON, OWN), []),
    ((XEON, OWN), (XEON, TORCH), []),
]


@on_ranks(2, 3)
def test_ranks_on_different_cpus_take_rank_0s_choice_where_all_are_able_else_ours(rank: int) -> None:
    for first, others, expected in OFFERS:
        has, setting = first if rank == 0 else others
        with products_apart(setting), pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "flags", lambda has=has: has)
            _, optimizer = trained()
            used = tensorcore.in_use(FP16)
            final = masters(optimizer)
        assert [kind for kind in KINDS if used[kind] == TORCH] == expected, (first, others)
        assert same_on_all_ranks(final)


@on_ranks(2)
def test_what_an_earlier_model_made_ours_stays_ours_on_all_ranks(rank: int) -> None:
    with products_apart(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "flags", lambda: XEON)
        if rank == 1:
            tensorcore.enable(FP16, {**dict.fromkeys(KINDS, TORCH), MATRIX: OWN})
        trained()
        assert tensorcore.in_use(FP16) == dict.fromkeys(KINDS, OWN)


@on_ranks(1, 2, 3)
def test_a_bad_variable_on_one_rank_is_an_error_on_all(rank: int, world_size: int) -> None:
    with products_apart("ours" if rank == world_size - 1 else None), pytest.raises(ValueError) as caught:
        sharded(nn.Linear(4, 4))
    assert "SHARDMP_PRODUCTS=ours: expected 'torch'" in str(caught.value)
    if rank != world_size - 1:
        assert str(caught.value).startswith(f"rank {world_size - 1}: ")


def test_fp32_asks_nobody() -> None:
    with products_apart("ours"):
        sharded(nn.Linear(4, 4), precision="fp32")
        assert not tensorcore.is_enabled(FP16)


# -- what says it


def env(*options: str, **variables: str) -> str:
    done = CliRunner().invoke(app, ["env", *options], env={"SHARDMP_PRODUCTS": None, **variables})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_env_shows_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, XEON)
    rest = ", ".join(KINDS[1:])
    assert f"fp16 products on the cpu: torch's for {MATRIX}; shardmp's for {rest}\n" in env()
    assert "bf16 products on the cpu: shardmp's\n" in env()
    assert json.loads(env("--json"))["products"]["bf16"] == "shardmp's"
    assert "fp16 products on the cpu: shardmp's\n" in env(SHARDMP_PRODUCTS=OWN)
    assert "fp16 products on the cpu: none: SHARDMP_PRODUCTS=ours: expected" in env(SHARDMP_PRODUCTS="ours")


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 2)
def test_a_checkpoint_knows_its_products_and_a_resume_with_others_warns(rank: int, stage: int) -> None:
    import tempfile

    import torch.distributed as dist

    told = [tempfile.mkdtemp()]
    dist.broadcast_object_list(told)
    finals = []
    for setting in (TORCH, TORCH, OWN):
        with products_apart(setting), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = trained()
            if not finals:
                shardmp.save(told[0], model, optimizer)
            else:
                assert shardmp.Checkpoints(told[0], model, optimizer).resume() is not None
            finals.append(masters(optimizer))
        said = [str(warning.message) for warning in caught if "16-bit products" in str(warning.message)]
        if setting == TORCH or rank != 0:
            assert said == []
        else:
            assert len(said) == 1
            assert "fp16 matrix product: torch's there, shardmp's here" in said[0]
            assert "SHARDMP_PRODUCTS=torch" in said[0]
            assert "fp16 recurrent layer" not in said[0]  # ours in both
    assert all(torch.equal(final[name], finals[0][name]) for final in finals for name in final)


@pytest.mark.parametrize(
    "saved", [None, 5, [], "own", {}, {"fp16": 3}, {"fp16": {MATRIX: 1}}, {"bf16": {MATRIX: TORCH}}]
)
def test_a_header_that_says_nothing_of_products_does_not_warn(saved: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        products.warn_of_differences("here", saved, {"fp16": dict.fromkeys(KINDS, OWN)})


def test_the_page_shows_the_table() -> None:
    lines = [line for line in (ROOT / "docs" / "precision.md").read_text().splitlines() if line.startswith("|")]
    shown = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in ("FP16", "BF16"):
            shown[cells[0], cells[1]] = cells[2:]
    expected = {}
    for row in TABLE:
        taken = [kind for kind in KINDS if row.entries[kind].who == TORCH]
        sources = {
            whence: [kind for kind in KINDS if row.entries[kind].whence == whence]
            for whence in (MEASURED, REPORTED, ASSUMED)
        }
        said = [f"{whence}: {', '.join(kinds)}" for whence, kinds in sources.items() if 0 < len(kinds) < len(KINDS)]
        said = said or [next(whence for whence, kinds in sources.items() if kinds)]
        expected[row.cpu, products.NAMES[row.dtype].upper()] = [", ".join(taken) or "nothing", "; ".join(said)]
    assert shown == expected


def test_the_benchmark_measures_every_kind_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    sys.modules.pop("products", None)
    try:
        import products as benchmark
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    with products_apart():
        benchmark.main(["--rounds", "1", "--seconds", "0", "--scale", "16"])
        table = capsys.readouterr().out
        benchmark.main(["--rounds", "1", "--seconds", "0", "--scale", "16", "--rows"])
        printed = capsys.readouterr().out
    torch.set_num_threads(threads)
    assert re.search(r"^products: \d+ of 18 within 1.1 of the better of the two; the worst \d", table, re.MULTILINE)
    for kind in KINDS:
        assert f"| {kind}: " in table
        assert (
            len(re.findall(rf"^    {kind}: Entry\((TORCH|OWN), MEASURED, torch=\S+, own=\d", printed, re.MULTILINE))
            == 2
        )
