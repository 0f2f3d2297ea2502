"""The training of the small model, on a micro shape: what it learns from, what it exports, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from common.model_folder import read_model_folder
from scheduler_svc.text import TextCodec
from tests.model.checkpoints import SHIPPED_MODEL
from tests.model.reference import reference_logits
from tools import train_tiny
from tools.tiny import tasks
from tools.tiny.evaluate import evaluate
from tools.tiny.model import BLOCK_SIZE, CONFIG
from tools.tiny.noise import MASK_ID, NUM_COPIES, NUM_SPECIAL, RIGHT_WEIGHT, NoisyBatch, noisy_batch
from tools.tiny.tokens import TURN, encode, make_tokenizer
from tools.train_tiny import Training, rate_at
from worker_svc.models.loading import load_model

MICRO: dict[str, Any] = CONFIG | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "num_experts": 4,
    "moe_intermediate_size": 8,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, few problems."""
    monkeypatch.setattr(train_tiny, "PROBLEMS_PER_STEP", 4)
    for name in ("NUM_TEST", "NUM_MEASURED", "NUM_SHIPPED"):
        monkeypatch.setattr(train_tiny, name, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights_of(training: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in training.model.published_tensors().items()}


def a_batch(seed: int = 0, count: int = 8) -> tuple[NoisyBatch, list[tuple[list[int], list[int]]]]:
    """A batch, and the (turn, answer) ids in it."""
    encoded = encode(make_tokenizer(512), tasks.fresh(seed, count))
    return noisy_batch(encoded, BLOCK_SIZE, 512, torch.Generator().manual_seed(seed)), encoded


def in_blocks(turn: list[int], answer: list[int]) -> torch.Tensor:
    tokens = turn + answer
    return torch.tensor(tokens + [0] * (-len(tokens) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)


def test_a_noisy_copy_hides_only_what_is_to_be_learned() -> None:
    """Prompts and clean units stay, masks are in answers, the second copy is a beginning, labels are right."""
    batch, encoded = a_batch()
    for row, (turn, answer) in enumerate(encoded):
        blocks, first = in_blocks(turn, answer), len(turn) // BLOCK_SIZE
        assert torch.equal(batch.ids[row, : len(blocks) - 1], blocks[:-1])
        for block in range(first, len(blocks)):
            at = batch.num_clean + NUM_COPIES * (block - first)
            ids, answer_weight = batch.ids[row, at : at + NUM_COPIES], batch.answer[row, at]
            num_prompt = max(0, len(turn) - block * BLOCK_SIZE)
            assert (answer_weight[:num_prompt] == 0).all() and (answer_weight[num_prompt:] > 0).all()
            assert (ids[:, :num_prompt] == blocks[block, :num_prompt]).all()
            assert (batch.labels[row, at : at + NUM_COPIES] == blocks[block]).all()
            assert ((ids[:2] == blocks[block]) | (ids[:2] == MASK_ID)).all()
            masked = (ids[1] == MASK_ID).int()
            assert (masked.diff() >= 0).all() and masked[-1] == 1
            assert (ids[2][ids[2] != blocks[block]] != 0).all()


def test_the_third_copy_has_wrong_tokens_and_right_ones_weigh_little() -> None:
    """Wrong tokens and masks weigh what their place does, right tokens a fifth in the third copy and nothing else."""
    batch, _ = a_batch(count=40)
    ids, labels, answer, weights = (
        part[:, batch.num_clean :].view(len(part), -1, NUM_COPIES, BLOCK_SIZE)
        for part in (batch.ids, batch.labels, batch.answer, batch.weights())
    )
    wrong = (ids != labels) & (ids != MASK_ID)
    assert not wrong[:, :, :2].any()
    assert 0.02 < float((wrong & (answer > 0))[:, :, 2].sum() / (answer > 0)[:, :, 2].sum()) < 0.3
    assert (ids[wrong] >= NUM_SPECIAL).all()
    assert torch.equal(weights[ids != labels], answer[ids != labels])
    assert not weights[:, :, :2][(ids == labels)[:, :, :2]].any()
    right = (ids == labels)[:, :, 2]
    assert torch.equal(weights[:, :, 2][right], answer[:, :, 2][right] * RIGHT_WEIGHT)
    assert not batch.weights()[:, : batch.num_clean].any()


def test_the_training_forward_is_that_of_the_exported_checkpoint(tmp_path: Path) -> None:
    """Logits of a noisy copy are a plain reference's on its prefix and itself, by the exported tensors, which the
    worker's loader takes."""
    training = Training(1, MICRO)
    for _ in range(2):
        training.step()
    training.export(tmp_path)
    tensors = weights_of(training)
    assert any(tensor.any() for name, tensor in tensors.items() if name.endswith("expert_bias"))
    loaded = load_model(read_model_folder(tmp_path), dtype=None, device="cpu").checkpoint_tensors(merged_experts=False)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())

    batch, encoded = a_batch(seed=5, count=3)
    with torch.no_grad():
        logits = training.model(batch, torch.ones_like(batch.ids, dtype=torch.bool), torch.float32)
    logits = logits.view(*batch.ids.shape, -1)
    for row, (turn, answer) in enumerate(encoded):
        blocks, first = in_blocks(turn, answer), len(turn) // BLOCK_SIZE
        for unit in range(batch.num_clean, batch.num_clean + NUM_COPIES * (len(blocks) - first)):
            block = first + (unit - batch.num_clean) // NUM_COPIES
            ids = [*blocks[:block].flatten().tolist(), *batch.ids[row, unit].tolist()]
            expected = reference_logits(tensors, MICRO, ids, BLOCK_SIZE)[-BLOCK_SIZE:]
            torch.testing.assert_close(logits[row, unit], expected, atol=1e-4, rtol=0)


def test_the_loss_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps at the full rate take it from that of a guess to well below."""
    monkeypatch.setattr(train_tiny, "RATES", ((0, 1.0), (20, 1.0)))
    training = Training(1, MICRO)
    losses = [training.step() for _ in range(20)]
    assert losses[0] > 6.3
    assert sum(losses[-5:]) / 5 < 5.3


@pytest.mark.parametrize("copy", [0, 1])
def test_guesses_replace_third_copies(monkeypatch: pytest.MonkeyPatch, copy: int) -> None:
    """In three of four problems they are the first or second ones with some masks guessed, in the fourth as drawn."""
    monkeypatch.setattr(train_tiny, "GUESSES", ((0, copy, 0.2, 0.8), (1, 2, 0.0, 0.0)))
    training = Training(1, MICRO)
    batch, _ = a_batch(seed=2)
    before = batch.ids.clone()
    with torch.no_grad():
        training.model.lm_head.mul_(100)  # sure of something everywhere
    training._guess(batch, torch.Generator().manual_seed(0))
    source, third = (batch.ids[:, batch.num_clean + place :: NUM_COPIES] for place in (copy, 2))
    is_guess = third != source
    is_guess[::4] = False
    assert is_guess.any() and (source[is_guess] == MASK_ID).all()
    assert (batch.answer[:, batch.num_clean :: NUM_COPIES][is_guess] > 0).all()
    assert torch.equal(batch.ids[::4], before[::4])
    batch.ids[:, batch.num_clean + 2 :: NUM_COPIES] = before[:, batch.num_clean + 2 :: NUM_COPIES]
    assert torch.equal(batch.ids, before)


def test_a_resumed_run_equals_an_unbroken_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four steps, and two, a file and two more: the same losses and weights bit for bit, with guesses and decay."""
    monkeypatch.setattr(train_tiny, "GUESSES", ((1, 0, 0.0, 0.1), (3, 1, 0.0, 0.1)))
    monkeypatch.setattr(train_tiny, "RATES", ((0, 1.0), (4, 0.0)))
    whole, broken = Training(3, MICRO), Training(3, MICRO)
    losses = [whole.step() for _ in range(4)]
    assert [broken.step() for _ in range(2)] == losses[:2]
    broken.save(tmp_path / "training.pt")
    resumed = Training(3, MICRO)
    resumed.load(tmp_path / "training.pt")
    assert [resumed.step() for _ in range(2)] == losses[2:]
    expected = weights_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(resumed).items())
    assert Training(4, MICRO).step() != losses[0]
    with pytest.raises(ValueError, match=r"training\.pt is of seed 3: give --seed 3 or another --out"):
        Training(4, MICRO).load(tmp_path / "training.pt")


