"""Speed bounds, written down before the runs that are to meet them."""

from __future__ import annotations

from dataclasses import dataclass

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FROM_8 = tuple(c for c in GRID if c >= 8)

MODEL_SHAPE = "llama-8b"
GPU = "H200"


@dataclass(frozen=True)
class Bound:
    """A ratio of two modes' decode rates that is to be reached everywhere it is asked for.

    Attributes:
        group: The piece of work it belongs to.
        least: The ratio has to be at least this, or above it where ``strict``.
        by_step: Compare decode steps instead of tokens: for two modes that both speculate.
        accept_length: Simulated tokens a verify step; None where neither mode verifies.
    """

    group: str
    mode: str
    reference: str
    least: float
    backends: tuple[str, ...]
    concurrencies: tuple[int, ...]
    strict: bool = False
    by_step: bool = False
    accept_length: float | None = None

    def met(self, ratio: float) -> bool:
        """Whether a ratio is good enough."""
        return ratio > self.least if self.strict else ratio >= self.least

    @property
    def name(self) -> str:
        unit = ", by step" if self.by_step else ""
        accept = f", accept length {self.accept_length}" if self.accept_length else ""
        return f"{self.mode} / {self.reference} {'>' if self.strict else '>='} {self.least}{unit}{accept}"


BOUNDS: tuple[Bound, ...] = (
    # A: the main job.
    Bound("A", "ours-plain", "base", 0.97, ("fa3", "triton"), (8, 64, 256)),
    Bound("A", "ours-spec", "spec", 0.99, ("fa3", "triton"), (8, 64, 256), by_step=True, accept_length=2.5),
    # B: the draft stays true across plain phases.
    Bound("B", "ours-threshold", "base", 0.975, ("fa3",), (64, 256)),
    # At one request the threshold of one request leaves it speculative.
    Bound("B", "ours-threshold", "upstream-zero", 1.0, ("fa3", "triton"), GRID[1:], strict=True),
    # C: as fast as the better of the two, at every load.
    Bound("C", "ours-plain", "base", 0.98, ("fa3", "triton", "flashinfer"), _FROM_8),
    Bound("C", "ours-spec", "spec", 0.995, ("fa3", "triton", "flashinfer"), _FROM_8, by_step=True, accept_length=2.5),
    Bound("C", "ours-spec", "spec", 0.995, ("fa3", "triton", "flashinfer"), _FROM_8, by_step=True, accept_length=1.6),
)
