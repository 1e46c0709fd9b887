"""One server asked over HTTP: its public endpoints in, one :class:`Sample` out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sglang_adaptive_spec.top.errors import NoPlugin, NotAllowed, NotSGLang, ServerGone

_TIMEOUT_SECONDS = 5.0  # a long prefill keeps the scheduler from answering for seconds
_KEY = "adaptive_spec"
MODES = ("spec", "plain")


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of mode, as the server recorded it.

    Attributes:
        at_seconds: Unix time on the server.
        step: The first decode step in the new mode.
        running_requests: Requests in that step's batch.
        first_step_seconds: What that step took, with all that the switch entailed; None where it is not known.
    """

    at_seconds: float
    step: int
    before: str
    after: str
    reason: str
    running_requests: int
    first_step_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Histogram:
    """What a Prometheus histogram of seconds adds up to."""

    total_seconds: float
    count: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server said at one moment; counters count from its start.

    Attributes:
        at_seconds: Unix time on the server.
        sglang_version: As the server reports it.
        settings: The plugin's settings, the derived ones filled in.
        mode: Of the last decode step.
        dry_run: Whether every step speculates, whatever is decided.
        decided_mode: What was decided for the last step; another than ``mode`` at most in a dry run.
        dry_run_steps: Decode steps of dry runs by the mode that was decided for them.
        steps: Decode steps by mode.
        tokens: Tokens that decode steps gave to clients, by mode.
        accepted_tokens: Tokens of speculative steps, the bonus tokens included.
        verified_requests: Requests in speculative steps, one a step.
        switch_count: Changes of mode.
        switches: The last of them, oldest first.
        faults: Faults of the plugin.
        disabled_by_faults: Whether repeated faults ended switching.
        catch_ups: Times that the draft caught up with plain steps.
        catch_up_tokens: Tokens that it has seen that way.
        plain_memory_gib: Memory of the plain graphs and what waits for the draft.
        plain_graph_count: Batch sizes captured for plain steps.
        running_requests: Requests in the running batch; None where the server does not say.
        waiting_requests: Requests in the queue; None where the server does not say.
        time_to_first_token: None on a server without ``--enable-metrics``, and before its first request.
        inter_token_latency: Likewise.
    """

    at_seconds: float
    sglang_version: str
    settings: Mapping[str, Any]
    mode: str
    dry_run: bool
    decided_mode: str
    dry_run_steps: Mapping[str, int]
    steps: Mapping[str, int]
    tokens: Mapping[str, int]
    accepted_tokens: int
    verified_requests: int
    switch_count: int
    switches: tuple[Switch, ...]
    faults: int
    disabled_by_faults: bool
    catch_ups: int
    catch_up_tokens: int
    plain_memory_gib: float
    plain_graph_count: int
    running_requests: int | None = None
    waiting_requests: int | None = None
    time_to_first_token: Histogram | None = None
    inter_token_latency: Histogram | None = None

    @property
    def all_steps(self) -> int:
        return sum(self.steps.values())

    @property
    def plain_steps(self) -> int:
        """Steps that ran plain, or would have but for a dry run."""
        return self.steps["plain"] + self.dry_run_steps["plain"]

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens.values())


class Sampler:
    """Asks one server."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        """Prepare to ask; nothing is sent yet.

        Args:
            url: The server's base URL, with or without the scheme.
            api_key: What the server was given as ``--api-key``.
            transport: Another way to the server than the network, for tests.

        Raises:
            NotSGLang: this is no URL.
        """
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._tells_load = True
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=_TIMEOUT_SECONDS,
                transport=transport,
                # A connection a request: the server closes one that failed or idled, perhaps just as it is used again.
                limits=httpx.Limits(max_keepalive_connections=0),
                follow_redirects=True,  # /metrics is mounted at /metrics/
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise NotSGLang(f"{url!r} is no URL of a server: {error}") from error

    def close(self) -> None:
        self._client.close()

    def sample(self) -> Sample:
        """Ask once.

        Raises:
            ServerGone: nobody answers, or too late.
            NotAllowed: the server refuses the key.
            NotSGLang: what answers is something else.
            NoPlugin: the server decodes without the plugin.
        """
        info = self._get("/server_info")
        states = info.get("internal_states") if isinstance(info, dict) else None
        if not isinstance(states, list) or not states or not isinstance(states[0], dict):
            raise NotSGLang(f"{self.url} is no SGLang server: its /server_info has no internal state.")
        block = states[0].get(_KEY)
        if block is None:
            raise NoPlugin(
                f"The SGLang server at {self.url} runs without this plugin. Start it with SGLANG_ADAPTIVE_SPEC=1 and "
                "a speculative algorithm."
            )
        try:
            return read_sample(
                block,
                load=self._load(),
                exposition=self._exposition() if info.get("enable_metrics") else "",
                sglang_version=str(info.get("version", "unknown")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise NoPlugin(
                f"The plugin of the server at {self.url} is of another version: {error!r} in its state. "
                "Run the view of the version that serves."
            ) from error

    def _load(self) -> Mapping[str, Any]:
        if not self._tells_load:
            return {}
        response = self._ask("/v1/loads?include=core")
        # Not every release has it. On SGLang 0.5.14 with --enable-metrics and a newer FastAPI it is broken, and each
        # request leaves a traceback in the server's log: it is not asked again.
        self._tells_load = response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.INTERNAL_SERVER_ERROR)
        if not response.is_success:
            return {}
        loads = response.json()["loads"]
        return dict(loads[0]) if loads else {}

    def _exposition(self) -> str:
        response = self._ask("/metrics")
        return response.text if response.is_success else ""

    def _get(self, path: str) -> Any:
        response = self._ask(path)
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise NotAllowed(f"{self.url} refuses the request ({response.status_code}): give its key with --api-key.")
        if response.is_server_error:
            raise ServerGone(f"{self.url}{path} fails: {response.status_code} {response.reason_phrase}.")
        try:
            return response.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError) as error:
            what = str(response.status_code) if not response.is_success else "it answers something else than JSON"
            raise NotSGLang(f"{self.url} is no SGLang server: {path}: {what}.") from error

    def _ask(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path)
        except httpx.TimeoutException as error:
            raise ServerGone(f"{self.url} does not answer within {_TIMEOUT_SECONDS:.0f} s.") from error
        except httpx.UnsupportedProtocol as error:
            raise NotSGLang(f"{self.url!r} is no URL of a server: {error}") from error
        except httpx.HTTPError as error:
            raise ServerGone(f"No answer from {self.url}: {error}.") from error


def read_sample(block: Mapping[str, Any], load: Mapping[str, Any], exposition: str, sglang_version: str) -> Sample:
    """A sample out of what the endpoints say.

    Args:
        block: ``adaptive_spec`` of /server_info.
        load: The first entry of /v1/loads; may be empty.
        exposition: /metrics as Prometheus text; may be empty.
        sglang_version: ``version`` of /server_info.

    Raises:
        KeyError, TypeError, ValueError: one of them is of another shape.
    """
    metrics = read_metrics(exposition)
    return Sample(
        # The server's clock where it tells, since its switches are told by it.
        at_seconds=float(load.get("timestamp") or time.time()),
        sglang_version=sglang_version,
        settings=dict(block["settings"]),
        mode=str(block["mode"]),
        dry_run=bool(block["dry_run"]),
        decided_mode=str(block["decided_mode"]),
        dry_run_steps={mode: int(block["dry_run_steps"][mode]) for mode in MODES},
        steps={mode: int(block["steps"][mode]) for mode in MODES},
        tokens={mode: int(block["tokens"][mode]) for mode in MODES},
        accepted_tokens=int(block["accepted_tokens"]),
        verified_requests=int(block["verified_requests"]),
        switch_count=int(block["switches"]),
        switches=tuple(
            Switch(
                at_seconds=s["at_seconds"],
                step=s["step"],
                before=s["from"],
                after=s["to"],
                reason=s["reason"],
                running_requests=s["running_requests"],
                first_step_seconds=s["first_step_seconds"],
            )
            for s in block["last_switches"]
        ),
        faults=int(block["faults"]),
        disabled_by_faults=bool(block["spec_only"]),
        catch_ups=int(block["catch_ups"]),
        catch_up_tokens=int(block["catch_up_tokens"]),
        plain_memory_gib=float(block["plain_memory_gib"]),
        plain_graph_count=len(block["plain_graph_sizes"]),
        running_requests=_count(load.get("num_running_reqs", metrics.get("sglang:num_running_reqs"))),
        waiting_requests=_count(load.get("num_waiting_reqs", metrics.get("sglang:num_queue_reqs"))),
        time_to_first_token=_histogram(metrics, "sglang:time_to_first_token_seconds"),
        inter_token_latency=_histogram(metrics, "sglang:inter_token_latency_seconds"),
    )


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _histogram(metrics: Mapping[str, float], name: str) -> Histogram | None:
    if f"{name}_count" not in metrics:
        return None
    return Histogram(metrics[f"{name}_sum"], metrics[f"{name}_count"])


def read_metrics(exposition: str) -> dict[str, float]:
    """Samples of Prometheus text by name, each summed over its label sets."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)
