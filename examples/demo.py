"""A tour in a few minutes on two CPU cores: split, train, verify, export, reload and sample a small model.

    make demo

It writes into a temporary directory (or the one named on the command line), needs no network, and does everything
through the `shardwise` command, as you would.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

LAYOUT = "tp2"
VOCAB_SIZE = 2048
SEQ_LENGTH = 256
STEPS = 300
PROMPT = "class Queue:\n    def __init__(self"
STDLIB = Path(sysconfig.get_paths()["stdlib"])
TRAINED_ON = ["[_a-s]*.py", "asyncio/*.py", "email/*.py", "json/*.py", "logging/*.py", "unittest/*.py"]
HELD_OUT = "[t-z]*.py"
END = "<|end|>"

CHART_WIDTH = 64
CHART_HEIGHT = 12


def main() -> None:
    started = time.perf_counter()
    if len(sys.argv) > 1:
        tour(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="shardwise-demo-") as directory:
            tour(Path(directory))
    print(f"\nThe whole tour took {time.perf_counter() - started:.0f} seconds.")


def tour(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    heading(1, "A corpus and a tokenizer, made on the spot")
    entropy = make_tokenizer(directory / "tokenizer")
    run = write_run(directory)

    heading(2, f"The plan: who owns what under {LAYOUT}")
    shardwise("plan", str(run))

    heading(3, "Training on two ranks, sequence parallelism on")
    print(run.read_text())
    shardwise("train", str(run))

    heading(4, "The loss curve")
    show_losses(directory / "logs" / "train.jsonl", entropy)

    heading(5, "Is the split model the same model? (a tiny model of it, whole against split)")
    shardwise("verify", str(run))

    heading(6, "The export is a plain Hugging Face directory")
    reload_and_sample(directory / "model", entropy)


def make_tokenizer(path: Path) -> float:
    """Trains a byte-level BPE tokenizer on the corpus; returns the unigram entropy of its tokens, in nats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted(file for pattern in TRAINED_ON for file in STDLIB.glob(pattern))
    texts = [file.read_text(encoding="utf-8") for file in files]
    print(f"{len(files)} modules of Python's own standard library, {sum(map(len, texts)) / 1e6:.1f} MB of source")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END).save_pretrained(path)

    counts = collections.Counter(token for encoded in bpe.encode_batch(texts) for token in encoded.ids)
    total = counts.total()
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    print(f"{bpe.get_vocab_size()} tokens in the vocabulary, {total / 1e6:.2f} million in the corpus")
    print(f"unigram entropy: {entropy:.2f} nats - the loss of a model that knows frequencies and nothing else")
    return entropy


def write_run(directory: Path) -> Path:
    """The configuration that every command below is given."""
    run = directory / "run.yaml"
    run.write_text(
        f"""\
model:
  tokenizer: {directory / "tokenizer"}
  config:
    model_type: llama
    hidden_size: 256
    intermediate_size: 704
    num_hidden_layers: 4
    num_attention_heads: 8
    num_key_value_heads: 4
    initializer_range: 0.06
    max_position_embeddings: {SEQ_LENGTH}
    vocab_size: {VOCAB_SIZE}
    tie_word_embeddings: true
layout: {LAYOUT}
sequence_parallel: true
data: {{path: {STDLIB}, include: {json.dumps(TRAINED_ON)}, seq_length: {SEQ_LENGTH}}}
steps: {STEPS}
batch_size: 4
optimizer: {{lr: 4.0e-3, options: {{betas: [0.9, 0.95]}}, schedule: {{warmup_steps: 10}}}}
log: {{dir: {directory / "logs"}, every: 20}}
export: {directory / "model"}
"""
    )
    return run


def show_losses(path: Path, entropy: float) -> None:
    """Draws the loss over the steps, with the unigram entropy as a dashed line."""
    losses = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    means = [mean(chunk) for chunk in split_evenly(losses, CHART_WIDTH)]
    top, bottom = max(means), min(*means, entropy) - 0.2
    height_of = lambda value: round((value - bottom) / (top - bottom) * (CHART_HEIGHT - 1))  # noqa: E731
    for level in range(CHART_HEIGHT - 1, -1, -1):
        label = bottom + level / (CHART_HEIGHT - 1) * (top - bottom)
        row = "".join(
            "*" if height_of(value) == level else "-" if height_of(entropy) == level else " " for value in means
        )
        note = f"  unigram entropy {entropy:.2f}" if height_of(entropy) == level else ""
        print(f"  {label:6.2f} |{row}{note}")
    print(f"         +{'-' * len(means)}  {len(losses)} steps")
    last = mean(losses[-10:])
    print(f"\nloss {losses[0]:.2f} -> {last:.2f} (mean of the last 10 steps), {entropy - last:.2f} below the entropy")
    if last > entropy - 1:
        sys.exit("the model has not learned as much as it should have")


def reload_and_sample(path: Path, entropy: float) -> None:
    """Loads the export with plain transformers, scores text it has not seen, and lets it write."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()

    print("\n".join(f"  {file.name:<28} {file.stat().st_size:>12,} bytes" for file in sorted(path.iterdir())))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(STDLIB.glob(HELD_OUT))[:8])
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    rows = ids[: len(ids) // SEQ_LENGTH * SEQ_LENGTH].view(-1, SEQ_LENGTH)[:32]
    with torch.no_grad():
        loss = float(model(input_ids=rows, labels=rows).loss)
    print(f"\nAutoModelForCausalLM.from_pretrained: {model.num_parameters():,} parameters")
    print(f"loss on modules it was not trained on: {loss:.2f} (unigram entropy {entropy:.2f})")

    torch.manual_seed(0)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(
        **prompt, max_new_tokens=120, do_sample=True, temperature=0.7, top_k=40, pad_token_id=tokenizer.eos_token_id
    )
    print("\na sample:\n")
    print("\n".join(f"    {line}" for line in tokenizer.decode(written[0]).splitlines()))


def shardwise(*words: str) -> None:
    """Runs the `shardwise` command; ends the tour if it fails."""
    print(f"$ shardwise {' '.join(words)}\n", flush=True)
    code = subprocess.run([sys.executable, "-m", "shardwise", *words], env=os.environ, check=False).returncode
    if code != 0:
        sys.exit(f"`shardwise {words[0]}` failed")


def heading(number: int, text: str) -> None:
    print(f"\n{'=' * 100}\n{number}. {text}\n{'=' * 100}", flush=True)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def split_evenly(values: list[float], count: int) -> list[list[float]]:
    count = min(count, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    return [values[start:stop] for start, stop in itertools.pairwise(edges)]


if __name__ == "__main__":
    main()
