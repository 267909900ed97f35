"""Invariant 12: what one rank is given or does otherwise is an error on all ranks in time, or changes nothing on any.

The rows are in one_rank_differs.py; a public option, argument or call without a row fails here.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from unittest import mock

import one_rank_differs
import pytest
from one_rank_differs import NOT_IN_A_TRAINING, ROWS, ends, what_is_public, wrong
from ranks import run_ranks

import shardmp
import shardmp.agreed
import shardmp.agreement
import shardmp.api
import shardmp.saving

# Seconds after which a collective gives up: an error in time comes before GROUP_TIMEOUT and some seconds for the asking.
GROUP_TIMEOUT = 2.0
LIMIT = 20.0


@pytest.mark.parametrize("key", ROWS)
def test_what_differs_on_one_rank_is_an_error_on_all_in_time_or_makes_no_difference(key: str, tmp_path: Path) -> None:
    found = run_ranks(ends, 2, key, 1, str(tmp_path), group_timeout=GROUP_TIMEOUT, timeout=LIMIT)
    assert wrong(key, found) is None


# Where rank 0 decides, and where the order of the calls is another: the same where it is the first rank that differs.
@pytest.mark.parametrize(
    "key", ["shard(stage)", "group(lr)", "save(step)", "load(optimizer)", "ShardedModule.load_state_dict()"]
)
def test_the_same_where_it_is_rank_0_of_three_that_differs(key: str, tmp_path: Path) -> None:
    found = run_ranks(ends, 3, key, 0, str(tmp_path), group_timeout=GROUP_TIMEOUT, timeout=LIMIT)
    assert wrong(key, found) is None


def test_every_public_option_argument_and_call_has_a_row() -> None:
    assert sorted(set(what_is_public()) - set(ROWS)) == []


def test_every_public_name_is_in_a_row_or_said_to_be_no_part_of_a_training() -> None:
    listed = {owner.__name__ for owner in (*one_rank_differs.FUNCTIONS, *one_rank_differs.CLASSES)} | {"Precision"}
    assert set(shardmp.__all__) - listed - NOT_IN_A_TRAINING == set()


def test_a_new_option_has_no_row_yet() -> None:
    """The enumeration sees what is added to a signature."""

    def shard(model: object, optimizer: object, *, sharpness: float = 1.0) -> None: ...

    assert list(inspect.signature(shard).parameters)[-1] == "sharpness"
    with mock.patch.object(one_rank_differs, "FUNCTIONS", (shard,)):
        assert "shard(sharpness)" in set(what_is_public()) - set(ROWS)


def _without_a_comparison(which: str, key: str, directory: str) -> tuple[str, str]:
    """As `ends`, where the code does not compare."""
    patches = {
        "options in a step": mock.patch.object(shardmp.agreed, "checksum", return_value=0),
        "what shard was given": mock.patch.object(shardmp.api, "_fingerprint", return_value=[]),
        "arguments of save": mock.patch.object(shardmp.saving, "refuse_other_arguments"),
    }
    with patches[which]:
        return ends(key, 1, directory)


@pytest.mark.parametrize(
    ("which", "key"),
    [
        ("options in a step", "group(weight_decay)"),
        ("what shard was given", "Precision(max_skips)"),
        ("arguments of save", "save(keep)"),
    ],
)
def test_a_row_fails_where_its_comparison_is_taken_out(which: str, key: str, tmp_path: Path) -> None:
    found = run_ranks(_without_a_comparison, 2, which, key, str(tmp_path), group_timeout=GROUP_TIMEOUT, timeout=LIMIT)
    assert wrong(key, found) is not None