def test_the_rate_goes_in_straight_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point is met, and half way between two of them is half of both."""
    monkeypatch.setattr(train_tiny, "RATES", ((0, 0.5), (10, 1.0), (20, 1.0), (40, 0.0)))
    assert [rate_at(step) for step in (0, 5, 10, 15, 20, 30, 40)] == [0.5, 0.75, 1, 1, 1, 0.5, 0]


def test_sigterm_leaves_a_file_to_go_on_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step that runs is finished and saved; the same command goes on after it to a folder that is served."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(train_tiny, "RATES", ((0, 1.0), (2, 0.0)))
    monkeypatch.setattr(Training, "__init__", _micro_init)
    step = Training.step

    def stopped(self: Training) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    command = ["--out", str(tmp_path / "micro"), "--threads", "1"]
    try:
        monkeypatch.setattr(Training, "step", stopped)
        assert train_tiny.main(command) == 3
        assert "run the same command again" in capsys.readouterr().err
        monkeypatch.setattr(Training, "step", step)
        assert train_tiny.main(command) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "going on after step 1" in capsys.readouterr().out
    folder = read_model_folder(tmp_path / "micro")
    assert (folder.block_size, folder.mask_token_id, set(folder.stop_token_ids)) == (32, 1, {0, 4})
    lines = (folder.path / "problems.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [
        problem.prompt for problem in tasks.fresh(train_tiny.SHIPPED_SEED, 3)
    ]
    assert "| `LowConfidence` | 0 of 3 |" in (folder.path / "README.md").read_text()


_init = Training.__init__


def _micro_init(self: Training, seed: int) -> None:
    _init(self, seed, MICRO)


def test_a_template_renders_the_turn_that_was_learned(tmp_path: Path) -> None:
    """What a scheduler makes of a message is the turn of the training, id by id."""
    training = Training(1, MICRO)
    training.export(tmp_path)
    prompt = "Start at 5: +3 -2 +9"
    codec = TextCodec(tmp_path)
    assert codec.render_chat([("user", prompt)]) == TURN.format(prompt=prompt)
    (pair,) = encode(training.tokenizer, [tasks.Problem("total", prompt, "5+3=8")])
    assert codec.encode_chat([("user", prompt)]) == pair[0]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(pair[1]) == "5+3=8"
    assert tokenizer.get_vocab_size() == 512


def test_the_evaluation_counts_right_answers_and_forwards() -> None:
    """The shipped model on a few of its problems: mostly right, and every block has a forward for its KV."""
    problems = [
        tasks.Problem("count", "Count from 3 to 7.", "3 4 5 6 7"),
        tasks.Problem("none", "Count from 3 to 7.", "8"),
    ]
    figures = evaluate(SHIPPED_MODEL, problems, "LowConfidence")
    assert dict(figures.num_right) == {"count": 1, "none": 0}
    assert dict(figures.num_asked) == {"count": 1, "none": 1}
    assert min(figures.forwards) >= 2 and len(figures.forwards) == 2
    assert figures.percentile(0) <= figures.mean() <= figures.percentile(100)
    assert figures.text().startswith("LowConfidence: 1 of 2 exact (count 1/1, none 0/1); forwards per block: mean ")
