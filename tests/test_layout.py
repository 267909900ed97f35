"""The layout: every element lies once, on one rank, and nothing of it depends on bucket size or ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmp.layout import BLOCK, UNIT, Entry, Layout, plan

ITEMSIZE = {"fp16": 2, "fp32": 4}

entries = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 70), st.integers(900, 1200), st.integers(2000, 9000)),
        st.sampled_from(["fp16", "fp32"]),
    ),
    min_size=1,
    max_size=25,
).map(lambda items: [Entry(f"p{index}", numel, dtype) for index, (numel, dtype) in enumerate(items)])
ranks = st.integers(1, 9)
bucket_bytes = st.sampled_from([1, 500, 4096, 20_000, 10**9])


def make(found: list[Entry], count: int, size: int, borders: tuple[int, ...] = ()) -> Layout:
    return plan(found, count, bucket_bytes=size, itemsize=ITEMSIZE, borders=borders)


@settings(max_examples=150, deadline=None)
@given(entries, ranks, bucket_bytes)
def test_every_element_lies_on_exactly_one_rank(found: list[Entry], count: int, size: int) -> None:
    layout = make(found, count, size)
    owned = {index: [0] * entry.numel for index, entry in enumerate(found)}
    for rank in range(count):
        for piece in layout.pieces(rank):
            for element in range(piece.lo, piece.hi):
                owned[piece.param][element] += 1
    assert all(set(counts) <= {1} for counts in owned.values())
    for index, entry in enumerate(found):
        pieces = layout.owners(index) if entry.numel else ()
        assert [element for piece in pieces for element in range(piece.lo, piece.hi)] == list(range(entry.numel))


@settings(max_examples=150, deadline=None)
@given(entries, ranks, bucket_bytes)
def test_no_two_parameters_and_no_two_pieces_overlap(found: list[Entry], count: int, size: int) -> None:
    layout = make(found, count, size)
    for bucket in layout.buckets:
        position = 0
        for slot in bucket.slots:
            assert slot.start >= position
            assert slot.start + slot.numel <= slot.end <= bucket.size
            position = slot.end
        for rank in range(count):
            position = 0
            for piece in bucket.pieces(rank):
                assert piece.offset >= position
                position = piece.offset + piece.length
                assert position <= bucket.shard
        gaps = sum(stop - start for start, stop in bucket.gaps)
        assert gaps + sum(slot.numel for slot in bucket.slots) == bucket.size


@settings(max_examples=150, deadline=None)
@given(entries, ranks, bucket_bytes)
def test_blocks_of_squares_never_cross_a_shard_or_a_neighbour(found: list[Entry], count: int, size: int) -> None:
    for bucket in make(found, count, size).buckets:
        assert bucket.shard % BLOCK == 0
        for slot in bucket.slots:
            if slot.numel >= BLOCK:
                assert slot.start % BLOCK == 0
                assert slot.end % BLOCK == 0
            else:
                assert slot.start % UNIT == 0
                assert slot.start // BLOCK == (slot.end - 1) // BLOCK
        for rank in range(count):
            for piece in bucket.pieces(rank):
                # A shard cuts a parameter only between its own blocks.
                assert piece.lo % BLOCK == 0
                assert piece.offset % UNIT == 0
                assert piece.length % UNIT == 0


@settings(max_examples=100, deadline=None)
@given(entries, ranks, bucket_bytes)
def test_buckets_hold_one_dtype_and_come_in_the_order_of_their_last_gradient(
    found: list[Entry], count: int, size: int
) -> None:
    layout = make(found, count, size)
    firsts = []
    for bucket in layout.buckets:
        params = [slot.param for slot in bucket.slots]
        assert {found[param].dtype for param in params} == {bucket.dtype}
        assert params == sorted(params, reverse=True)
        firsts.append(min(params))
    assert firsts == sorted(firsts, reverse=True)


@settings(max_examples=100, deadline=None)
@given(entries, ranks, bucket_bytes, st.sets(st.integers(0, 24), max_size=4))
def test_no_bucket_crosses_a_border(found: list[Entry], count: int, size: int, borders: set[int]) -> None:
    layout = make(found, count, size, tuple(borders))
    for bucket in layout.buckets:
        params = [slot.param for slot in bucket.slots]
        assert not any(min(params) < border <= max(params) for border in borders)


def test_a_bucket_is_closed_once_it_is_full_and_padding_is_small() -> None:
    layout = make([Entry(f"p{index}", 2048, "fp16") for index in range(8)], 2, 8192)
    assert [len(bucket.slots) for bucket in layout.buckets] == [2, 2, 2, 2]
    assert all(bucket.size == 4096 for bucket in layout.buckets)


@pytest.mark.parametrize("count", [1, 2, 64, 1024])
def test_padding_stays_below_one_block_for_each_rank_and_bucket_and_one_for_each_parameter(count: int) -> None:
    found = [Entry(f"p{index}", 1_000_003, "fp16") for index in range(20)]
    layout = make(found, count, 8 * 2**20)
    padding = sum(bucket.size for bucket in layout.buckets) - sum(entry.numel for entry in found)
    assert padding <= BLOCK * (len(found) + count * len(layout.buckets))
