"""Random requests, features, arrivals, hang-ups and flips, against a server without speculation.

What fails is shrunk to a short script and printed as Python. To play it again, give it to the test as another
``@example(...)``; one that stays there is played by every ``make test``.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.engine.scripts import (
    FEATURES,
    FLIPS,
    GRAMMARS,
    PROMPTS,
    STOPS,
    Ask,
    Flip,
    Reference,
    Script,
    differences,
    play,
)
from tests.engine.serving import CHAIN, CHAINS_ONLY, SPECULATION, TREE, Server, serve

pytestmark = pytest.mark.engine

# Pools so small that requests are thrown out for want of room, and that a switch finds none. Trees take more. With
# fewer SGLang itself would cut LONE short: it keeps a page and a token.
LAYOUTS = {
    "tree-pages": [*TREE, "--page-size=16", "--attention-backend=triton", "--max-total-tokens=1024"],
    "chain": [*CHAIN, "--page-size=1", "--max-total-tokens=640"],
    "chain-sync": [*CHAIN, "--page-size=16", "--disable-overlap-schedule", "--max-total-tokens=656"],
}
if CHAINS_ONLY:
    LAYOUTS = {"chain-pages": [*CHAIN, "--page-size=16", "--max-total-tokens=656"], "chain": LAYOUTS["chain"]}
FAST = next(iter(LAYOUTS))
PRIORITIES = [
    "--enable-priority-scheduling",
    "--default-priority-value=0",
    "--priority-scheduling-preemption-threshold=0",
]
TRIES_ONCE_FAILED = 3


class LongLived:
    """One server for all scripts, started again only if a script ended it."""

    def __init__(self, layout: str, folder: Path) -> None:
        self._layout = layout
        self._logs = (folder / f"log-{number}" for number in count())
        self._running = ExitStack()
        self._server: Server | None = None
        self._failed = False

    def __call__(self) -> Server:
        if self._server is None:
            arguments = [*SPECULATION, *LAYOUTS[self._layout], *PRIORITIES]
            # Ten tokens a request that wait for the draft make for many catch-ups.
            start = {"disable_batch_threshold": 2, "min_dwell_steps": 1, "catch_up_tokens": 10}
            self._server = self._running.enter_context(serve(next(self._logs), arguments, settings=start))
        return self._server

    def stop(self) -> None:
        self._server = None
        self._running.close()

    def give_up(self) -> str:
        """Be done with a server that has ended, or is to: the end of its log."""
        assert self._server is not None
        tail = self._server.process.log_tail()
        self._running.pop_all()
        self._server.process.stop()
        self._server = None
        return tail

    def check(self, script: Script, reference: Reference) -> None:
        """Play a script and hold it against the reference; once one has failed, which depends on the moment, thrice.

        The crowd is too large and too long not to run in both modes.
        """
        for _ in range(TRIES_ONCE_FAILED if self._failed else 1):
            self._failed, before = True, self._failed
            self._check(script, reference)
            self._failed = before

    def _check(self, script: Script, reference: Reference) -> None:
        server = self()
        try:
            before = server.state()["steps"]
            found = differences(script, play(server, script), reference)
            leaked, state = server.used_tokens(), server.state()
            faults, after = state["faults"], state["steps"]
            server.check_alive()
        except Exception as error:
            raise AssertionError(f"{error!r} in {script}\n{self.give_up()}") from error
        if faults:
            raise AssertionError(f"{faults} faults of the plugin\n{self.give_up()}")
        assert found == []
        assert leaked == 0
        assert script != CROWD or min(after[mode] - before[mode] for mode in after) >= 6, (before, after)


@pytest.fixture(scope="module")
def reference(plain_server: Server) -> Reference:
    return Reference(plain_server)


@pytest.fixture(scope="module", params=LAYOUTS)
def any_layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongLived]:
    server = LongLived(request.param, tmp_path_factory.mktemp("soak"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def one_layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongLived]:
    server = LongLived(FAST, tmp_path_factory.mktemp("random"))
    yield server
    server.stop()


@st.composite
def feature_sets(draw: st.DrawFn) -> frozenset[str]:
    """At most one of what decides on a request's end, and any of the others.

    No stops beside a grammar: SGLang's verify step that completes the grammar looks for no earlier stop in its run.
    """
    ends = GRAMMARS | {"to the limit", "least"}
    end = draw(st.none() | st.sampled_from(sorted(ends)))
    others = FEATURES.keys() - ends - (STOPS if end in GRAMMARS else set())
    some = draw(st.frozensets(st.sampled_from(sorted(others)), max_size=3))
    return some if end is None else some | {end}


asks = st.builds(
    Ask,
    prompt=st.integers(0, len(PROMPTS) - 1),
    new_tokens=st.integers(1, 48),
    features=feature_sets(),
    at=st.integers(0, 20),
    hangs_up_after=st.none() | st.none() | st.integers(1, 12),
    streams=st.booleans(),
    priority=st.integers(0, 2),
)
flips = st.builds(Flip, to=st.sampled_from(sorted(FLIPS)), at=st.integers(0, 30))
scripts = st.builds(
    Script,
    asks=st.lists(asks, min_size=1, max_size=8).map(tuple),
    flips=st.lists(flips, min_size=1, max_size=5).map(tuple),
)

# At once nearly, more than the pool holds, and each third throws the others out.
CROWD = Script(
    asks=tuple(
        Ask(prompt, 48, frozenset({"to the limit"}), at=number, priority=number % 3)
        for number, prompt in enumerate((2, 3, 6, 7, 10, 11, 12, 0))
    ),
    flips=(Flip("every 1"), Flip("spec", at=8), Flip("every 3", at=16)),
)

# To the last slots of the smallest pool, by itself.
LONE = Script(asks=(Ask(12, 310, frozenset({"to the limit"})),), flips=(Flip("every 1"),))

COMMON = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


@pytest.mark.supports("Structured output", "EBNF", "grammars while streaming", since="0.1.0")
@pytest.mark.supports("Steps and scheduling", "priorities that preempt (`--enable-priority-scheduling`)", since="0.1.0")
@pytest.mark.supports("Ends of a request", "`ignore_eos`", "`stop_token_ids`", since="0.1.0")
@pytest.mark.supports(
    "Allocation and cache", "a pool that is full, real retraction", "a switch that finds no slots", since="0.1.0"
)
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate], **COMMON)
@example(script=CROWD)
@given(script=scripts)
def test_random_scripts_change_no_token(script: Script, one_layout: LongLived, reference: Reference) -> None:
    """The fast part, the same in every run: found failures are shrunk by the long one."""
    one_layout.check(script, reference)


@pytest.mark.supports("Faults", "SIGTERM while modes flip", since="0.1.0", note="what runs is answered first")
def test_a_server_told_to_end_while_it_flips_answers_what_it_has(one_layout: LongLived, reference: Reference) -> None:
    """Last on this server."""
    server = one_layout()
    script = Script(tuple(Ask(prompt, 120, frozenset({"to the limit"})) for prompt in (0, 4)))
    with ThreadPoolExecutor(1) as pool:
        assert server.use(**FLIPS["every 1"])
        answers = pool.submit(play, server, script)
        before = server.state()["switches"]
        while server.state()["switches"] < before + 6:
            assert not answers.done()
        server.process.send_signal(signal.SIGTERM)
        found = differences(script, answers.result(), reference)
    ended = server.process.wait(60)
    log = server.log
    one_layout.give_up()
    assert found == []
    assert ended is not None, "the server did not end"
    assert "Gracefully exiting" in log


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=60, **COMMON | {"derandomize": False})
@example(script=LONE)
@given(script=scripts)
def test_many_random_scripts_change_no_token(script: Script, any_layout: LongLived, reference: Reference) -> None:
    any_layout.check(script, reference)
