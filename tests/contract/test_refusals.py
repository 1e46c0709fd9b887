"""Through SGLang's own parser and argument resolution: what starts, and what ends with one message."""

import json

import pytest

from sglang_adaptive_spec.releases.lock import locked_releases

from .conftest import write_config
from .starts import CONFIG, ENABLE, POLICY, THRESHOLD, M, N

# --- what starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "carried"),
    [
        (THRESHOLD, {"disable_batch_threshold": 8}),
        ((POLICY, "plain"), {"policy": "plain"}),
        ((POLICY, "spec"), {"policy": "spec"}),
        ((N, "8", M, "2"), {"disable_batch_threshold": 8, "resume_batch_threshold": 2}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_good_flags_start_and_reach_the_child_processes(probe, eagle3, flags, carried):
    outcome = probe.start(*eagle3, *flags)
    assert outcome.started
    assert json.loads(outcome.facts["config"]) == carried


def test_good_settings_in_the_environment_start(probe, eagle3):
    assert probe.start(*eagle3, env={CONFIG: '{"disable_batch_threshold": 8}'}).started


def test_without_speculation_and_flags_it_starts_silently(probe, model):
    outcome = probe.start(*model)
    assert outcome.started
    assert "adaptive-spec" not in outcome.stdout + outcome.stderr
    assert outcome.facts["config"] is None


@pytest.mark.supports(
    "Steps and scheduling", "`--enable-mixed-chunk`", since="0.1.0", note="SGLang switches it off with speculation"
)
def test_chunks_mixed_into_a_running_batch_are_switched_off_by_sglang(probe, eagle3):
    outcome = probe.start(*eagle3, *THRESHOLD, "--enable-mixed-chunk")
    assert outcome.started
    assert outcome.facts["enable_mixed_chunk"] is False


def test_the_algorithm_nextn_is_served(probe, model, draft):
    assert probe.start(*model, *draft, "--speculative-algorithm", "NEXTN", *THRESHOLD).started


def test_the_help_lists_our_flags_and_sglangs(probe):
    outcome = probe.start("--help")
    assert outcome.started
    assert N in outcome.stdout
    assert "--speculative-algorithm" in outcome.stdout


# --- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((POLICY, "threshold"), "No batch threshold was given"),
        ((N, "0"), "(disable_batch_threshold in JSON) is 0"),
        ((N, "-3"), "(disable_batch_threshold in JSON) is -3"),
        ((N, "8", M, "8"), "resume threshold (8) is not below"),
        ((N, "8", M, "9"), "resume threshold (9) is not below"),
        ((N, "8", M, "0"), "(resume_batch_threshold in JSON) is 0"),
        ((POLICY, "plain", *THRESHOLD), "together with the policy 'plain'"),
        ((POLICY, "spec", *THRESHOLD), "together with the policy 'spec'"),
        ((*THRESHOLD, "--adaptive-spec-min-dwell-steps", "0"), "(min_dwell_steps in JSON) is 0"),
    ],
    ids=lambda value: " ".join(value) or "no flags" if isinstance(value, tuple) else "",
)
def test_wrong_flags_end_with_one_message(probe, eagle3, flags, words):
    assert words in probe.start(*eagle3, *flags).refusal


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((N, "many"), "invalid int value: 'many'"),
        ((N, "8.5"), "invalid int value: '8.5'"),
        ((POLICY, "fast"), "invalid choice: 'fast' (choose from"),
    ],
    ids=" ".join,
)
def test_what_the_parser_can_not_read_is_turned_away_by_flag(probe, eagle3, flags, words):
    error = probe.start(*eagle3, *flags).usage_error
    assert f"argument {flags[0]}: {words}" in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", f"{CONFIG} can't be read"),
        ("[8]", f"{CONFIG} can't be read"),
        ('{"treshold": 8}', "Unknown setting 'treshold'"),
        ('{"disable_batch_threshold": "8"}', "(disable_batch_threshold in JSON) is '8'"),
        ('{"policy": "fast"}', "(policy in JSON) is 'fast'"),
    ],
)
def test_wrong_settings_in_the_environment_end_with_one_message(probe, eagle3, text, words):
    assert words in probe.start(*eagle3, env={CONFIG: text}).refusal


def test_flags_and_environment_together_are_refused(probe, eagle3):
    refusal = probe.start(*eagle3, *THRESHOLD, env={CONFIG: '{"policy": "plain"}'}).refusal
    assert f"{CONFIG} is set, and so are flags" in refusal


