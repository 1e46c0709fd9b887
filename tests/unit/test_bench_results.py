"""Result files, tables and bounds."""

from __future__ import annotations

from math import log
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from bench import check, report
from bench.bounds import BOUNDS, AnyBound, Bound, EnvelopeBound, HostBound
from bench.results import RESULTS, Overall, Results, append_row, without_paths

HOST: dict[str, Any] = {
    "gpu": "NVIDIA H200, 143771 MiB, 580",
    "cpu": "some CPU",
    "commit": "abc",
    "plugin_digest": "d1",
    "packages": {"sglang": "0.5.14", "torch": "2.11.0"},
}


def header(
    started: str = "2026-01-01T00:00:00+00:00",
    gpu: str | None = HOST["gpu"],
    release: str = "0.5.14",
    **settings: Any,
) -> dict[str, Any]:
    wanted = {
        "model_shape": "llama-8b",
        "device": "cuda",
        "input_tokens": 256,
        "output_tokens": 128,
        "repeats": 2,
        "rounds": 1,
        "simulate_accept_length": 2.5,
    }
    return {
        "kind": "header",
        "tool": "bench.sweep",
        "started": started,
        "command": "python -m bench.sweep",
        "settings": wanted | settings,
        "host": HOST | {"gpu": gpu, "packages": HOST["packages"] | {"sglang": release}},
    }


def measurement(mode: str, rates: list[float], concurrency: int = 64, **changes: Any) -> dict[str, Any]:
    repeats = [{"tokens_per_s": rate, "step_ms": 1000 * concurrency / rate} for rate in rates]
    row = {"kind": "measurement", "backend": "fa3", "mode": mode, "round": 0, "concurrency": concurrency}
    return row | {"repeats": repeats} | changes


def test_rows_survive_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append_row(path, header())
    append_row(path, measurement("base", [100.0, 102.0]))
    with path.open("a") as file:
        file.write('{"kind": "measu')
    results = Results.read(path)
    assert results.tool == "bench.sweep"
    assert len(results.rows) == 2
    assert results.name == "r.jsonl"


def test_ratio_is_of_medians_over_the_turn_that_both_have() -> None:
    rows = [
        header(),
        measurement("base", [100.0, 110.0, 120.0]),
        measurement("base", [1000.0], round=1),
        measurement("ours-plain", [99.0, 104.5, 110.0]),
    ]
    ratio = Results(rows).ratio("fa3", "ours-plain", "base", 64)
    assert ratio is not None
    assert ratio.value == pytest.approx(104.5 / 110)
    assert ratio.low == pytest.approx(101.75 / 115)
    assert ratio.high == pytest.approx(107.25 / 105)
    assert ratio.repeats == 3
    assert Results(rows).ratio("triton", "ours-plain", "base", 64) is None
    assert Results(rows).ratio("fa3", "ours-plain", "base", 8) is None


@pytest.mark.parametrize("by_round", [False, True])
def test_turns_in_common_are_compared_one_by_one(by_round: bool) -> None:
    """A host that is slow for a turn is so for both; values of different turns say nothing of each other."""
    rows = [header(passes=3)]
    for number, (base, ours) in enumerate((([100.0, 102.0], [99.0]), ([50.0, 52.0], [51.0]), ([80.0], [72.0]))):
        rows += [measurement("base", base, **{"pass": number}), measurement("ours-plain", ours, **{"pass": number})]
    rows.append(measurement("base", [1000.0], **{"pass": 3}))  # in which the other was not measured
    rows = [row | {"round": row.get("pass", 0), "pass": 0} if by_round and "mode" in row else row for row in rows]
    ratio = Results(rows).ratio("fa3", "ours-plain", "base", 64)
    assert ratio is not None
    assert ratio.value == pytest.approx(99 / 101)
    assert ratio.low == pytest.approx((99 / 101 + 0.9) / 2)
    assert ratio.high == pytest.approx((99 / 101 + 1.0) / 2)
    assert str(ratio).endswith("3 turns)")
    assert "their median" in report.markdown(Results(rows))
    assert "their median" not in report.markdown(Results(rows[:3]))


