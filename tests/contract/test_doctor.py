"""The doctor on the real SGLang, with another plugin on the same functions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.engine.saboteur import install

from .starts import environment
from .test_other_plugins import REPLACES, TARGETS, WRAPS

OTHERS = {
    "wraps": WRAPS.format(targets=TARGETS, how="with_wrapt"),
    "hooks": WRAPS.format(targets=TARGETS, how="through_registry"),
    "replaces": REPLACES.format(target=TARGETS[-1]),
}


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    """All at once: each spends its time on imports."""
    command = [sys.executable, "-m", "sglang_adaptive_spec.doctor", "--json"]
    return {
        name: subprocess.Popen(
            command,
            env=environment() | install(tmp_path_factory.mktemp(name) / "other", source),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, source in OTHERS.items()
    }


@pytest.mark.parametrize("name", OTHERS)
def test_the_doctor_names_what_others_do_and_whether_a_start_would_succeed(examined, name):
    stdout, stderr = examined[name].communicate(timeout=180)
    content = json.loads(stdout)
    findings = {finding["subject"]: finding for finding in content["findings"]}
    if name == "replaces":
        assert examined[name].returncode == 1
        assert content["ok"] is False
        assert "the plugin saboteur (saboteur) replaces" in findings["patches"]["detail"]
        return
    assert examined[name].returncode == 0, stderr
    assert content["ok"] is True
    assert findings["lock"]["status"] == "ok"
    assert set(findings["patches"]["items"]) == set(TARGETS)
    others = findings["other plugins"]["items"]
    for target in TARGETS:
        hooked = f"saboteur (saboteur): around {target.replace(':', '.')}"
        assert (f"saboteur: wraps {target}" if name == "wraps" else hooked) in others
