"""Patches on modules written for the test: each has a function, a method, and a module-level constant."""

import functools
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import wrapt

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

    @staticmethod
    def triple(number):
        return 3 * number

    @classmethod
    def named(cls, number):
        return cls.__name__, number
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
    assert patch("package.user", origin="package.maker:double").source == "package.maker:double"


def test_a_patch_is_placed_on_the_first_target_that_a_release_has():
    moved = patch("package.old", other_targets=("package.new:double", "package.newest:double"))
    placed = moved.placed({"package.new:double": "package.maker:double", "package.newest:double": "x"}.get)
    assert (placed.target, placed.source) == ("package.new:double", "package.maker:double")
    assert moved.placed({}.get) is None


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


# --- static and class methods ----------------------------------------------------------------------------


def test_static_and_class_methods_are_wrapped_and_stay_what_they_are(module):
    applied(patch(module.__name__, "Counter.triple"))
    assert module.Counter.triple(2) == module.Counter().triple(2) == 106
    assert isinstance(vars(module.Counter)["triple"], staticmethod)


def test_a_class_method_gets_the_class_that_it_was_called_on(module):
    def shout(owner, wrapped, instance, args, kwargs):
        name, number = wrapped(*args, **kwargs)
        return name.upper(), number

    applied(patch(module.__name__, "Counter.named", wrapper=shout))
    assert module.Counter.named(2) == ("COUNTER", 2)
    assert type("Child", (module.Counter,), {}).named(number=3) == ("CHILD", 3)


@pytest.mark.parametrize("name", ["triple", "named"])
def test_a_static_or_class_method_can_be_switched_off_and_reverted(module, name):
    original = vars(module.Counter)[name]
    patches = applied(patch(module.__name__, f"Counter.{name}"))
    patches.verify()
    patches.enabled = False
    getattr(module.Counter, name)(2)
    assert patches.owner.calls == 0
    assert patches.revert() == ()
    assert vars(module.Counter)[name] is original


# --- another plugin on the same function, before or after us ---------------------------------------------


@pytest.fixture
def registry(monkeypatch) -> ModuleType:
    """SGLang's own hook registry, which stands alone."""
    name = "sglang.srt.plugins.hook_registry"
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(name, root / "srt" / "plugins" / "hook_registry.py")
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


def through_registry(kind: str):
    hooks = {
        "before": lambda *args, **kwargs: None,
        "after": lambda result, *args, **kwargs: None,
        "around": lambda original, *args, **kwargs: original(*args, **kwargs),
    }

    def add(registry: ModuleType, module: ModuleType, name: str, seen: list) -> None:
        def hook(*args, **kwargs):
            seen.append(kind)
            return hooks[kind](*args, **kwargs)

        source = registry.HookSource("other", "other-dist")
        registry.HookRegistry.register(f"{module.__name__}.{name}", hook, registry.HookType(kind), source=source)
        registry.HookRegistry.apply_hooks()

    return add


def with_wrapt(registry: ModuleType, module: ModuleType, name: str, seen: list) -> None:
    @wrapt.decorator
    def note(wrapped, instance, args, kwargs):
        seen.append("wrapt")
        return wrapped(*args, **kwargs)

    owner, _, attribute = name.rpartition(".")
    owner = getattr(module, owner) if owner else module
    setattr(owner, attribute, note(vars(owner)[attribute]))


OTHERS = {kind: through_registry(kind) for kind in ("before", "after", "around")} | {"wrapt": with_wrapt}
FUNCTIONS = {
    "double": lambda module: module.double(2),
    "Counter.add": lambda module: module.Counter().add(2),
    "Counter.triple": lambda module: module.Counter.triple(2),
    "Counter.named": lambda module: module.Counter.named(2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", ["we", "they"])
def test_both_run_once_whoever_comes_first(registry, module, name, other, first):
    def count(owner, wrapped, instance, args, kwargs):
        owner.calls += 1
        return wrapped(*args, **kwargs)

    expected, seen = FUNCTIONS[name](module), []
    patches = patch_set(patch(module.__name__, name, wrapper=count))
    steps = [patches.apply, lambda: OTHERS[other](registry, module, name, seen)]
    for step in steps if first == "we" else reversed(steps):
        step()
    patches.verify()
    assert FUNCTIONS[name](module) == expected
    assert len(seen) == 1
    assert patches.owner.calls == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_the_registry_replaces_after_us_is_refused_with_whose_doing_it_was(registry, module, name):
    patches = applied(patch(module.__name__, name))
    source = registry.HookSource("other", "other-dist")
    target = f"{module.__name__}.{name}"
    registry.HookRegistry.register(target, lambda *args: None, registry.HookType.REPLACE, source=source)
    registry.HookRegistry.apply_hooks()
    with pytest.raises(Refusal) as caught:
        patches.verify()
    assert f"the plugin other (other-dist) replaces {target}" in caught.value.why


def test_a_subclass_in_the_place_of_a_class_keeps_its_wrappers(registry, module):
    patches = applied(patch(module.__name__, "Counter.add"))
    child = type("Child", (module.Counter,), {})
    registry.HookRegistry.register(f"{module.__name__}.Counter", child, registry.HookType.REPLACE)
    registry.HookRegistry.apply_hooks()
    patches.verify()
    assert module.Counter().add(3) == 103


def test_a_subclass_that_goes_its_own_way_is_refused(registry, module):
    patches = applied(patch(module.__name__, "Counter.add"))
    child = type("Child", (module.Counter,), {"add": lambda self, number: number})
    source = registry.HookSource("other", None)
    registry.HookRegistry.register(f"{module.__name__}.Counter", child, registry.HookType.REPLACE, source=source)
    registry.HookRegistry.apply_hooks()
    with pytest.raises(Refusal, match=r"Counter\.add no longer runs") as caught:
        patches.verify()
    assert f"the plugin other replaces {module.__name__}.Counter" in caught.value.why


def test_what_serves_plain_steps_is_off_where_there_are_none(module):
    patches = applied(patch(module.__name__), patch(module.__name__, "Counter.add", for_plain=False))
    patches.plain_possible = False
    assert module.double(4) == 8
    assert module.Counter().add(3) == 103
    patches.plain_possible = True
    assert module.double(4) == 108
