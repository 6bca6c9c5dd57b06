"""`shardwise train` on every task: the losses, gradients' norms and metrics of the unsplit model, at every layout.

`make test` has tasks take turns over fsdp2 and pp2.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import wave
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torchmetrics.functional.classification import multiclass_f1_score
from torchmetrics.functional.text import rouge_score, squad, word_error_rate

from shardwise.cli import tasks, training
from shardwise.cli.check import check_run
from shardwise.cli.data import load_tokenizer
from shardwise.cli.main import main
from shardwise.cli.metrics import ExampleMetrics
from shardwise.cli.tasks import example_rows, find_task, open_tools, read_model_config, read_task_records
from shardwise.cli.training import train
from shardwise.data.ahead import PackedBatches
from shardwise.data.config import held_out
from shardwise.data.corpus import Record
from shardwise.data.documents import Documents
from shardwise.data.rows import MaskedRows, StreamRows
from shardwise.data.tasks import TASKS, Tools, collate
from shardwise.errors import ConfigError, LoadError
from shardwise.mesh import Mesh
from shardwise.ranks.spawn import spawn
from tests.cli.test_train import config_of
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.spawn

STEPS, ROWS = 3, 4
LAYOUTS = ("tp2", "fsdp2", "pp2")
WORDS = [
    "good",
    "bad",
    "fine",
    "poor",
    "the",
    "film",
    "was",
    "a",
    "very",
    "not",
    "red",
    "blue",
    "who",
    "made",
    "it",
    "ann",
    "bob",
]
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 40}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
SPEECH = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
SPEECH |= {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "mask_time_prob": 0.0, "layerdrop": 0.0}
SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 40, "final_dropout": 0.0}
SPEECH |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0}
SPEECH |= {
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "classifier_proj_size": 16,
    "num_feat_extract_layers": 2,
}


def make_tokenizer(directory):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<image>", "<user>", "<assistant>"]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **names, mask_token="[MASK]", eos_token="[SEP]", additional_special_tokens=special[5:]
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def sentences(number):
    random = np.random.default_rng(number)
    return [" ".join(random.choice(WORDS, size=3 + index % 5)) for index in range(number)]


def write_lines(path, records):
    path.write_text("\n".join(map(json.dumps, records)))


def write_sound(path, seed):
    samples = (np.random.default_rng(seed).standard_normal(400 + 40 * (seed % 3)) * 3000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())


def write_images(directory, number):
    for index in range(number):
        pixels = np.random.default_rng(index).integers(255, size=(18, 16, 3), dtype=np.uint8)
        (place := directory / ("cat" if index % 2 else "dog")).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{index}.png")


def save(directory, model, *beside):
    torch.manual_seed(0)
    built = model[0](model[1])
    built.save_pretrained(directory)
    make_tokenizer(directory)
    for each in beside:
        each.save_pretrained(directory)


def make_speech(directory, number):
    directory.mkdir(parents=True, exist_ok=True)
    records = []
    for index, text in enumerate(sentences(number)):
        write_sound(directory / f"{index}.wav", index)
        records.append({"audio": f"{index}.wav", "text": text, "label": ["up", "down", "left"][index % 3]})
    write_lines(directory / "data.jsonl", records)


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=40, num_mel_bins=8, encoder_layers=2, decoder_layers=2, d_model=32, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=50,
        max_target_positions=32, pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
        suppress_tokens=[], begin_suppress_tokens=[], dropout=0.0,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration, config


def llava():
    text = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama", "max_position_embeddings": 64}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=5, vision_feature_select_strategy="default"
    )
    return transformers.LlavaForConditionalGeneration, config


CHAT = (
    "{% for m in messages %}<{{ m.role }}> {% for part in m.content %}{% if part.type == 'image' %}<image> {% else %}"
    "{{ part.text }} {% endif %}{% endfor %}[SEP] {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def seen(text, answer):
    asks = {"role": "user", "content": [{"type": "image", "path": "0.png"}, {"type": "text", "text": text}]}
    return {"messages": [asks, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A directory for each task, with a model and data."""
    root, texts = tmp_path_factory.mktemp("tasks"), sentences(14)
    bert = transformers.BertConfig(**BERT, pad_token_id=0)
    for name, kind in {
        "masked-lm": "BertForMaskedLM",
        "sequence-classification": "BertForSequenceClassification",
        "token-classification": "BertForTokenClassification",
        "question-answering": "BertForQuestionAnswering",
    }.items():
        (root / name).mkdir()
        save(root / name / "model", (getattr(transformers, kind), bert))
    t5 = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        eos_token_id=3, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    save(root / "seq2seq-lm" / "model", (transformers.T5ForConditionalGeneration, t5))
    vit = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=2, **{**BERT, "vocab_size": 2})
    pictures = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    save(root / "image-classification/model", (transformers.ViTForImageClassification, vit), pictures)
    write_images(root / "image-classification/data", 14)
    hears = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    sound = transformers.Wav2Vec2Config(**SPEECH, num_labels=3, pad_token_id=0)
    save(root / "audio-classification/model", (transformers.Wav2Vec2ForSequenceClassification, sound), hears)
    save(root / "ctc/model", (transformers.Wav2Vec2ForCTC, sound), hears)
    listens = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    save(root / "speech-seq2seq/model", whisper(), listens)
    for name in ("audio-classification", "ctc", "speech-seq2seq"):
        make_speech(root / name / "data", 14)
    (root / "masked-lm/data.txt").write_text("\n".join(texts * 8))
    labels = ["good", "bad"]
    write_lines(
        root / "sequence-classification/data.jsonl",
        [{"sentence": text, "label": labels[n % 2]} for n, text in enumerate(texts)],
    )
    write_lines(
        root / "token-classification/data.jsonl",
        [{"tokens": text.split(), "tags": [f"T{len(word) % 2}" for word in text.split()]} for text in texts],
    )
    answers = [{"text": [text.split()[1]], "answer_start": [text.index(" ") + 1]} for text in texts]
    write_lines(
        root / "question-answering/data.jsonl",
        [
            {"question": "who was it", "context": text, "answers": each}
            for text, each in zip(texts, answers, strict=True)
        ],
    )
    write_lines(root / "seq2seq-lm/data.jsonl", [{"prompt": text, "response": text[::-1][:9]} for text in texts])
    place = root / "image-text-to-text"
    eye = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    save(place / "model", llava())
    transformers.LlavaProcessor(
        eye, make_tokenizer(place / "model"), patch_size=8, vision_feature_select_strategy="default",
        chat_template=CHAT, image_token="<image>", num_additional_image_tokens=1,
    ).save_pretrained(place / "model")  # fmt: skip
    Image.fromarray(np.full((20, 16, 3), 99, np.uint8)).save(place / "0.png")
    write_lines(place / "data.jsonl", [seen(text, "red film" if n % 2 else "bob") for n, text in enumerate(texts)])
    return root


NAMES = [name for name in TASKS if name != "causal-lm"]
NAMES_AT = (
    {"tp2": NAMES, "fsdp2": NAMES[::2], "pp2": NAMES[1::2]} if not FULL_PRODUCT else dict.fromkeys(LAYOUTS, NAMES)
)


