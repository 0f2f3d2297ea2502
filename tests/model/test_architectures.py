"""Each architecture against an independent implementation: the forward, and what is read of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.architectures import ARCHITECTURES, CheckpointError
from common.folder_files import folder_name
from common.model_folder import ModelFolderError, read_model_folder
from tests.model.checkpoints import merge_experts
from tests.model.forwards import Bench, Part, in_blocks, model_of, random_ids
from tests.model.published import CONFIGS, VOCAB, published, published_folder, write_published
from tests.text.folders import byte_tokenizer
from worker_svc.models.decoder import Decoder
from worker_svc.models.loading import load_model

QWEN_NAMES = sorted(CONFIGS.keys() - {"LLaDA2MoeModelLM"})
MASK = 259
every_architecture = pytest.mark.parametrize("name", sorted(CONFIGS))


def in_two_forwards(bench: Bench, ids: list[int]) -> Tensor:
    """Logits [n, V] of all blocks: a chunk of all but the last, then that one over its KV."""
    *before, last = in_blocks(ids, bench.block_size)
    return torch.cat([*bench.forward(Part(0, 0, before)), *bench.forward(Part(0, len(before), [last]))])


def same(got: Tensor, expected: Tensor) -> bool:
    """Within 1e-5, and the same token everywhere."""
    return bool(((got - expected).abs().max() < 1e-5) & (got.argmax(-1) == expected.argmax(-1)).all())


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", QWEN_NAMES)
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
def test_the_forward_is_that_of_transformers(name: str, block_size: int, batch_invariant: bool) -> None:
    """Blocks over cached blocks give the logits of Qwen3, Qwen3-MoE and Qwen2 under a mask of blocks of every size."""
    config, weights, forward = published(name)
    ids = [token % VOCAB for token in random_ids(3 * block_size, seed=block_size)]
    bench = Bench(model_of(config, weights), block_size, batch_invariant)
    assert same(in_two_forwards(bench, ids), forward(ids, block_size))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Fast_dLLM_QwenForCausalLM", {"tie_word_embeddings": True}),
        ("SDARForCausalLM", {"tie_word_embeddings": True}),
        ("SDARForCausalLM", {"num_key_value_heads": 4}),
        ("SDARForCausalLM", {"rope_theta": 1000.0, "rms_norm_eps": 1e-2}),
        ("SDARMoeForCausalLM", {"norm_topk_prob": False}),
        ("SDARMoeForCausalLM", {"num_experts_per_tok": 8}),
    ],
    ids=str,
)
def test_variants_of_the_configuration(name: str, changes: dict[str, Any]) -> None:
    """Each key that changes the forward is followed."""
    config, weights, forward = published(name, seed=1, **changes)
    ids = [token % VOCAB for token in random_ids(12, seed=2)]
    assert same(in_two_forwards(Bench(model_of(config, weights), 4), ids), forward(ids, 4))


def test_shifted_logits_are_rolled_by_one() -> None:
    """Row i has the logits of row i - 1, and row 0, which speaks of the next block, those of the last row."""
    config, weights, forward = published("Fast_dLLM_QwenForCausalLM")
    ids = [token % VOCAB for token in random_ids(24, seed=3)]
    bench = Bench(model_of(config, weights), 8, logit_shift=1)
    plain = forward(ids, 8).view(3, 8, -1)
    assert same(in_two_forwards(bench, ids), torch.cat([plain[:, -1:], plain[:, :-1]], dim=1).flatten(0, 1))


LLADA2_MINI = {
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LLADA2_FLASH = LLADA2_MINI | {
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "moe_intermediate_size": 1024,
}
SDAR_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SDAR_8B = SDAR_4B | {"hidden_size": 4096, "intermediate_size": 12288}
SDAR_30B = SDAR_4B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
FAST_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "sizes", "num_parameters", "kv_bytes"),
    [
        pytest.param("LLaDA2MoeModelLM", LLADA2_MINI, 16_255_643_392, 40_960, id="LLaDA2-mini"),
        pytest.param("LLaDA2MoeModelLM", LLADA2_FLASH, 102_889_705_216, 65_536, id="LLaDA2-flash"),
        pytest.param("SDARForCausalLM", SDAR_4B, 8_822_848_512 // 2, 147_456, id="SDAR-4B"),
        pytest.param("SDARForCausalLM", SDAR_8B, 16_381_470_720 // 2, 147_456, id="SDAR-8B"),
        pytest.param("SDARMoeForCausalLM", SDAR_30B, 30_532_122_624, 98_304, id="SDAR-30B-A3B"),
        pytest.param("Fast_dLLM_QwenForCausalLM", FAST_7B, 15_231_233_024 // 2, 57_344, id="Fast-dLLM-v2-7B"),
    ],
)
def test_published_sizes_give_the_published_files(
    name: str, sizes: dict[str, int], num_parameters: int, kv_bytes: int
) -> None:
    """With the sizes of the published checkpoints all tensors together are as many values as their files hold, and the
    KV of a token in bfloat16 is as large as published."""
    with torch.device("meta"):
        model = Decoder(ARCHITECTURES[name].backbone(sizes), torch.bfloat16)
    tensors = model.checkpoint_tensors(merged_experts=False)
    assert sum(tensor.numel() for tensor in tensors.values()) == num_parameters
    assert 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim == kv_bytes


@every_architecture
def test_a_token_changes_its_block_and_what_follows_only(name: str) -> None:
    """In batch-invariant mode not one bit of an earlier block; and all of its own, in both directions."""
    config, weights, _ = published(name)
    ids = [token % VOCAB for token in random_ids(16, seed=4)]
    model = model_of(config, weights)
    before = in_two_forwards(Bench(model, 4, batch_invariant=True), ids)
    ids[10] = (ids[10] + 1) % VOCAB
    after = in_two_forwards(Bench(model, 4, batch_invariant=True), ids)
    assert torch.equal(before[:8], after[:8])
    assert (before[8:] != after[8:]).any(dim=1).all()


@every_architecture
def test_the_kv_of_a_block_is_that_of_its_final_tokens(name: str) -> None:
    """After the commit nothing is left of masks and tokens that stood there before."""
    config, weights, _ = published(name)
    model, blocks = model_of(config, weights), in_blocks([token % VOCAB for token in random_ids(12, seed=5)], 4)
    bench, fresh = Bench(model, 4), Bench(model, 4, page_seed=1)
    for index, block in enumerate(blocks):
        for seen in (0, 3, 4):
            bench.forward(Part(1, index, [block[:seen] + [MASK] * (4 - seen)]))
    fresh.forward(Part(2, 0, blocks))
    assert torch.allclose(bench.final_kv(1, 3), fresh.final_kv(2, 3), atol=1e-5)


@every_architecture
def test_a_published_folder(name: str, tmp_path: Path) -> None:
    """The folder resolves to the architecture's facts, special ids by text, and its weights load as they are."""
    folder = published_folder(tmp_path, name)
    architecture = ARCHITECTURES[name]
    block_size = {"LLaDA2MoeModelLM": 32, "Fast_dLLM_QwenForCausalLM": 32}.get(name, 4)
    assert (folder.block_size, folder.logit_shift) == (block_size, int(name.startswith("Fast")))
    assert folder.algorithms == architecture.algorithms and not folder.warnings
    tokenizer_ids = {"LLaDA2MoeModelLM": (257, (256, 258)), "Fast_dLLM_QwenForCausalLM": (259, (258,))}
    assert (folder.mask_token_id, folder.stop_token_ids) == tokenizer_ids.get(name, (259, (256, 258)))
    config, weights, _ = published(name)
    ids = [token % VOCAB for token in random_ids(16, seed=5)]
    loaded = load_model(folder, dtype=None, device="cpu")
    assert torch.equal(
        in_two_forwards(Bench(loaded, 4), ids), in_two_forwards(Bench(model_of(config, weights), 4), ids)
    )


