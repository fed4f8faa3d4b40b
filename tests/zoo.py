"""Tiny random causal language models, one per architecture, for comparisons with `generate`."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

Table = dict[str, tuple[str, dict[str, Any]]]

# Given to every architecture that has the field. Nothing ends a text early: no end token, no padding token.
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

ALTERNATING = ["sliding_attention", "full_attention"] * 2
WINDOW: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 8, "layer_types": ALTERNATING}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GROUPED_MOE: dict[str, Any] = {
    **MOE,
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # the rotary part
    "v_head_dim": 12,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}
GEMMA_3N: dict[str, Any] = {
    **WINDOW,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


SUPPORTED: Table = {
    "llama": ("llama", {}),
    "llama_yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama_llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama_linear": ("llama", _rope("linear", factor=4.0)),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {**WINDOW, "use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_experts": 4, "norm_topk_prob": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 8}),
    "ministral": ("ministral", WINDOW),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_neox": ("gpt_neox", {"num_hidden_layers": 4}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {**WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": ("gemma3_text", {**WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3n": ("gemma3n_text", GEMMA_3N),
    "gemma4": ("gemma4_text", {**GEMMA_3N, "global_head_dim": 32}),
    "gemma4_moe": (
        "gemma4_text",
        {
            **WINDOW,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    # glm and glm4 replace a missing end token by ids far outside this vocabulary.
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {**GROUPED_MOE, "use_qk_norm": True}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOW),
    "cohere": ("cohere", {"num_hidden_layers": 4, "use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {**WINDOW, "logit_scale": 0.5}),
    "granite": ("granite", MULTIPLIERS),
    "granitemoe": ("granitemoe", {**MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "exaone4": ("exaone4", WINDOW),
    "gpt_oss": ("gpt_oss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("deepseek_v2", {**GROUPED_MOE, **MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", {**GROUPED_MOE, **MLA}),
    "minicpm3": ("minicpm3", {**MLA, "dim_model_base": 32}),
    "gpt2": ("gpt2", {"n_inner": 96}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 96}),
    "biogpt": ("biogpt", {}),
    "nemotron": ("nemotron", {}),
    "persimmon": ("persimmon", {}),
    "ernie4_5": ("ernie4_5", {}),
    "seed_oss": ("seed_oss", {}),
    "apertus": ("apertus", {}),
    "helium": ("helium", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
}

LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

UNSUPPORTED: Table = {
    # Attention that does not go through the attention interface.
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {"max_seq_len": 512}),
    "falcon": ("falcon", {}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "xglm": ("xglm", {"ffn_dim": 96}),
    # A recurrent state in some or all layers.
    "mamba": ("mamba", {"time_step_rank": 4}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "qwen3_next": ("qwen3_next", {**LINEAR, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 48}),
    "qwen3_5": ("qwen3_5_text", LINEAR),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16, "block_auto_adjust_ff_dim": False},
    ),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8}),
    "rwkv": ("rwkv", {"attention_hidden_size": 64}),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "chunk_size": 8,
            "use_mamba_kernels": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 48,
            "use_mamba_kernels": False,
        },
    ),
    "minimax": ("minimax", {"num_local_experts": 2, "block_size": 8}),
    # Masks or attention calls that cannot be seen from one attention call.
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 96, "num_local_experts": 2},
    ),
    "doge": ("doge", {"keep_window_size": 8}),
    "diffllama": ("diffllama", {}),
    # Rotary frequencies chosen from the largest position of the whole batch.
    "llama_dynamic": ("llama", {"max_position_embeddings": 16, **_rope("dynamic", factor=2.0)}),
    "phi3_longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            **_rope("longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=16),
        },
    ),
    # Not a decoder alone.
    "t5": ("t5", {"d_kv": 16, "d_ff": 96, "num_decoder_layers": 2}),
}

# Softcapped attention scores: some releases of transformers ignore the cap except in the eager implementation.
SOFTCAPPED = {"gemma2"}


# Widths of real models: hidden, intermediate, heads, key-value heads, head size.
SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "640": (640, 2048, 4, 1, 256),  # Gemma-3-270M
    "1024": (1024, 3072, 16, 8, 128),  # Qwen3-0.6B
    "2048": (2048, 8192, 32, 8, 64),  # Llama-3.2-1B
    "2304": (2304, 9216, 8, 4, 256),  # Gemma-2-2B
    "3584": (3584, 18944, 28, 4, 128),  # Qwen2.5-7B
    "4096": (4096, 12288, 32, 8, 128),  # Qwen3-8B
}
# What else is wider in a real model, wherever an architecture sets it.
_WIDE: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "sliding_window": 512,
    "moe_intermediate_size": 768,
    "shared_expert_intermediate_size": 1408,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size_per_layer_input": 32000,
    "hidden_size_per_layer_input": 256,
    "global_head_dim": 256,
    "query_pre_attn_scalar": 256,
    "dim_model_base": 256,
}


def make_config(model_type: str, overrides: dict[str, Any], base: dict[str, Any] = BASE) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    known = config_class().to_dict().keys() | config_class.attribute_map.keys()
    shared = {key: value for key, value in base.items() if key in known}
    return config_class(**{**shared, **deepcopy(overrides)})


def wide_config(name: str, size: str) -> PreTrainedConfig:
    """The configuration `name` of ZOO at the widths of a real model, with as many layers as before."""
    model_type, overrides = SUPPORTED[name]
    hidden, intermediate, heads, kv_heads, head_dim = SIZES[size]
    latent = "kv_lora_rank" in overrides  # every head has keys of its own, and head_dim is the rotary part
    widths = {
        **_WIDE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "n_inner": intermediate,
        "ffn_dim": intermediate,
        "word_embed_proj_dim": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else kv_heads,
        "head_dim": _WIDE["qk_rope_head_dim"] if latent else head_dim,
    }
    base = {key: widths.get(key, value) for key, value in BASE.items()}
    wider = {key: value if value is None else widths.get(key, value) for key, value in overrides.items()}
    return make_config(model_type, wider, base)


def build_wide(name: str, size: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of `wide_config`, its weights drawn on the device so that activations keep their scale."""
    options = {"attn_implementation": "eager"} if name in SOFTCAPPED else {}
    with torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(wide_config(name, size), dtype=dtype, **options)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def _builders(table: Table) -> dict[str, Callable[[], PreTrainedConfig]]:
    return {
        name: partial(make_config, model_type, overrides)
        for name, (model_type, overrides) in table.items()
        if model_type in CONFIG_MAPPING
    }


# For every entry of ZOO the greedy tokens of `generate` are the argmax of one full forward over the whole text.
ZOO = _builders(SUPPORTED)
REFUSED = _builders(UNSUPPORTED)


def _randomise(model: PreTrainedModel) -> None:
    """Draw every weight anew, wide enough that the greedy text depends on the whole context.

    Embeddings stay small, or a model with tied embeddings would only repeat its last token.
    Vectors (norm weights, biases, sinks) are moved a little away from their initial value.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        if id(parameter) in embeddings:
            parameter.copy_(0.02 * noise)
        elif parameter.ndim > 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.add_(0.05 * noise)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The model `name` of ZOO or REFUSED; the same name, dtype and seed give the same weights."""
    config = (ZOO | REFUSED)[name]()
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    options = {"attn_implementation": "eager"} if name in SOFTCAPPED else {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=dtype, **options)
        _randomise(model)
    return model.eval().requires_grad_(False)
