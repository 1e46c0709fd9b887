"""Room for flashinfer's plans of speculative graphs, on arguments that look like SGLang's after they were resolved."""

import logging
import os
from types import SimpleNamespace

import pytest

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.config import CONFIG_VARIABLE
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.releases import flashinfer_workspace
from sglang_adaptive_spec.releases.flashinfer_workspace import (
    DEFAULT_BYTES,
    MIB,
    WORKSPACE_VARIABLE,
    Heads,
    plan_bytes,
)
from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514
from sglang_adaptive_spec.releases.sglang_0_5_17 import Sglang0517

LLAMA_8B = Heads(query=32, kv=8, dim=128)
SIZES = [1, 2, 4, 8, 64, 128, 192, 224, 256]
NEEDED = "579"  # MiB, for 256 requests of 4 draft tokens


@pytest.fixture(autouse=True)
def unset(monkeypatch, caplog):
    # SGLang, once imported by other tests, may have set another one.
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(flashinfer_workspace, "_given_here", None)
    # Set first, so that whatever the code under test writes is undone as well.
    monkeypatch.setenv(WORKSPACE_VARIABLE, "")
    monkeypatch.delenv(WORKSPACE_VARIABLE)


def server(architecture: str = "LlamaForCausalLM", attention: str = "MHA", locked: bool = False, **changed):
    """Resolved arguments of a server that speculates on flashinfer, with graphs for up to 256 requests."""
    model = SimpleNamespace(
        attention_arch=SimpleNamespace(name=attention),
        hf_config=SimpleNamespace(architectures=[architecture]),
        head_dim=128,
        get_num_attention_heads=lambda ranks: 32 // ranks,
        get_num_kv_heads=lambda ranks: max(1, 8 // ranks),
    )
    values = {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_draft_tokens": 4,
        "speculative_eagle_topk": 1,
        "speculative_attention_mode": "prefill",
        "speculative_draft_attention_backend": None,
        "attention_backend": "flashinfer",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "enable_deterministic_inference": False,
        "max_running_requests": None,
        "tp_size": 1,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full", bs=list(SIZES), max_bs=256)),
        "_cuda_graph_config_locked": {("decode", "bs")} if locked else set(),
        "_generate_decode_cuda_graph_batch_sizes": lambda most: list(SIZES),
    }
    return SimpleNamespace(**{**values, **changed}, get_model_config=lambda: model)


def take_limits(arguments, release=Sglang0514) -> str | None:
    """What becomes of the workspace once a server's limits are taken: its variable."""
    Plugin(release(), "1.0").take_limits(arguments)
    return os.environ.get(WORKSPACE_VARIABLE)


# --- the formula -----------------------------------------------------------------------------------------


def test_a_verify_step_needs_what_flashinfer_asked_for_when_it_failed():
    values, sums = 601_882_624, 601_882_624 // 128
    assert plan_bytes(256, 4, LLAMA_8B) == values + sums
    assert f"{-(-(values + sums) // MIB)}" == NEEDED


@pytest.mark.parametrize(
    ("requests", "draft_tokens", "heads", "tiles", "tile"),
    [
        (1, 4, LLAMA_8B, 1, 16),
        (1, 5, LLAMA_8B, 1, 64),
        (48, 4, LLAMA_8B, 6 + 47, 128),
        (48, 4, Heads(32, 8, 256), 12 + 47, 64),
        (48, 4, Heads(8, 8, 128), 2 + 47, 128),
        (48, 1, Heads(8, 8, 128), 3 + 47, 16),
    ],
    ids=str,
)
def test_tiles_are_as_high_as_the_longest_request_may_need(requests, draft_tokens, heads, tiles, tile):
    assert plan_bytes(requests, draft_tokens, heads) == heads.query * tiles * tile * (heads.dim + 1) * 4


def test_sglangs_own_limit_is_within_its_default():
    assert plan_bytes(48, 4, LLAMA_8B) < DEFAULT_BYTES < plan_bytes(256, 4, LLAMA_8B)


# --- a larger workspace ----------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [Sglang0514, Sglang0517])
def test_the_workspace_holds_the_largest_speculative_graph(release, caplog):
    arguments = server()
    assert take_limits(arguments, release) == str(int(NEEDED) * MIB)
    assert arguments.cuda_graph_config.decode.bs == SIZES
    (record,) = caplog.records
    assert f"from 384 to {NEEDED} MiB, or speculative graphs of 256 requests" in record.getMessage()


@pytest.mark.parametrize("config", ['{"policy": "plain"}', '{"policy": "spec"}', '{"dry_run": true}'])
def test_it_does_under_any_policy_since_sglang_captures_the_same_graphs(config, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    assert take_limits(server()) == str(int(NEEDED) * MIB)


@pytest.mark.parametrize("given", ["1", str(2**31), ""])
def test_what_the_user_has_set_is_left_alone(given, monkeypatch, caplog):
    monkeypatch.setenv(WORKSPACE_VARIABLE, given)
    assert take_limits(server()) == given
    assert caplog.text == ""


def test_a_second_engine_in_the_process_gets_what_it_needs():
    first = take_limits(server(cuda_graph_config=graphs([1, 192])))
    second = take_limits(server())
    assert DEFAULT_BYTES < int(first) < int(second) == int(NEEDED) * MIB


def graphs(sizes: list[int] | None, backend: str = "full") -> SimpleNamespace:
    return SimpleNamespace(decode=SimpleNamespace(backend=backend, bs=sizes, max_bs=max(sizes or [1])))


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_backend": "fa3"},
        {"prefill_attention_backend": "fa3"},
        {"attention": "MLA"},
        {"cuda_graph_config": graphs(None)},
        {"cuda_graph_config": graphs([256], "disabled")},
        {"cuda_graph_config": graphs([1, 128])},
        {"max_running_requests": 48},
        {"tp_size": 2},
        {"speculative_algorithm": None},
    ],
    ids=str,
)
def test_the_workspace_stays_where_it_is_enough_or_not_used(changed, caplog):
    assert take_limits(server(**changed)) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_backend": "fa3", "prefill_attention_backend": "flashinfer"},
        {"attention_backend": "fa3", "speculative_draft_attention_backend": "flashinfer"},
        {"prefill_attention_backend": "fa3", "speculative_attention_mode": "decode"},
        {"max_running_requests": 1000},
    ],
    ids=str,
)
def test_it_goes_by_the_backend_that_verifies_and_the_drafts(changed):
    assert take_limits(server(**changed)) == str(int(NEEDED) * MIB)


