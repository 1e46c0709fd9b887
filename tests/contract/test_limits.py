"""How many requests may run, and for which batches there are graphs, in the arguments as SGLang resolves them."""

import json

import pytest

from sglang_adaptive_spec.calibration import Calibration

from .conftest import write_config
from .starts import POLICY, N

DRY = "--adaptive-spec-dry-run"
NOTE = "Max running requests is reset to 48"


@pytest.mark.parametrize("flags", [(), (N, "8"), (POLICY, "plain")], ids=" ".join)
def test_as_many_requests_may_run_as_without_speculation(probe, model, eagle3, flags):
    without = probe.start(*model)
    outcome = probe.start(*eagle3, *flags)
    assert outcome.started
    assert without.facts["max_running_requests"] is None
    assert outcome.facts["max_running_requests"] is None
    assert NOTE not in outcome.stderr + outcome.stdout


@pytest.mark.parametrize("flags", [(POLICY, "spec"), (DRY,), (N, "8", DRY)], ids=" ".join)
def test_where_sglang_runs_every_step_the_limit_is_sglangs(probe, eagle3, flags):
    outcome = probe.start(*eagle3, *flags)
    assert outcome.started
    assert outcome.facts["max_running_requests"] == 48
    assert NOTE in outcome.stderr + outcome.stdout
    assert outcome.facts["plain_graph_sizes"] is None


def test_what_the_user_says_holds(probe, eagle3):
    assert probe.start(*eagle3, "--max-running-requests", "17").facts["max_running_requests"] == 17


def test_without_the_plugin_the_limit_is_sglangs(probe, eagle3):
    assert probe.start(*eagle3, plugin="off").facts["max_running_requests"] == 48


def test_speculation_has_graphs_up_to_the_threshold_and_plain_steps_as_without_it(probe, eagle3):
    most = ("--torch-compile-max-bs", "64")
    everything = probe.start(*eagle3, *most, POLICY, "spec").facts["spec_graph_sizes"]
    facts = probe.start(*eagle3, *most, N, "11").facts
    assert max(everything) == 64
    assert facts["spec_graph_sizes"] == [size for size in everything if size <= 11]
    assert facts["plain_graph_sizes"] == [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]


def test_the_policy_that_measures_has_graphs_for_all(probe, eagle3):
    everything = probe.start(*eagle3, POLICY, "spec").facts["spec_graph_sizes"]
    facts = probe.start(*eagle3).facts
    assert facts["spec_graph_sizes"] == everything
    assert max(facts["plain_graph_sizes"]) == max(everything)


def test_saved_step_times_say_how_far_speculation_has_graphs(probe, eagle3, tmp_path):
    path = tmp_path / "costs.json"
    Calibration({}, {"steps": []}, 6).save(str(path))
    assert max(probe.start(*eagle3, "--adaptive-spec-costs", str(path)).facts["spec_graph_sizes"]) == 6
    path.write_text(json.dumps({"format": 2}))
    assert "can't be read" in probe.start(*eagle3, "--adaptive-spec-costs", str(path)).refusal


def test_graph_sizes_that_the_user_names_hold(probe, eagle3):
    facts = probe.start(*eagle3, N, "8", "--cuda-graph-bs-decode", "1", "16").facts
    assert facts["spec_graph_sizes"] == [1, 16]
    assert facts["plain_graph_sizes"] is None


@pytest.mark.parametrize(
    ("architecture", "flags", "workspace_mib", "largest_graph"),
    [
        ("LlamaForCausalLM", (), 579, 256),
        ("LlamaForCausalLM", (POLICY, "spec"), None, 256),  # where 48 requests run
        ("LlamaForCausalLM", (N, "64"), None, 64),
        ("Qwen2ForCausalLM", (), 579, 256),
    ],
    ids=str,
)
def test_speculative_graphs_have_room_on_flashinfer(
    probe, eagle3, tmp_path, architecture, flags, workspace_mib, largest_graph
):
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    write_config(tmp_path, architecture, num_hidden_layers=2, **shape)
    # On a CPU the target's backend is another whatever is asked for; the draft's is not looked at.
    backend = ("--speculative-draft-attention-backend", "flashinfer")
    graphs = ("--cuda-graph-backend-decode", "full", "--torch-compile-max-bs", "256")
    outcome = probe.start(*eagle3, "--model-path", str(tmp_path), *backend, *graphs, *flags)
    assert outcome.started
    workspace = outcome.facts["flashinfer_workspace"]
    assert workspace == (workspace_mib and str(workspace_mib * 2**20))
    assert max(outcome.facts["spec_graph_sizes"]) == largest_graph
    assert max(outcome.facts["plain_graph_sizes"] or [256]) == 256
