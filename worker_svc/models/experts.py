"""The routed experts of a layer: which experts a token gets, and their sum. The gate is computed in fp32."""

from __future__ import annotations

import torch
from torch.nn.functional import grouped_mm, linear, silu

from common.architectures.base import Experts


def top_lowest_index(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of the last dimension, best first; of equals the lower one, which `topk` leaves open."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate, in fp32. x: [T, hidden_size] -> expert weights fp32 [T, k] and experts int64 [T, k].

    The bias decides who is chosen, not with what weight. A group is as good as its two best experts together.
    """
    logits = linear(x.float(), weight)
    scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if config.groups_kept < config.num_groups:
        groups = torch.unflatten(choice, -1, (config.num_groups, -1))
        best_groups = top_lowest_index(groups.topk(2, dim=-1).values.sum(-1), config.groups_kept)
        dropped = torch.ones(groups.shape[:-1], dtype=torch.bool, device=x.device).scatter_(-1, best_groups, False)
        choice = groups.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
    experts = top_lowest_index(choice, config.per_token)
    weights = scores.gather(-1, experts)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.scale, experts


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    grouped: bool | None = None,
) -> torch.Tensor:
    """The sum of each token's experts, weighted in fp32. x: [T, H]; weights, experts: [T, k] -> [T, H] in x's dtype.

    gate_up: [E, 2 * I, H], down: [E, H, I]. Tokens are sorted by expert, so that an expert is two products on
    neighbouring rows and an expert without tokens costs nothing. `grouped`: all experts in one kernel per product,
    where the host need not know the counts; None = where that kernel is fast, else an expert after the other.
    """
    num_tokens, k = experts.shape
    by_expert, order = experts.flatten().sort(stable=True)
    # Where each expert's rows end; counting instead would make the host wait for the largest.
    ends = torch.searchsorted(by_expert, torch.arange(len(gate_up), device=x.device), right=True)
    rows = x.index_select(0, order // k)
    if grouped_is_fast(gate_up) if grouped is None else grouped:
        offsets = ends.to(torch.int32)
        out = grouped_mm(silu_gate(grouped_mm(rows, gate_up.mT, offs=offsets)), down.mT, offs=offsets)
    else:
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        hidden = x.new_empty(num_tokens * k, gate_up.shape[1])
        _product_per_expert(rows, gate_up, counts, hidden)
        out = torch.empty_like(rows)
        _product_per_expert(silu_gate(hidden), down, counts, out)
    per_token = out.index_select(0, order.argsort()).view(num_tokens, k, -1)
    return (per_token.float() * weights[..., None]).sum(1).to(x.dtype)


def grouped_is_fast(gate_up: torch.Tensor) -> bool:
    """Whether torch has a kernel for all experts at once: bfloat16 from compute capability 9.0 on, rows of whole 16
    bytes. Elsewhere its grouped product is a loop too."""
    if not gate_up.is_cuda or gate_up.dtype is not torch.bfloat16:
        return False
    _, two_inner, hidden = gate_up.shape
    return two_inner % 16 == 0 and hidden % 8 == 0 and torch.cuda.get_device_capability(gate_up.device) >= (9, 0)


def loop_waits(gate_up: torch.Tensor) -> bool:
    """Whether the host waits for the counts of tokens, as an expert follows the other on a device beside it."""
    return gate_up.is_cuda and not grouped_is_fast(gate_up)


def _product_per_expert(rows: torch.Tensor, weight: torch.Tensor, counts: list[int], out: torch.Tensor) -> None:
    """out[i] = weight[expert of row i] @ rows[i], for rows sorted by expert."""
    parts = zip(weight.mT.unbind(), torch.split(rows, counts), torch.split(out, counts), strict=True)
    for expert_weight, expert_rows, expert_out in parts:
        if len(expert_rows):
            torch.mm(expert_rows, expert_weight, out=expert_out)


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
