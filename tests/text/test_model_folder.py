from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from common.fingerprint import check_fingerprint
from common.model_folder import ModelFolderError, load_tokenizer, read_model_folder
from common.tokenizer_files import read_chat_templates
from tests.text.folders import LLADA2_CONFIG, SHIPPED, byte_tokenizer, safetensors_bytes, spell, write_folder


def test_the_shipped_model() -> None:
    """The shipped folder gives block 32 from the table and the special ids by their text."""
    folder = read_model_folder(SHIPPED)
    assert folder.architecture == "LLaDA2MoeModelLM"
    assert (folder.block_size, folder.vocab_size, folder.num_tokens, folder.context_length) == (32, 512, 512, 4096)
    assert (folder.mask_token_id, folder.stop_token_ids) == (1, (0, 4))
    assert folder.config["num_experts"] == 8
    assert [len(part) for part in folder.fingerprint.split("-")] == [32, 32]


def test_special_ids_by_text_come_before_the_table(tmp_path: Path) -> None:
    """Token text wins even where the ids of the table exist."""
    config = LLADA2_CONFIG | {"vocab_size": 157184}
    folder = read_model_folder(write_folder(tmp_path, config=config))
    assert (folder.mask_token_id, folder.stop_token_ids, folder.num_tokens) == (257, (256, 258), 261)


def test_special_ids_by_table(tmp_path: Path) -> None:
    """Without the usual texts, the published ids of the architecture are taken."""
    config = LLADA2_CONFIG | {"vocab_size": 157184}
    folder = read_model_folder(write_folder(tmp_path, config=config, tokenizer=byte_tokenizer([], ())))
    assert (folder.mask_token_id, folder.stop_token_ids) == (156895, (156892, 156900))


@pytest.mark.parametrize("mask_token", ["[M]", {"content": "[M]", "lstrip": False}])
def test_mask_token_of_the_tokenizer_configuration(tmp_path: Path, mask_token: object) -> None:
    """A mask token with another text is found by its name in tokenizer_config.json."""
    tokenizer = byte_tokenizer([], ("<|endoftext|>", "[M]"))
    folder = read_model_folder(write_folder(tmp_path, tokenizer=tokenizer, tokenizer_config={"mask_token": mask_token}))
    assert folder.mask_token_id == 257


@pytest.mark.parametrize(("eos", "expected"), [(7, (7, 256, 258)), ([8, 256], (8, 256, 258)), (None, (256, 258))])
def test_stop_ids_of_the_generation_configuration(tmp_path: Path, eos: object, expected: tuple[int, ...]) -> None:
    """eos_token_id of generation_config.json, one or several, is added to the stop ids found by text."""
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert read_model_folder(tmp_path).stop_token_ids == expected


def test_overrides(tmp_path: Path) -> None:
    """Block size and context length can be set; another block size is another fingerprint."""
    write_folder(tmp_path)
    folder = read_model_folder(tmp_path, block_size=4, context_length=100)
    assert (folder.block_size, folder.context_length) == (4, 100)
    assert folder.fingerprint != read_model_folder(tmp_path).fingerprint


