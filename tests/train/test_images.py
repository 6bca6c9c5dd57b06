"""Batches with images, of which rows have several or none, train as the unsplit model does."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import shardwise
from shardwise.data.batch import split_rows
from shardwise.errors import BatchError
from shardwise.tiny.inputs import add_media, make_batch, missing_media
from shardwise.tiny.models import build_tiny_model
from shardwise.tiny.shrink import shrink_config
from tests.families import FULL_PRODUCT
from tests.oracle import LOSS, differing, differing_gradients

pytestmark = pytest.mark.spawn

IMAGE, START, END = 290, 292, 293
GRIDS = {0: [(1, 4, 4), (1, 4, 8)], 2: [(1, 8, 4)], 3: [(1, 4, 4)]}
"""Of Qwen2-VL: the images of each of four rows, in patches of which 2 x 2 are one token."""


def qwen2_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    eye = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=eye, **tokens)).eval()


def qwen2_vl_batch(rows, *, with_positions=False, seed=0):
    """The rows of these numbers; `GRIDS` says which images they have."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 280, (4, 40), generator=generator)
    patches = {
        row: [torch.randn(4 * (h * w // 4), 96, generator=generator) for _, h, w in GRIDS.get(row, ())]
        for row in range(4)
    }
    for row, grids in GRIDS.items():
        at = 1
        for _, height, width in grids:
            count = height * width // 4
            ids[row, at], ids[row, at + 1 : at + 1 + count], ids[row, at + 1 + count] = START, IMAGE, END
            at += count + 3
    ids = ids[rows]
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids > 280, -100), "mm_token_type_ids": (ids == IMAGE).int()}
    grids = [grid for row in rows for grid in GRIDS.get(row, ())]
    if grids:
        batch["pixel_values"] = torch.cat([each for row in rows for each in patches[row]])
        batch["image_grid_thw"] = torch.tensor(grids)
    if with_positions:
        batch["position_ids"] = torch.arange(40).expand(3, len(rows), 40) + torch.arange(3).view(3, 1, 1)
    return batch


def qwen3_vl():
    """A model whose text layers are followed by sums with images' features."""
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    eye = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    eye |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=eye, video_token_id=291, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config).eval()


def llava():
    text = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    eye = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    config = LlavaConfig(text_config=text, vision_config=eye, image_token_index=98, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config).eval()


