"""Examples of tasks other than text: a record becomes the inputs and labels of a model when its row is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import transformers
from torch import Tensor

from shardwise.data.batch import IGNORED, is_medium
from shardwise.data.config import TaskName
from shardwise.data.corpus import Record, digest
from shardwise.data.media import read_image, read_sound
from shardwise.data.messages import read_messages
from shardwise.data.rows import Rows
from shardwise.errors import LoadError, as_error, counted

Example = dict[str, Any]
_MULTIPLE = 8  # rows of text are padded to a multiple of this


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What turns records into examples.

    Attributes:
        tokenizer, images, audio: of transformers; None where a task needs none.
        processor: of a model that reads text with images.
        labels: the names of the classes, by index; empty for numbers.
        seq_length: most tokens of a text; longer ones are truncated.
        is_numbered: whether the data names classes by their numbers.
        start_token: id that the model itself puts before labels; None: none.
        dtype: of images and sound.
        fingerprint: changes with the tokenizer and the processors.
    """

    tokenizer: Any = None
    images: Any = None
    audio: Any = None
    processor: Any = None
    labels: tuple[str, ...] = ()
    is_numbered: bool = False
    seq_length: int = 512
    start_token: int | None = None
    dtype: torch.dtype = torch.float32
    fingerprint: str = ""

    def label(self, record: Record, value: Any) -> int | float:
        """Returns the index of a class by its name or number; a number where there are no classes."""
        if not self.labels:
            with as_error(LoadError, f"the label {value!r} is no number", TypeError, ValueError, at=record.place):
                return float(value)
        number = find_label(self.labels, value, is_numbered=self.is_numbered)
        if number is None:
            known = ", ".join(self.labels[:12])
            raise LoadError(f"the label {value!r} is none of the model's", at=record.place, why=f"they are {known}")
        return number


def find_label(labels: Sequence[str], value: Any, *, is_numbered: bool = False) -> int | None:
    """Returns the index of a class by its number, or by its name, maybe in other letters; None if there is none."""
    text = str(value)
    if is_numbered:
        return int(text) if text.isdecimal() and int(text) < len(labels) else None
    lower = [label.lower() for label in labels]
    if text not in labels and lower.count(text.lower()) == 1:
        return lower.index(text.lower())
    return labels.index(text) if text in labels else None


def _text_of(record: Record, column: str) -> str:
    value = record.value(column)
    if not isinstance(value, str | int | float):
        raise LoadError(f"{column!r} holds {type(value).__name__}, not text", at=record.place)
    return str(value)


def _encode_pair(record: Record, tools: Tools) -> Example:
    source, target = (_text_of(record, column) for column in ("prompt", "response"))
    limits = {"truncation": True, "max_length": tools.seq_length}
    labels = tools.tokenizer(text_target=target, **limits)["input_ids"]
    return {**tools.tokenizer(source, **limits), "labels": labels}


def _encode_text(record: Record, tools: Tools) -> Example:
    text, other = _text_of(record, "text"), record.get("text_pair")
    encoded = tools.tokenizer(text, other, truncation=True, max_length=tools.seq_length)
    return {**encoded, "labels": tools.label(record, record.value("label"))}


def _encode_words(record: Record, tools: Tools) -> Example:
    words, tags = record.value("tokens"), record.value("tags")
    if len(words) != len(tags):
        raise LoadError(f"{len(words)} tokens with {len(tags)} tags", at=record.place)
    encoded = tools.tokenizer(words, is_split_into_words=True, truncation=True, max_length=tools.seq_length)
    places = encoded.word_ids()
    firsts = [place is not None and place not in places[:number] for number, place in enumerate(places)]
    labels = [
        tools.label(record, tags[place]) if is_first else IGNORED
        for place, is_first in zip(places, firsts, strict=True)
    ]
    return {**encoded, "labels": labels}


def _encode_question(record: Record, tools: Tools) -> Example:
    encoded, spans = encode_answers(record, tools)
    return {**encoded, "start_positions": spans[0][0], "end_positions": spans[0][1]}


