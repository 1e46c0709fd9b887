"""Plain steps emit the tokens of the server without speculation: ``python -m bench.tokens_gpu``.

The tiny trained pair decodes one fixed batch. The policy ``plain`` runs the same kernels on the same batch as
the server without speculation, so in bf16 every token has to be equal: exit code 1 where one is not. With a flip
every three steps, or where the policy ``auto`` decides, a verify step computes the same numbers by other kernels, so
in bf16 equality is likely but not owed, and reported only (SGLang's kernels for GPUs take no float32; on a CPU it is
owed). Steps, faults and the switches of several tensor-parallel ranks, which have to be the same, are owed in every
case.

``--variants`` does all of it again with other CUDA graphs, each against a server without speculation that has the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from bench import host
from bench.child import ROOT, log_tail, run_module
from bench.measure import cuda_graph_sizes
from bench.modes import SPECULATION, Served, plugin_environment
from bench.results import append_row, now, without_paths
from bench.serving import comma

_MODELS = ROOT / "tests" / "models"


@dataclass(frozen=True)
class Case:
    """One server to compare with the server without speculation of the same number type.

    Attributes:
        owed: Whether a difference of tokens is a failure even in bf16.
    """

    name: str
    dtype: str
    plugin: dict[str, Any]
    owed: bool


CASES = (
    Case("plain", "bfloat16", {"policy": "plain"}, owed=True),
    Case("alternate", "bfloat16", {"policy": "alternate", "alternate_period_steps": 3}, owed=False),
    Case("auto", "bfloat16", {"policy": "auto"}, owed=False),
)


OTHER_GRAPHS = ("padded", "beyond-graphs", "eager")
VARIANTS = ("graphs", *OTHER_GRAPHS, "prefill-graphs", "no-overlap", "paged")


def variant_arguments(variant: str, requests: int) -> dict[str, Any]:
    """What differs in a variant's servers.

    Args:
        requests: The batch at first; it shrinks as requests end.
    """
    different: dict[str, dict[str, Any]] = {
        # Nearly every batch in a graph for more.
        "padded": {"cuda_graph_bs_decode": [3, requests]},
        # More requests than any graph of either mode holds, then fewer.
        "beyond-graphs": {"cuda_graph_max_bs_decode": max(1, requests // 4)},
        "eager": {"disable_cuda_graph": True},
        # The only ones that SGLang captures for a target with an EAGLE draft, too.
        "prefill-graphs": {"cuda_graph_backend_prefill": "breakable"},
        "no-overlap": {"disable_overlap_schedule": True},
        "paged": {"page_size": 16},
    }
    return different.get(variant, {})


@dataclass(frozen=True)
class Answer:
    """What a server generated.

    Attributes:
        tokens: Output ids, one list a request.
        plugin: The plugin's state afterwards; None where it is not active.
        graph_sizes: Decode batch sizes that CUDA graphs were captured for; None where there are none.
        switches_by_rank: What each tensor-parallel rank's log says of its switches; empty with one rank.
    """

    tokens: list[list[int]]
    plugin: dict[str, Any] | None
    graph_sizes: list[int] | None = None
    switches_by_rank: list[list[str]] = field(default_factory=list)


def differences(wanted: list[list[int]], got: list[list[int]]) -> list[str]:
    """What differs, a line a request."""
    found = []
    for number, (want, have) in enumerate(zip(wanted, got, strict=True)):
        if want == have:
            continue
        same = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
        found.append(f"request {number}: equal for {same} of {len(want)} tokens")
    return found


def wrong_steps(case: Case, answer: Answer) -> str | None:
    """What shows that a server did not run in the modes that its policy says."""
    if answer.plugin is None:
        return "the plugin is not active"
    if answer.plugin["faults"]:
        return f"the plugin counts {answer.plugin['faults']} faults"
    steps, switches = answer.plugin["steps"], answer.plugin["switches"]
    if case.name == "plain" and (steps["spec"] or not steps["plain"]):
        return f"not all steps were plain: {steps}"
    if case.name == "alternate" and switches < 2:
        return f"{switches} flips"
    if case.name == "auto" and not answer.plugin["measured_sizes"]:
        return "no step time was measured at start"
    if any(len(rank) != switches or rank != answer.switches_by_rank[0] for rank in answer.switches_by_rank):
        return "the ranks did not switch alike"
    return None


def switches_by_rank(log: str, ranks: int) -> list[list[str]]:
    """What the log of a server says of each rank's switches: modes, reason, batch and step."""
    if ranks == 1:
        return []
    return [re.findall(rf"TP{rank}\] adaptive-spec: (.* -> .*)", log) for rank in range(ranks)]


