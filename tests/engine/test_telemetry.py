"""What the person on call sees and does, over HTTP: metrics, log lines, live control, and who may."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.load import Request, differences, run_load
from tests.engine.serving import CHAIN, CHAINS_ONLY, RICH_MESSAGES, SPECULATION, TARGET, Server, serve
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine
needs_rich_messages = pytest.mark.skipif(not RICH_MESSAGES, reason="SGLang lets plain numbers through alone")

KEY = "tell-nobody"
LOG_INTERVAL = 10
THRESHOLD = {"disable_batch_threshold": 3, "resume_batch_threshold": 2, "min_dwell_steps": 2}
OURS = "sglang:adaptive_spec_"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-metrics", f"--decode-log-interval={LOG_INTERVAL}", f"--api-key={KEY}"]
    log = tmp_path_factory.mktemp("telemetry") / "log"
    # Now and then a request is thrown out of the batch and prefilled again later.
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "29"}
    with serve(log, [*SPECULATION, *CHAIN, *arguments], settings=THRESHOLD, env=env) as server:
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        yield server
        assert server.state()["faults"] == 0


@pytest.fixture(autouse=True)
def by_load(server: Server) -> None:
    assert server.use(**THRESHOLD)


# --- metrics ---------------------------------------------------------------------------------------------


def generate_rising_and_falling(server: Server, seed: int) -> list[dict[str, Any]]:
    """Requests that come one by one and leave one by one, so that the load crosses the thresholds twice."""
    prompts = heldout_prompts(6, seed=seed, max_size=16)

    def send(index: int) -> dict[str, Any]:
        time.sleep(0.04 * index)
        # Long enough to meet even where a step takes a few milliseconds; only one may end earlier.
        return server.generate(prompts[index], max_new_tokens=200 + 40 * index, ignore_eos=index != 1)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(send, range(len(prompts))))


def settled(server: Server) -> tuple[dict[str, float], dict[str, Any]]:
    """A scrape and the plugin's state, once the server has been idle for a moment."""
    deadline = time.monotonic() + 10
    while True:
        scrape, state = server.scrape(), server.state()
        if sum(scrape[f"{OURS}steps_total mode={mode}"] for mode in ("spec", "plain")) == sum(state["steps"].values()):
            return scrape, state
        assert time.monotonic() < deadline, "an idle server's metrics are exact"
        time.sleep(0.05)


def as_scraped(state: dict[str, Any]) -> dict[str, float]:
    """What a scrape should say, given the plugin's own counters."""
    codes = {
        "more requests run than the threshold": "load_rose",
        "few enough requests run to resume": "load_fell",
        "fixed policy": "fixed",
        "forced flip": "forced",
    }
    values = {"accept_length": state["accept_length"]}
    values |= {f"{name}_total": state[name] for name in ("accepted_tokens", "verified_requests")}
    values |= {f"{name}_total": state[name] for name in ("catch_ups", "catch_up_tokens", "catch_up_seconds")}
    for mode in ("spec", "plain"):
        values |= {f"{name}_total mode={mode}": state[name][mode] for name in ("steps", "tokens")}
        values |= {f"mode mode={mode}": float(state["mode"] == mode)}
    for switch in state["switch_counts"]:
        values[f"switches_total reason={codes[switch['reason']]} to_mode={switch['to']}"] = switch["count"]
    return {OURS + name: value for name, value in values.items()}


@pytest.mark.skipif(version("sglang").startswith("0.5.11"), reason="it does not tell how often a request was retracted")
def test_a_scrape_agrees_with_the_plugin_and_with_what_clients_got(server: Server) -> None:
    scrape_before, before = settled(server)
    answers = generate_rising_and_falling(server, seed=51)
    scrape, after = settled(server)
    wanted = as_scraped(after)
    assert {name: scrape[name] for name in wanted} == pytest.approx(wanted)

    def grew(name: str) -> float:
        # From 0.5.17 on some of SGLang's counters have a label more.
        after, before = (
            [value for key, value in values.items() if key == name or key.startswith(f"{name} ")]
            for values in (scrape, scrape_before)
        )
        return sum(after) - sum(before)

    assert grew(f"{OURS}switches_total reason=load_rose to_mode=plain") >= 1
    assert grew(f"{OURS}switches_total reason=load_fell to_mode=spec") >= 1
    assert grew(f"{OURS}catch_up_tokens_total") > 0

    metas = [answer["meta_info"] for answer in answers]
    tokens = {mode: grew(f"{OURS}tokens_total mode={mode}") for mode in ("spec", "plain")}
    # The first token of each comes from its prefill, and so does the one after a retraction; unless it was thrown
    # out again before that.
    retractions = sum(meta["num_retractions"] for meta in metas)
    assert retractions > 0
    of_prefills = sum(meta["completion_tokens"] for meta in metas) - sum(tokens.values())
    assert len(metas) <= of_prefills <= len(metas) + retractions
    assert tokens["plain"] > 0
    if RICH_MESSAGES:
        assert tokens["plain"] == sum(meta["adaptive_spec_plain_steps"] for meta in metas)
    assert grew("sglang:generation_tokens_total") == sum(meta["completion_tokens"] for meta in metas)
    # SGLang's own: plain steps are no verify steps. Ours has the steps under way as requests ended, too.
    verified = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    if not CHAINS_ONLY:  # SGLang counts them from 0.5.13 on
        assert grew("sglang:spec_verify_calls_total") == verified
    assert verified <= grew(f"{OURS}verified_requests_total") <= verified + len(metas) + retractions
    seconds = [after["mode_seconds"][mode] - before["mode_seconds"][mode] for mode in ("spec", "plain")]
    assert min(seconds) > 0


