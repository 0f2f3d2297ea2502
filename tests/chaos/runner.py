"""Runs a scenario: services, load and events at once, then the checks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.grpc_proxy import GrpcProxy
from tests.chaos.hostile import Outcome, attack
from tests.chaos.load import Answer, Record, Sender
from tests.chaos.measures import Sample, figures_of, sample
from tests.chaos.scenario import Bound, Checks, Event, Load, Run, Scenario
from tests.chaos.services import ROOT, Refused, Say, Skipped, World, running

SAMPLE_EVERY_S = 1.0
CALM_CONCURRENCY = 64
SHOWN_FAULTS = 5


@dataclass
class RunResult:
    """What one run gave. `faults` are lines, each of which fails the scenario."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of failed requests


@dataclass
class Result:
    """What a scenario gave."""

    scenario: Scenario
    runs: list[RunResult]
    faults: list[str]
    skipped: str = ""
    took_s: float = 0.0

    @property
    def verdict(self) -> str:
        return "FAILED" if self.faults else "skipped" if self.skipped else "passed"

    def lines(self) -> list[str]:
        """Everything, for a person."""
        lines = [f"{self.scenario.name}: {self.verdict} in {self.took_s:.0f} s. {self.scenario.summary}"]
        for run in self.runs:
            figures = ", ".join(f"{name} {shown(value)}" for name, value in run.figures.items())
            lines += [f"  {run.name + ': ' if run.name else ''}{figures}", *(f"    {note}" for note in run.notes)]
        lines += [f"  {self.skipped}"] if self.skipped else []
        return lines + [f"  FAULT {fault}" for fault in self.faults]


