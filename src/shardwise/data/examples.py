"""Converts records to documents whose responses are learned: prompts with responses, and conversations.

# [Note: what a conversation teaches]
A chat template writes a conversation as one text. If the template marks the assistant's messages (`{% generation %}`),
transformers reports their tokens. Otherwise the conversation is written three times per assistant message: in full, up
to the message with the prompt for it (`add_generation_prompt`), and up to the message's end. If the last is a prefix of
the first, what it does not share with the prompt is the message and its end token.

# [Note: templates that rewrite]
Templates of reasoning models write a message otherwise once others follow (they drop its reasoning), and some write a
last token that is gone then. There every message is written as it was when it was the last one, and these are joined,
which is what a training template says by hand (TRL's for Qwen3: "always include the thinking block"). What follows a
message is found by a mark in place of its content: texts behind the mark do not depend on what was rewritten.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.data.corpus import Record, digest
from shardwise.data.documents import Document
from shardwise.data.messages import Message, read_messages, read_prompt
from shardwise.errors import ConfigError, LoadError, ShardwiseError

_BATCH = 256
_MARK = "Qp7mark7pQ"  # stands in for a message's content
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class ExampleEncoder:
    """Function that converts records to documents."""

    encode: Callable[[Sequence[Record]], list[Document]]
    fingerprint: str


def build_example_encoder(
    tokenizer: Any, *, kind: Literal["prompt", "chat"], as_chat: bool = False, learn: Literal["all", "last"] = "all"
) -> ExampleEncoder:
    """Builds the `ExampleEncoder` of a tokenizer.

    Args:
        tokenizer: a transformers tokenizer with an end token.
        as_chat: whether a prompt and its response are messages, written by the chat template.
        learn: whether all messages of the assistant are learned, or the last one alone.
    """
    uses_template = kind == "chat" or as_chat
    if not uses_template:
        before = start_tokens(tokenizer)
        fingerprint = digest("prompt", before, tokenizer.eos_token_id)
        return ExampleEncoder(encode=partial(_encode_prompts, tokenizer, before), fingerprint=fingerprint)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ConfigError(
            "the tokenizer has no chat template",
            why="it says how messages become one text",
            fix="name one with data.chat_template, or write prompts and responses in plain text: data.format: prompt",
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"a chat template with a {type(tokenizer).__name__}",
            why="it does not tell which letters a token stands for, so responses cannot be found",
            fix="use a fast tokenizer (tokenizer.json)",
        )
    conversations = _Conversations(tokenizer, of_prompts=kind == "prompt", learn=learn)
    specials = sorted((name, str(value)) for name, value in tokenizer.special_tokens_map.items())
    fingerprint = digest("chat", kind, str(template), specials, learn)
    return ExampleEncoder(
        encode=lambda records: [conversations.encode(record) for record in records], fingerprint=fingerprint
    )


def encode_examples(records: Iterable[Record], encoder: ExampleEncoder) -> Iterator[Document]:
    """Yields one document per record."""
    several = iter(records)
    while batch := list(itertools.islice(several, _BATCH)):
        yield from encoder.encode(batch)


def _encode_prompts(tokenizer: Any, before: list[int], records: Sequence[Record]) -> list[Document]:
    """Returns documents of the tokens `before` a text, the prompt, and as targets the response and the end token.

    Prompt and response are tokenized separately like at inference, where only the prompt is known.
    """
    texts, found = zip(*map(read_prompt, records), strict=True), []
    prompts, responses = (encode_texts(tokenizer, each) for each in texts)
    for record, prompt, response in zip(records, prompts, responses, strict=True):
        if not response:
            raise LoadError("the response is empty: it has no tokens", at=record.place)
        tokens = [*before, *prompt, *response, tokenizer.eos_token_id]
        is_target = np.arange(len(tokens)) >= len(before) + len(prompt)
        found.append(Document(np.array(tokens, dtype=np.uint32), is_target))
    return found


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of each text, without special tokens."""
    # verbose: it would warn of texts longer than the model's context, which are cut later.
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def start_tokens(tokenizer: Any) -> list[int]:
    """Returns the token that the tokenizer puts before every text, if there is one."""
    first = tokenizer("a")["input_ids"][:1]
    return list(first) if first and first[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id) else []


