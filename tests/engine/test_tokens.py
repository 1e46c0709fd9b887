"""Flips change no token and lose no slot, whatever the layout and however the mode flips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.load import Request, differences, run_load
from tests.engine.serving import CHAIN, CHAINS_ONLY, SPECULATION, TREE, Server, serve

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Layout:
    page_size: int
    overlap: bool
    topk: int

    def __str__(self) -> str:
        return f"page{self.page_size}-{'overlap' if self.overlap else 'sync'}-topk{self.topk}"

    @property
    def arguments(self) -> list[str]:
        shape = CHAIN if self.topk == 1 else TREE
        overlap = [] if self.overlap else ["--disable-overlap-schedule"]
        # SGLang admits trees on pages for these backends only; on a CPU the name is all that differs.
        backend = ["--attention-backend=triton"] if self.topk > 1 and self.page_size > 1 else []
        return [*SPECULATION, *shape, f"--page-size={self.page_size}", *overlap, *backend]

    @property
    def environment(self) -> dict[str, str]:
        # Some attention backends want lengths on the host during speculation (fa3), others do without (triton).
        return RETRACT | {"SGLANG_CPU_ENGINE_NEEDS_CPU_SEQ_LENS": "1" if self.page_size == 1 else "0"}


LAYOUTS = [
    Layout(page, overlap, topk)
    for page in (1, 16)
    for overlap in ((True,) if CHAINS_ONLY else (True, False))
    for topk in ((1,) if CHAINS_ONLY else (1, 4))
]
THRESHOLD = {"disable_batch_threshold": 3, "min_dwell_steps": 2}
FLIPS: dict[str, dict[str, Any]] = {
    "always-spec": {"policy": "spec"},
    "by-load": THRESHOLD,
    **{f"every-{k}": {"policy": "alternate", "alternate_period_steps": k} for k in (1, 2, 3, 7)},
}
# Every 11th step one request is thrown out of the batch and prefilled again later.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    layout: Layout = request.param
    log = tmp_path_factory.mktemp(str(layout)) / "server.log"
    with serve(log, layout.arguments, settings=THRESHOLD, env=layout.environment) as server:
        yield server


@pytest.mark.supports(
    "Allocation and cache",
    "page size 1 and above",
    "retraction of running requests",
    "radix cache, prefixes found in it",
    "slots allocated ahead for speculation, before and after a flip",
    since="0.1.0",
)
@pytest.mark.supports(
    "Steps and scheduling",
    "overlap schedule, and `--disable-overlap-schedule`",
    "chunked prefill between decode steps",
    "attention backends that want lengths on the host, and others",
    since="0.1.0",
)
@pytest.mark.supports(
    "Steps and scheduling", "`--disable-cuda-graph`", since="0.1.0", note="the CPU engine has no graphs at all"
)
@pytest.mark.supports(
    "Models and drafts", "drafts as chains and as trees (`--speculative-eagle-topk`)", "Llama", since="0.1.0"
)
@pytest.mark.supports("Faults", "a client that disconnects", since="0.1.0")
@pytest.mark.parametrize("flips", FLIPS)
def test_flips_change_no_token(server: Server, flips: str, load: list[Request], reference: list[list[int]]) -> None:
    assert server.use(**FLIPS[flips])
    before = server.state()
    # Alone before and after the load: where the load decides, it rises and falls, however fast the machine is.
    lone_before = server.generate(load[0].text, max_new_tokens=40, ignore_eos=True)["output_ids"]
    tokens = run_load(server, load)
    lone_after = server.generate(load[0].text, max_new_tokens=40, ignore_eos=True)["output_ids"]
    after = server.state()

    server.check_alive()
    assert lone_before == lone_after
    assert lone_after[: load[0].max_new_tokens] == reference[0]
    assert differences(load, reference, tokens) == []
    assert after["faults"] == 0
    ran = {mode: after["steps"][mode] - before["steps"][mode] for mode in ("spec", "plain")}
    switched = after["switches"] - before["switches"]
    if flips == "always-spec":
        assert ran["plain"] == 0
    else:
        assert min(ran.values()) >= 6, f"too few steps in one of the modes to show anything: {ran}"
        assert switched >= 2, f"too few flips to show anything: {switched}"
        if flips != "every-1":  # only a step after one of its own mode counts for that
            assert all(after["step_seconds"].values()), "not both modes were timed"
        assert any(s["first_step_seconds"] for s in after["last_switches"]), "no switch was timed"
    assert server.used_tokens() == 0


@pytest.mark.supports("Control", "one mode for ever (policies `plain` and `spec`)", since="0.1.0")
@pytest.mark.parametrize("layout", [Layout(1, True, 1), Layout(16, CHAINS_ONLY, 1)], ids=str)
def test_always_plain_changes_no_token(
    layout: Layout, load: list[Request], reference: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with serve(log, layout.arguments, settings={"policy": "plain"}, env=layout.environment) as server:
        tokens = run_load(server, load)
        state = server.state()
        assert differences(load, reference, tokens) == []
        assert state["steps"]["spec"] == 0
        assert state["steps"]["plain"] > 20
        assert state["faults"] == 0
        assert server.used_tokens() == 0
