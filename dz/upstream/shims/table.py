"""The list of shims. Each line is data: what it stands for, which releases had it, why it is safe.

`releases` are those of transformers unless another package is named, read off the published 4.36, 4.41, 4.46, 4.51,
4.57, 5.17 and 5.24: the first and the last of these that had it."""

from __future__ import annotations

from dz.upstream.shims.packages import PACKAGES
from dz.upstream.shims.shim import Attribute, Mend, Shim, Symbol

_MASKS = "transformers.modeling_attn_mask_utils"
_CACHE = "transformers.cache_utils:Cache"
_CONFIG = "transformers.configuration_utils:PreTrainedConfig"
_UTILS = "transformers.utils"
_IMPORTS = "transformers.utils.import_utils"
_FAST = "transformers.image_processing_utils_fast"


def _symbols(make: str, *names: str) -> tuple[Symbol, ...]:
    """Several symbols (module.name) with one maker."""
    split = [n.rpartition(".") for n in names]
    return tuple(Symbol(module=m, name=n, make=make) for m, _, n in split)


CORE = (
    Shim(
        name="mask-helpers",
        stands_for="the module of attention-mask helpers (causal and padding masks as additive [B, 1, Q, K])",
        releases="4.36 to 5.17",
        safe="own code with the old meaning; the explicit mask is given also where the old helper left it out",
        symbols=(
            Symbol(module=_MASKS, name="AttentionMaskConverter", make="masks:make_converter"),
            Symbol(module=_MASKS, name="_prepare_4d_causal_attention_mask", make="masks:make_causal"),
            Symbol(module=_MASKS, name="_prepare_4d_causal_attention_mask_for_sdpa", make="masks:make_causal_sdpa"),
            Symbol(module=_MASKS, name="_prepare_4d_attention_mask", make="masks:make_padding"),
            Symbol(module=_MASKS, name="_prepare_4d_attention_mask_for_sdpa", make="masks:make_padding"),
        ),
    ),
    Shim(
        name="mask-arguments",
        stands_for="the mask functions' arguments input_embeds and cache_position",
        releases="4.57",
        safe="one is only renamed; the other said where the cache ends, which the cache says itself",
        symbols=tuple(
            Symbol(
                module="transformers.masking_utils", name=name, make="masks:make_mask_function",
                changed="input_embeds", mentions=("input_embeds", "cache_position"),
            )
            for name in (
                "create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask",
                "create_bidirectional_mask", "create_masks_for_generate",
            )
        ),
    ),
    Shim(
        name="cache-length",
        stands_for="Cache.get_max_length, Cache.get_max_cache_shape: the bound of a cache, None without one",
        releases="get_max_length 4.36 to 4.46, get_max_cache_shape 4.46 to 5.17",
        safe="today's answer of -1 for no bound becomes the None that the code tests for; bounds stay",
        attributes=(
            Attribute(cls=_CACHE, name="get_max_length", make="caches:max_length", always=True),
            Attribute(cls=_CACHE, name="get_max_cache_shape", make="caches:max_length", always=True),
        ),
    ),
    Shim(
        name="cache-usable-length",
        stands_for="Cache.get_usable_length: what a layer keeps when more comes",
        releases="4.36 to 4.51",
        safe="for a growing cache it is the length; for a bounded one the same subtraction as before",
        attributes=(Attribute(cls=_CACHE, name="get_usable_length", make="caches:usable_length"),),
    ),
    Shim(
        name="cache-seen-tokens",
        stands_for="Cache.seen_tokens and _seen_tokens: how many tokens went in",
        releases="4.36 to 4.51",
        safe="both were the length of the first layer",
        attributes=(
            Attribute(cls=_CACHE, name="seen_tokens", make="caches:seen_tokens", kind="property"),
            Attribute(cls=_CACHE, name="_seen_tokens", make="caches:seen_tokens", kind="property"),
        ),
    ),
    Shim(
        name="cache-tensors",
        stands_for="Cache.key_cache, Cache.value_cache and cache[layer]: the tensors of each layer",
        releases="4.36 to 4.51",
        safe="the layers' own tensors, to read; code that writes into them is refused, since it would be lost",
        attributes=(
            Attribute(cls=_CACHE, name="key_cache", make="caches:keys", kind="property"),
            Attribute(cls=_CACHE, name="value_cache", make="caches:values", kind="property"),
            Attribute(cls=_CACHE, name="__getitem__", make="caches:pair"),
        ),
    ),
    Shim(
        name="cache-tuples",
        stands_for="DynamicCache.from_legacy_cache and to_legacy_cache: caches as tuples of pairs",
        releases="4.36 to 4.57",
        safe="the pairs hold the layers' own tensors; a cache that is one already stays as it is",
        attributes=(
            Attribute(
                cls="transformers.cache_utils:DynamicCache",
                name="from_legacy_cache",
                make="caches:from_legacy",
                kind="class method",
            ),
            Attribute(cls=_CACHE, name="to_legacy_cache", make="caches:to_legacy"),
        ),
    ),
    Shim(
        name="cache-classes",
        stands_for="cache classes for one kind of layers",
        releases="4.36 to 4.57",
        safe="for isinstance alone, which no cache is then; code that makes one is told that it cannot",
        symbols=_symbols(
            "caches:make_named",
            "transformers.cache_utils.HybridCache",
            "transformers.cache_utils.HybridChunkedCache",
            "transformers.cache_utils.SlidingWindowCache",
            "transformers.cache_utils.SinkCache",
            "transformers.cache_utils.MambaCache",
            "transformers.HybridCache",
            "transformers.SlidingWindowCache",
            "transformers.SinkCache",
        ),
    ),
    Shim(
        name="full-caches",
        stands_for="a growing cache that keeps every key, with windows in the masks of the code alone",
        releases="4.36 to 4.51",
        safe="the configuration says full_attention for each layer, so that today's cache drops nothing",
        mends=(Mend(make="classes:full_layers", sees="windows_in_masks", on="configuration"),),
    ),
    Shim(
        name="rope-default",
        stands_for='ROPE_INIT_FUNCTIONS["default"]: the rope without scaling',
        releases="4.46 to 4.57",
        safe="the same formula; only this code's view of the table gets the entry",
        symbols=(
            Symbol(
                module="transformers.modeling_rope_utils",
                name="ROPE_INIT_FUNCTIONS",
                make="rope:make_functions",
                changed="default",
                unless="compute_default_rope_parameters",
            ),
        ),
    ),
    Shim(
        name="computed-buffers",
        stands_for="models made with real tensors, so that what a module computes for itself survives the load",
        releases="to 4.57",
        safe="the class's own code computes them, once more and outside the meta device",
        mends=(
            Mend(make="buffers:computed", sees="computing"),
            Mend(make="buffers:restored", sees="nothing"),
            Mend(make="classes:rotary_function", sees="nothing"),
        ),
    ),
    Shim(
        name="rope-settings",
        stands_for="config.rope_scaling without the base in it, and config.rope_theta",
        releases="4.36 to 4.57",
        safe="the same numbers from where they are kept now; a base that is nowhere is an error",
        attributes=(
            Attribute(
                cls=_CONFIG, name="rope_scaling", make="rope:scaling", kind="property", always=True, writable=True
            ),
        ),
    ),
    Shim(
        name="tied-weights",
        stands_for="_tied_weights_keys as a list",
        releases="4.36 to 4.57",
        safe="what 4.x tied was tied to the input embeddings; the model is asked where they are",
        mends=(Mend(make="classes:tied_weights", sees="listed_ties"),),
    ),
    Shim(
        name="generation",
        stands_for="a base class that can generate, and that hands the cache over as past_key_values",
        releases="generate to 4.51, the name to 5.17",
        safe="upstream's own generate; only the name of one argument differs",
        mends=(
            Mend(make="classes:generation", sees="ungenerating"),
            Mend(make="classes:cache_argument", sees="old_cache_arguments"),
        ),
    ),
    Shim(
        name="typed-keywords",
        stands_for="types that only annotate keyword arguments",
        releases="4.51",
        safe="a type for annotations holds nothing",
        symbols=_symbols(
            "helpers:make_keywords", f"{_UTILS}.LossKwargs", "transformers.modeling_utils.LossKwargs",
            f"{_FAST}.DefaultFastImageProcessorKwargs",
            "transformers.modeling_flash_attention_utils.FlashAttentionKwargs",
        ),
    ),
    Shim(
        name="availability",
        stands_for="questions about what is installed",
        releases="4.x",
        safe="no to tracing and old kernels: the code then takes its plain path; yes to a torch that dz needs anyway",
        symbols=(
            *_symbols(
                "helpers:make_no",
                f"{_UTILS}.is_torch_fx_available", f"{_IMPORTS}.is_torch_fx_available", f"{_UTILS}.is_torch_fx_proxy",
                f"{_UTILS}.is_flash_attn_available", f"{_IMPORTS}.is_flash_attn_available",
                f"{_UTILS}.is_flash_attn_greater_or_equal_2_10", f"{_IMPORTS}.is_flash_attn_greater_or_equal_2_10",
                f"{_UTILS}.is_flash_attn_greater_or_equal", f"{_UTILS}.is_tf_available", f"{_UTILS}.is_flax_available",
            ),
            *_symbols(
                "helpers:make_true", "transformers.pytorch_utils.is_torch_greater_or_equal_than_1_13",
                "transformers.pytorch_utils.is_torch_greater_or_equal_than_2_2",
                "transformers.pytorch_utils.is_torch_greater_or_equal_than_1_10",
            ),
        ),
    ),
    Shim(
        name="documentation",
        stands_for="decorators and texts that only wrote documentation",
        releases="4.x",
        safe="they changed no behaviour",
        symbols=(
            *_symbols(
                "helpers:make_decorator",
                f"{_UTILS}.add_start_docstrings", f"{_UTILS}.add_start_docstrings_to_model_forward",
                f"{_UTILS}.replace_return_docstrings", f"{_UTILS}.add_code_sample_docstrings",
                f"{_UTILS}.add_end_docstrings", f"{_UTILS}.doc.add_start_docstrings",
            ),
            *_symbols(
                "helpers:make_text", f"{_FAST}.BASE_IMAGE_PROCESSOR_FAST_DOCSTRING",
                f"{_FAST}.BASE_IMAGE_PROCESSOR_FAST_DOCSTRING_PREPROCESS",
                "transformers.video_processing_utils.BASE_VIDEO_PROCESSOR_DOCSTRING",
            ),
        ),
    ),
    Shim(
        name="export",
        stands_for="base classes of export settings",
        releases="4.x",
        safe="dz exports nothing; the classes are only declared",
        symbols=_symbols(
            "helpers:make_export_config",
            "transformers.onnx.OnnxConfig", "transformers.onnx.OnnxConfigWithPast", "transformers.onnx.PatchingSpec",
            "transformers.onnx.OnnxSeq2SeqConfigWithPast",
        ),
    ),
    Shim(
        name="moved",
        stands_for="helpers that have moved",
        releases="4.x",
        safe="the installed object from its new place, or own code of the same published table",
        symbols=(
            *_symbols("helpers:make_recorder", f"{_UTILS}.generic.OutputRecorder"),
            *_symbols("helpers:make_video_input", "transformers.image_utils.VideoInput"),
            *_symbols("helpers:make_heads", "transformers.pytorch_utils.find_pruneable_heads_and_indices"),
        ),
    ),
)  # fmt: skip

SHIMS = (*CORE, *PACKAGES)
# Names that are the same wherever a release kept them: found by the name alone, below any module of transformers.
# name -> (shim, maker)
ANYWHERE = {"bytes_to_unicode": ("moved", "helpers:make_byte_letters")}