class _Conversations:
    """Messages through the chat template; see [Note: what a conversation teaches]."""

    def __init__(self, tokenizer: Any, *, of_prompts: bool, learn: str) -> None:
        self._tokenizer, self._of_prompts, self._learn = tokenizer, of_prompts, learn

    def encode(self, record: Record) -> Document:
        """Returns the conversation as a document; the assistant's messages are targets."""
        (messages, learned), tools = self._messages(record), None if self._of_prompts else record.get("tools")
        if self._learn == "last":
            last = max(place for place, is_learned in enumerate(learned) if is_learned)
            learned = [place == last for place in range(len(messages))]
        try:
            found = self._written(messages, learned, tools or None)
        except ShardwiseError as error:
            raise LoadError(error.summary, at=record.place, why=error.why, fix=error.fix) from error
        except Exception as error:  # a template is a program, which fails in any way
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise LoadError("the chat template refuses the messages", at=record.place, why=why) from error
        if not found.is_target[1:].any():
            raise LoadError("the chat template leaves out the assistant's messages", at=record.place)
        return found

    def _messages(self, record: Record) -> tuple[list[Message], list[bool]]:
        if not self._of_prompts:
            return read_messages(record)
        prompt, response = read_prompt(record)
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}], [False, True]

    def _written(self, messages: list[Message], learned: list[bool], tools: Any) -> Document:
        if _GENERATION.search(self._tokenizer.get_chat_template(tools=tools)):
            marked = self._tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            said = [is_learned for message, is_learned in zip(messages, learned, strict=True) if _is_said(message)]
            mask = np.array(marked["assistant_masks"], np.bool_)
            return Document(np.array(marked["input_ids"], np.uint32), mask if all(said) else _only_runs(mask, said))
        full, kept = self._spans(messages, learned, tools)
        encoded = self._tokens(full)
        is_target = [
            any(start < stop_of and first_of < stop for first_of, stop_of in kept)
            for start, stop in encoded["offset_mapping"]
        ]
        return Document(np.array(encoded["input_ids"], np.uint32), np.array(is_target, np.bool_))

    def _spans(self, messages: list[Message], learned: list[bool], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Returns the conversation as a text, and the characters of each message that is learned."""
        full, spans = self._text(messages, tools), []
        for place in (place for place, is_learned in enumerate(learned) if is_learned):
            before, until = self._before(messages, place, tools), self._text(messages[: place + 1], tools)
            if not full.startswith(until) or self._with_reasoning(messages, place, tools) != until:
                text, all_spans = self._joined(messages, tools)
                return text, [span for place, span in all_spans.items() if learned[place]]
            spans.append((self._common(before, until), len(until)))
        return full, spans

    def _joined(self, messages: list[Message], tools: Any) -> tuple[str, dict[int, tuple[int, int]]]:
        """Returns the same where messages are rewritten: [Note: templates that rewrite]."""
        text, spans, last = "", {}, None
        for place in filter(lambda place: _is_said(messages[place]), range(len(messages))):
            shown, end = messages, 0
            if last is not None:
                shown = [*messages[:last], {**messages[last], "content": _MARK}, *messages[last + 1 :]]
                was_last = _behind_mark(self._text(shown[: last + 1], tools))
                follows = _behind_mark(self._text(shown[: place + 1], tools))
                end = self._common(was_last, follows)
                if end < len(was_last):  # a token that ends the last message of all
                    text = text[: len(text) - len(was_last) + end]
                    spans[last] = spans[last][0], len(text)
            before, until = self._before(shown, place, tools), self._with_reasoning(shown, place, tools)
            if last is not None:
                before, until = _behind_mark(before)[end:], _behind_mark(until)[end:]
            start = len(text) + self._common(before, until)
            text += until
            spans[place], last = (start, len(text)), place
        return text, spans

    def _before(self, messages: list[Message], place: int, tools: Any) -> str:
        """Returns the text that asks for message `place`. transformers writes no conversation without a message, so for
        the first one it is found by the text that asks for a second one.
        """
        if place:
            return self._text(messages[:place], tools, asks=True)
        until, asks = self._text(messages[:1], tools), self._text(messages[:1], tools, asks=True)
        header = asks.removeprefix(until)
        return until[: until.index(header) + len(header)] if header in until else ""

    def _with_reasoning(self, messages: list[Message], place: int, tools: Any) -> str:
        """Returns the text up to message `place`. Where the template drops its reasoning, that is put back."""
        until, content = self._text(messages[: place + 1], tools), messages[place].get("content")
        reasoning, end, _ = content.partition("</think>") if isinstance(content, str) else ("", "", "")
        if not end or reasoning.rpartition("<think>")[2].strip() in until:
            return until
        marked = [*messages[:place], {**messages[place], "content": _MARK[::-1]}]
        return self._text(marked, tools).replace(_MARK[::-1], str(content))

    def _common(self, one: str, other: str) -> int:
        """Returns how many characters of two texts are equal at their beginning, in whole tokens of both."""
        if other.startswith(one):
            return len(one)
        pairs = enumerate(zip(one, other, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
        ends = []
        for text in (one, other):
            ends.append({0, *(stop for _, stop in self._tokens(text)["offset_mapping"])})
        return max(end for end in ends[0] & ends[1] if end <= shared)

    def _tokens(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, asks: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=asks
        )
        return text


def _is_said(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


def _behind_mark(text: str) -> str:
    before, mark, behind = text.rpartition(_MARK)
    if not mark or _MARK in before:
        raise LoadError(
            "the chat template does not tell which tokens are the assistant's",
            why="it has no {% generation %}, and rewrites what messages say once others follow",
            fix="name a training template with data.chat_template, or learn one message a conversation",
        )
    return behind


def _only_runs(is_target: NDArray[np.bool_], kept: Sequence[bool]) -> NDArray[np.bool_]:
    """Returns the targets of those messages that are kept; `is_target` has a run for each message."""
    starts = np.flatnonzero(is_target & ~np.concatenate([[False], is_target[:-1]]))
    if len(starts) != len(kept):
        raise LoadError(
            "the chat template does not tell the messages of the assistant apart",
            why=f"it marks {len(starts)} parts of {len(kept)} messages, of which some are not to be learned",
        )
    number = np.searchsorted(starts, np.arange(len(is_target)), side="right") - 1
    return is_target & np.asarray(kept, np.bool_)[np.maximum(number, 0)]