def write_config(**changes: Any) -> Callable[[Path], object]:
    return lambda path: (path / "config.json").write_text(json.dumps(LLADA2_CONFIG | changes))


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json is missing"),
    "config cut off": (lambda path: (path / "config.json").write_text('{"architectures": ['), "not valid JSON"),
    "config not UTF-8": (lambda path: (path / "config.json").write_bytes(b'{"a": "\xff\xfe"}'), "not valid JSON"),
    "config too deep": (lambda path: (path / "config.json").write_text("[" * 200_000), "not valid JSON"),
    "config a list": (lambda path: (path / "config.json").write_text("[]"), "must hold a JSON object"),
    "unknown architecture": (write_config(architectures=["LlamaForCausalLM"]), "'LlamaForCausalLM' is not served"),
    "no architecture": (write_config(architectures=[]), "architecture None is not served"),
    "architecture no list": (write_config(architectures=7), "architecture None is not served"),
    "LLaDA2.2": (write_config(expert_capacity=48), "expert_capacity"),
    "vocab_size a string": (write_config(vocab_size="600"), "vocab_size must be a positive integer"),
    "vocab_size absent": (write_config(vocab_size=None), "vocab_size must be a positive integer"),
    "vocab_size true": (write_config(vocab_size=True), "vocab_size must be a positive integer"),
    "no positions": (write_config(max_position_embeddings=0), "max_position_embeddings must be a positive integer"),
    "head too small": (write_config(vocab_size=200), "the tokenizer has 261 tokens"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer"),
    "tokenizer cut off": (lambda path: (path / "tokenizer.json").write_text('{"version":'), "cannot be read"),
    "tokenizer_config broken": (lambda path: (path / "tokenizer_config.json").write_text("nil"), "not valid JSON"),
    "no mask token": (
        lambda path: write_folder(path, tokenizer=byte_tokenizer([], ("<|role_end|>",))),
        "no mask token",
    ),
    "no stop token": (lambda path: write_folder(path, tokenizer=byte_tokenizer([], ("<|mask|>",))), "no stop token"),
    "bad eos": (
        lambda path: (path / "generation_config.json").write_text('{"eos_token_id": [600]}'),
        "below vocab_size",
    ),
    "eos is mask": (
        lambda path: (path / "generation_config.json").write_text('{"eos_token_id": 257}'),
        "both the mask",
    ),
    "index of nothing": (
        lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'),
        "no valid index",
    ),
    "weights empty": (lambda path: (path / "model.safetensors").write_bytes(b""), "cut off"),
    "weights cut off": (
        lambda path: (path / "model.safetensors").write_bytes(safetensors_bytes(b"x" * 100)[:50]),
        "cut off",
    ),
    "template neither": (
        lambda path: (path / "tokenizer_config.json").write_text('{"chat_template": 3}'),
        "chat_template must be",
    ),
    "templates without default": (
        lambda path: (path / "tokenizer_config.json").write_text(
            '{"chat_template": [{"name": "rag", "template": ""}]}'
        ),
        "'default'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_served_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    """Each kind of broken folder gets one line that says what and where."""
    damage, words = REFUSALS[case]
    folder = write_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelFolderError) as caught:
        read_model_folder(folder)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"block_size": 0}, "block size 0"),
        ({"block_size": 5000}, "block size 5000"),
        ({"context_length": 1}, "context length 1"),
        ({"context_length": 4097}, "max_position_embeddings"),
    ],
)
def test_overrides_out_of_range(tmp_path: Path, overrides: dict[str, int], words: str) -> None:
    """A block size or context length that the model cannot have is refused."""
    with pytest.raises(ModelFolderError, match=words):
        read_model_folder(write_folder(tmp_path), **overrides)


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path: Path) -> None:
    """Scheduler and worker may mount the folder at different paths."""
    first = read_model_folder(write_folder(tmp_path / "a"))
    second = read_model_folder(write_folder(tmp_path / "b" / "c"))
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        write_config(rope_theta=5),
        lambda path: byte_tokenizer([b"ab"]).save(str(path / "tokenizer.json")),
        lambda path: (path / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        lambda path: (path / "tokenizer_config.json").write_text('{"chat_template": "x"}'),
        lambda path: (path / "model.safetensors").write_bytes(safetensors_bytes(header=b'{"a":2}')),
        lambda path: (path / "model.safetensors").write_bytes(safetensors_bytes(tensors=b"\0" * 17)),
        lambda path: (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors"),
        lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
    ],
)
def test_the_fingerprint_changes_with_the_model(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """Configuration, tokenizer, template, and name, size and header of the weight files are all in the fingerprint."""
    folder = write_folder(tmp_path)
    before = read_model_folder(folder).fingerprint
    change(folder)
    assert read_model_folder(folder).fingerprint != before


@pytest.mark.parametrize("place", [0, 3_000_000, 5_950_000])
def test_other_weights_are_another_fingerprint(tmp_path: Path, place: int) -> None:
    """A finetune has the configuration, names and sizes of its base: what a file holds is looked at, in samples."""
    tensors = bytearray(6_000_000)
    before = read_model_folder(write_folder(tmp_path, weights=safetensors_bytes(tensors=bytes(tensors)))).fingerprint
    tensors[place : place + 50_000] = b"\1" * 50_000
    after = read_model_folder(write_folder(tmp_path, weights=safetensors_bytes(tensors=bytes(tensors)))).fingerprint
    assert after != before and after.partition("-")[0] == before.partition("-")[0]


def test_the_fingerprint_reads_little_of_large_files(tmp_path: Path) -> None:
    """A terabyte takes no longer than a megabyte: a start must not wait until all weights are hashed."""
    folder = write_folder(tmp_path)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**40)
    assert read_model_folder(folder).fingerprint


def test_a_folder_without_weights(tmp_path: Path) -> None:
    """A scheduler's folder may lack them, all or some: then its fingerprint is of the rest, and fits any weights."""
    folder = write_folder(tmp_path)
    whole = read_model_folder(folder).fingerprint
    (folder / "model.safetensors").unlink()
    bare = read_model_folder(folder).fingerprint
    assert bare == whole.partition("-")[0] + "-"
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    assert read_model_folder(folder).fingerprint == bare
    check_fingerprint(theirs=whole, ours=bare)
    check_fingerprint(theirs=whole, ours=whole)
    with pytest.raises(ValueError, match=r"another model: .* the weights are not those"):
        check_fingerprint(theirs=bare + "0" * 32, ours=whole)
    with pytest.raises(ValueError, match=r"another model: .*--block-size"):
        check_fingerprint(theirs="0" * 32 + whole[32:], ours=whole)


def test_the_jinja_file_comes_before_the_tokenizer_configuration(tmp_path: Path) -> None:
    """chat_template.jinja wins; a list gives all its templates by name; without either there is none."""
    assert read_chat_templates(write_folder(tmp_path)) == {}
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    found = read_chat_templates(write_folder(tmp_path, tokenizer_config={"chat_template": named}))
    assert found == {"rag": "r", "default": "d"}
    assert read_chat_templates(write_folder(tmp_path, template="file")) == {"default": "file"}


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    """A tokenizer saved with truncation and padding does not cut or fill prompts."""
    tokenizer = byte_tokenizer([])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    loaded = load_tokenizer(write_folder(tmp_path, tokenizer=tokenizer))
    assert loaded.encode("abcd").ids == list(b"abcd")


def test_named_tokens_are_special(tmp_path: Path) -> None:
    """A token that tokenizer_config.json names is special even where tokenizer.json does not say so."""
    tokenizer = byte_tokenizer([])
    tokenizer.add_tokens(["<eot>"])
    folder = write_folder(tmp_path, tokenizer=tokenizer, tokenizer_config={"eos_token": "<eot>"})
    loaded = load_tokenizer(folder)
    assert loaded.get_added_tokens_decoder()[261].special
    assert loaded.get_vocab_size() == 262
    assert loaded.decode([97, 261]) == "a"


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    """Such a folder is read through transformers and gives the same ids."""
    vocabulary = {spell(bytes([byte])): byte for byte in range(256)} | {"th": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("that", add_special_tokens=False).ids == [256, *b"at"]


def test_what_transformers_adds_behind_the_vocabulary_is_no_token(tmp_path: Path) -> None:
    """SDAR names its mask token with another text than it lists; the id that transformers makes up for it is unknown
    to the model, so the one that the files define is the mask."""
    vocabulary = {spell(bytes([byte])): byte for byte in range(256)} | {"<|endoftext|>": 256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "added_tokens.json").write_text('{"<MASK>": 257}')
    named = {"tokenizer_class": "GPT2Tokenizer", "mask_token": "<|MASK|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    config = LLADA2_CONFIG | {"architectures": ["SDARForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = read_model_folder(tmp_path)
    assert (folder.mask_token_id, folder.num_tokens) == (257, 258)
    assert 257 not in load_tokenizer(tmp_path).encode("<|MASK|>", add_special_tokens=False).ids


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    """A tokenizer that the folder brings as Python code is refused, without a question on the terminal."""
    marker = tmp_path / "it-ran"
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import GPT2Tokenizer as OwnTokenizer\n"
    (tmp_path / "tokenization_own.py").write_text(code)
    classes = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": classes})
    )
    with pytest.raises(ModelFolderError):
        load_tokenizer(tmp_path)
    assert not marker.exists()


def test_a_tokenizer_of_another_kind_loads(tmp_path: Path) -> None:
    """load_tokenizer takes any tokenizer.json; what cannot be detokenized is refused by the codec."""
    path = write_folder(tmp_path, tokenizer=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    assert load_tokenizer(path).get_vocab_size() == 1
