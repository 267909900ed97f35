"""FP16 and BF16 products on a CPU, computed as a Tensor Core does: multiply 16 bits, add in FP32.

Owns torch's CPU kernels of the operators and dtypes that `products` gives to "own". Takes 16-bit CPU tensors and gives
16-bit results, forward and backward, wherever in torch the operator is called from. Invariant: a result is the FP32
kernel's result on the 16-bit inputs, alpha, beta and bias included, rounded once; tensors of every other dtype take the
stock kernel and keep their bits; other devices are never touched.

[Note: why at the dispatcher]
torch's own FP16 products are 10 to 40 times slower than FP32 on a CPU without units. A mode or a patched function would
miss what calls operators from C++ or later: backward formulas, activation checkpoints that recompute inside backward,
autocast, MultiheadAttention's fast path. A kernel registered for the CPU key is below all of them. Composites such as
linear, matmul, einsum, bilinear or LSTM end in the operators registered here. The price: a call with another dtype
passes through a few microseconds of Python, and keeps the GIL, which torch offers no way to release around a kernel.

[Note: tiling and bits]
The definition is `(a.float() @ b.float()).half()`. Upcasting a large weight for one row of input costs more than the
product, so large operands are upcast tile by tile, in 2 MB that stay in the cache, and no temporary above 16 MB is made
where a tile can avoid it. Tiles cut rows and columns of the output, in multiples of 16, by shape and layout alone: equal
calls give equal bits. One case is cut along the sum: one row times a row-major matrix, where the kernel adds row after
row to its result, so that going on where the last tile stopped is the same sum. Tiles gave the bits of the definition
for all shapes tried with MKL on one thread, if the cut side is a multiple of 8; another side is cut only beyond 16 MB,
and there a last bit of the FP32 sum may differ. The sign of a zero is not part of the definition. Attention keeps its
logsumexp in FP32, and its backward sees the rounded output, as with 16-bit kernels on a GPU.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import products
from .products import ATTENTION, CONVOLUTION, CONVOLUTION_BACKWARD, KINDS, MATRIX, OWN, RECURRENT, TORCH

__all__ = ["accumulate_in_fp32", "disable", "enable", "in_use", "is_enabled", "refusals"]

Kernel = Callable[..., Any]

# FP32 elements of a tile that stays in the cache, and of the largest temporary that is made without a need (2, 16 MB).
_TILE = 2**19
_LIMIT = 2**22
# A product with a side up to this is bound by the upcast of its other side, not by its multiplications.
_SKINNY = 64

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_DTYPES = (torch.float16, torch.bfloat16)

# Classes for which torch has no 16-bit kernel on the CPU, found by running those of torch.nn in both dtypes. The second
# kind runs in FP32 under autocast.
_WITHOUT_KERNEL: dict[torch.dtype, tuple[type[nn.Module], ...]] = {torch.float16: (nn.RReLU,), torch.bfloat16: ()}
_NEED_AUTOCAST: tuple[type[nn.Module], ...] = (
    nn.AvgPool3d,
    nn.LPPool3d,
    nn.LocalResponseNorm,
    nn.CTCLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
)

# By kind of operator, the dtypes of which products are ours now.
_active: dict[str, set[torch.dtype]] = {kind: set() for kind in KINDS}
_stock: dict[str, Kernel] = {}
_library: torch.library.Library | None = None
_lock = threading.Lock()
_local = threading.local()


def enable(dtype: torch.dtype, choice: Mapping[str, str] | None = None) -> bool:
    """Computes here the FP16 or BF16 products that are "own" in `choice`, by default this CPU's; whether there are any.

    What is ours already stays ours until `disable`.
    """
    global _library
    if dtype not in _DTYPES:
        return False
    wanted = [kind for kind, who in (choice or products.chosen_here(dtype)).items() if who == OWN]
    with _lock:
        if wanted and _library is None:
            _library = _register()
        for kind in wanted:
            _active[kind].add(dtype)
    return bool(wanted)


def in_use(dtype: torch.dtype) -> products.Choice:
    """Who computes products of `dtype` in this process now."""
    return {kind: OWN if dtype in _active[kind] else TORCH for kind in KINDS}


def accumulate_in_fp32(dtype: torch.dtype) -> None:
    """Lets cuBLAS add the parts of a long FP16 or BF16 sum in FP32 too, in this process; by default it may use 16 bits."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)
    if name is not None:
        setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", False)


def is_enabled(dtype: torch.dtype) -> bool:
    """Whether some products of this dtype on the CPU are ours now."""
    return OWN in in_use(dtype).values()


def disable() -> None:
    """Restores torch's own kernels for all dtypes."""
    global _library
    with _lock:
        for dtypes in _active.values():
            dtypes.clear()
        if _library is not None:
            _library._destroy()
            _library = None
        _stock.clear()


