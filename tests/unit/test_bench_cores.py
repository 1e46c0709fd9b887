"""The cores that schedulers are measured on."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench import cores, order


@pytest.fixture(autouse=True)
def _where_it_was() -> Iterator[None]:
    """So that a test which leaves this process on one core fails, and not the next."""
    before = os.sched_getaffinity(0)
    yield
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == before


@contextmanager
def served() -> Iterator[int]:
    """A session with a process that calls itself as SGLang's scheduler does, and one that does not."""
    script = "(exec -a sglang::scheduler_TP0 sleep 60) & (exec -a sglang::detokenizer sleep 60) & echo ready; wait"
    with subprocess.Popen(["bash", "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            os.killpg(process.pid, 9)


@pytest.fixture
def server() -> Iterator[int]:
    with served() as session:
        yield session


def await_schedulers(session: int) -> list[int]:
    while not (found := cores.schedulers(session)):  # the test's own limit of time ends this
        pass
    return list(found)


def test_schedulers_and_nothing_else_move_to_the_same_cores(server: int) -> None:
    (scheduler,) = await_schedulers(server)
    allowed = os.sched_getaffinity(0)
    row = cores.pin(1, [server, server])
    assert row["schedulers"] == 2  # the same session twice stands for two servers
    assert len(row["cores"]) == 1
    assert os.sched_getaffinity(scheduler) == set(row["cores"])
    assert os.sched_getaffinity(server) == allowed
    assert set(row["core_ms"]) == allowed
    assert min(row["core_ms"].values()) > 0


def test_the_scheduler_of_another_session_stays(server: int) -> None:
    await_schedulers(server)
    with served() as other:
        (scheduler,) = await_schedulers(other)
        assert cores.pin(1, [server])["schedulers"] == 1
        assert os.sched_getaffinity(scheduler) == os.sched_getaffinity(0)


def test_timing_a_core_leaves_this_process_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    assert cores.time_core(min(before)) > 0
    assert os.sched_getaffinity(0) == before


def test_a_server_that_ended_has_nothing_to_move() -> None:
    row = cores.pin(1, [])
    assert row["schedulers"] == 0
    assert row["cores"]


def test_the_quickest_cores_are_chosen() -> None:
    took_ms = {0: 2.0, 1: 1.0, 2: 3.0, 3: 1.0}
    assert cores.quickest(took_ms, 2) == [1, 3]
    assert cores.quickest(took_ms, 3) == [0, 1, 3]
    assert cores.quickest(took_ms, 9) == [0, 1, 2, 3]
    assert cores.quickest(took_ms, 0) == [1]


@pytest.mark.parametrize(
    ("count", "why"),
    [
        ("-1", "1 core or more"),
        # With one server at once.
        ("1", "pin those of several"),
    ],
)
def test_what_can_not_be_pinned_is_refused(count: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    order.add_options(parser)
    args = parser.parse_args(["--pin-schedulers", count])
    args.modes = ["base"]
    with pytest.raises(SystemExit):
        order.check_options(parser, args)
    assert why in capsys.readouterr().err
