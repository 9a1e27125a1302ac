"""The way in which each architecture that vLLM knows is made (see make.py).

Architectures with a class in transformers are made without an entry here; these need special settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.conformance.make import SHAPE, UNSET, VOCABULARY, Family
from recipes.conformance.multimodal import MULTIMODAL, TWO_KINDS


def family(architecture: str) -> Family | None:
    """Return the family of this architecture; None: nothing here makes it."""
    import transformers

    if architecture in FAMILIES:
        return FAMILIES[architecture]
    return Family(architecture) if getattr(transformers, architecture, None) is not None else None


def _families(*families: Family) -> dict[str, Family]:
    return {family.architecture: family for family in families}


def _by_hand(
    architecture: str,
    *,
    packed: Mapping[str, list[str]] | None = None,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Family:
    settings = {"model_type": "llama", **settings}
    return Family(architecture, settings, by_hand=True, packed=packed or {}, engine=engine or {})


EXPERTS: dict[str, Any] = {
    **{key: SHAPE[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group")},
    **{key: SHAPE[key] for key in ("moe_intermediate_size", "topk_group", "first_k_dense_replace")},
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
CORRECTED: dict[str, Any] = {"use_qk_norm": True, "moe_router_enable_expert_bias": True, "score_function": "sigmoid"}
LATENT: dict[str, Any] = {
    **{key: SHAPE[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
PLAMO3: dict[str, Any] = {"interleaved_sliding_window": [64, None], "rope_local_theta": 10000, "sliding_window": 64}
BAILING: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "score_function": "softmax",
}
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm",
    "num_layers": 2,
    "padded_vocab_size": VOCABULARY,
    "ffn_hidden_size": 256,
    "kv_channels": 32,
    "seq_length": 256,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "original_rope": True,
    "rmsnorm": True,
}
MAMBA2 = {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 64}

SHORT_CONV = {"conv_dim": 128, "block_dim": 128, "conv_L_cache": 4}  # 4 is the only width that CPUs take
SKIPS: dict[str, Any] = {f"bskcn_{n}": [n % 2] for n in range(1, 5)}
TIED = {"tie_word_embeddings": True}

FAMILIES = _families(
    *MULTIMODAL,
    # vLLM ties these whatever their configuration says.
    *(Family(f"{name}ForCausalLM", TIED) for name in ("Bloom", "Cohere", "Cohere2", "Cohere2Moe")),
    Family("GPTBigCodeForCausalLM", {"num_key_value_heads": 1, **TIED}),
    Family("BertForMaskedLM", TIED),
    Family("GemmaForCausalLM", TIED),
    Family("OPTForCausalLM", {"ffn_dim": 256, "word_embed_proj_dim": 128, **TIED}),
    Family(
        "DbrxForCausalLM",
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "num_key_value_heads": UNSET,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    Family("FalconForCausalLM", {"head_dim": UNSET, "new_decoder_architecture": True, "num_kv_heads": 2}),
    Family(
        "Gemma3nForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,  # transformers does not save what shared layers do not use, vLLM wants it
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
            "intermediate_size": [256] * 4,
            "tie_word_embeddings": True,
        },
    ),
    Family("Gemma4ForCausalLM", {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32}),
    Family("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **SHORT_CONV}),
    Family("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], **SHORT_CONV}),
    Family(
        "LongcatFlashForCausalLM",
        {
            "num_layers": 1,
            "num_hidden_layers": 2,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 64,
            "zero_expert_num": 2,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "zero_expert_type": "identity",
        },
    ),
    Family("Mamba2ForCausalLM", MAMBA2),
    Family("DeepseekV3ForCausalLM", {"topk_method": "noaux_tc"}),
    Family("ExaoneMoeForCausalLM", {"sliding_windows": [64, 64]}),
    Family("Gemma2ForCausalLM", TIED),
    Family("Glm4MoeForCausalLM", {"head_dim": 32}),
    Family("Glm4MoeLiteForCausalLM", {"first_k_dense_replace": 1, "head_dim": 64}),
    Family("GlmMoeDsaForCausalLM", {"first_k_dense_replace": 1}),
    Family("PhiForCausalLM", {"num_key_value_heads": 4}),
    Family("XLMRobertaModel", {"position_embedding_type": "absolute"}),
    Family("GPTJForCausalLM", {"rotary_dim": 16}),
    Family("HYV3ForCausalLM", {"expert_hidden_dim": 64, "route_norm": True, "first_k_dense_replace": 1}),
    Family("LagunaForCausalLM", {"num_attention_heads_per_layer": [4, 4]}),
    Family("MiniMaxM2ForCausalLM", {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}),
    Family("Llama4ForCausalLM", {"num_experts_per_tok": 1, "attention_chunk_size": 128, "head_dim": 32}),
    Family(
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],  # its experts run on GPUs only
            "num_hidden_layers": UNSET,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "hybrid_override_pattern": "M*-",
        },
        renames={"backbone.embedding.": "backbone.embeddings."},
    ),
    Family("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8}),
    Family("Qwen3NextForCausalLM", TWO_KINDS),
    Family("Qwen3_5ForCausalLM", TWO_KINDS),
    Family("Qwen3_5MoeForCausalLM", TWO_KINDS),
    Family("OlmoHybridForCausalLM", TWO_KINDS),
    Family(
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            **TIED,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
    ),
    *(Family(f"{name}Model", engine={"runner": "pooling"}) for name in ("Gemma2", "Llama", "Mistral", "Qwen2")),
    # llama.py under other names
    Family("LLaMAForCausalLM", like="LlamaForCausalLM"),
    Family("IQuestCoderForCausalLM", like="LlamaForCausalLM"),
    Family("InternLM3ForCausalLM", like="LlamaForCausalLM"),
    Family("TeleChat3ForCausalLM", like="LlamaForCausalLM"),
    Family("PhiMoEForCausalLM", like="PhimoeForCausalLM"),
    Family("GraniteSWAForCausalLM", like="GraniteForCausalLM"),
    Family("GraniteMoeSWAForCausalLM", like="GraniteMoeSharedForCausalLM"),
    Family("Rnj1ForCausalLM", like="Gemma3ForCausalLM"),
    # configurations of remote code: Llama's holds any attribute
    _by_hand("OrionForCausalLM"),
    _by_hand("ExaoneForCausalLM", activation_function="silu", layer_norm_epsilon=1e-5, num_layers=2),
    _by_hand("SolarForCausalLM", **SKIPS, bskcn_tv=[0.9, 0.1]),
    _by_hand("MiMoForCausalLM", attention_bias=True, num_nextn_predict_layers=1),
    _by_hand("MiniCPMForCausalLM", scale_emb=12, scale_depth=1.4, dim_model_base=64, num_experts=0),
    _by_hand("MiniCPM3ForCausalLM", **LATENT, scale_emb=12, scale_depth=1.4, dim_model_base=64, num_experts=0),
    _by_hand("InternLM2ForCausalLM", packed={"gate_up_proj": ["w1", "w3"]}),
    _by_hand("InternLM2ForRewardModel", packed={"gate_up_proj": ["w1", "w3"]}),
    _by_hand("TeleFLMForCausalLM", use_mup=True, mup_scale_factor=4.0, input_mult=2.0, output_mult=0.5),
    _by_hand("Step1ForCausalLM"),
    _by_hand("Plamo3ForCausalLM", layer_types=["sliding_attention", "full_attention"], **PLAMO3),
    _by_hand("DeepseekForCausalLM", **EXPERTS, qk_nope_head_dim=0, qk_rope_head_dim=0),
    _by_hand("BailingMoeForCausalLM", **BAILING),
    _by_hand("BailingMoeV2ForCausalLM", **{**BAILING, **CORRECTED}),
    _by_hand("SarvamMoEForCausalLM", **BAILING),
    _by_hand("SarvamMLAForCausalLM", **BAILING, **LATENT),
    _by_hand("AXK1ForCausalLM", **EXPERTS, **LATENT, model_type="axk1"),
    _by_hand("PanguEmbeddedForCausalLM", bias=True),
    _by_hand("PanguUltraMoEForCausalLM", **EXPERTS, **LATENT, sandwich_norm=True),
    _by_hand(
        "Step3TextForCausalLM",
        share_expert_dim=64,
        share_q_dim=64,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=64,
        norm_expert_weight=True,
        max_position_embedding=256,
        moe_layers_enum="1",
    ),
    _by_hand("IQuestLoopCoderForCausalLM", loop_num=2, loop_window_size=64, max_window_layers=2),
    _by_hand("Qwen2ForRewardModel", model_type="qwen2"),
    # By itself it answers for the tokens that end a step of reasoning only.
    _by_hand("Qwen2ForProcessRewardModel", engine={"pooler_config": {"pooling_type": "ALL"}}, model_type="qwen2"),
    _by_hand("ChatGLMModel", **CHATGLM),
    _by_hand("ChatGLMForConditionalGeneration", **CHATGLM),
    _by_hand("LlamaBidirectionalModel", pooling="avg"),
    _by_hand("LlamaBidirectionalForSequenceClassification", pooling="avg", num_labels=1),
)