def encode_answers(record: Record, tools: Tools) -> tuple[Any, list[tuple[int, int]]]:
    """Returns the inputs of a question, and the first and the last token of each answer. Like in transformers' own
    script an answer beyond the row, or none, is at the first token.
    """
    question, context, answers = _text_of(record, "question"), _text_of(record, "context"), record.value("answers")
    if not isinstance(answers, Mapping) or not {"text", "answer_start"} <= answers.keys():
        fix = 'it looks like {"text": ["Ann"], "answer_start": [0]}, with empty lists where there is no answer'
        raise LoadError(f"the answers are {answers!r:.40}", at=record.place, fix=fix)
    encoded = tools.tokenizer(
        question, context, truncation="only_second", max_length=tools.seq_length, return_offsets_mapping=True
    )
    offsets, parts, spans = encoded.pop("offset_mapping"), encoded.sequence_ids(), []
    for first, text in zip(answers["answer_start"], answers["text"], strict=True):
        last = first + len(text)
        if context[first:last] != text:
            what = f"the answer {text!r} does not begin at {first} of the context"
            raise LoadError(what, at=record.place, why=f"there is {context[first:last]!r}")
        inside = [
            place
            for place, (part, (begin, stop)) in enumerate(zip(parts, offsets, strict=True))
            if part == 1 and begin < last and stop > first
        ]
        is_whole = inside and offsets[inside[0]][0] <= first and offsets[inside[-1]][1] >= last
        spans.append((inside[0], inside[-1]) if is_whole else (0, 0))
    return encoded, spans or [(0, 0)]


def _encode_image(record: Record, tools: Tools) -> Example:
    image = read_image(record.value("image"), record.directory)
    pixels = tools.images(image, return_tensors="np")["pixel_values"][0]
    return {"pixel_values": pixels, "labels": tools.label(record, record.value("label"))}


def _encode_sound(record: Record, tools: Tools) -> Example:
    return {**_hear(record, tools), "labels": tools.label(record, record.value("label"))}


def _encode_speech(record: Record, tools: Tools) -> Example:
    text = _text_of(record, "text")
    labels = tools.tokenizer(text, truncation=True, max_length=tools.seq_length)["input_ids"]
    starts = tools.start_token is not None and labels[:1] == [tools.start_token]  # the model puts it there itself
    return {**_hear(record, tools), "labels": labels[1:] if starts else labels}


def _hear(record: Record, tools: Tools) -> Example:
    heard = tools.audio(hear(record, tools), sampling_rate=tools.audio.sampling_rate, return_tensors="np")
    return {name: value[0] for name, value in heard.items()}


def hear(record: Record, tools: Tools) -> Any:
    """Returns the sound of a record, float32 [samples]."""
    return read_sound(record.value("audio"), record.directory, rate=tools.audio.sampling_rate)


def _encode_seen(record: Record, tools: Tools) -> Example:
    """A conversation with images: what the assistant says is learned."""
    messages = record.value("messages")
    shown = Record(record.place, {"messages": [_without_images(message) for message in messages]})
    _, learned = read_messages(shown)
    parts = [part for message in messages for part in _images_of(message)]
    raw = record.get("images") or [part.get("path") or part.get("url") or part.get("image") for part in parts]
    if len(raw) != len(parts):
        what = f"{counted(len(raw), 'image')} for {counted(len(parts), 'image part')} of the messages"
        fix = 'write {"type": "image"} into the content of the message that shows an image'
        raise LoadError(what, at=record.place, fix=fix)
    images = [read_image(image, record.directory) for image in raw]
    encoded = _see(tools, messages, images)
    tokens = encoded["input_ids"][0]
    is_target = np.zeros(len(tokens), np.bool_)
    for place in (place for place, is_learned in enumerate(learned) if is_learned):
        before = _see(tools, messages[:place], images, asks=True)["input_ids"][0]
        until = _see(tools, messages[: place + 1], images)["input_ids"][0]
        if [*until] != [*tokens[: len(until)]] or [*before] != [*until[: len(before)]]:
            why = f"it writes the messages before a response differently with what follows (message {place})"
            fix = "name a training template with data.chat_template, or give conversations of one answer"
            raise LoadError("the chat template does not tell what is learned", at=record.place, why=why, fix=fix)
        is_target[len(before) : len(until)] = True
    found = {name: value if is_medium(name) else value[0] for name, value in encoded.items()}
    return found | {"labels": np.where(is_target, tokens, IGNORED)}


