"""Reads the messages of a conversation from a record, in the shapes that data sets have."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardwise.data.corpus import Record
from shardwise.errors import LoadError

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_ROLES |= {"function_call": "assistant", "observation": "tool", "function": "tool"}
_LEARNED = ("weight", "train", "training")
"""Keys of a message that say whether it is learned: those of OpenAI, axolotl and others."""
_LOOKS = 'it looks like [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'

Message = dict[str, Any]


def read_messages(record: Record) -> tuple[list[Message], list[bool]]:
    """Returns the messages of a record with `role` and `content`, and of each whether it may be learned.

    Messages of ShareGPT (`conversations` with `from` and `value`) are renamed, content in parts of text is joined, and
    arguments of tool calls that are JSON texts are read. A message of the assistant with `weight: 0`, `train: false`
    or `training: false` is not learned.
    """
    if record.name("messages") == "messages" not in record.values and "conversations" in record.values:
        record = replace(record, columns={"messages": "conversations"})
    messages = record.value("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise LoadError(f"expected a list of messages, found {messages!r:.40}", at=record.place, fix=_LOOKS)
    read = [_read_message(message, number, record.place) for number, message in enumerate(messages)]
    learned = [message["role"] == "assistant" and all(message.pop(flag, True) for flag in _LEARNED) for message in read]
    if all(message["role"] != "assistant" for message in read):
        roles = ", ".join(dict.fromkeys(message["role"] for message in read))
        raise LoadError(
            "no message is the assistant's, so nothing is learned", at=record.place, why=f"the roles are {roles}"
        )
    if not any(learned):
        raise LoadError("every message of the assistant is marked as one not to learn", at=record.place)
    return read, learned


def _read_message(message: Any, number: int, place: str) -> Message:
    if isinstance(message, Mapping) and "from" in message and "value" in message:
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"], **rest}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise LoadError(f"message {number} has no role", at=place, fix=_LOOKS)
    read = {key: value for key, value in message.items() if value is not None}
    content = read.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        read["content"] = content = "".join(_read_part(part, number, place) for part in content)
    elif not isinstance(content, str | None) and read["role"] != "tool":
        raise LoadError(f"message {number} holds {type(content).__name__}, not text", at=place)
    for flag in _LEARNED:
        if read.get(flag, 1) not in (0, 1):
            raise LoadError(f"{flag} of message {number} is {read[flag]!r}, must be 0 or 1, false or true", at=place)
    if read["role"] == "assistant" and not str(content or "").strip() and not read.get("tool_calls"):
        raise LoadError(f"the response is empty: message {number}, the assistant's, says nothing", at=place)
    if isinstance(read.get("tool_calls"), Sequence):
        read["tool_calls"] = [_read_arguments(call) for call in read["tool_calls"]]
    return read


def _read_part(part: Any, number: int, place: str) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise LoadError(f"message {number} holds a part of type {kind}, not text", at=place)


def _read_arguments(call: Any) -> Any:
    """Returns a tool call whose arguments are an object: a template would write a JSON text as a text of a text."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function.get("arguments"), str):
        return call
    with suppress(ValueError):
        if isinstance(arguments := json.loads(function["arguments"]), dict):
            read = {**function, "arguments": arguments}
            return {**call, "function": read} if "function" in call else read
    return call


def read_prompt(record: Record) -> tuple[str, str]:
    """Returns a record's prompt and response; Alpaca's are `instruction` and any `input` after it, and `output`."""
    is_alpaca = record.values.keys() >= {"instruction", "output"} and record.name("prompt") not in record.values
    if is_alpaca:
        record = replace(record, columns={"prompt": "instruction", "response": "output"})
    prompt, response = record.text("prompt"), record.text("response")
    if not response.strip():
        what = f"the response is empty: {record.name('response')!r} holds {response!r}"
        raise LoadError(what, at=record.place, fix="leave the record out")
    context = record.values.get("input") if is_alpaca else None
    return f"{prompt}\n\n{context}" if context else prompt, response
