"""The command line in one page: text in, a Hugging Face model directory out, trained on two CPU ranks.

python examples/text_to_model.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

RUN = """\
model:
  tokenizer: tokenizer
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
layout: tp2
data: {path: corpus.jsonl, seq_length: 64}
steps: 40
batch_size: 8
optimizer: {lr: 1.0e-2, schedule: {name: linear, warmup_steps: 5}}
log: {dir: logs, every: 20}
export: model
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sums = [f"{a} plus {b} is {a + b}." for a in range(40) for b in range(40)]
        (directory / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sums))
        write_tokenizer(directory / "tokenizer")
        (directory / "run.yaml").write_text(RUN)
        print(RUN)
        subprocess.run([sys.executable, "-m", "shardwise", "train", "run.yaml"], cwd=directory, check=True)

        tokenizer = AutoTokenizer.from_pretrained(directory / "model")
        model = AutoModelForCausalLM.from_pretrained(directory / "model")
        prompt = tokenizer("2 plus 3 ", return_tensors="pt")
        written = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        print(repr(tokenizer.decode(written[0], skip_special_tokens=True)))


def write_tokenizer(path: Path) -> None:
    """A tokenizer of single bytes: enough here, and made in no time."""
    vocabulary = {
        token: number for number, token in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(path)


if __name__ == "__main__":
    main()
