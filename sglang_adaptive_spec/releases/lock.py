"""Lock files: what a release of SGLang looked like when this plugin was proven on it.

A lock holds the adapter that serves the release; each wrapped function and where it is written; for each function
that is wrapped or relied on, its parameters and a digest of its syntax tree (docstrings and positions left out); and
the attributes of SGLang that are read. It is made from source text, nothing is imported::

    python -m sglang_adaptive_spec.releases.lock 0.5.24                   # the wheel is fetched with pip
    python -m sglang_adaptive_spec.releases.lock 0.5.24 WHEEL_OR_FOLDER   # or is there, or a site-packages folder
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_adaptive_spec.releases.digest import FunctionLock, describe_function
from sglang_adaptive_spec.releases.reads import found
from sglang_adaptive_spec.releases.source import Source

_LOCKS = Path(__file__).parent / "locks"


@dataclass(frozen=True)
class Lock:
    """One release as it was.

    Attributes:
        adapter: The name of the adapter that serves it.
        functions: What is wrapped or relied on, by ``module:qualified.name``.
        targets: Each wrapped name, and the function it stands for.
        attributes: What is read beside, as ``module:Class.name`` or ``module:name``.
    """

    adapter: str
    functions: Mapping[str, FunctionLock]
    targets: Mapping[str, str] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()

    def to_json(self, release: str) -> str:
        """The text of the lock file, the same for equal locks."""
        functions = {
            name: {"parameters": list(function.parameters), "digest": function.digest}
            for name, function in sorted(self.functions.items())
        }
        content = {
            "release": release,
            "adapter": self.adapter,
            "targets": dict(sorted(self.targets.items())),
            "functions": functions,
            "attributes": sorted(self.attributes),
        }
        return json.dumps(content, indent=1) + "\n"


def lock_path(release: str) -> Path:
    """Where the lock of a release lies, whether or not it exists."""
    return _LOCKS / f"{release}.json"


def locked_releases() -> tuple[str, ...]:
    """The releases that have a lock file, oldest first."""
    names = [path.stem for path in _LOCKS.glob("*.json")]
    return tuple(sorted(names, key=_release_order))


def _release_order(release: str) -> list[int]:
    return [int(part.removeprefix("post")) if part.removeprefix("post").isdigit() else 0 for part in release.split(".")]


def read_lock(release: str) -> Lock:
    """The lock of a release.

    Raises:
        FileNotFoundError: it has none.
    """
    raw = json.loads(lock_path(release).read_text())
    functions = {
        name: FunctionLock(tuple(entry["parameters"]), entry["digest"]) for name, entry in raw["functions"].items()
    }
    return Lock(raw["adapter"], functions, raw["targets"], tuple(raw["attributes"]))


def describe(source: Source, names: Iterable[str]) -> dict[str, FunctionLock | None]:
    """Describe functions in a release's source; None for the ones that are not there.

    Args:
        names: ``module:qualified.name`` of each function.
    """
    found = {name: source.function(name) for name in names}
    return {name: describe_function(node) if node else None for name, node in found.items()}


def drifted(lock: Lock, source: Source) -> dict[str, str]:
    """Compare a release's source with its lock.

    Returns:
        By function or attribute, what changed: ``gone``, ``parameters`` or ``body``.
    """
    changes = {}
    for name, now in describe(source, lock.functions).items():
        before = lock.functions[name]
        if now is None:
            changes[name] = "gone"
        elif now.parameters != before.parameters:
            changes[name] = "parameters"
        elif now.digest != before.digest:
            changes[name] = "body"
    for target, origin in lock.targets.items():
        if origin not in changes and source.origin(target) != origin:
            changes[target] = "gone"
    return changes | {name: "gone" for name in lock.attributes if not source.has_attribute(name)}


def make_lock(source: Source) -> Lock:
    """Describe a release with the adapter that finds everything it needs there.

    Raises:
        LookupError: no adapter does; the message says what the closest one misses.
    """
    from sglang_adaptive_spec.releases.families import adapter_for, load_adapter

    name = adapter_for(source)
    adapter = load_adapter(name)
    placed = [patch.placed(source.origin) for patch in adapter.patches]
    targets = {patch.target: patch.source for patch in placed if patch}
    relied_on = [found(entry, source.function) or entry for entry in adapter.relies_on]
    described = describe(source, {*targets.values(), *relied_on})
    functions = {name: function for name, function in described.items() if function}
    read = tuple(sorted(found(entry, source.has_attribute) or entry for entry in adapter.reads))
    return Lock(name, functions, targets, read)


def write_lock(release: str, source: Source) -> Path:
    """Write the lock of a release from its source.

    Raises:
        LookupError: no adapter serves it.
    """
    path = lock_path(release)
    text = make_lock(source).to_json(release)
    path.write_text(text)
    return path


def main(arguments: list[str]) -> int:
    """Write the lock file of the release named on the command line, from the wheel or folder named after it."""
    from sglang_adaptive_spec.releases.wheels import fetch_wheel

    if not 1 <= len(arguments) <= 2:
        sys.stderr.write("usage: python -m sglang_adaptive_spec.releases.lock RELEASE [WHEEL_OR_FOLDER]\n")
        return 2
    release = arguments[0]
    try:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(arguments[1]) if len(arguments) > 1 else fetch_wheel(release, Path(folder))
            path = write_lock(release, Source(root))
    except (LookupError, OSError) as error:
        sys.stderr.write(f"no lock for SGLang {release}: {error}\n")
        return 1
    sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
