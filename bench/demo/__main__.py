"""`python -m bench.demo`."""

import sys
from importlib.util import find_spec

NEEDED = ("httpx", "matplotlib", "rich", "sglang")


def start() -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"The demo needs {', '.join(missing)}, which {sys.executable} does not have. "
            "`make demo` sets up an environment with everything; or install what is missing into this one.",
            file=sys.stderr,
        )
        return 1
    from .run import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
