"""One server, measured at every concurrency: the child process of :mod:`bench.sweep`.

``python -m bench.measure TASK.json`` starts an ``sgl.Engine`` and does what its input says, line by line: with ``8 0``
measure 8 requests in the first pass (``8 1`` in the second), or with ``numbers`` see whether the weights give any. It
appends one JSON line a measurement to the task's results as soon as it has it, by which the parent knows that it is
done. At the end of its input it ends.

The decode figure of one repeat is ``concurrency * (output - 1) / (t_full - t_one)``: the time of a run of
``output`` tokens less the time of a run of one token of the same prompts, which is prefill and the way
through the tokenizer process and back.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import modes as bench_modes
from bench.decode_log import LogReader, graph_use
from bench.modes import BenchMode, Served
from bench.results import append_row
from bench.sharing import memory_gb

EXIT_NOT_PROVEN = 4

_MOST_REPEATS_FACTOR = 4


@dataclass(frozen=True)
class Task:
    """What the parent asks of one server.

    Attributes:
        labels: Copied into every row: backend, mode, round.
        engine_arguments: For ``sgl.Engine``.
        vocab_size: Prompts are drawn from it.
        repeats: Timed pairs of runs a concurrency and pass, at least.
        least_seconds: More of them until they took so long: short runs say less each. At most four times as many.
        accept_length: Simulated tokens a verify step; None where the weights decide.
        latency: Whether the first pass adds a streamed run a concurrency for inter-token latencies.
        graphs_required: Whether every decode step has to replay a CUDA graph.
        shares_gpu: Whether other servers use the GPU, too.
        log: File that this process's output goes to, the server's included.
        results: File to append rows to.
    """

    labels: dict[str, Any]
    engine_arguments: dict[str, Any]
    input_tokens: int
    output_tokens: int
    vocab_size: int
    repeats: int
    least_seconds: float
    accept_length: float | None
    latency: bool
    graphs_required: bool
    shares_gpu: bool
    log: str
    results: str

    @property
    def mode(self) -> BenchMode:
        return bench_modes.MODES[self.labels["mode"]]


class ProofError(Exception):
    """A run did not do what it was to be measured for."""


class Bench:
    """A started server under measurement."""

    def __init__(self, task: Task, engine: Any) -> None:
        self._task = task
        self._engine = engine
        self._log = LogReader(Path(task.log))

    def served(self) -> Served:
        """The server's state now, once it is idle."""
        return Served(self._engine.get_server_info()["internal_states"][0])

    def concurrency(self, concurrency: int, pass_number: int) -> dict[str, Any]:
        """Measure one concurrency in one pass; the first one begins with an untimed run.

        Raises:
            ProofError: a run was not what it was to be; nothing of it is reported.
        """
        task, first_pass = self._task, pass_number == 0
        warm_up_s = None
        if first_pass:
            warm_up_s, _ = self._generate(self._prompts(concurrency, repeat=-1), task.output_tokens)
        self._log.added()
        gc.collect()
        repeats: list[dict[str, Any]] = []
        # Numbered by the most that a pass can have: the prompts of a pass are those of every mode.
        first = pass_number * _MOST_REPEATS_FACTOR * task.repeats
        while not enough(task, repeats):
            repeats.append(self._repeat(concurrency, first + len(repeats)))
        use = graph_use(self._log.added(), concurrency)
        if task.graphs_required and not use.proven:
            raise ProofError(f"CUDA graphs at {concurrency} requests: {use}")
        row = {
            "tokens_per_s": round(median(r["tokens_per_s"] for r in repeats), 2),
            "step_ms": round(median(r["step_ms"] for r in repeats), 4),
            "one_token_s": round(median(r["one_token_s"] for r in repeats), 5),
            "repeats": repeats,
            "warm_up_s": warm_up_s and round(warm_up_s, 3),
            "decode_log_lines": asdict(use),
        }
        if task.latency and first_pass:
            row["streamed"] = self._streamed(self._prompts(concurrency, repeat=-2))
        return row

    def finite_logprobs(self) -> bool:
        """Whether the (random) weights give numbers: SGLang would serve NaN without a word."""
        prompt = self._prompts(1, repeat=-3)
        outputs = self._engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            return_logprob=True,
        )
        values = [entry[0] for entry in outputs[0]["meta_info"]["output_token_logprobs"]]
        return bool(values) and all(v is not None and abs(v) < float("inf") for v in values)

    def _repeat(self, concurrency: int, repeat: int) -> dict[str, Any]:
        task = self._task
        prompts = self._prompts(concurrency, repeat)
        one_token_s, one_token_outputs = self._generate(prompts, 1)
        before = self.served()
        full_s, outputs = self._generate(prompts, task.output_tokens)
        after = self.served()
        found = bench_modes.complaints_about_outputs(one_token_outputs, 1)
        found += bench_modes.complaints_about_outputs(outputs, task.output_tokens)
        found += bench_modes.complaints_about_mode(task.mode, before, after, outputs, task.output_tokens)
        decode_s = full_s - one_token_s
        if decode_s <= 0:
            found.append(f"{task.output_tokens} tokens took {full_s:.4f} s, no longer than one: {one_token_s:.4f} s")
        if found:
            raise ProofError("; ".join(found))
        verify_steps = bench_modes.verify_steps(outputs)
        plugin_steps = {m: after.steps(m) - before.steps(m) for m in ("plain", "spec") if after.plugin}
        mostly_plain = not verify_steps or plugin_steps.get("plain", 0) > plugin_steps.get("spec", 0)
        # The plugin's counts include steps in flight when the last token was sent: SGLang's own way to count is
        # the same in every mode.
        steps = task.output_tokens - 1 if mostly_plain else verify_steps
        return {
            "one_token_s": round(one_token_s, 6),
            "full_s": round(full_s, 6),
            "decode_s": round(decode_s, 6),
            "tokens_per_s": round(concurrency * (task.output_tokens - 1) / decode_s, 3),
            "expected_tokens_per_s": round(expected_tokens(task, outputs) / decode_s, 3),
            # Decode steps: simulated acceptance is drawn at random, so two runs need not take equally many.
            "steps": steps,
            "step_ms": round(1000 * decode_s / steps, 5),
            "verify_steps": verify_steps,
            "plugin_steps": plugin_steps,
            "plugin_times": plugin_times(before, after),
        }

    def _generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[dict[str, Any]]]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        start = time.perf_counter()
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start, outputs

    def _streamed(self, prompts: list[list[int]]) -> dict[str, float]:
        """Latencies that a streaming client sees, in ms, by the definitions of SGLang's bench_serving.

        A chunk of several tokens counts as that many intervals of equal length.
        """
        sampling = {"temperature": 0, "max_new_tokens": self._task.output_tokens, "ignore_eos": True}
        start = time.perf_counter()
        last_time: dict[str, float] = {}
        last_tokens: dict[str, int] = {}
        first_ms: list[float] = []
        intervals_ms: list[float] = []
        for chunk in self._engine.generate(input_ids=prompts, sampling_params=sampling, stream=True):
            now = time.perf_counter()
            request, tokens = chunk["meta_info"]["id"], chunk["meta_info"]["completion_tokens"]
            if request not in last_time:
                first_ms.append(1000 * (now - start))
            elif tokens > last_tokens[request]:
                new = tokens - last_tokens[request]
                intervals_ms += [1000 * (now - last_time[request]) / new] * new
            last_time[request], last_tokens[request] = now, tokens
        return {
            "ttft_p50_ms": round(percentile(first_ms, 50), 3),
            "ttft_p99_ms": round(percentile(first_ms, 99), 3),
            "itl_p50_ms": round(percentile(intervals_ms, 50), 3),
            "itl_p99_ms": round(percentile(intervals_ms, 99), 3),
        }

    def _prompts(self, concurrency: int, repeat: int) -> list[list[int]]:
        # Seeded by what they are for: every mode gets the same prompts, and no two runs of a mode do.
        draw = random.Random(f"{concurrency}/{repeat}")
        size = self._task.input_tokens
        return [[draw.randrange(2, self._task.vocab_size) for _ in range(size)] for _ in range(concurrency)]


