"""Converts records to documents whose responses are learned: prompts with responses, and conversations.

# [Note: what a conversation teaches]
A chat template writes a conversation as one text. If the template marks the assistant's messages (`{% generation %}`),
transformers reports their tokens. Otherwise the conversation is written three times per assistant message: in full, up
to the message with the prompt for it (`add_generation_prompt`), and up to the message's end. If the latter two are
prefixes of the first, the text between them is the message and its end token. Templates that rewrite a message once
others follow are not supported.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardwise.data.corpus import digest
from shardwise.data.documents import Document, Record
from shardwise.errors import ConfigError, LoadError, ShardwiseError, did_you_mean

_BATCH = 256
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class ExampleEncoder:
    """Function that converts records to documents."""

    encode: Callable[[Sequence[Record]], list[Document]]
    fingerprint: str


def build_example_encoder(
    tokenizer: Any, *, kind: Literal["prompt", "chat"], keys: Mapping[str, str], as_chat: bool = False
) -> ExampleEncoder:
    """Builds the `ExampleEncoder` of a tokenizer.

    Args:
        tokenizer: a transformers tokenizer with an end token.
        keys: names of "prompt" and "response", or "messages" and "tools", in a record.
        as_chat: whether a prompt and its response are messages, written by the chat template.
    """
    uses_template = kind == "chat" or as_chat
    if not uses_template:
        writer = _PlainPrompts(tokenizer, keys)
        fingerprint = digest("prompt", dict(keys), writer.before, tokenizer.eos_token_id)
        return ExampleEncoder(encode=writer.encode, fingerprint=fingerprint)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ConfigError(
            "the tokenizer has no chat template",
            why="it says how messages become one text",
            fix='set one and save it (tokenizer.chat_template = "..."), or write prompts and responses in plain text\n'
            "with data.format: prompt",
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"a chat template with a {type(tokenizer).__name__}",
            why="it does not tell which letters a token stands for, so responses cannot be found",
            fix="use a fast tokenizer (tokenizer.json)",
        )
    conversations = _Conversations(tokenizer, keys, of_prompts=kind == "prompt")
    specials = sorted((name, str(value)) for name, value in tokenizer.special_tokens_map.items())
    fingerprint = digest("chat", kind, dict(keys), str(template), specials)
    return ExampleEncoder(
        encode=lambda records: [conversations.encode(record) for record in records], fingerprint=fingerprint
    )


def encode_examples(records: Iterable[Record], encoder: ExampleEncoder) -> Iterator[Document]:
    """Yields one document per record."""
    several = iter(records)
    while batch := list(itertools.islice(several, _BATCH)):
        yield from encoder.encode(batch)


class _PlainPrompts:
    """Prompt and response, tokenized separately like at inference, where only the prompt is known."""

    def __init__(self, tokenizer: Any, keys: Mapping[str, str]) -> None:
        self._tokenizer, self._keys = tokenizer, keys
        first = tokenizer("a")["input_ids"][:1]
        self.before = list(first) if first == [tokenizer.bos_token_id] else []

    def encode(self, records: Sequence[Record]) -> list[Document]:
        """Yields each document: the tokenizer's start tokens, the prompt, and as targets the response and the end
        token.
        """
        prompts = [_text(record, self._keys["prompt"], self._keys) for record in records]
        responses = [_text(record, self._keys["response"], self._keys, may_be_empty=False) for record in records]
        found = []
        for record, prompt, response in zip(records, self._ids(prompts), self._ids(responses), strict=True):
            if not response:
                raise LoadError("the response is empty: it has no tokens", at=record.place)
            before, learned = [*self.before, *prompt], [*response, self._tokenizer.eos_token_id]
            is_target = np.repeat([False, True], [len(before), len(learned)])
            found.append(Document(np.array([*before, *learned], dtype=np.uint32), is_target))
        return found

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids


class _Conversations:
    """Messages through the chat template; see [Note: what a conversation teaches]."""

    def __init__(self, tokenizer: Any, keys: Mapping[str, str], *, of_prompts: bool) -> None:
        self._tokenizer, self._keys, self._of_prompts = tokenizer, keys, of_prompts

    def encode(self, record: Record) -> Document:
        """Returns the conversation as a document; the assistant's messages are targets."""
        messages, tools = self._messages(record), record.values.get(self._keys.get("tools", ""))
        try:
            found = self._written(messages, tools or None)
        except ShardwiseError as error:
            raise LoadError(error.summary, at=record.place, why=error.why, fix=error.fix) from error
        except Exception as error:  # a template is a program, which fails in any way
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise LoadError("the chat template refuses the messages", at=record.place, why=why) from error
        if not found.is_target[1:].any():
            raise LoadError("the chat template leaves out the assistant's messages", at=record.place)
        return found

    def _messages(self, record: Record) -> Sequence[Mapping[str, Any]]:
        if self._of_prompts:
            prompt = _text(record, self._keys["prompt"], self._keys)
            response = _text(record, self._keys["response"], self._keys, may_be_empty=False)
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        messages = _value(record, self._keys["messages"], self._keys)
        _check_messages(messages, record.place)
        return [{key: value for key, value in message.items() if value is not None} for message in messages]

    def _written(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Document:
        if _GENERATION.search(self._tokenizer.get_chat_template(tools=tools)):
            marked = self._tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            return Document(np.array(marked["input_ids"], np.uint32), np.array(marked["assistant_masks"], np.bool_))
        full = self._text(messages, tools)
        spans = [
            self._span(full, messages, place, tools)
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        encoded = self._tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        is_target = [
            any(start < stop_of and first_of < stop for first_of, stop_of in spans)
            for start, stop in encoded["offset_mapping"]
        ]
        return Document(np.array(encoded["input_ids"], np.uint32), np.array(is_target, np.bool_))

    def _span(self, full: str, messages: Sequence[Mapping[str, Any]], place: int, tools: Any) -> tuple[int, int]:
        """Returns the character span in `full` of the message with index `place`."""
        before = self._text(messages[:place], tools, asks=True) if place else ""
        until = self._text(messages[: place + 1], tools)
        if not (full.startswith(until) and until.startswith(before)):
            raise LoadError(
                "the chat template does not tell which tokens are the assistant's",
                why="it has no {% generation %}, and writes the messages before a response differently with it or\n"
                f"with what follows (message {place})",
                fix="put {% generation %} around what the assistant says in the template, or give conversations in\n"
                "which the last message alone is the assistant's",
            )
        return len(before), len(until)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, asks: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=asks
        )
        return text


def _check_messages(messages: Any, place: str) -> None:
    """Raises if `messages` is no conversation with an assistant message."""
    looks = 'it looks like [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise LoadError(f"expected a list of messages, found {messages!r:.40}", at=place, fix=looks)
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise LoadError(f"message {number} has no role", at=place, fix=looks)
        content = message.get("content")
        says = content.strip() if isinstance(content, str) else content
        if message["role"] == "assistant" and not says and not message.get("tool_calls"):
            raise LoadError(f"the response is empty: message {number}, the assistant's, says nothing", at=place)
    if all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise LoadError("no message is the assistant's, so nothing is learned", at=place, why=f"the roles are {roles}")


def _value(record: Record, key: str, keys: Mapping[str, str]) -> Any:
    if key in record.values:
        return record.values[key]
    setting = next(name for name, value in keys.items() if value == key)
    present = [str(name) for name in record.values]
    raise LoadError(
        f"there is no key {key!r}{did_you_mean(key, present)}",
        at=record.place,
        why=f"the keys are {', '.join(present)}",
        fix=f"name the key with data.{setting}_key; all records of a data set have one data.format",
    )


def _text(record: Record, key: str, keys: Mapping[str, str], *, may_be_empty: bool = True) -> str:
    value = _value(record, key, keys)
    if not isinstance(value, str):
        fix = "lists of messages are read with data.format: chat" if isinstance(value, list) else None
        raise LoadError(f"{key!r} holds {type(value).__name__}, not text", at=record.place, fix=fix)
    if not may_be_empty and not value.strip():
        raise LoadError(f"the response is empty: {key!r} holds {value!r}", at=record.place, fix="leave the record out")
    return value
