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

POLICIES = ("auto", "threshold", "spec", "plain")
TEST_POLICIES = ("alternate",)
_BY_WHAT_IS_GIVEN = "threshold if one is given, else auto"
DEFAULT_MIN_DWELL_STEPS = 8
DEFAULT_CATCH_UP_TOKENS = 32
DEFAULT_MEASURE_SECONDS = 6


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        policy: ``auto`` (by measured cost), ``threshold`` (by load), ``spec`` or ``plain`` (always that mode),
            ``alternate`` (testing: a flip every ``alternate_period_steps``). Unless given, ``threshold`` where a
            threshold is, else ``auto``.
        disable_batch_threshold: Requests; plain when more than this many run.
        resume_batch_threshold: Requests; speculative again when at most this many run. Three quarters of
            ``disable_batch_threshold`` unless given.
        min_dwell_steps: Decode steps a mode lasts before the next switch; ``auto`` has exceptions.
        alternate_period_steps: Decode steps a mode lasts under the policy ``alternate``.
        catch_up_tokens: Tokens of a request that wait during plain steps until the draft sees them, all in one
            forward. More cost memory and, at the end of a request, more tokens that the radix cache forgoes.
        dry_run: Decide and report, but let SGLang run every step as it would alone.
        measure_seconds: How long step times are measured at start, at most; then the next batch size is not begun.
        costs: File with step times that ``sglang_adaptive_spec.calibrate`` saved; measured at start unless given.

    Raises:
        Refusal: on construction, when a value is out of range or two values contradict each other.
    """

    policy: str = _BY_WHAT_IS_GIVEN
    disable_batch_threshold: int | None = None
    resume_batch_threshold: int | None = None
    min_dwell_steps: int = DEFAULT_MIN_DWELL_STEPS
    alternate_period_steps: int = 1
    catch_up_tokens: int = DEFAULT_CATCH_UP_TOKENS
    dry_run: bool = False
    measure_seconds: int = DEFAULT_MEASURE_SECONDS
    costs: str | None = None

    def __post_init__(self) -> None:
        if self.policy == _BY_WHAT_IS_GIVEN:
            object.__setattr__(self, "policy", self._policy_by_what_is_given)
        if self.policy not in POLICIES + TEST_POLICIES:
            raise _bad("policy", self.policy, f"one of {', '.join(POLICIES)}")
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            # bool is an int to Python, and a typing error to whoever wrote it.
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise _bad(name, value, f"a whole number, {minimum} or more")
        if not isinstance(self.dry_run, bool):
            raise _bad("dry_run", self.dry_run, "true or false")
        if self.costs is not None and not isinstance(self.costs, str):
            raise _bad("costs", self.costs, "the name of a file")
        self._check_use()
        if self.policy == "threshold":
            self._check_thresholds()
        elif self.disable_batch_threshold is not None or self.resume_batch_threshold is not None:
            raise Refusal(
                f"A batch threshold was given together with the policy {self.policy!r}.",
                "Only the policy 'threshold' reads thresholds; with any other they would be ignored.",
                "Drop the threshold, or ask for --adaptive-spec-policy threshold.",
            )

    def _check_use(self) -> None:
        if self.costs is not None and self.policy != "auto":
            raise Refusal(
                f"A file of step times was given together with the policy {self.policy!r}.",
                "Only the policy 'auto' reads them; with any other they would be ignored.",
                f"Drop {FLAGS['costs']}, or the threshold and the policy.",
            )
        if self.dry_run and not self.switches:
            raise Refusal(
                f"A dry run was asked for together with the policy {self.policy!r}.",
                "That policy always decides the same, so there would be nothing to report.",
                f"Drop {FLAGS['dry_run']}, or ask for the policy 'auto' or 'threshold'.",
            )

    def _check_thresholds(self) -> None:
        if self.disable_batch_threshold is None:
            raise Refusal(
                "No batch threshold was given.",
                "The policy 'threshold' goes by nothing else, and no number is right for every model, GPU and "
                "attention backend (from below 8 to above 200 in public reports).",
                "Give --speculative-disable-batch-threshold N (plain when more than N requests run) or its JSON name "
                "disable_batch_threshold, or leave the choice to the policy 'auto', which measures.",
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
    def _policy_by_what_is_given(self) -> str:
        by_load = self.disable_batch_threshold is not None or self.resume_batch_threshold is not None
        return "threshold" if by_load else "auto"

    @property
    def switches(self) -> bool:
        """Whether the policy uses both modes."""
        return self.policy not in ("spec", "plain")

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
                f"Correct its name. Known settings: {', '.join([*FLAGS, 'measure_seconds'])}.",
            )
        return cls(**values)

    def with_changes(self, asked: Mapping[str, Any]) -> Settings:
        """These settings with some of them changed on a running server.

        A fixed policy holds the server in one mode and needs nothing else; everything else changes what a policy
        goes by, and keeps what is not mentioned.

        Raises:
            Refusal: the result would be no settings, or can't change under way.
        """
        if asked.get("catch_up_tokens", self.catch_up_tokens) != self.catch_up_tokens:
            raise Refusal(
                "catch_up_tokens can't change on a running server.",
                "The memory for what waits was allocated at start.",
                "Restart the server with another value.",
            )
        for name in ("costs", "measure_seconds"):
            if asked.get(name, getattr(self, name)) != getattr(self, name):
                raise Refusal(
                    f"{name} can't change on a running server.",
                    "Step times are read or measured at start; from then on the server corrects them by what it sees.",
                    "Restart the server with another value.",
                )
        kept: dict[str, Any] = {"catch_up_tokens": self.catch_up_tokens, "min_dwell_steps": self.min_dwell_steps}
        by_load = {name: getattr(self, name) for name in _OPTIONAL}
        thresholds = any(asked.get(name) is not None for name in _OPTIONAL)
        policy = asked.get("policy", "threshold" if thresholds else self.policy)
        if policy == "threshold":
            kept |= by_load
        if policy in ("auto", "threshold"):
            kept |= {"dry_run": self.dry_run}
        return Settings.from_mapping({**kept, "policy": policy, **asked})

    def effective(self) -> dict[str, Any]:
        """All settings, the derived ones filled in."""
        values = asdict(self)
        if self.policy == "threshold":
            values["resume_batch_threshold"] = self.resume_threshold_requests
        if self.policy not in TEST_POLICIES:
            del values["alternate_period_steps"]
        if self.policy != "auto":
            del values["costs"], values["measure_seconds"]
        return values

    def to_json(self) -> str:
        """The settings as JSON, without the ones left at their default."""
        default = {field.name: field.default for field in fields(self)} | {"policy": self._policy_by_what_is_given}
        return json.dumps({k: v for k, v in asdict(self).items() if v != default[k]}, sort_keys=True)


FLAGS = {
    "policy": "--adaptive-spec-policy",
    "disable_batch_threshold": "--speculative-disable-batch-threshold",
    "resume_batch_threshold": "--adaptive-spec-resume-batch-threshold",
    "min_dwell_steps": "--adaptive-spec-min-dwell-steps",
    "catch_up_tokens": "--adaptive-spec-catch-up-tokens",
    "dry_run": "--adaptive-spec-dry-run",
    "costs": "--adaptive-spec-costs",
}
"""The settings by the names they have in JSON, with their flags."""

SWITCHES = frozenset(field.name for field in fields(Settings) if isinstance(field.default, bool))
"""The settings that are either on or off."""

_OPTIONAL = {"disable_batch_threshold", "resume_batch_threshold"}
DECIDES = frozenset({"policy", *_OPTIONAL})
"""The settings that say who decides on the mode; a threshold asks for the policy that goes by it."""
_MINIMUM = {
    "disable_batch_threshold": 1,
    "resume_batch_threshold": 1,
    "min_dwell_steps": 1,
    "alternate_period_steps": 1,
    "catch_up_tokens": 1,
    "measure_seconds": 1,
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
        f"Correct it where it was given: the flag, {CONFIG_VARIABLE}, or the request to change settings.",
    )


def _bad_variable(text: str, why: str) -> Refusal:
    return Refusal(
        f"{CONFIG_VARIABLE} can't be read: {text!r}.",
        why,
        'Give a JSON object, such as {"disable_batch_threshold": 32}.',
    )
