"""Options that people pass to `from_pretrained` mean the same here, or are refused by name before any reading."""

from __future__ import annotations

import pytest
import torch
import transformers

import shardwise
from shardwise.api.describing import describe
from shardwise.errors import ConfigError, UnsupportedError
from tests.families import tiny_model

pytestmark = pytest.mark.single

REFUSED = {
    "device_map": ("auto", "the layout and the mesh say which rank holds what", r'Mesh\.open\("fsdp2"\)'),
    "max_memory": ({0: "1GiB"}, "which rank holds what", "layout"),
    "offload_folder": ("offload", "which rank holds what", "layout"),
    "quantization_config": ({"load_in_4bit": True}, "quantized weights cannot be split yet", "bfloat16"),
    "load_in_4bit": (True, "quantized weights", "bfloat16"),
    "load_in_8bit": (True, "quantized weights", "bfloat16"),
    "tp_plan": ("auto", "say how a model is split", r'Mesh\.open\("tp2"\)'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_way_to_place_or_store_a_model_is_refused_by_name(name):
    value, why, fix = REFUSED[name]
    mesh, says = shardwise.Mesh.open("tp1"), rf"(?s)the option {name}=.*{why}.*{fix}"
    for call in (
        lambda: shardwise.load("/nowhere", mesh, **{name: value}),
        lambda: shardwise.verify("/nowhere", "tp2", **{name: value}),
        lambda: describe("/nowhere", "tp2", **{name: value}),
    ):
        with pytest.raises(UnsupportedError, match=says):
            call()


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "auto"])
def test_torch_dtype_is_dtype(tmp_path, dtype):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    mesh = shardwise.Mesh.open("tp1")
    off = {"device_map": None, "load_in_4bit": False, "low_cpu_mem_usage": True}
    for options in ({"torch_dtype": dtype, **off}, {"dtype": dtype}):
        state = shardwise.full_state_dict(shardwise.load(tmp_path, mesh, **options))
        assert all(
            torch.equal(state[name], value) and state[name].dtype == value.dtype for name, value in plain.items()
        )
    with pytest.raises(ConfigError, match="unknown dtype 'bf61'"):
        shardwise.load(tmp_path, mesh, torch_dtype="bf61")
    assert "in bfloat16" in describe(tmp_path, "tp2", torch_dtype="bfloat16", low_cpu_mem_usage=True).memory
    assert "in float32" in describe(tmp_path, "tp2", torch_dtype="auto").memory


@pytest.mark.spawn
def test_verify_proves_the_dtype_by_both_names():
    config = tiny_model("llama").config
    told = [str(shardwise.verify(config, "tp2", **{name: "bfloat16"})) for name in ("dtype", "torch_dtype")]
    assert "bfloat16" in told[0] and told[0].count("bfloat16") == told[1].count("bfloat16")
