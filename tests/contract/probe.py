"""Starts SGLang many times for the price of one import: imports it once, then forks a child per start.

Run by path. It reads one start a line as JSON from standard input, and answers each with one line:

    {"flags": [...], "plugin": "on" | "off" | "own", "env": {...}, "sglang_version": null, "check_targets": [...],
     "paths_before": [...], "paths_after": [...]}
    {"exit_code": 0, "stdout": "...", "stderr": "...", "facts": {...}}

A start is what `python -m sglang.launch_server` does up to the point where it starts processes: load the
plugins, parse and resolve the arguments. With "on" the plugins were loaded before the fork, which spares a
second each; with "off" and "own" the child loads them itself, with "own" as its environment says.
"""

import functools
import importlib
import importlib.metadata
import json
import os
import socket
import sys
import tempfile
import traceback

ENABLE = "SGLANG_ADAPTIVE_SPEC"


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang.srt.layers.quantization
    import sglang.srt.server_args  # noqa: F401  (with the line above: what every start imports)

    for line in sys.stdin:
        reply = _with_plugin()(line) if json.loads(line)["plugin"] == "on" else _in_child(json.loads(line))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # taking torch down would cost seconds


@functools.cache
def _with_plugin():
    """Fork a process that loads the plugin once and then forks in its turn; how to ask it."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        os.environ[ENABLE] = "1"
        from sglang.srt.plugins import load_plugins

        load_plugins()
        stream = theirs.makefile("rw")
        for line in stream:
            stream.write(json.dumps(_in_child(json.loads(line))) + "\n")
            stream.flush()
        os._exit(0)
    theirs.close()
    stream = ours.makefile("rw")

    def ask(line: str) -> dict:
        stream.write(line)
        stream.flush()
        return json.loads(stream.readline())

    return ask


def _in_child(start: dict) -> dict:
    with (
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
        tempfile.TemporaryFile("w+") as facts,
    ):
        pid = os.fork()
        if pid == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            _run_and_exit(start, facts)
        _, status = os.waitpid(pid, 0)
        for file in (stdout, stderr, facts):
            file.seek(0)
        return {
            "exit_code": os.waitstatus_to_exitcode(status),
            "stdout": stdout.read(),
            "stderr": stderr.read(),
            "facts": json.loads(facts.read() or "{}"),
        }


def _run_and_exit(start: dict, facts) -> None:
    """Run one start, and leave the child as the interpreter would."""
    code = 0
    try:
        _run(start, facts)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for file in (sys.stdout, sys.stderr, facts):
        file.flush()
    os._exit(code)


def _run(start: dict, facts) -> None:
    os.environ.update(start["env"])
    sys.path[:] = [*start["paths_before"], *sys.path, *start["paths_after"]]
    if start["sglang_version"]:
        _pretend_version(start["sglang_version"])
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    found = {}
    try:
        if start["flags"]:
            arguments = prepare_server_args(start["flags"])
            found = {
                "speculative_adaptive": arguments.speculative_adaptive,
                "max_running_requests": arguments.max_running_requests,
                "enable_mixed_chunk": arguments.enable_mixed_chunk,
                "spec_graph_sizes": arguments.cuda_graph_config.decode.bs,
                "plain_graph_sizes": getattr(arguments, "adaptive_spec_plain_graph_sizes", None),
            }
    finally:
        # Before the targets are imported, and also when SystemExit ends the start.
        found["our_modules"] = sorted(name for name in sys.modules if name.split(".")[0] == "sglang_adaptive_spec")
        found["config"] = os.environ.get("SGLANG_ADAPTIVE_SPEC_CONFIG")
        found["flashinfer_workspace"] = os.environ.get("SGLANG_FLASHINFER_WORKSPACE_SIZE")
        found["wrapped"] = {target: _is_wrapped(target) for target in start["check_targets"]}
        json.dump(found, facts)


def _pretend_version(version: str) -> None:
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: version if name == "sglang" else real(name)


def _is_wrapped(target: str) -> bool:
    """Whether code of ours runs when SGLang calls ``module:qualified.name``."""
    module, _, qualified = target.partition(":")
    function = importlib.import_module(module)
    for name in qualified.split("."):
        function = getattr(function, name)
    while function is not None:
        # A hook of ours keeps the wrapper in its closure, and so does SGLang's hook registry.
        if any(_is_ours(cell.cell_contents) for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_ours(function) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("sglang_adaptive_spec")


if __name__ == "__main__":
    main()
