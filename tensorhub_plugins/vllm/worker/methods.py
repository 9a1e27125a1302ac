"""The methods of a vLLM worker that leave its weights unchanged. Any other may change them unknown to the store."""

from __future__ import annotations

# Of vLLM 0.24 to 0.33. tests/versions fails on a method of a newer one that has not been reviewed.
LEAVE_WEIGHTS = frozenset(
    {
        "add_lora", "list_loras", "pin_lora", "remove_lora",
        "annotate_profile", "profile", "check_health", "handle_ft_command", "synchronize_device", "shutdown",
        "checkpoint_prepare", "checkpoint_restore",  # of connections between ranks
        "compile_or_warm_up_model", "determine_available_memory", "init_device", "init_worker",
        "load_model",  # extension.py refuses it where there is a model already
        "compute_weight_checksums", "save_sharded_state", "save_tensorized_model",
        "execute_dummy_batch", "execute_model", "randomize_dummy_inputs", "sample_tokens", "take_draft_token_ids",
        "get_cache_block_size_bytes", "get_compilation_match_table", "get_draft_model", "get_encoder_timing_stats",
        "get_kv_cache_spec", "get_kv_connector_handshake_metadata", "get_model", "get_model_inspection",
        "get_simple_cpu_offload_num_cpu_blocks", "get_supported_kv_cache_layouts", "get_supported_tasks",
        "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "initialize_from_config",
        "release_late_interaction_query_cache", "reset_encoder_cache", "reset_mm_cache", "set_kv_cache_layout",
        "sleep", "wake_up", "discard", "sleep_mode_backend",  # extension.py wraps those that matter
        "supports_draft_weight_updates", "start_draft_weight_update",
        "update_weights", "finish_weight_update",  # of a round that start_weight_update has begun
        "update_config", "update_environment_variables", "update_max_model_len",
    }
)  # fmt: skip
# These change them, at once or later. For a method in neither list the bytes are compared, before and after.
CHANGE_WEIGHTS = ("reload_weights", "start_weight_update")


def may_change_weights(method: object) -> bool:
    """Return whether a call of workers from outside the store may change weights: a method's name, or a function."""
    return not isinstance(method, str) or (method not in LEAVE_WEIGHTS and not method.startswith("tensorhub_"))