def refusals(
    model: nn.Module, kept: Iterable[str] = (), *, dtype: torch.dtype = torch.float16, autocast: bool = True
) -> list[str]:
    """What in `model` cannot train in `dtype` on any CPU, one message each; `kept` names modules that stay in FP32.

    A subclass counts as its class. Losses count only without autocast, which runs them in FP32.
    """
    if dtype not in _DTYPES:
        return []
    classes = _WITHOUT_KERNEL[dtype] + (() if autocast else _NEED_AUTOCAST)
    kept = tuple(kept)
    return [
        f"{name or 'the model'} ({type(module).__name__}): torch has no {str(dtype)[6:]} kernel for it on the CPU; "
        f"keep it in FP32 with keep_fp32=({name!r},)"
        for name, module in model.named_modules()
        if isinstance(module, classes) and not any(not k or name == k or name.startswith(f"{k}.") for k in kept)
    ]


def _register() -> torch.library.Library:
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        raise RuntimeError(
            f"emulating 16-bit products needs torch.library.get_kernel, which torch {torch.__version__} lacks: "
            "install torch 2.11 or newer, or train with precision='fp32' on this CPU"
        )
    library = torch.library.Library("aten", "IMPL")
    # All stock kernels are taken before the first override: some of them are composites of others.
    operators = [(kind, *item) for kind, emulations in _EMULATIONS.items() for item in emulations.items()]
    for _, name, _ in operators:
        _stock[name] = get_kernel(f"aten::{name}", "CPU").call_boxed
    with warnings.catch_warnings():
        # torch warns that kernels are overridden, which is the purpose here.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for kind, name, (decisive, emulation) in operators:
            library.impl(name, _kernel(_stock[name], _active[kind], decisive, emulation), "CPU")
    return library


def _kernel(stock: Kernel, active: set[torch.dtype], decisive: tuple[int, ...], emulation: Kernel) -> Kernel:
    """The kernel that is registered: emulation where all decisive tensors have one dtype that is active, else the stock one.

    A mixture goes to the stock kernel, which raises its own error.
    """
    first, *others = decisive

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = args[first].dtype
        if dtype in active and all(args[i].dtype is dtype for i in others):
            return emulation(*args, **kwargs)
        return stock(_CPU, *args, **kwargs)

    return kernel


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(None, a, b, {})


