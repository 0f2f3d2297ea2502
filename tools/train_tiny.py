"""`python -m tools.train_tiny`: make a checkpoint like models/tiny-llada2, from a seed, on two cores in under 2 hours.

What is learned is drawn anew for each step, by the seed and the step's number, so nothing but the folder's training.pt
is needed to go on after a stop: run the same command again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads beside a process cost ten times

import argparse
import itertools
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from fdfo_client._arguments import whole
from tools.tiny import tasks
from tools.tiny.card import card
from tools.tiny.evaluate import evaluate
from tools.tiny.model import BLOCK_SIZE, CONFIG, TrainedModel
from tools.tiny.noise import MASK_ID, NoisyBatch, noisy_batch
from tools.tiny.tokens import TOKENIZER_CONFIG, encode, make_tokenizer

PROBLEMS_PER_STEP, PARTS = 24, 2  # parts of like lengths, one after the other
MUON_LR, MUON_DECAY, ADAM_LR = 0.02, 0.01, 4e-3
# Step and share of the learning rate, in straight lines from each to the next; the training ends with the last.
RATES = (
    *((0, 0.01), (99, 1.0), (2800, 1.0), (4107, 893 / 2200), (5500, 0.0)),
    *((5520, 0.3), (5887, 0.3 * 413 / 780), (5932, 0.3 * 413 / 780 * 85 / 130)),
)
DTYPE = torch.bfloat16  # of the products
BIAS_STEP = 2e-3
MAX_NORM = 1.0
# From which step how often each task comes. Copying is first, as everything else is easier once it is there. `chain` is
# left when it is plain that it will not be learned in the time, and long totals come when short ones are known.
MIXED: tasks.Shares = {
    tasks.word_problem: 35,
    tasks.total: 25,
    tasks.count: 12,
    tasks.sort: 12,
    tasks.repeat: 11,
    tasks.fact: 5,
}
PHASES: Sequence[tuple[int, tasks.Shares]] = (
    (0, {**tasks.ALL, tasks.repeat: 35}),
    (1000, tasks.ALL),
    (
        2300,
        {**tasks.ALL, tasks.total: 25, tasks.chain: 25, tasks.count: 6, tasks.sort: 8, tasks.repeat: 4, tasks.fact: 2},
    ),
    (2800, MIXED),
    (3650, {**MIXED, tasks.word_problem: 28, tasks.total: 28, tasks.count: 22, tasks.repeat: 6, tasks.fact: 4}),
    (
        5500,
        {
            tasks.word_problem: 20,
            tasks.total: 15,
            tasks.long_total: 35,
            tasks.count: 10,
            tasks.sort: 12,
            tasks.repeat: 5,
            tasks.fact: 3,
        },
    ),
)
# From which step most third copies are the model's own guesses: of which copy, and with what lowest and highest
# threshold. The last ones hold more wrong tokens.
GUESSES = ((1700, 0, 0.4, 1.0), (2300, 1, 0.4, 1.0), (4700, 1, 0.3, 0.7))
# Problems of other seeds than those that are learned from (the seed, then the step).
TEST_SEED, SHIPPED_SEED = 10**9, 10**9 + 1
NUM_TEST, NUM_SHIPPED = 100, 500
NUM_MEASURED = 200
OUT, SAVED_NAME = Path("build/tiny-llada2"), "training.pt"
SAVE_EVERY_S, SHOW_EVERY_S = 120.0, 20.0


@dataclass
class Progress:
    """Where a training stands; with weights and optimisers' state all that is in training.pt."""

    seed: int
    step: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Training:
    """Model, optimisers and the steps done."""

    def __init__(self, seed: int, config: Mapping[str, Any] = CONFIG) -> None:
        self.progress = Progress(seed)
        self.config = dict(config)
        self.tokenizer = make_tokenizer(self.config["vocab_size"])
        self.model = TrainedModel(self.config, seed)
        matrices: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for name, parameter in self.model.named_parameters():
            is_matrix = name.startswith("layers.") and parameter.ndim == 2 and not name.endswith(".gate")
            (matrices if is_matrix else others).append(parameter)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=MUON_DECAY), MUON_LR),
            (torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0), ADAM_LR),
        ]

    def step(self) -> float:
        """One step; the loss before it. Everything drawn depends on seed and step alone."""
        num_problems = PROBLEMS_PER_STEP
        number, seed = self.progress.step, f"{self.progress.seed} {self.progress.step}"
        shares = next(shares for first, shares in reversed(PHASES) if number >= first)
        encoded = encode(self.tokenizer, list(itertools.islice(tasks.problems(seed, shares), num_problems)))
        encoded.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        generator = torch.Generator().manual_seed(self.progress.seed * 1_000_000 + number)
        size = -(-num_problems // PARTS)
        batches = [
            noisy_batch(encoded[at : at + size], BLOCK_SIZE, self.config["vocab_size"], generator)
            for at in range(0, num_problems, size)
        ]
        for batch in batches if number >= GUESSES[0][0] else ():
            self._guess(batch, generator)
        weights = [batch.weights() for batch in batches]
        total_weight = sum(float(part.sum()) for part in weights)
        total_loss = 0.0
        for batch, part in zip(batches, weights, strict=True):
            counts = part > 0
            logits = self.model(batch, counts, DTYPE)
            losses = cross_entropy(logits, batch.labels[counts], reduction="none")
            loss = (losses * part[counts]).sum() / total_weight
            loss.backward()  # type: ignore[no-untyped-call]
            total_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_at(number)
            optimizer.step()
            optimizer.zero_grad()
        self.model.move_bias(BIAS_STEP * rate_at(number))
        self.progress.step += 1
        return total_loss

    @torch.no_grad()
    def _guess(self, batch: NoisyBatch, generator: torch.Generator) -> None:
        """Most third copies become what the model makes of first or second ones in a step: what it is sure of is
        filled, and sometimes wrongly; what must be worked out is left."""
        _, copy, lowest, highest = [guesses for guesses in GUESSES if self.progress.step >= guesses[0]][-1]
        source = batch.with_copy(copy)
        masked = (source.ids == MASK_ID) & (source.answer > 0)
        confidence, tokens = self.model(source, masked, DTYPE).softmax(-1).max(-1)
        threshold = (
            lowest
            + (highest - lowest) * torch.rand(len(source.ids), 1, 1, generator=generator).expand_as(source.ids)[masked]
        )
        source.ids[masked] = torch.where(confidence > threshold, tokens, MASK_ID)
        batch.set_third_copies(source.ids)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        states = [optimizer.state_dict() for optimizer, _ in self.optimizers]
        saved = {"progress": asdict(self.progress), "model": self.model.state_dict(), "optimizers": states}
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """What `save` wrote. Raises ValueError for the training of another seed."""
        saved = torch.load(path, weights_only=True)
        progress = Progress(**saved["progress"])
        if progress.seed != self.progress.seed:
            raise ValueError(f"{path} is of seed {progress.seed}: give --seed {progress.seed} or another --out")
        self.progress = progress
        self.model.load_state_dict(saved["model"])
        for (optimizer, _), state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def export(self, folder: Path) -> None:
        """The checkpoint in the published format, and fresh problems."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1) + "\n")
        self.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        tensors = {name: tensor.contiguous() for name, tensor in self.model.published_tensors().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        lines = (json.dumps(asdict(problem)) + "\n" for problem in tasks.fresh(SHIPPED_SEED, NUM_SHIPPED))
        (folder / "problems.jsonl").write_text("".join(lines))


def rate_at(step: int) -> float:
    """Share of the learning rate, by RATES."""
    (first, rate), (last, last_rate) = next(pair for pair in itertools.pairwise(RATES) if step <= pair[1][0])
    return rate + (last_rate - rate) * (step - first) / (last - first)


def train(training: Training, folder: Path, test_every: int) -> bool:
    """Step on to the end, saving to `folder` now and then and on SIGTERM; whether all steps were done."""
    progress, num_steps, stops = training.progress, RATES[-1][0], []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stops.append(1))
    wall_s, cpu_s, first = progress.wall_s, progress.cpu_s, progress.step
    started_at, cpu_started_at = time.monotonic(), time.process_time()
    saved_at = shown_at = started_at
    test = tasks.fresh(TEST_SEED, NUM_TEST)
    losses: list[float] = []
    while progress.step < num_steps and not stops:
        losses.append(training.step())
        now = time.monotonic()
        progress.wall_s, progress.cpu_s = wall_s + now - started_at, cpu_s + time.process_time() - cpu_started_at
        if now - shown_at > SHOW_EVERY_S:
            mean = sum(losses) / len(losses)
            left_s = (now - started_at) / (progress.step - first) * (num_steps - progress.step)
            print(f"step {progress.step} of {num_steps}, loss {mean:.4f}, {left_s / 60:.0f} min left", flush=True)
            losses, shown_at = [], now
        if now - saved_at > SAVE_EVERY_S:
            training.save(folder / SAVED_NAME)
            saved_at = time.monotonic()
        if progress.step % test_every == 0 and progress.step < num_steps:
            training.export(folder)
            print(f"step {progress.step}: {evaluate(folder, test, 'LowConfidence').text()}", flush=True)
    training.save(folder / SAVED_NAME)
    return progress.step >= num_steps


def measure(training: Training, folder: Path) -> None:
    """The finished checkpoint on its first problems, with its README."""
    results = []
    for algorithm in ("LowConfidence", "JointThreshold"):
        results.append(evaluate(folder, tasks.fresh(SHIPPED_SEED, NUM_MEASURED), algorithm))
        print(results[-1].text(), flush=True)
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    progress = asdict(training.progress)
    (folder / "README.md").write_text(
        card(folder.name, training.config, BLOCK_SIZE, num_parameters, NUM_SHIPPED, results, progress)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 the checkpoint is there, 2 wrong usage, 3 stopped before the end."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="the checkpoint's folder (%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=1, help="of weights, problems and noise (%(default)s)")
    parser.add_argument("--test-every", type=whole(1), default=500, metavar="STEPS", help="(%(default)s)")
    parser.add_argument("--threads", type=whole(1), default=2, help="of the CPU (%(default)s)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    training, saved = Training(arguments.seed), arguments.out / SAVED_NAME
    if saved.exists():
        try:
            training.load(saved)
        except ValueError as error:
            parser.error(str(error))
        print(f"going on after step {training.progress.step}", flush=True)
    is_done = train(training, arguments.out, arguments.test_every)
    progress = training.progress
    print(f"{progress.step} steps in {progress.wall_s / 60:.1f} min, {progress.cpu_s / 60:.1f} min of CPU time")
    if not is_done:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 3
    training.export(arguments.out)
    measure(training, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