def run_of(root, name, directory, **values):
    place = root / name
    data = next(str(place / each) for each in ("data", "data.jsonl", "data.txt") if (place / each).exists())
    columns = {"text": "sentence"} if name == "sequence-classification" else {}
    run = {
        "model": {"path": str(place / "model")},
        "data": {"path": data, "seq_length": 32, "columns": columns},
        "evaluation": {"path": data, "every": STEPS, "max_new_tokens": 6},
        "steps": STEPS,
        "batch_size": ROWS,
        "optimizer": {"lr": 0.01, "schedule": {"name": "constant"}, "max_grad_norm": 1.0},
        "log": {"dir": f"{directory}/{name}"},
        "timeout_seconds": 60,
    }
    return {**run, **values}


def reference(root, name, directory):
    """Losses and norms of plain steps on the unsplit model, and its held-out loss and metrics."""
    config = config_of(run_of(root, name, directory))
    task = TASKS[find_task(config)]
    tokenizer = load_tokenizer(config)
    tools, model_config = open_tools(config, read_model_config(config, tokenizer), tokenizer)
    torch.manual_seed(0)
    model = task.auto_class.from_pretrained(
        config.model.path, config=model_config, ignore_mismatched_sizes=True
    ).train()
    rows = example_rows((config.data,), task, tools)
    batches = PackedBatches(rows, batch_size=ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        loss = model(**next(batches)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found, held_out_of(model.eval(), task, rows, tokenizer)


@torch.no_grad()
def held_out_of(model, task, rows, tokenizer):
    """Metrics over all rows, one by one, by torchmetrics or by hand."""
    said, meant = [], []
    for row in range(rows.num_rows):
        batch = rows.read([row], width=rows.width([row]))
        outputs = model(**batch)
        if task.metrics == "classes":
            kept = batch["labels"] != -100
            said += outputs.logits.argmax(-1)[kept].tolist()
            meant += batch["labels"][kept].tolist()
        elif task.metrics == "spans":
            places = (outputs.start_logits.argmax(), outputs.end_logits.argmax())
            said.append(tokenizer.decode(batch["input_ids"][0, places[0] : places[1] + 1]))
            meant.append(tokenizer.decode(batch["input_ids"][0, batch["start_positions"] : batch["end_positions"] + 1]))
        elif task.metrics == "frames":
            ids = [each for each, _ in itertools.groupby(outputs.logits[0].argmax(-1).tolist()) if each]
            said.append(tokenizer.decode(ids, skip_special_tokens=True))
            meant.append(tokenizer.decode(batch["labels"][batch["labels"] != -100], skip_special_tokens=True))
        elif task.metrics:
            labels = batch.pop("labels")[0]
            ids = model.generate(**batch, max_new_tokens=6, do_sample=False, num_beams=1)[0]
            said.append(tokenizer.decode(ids, skip_special_tokens=True))
            meant.append(tokenizer.decode(labels[labels != -100], skip_special_tokens=True))
    if task.metrics == "classes":
        number = max(2, model.config.num_labels)
        f1 = multiclass_f1_score(torch.tensor(said), torch.tensor(meant), number, average="macro")
        return {"accuracy": float(np.mean(np.equal(said, meant))), "f1": float(f1)}
    if task.metrics == "spans":
        pairs = [{"prediction_text": each, "id": str(n)} for n, each in enumerate(said)]
        right = [{"answers": {"answer_start": [0], "text": [each]}, "id": str(n)} for n, each in enumerate(meant)]
        return {key: float(value) for key, value in squad(pairs, right).items()}
    if task.metrics in ("words", "frames"):
        return {"wer": float(word_error_rate(said, meant))}
    if task.metrics:
        return {"rougeL": float(rouge_score(said, meant, rouge_keys="rougeL")["rougeL_fmeasure"])}
    return {}


def train_all(root, directory, layout):
    """The losses, norms and held-out metrics of every task."""
    found = {}
    for name in NAMES_AT[layout]:
        run = run_of(root, name, f"{directory}/{layout}", layout=layout)
        train(config_of(run))
        lines = (Path(run["log"]["dir"]) / "train.jsonl").read_text().splitlines()
        found[name] = list(map(json.loads, lines))
    return found


@pytest.fixture(scope="module")
def expected(origin, tmp_path_factory):
    directory = tmp_path_factory.mktemp("reference")
    return {name: reference(origin, name, directory) for name in NAMES if TASKS[name].encode is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_task_trains_as_the_unsplit_model(origin, expected, layout, tmp_path):
    (found, _) = spawn(train_all, 2, origin, tmp_path, layout)
    for name, lines in found.items():
        losses = [line["loss"] for line in lines]
        assert all(map(math.isfinite, losses)) and lines[-1]["eval_loss"] > 0, name
        if name not in expected:  # masks are drawn
            assert losses[-1] < losses[0] and "eval_perplexity" in lines[-1]
            continue
        numbers, metrics = expected[name]
        assert losses == pytest.approx([loss for loss, _ in numbers], rel=2e-4), name
        assert [line["grad_norm"] for line in lines] == pytest.approx([norm for _, norm in numbers], rel=2e-3), name
        for key, value in metrics.items():
            assert lines[-1][f"eval_{key}"] == pytest.approx(value, abs=1e-5), (name, key)


def losses_of(run):
    return [json.loads(line) for line in (Path(run["log"]["dir"]) / "train.jsonl").read_text().splitlines()]


def test_a_head_that_a_checkpoint_lacks_is_drawn_and_exported_with_the_labels(origin, tmp_path):
    run = run_of(origin, "token-classification", tmp_path, evaluation={}, export=str(tmp_path / "out"))
    run["model"] = {"path": str(origin / "masked-lm/model"), "task": "token-classification"}
    records = [{"tokens": ["a", "film"], "tags": ["X", "Y"]}, {"tokens": ["red"], "tags": ["Z"]}] * 4
    write_lines(tmp_path / "tags.jsonl", records)
    run["data"] = {"path": str(tmp_path / "tags.jsonl"), "seq_length": 16}
    train(config_of(run))
    losses = [line["loss"] for line in losses_of(run)]
    assert losses[-1] < losses[0]
    exported = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert exported.config.id2label == {0: "X", 1: "Y", 2: "Z"}
    body = transformers.AutoModel.from_pretrained(origin / "masked-lm/model").state_dict()
    assert body["encoder.layer.0.attention.self.query.weight"].shape == (32, 32)


def test_the_processors_of_a_model_are_exported_with_it(origin, tmp_path):
    run = run_of(origin, "image-classification", tmp_path, evaluation={}, steps=1, export=str(tmp_path / "out"))
    train(config_of(run))
    assert transformers.AutoImageProcessor.from_pretrained(tmp_path / "out").size == {"height": 16, "width": 16}


def test_numbers_are_learned_as_numbers(origin, tmp_path):
    texts = sentences(8)
    write_lines(tmp_path / "stars.jsonl", [{"text": text, "label": len(text) / 10} for text in texts])
    run = run_of(origin, "sequence-classification", tmp_path)
    run["model"] = {"path": str(origin / "masked-lm/model"), "task": "sequence-classification"}
    run["data"] = {"path": str(tmp_path / "stars.jsonl"), "seq_length": 16}
    run["evaluation"] = {"path": str(tmp_path / "stars.jsonl"), "every": STEPS}
    train(config_of(run))
    last = losses_of(run)[-1]
    assert last["eval_mse"] == pytest.approx(last["eval_loss"], rel=1e-5)


def test_the_best_step_is_kept_and_exported_and_a_run_that_gets_worse_ends(origin, tmp_path, capfd):
    run = run_of(origin, "seq2seq-lm", tmp_path, steps=12, export=str(tmp_path / "out"))
    run["optimizer"] |= {"lr": 0.9, "max_grad_norm": None}
    run["evaluation"] |= {"every": 1, "metric": "loss", "patience": 2}
    run["checkpoint"] = {"dir": str(tmp_path / "saved"), "best": True}
    train(config_of(run))
    lines = losses_of(run)
    held_out = [line["eval_loss"] for line in lines]
    best = held_out.index(min(held_out))
    assert len(lines) == best + 3 < 12
    out = capfd.readouterr().out
    assert f"best    step {best + 1}, loss {held_out[best]:.4f}" in out and "it ends" in out
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    config = config_of(run)
    tools, _ = open_tools(config, model.config, load_tokenizer(config))
    rows = example_rows((config.data,), TASKS["seq2seq-lm"], tools)
    batch = rows.read(range(rows.num_rows), width=0)
    assert float(model(**batch).loss.detach()) == pytest.approx(held_out[best], rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "saved/best").glob("step-*")) == [f"step-{best + 1}"]


WRONG = {
    "another column": (
        "sequence-classification",
        {"data": {"columns": {}}},
        "there is no key 'text'",
        "data.columns={text: ...}",
    ),
    "no such column": (
        "sequence-classification",
        {"data": {"columns": {"texts": "review"}}},
        "data.columns: no record of this task has 'texts' (did you mean 'text'?)",
    ),
    "a key of text": ("sequence-classification", {"data": {"text_key": "review"}}, "data.text_key", "has no effect"),
    "rows of text": ("ctc", {"data": {"rows": "packed"}}, "data.rows", "has no effect on this task"),
    "columns of text": ("masked-lm", {"data": {"columns": {"text": "b"}}}, "data.columns", "see data.text_key"),
    "no such metric": ("ctc", {"evaluation": {"metric": "accuracy"}}, "evaluation.metric is 'accuracy'", "wer"),
    "layers left out": (
        "ctc",
        {"layout": "ddp2", "model": {"path": "model"}},
        "leaves out layers at random (layerdrop 0.5)",
        "use fsdp",
    ),
    "no such file": ("image-text-to-text", {"data": {"path": "elsewhere.jsonl"}}, "cannot read the image", "0.png"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(origin, tmp_path, monkeypatch, name):
    task, changes, *parts = WRONG[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere.jsonl").write_text((origin / "image-text-to-text/data.jsonl").read_text())
    run = run_of(origin, task, tmp_path)
    shutil.copytree(origin / task / "model", "model")
    config = transformers.AutoConfig.from_pretrained("model")
    config.layerdrop = 0.5
    config.save_pretrained("model")
    for key, values in changes.items():
        run[key] = {**run[key], **values} if isinstance(values, dict) else values
    problems = check_run(config_of(run))
    assert len(problems) == 1 and all(part in str(problems) for part in parts), problems


def test_labels_that_the_model_lacks_are_said(origin, tmp_path):
    run = run_of(origin, "sequence-classification", tmp_path)
    held = [{"sentence": "a film", "label": label} for label in ("good", "bad", "middling")]
    write_lines(tmp_path / "held.jsonl", held * 4)
    run["evaluation"]["path"] = str(tmp_path / "held.jsonl")
    with pytest.raises(LoadError, match=r"the label 'middling' is none of the model's[\s\S]*bad, good"):
        train(config_of(run))


def tools_of(root, run):
    config = config_of(run)
    tokenizer = load_tokenizer(config) if "tokenizer" in TASKS[find_task(config)].needs else None
    return open_tools(config, read_model_config(config, tokenizer), tokenizer)[0]


def records_of(run):
    """The values of all training records."""
    config = config_of(run)
    return [record.values for record in read_task_records(config.data, TASKS[find_task(config)])[0]]


def test_a_table_goes_before_the_directories_beside_it_and_include_chooses(origin, tmp_path):
    (tmp_path / "d/clips").mkdir(parents=True)
    for number in range(4):
        write_sound(tmp_path / f"d/clips/{number}.wav", number)
    for name, label in (("train", "up"), ("test", "down")):
        lines = [{"audio": f"clips/{number}.wav", "label": label} for number in range(4)]
        write_lines(tmp_path / f"d/{name}.jsonl", lines)
    run = run_of(origin, "audio-classification", tmp_path, evaluation={})
    run["data"]["path"] = str(tmp_path / "d")
    assert [values["label"] for values in records_of(run)] == ["down"] * 4 + ["up"] * 4
    run["data"]["include"] = ["train.jsonl"]
    assert [values["label"] for values in records_of(run)] == ["up"] * 4


def test_every_source_has_columns_and_a_directory_of_its_own(origin, tmp_path):
    for name, shade in (("one", 0), ("two", 255)):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((16, 16, 3), shade, np.uint8)).save(tmp_path / name / "0.png")
        write_lines(tmp_path / name / "d.jsonl", [{"image": "0.png", "label": "cat", name: "dog"}] * 4)
    run = run_of(origin, "image-classification", tmp_path)
    images = tools_of(origin, run).images
    held = {**run["evaluation"], "path": str(tmp_path / "two/d.jsonl")}
    run["data"] = {"sources": [{"path": str(tmp_path / "one/d.jsonl"), "columns": {"label": "one"}}]}
    config, task = config_of({**run, "evaluation": held}), TASKS["image-classification"]
    tools = Tools(images=images, labels=("cat", "dog"))
    rows = example_rows(config.data.sources, task, tools).read([0], width=0)
    assert rows["labels"].tolist() == [1] and rows["pixel_values"].max() == -1
    plain = config_of({**run, "data": {"path": str(tmp_path / "one/d.jsonl")}, "evaluation": held})
    held_rows = example_rows((held_out(plain.data, plain.evaluation),), task, tools).read([0], width=0)
    assert held_rows["pixel_values"].min() == 1, "the image beside the held-out table"


def test_labels_are_the_models_own_in_any_letters_and_their_number_fits_its_head(origin, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        origin / "sequence-classification/model", id2label={0: "POSITIVE", 1: "NEGATIVE"}
    )
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    run = run_of(origin, "sequence-classification", tmp_path, evaluation={}, export=str(tmp_path / "out"), steps=1)
    run["model"] = {"path": str(tmp_path / "model")}
    lines = [{"text": text, "label": label} for text, label in (("good film", "positive"), ("bad film", "negative"))]
    write_lines(tmp_path / "d.jsonl", lines * 4)
    run["data"] = {"path": str(tmp_path / "d.jsonl"), "seq_length": 32}
    train(config_of(run))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "POSITIVE", 1: "NEGATIVE"}
    write_lines(tmp_path / "d.jsonl", [*lines, {"text": "fine", "label": "neutral"}] * 4)
    del run["export"]
    with pytest.raises(ConfigError, match=r"labels are negative, neutral, positive, and the model's POS"):
        train(config_of(run))


LABELS = {
    "floats": (["1.3", "2.8", "0.5"], "regression", ()),
    "classes": (["0", "2", "1"], "single_label_classification", ("LABEL_0", "LABEL_1", "LABEL_2")),
    "below zero": (["-1", "0", "1"], "regression", ()),
}


@pytest.mark.parametrize("name", LABELS)
def test_numbers_in_a_table_are_numbers(origin, tmp_path, name):
    cells, problem, labels = LABELS[name]
    (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"a film,{cell}\n" for cell in cells))
    run = run_of(origin, "sequence-classification", tmp_path)
    run["model"] = {"path": str(origin / "masked-lm/model"), "task": "sequence-classification"}
    run |= {"data": {"path": str(tmp_path / "d.csv"), "seq_length": 32}, "evaluation": {}}
    config = config_of(run)
    tokenizer = load_tokenizer(config)
    tools, model_config = open_tools(config, read_model_config(config, tokenizer), tokenizer)
    assert (tools.labels, model_config.problem_type) == (labels, problem)
    (tmp_path / "d.csv").write_text("text,label\na film,\n")
    with pytest.raises(LoadError, match="the label is empty"):
        train(config)


BAD_LABELS = {
    "a class too far": (["0", "999999999"], "labels such as 999999999 are no classes"),
    "not finite": (["1.5", "nan"], "labels such as nan are no numbers"),
    "one": (["good", "good"], "every record has the label good"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_labels_that_teach_nothing_are_errors(origin, tmp_path, name):
    cells, says = BAD_LABELS[name]
    (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"a film,{cell}\n" for cell in cells))
    run = run_of(origin, "sequence-classification", tmp_path, evaluation={})
    run["model"] = {"path": str(origin / "masked-lm/model"), "task": "sequence-classification"}
    run["data"] = {"path": str(tmp_path / "d.csv"), "seq_length": 32}
    assert says in str(check_run(config_of(run)))


def test_a_classifier_needs_padding(origin, tmp_path):
    config = config_of(run_of(origin, "sequence-classification", tmp_path))
    tokenizer = load_tokenizer(config)
    model_config = read_model_config(config, tokenizer)
    model_config.pad_token_id = None
    assert open_tools(config, model_config, tokenizer)[1].pad_token_id == tokenizer.pad_token_id
    tokenizer.pad_token = None
    with pytest.raises(ConfigError, match="the tokenizer has no padding token"):
        open_tools(config, model_config, tokenizer)


def test_a_tokenizer_alone_is_no_processor(tmp_path):
    make_tokenizer(tmp_path)
    transformers.LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="there is a tokenizer only"):
        tasks._load(transformers.AutoProcessor, [str(tmp_path)])


def with_values(values):
    """Makes evaluations give these losses, one after the other."""
    left = iter(values)
    return lambda *_, **__: lambda: {"loss": next(left), "perplexity": 1.0}


def best_run(origin, tmp_path, **values):
    run = run_of(origin, "seq2seq-lm", tmp_path, steps=4)
    run["evaluation"] |= {"every": 1}
    run["checkpoint"] = {"dir": str(tmp_path / "saved"), "best": True}
    return {**run, **values}


def test_what_is_no_number_is_never_the_best(origin, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(training, "build_evaluation", with_values([2.0, 4.0, math.nan, 3.0]))
    train(config_of(best_run(origin, tmp_path)))
    assert "best    step 1, loss 2.0000" in capfd.readouterr().out


def test_a_run_that_resumes_knows_its_best_and_its_patience_and_a_new_one_knows_none(
    origin, tmp_path, monkeypatch, capfd
):
    run = best_run(origin, tmp_path)
    run["evaluation"]["patience"] = 2
    monkeypatch.setattr(training, "build_evaluation", with_values([2.0, 4.0, 5.0]))
    assert train(config_of(run)).step == 3
    assert train(config_of(run)) is None, "it is over"
    assert capfd.readouterr().out.count("best    step 1, loss 2.0000") == 2
    run["evaluation"] |= {"metric": "rougeL", "patience": None}
    found = lambda *_, **__: lambda: {"loss": 1.0, "rougeL": 0.25}  # noqa: E731
    monkeypatch.setattr(training, "build_evaluation", found)
    train(config_of(run))
    assert "best    step 4, rougeL 0.2500" in capfd.readouterr().out
    for tag in (tmp_path / "saved").glob("step-*"):
        shutil.rmtree(tag)
    monkeypatch.setattr(training, "build_evaluation", lambda *_, **__: lambda: {"loss": 1.0, "rougeL": 0.125})
    train(config_of({**run, "steps": 1}))
    assert "best    step 1, rougeL 0.1250" in capfd.readouterr().out, "not that of the run before"


def test_without_a_best_step_the_newest_is_measured(origin, tmp_path, capfd):
    run = best_run(origin, tmp_path, steps=2)
    train(config_of({**run, "checkpoint": {"dir": str(tmp_path / "saved")}}))
    found = training.evaluate(config_of(run))
    assert found["loss"] == pytest.approx(losses_of(run)[-1]["eval_loss"], rel=1e-5)


def test_epochs_go_on_with_another_batch_size(origin, tmp_path):
    run = run_of(origin, "seq2seq-lm", tmp_path, evaluation={}, batch_size=2, epochs=2.0)
    del run["steps"]
    run["checkpoint"] = {"dir": str(tmp_path / "saved"), "every": 5, "keep_last": None}
    assert train(config_of(run)).step == 14
    for step in (10, 14):
        shutil.rmtree(tmp_path / f"saved/step-{step}")
    run |= {"batch_size": 4, "checkpoint": {**run["checkpoint"], "change": ["batch_size"]}}
    assert train(config_of(run)).step == 5 + (28 - 8) // 4, "10 of 28 rows are read, 8 in whole batches of 4"


def test_nothing_is_masked_where_nothing_may_be(origin):
    rows = StreamRows(Documents(np.array([1] * 8 + [9] * 8, np.uint32), None, None, 0), seq_length=8)
    masked = MaskedRows(rows, mask=4, num_tokens=30, kept=[1], seed=0).read([0, 1], width=8)
    assert (masked["labels"][0] == -100).all() and (masked["labels"][1] != -100).sum() >= 1


def test_masks_of_features_are_drawn_from_the_seed(origin, tmp_path):
    found = []
    shutil.copytree(origin / "ctc/model", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    config.mask_time_prob, config.mask_time_length = 0.5, 2
    transformers.Wav2Vec2ForCTC(config).save_pretrained(tmp_path / "model")
    for number in range(2):
        run = run_of(origin, "ctc", tmp_path / str(number), evaluation={}, steps=2)
        run["model"] = {"path": str(tmp_path / "model")}
        np.random.seed(number)
        train(config_of(run))
        found.append([line["loss"] for line in losses_of(run)])
    assert found[0] == found[1]


def test_the_held_out_rows_are_of_all_classes(origin):
    run = run_of(origin, "image-classification", "unused")
    tools = Tools(images=tools_of(origin, run).images, labels=("cat", "dog"))
    config = config_of(run)
    rows = example_rows((config.data,), TASKS["image-classification"], tools).read(range(6), width=0)
    assert set(rows["labels"].tolist()) == {0, 1}


BAD_CHATS = {
    "a number": ({"messages": [{"role": "user", "content": 7}]}, CHAT, "message 0 holds int, not text"),
    "an image of nothing": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "b"}]},
        CHAT,
        "an image part names no file",
    ),
    "more images": ({**seen("red", "bob"), "images": ["0.png", "0.png"]}, CHAT, "2 images for 1 image part"),
    "no part": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "images": ["0.png"]},
        CHAT,
        "1 image for 0 image parts",
    ),
    "a template that rewrites": (
        {"messages": [*seen("red", "bob")["messages"], *seen("blue", "ann")["messages"]]},
        CHAT.replace("{{ part.text }}", "{{ part.text if loop.last and m == messages[-1] else 'x' }}"),
        "does not tell what is learned",
    ),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_chats_with_images_that_are_not_clear_are_errors(origin, tmp_path, name):
    values, template, says = BAD_CHATS[name]
    run = run_of(origin, "image-text-to-text", tmp_path)
    tools = tools_of(origin, run)
    tools.processor.chat_template = template
    record = Record("here", values, directory=origin / "image-text-to-text")
    with pytest.raises(LoadError, match=says):
        TASKS["image-text-to-text"].encode(record, tools)