@every_architecture
def test_published_ids_without_the_texts(name: str, tmp_path: Path) -> None:
    """A tokenizer without the usual texts leaves the ids of the published checkpoint."""
    config, weights, _ = published(name)
    write_published(tmp_path, name, config | {"vocab_size": 160_000}, weights)
    byte_tokenizer([], ()).save(str(tmp_path / "tokenizer.json"))
    folder = read_model_folder(tmp_path)
    assert (folder.mask_token_id, folder.stop_token_ids) == {
        "LLaDA2MoeModelLM": (156895, (156892, 156900)),
        "SDARForCausalLM": (151669, (151643, 151645)),
        "SDARMoeForCausalLM": (151669, (151643, 151645)),
        "Fast_dLLM_QwenForCausalLM": (151665, (151645,)),
    }[name]


def test_experts_of_sdar_in_both_layouts(tmp_path: Path) -> None:
    """A tensor per expert and one per layer are the same model to the bit."""
    name = "SDARMoeForCausalLM"
    config, weights, _ = published(name)
    merged = read_model_folder(write_published(tmp_path, name, config, merge_experts(weights)))
    ids = [token % VOCAB for token in random_ids(8, seed=6)]
    expected = in_two_forwards(Bench(model_of(config, weights), 4), ids)
    assert torch.equal(in_two_forwards(Bench(load_model(merged, dtype=None, device="cpu"), 4), ids), expected)