def test_a_wide_tree_needs_more_to_draft_than_to_verify():
    wide = server(speculative_eagle_topk=16, max_running_requests=100)
    assert take_limits(wide) == str(-(-plan_bytes(1600, 1, LLAMA_8B) // MIB) * MIB)


@pytest.mark.parametrize("backend", ["prefill_attention_backend", "decode_attention_backend", None])
def test_sglang_sets_the_size_itself_only_where_the_target_has_the_backend(backend):
    changed = {"attention_backend": "fa3", "speculative_draft_attention_backend": "flashinfer"}
    if backend is not None:
        changed[backend] = "flashinfer"
    arguments = server("Qwen2ForCausalLM", **changed)
    assert take_limits(arguments) == (str(int(NEEDED) * MIB) if backend is None else None)
    assert max(arguments.cuda_graph_config.decode.bs) == (256 if backend is None else 224)


def test_requests_that_may_run_and_thresholds_bound_it(monkeypatch):
    fewer = server(max_running_requests=200)
    assert take_limits(fewer) == str(-(-plan_bytes(200, 4, LLAMA_8B) // MIB) * MIB)
    monkeypatch.delenv(WORKSPACE_VARIABLE)
    monkeypatch.setenv(CONFIG_VARIABLE, '{"disable_batch_threshold": 64}')
    assert take_limits(server()) is None


# --- where SGLang sets the size itself ------------------------------------------------------------------

FIXED = sorted(flashinfer_workspace.FIXED_FOR)


@pytest.mark.parametrize("architecture", FIXED)
def test_graphs_that_do_not_fit_are_left_out_and_plain_steps_keep_theirs(architecture, caplog):
    arguments = server(architecture)
    assert take_limits(arguments) is None
    assert arguments.cuda_graph_config.decode.bs == [size for size in SIZES if size < 256]
    assert arguments.adaptive_spec_plain_graph_sizes == SIZES
    (record,) = caplog.records
    assert "no speculative graphs of more than 226 requests" in record.getMessage()


def test_whatever_the_user_has_set_sglang_sets_it_anew(monkeypatch):
    monkeypatch.setenv(WORKSPACE_VARIABLE, str(2**31))
    arguments = server(FIXED[0])
    take_limits(arguments)
    assert max(arguments.cuda_graph_config.decode.bs) == 224


@pytest.mark.parametrize(
    ("release", "locked", "config"),
    [
        (Sglang0517, False, "{}"),
        (Sglang0514, True, "{}"),
        (Sglang0514, False, '{"disable_batch_threshold": 250}'),
        (Sglang0514, False, '{"policy": "spec"}'),
    ],
    ids=["read-only arguments", "sizes of the user", "a threshold of the user", "policy spec"],
)
def test_graphs_that_do_not_fit_and_can_not_be_left_out_are_refused(release, locked, config, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, config)
    with pytest.raises(Refusal) as caught:
        take_limits(server(FIXED[0], locked=locked), release)
    assert caught.value.what == "flashinfer's workspace has no room for speculative graphs of more than 226 requests."
    assert "SGLang sets it to 512 MiB" in caught.value.why
    assert "--max-running-requests 226 " in caught.value.remedy


def test_the_refusals_number_fits(caplog):
    take_limits(server(FIXED[0], max_running_requests=226), Sglang0517)
    assert caplog.text == ""


def test_under_deterministic_inference_the_size_is_enough_for_twice_as_many(monkeypatch, caplog):
    monkeypatch.setenv(CONFIG_VARIABLE, '{"policy": "plain"}')
    arguments = server(FIXED[0], enable_deterministic_inference=True, cuda_graph_config=graphs([1, 512]))
    assert take_limits(arguments, Sglang0517) is None
    assert caplog.text == ""
