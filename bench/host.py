"""Facts about the machine and the software that a figure depends on."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
        "plugin_digest": plugin_digest(),
    }


def plugin_digest() -> str | None:
    """A hash of the installed plugin's source, which says more than a commit where there is no repository."""
    names = ("sglang_adaptive_spec", "sglang_adaptive_spec.patches")
    folders: list[Path] = []
    for name in names:
        try:
            spec = find_spec(name)
        except ImportError:
            spec = None
        if spec is not None:
            folders += map(Path, spec.submodule_search_locations or ())
    if not folders:
        return None
    return digest(folders)


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
    root = Path(__file__).resolve().parent.parent
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", "sglang_adaptive_spec", "patches")
    return commit + ("+" if changed else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
