"""A fault in the plugin, or in what surrounds it, costs no request; repeated ones end switching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.engine.load import Request, differences, run_load
from tests.engine.saboteur import install
from tests.engine.serving import CHAIN, RICH_MESSAGES, SPECULATION, TARGET, Server, serve
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine

# Each fault happens as often as the file of its name says. The window is short, so that one test's faults are
# forgotten by the next.
WINDOW_STEPS = 20
SABOTAGE = f"""
from pathlib import Path

def due(name):
    wish = Path(__file__).parent / name
    times = int(wish.read_text()) if wish.exists() else 0
    if times:
        wish.write_text(str(times - 1))
    return times > 0

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_adaptive_spec import faults
    from sglang_adaptive_spec.policies import AlternatePolicy
    from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514

    faults.WINDOW_STEPS = {WINDOW_STEPS}
    plain, catch_up, decide = Sglang0514.run_plain_decode, Sglang0514.catch_up, AlternatePolicy.decide

    def fail_plain(self, worker, runtime, batch, publish):
        early = due("a plain step before its lengths are out")
        if any(req.finished() for req in batch.reqs) and due("a plain step of one that has ended"):
            raise RuntimeError("injected")
        result = plain(self, worker, runtime, batch, None if early else publish)
        if early or due("a plain step after its lengths are out"):
            raise RuntimeError("injected")
        return result

    def fail_catch_up(self, *arguments, **more):
        if due("a catch-up"):
            raise RuntimeError("injected")
        return catch_up(self, *arguments, **more)

    def fail_decide(self, seen):
        if due("the policy"):
            raise RuntimeError("injected")
        return decide(self, seen)

    def turn_around(result, batch, *args, **kwargs):
        plan = getattr(batch, "adaptive_spec_plan", None)
        if plan is not None and due("a plan turned around"):
            plan.mode = plan.mode.other

    Sglang0514.run_plain_decode, Sglang0514.catch_up, AlternatePolicy.decide = fail_plain, fail_catch_up, fail_decide
    target = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode"
    HookRegistry.register(target, turn_around, HookType.AFTER)
"""
FAULTS = {
    "a plan turned around": ("preparation", "turned into"),
    "a plain step before its lengths are out": ("plain_step", "a plain step failed"),
    "a plain step after its lengths are out": ("plain_step", "a plain step failed"),
    "a catch-up": ("catch_up", "the draft could not catch up"),
    "the policy": ("policy", "the policy failed"),
}
FLIPS = {"policy": "alternate", "alternate_period_steps": 3}
FOR_GOOD = "from here on SGLang speculates as it would alone"


class Sabotaged:
    """A server with somebody inside who breaks what he is told to."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self._folder = folder

    def break_next(self, what: str, times: int = 1) -> None:
        (self._folder / what).write_text(str(times))

    def broke(self, what: str) -> bool:
        return (self._folder / what).read_text() == "0"


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sabotaged]:
    folder = tmp_path_factory.mktemp("faults")
    env = install(folder / "saboteur", SABOTAGE)
    with serve(folder / "log", [*SPECULATION, *CHAIN], settings=FLIPS, env=env) as server:
        yield Sabotaged(server, folder / "saboteur")


@pytest.mark.supports(
    "Faults",
    "an exception in a plain step",
    "an exception in a catch-up of the draft",
    "an exception in the policy",
    "another plugin that changes a prepared batch",
    since="0.1.0",
)
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_said_once_and_costs_no_request(
    sabotaged: Sabotaged, load: list[Request], reference: list[list[int]], what: str
) -> None:
    server, (kind, message) = sabotaged.server, FAULTS[what]
    assert server.use(**FLIPS)
    before = server.state()
    sabotaged.break_next(what)
    tokens = run_load(server, load)
    after = server.state()
    assert sabotaged.broke(what)
    assert differences(load, reference, tokens) == []
    assert after["faults_by_kind"][kind] == before["faults_by_kind"].get(kind, 0) + 1
    assert after["faults"] == before["faults"] + 1
    assert server.log.count(message) == 1
    assert "must match the size of tensor" not in server.log
    # It was that step's fault alone.
    assert not after["spec_only"]
    assert after["steps"]["plain"] > before["steps"]["plain"] + 10
    assert server.used_tokens() == 0


def test_what_a_failed_catch_up_left_out_stays_out_of_the_radix_cache(sabotaged: Sabotaged) -> None:
    server = sabotaged.server
    assert server.use(policy="plain")
    [prompt] = heldout_prompts(1, seed=61, max_size=24)
    ids = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(prompt).ids

    def cached_after(times: int) -> int:
        server.used_tokens()
        sabotaged.break_next("a catch-up", times)
        output_ids = generate(server, ids, 150)["output_ids"]
        assert sabotaged.broke("a catch-up")
        # The later catch-ups went well, and are of no use behind the gap.
        return int(generate(server, ids + output_ids[:120], 4)["meta_info"]["cached_tokens"])

    assert cached_after(0) > len(ids) + 60
    assert cached_after(1) <= len(ids)


