"""Loading of checkpoints: every published layout is read, and whatever is not right is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.architectures.llada2_moe import LLADA2_MOE
from common.model_folder import read_model_folder
from tests.model.checkpoints import SHIPPED_MODEL, TINY_CONFIG, merge_experts, random_weights, write_checkpoint
from tests.model.forwards import Bench, Part, folder_of, in_blocks, random_ids, tiny_model
from worker_svc.models.base import BlockModel
from worker_svc.models.loading import CheckpointError, load_model

B = 8
IDS = random_ids(2 * B, seed=0)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(TINY_CONFIG)


def load(path: Path, config: dict[str, Any] = TINY_CONFIG, dtype: torch.dtype = torch.float32) -> BlockModel:
    return load_model(folder_of(path, config), dtype=dtype, device="cpu")


def logits(model: BlockModel) -> Tensor:
    return Bench(model, B).forward(Part(0, 0, in_blocks(IDS, B)))[0]


def refusal(path: Path, config: dict[str, Any] = TINY_CONFIG) -> str:
    """The error's text, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        load(path, config)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


# What is read


def test_all_layouts_load_alike(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """One file, shards, merged experts and the multi-modal prefix are the same model to the bit."""
    expected = logits(tiny_model())
    prefixed = {
        name if name == "lm_head.weight" else f"model.language_model.{name.removeprefix('model.')}": weight
        for name, weight in weights.items()
    }
    layouts: dict[str, tuple[dict[str, Tensor], int]] = {
        "one file": (weights, 1),
        "shards": (weights, 3),
        "merged": (merge_experts(weights), 1),
        "merged shards": (merge_experts(weights), 2),
        "prefix": (prefixed, 1),
    }
    for name, (tensors, num_shards) in layouts.items():
        write_checkpoint(tmp_path / name, TINY_CONFIG, tensors, num_shards)
        folder = read_model_folder(tmp_path / name)
        model = load_model(folder, dtype=torch.float32, device="cpu")
        assert torch.equal(logits(model), expected), name


def test_expert_bias_and_gate_stay_fp32(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """In bf16 everything is rounded but what routes; a bf16 checkpoint loads as well."""
    write_checkpoint(tmp_path / "fp32", TINY_CONFIG, weights)
    model = load(tmp_path / "fp32", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.expert_bias"
    for place, tensor in model.checkpoint_tensors(merged_experts=False).items():
        assert tensor.dtype == (torch.float32 if ".mlp.gate." in place else torch.bfloat16), place
    assert torch.equal(model.checkpoint_tensors(merged_experts=False)[name], weights[name])

    stored = {k: w if k.endswith("expert_bias") else w.bfloat16() for k, w in weights.items()}
    write_checkpoint(tmp_path / "bf16", TINY_CONFIG, stored)
    from_bf16 = load(tmp_path / "bf16", dtype=torch.bfloat16)
    tensors = from_bf16.checkpoint_tensors(merged_experts=False)
    assert all(torch.equal(tensors[k].float(), w.float()) for k, w in stored.items())


def test_tied_head(tmp_path: Path) -> None:
    """With a tied head there is no lm_head tensor, and the embedding is the head."""
    config = TINY_CONFIG | {"tie_word_embeddings": True}
    tied = random_weights(config)
    write_checkpoint(tmp_path / "tied", config, tied)
    untied = tied | {"lm_head.weight": tied["model.word_embeddings.weight"].clone()}
    write_checkpoint(tmp_path / "untied", TINY_CONFIG, untied)
    assert torch.equal(logits(load(tmp_path / "tied", config)), logits(load(tmp_path / "untied")))


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    """A second copy of a tied head is left out; another tensor under its name is refused."""
    config = TINY_CONFIG | {"tie_word_embeddings": True}
    tied = random_weights(config)
    embedding = tied["model.word_embeddings.weight"]
    write_checkpoint(tmp_path / "twice", config, tied | {"lm_head.weight": embedding.clone()}, num_shards=2)
    write_checkpoint(tmp_path / "once", config, tied)
    assert torch.equal(logits(load(tmp_path / "twice", config)), logits(load(tmp_path / "once", config)))
    for name, head in {"other": embedding + 1, "shape": embedding[:-1]}.items():
        write_checkpoint(tmp_path / name, config, tied | {"lm_head.weight": head.clone()})
        assert "lm_head.weight is not the embedding" in refusal(tmp_path / name, config)


def test_qk_norm_is_used_unless_the_configuration_says_no(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """use_qk_norm absent means true; false means that the tensors must not be there."""
    assert LLADA2_MOE.backbone(TINY_CONFIG).qk_norm is True
    config = TINY_CONFIG | {"use_qk_norm": False}
    write_checkpoint(tmp_path / "without", config, random_weights(config))
    load(tmp_path / "without", config)
    write_checkpoint(tmp_path / "with", config, weights)
    assert "key_layernorm" in refusal(tmp_path / "with", config)
    assert "missing" in refusal(tmp_path / "without")


def test_progress_counts_bytes(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """About ten reports, rising to the size of all tensors."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights, num_shards=2)
    seen: list[tuple[int, int]] = []
    folder = folder_of(tmp_path, TINY_CONFIG)
    load_model(folder, dtype=torch.float32, device="cpu", on_progress=lambda done, total: seen.append((done, total)))
    size = sum(weight.nbytes for weight in weights.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert 5 <= len(seen) <= 10
    assert seen[-1] == (size, size)
    assert {total for _, total in seen} == {size}


def test_dtype_of_the_configuration(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """Without a dtype it is the checkpoint's, under its old and its new key, or that of the tensors; what is not built
    is refused with what to do."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights)
    without = {key: value for key, value in TINY_CONFIG.items() if key != "dtype"}
    for keys, dtype in (
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({}, torch.float32),
    ):
        model = load_model(folder_of(tmp_path, without | keys), dtype=None, device="cpu")
        assert model.dtype is dtype
        assert model.checkpoint_tensors(merged_experts=False)["lm_head.weight"].dtype is dtype
    with pytest.raises(CheckpointError, match="'float16' is not served; choose --dtype float32 or bfloat16"):
        load_model(folder_of(tmp_path, without | {"dtype": "float16"}), dtype=None, device="cpu")
    stored = {name: w if name.endswith("expert_bias") else w.bfloat16() for name, w in weights.items()}
    write_checkpoint(tmp_path, TINY_CONFIG, stored)
    assert load_model(folder_of(tmp_path, without), dtype=None, device="cpu").dtype is torch.bfloat16


def test_configuration_defaults() -> None:
    """Absent keys have the published class's defaults."""
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    sizes += ["num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"]
    config = LLADA2_MOE.backbone({key: TINY_CONFIG[key] for key in sizes})
    assert (config.rms_norm_eps, config.rope_theta, config.head_dim, config.rotary_dim) == (1e-5, 10000.0, 16, 8)
    assert (config.qk_norm, config.tied_head, config.first_moe_layer) == (True, False, 0)
    experts = config.experts
    assert experts is not None
    assert (experts.num_groups, experts.groups_kept, experts.scale, experts.num_shared) == (8, 4, 2.5, 0)


def test_rotary_keys_as_transformers_5_writes_them() -> None:
    """rope_parameters stands for rope_theta and partial_rotary_factor; whatever else it may say is refused."""
    raw = {key: value for key, value in TINY_CONFIG.items() if key not in ("rope_theta", "partial_rotary_factor")}
    parameters = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
    refused = ({"rope_type": "yarn"}, {"type": "yarn"}, {"factor": 2.0}, {"full_attention": parameters})
    for name in ("rope_parameters", "rope_scaling"):
        assert LLADA2_MOE.backbone(raw | {name: parameters}).rope_theta == 1000.0
        for given in (*(parameters | more for more in refused), {"full_attention": parameters}, "default"):
            with pytest.raises(CheckpointError, match=name):
                LLADA2_MOE.backbone(raw | {name: given})


# What is refused: files


@pytest.mark.parametrize("cut", [0, 4, 100, 20_000, -1])
def test_a_truncated_file(tmp_path: Path, weights: dict[str, Tensor], cut: int) -> None:
    """A file that ends early, in its header or in its data, is named."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    assert "model.safetensors" in refusal(tmp_path)


def test_a_corrupt_file(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """A file with a broken header is named."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"\xff" * 12
    file.write_bytes(data)
    assert "model.safetensors" in refusal(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    """A folder without weights, or with pickled ones only, says what is read."""
    assert "no *.safetensors file" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in refusal(tmp_path)


def test_several_files_without_an_index(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """Shards without their index are not guessed together."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights, num_shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "index" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\xff"])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    """An index that is no index is named."""
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert "index" in refusal(tmp_path)


def test_shards_that_are_not_those_of_the_index(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """A shard that is not there, lies elsewhere, or holds other tensors than the index says is refused."""
    write_checkpoint(tmp_path / "gone", TINY_CONFIG, weights, num_shards=2)
    (tmp_path / "gone" / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path / "gone")

    folder = tmp_path / "elsewhere"
    write_checkpoint(folder, TINY_CONFIG, weights, num_shards=2)
    index = folder / "model.safetensors.index.json"
    (folder / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    assert "../model-00001-of-00002.safetensors" in refusal(folder)

    write_checkpoint(tmp_path / "other", TINY_CONFIG, weights, num_shards=2)
    save_file({"lm_head.weight": weights["lm_head.weight"]}, tmp_path / "other" / "model-00002-of-00002.safetensors")
    assert "its tensors are not those" in refusal(tmp_path / "other")


# What is refused: tensors


def test_a_missing_tensor(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """A tensor that is not there is named, and how many more."""
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    write_checkpoint(tmp_path, TINY_CONFIG, {k: w for k, w in weights.items() if k != name})
    assert name in refusal(tmp_path)
    write_checkpoint(tmp_path, TINY_CONFIG, {k: w for k, w in weights.items() if ".mlp.experts.3." not in k})
    assert "and 5 more" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.3.input_layernorm.weight", "model.layers.1.attention.dense.bias", "x"])
def test_a_surplus_tensor(tmp_path: Path, weights: dict[str, Tensor], name: str) -> None:
    """A tensor that the forward would not use is named rather than dropped."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights | {name: torch.zeros(64)})
    assert name in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.norm.weight", (63,)), ("lm_head.weight", (64, 512)), ("model.layers.2.mlp.gate.expert_bias", (16, 1))],
)
def test_a_wrong_shape(tmp_path: Path, weights: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """A tensor of another shape is named with both shapes; nothing is broadcast into place."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights | {name: torch.zeros(shape)})
    message = refusal(tmp_path)
    assert name in message
    assert str(list(shape)) in message


def test_quantised_tensors(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """Integers are not taken for weights."""
    name = "model.norm.weight"
    write_checkpoint(tmp_path, TINY_CONFIG, weights | {name: torch.zeros(64, dtype=torch.int8)})
    assert "I8" in refusal(tmp_path)


def test_both_expert_layouts_at_once(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """Merged and single experts in one checkpoint contradict each other."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights | merge_experts(weights))
    assert "mlp.experts" in refusal(tmp_path)


def test_a_tensor_under_two_names(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """With and without the multi-modal prefix is once too often."""
    write_checkpoint(tmp_path, TINY_CONFIG, weights | {"model.language_model.norm.weight": torch.ones(64)})
    assert "norm.weight" in refusal(tmp_path)


# What is refused: configurations


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_capacity", 48),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("hidden_size", -64),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("head_dim", 0),
        ("rotary_dim", 16),
        ("partial_rotary_factor", 0.6),
        ("partial_rotary_factor", 0.0),
        ("partial_rotary_factor", 1.5),
        ("n_group", 3),
        ("n_group", 16),
        ("n_group", 0),
        ("topk_group", 5),
        ("num_experts_per_tok", 9),
        ("num_experts", 10**9),
        ("num_hidden_layers", 10**9),
        ("num_shared_experts", -1),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("use_qk_norm", "yes"),
        ("tie_word_embeddings", 1),
        ("hidden_act", "gelu"),
        ("use_bias", True),
        ("use_qkv_bias", True),
        ("use_rmsnorm", False),
        ("use_sliding_window", True),
        ("using_split_qkv_in_self_attention", True),
        ("norm_head", True),
        ("norm_softmax", True),
        ("norm_topk_prob", False),
        ("score_function", "softmax"),
        ("moe_router_enable_expert_bias", False),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_served(key: str, value: Any) -> None:
    """What cannot be, or is not built, is refused in one line that names the key."""
    with pytest.raises(CheckpointError) as caught:
        LLADA2_MOE.backbone(TINY_CONFIG | {key: value})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_with_an_odd_rotary_dimension() -> None:
    """Rotation turns pairs."""
    with pytest.raises(CheckpointError, match="head_dim 18"):
        LLADA2_MOE.backbone(TINY_CONFIG | {"head_dim": 18, "rotary_dim": 9})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_experts", "num_hidden_layers"])
def test_a_configuration_without_a_size(key: str) -> None:
    """A size that is not there is asked for, not guessed."""
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        LLADA2_MOE.backbone({k: v for k, v in TINY_CONFIG.items() if k != key})


def test_the_shipped_configuration_is_served() -> None:
    """models/tiny-llada2 passes every check."""
    config = LLADA2_MOE.backbone(json.loads((SHIPPED_MODEL / "config.json").read_text()))
    assert config.experts is not None and config.experts.num_experts == 8
    assert (config.rope_theta, config.rotary_dim) == (1000.0, 16)
