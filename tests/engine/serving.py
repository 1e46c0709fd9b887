"""A real SGLang server over HTTP for a test: its own process, scheduler, worker and sockets."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.server import Server as ServerProcess
from bench.server import settings_body

START_SECONDS = 240
# Whether SGLang's messages carry more than plain numbers: a request's plain steps, why a change was refused.
RICH_MESSAGES = version("sglang") == "0.5.14"
MODELS = Path(__file__).parents[1] / "models"
TARGET, DRAFT = MODELS / "target", MODELS / "draft"

# Speculation as in the benchmarks; the tests vary topk.
SPECULATION = (
    "--speculative-algorithm=EAGLE3",
    f"--speculative-draft-model-path={DRAFT}",
    "--speculative-num-steps=3",
)
CHAIN = ("--speculative-eagle-topk=1", "--speculative-num-draft-tokens=4")
TREE = ("--speculative-eagle-topk=4", "--speculative-num-draft-tokens=8")

# Every allocation is accounted for after every step, and once more when the server falls idle; each relayed
# token is consumed exactly once.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
# Halves the time of a start, and changes nothing of what runs.
FORK = {"SGLANG_CPU_ENGINE_FORK": "1"}
COMMON = (
    "--dtype=float32",
    "--skip-server-warmup",
    # An idle server would keep a core busy with looking for work.
    "--sleep-on-idle",
    "--max-running-requests=32",
    "--chunked-prefill-size=128",
)
# What SGLang puts on each metric of its scheduler.
COMMON_LABELS = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}


@dataclass
class Server:
    """A running server: what a client can ask of it, and its log."""

    process: ServerProcess
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        # A connection each: the server closes idle ones after a while, perhaps just as a request is sent on one.
        each_its_own = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(base_url=self.process.url, timeout=120, limits=each_its_own)

    def generate(self, text: str, **sampling: Any) -> dict[str, Any]:
        """One greedy completion through /generate; other request fields go in ``extra``."""
        extra = sampling.pop("extra", {})
        body = {"text": text, "sampling_params": {"temperature": 0, **sampling}, **extra}
        answer = self.client.post("/generate", json=body)
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    def state(self) -> dict[str, Any]:
        """The plugin's block in /server_info."""
        states = self.client.get("/server_info").raise_for_status().json()["internal_states"]
        block: dict[str, Any] = states[0]["adaptive_spec"]
        return block

    def ask(self, settings: Any, **fields: Any) -> httpx.Response:
        """Ask for other settings, whatever the answer; further fields of the request go in ``fields``."""
        return self.client.post("/set_internal_state", json={"server_args": {"adaptive_spec": settings}, **fields})

    def use(self, **settings: Any) -> bool:
        """Put other settings in charge; whether the server took them."""
        answer = self.client.post("/set_internal_state", json=settings_body(settings))
        return answer.status_code == httpx.codes.OK and all(answer.json())

    def scrape(self) -> dict[str, float]:
        """SGLang's and the plugin's metrics: values by name and labels, without the labels that all have."""
        text = self.client.get("/metrics").raise_for_status().text
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sorted((name, value) for name, value in sample.labels.items() if name not in COMMON_LABELS)
                values[sample.name + "".join(f" {name}={value}" for name, value in labels)] = sample.value
        return values

    def flush(self) -> None:
        """Empty the radix cache, once running requests have left: SGLang refuses before."""
        deadline = time.monotonic() + 30
        while self.client.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, f"the server does not fall idle\n{self.process.log_tail()}"
            time.sleep(0.1)

    def used_tokens(self) -> int:
        """KV slots in use after the radix cache is emptied; waits for running requests to leave."""
        self.flush()
        loads = self.client.get("/v1/loads").raise_for_status().json()["loads"]
        return sum(int(load["num_used_tokens"]) for load in loads)

    @property
    def log(self) -> str:
        """All that the server has written so far."""
        return self.process.log.read_text(errors="replace")

    def check_alive(self) -> None:
        """Fail with the end of the log if a process of the server is gone."""
        assert self.client.get("/health").status_code == httpx.codes.OK, self.process.log_tail()


def environment(extra: Mapping[str, str], *, plugin: bool) -> dict[str, str]:
    """This process's environment without traces of the plugin, unless it is wanted."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_ADAPTIVE_SPEC")}
    return clean | {"OMP_NUM_THREADS": "1"} | ({"SGLANG_ADAPTIVE_SPEC": "1"} if plugin else {}) | dict(extra)


@contextmanager
def serve(
    log: Path,
    arguments: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    common: Sequence[str] = COMMON,
) -> Iterator[Server]:
    """Start a server, wait until it answers, and stop it with all its children.

    Args:
        log: Where standard output and standard error go.
        arguments: Arguments of launch_server, after the ones common to all tests.
        settings: The plugin's settings; None leaves it inactive.
        env: Further environment variables.
        common: Arguments in place of those common to all tests.
    """
    config = {"SGLANG_ADAPTIVE_SPEC_CONFIG": json.dumps(dict(settings))} if settings else {}
    process = ServerProcess(
        name="test",
        arguments=["--model-path", str(TARGET), *common, *arguments],
        environment=environment({**STRICT, **FORK, **config, **(env or {})}, plugin=settings is not None),
        log=log,
    )
    # The tests look at what the server did, not at how it ends.
    process.grace_seconds = 0.2
    with process:
        process.wait_until_healthy(START_SECONDS)
        server = Server(process)
        with server.client:
            yield server
            server.check_alive()
