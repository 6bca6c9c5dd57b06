"""What stands in for torch's `varlen_attn`, which runs on cards alone."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend_as_operator", "attend_by_loop"]


def attend_by_loop(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Document by document; the arguments are torch's."""
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q[-1] == len(query) == len(key)
    assert max_q == max_k == cu_seq_q.diff().max() and torch.equal(cu_seq_q, cu_seq_k)
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = window_size
    assert right == 0
    outputs = []
    for start, end in pairwise(cu_seq_q.tolist()):
        inputs = [each[start:end].transpose(0, 1) for each in (query, key, value)]
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (distance >= 0) & ((distance <= left) | (left < 0))
        output = F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def attend_as_operator(
    query, key, value, starts, _, longest, __, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """The same as graphs see torch's: one operator with a backward of its own."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    output, _ = _forward(query, key, value, starts, longest, scale or query.shape[-1] ** -0.5, window_size[0])
    return output


@torch.library.custom_op("shardwise_tests::varlen", mutates_args={})
def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    """The output and what each token attends to, `[heads, tokens, tokens]`."""
    assert longest == starts.diff().max()
    tokens, groups = torch.arange(len(query)), query.shape[1] // key.shape[1]
    documents, distance = torch.searchsorted(starts, tokens, right=True), tokens[:, None] - tokens
    is_seen = (documents[:, None] == documents) & (distance >= 0) & ((distance <= left) | (left < 0))
    keys, values = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (key, value))
    weights = (query.transpose(0, 1) @ keys.mT * scale).masked_fill(~is_seen, -torch.inf).softmax(-1)
    return (weights @ values).transpose(0, 1).contiguous(), weights


@torch.library.custom_op("shardwise_tests::varlen_backward", mutates_args={})
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (key, value))
    gradient, queries = gradient.transpose(0, 1), query.transpose(0, 1)
    of_weights = gradient @ values.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_groups = [each.unflatten(0, (-1, groups)).sum(1) for each in (of_scores.mT @ queries, weights.mT @ gradient)]
    found = [each.transpose(0, 1).contiguous() for each in (of_scores @ keys, *of_groups)]
    return found[0], found[1], found[2]


@_forward.register_fake
def _(query, key, value, starts, longest, scale, left):
    return torch.empty_like(query).contiguous(), query.new_empty(query.shape[1], len(query), len(query))


@_backward.register_fake
def _(gradient, query, key, value, weights, scale):
    return tuple(torch.empty_like(each).contiguous() for each in (query, key, value))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.scale = inputs[5]


def _differentiate(ctx, gradient, _):
    return (*_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep)
