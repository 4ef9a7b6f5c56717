"""A small random model of any model type of transformers, by the meaning of its config's fields.

A config's defaults are those of some released model. Here each size among them is made small by
what its field's name means, whatever the model. Sub-configs, of the text model inside a
vision-language one for instance, are made small in the same way, and of the layers each kind that
the defaults hold is kept once. Only where meaning cannot serve does a type have its own entry.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FIRST_WORD, LAST_WORD, VOCABULARY = 10, 79, 99
"""Words stand between the special tokens: those that are below 10 by default stay there, the
others come after 79."""

MEANINGS = [
    # Rows of 96, 88 and 40 floats are whole multiples of 16 bytes, which grouped products want.
    (
        96,
        "hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim word_embed_proj_dim "
        "d_latents hidden_size_global backbone_hidden_size cross_attention_hidden_size "
        "out_hidden_size output_dim encoder_hidden_size entity_emb_size true_hidden_size "
        "lru_width "
        "prediction_head_size pooler_hidden_size audio_hidden_size ple_embed_dim "
        "intra_bottleneck_size",
    ),
    (
        88,
        "intermediate_size n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner dff dim_ff "
        "hidden_dim ffn_hidden_size intermediate_size_mlp mlp_dim dense_intermediate_size "
        "prefix_dense_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim "
        "speech_encoder_intermediate_size",
    ),
    (
        40,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "shared_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size",
    ),
    (
        6,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads num_self_attention_heads num_cross_attention_heads "
        "t2u_encoder_attention_heads t2u_decoder_attention_heads speech_encoder_attention_heads",
    ),
    (3, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads"),
    # A 16th of it may still be rotated; and 6 times 32 is not 96, so that a model whose heads may
    # have any size is not mistaken for one whose heads share the hidden size out: 16 each.
    (32, "head_dim d_kv kv_channels d_head dim_head"),
    (16, "swa_head_dim attention_head_dim"),
    (8, "rotary_dim"),
    # Latent attention: a value is as long as neither part of a key, nor as both.
    (8, "qk_rope_head_dim"),
    (12, "qk_nope_head_dim"),
    (10, "v_head_dim"),
    (24, "q_lora_rank o_lora_rank"),
    (28, "kv_lora_rank"),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers num_blocks "
        "num_self_attends_per_block t2u_encoder_layers t2u_decoder_layers speech_encoder_layers",
    ),
    (
        64,
        "max_position_embeddings n_positions max_seq_len n_ctx context_length model_max_length "
        "max_encoder_position_embeddings max_decoder_position_embeddings max_source_positions "
        "max_target_positions t2u_max_position_embeddings",
    ),
    (
        VOCABULARY,
        "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input "
        "entity_vocab_size t2u_vocab_size ngram_vocab_size_base encoder_hash_byte_group_vocab "
        "unpadded_vocab_size",
    ),
    # What 1/√ of scales the scores: not the head size, so that the two are not mistaken.
    (20, "query_pre_attn_scalar"),
    # Narrower than the texts, so that it is met; even, where it reaches to both sides.
    (5, "sliding_window sliding_window_size attention_window_size attention_chunk_size"),
    (6, "local_attention attention_window window_size"),
    # An indexer that keeps fewer keys than there are.
    (4, "index_topk index_n_heads index_block_size keep_window_size"),
    (2, "index_topk_blocks"),
    (16, "index_head_dim"),
    (7, "rel_extent"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts n_group "
        "num_expert_group o_groups",
    ),
    (1, "n_shared_experts topk_group first_k_dense_replace num_dense_layers"),
    # State-space and linear attention layers: 2 times 96, in 12 heads of 16.
    (8, "mamba_d_state state_size ssm_state_size chunk_size mamba_chunk_size"),
    (12, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    (16, "mamba_d_head mamba_head_dim"),
    (192, "mamba_d_ssm"),
    (5, "time_step_rank"),
    (2, "n_groups mamba_n_groups split_ngram_parts"),
    (3, "linear_num_key_heads"),
    (6, "linear_num_value_heads"),
    (8, "linear_key_head_dim laurel_rank gated_norm_rank hc_lowrank"),
    (12, "linear_value_head_dim hidden_size_per_layer_input"),
    # A layer of attention after one of another kind; none that borrows another's keys.
    (2, "attn_layer_period"),
    (1, "attn_layer_offset"),
    (0, "num_kv_shared_layers"),
    (32, "image_size"),
    (8, "patch_size"),
    (4, "num_filters"),
]
"""A size, and the names of the fields that mean it."""

SIZES = {name: size for size, names in MEANINGS for name in names.split()}

SPREADS = ("initializer_range", "init_std", "initializer_std", "embed_init_std")
"""Names of the standard deviation of random weights: large, so that attention is sharp."""

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    # The list that says which layers attend is empty, or absent, by default.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zamba": {  # two layers that share their weights
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    # Parts of layers, which must add up.
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # Numbers that the model wants to be even, or one, or the hidden size's share.
    "esmc": {"num_key_value_heads": 6, "head_dim": 16},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "qk_dim_factor": 1.0, "num_heads": 8},
    "reformer": {"axial_pos_embds_dim": (32, 64), "axial_pos_shape": (8, 8)},
    "diffllama": {"num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
    "helium": {"head_dim": 16},
    "xlnet": {"d_head": 16},
    "mamba2": {"num_heads": 12, "head_dim": 16},
    # What released configs say, but the defaults do not.
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 3, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "esm": {"mask_token_id": 5, "pad_token_id": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    # Its cache asks for the number of layers, which only the sub-configs hold.
    "blt": {"use_cache": False},
    # Without norms, scores grow so large that rounding them may do anything to the weights.
    "mobilebert": {"normalization_type": "layer_norm"},
    "xmod": {"default_language": "en_XX"},
}
"""What a type needs that the names of its fields do not tell, and why."""


def small_config(kind: str, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The config of a small model: a type's own, or that of the part which the class is made of."""
    cls = CONFIG_MAPPING[kind]
    parts = {type(part) for part in vars(_default(cls)).values()}
    if cls is not model_class.config_class and model_class.config_class in parts:
        cls = model_class.config_class
    return cls(**_small(cls))