def test_a_scrape_under_load_is_at_most_a_second_behind(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(server.generate, heldout_prompts(1, seed=52)[0], max_new_tokens=900, ignore_eos=True)
        idle = earlier = sum(server.state()["steps"].values())
        while earlier < idle + 5:
            earlier = sum(server.state()["steps"].values())
        # Between the two looks lies more than the second.
        time.sleep(1.5)
        scrape = server.scrape()
        assert not busy.done(), "the load was too short to show anything"
        assert sum(scrape[f"{OURS}steps_total mode={mode}"] for mode in ("spec", "plain")) >= earlier
        busy.result()


# --- the decode log line ---------------------------------------------------------------------------------


def decode_lines(server: Server, action: Callable[[], object]) -> list[str]:
    def all_lines() -> list[str]:
        return [line for line in server.log.splitlines() if "Decode batch" in line]

    already = len(all_lines())
    action()
    return all_lines()[already:]


def test_the_decode_log_line_says_the_mode_whatever_it_is(server: Server) -> None:
    [prompt] = heldout_prompts(1, seed=53)
    request = {"max_new_tokens": 8 * LOG_INTERVAL, "ignore_eos": True}
    assert server.use(policy="spec")
    lines = decode_lines(server, lambda: [server.generate(prompt, **request) for _ in range(3)])
    assert lines[-1].endswith("mode: spec")
    assert "accept len" in lines[-1]
    accept_length = server.scrape()["sglang:spec_accept_length"]
    assert accept_length > 1

    # An interval without a verify step: the line comes, and SGLang's gauge is not drawn to 0.
    assert server.use(policy="plain")
    lines = decode_lines(server, lambda: server.generate(prompt, **request))[1:]
    assert len(lines) >= 6
    assert all(line.endswith("mode: plain") and "accept len" not in line for line in lines)
    assert server.scrape()["sglang:spec_accept_length"] == accept_length
    assert server.scrape().get("sglang:spec_num_steps", 0) == 0
    assert throughputs(lines)[-1] > 0

    assert server.use(policy="alternate", alternate_period_steps=3)
    lines = decode_lines(server, lambda: [server.generate(prompt, **request) for _ in range(3)])[1:]
    mixed = [re.search(r"mode: mixed (\d+) spec/(\d+) plain$", line) for line in lines]
    assert all(mixed), lines
    assert {sum(map(int, match.groups())) for match in mixed if match} == {LOG_INTERVAL}


def throughputs(lines: list[str]) -> list[float]:
    return [float(line.partition("gen throughput (token/s): ")[2].partition(",")[0]) for line in lines]


# --- SGLang's benchmark ----------------------------------------------------------------------------------


def test_bench_serving_reports_the_accept_length_of_speculative_steps(server: Server, tmp_path: Path) -> None:
    assert server.use(policy="alternate", alternate_period_steps=4)
    # SGLang's own settings are still SGLang's. A change to this one sets its accept length back to nothing, in every
    # release; otherwise bench_serving would report the mean of the server's whole life.
    own = {"server_args": {"speculative_accept_threshold_single": 1.0}}
    assert server.client.post("/set_internal_state", json=own).json() == [True]
    _, before = settled(server)
    prompts = tmp_path / "prompts.jsonl"
    turns = [[{"content": text}, {"content": "x " * 60}] for text in heldout_prompts(12, seed=54, max_size=16)]
    prompts.write_text("".join(json.dumps({"conversations": two}) + "\n" for two in turns))
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend=sglang", f"--base-url={server.process.url}"]
    command += [f"--model={TARGET}", "--dataset-name=custom", f"--dataset-path={prompts}", "--num-prompts=12"]
    command += ["--sharegpt-output-len=100", "--max-concurrency=4", "--disable-tqdm", f"--output-file={report}"]
    environment = os.environ | {"OPENAI_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    _, after = settled(server)
    reported = json.loads(report.read_text())
    assert reported["completed"] == 12

    grew = {name: after[name] - before[name] for name in ("accepted_tokens", "verified_requests")}
    assert reported["accept_length"] == pytest.approx(grew["accepted_tokens"] / grew["verified_requests"], rel=0.02)
    plain = after["tokens"]["plain"] - before["tokens"]["plain"]
    assert plain > 0.1 * reported["total_output_tokens"], "hardly a plain step to be mistaken for a verify step"


# --- control ---------------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {"policy": "spec"},
    {"policy": "plain"},
    {"policy": "threshold"},
    {"disable_batch_threshold": 5},
    {"disable_batch_threshold": 9, "resume_batch_threshold": 4},
    {"min_dwell_steps": 3},
    {"policy": "threshold", "disable_batch_threshold": 2, "resume_batch_threshold": 1, "min_dwell_steps": 1},
]
BAD: list[Any] = [
    {},
    None,
    "plain",
    ["plain"],
    {"policy": "automatic"},
    {"policy": None},
    {"policy": ["spec"]},
    {"polcy": "spec"},
    {"disable_batch_threshold": 0},
    {"disable_batch_threshold": -4},
    {"disable_batch_threshold": "8"},
    {"disable_batch_threshold": 8.5},
    {"disable_batch_threshold": True},
    {"disable_batch_threshold": 10**9},
    {"disable_batch_threshold": 4, "resume_batch_threshold": 4},
    {"policy": "plain", "disable_batch_threshold": 4},
    {"catch_up_tokens": 8},
    {"min_dwell_steps": 0},
]


@needs_rich_messages
@pytest.mark.parametrize("settings", GOOD, ids=str)
def test_what_is_asked_for_holds_from_the_answer_on(server: Server, settings: dict[str, Any]) -> None:
    response = server.ask(settings, rid=f"on-call-{len(str(settings))}")
    assert (response.status_code, response.json()) == (200, [True])
    state = server.state()
    assert state["policy"] == settings.get("policy", "threshold")
    assert settings.items() <= state["settings"].items()
    assert f"asked by request on-call-{len(str(settings))}" in server.log
    if state["policy"] in ("spec", "plain"):
        server.generate(heldout_prompts(1, seed=55)[0], max_new_tokens=12)
        held = server.state()
        assert held["mode"] == state["policy"]
        assert server.scrape()[f"{OURS}policy policy={state['policy']}"] == 1


@needs_rich_messages
@pytest.mark.parametrize("settings", BAD, ids=str)
def test_what_can_not_be_had_is_an_error_and_changes_nothing(server: Server, settings: Any) -> None:
    before = server.state()["settings"]
    response = server.ask(settings)
    assert response.status_code == 400
    message = response.json()["message"]
    assert "why:" in message
    assert "do:" in message
    assert server.state()["settings"] == before


@needs_rich_messages
def test_settings_beside_sglangs_own_change_neither(server: Server) -> None:
    before = server.client.get("/server_info").json()["internal_states"][0]
    both = {"adaptive_spec": {"policy": "plain"}, "pp_max_micro_batch_size": 7}
    assert server.client.post("/set_internal_state", json={"server_args": both}).status_code == 400
    after = server.client.get("/server_info").json()["internal_states"][0]
    assert after["adaptive_spec"]["settings"] == before["adaptive_spec"]["settings"]
    assert after["pp_max_micro_batch_size"] == before["pp_max_micro_batch_size"]


@needs_rich_messages
def test_control_needs_the_api_key_and_metrics_do_not(server: Server) -> None:
    before = server.state()["settings"]
    for headers in ({}, {"Authorization": "Bearer guessed"}, {"Authorization": KEY}):
        with httpx.Client(base_url=server.process.url, headers=headers, timeout=30) as stranger:
            body = {"server_args": {"adaptive_spec": {"policy": "plain"}}}
            assert stranger.post("/set_internal_state", json=body).status_code == 401
            assert stranger.get("/server_info").status_code == 401
            assert stranger.get("/metrics").status_code == 200
    assert server.state()["settings"] == before


@needs_rich_messages
def test_control_from_all_sides_under_load_loses_no_request(
    server: Server, load: list[Request], reference: list[list[int]]
) -> None:
    calls = [*GOOD, *BAD[:6], {"policy": "alternate", "alternate_period_steps": 1}]
    answered: list[int] = []
    over = False

    def steer(start: int) -> None:
        for settings in cycle(calls[start:] + calls[:start]):
            if over:
                return
            answered.append(server.ask(settings).status_code)

    with ThreadPoolExecutor(4) as pool:
        steering = [pool.submit(steer, 3 * k) for k in range(4)]
        tokens = run_load(server, load)
        over = True
        for one in steering:
            one.result()
    assert differences(load, reference, tokens) == []
    assert set(answered) == {200, 400}
    assert len(answered) > 40
    assert server.state()["switches"] > 0
    # Refused unless the server is idle, which is also when SGLang looks for lost slots.
    deadline = time.monotonic() + 10
    while server.client.post("/flush_cache").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
