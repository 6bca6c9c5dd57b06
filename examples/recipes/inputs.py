"""Makes the tiny models and the data that the recipes in this directory train on. Needs no network.

python examples/recipes/inputs.py DIRECTORY [RECIPE ...]

Models have random weights. Data are the sources of Python's own standard library, numbers, the tones of telephones and
coloured pictures.
"""

import ast
import json
import sys
import sysconfig
import wave
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 0}
CHAT = (
    "{% for message in messages %}[{{ message.role }}] {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def main() -> None:
    root = Path(sys.argv[1])
    for name in sys.argv[2:] or RECIPES:
        torch.manual_seed(0)
        RECIPES[name](root)


def pretrain(root: Path) -> None:
    """Sources for training and others that are held out, and a tokenizer of 1,024 tokens."""
    for part, pattern in {"train": "[a-m]*.py", "held-out": "[n-z]*.py"}.items():
        (place := root / "sources" / part).mkdir(parents=True, exist_ok=True)
        for path in sorted(LIBRARY.glob(pattern))[:40]:
            (place / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    texts = (path.read_text(encoding="utf-8") for path in sorted((root / "sources/train").iterdir()))
    pieces(texts).save_pretrained(root / "sources/tokenizer")


def chat(root: Path) -> None:
    """A llama over bytes, and conversations about where a function is defined."""
    tokenizer = single_bytes()
    tokenizer.chat_template = CHAT
    save(root / "chat/model", llama(tokenizer), tokenizer)
    records = []
    for module in ("bisect", "heapq", "shutil", "textwrap", "fnmatch", "statistics", "tokenize"):
        tree = ast.parse((LIBRARY / f"{module}.py").read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
        for name in names[:4]:
            asks = {"role": "user", "content": f"Where is {name}?"}
            records.append({"messages": [asks, {"role": "assistant", "content": module}]})
    write(root / "chat/chats.jsonl", records)


def classifier(root: Path) -> None:
    """A BERT without a classifier, and pieces of four modules with their names."""
    records = []
    for label in ("argparse", "difflib", "tarfile", "_pydecimal"):
        lines = [line for line in (LIBRARY / f"{label}.py").read_text(encoding="utf-8").splitlines() if line.strip()]
        chunks = ["\n".join(lines[start : start + 6]) for start in range(0, 1200, 6)]
        records += [{"text": chunk, "label": label.strip("_")} for chunk in chunks]
    tokenizer = pieces((record["text"] for record in records), for_bert=True)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    save(root / "classifier/model", transformers.BertForMaskedLM(config), tokenizer)
    divide(root / "classifier", records)


def translation(root: Path) -> None:
    """A T5, and numbers in English and German."""
    records = [{"prompt": english(number), "response": german(number)} for number in range(1, 1000)]
    texts = [text for record in records for text in record.values()]
    tokenizer = whole_words({word: None for text in texts for word in text.split()})
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    save(root / "translation/model", transformers.T5ForConditionalGeneration(config), tokenizer)
    divide(root / "translation", records)


def speech(root: Path) -> None:
    """A Whisper, and the tones of two digits that somebody dials, with the digits."""
    tokenizer = whole_words("0123456789")
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=40, encoder_layers=2, decoder_layers=2, d_model=64, encoder_ffn_dim=128,
        decoder_ffn_dim=128, encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=50,
        max_target_positions=16, pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        suppress_tokens=[], begin_suppress_tokens=[], init_std=0.06,
    )  # fmt: skip
    hears = transformers.WhisperFeatureExtractor(feature_size=40, chunk_length=1)
    save(root / "speech/model", transformers.WhisperForConditionalGeneration(config), tokenizer, hears)
    random = np.random.default_rng(0)
    records = []
    for number in range(300):
        digits = "".join(random.choice(list("0123456789"), size=2))
        write_tones(root / f"speech/{number}.wav", digits, random)
        records.append({"audio": f"{number}.wav", "text": " ".join(digits)})
    divide(root / "speech", records)


def images(root: Path) -> None:
    """A LLaVA, and questions about pictures of two coloured halves."""
    from PIL import Image

    colours = {"red": (200, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 200), "white": (230, 230, 230)}
    words = ["which", "colour", "is", "left", "right", "it", *colours, "<user>", "<assistant>"]
    tokenizer = whole_words(words, "<image>")
    image = tokenizer.convert_tokens_to_ids("<image>")
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(
        text_config={**LLAMA, "model_type": "llama", "vocab_size": len(tokenizer), "eos_token_id": 1},
        vision_config=vision, image_token_id=image, vision_feature_select_strategy="default",
    )  # fmt: skip
    eye = transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, do_resize=False
    )
    template = (
        "{% for message in messages %}<{{ message.role }}> {% for part in message.content %}"
        "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}"
        "{{ '</s> ' if message.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    processor = transformers.LlavaProcessor(
        eye, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=template,
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    save(root / "images/model", transformers.LlavaForConditionalGeneration(config), processor)
    random = np.random.default_rng(0)
    records = []
    for number in range(240):
        halves = dict(zip(("left", "right"), random.choice(list(colours), size=2), strict=True))
        pixels = np.concatenate([np.full((16, 8, 3), colours[colour]) for colour in halves.values()], axis=1)
        noisy = np.clip(pixels + random.normal(0, 20, pixels.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(root / f"images/{number}.png")
        side = ("left", "right")[number % 2]
        asks = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": f"which colour is {side}"}]
        answers = [{"type": "text", "text": str(halves[side])}]
        records.append({"messages": [{"role": "user", "content": asks}, {"role": "assistant", "content": answers}]})
    divide(root / "images", records)


RECIPES = {each.__name__: each for each in (pretrain, chat, classifier, translation, speech, images)}


def single_bytes() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single bytes and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(["<|end|>", *alphabet])}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def pieces(texts: Iterable[str], *, for_bert: bool = False) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of 1,024 pieces of words."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"] if for_bert else ["<|end|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(texts, trainer)
    if not for_bert:
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def whole_words(words: Iterable[str], *special: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of these words, which ends texts with `</s>`, unless it has special words of its own."""
    known = ["<pad>", "</s>", "<unk>", *special, *words]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not special:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=list(special),
    )  # fmt: skip


def llama(tokenizer: PreTrainedTokenizerFast) -> transformers.LlamaForCausalLM:
    """Returns a llama of random weights."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, vocab_size=len(tokenizer)))


def save(directory: Path, *parts: transformers.PreTrainedModel | PreTrainedTokenizerFast) -> None:
    """Saves a model with its tokenizer and processors."""
    for part in parts:
        part.save_pretrained(directory)


def divide(directory: Path, records: Sequence[dict[str, object]]) -> None:
    """Writes every fifth record, of all in random order, to held-out.jsonl, the others to train.jsonl."""
    order = np.random.default_rng(0).permutation(len(records))
    write(directory / "train.jsonl", [records[n] for place, n in enumerate(order) if place % 5])
    write(directory / "held-out.jsonl", [records[n] for place, n in enumerate(order) if not place % 5])


def write(path: Path, records: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


ONES = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
EINS = [
    "ein",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
]
ZEHN = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def english(number: int) -> str:
    """Returns a number below 1,000 in words: `two-hundred forty one`."""
    hundreds, rest = divmod(number, 100)
    words = [f"{ONES[hundreds - 1]}-hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10 - 2])
        rest %= 10
    return " ".join([*words, *([ONES[rest - 1]] if rest else [])])


def german(number: int) -> str:
    """Returns a number below 1,000 in the parts of its word: `zweihundert ein und vierzig`."""
    hundreds, rest = divmod(number, 100)
    words = [f"{EINS[hundreds - 1]}hundert"] if hundreds else []
    if rest >= 20:
        words += ([EINS[rest % 10 - 1], "und"] if rest % 10 else []) + [ZEHN[rest // 10 - 2]]
    elif rest:
        words.append(EINS[rest - 1] if rest > 1 else "eins")
    return " ".join(words)


def write_tones(path: Path, digits: str, random: np.random.Generator) -> None:
    """Writes what a telephone sends for digits: two tones each, for a quarter of a second."""
    time = np.arange(4000) / 16000
    sound = []
    for digit in digits:
        row, column = (3, 1) if digit == "0" else divmod(int(digit) - 1, 3)
        low, high = (697, 770, 852, 941)[row], (1209, 1336, 1477)[column]
        sound.append(np.sin(2 * np.pi * low * time) + np.sin(2 * np.pi * high * time))
        sound.append(np.zeros(800))
    samples = np.concatenate(sound) + random.normal(0, 0.1, sum(map(len, sound)))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((samples * 9000).astype("<i2").tobytes())


if __name__ == "__main__":
    main()
