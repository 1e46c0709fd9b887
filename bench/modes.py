"""The servers to compare: what each is started with, and the proof that it ran as claimed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_adaptive_spec.releases.flashinfer_workspace import WORKSPACE_VARIABLE

PLUGIN_VARIABLE = "SGLANG_ADAPTIVE_SPEC"
CONFIG_VARIABLE = "SGLANG_ADAPTIVE_SPEC_CONFIG"
ACCEPT_VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
WORKSPACE_BYTES = 2**30
"""Room for the speculative graphs of 256 requests, which SGLang's default does not have. The plugin makes it itself."""

SPECULATION: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}

# Every batch a request can be in takes the 0-step tier. The second entry is never reached: it only lets the
# server start at 3 steps, as a server that adapts would.
ZERO_STEP_TABLE: dict[str, Any] = {"1": {"candidate_steps": [0]}, "1000000": {"candidate_steps": [3]}}

_SETTLING_STEPS = 2
"""Steps that a policy which chooses by load may take in the other mode before it settles."""


def plugin_environment(base: Mapping[str, str], settings: Mapping[str, Any] | None) -> dict[str, str]:
    """An environment in which the plugin runs with these settings, or not at all; nothing else about speculation."""
    env = {k: v for k, v in base.items() if k not in (PLUGIN_VARIABLE, CONFIG_VARIABLE, ACCEPT_VARIABLE)}
    if settings is not None:
        env |= {PLUGIN_VARIABLE: "1", CONFIG_VARIABLE: json.dumps(settings, sort_keys=True)}
    return env


@dataclass(frozen=True)
class BenchMode:
    """One kind of server.

    Attributes:
        name: What it is called on the command line and in results.
        speculates: Whether it is started with a draft model.
        plugin: The plugin's settings; None leaves the plugin inactive.
        arguments: SGLang's arguments beyond the common ones.
        upstream_table: SGLang's own adaptive table, to be written to a file.
        least_concurrency: Requests below which the mode would not do what its name says.
    """

    name: str
    speculates: bool = True
    plugin: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    upstream_table: Mapping[str, Any] | None = None
    least_concurrency: int = 1

    @property
    def measures_at_start(self) -> bool:
        """Whether the plugin times decode steps while the server starts."""
        return self.plugin is not None and self.plugin["policy"] == "auto"

    def environment(
        self, base: Mapping[str, str], accept_length: float | None, attention_backend: str | None
    ) -> dict[str, str]:
        """The environment of this server's process.

        Args:
            base: The environment to start from; whatever it says about speculation is dropped.
            accept_length: Tokens a verify step accepts, simulated by SGLang; None leaves it to the weights.
            attention_backend: What the server is started with.
        """
        env = plugin_environment(base, self.plugin)
        if self.speculates and accept_length is not None:
            env[ACCEPT_VARIABLE] = str(accept_length)
        if self.speculates and self.plugin is None and attention_backend == "flashinfer":
            env.setdefault(WORKSPACE_VARIABLE, str(WORKSPACE_BYTES))
        return env

    def engine_arguments(self, draft: Path, folder: Path) -> dict[str, Any]:
        """SGLang's arguments that make this mode; a table is written into ``folder``."""
        arguments: dict[str, Any] = {}
        if self.speculates:
            arguments |= SPECULATION | {"speculative_draft_model_path": str(draft)}
        arguments |= self.arguments
        if self.upstream_table is not None:
            table = folder / f"{self.name}.json"
            table.write_text(json.dumps(self.upstream_table))
            arguments["speculative_adaptive_config"] = str(table)
        return arguments


MODES: dict[str, BenchMode] = {
    mode.name: mode
    for mode in (
        BenchMode("base", speculates=False),
        BenchMode("spec"),
        BenchMode("ours-spec", plugin={"policy": "spec"}),
        BenchMode("ours-plain", plugin={"policy": "plain"}),
        BenchMode("ours-auto", plugin={"policy": "auto"}),
        # Plain by load, and free to return: so unlike under the fixed policy the draft has to be kept true.
        *(
            BenchMode(
                f"ours-threshold{suffix}",
                plugin={
                    "policy": "threshold",
                    "disable_batch_threshold": 1,
                    "resume_batch_threshold": 1,
                    "min_dwell_steps": 1,
                    **catch_up,
                },
                least_concurrency=2,
            )
            # The default, and how it was chosen.
            for suffix, catch_up in (("", {}), *((f"-{n}", {"catch_up_tokens": n}) for n in (4, 32, 64)))
        ),
        # What a switch costs: the draft returns to as many waiting tokens as the default lets wait.
        BenchMode("ours-alternate", plugin={"policy": "alternate", "alternate_period_steps": 31}),
        BenchMode("upstream-zero", arguments={"speculative_adaptive": True}, upstream_table=ZERO_STEP_TABLE),
        BenchMode("upstream-adaptive", arguments={"speculative_adaptive": True}),
    )
}


