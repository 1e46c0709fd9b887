"""Deciding needs neither torch nor SGLang: what imports them is the adapter of a release alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_TORCH = (
    "acceptance",
    "activate",
    "cli",
    "config",
    "controller",
    "costs",
    "engine.core",
    "engine.steps",
    "errors",
    "faults",
    "modes",
    "patches",
    "patching",
    "plugin",
    "policies",
    "releases.base",
    "releases.lock",
    "releases.refusals_0_5_14",
    "request_steps",
    "stopwatch",
    "telemetry",
)


def imported_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_everything_but_the_adapters_imports_without_torch_and_sglang():
    modules = imported_after("import " + ", ".join(f"sglang_adaptive_spec.{name}" for name in WITHOUT_TORCH))
    assert "sglang_adaptive_spec.engine.core" in modules
    assert not {"torch", "sglang"} & modules


def test_a_checkout_has_all_of_the_package():
    """`python -m sglang.launch_server`, run in a checkout, finds this folder before what is installed."""
    code = "import importlib.util as u; print(u.find_spec('sglang_adaptive_spec.patches').origin)"
    # Without site-packages: what is installed could help out.
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "sglang_adaptive_spec" / "patches" / "__init__.py"), done.stderr


def test_policies_and_controller_import_without_the_engine():
    modules = imported_after("import sglang_adaptive_spec.controller, sglang_adaptive_spec.policies")
    assert not {name for name in modules if name.startswith("sglang_adaptive_spec.engine")}


@pytest.mark.parametrize("call", ["", "; sglang_adaptive_spec.plugin.register()"], ids=["imported", "registered"])
def test_the_stub_brings_nothing_of_ours_along_when_not_asked(call, monkeypatch):
    monkeypatch.delenv("SGLANG_ADAPTIVE_SPEC", raising=False)
    modules = imported_after("import sglang_adaptive_spec.plugin" + call)
    ours = {name for name in modules if name.split(".")[0] == "sglang_adaptive_spec"}
    assert ours == {"sglang_adaptive_spec", "sglang_adaptive_spec.plugin"}
    assert "wrapt" not in modules
