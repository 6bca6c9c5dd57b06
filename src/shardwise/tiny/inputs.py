"""Makes batches, with labels, for a tiny model's forward."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from shardwise.errors import UnsupportedError
from shardwise.tiny.families import FAMILIES, fields_of, is_count, sub_configs


def clone_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the batch, because some models write into their inputs."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


def loss_or_surrogate(output: Any) -> Tensor:
    """Returns the model's loss; without one, a fixed random weighting of all outputs."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is not None:
        return loss
    found = list(output.values()) if isinstance(output, Mapping) else tree_leaves(output)
    if not isinstance(output, Mapping) and found and isinstance(found[0], Tensor) and found[0].numel() == 1:
        return found[0]  # of models written by hand
    values = [value for value in found if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([(value.float() * _weights(value)).mean() for value in values]).sum()


@torch.no_grad()
def has_loss(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Returns whether the model computes a loss for `batch`."""
    output = model(**clone_batch(batch))
    return isinstance(output, Mapping) and output.get("loss") is not None


def _weights(value: Tensor) -> Tensor:
    """Random weights, equal for every row, so that data-parallel ranks can compute the mean over rows together."""
    shape = value.shape[1:]
    generator = torch.Generator().manual_seed(shape.numel())
    return torch.randn(shape, generator=generator).to(value.device)


_ANY_IMAGE = 64  # pixels of images for models that take every size
SIGNALS = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "image_pixel_values")
"""Arguments of forwards that hold images, videos or sound."""
_GRIDS = ("grid_thw", "image_grid_thw")
_GRID = (1, 4, 4)


def class_names(table: str) -> frozenset[str]:
    """Returns the model classes in one of transformers' auto mappings, such as "MODEL_FOR_CTC_MAPPING_NAMES"."""
    listed = getattr(modeling_auto, table).values()
    return frozenset(name for names in listed for name in ((names,) if isinstance(names, str) else names))


def signals_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the arguments of `model`'s forward, other than tokens, that it requires."""
    takes = inspect.signature(model.forward).parameters
    family = FAMILIES.get(model.config.model_type)
    if family and family.inputs:
        return family.inputs
    if "input_ids" in takes:  # text towers next to image towers need both
        is_dual = _is_listed(model, "ZERO_SHOT_IMAGE_CLASSIFICATION")
        needed = (name for name in SIGNALS if name in takes and takes[name].default is inspect.Parameter.empty)
        return ("pixel_values",) if is_dual and "pixel_values" in takes else tuple(needed)
    found = tuple(name for name in SIGNALS if name in takes)[:1]
    if not found:
        raise UnsupportedError(f"no batch for {type(model).__name__}", why=f"its forward takes {', '.join(takes)}")
    return found


def make_patches(
    model: PreTrainedModel, grids: Sequence[tuple[int, ...]], *, generator: torch.Generator, beside_tokens: bool = False
) -> dict[str, Tensor]:
    """Returns images for a model that takes the concatenated patches of all images, with the grid of each; else empty.

    Args:
        grids: frames, rows and columns of patches of each image.
        beside_tokens: whether a model that also takes tokens receives images.
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
    patches = torch.randn((sum(map(math.prod, grids)), size), generator=generator)
    return {name: patches, grid: torch.tensor(grids)}


def make_signal(model: PreTrainedModel, name: str, shape: tuple[int, int], *, generator: torch.Generator) -> Tensor:
    """Returns noise for an argument in `signals_of`.

    Args:
        shape: batch size and sequence length; the latter counts frames after the model's convolutions.
    """
    try:
        size = _SIZES[name](_fields(model), shape[1])
    except KeyError as error:
        why = f"its configuration has no {error.args[0]!r}, which would give the size of {name}"
        raise UnsupportedError(f"no batch for {type(model).__name__}", why=why) from error
    return torch.randn((shape[0], *size), generator=generator)


def _fields(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the fields of the model's configuration and its nested ones; the outer ones take precedence."""
    fields: dict[str, Any] = {}
    for part in sub_configs(model.config):
        fields = {**{key: value for key, value in fields_of(part).items() if value is not None}, **fields}
    return fields


def _image_size(fields: Mapping[str, Any], _: int) -> tuple[int, ...]:
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
    for channels in ("feature_projection_input_dim", "input_feat_per_channel", "input_dim"):
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


_SIZES = dict(zip(SIGNALS, (_image_size, _video_size, _feature_size, _wave_size), strict=False))


Padding = Literal["none", "left", "right"]

_IGNORED = -100
_CHARACTERS = 128  # ids of models without a vocabulary, which read code points
_SEQUENCE_CLASSIFIERS = (*(f"{of}_CLASSIFICATION" for of in ("SEQUENCE", "IMAGE", "AUDIO", "VIDEO")), "AUDIO_XVECTOR")
_CHOICES = ("MULTIPLE_CHOICE",)  # of two sequences
_YES_OR_NO = (*_CHOICES, "NEXT_SENTENCE_PREDICTION")
_SENTENCE_LABELS = ("next_sentence_label", "sentence_order_label")  # of BERT's pretraining and its like
MEDIA = {"pixel_values": ("image", "get_image_features"), "input_features": ("audio", "get_audio_features")}
"""What holds images and sound beside tokens: the name of their token in a config, and the method that encodes them."""
_PADDED_SHARE = 4  # every second sequence ends or begins with a quarter of padding


def make_batch(
    model: PreTrainedModel, *, batch_size: int = 2, sequence_length: int = 16, seed: int, padding: Padding = "none"
) -> dict[str, Tensor]:
    """Returns random inputs for `model`, with labels if its forward takes them.

    Args:
        padding: side of every second sequence where a quarter is masked.

    Returns:
        input_ids, attention_mask and labels, [batch_size, sequence_length] unless the head requires another shape;
            images or audio instead or in addition, if the model needs them.
    """
    generator = torch.Generator().manual_seed(seed)
    takes, shape = inspect.signature(model.forward).parameters, (batch_size, sequence_length)
    mask = _mask(shape, padding)
    family = FAMILIES.get(model.config.model_type)
    batch: dict[str, Tensor] = {}
    if "input_ids" in takes:
        num_rows = getattr(model.config, family.id_rows) if family and family.id_rows else 1
        batch["input_ids"] = _tokens(model, (batch_size * num_rows, sequence_length), generator)
        if "attention_mask" in takes:
            batch["attention_mask"] = mask
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = _tokens(model, shape, generator)
    batch |= (patches := make_patches(model, [_GRID] * batch_size, generator=generator))
    for name in () if patches else signals_of(model):
        batch[name] = make_signal(model, name, shape, generator=generator)
        if family and family.masks_frames:
            batch["attention_mask"] = torch.ones(batch[name].shape[:2], dtype=torch.long)
    tokens = batch.get("input_ids")
    if tokens is not None and _is_listed(model, *_CHOICES):
        batch |= {name: torch.stack((value, value.flip(-1)), 1) for name, value in batch.items()}
    batch |= _labels(model, tokens, mask, generator)
    if tokens is not None and model.config.is_encoder_decoder and _is_listed(model, *_SEQUENCE_CLASSIFIERS):
        last = mask.flip(1).argmax(1)  # distance of the last token from the end; such heads read it there
        tokens[torch.arange(batch_size), sequence_length - 1 - last] = model.config.eos_token_id
    return batch


def make_medium(
    model: PreTrainedModel, name: str, grids: Sequence[tuple[int, ...]] = (_GRID,), *, generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns what a method in `MEDIA` encodes: as many images or sounds as `grids`, for the argument `name`."""
    patches = make_patches(model, grids, generator=generator, beside_tokens=True)
    if name in patches:
        return patches
    fields, takes = _fields(model), inspect.signature(encoder_of(model, name)).parameters
    *_, height, width = sizes = make_signal(model, name, (1, 16), generator=generator).shape[1:]
    frames = width if height == fields.get("num_mel_bins") else height
    image = fields.get("image_grid_pinpoints", [(height, width)])[0]  # in tiles, which follow the whole image
    tiles = [1 + math.prod(image) // (height * width)] if "image_grid_pinpoints" in fields else []
    tiles += [1] * ("pixel_attention_mask" in takes)
    tiles += [1, fields["max_num_tiles"]] if "aspect_ratio_ids" in takes else []
    ones = {"pixel_attention_mask": (1, height, width), "aspect_ratio_ids": (1,), "aspect_ratio_mask": tiles}
    ones |= {"input_features_mask": (frames,), "feature_attention_mask": (frames,)}
    found = {key: torch.ones(len(grids), *shape, dtype=torch.long) for key, shape in ones.items()}
    found["image_sizes"] = torch.tensor([image] * len(grids))
    signal = torch.randn((len(grids), *tiles, *sizes), generator=generator)
    return {name: signal} | {key: value for key, value in found.items() if key in takes}


def encoder_of(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    """Returns the first method in `MEDIA` of a module that takes the argument `name`; else the model's forward."""
    methods = dict.fromkeys(getattr(module, MEDIA[name][1], model.forward) for module in model.modules())
    own = (method for method in methods if name in inspect.signature(method).parameters)
    return min(own, key=lambda method: method == model.forward)


def add_media(model: PreTrainedModel, batch: dict[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """Adds an image and a sound before the tokens of every row, as far as the model supports them."""
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in MEDIA if name in missing_media(model, batch) and "input_ids" in batch]:
        with suppress(Exception), torch.no_grad():  # a model that wants other inputs beside these fails in any way
            batch = _with_medium(model, batch, name, generator)
    return batch


def _with_medium(
    model: PreTrainedModel, batch: dict[str, Tensor], name: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns the batch with a medium, and as many placeholder tokens before each row as it takes."""
    config, rows = model.config, len(batch["input_ids"])
    numbers = (getattr(config, f"{MEDIA[name][0]}_token_{end}", None) for end in ("id", "index"))
    token, start = next(filter(is_count, numbers)), getattr(config, "vision_start_token_id", None)
    signal = make_medium(model, name, [_GRID] * rows, generator=generator)
    for number in _num_tokens(model, name, signal, rows):
        before = torch.tensor([start] * is_count(start) + [token] * number)
        heads = {"input_ids": before, "attention_mask": torch.ones_like(before)}
        heads |= {} if "decoder_input_ids" in batch else {"labels": torch.full_like(before, _IGNORED)}
        own = {key: torch.cat((heads[key].expand(rows, -1), batch[key]), 1) for key in heads.keys() & batch.keys()}
        takes, is_medium = inspect.signature(model.forward).parameters, (own["input_ids"] == token).long()
        found = batch | own | signal | dict.fromkeys({"mm_token_type_ids", "token_type_ids"} & takes.keys(), is_medium)
        if "cross_attention_mask" in takes:  # of every token, to the tiles of every image of its row
            found["cross_attention_mask"] = is_medium.new_ones(*is_medium.shape, *signal[name].shape[1:3])
        with suppress(Exception):
            copy.deepcopy(model)(**clone_batch(found))  # modules may cache results
            return found
    return batch


def _num_tokens(model: PreTrainedModel, name: str, signal: dict[str, Tensor], rows: int) -> Sequence[int]:
    """Returns the numbers of placeholder tokens of a row to try: that of the encoder's features, if it is a method."""
    encode = encoder_of(tried := copy.deepcopy(model), name)
    if encode == tried.forward:
        return range(2, 65)
    features = tree_leaves(getattr(output := encode(**signal), "pooler_output", output))
    return [sum(each.numel() // each.shape[-1] for each in features if isinstance(each, Tensor)) // rows]


def missing_media(model: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
    """Returns the image, video and sound arguments of the model's forward that a batch does not have."""
    takes = inspect.signature(model.forward).parameters
    return [name for name in SIGNALS if name in takes and name not in batch]


def guess_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Returns small candidate batches for a forward: that of `make_batch`, or required arguments as token ids [2, 16]
    or as numbers [2, 16, features of the first linear], with ids as labels.
    """
    if isinstance(model, PreTrainedModel):
        return [make_batch(model, seed=0)]
    generator = torch.Generator().manual_seed(0)
    takes = inspect.signature(model.forward).parameters.values()
    given = [each for each in takes if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    names = [each.name for each in given if each.name == "labels" or each.default is each.empty]
    ids = {name: torch.randint(0, _size_of(model, "num_embeddings"), (2, 16), generator=generator) for name in names}
    width = _size_of(model, "in_features", "input_size")
    numbers = {name: torch.randn(2, 16, width, generator=generator) for name in names if name != "labels"}
    return [ids, ids | numbers]


def _size_of(model: nn.Module, *names: str) -> int:
    """Returns the first size attribute of one of these names in a module."""
    found = (getattr(module, name, None) for module in model.modules() for name in names)
    return next((size for size in found if isinstance(size, int)), 2)


def _labels(
    model: PreTrainedModel, tokens: Tensor | None, mask: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    takes, (batch_size, sequence_length) = _takes(model), mask.shape
    if "start_positions" in takes:
        spans = {
            name: torch.randint(1, sequence_length, (batch_size,), generator=generator)
            for name in ("start_positions", "end_positions")
        }
        asks = "question_positions" in takes and _is_listed(model, "PRETRAINING")
        return spans | ({"question_positions": torch.zeros(batch_size, 1, dtype=torch.long)} if asks else {})
    if "labels" not in takes or "list[dict]" in str(takes["labels"].annotation):
        return {}  # boxes of every image are no tensor; without them there is no loss
    if _is_listed(model, *_YES_OR_NO):
        return {"labels": torch.randint(0, 2, (batch_size,), generator=generator)}
    if _is_listed(model, *_SEQUENCE_CLASSIFIERS):
        return {"labels": _classes(model.config, batch_size, generator)}
    if _is_listed(model, "CTC"):  # fewer labels than frames
        return {"labels": _tokens(model, (batch_size, sequence_length // 4), generator)}
    if _is_listed(model, "TOKEN_CLASSIFICATION"):
        labels = torch.randint(0, model.config.num_labels, tuple(mask.shape), generator=generator)
    elif "decoder_input_ids" in takes or tokens is None:
        labels = _tokens(model, (batch_size, sequence_length), generator)
    elif len(tokens) == len(mask):
        labels = tokens
    else:
        labels, mask = tokens.view(batch_size, -1, sequence_length).mT, mask[..., None]
    sentences = [name for name in takes if name in _SENTENCE_LABELS]  # without them there is no loss
    return {"labels": labels.masked_fill(mask == 0, _IGNORED)} | {
        name: torch.randint(0, 2, (batch_size,), generator=generator) for name in sentences
    }


def _classes(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> Tensor:
    """Labels of each row: a class, or by the config's `problem_type` several classes or numbers."""
    shape, problem = (rows, config.num_labels), getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return torch.randint(0, 2, shape, generator=generator).float()
    if problem == "regression" and config.num_labels > 1:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, config.num_labels, (rows,), generator=generator)


def _takes(model: PreTrainedModel) -> dict[str, inspect.Parameter]:
    """Returns the arguments of the model's forward, including those of an overridden forward if it takes `**kwargs`."""
    found: dict[str, inspect.Parameter] = {}
    for kind in type(model).__mro__:
        if "forward" in vars(kind):
            own = inspect.signature(vars(kind)["forward"]).parameters
            found = {**own, **found}
            if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in own.values()):
                break
    return found


def _is_listed(model: PreTrainedModel, *tasks: str) -> bool:
    return any(type(model).__name__ in class_names(f"MODEL_FOR_{task}_MAPPING_NAMES") for task in tasks)


def _mask(shape: tuple[int, int], padding: Padding) -> Tensor:
    mask = torch.ones(shape, dtype=torch.long)
    width = shape[1] // _PADDED_SHARE
    if padding != "none" and width:
        mask[1::2, slice(None, width) if padding == "left" else slice(-width, None)] = 0
    return mask


def _tokens(model: PreTrainedModel, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Returns random token ids without special ones, which stand for images, padding and ends."""
    sizes = [size for part in sub_configs(model.config) if isinstance(size := vars(part).get("vocab_size"), int)]
    special = {
        token
        for config in sub_configs(model.config)
        for name, value in vars(config).items()
        if name.endswith(("token_id", "token_index", "token_ids"))
        for token in (value if isinstance(value, list | tuple) else (value,))
    }
    allowed = torch.tensor([token for token in range(min(sizes, default=_CHARACTERS)) if token not in special])
    return allowed[torch.randint(0, len(allowed), shape, generator=generator)]
