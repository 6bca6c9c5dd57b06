"""Makes images and audio for tiny multimodal models."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from shardwise.errors import UnsupportedError
from shardwise.tiny.families import FAMILIES
from shardwise.tiny.fields import fields_of, sub_configs

_ANY_IMAGE = 64  # pixels of images for models that take every size
SIGNALS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
"""Arguments of forwards that hold images, videos or sound."""
_GRIDS = ("grid_thw", "image_grid_thw")
_GRID = (1, 4, 4)  # frames, rows and columns of patches of every image


def class_names(table: str) -> frozenset[str]:
    """The model classes in one of transformers' auto mappings, such as "MODEL_FOR_CTC_MAPPING_NAMES"."""
    listed = getattr(modeling_auto, table).values()
    return frozenset(name for names in listed for name in ((names,) if isinstance(names, str) else names))


def signals_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Arguments of `model`'s forward, other than tokens, that it requires.

    Raises:
        UnsupportedError: it takes neither tokens nor any of them.
    """
    takes = inspect.signature(model.forward).parameters
    family = FAMILIES.get(model.config.model_type)
    if family and family.inputs:
        return family.inputs
    if "input_ids" in takes:  # text towers next to image towers need both
        is_dual = type(model).__name__ in class_names("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES")
        needed = (name for name in SIGNALS if name in takes and takes[name].default is inspect.Parameter.empty)
        return ("pixel_values",) if is_dual and "pixel_values" in takes else tuple(needed)
    found = tuple(name for name in SIGNALS if name in takes)[:1]
    if not found:
        raise UnsupportedError(f"no batch for {type(model).__name__}", why=f"its forward takes {', '.join(takes)}")
    return found


def make_patches(
    model: PreTrainedModel, num_images: int, *, generator: torch.Generator, beside_tokens: bool = False
) -> dict[str, Tensor]:
    """Images for a model that takes the concatenated patches of all images, with the grid of each; empty for other
    models.

    Args:
        beside_tokens: whether a model that also takes tokens receives images.

    Raises:
        UnsupportedError: the configuration does not give the patch size.
    """
    takes = inspect.signature(model.forward).parameters
    grid = next((name for name in _GRIDS if name in takes and ("input_ids" not in takes or beside_tokens)), None)
    name = next((name for name in ("hidden_states", "pixel_values") if name in takes), None)
    if grid is None or name is None:
        return {}
    fields = _fields(model)
    if "patch_size" not in fields:
        raise UnsupportedError(f"no batch for {type(model).__name__}", why="its configuration has no 'patch_size'")
    channels = fields.get("in_channels", fields.get("num_channels", 3))
    size = channels * fields.get("temporal_patch_size", 1) * fields["patch_size"] ** 2
    patches = torch.randn((num_images * math.prod(_GRID), size), generator=generator)
    return {name: patches, grid: torch.tensor([_GRID] * num_images)}


def make_signal(model: PreTrainedModel, name: str, shape: tuple[int, int], *, generator: torch.Generator) -> Tensor:
    """Noise for an argument in `signals_of`.

    Args:
        model: its configuration gives the sizes.
        name: name of the argument.
        shape: batch size and sequence length; the latter counts frames after the model's convolutions.
        generator: generator of the noise.

    Raises:
        UnsupportedError: the configuration does not give the size.
    """
    try:
        size = _SIZES[name](_fields(model), shape[1])
    except KeyError as error:
        why = f"its configuration has no {error.args[0]!r}, which would give the size of {name}"
        raise UnsupportedError(f"no batch for {type(model).__name__}", why=why) from error
    return torch.randn((shape[0], *size), generator=generator)


def _fields(model: PreTrainedModel) -> dict[str, Any]:
    """Fields of the model's configuration and its nested ones; the outer ones take precedence."""
    fields: dict[str, Any] = {}
    for part in sub_configs(model.config):
        fields = {**{key: value for key, value in fields_of(part).items() if value is not None}, **fields}
    return fields


def _image_size(fields: Mapping[str, Any], length: int) -> tuple[int, ...]:
    del length
    size = fields.get("image_size", _ANY_IMAGE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = (fields["num_frames"],) if "num_frames" in fields else ()
    return *frames, fields.get("num_channels", 3), height, width


def _video_size(fields: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """[frames, channels, height, width], with the number of frames that the model takes at once."""
    side = fields.get("crop_size", fields.get("image_size", _ANY_IMAGE))
    frames = fields.get("frames_per_clip", fields.get("num_frames", 2))
    return frames, *_image_size({"image_size": side} | {"num_channels": fields.get("in_chans", 3)}, length)


def _feature_size(fields: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """[mel bins, frames] before convolutions over time, [frames, channels] for models that start with a projection."""
    if "audio_length_per_tok" in fields:
        return fields["num_mel_bins"], length * fields["audio_length_per_tok"]
    for channels in ("feature_projection_input_dim", "input_feat_per_channel"):
        if channels in fields:
            return 4 * length, fields[channels]
    if "max_source_positions" in fields:
        return fields["num_mel_bins"], 2 * fields["max_source_positions"]
    return 8 * length, fields["num_mel_bins"]


def _wave_size(fields: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """[samples], or [frames, mel bins] for models of spectrograms as images."""
    if "num_mel_bins" in fields and "max_length" in fields:
        return fields["max_length"], fields["num_mel_bins"]
    return ((length + 2) * math.prod(fields["conv_stride"]),)


_SIZES = {
    "pixel_values": _image_size,
    "pixel_values_videos": _video_size,
    "input_features": _feature_size,
    "input_values": _wave_size,
}
