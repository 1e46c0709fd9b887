"""SGLang's wheels, to read; they are never installed from here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def fetch_wheel(release: str, folder: Path) -> Path:
    """The wheel of a release, downloaded with pip unless it lies in the folder already.

    Raises:
        OSError: pip can't get it.
    """
    if found := sorted(folder.glob(f"sglang-{release}-*.whl")):
        return found[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--dest={folder}", f"sglang=={release}"]
    fetched = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    if not found:
        raise OSError(f"pip can't download sglang=={release}:\n{fetched.stderr.strip()}")
    return found[0]