def prompts(target: Path, count: int) -> list[list[int]]:
    """Held-out text of the pair's domain; random ids for a model without a tokenizer."""
    tokenizer_file = target / "tokenizer.json"
    if not tokenizer_file.exists():
        size = json.loads((target / "config.json").read_text())["vocab_size"]
        draw = random.Random(3)
        return [[draw.randrange(2, size) for _ in range(draw.randrange(8, 60))] for _ in range(count)]
    from tokenizers import Tokenizer

    from tests.models.prompts import heldout_prompts

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return [tokenizer.encode(text).ids for text in heldout_prompts(count, seed=17)]


def serve(task: dict[str, Any]) -> int:
    """The child process: start a server, generate the batch, write the answer."""
    import sglang as sgl

    engine = sgl.Engine(**task["engine_arguments"])
    try:
        sampling = [
            {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} for tokens in task["output_tokens"]
        ]
        outputs = engine.generate(input_ids=task["prompts"], sampling_params=sampling)
        served = Served(engine.get_server_info()["internal_states"][0])
        ids = [output["output_ids"] for output in outputs]
        answer = Answer(ids, dict(served.plugin) if served.plugin else None, cuda_graph_sizes(served.state))
        Path(task["answer"]).write_text(json.dumps(asdict(answer)))
    finally:
        engine.shutdown()
    return 0