@dataclass(frozen=True)
class Served:
    """What a server says about itself at one moment.

    Attributes:
        state: The first scheduler's internal state, as in /server_info.
    """

    state: Mapping[str, Any]

    @property
    def plugin(self) -> Mapping[str, Any] | None:
        """The plugin's own state, or None where it is not active."""
        plugin: Mapping[str, Any] | None = self.state.get("adaptive_spec")
        return plugin

    def steps(self, mode: str) -> int:
        """Decode steps that the plugin ran in a mode so far."""
        return int(self.plugin["steps"][mode]) if self.plugin else 0


def verify_steps(outputs: Iterable[Mapping[str, Any]]) -> int:
    """Verify steps of the request that needed the most of them; 0 where none ran."""
    return max((int(output["meta_info"].get("spec_verify_ct") or 0) for output in outputs), default=0)


def complaints_about_outputs(outputs: list[Mapping[str, Any]], output_tokens: int) -> list[str]:
    """What shows that a run did not generate what was asked for, from scratch."""
    found = []
    for output in outputs:
        meta = output["meta_info"]
        if meta["completion_tokens"] != output_tokens or meta["finish_reason"]["type"] != "length":
            found.append(f"{meta['completion_tokens']} tokens instead of {output_tokens}: {meta['finish_reason']}")
        if meta.get("cached_tokens"):
            found.append(f"{meta['cached_tokens']} prompt tokens came from the prefix cache")
    return sorted(set(found))


def complaints_about_mode(
    mode: BenchMode,
    before: Served,
    after: Served,
    outputs: list[Mapping[str, Any]],
    output_tokens: int,
) -> list[str]:
    """What shows that the steps between two states did not run in the mode claimed.

    Args:
        outputs: Results of one full run between the two states.
        output_tokens: Tokens that each request of it generated.
    """
    found = complaints_about_server(mode, after)
    steps = verify_steps(outputs)
    if not mode.speculates:
        return found + ([f"{steps} verify steps on a server without speculation"] if steps else [])
    if mode.plugin is None:
        if not steps:
            found.append("no verify step on a speculating server")
        tier = after.state.get("speculative_num_steps")
        if mode.name == "upstream-zero" and (steps != output_tokens - 1 or tier != 0):
            found.append(
                f"{steps} verify steps for {output_tokens - 1} tokens, {tier} draft steps: not the 0-step tier"
            )
        return found
    plain, spec = (after.steps(name) - before.steps(name) for name in ("plain", "spec"))
    ran = f"{plain} plain and {spec} speculative steps"
    if mode.name == "ours-spec" and (plain or not spec or not steps):
        found.append(f"{ran}, {steps} verify steps: not all speculative")
    if mode.name == "ours-plain" and (spec or steps or plain < output_tokens - 1):
        found.append(f"{ran}, {steps} verify steps: not all plain")
    most_settled_tokens = _SETTLING_STEPS * SPECULATION["speculative_num_draft_tokens"]
    if mode.name.startswith("ours-threshold") and (
        spec > _SETTLING_STEPS or plain < output_tokens - 1 - most_settled_tokens
    ):
        found.append(f"{ran}: not plain by load")
    if mode.name == "ours-alternate" and not (plain and spec):
        found.append(f"{ran}: no switch")
    return found


def complaints_about_server(mode: BenchMode, served: Served) -> list[str]:
    """What shows that a server is not of the mode claimed."""
    found = []
    algorithm = served.state.get("speculative_algorithm")
    if (algorithm is not None) != mode.speculates:
        found.append(f"the server's speculative algorithm is {algorithm}")
    if bool(served.state.get("speculative_adaptive")) != bool(mode.arguments.get("speculative_adaptive")):
        found.append(f"speculative_adaptive is {served.state.get('speculative_adaptive')}")
    plugin = served.plugin
    if (plugin is not None) != (mode.plugin is not None):
        found.append("the plugin is active" if plugin is not None else "the plugin is not active")
    elif plugin is not None and mode.plugin is not None:
        if plugin["policy"] != mode.plugin["policy"]:
            found.append(f"the plugin's policy is {plugin['policy']}")
        if plugin["faults"]:
            found.append(f"the plugin counts {plugin['faults']} faults")
    return found
