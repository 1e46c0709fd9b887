"""Another plugin of SGLang's on the functions that this one wraps, loaded before or after it."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from sglang_adaptive_spec.releases import lock
from tests.engine.saboteur import install

from .starts import ENABLE, THRESHOLD

TARGETS = tuple(lock.read_lock(version("sglang")).targets)

# Wraps everything that this plugin wraps, in a way of the test's choice, and says what passes through it.
WRAPS = """
import sys
import wrapt
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
TARGETS = {targets!r}
def note(name):
    sys.stderr.write("other plugin: " + name.rpartition(".")[2] + chr(10))
def through_registry(target):
    def around(original, *args, **kwargs):
        note(target)
        return original(*args, **kwargs)
    HookRegistry.register(target.replace(":", "."), around, HookType.AROUND)
def with_wrapt(target):
    module, _, name = target.partition(":")
    def around(wrapped, instance, args, kwargs):
        note(target)
        return wrapped(*args, **kwargs)
    wrapt.register_post_import_hook(
        lambda loaded: wrapt.wrap_object(loaded, name, wrapt.FunctionWrapper, (around,)), module)
def register():
    for target in TARGETS:
        {how}(target)
"""
REPLACES = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
def register():
    HookRegistry.register({target!r}.replace(":", "."), lambda *args, **kwargs: None, HookType.REPLACE)
"""


@pytest.fixture
def start(probe, eagle3, tmp_path):
    """Start SGLang with a plugin of this source beside ours."""

    def run(source: str, loaded: str, check_targets: tuple[str, ...] = ()):
        env = install(tmp_path / "other", source)
        paths = {f"paths_{loaded}": (env["PYTHONPATH"],)}
        return probe.start(*eagle3, *THRESHOLD, plugin="own", env={ENABLE: "1"}, check_targets=check_targets, **paths)

    return run


@pytest.mark.parametrize("loaded", ["before", "after"])
@pytest.mark.parametrize("how", ["through_registry", "with_wrapt"])
def test_both_plugins_run_whichever_loads_first(start, loaded, how):
    outcome = start(WRAPS.format(targets=TARGETS, how=how), loaded, TARGETS)
    assert outcome.started
    assert json.loads(outcome.facts["config"]) == {"disable_batch_threshold": 8}
    assert outcome.facts["wrapped"] == dict.fromkeys(TARGETS, True)
    for name in ("add_cli_args", "from_cli_args"):
        assert outcome.stderr.count(f"other plugin: {name}") == 1


@pytest.mark.parametrize("loaded", ["before", "after"])
@pytest.mark.parametrize("name", ["init_cuda_graphs", "prepare_for_decode"])
def test_a_replaced_function_ends_the_start_with_who_replaced_it(start, loaded, name):
    target = next(target for target in TARGETS if target.endswith(name))
    refusal = start(REPLACES.format(target=target), loaded).refusal
    assert f"{target} no longer runs through this plugin" in refusal
    assert "the plugin saboteur (saboteur) replaces" in refusal
    assert "SGLANG_PLUGINS" in refusal