def _see(tools: Tools, messages: Sequence[Any], images: Sequence[Any], *, asks: bool = False) -> Any:
    """Returns the inputs of messages. The template writes all special tokens."""
    text = tools.processor.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
    shown = list(images[: sum(len(_images_of(message)) for message in messages)])
    return tools.processor(text=[text], images=shown or None, return_tensors="np", add_special_tokens=False)


def _images_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, Sequence) else ()
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def _without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    images = _images_of(message)
    return {**message, "content": [part for part in message["content"] if part not in images]} if images else message


@dataclass(frozen=True)
class Task:
    """How a task is trained.

    Attributes:
        class_name: name of transformers' auto class.
        encode: turns a record into an example; None for text, whose documents are kept in a file.
        columns: what a record holds, by the names that `data.columns` may map to others; labels come last.
        metrics: what is measured besides the loss.
        needs: the tools that it takes.
        adapter_type: PEFT's `task_type`; "" where it has none.
    """

    class_name: str
    encode: Callable[[Record, Tools], Example] | None = None
    columns: tuple[str, ...] = ()
    metrics: Literal["", "classes", "spans", "summaries", "words", "frames"] = ""
    needs: tuple[str, ...] = ("tokenizer",)
    adapter_type: str = ""

    @property
    def auto_class(self) -> Any:
        """Transformers' auto class."""
        return getattr(transformers, self.class_name)


_TEXT, _SPEECH, _HEARD = ("tokenizer",), ("audio", "tokenizer"), ("audio", "text")
TASKS: dict[str, Task] = {
    "causal-lm": Task("AutoModelForCausalLM", adapter_type="CAUSAL_LM"),
    "masked-lm": Task("AutoModelForMaskedLM"),
    "seq2seq-lm": Task(
        "AutoModelForSeq2SeqLM", _encode_pair, ("prompt", "response"), "summaries", _TEXT, "SEQ_2_SEQ_LM"
    ),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification", _encode_text, ("text", "label"), "classes", _TEXT, "SEQ_CLS"
    ),
    "token-classification": Task(
        "AutoModelForTokenClassification", _encode_words, ("tokens", "tags"), "classes", _TEXT, "TOKEN_CLS"
    ),
    "question-answering": Task(
        "AutoModelForQuestionAnswering",
        _encode_question,
        ("question", "context", "answers"),
        "spans",
        _TEXT,
        "QUESTION_ANS",
    ),
    "image-classification": Task(
        "AutoModelForImageClassification", _encode_image, ("image", "label"), "classes", ("images",)
    ),
    "audio-classification": Task(
        "AutoModelForAudioClassification", _encode_sound, ("audio", "label"), "classes", ("audio",)
    ),
    "speech-seq2seq": Task("AutoModelForSpeechSeq2Seq", _encode_speech, _HEARD, "words", _SPEECH),
    "ctc": Task("AutoModelForCTC", _encode_speech, _HEARD, "frames", _SPEECH),
    "image-text-to-text": Task(
        "AutoModelForImageTextToText", _encode_seen, ("messages",), "", ("tokenizer", "processor"), "CAUSAL_LM"
    ),
}
"""The tasks of `shardwise train` by name."""
assert tuple(TASKS) == get_args(TaskName)


