"""The entry point that SGLang loads in every one of its processes.

Standard library only, and nothing of ours is imported before the environment says so: without
``SGLANG_ADAPTIVE_SPEC=1`` an installed plugin costs one dictionary look-up a process.
"""

import os
import sys

ENABLE_VARIABLE = "SGLANG_ADAPTIVE_SPEC"
_ON = {"1", "true", "yes", "on"}
_OFF = {"", "0", "false", "no", "off"}


def is_on() -> bool:
    """Whether the environment asks for the plugin.

    Raises:
        Refusal: it says neither yes nor no.
    """
    asked = os.environ.get(ENABLE_VARIABLE, "").strip().lower()
    if asked in _OFF or asked in _ON:
        return asked in _ON
    from sglang_adaptive_spec.errors import Refusal

    raise Refusal(
        f"{ENABLE_VARIABLE}={asked!r} is neither on nor off.",
        "Guessing would serve with or without the plugin against your wish.",
        f"Set {ENABLE_VARIABLE}=1, or unset it.",
    )


def register() -> None:
    """Activate the plugin in this process if the environment asks for it.

    Raises:
        SystemExit: what was asked can't be had; the message is on standard error. SGLang swallows a
            plugin's exceptions, but not this one.
    """
    asked = os.environ.get(ENABLE_VARIABLE, "").strip().lower()
    if asked in _OFF:
        if not asked and os.environ.get(f"{ENABLE_VARIABLE}_CONFIG"):
            sys.stderr.write(f"{ENABLE_VARIABLE}_CONFIG is set, but {ENABLE_VARIABLE} is not: the plugin is off.\n")
        return
    from sglang_adaptive_spec.errors import Refusal

    try:
        is_on()
        from sglang_adaptive_spec.activate import activate

        activate()
    except Refusal as refusal:
        refusal.end_process()
    except Exception as error:
        # SGLang would log it and serve on as if nothing had been asked for.
        Refusal(
            f"The plugin could not be activated: {error!r}.",
            "This is a fault of the plugin or of its installation.",
            f"Reinstall sglang-adaptive-spec, or unset {ENABLE_VARIABLE} to start without it.",
        ).end_process()
