"""The gate and the experts against loops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from common.architectures import ARCHITECTURES, Experts
from tests.model.checkpoints import TINY_CONFIG
from tests.model.reference import reference_gate
from worker_svc.models.experts import grouped_is_fast, loop_waits, route, run_experts

H = 8


def gate_config(num_experts: int, n_group: int, topk_group: int, k: int) -> Experts:
    sizes = {"num_experts": num_experts, "n_group": n_group, "topk_group": topk_group, "num_experts_per_tok": k}
    experts = ARCHITECTURES["LLaDA2MoeModelLM"].backbone(TINY_CONFIG | {"hidden_size": H} | sizes).experts
    assert experts is not None
    return experts


# experts, groups, groups kept, experts per token: as published, all groups kept, all experts kept, one group
SHAPES = [(16, 4, 2, 4), (32, 8, 4, 8), (8, 2, 1, 2), (8, 2, 2, 3), (8, 4, 2, 4), (6, 1, 1, 6), (6, 1, 1, 1)]


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10_000), coarse=st.booleans())
def test_the_gate_is_the_loop(shape: tuple[int, int, int, int], seed: int, coarse: bool) -> None:
    """Experts, their order and their weights are those of the loop, with biases of both signs and with ties."""
    num_experts, n_group, topk_group, k = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, H, generator=generator)
    weight = torch.randn(num_experts, H, generator=generator) * 0.3
    bias = torch.randn(num_experts, generator=generator) * 0.3
    if coarse:  # few values, so that experts and groups tie; multiples of 1/4 so that sums are exact
        weight = torch.zeros(num_experts, H)
        bias = torch.randint(-2, 3, (num_experts,), generator=generator) / 4
    weights, experts = route(x, weight, bias, gate_config(*shape))
    assert weights.dtype == torch.float32
    for token in range(len(x)):
        scores = (x[token : token + 1] @ weight.T).sigmoid()[0].tolist()
        chosen = reference_gate(scores, bias.tolist(), n_group=n_group, topk_group=topk_group, k=k, scale=2.5)
        assert experts[token].tolist() == list(chosen)
        assert torch.allclose(weights[token], torch.tensor(list(chosen.values())), atol=1e-5)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    """A large bias brings an expert in; its weight is still its unbiased score over the sum."""
    config = gate_config(4, 1, 1, 2)
    weight = torch.zeros(4, H)
    bias = torch.tensor([0.0, -3.0, 5.0, 0.1])
    weights, experts = route(torch.ones(1, H), weight, bias, config)
    assert experts.tolist() == [[2, 3]]
    assert torch.allclose(weights, torch.tensor([[1.25, 1.25]]))


def test_the_gate_is_that_of_transformers() -> None:
    """The same experts and weights as DeepSeek V3's router, which is the same gate."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    sizes: dict[str, Any] = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
    router = deepseek.DeepseekV3TopkRouter(
        DeepseekV3Config(hidden_size=H, n_routed_experts=32, norm_topk_prob=True, **sizes)
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, H, generator=generator)
    bias = torch.randn(32, generator=generator) * 0.2
    router.weight.data.copy_(weight)
    router.e_score_correction_bias.copy_(bias)
    x = torch.randn(40, H, generator=generator)
    with torch.no_grad():
        _, expected_weights, expected_experts = router(x)
    weights, experts = route(x, weight, bias, gate_config(32, 8, 4, 8))
    dense = torch.zeros(40, 32).scatter(1, experts, weights)
    assert torch.allclose(dense, torch.zeros(40, 32).scatter(1, expected_experts, expected_weights), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(1, 20), num_experts=st.integers(1, 9), seed=st.integers(0, 1000), in_bf16=st.booleans())
def test_sorted_experts_are_dense_experts(num_tokens: int, num_experts: int, seed: int, in_bf16: bool) -> None:
    """Sorting tokens by expert gives what every expert on every token gives, experts without tokens included."""
    generator = torch.Generator().manual_seed(seed)
    k = min(3, num_experts)
    x = torch.randn(num_tokens, H, generator=generator)
    gate_up = torch.randn(num_experts, 10, H, generator=generator)
    down = torch.randn(num_experts, H, 5, generator=generator)
    weights = torch.rand(num_tokens, k, generator=generator)
    experts = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :k]
    if in_bf16:
        x, gate_up, down = x.bfloat16(), gate_up.bfloat16(), down.bfloat16()

    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    per_expert = torch.einsum("tei,ehi->teh", silu(gate) * up, down)
    dense = torch.zeros(num_tokens, num_experts).scatter(1, experts, weights)
    expected = torch.einsum("te,teh->th", dense, per_expert.float())
    with torch.inference_mode():
        got = run_experts(x, weights, experts, gate_up, down)
    assert got.dtype == x.dtype
    assert torch.allclose(got.float(), expected, atol=0.5 if in_bf16 else 1e-4, rtol=0.05 if in_bf16 else 1e-4)


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(1, 40), num_experts=st.integers(1, 9), seed=st.integers(0, 1000), in_bf16=st.booleans())
def test_one_kernel_for_all_experts_is_the_loop(num_tokens: int, num_experts: int, seed: int, in_bf16: bool) -> None:
    """The grouped product gives what one expert after the other gives, experts without tokens included."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    k = min(3, num_experts)
    x = torch.randn(num_tokens, H, generator=generator).to(dtype)
    gate_up = torch.randn(num_experts, 16, H, generator=generator).to(dtype)
    down = torch.randn(num_experts, H, 8, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, k, generator=generator)
    experts = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :k]
    with torch.inference_mode():
        loop, grouped = (run_experts(x, weights, experts, gate_up, down, grouped=flag) for flag in (False, True))
    assert grouped.dtype == dtype
    assert torch.allclose(grouped.float(), loop.float(), atol=0.1 if in_bf16 else 1e-4, rtol=0.02 if in_bf16 else 1e-4)


def test_the_host_waits_for_counts_where_experts_follow_each_other_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bfloat16 on CUDA from 9.0 on does not wait, 8.9 and fp32 do; the CPU has nothing to wait for."""

    def on_cuda(dtype: torch.dtype) -> Any:
        return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(2, 16, 8), device="cuda")

    for capability, waits in (((9, 0), False), ((8, 9), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert loop_waits(on_cuda(torch.bfloat16)) is waits
        assert loop_waits(on_cuda(torch.float32))
    assert not loop_waits(torch.zeros(2, 16, 8))


def test_the_gate_reads_bf16_in_fp32() -> None:
    """Two experts that fp32 tells apart and bf16 products do not: the better one is chosen, with fp32's weight."""
    x = torch.ones(1, H, dtype=torch.bfloat16)
    weight = torch.full((2, H), 1 / 8)
    weight[1, 0] += 2**-9  # bf16 rounds a sum of 1 + 2**-9 to 1, and a weight of 1/8 + 2**-12 to 1/8
    weight[1, 1] += 2**-12
    weights, experts = route(x, weight, None, gate_config(2, 1, 1, 1))
    assert experts.tolist() == [[1]]
    config = replace(gate_config(2, 1, 1, 2), normalise=False, scale=1.0)
    weights, _ = route(x, weight, None, config)
    expected = (x.double() @ weight.double().T).sigmoid()[0].flip(0)
    assert torch.allclose(weights[0].double(), expected, rtol=1e-6)


def test_the_grouped_product_is_for_its_kernel_only() -> None:
    """On the CPU the experts run one after the other, whatever the dtype."""
    assert not grouped_is_fast(torch.zeros(2, 16, 8, dtype=torch.bfloat16))
