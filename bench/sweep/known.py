"""What the installed transformers has: its architectures by task, their classes and default configurations."""

from __future__ import annotations

import copy
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from shardwise.errors import ConfigError, UnsupportedError, did_you_mean
from shardwise.tiny.families import sub_configs

__all__ = ["TASKS", "architectures", "default_config", "model_class"]

# Task -> the table of transformers that lists its classes.
TASKS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question_answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "video_classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "audio_classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech_seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}

_QWEN4_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
_MUSICGEN = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
_LACKING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 5 + ["linear_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "musicgen": _MUSICGEN,
    "musicgen_melody": _MUSICGEN,
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
}
"""Arguments without which a default configuration does not exist; every published one has them."""


def architectures(*tasks: str) -> tuple[tuple[str, str, str], ...]:
    """(model type, task, class name) of all that the installed transformers lists for the tasks, sorted in each.

    Raises:
        ConfigError: a task is unknown.
    """
    found = []
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"unknown task {task!r}{did_you_mean(task, TASKS)}", fix=f"use one of {', '.join(TASKS)}")
        for model_type, names in sorted(getattr(modeling_auto, TASKS[task]).items()):
            for name in (names,) if isinstance(names, str) else names:
                found.append((model_type, task, name))
    return tuple(found)


def model_class(name: str) -> type[PreTrainedModel]:
    """The class of transformers called `name`.

    Raises:
        UnsupportedError: transformers has none, or lacks a package for it.
    """
    try:
        return getattr(transformers, name)
    except (AttributeError, ImportError) as error:
        raise UnsupportedError(f"no model class {name!r}", why=str(error)) from error


def default_config(model_type: str, *, task: str | None = None) -> PreTrainedConfig:
    """The configuration transformers gives a model type without arguments.

    Args:
        model_type: as in `config.model_type`.
        task: "causal_lm" makes a decoder of an encoder that can be either, such as BERT; "sequence_classification"
            gives a decoder the padding token without which its head takes no batch.

    Raises:
        UnsupportedError: there is none, or it does not pass its own checks.
    """
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"no model type {model_type!r} in transformers{did_you_mean(model_type, CONFIG_MAPPING)}"
        )
    try:
        config = CONFIG_MAPPING[model_type](**copy.deepcopy(_LACKING.get(model_type, {})))
    except (StrictDataclassError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"no default configuration of {model_type!r}", why=f"{type(error).__name__}: {error}"
        ) from error
    if task == "causal_lm" and "is_decoder" in vars(config) and not config.is_encoder_decoder:
        config.is_decoder = True
    if task == "sequence_classification":
        for part in sub_configs(config):
            if vars(part).get("pad_token_id", 0) is None:
                part.pad_token_id = 0
    return config
