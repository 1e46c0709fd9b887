"""``python -m sglang_adaptive_spec.top URL``."""

from __future__ import annotations

import sys

from sglang_adaptive_spec.top.errors import Missing, TopError


def main() -> int:
    """Run the view; the exit code."""
    try:
        try:
            from sglang_adaptive_spec.top.run import run
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("sglang_adaptive_spec"):
                raise
            raise Missing(
                f"The view needs {error.name}, which is not installed: pip install httpx prometheus-client rich."
            ) from error
        run(sys.argv[1:])
    except TopError as error:
        sys.stderr.write(f"sglang-adaptive-spec top: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