def test_all_concurrencies_and_turns_have_a_ratio_together() -> None:
    """Of medians in the turns that both have, by step where two modes that speculate are compared."""
    rows = [header(passes=2, concurrencies=[8, 64])]
    for number, concurrency, spec, ours in ((0, 8, [100.0, 100.0], [90.0]), (1, 8, [100.0], [100.0])):
        turn = {"pass": number}
        rows += [measurement("spec", spec, concurrency, **turn), measurement("ours-spec", ours, concurrency, **turn)]
    rows += [measurement("spec", [100.0]), measurement("ours-spec", [90.0 / 0.81])]
    rows.append(measurement("spec", [1000.0], **{"pass": 1}))  # in which the other was not measured
    for row in rows[1:]:
        row["repeats"] = [repeat | {"tokens_per_s": 1.0} for repeat in row["repeats"]]
    overall = Results(rows).overall("fa3", "ours-spec", "spec", by_step=True)
    assert overall is not None
    assert (overall.ratio, overall.turns) == (pytest.approx(1.0), 3)
    assert overall.standard_error == pytest.approx(stdev(map(log, (0.9, 1.0, 1 / 0.9))) / 3**0.5)
    assert Results(rows).overall("fa3", "ours-spec", "spec", by_step=False) == Overall(1.0, 0.0, 3)
    assert Results(rows[:-3]).overall("fa3", "ours-spec", "spec") is None  # too few
    assert "| all |  |  | 1.000 ± 0.061 |" in report.markdown(Results(rows))


def test_a_backend_without_auto_has_no_column_for_it() -> None:
    rows = [header(), *(measurement(mode, [100.0]) for mode in ("base", "spec", "ours-auto"))]
    rows += [measurement(mode, [100.0], backend="triton") for mode in ("base", "spec", "ours-spec")]
    of_fa3, of_triton = report.markdown(Results(rows)).split("## Attention backend triton")
    for table in (of_fa3, of_triton):
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) == 1, table


def test_the_better_one_is_that_of_the_turns_which_all_have() -> None:
    rows = [header()]
    for number, rates in enumerate(({"base": 100, "spec": 90, "ours-auto": 99}, {"spec": 300, "ours-auto": 310})):
        rows += [measurement(mode, [float(rate)], **{"pass": number}) for mode, rate in rates.items()]
    ratio = Results(rows).ratio_to_better("fa3", "ours-auto", ("base", "spec"), 64)
    assert ratio is not None
    assert ratio.value == pytest.approx(0.99)


def test_repeats_of_all_passes_count_together() -> None:
    times = {"switch_ms": {"spec": [5.0], "plain": []}, "step_ms": {"spec": 4.0, "plain": 3.0}}
    rows = [header(passes=2)]
    for number, rate in enumerate((100.0, 104.0)):
        rows += [measurement("base", [rate], **{"pass": number}), measurement("ours-plain", [rate], **{"pass": number})]
        rows[-1]["repeats"][0]["plugin_times"] = times
    assert [v.figure and v.figure.repeats for v in verdicts(rows)] == [2]
    table = report.markdown(Results(rows))
    assert "2 repeats in each of 2 passes, 1 round(s)." in table
    assert "| 64 | 102 (3.9) | 102 (3.9) | 1.000 |" in table
    assert table.count("| ours-plain | 64 | spec | 5.0 (2) | 4.0 |") == 1


def test_ratio_by_step_ignores_how_many_tokens_were_accepted() -> None:
    slow_luck = {"tokens_per_s": 90.0, "step_ms": 5.0}
    good_luck = {"tokens_per_s": 100.0, "step_ms": 5.0}
    rows = [
        header(),
        measurement("spec", [], repeats=[good_luck, good_luck]),
        measurement("ours-spec", [], repeats=[slow_luck, slow_luck]),
    ]
    by_step = Results(rows).ratio("fa3", "ours-spec", "spec", 64, by_step=True)
    by_token = Results(rows).ratio("fa3", "ours-spec", "spec", 64)
    assert by_step is not None
    assert by_token is not None
    assert by_step.value == 1.0
    assert by_token.value == 0.9


def test_server_without_finite_numbers_does_not_count() -> None:
    broken = {"kind": "numbers", "backend": "fa3", "mode": "base", "round": 0, "finite_logprobs": False}
    rows = [header(), measurement("base", [100.0, 101.0]), measurement("spec", [100.0, 101.0]), broken]
    assert Results(rows).modes() == ["spec"]


def test_paths_are_cut() -> None:
    text = 'File "/opt/some/site-packages/sglang/srt/x.py", line 3: see https://example.org/a/b and 1/2'
    assert without_paths(text) == 'File "x.py", line 3: see https://example.org/a/b and 1/2'


def test_table_and_errors() -> None:
    rows = [
        header(),
        measurement("base", [100.0, 102.0]),
        measurement("ours-plain", [98.0, 99.0]),
        {"kind": "error", "backend": "fa3", "mode": "spec", "round": 0, "error": "it broke"},
    ]
    table = report.markdown(Results(rows))
    assert "| 64 | 101 (2.0) | 98 (1.0) | 0.975 |" in table
    assert "- fa3 spec: it broke" in table


