"""What a policy sees, and what it answers. Neither torch nor SGLang is known here."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from sglang_adaptive_spec.modes import Decision, Mode, Reason

STEADY = {mode: Decision(mode, Reason.STEADY) for mode in Mode}
DWELL = {mode: Decision(mode, Reason.DWELL) for mode in Mode}
"""To stay in a mode, made once: most steps do."""


class Observation(NamedTuple):
    """What is known when a decode step is prepared; equal on every tensor-parallel rank.

    Attributes:
        running_requests: Requests in the decode batch.
        mode: The mode of the step before.
        steps_in_mode: Decode steps since the last switch, the step being prepared not counted.
        context_tokens: Mean context length of the batch; 0 where it is not known.
    """

    running_requests: int
    mode: Mode
    steps_in_mode: int
    context_tokens: int = 0


class Policy(Protocol):
    """Chooses the mode of each decode step."""

    @property
    def returns_to_spec(self) -> bool:
        """Whether a speculative step may follow a plain one, so that the draft has to be kept true."""

    @property
    def needs_plain(self) -> bool:
        """Whether plain steps can occur at all, so that their graphs have to be built."""

    @property
    def initial_mode(self) -> Mode:
        """The mode that counts as current before the first step."""

    @property
    def attentive(self) -> bool:
        """Whether the next decision waits for what the last steps showed, which is otherwise heard some steps later."""

    def decide(self, seen: Observation) -> Decision:
        """Choose the mode of the step being prepared."""

    def note_verify(self, requests: int, *tokens: int) -> None:
        """Hear of processed verify steps of as many requests, and of the tokens that these got out of each."""

    def note_step(self, mode: Mode, requests: int, context_tokens: int, *seconds: float) -> None:
        """Hear how long each of some decode steps took, from the decode result before it to its own.

        The caller leaves out what is no mere decode step: one with a prefill in between, or the first of a mode.

        Args:
            mode: The mode that the steps ran in.
            requests: Requests in the batch.
            context_tokens: Mean context length of the batch; 0 where it is not known.
            seconds: The same on every tensor-parallel rank, at the same step.
        """

    def note_switch(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        """Hear how long the first step after a switch took, with all that the switch entailed.

        Args: as of :meth:`note_step`, for one step; ``mode`` is the one switched to.
        """

    def explain(self) -> dict[str, Any]:
        """What the last decision was based on, as plain JSON types; empty for a policy that measures nothing."""


class Uninformed:
    """What policies that go by nothing measured have in common."""

    attentive = False

    def note_verify(self, requests: int, *tokens: int) -> None:
        pass

    def note_step(self, mode: Mode, requests: int, context_tokens: int, *seconds: float) -> None:
        pass

    def note_switch(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        pass

    def explain(self) -> dict[str, Any]:
        return {}


class Switching:
    """What policies that use both modes have in common."""

    returns_to_spec = True
    needs_plain = True
    initial_mode = Mode.SPEC
