"""Tiny models that take images or sound, and their processors; see doctor_make.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorhub_plugins.vllm.doctor_make import SHAPE, Family, token_id

SIDE = {"height": SHAPE["image_size"], "width": SHAPE["image_size"]}
PATCHES = (SHAPE["image_size"] // SHAPE["patch_size"]) ** 2
IMAGE = ("<image>",)
GEMMA = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_AUDIO = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
WHISPER = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")


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

    start, image, end = GEMMA
    tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token = start, image, end
    tokenizer.image_token_id = token_id(GEMMA, image)
    return Gemma3Processor(Gemma3ImageProcessor(size=SIDE), tokenizer, image_seq_length=PATCHES)


def _pixtral(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = PixtralImageProcessor(size={"longest_edge": SIDE["height"]}, patch_size=SHAPE["patch_size"])
    return PixtralProcessor(images, tokenizer, patch_size=SHAPE["patch_size"], spatial_merge_size=2)


def _qwen(kind: str) -> Any:
    def processor(tokenizer: Any) -> Any:
        import transformers

        pixels = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
        images = transformers.Qwen2VLImageProcessor(**pixels)
        videos = transformers.Qwen2VLVideoProcessor(**pixels)
        return getattr(transformers, kind)(images, tokenizer, videos, chat_template="{{ messages }}")

    return processor


def _whisper(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    return WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer)


def _qwen_audio(tokenizer: Any) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer)


def _ids(special: Sequence[str], **names: str) -> dict[str, int]:
    return {key: token_id(special, token) for key, token in names.items()}


QWEN_IDS = _ids(
    QWEN,
    vision_start_token_id="<|vision_start|>",
    vision_end_token_id="<|vision_end|>",
    image_token_id="<|image_pad|>",
    video_token_id="<|video_pad|>",
)
QWEN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}

MULTIMODAL = (
    Family(
        "LlavaForConditionalGeneration",
        {"image_seq_length": PATCHES, "vision_feature_layer": -1, **_ids(IMAGE, image_token_index="<image>")},
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
            **_ids(IMAGE, image_token_index="<image>"),
        },
        special=IMAGE,
        processor=_paligemma,
    ),
    Family(
        "Gemma3ForConditionalGeneration",
        {
            "mm_tokens_per_image": PATCHES,
            "vision_config": {"vision_use_head": False},
            **_ids(GEMMA, image_token_index=GEMMA[1], boi_token_index=GEMMA[0], eoi_token_index=GEMMA[2]),
        },
        special=GEMMA,
        processor=_gemma3,
    ),
    Family(
        "Mistral3ForConditionalGeneration",
        {"spatial_merge_size": 2, "vision_feature_layer": -1, **_ids(PIXTRAL, image_token_index="[IMG]")},
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
            **_ids(QWEN_AUDIO, audio_token_index="<|AUDIO|>"),
        },
        engine={"max_model_len": 1024, "max_num_batched_tokens": 2048},
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
            "decoder_start_token_id": token_id(WHISPER, "<|startoftranscript|>"),
        },
        engine={"max_num_batched_tokens": 2048},  # an encoder sees 30 seconds at once
        special=WHISPER,
        processor=_whisper,
    ),
)
