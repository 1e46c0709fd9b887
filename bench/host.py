"""Facts about the machine and the software that a figure depends on."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.child import ROOT, environment

_PACKAGES = ("sglang", "torch", "triton", "transformers", "flashinfer-python", "sglang-kernel", "wrapt")


def facts() -> dict[str, Any]:
    """What to write at the head of a result file. Starts nothing on the GPU."""
    return {
        "gpu": _gpu(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": os.environ.get("BENCH_COMMIT") or _commit(),
        "plugin_digest": installed_digest(),
    }


def installed_digest() -> str | None:
    """A hash of the source of the plugin that SGLang would load; None where none is installed."""
    # Asked of a process like the server's: in this one the working tree may hide what is installed.
    with tempfile.TemporaryDirectory() as elsewhere:
        return _output(sys.executable, "-m", "bench.host", env=environment(os.environ), cwd=elsewhere) or None


def tree_digest() -> str:
    """A hash of the plugin's source in the working tree."""
    return digest([ROOT / "sglang_adaptive_spec", ROOT / "patches"])


def _digest_here() -> str | None:
    folders: list[Path] = []
    for name in ("sglang_adaptive_spec", "sglang_adaptive_spec.patches"):
        try:
            spec = find_spec(name)
        except ImportError:
            spec = None
        if spec is not None:
            folders += map(Path, spec.submodule_search_locations or ())
    return digest(folders) if folders else None


def digest(folders: Iterable[Path]) -> str:
    """A hash over the Python files below some folders: their contents, whatever they are called above."""
    contents = {file.read_bytes() for folder in folders for file in folder.rglob("*.py")}
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(c).digest() for c in contents))).hexdigest()[:16]


def plugin_is_installed() -> bool:
    """Whether SGLang would find the plugin."""
    return any(entry.value.startswith("sglang_adaptive_spec") for entry in entry_points(group="sglang.srt.plugins"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> str | None:
    output = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The commit the working tree is at, with "+" for uncommitted changes of the plugin."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "sglang_adaptive_spec", "patches")
    return commit + ("+" if changed else "")


def _output(*command: str, env: Mapping[str, str] | None = None, cwd: str | None = None) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, env=env, cwd=cwd
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    print(_digest_here() or "")
