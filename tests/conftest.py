"""What all tests share: one thread per process, the device, and an end to the ranks' worker processes with the session.

With SHARDMP_TEST_DEVICE=cuda (`make test-gpu`) the central tests carry the marker `gpu` and make their tensors on the
GPU; without it no test sees one, so that `make test` is the same everywhere.
"""

import os
from collections.abc import Generator

import pytest
import torch
from rank_worker import DEVICE
from ranks import close_pool

if torch.version.cuda and DEVICE != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Files whose tests run on a device as they are; the others are about files, words, hosts, or the CPU itself.
ON_DEVICE = {
    "test_exact",
    "test_invariants",
    "test_models",
    "test_optimizers",
    "test_reads",
    "test_scaler",
    "test_step",
    "test_verdict",
}
CPU_ALONE = {
    "test_10_unequal_numbers_of_backwards_end_in_an_error_that_names_who_was_where_and_poison": (
        "NCCL's watchdog ends the process in place of an error"
    ),
    "test_modules_without_a_16_bit_kernel_are_refused_by_name_and_can_stay_fp32": "CUDA has these kernels",
    "test_lstm_and_bilinear_train_as_they_do_in_fp32": "cuDNN's recurrent layers are not deterministic",
}


def pytest_configure() -> None:
    torch.set_num_threads(1)
    if DEVICE not in ("", "cpu", "cuda"):
        raise pytest.UsageError(f"SHARDMP_TEST_DEVICE: expected 'cpu' or 'cuda', got {DEVICE!r}")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("SHARDMP_TEST_DEVICE=cuda: this process sees no CUDA device")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items if DEVICE else ():
        if item.module.__name__ in ON_DEVICE:
            item.add_marker(pytest.mark.gpu)
            if item.originalname in CPU_ALONE:
                item.add_marker(pytest.mark.skip(reason=CPU_ALONE[item.originalname]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, object, object]:
    if not DEVICE or item.module.__name__ not in ON_DEVICE:
        return (yield)
    from helpers import OnDevice

    with OnDevice(DEVICE):  # tests of one process; ranks see to themselves
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    close_pool()
