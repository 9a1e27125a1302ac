"""Tiny models that take images or sound, and their processors; see make.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.conformance.make import SHAPE, Family, token_id

SIDE = {"height": SHAPE["image_size"], "width": SHAPE["image_size"]}
PATCHES = (SHAPE["image_size"] // SHAPE["patch_size"]) ** 2
IMAGE = {"image_token": "<image>", "newline": "\n"}
GEMMA = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
    **{f"newlines_{n}": "\n" * n for n in range(1, 5)},
}
PIXTRAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
QWEN = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
QWEN_AUDIO = {"audio_bos_token": "<|audio_bos|>", "audio_token": "<|AUDIO|>", "audio_eos_token": "<|audio_eos|>"}
WHISPER = {
    "end": "<|endoftext|>",
    "start": "<|startoftranscript|>",
    "en": "<|en|>",
    "task": "<|transcribe|>",
    "times": "<|notimestamps|>",
}
CLIP = {"vision_tower.": "vision_tower.vision_model."}  # as checkpoints have it that others have saved


def _llava(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": SIDE["height"]}, crop_size=SIDE),
        tokenizer,
        patch_size=SHAPE["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _paligemma(tokenizer: Any) -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    images = SiglipImageProcessor(size=SIDE)
    images.image_seq_length = PATCHES
    return PaliGemmaProcessor(images, tokenizer)


def _gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(Gemma3ImageProcessor(size=SIDE), tokenizer, image_seq_length=PATCHES)


def _pixtral(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = PixtralImageProcessor(size={"longest_edge": SIDE["height"]}, patch_size=SHAPE["patch_size"])
    return PixtralProcessor(images, tokenizer, patch_size=SHAPE["patch_size"], spatial_merge_size=2)


def _qwen(kind: str, videos_by: str = "Qwen2VLVideoProcessor", patch: int = 14) -> Any:
    def processor(tokenizer: Any) -> Any:
        import transformers

        pixels = {"patch_size": patch, "min_pixels": 56 * 56, "max_pixels": 112 * 112}
        images = transformers.Qwen2VLImageProcessor(**pixels)
        videos = getattr(transformers, videos_by)(patch_size=patch)
        return getattr(transformers, kind)(images, tokenizer, videos, chat_template="{{ messages }}")

    return processor


def _whisper(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    return WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer)


def _qwen_audio(tokenizer: Any) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer)


def _ids(special: Mapping[str, str], **names: str) -> dict[str, int]:
    return {key: token_id(special, name) for key, name in names.items()}


QWEN_IDS = _ids(
    QWEN,
    vision_start_token_id="vision_bos_token",
    vision_end_token_id="vision_eos_token",
    image_token_id="image_token",
    video_token_id="video_token",
)
QWEN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}

QWEN3_VISION = {"depth": 2, "num_heads": 4, "out_hidden_size": 128, "patch_size": 16, "num_position_embeddings": 64}
QWEN3: dict[str, Any] = {
    "text_config": {**QWEN_ROPE, "architectures": ["Qwen3ForCausalLM"]},
    "vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [0]},
}
QWEN3_MOE = {
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "architectures": ["Qwen3MoeForCausalLM"],
}
QWEN35_VISION = QWEN3_VISION
TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
QWEN3_PROCESSOR = _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16)

MULTIMODAL = (
    Family(
        "LlavaForConditionalGeneration",
        {"image_seq_length": PATCHES, "vision_feature_layer": -1, **_ids(IMAGE, image_token_index="image_token")},
        renames=CLIP,
        special=IMAGE,
        processor=_llava,
    ),
    Family(
        "PaliGemmaForConditionalGeneration",
        {
            "projection_dim": 128,
            "tie_word_embeddings": True,
            "vision_config": {"projection_dim": 128, "num_image_tokens": PATCHES, "vision_use_head": False},
            "text_config": {"num_image_tokens": PATCHES, "tie_word_embeddings": True},
            **_ids(IMAGE, image_token_index="image_token"),
        },
        renames=CLIP,
        special=IMAGE,
        processor=_paligemma,
    ),
    Family(
        "Gemma3ForConditionalGeneration",
        {
            "mm_tokens_per_image": PATCHES,
            "vision_config": {"vision_use_head": False},
            **_ids(GEMMA, image_token_index="image_token", boi_token_index="boi_token", eoi_token_index="eoi_token"),
        },
        renames=CLIP,
        special=GEMMA,
        processor=_gemma3,
    ),
    Family(
        "Mistral3ForConditionalGeneration",
        {"spatial_merge_size": 2, "vision_feature_layer": -1, **_ids(PIXTRAL, image_token_index="image_token")},
        special=PIXTRAL,
        processor=_pixtral,
    ),
    Family(
        "Qwen2VLForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": QWEN_ROPE,
            "vision_config": {"depth": 2, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
        },
        special=QWEN,
        processor=_qwen("Qwen2VLProcessor"),
    ),
    Family(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **QWEN_IDS,
            "text_config": QWEN_ROPE,
            "vision_config": {"depth": 2, "num_heads": 4, "out_hidden_size": 128, "fullatt_block_indexes": [1]},
        },
        special=QWEN,
        processor=_qwen("Qwen2_5_VLProcessor"),
    ),
    Family("Qwen3VLForConditionalGeneration", {**QWEN_IDS, **QWEN3}, special=QWEN, processor=QWEN3_PROCESSOR),
    Family(
        "Qwen3VLMoeForConditionalGeneration",
        {**QWEN_IDS, "text_config": {**QWEN_ROPE, **QWEN3_MOE}, "vision_config": QWEN3["vision_config"]},
        special=QWEN,
        processor=QWEN3_PROCESSOR,
    ),
    Family(
        "Qwen3_5ForConditionalGeneration",
        {**QWEN_IDS, "text_config": {**QWEN_ROPE, **TWO_KINDS}, "vision_config": QWEN35_VISION},
        special=QWEN,
        processor=QWEN3_PROCESSOR,
    ),
    Family(
        "Qwen2AudioForConditionalGeneration",
        {
            "audio_config": {
                "d_model": 128,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 256,
                "num_mel_bins": 128,
            },
            "text_config": {"max_position_embeddings": 2048},
            **_ids(QWEN_AUDIO, audio_token_index="audio_token"),
        },
        engine={"max_model_len": 1024, "max_num_batched_tokens": 2048},
        renames={"language_model.model.model.": "language_model.model."},
        special=QWEN_AUDIO,
        processor=_qwen_audio,
    ),
    Family(
        "WhisperForConditionalGeneration",
        {
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "max_target_positions": 256,
            "tie_word_embeddings": True,
            "begin_suppress_tokens": None,
            "decoder_start_token_id": token_id(WHISPER, "start"),
        },
        engine={"max_num_batched_tokens": 2048},  # an encoder sees 30 seconds at once
        special=WHISPER,
        processor=_whisper,
    ),
)
