"""Step times on file: what one start measured, for the next one of the same setup."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_adaptive_spec.errors import Refusal

_FORMAT = 1
_AGAIN = "Run python -m sglang_adaptive_spec.calibrate --save FILE with this server's arguments, or drop the file."


@dataclass(frozen=True)
class Calibration:
    """What ``python -m sglang_adaptive_spec.calibrate`` saves.

    Attributes:
        setup: What the step times depend on, by name.
        costs: The step times, as ``StepCosts.to_json`` gives them.
        most_spec_requests: Above this batch size speculation loses even if every draft is accepted; None where it
            may always win.
    """

    setup: Mapping[str, Any]
    costs: Mapping[str, Any]
    most_spec_requests: int | None

    def save(self, path: str) -> None:
        """Write the file."""
        Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n")

    def check(self, setup: Mapping[str, Any], path: str) -> None:
        """Refuse a file that was made for another setup.

        Args:
            setup: The one at hand.
            path: Where the file lies, for the message.

        Raises:
            Refusal: naming everything that differs.
        """
        names = sorted(set(setup) | set(self.setup))
        differing = [
            f"{name}: {self.setup.get(name)!r} there, {setup.get(name)!r} here"
            for name in names
            if self.setup.get(name) != setup.get(name)
        ]
        if differing:
            raise Refusal(
                f"The step times in {path} are of another setup ({'; '.join(differing)}).",
                "A step would take another time here, so the policy would decide by wrong numbers.",
                _AGAIN,
            )


def load(path: str) -> Calibration:
    """Read a file of step times.

    Raises:
        Refusal: it is not there, or not of this kind.
    """
    try:
        saved = json.loads(Path(path).read_text())
        if saved.pop("format") != _FORMAT:
            raise ValueError("it is of another format")
        calibration = Calibration(**saved)
        if not (isinstance(calibration.setup, dict) and isinstance(calibration.costs, dict)):
            raise TypeError("it lacks the setup or the step times")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(path, error) from error
    return calibration


def unreadable(path: str | None, error: Exception) -> Refusal:
    """The refusal of a file that is not what it should be."""
    return Refusal(f"The step times in {path} can't be read.", f"{error}", _AGAIN)
