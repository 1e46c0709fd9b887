"""Activate the plugin in one process: release lock, patches, and later the checks that need arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_adaptive_spec import __version__, calibration
from sglang_adaptive_spec.config import CONFIG_VARIABLE, Settings, read_config_variable
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch, PatchSet
from sglang_adaptive_spec.policies import make_policy
from sglang_adaptive_spec.releases import lock
from sglang_adaptive_spec.releases.base import PlainRuntime, Release
from sglang_adaptive_spec.releases.families import load_adapter
from sglang_adaptive_spec.releases.source import Source

logger = logging.getLogger(__name__)

DRIFT_VARIABLE = "SGLANG_ADAPTIVE_SPEC_ALLOW_DRIFT"
"""Comma-separated functions whose body may differ from the lock file."""

FIRST_RELEASE = "0.5.11"
"""The first release of SGLang that loads plugins."""


@dataclass
class Plugin:
    """What this process's patches share; one a process, made when the plugin activates.

    Attributes:
        release: The adapter of the installed SGLang.
        sglang_version: The installed SGLang.
        patches: What is wrapped there.
        drift: What differs from the lock and is allowed to, by function; told again when the server is ready.
        engine: The scheduler process's engine; None while this process speculates nothing.
    """

    release: Release
    sglang_version: str
    patches: tuple[Patch, ...] = ()
    drift: Mapping[str, str] = field(default_factory=dict)
    engine: Any = None

    @cached_property
    def patch_set(self) -> PatchSet:
        """The patches on this process's SGLang."""
        return PatchSet(self, self.patches)

    def check(self, server_args: Any) -> None:
        """Refuse arguments that can't be served, before anything is started.

        Raises:
            Refusal: what, why, and what to do.
        """
        asked = read_config_variable()
        if not self.release.speculates(server_args):
            if asked is None:
                return
            raise Refusal(
                "Settings of this plugin were given, but no speculative algorithm.",
                "Without speculation there is nothing to switch off: every step is plain already.",
                "Add --speculative-algorithm and a draft model, or drop the plugin's settings "
                f"(flags or {CONFIG_VARIABLE}).",
            )
        # Here, too: what replaced the engine's own start in the scheduler would go unnoticed there.
        self.patch_set.verify()
        settings = Settings.from_mapping(asked or {})
        self.release.preflight(server_args, settings)
        self.patch_set.plain_possible = make_policy(settings).needs_plain

    @property
    def lifts_request_limit(self) -> bool:
        """Whether as many requests may run as would without speculation; not where SGLang runs every step itself."""
        try:
            settings = Settings.from_mapping(read_config_variable() or {})
        except Refusal:
            return False  # check() says so
        return settings.policy != "spec" and not settings.dry_run

    def take_limits(self, server_args: Any) -> None:
        """Let speculation have graphs for the batches it can run in, and plain steps for all others.

        Raises:
            Refusal: a file of step times can't be read, or SGLang could not capture its speculative graphs.
        """
        if not self.release.speculates(server_args):
            return
        settings = Settings.from_mapping(read_config_variable() or {})
        if self.lifts_request_limit:
            most_spec_requests = settings.disable_batch_threshold
            if settings.costs is not None:
                most_spec_requests = calibration.load(settings.costs).most_spec_requests
            self.release.take_limits(server_args, most_spec_requests)
        self.release.make_room(server_args, settings)

    def start_engine(self, server_args: Any) -> None:
        """Make the engine, in the scheduler's process, once its arguments are known."""
        from sglang_adaptive_spec.engine.core import AdaptiveEngine

        settings = Settings.from_mapping(read_config_variable() or {})
        self.engine = AdaptiveEngine(settings, self.release, server_args)

    def summary(self, runtime: PlainRuntime | None) -> str:
        """The one line that a started scheduler logs."""
        settings = self.engine.settings
        policy = settings.policy
        if policy == "threshold":
            policy = (
                f"plain above {settings.threshold_requests} running requests, "
                f"spec again at {settings.resume_threshold_requests}"
            )
        elif policy == "auto":
            policy = f"auto, {self.engine.costs_origin}"
        if settings.dry_run:
            policy = f"dry run of {policy}"
        built = "no plain graphs (not needed)"
        if runtime is not None:
            graphs = f"{len(runtime.graph_sizes)} sizes" if runtime.graph_sizes else "none, steps run eagerly"
            built = f"plain graphs: {graphs}; {runtime.memory_gib:.2f} GiB, {runtime.build_seconds:.1f} s to build"
            if runtime.draft_ring_gib:
                tokens = self.engine.catch_up_chunk_tokens
                built += f"; {runtime.draft_ring_gib:.2f} GiB of it holds {tokens} tokens a request for the draft"
        return f"adaptive-spec {__version__} on SGLang {self.sglang_version}: {policy}; {built}"

    def remind_of_drift(self) -> None:
        """Say once more, in a started scheduler's log, what was allowed to differ."""
        if self.drift:
            logger.warning(
                "adaptive-spec: serving on a changed SGLang, as %s allows: %s", DRIFT_VARIABLE, _list(self.drift)
            )