def test_what_overrides_the_block_size(tmp_path: Path) -> None:
    """The flag comes before the key of config.json, and that before the description; another size is another model."""
    name = "SDARForCausalLM"
    config, weights, _ = published(name)
    plain = published_folder(tmp_path, name)
    assert plain.block_size == 4
    write_published(tmp_path, name, config | {"block_size": 16}, weights)
    assert read_model_folder(tmp_path).block_size == 16
    overridden = read_model_folder(tmp_path, block_size=64)
    assert overridden.block_size == 64
    assert overridden.fingerprint != read_model_folder(tmp_path).fingerprint != plain.fingerprint
    with pytest.raises(ModelFolderError, match="block_size must be a positive integer"):
        read_model_folder(write_published(tmp_path, name, config | {"block_size": "4"}, weights))


def test_what_overrides_the_mask_id(tmp_path: Path) -> None:
    """The flag comes before the token's text, and config.json before the published id; what is no id is refused."""
    name = "SDARForCausalLM"
    config, weights, _ = published(name)
    folder = published_folder(tmp_path, name, mask_token_id=7)
    assert folder.mask_token_id == 7 and folder.fingerprint != published_folder(tmp_path, name).fingerprint
    with pytest.raises(ModelFolderError, match="mask token id 320 must be below"):
        published_folder(tmp_path, name, mask_token_id=VOCAB)
    write_published(tmp_path, name, config | {"mask_token_id": 9}, weights)
    assert read_model_folder(tmp_path).mask_token_id == 259
    byte_tokenizer([], ("<|im_end|>",)).save(str(tmp_path / "tokenizer.json"))
    assert read_model_folder(tmp_path).mask_token_id == 9
    write_published(tmp_path, name, config | {"mask_token_id": 400}, weights)
    byte_tokenizer([], ("<|im_end|>",)).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFolderError, match="mask_token_id 400 must be an id"):
        read_model_folder(tmp_path)