@pytest.mark.parametrize(("others", "usual_ms"), [(["spec"], "20.0"), (["base"], "8.2"), ([], "8.2")])
def test_a_first_step_is_held_against_steps_of_the_same_batch(others: list[str], usual_ms: str) -> None:
    """The plugin's own median may be of batches long gone."""
    times = {"step_ms": {"spec": 8.2, "plain": None}, "switch_ms": {"spec": [19.6], "plain": []}}
    switched = measurement("ours-auto", [10_000.0])
    switched["repeats"] = [repeat | {"plugin_times": times} for repeat in switched["repeats"]]
    always = [measurement(mode, [3200.0, 3200.0]) for mode in others]
    assert f"| ours-auto | 64 | spec | 19.6 (1) | {usual_ms} |" in report.markdown(
        Results([header(), switched, *always])
    )


def test_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    modes = ("base", "spec", "ours-plain")
    rows = [header(), *(measurement(m, [90.0 * c, 91.0 * c], c) for m in modes for c in (1, 8, 64))]
    assert report.plot(Results(rows), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert not report.plot(Results([header()]), tmp_path / "none.png")


@pytest.mark.parametrize(("base", "spec", "ratio"), [(100.0, 80.0, 0.9), (80.0, 100.0, 0.9), (80.0, None, None)])
def test_the_envelope_is_the_faster_of_two(base: float, spec: float | None, ratio: float | None) -> None:
    bound = EnvelopeBound("D", "ours-auto", "base", 0.97, ("fa3",), (64,), accept_length=2.5)
    rows = [header(), measurement("base", [base, base]), measurement("ours-auto", [90.0, 90.0])]
    if spec is not None:
        rows.append(measurement("spec", [spec, spec]))
    figure = bound.figure(Results(rows), ("fa3", 64))
    assert (figure and figure.value) == ratio
    assert bound.places == (("fa3", 64),)


def test_the_envelope_leaves_the_luck_of_simulated_acceptance_out() -> None:
    bound = EnvelopeBound("D", "ours-auto", "base", 0.97, ("fa3",), (64,), accept_length=2.5)
    rows = [header(), measurement("base", [80.0, 80.0])]
    for mode, lucky in (("spec", 104.0), ("ours-auto", 96.0)):
        rows.append(measurement(mode, [lucky, lucky]))
        for repeat in rows[-1]["repeats"]:
            repeat["expected_tokens_per_s"] = 100.0
    figure = bound.figure(Results(rows), ("fa3", 64))
    assert figure is not None
    assert figure.value == 1.0


BOUND = Bound("A", "ours-plain", "base", 0.97, ("fa3",), (64,))


def verdicts(*files: list[dict[str, Any]], bound: AnyBound = BOUND) -> list[check.Verdict]:
    return list(check.judge([bound], [Results(rows, f"{n}.jsonl") for n, rows in enumerate(files)]))


def pair(ratio: float, **head: Any) -> list[dict[str, Any]]:
    rates = [100 * ratio, 100 * ratio]
    return [header(**head), measurement("base", [100.0, 100.0]), measurement("ours-plain", rates)]


def test_last_measured_counts() -> None:
    old, new = pair(0.99, started="2026-01-01T00:00:00+00:00"), pair(0.95, started="2026-02-01T00:00:00+00:00")
    assert [v.word for v in verdicts(old)] == ["ok"]
    assert [v.word for v in verdicts(new, old)] == ["MISSED"]
    (verdict,) = verdicts(old, new)
    assert "MISSED" in verdict.line("d1")
    assert "0.9500" in verdict.line("d1")
    assert "another plugin" in verdict.line("d2")


def test_bound_itself_is_met_and_a_strict_one_is_not() -> None:
    assert BOUND.met(0.97)
    assert not BOUND.met(0.9699)
    strict = Bound("B", "ours-threshold", "upstream-zero", 1.0, ("fa3",), (64,), strict=True)
    assert not strict.met(1.0)
    assert strict.met(1.001)


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        ([99.0, 99.0], "ok"),
        # A hiccup in the time that is taken off makes the rest look fast.
        ([130.0, 96.0], "UNSETTLED"),
        ([99.0, 80.0], "UNSETTLED"),
        ([96.0, 95.0], "MISSED"),
        # Enough repeats outvote one outlier.
        ([99.0, 98.0, 130.0, 99.0, 98.0], "ok"),
        ([96.0, 96.0, 130.0, 95.0, 95.0], "MISSED"),
    ],
    ids=str,
)
def test_a_verdict_may_not_hang_on_one_repeat(ours: list[float], word: str) -> None:
    rows = [header(), measurement("base", [100.0] * len(ours)), measurement("ours-plain", ours)]
    assert [v.word for v in verdicts(rows)] == [word]


