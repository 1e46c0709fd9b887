"""Where SGLang asks for attention backends: by name, and for the draft model."""

from typing import TYPE_CHECKING, Any

from sglang_cpu_engine.attention.backend import MultiStepDraftBackend, ReferenceBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

# The names that SGLang falls back to on a CPU, and "triton", the only one of the names that allow a
# tree (topk > 1) together with pages (page_size > 1) which may be given on a machine without a GPU.
BACKEND_NAMES = ("torch_native", "intel_amx", "triton")


def create_backend(model_runner: "ModelRunner") -> ReferenceBackend:
    """Entry of SGLang's attention registry."""
    return ReferenceBackend(model_runner)


def create_draft_decode_backend(factory: Any) -> MultiStepDraftBackend | None:
    """`DraftBackendFactory.create_decode_backend`; a draft of one step runs no forward pass."""
    if factory.speculative_num_steps <= 1:
        return None
    return MultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_draft_extend_backend(factory: Any) -> ReferenceBackend:
    """`DraftBackendFactory.create_draft_extend_backend`."""
    return ReferenceBackend(factory.draft_model_runner)
