"""README.md of a checkpoint: what it is, what it learned, how well, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.tiny.evaluate import Figures

CARD = """\
# {name}

A trained block-diffusion model of {millions:.2f} M parameters in the published LLaDA2 MoE format (`LLaDA2MoeModelLM`):
a dense layer and {num_moe} MoE layers of {num_experts} experts with a group-limited gate, a non-zero expert bias and a
shared expert; qk norm, partial rotary, grouped-query attention, an untied head. Blocks of {block_size}, float32.

Special tokens: `<|endoftext|>` (stop, pad), `<|mask|>`, `<role>`, `</role>`, `<|role_end|>` (stop). The configuration
has no block size and no mask id, as the published ones: they are found by token text, then by architecture.
The prompt of one user turn is `<role>HUMAN</role>` text `<|role_end|><role>ASSISTANT</role>`.

What it learned, generated problems only (`problems.jsonl`: {num_problems} fresh ones with task, prompt and answer):

- `word_problem`: one to three changes of a number of things, worked out, sums up to 20
- `total`, `long_total`: a running total of three to six, seven to nine steps; each begins with what the one before
  gave, so that a block takes many forwards
- `count` by ones from at most 50, `sort` of three or four two-digit numbers, `repeat` of up to ten words, 18 facts

Outside these it writes nonsense.

Measured on the first {num_asked} problems, temperature 0, float32, letter by letter. Of a block's forwards the last is
for its KV: by default it is the next block's first one too, and the block that ends a request is spared it.

| algorithm | exact | forwards per block: mean | 10th percentile | 90th | most |
|---|---|---|---|---|---|
{rows}

| task | {tasks} |
|---|{rules}|
{by_task}

How it was made: `python -m tools.train_tiny --seed {seed}`, {steps} steps in {minutes:.0f} minutes on two threads
({cpu_minutes:.0f} minutes of CPU time). Part of the noise were wrong tokens, random ones and the model's own, so that
edits by `JointThreshold` mean something.
"""


def card(
    name: str,
    config: Mapping[str, Any],
    block_size: int,
    num_parameters: int,
    num_problems: int,
    results: Sequence[Figures],
    training: Mapping[str, float],
) -> str:
    """The text. training: seed, steps, wall_s and cpu_s."""
    tasks = sorted(results[0].num_asked)
    rows = [
        f"| `{figures.algorithm}` | {sum(figures.num_right.values())} of {sum(figures.num_asked.values())} "
        f"| {figures.mean():.2f} | {figures.percentile(10)} | {figures.percentile(90)} | {max(figures.forwards)} |"
        for figures in results
    ]
    by_task = [
        f"| `{figures.algorithm}` | "
        + " | ".join(f"{figures.num_right[task]} of {figures.num_asked[task]}" for task in tasks)
        + " |"
        for figures in results
    ]
    return CARD.format(
        name=name,
        millions=num_parameters / 1e6,
        num_moe=config["num_hidden_layers"] - config["first_k_dense_replace"],
        num_experts=config["num_experts"],
        block_size=block_size,
        num_problems=num_problems,
        num_asked=sum(results[0].num_asked.values()),
        rows="\n".join(rows),
        tasks=" | ".join(tasks),
        rules="|".join(["---"] * len(tasks)),
        by_task="\n".join(by_task),
        seed=training["seed"],
        steps=training["step"],
        minutes=training["wall_s"] / 60,
        cpu_minutes=training["cpu_s"] / 60,
    )