def _addmm(c: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    return _product(c, a, b, factors)


def _product(c: Tensor | None, a: Tensor, b: Tensor, factors: dict[str, Any]) -> Tensor:
    """beta * c + alpha * (a @ b), where c may be broadcast; `factors` are alpha and beta as the caller gave them."""
    if a.dim() != 2 or b.dim() != 2 or a.size(1) != b.size(0):
        return _multiply(None, a.float(), b.float(), {})  # raises torch's own error
    (m, k), n = a.shape, b.size(1)
    if c is None and k == 1:
        return a * b  # an elementwise product of 16-bit numbers is made in FP32 and rounded once: no FP32 matrix at all
    if max(m * k, k * n, m * n) > _TILE:
        if c is None and m == 1 and k * n > _TILE and b.stride(1) == 1:
            return _row_times_matrix(a, b)
        rows, columns = _cuts(a, b)
        if len(rows) * len(columns) > 1:
            return _tiled_product(c, a, b, factors, rows, columns)
    bias = None if c is None else c.float()
    return _multiply(bias, a.float(), b.float(), factors).to(a.dtype)


def _multiply(c: Tensor | None, a: Tensor, b: Tensor, factors: dict[str, Any], out: Tensor | None = None) -> Tensor:
    """The stock FP32 kernel."""
    name = "mm" if c is None else "addmm"
    arguments = (a, b) if c is None else (c, a, b)
    if out is None:
        return _stock[name](_CPU, *arguments, **factors)
    return _stock[f"{name}.out"](_CPU, *arguments, **factors, out=out)


def _cuts(a: Tensor, b: Tensor) -> tuple[list[slice], list[slice]]:
    """Rows and columns of the output tiles, by shape and layout alone."""
    (m, k), n = a.shape, b.size(1)
    budget = _TILE if min(m, k, n) <= _SKINNY else _LIMIT
    # Rows of a row-major a are one piece of memory, as are columns of a b that is a transposed view; other cuts read
    # short strips, which takes longer than upcasting it all.
    columns = _cut(n, k, budget if b.stride(0) == 1 else _LIMIT)
    rows = _cut(m, k, budget if a.stride(1) == 1 else _LIMIT)
    return max(rows, _cut(m, columns[0].stop, budget), key=len), columns


def _cut(length: int, width: int, budget: int) -> list[slice]:
    """`length` lines of `width` elements in pieces of about `budget` elements: multiples of 16 lines, all of one size.

    Of one size, because a narrow rest would meet another FP32 kernel than the whole does.
    """
    if length % 8:
        budget = _LIMIT  # [Note: tiling and bits]
    groups = length // 16
    pieces = max(1, min(groups, -(-length * width // budget)))
    stops = [16 * (i * groups // pieces) for i in range(1, pieces)]
    return [slice(*ends) for ends in zip([0, *stops], [*stops, length], strict=True)]


def _tiled_product(
    c: Tensor | None, a: Tensor, b: Tensor, factors: dict[str, Any], rows: list[slice], columns: list[slice]
) -> Tensor:
    (m, k), n = a.shape, b.size(1)
    result = torch.empty(m, n, dtype=a.dtype, device="cpu")
    if c is not None and c.numel() <= max(m, n):
        c = c.float()  # a bias: upcast before it is spread
    spread = None if c is None else c.expand(m, n)
    height, width = (max(part.stop - part.start for part in parts) for parts in (rows, columns))
    operand, product = _scratch("operand", width * k), _scratch("product", height * width)
    b32: Tensor | None = None
    for i in rows:
        a32 = a[i].float()
        for j in columns:
            if b32 is None or len(columns) > 1:
                b16 = b[:, j]
                # In the memory order of b: a plain copy, and the FP32 kernel sees the layout it would see in the whole.
                strides = (1, k) if b.stride(0) == 1 else (b16.size(1), 1)
                b32 = operand.as_strided(b16.shape, strides).copy_(b16)
            c32 = None if spread is None else spread[i, j].float()
            out = product[: a32.size(0) * b32.size(1)].view(a32.size(0), b32.size(1))
            result[i, j].copy_(_multiply(c32, a32, b32, factors, out))
    return result


def _row_times_matrix(a: Tensor, b: Tensor) -> Tensor:
    """(1, k) @ (k, n) for a row-major b, cut along k."""
    k, n = b.shape
    a32, total = a.float(), torch.zeros(1, n, dtype=torch.float32, device="cpu")
    lines = max(8, _TILE // n // 8 * 8)
    operand = _scratch("operand", min(lines, k) * n)
    for i in range(0, k, lines):
        b16 = b[i : i + lines]
        b32 = operand[: b16.numel()].view(b16.shape).copy_(b16)
        _multiply(total, a32[:, i : i + lines], b32, {}, total)
    return total.to(a.dtype)


def _scratch(name: str, numel: int) -> Tensor:
    """FP32 memory for one tile, of which about _TILE elements belong to the thread as long as it lives.

    A fresh buffer would be paid for with a page fault every 4 KB.
    """
    if numel > 2 * _TILE:
        return torch.empty(numel, dtype=torch.float32, device="cpu")
    buffer: Tensor | None = getattr(_local, name, None)
    if buffer is None or buffer.numel() < numel:
        buffer = torch.empty(max(numel, _TILE), dtype=torch.float32, device="cpu")
        setattr(_local, name, buffer)
    return buffer


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return _batch_product(None, a, b, {})


def _baddbmm(c: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    return _batch_product(c, a, b, factors)


def _batch_product(c: Tensor | None, a: Tensor, b: Tensor, factors: dict[str, Any]) -> Tensor:
    """A batch of products; a large batch in chunks of whole matrices."""

    def multiply(c: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        a32, b32 = a.float(), b.float()
        if c is None:
            return _stock["bmm"](_CPU, a32, b32)
        return _stock["baddbmm"](_CPU, c.float(), a32, b32, **factors)

    if a.dim() != 3 or b.dim() != 3 or a.size(0) != b.size(0) or a.size(2) != b.size(1):
        return multiply(c, a, b)  # raises torch's own error
    batch, m, k, n = *a.shape, b.size(2)
    chunk = max(1, _LIMIT // max(1, m * k, k * n, m * n))
    if batch <= chunk:
        return multiply(c, a, b).to(a.dtype)
    result = torch.empty(batch, m, n, dtype=a.dtype, device="cpu")
    spread = None if c is None else c.expand(batch, m, n)
    for i in range(0, batch, chunk):
        part = slice(i, i + chunk)
        result[part].copy_(multiply(None if spread is None else spread[part], a[part], b[part]))
    return result


def _addmv(c: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Tensor:
    """beta * c + alpha * (a @ x); a large row-major matrix is upcast by rows."""
    stock = _stock["addmv"]
    x32 = x.float()
    if a.dim() != 2 or c.dim() > 1 or a.size(0) != c.numel() or a.numel() <= _TILE or a.stride(1) != 1:
        return stock(_CPU, c.float(), a.float(), x32, **factors).to(a.dtype)
    rows = _cut(a.size(0), a.size(1), _TILE)
    parts = [stock(_CPU, c[i].float(), a[i].float(), x32, **factors) for i in rows]
    return torch.cat(parts).to(a.dtype)


def _whole(name: str) -> Kernel:
    """The stock kernel on upcast arguments, its FP32 results rounded: for what needs no tiles."""

    def emulation(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        upcast = [x.float() if isinstance(x, Tensor) and x.dtype is dtype else x for x in args]
        # Autocast may be on around a backward: it would round what a composite kernel hands to its parts.
        with torch._C._DisableAutocast():
            results = _stock[name](_CPU, *upcast, **kwargs)
        if isinstance(results, Tensor):
            return results.to(dtype)
        return tuple(x if x is None or x.dtype is not torch.float32 else x.to(dtype) for x in results)

    return emulation


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    output, logsumexp = _by_batch(name, (q, k, v), args, **kwargs)
    return output.to(q.dtype), logsumexp


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    name = "_scaled_dot_product_flash_attention_for_cpu_backward"
    output, logsumexp, *rest = args
    return tuple(x.to(q.dtype) for x in _by_batch(name, (grad, q, k, v, output, logsumexp), rest, **kwargs))


def _by_batch(
    name: str, tensors: Sequence[Tensor], args: Sequence[Any], attn_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, ...]:
    """An attention kernel on upcast tensors; a large batch in chunks, since its elements do not see each other."""
    batch = tensors[0].size(0)
    chunk = max(1, _LIMIT * batch // max(1, *(x.numel() for x in tensors)))
    pieces = []
    for i in range(0, max(1, batch), chunk):
        part = slice(i, i + chunk)
        mask = attn_mask
        if mask is not None:
            mask = (mask[part] if mask.dim() == 4 and mask.size(0) == batch else mask).float()
        pieces.append(_stock[name](_CPU, *(x[part].float() for x in tensors), *args, attn_mask=mask, **kwargs))
    return pieces[0] if len(pieces) == 1 else tuple(torch.cat(results) for results in zip(*pieces, strict=True))


def _out_variant(emulation: Kernel) -> Kernel:
    def kernel(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = emulation(*args, **kwargs)
        if out.dtype is not result.dtype:
            raise RuntimeError(f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return kernel


def _in_place(emulation: Kernel) -> Kernel:
    def kernel(c: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return c.copy_(emulation(c, *args, **kwargs))

    return kernel


# By kind, each operator: positions of the tensors whose common dtype decides, and the emulation.
_EMULATIONS: dict[str, dict[str, tuple[tuple[int, ...], Kernel]]] = {
    MATRIX: {
        "mm": ((0, 1), _mm),
        "mm.out": ((0, 1), _out_variant(_mm)),
        "addmm": ((1, 2, 0), _addmm),
        "addmm.out": ((1, 2, 0), _out_variant(_addmm)),
        "addmm_": ((1, 2, 0), _in_place(_addmm)),
        "bmm": ((0, 1), _bmm),
        "bmm.out": ((0, 1), _out_variant(_bmm)),
        "baddbmm": ((1, 2, 0), _baddbmm),
        "baddbmm.out": ((1, 2, 0), _out_variant(_baddbmm)),
        "baddbmm_": ((1, 2, 0), _in_place(_baddbmm)),
        "addmv": ((1, 2, 0), _addmv),  # mv ends here
        "addmv.out": ((1, 2, 0), _out_variant(_addmv)),
        "addmv_": ((1, 2, 0), _in_place(_addmv)),
        "addbmm": ((1, 2, 0), _whole("addbmm")),
        "addbmm.out": ((1, 2, 0), _out_variant(_whole("addbmm"))),
        "addbmm_": ((1, 2, 0), _in_place(_whole("addbmm"))),
        "_addmm_activation": ((1, 2, 0), _whole("_addmm_activation")),
        "_addmm_activation.out": ((1, 2, 0), _out_variant(_whole("_addmm_activation"))),
    },
    CONVOLUTION: {"_convolution": ((0, 1), _whole("_convolution"))},  # convolution ends here
    CONVOLUTION_BACKWARD: {"convolution_backward": ((0, 1, 2), _whole("convolution_backward"))},
    ATTENTION: {
        "_scaled_dot_product_flash_attention_for_cpu": ((0, 1, 2), _attention),
        "_scaled_dot_product_flash_attention_for_cpu_backward": ((0, 1, 2, 3), _attention_backward),
    },
    RECURRENT: {
        "mkldnn_rnn_layer": ((0, 1, 2), _whole("mkldnn_rnn_layer")),  # an LSTM with FP32 inputs under autocast
        "mkldnn_rnn_layer_backward": ((0, 1, 2), _whole("mkldnn_rnn_layer_backward")),
    },
}