_plugin: Plugin | None = None


def activate() -> Plugin:
    """Check the installed SGLang against its lock and apply the patches; once a process.

    Raises:
        Refusal: SGLang is missing, of an unknown release, or changed where this plugin wraps it.
    """
    global _plugin
    if _plugin is None:
        installed = installed_sglang()
        locked = lock_for(installed)
        drift = check_lock(installed)
        release = load_adapter(locked.adapter)
        plugin = Plugin(release, installed, placed_patches(release, locked), drift)
        plugin.patch_set.apply()
        _plugin = plugin
    return _plugin


def placed_patches(release: Release, locked: lock.Lock) -> tuple[Patch, ...]:
    """The patches of an adapter on the targets that a release has."""
    placed = (patch.placed(locked.targets.get) for patch in release.patches)
    return tuple(patch for patch in placed if patch)


def installed_sglang() -> str:
    """The version of the installed SGLang.

    Raises:
        Refusal: there is none.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise Refusal(
            "SGLang is not installed.",
            "This plugin changes a running SGLang; on its own it does nothing.",
            "pip install sglang, in the environment of this plugin.",
        ) from None


def lock_for(installed: str) -> lock.Lock:
    """The lock of a version of SGLang.

    Raises:
        Refusal: there is none, so this plugin does not serve it.
    """
    try:
        return lock.read_lock(installed)
    except FileNotFoundError:
        raise Refusal(
            f"SGLang {installed} is installed, which this plugin has not been proven on.",
            "SGLang rewrites the functions this plugin wraps in nearly every release; on an unknown one it could "
            "corrupt the KV cache.",
            f"Install a served release ({', '.join(lock.locked_releases())}), or unset SGLANG_ADAPTIVE_SPEC.",
        ) from None


def release_for(installed: str) -> Release:
    """The adapter that serves a version of SGLang.

    Raises:
        Refusal: none does.
    """
    return load_adapter(lock_for(installed).adapter)


def check_lock(installed: str, root: Path | None = None) -> dict[str, str]:
    """Compare the installed source with the lock file of its release.

    Args:
        installed: The version of SGLang.
        root: The folder that contains the ``sglang`` package, or a wheel; the installed one unless given.

    Returns:
        What differs although it was allowed to, by function.

    Raises:
        Refusal: a function that is wrapped or relied on has changed, or an attribute that is read is gone.
    """
    changes = lock.drifted(lock_for(installed), Source(root or installed_root()))
    allowed = {name.strip() for name in os.environ.get(DRIFT_VARIABLE, "").split(",") if name.strip()}
    refused = {name: change for name, change in changes.items() if not _may_drift(name, change, allowed)}
    if refused:
        raise Refusal(
            f"SGLang {installed} differs from what this plugin was proven on: {_list(refused)}.",
            "The plugin wraps, relies on or reads these, and what it assumes of them may no longer hold.",
            _remedy(installed, refused),
        )
    if changes:
        logger.warning("adaptive-spec: running on a changed SGLang, as %s allows: %s", DRIFT_VARIABLE, _list(changes))
    return changes


def _remedy(installed: str, refused: Mapping[str, str]) -> str:
    reinstall = f"Reinstall SGLang {installed} unmodified."
    if set(refused.values()) != {"body"}:
        return reinstall
    return (
        f"{reinstall} If you changed a body yourself and know it to be compatible, set "
        f"{DRIFT_VARIABLE}={','.join(refused)}."
    )


def _may_drift(name: str, change: str, allowed: set[str]) -> bool:
    return change == "body" and (name in allowed or name.partition(":")[2] in allowed)


def _list(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({change})" for name, change in sorted(changes.items()))


def installed_root() -> Path:
    """The folder that contains the installed ``sglang`` package."""
    spec = find_spec("sglang")
    assert spec is not None, "its metadata is installed"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]).parent