def test_what_a_template_writes_is_all_that_is_learned(origin, tmp_path):
    tools = tools_of(origin, run_of(origin, "image-text-to-text", tmp_path))
    record = Record("here", seen("red", "bob film"), directory=origin / "image-text-to-text")
    example = TASKS["image-text-to-text"].encode(record, tools)
    learned = [token for token in example["labels"].tolist() if token != -100]
    assert tools.tokenizer.decode(learned) == "bob film [SEP]" and example["input_ids"][0] != 2, "no second start"


def test_a_start_token_that_the_model_adds_is_no_label(origin, tmp_path):
    tools = tools_of(origin, run_of(origin, "speech-seq2seq", tmp_path))
    record = Record("here", {"audio": "0.wav", "text": "bob"}, directory=origin / "speech-seq2seq/data")
    assert tools.tokenizer("bob")["input_ids"][0] == tools.start_token == 2
    assert TASKS["speech-seq2seq"].encode(record, tools)["labels"][0] != 2


def test_a_text_that_is_null_is_an_error(origin, tmp_path):
    write_lines(tmp_path / "d.jsonl", [{"prompt": "a", "response": None}])
    run = run_of(origin, "seq2seq-lm", tmp_path, evaluation={})
    run["data"] = {"path": str(tmp_path / "d.jsonl")}
    with pytest.raises(LoadError, match="'response' holds nothing"):
        train(config_of({**run, "batch_size": 1}))
    for last, says in ((None, "'response' holds nothing"), ("", "the response is empty")):  # before it is read
        write_lines(tmp_path / "d.jsonl", [{"prompt": "a", "response": "b"}] * 8 + [{"prompt": "a", "response": last}])
        assert says in str(check_run(config_of(run)))


