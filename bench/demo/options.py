"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.server import cuda_device_present

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "models"


@dataclass(frozen=True)
class Options:
    """The command line."""

    model_path: Path
    draft_path: Path
    device: str
    threshold: int
    low: int
    high: int
    seconds: float
    bursts: int
    requests: int
    tokens: int
    out: Path
    keep_log: bool
    start_timeout: float
    server_args: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def resume(self) -> int:
        """The plugin's own default."""
        return max(1, 3 * self.threshold // 4)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; ends the process when it asks for something that can't show a switch."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description="Start an SGLang server with the plugin, let the load on it rise and fall, show which mode "
        "it decodes in, and compare every answer, token for token, with a server without speculation.",
        epilog="Exit status: 0 if the server switched both ways and every answer was right, else 1.",
    )

    def add(flag: str, kind: type, default: object, unit: str, text: str) -> None:
        parser.add_argument(flag, type=kind, default=default, metavar=unit, help=f"{text} (default: %(default)s)")

    add("--model-path", Path, MODELS / "target", "DIR", "target model")
    add("--draft-path", Path, MODELS / "draft", "DIR", "its EAGLE3 draft")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto, the default: a GPU if there is one",
    )
    add("--threshold", int, 8, "N", "plain above N running requests")
    add("--low", int, 2, "N", "requests at once while the load is low")
    add("--high", int, 20, "N", "requests at once in a burst")
    add("--seconds", float, 9.0, "S", "length of each phase")
    add("--bursts", int, 2, "N", "times the load rises and falls")
    add("--requests", int, 32, "N", "different requests; used again in turn")
    add("--tokens", int, 128, "N", "tokens of the longest answer")
    add("--out", Path, ROOT / "bench" / "results" / "demo.png", "PNG", "the plot")
    add("--start-timeout", float, 240.0, "S", "longest wait for a server to start")
    parser.add_argument("--keep-log", action="store_true", help="keep the servers' logs, and say where")
    parser.add_argument("server_args", nargs="*", metavar="-- ARG", help="more arguments for both servers")
    values = vars(parser.parse_args(arguments))
    if values["device"] == "auto":
        values["device"] = "cuda" if cuda_device_present() else "cpu"
    options = Options(**{**values, "server_args": tuple(values["server_args"])})
    if min(options.low, options.threshold, options.bursts, options.requests, options.tokens) < 1:
        parser.error("--low, --threshold, --bursts, --requests and --tokens start at 1")
    if options.seconds <= 0:
        parser.error("--seconds has to be more than 0")
    if not options.low <= options.resume:
        parser.error(
            f"--low {options.low} would never bring speculation back: with --threshold "
            f"{options.threshold} it returns at {options.resume} requests or fewer"
        )
    if not options.high > options.threshold:
        parser.error(f"--high {options.high} is not above --threshold {options.threshold}: nothing to switch for")
    for what, path in (("target", options.model_path), ("draft", options.draft_path)):
        if not (path / "config.json").is_file():
            parser.error(f"no {what} model in {path}: there is no config.json")
    return options
