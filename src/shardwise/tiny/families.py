"""How each size in a configuration shrinks, by the meaning of the attribute. Data only; `shrink_config` applies it.

Names are those of transformers' configurations, including aliases (`d_model` is a hidden size). Names that are not
listed keep their value: norms, activations, multipliers, biases, dropout and ties are structure, not size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from transformers import PreTrainedConfig


def sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yields `config` and every configuration inside it, depth first."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from sub_configs(value)


def is_count(value: object) -> TypeGuard[int]:
    """Returns whether a field is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of `config` itself under their own names, private ones left out."""
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def read_field(config: PreTrainedConfig, name: str) -> Any:
    """Returns a field or property under its own or an alias's name; None if there is none.

    Reads past `__getattribute__`, which refuses fields that differ between layers.
    """
    name = config.attribute_map.get(name, name)
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def layer_overrides(config: PreTrainedConfig) -> dict[int, Mapping[str, Any]]:
    """Returns, by layer, the fields in which it differs from the rest, for configurations that differ by layer."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(index): fields for index, fields in config.to_dict()["per_layer_config"].items()}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _caps(text: str) -> dict[str, int]:
    """`"16: a b; 8: c"` as `{"a": 16, "b": 16, "c": 8}`."""
    pairs = (group.split(":") for group in text.strip(" \n;").split(";"))
    return {name: int(cap) for cap, names in pairs for name in names.split()}


HEADS = 8
HIDDEN = 64  # the tiny model's width: 8 heads of 8

# Number of query heads. Each becomes 8; 1, 2 and 4 stay.
QUERY_HEADS = _names(
    """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads
    num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads num_cross_attention_heads
    swa_num_attention_heads conf_num_attention_heads num_attention_heads_per_layer speech_encoder_attention_heads
    t2u_encoder_attention_heads t2u_decoder_attention_heads linear_num_value_heads linear_num_heads index_n_heads
    mamba_n_heads mamba_num_heads n_mamba_heads indexer_n_heads"""
)

# Number of heads that several query heads share -> the attributes that say how many those are, the first found counts.
KEY_VALUE_HEADS: Mapping[str, tuple[str, ...]] = {
    "num_key_value_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_attention_heads",),
    "kv_n_heads": ("num_attention_heads", "n_heads"),
    "num_query_groups": ("num_attention_heads",),
    "swa_num_key_value_heads": ("swa_num_attention_heads",),
    "linear_num_key_heads": ("linear_num_value_heads",),
    "num_global_key_value_heads": ("num_attention_heads",),
    "decoder_key_value_heads": ("decoder_attention_heads",),
    "encoder_key_value_heads": ("encoder_attention_heads",),
}

# Per-head sizes: name -> (size where heads x size is the hidden size, size where both are decoupled).
HEAD_DIMS: Mapping[str, tuple[int, int]] = {
    "qk_rope_head_dim": (8, 8),
    "qk_nope_head_dim": (16, 16),
    "qk_head_dim": (24, 24),
    "v_head_dim": (16, 16),
    "head_dim": (8, 16),
    "swa_head_dim": (8, 16),
    "swa_v_head_dim": (8, 16),
    "global_head_dim": (8, 32),
    "d_kv": (8, 16),
    "d_head": (8, 16),
    "dim_head": (8, 16),
    "kv_channels": (8, 16),
    "attention_head_size": (8, 16),
    "attention_head_dim": (8, 16),
    "linear_head_dim": (8, 16),
    "linear_key_head_dim": (8, 8),
    "linear_value_head_dim": (8, 16),
    "index_head_dim": (16, 16),
    "indexer_head_dim": (16, 16),
    "mamba_d_head": (16, 16),
    "mamba_head_dim": (16, 16),
    "mamba_headdim": (16, 16),
}

# Sizes that scale with the hidden size and equal the tiny model's where they equalled the original's.
RANKED_WIDTHS = _names(
    """hidden_size d_model n_embd dim emb_dim embed_dim embedding_size embedding_dim input_embedding_size
    output_embedding_size word_embed_proj_dim attention_hidden_size lru_width pooler_hidden_size hidden_size_global
    encoder_hidden_size cross_attention_hidden_size out_hidden_size output_dim projection_dim backbone_hidden_size
    mamba_d_ssm input_size adapter_out_dim adapter_in_dim adapter_input_size vision_output_dim projector_input_dim
    projector_output_dim audio_hidden_size d_latents prediction_head_size true_hidden_size intra_bottleneck_size
    embed_dim_per_layer ple_embed_dim entity_emb_size hidden_dim pronunciation_embed_dim shape_embed_dim
    text_embed_dim projection_size proj_size bottleneck_size"""
)

