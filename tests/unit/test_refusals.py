"""What is not served, on arguments that look like SGLang's after they were resolved."""

from types import SimpleNamespace

import pytest

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.releases.refusals_0_5_14 import refuse_unreachable, refuse_unserved
from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514

THRESHOLD = Settings(disable_batch_threshold=8)

OFF = (
    "speculative_adaptive",
    "enable_multi_layer_eagle",
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_pdmux",
    "enable_hisparse",
    "enable_hierarchical_cache",
    "enable_streaming_session",
    "enable_lora",
    "enable_torch_compile",
    "enable_memory_saver",
    "speculative_use_rejection_sampling",
    "enable_return_hidden_states",
    "enable_custom_logit_processor",
    "enable_deterministic_inference",
)
WHERE_MODES_MIX = OFF[-3:]


def latent(architecture: str, **more) -> dict:
    """What SGLang says of a model with latent attention."""
    return {
        "attention_arch": SimpleNamespace(name="MLA"),
        "hf_config": SimpleNamespace(architectures=[architecture]),
        "hf_text_config": SimpleNamespace(rope_scaling=None, **more),
    }


def arguments(algorithm: str = "EAGLE3", model: dict | None = None, **changed) -> SimpleNamespace:
    values = dict.fromkeys(OFF, False)
    values |= {
        "device": "cuda",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "lora_paths": None,
        "disaggregation_mode": "null",
    }
    values |= {"speculative_algorithm": algorithm, "enable_multimodal": None, "max_running_requests": 256}
    values["cuda_graph_config"] = SimpleNamespace(decode=SimpleNamespace(backend="full", bs=[1, 2, 64]))
    config = {"is_multimodal": False, "is_hybrid_swa": False, "is_encoder_decoder": False}
    config["hf_text_config"] = SimpleNamespace(rope_scaling=None)
    config = SimpleNamespace(**{**config, "attention_arch": SimpleNamespace(name="MHA"), **(model or {})})
    return SimpleNamespace(**{**values, **changed}, get_model_config=lambda: config)


def refusal_of(server_args, settings: Settings = THRESHOLD) -> Refusal:
    with pytest.raises(Refusal) as caught:
        refuse_unserved(server_args, settings)
    assert caught.value.why
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "eagle"])
def test_eagle_on_one_gpu_is_served(algorithm):
    refuse_unserved(arguments(algorithm), THRESHOLD)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "NGRAM", "DFLASH", "SOMEONE_ELSES"])
def test_another_algorithm_is_refused_with_the_served_ones(algorithm):
    refusal = refusal_of(arguments(algorithm))
    assert f"--speculative-algorithm {algorithm} is not served" in refusal.what
    assert "Use EAGLE, EAGLE3 or NEXTN" in refusal.remedy


@pytest.mark.parametrize(
    ("changed", "flag"),
    [({name: True}, "--" + name.replace("_", "-")) for name in OFF if name not in WHERE_MODES_MIX]
    + [
        ({"pp_size": 2}, "--pp-size above 1"),
        ({"dp_size": 2}, "--dp-size above 1"),
        ({"ep_size": 2}, "--ep-size above 1"),
        ({"lora_paths": ["adapter"]}, "--enable-lora"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
    ],
    ids=str,
)
def test_a_feature_not_yet_proven_is_refused_by_its_flag(changed, flag):
    assert refusal_of(arguments(**changed)).what == f"{flag} is not served."


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensor_parallel_ranks_are_served(device):
    refuse_unserved(arguments(tp_size=2, device=device), THRESHOLD)


def test_several_features_are_named_in_one_refusal():
    refusal = refusal_of(arguments(dp_size=2, enable_lora=True, enable_pdmux=True, model={"is_hybrid_swa": True}))
    assert refusal.what == (
        "--dp-size above 1, --enable-pdmux, --enable-lora, a model with sliding-window layers are not served."
    )
    # The reason that all of them share is given once.
    assert refusal.why.count("has not been proven, and") == 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"is_multimodal": True}, "a multimodal model"),
        ({"is_hybrid_swa": True}, "a model with sliding-window layers"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        (latent("LongcatFlashForCausalLM"), "a model with latent attention (MLA) other than DeepSeek-V2 and V3"),
        (
            latent("DeepseekV32ForCausalLM", index_topk=2048),
            "a model with sparse attention (DSA: DeepSeek-V3.2, GLM-5) is not served",
        ),
        (
            latent("DeepseekV3ForCausalLM", index_topk=2048),
            "a model with sparse attention (DSA: DeepSeek-V3.2, GLM-5) is not served",
        ),
        (
            {"hf_text_config": SimpleNamespace(rope_scaling={"mrope_section": [8, 4, 4]})},
            "a model with multimodal rotary positions",
        ),
        (
            {"hf_text_config": SimpleNamespace(rope_parameters={"mrope_section": [8, 4, 4]})},
            "a model with multimodal rotary positions",
        ),
    ],
    ids=str,
)
def test_a_kind_of_model_not_yet_proven_is_refused(model, words):
    assert words in refusal_of(arguments(model=model)).what


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_latent_attention_is_served_where_it_is_deepseeks(architecture):
    refuse_unserved(arguments("EAGLE", model=latent(architecture)), THRESHOLD)


