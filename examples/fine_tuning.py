"""Fine-tuning in one page: LoRA on a few conversations, over two CPU ranks, and the answers before and after.

python examples/fine_tuning.py               # of a small model that is made on the spot
python examples/fine_tuning.py DIRECTORY     # of yours, such as the one that `make demo DIRECTORY` leaves in model/
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima", "Norway": "Oslo", "Cuba": "Havana"}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
RUN = """\
model: {path: MODEL, tokenizer: tokenizer}
layout: tp2
data: {path: chats.jsonl, format: chat, seq_length: 128}
adapter: {r: 8, lora_alpha: 16, target_modules: all-linear}
steps: 60
batch_size: 2
optimizer: {lr: 2.0e-2, schedule: {warmup_steps: 5}}
log: {dir: logs, every: 20}
export: adapter
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else make_model(directory / "model")
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(directory / "tokenizer")
        with (directory / "chats.jsonl").open("w") as file:
            for country, capital in CAPITALS.items():
                file.write(json.dumps({"messages": [*ask(country), {"role": "assistant", "content": capital}]}) + "\n")
        run = RUN.replace("MODEL", str(model))
        (directory / "run.yaml").write_text(run)
        print(run)
        subprocess.run([sys.executable, "-m", "shardwise", "train", "run.yaml"], cwd=directory, check=True)

        base = AutoModelForCausalLM.from_pretrained(model)
        before = {country: answer(base, tokenizer, country) for country in CAPITALS}
        tuned = peft.PeftModel.from_pretrained(base, directory / "adapter")
        for country, capital in CAPITALS.items():
            after = answer(tuned, tokenizer, country)
            print(f"{country:8} before {before[country]!r:28} after {after!r:12} right {capital!r}")


def ask(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


def answer(model: Any, tokenizer: Any, country: str) -> str:
    prompt = tokenizer.apply_chat_template(ask(country), add_generation_prompt=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text: str = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def make_model(path: Path) -> Path:
    """A small llama and a tokenizer of single bytes."""
    vocabulary = {
        token: number for number, token in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