def test_a_step_that_fails_once_a_request_of_it_has_ended_takes_no_slot_for_it(
    sabotaged: Sabotaged, plain_server: Server
) -> None:
    """A grammar lets results be processed between a step's preparation and the step."""
    server = sabotaged.server
    assert server.use(policy="plain")
    before = server.state()["faults_by_kind"].get("plain_step", 0)
    prompts = heldout_prompts(6, seed=63, max_size=20)
    lengths = [{"max_new_tokens": 20 + 7 * number, "ignore_eos": True} for number in range(5)]
    sampling = [{"temperature": 0, **limits} for limits in (*lengths, {"max_new_tokens": 70, "regex": "[a-z ]{200}"})]
    body = {"text": prompts, "sampling_params": sampling}
    sabotaged.break_next("a plain step of one that has ended", 2)
    got, wanted = (one.client.post("/generate", json=body).raise_for_status().json() for one in (server, plain_server))
    assert sabotaged.broke("a plain step of one that has ended")
    assert [answer["output_ids"] for answer in got] == [answer["output_ids"] for answer in wanted]
    assert server.state()["faults_by_kind"]["plain_step"] == before + 2
    assert server.used_tokens() == 0
    # Until these faults are forgotten.
    server.generate(prompts[0], max_new_tokens=4 * WINDOW_STEPS, ignore_eos=True)


@pytest.mark.supports(
    "Faults", "repeated faults", since="0.1.0", note="the server then speculates as SGLang alone would"
)
def test_repeated_faults_end_switching_and_cost_no_request(
    sabotaged: Sabotaged, load: list[Request], reference: list[list[int]]
) -> None:
    """Last on this server: there is no way back."""
    server = sabotaged.server
    assert server.use(**FLIPS)
    sabotaged.break_next("a plain step before its lengths are out", 3)
    assert differences(load, reference, run_load(server, load)) == []
    before = server.state()
    assert before["spec_only"]
    assert differences(load, reference, run_load(server, load)) == []
    after = server.state()
    assert after["mode"] == "spec"
    assert after["steps"]["plain"] == before["steps"]["plain"]
    assert after["steps"]["spec"] > before["steps"]["spec"]
    assert server.log.count(FOR_GOOD) == 1
    if RICH_MESSAGES:
        refused = server.ask({"policy": "plain"})
        assert refused.status_code == 400
        assert "since repeated faults" in refused.json()["message"]
    else:
        assert not server.use(policy="plain")
    assert server.used_tokens() == 0


def accept_length(server: Server) -> float:
    """Of the first few tokens behind long prompts that are new to the server: what it makes of a prompt."""
    server.flush()
    prompts = ["\n".join(heldout_prompts(4, seed=seed)) for seed in range(62, 70)]
    metas = [server.generate(text, max_new_tokens=24, ignore_eos=True)["meta_info"] for text in prompts]
    if RICH_MESSAGES:
        assert sum(meta["adaptive_spec_plain_steps"] for meta in metas) == 0
    return mean(meta["spec_accept_length"] for meta in metas)


def test_a_server_held_plain_speculates_well_once_faults_have_ended_that(
    sabotaged: Sabotaged, tmp_path: Path, load: list[Request], reference: list[list[int]]
) -> None:
    """Its draft has seen nothing so far. The admin key guards its control; /metrics shows what happened."""
    env = install(tmp_path / "saboteur", SABOTAGE)
    arguments = [*SPECULATION, *CHAIN, "--enable-metrics", "--admin-api-key=for-admins"]
    with serve(tmp_path / "log", arguments, settings={"policy": "plain"}, env=env) as server:
        for headers in ({}, {"Authorization": "Bearer guessed"}):
            server.client.headers = httpx.Headers(headers)
            assert server.ask({"policy": "plain"}).status_code == 401
        server.client.headers = httpx.Headers({"Authorization": "Bearer for-admins"})
        assert server.use(policy="plain")

        inside = Sabotaged(server, tmp_path / "saboteur")
        assert server.scrape()["sglang:adaptive_spec_disabled_by_faults"] == 0
        inside.break_next("a plain step after its lengths are out", 3)
        assert differences(load, reference, run_load(server, load)) == []
        assert server.state()["spec_only"]
        # Right away, with what the plain phase left in the radix cache.
        assert differences(load, reference, run_load(server, load)) == []
        scrape = server.scrape()
        assert scrape["sglang:adaptive_spec_disabled_by_faults"] == 1
        assert scrape["sglang:adaptive_spec_faults_total kind=plain_step"] == 3

        assert sabotaged.server.state()["spec_only"] or sabotaged.server.use(policy="spec")
        lengths = accept_length(server), accept_length(sabotaged.server)
        assert lengths[0] / lengths[1] >= 0.98


def generate(server: Server, input_ids: list[int], new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    response = server.client.post("/generate", json={"input_ids": input_ids, "sampling_params": sampling})
    answer: dict[str, Any] = response.raise_for_status().json()
    return answer
