"""The plugin's settings: one place for their names, units, defaults and checks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sglang_adaptive_spec.errors import Refusal

CONFIG_VARIABLE = "SGLANG_ADAPTIVE_SPEC_CONFIG"
"""Carries the settings, as JSON, to ``sglang.Engine`` and to SGLang's child processes."""

POLICIES = ("threshold", "spec", "plain")
TEST_POLICIES = ("alternate",)
DEFAULT_MIN_DWELL_STEPS = 8
DEFAULT_CATCH_UP_TOKENS = 32


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        policy: ``threshold`` (by load), ``spec`` or ``plain`` (always that mode), ``alternate`` (testing: a
            flip every ``alternate_period_steps``).
        disable_batch_threshold: Requests; plain when more than this many run.
        resume_batch_threshold: Requests; speculative again when at most this many run. Three quarters of
            ``disable_batch_threshold`` unless given.
        min_dwell_steps: Decode steps a mode lasts before the next switch.
        alternate_period_steps: Decode steps a mode lasts under the policy ``alternate``.
        catch_up_tokens: Tokens of a request that wait during plain steps until the draft sees them, all in one
            forward. More cost memory and, at the end of a request, more tokens that the radix cache forgoes.

    Raises:
        Refusal: on construction, when a value is out of range or two values contradict each other.
    """

    policy: str = "threshold"
    disable_batch_threshold: int | None = None
    resume_batch_threshold: int | None = None
    min_dwell_steps: int = DEFAULT_MIN_DWELL_STEPS
    alternate_period_steps: int = 1
    catch_up_tokens: int = DEFAULT_CATCH_UP_TOKENS

    def __post_init__(self) -> None:
        if self.policy not in POLICIES + TEST_POLICIES:
            raise _bad("policy", self.policy, f"one of {', '.join(POLICIES)}")
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            # bool is an int to Python, and a typing error to whoever wrote it.
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise _bad(name, value, f"a whole number, {minimum} or more")
        if self.policy == "threshold":
            self._check_thresholds()
        elif self.disable_batch_threshold is not None or self.resume_batch_threshold is not None:
            raise Refusal(
                f"A batch threshold was given together with the policy {self.policy!r}.",
                "Only the policy 'threshold' reads thresholds; with any other they would be ignored.",
                "Drop the threshold, or ask for --adaptive-spec-policy threshold.",
            )

    def _check_thresholds(self) -> None:
        if self.disable_batch_threshold is None:
            raise Refusal(
                "No batch threshold was given.",
                "The batch size from which speculation costs more than it gives depends on the model, the "
                "GPU and the attention backend (from below 8 to above 200 in public reports), so there is "
                "no safe default.",
                "Give --speculative-disable-batch-threshold N (plain when more than N requests run) or its JSON name "
                "disable_batch_threshold, or choose the policy spec or plain.",
            )
        resume = self.resume_batch_threshold
        if resume is not None and not (resume < self.disable_batch_threshold or resume == 1):
            raise Refusal(
                f"The resume threshold ({resume}) is not below the disable threshold ({self.disable_batch_threshold}).",
                "Without a gap between them the server would flip at every request that comes or goes.",
                f"Choose --adaptive-spec-resume-batch-threshold below {self.disable_batch_threshold}, or "
                "leave it out for three quarters of it.",
            )

    @property
    def threshold_requests(self) -> int:
        """The disable threshold of the policy ``threshold``."""
        assert self.disable_batch_threshold is not None, "checked on construction"
        return self.disable_batch_threshold

    @property
    def resume_threshold_requests(self) -> int:
        """The resume threshold, given or derived; at least one, or a lone request could never resume."""
        if self.resume_batch_threshold is not None:
            return self.resume_batch_threshold
        return max(1, 3 * self.threshold_requests // 4)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Settings:
        """Build settings from names and values, refusing names that don't exist."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise Refusal(
                f"Unknown setting {', '.join(map(repr, unknown))}.",
                "A setting that nobody reads would silently change nothing.",
                f"Correct the flag or {CONFIG_VARIABLE}. Known settings: {', '.join(FLAGS)}.",
            )
        return cls(**values)

    def with_changes(self, asked: Mapping[str, Any]) -> Settings:
        """These settings with some of them changed on a running server.

        A fixed policy holds the server in one mode and needs nothing else; everything else changes what the
        policy 'threshold' goes by, and keeps what is not mentioned.

        Raises:
            Refusal: the result would be no settings, or can't change under way.
        """
        if asked.get("catch_up_tokens", self.catch_up_tokens) != self.catch_up_tokens:
            raise Refusal(
                "catch_up_tokens can't change on a running server.",
                "The memory for what waits was allocated at start.",
                "Restart the server with another value.",
            )
        kept: dict[str, Any] = {"catch_up_tokens": self.catch_up_tokens, "min_dwell_steps": self.min_dwell_steps}
        if asked.get("policy", "threshold") == "threshold":
            kept |= {name: getattr(self, name) for name in _OPTIONAL}
        return Settings.from_mapping({**kept, **asked})

    def effective(self) -> dict[str, Any]:
        """All settings, the derived ones filled in."""
        values = asdict(self)
        if self.policy == "threshold":
            values["resume_batch_threshold"] = self.resume_threshold_requests
        if self.policy not in TEST_POLICIES:
            del values["alternate_period_steps"]
        return values

    def to_json(self) -> str:
        """The settings as JSON, without the ones left at their default."""
        default = {field.name: field.default for field in fields(self)}
        return json.dumps({k: v for k, v in asdict(self).items() if v != default[k]}, sort_keys=True)


FLAGS = {
    "policy": "--adaptive-spec-policy",
    "disable_batch_threshold": "--speculative-disable-batch-threshold",
    "resume_batch_threshold": "--adaptive-spec-resume-batch-threshold",
    "min_dwell_steps": "--adaptive-spec-min-dwell-steps",
    "catch_up_tokens": "--adaptive-spec-catch-up-tokens",
}
"""The settings by the names they have in JSON, with their flags."""

_OPTIONAL = {"disable_batch_threshold", "resume_batch_threshold"}
_MINIMUM = {
    "disable_batch_threshold": 1,
    "resume_batch_threshold": 1,
    "min_dwell_steps": 1,
    "alternate_period_steps": 1,
    "catch_up_tokens": 1,
}


def read_config_variable() -> dict[str, Any] | None:
    """The settings in the environment as names and values, or None when there are none.

    Raises:
        Refusal: the variable does not hold a JSON object.
    """
    text = os.environ.get(CONFIG_VARIABLE, "").strip()
    if not text:
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise _bad_variable(text, str(error)) from error
    if not isinstance(values, dict):
        raise _bad_variable(text, "it is no JSON object")
    return values


def write_config_variable(settings: Settings) -> None:
    """Put the settings where this process's children will look for them."""
    os.environ[CONFIG_VARIABLE] = settings.to_json()


def _bad(name: str, value: object, expected: str) -> Refusal:
    return Refusal(
        f"{FLAGS.get(name, name)} ({name} in JSON) is {value!r}.",
        f"It has to be {expected}.",
        f"Correct the flag, or {CONFIG_VARIABLE} where the settings are JSON.",
    )


def _bad_variable(text: str, why: str) -> Refusal:
    return Refusal(
        f"{CONFIG_VARIABLE} can't be read: {text!r}.",
        why,
        'Give a JSON object, such as {"disable_batch_threshold": 32}.',
    )
