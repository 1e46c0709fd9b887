"""The doctor on environments made for the test; tests/contract has it on the real SGLang."""

import json
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError
from types import SimpleNamespace

import pytest

from sglang_adaptive_spec import doctor
from sglang_adaptive_spec.config import CONFIG_VARIABLE
from sglang_adaptive_spec.doctor import FAIL, NOTE, OK, Finding
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.plugin import ENABLE_VARIABLE


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A healthy machine; its parts can be set."""
    parts = SimpleNamespace(
        sglang="1.0", lock=None, drift={}, cuda=True, plugins=["adaptive_spec"], root=tmp_path, missing=()
    )
    (tmp_path / "sglang" / "srt" / "plugins").mkdir(parents=True)

    def version(name):
        if name in parts.missing:
            raise PackageNotFoundError(name)
        return "2.0"

    def lock_for(installed):
        if parts.lock:
            raise parts.lock

    def check_lock(installed):
        if isinstance(parts.drift, Refusal):
            raise parts.drift
        return parts.drift

    cuda = SimpleNamespace(
        is_available=lambda: parts.cuda, device_count=lambda: 2, get_device_name=lambda index: "H200"
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(doctor, "installed_sglang", lambda: parts.sglang)
    monkeypatch.setattr(doctor, "installed_root", lambda: parts.root)
    monkeypatch.setattr(doctor, "lock_for", lock_for)
    monkeypatch.setattr(doctor, "check_lock", check_lock)
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "_patches", lambda: iter([Finding("patches", OK, "3 functions wrapped")]))
    monkeypatch.setattr(
        doctor, "entry_points", lambda group: [EntryPoint(name, "x:y", group) for name in parts.plugins]
    )
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    for name in ("SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    return parts


def finding(subject: str) -> Finding:
    (found,) = [each for each in doctor.examine() if each.subject == subject]
    return found


def test_a_healthy_machine_ends_with_zero(machine, capsys):
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "  ok  SGLang: 1.0\n" in out
    assert "  ok  GPU: H200\n" in out
    assert "FAIL" not in out


def test_the_findings_are_json_on_demand(machine, capsys):
    machine.cuda = False
    assert doctor.main(["--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is False
    (gpu,) = [each for each in content["findings"] if each["subject"] == "GPU"]
    assert gpu["status"] == FAIL
    assert "CUDA_VISIBLE_DEVICES" in gpu["remedy"]


def test_an_sglang_without_plugins_is_named_as_such(machine):
    (machine.root / "sglang" / "srt" / "plugins").rmdir()
    found = finding("SGLang")
    assert found.status == FAIL
    assert "has no plugins" in found.detail
    assert "0.5.11" in found.remedy


def test_an_unproven_sglang_fails_and_nothing_is_loaded(machine):
    machine.lock = Refusal("SGLang 1.0 is installed, which nobody proved.", "Why.", "Install another.")
    findings = {each.subject: each for each in doctor.examine()}
    assert findings["SGLang"].status == FAIL
    assert findings["SGLang"].remedy == "Install another."
    assert not {"lock", "patches"} & set(findings)


@pytest.mark.parametrize("name", ["torch", "wrapt"])
def test_a_missing_package_fails(machine, name):
    machine.missing = (name,)
    assert finding(name).status == FAIL


def test_sglang_on_the_cpu_is_worth_a_note(machine, monkeypatch):
    machine.cuda = False
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert finding("GPU").status == NOTE


@pytest.mark.parametrize(
    ("plugins", "chosen", "status", "words"),
    [
        (["other", "adaptive_spec"], "", OK, "one of 2 plugins"),
        (["other"], "", FAIL, "SGLang can't see adaptive_spec"),
        (["adaptive_spec"], "other, another", FAIL, "leaves adaptive_spec out"),
        (["adaptive_spec"], "other, adaptive_spec", OK, "one of 1 plugins"),
    ],
)
def test_the_entry_point_has_to_be_seen_and_chosen(machine, monkeypatch, plugins, chosen, status, words):
    machine.plugins = plugins
    monkeypatch.setenv("SGLANG_PLUGINS", chosen)
    found = finding("entry point")
    assert found.status == status
    assert words in found.detail


@pytest.mark.parametrize(("value", "status"), [("1", OK), ("", NOTE), ("maybe", FAIL)])
def test_the_switch_is_told(machine, monkeypatch, value, status):
    monkeypatch.setenv(ENABLE_VARIABLE, value)
    assert finding("environment").status == status


@pytest.mark.parametrize(("text", "status"), [('{"disable_batch_threshold": 8}', OK), ("{", FAIL), ("[8]", FAIL)])
def test_settings_in_the_environment_are_checked(machine, monkeypatch, text, status):
    monkeypatch.setenv(CONFIG_VARIABLE, text)
    assert status in [each.status for each in doctor.examine() if each.subject in ("settings", "environment")]
    assert doctor.main([]) == (status == FAIL)


def test_the_lock_is_told(machine):
    assert finding("lock").status == OK
    machine.drift = {"sglang.engine:forward": "body"}
    assert finding("lock").items == ("sglang.engine:forward",)
    machine.drift = Refusal("SGLang 1.0 differs: sglang.engine:forward (body).", "Why.", "Reinstall.")
    assert finding("lock").status == FAIL
