"""What ends the view, each with an exit code of ``sysexits.h``."""

from __future__ import annotations

import os


class TopError(Exception):
    """There is nothing to show: one message, and the exit code it ends with."""

    exit_code = os.EX_SOFTWARE


class ServerGone(TopError):  # noqa: N818
    """Nobody answers there, or not in time."""

    exit_code = os.EX_UNAVAILABLE


class NotAllowed(TopError):  # noqa: N818
    """The server wants another key, or one at all."""

    exit_code = os.EX_NOPERM


class NotSGLang(TopError):  # noqa: N818
    """What answers is no SGLang server."""

    exit_code = os.EX_PROTOCOL


class NoPlugin(TopError):  # noqa: N818
    """An SGLang server, but without this plugin at work."""

    exit_code = os.EX_CONFIG


class Missing(TopError):  # noqa: N818
    """A library of the extra ``top`` is not installed."""

    exit_code = os.EX_UNAVAILABLE