@pytest.mark.parametrize(
    "head",
    [
        {"gpu": None},
        {"gpu": "NVIDIA A100"},
        {"model_shape": "tiny"},
        {"device": "cpu"},
        {"release": "0.5.23"},
    ],
    ids=str,
)
def test_other_machines_shapes_and_releases_do_not_count(head: dict[str, Any]) -> None:
    assert [v.figure for v in verdicts(pair(0.99, **head))] == [None]


def test_a_bound_on_another_release_says_so() -> None:
    bound = Bound("E", "ours-plain", "base", 0.97, ("fa3",), (64,), release="0.5.23")
    assert bound.name == "ours-plain / base >= 0.97, SGLang 0.5.23"
    assert [v.word for v in verdicts(pair(0.99), pair(0.98, release="0.5.23"), bound=bound)] == ["ok"]
    assert [v.figure for v in verdicts(pair(0.99), bound=bound)] == [None]


def test_sides_of_two_files_do_not_make_a_pair() -> None:
    base, ours = pair(0.99), pair(0.99)
    assert [v.figure for v in verdicts(base[:2], [ours[0], ours[2]])] == [None]


def test_one_repeat_is_not_enough() -> None:
    rows = [header(), measurement("base", [100.0]), measurement("ours-plain", [100.0])]
    assert [v.figure for v in verdicts(rows)] == [None]


def test_accept_length_has_to_be_the_bounds() -> None:
    rows = [header(), measurement("spec", [100.0] * 2), measurement("ours-spec", [100.0] * 2)]
    for accept_length, measured in ((2.5, True), (1.6, False)):
        bound = Bound("C", "ours-spec", "spec", 0.99, ("fa3",), (64,), by_step=True, accept_length=accept_length)
        assert [v.figure is not None for v in verdicts(rows, bound=bound)] == [measured]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = ["--group", "A", "--results", str(tmp_path)]
    assert check.main(group) == 1
    assert "never" in capsys.readouterr().out
    for row in _all_of_group_a(0.999):
        append_row(tmp_path / "all.jsonl", row)
    append_row(tmp_path / "other.jsonl", {"kind": "header", "tool": "something else"})
    assert check.main(group) == 0
    assert "12 met, 0 missed, 0 unsettled, 0 never measured" in capsys.readouterr().out
    for row in _all_of_group_a(0.96):
        append_row(tmp_path / "newer.jsonl", row | ({"started": "2027"} if row["kind"] == "header" else {}))
    assert check.main(group) == 1
    assert "0 met, 12 missed" in capsys.readouterr().out


def _all_of_group_a(ratio: float) -> list[dict[str, Any]]:
    rows = [header()]
    for backend in ("fa3", "triton"):
        for concurrency in (8, 64, 256):
            for mode in ("base", "spec", "ours-plain", "ours-spec"):
                rate = 100.0 * (ratio if mode.startswith("ours") else 1.0)
                rows.append(measurement(mode, [rate, rate], concurrency, backend=backend))
    return rows


def test_bounds_name_modes_that_exist() -> None:
    from bench.modes import MODES

    for bound in BOUNDS:
        if not isinstance(bound, Bound):
            continue
        assert {bound.mode, bound.reference} <= MODES.keys()
        assert min(bound.concurrencies) >= MODES[bound.mode].least_concurrency


@pytest.mark.parametrize(
    ("added_us", "word"),
    [([11.0, 12.0, 40.0], "UNSETTLED"), ([11.0, 12.0, 14.0], "ok"), ([16.0, 17.0], "MISSED"), ([1.0], "never")],
    ids=str,
)
def test_host_time_is_held_against_its_bound(added_us: list[float], word: str) -> None:
    bound = HostBound("C", ("spec-step",), 15.0, (1,))
    repeats = [{"added_us": value} for value in added_us]
    row = {"kind": "measurement", "case": "spec-step", "batch_size": 1, "repeats": repeats}
    rows = [header(gpu=None) | {"tool": "bench.overhead"}, row]
    (verdict,) = verdicts(rows, bound=bound)
    assert verdict.word == word
    if word == "ok":
        assert "12.00 us (11.50 to 13.00, 3 repeats)" in verdict.line("d1")


def test_a_file_is_written_anew_by_the_tool_that_made_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted(RESULTS.glob("h200-triton-*.jsonl")):
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        assert report.rewrite(copy)
        assert copy.with_suffix(".md").read_text() in capsys.readouterr().out
    copy.write_text('{"kind": "header", "tool": "bench.tokens_gpu"}\n')
    assert not report.rewrite(copy)
    assert "has no table" in capsys.readouterr().out
