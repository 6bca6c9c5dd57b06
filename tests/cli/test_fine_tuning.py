"""`shardwise train` on prompts and conversations, with adapters, and what it says where they are wrong."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from shardwise.cli.main import main
from shardwise.data.rows import DocumentRows
from tests.cli.forked import run_forked  # noqa: F401 - a fixture
from tests.cli.test_train import MODEL, make_tokenizer

pytestmark = [
    pytest.mark.single,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT 0.21, loading an adapter
]

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
RUN = {
    "model": {"path": "model"},
    "data": {"path": "data", "format": "chat", "seq_length": 48},
    "adapter": {"r": 2, "target_modules": ["q_proj", "down_proj"]},
    "steps": 4,
    "batch_size": 4,
    "log": {"dir": "log"},
}


def conversation(number, answer=None):
    said = str(number + 1) if answer is None else answer
    return {"messages": [{"role": "user", "content": f"{number}+1?"}, {"role": "assistant", "content": said}]}


def write(path, *records):
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A sound run: its file, a model with a tokenizer and a chat template, conversations and prompts."""
    directory = tmp_path_factory.mktemp("run")
    make_tokenizer(directory / "model", "What is one plus one? It is two.")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "model")
    values = {name: value for name, value in MODEL.items() if name != "model_type"}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, vocab_size=301)).save_pretrained(
        directory / "model"
    )
    write(directory / "data/a.jsonl", *(conversation(number) for number in range(60)))
    (directory / "data/README.md").write_text("Conversations about sums.")
    write(directory / "prompts.jsonl", *({"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(9)))
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    return directory


@pytest.fixture
def run(origin, tmp_path, monkeypatch):
    """Runs `shardwise train run.yaml WORDS` in a copy of the sound run; gives its exit code."""
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return lambda *words, verb="train": main([verb, "run.yaml", *words])


def losses(log="log"):
    return [json.loads(line)["loss"] for line in Path(log, "train.jsonl").read_text().splitlines()]


def loss_of(model, seed=0):
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def test_an_adapter_is_trained_and_goes_out_alone_with_its_base_or_merged(run, capsys):
    import peft

    words = ["evaluation={path: prompts.jsonl, format: prompt, every: 2}", "optimizer.lr=0.01"]
    for mode in ("only", "with_base", "merged"):
        assert run(*words, f"adapter.export={mode}", f"export={mode}", "steps=2") == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        assert "adapter 576 parameters are trained, in 8 tensors" in out and "held out, step 2" in out
    assert run("adapter={path: only}", "export=further", "steps=1") == 0, capsys.readouterr().err
    load = transformers.AutoModelForCausalLM.from_pretrained
    alone = peft.PeftModel.from_pretrained(load("model"), "only")
    assert alone.peft_config["default"].task_type == "CAUSAL_LM"
    expected = loss_of(alone)
    assert loss_of(peft.PeftModel.from_pretrained(load("with_base"), "with_base/adapter")) == expected
    assert loss_of(load("merged")) == pytest.approx(expected, abs=1e-5)
    assert loss_of(load("model")) != expected


def test_a_converted_adapter_loads_with_its_base_and_its_tokenizer_as_an_exported_one_does(run, tmp_path, capsys):
    import peft

    words = ["checkpoint={dir: saved}", "export=exported", "optimizer.schedule.name=constant"]
    assert run(*words, "steps=2") == 0, capsys.readouterr().err
    assert run(*words, "steps=3") == 0, capsys.readouterr().err  # it goes on
    assert main(["convert", "saved", "converted", "--adapter", "--to", "hf"]) == 0, capsys.readouterr().err
    configs = [json.loads(Path(place, "adapter_config.json").read_text()) for place in ("exported", "converted")]
    assert configs[0] == configs[1] and configs[0]["base_model_name_or_path"] == "model"
    loaded = [peft.AutoPeftModelForCausalLM.from_pretrained(place) for place in ("exported", "converted")]
    assert loss_of(loaded[0]) == loss_of(loaded[1])
    for place in ("exported", "converted"):
        assert transformers.AutoTokenizer.from_pretrained(place).chat_template == TEMPLATE
    other = transformers.AutoTokenizer.from_pretrained("model")
    other.chat_template = "{{ 'mine' }}"
    other.save_pretrained("other")
    assert main(["convert", "saved", "again", "--adapter", "--to", "hf", "--tokenizer", "other"]) == 0
    assert transformers.AutoTokenizer.from_pretrained("again").chat_template == other.chat_template


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_a_run_that_was_ended_goes_on_with_its_data_and_its_adapter(run, capsys, rows):
    words = [f"data.rows={rows}", "optimizer.schedule.name=constant"]
    assert run(*words, "log.dir=whole") == 0
    checkpoint = "checkpoint={dir: saved}"
    assert run(*words, checkpoint, "steps=2") == 0
    assert run(*words, checkpoint) == 0, capsys.readouterr().err
    assert losses() == losses("whole") and "resume  saved" in capsys.readouterr().out
    other = "padded" if rows == "packed" else "packed"
    assert run(checkpoint, f"data.rows={other}", "adapter.r=4", "steps=5", words[1]) == 1
    err = capsys.readouterr().err
    assert f"data.rows: was '{rows}', is '{other}'" in err and "adapter.r: was 2, is 4" in err


@pytest.mark.spawn
def test_a_pipeline_trains_an_adapter_as_one_process_does(run, run_forked, capfd):  # noqa: F811
    words = ["optimizer.schedule.name=constant", "optimizer.lr=0.01", "steps=2"]
    assert run(*words, "log.dir=whole", "export=alone", "layout=tp1") == 0
    staged = ["export=staged", "layout=pp2", "num_microbatches=2"]
    assert run_forked("run.yaml", *words, *staged) == 0, capfd.readouterr().err
    assert losses() == pytest.approx(losses("whole"), abs=1e-5)
    ours, theirs = (load_file(Path(each) / "adapter_model.safetensors") for each in ("staged", "alone"))
    assert ours.keys() == theirs.keys()
    assert all(float((ours[name] - value).abs().max()) <= 2e-5 for name, value in theirs.items())


def test_kept_documents_serve_rows_of_any_kind_and_are_made_again_when_they_are_damaged(run, capsys, caplog):
    assert run("steps=1") == 0
    (path,) = Path("log/tokens").iterdir()
    assert "tokenizing" in capsys.readouterr().out
    assert run("steps=1", "data.rows=padded", "data.seq_length=40") == 0
    assert "tokenizing" not in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[:-4])
    assert run("steps=1") == 0
    assert "tokenizing" in capsys.readouterr().out and "it is written again" in caplog.text
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = TEMPLATE.replace("<|end|>", "<|end|> ")
    tokenizer.save_pretrained("model")
    assert run("steps=1") == 0
    assert len(list(Path("log/tokens").iterdir())) == 2, "another template, other tokens"


def test_what_is_cut_and_left_out_is_said_with_the_data_and_at_every_step(run, capsys):
    long, far = conversation(1, "because " * 9), conversation(2)
    far["messages"][0]["content"] *= 30
    write("data/b.jsonl", long, far)
    assert run("steps=2") == 0
    out = capsys.readouterr().out
    assert "of 48 (1 truncated, 1 dropped)" in out and out.count("data: 1 truncated, 1 dropped") == 2
    assert run("steps=1", "data.too_long=drop") == 0
    assert "of 48 (2 dropped)" in capsys.readouterr().out


def test_text_in_documents_apart_is_read_too(run, monkeypatch):
    seen = []
    read = DocumentRows.read
    monkeypatch.setattr(DocumentRows, "read", lambda self, *a, **k: seen.append(read(self, *a, **k)) or seen[-1])
    write("texts.jsonl", *({"text": f"{number} is a number"} for number in range(40)))
    assert run("data={path: texts.jsonl, rows: packed, seq_length: 48}", "steps=1") == 0
    (batch,) = seen
    starts = batch["position_ids"] == 0
    assert starts.sum() > 8 and (batch["labels"][starts] == -100).all()


def test_several_sources_are_read_by_weight_and_a_run_of_them_goes_on(run, capsys):
    with Path("table.csv").open("w") as table:
        table.write("question,answer\n" + "".join(f"{number}+1=,{number + 1}\n" for number in range(20)))
    prompts = "{path: table.csv, format: prompt, prompt_key: question, response_key: answer, weight: 2}"
    words = [f"data={{sources: [{prompts}, {{path: data/a.jsonl, format: chat, learn: last}}], seq_length: 48}}"]
    words += ["log.dir=several", "checkpoint.dir=several/saved", "batch_size=4"]
    assert run(*words, "steps=1") == 0
    assert "table.csv, 1 file: 20 documents" in capsys.readouterr().out
    assert run(*words, "steps=2") == 0, capsys.readouterr().err
    assert run(*words, "steps=3", "data.sources=[{path: table.csv}]") == 1
    assert run(*words, "data.path=data") == 1
    assert "data.path: is a key of each source where there are data.sources" in capsys.readouterr().err


class Records(list):
    """As much of a `datasets` split as is used."""

    column_names = ("messages",)
    _fingerprint = "f"


def test_a_data_set_of_the_datasets_library_is_read(run, capsys, monkeypatch):
    records = Records(conversation(number) for number in range(40))
    for record in records:
        record["messages"][0]["tool_calls"] = None  # as Arrow fills up what some rows have
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, subset, split: records
    module.config = types.SimpleNamespace(HF_HUB_OFFLINE=False)
    module.load_dataset_builder = lambda name, subset: {"set": module.config.HF_HUB_OFFLINE or 1 / 0}[name]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert run("data={dataset: set, format: chat, seq_length: 48}", "steps=1") == 0, capsys.readouterr().err
    assert run("data={dataset: set, format: prompt, seq_length: 48}", "steps=1") == 1
    assert "there is no key 'prompt'" in capsys.readouterr().err
    assert run("data={dataset: sett, seq_length: 48}", verb="check") == 1
    assert "data.dataset: the data set 'sett' cannot be had" in capsys.readouterr().out
    assert run("data={dataset: set, format: chat, seq_length: 48}", verb="check") == 0, "stored, without the hub"
    assert module.config.HF_HUB_OFFLINE is False


def without_template():
    Path("model/chat_template.jinja").unlink()


def broken_line():
    Path("data/b.jsonl").write_text('{"messages": [\n')


# Name -> (what is done to the run, words of the command line, parts of the one error).
BAD = {
    "data: no such format": (
        None,
        ["data.format=chta"],
        ["data.format: Input should be 'text', 'prompt' or 'chat', not 'chta'"],
    ),
    "data: no template": (without_template, [], ["data.path: the tokenizer has no chat template"]),
    "data: broken JSON": (broken_line, [], ["data.path: a line is not JSON", "data/b.jsonl:1"]),
    "data: mixed": (
        lambda: shutil.copy("prompts.jsonl", "data/b.jsonl"),
        [],
        ["no key 'messages'", "data/b.jsonl:1", "all records of a data set have one data.format"],
    ),
    "data: empty response": (
        lambda: write("data/a.jsonl", conversation(1), conversation(2, "")),
        [],
        ["the response is empty", "data/a.jsonl:2"],
    ),
    "data: an empty file": (lambda: write("data/a.jsonl"), [], ["data.path: the data holds no records"]),
    "data: no text for a stream": (None, ["data.rows=stream"], ["data.rows: is stream with data.format: chat"]),
    "data: a key of another format": (
        None,
        ["data.prompt_key=question"],
        ["data.prompt_key: says something of data.format: prompt; the format is chat"],
    ),
    "data: text in a prompt's directory": (None, ["data.include=['*.md']"], ["data/README.md is no table"]),
    "data: as text": (
        None,
        ["data.format=text", "data.include=['*.jsonl']"],
        ["data.text_key is 'text', which is not there", "data.format: prompt, or chat"],
    ),
    "data: all too long": (None, ["data.seq_length=4", "data.too_long=drop"], ["none of 60 documents is left"]),
    "evaluation: another format": (
        None,
        ["evaluation={path: prompts.jsonl}"],
        ["evaluation.path: there is no key 'messages'", "one data.format"],
    ),
    "evaluation: a format of nothing": (None, ["evaluation.format=text"], ["evaluation.format: is text, and nothing"]),
    "adapter: unknown key": (
        None,
        ["adapter.lora_alhpa=3"],
        ["adapter: peft.LoraConfig refuses these keys", "unexpected keyword argument 'lora_alhpa'"],
    ),
    "adapter: wrong types": (
        None,
        ["adapter={r: '8'}"],
        ["adapter: the adapter does not fit LlamaForCausalLM", "'str'"],
    ),
    "adapter: nothing fits": (
        None,
        ["adapter.target_modules=[query]"],
        ["the adapter does not fit LlamaForCausalLM", "query"],
    ),
    "adapter: no directory": (None, ["adapter={path: data}"], ["no adapter in 'data'"]),
    "adapter: path and more": (
        None,
        ["adapter.path=only"],
        ["adapter.r: is set by the adapter at adapter.path", "adapter.target_modules: is set"],
    ),
    "adapter: no such export": (
        None,
        ["adapter.export=merge", "export=out"],
        ["adapter.export: is 'merge', must be one of only, with_base, merged (did you mean 'merged'?)"],
    ),
    "adapter: export of nothing": (None, ["adapter.export=merged"], ["adapter.export: is merged, but nothing is exp"]),
    "adapter: no mapping": (None, ["adapter=lora"], ["adapter: Input should be", "not 'lora'"]),
    "adapter: PiSSA": (None, ["adapter.init_lora_weights=pissa"], ["init_lora_weights='pissa'"]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_error_before_the_first_step(run, capsys, name):
    prepare, words, parts = BAD[name]
    if prepare is not None:
        prepare()
    assert run(*words) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and "Traceback" not in err and "\nerror: " not in err
    assert [each for each in parts if each not in err] == [], err
    assert "step" not in out


@pytest.mark.spawn
def test_bad_data_is_one_error_of_all_ranks(run, run_forked, capfd):  # noqa: F811
    for name in ("data: empty response", "data: no template"):
        prepare, _, parts = BAD[name]
        prepare()
        assert run_forked("run.yaml", "layout=tp2") == 1
        err = capfd.readouterr().err
        assert [each for each in parts if err.count(each) != 1] == [] and "Traceback" not in err, err


def test_a_model_that_cannot_keep_documents_apart_is_refused_in_words(run, capsys):
    model = "model={config: {model_type: mamba, hidden_size: 16, num_hidden_layers: 1}, tokenizer: model}"
    words = [model, "adapter=null"]
    assert run(*words, verb="check") == 1
    out = capsys.readouterr().out
    assert "data.rows: a model of type 'mamba' with several documents in a row" in out and "data.rows=padded" in out
    assert run(*words, "data.rows=padded", verb="check") == 0, capsys.readouterr().out


def test_the_plan_shows_the_adapter(run, capsys):
    assert main(["plan", "run.yaml", "--layout", "tp2"]) == 0
    out = capsys.readouterr().out
    assert "q_proj.lora_B" in out and "down_proj.lora_A" in out and "over tp" in out
