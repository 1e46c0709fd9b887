import json
import logging
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from sglang_adaptive_spec import activate as activate_module
from sglang_adaptive_spec.activate import DRIFT_VARIABLE, Plugin, activate, check_lock, installed_sglang
from sglang_adaptive_spec.calibration import Calibration
from sglang_adaptive_spec.config import CONFIG_VARIABLE, Settings
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.releases import lock
from sglang_adaptive_spec.releases.base import PlainRuntime
from sglang_adaptive_spec.releases.lock import Lock, describe
from sglang_adaptive_spec.releases.source import Source

# --- the lock --------------------------------------------------------------------------------------------

SOURCE = "def prepare(batch):\n    return batch\n\ndef forward(batch):\n    return batch\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree of SGLang 1.0 and its lock; write_text() changes the tree afterwards."""
    monkeypatch.setattr(lock, "_LOCKS", tmp_path)
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    module = package / "engine.py"
    module.write_text(SOURCE)
    functions = describe(Source(tmp_path), ["sglang.engine:prepare", "sglang.engine:forward"])
    lock.lock_path("1.0").write_text(Lock("Adapter", functions).to_json("1.0"))
    return module


def check(tree) -> None:
    check_lock("1.0", root=tree.parents[1])


def test_an_unchanged_tree_passes(tree):
    check(tree)


def test_changed_functions_are_refused_by_name_and_kind(tree):
    tree.write_text("def prepare(batch, extra):\n    return batch\n\ndef forward(batch):\n    return None\n")
    with pytest.raises(Refusal) as caught:
        check(tree)
    assert "SGLang 1.0 differs" in caught.value.what
    assert "sglang.engine:forward (body), sglang.engine:prepare (parameters)" in caught.value.what
    assert "no longer hold" in caught.value.why
    assert caught.value.remedy == "Reinstall SGLang 1.0 unmodified."


def test_a_changed_body_is_refused_with_the_way_to_allow_it(tree):
    tree.write_text(SOURCE.removesuffix("return batch\n") + "return None\n")
    with pytest.raises(Refusal) as caught:
        check(tree)
    assert f"{DRIFT_VARIABLE}=sglang.engine:forward" in caught.value.remedy


@pytest.mark.parametrize("allowed", ["sglang.engine:forward", "forward", " other , sglang.engine:forward "])
def test_a_changed_body_may_be_allowed_by_name_and_is_told(tree, allowed, monkeypatch, caplog):
    tree.write_text(SOURCE.removesuffix("return batch\n") + "return None\n")
    monkeypatch.setenv(DRIFT_VARIABLE, allowed)
    with caplog.at_level(logging.WARNING):
        drift = check_lock("1.0", root=tree.parents[1])
    assert drift == {"sglang.engine:forward": "body"}
    (record,) = caplog.records
    assert "sglang.engine:forward (body)" in record.getMessage()


@pytest.mark.parametrize("allowed", ["prepare", "engine", "forward_batch", "1", "*"])
def test_another_name_allows_nothing(tree, allowed, monkeypatch):
    tree.write_text(SOURCE.removesuffix("return batch\n") + "return None\n")
    monkeypatch.setenv(DRIFT_VARIABLE, allowed)
    with pytest.raises(Refusal):
        check(tree)


@pytest.mark.parametrize(
    ("changed", "kind"), [("def forward(batch, extra):", "parameters"), ("def renamed(batch):", "gone")]
)
def test_changed_parameters_and_missing_functions_can_not_be_allowed(tree, changed, kind, monkeypatch):
    tree.write_text(SOURCE.replace("def forward(batch):", changed))
    monkeypatch.setenv(DRIFT_VARIABLE, "sglang.engine:forward")
    with pytest.raises(Refusal, match=rf"sglang.engine:forward \({kind}\)"):
        check(tree)


# --- activation ------------------------------------------------------------------------------------------


