"""What the profile says of a trace, and what it is loaded with."""

from __future__ import annotations

import gzip
import json
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from bench import profile
from bench.ramp.trace import parse_phases
from bench.results import Results
from bench.serving import NotProvenError
from bench.timeline import summarize

SCHEDULER, OTHER = 7, 8


def event(cat: str, name: str, ts: float, dur: float, tid: int = SCHEDULER, correlation: int | None = None) -> Any:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def written(tmp_path: Path, events: list[Any]) -> Path:
    path = tmp_path / "1-TP-0.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}, file)
    return path


def decode_steps_with_one_prefill() -> list[Any]:
    """Three graphs, launched at 0, 10 and 60 ms, and 150 kernels between the last two; microseconds."""
    graphs = [event("cuda_runtime", "cudaGraphLaunch", at, 500, correlation=n) for n, at in enumerate((0, 1e4, 6e4))]
    in_graphs = [event("kernel", "gemm", at + 600, 9000, tid=0, correlation=n) for n, at in enumerate((0, 1e4, 6e4))]
    # Two kernels of the same graph at once count once.
    in_graphs.append(event("kernel", "gemm", 600, 9000, tid=1, correlation=0))
    singles = [event("cuda_runtime", "cudaLaunchKernel", 2e4 + 200 * n, 5, correlation=100 + n) for n in range(150)]
    alone = [event("kernel", "fill", 2.5e4 + 200 * n, 20, tid=0, correlation=100 + n) for n in range(150)]
    operations = [event("cpu_op", "aten::linear", 2e4, 30_000), event("cpu_op", "aten::mm", 2.1e4, 1000)]
    wait = event("cuda_runtime", "cudaEventSynchronize", 6.1e4, 9000)
    elsewhere = event("cuda_runtime", "cudaStreamSynchronize", 6.1e4, 9000, tid=OTHER)
    return [*graphs, *in_graphs, *singles, *alone, *operations, wait, elsewhere]


def test_host_and_gpu_time_are_told_apart(tmp_path: Path) -> None:
    told = summarize(written(tmp_path, decode_steps_with_one_prefill()))
    assert told["wall_ms"] == 70.0
    assert told["gpu_in_graphs_ms"] == 27.0
    assert told["gpu_single_ms"] == 3.0
    assert told["gpu_busy_ms"] == 30.0
    assert (told["graph_launches"], told["single_launches"]) == (3, 150)
    assert told["host_wait_ms"] == 9.0
    assert told["operations_ms"] == {"aten::linear": 30.0}
    assert told["kernels_outside_graphs_ms"] == {"fill": 3.0}


def test_a_step_with_a_prefill_behind_is_told_from_one_without(tmp_path: Path) -> None:
    told = summarize(written(tmp_path, decode_steps_with_one_prefill()))
    assert told["graph_to_graph_ms"] == {"short": [10.0], "long": [50.0]}


def test_a_trace_of_a_cpu_has_no_gpu_time(tmp_path: Path) -> None:
    told = summarize(written(tmp_path, [event("cpu_op", "aten::linear", 0, 1000)]))
    assert told["wall_ms"] == 1.0
    assert told["gpu_busy_ms"] == told["graph_launches"] == 0
    assert told["graph_to_graph_ms"] == {"short": [], "long": []}


def test_an_empty_trace_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no operation"):
        summarize(written(tmp_path, []))


def test_the_load_goes_on_for_as_long_as_the_profiler_needs() -> None:
    args = profile.parse(["--device", "cpu"])
    assert sum(phase.seconds for phase in parse_phases(args.phases)) > args.after_seconds + 5


def test_the_table_of_a_committed_profile_is_what_the_file_says() -> None:
    path = Path(profile.__file__).parent / "results" / "h200-triton-profile.jsonl"
    assert profile.markdown(Results.read(path)) == path.with_suffix(".md").read_text()


def test_prefills_have_no_graphs_which_would_look_like_many_decode_steps() -> None:
    assert profile.parse([]).prefill_graph_sizes == []
    assert profile.parse(["--prefill-graph-sizes", "128,256"]).prefill_graph_sizes == [128, 256]


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(400)

    def log_message(self, *_: object) -> None:
        pass


def test_a_trace_of_before_is_no_trace_and_a_refusal_is_told(tmp_path: Path) -> None:
    (tmp_path / "0-TP-0.trace.json.gz").write_text("of before")
    http = HTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=http.serve_forever, daemon=True).start()
    server = SimpleNamespace(url=f"http://127.0.0.1:{http.server_port}")
    args = profile.parse(["--device", "cpu", "--after-seconds", "0"])
    with profile.Profiler(server, args, tmp_path) as profiler:  # type: ignore[arg-type]
        time.sleep(0.5)
        with pytest.raises(NotProvenError, match="400"):
            profiler.trace()
    http.shutdown()


def test_phases_that_are_none_are_refused() -> None:
    with pytest.raises(SystemExit):
        profile.parse(["--phases", "often"])