# Inner sizes of feed-forwards: scale with the hidden size, multiples of 16.
FEED_FORWARDS = _names(
    """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dff dim_ff d_inner n_inner ffn_hidden_size
    moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size
    moe_shared_expert_intermediate_size intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size
    feed_forward_size mlp_dim speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim
    block_auto_adjust_ff_dim expert_dim"""
)

VOCABULARIES = _names(
    """vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size decoder_vocab_size n_words entity_vocab_size
    t2u_vocab_size char_vocab_size unit_hifi_gan_vocab_size pronunciation_vocab_size shape_vocab_size
    unpadded_vocab_size encoder_hash_byte_group_vocab audio_vocab_size ngram_vocab_size_base"""
)

LAYER_COUNTS = _names(
    """num_hidden_layers n_layer n_layers num_layers layers encoder_layers decoder_layers num_decoder_layers
    num_encoder_layers depth num_blocks num_self_attends_per_block conf_num_hidden_layers num_layers_per_stack
    speech_encoder_layers t2u_encoder_layers t2u_decoder_layers"""
)
# Lists of such counts; a tiny model has at most two layers of each.
STAGE_DEPTHS = _names("block_sizes depths")
# The first n layers are of another kind; so are the last n; every n-th is (name -> the attribute with its offset).
LAYER_PREFIXES = _names("first_k_dense_replace num_dense_layers max_window_layers moe_layer_start_index")
LAYER_SUFFIXES = frozenset(("num_kv_shared_layers",))
LAYER_PERIODS: Mapping[str, str | None] = {
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "decoder_sparse_step": None,
    "encoder_sparse_step": None,
    "global_attn_every_n_layers": None,
    "layer_group_size": None,
    "full_attention_interval": None,
    "interleave_moe_layer_step": None,
    "no_rope_layer_interval": None,
    "cross_attention_frequency": None,
    "rescale_every": None,
    "n_layers_per_attn_res_block": None,
}


# Kinds of layers that repeat until the last layer.
LAYER_CYCLES = frozenset(("block_types",))
# One number per layer, though it looks like a list of layers.
LAYER_FLAGS = frozenset(("no_rope_layers",))