def test_a_missing_sglang_is_refused(monkeypatch):
    def not_found(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(activate_module, "version", not_found)
    with pytest.raises(Refusal, match="SGLang is not installed"):
        installed_sglang()


def test_activation_checks_then_applies_once_a_process(monkeypatch):
    done = []
    monkeypatch.setattr(activate_module, "_plugin", None)
    monkeypatch.setattr(activate_module, "installed_sglang", lambda: "1.0")
    monkeypatch.setattr(activate_module, "lock_for", lambda installed: Lock("Adapter", {}))
    monkeypatch.setattr(activate_module, "load_adapter", lambda name: SimpleNamespace(patches=()))
    monkeypatch.setattr(activate_module, "check_lock", lambda installed: done.append("checked"))
    monkeypatch.setattr(activate_module.PatchSet, "apply", lambda patches: done.append("applied"))
    assert activate() is activate()
    assert done == ["checked", "applied"]


def test_nothing_is_applied_to_a_changed_sglang(monkeypatch):
    def refuse(installed):
        raise Refusal("changed", "a reason", "a way out")

    done = []
    monkeypatch.setattr(activate_module, "_plugin", None)
    monkeypatch.setattr(activate_module, "installed_sglang", lambda: "1.0")
    monkeypatch.setattr(activate_module, "lock_for", lambda installed: Lock("Adapter", {}))
    monkeypatch.setattr(activate_module, "check_lock", refuse)
    monkeypatch.setattr(activate_module.PatchSet, "apply", lambda patches: done.append("applied"))
    with pytest.raises(Refusal):
        activate()
    assert done == []


# --- arguments -------------------------------------------------------------------------------------------


@pytest.fixture
def plugin():
    release = SimpleNamespace(patches=(), checked=[], with_room=[])
    release.speculates = lambda arguments: arguments == "speculative"
    release.preflight = lambda arguments, settings: release.checked.append(settings)
    release.make_room = lambda arguments, settings: release.with_room.append(settings.policy)
    release.most_accepted_tokens = lambda arguments: 4
    return Plugin(release, "1.0")


def test_a_server_without_speculation_and_settings_is_left_alone(plugin):
    plugin.check("not speculative")
    assert plugin.release.checked == []


def test_settings_without_speculation_are_refused(plugin, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, '{"policy": "plain"}')
    with pytest.raises(Refusal) as caught:
        plugin.check("not speculative")
    assert "no speculative algorithm" in caught.value.what
    assert "nothing to switch off" in caught.value.why
    assert "--speculative-algorithm" in caught.value.remedy
    assert CONFIG_VARIABLE in caught.value.remedy


def test_speculation_without_settings_is_left_to_the_policy_that_measures(plugin):
    plugin.check("speculative")
    assert plugin.release.checked == [Settings(policy="auto")]


@pytest.mark.parametrize(
    ("config", "lifts"),
    [
        ("{}", True),
        ('{"policy": "plain"}', True),
        ('{"disable_batch_threshold": 8}', True),
        ('{"policy": "spec"}', False),
        ('{"dry_run": true}', False),
        ('{"policy": "no such"}', False),
    ],
)
def test_the_request_limit_is_lifted_where_plain_steps_may_run(plugin, monkeypatch, config, lifts):
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    assert plugin.lifts_request_limit is lifts


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ("{}", [None]),
        ('{"policy": "plain"}', [None]),
        ('{"disable_batch_threshold": 8}', [8]),
        ('{"policy": "spec"}', []),
        ('{"dry_run": true}', []),
    ],
)
def test_speculation_gets_graphs_for_the_batches_it_can_run_in(plugin, monkeypatch, config, taken):
    asked = []
    plugin.release.take_limits = lambda arguments, most_spec_requests: asked.append(most_spec_requests)
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    plugin.take_limits("not speculative")
    plugin.take_limits("speculative")
    assert asked == taken


@pytest.mark.parametrize("config", ["{}", '{"policy": "plain"}', '{"policy": "spec"}', '{"dry_run": true}'])
def test_speculative_graphs_get_room_after_the_limits_are_taken(plugin, monkeypatch, config):
    seen = []
    plugin.release.take_limits = lambda arguments, most_spec_requests: seen.append(list(plugin.release.with_room))
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    plugin.take_limits("not speculative")
    assert plugin.release.with_room == []
    plugin.take_limits("speculative")
    assert plugin.release.with_room == [Settings.from_mapping(json.loads(config)).policy]
    assert seen in ([], [[]])


def test_saved_step_times_say_how_far_speculation_may_win(plugin, monkeypatch, tmp_path):
    asked = []
    plugin.release.take_limits = lambda arguments, most_spec_requests: asked.append(most_spec_requests)
    Calibration({}, {}, 96).save(tmp_path / "costs.json")
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"costs": str(tmp_path / "costs.json")}))
    plugin.take_limits("speculative")
    assert asked == [96]


def test_the_release_checks_the_settings_from_the_environment(plugin, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, '{"disable_batch_threshold": 8}')
    plugin.check("speculative")
    assert plugin.release.checked == [Settings(disable_batch_threshold=8)]


# --- the summary line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "graph_sizes", "expected"),
    [
        (
            '{"disable_batch_threshold": 8}',
            (1, 2, 4),
            (
                "plain above 8 running requests, spec again at 6; plain graphs: 3 sizes; 1.25 GiB, 2.0 s to build; "
                "0.50 GiB of it holds 32 tokens a request for the draft"
            ),
        ),
        ('{"policy": "plain"}', (), "plain; plain graphs: none, steps run eagerly; 1.25 GiB, 2.0 s to build"),
        ('{"policy": "spec"}', None, "spec; no plain graphs (not needed)"),
    ],
)
def test_the_summary_says_on_one_line_what_runs(plugin, monkeypatch, config, graph_sizes, expected):
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    plugin.start_engine(server_args=None)
    runtime = None
    if graph_sizes is not None:
        ring_gib = 0.5 if "threshold" in config else 0.0
        runtime = PlainRuntime(None, None, None, ring_gib, memory_gib=1.25, build_seconds=2.0, graph_sizes=graph_sizes)
    line = plugin.summary(runtime)
    assert line.startswith("adaptive-spec ")
    assert line.endswith(f" on SGLang 1.0: {expected}")
    assert "\n" not in line


def test_an_allowed_drift_is_told_again_when_the_server_is_ready(plugin, caplog):
    with caplog.at_level(logging.WARNING):
        plugin.remind_of_drift()
        assert caplog.text == ""
        Plugin(plugin.release, "1.0", drift={"sglang.engine:forward": "body"}).remind_of_drift()
    assert "sglang.engine:forward (body)" in caplog.text
    assert DRIFT_VARIABLE in caplog.text