def test_a_multimodal_model_is_served_as_a_text_model():
    refuse_unserved(arguments(model={"is_multimodal": True}, enable_multimodal=False), THRESHOLD)


@pytest.mark.parametrize("name", WHERE_MODES_MIX)
@pytest.mark.parametrize("settings", [THRESHOLD, Settings(policy="alternate"), Settings(policy="auto")], ids=str)
def test_what_one_mode_alone_knows_is_refused_where_modes_would_mix(name, settings):
    refusal = refusal_of(arguments(**{name: True}), settings)
    assert "--" + name.replace("_", "-") in refusal.what
    assert "--adaptive-spec-policy spec or plain" in refusal.remedy


@pytest.mark.parametrize("name", WHERE_MODES_MIX)
@pytest.mark.parametrize("policy", ["spec", "plain"])
def test_what_one_mode_alone_knows_is_served_in_one_mode(name, policy):
    refuse_unserved(arguments(**{name: True}), Settings(policy=policy))


def test_hidden_states_are_served_where_they_are_all_of_one_kind():
    refuse_unserved(arguments("EAGLE", enable_return_hidden_states=True), THRESHOLD)


@pytest.mark.parametrize(("most", "refused"), [(8, True), (9, False), (48, False), (None, False)])
def test_a_threshold_out_of_reach_is_refused(most, refused):
    if not refused:
        refuse_unserved(arguments(max_running_requests=most), Settings(disable_batch_threshold=8))
        return
    with pytest.raises(Refusal) as caught:
        refuse_unserved(arguments(max_running_requests=most), Settings(disable_batch_threshold=8))
    assert "out of reach" in caught.value.what
    assert "--max-running-requests above 8" in caught.value.remedy


@pytest.mark.parametrize("threshold", [64, 65, 200])
def test_a_threshold_above_the_speculative_graphs_is_refused(threshold):
    settings, sizes = Settings(disable_batch_threshold=threshold), (1, 2, 64)
    if threshold == 64:
        refuse_unreachable(settings, 256, sizes)
        return
    with pytest.raises(Refusal) as caught:
        refuse_unreachable(settings, 256, sizes)
    assert "above the largest speculative graph, of 64" in caught.value.what
    assert f"a threshold of {threshold}" in caught.value.remedy


def test_other_policies_have_no_threshold_to_reach():
    refuse_unreachable(Settings(policy="auto"), 1, (1,))


def worker(plan_stream: object = None, **of_the_runner: object) -> SimpleNamespace:
    runner = SimpleNamespace(**{"mambaish_config": None, "sliding_window_size": None, **of_the_runner})
    return SimpleNamespace(plan_stream=plan_stream, target_worker=SimpleNamespace(model_runner=runner))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"mambaish_config": object()}, "a model with state-space or linear-attention layers is not served."),
        ({"sliding_window_size": 64}, "a model with sliding-window layers is not served."),
        ({"plan_stream": object()}, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM is not served."),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_shows_once_the_model_is_loaded_is_refused_then(changed, what):
    with pytest.raises(Refusal) as caught:
        Sglang0514().check_worker(worker(**changed))
    assert caught.value.what == what
    Sglang0514().check_worker(worker())
