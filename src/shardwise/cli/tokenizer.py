"""The tokenizer of a run, and its encoder."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.data.corpus import Encoder, digest
from shardwise.errors import ConfigError, LoadError, one_line
from shardwise.train.run_config import TrainConfig
from shardwise.weights.locate import locate_source

__all__ = ["build_encoder", "load_tokenizer", "read_tokenizer"]


def load_tokenizer(config: TrainConfig) -> Any:
    """The run's tokenizer. Raises `LoadError` if transformers cannot load it."""
    return read_tokenizer(str(config.model.tokenizer or config.model.path), option="model.tokenizer")


def read_tokenizer(place: str, *, option: str) -> Any:
    """The tokenizer of the directory or hub id in `option`. Raises `LoadError` if it cannot be loaded."""
    locate_source(place)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        if len(tokenizer.get_vocab().keys() - special) < 2:  # transformers invents one where there are no files
            raise ValueError("there are no tokenizer files, so its vocabulary has special tokens only")
        return tokenizer
    except Exception as error:  # a damaged file raises errors of many kinds
        raise LoadError(
            f"cannot load a tokenizer from {place!r}",
            why=one_line(error),
            fix=f"set {option} to a directory or hub id with tokenizer files",
        ) from error


def build_encoder(tokenizer: Any) -> Encoder:
    """The `Encoder` of `tokenizer`. Raises `ConfigError` if the tokenizer has no end token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token",
            why="it separates the documents that share a row",
            fix='set one and save it: tokenizer.eos_token = "</s>"; tokenizer.save_pretrained(...)',
        )

    def encode(texts: list[str]) -> list[list[int]]:
        # verbose: it would warn of texts longer than the model's context, which are cut into rows later.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    fingerprint = digest(f"{type(tokenizer).__name__} {rules}")
    return Encoder(encode=encode, separator=int(tokenizer.eos_token_id), fingerprint=fingerprint)
