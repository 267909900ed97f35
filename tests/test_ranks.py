"""The harness itself: values in rank order, failures shown with the first rank's traceback, never a hang."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import RankError, on_ranks, run_ranks

pytest_plugins = ["pytester"]


def value_of_rank(offset: torch.Tensor) -> tuple[int, torch.Tensor]:
    return dist.get_rank(), offset + dist.get_rank()


def sum_of_ranks() -> float:
    total = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(total)
    return total.item()


def pid() -> int:
    return os.getpid()


def fail_while_the_others_sleep(culprit: int) -> None:
    if dist.get_rank() == culprit:
        number = 3
        assert number == 4
    time.sleep(60)


def fail_while_the_others_reduce(culprit: int) -> None:
    print("a word from rank", dist.get_rank())
    if dist.get_rank() == culprit:
        raise ValueError("what went wrong")
    dist.all_reduce(torch.ones(1))


def die(culprit: int, how: str) -> None:
    if dist.get_rank() == culprit:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def sleep_in_this_function() -> None:
    time.sleep(60)


def skip_here() -> None:
    if dist.get_rank() == 1:
        pytest.skip("rank 1 has no such thing")
    dist.all_reduce(torch.ones(1))


def unpicklable_value() -> object:
    return threading.Lock()


def leave_traces() -> None:
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def traces() -> tuple:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("a warning", stacklevel=1)
    state = (torch.initial_seed(), torch.get_default_dtype(), torch.is_grad_enabled())
    return (*state, os.environ.get("LEFT_BEHIND"), os.getcwd(), len(seen), torch.get_num_threads())


def variable(name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_come_back_in_rank_order(world_size: int) -> None:
    for rank, (said, value) in enumerate(run_ranks(value_of_rank, world_size, torch.tensor([10.0, 20.0]))):
        assert said == rank
        assert value.tolist() == [10.0 + rank, 20.0 + rank]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_collective_spans_all_ranks(world_size: int) -> None:
    assert run_ranks(sum_of_ranks, world_size) == [2.0**world_size - 1] * world_size


def test_processes_are_reused_and_fresh_ones_are_not() -> None:
    pids = run_ranks(pid, 2)
    assert run_ranks(pid, 2) == pids
    fresh = run_ranks(pid, 2, fresh=True)
    assert not set(fresh) & set(pids)
    assert run_ranks(pid, 2) == pids
    for gone in fresh:
        with pytest.raises(ProcessLookupError):
            os.kill(gone, 0)


def test_first_failure_is_shown_while_the_other_ranks_hang() -> None:
    run_ranks(pid, 3)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_while_the_others_sleep, 3, 1)
    assert time.monotonic() - start < 5.0
    assert caught.value.first == 1
    text = str(caught.value)
    assert "rank 1 of 3 failed first" in text
    assert "in fail_while_the_others_sleep" in text
    assert "assert 3 == 4" in text  # the values, as pytest shows them
    assert "rank 0 was still running" in text
    assert "rank 2 was still running" in text
    assert run_ranks(sum_of_ranks, 3) == [7.0] * 3


def test_a_failure_that_tears_the_others_down_keeps_the_pool() -> None:
    pids = run_ranks(pid, 2)
    start = time.monotonic()
    with pytest.raises(RankError, match="what went wrong") as caught:
        run_ranks(fail_while_the_others_reduce, 2, 0)
    assert time.monotonic() - start < 5.0
    assert caught.value.first == 0
    assert "a word from rank 1" in str(caught.value)
    assert run_ranks(pid, 2) == pids


@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 7"), ("kill", "killed by SIGKILL")])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_dead_rank_is_named(how: str, said: str, fresh: bool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=said) as caught:
        run_ranks(die, 2, 1, how, fresh=fresh)
    assert time.monotonic() - start < 10.0
    assert caught.value.first == 1
    assert "rank 1 of 2 died first" in str(caught.value)
    assert run_ranks(sum_of_ranks, 2) == [3.0] * 2


def test_timeout_shows_where_each_rank_is() -> None:
    with pytest.raises(RankError, match=r"2 ranks did not all finish within the timeout of 1 s") as caught:
        run_ranks(sleep_in_this_function, 2, timeout=1)
    assert caught.value.first is None
    assert str(caught.value).count("in sleep_in_this_function") == 2
    assert run_ranks(sum_of_ranks, 2) == [3.0] * 2


def test_a_skip_on_one_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="rank 1 has no such thing"):
        run_ranks(skip_here, 2)
    assert run_ranks(sum_of_ranks, 2) == [3.0] * 2


def test_a_call_finds_nothing_of_the_one_before() -> None:
    run_ranks(leave_traces, 2)
    assert run_ranks(traces, 2) == [(0, torch.float32, True, None, os.getcwd(), 1, 1)] * 2


def test_variables_reach_new_processes_only() -> None:
    assert run_ranks(variable, 2, "HARNESS_VARIABLE", env={"HARNESS_VARIABLE": "here"}) == ["here"] * 2
    assert run_ranks(variable, 2, "HARNESS_VARIABLE") == [None] * 2


def test_what_cannot_travel_is_named() -> None:
    def nested() -> None: ...

    with pytest.raises(TypeError, match="expected a module-level function, got test_what_cannot_travel_is_named"):
        run_ranks(nested, 2)
    with pytest.raises(TypeError, match=r"argument 'offset' \(lock\) cannot travel"):
        run_ranks(value_of_rank, 2, offset=threading.Lock())
    with pytest.raises(RankError, match=r"cannot pickle '_thread\.lock' object"):
        run_ranks(unpicklable_value, 2)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("factor", [1, 10])
@pytest.mark.parametrize("name", ["a"])
def test_decorated_body_runs_on_every_rank(rank: int, world_size: int, factor: int, name: str, tmp_path: Path) -> None:
    assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    (tmp_path / f"{name}{rank}").write_text(str(factor * rank))
    dist.barrier()
    assert sorted(int(path.read_text()) for path in tmp_path.iterdir()) == [factor * r for r in range(world_size)]


@pytest.mark.parametrize("factor", [1, 10])
@on_ranks(2)
def test_decorators_compose_in_the_other_order(factor: int) -> None:
    total = torch.tensor(float(factor))
    dist.all_reduce(total)
    assert total == 2 * factor


def test_pytest_reports_each_world_size(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_written_by_the_harness_test="""
        import pytest
        import torch.distributed as dist
        from ranks import on_ranks

        @on_ranks(1, 2)
        @pytest.mark.parametrize("number", [5, 6])
        def test_ends(rank, world_size, number):
            if number == 6 and rank == 1:
                assert number == 7, "only here"
            dist.barrier()

        @on_ranks(2)
        def test_skips(rank):
            pytest.skip("not today")
        """
    )
    result = pytester.runpytest_inprocess("-rA", "-p", "no:cacheprovider", plugins=[])
    result.assert_outcomes(passed=3, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*test_ends?6-2ranks?*", "rank 1 of 2 failed first*", "*only here*"])
    result.stdout.fnmatch_lines(["*assert 6 == 7*"])


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_no_rank_outlives_its_pytest(tmp_path: Path) -> None:
    (tmp_path / "called.py").write_text("import os, time\ndef pid(): return os.getpid()\ndef sleep(): time.sleep(60)\n")
    (tmp_path / "script.py").write_text(
        "if __name__ == '__main__':\n"
        "    import called, ranks\n"
        "    print(*ranks.run_ranks(called.pid, 2), flush=True)\n"
        "    ranks.run_ranks(called.sleep, 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(ranks.__file__).parent), "TMPDIR": str(tmp_path / "left")}
    (tmp_path / "left").mkdir()
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert list((tmp_path / "left").glob("ranks-*"))
        process.kill()
    deadline = time.monotonic() + 10
    while alive := [one for one in pids if Path(f"/proc/{one}").exists()]:
        assert time.monotonic() < deadline, f"processes {alive} outlived their parent"
        time.sleep(0.05)
    assert not list((tmp_path / "left").glob("ranks-*"))
