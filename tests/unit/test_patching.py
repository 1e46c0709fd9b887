"""Patches on modules written for the test: each has a function, a method, and a module-level constant."""

import functools
import importlib
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch, PatchSet

SOURCE = """
def double(number):
    return 2 * number

class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number, times=1):
        self.count += number * times
        return self.count
"""

# Post-import hooks can't be taken back, so every test gets modules of its own name.
_names = itertools.count()


@pytest.fixture
def module_name(tmp_path, monkeypatch) -> str:
    name = f"patched_{next(_names)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def module(module_name) -> ModuleType:
    return importlib.import_module(module_name)


def add_hundred(owner, wrapped, instance, args, kwargs):
    owner.calls += 1
    return 100 + wrapped(*args, **kwargs)


def patch(module: str, name: str = "double", **changes) -> Patch:
    values = {"wrapper": add_hundred, "why": "a test", "upstream": "none", "remove_when": "never"}
    return Patch(target=f"{module}:{name}", **{**values, **changes})


def patch_set(*patches: Patch) -> PatchSet:
    return PatchSet(SimpleNamespace(calls=0), patches)


def applied(*patches: Patch) -> PatchSet:
    patches_applied = patch_set(*patches)
    patches_applied.apply()
    return patches_applied


def wrap_as_another_plugin(module: ModuleType) -> None:
    """Wrap ``double`` so that it adds 1000, as a plugin that behaves."""
    original = module.double

    @functools.wraps(original)
    def wrapper(number):
        return 1000 + original(number)

    module.double = wrapper


# --- declare ---------------------------------------------------------------------------------------------


def test_a_patch_splits_its_target_and_names_its_source():
    here = patch("package.module", "Class.method")
    assert (here.module, here.name, here.source) == ("package.module", "Class.method", "package.module:Class.method")
    assert patch("package.user", defined_in="package.maker:double").source == "package.maker:double"


# --- apply -----------------------------------------------------------------------------------------------


def test_a_function_of_an_imported_module_is_wrapped_at_once(module):
    patches = applied(patch(module.__name__))
    assert module.double(4) == 108
    assert patches.applied == (f"{module.__name__}:double",)


def test_a_function_of_a_later_module_is_wrapped_on_its_import(module_name):
    patches = applied(patch(module_name))
    assert module_name not in sys.modules
    assert patches.applied == ()
    assert importlib.import_module(module_name).double(4) == 108
    assert patches.applied == (f"{module_name}:double",)


def test_from_import_of_a_later_module_gets_the_wrapped_function(module_name):
    applied(patch(module_name))
    namespace = {}
    exec(f"from {module_name} import double", namespace)
    assert namespace["double"](4) == 108


def test_a_method_gets_its_instance_and_keeps_its_signature(module):
    seen = []

    def watch(owner, wrapped, instance, args, kwargs):
        seen.append((instance, args, kwargs))
        return wrapped(*args, **kwargs)

    applied(patch(module.__name__, "Counter.add", wrapper=watch))
    counter = module.Counter()
    assert counter.add(3, times=2) == 6
    assert seen == [(counter, (3,), {"times": 2})]


def test_applying_twice_wraps_once(module):
    patches = applied(patch(module.__name__))
    patches.apply()
    assert module.double(4) == 108
    assert patches.owner.calls == 1


def test_applying_twice_before_the_import_wraps_once(module_name):
    patches = applied(patch(module_name))
    patches.apply()
    assert importlib.import_module(module_name).double(4) == 108


# --- switch off, revert ----------------------------------------------------------------------------------


def test_a_patch_can_be_switched_off_and_on_in_place(module):
    patches = applied(patch(module.__name__))
    bound_before = module.double
    patches.enabled = False
    assert bound_before(4) == 8
    assert patches.owner.calls == 0
    patches.enabled = True
    assert bound_before(4) == 108


def test_reverting_puts_the_original_back(module):
    original, method = module.double, vars(module.Counter)["add"]
    patches = applied(patch(module.__name__), patch(module.__name__, "Counter.add"))
    assert patches.revert() == ()
    assert module.double is original
    assert vars(module.Counter)["add"] is method
    assert patches.applied == ()


def test_what_someone_wrapped_over_stays_but_is_switched_off(module):
    patches = applied(patch(module.__name__), patch(module.__name__, "Counter.add"))
    wrap_as_another_plugin(module)
    assert module.double(4) == 1108
    assert patches.revert() == (f"{module.__name__}:double",)
    assert module.double(4) == 1008
    assert patches.owner.calls == 1