# Everything that only has an upper limit: the value stays where it is smaller, in lists too.
CAPS: Mapping[str, int] = _caps(
    """
    4: num_experts num_local_experts n_routed_experts moe_num_experts num_expert zero_expert_num mamba_n_groups
       n_groups mamba_ngroups altup_num_inputs num_memory_blocks o_groups;
    2: num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_group num_expert_group
       n_shared_experts num_shared_experts moe_num_shared_experts num_random_blocks hc_mult hc_count
       heads_per_ngram hc_sinkhorn_iters block_sizes depths;
    8: patch_size;
    1: topk_group num_nextn_predict_layers;
    64: max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length seq_length
       max_sequence_length max_source_positions max_target_positions max_encoder_position_embeddings
       max_decoder_position_embeddings t2u_max_position_embeddings position_bias_max_distance max_2d_position_embeddings
       num_position_embeddings max_pos_emb;
    32: q_lora_rank o_lora_rank original_max_position_embeddings laurel_rank hidden_size_per_layer_input
       router_hidden_size keep_window_size context_size hc_lowrank rel_extent position_bias_num_buckets;
    16: kv_lora_rank d_rel state_size ssm_state_size mamba_d_state time_step_rank mamba_dt_rank gated_norm_rank
       adapter_rank embedding_rank num_conv_pos_embeddings centroid_intermediate_top_k lang_embed_dim;
    4: frames_per_clip mm_tokens_per_image;
    32: image_size crop_size indexer_budget conv_dim tdnn_dim num_codevectors_per_group;
    8: num_filters sliding_window window_size sliding_window_size attention_window attention_window_size local_attention
       attention_chunk_size chunk_size mamba_chunk_size index_topk local_radius global_block_size
       local_attention_window_len block_size index_block_size local_attn_chunk_length lsh_attn_chunk_length
       num_landmarks segment_means_seq_len num_global_tokens num_hash;
    """
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts about one model type that the names of its attributes do not tell.

    Attributes:
        set: attribute -> value of the tiny model.
        repeats: number of layers of each kind in a tiny model, if the original has as many.
        inputs: optional arguments of the forward that are required for a loss.
        masks_frames: whether the forward needs a mask over audio frames.
        id_rows: field with the number of rows of input ids per sequence; labels then have them as the last dim.
    """

    set: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 1
    inputs: tuple[str, ...] = ()
    masks_frames: bool = False
    id_rows: str | None = None


_IMAGES = Family(inputs=("pixel_values",))
_TWO_TILES = Family(set={"image_grid_pinpoints": [[32, 64]]})

# Each with the reason.
FAMILIES: Mapping[str, Family] = {
    # As wide as the local encoder's crossed outputs, 2 x 64.
    "blt_global_transformer": Family(set={"hidden_size": 128, "head_dim": 16}),
    "blt_local_encoder": Family(set={"hidden_size_global": 128}),
    "blt_local_decoder": Family(set={"hidden_size_global": 128}),
    # Four stages, each halving the patches, must leave a full window to the last.
    **dict.fromkeys(("donut-swin", "swin"), Family(set={"image_size": 64, "window_size": 2})),
    "levit": Family(set={"image_size": 64, "patch_size": 16}),  # four strided convolutions make patches of 16
    "mobilevitv2": Family(set={"image_size": 64}),  # 2 x 2 patches are unfolded after five halvings of the image
    # A window must hold patches of 8 pixels, merged 2 by 2.
    **dict.fromkeys(
        ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "exaone4_5_vision"), Family(set={"window_size": 32})
    ),
    "qwen2_vl_vision": Family(set={"embed_dim": 64}),  # rows and columns each rotate half of a head, in pairs
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _TWO_TILES),
    "vipllava": Family(set={"vision_feature_layer": [-3, -2, -1, 0, 1]}),  # five outputs of two layers
    "mllama_vision_model": Family(set={"vision_output_dim": 128}),  # of two outputs
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), Family(set={"window_size": 10})),  # 2 x downsample_rate
    "aria": Family(set={"projector_patch_to_query_dict": {16: 4}}),  # an image has 4 x 4 patches
    "falcon_h1": Family(set={"mamba_d_ssm": 128}),  # Mamba heads times their size, 8 x 16
    # A rate above the sequence length compresses nothing.
    "deepseek_v4": Family(
        set={"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
    ),
    "dots3_note_text": Family(set={"head_dim": 32}),  # sliding layers check it against the parts of their keys
    # Text and image towers compute nothing without each other.
    **dict.fromkeys(("aimv2", "bridgetower", "groupvit", "vilt", "vision-text-dual-encoder"), _IMAGES),
    "git": _IMAGES,  # its loss skips as many positions as an image has patches
    "voxtral_realtime": Family(inputs=("input_features",)),  # every token is added to a frame of audio
    "hrm_text": Family(set={"num_layers_per_stack": 2, "num_hidden_layers": 16}),  # layers x H cycles x (L cycles + 1)
    "layoutlmv3": Family(set={"coordinate_size": 8, "shape_size": 16}),  # 4 and 2 of them make the hidden size
    "lilt": Family(set={"hidden_size": 96}),  # 6 coordinates share the hidden size equally
    # The loss counts the frames of the mask.
    **dict.fromkeys(("lasr_ctc", "parakeet_ctc"), Family(masks_frames=True)),
    "mamba2": Family(set={"head_dim": 16}),  # heads times their size is `expand` times the hidden size
    "moonshine": Family(set={"conv_stride": (64, 3, 2)}),  # its strides are not in its configuration
    # A row of ids for every codebook.
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), Family(id_rows="num_codebooks")),
    "neomme": Family(set={"head_dim": 16}),  # rows and columns each rotate a quarter of the head
    "perceiver": Family(set={"max_position_embeddings": 16}),  # logits come for every position, used or not
    # Axes multiply to the length of a training sequence and add up to the hidden size; hashing must repeat.
    "reformer": Family(set={"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (16, 48), "hash_seed": 0}),
    "xlstm": Family(set={"hidden_size": 128, "embedding_dim": 128}),  # key sizes are rounded up to 64 in the model
    # Tying the shared block needs two layers that use it.
    "zamba": Family(repeats=2),
    "zamba2": Family(repeats=2, set={"mamba_headdim": 16}),
}