def shown(value: float) -> str:
    """Whole numbers whole, others with three digits that say something."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


async def run_scenario(scenario: Scenario, say: Say, log: Path | None = None) -> Result:
    """All runs of a scenario, one after the other, then the bounds. `log` gets what the services say."""
    started_at = time.monotonic()
    result = Result(scenario, [], [])
    log = log or Path(tempfile.mkstemp(prefix=f"fdfo-chaos-{scenario.name}-", suffix=".log")[1])
    try:
        async with asyncio.timeout(scenario.limit_s):
            for run in scenario.runs:
                if run.name:
                    say(f"run: {run.name}")
                reference = result.runs[0].answers if result.runs else None
                result.runs.append(await _run(run, scenario, reference, log, say))
    except TimeoutError:
        result.faults.append(f"not over after {scenario.limit_s:g} s")
    except Skipped as reason:
        result.skipped = str(reason)
    except Exception as error:
        result.faults.append(f"{type(error).__name__}: {_first_of(error)}")
    for this in result.runs:
        result.faults += [f"{this.name + ': ' if this.name else ''}{fault}" for fault in this.faults]
    if not result.faults and not result.skipped:
        result.faults += [fault for bound in scenario.bounds if (fault := check_bound(bound, result.runs))]
    if result.faults:
        result.faults.append(f"the log of the services is {log}")
    result.took_s = time.monotonic() - started_at
    return result


def _first_of(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__


async def _run(run: Run, scenario: Scenario, reference: dict[int, Answer] | None, log: Path, say: Say) -> RunResult:
    draws = random.Random(run.load.seed)
    result = RunResult(run.name)
    try:
        async with running(run.services, log, say, draws) as world:
            expected = reference if scenario.checks.equal == "first run" else None
            if scenario.checks.equal == "calm":
                say("the calm run")
                expected = await _calm_answers(run.load, world)
            say("the load")
            await _disturbed(run, world, result, say)
            check_records(result, scenario.checks, expected)
            if left := await world.wait_idle(scenario.checks.idle_within_s):
                result.faults.append(f"after {scenario.checks.idle_within_s:g} s: {left}")
    except Refused as refusal:
        if not run.services.previous or "model" not in str(refusal):
            raise
        result.notes.append(f"refused: {refusal}")
    return result


async def _calm_answers(load: Load, world: World) -> dict[int, Answer]:
    """The answers of the same requests, all at once, undisturbed."""
    calm = dataclasses.replace(
        load, over_s=0.0, concurrency=CALM_CONCURRENCY, poison_token_id=0, hostile=0, at_each_scheduler=False
    )
    sender = Sender(calm, world.targets)
    await sender.run()
    if errors := [record.error for record in sender.records if not record.is_ok]:
        raise RuntimeError(f"the calm run failed: {errors[0]}")
    return {record.number: record.answer() for record in sender.records}


async def _disturbed(run: Run, world: World, result: RunResult, say: Say) -> None:
    """The load with its events, and what both gave."""
    sender = Sender(run.load, world.targets)
    samples: list[Sample] = []
    faults_at: list[float] = []
    over = asyncio.Event()
    pids = [child.pid for child in world.children]
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(world, sender, samples, say))
        happening = [tasks.create_task(_happen(event, world, faults_at, over)) for event in run.events]
        attacking = tasks.create_task(_attack(run.load, world)) if run.load.hostile else None
        if run.load.kind == "killed clients":
            await _run_killed_clients(run.load, world, result, say)
        else:
            await sender.run()
        if attacking is not None:
            _note_attack(await attacking, result)
        over.set()
        for event, task in zip(run.events, happening, strict=True):
            if not await task:
                result.faults.append(f"the load was over before {event.do} {event.who} at {event.at_s:g} s")
        watching.cancel()
    if not may_restart(run) and pids != [child.pid for child in world.children]:
        result.faults.append("a service died by itself")
    counters = [(await world.scheduler_info(child)).counters for child in world.schedulers if child in world.children]
    result.figures["aborts"] = sum(each.requests_aborted for each in counters)
    result.figures["restarts"] = sum(each.restarts for each in counters)
    result.figures["preemptions"] = sum(each.preemptions for each in counters)
    if run.load.kind != "killed clients":
        result.figures |= figures_of(sender, faults_at, samples)
        result.faults += [f"request {record.number}: {fault}" for record in sender.records if (fault := record.fault())]
        _note_failures(sender.records, result)
        result.answers = {record.number: record.answer() for record in sender.records if record.is_ok}
    counts = sum((proxy.counts for proxy in world.proxies if isinstance(proxy, GrpcProxy)), Counter())
    if counts:
        result.notes.append("proxies: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


def may_restart(run: Run) -> bool:
    """Whether a service of this run is meant to die."""
    return bool(run.load.poison_token_id) or any(event.do in ("kill", "terminate") for event in run.events)


async def _happen(event: Event, world: World, faults_at: list[float], over: asyncio.Event) -> bool:
    """One line of `events`, as often as it says, until the load is over; one that has begun is ended. False: none."""
    clock = asyncio.get_running_loop().time
    due_at, last_at = clock() + event.at_s, clock() + max(event.until_s, event.at_s)
    happened = False
    while due_at <= last_at:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due_at):
                await over.wait()
        if over.is_set():
            break
        happened = True
        faults_at.append(clock())
        await world.do(event)
        if not event.every_s:
            break
        while due_at <= clock():
            due_at += event.every_s
    return happened


async def _watch(world: World, sender: Sender, samples: list[Sample], say: Say) -> None:
    """Every second, a sample of each process and a line of what is going on."""
    clock = asyncio.get_running_loop().time
    tokens_before = 0
    while True:
        for child in world.children:
            samples.extend(sample(clock(), child.pid, child.name))
        if sender.records:
            under_way = len(sender.records) - sender.num_ended
            tokens_per_s = (sender.num_tokens - tokens_before) / SAMPLE_EVERY_S
            tokens_before = sender.num_tokens
            ended = f"{sender.num_ended} ended, {sender.num_failed} of them failed"
            say(f"{ended}, {under_way} under way, {tokens_per_s:.0f} tokens/s")
        await asyncio.sleep(SAMPLE_EVERY_S)


async def _attack(load: Load, world: World) -> Outcome:
    worker = world.workers[0]
    info = await world.worker_info(worker)
    return await attack(worker.target, world.targets[0], info, load.hostile, load.seed)


def _note_attack(outcome: Outcome, result: RunResult) -> None:
    result.notes.append(", ".join(f"{name} {count}" for name, count in sorted(outcome.answers.items())))
    result.faults += outcome.faults[:SHOWN_FAULTS]
    if len(outcome.faults) > SHOWN_FAULTS:
        result.faults.append(f"and {len(outcome.faults) - SHOWN_FAULTS} more such answers")


async def _run_killed_clients(load: Load, world: World, result: RunResult, say: Say) -> None:
    """Client processes, some at a time, each killed at a random moment after it has sent its requests."""
    draws = random.Random(load.seed)
    gate = asyncio.Semaphore(load.clients_at_once)
    num_clients = -(-load.requests // load.requests_per_client)

    async def one(number: int, life_s: float) -> None:
        words = (",".join(world.targets), str(load.requests_per_client), str(number))
        async with gate:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.chaos.killed_client", *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            try:
                assert process.stdout is not None
                if await process.stdout.readline() != b"sent\n":
                    raise RuntimeError("a client ended before it had sent its requests")
                await asyncio.sleep(life_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            say(f"client {number} of {num_clients} killed after {life_s:.1f} s")

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_clients):
            tasks.create_task(one(number, draws.uniform(*load.lives_s)))
    result.figures["clients killed"] = num_clients
    result.figures["requests"] = num_clients * load.requests_per_client


def _note_failures(records: Sequence[Record], result: RunResult) -> None:
    result.errors = [record.error for record in records if record.error]
    for error, count in Counter(result.errors).most_common(SHOWN_FAULTS):
        result.notes.append(f"failed {count} times: {error[:200]}")


def check_records(result: RunResult, checks: Checks, expected: dict[int, Answer] | None) -> None:
    """How many failed, and whether the answers are those expected."""
    failed = int(result.figures.get("failed", 0))
    if failed != checks.failed:
        result.faults.append(f"{failed} requests failed, not {checks.failed}")
    result.faults += [
        f"a request failed otherwise: {error[:200]}" for error in result.errors if checks.error not in error
    ]
    if expected is not None:
        missing = [number for number in expected if number not in result.answers]
        other = [number for number, answer in result.answers.items() if answer != expected.get(number)]
        if missing:
            result.faults.append(f"{len(missing)} of {len(expected)} have no answer, such as request {missing[0]}")
        if other:
            result.faults.append(f"{len(other)} answers are not those expected, such as that of request {other[0]}")


def check_bound(bound: Bound, runs: Sequence[RunResult]) -> str:
    by_name = {run.name: run for run in runs}
    run = by_name[bound.run] if bound.run else runs[-1]
    if bound.figure not in run.figures:
        return f"no figure {bound.figure!r}; there are {', '.join(run.figures)}"
    value, what = run.figures[bound.figure], f"{run.name + ': ' if run.name else ''}{bound.figure}"
    if bound.relative_to:
        value /= by_name[bound.relative_to].figures[bound.figure]
        what += f" relative to {bound.relative_to}"
    if bound.at_least is not None and value < bound.at_least:
        return f"{what} is {value:.3g}, not at least {bound.at_least:g}"
    if bound.at_most is not None and value > bound.at_most:
        return f"{what} is {value:.3g}, not at most {bound.at_most:g}"
    return ""