class Runner:
    """Starts one server after another on the same batch."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args = args
        self._work = work
        self._prompts = prompts(args.target, args.requests)

    def answer(self, variant: str, name: str, dtype: str, plugin: dict[str, Any] | None) -> Answer | None:
        """A server's answer, or None where it failed; its log's end is printed then."""
        args = self._args
        task_file, log, out = (self._work / f"{variant}-{name}-{dtype}.{kind}" for kind in ("json", "log", "answer"))
        arguments: dict[str, Any] = {
            "model_path": str(args.target),
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "grammar_backend": "none",
            "sampling_backend": "pytorch",
            "disable_radix_cache": True,
            "max_running_requests": args.requests,
            "tp_size": args.tp_size,
            "log_level": "info",
        }
        if plugin is not None:
            arguments |= SPECULATION | {"speculative_draft_model_path": str(args.draft)}
            if args.draft == args.target:
                arguments["speculative_algorithm"] = "NEXTN"
        if args.device == "cpu":
            arguments |= {"device": "cpu", "disable_cuda_graph": True, "max_total_tokens": 16384}
        else:
            arguments |= {
                "attention_backend": args.attention_backend,
                "cuda_graph_backend_prefill": "disabled",
                "cuda_graph_max_bs_decode": args.requests,
                "max_total_tokens": 65536,
                # A small model on a large GPU: leave it for what else is captured and compiled.
                "mem_fraction_static": 0.5,
            }
        task = {
            "engine_arguments": arguments | variant_arguments(variant, args.requests),
            "prompts": self._prompts,
            # From half of it on, so that they end one after the other and the batch goes through every size.
            "output_tokens": [
                args.output_tokens - number * args.output_tokens // (2 * args.requests)
                for number in range(args.requests)
            ],
            "answer": str(out),
        }
        task_file.write_text(json.dumps(task))
        env = plugin_environment(os.environ, plugin)
        code = run_module("bench.tokens_gpu", ["--serve", str(task_file)], env, log, args.timeout_seconds)
        if args.logs is not None:
            args.logs.mkdir(parents=True, exist_ok=True)
            (args.logs / log.name).write_bytes(log.read_bytes())
        if code != 0 or not out.exists():
            print(
                f"{variant}: {name} in {dtype}: no answer, exit code {code}", *log_tail(log), sep="\n    ", flush=True
            )
            return None
        answer = Answer(**json.loads(out.read_text()))
        return replace(answer, switches_by_rank=switches_by_rank(log.read_text(errors="replace"), args.tp_size))


def run(args: argparse.Namespace, work: Path) -> int:
    """Compare; returns the exit code."""
    runner = Runner(args, work)
    cases = [case for case in CASES if case.name in args.cases]
    base: dict[tuple[str, str], Answer | None] = {}
    failed = False
    for variant, case in product(args.variants, cases):
        dtype = "float32" if args.device == "cpu" else case.dtype
        if (variant, dtype) not in base:
            base[variant, dtype] = runner.answer(variant, "base", dtype, None)
        reference, answer = base[variant, dtype], runner.answer(variant, case.name, dtype, case.plugin)
        row: dict[str, Any] = {"kind": "tokens", "variant": variant, "case": case.name, "dtype": dtype}
        owed = case.owed or dtype == "float32"
        row["owed"] = owed
        if reference is None or answer is None:
            row |= {"equal": None, "error": "no answer to compare"}
        else:
            row |= {
                "equal": reference.tokens == answer.tokens,
                "requests": len(reference.tokens),
                "tokens": sum(map(len, reference.tokens)),
                "differences": differences(reference.tokens, answer.tokens),
                "error": wrong_steps(case, answer),
                "plugin": answer.plugin,
                "graph_sizes": {"base": reference.graph_sizes, case.name: answer.graph_sizes},
                "tp_size": args.tp_size,
            }
        ok = row["equal"] is True and row["error"] is None
        failed |= row["error"] is not None or (owed and not ok)
        verdict = "OK" if ok else row["error"] or "MISMATCH"
        reported = "" if owed else " (reported only)"
        print(
            f"{variant}: {case.name} against base, {dtype}{reported}: {verdict}",
            *row.get("differences", []),
            sep="\n    ",
            flush=True,
        )
        if args.out is not None:
            append_row(args.out, row)
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    if argv[:1] == ["--serve"]:
        return serve(json.loads(Path(argv[1]).read_text()))
    parser = argparse.ArgumentParser(prog="python -m bench.tokens_gpu", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", type=comma(str), default=names, help=f"default: {','.join(names)}")
    parser.add_argument(
        "--variants", type=comma(str), default=["graphs"], metavar="A,B", help=f"{', '.join(VARIANTS)}; default: graphs"
    )
    parser.add_argument("--target", type=Path, default=_MODELS / "target")
    parser.add_argument(
        "--draft", type=Path, default=_MODELS / "draft", help="EAGLE3; the target once more: its own layer (MTP)"
    )
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tp-size", type=int, default=1, help="tensor-parallel ranks of every server")
    parser.add_argument("--requests", type=int, default=16, help="the batch")
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--timeout-seconds", type=float, default=240, help="for one server, start included")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' logs there")
    args = parser.parse_args(argv)
    if unknown := set(args.cases) - set(names) | set(args.variants) - set(VARIANTS):
        parser.error(f"no such case or variant: {', '.join(sorted(unknown))}")
    if args.device == "cpu" and set(args.variants).intersection(OTHER_GRAPHS):
        parser.error(f"there are no CUDA graphs on a CPU to vary: {', '.join(OTHER_GRAPHS)}")
    args.target, args.draft = args.target.resolve(), args.draft.resolve()
    missing = [path.name for path in (args.target, args.draft) if not (path / "config.json").exists()]
    if missing:
        print(f"No model in {' and '.join(missing)}.")
        return 2
    if not host.plugin_is_installed():
        print("The plugin is not installed in this environment, so SGLang would not load it.")
        return 2
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        # What was found last replaces what was found before.
        args.out.unlink(missing_ok=True)
        command = without_paths(" ".join(["python -m bench.tokens_gpu", *argv]))
        head = {"kind": "header", "tool": "bench.tokens_gpu", "started": now(), "command": command}
        append_row(args.out, head | {"host": host.facts()})
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        return run(args, Path(work))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
