"""What is sent, and what became of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bench.loads import random_prompts
from fdfo_client import AsyncClient, Committed, FdfoError, Finished, Started
from tests.chaos.scenario import Load
from tests.chaos.services import MODELS

Options: TypeAlias = dict[str, Any]  # of AsyncClient.stream
Answer: TypeAlias = tuple[object, ...]

MULTI_BYTE = ("Repeat: Zoë Łukasz Ünal", "Sort: 三 二 一", "Count the 🍪🍪🍪", "Wiederhole: größer, süß, heiß")


@dataclass(eq=False)
class Record:
    """One request. Times are seconds of the event loop's clock; `events_at` are those of all its events."""

    number: int
    target: str
    sent_at: float
    ended_at: float = 0.0
    events_at: list[float] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    num_finished: int = 0
    error: str = ""

    @property
    def is_ok(self) -> bool:
        return self.finished is not None and not self.error

    def answer(self) -> Answer:
        """What must not depend on company or faults."""
        end = self.finished
        assert end is not None
        return self.text, tuple(self.token_ids), end.reason, end.stop_token_id, end.stop_string

    def fault(self) -> str:
        """What is wrong with the order or the count of what came; "" if nothing."""
        if self.num_finished > 1:
            return "two Finished events"
        if self.finished is not None and self.finished.usage.completion_tokens != len(self.token_ids):
            return f"{len(self.token_ids)} tokens came, usage says {self.finished.usage.completion_tokens}"
        return ""


def requests(load: Load) -> Iterator[Options]:
    """The same ones for the same load; without end where it has a duration."""
    count = None if load.duration_s else load.requests
    numbers = itertools.count() if count is None else range(count)
    if load.kind == "random":
        prompts = random_prompts(64, load.prompt_tokens, load.seed)
        for number in numbers:
            yield {
                "prompt_ids": prompts[number % len(prompts)],
                "max_new_tokens": load.output_tokens[0],
                "ignore_eos": True,
                "seed": number,
            }
        return
    prompts_of_problems = problems()
    for number in numbers:
        yield _mixed(load, number, prompts_of_problems)


def _mixed(load: Load, number: int, prompts: Sequence[str]) -> Options:
    draws = random.Random(f"{load.seed}/{number}")
    prompt = prompts[number % len(prompts)]
    options: Options = {"max_new_tokens": draws.randint(*load.output_tokens), "ignore_eos": True, "seed": number}
    match number % 8:
        case 1:
            options.update(temperature=1.0, top_k=40, top_p=0.9)
        case 2:
            options.update(algorithm="JointThreshold")
        case 3:
            options.update(ignore_eos=False)
        case 4:  # random bytes: parts of characters are held back, stop strings come late
            prompt = MULTI_BYTE[number // 8 % len(MULTI_BYTE)]
            options.update(temperature=1.6, stop=["ë", "zz", "~~"])
        case 5:
            prompt = " ".join(prompts[(number + offset) % len(prompts)] for offset in range(8))
        case 6:
            options.update(temperature=0.7, min_p=0.05, stop=["100", "= 9", "seven."])
        case 7:
            options.update(algorithm_params={"threshold": 0.6}, stop=["= 17", "number of months"])
    return {**options, "messages": [{"role": "user", "content": prompt}]}


def problems() -> list[str]:
    """The prompts that ship with the model."""
    lines = (MODELS["tiny"] / "problems.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


class Sender:
    """Sends a load to schedulers and keeps a record of each request."""

    def __init__(self, load: Load, targets: Sequence[str]) -> None:
        self.load = load
        self.records: list[Record] = []
        self.num_ended = 0
        self.num_tokens = 0
        self.started_at = 0.0
        self.wall_s = 0.0
        self._targets = list(targets)

    @property
    def num_failed(self) -> int:
        return sum(bool(record.error) for record in self.records)

    async def run(self) -> None:
        """Send everything and wait for the ends."""
        load = self.load
        clock = asyncio.get_running_loop().time
        self.started_at = clock()
        groups = [[target] for target in self._targets] if load.at_each_scheduler else [self._targets]
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(self._send_all(group))
            if load.poison_token_id:
                poison: Options = {"prompt_ids": [load.poison_token_id] * 8, "max_new_tokens": 64}
                tasks.create_task(self._send_alone(poison))
        self.wall_s = clock() - self.started_at

    async def _send_all(self, targets: list[str]) -> None:
        load, waiting = self.load, enumerate(requests(self.load))
        async with AsyncClient(targets) as client, asyncio.TaskGroup() as tasks:
            if load.over_s:
                for number, options in waiting:
                    tasks.create_task(self._send(client, number, options))
                    await asyncio.sleep(load.over_s / load.requests)
                return

            async def one_after_the_other() -> None:
                for number, options in waiting:
                    await self._send(client, number, options)
                    if load.duration_s and asyncio.get_running_loop().time() >= self.started_at + load.duration_s:
                        return

            for _ in range(load.concurrency):
                tasks.create_task(one_after_the_other())

    async def _send_alone(self, options: Options) -> None:
        async with AsyncClient(self._targets) as client:
            await self._send(client, -1, options)

    async def _send(self, client: AsyncClient, number: int, options: Options) -> None:
        clock = asyncio.get_running_loop().time
        record = Record(number, client.targets[0], clock())
        self.records.append(record)
        if self.load.timeout_s:
            options = {**options, "timeout": self.load.timeout_s}
        try:
            async for event in client.stream(**options):
                record.events_at.append(clock())
                match event:
                    case Started():
                        pass
                    case Committed():
                        record.text += event.text
                        record.token_ids += event.token_ids
                        record.commits.append((clock(), len(event.token_ids)))
                        self.num_tokens += len(event.token_ids)
                    case Finished():
                        record.finished = event
                        record.num_finished += 1
        except FdfoError as error:
            record.error = " ".join(f"{type(error).__name__}: {error}".split())
        record.ended_at = clock()
        self.num_ended += 1
