"""What a policy sees, and what it answers. Neither torch nor SGLang is known here."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sglang_adaptive_spec.modes import Decision, Mode


class Observation(NamedTuple):
    """What is known when a decode step is prepared; equal on every tensor-parallel rank.

    Attributes:
        running_requests: Requests in the decode batch.
        mode: The mode of the step before.
        steps_in_mode: Decode steps since the last switch, the step being prepared not counted.
    """

    running_requests: int
    mode: Mode
    steps_in_mode: int


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

    def decide(self, seen: Observation) -> Decision:
        """Choose the mode of the step being prepared."""


class Switching:
    """What policies that use both modes have in common."""

    returns_to_spec = True
    needs_plain = True
    initial_mode = Mode.SPEC
