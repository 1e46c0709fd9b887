import json

import pytest

from sglang_adaptive_spec.calibration import Calibration, load
from sglang_adaptive_spec.crossover import as_text, contradict, most_spec_requests, pairs, spec_wins_up_to
from sglang_adaptive_spec.errors import Refusal

SETUP = {"device": "a GPU", "tp_size": 1}


def test_what_was_saved_is_loaded(tmp_path):
    saved = Calibration(SETUP, {"steps": []}, 64)
    saved.save(tmp_path / "costs.json")
    assert load(str(tmp_path / "costs.json")) == saved


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        '{"format": 0}',
        '{"format": 1}',
        '{"format": 1, "setup": 3, "costs": 4, "most_spec_requests": 5}',
    ],
    ids=repr,
)
def test_what_is_no_such_file_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Refusal) as caught:
        load(str(path))
    assert str(path) in caught.value.what
    assert caught.value.why
    assert "sglang_adaptive_spec.calibrate --save" in caught.value.remedy


def test_the_same_setup_is_accepted():
    Calibration(SETUP, {}, None).check(json.loads(json.dumps(SETUP)), "costs.json")


def test_everything_that_differs_is_named():
    with pytest.raises(Refusal) as caught:
        Calibration(SETUP, {}, None).check({"device": "another", "tp_size": 1, "new": 3}, "costs.json")
    assert "device: 'a GPU' there, 'another' here; new: None there, 3 here" in caught.value.what
    assert "tp_size" not in caught.value.what


# --- where the modes cross -------------------------------------------------------------------------------


def table(**ratios: float) -> list[dict]:
    """A plain step takes a second; a speculative one as many as given, by batch size (``r8=2.5``)."""
    return [
        {"mode": mode, "requests": int(name[1:]), "context_tokens": 1024, "seconds": seconds}
        for name, ratio in ratios.items()
        for mode, seconds in (("spec", ratio), ("plain", 1.0))
    ]


def test_sizes_measured_in_one_mode_only_are_left_out_and_the_longest_context_counts():
    rows = table(r4=2.0, r1=1.5)
    rows.append({"mode": "spec", "requests": 2, "context_tokens": 1024, "seconds": 9.0})
    rows += [{**row, "context_tokens": 4096, "seconds": 3 * row["seconds"]} for row in table(r4=1.0)]
    assert [(p.requests, p.context_tokens, p.break_even_accept_length) for p in pairs(rows)] == [
        (1, 1024, 1.5),
        (4, 4096, 1.0),
    ]


@pytest.mark.parametrize(("accept_length", "most"), [(1.2, 0), (1.6, 1), (2.0, 1), (2.5, 4), (4.0, 16)])
def test_speculation_wins_up_to_where_it_first_loses(accept_length, most):
    assert spec_wins_up_to(pairs(table(r1=1.5, r4=2.0, r16=3.0)), accept_length) == most


@pytest.mark.parametrize(
    ("ratios", "most"),
    [
        ({"r1": 1.5, "r4": 2.0, "r16": 3.0}, None),
        ({"r1": 1.5, "r4": 2.0, "r16": 5.0, "r32": 6.0}, 16),
        ({"r1": 1.5, "r4": 4.0, "r16": 3.9, "r32": 6.0}, 32),
        ({"r1": 4.5, "r4": 5.0}, 1),
        ({}, None),
    ],
    ids=str,
)
def test_speculation_keeps_the_sizes_where_it_could_ever_win(ratios, most):
    assert most_spec_requests(pairs(table(**ratios)), most_accepted_tokens=4) == most


def test_the_tables_say_it_in_words():
    text = as_text(pairs(table(r1=1.5, r4=2.0, r16=3.0)))
    assert "       4      1024   2000.00   1000.00                           2.00" in text
    assert "          1.2   no batch size" in text
    assert "          2.5   4 requests\n" in text
    assert "          4.0   16 requests, the largest batch measured" in text


@pytest.mark.parametrize(
    ("ratios", "noisy"),
    [
        ({"r1": 1.3, "r4": 1.2, "r16": 3.0, "r64": 2.0}, False),
        ({"r1": 0.9, "r4": 1.2}, True),  # verifying four tokens faster than decoding one
        ({"r1": 1.3, "r4": 10.0, "r16": 1.2}, True),
    ],
)
def test_times_that_contradict_each_other_are_said_to(ratios, noisy):
    measured = pairs(table(**ratios))
    assert contradict(measured) is noisy
    assert ("contradict" in as_text(measured)) is noisy
