"""The documentation says what the code does: every flag, variable, refusal and log line."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from sglang_adaptive_spec.cli import add_flags
from sglang_adaptive_spec.config import FLAGS, POLICIES, Settings
from sglang_adaptive_spec.modes import Reason
from sglang_adaptive_spec.releases.lock import locked_releases
from sglang_adaptive_spec.releases.refusals_0_5_14 import REFUSED
from sglang_adaptive_spec.top.errors import TopError
from sglang_adaptive_spec.top.run import parser as top_parser
from tests.pages import PAGES, ROOT, code_spans, commands, read

FLAGS_PAGE, TROUBLE_PAGE = "docs/flags.md", "docs/troubleshooting.md"
SOURCES = [path for root in ("sglang_adaptive_spec", "patches") for path in sorted((ROOT / root).rglob("*.py"))]
# For tests alone: no flag, and no line in the documentation.
TEST_SETTINGS = {"alternate_period_steps"}
# Links to a page that is being written elsewhere.
EXPECTED_PAGES = {"docs/how-it-decides.md"}


# --- releases --------------------------------------------------------------------------------------------


def releases_in(page: str) -> dict[str, str]:
    """Each release of a page's table, and how it was tested."""
    [table] = re.findall(r"^\| release \|.*\n\| --- .*\n((?:\|.*\n)+)", read(page), re.M)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {release: how for names, how, _ in cells for release in names.split(", ")}


@pytest.mark.parametrize("page", ["README.md", "docs/releases.md"])
def test_the_table_has_the_locked_releases_and_no_other(page: str) -> None:
    table = releases_in(page)
    assert set(table) == set(locked_releases())
    assert table.items() >= releases_in("README.md").items()


@pytest.mark.parametrize("release", locked_releases())
def test_every_served_release_has_an_environment_to_test_it_in(release: str) -> None:
    assert (ROOT / "tests" / "requirements" / f"engine-{release}.txt").exists()


# --- flags and variables ---------------------------------------------------------------------------------


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """A table's rows below a heading, by what stands first in its first column."""
    section = re.split(r"^## ", read(page), flags=re.M)
    [text] = [part for part in section if part.startswith(heading)]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return {re.split(r"[` ]", row[0].strip())[1]: [cell.strip() for cell in row] for row in cells}


def test_every_flag_and_setting_is_in_the_table_with_its_default() -> None:
    table = rows(FLAGS_PAGE, "Settings")
    assert set(table) == set(FLAGS.values())
    names = {row[1].strip("`"): row for row in table.values()}
    # Some have no flag.
    names |= {name: [] for name in re.findall(r"^\| \| `(\w+)` \|", read(FLAGS_PAGE), re.M)}
    assert set(names) == {field.name for field in fields(Settings)} - TEST_SETTINGS
    for field in fields(Settings):
        if field.name in FLAGS:
            assert names[field.name][0].startswith(f"`{FLAGS[field.name]}")
            if isinstance(field.default, int | str) and re.fullmatch(r"\w+", str(field.default)):
                shown = "off" if field.default is False else str(field.default)
                assert names[field.name][2].strip("`") == shown


def test_the_table_gives_each_flag_the_metavar_of_its_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    wanted = {action.option_strings[0]: action.metavar for action in parser._actions if action.metavar}
    for flag, metavar in wanted.items():
        assert f"`{flag} {metavar}`" in read(FLAGS_PAGE)


def test_every_policy_is_named_where_the_flag_is() -> None:
    meaning = rows(FLAGS_PAGE, "Settings")[FLAGS["policy"]][3]
    assert set(POLICIES) <= set(re.findall(r"`(\w+)`", meaning))


def test_every_variable_is_in_the_table_and_no_other() -> None:
    used = {name for path in SOURCES for name in re.findall(r"\"(SGLANG_ADAPTIVE_SPEC\w*)\"", path.read_text())}
    documented = set(rows(FLAGS_PAGE, "Environment variables")) - {"SGLANG_PLUGINS"}
    assert documented == used


