import pytest

from sglang_adaptive_spec import activate as activate_module
from sglang_adaptive_spec.errors import REFUSED_EXIT_CODE, Refusal
from sglang_adaptive_spec.plugin import ENABLE_VARIABLE, register


@pytest.fixture
def activations(monkeypatch) -> list[str]:
    """Stands in for the activation; one entry each time."""
    made = []
    monkeypatch.setattr(activate_module, "activate", lambda: made.append("activated"))
    return made


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "off", "OFF", " 0 "], ids=repr)
def test_an_off_value_does_nothing(value, activations, monkeypatch, capsys):
    if value is not None:
        monkeypatch.setenv(ENABLE_VARIABLE, value)
    register()
    assert activations == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "TRUE", " 1 "], ids=repr)
def test_an_on_value_activates(value, activations, monkeypatch, capsys):
    monkeypatch.setenv(ENABLE_VARIABLE, value)
    register()
    assert activations == ["activated"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", ["2", "maybe", "threshold", "-1"])
def test_a_value_that_is_neither_ends_the_process_with_one_message(value, activations, monkeypatch, capsys):
    monkeypatch.setenv(ENABLE_VARIABLE, value)
    with pytest.raises(SystemExit) as ended:
        register()
    message = capsys.readouterr().err
    assert ended.value.code == REFUSED_EXIT_CODE != 0
    assert message.count("refuses to start") == 1
    assert f"{ENABLE_VARIABLE}='{value}'" in message
    assert f"Set {ENABLE_VARIABLE}=1, or unset it." in message
    assert activations == []


def test_a_refused_activation_ends_the_process_in_a_way_sglang_can_not_swallow(monkeypatch, capsys):
    def refuse():
        raise Refusal("this release", "a reason", "a way out")

    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    monkeypatch.setattr(activate_module, "activate", refuse)
    with pytest.raises(SystemExit) as ended:
        register()
    # SGLang catches Exception around a plugin.
    assert not isinstance(ended.value, Exception)
    assert ended.value.code == REFUSED_EXIT_CODE
    message = capsys.readouterr().err
    assert [line.split(":")[0].strip() for line in message.splitlines()[2:]] == ["what", "why", "do"]
    assert "this release" in message


@pytest.mark.parametrize("error", [ImportError("wrapt"), KeyError("functions"), OSError("no source")], ids=repr)
def test_an_unexpected_failure_of_the_activation_ends_the_process(error, monkeypatch, capsys):
    """SGLang would log the exception and serve on without the plugin."""

    def fail():
        raise error

    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    monkeypatch.setattr(activate_module, "activate", fail)
    with pytest.raises(SystemExit):
        register()
    assert repr(error) in capsys.readouterr().err


def test_settings_without_the_switch_are_pointed_out(activations, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_ADAPTIVE_SPEC_CONFIG", '{"policy": "plain"}')
    register()
    assert activations == []
    assert "SGLANG_ADAPTIVE_SPEC is not: the plugin is off" in capsys.readouterr().err
    monkeypatch.setenv(ENABLE_VARIABLE, "0")
    register()
    assert capsys.readouterr().err == ""
