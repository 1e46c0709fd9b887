"""Whether a start with this plugin would succeed on this machine, and what to do if not::

    python -m sglang_adaptive_spec.doctor [--json]

Exit code 0 only if it would. It loads SGLang and its plugins as a server does, and starts nothing. What only a
server's arguments decide (the model, the algorithm, thresholds) is checked at its start.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from sglang_adaptive_spec import __version__
from sglang_adaptive_spec.activate import activate, check_lock, installed_root, installed_sglang, lock_for
from sglang_adaptive_spec.config import CONFIG_VARIABLE, Settings, read_config_variable
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import chain
from sglang_adaptive_spec.plugin import ENABLE_VARIABLE, is_on
from sglang_adaptive_spec.releases.other_plugins import hooks_on, wrappers_in

ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT = "adaptive_spec"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"

OK, NOTE, FAIL = "ok", "note", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        subject: What.
        status: ``ok``, ``note`` (worth knowing) or ``FAIL`` (a start would not succeed).
        detail: What was found.
        remedy: What to do about it.
        items: The single things behind ``detail``, where there are several.
    """

    subject: str
    status: str
    detail: str
    remedy: str = ""
    items: tuple[str, ...] = ()


def examine() -> list[Finding]:
    """Look at everything; what needs something that is missing is left out."""
    findings = [*_sglang(), *_package("torch"), *_package("wrapt"), *_gpu(), *_entry_point(), *_environment()]
    if not any(finding.status == FAIL for finding in findings if finding.subject in ("SGLang", "torch", "wrapt")):
        findings += [*_lock(), *_patches()]
    return findings


def _sglang() -> Iterator[Finding]:
    try:
        installed = installed_sglang()
        if not installed_root().joinpath(*ENTRY_POINT_GROUP.split(".")).is_dir():
            yield Finding(
                "SGLang",
                FAIL,
                f"{installed} has no plugins: it would run without this one and say nothing",
                "Install SGLang 0.5.11 or newer; plugins were not there before.",
            )
            return
        lock_for(installed)
        yield Finding("SGLang", OK, installed)
    except Refusal as refusal:
        yield _refused("SGLang", refusal)


def _package(name: str) -> Iterator[Finding]:
    try:
        yield Finding(name, OK, version(name))
    except PackageNotFoundError:
        yield Finding(name, FAIL, "not installed", f"pip install {name}, in the environment of SGLang.")


def _gpu() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("GPU", FAIL, f"torch can't be imported: {error}", "Reinstall torch.")
        return
    if torch.cuda.is_available():
        names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Finding("GPU", OK, ", ".join(dict.fromkeys(names)), items=names)
    elif os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        yield Finding("GPU", NOTE, "none; SGLANG_USE_CPU_ENGINE=1 lets SGLang run on the CPU")
    else:
        yield Finding("GPU", FAIL, "torch sees no CUDA device", "Check the driver and CUDA_VISIBLE_DEVICES.")


def _entry_point() -> Iterator[Finding]:
    names = [point.name for point in entry_points(group=ENTRY_POINT_GROUP)]
    subject = "entry point"
    if ENTRY_POINT not in names:
        remedy = "pip install sglang-adaptive-spec, in the environment of SGLang."
        yield Finding(subject, FAIL, f"SGLang can't see {ENTRY_POINT} among its plugins", remedy)
        return
    chosen = {name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name.strip()}
    if chosen and ENTRY_POINT not in chosen:
        yield Finding(
            subject,
            FAIL,
            f"{PLUGINS_VARIABLE}={os.environ[PLUGINS_VARIABLE]} leaves {ENTRY_POINT} out",
            f"Add {ENTRY_POINT} to {PLUGINS_VARIABLE}, or unset it.",
        )
        return
    yield Finding(subject, OK, f"{ENTRY_POINT}, one of {len(names)} plugins", items=tuple(sorted(names)))


def _environment() -> Iterator[Finding]:
    try:
        if is_on():
            yield Finding("environment", OK, f"{ENABLE_VARIABLE} is on")
        else:
            remedy = f"Set {ENABLE_VARIABLE}=1 to use the plugin."
            yield Finding(
                "environment", NOTE, f"{ENABLE_VARIABLE} is not set: servers start without the plugin", remedy
            )
        asked = read_config_variable()
        if asked is not None:
            yield Finding("settings", OK, f"{CONFIG_VARIABLE}: {Settings.from_mapping(asked).to_json()}")
    except Refusal as refusal:
        yield _refused("environment", refusal)


def _lock() -> Iterator[Finding]:
    try:
        drift = check_lock(installed_sglang())
    except Refusal as refusal:
        yield _refused("lock", refusal)
        return
    if drift:
        yield Finding("lock", NOTE, f"{len(drift)} changed functions, as you allow", items=tuple(drift))
    else:
        yield Finding("lock", OK, "the installed source is the one this plugin was proven on")


def _patches() -> Iterator[Finding]:
    os.environ[ENABLE_VARIABLE] = "1"
    try:
        _load_plugins()
        patch_set = activate().patch_set
        for patch in patch_set.patches:
            importlib.import_module(patch.module)
        patch_set.verify()
    except Refusal as refusal:
        yield _refused("patches", refusal)
        return
    except SystemExit:
        yield Finding("patches", FAIL, "a plugin ended the process; its message is above", "Do what it says.")
        return
    except Exception as error:
        yield Finding("patches", FAIL, f"SGLang can't be loaded: {error!r}", "Repair the installation of SGLang.")
        return
    applied = tuple(patch.target for patch in patch_set.patches if patch_set.in_chain(patch))
    yield Finding("patches", OK, f"{len(applied)} functions wrapped", items=applied)
    others = tuple(
        dict.fromkeys(
            line
            for patch in patch_set.patches
            for line in (
                *(f"{hook.plugin}: {hook.kind} {hook.target}" for hook in hooks_on(patch.target)),
                *(f"{module}: wraps {patch.target}" for module in wrappers_in(chain(patch))),
            )
        )
    )
    if others:
        yield Finding("other plugins", NOTE, "on the same functions, and all run", items=others)
    else:
        yield Finding("other plugins", OK, "none on the same functions")


def _load_plugins() -> None:
    load: Callable[[], None] = importlib.import_module(ENTRY_POINT_GROUP).load_plugins
    load()


def _refused(subject: str, refusal: Refusal) -> Finding:
    return Finding(subject, FAIL, f"{refusal.what} {refusal.why}", refusal.remedy)


def report(findings: list[Finding]) -> str:
    """The findings as text, a line each; what to do below the line that asks for it."""
    lines = [f"sglang-adaptive-spec {__version__}"]
    for finding in findings:
        lines.append(f"{finding.status:>4}  {finding.subject}: {finding.detail}")
        if finding.subject == "other plugins":
            lines += [f"          {item}" for item in finding.items]
        if finding.remedy:
            lines.append(f"        do: {finding.remedy}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Look, say what was found, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_adaptive_spec.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    as_json = parser.parse_args(arguments).json
    # What SGLang logs on the way is in the findings, or none of them.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with redirect_stdout(sys.stderr):
        findings = examine()
    ok = all(finding.status != FAIL for finding in findings)
    if as_json:
        content = {"version": __version__, "ok": ok, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        sys.stdout.write(report(findings))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
