"""From the endpoints of a server to one sample, or to one clear error."""

from __future__ import annotations

import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from sglang_adaptive_spec.top.errors import NoPlugin, NotAllowed, NotSGLang, ServerGone, TopError
from sglang_adaptive_spec.top.sampler import Histogram, Sampler, Switch, read_metrics
from tests.unit.top_samples import SWITCH, block

METRICS = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 7.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{tp_rank="0"} 2.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="a"} 1.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="a"} 3.0
sglang:time_to_first_token_seconds_count{model_name="a"} 3.0
sglang:time_to_first_token_seconds_sum{model_name="a"} 1.5
sglang:time_to_first_token_seconds_count{model_name="b"} 1.0
sglang:time_to_first_token_seconds_sum{model_name="b"} 0.5
"""
LOAD = {"timestamp": 1000.0, "num_running_reqs": 65, "num_waiting_reqs": 3}


def server(**answers: Any) -> Callable[[httpx.Request], httpx.Response]:
    """A server by the answers of its paths: JSON, or a ready response."""
    known = {
        "server_info": {"version": "0.5.14", "internal_states": [{"adaptive_spec": block()}]},
        "loads": {"loads": [LOAD]},
        **answers,
    }

    def answer(request: httpx.Request) -> httpx.Response:
        found = known.get(request.url.path.rpartition("/")[2], httpx.Response(404))
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    return answer


def sampler(answer: Callable[[httpx.Request], httpx.Response], key: str | None = None) -> Sampler:
    return Sampler("box:30000/", key, transport=httpx.MockTransport(answer))


def test_a_sample_says_what_the_endpoints_say() -> None:
    sample = sampler(server()).sample()
    assert sample.at_seconds == 1000.0
    assert sample.mode == "plain"
    assert (sample.all_steps, sample.all_tokens) == (400, 11400)
    assert (sample.running_requests, sample.waiting_requests) == (65, 3)
    assert sample.switches == (Switch(990.0, 100, "spec", "plain", SWITCH["reason"], 65, 0.0123),)
    assert sample.plain_graph_count == 3
    assert sample.time_to_first_token is None


def test_metrics_are_asked_for_only_where_they_are_on() -> None:
    info = {"version": "0.5.14", "internal_states": [{"adaptive_spec": block()}], "enable_metrics": True}
    sample = sampler(server(server_info=info, metrics=httpx.Response(200, text=METRICS))).sample()
    assert sample.time_to_first_token == Histogram(total_seconds=2.0, count=4.0)
    assert sample.inter_token_latency is None
    assert sample.running_requests == 65  # the gauge is as old as the last log line
    off = sampler(server(metrics=httpx.Response(200, text=METRICS))).sample()
    assert off.time_to_first_token is None


def test_where_the_load_is_not_told_the_metrics_say() -> None:
    info = {"version": "0.5.14", "internal_states": [{"adaptive_spec": block()}], "enable_metrics": True}
    broken = httpx.Response(500, text="Internal Server Error")
    sample = sampler(server(server_info=info, loads=broken, metrics=httpx.Response(200, text=METRICS))).sample()
    assert (sample.running_requests, sample.waiting_requests) == (7, 2)
    neither = sampler(server(loads=broken)).sample()
    assert neither.running_requests is None


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (500, 1), (503, 3), (200, 3)])
def test_a_server_that_does_not_tell_its_load_is_asked_once(status: int, asked: int) -> None:
    """SGLang 0.5.14 writes a traceback into its log each time."""
    requests: list[str] = []
    answer = server(loads=httpx.Response(status, json={"loads": [LOAD]}))

    def count(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        return answer(request)

    one = sampler(count)
    for _ in range(3):
        one.sample()
    assert requests.count("/v1/loads") == asked


def test_metrics_of_several_label_sets_add_up() -> None:
    assert read_metrics(METRICS)["sglang:time_to_first_token_seconds_count"] == 4.0
    assert read_metrics("") == {}


def test_the_key_is_sent_as_sglang_reads_it() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return server()(request)

    sampler(answer, "secret").sample()
    assert set(seen) == {"Bearer secret"}


def raises(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "kind", "code", "words"),
    [
        (raises(httpx.ConnectError("refused")), ServerGone, os.EX_UNAVAILABLE, "No answer from http://box:30000"),
        (raises(httpx.ReadTimeout("slow")), ServerGone, os.EX_UNAVAILABLE, "does not answer within"),
        (server(server_info=httpx.Response(503)), ServerGone, os.EX_UNAVAILABLE, "503"),
        (server(server_info=httpx.Response(401)), NotAllowed, os.EX_NOPERM, "--api-key"),
        (server(server_info=httpx.Response(403)), NotAllowed, os.EX_NOPERM, "--api-key"),
        (server(server_info=httpx.Response(404)), NotSGLang, os.EX_PROTOCOL, "404"),
        (server(server_info=httpx.Response(200, text="<html>")), NotSGLang, os.EX_PROTOCOL, "JSON"),
        (server(server_info={"version": "1"}), NotSGLang, os.EX_PROTOCOL, "no internal state"),
        (server(server_info=[1]), NotSGLang, os.EX_PROTOCOL, "no internal state"),
        (server(server_info={"internal_states": [{}]}), NoPlugin, os.EX_CONFIG, "SGLANG_ADAPTIVE_SPEC=1"),
        (
            server(server_info={"internal_states": [{"adaptive_spec": {"mode": "spec"}}]}),
            NoPlugin,
            os.EX_CONFIG,
            "another version",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_shown_is_said_in_one_message(
    answer: Callable[[httpx.Request], httpx.Response], kind: type[TopError], code: int, words: str
) -> None:
    with pytest.raises(TopError) as caught:
        sampler(answer).sample()
    assert type(caught.value) is kind
    assert caught.value.exit_code == code
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://box:1", "http://box:port"])
def test_what_is_no_url_is_said_so(url: str) -> None:
    with pytest.raises(NotSGLang, match="is no URL"):
        Sampler(url).sample()


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    requests = []

    class Server(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            requests.append(self.client_address)
            response = server()(httpx.Request("GET", f"http://box{self.path}"))
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        asked = Sampler(f"127.0.0.1:{listening.server_port}")
        asked.sample()
        asked.close()
        listening.shutdown()
    assert len(requests) == len(set(requests)) == 2
