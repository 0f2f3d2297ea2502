"""`fdfo serve` as a child process, for commands that need services of their own for a while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator

from fdfo_client._errors import FdfoError

NUM_LOG_LINES = 20


@contextlib.asynccontextmanager
async def local_services(*flags: str) -> AsyncIterator[str]:
    """`fdfo serve` with these flags on free ports of this machine, for the time of the `async with`; gives the target.

    Raises FdfoError when the services do not start. It, and every FdfoError from inside, ends with the last lines of
    their log.
    """
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fdfo_client", "serve", "--json", "--port", "0", "--exit-with-parent", *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            assert process.stdout is not None, "it was asked for"
            line = await process.stdout.readline()
            if not line:
                raise FdfoError("the services did not start")
            yield json.loads(line)["targets"][0]
        except FdfoError as error:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            raise FdfoError("\n".join([str(error), "the last lines of their log:", *lines[-NUM_LOG_LINES:]])) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