@pytest.mark.parametrize("settings", [{"flags": THRESHOLD}, {"env": {CONFIG: '{"policy": "plain"}'}}], ids=str)
def test_settings_without_speculation_are_refused(probe, model, settings):
    refusal = probe.start(*model, *settings.get("flags", ()), env=settings.get("env")).refusal
    assert "no speculative algorithm" in refusal
    assert "--speculative-algorithm" in refusal


# --- what is not served ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["STANDALONE", "DFLASH"])
def test_another_algorithm_is_refused(probe, model, draft, algorithm):
    """NGRAM is refused too, but SGLang's resolution demands CUDA for it: see the unit test."""
    refusal = probe.start(*model, *draft, "--speculative-algorithm", algorithm, *THRESHOLD).refusal
    assert f"--speculative-algorithm {algorithm} is not served" in refusal


@pytest.mark.parametrize(
    "flags",
    [
        "--speculative-adaptive",
        "--enable-multi-layer-eagle",
        "--pp-size 2",
        "--dp-size 2",
        "--disaggregation-mode decode",
        "--enable-two-batch-overlap",
        "--enable-pdmux",
        "--enable-hisparse",
        "--enable-hierarchical-cache",
        "--enable-streaming-session",
        "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj",
        "--enable-torch-compile",
        "--enable-memory-saver",
        "--speculative-use-rejection-sampling",
        "--enable-return-hidden-states",
        "--enable-custom-logit-processor",
    ],
)
def test_a_feature_not_yet_proven_is_refused_by_its_flag(probe, eagle3, flags):
    refusal = probe.start(*eagle3, *THRESHOLD, *flags.split()).refusal
    assert f"what: {flags.split()[0]}" in refusal
    assert "is not served." in refusal


LATENT = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 16)
# Beside what every tiny configuration says. Sparse attention: see the unit test, SGLang resolves it with CUDA alone.
MODELS = {
    "a model with latent attention (MLA) other than DeepSeek-V2 and V3": (
        "Glm4MoeLiteForCausalLM",
        {"model_type": "glm4_moe_lite", **LATENT},
    ),
    "a model with sliding-window layers": ("GptOssForCausalLM", {"model_type": "gpt_oss", "head_dim": 16}),
    "a model with multimodal rotary positions": (
        "Qwen2ForCausalLM",
        {"model_type": "qwen2", "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
    ),
    "a multimodal model, a model with multimodal rotary positions": (
        "Qwen2_5_VLForConditionalGeneration",
        {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    ),
    "a multimodal model, an encoder-decoder model": ("MllamaForConditionalGeneration", {"model_type": "mllama"}),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_kind_of_model_not_yet_proven_is_refused_before_it_is_loaded(probe, draft, tmp_path, what):
    architecture, more = MODELS[what]
    write_config(tmp_path, architecture, num_hidden_layers=8, **more)
    flags = ["--model-path", str(tmp_path), "--skip-tokenizer-init", *draft, "--speculative-algorithm", "EAGLE3"]
    refusal = probe.start(*flags, *THRESHOLD).refusal
    assert f"what: {what} {'are' if ',' in what else 'is'} not served." in refusal


def test_several_features_are_named_in_one_message(probe, eagle3):
    flags = "--dp-size 2 --tp-size 2 --enable-dp-attention --enable-torch-compile --speculative-adaptive"
    refusal = probe.start(*eagle3, *THRESHOLD, *flags.split()).refusal
    named = ["--speculative-adaptive", "--dp-size", "--enable-dp-attention", "--enable-torch-compile"]
    assert all(name in refusal for name in named)
    assert "are not served" in refusal


# --- releases --------------------------------------------------------------------------------------------


UNKNOWN = "SGLang rewrites the functions this plugin wraps"


@pytest.mark.parametrize("release", ["0.5.14.post1", "0.5.99"])
def test_a_release_that_nobody_proved_is_refused_with_the_served_ones(probe, eagle3, release):
    outcome = probe.start(*eagle3, *THRESHOLD, plugin="own", env={ENABLE: "1"}, sglang_version=release)
    assert f"SGLang {release} is installed" in outcome.refusal
    assert UNKNOWN in outcome.refusal
    assert f"Install a served release ({', '.join(locked_releases())})" in outcome.refusal


def test_a_value_that_is_neither_on_nor_off_is_refused(probe, eagle3):
    outcome = probe.start(*eagle3, plugin="own", env={ENABLE: "maybe"})
    assert f"{ENABLE}='maybe' is neither on nor off" in outcome.refusal
