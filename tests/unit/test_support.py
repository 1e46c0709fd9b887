"""The support table says what the tests and the refusals say."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_adaptive_spec.releases.refusals_0_5_14 import REFUSED
from tests.support import AREAS, PAGE, ROOT, Unserved, features, page


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == page(features(), REFUSED), "write it anew: python -m tests.support"


def test_every_area_has_a_feature() -> None:
    assert {feature.area for feature in features()} == set(AREAS)


@pytest.mark.parametrize("unserved", REFUSED, ids=lambda one: one.flag)
def test_every_refusal_is_shown_by_a_test(unserved: Unserved) -> None:
    tests = [*(ROOT / "tests/unit").glob("test_*.py"), *(ROOT / "tests/contract").glob("test_*.py")]
    first = unserved.flag.split()[0] if unserved.flag.startswith("-") else unserved.flag
    # A flag, or the argument that it sets.
    words = (first, first.strip("-").replace("-", "_"))
    assert any(word in test.read_text() for test in tests if test != Path(__file__) for word in words)


def test_marks_of_other_forms_are_turned_away(tmp_path: Path) -> None:
    def found(mark: str) -> list[str]:
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / "test_one.py").write_text(f"@pytest.mark.supports({mark})\ndef test(): ...\n")
        return [feature.name for feature in features(tmp_path)]

    assert found("'Faults', 'b', 'a', since='0.1.0', note='but'") == ["a", "b"]
    for mark in (
        "'Faults', since='0.1.0'",
        "'Faults', 'a'",
        "'Faults', name, since='0.1.0'",
        "'Elsewhere', 'a', since='0.1.0'",
        "'Faults', 'a', since='0.1.0', until='0.2.0'",
    ):
        with pytest.raises(ValueError, match=r"tests/test_one\.py:1: "):
            found(mark)


def test_a_feature_is_marked_alike_everywhere(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name, note in (("test_one", "but"), ("test_two", "")):
        text = f"@pytest.mark.supports('Faults', 'a', since='0.1.0', note='{note}')\ndef test(): ...\n"
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    with pytest.raises(ValueError, match="marked elsewhere"):
        features(tmp_path)