class ExampleRows(Rows):
    """Rows of one example each, which are encoded when they are read.

    Args:
        records: of all ranks, in the same order; also an attribute.
        fingerprint: changes with the records.
        paddings: what fills a sequence up, by the input's name; 0 for others.
    """

    kind = "examples"

    def __init__(
        self,
        records: Sequence[Record],
        encode: Callable[[Record, Tools], Example],
        tools: Tools,
        *,
        fingerprint: str,
        paddings: Mapping[str, int],
    ) -> None:
        self.num_rows, self.num_tokens, self.seq_length = len(records), 0, tools.seq_length
        self.records, self._encode, self._tools, self._paddings = records, encode, tools, paddings
        identity = digest("examples", fingerprint, tools.fingerprint, list(tools.labels), tools.seq_length)
        self.checksum = int(identity[:12], 16)
        self._lengths: dict[int, int] = {}
        if not records:
            raise LoadError("the data holds no records", at="data")
        is_raw = tools.audio is not None and "input_values" in tools.audio.model_input_names
        self._hears = is_raw and np.ndim(self._encoded(0)["input_values"]) == 1  # samples, not frames

    def width(self, batch: Sequence[int]) -> int:
        """Returns the length of the longest text or sound of a batch; 0 where lengths change nothing.

        A loss over all positions, and a model of sound without a mask, depend on how far a batch is filled up: that
        must not depend on how it is shared out among data ranks.
        """
        tools = self._tools
        hears = self._hears
        if not hears and (tools.audio is not None or tools.processor is not None or tools.images is not None):
            return 0
        for row in batch:
            if row not in self._lengths:
                sound = hear(self.records[row], tools) if hears else ()
                self._lengths[row] = len(sound if hears else self._encoded(row)["input_ids"])
        longest = max(self._lengths[row] for row in batch)
        return longest if hears else -(-longest // _MULTIPLE) * _MULTIPLE

    def read(self, rows: Sequence[int], *, width: int, turn: int = 0) -> dict[str, Tensor]:
        """Returns the inputs and labels of rows."""
        batch = collate([self._encoded(row) for row in rows], self._paddings, width=width)
        own = {name: value.to(self._tools.dtype) for name, value in batch.items() if value.is_floating_point()}
        return batch | {name: value for name, value in own.items() if name != "labels"}

    def _encoded(self, row: int) -> Example:
        record = self.records[row]
        try:
            with as_error(LoadError, "the record cannot be encoded", at=record.place):
                return self._encode(record, self._tools)
        except LoadError as error:
            error.at = error.at or record.place
            raise


def collate(examples: Sequence[Example], paddings: Mapping[str, int], *, width: int = 0) -> dict[str, Tensor]:
    """Returns a batch: sequences are filled up at their end, and the images of texts are joined.

    Args:
        width: of texts or sound; 0: that of the longest.
    """
    text = next((name for name in ("input_ids", "input_values") if name in examples[0]), None)
    found, lengths = {}, [len(each[text]) for each in examples] if text else []
    for name in {name: None for example in examples for name in example}:
        values = [np.asarray(example[name]) for example in examples if name in example]
        is_joined = "input_ids" in examples[0] and is_medium(name)  # a row for each image or patch, not for each text
        padding = IGNORED if name == "labels" else paddings.get(name, 0)
        is_whole = values[0].ndim == 1 and [*map(len, values)] == lengths
        own = width if is_whole else 0
        tensor = torch.from_numpy(np.concatenate(values) if is_joined else _stack(values, padding, width=own))
        found[name] = tensor.float() if tensor.dtype == torch.float64 else tensor
    return found


def _stack(values: Sequence[np.ndarray[Any, Any]], padding: int, *, width: int) -> np.ndarray[Any, Any]:
    """Returns the values as one array; those of other lengths than the longest, or `width`, are filled up."""
    lengths = {len(value) if value.ndim else 0 for value in values}
    if values[0].ndim == 0 or (len(lengths) == 1 and width <= max(lengths)):
        return np.stack(values)
    longest = width or -(-max(lengths) // _MULTIPLE) * _MULTIPLE
    pads = [[(0, longest - len(value)), *[(0, 0)] * (value.ndim - 1)] for value in values]
    return np.stack([np.pad(value, pad, constant_values=padding) for value, pad in zip(values, pads, strict=True)])