def test_reverting_before_the_import_leaves_the_later_module_alone(module_name):
    patches = applied(patch(module_name))
    assert patches.revert() == ()
    assert importlib.import_module(module_name).double(4) == 8


# --- verify ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["double", "Counter.add"])
def test_what_is_in_place_verifies(module, name):
    applied(patch(module.__name__, name)).verify()


def test_a_module_that_was_never_imported_verifies(module_name):
    applied(patch(module_name)).verify()


def test_a_wrapper_from_before_is_called_through_and_verifies(module):
    wrap_as_another_plugin(module)
    patches = applied(patch(module.__name__))
    patches.verify()
    assert module.double(4) == 1108


def test_a_wrapper_from_after_is_called_through_and_verifies(module):
    patches = applied(patch(module.__name__))
    wrap_as_another_plugin(module)
    patches.verify()
    assert module.double(4) == 1108


def test_a_method_hooked_by_sglangs_registry_after_us_is_called_through_and_verifies(module):
    """The registry takes the method from its class, which binds our wrapper, and puts a function in its place."""
    patches = applied(patch(module.__name__, "Counter.add"))
    original = getattr(module.Counter, "add")  # noqa: B009  (as the registry does it)

    @functools.wraps(original)
    def hook(*args, **kwargs):
        return 1000 + original(*args, **kwargs)

    hook.__wrapped__ = original
    module.Counter.add = hook
    patches.verify()
    assert module.Counter().add(3) == 1000 + 3 + 100


def test_another_set_of_patches_over_ours_verifies_on_both_sides(module):
    ours, theirs = applied(patch(module.__name__)), applied(patch(module.__name__))
    ours.verify()
    theirs.verify()
    assert module.double(4) == 208


@pytest.mark.parametrize("name", ["double", "Counter.add"])
def test_a_replaced_target_is_refused_by_name(module, name):
    patches = applied(patch(module.__name__, name), patch(module.__name__, "Counter.__init__"))
    if name == "double":
        module.double = lambda number: number
    else:
        module.Counter.add = lambda self, number: number
    with pytest.raises(Refusal) as caught:
        patches.verify()
    assert caught.value.what == f"{module.__name__}:{name} no longer runs through this plugin."
    assert "replaced" in caught.value.why
    assert "SGLANG_PLUGINS" in caught.value.remedy


def test_all_replaced_targets_are_named_at_once(module):
    patches = applied(patch(module.__name__), patch(module.__name__, "Counter.add"))
    module.double = module.Counter.add = lambda *args: None
    with pytest.raises(Refusal, match=r"double, .*Counter\.add no longer"):
        patches.verify()


def test_a_patch_that_is_not_required_may_be_replaced(module):
    patches = applied(patch(module.__name__, required=False))
    module.double = lambda number: number
    patches.verify()


# --- SGLang's hook registry ------------------------------------------------------------------------------


@pytest.fixture
def hooks(monkeypatch) -> dict:
    """Stands in for SGLang's registry; the hooks by their target."""
    registered = {}

    class HookRegistry:
        @staticmethod
        def register(target, hook, kind):
            assert kind == "around"
            assert target not in registered
            registered[target] = hook

    stand_in = SimpleNamespace(HookRegistry=HookRegistry, HookType=SimpleNamespace(AROUND="around"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", stand_in)
    return registered


def test_a_static_method_goes_through_sglangs_registry_once(hooks):
    patches = applied(patch("package.module", "Class.static", via="hook_registry"))
    patches.apply()
    hook = hooks["package.module.Class.static"]
    assert hook(lambda number, by: number * by, 4, by=2) == 108


def test_a_hook_can_be_switched_off(hooks):
    patches = applied(patch("package.module", "Class.static", via="hook_registry"))
    patches.enabled = False
    assert hooks["package.module.Class.static"](lambda number: number, 4) == 4
    assert patches.owner.calls == 0


def test_revert_names_the_hooks_that_stay(hooks):
    patches = applied(patch("package.module", "Class.static", via="hook_registry"))
    assert patches.revert() == ("package.module:Class.static",)


def test_what_serves_plain_steps_is_off_where_there_are_none(module):
    patches = applied(patch(module.__name__), patch(module.__name__, "Counter.add", for_plain=False))
    patches.plain_possible = False
    assert module.double(4) == 8
    assert module.Counter().add(3) == 103
    patches.plain_possible = True
    assert module.double(4) == 108