def small_model(
    kind: str,
    model_class: type[PreTrainedModel],
    kernel: str,
    *,
    decoder: bool,
    seed: int = 0,
    spread: float = 4.0,
    **changes: Any,
) -> PreTrainedModel:
    """A small random model of a type, in eval mode.

    Args:
        kind: the model type.
        model_class: the class to make it of.
        kernel: transformers' name of the attention kernel.
        decoder: whether a model that can be both is to be a decoder, which BERT and its like are
            not by default, whatever their class.
        seed: of the random weights.
        spread: about the standard deviation of the scores, where nothing but 1/√d_k scales them.
        changes: fields of the config that are to be otherwise.

    Raises:
        ValueError: from transformers, if the model has no such kernel.
    """
    torch.manual_seed(seed)
    config = small_config(kind, model_class)
    if decoder and hasattr(config, "is_decoder"):
        config.is_decoder = True
    for name, value in changes.items():
        setattr(config, name, value)
    model = model_class._from_config(config, attn_implementation=kernel).eval()
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                _draw(module, name, weight, spread**0.5)
    return model


def _draw(module: nn.Module, name: str, weight: nn.Parameter, gain: float) -> None:
    """Draw a weight anew, so that what goes in with 1 comes out with the gain: scores of about its
    square.

    Vectors stay as they are, but for those of zeros that are no biases: a factor, or a sink, of 0
    would hide whatever it is put on.
    """
    if isinstance(module, nn.Embedding):
        weight.normal_()
    elif weight.dim() < 2:
        if weight.numel() and not weight.any() and "bias" not in name:
            weight.normal_()
    elif weight.numel() and name != "A_log":  # of a state space: its decay
        convolves = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        inputs = weight[0].numel() if convolves else weight.shape[-1]
        weight.normal_(std=gain * inputs**-0.5)


def _default(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A class's config by default, or what comes closest: of some, the defaults are refused."""
    own = EXCEPTIONS.get(cls.model_type, {})
    return cls(**{name: value for name, value in own.items() if isinstance(value, dict)})


def _small(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """The arguments that make a config class's config small."""
    own = EXCEPTIONS.get(cls.model_type, {})
    default = _default(cls)
    fields = {field.name: vars(default).get(field.name) for field in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    special = LAST_WORD + 1
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            named = {"model_type": value.model_type} if value.model_type else {}
            arguments[name] = named | _small(type(value)) | own.get(name, {})
        elif name in SPREADS:
            arguments[name] = 0.5
        elif re.search("_token_(id|index)$", name) and isinstance(value, int) and value >= 10:
            arguments[name] = special
            special += 1
        elif name in SIZES and not isinstance(value, bool):
            arguments[name] = SIZES[name]
    if "kv_lora_rank" in fields:  # latent attention has a key and a value of each head's own
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    if "qk_rope_head_dim" in fields and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        arguments["head_dim"] = arguments["qk_rope_head_dim"]
    whole = {
        name: value
        for name, value in own.items()
        if name not in arguments or not isinstance(value, dict)
    }
    return arguments | _layers(default, fields) | whole


def _layers(default: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind that the defaults hold, where lists say what each layer is.

    A list of as many different entries as there are layers numbers them, and says nothing of kinds.
    """
    count = getattr(default, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list | tuple)
        and len(value) == count
        and 1 < count != len(set(map(str, value)))
    }
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    first = [kinds.index(one) for one in dict.fromkeys(kinds)]
    if len(first) == 1:
        first = [0, 1]
    found = {name: [value[at] for at in first] for name, value in lists.items()}
    return found | {"num_hidden_layers": len(first)}