def test_every_option_of_the_view_is_in_the_table_with_its_default() -> None:
    table = rows(FLAGS_PAGE, "The live view")
    options = {action.option_strings[0]: action for action in top_parser()._actions if action.option_strings}
    del options["-h"]
    assert {name for name in table if name.startswith("--")} == set(options)
    for name, action in options.items():
        if isinstance(action.default, float):
            assert float(table[name][1]) == action.default


def test_every_exit_code_of_the_view_is_in_the_table() -> None:
    codes = {0, 2} | {kind.exit_code for kind in TopError.__subclasses__()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", read(FLAGS_PAGE), re.M)} == codes


# --- messages --------------------------------------------------------------------------------------------


RAISED = ("Refusal", "PreparationMismatch", "ServerGone", "NotAllowed", "NotSGLang", "NoPlugin", "Missing")


def messages() -> Iterator[tuple[str, str]]:
    """Every refusal, log line and word on standard error in the source: where, and as a regular expression."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            text = _message(node, path) if isinstance(node, ast.Call) else None
            pattern = _pattern(text) if text else ""
            if pattern.replace(".*", ""):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", pattern


def _message(call: ast.Call, path: Path) -> ast.expr | None:
    name = ast.unparse(call.func)
    if name in RAISED or name.startswith("logger.") or (name == "sys.stderr.write" and path.name == "plugin.py"):
        return call.args[0]
    return call.args[1] if name.endswith("controller.fault") else None


def _pattern(text: ast.expr) -> str:
    if isinstance(text, ast.JoinedStr):
        return "".join(
            re.escape(str(v.value).rstrip("\n")) if isinstance(v, ast.Constant) else ".*" for v in text.values
        )
    if isinstance(text, ast.Constant):
        return ".*".join(map(re.escape, re.split(r"%(?:\.\d)?[sdrf]", str(text.value))))
    return ""


MESSAGES = dict(messages())


def test_the_messages_are_found() -> None:
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("where", MESSAGES)
def test_every_message_has_its_line_in_troubleshooting(where: str) -> None:
    shown = [span for span in code_spans(TROUBLE_PAGE) if re.fullmatch(MESSAGES[where], span)]
    assert shown, f"{TROUBLE_PAGE} has no line for the message of {where}, which reads like: {MESSAGES[where]}"


def test_every_message_in_a_table_is_one_of_the_code() -> None:
    known = [*MESSAGES.values(), *(re.escape(reason.value) for reason in Reason)]
    # Made of pieces, or SGLang's own; and what is no message but a look of one.
    known += [r"adaptive-spec .* on SGLang .*: .*; .*", r"Decode batch, .*, mode: .*", r"\[true\]", "running"]
    for span in re.findall(r"^\| `([^`\n]+)`", read(TROUBLE_PAGE), re.M):
        assert any(re.fullmatch(pattern, span) for pattern in known), f"nobody says any more: {span}"


def test_every_unserved_feature_is_named() -> None:
    assert {feature.flag for feature in REFUSED} <= code_spans(TROUBLE_PAGE)


def test_every_reason_of_a_switch_is_explained() -> None:
    silent = {Reason.STEADY, Reason.DWELL}  # no switch
    assert {reason.value for reason in Reason if reason not in silent} <= code_spans(TROUBLE_PAGE)


# --- pages -----------------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """A page's headings as GitHub makes them targets of links."""
    headings = re.findall(r"^#+ (.*)$", read(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", read(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        name = str(target.relative_to(ROOT))
        assert target.exists() or name in EXPECTED_PAGES, link
        if anchor:
            assert anchor in anchors(name), link


def test_the_readme_links_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.-]+)\)", read("README.md")))
    assert {name for name in PAGES if name.startswith("docs/")} <= linked


@pytest.mark.parametrize("page", PAGES)
def test_json_on_a_page_is_json(page: str) -> None:
    for command in commands(page):
        for word in command.words:
            _, _, text = word.rpartition("SGLANG_ADAPTIVE_SPEC_CONFIG=")
            if text.startswith("{"):
                asked = json.loads(text)
                Settings(disable_batch_threshold=64).with_changes(asked.get("server_args", {}).get("adaptive_spec", {}))