ANSWERS = {
    "elsewhere": ({"text": ["Ann"], "answer_start": [4]}, "the answer 'Ann' does not begin at 4 of the context"),
    "beyond": ({"text": ["Ann"], "answer_start": [400]}, "does not begin at 400"),
    "a list": (["Ann"], r"the answers are \['Ann'\]"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_where_they_are_said_to_be(origin, tmp_path, name):
    answers, says = ANSWERS[name]
    tools = tools_of(origin, run_of(origin, "question-answering", tmp_path))
    record = Record("here", {"question": "who", "context": "Ann laughs", "answers": answers})
    with pytest.raises(LoadError, match=says):
        TASKS["question-answering"].encode(record, tools)


TARGETS = {"sequence-classification": ["query"], "image-classification": ["q_proj"], "seq2seq-lm": "all-linear"}


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_is_trained_with_the_head_of_its_task(origin, tmp_path, name):
    run = run_of(origin, name, tmp_path, evaluation={}, export=str(tmp_path / "out"))
    run["adapter"] = {"r": 2, "target_modules": TARGETS[name]}
    train(config_of(run))
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    assert any("classifier" in key for key in saved) == (name != "seq2seq-lm"), sorted(saved)[:3]
    kind = json.loads((tmp_path / "out/adapter_config.json").read_text())["task_type"]
    expected = {"sequence-classification": "SEQ_CLS", "image-classification": None, "seq2seq-lm": "SEQ_2_SEQ_LM"}
    assert kind == expected[name]


def test_every_row_generates_as_many_tokens_as_data_ranks_in_a_pipeline_need(origin, tmp_path):
    run = run_of(origin, "seq2seq-lm", tmp_path)
    tools, model = tools_of(origin, run), transformers.T5ForConditionalGeneration.from_pretrained(run["model"]["path"])
    model.generation_config.eos_token_id = [*range(40)]  # each token ends a row
    metrics = ExampleMetrics(TASKS["seq2seq-lm"], tools, model, Mesh.open("tp1"), max_new_tokens=7)
    widths, generate = [], model.generate
    model.generate = lambda **inputs: widths.append(generate(**inputs)) or widths[-1]
    rows = example_rows((config_of(run).data,), TASKS["seq2seq-lm"], tools)
    metrics.see(None, rows.read([0, 1], width=0), [0, 1])
    assert widths[0].shape == (2, 8) and model.generation_config.eos_token_id == [*range(40)]


def test_plan_and_verify_take_a_task(origin, capfd):
    model = str(origin / "masked-lm/model")
    assert main(["plan", model, "--layout", "tp2", "--task", "token-classification"]) == 0
    assert "classifier.weight" in capfd.readouterr().out
    assert main(["verify", model, "--layout", "tp2", "--task", "sequence-classification"]) == 0
    assert "a tiny BertForSequenceClassification over tp2: equal to the unsplit model" in capfd.readouterr().out


def test_the_command_line_takes_directories_of_images(origin, tmp_path, capfd):
    run = run_of(origin, "image-classification", tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["check", str(tmp_path / "run.yaml")]) == 0, capfd.readouterr().out
    run["evaluation"] |= {"metric": "mse"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["check", str(tmp_path / "run.yaml")]) == 1
    assert "evaluation.metric is 'mse', which is not measured" in capfd.readouterr().out


def test_held_out_rows_that_are_no_batch_are_an_error_before_the_first_step(origin, tmp_path):
    lines = [json.loads(line) for line in (origin / "ctc/data/data.jsonl").read_text().splitlines()]
    (tmp_path / "held").mkdir()
    for number in range(2):
        write_sound(tmp_path / f"held/{number}.wav", number)
    write_lines(tmp_path / "held/d.jsonl", lines[:2])
    run = run_of(origin, "ctc", tmp_path)
    run["evaluation"]["path"] = str(tmp_path / "held/d.jsonl")
    with pytest.raises(ConfigError, match="2 held-out rows for a batch of 4"):
        train(config_of(run))
    assert not (tmp_path / "ctc/train.jsonl").exists()


def test_labels_may_be_longer_than_their_inputs():
    examples = [{"input_ids": [1, 2], "labels": [3, 4]}, {"input_ids": [1], "labels": [5] * 11}]
    batch = collate(examples, {"input_ids": 0}, width=8)
    assert batch["input_ids"].shape == (2, 8) and batch["labels"].shape == (2, 16)
    spoken = [{"input_values": np.zeros((4, 3), np.float32), "labels": 1}] * 2  # frames of a spectrogram
    assert collate(spoken, {})["input_values"].shape == (2, 4, 3)


class Broken:
    """A callback that fails."""

    def report(self, record):
        raise ValueError("no plot")

    def close(self):
        raise RuntimeError("no file")


def test_a_callback_that_fails_ends_no_run(origin, tmp_path, caplog):
    run = run_of(origin, "seq2seq-lm", tmp_path, evaluation={}, export=str(tmp_path / "out"))
    run["log"]["callbacks"] = ["tests.cli.test_tasks:Broken"]
    assert train(config_of(run)).step == STEPS and (tmp_path / "out/model.safetensors").exists()
    assert "no plot" in caplog.text and "no file" in caplog.text


def test_the_processors_of_a_new_model_are_exported_too(origin, tmp_path):
    run = run_of(origin, "image-classification", tmp_path, evaluation={}, steps=1, export=str(tmp_path / "out"))
    config = json.loads((origin / "image-classification/model/config.json").read_text())
    model = {
        "config": {"model_type": "vit", **{key: config[key] for key in ("hidden_size", "image_size", "patch_size")}}
    }
    model["config"] |= {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model |= {"task": "image-classification", "tokenizer": str(origin / "image-classification/model")}
    train(config_of({**run, "model": model}))
    assert (tmp_path / "out/preprocessor_config.json").exists()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").id2label == {0: "cat", 1: "dog"}


def with_labels(origin, tmp_path, names, values):
    """A classifier with classes of these names, and data with these labels."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        origin / "sequence-classification/model", id2label=dict(enumerate(names)), ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    write_lines(tmp_path / "d.jsonl", [{"text": "a film", "label": value} for value in values] * 4)
    run = run_of(origin, "sequence-classification", tmp_path, evaluation={}, steps=1)
    data = {"path": str(tmp_path / "d.jsonl"), "seq_length": 16}
    return {**run, "model": {"path": str(tmp_path / "model")}, "data": data}


def indices_of(run):
    tools = tools_of(None, run)
    return [tools.label(None, values["label"]) for values in records_of(run)][: len(set(map(str, tools.labels)))]


def test_names_that_are_numbers_are_names_where_all_are(origin, tmp_path):
    names = ["1", "2", "3"]
    assert indices_of(with_labels(origin, tmp_path, names, [1, 2, 3])) == [0, 1, 2]
    assert indices_of(with_labels(origin, tmp_path, names, [0, 1, 2])) == [0, 1, 2]


def test_a_trained_head_is_not_renamed(origin, tmp_path):
    run = with_labels(origin, tmp_path, ["POSITIVE", "NEGATIVE"], ["neg", "pos"])
    with pytest.raises(ConfigError, match=r"labels are neg, pos, and the model's POSITIVE, NEGATIVE[\s\S]*model.task"):
        train(config_of(run))
    run["model"]["task"] = "sequence-classification"
    assert train(config_of(run)).step == 1


def test_labels_of_a_run_are_those_of_its_checkpoint(origin, tmp_path, capfd):
    run = with_labels(origin, tmp_path, ["LABEL_0", "LABEL_1", "LABEL_2"], ["x", "y", "z"])
    run["checkpoint"] = {"dir": str(tmp_path / "saved")}
    train(config_of(run))
    for path, labels in {"some": ["x", "z"], "more": ["a", "x", "z"]}.items():
        write_lines(tmp_path / f"{path}.jsonl", [{"text": "a film", "label": label} for label in labels] * 4)
    run["data"]["path"] = run["evaluation"]["path"] = str(tmp_path / "some.jsonl")
    assert indices_of(run)[:2] == [0, 2]
    assert "accuracy" in training.evaluate(config_of(run))
    run["data"]["path"] = str(tmp_path / "more.jsonl")
    with pytest.raises(ConfigError, match="labels are a, x, z, and the model's x, y, z"):
        training.evaluate(config_of(run))


def test_a_best_step_is_asked_for_when_training_goes_on(origin, tmp_path, monkeypatch, capfd):
    run = best_run(origin, tmp_path, steps=1, export=str(tmp_path / "out"))
    without = {**run, "checkpoint": {"dir": str(tmp_path / "saved")}, "export": None}
    monkeypatch.setattr(training, "build_evaluation", with_values([1.0]))
    train(config_of(without))
    monkeypatch.setattr(training, "build_evaluation", with_values([3.0, 2.0]))
    train(config_of({**run, "steps": 3}))
    assert "best    step 3, loss 2.0000" in capfd.readouterr().out and (tmp_path / "out/model.safetensors").exists()


def test_patience_begins_again_where_a_run_was_changed(origin, tmp_path, monkeypatch):
    run = best_run(origin, tmp_path)
    run["evaluation"]["patience"] = 1
    monkeypatch.setattr(training, "build_evaluation", with_values([2.0, 3.0]))
    assert train(config_of(run)).step == 2
    run["optimizer"] = {**run["optimizer"], "lr": 0.001}
    run["checkpoint"]["change"] = ["optimizer.lr"]
    monkeypatch.setattr(training, "build_evaluation", with_values([1.5, 1.0]))
    assert train(config_of(run)).step == 4


def test_passes_over_the_data_count_from_the_state_that_was_given(origin, tmp_path):
    run = run_of(origin, "seq2seq-lm", tmp_path, evaluation={}, batch_size=2, epochs=1.0)
    del run["steps"]
    assert train(config_of(run)).step == 7
    again = {**run, "log": {"dir": str(tmp_path / "again")}}
    again["data"] = {**run["data"], "state": str(tmp_path / "seq2seq-lm/data_state.json")}
    assert train(config_of(again)).step == 7


def test_an_adapter_trains_every_part_of_a_head_that_is_drawn(origin, tmp_path):
    run = run_of(origin, "ctc", tmp_path / "ctc", evaluation={}, export=str(tmp_path / "ctc/out"), steps=1)
    run["adapter"] = {"r": 2, "target_modules": ["q_proj"]}
    train(config_of(run))
    assert any("lm_head" in key for key in load_file(tmp_path / "ctc/out/adapter_model.safetensors"))
    run = run_of(origin, "sequence-classification", tmp_path, evaluation={}, export=str(tmp_path / "out"), steps=1)
    run["model"] = {"path": str(origin / "masked-lm/model"), "task": "sequence-classification"}
    run["adapter"] = {"r": 2, "target_modules": ["query"]}
    train(config_of(run))
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    assert any("pooler" in key for key in saved) and any("classifier" in key for key in saved)


def test_a_record_that_cannot_be_encoded_is_named(origin, tmp_path):
    lines = [{"question": "who " * 40, "context": "a film", "answers": {"text": [], "answer_start": []}}] * 4
    write_lines(tmp_path / "d.jsonl", lines)
    run = run_of(origin, "question-answering", tmp_path, evaluation={})
    run["data"] = {"path": str(tmp_path / "d.jsonl"), "seq_length": 16}
    with pytest.raises(LoadError, match=r"the record cannot be encoded\n +at:  .*d.jsonl"):
        train(config_of(run))


def test_the_blank_of_ctc_is_the_tokenizers_padding(origin, tmp_path):
    vocabulary = {token: number for number, token in enumerate(["<unk>", "|", *"abdefghilmnorstuvwy", "<pad>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    letters = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    letters.save_pretrained(tmp_path / "letters")
    run = run_of(origin, "ctc", tmp_path, evaluation={}, steps=1)
    run["model"]["tokenizer"] = str(tmp_path / "letters")
    with pytest.raises(ConfigError, match="the model's blank is 0, and the tokenizer's padding 21"):
        train(config_of(run))
    run["model"]["task"] = "ctc"
    run["export"] = str(tmp_path / "out")
    train(config_of(run))
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert exported.pad_token_id == 21 and exported.vocab_size == len(letters)
    metrics = ExampleMetrics(TASKS["ctc"], Tools(tokenizer=letters), None, Mesh.open("tp1"), max_new_tokens=1)
    said, meant = (torch.tensor([letters(word)["input_ids"]]) for word in ("helo", "hello"))
    metrics.see(SimpleNamespace(logits=torch.nn.functional.one_hot(said, 22).float()), {"labels": meant}, [0])
    assert metrics.results() == {"wer": 1.0}


@pytest.mark.filterwarnings("ignore:parameters are kept in bfloat16")
def test_sound_is_heard_in_the_dtype_of_the_weights(origin, tmp_path):
    run = run_of(origin, "ctc", tmp_path, evaluation={}, steps=1)
    run["model"]["dtype"] = "bfloat16"
    assert math.isfinite(train(config_of(run)).loss)


def test_another_tokenizer_is_another_data_set(origin, tmp_path):
    run = run_of(origin, "seq2seq-lm", tmp_path, evaluation={}, steps=1, checkpoint={"dir": str(tmp_path / "saved")})
    train(config_of(run))
    file = json.loads((origin / "seq2seq-lm/model/tokenizer.json").read_text())
    words = file["model"]["vocab"]
    words["good"], words["bad"] = words["bad"], words["good"]
    shutil.copytree(origin / "seq2seq-lm/model", tmp_path / "other")
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(file))
    run["model"]["tokenizer"] = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="data: was"):
        train(config_of({**run, "steps": 2}))


def classifier_run(origin, tmp_path, kind, config, name="sequence-classification", **adapter):
    """A run that trains a new head, with an adapter, on the body of another class."""
    save(tmp_path / "model", (kind, config))
    run = run_of(origin, name, tmp_path, evaluation={}, steps=1, export=str(tmp_path / "out"))
    return {
        **run,
        "model": {"path": str(tmp_path / "model"), "task": name},
        **({"adapter": adapter} if adapter else {}),
    }


def test_a_head_of_several_layers_is_saved_once(origin, tmp_path):
    roberta = transformers.RobertaConfig(**{**BERT, "max_position_embeddings": 66}, pad_token_id=0)
    run = classifier_run(origin, tmp_path, transformers.RobertaForMaskedLM, roberta, r=2, target_modules="all-linear")
    train(config_of(run))
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    assert sum("classifier" in key for key in saved) == 4


def test_a_model_whose_body_has_no_name_has_a_head_of_few_parameters(origin, tmp_path):
    t5 = transformers.AutoConfig.from_pretrained(origin / "seq2seq-lm/model")
    run = classifier_run(
        origin, tmp_path, transformers.T5ForConditionalGeneration, t5, "seq2seq-lm", r=2, target_modules=["q", "v"]
    )
    train(config_of(run))
    weights = load_file(tmp_path / "model/model.safetensors")
    lacking = {key: value for key, value in weights.items() if not key.startswith("encoder.block")}
    save_file(lacking, tmp_path / "model/model.safetensors", {"format": "pt"})
    del run["adapter"], run["export"]
    with pytest.raises(LoadError, match="not in the checkpoint: encoder.block"):
        train(config_of(run))


def test_a_body_of_another_width_is_an_error(origin, tmp_path):
    shutil.copytree(origin / "image-classification/model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    run = run_of(origin, "image-classification", tmp_path, evaluation={}, steps=1)
    run["model"] = {"path": str(tmp_path / "model"), "task": "image-classification"}
    with pytest.raises(LoadError, match="6 of another shape: vit.layers"):
        train(config_of(run))


def test_every_linear_layer_of_ctc_has_an_adapter_but_the_head(origin, tmp_path):
    run = run_of(origin, "ctc", tmp_path, evaluation={}, export=str(tmp_path / "out"), steps=1)
    run["adapter"] = {"r": 2, "target_modules": "all-linear"}
    train(config_of(run))
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    assert not any("lm_head" in key and "lora" in key for key in saved) and any(
        "lm_head.weight" in key for key in saved
    )


def test_a_parameter_of_the_model_itself_is_no_module_to_save(origin, tmp_path):
    sound = transformers.Wav2Vec2Config(**SPEECH, num_labels=3, pad_token_id=0, use_weighted_layer_sum=True)
    hears = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    save(tmp_path / "model", (transformers.Wav2Vec2ForSequenceClassification, sound), hears)
    run = run_of(origin, "audio-classification", tmp_path, evaluation={}, steps=1)
    run["model"] = {"path": str(tmp_path / "model")}
    assert train(config_of({**run, "adapter": {"r": 2, "target_modules": ["q_proj"]}})).step == 1


def test_a_type_with_several_classes_of_a_task_is_trained(origin, tmp_path):
    deit = transformers.DeiTConfig(image_size=16, patch_size=8, num_labels=2, **{**BERT, "vocab_size": 2})
    pictures = transformers.AutoImageProcessor.from_pretrained(origin / "image-classification/model")
    save(tmp_path / "model", (transformers.DeiTForImageClassification, deit), pictures)
    for model in ({"path": str(tmp_path / "model")}, {"path": str(tmp_path / "model"), "task": "image-classification"}):
        run = run_of(origin, "image-classification", tmp_path, evaluation={}, steps=1)
        assert train(config_of({**run, "model": model})).step == 1


def fail_to_write_processors(root, directory):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    transformers.ViTImageProcessor.save_pretrained = fail
    transformers.image_processing_base.ImageProcessingMixin.save_pretrained = fail
    run = run_of(
        root, "image-classification", directory, evaluation={}, layout="tp2", steps=1, export=f"{directory}/out"
    )
    try:
        train(config_of(run))
    except LoadError as error:
        return str(error)
    return "no error"


def test_a_processor_that_cannot_be_written_is_every_ranks_error(origin, tmp_path):
    assert all("No space left" in text for text in spawn(fail_to_write_processors, 2, origin, tmp_path))


def test_an_earlier_best_step_is_not_replaced(origin, tmp_path):
    run = best_run(origin, tmp_path, steps=1)
    train(config_of(run))
    shutil.rmtree(tmp_path / "saved/step-1")
    run["checkpoint"]["resume"] = "never"
    with pytest.raises(ConfigError, match="holds checkpoints of another run: step-1"):
        train(config_of(run))


def test_labels_are_those_of_the_best_step_where_it_alone_is_left(origin, tmp_path):
    run = with_labels(origin, tmp_path, ["LABEL_0", "LABEL_1"], ["x", "y"])
    run["checkpoint"], run["evaluation"] = {"dir": str(tmp_path / "saved"), "best": True}, {"path": run["data"]["path"]}
    train(config_of(run))
    shutil.rmtree(tmp_path / "saved/step-1")
    write_lines(tmp_path / "d.jsonl", [{"text": "a film", "label": label} for label in ("a", "x")] * 4)
    with pytest.raises(ConfigError, match="labels are a, x, and the model's x, y"):
        training.evaluate(config_of(run))


def test_classes_that_are_numbers_stay_as_they_are_when_a_run_resumes(origin, tmp_path):
    run = with_labels(origin, tmp_path, ["1", "2", "3"], [])
    run["data"]["path"] = str(tmp_path / "d.csv")
    run["checkpoint"] = {"dir": str(tmp_path / "saved"), "change": ["data"]}
    for steps, labels in enumerate(([0, 1, 2], [1, 2]), start=1):
        (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"a film,{label}\n" for label in labels * 4))
        assert indices_of(run)[: len(labels)] == labels
        assert train(config_of({**run, "steps": steps})).step == steps


def test_sound_that_cannot_be_read_is_named(origin, tmp_path):
    (tmp_path / "data/up").mkdir(parents=True)
    write_sound(tmp_path / "data/up/0.wav", 0)
    (tmp_path / "data/up/a.MP3").write_bytes(b"")
    (tmp_path / "data/up/b.txt").write_text("a note")
    run = run_of(origin, "audio-classification", tmp_path)
    run["data"]["path"] = str(tmp_path / "data")
    with pytest.raises(LoadError, match=r"1 sound file of .*data cannot be read: .*a\.MP3"):
        records_of(run)


def test_the_best_of_all_answers_counts(origin, tmp_path):
    write_lines(tmp_path / "d.jsonl", [
        {"question": "who was it", "context": text, "answers": {"text": words[1:3], "answer_start": places}}
        for text in sentences(4)
        for words in [text.split()]
        for places in [[text.index(" ") + 1, text.index(" ", text.index(" ") + 1) + 1]]
    ])  # fmt: skip
    run = run_of(origin, "question-answering", tmp_path)
    run["data"]["path"] = run["evaluation"]["path"] = str(tmp_path / "d.jsonl")
    config, task = config_of(run), TASKS["question-answering"]
    tools = tools_of(None, run)
    rows = example_rows((config.data,), task, tools)
    batch = rows.read([0, 1], width=0)
    logits = torch.zeros(2, 2, batch["input_ids"].shape[1])
    for row in range(2):  # the first row is answered by its second answer, the other one by neither
        place = int(batch["start_positions"][row]) + 1 if row == 0 else 1
        logits[:, row, place] = 1.0
    metrics = ExampleMetrics(task, tools, None, Mesh.open("tp1"), max_new_tokens=1, records=rows.records)
    metrics.see(SimpleNamespace(start_logits=logits[0], end_logits=logits[1]), batch, [0, 1])
    assert metrics.results()["exact_match"] == 50.0


def test_a_sum_over_rows_is_the_loss_of_held_out_sound(origin, tmp_path):
    model = transformers.Wav2Vec2ForCTC.from_pretrained(origin / "ctc/model", ctc_loss_reduction="sum").eval()
    shutil.copytree(origin / "ctc/model", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    run = run_of(origin, "ctc", tmp_path, model={"path": str(tmp_path / "model")})
    for index in range(12):
        write_sound(tmp_path / f"{index}.wav", 3 * index)  # equally long ones
    write_lines(tmp_path / "d.jsonl", [{"audio": f"{n}.wav", "text": text} for n, text in enumerate(sentences(12))])
    run["data"]["path"] = run["evaluation"]["path"] = str(tmp_path / "d.jsonl")
    rows = example_rows((config_of(run).data,), TASKS["ctc"], tools_of(None, run))
    batch = rows.read(range(12), width=rows.width(range(12)))
    with torch.no_grad():
        assert training.evaluate(config_of(run))["loss"] == pytest.approx(float(model(**batch).loss), rel=1e-5)


def test_hidden_files_are_no_examples(origin, tmp_path):
    write_images(tmp_path / "data", 4)
    (tmp_path / "data/.ipynb_checkpoints").mkdir()
    shutil.copy(tmp_path / "data/dog/0.png", tmp_path / "data/.ipynb_checkpoints/0.png")
    (tmp_path / "data/dog/._0.png").write_bytes(b"")
    run = run_of(origin, "image-classification", tmp_path)
    run["data"]["path"] = str(tmp_path / "data")
    assert [values["label"] for values in records_of(run)] == ["cat", "cat", "dog", "dog"]


def test_a_run_that_began_at_a_state_of_the_data_resumes_with_another_batch_size(origin, tmp_path):
    run = run_of(origin, "seq2seq-lm", tmp_path, evaluation={}, batch_size=2, epochs=1.0)
    del run["steps"]
    train(config_of(run))
    again = {**run, "log": {"dir": str(tmp_path / "again")}, "epochs": 2.0}
    again["data"] = {**run["data"], "state": str(tmp_path / "seq2seq-lm/data_state.json")}
    again["checkpoint"] = {"dir": str(tmp_path / "saved"), "every": 4, "keep_last": None}
    assert train(config_of(again)).step == 14
    for step in (8, 12, 14):
        shutil.rmtree(tmp_path / f"saved/step-{step}")
    again |= {"batch_size": 4, "checkpoint": {**again["checkpoint"], "change": ["batch_size"]}}
    assert train(config_of(again)).step == 4 + (28 - 8) // 4, "8 of 28 rows were read behind those of the state"
