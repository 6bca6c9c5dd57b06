"""Prompts and conversations become tokens of which the responses alone are learned."""

from __future__ import annotations

import csv
import importlib.util
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.data.corpus import Record, file_records, file_source
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
    encoder = build_example_encoder(tokenizer, **{"kind": "chat", **options})
    (found,) = encode_examples([Record("here:1", values)], encoder)
    return found


def learned(tokenizer, found):
    """The text of each run of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], found.is_target, [False]])))
    return [tokenizer.decode(found.tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def says(*texts, roles=("user", "assistant")):
    return [{"role": roles[number % len(roles)], "content": text} for number, text in enumerate(texts)]


PROMPTS = {"kind": "prompt"}


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


# Short forms of templates of reasoning models, which rewrite earlier messages (Qwen3's, DeepSeek-R1's), and of one that
# ends the whole text with a token (Phi-4-mini's).
THINKS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1] %}{% if loop.index0 > ns.last %}<think>"
    "{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' }}</think>"
    "{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS_REASONS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
ENDS = PLAIN.replace("<|end|>", "<|stop|>").replace(
    "<|assistant|>{% endif %}", "<|assistant|>{% else %}<|end|>{% endif %}"
)
TWO_TURNS = {
    "thinks": (
        THINKS,
        "<|user|>2+2?<|end|><|assistant|><think>sum</think>4<|end|><|user|>3+3?<|end|><|assistant|><think></think>6<|end|>",
        ["<think>sum</think>4<|end|>\n", "<think></think>6<|end|>\n"],
    ),
    "forgets reasons": (
        FORGETS_REASONS,
        "<|user|>2+2?<|end|><|assistant|><think>sum</think>4<|end|><|user|>3+3?<|end|><|assistant|>6<|end|>",
        ["sum</think>4<|end|>", "6<|end|>"],
    ),
    "ends": (
        ENDS,
        "<|user|>2+2?<|stop|><|assistant|><think>sum</think>4<|stop|><|user|>3+3?<|stop|><|assistant|>6<|stop|><|end|>",
        ["<think>sum</think>4<|stop|>\n", "6<|stop|>\n<|end|>"],
    ),
}


@pytest.mark.parametrize("name", TWO_TURNS)
def test_a_message_is_learned_as_it_was_written_when_it_was_the_last_one(name):
    template, text, expected = TWO_TURNS[name]
    tokenizer = make_tokenizer(template, additional_special_tokens=["<think>", "<|stop|>", "<|user|>", "<|assistant|>"])
    messages = says("2+2?", "<think>sum</think>4", "3+3?", "6")
    found = encode(tokenizer, {"messages": messages})
    assert learned(tokenizer, found) == expected
    assert tokenizer.decode(found.tokens).replace("\n", "") == text
    alone = encode(tokenizer, {"messages": messages}, learn="last")
    assert learned(tokenizer, alone) == expected[1:], "with the context that the model is given then"
    assert tokenizer.decode(alone.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "marked"])
@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"training": False}])
def test_messages_that_say_so_are_not_learned(template, flag):
    tokenizer = make_tokenizer(template)
    messages = says("a", "bad", "b", "good")
    messages[1] |= flag
    found = encode(tokenizer, {"messages": messages})
    assert [text.rstrip("\n") for text in learned(tokenizer, found)] == ["good<|end|>"]
    assert "bad" in tokenizer.decode(found.tokens)


def test_the_header_of_a_first_message_is_not_learned():
    tokenizer = make_tokenizer(PLAIN)
    found = encode(tokenizer, {"messages": says("hello", roles=["assistant"])})
    assert learned(tokenizer, found) == ["hello<|end|>\n"]


def test_conversations_of_other_shapes_are_read():
    tokenizer = make_tokenizer(PLAIN)
    plain = encode(tokenizer, {"messages": says("hi", "ho")})
    parts = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "hi"), ("assistant", "ho"))
    ]
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    for values in ({"messages": parts}, {"conversations": shared}, {"messages": shared}):
        found = encode(tokenizer, values)
        assert np.array_equal(found.tokens, plain.tokens) and np.array_equal(found.is_target, plain.is_target)
    call = [{"function": {"name": "f", "arguments": '{"city": "Paris"}'}}]
    messages, tokenizer = [*says("hi"), {"role": "assistant", "content": "", "tool_calls": call}], make_tokenizer(TOOLS)
    assert '"arguments": {"city": "Paris"}' in learned(tokenizer, encode(tokenizer, {"messages": messages}))[0]


def test_records_of_alpaca_are_prompts():
    tokenizer = make_tokenizer()
    values = {"instruction": "Add.", "input": "2+2", "output": "4"}
    assert tokenizer.decode(encode(tokenizer, values, **PROMPTS).tokens) == "Add.\n\n2+24<|end|>"
    assert tokenizer.decode(encode(tokenizer, values | {"input": ""}, **PROMPTS).tokens) == "Add.4<|end|>"


BAD = {
    "no key": (PLAIN, {"mesages": []}, ["no key 'messages' (did you mean 'mesages'?)", "the keys are mesages"]),
    "another format": (PLAIN, {"prompt": "a", "response": "b"}, ["there is no key"]),
    "no keys": (PLAIN, {}, ["there is no key"]),
    "no list": (PLAIN, {"messages": "hello"}, ["expected a list of messages, found 'hello'"]),
    "none": (PLAIN, {"messages": []}, ["expected a list of messages, found []"]),
    "other words": (PLAIN, {"messages": [{"speaker": "human", "text": "a"}]}, ["message 0 has no role"]),
    "a picture": (
        PLAIN,
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]},
        ["message 0 holds a part of type image"],
    ),
    "a number": (PLAIN, {"messages": [*says("a"), {"role": "assistant", "content": 4}]}, ["message 1 holds int"]),
    "half": (PLAIN, {"messages": [{"role": "user", "content": "a", "weight": 0.5}]}, ["weight of message 0 is 0.5"]),
    "a word": (PLAIN, {"messages": [{"role": "user", "content": "a", "train": "no"}]}, ["is 'no', must be 0 or 1"]),
    "nothing to learn": (
        PLAIN,
        {"messages": [*says("a"), {"role": "assistant", "content": "b", "weight": 0}]},
        ["marked as one not to learn"],
    ),
    "no assistant": (PLAIN, {"messages": says("a", roles=["user"])}, ["no message is the assistant's", "are user"]),
    "says nothing": (PLAIN, {"messages": says("a", " \n")}, ["the response is empty: message 1"]),
    "refused": (STRICT, {"messages": says("a", "b", roles=["assistant"])}, ["template refuses", "the user begins"]),
    "forgetful": (FORGETFUL, {"messages": says("aa", "bb", "cc", "dd")}, ["does not tell which", "data.chat_template"]),
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
        ({"prompt": "a"}, ["no key 'response'", "data.columns={response: ...}"]),
        ({"prompt": "a", "response": ""}, ["the response is empty: 'response' holds ''"]),
        ({"prompt": 3, "response": "a"}, ["'prompt' holds int, not text"]),
        ({"prompt": "a", "response": None}, ["'response' holds nothing"]),
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
        build_example_encoder(make_tokenizer(), kind="chat")


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
    with pytest.raises(LoadError, match="is no table"):
        file_records([tmp_path / "a.txt"])


def test_tables_hold_records(tmp_path):
    records = [{"prompt": "ä", "response": "1, 2"}, {"prompt": "b\nc", "response": '"x"'}]
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(records), encoding="utf-8")
    (tmp_path / "b.json").write_text("\n".join(map(json.dumps, records)))
    for name, dialect in (("c.csv", "excel"), ("d.tsv", "excel-tab")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "response"], dialect=dialect)
            writer.writeheader()
            writer.writerows(records)
    for name in ("a.json", "b.json", "c.csv", "d.tsv"):
        assert [dict(each.values) for each in file_records([tmp_path / name]).read(lambda done: None)] == records, name
        texts = file_source([tmp_path / name], text_key="prompt").read(lambda done: None)
        assert [text for text in texts if text is not None] == ["ä", "b\nc"], name


def test_parquet_is_read_or_its_package_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(ConfigError, match="pip install pyarrow"):
            list(file_records([path]).read(lambda done: None))
        return
    with pytest.raises(LoadError, match="is not Parquet"):
        list(file_records([path]).read(lambda done: None))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    assert [each.values for each in file_records([path]).read(lambda done: None)] == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.json", '[{"a": 1}', "the array is not JSON"),
        ("a.csv", "a,b\n1,2,3\n", "another number of fields"),
        ("a.csv", 'a,b\n1,"2\n', "a row is not CSV"),
        ("a.csv", "a,b,a\n1,2,3\n", "two columns are called 'a'"),
    ],
)
def test_a_broken_table_is_said_with_its_place(tmp_path, name, text, part):
    (tmp_path / name).write_text(text)
    with pytest.raises(LoadError, match=part) as raised:
        list(file_records([tmp_path / name]).read(lambda done: None))
    assert name in str(raised.value.at)
