"""A client process that is made to be killed: many streams, some of them aborted at random moments.

    python -m tests.chaos.killed_client TARGETS NUM_REQUESTS SEED

A third of the requests is cancelled, a third aborted by its id, a third runs until the process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

from fdfo_client import AsyncClient, FdfoError

LONGEST_S = 1.5  # until an abort


async def one(client: AsyncClient, number: int, seed: int) -> None:
    """One request, and its end."""
    draws = random.Random(f"{seed}/{number}")
    name = f"killed-{seed}-{number}"
    prompt = " ".join(f"Count from {number} to {number + 9}." for _ in range(draws.choice([1, 1, 8])))
    limit = draws.randint(200, 2000)

    async def read() -> None:
        with contextlib.suppress(FdfoError):
            await client.generate(
                prompt, max_new_tokens=limit, ignore_eos=True, temperature=1.0, seed=number, request_id=name
            )

    reading = asyncio.create_task(read())
    await asyncio.wait({reading}, timeout=draws.uniform(0, LONGEST_S))
    match number % 3:
        case 0:
            reading.cancel()
        case 1:
            with contextlib.suppress(FdfoError):
                await client.abort(name)
    await asyncio.wait({reading})


async def main(targets: str, num_requests: int, seed: int) -> None:
    """Send all at once."""
    async with AsyncClient(targets) as client:
        running = [asyncio.create_task(one(client, number, seed)) for number in range(num_requests)]
        await asyncio.sleep(0)
        sys.stdout.write("sent\n")
        sys.stdout.flush()
        await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
