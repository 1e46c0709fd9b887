"""SGLang's wheels, to read; they are never installed from here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def fetch_wheel(release: str, folder: Path) -> Path:
    """The wheel of a release, downloaded with pip unless it lies in the folder already.

    Raises:
        OSError: pip can't get it.
    """
    if found := sorted(folder.glob(f"sglang-{release}-*.whl")):
        return found[0]
    # Aside, and moved when it is whole: another process may look for it at the same time.
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [f"--dest={aside}", f"sglang=={release}"]
        fetched = subprocess.run(command, capture_output=True, text=True, check=False)
        for wheel in Path(aside).glob(f"sglang-{release}-*.whl"):
            return wheel.replace(folder / wheel.name)
    raise OSError(f"pip can't download sglang=={release}:\n{fetched.stderr.strip()}")