def enough(task: Task, repeats: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a concurrency was measured often and long enough in one pass."""
    took_seconds = sum(repeat["one_token_s"] + repeat["full_s"] for repeat in repeats)
    least = task.repeats if took_seconds >= task.least_seconds else _MOST_REPEATS_FACTOR * task.repeats
    return len(repeats) >= least


def expected_tokens(task: Task, outputs: list[dict[str, Any]]) -> float:
    """Decoded tokens of a run, had each verify step given just the simulated accept length.

    That is drawn anew at every step, one number for the whole batch: over 50 steps the mean is off by some 3 %, which
    says nothing about the server. What its steps are expected to give is the same quantity without that noise.
    """
    actual = float(len(outputs) * (task.output_tokens - 1))
    if task.accept_length is None or not task.mode.speculates or task.mode.arguments.get("speculative_adaptive"):
        return actual
    metas = [output["meta_info"] for output in outputs]
    return sum(
        meta.get("adaptive_spec_plain_steps", 0) + task.accept_length * (meta.get("spec_verify_ct") or 0)
        for meta in metas
    )


def plugin_times(before: Served, after: Served) -> dict[str, Any] | None:
    """What the plugin's own clock says of the steps between two states, in ms; None without the plugin.

    A switch has the time of its first step, from the last result in the mode before it.
    """
    if after.plugin is None or before.plugin is None:
        return None
    start = sum(before.plugin["steps"].values())
    switches = [s for s in after.plugin["last_switches"] if s["step"] >= start and s["first_step_seconds"] is not None]
    return {
        "step_ms": {mode: s and round(1000 * s, 4) for mode, s in after.plugin["step_seconds"].items()},
        "switch_ms": {
            mode: [round(1000 * s["first_step_seconds"], 4) for s in switches if s["to"] == mode]
            for mode in ("plain", "spec")
        },
    }


def percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile of at least one value."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


def server_row(served: Served, startup_s: float, *, shares_gpu: bool) -> dict[str, Any]:
    """What a started server says about its set-up.

    Args:
        shares_gpu: Whether others use the GPU, too.
    """
    state = served.state
    kept = (
        "attention_backend",
        "decode_attention_backend",
        "prefill_attention_backend",
        "disable_cuda_graph",
        "disable_overlap_schedule",
        "dtype",
        "page_size",
        "chunked_prefill_size",
        "max_running_requests",
        "effective_max_running_requests_per_dp",
        "random_seed",
        "sampling_backend",
        "speculative_adaptive",
        "speculative_algorithm",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
    )
    return {
        "startup_s": round(startup_s, 1),
        "arguments": {name: state.get(name) for name in kept},
        "cuda_graph_sizes": cuda_graph_sizes(state),
        "memory_gb": memory_gb(served, shares_gpu=shares_gpu),
        "gpu_memory_used_mib": None if shares_gpu else gpu_memory_used_mib(),
        "plugin": served.plugin,
    }


def cuda_graph_sizes(state: Mapping[str, Any]) -> list[int] | None:
    """The decode batch sizes that graphs were captured for; None where there are no graphs."""
    if state.get("disable_cuda_graph"):
        return None  # the sizes are kept there all the same
    phase = getattr(state.get("cuda_graph_config"), "decode", None)
    sizes = getattr(phase, "bs", None)
    return list(sizes) if sizes else None


def gpu_memory_used_mib() -> int | None:
    """Memory in use on the first GPU that this process may use, or None without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return int(output.splitlines()[0])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def obey(commands: Iterable[str], bench: Bench, write: Callable[[str, dict[str, Any]], None]) -> int:
    """Measure what each line of input asks for; returns the exit code."""
    proven = True
    for command in map(str.strip, commands):
        if command == "numbers":
            finite = bench.finite_logprobs()
            write("numbers", {"finite_logprobs": finite})
            if not finite:
                proven = False
                write("error", {"error": "the weights give no finite logprobs: what was measured is no decoding"})
            continue
        concurrency, pass_number = map(int, command.split())
        turn = {"concurrency": concurrency, "pass": pass_number}
        try:
            write("measurement", turn | bench.concurrency(concurrency, pass_number))
        except ProofError as error:
            proven = False
            write("error", turn | {"error": f"not measured: {error}"})
    return 0 if proven else EXIT_NOT_PROVEN


def run(task: Task, commands: Iterable[str]) -> int:
    """Start the server and measure it; returns the exit code."""
    results = Path(task.results)

    def write(kind: str, values: dict[str, Any]) -> None:
        append_row(results, {"kind": kind, **task.labels, **values})

    import sglang as sgl

    start = time.perf_counter()
    engine = sgl.Engine(**task.engine_arguments)
    try:
        # What a start leaves is not looked through again before each turn: that takes longer than a short one.
        gc.collect()
        gc.freeze()
        bench = Bench(task, engine)
        startup_s = time.perf_counter() - start
        write("server", server_row(bench.served(), startup_s, shares_gpu=task.shares_gpu))
        return obey(commands, bench, write)
    finally:
        engine.shutdown()


def main() -> int:
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    code = run(task, sys.stdin)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    exit_code = main()
    # Past interpreter shutdown, where SGLang's threads have been seen to hang; everything is written.
    os._exit(exit_code)
