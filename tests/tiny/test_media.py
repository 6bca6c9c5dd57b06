"""Tiny models beside text are given images and sound, in the shapes that their processors make."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from shardwise.tiny.inputs import add_media, make_batch, missing_media
from shardwise.tiny.models import build_tiny_model
from shardwise.tiny.shrink import shrink_config
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.single

SHAPES = {
    "granite_speech": {"input_features": (2, 64, 160)},
    "idefics3": {"pixel_values": (2, 1, 3, 32, 32), "pixel_attention_mask": (2, 1, 32, 32)},
    "llava": {"pixel_values": (2, 3, 32, 32)},
    "llava_next": {"pixel_values": (2, 3, 3, 32, 32), "image_sizes": (2, 2)},
    "mistral3": {"pixel_values": (2, 3, 32, 32), "image_sizes": (2, 2)},
    "mllama": {
        "pixel_values": (2, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": (2, 1),
        "aspect_ratio_mask": (2, 1, 4),
        "cross_attention_mask": (2, 18, 1, 4),
    },
    "qwen2_audio": {"input_features": (2, 128, 128), "feature_attention_mask": (2, 128)},
    "qwen3_vl": {"pixel_values": (32, 384), "image_grid_thw": (2, 3)},
    "vipllava": {"pixel_values": (2, 3, 32, 32)},
    "voxtral": {"input_features": (2, 128, 128)},
}
TABLES = [getattr(modeling_auto, f"MODEL_FOR_{of}_MAPPING_NAMES") for of in ("MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")]
CLASSES = {family: names if isinstance(names, str) else names[0] for table in TABLES for family, names in table.items()}


def tiny(family):
    config = transformers.CONFIG_MAPPING[family]()
    vision, projector = getattr(config, "vision_config", None), getattr(config, "projector_config", None)
    if hasattr(vision, "out_hidden_size"):  # these defaults are no checkpoint's
        vision.out_hidden_size = config.get_text_config().hidden_size
    if hasattr(projector, "encoder_hidden_size"):
        projector.encoder_hidden_size = config.encoder_config.hidden_dim
    if getattr(config, "audio_token_id", 0) is None:
        config.audio_token_id = 24
    return build_tiny_model(shrink_config(config), getattr(transformers, CLASSES[family]), seed=0).eval()


@pytest.mark.parametrize("family", SHAPES)
def test_media_have_the_shapes_that_a_family_takes(family):
    model = tiny(family)
    text = make_batch(model, seed=0)
    found = add_media(model, text, seed=0)
    added = {name: tuple(value.shape) for name, value in found.items() if name not in text}
    assert {name: shape for name, shape in added.items() if "token_type" not in name} == SHAPES[family]
    again = add_media(model, text, seed=0)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert (found["labels"][:, : -text["labels"].shape[1]] == -100).all()
    model(**found).loss.backward()


@pytest.mark.skipif(not FULL_PRODUCT, reason="make coverage builds every family")
def test_most_families_are_given_media():
    given, lacking = set(), set()
    for family in CLASSES:
        try:
            model = tiny(family)
            text = make_batch(model, seed=0)
        except Exception:  # noqa: BLE001 - its defaults make no model, or it wants other libraries
            continue
        if wanted := {*missing_media(model, text)} - {"pixel_values_videos"}:
            (lacking if wanted & {*missing_media(model, add_media(model, text, seed=0))} else given).add(family)
    assert len(given) >= 50, sorted(lacking)