def test_two_mask_tokens(tmp_path: Path) -> None:
    """Where a tokenizer has both texts of SDAR's mask token, config.json's id or the published one says which is it;
    without their word the folder is refused, as the wrong one would be a mask that the model never saw."""
    name = "SDARForCausalLM"
    config, weights, _ = published(name)
    write_published(tmp_path, name, config | {"vocab_size": VOCAB}, weights)
    byte_tokenizer([], ("<|endoftext|>", "<MASK>", "<|MASK|>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFolderError, match=r"<\|MASK\|> with id 258 and <MASK> with id 257, .*--mask-token-id"):
        read_model_folder(tmp_path)
    assert read_model_folder(tmp_path, mask_token_id=257).mask_token_id == 257
    (tmp_path / "config.json").write_text(json.dumps(config | {"mask_token_id": 257}))
    assert read_model_folder(tmp_path).mask_token_id == 257


def test_a_folder_that_is_named_for_other_blocks(tmp_path: Path) -> None:
    """SDAR-...-b32 with blocks of 4 is warned of, unless the flag says what is meant."""
    name = "SDARForCausalLM"
    path = tmp_path / "SDAR-4B-Chat-b32"
    for likewise in (path, tmp_path / "SDAR-b32-fp32", tmp_path / "models--JetLM--SDAR-4B-Chat-b32/snapshots/0f1e"):
        assert "--block-size 32" in published_folder(likewise, name).warnings[0]
    assert folder_name(likewise) == "SDAR-4B-Chat-b32"
    assert not published_folder(path, name, block_size=32).warnings
    assert not published_folder(path, name, block_size=4).warnings


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("SDARForCausalLM", "use_regular_causal", True),
        ("SDARForCausalLM", "quantization_config", {"quant_method": "awq"}),
        ("SDARForCausalLM", "compression_config", {"format": "pack-quantized"}),
        ("SDARForCausalLM", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("SDARForCausalLM", "rope_scaling", "yarn"),
        ("LLaDA2MoeModelLM", "rope_parameters", {"type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
        ("SDARForCausalLM", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}),
        ("Fast_dLLM_QwenForCausalLM", "rope_parameters", {"rope_type": "default", "factor": 4.0}),
        ("SDARForCausalLM", "layer_types", ["sliding_attention"] * 2),
        ("LLaDA2MoeModelLM", "layer_types", ["sliding_attention"] * 3),
        ("SDARForCausalLM", "attention_bias", True),
        ("SDARForCausalLM", "use_sliding_window", True),
        ("SDARForCausalLM", "hidden_act", "gelu"),
        ("SDARForCausalLM", "num_key_value_heads", 3),
        ("SDARMoeForCausalLM", "mlp_only_layers", [0]),
        ("SDARMoeForCausalLM", "decoder_sparse_step", 2),
        ("SDARMoeForCausalLM", "num_experts_per_tok", 9),
        ("SDARMoeForCausalLM", "moe_intermediate_size", None),
        ("Fast_dLLM_QwenForCausalLM", "layer_types", ["full_attention", "sliding_attention"]),
        ("Fast_dLLM_QwenForCausalLM", "use_sliding_window", True),
        ("Fast_dLLM_QwenForCausalLM", "num_attention_heads", 5),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_served(name: str, key: str, value: Any) -> None:
    """What cannot be, or is not built, is refused in one line that names the key."""
    with pytest.raises(CheckpointError) as caught:
        ARCHITECTURES[name].backbone(CONFIGS[name] | {key: value})
    assert key in str(caught.value) or key == "num_attention_heads"
    assert "\n" not in str(caught.value)


def test_absent_keys_have_the_defaults_of_the_configuration_classes() -> None:
    """As transformers' Qwen3, Qwen3-MoE and Qwen2 classes have them; a key that is null is absent."""
    optional = ("head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "norm_topk_prob", "layer_types")
    found = {}
    for name in QWEN_NAMES:
        raw = {key: value for key, value in CONFIGS[name].items() if key not in optional}
        backbone = ARCHITECTURES[name].backbone(raw)
        nulls = dict.fromkeys((*optional, "hidden_act", "use_sliding_window", "mlp_only_layers", "rope_parameters"))
        assert ARCHITECTURES[name].backbone(raw | nulls) == backbone
        normalise = None if backbone.experts is None else backbone.experts.normalise
        found[name] = (backbone.head_dim, backbone.rms_norm_eps, backbone.rope_theta, backbone.tied_head, normalise)
    assert found == {
        "Fast_dLLM_QwenForCausalLM": (12, 1e-6, 10000.0, False, None),
        "SDARForCausalLM": (128, 1e-6, 10000.0, False, None),
        "SDARMoeForCausalLM": (12, 1e-6, 10000.0, False, False),
    }


@pytest.mark.parametrize("name", ["LLaDAModelLM", "DreamModel", "DiffusionGemmaForBlockDiffusion"])
def test_models_without_a_final_kv_are_refused(name: str, tmp_path: Path) -> None:
    """One line says why, not only that the name is unknown."""
    config, weights, _ = published("SDARForCausalLM")
    write_published(tmp_path, "SDARForCausalLM", config | {"architectures": [name]}, weights)
    with pytest.raises(ModelFolderError, match=rf"{name} is not served: it"):
        read_model_folder(tmp_path)
