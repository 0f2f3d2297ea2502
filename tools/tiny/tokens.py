"""The tokenizer of the small model: a byte-level BPE with single digits, trained on the problems' own text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny.tasks import ALL, Problem, problems

END, MASK, ROLE_END = "<|endoftext|>", "<|mask|>", "<|role_end|>"
SPECIAL_TOKENS = (END, MASK, "<role>", "</role>", ROLE_END)
NUM_TRAINING_PROBLEMS = 20_000
TRAINING_SEED = 5

# One user turn and the mark that the answer begins, as the template renders them.
TURN = "<role>HUMAN</role>{prompt}<|role_end|><role>ASSISTANT</role>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role']=='user' %}<role>HUMAN</role>{{ m['content'] }}<|role_end|>"
    "{% elif m['role']=='assistant' %}<role>ASSISTANT</role>{{ m['content'] }}<|role_end|>"
    "{% else %}<role>SYSTEM</role>{{ m['content'] }}<|role_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
)
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": END,
    "mask_token": MASK,
    "add_bos_token": False,
    "add_eos_token": False,
    "model_max_length": 4096,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


@cache
def make_tokenizer(vocab_size: int) -> Tokenizer:
    """The special tokens first, then all 256 bytes, then what is most often joined in the problems; always the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawn = islice(problems(TRAINING_SEED, ALL), NUM_TRAINING_PROBLEMS)
    texts = (f"HUMAN\n{problem.prompt}\nASSISTANT\n{problem.answer}" for problem in drawn)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, some: Sequence[Problem]) -> list[tuple[list[int], list[int]]]:
    """Of each problem the ids of its turn, and those of its answer with the end of the turn."""
    turns = tokenizer.encode_batch([TURN.format(prompt=problem.prompt) for problem in some])
    answers = tokenizer.encode_batch([problem.answer + ROLE_END for problem in some])
    return [(turn.ids, answer.ids) for turn, answer in zip(turns, answers, strict=True)]
