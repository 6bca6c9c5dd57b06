"""Prompts and conversations become tokens of which the responses alone are learned."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.data.documents import Record, file_records
from shardwise.data.examples import build_example_encoder, encode_examples
from shardwise.errors import ConfigError, LoadError

pytestmark = pytest.mark.single

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n"
    "{% endfor %}"
)
FORGETFUL = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:1] }}")
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + PLAIN
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN.replace(
    "{{ m['content'] }}", "{{ m['content'] or m.tool_calls | tojson }}"
)


def make_tokenizer(template=None, **options):
    words = ["<|end|>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template, **options)


def encode(tokenizer, values, **options):
    keys = {"messages": "messages", "tools": "tools"}
    encoder = build_example_encoder(tokenizer, **{"kind": "chat", "keys": keys, **options})
    (found,) = encode_examples([Record("here:1", values)], encoder)
    return found


def learned(tokenizer, found):
    """The text of each run of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], found.is_target, [False]])))
    return [tokenizer.decode(found.tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def says(*texts, roles=("user", "assistant")):
    return [{"role": roles[number % len(roles)], "content": text} for number, text in enumerate(texts)]


PROMPTS = {"kind": "prompt", "keys": {"prompt": "prompt", "response": "response"}}


def test_of_a_prompt_and_its_response_the_response_and_the_end_are_learned():
    tokenizer = make_tokenizer()
    found = encode(tokenizer, {"prompt": "2+2=", "response": " 4 ✓"}, **PROMPTS)
    assert learned(tokenizer, found) == [" 4 ✓<|end|>"]
    assert tokenizer.decode(found.tokens) == "2+2= 4 ✓<|end|>"
    assert learned(tokenizer, encode(tokenizer, {"prompt": "", "response": "hi"}, **PROMPTS)) == ["hi<|end|>"]


def test_a_text_begins_as_the_tokenizer_begins_one():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos_token="<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    found = encode(tokenizer, {"prompt": "a", "response": "b"}, **PROMPTS)
    assert tokenizer.decode(found.tokens) == "<s>ab<|end|>"


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "marked"])
def test_every_turn_of_the_assistant_is_learned_and_nothing_else(template):
    tokenizer = make_tokenizer(template)
    system = {"role": "system", "content": "Be brief. ✓"}
    messages = [system, *says("Größe?", "12 m", "And 你好?", "Hello.")]
    found = encode(tokenizer, {"messages": messages})
    end = "<|end|>" if template is MARKED else "<|end|>\n"
    assert learned(tokenizer, found) == [f"12 m{end}", f"Hello.{end}"]
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(found.tokens) == written


def test_a_prompt_and_its_response_can_be_written_by_the_template():
    tokenizer = make_tokenizer(PLAIN)
    found = encode(tokenizer, {"prompt": "Hi", "response": "Ho"}, as_chat=True, **PROMPTS)
    assert tokenizer.decode(found.tokens) == "<|user|>Hi<|end|>\n<|assistant|>Ho<|end|>\n"
    assert learned(tokenizer, found) == ["Ho<|end|>\n"]


def test_tools_their_calls_and_their_answers_go_through_the_template():
    tokenizer = make_tokenizer(TOOLS)
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": "1+1", "tool_calls": None},  # as data sets fill up what some rows lack
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "two", "tool_calls": None},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = encode(tokenizer, {"messages": messages, "tools": tools})
    called, answered = learned(tokenizer, found)
    assert '"name": "add"' in called and answered == "two<|end|>\n"
    assert tokenizer.decode(found.tokens).startswith(json.dumps(tools))


BAD = {
    "no key": (PLAIN, {"mesages": []}, ["no key 'messages' (did you mean 'mesages'?)", "the keys are mesages"]),
    "another format": (PLAIN, {"prompt": "a", "response": "b"}, ["there is no key"]),
    "no keys": (PLAIN, {}, ["there is no key"]),
    "no list": (PLAIN, {"messages": "hello"}, ["expected a list of messages, found 'hello'"]),
    "none": (PLAIN, {"messages": []}, ["expected a list of messages, found []"]),
    "other words": (PLAIN, {"messages": [{"from": "human", "value": "a"}]}, ["message 0 has no role"]),
    "no assistant": (PLAIN, {"messages": says("a", roles=["user"])}, ["no message is the assistant's", "are user"]),
    "says nothing": (PLAIN, {"messages": says("a", " \n")}, ["the response is empty: message 1"]),
    "refused": (STRICT, {"messages": says("a", "b", roles=["assistant"])}, ["template refuses", "the user begins"]),
    "forgetful": (FORGETFUL, {"messages": says("aa", "bb", "cc", "dd")}, ["does not tell which", "generation %}"]),
    "marks nothing": (
        MARKED.replace("== 'assistant'", "== 'model'"),
        {"messages": says("a", "b")},
        ["leaves out the assistant"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_messages_is_said_with_its_place(name):
    template, values, parts = BAD[name]
    with pytest.raises(LoadError) as raised:
        encode(make_tokenizer(template), values)
    assert raised.value.at == "here:1" and [part for part in parts if part not in str(raised.value)] == [], raised.value


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"prompt": "a"}, ["no key 'response'", "data.response_key"]),
        ({"prompt": "a", "response": ""}, ["the response is empty: 'response' holds ''"]),
        ({"prompt": 3, "response": "a"}, ["'prompt' holds int, not text"]),
        ({"prompt": "a", "response": None}, ["'response' holds NoneType, not text"]),
        ({"prompt": [{"role": "user"}], "response": "a"}, ["holds list, not text", "data.format: chat"]),
        ({"messages": []}, ["there is no key"]),
        ({"text": "a"}, ["there is no key"]),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said_with_its_place(values, parts):
    with pytest.raises(LoadError) as raised:
        encode(make_tokenizer(), values, **PROMPTS)
    assert raised.value.at == "here:1" and [part for part in parts if part not in str(raised.value)] == [], raised.value


def test_a_tokenizer_without_a_template_is_refused_at_once():
    with pytest.raises(ConfigError, match="no chat template"):
        build_example_encoder(make_tokenizer(), kind="chat", keys={"messages": "messages"})


def test_files_are_read_with_marks_and_line_ends_of_any_system(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("﻿".encode() + '{"prompt": "ä"}\r\n\r\n{"prompt": "b\\nc"}\r\n'.encode())
    found = list(file_records([path]).read(lambda done: None))
    assert [(each.place, each.values["prompt"]) for each in found] == [(f"{path}:1", "ä"), (f"{path}:3", "b\nc")]


@pytest.mark.parametrize(
    ("text", "part"), [('{"a": 1}\n{"a": ', ":2"), ("[1]\n", "found list"), ("\xff", "not UTF-8"), ('{"a": 1}{', ":1")]
)
def test_a_line_that_is_no_object_is_said_with_its_place(tmp_path, text, part):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LoadError) as raised:
        list(file_records([path]).read(lambda done: None))
    assert part in str(raised.value)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(LoadError, match="is no .jsonl file"):
        file_records([tmp_path / "a.txt"])
