"""A load that rises, bursts and falls: the same trace on a server of each mode, through HTTP, streamed."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

from bench.modes import MODES, BenchMode
from bench.ramp import report
from bench.ramp.client import warm_up
from bench.ramp.load import Load, add_load_options, phases_of, settle_load
from bench.ramp.outcome import seconds, summary
from bench.ramp.trace import boundaries
from bench.server import Server
from bench.serving import Labels, Measurement, add_options, result_file, say, settle_options, state_of

PHASES = "7s@3/s,8s@3-70/s,8s@70/s,6s@70-5/s,6s@5/s,4s@80/s,6s@5/s"
"""Sized for an H200 and the 8B shape: at 70 requests a second plain decode keeps up, and speculation on triton not."""


def ramp_modes(threshold: int) -> dict[str, BenchMode]:
    """The modes of the sweep, with such settings as a server under a changing load would have."""
    by_load = {"policy": "threshold", "disable_batch_threshold": threshold}
    return MODES | {"ours-threshold": BenchMode("ours-threshold", plugin=by_load)}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ramp", description=__doc__)
    add_options(parser, "base,spec,ours-threshold")
    add_load_options(parser, PHASES)
    args = parser.parse_args(argv)
    settle_options(parser, args, ramp_modes(args.threshold))
    settle_load(parser, args)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    modes = ramp_modes(args.threshold)
    load_s = boundaries(phases_of(args))[-1]
    with result_file("bench.ramp", args, argv) as work:
        measurement = Measurement(
            args, [modes[name] for name in args.modes], warm_up_s=10.0, pass_s=load_s + 5.0, work=work
        )
        vocab = measurement.pair.vocab_size
        load = Load.of(args, vocab)
        say(f"{len(load.trace)} requests in {load_s:.0f} s, {sum(r.output_tokens for r in load.trace)} tokens out")

        def warm(server: Server) -> None:
            start = time.monotonic()
            warm_up(server.url, args.max_running_requests, args.input_tokens, vocab)
            say(f"{server.name}: warm after {time.monotonic() - start:.0f} s")

        def measure(mode: BenchMode, server: Server, labels: Labels) -> None:
            recording = load.send(server.url)
            for row in seconds(recording, load.phases):
                measurement.write(labels, "second", row)
            for switch in recording.switches:
                measurement.write(labels, "switch", {**asdict(switch), "at_s": round(switch.at_s, 3)})
            if (plugin := state_of(server).plugin) is not None:
                # What the policy went by in the end, for whoever asks why it did what it did.
                measurement.write(labels, "policy", {name: plugin[name] for name in ("explain", "step_costs")})
            row = summary(recording, load.phases)
            measurement.write(labels, "measurement", row)
            switches = f"{row['switches']} switches, {row['probes']} probes"
            say(f"{mode.name}: {row['window_tokens']} tokens in the window, {switches}")

        measurement.run(warm, measure)
    report.write(args.out)
    return 1 if measurement.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