def llava_batch(rows, *, seed=0, images=(2, 0, 1, 1), **_):
    """The rows of these numbers, with so many images of four tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids, pixels = torch.randint(3, 90, (4, 16), generator=generator), []
    for row, count in enumerate(images):
        ids[row, 1 : 1 + 4 * count] = 98
        pixels.append(torch.randn(count, 3, 16, 16, generator=generator))
    batch = {"input_ids": ids[rows], "labels": ids[rows].masked_fill(ids[rows] == 98, -100)}
    own = torch.cat([pixels[row] for row in rows])
    return batch | ({"pixel_values": own} if len(own) else {})


def mllama():
    """A model whose decoder has layers that attend to images, and do not run without."""
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1}
    eye |= {"attention_heads": 2, "image_size": 16, "patch_size": 8, "max_num_tiles": 1, "vision_output_dim": 64}
    eye |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    text = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "pad_token_id": 0}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    torch.manual_seed(0)
    config = transformers.MllamaConfig(text_config=text, vision_config=eye, image_token_index=98)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    for name, value in model.named_parameters():
        if "gate" in name:
            value.data.fill_(0.5)
    return model


def mllama_batch(rows, *, seed=0, **_):
    """The rows of these numbers, of which the even ones have an image; all of `rows` or none."""
    generator = torch.Generator().manual_seed(seed)
    ids, pixels = (
        torch.randint(3, 90, (4, 16), generator=generator),
        torch.randn(4, 1, 1, 3, 16, 16, generator=generator),
    )
    batch = {"input_ids": ids[rows], "labels": ids[rows]}
    if rows[0] % 2:
        return batch
    ones = {"aspect_ratio_ids": (1,), "aspect_ratio_mask": (1, 1), "cross_attention_mask": (16, 1, 1)}
    media = {name: torch.ones(len(rows), *shape, dtype=torch.long) for name, shape in ones.items()}
    return batch | media | {"pixel_values": pixels[rows]}


MODELS = {"qwen2_vl": (qwen2_vl, qwen2_vl_batch), "qwen3_vl": (qwen3_vl, qwen2_vl_batch), "llava": (llava, llava_batch)}
CROSSING = {"mllama": (mllama, mllama_batch)}


def differences(
    mesh, kind, *, order=(0, 1, 2, 3), num_microbatches=1, frozen=False, evaluates=False, splits=False, **options
):
    """What a step over rows in this order computes otherwise than the unsplit model."""
    build, batch_of = (MODELS | CROSSING)[kind]
    unsplit = build()
    if frozen:
        for name, value in unsplit.named_parameters():
            value.requires_grad_(not ("vision" in name or "visual" in name))
    model = shardwise.parallelize(copy.deepcopy(unsplit), mesh, sequence_parallel=splits)
    share = len(order) // mesh.data_size
    own = list(order[mesh.data_rank * share :][:share])
    parts = [batch_of(list(order[at : at + share]), **options) for at in range(0, len(order), share)]
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    losses = [unsplit(**part).loss * count / sum(counts) for part, count in zip(parts, counts, strict=True)]
    loss = torch.stack(losses).sum()
    if evaluates:
        with torch.no_grad():
            found = model(**batch_of(own, **options)).loss
            return differing("loss", found, unsplit(**batch_of(own, **options)).loss, LOSS)
    loss.backward()
    result = shardwise.TrainStep(model, mesh, num_microbatches=num_microbatches)(batch_of(own, **options))
    found = differing("loss", result.loss, loss.detach(), LOSS)
    gradients = {name: value.grad for name, value in unsplit.named_parameters() if value.grad is not None}
    return found + differing_gradients(shardwise.full_gradients(model), gradients)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [("tp1", 4), ("tp2", 2), ("pp2", 4), *[("tp1", 1), ("tp1", 2), ("pp2", 2)] * FULL_PRODUCT],
)
def test_rows_with_several_images_and_none(on_ranks, layout, num_microbatches, kind):
    found = on_ranks(differences, with_positions=num_microbatches == 2)
    assert found == [[]] * (1 if layout == "tp1" else 2)


def test_images_that_no_token_tells_of_are_one_error():
    model, images = llava(), {"images": (2, 0, 1, 2)}
    batch = llava_batch([0, 1, 2, 3], **images)
    batch["input_ids"][0, 1] = 5
    with shardwise.Mesh.open("tp1") as mesh:
        step = shardwise.TrainStep(shardwise.parallelize(model, mesh), mesh, num_microbatches=2)
        with pytest.raises(BatchError, match=r"cannot divide the rows of pixel_values into 2 microbatches"):
            step(batch)
        with pytest.raises(BatchError, match="the tensors of the batch differ in rows"):
            step(llava_batch([0, 1, 2, 3]) | {"attention_mask": torch.ones(3, 16)})


@pytest.mark.parametrize("layout", ["pp2"])
@pytest.mark.parametrize("order", [(0, 2), (1, 3)])
def test_images_that_no_token_tells_of_are_divided_by_rows(on_ranks, layout, order):
    """Mllama attends to images; (1, 3) are rows without."""
    assert on_ranks(differences, kind="mllama", num_microbatches=2) == [[]] * 2


@pytest.mark.parametrize("layout", ["tp2"])
def test_masks_of_images_leave_their_sequence_whole(on_ranks, layout):
    assert on_ranks(differences, kind="mllama", order=(0, 2), splits=True) == [[]] * 2


RAGGED = [
    {"kind": "llava", "order": (0, 1)},
    {"kind": "llava", "order": (1, 0), "frozen": True},
    {"kind": "llava", "order": (0, 1, 1, 2), "num_microbatches": 2},
    {"kind": "qwen2_vl", "order": (1, 2)},
    {"kind": "qwen2_vl", "order": (0, 1), "evaluates": True},
    {"kind": "qwen2_vl", "order": (1, 1)},
    {"kind": "mllama", "order": (0, 1)},
]
"""Rows of which one data rank has an image and the other has none; at last nobody has."""


def ragged(mesh):
    return [differences(mesh, **case) for case in RAGGED]


@pytest.mark.parametrize("layout", ["fsdp2", "ddp2", *["fsdp2.tp2"] * FULL_PRODUCT])
def test_a_data_rank_without_an_image_beside_one_with(on_ranks, layout):
    assert on_ranks(ragged, timeout=60) == [[[]] * len(RAGGED)] * (4 if "." in layout else 2)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("layout", ["pp2.fsdp2"])
def test_a_data_rank_without_an_image_in_stages(on_ranks, layout, kind):
    assert on_ranks(differences, order=(0, 1, 1, 1), num_microbatches=2, timeout=60) == [[]] * 4


TOWERS = {
    "aria": "AriaForConditionalGeneration",
    "florence2": "Florence2ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "got_ocr2": "GotOcr2ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "vipllava": "VipLlavaForConditionalGeneration",
}


def tower_differences(mesh, family, *, sequence_parallel):
    """What steps over rows with images, without, and with some on the last data rank alone compute otherwise."""
    config = MODELS[family][0]().config if family in MODELS else shrink_config(transformers.CONFIG_MAPPING[family]())
    unsplit = build_tiny_model(config, getattr(transformers, TOWERS[family]), seed=0).eval()
    text = make_batch(unsplit, batch_size=4, seed=0)
    images = add_media(unsplit, text, seed=0)
    assert not {"pixel_values", "input_features"} & {*missing_media(unsplit, images)}
    batches = {"images": split_rows(images, 4, mesh.data_size), "text": split_rows(text, 4, mesh.data_size)}
    if mesh.data_size > 1:
        batches["ragged"] = [batches["text"][0], batches["images"][1]]
    found = []
    for name, parts in batches.items():
        whole = copy.deepcopy(unsplit)
        counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        loss = sum(whole(**part).loss * count / sum(counts) for part, count in zip(parts, counts, strict=True))
        loss.backward()
        gradients = {fqn: value.grad for fqn, value in whole.named_parameters() if value.grad is not None}
        model = shardwise.parallelize(copy.deepcopy(unsplit), mesh, sequence_parallel=sequence_parallel)
        result = shardwise.TrainStep(model, mesh, num_microbatches=mesh.size("pp"))(parts[mesh.data_rank])
        problems = differing("loss", result.loss, loss.detach(), LOSS)
        problems += differing_gradients(shardwise.full_gradients(model), gradients)
        found += [f"{name}: {problem}" for problem in problems]
    return found


@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "family"),
    [
        ("tp2", False, "internvl"),
        ("fsdp2.tp2", True, "paligemma"),
        ("pp2.tp2", False, "qwen2_vl"),
        ("tp2", True, "qwen3_vl"),
        ("pp2", False, "qwen2_audio"),
        *[
            (layout, splits, family)
            for layout in ("tp2", "fsdp2.tp2", "pp2", "pp2.tp2")
            for splits in (False, True)
            for family in TOWERS
        ]
        * FULL_PRODUCT,
    ],
)
def test_layers_of_towers_are_split_too(on_ranks, layout, sequence_parallel, family):
    assert on_ranks(tower_differences) == [[]] * (4 if "." in layout else 2)


@pytest.mark.skipif(not FULL_PRODUCT, reason="make coverage runs it; below one is given to another model")
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_verify_gives_images_to_a_model_that_takes_some(layout):
    model = llava()
    tiny = build_tiny_model(shrink_config(model.config), type(model), seed=0)
    batch = add_media(tiny, make_batch(tiny, seed=0), seed=0)
    tiny(**batch).loss.backward()
    assert tiny.model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum() > 0
    report = shardwise.verify(model, layout)
    assert report.passed, str(report)
    assert "not given" not in str(report)


def test_verify_says_what_a_model_was_not_given():
    report = shardwise.verify(qwen2_vl(), "tp2")
    assert report.passed, str(report)
    assert "without pixel_values_videos, which it was not given" in str(report).splitlines()[0]
