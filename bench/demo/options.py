"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .server import cuda_device_present

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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", type=Path, default=MODELS / "target", metavar="DIR", help="target model")
    add("--draft-path", type=Path, default=MODELS / "draft", metavar="DIR", help="its EAGLE3 draft")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--threshold", type=int, default=8, metavar="N", help="plain above N running requests")
    add("--low", type=int, default=2, metavar="N", help="requests at once while the load is low")
    add("--high", type=int, default=20, metavar="N", help="requests at once in a burst")
    add("--seconds", type=float, default=9.0, metavar="S", help="length of each phase")
    add("--bursts", type=int, default=2, metavar="N", help="times the load rises and falls")
    add("--requests", type=int, default=32, metavar="N", help="different requests; used again in turn")
    add("--tokens", type=int, default=128, metavar="N", help="tokens of the longest answer")
    add("--out", type=Path, default=ROOT / "bench" / "results" / "demo.png", metavar="PNG", help="the plot")
    add("--keep-log", action="store_true", help="keep the servers' logs, and say where")
    add("--start-timeout", type=float, default=240.0, metavar="S", help="longest wait for a server to start")
    add("server_args", nargs="*", metavar="-- ARG", help="more arguments for both servers")
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
        parser.error(
            f"--high {options.high} is not above --threshold {options.threshold}: nothing to switch for"
        )
    for what, path in (("target", options.model_path), ("draft", options.draft_path)):
        if not (path / "config.json").is_file():
            parser.error(f"no {what} model in {path}: there is no config.json")
    return options
