"""What this plugin does not serve on SGLang 0.5.14, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.errors import Refusal

_SERVED_ALGORITHMS = ("EAGLE", "EAGLE3")
# DeepSeek-V2 and V3, and what goes by their names: DeepSeek-R1, Kimi K2.
_SERVED_LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


@dataclass(frozen=True)
class Unserved:
    """One feature of SGLang that plain and speculative steps are not yet proven to share."""

    flag: str
    asked: Callable[[Any], bool]
    why: str
    remedy: str = "Drop the flag, or start without this plugin."

    def refusal(self) -> Refusal:
        """To raise where it was asked for."""
        return Refusal(f"{self.flag} is not served.", self.why, self.remedy)


NOT_PROVEN = "Switching modes under it has not been proven, and a wrong token is worse than a slow one."

UNSERVED = (
    Unserved(
        "--speculative-adaptive",
        lambda a: a.speculative_adaptive,
        "SGLang's own adaptive speculation changes the draft width under way; two controllers would fight "
        "over the same graphs.",
        "Drop --speculative-adaptive: this plugin takes its place.",
    ),
    Unserved(
        "--enable-multi-layer-eagle",
        lambda a: a.enable_multi_layer_eagle,
        "It runs another worker, with one draft KV cache a layer to keep true.",
    ),
    Unserved("--pp-size above 1", lambda a: a.pp_size > 1, "SGLang does not speculate with pipeline stages."),
    Unserved(
        "--enable-dp-attention",
        lambda a: a.enable_dp_attention,
        "Its ranks step together, so they would have to agree on the mode at every step.",
    ),
    Unserved("--ep-size above 1", lambda a: a.ep_size > 1, NOT_PROVEN),
    Unserved("--dp-size above 1", lambda a: a.dp_size > 1, NOT_PROVEN, "Start one server a replica."),
    Unserved(
        "--disaggregation-mode",
        lambda a: a.disaggregation_mode != "null",
        "Decode batches are built elsewhere there, past the point where the mode is decided.",
    ),
    Unserved("--enable-two-batch-overlap", lambda a: a.enable_two_batch_overlap, NOT_PROVEN),
    Unserved("--enable-pdmux", lambda a: a.enable_pdmux, NOT_PROVEN),
    Unserved("--enable-hisparse", lambda a: a.enable_hisparse, NOT_PROVEN),
    Unserved("--enable-hierarchical-cache", lambda a: a.enable_hierarchical_cache, NOT_PROVEN),
    Unserved("--enable-streaming-session", lambda a: a.enable_streaming_session, NOT_PROVEN),
    Unserved("--enable-lora", lambda a: bool(a.enable_lora or a.lora_paths), NOT_PROVEN),
    Unserved("--enable-torch-compile", lambda a: a.enable_torch_compile, NOT_PROVEN),
    Unserved("--enable-memory-saver", lambda a: a.enable_memory_saver, NOT_PROVEN),
    Unserved("--speculative-use-rejection-sampling", lambda a: a.speculative_use_rejection_sampling, NOT_PROVEN),
)


_OTHER_MODEL = "Start this model without the plugin."
_ONE_MODE = "Use --adaptive-spec-policy spec or plain, or drop the flag."

# Some of these models show it only once they are loaded.
SLIDING_WINDOW = Unserved(
    "a model with sliding-window layers", lambda a: a.get_model_config().is_hybrid_swa, NOT_PROVEN, _OTHER_MODEL
)
UNSERVED_MODELS = (
    Unserved(
        "a multimodal model",
        lambda a: a.get_model_config().is_multimodal and a.enable_multimodal is not False,
        NOT_PROVEN,
        _OTHER_MODEL,
    ),
    Unserved(
        "a model with multimodal rotary positions",
        lambda a: "mrope_section" in _rope(a.get_model_config().hf_text_config),
        NOT_PROVEN,
        _OTHER_MODEL,
    ),
    SLIDING_WINDOW,
    Unserved("an encoder-decoder model", lambda a: a.get_model_config().is_encoder_decoder, NOT_PROVEN, _OTHER_MODEL),
    Unserved(
        "a model with sparse attention (DSA: DeepSeek-V3.2, GLM-5)",
        lambda a: _is_sparse(a.get_model_config()),
        "Which tokens it attends to, and the cache of keys that this is chosen by, have not been proven to survive a "
        "change of mode.",
        _OTHER_MODEL,
    ),
    Unserved(
        "a model with latent attention (MLA) other than DeepSeek-V2 and V3",
        lambda a: _is_other_latent(a.get_model_config()),
        NOT_PROVEN,
        _OTHER_MODEL,
    ),
)
UNSERVED_WHERE_MODES_MIX = (
    Unserved(
        "--enable-return-hidden-states with EAGLE3 and a policy that switches",
        lambda a: a.enable_return_hidden_states and a.speculative_algorithm == "EAGLE3",
        "SGLang's EAGLE3 steps return the draft's auxiliary states, plain ones the model's last: one response would "
        "mix the two.",
        _ONE_MODE,
    ),
    Unserved(
        "--enable-custom-logit-processor with a policy that switches",
        lambda a: a.enable_custom_logit_processor,
        "SGLang's speculative steps call no custom processor, plain ones do: it would hold for some tokens of a "
        "response and not for others.",
        _ONE_MODE,
    ),
    Unserved(
        "--enable-deterministic-inference with a policy that switches",
        lambda a: a.enable_deterministic_inference,
        "Which mode a step runs in depends on the load, SGLang's speculative steps read no seed, and the two modes "
        "round differently: the same request would not give the same tokens again.",
        _ONE_MODE,
    ),
)
# What shows only once the model is loaded.
RECURRENT = Unserved(
    "a model with state-space or linear-attention layers",
    lambda _: True,
    "Its recurrent states would have to follow every change of mode, which is not built yet.",
    _OTHER_MODEL,
)
PLAN_STREAM = Unserved(
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
    lambda _: True,
    "It plans the draft's forwards on a stream of their own, unordered with what waits for the draft.",
    "Unset it, or start without this plugin.",
)
REFUSED = (*UNSERVED, *UNSERVED_MODELS, *UNSERVED_WHERE_MODES_MIX, RECURRENT, PLAN_STREAM)
"""All of it, for the support table."""


def _rope(text_config: Any) -> Any:
    """A model's scaling of rotary positions, wherever its configuration has it."""
    return getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}


def _is_sparse(model_config: Any) -> bool:
    return getattr(model_config.hf_text_config, "index_topk", None) is not None


def _is_other_latent(model_config: Any) -> bool:
    """Whether a model attends to latent states, and is none of those that it is proven on."""
    latent = model_config.attention_arch.name == "MLA" and not _is_sparse(model_config)
    return latent and model_config.hf_config.architectures[0] not in _SERVED_LATENT


def refuse_unserved(server_args: Any, settings: Settings, unserved: tuple[Unserved, ...] = UNSERVED) -> None:
    """Refuse what is not served.

    Args:
        unserved: The features of the release that are not.

    Raises:
        Refusal: naming every unserved flag, so that one start shows all of them.
    """
    algorithm = server_args.speculative_algorithm
    if algorithm.upper() not in _SERVED_ALGORITHMS:
        raise Refusal(
            f"--speculative-algorithm {algorithm} is not served.",
            "This plugin keeps the draft of EAGLE, EAGLE3 and MTP (NEXTN) true across plain steps; this kind "
            "needs another way that is not built yet.",
            "Use EAGLE, EAGLE3 or NEXTN, or start without this plugin.",
        )
    decode_graphs = server_args.cuda_graph_config.decode
    sizes = () if decode_graphs.backend == "disabled" else tuple(decode_graphs.bs or ())
    refuse_unreachable(settings, server_args.max_running_requests, sizes)
    found = [feature for feature in unserved if feature.asked(server_args)]
    found += [feature for feature in UNSERVED_MODELS if feature.asked(server_args)]
    if settings.policy not in ("spec", "plain"):
        found += [feature for feature in UNSERVED_WHERE_MODES_MIX if feature.asked(server_args)]
    if len(found) == 1:
        raise found[0].refusal()
    if found:
        raise Refusal(
            f"{', '.join(feature.flag for feature in found)} are not served.",
            " ".join(dict.fromkeys(feature.why for feature in found)),
            "Drop these flags, or start without this plugin.",
        )


def refuse_unreachable(settings: Settings, most_requests: int | None, spec_graph_sizes: tuple[int, ...] = ()) -> None:
    """Refuse a threshold that the number of running requests never exceeds, or that speculation can't follow.

    Args:
        settings: What was asked of the plugin.
        most_requests: Requests that may run at once; None where the memory is yet to decide.
        spec_graph_sizes: Batch sizes with speculative graphs; empty where that is not known, or graphs are off.

    Raises:
        Refusal: naming both numbers.
    """
    if settings.policy != "threshold":
        return
    threshold = settings.threshold_requests
    if most_requests is not None and threshold >= most_requests:
        raise Refusal(
            f"The threshold of {threshold} requests is out of reach: at most {most_requests} ever run.",
            "So the server would speculate always.",
            f"Give --max-running-requests above {threshold} if the memory allows it, or a lower threshold.",
        )
    if spec_graph_sizes and threshold > max(spec_graph_sizes):
        raise Refusal(
            f"The threshold of {threshold} requests is above the largest speculative graph, of "
            f"{max(spec_graph_sizes)}.",
            "Between the two the server would speculate without CUDA graphs, slower than either mode.",
            f"Start the server with a threshold of {threshold}, or with --cuda-graph-max-bs-decode of as many.",
        )
