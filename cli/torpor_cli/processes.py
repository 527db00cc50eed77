"""Child processes of a mesh: started in order, restarted when they die, stopped in order.

A child runs in a session of its own, so that Ctrl-C reaches only this process, which then stops the rest in order; and
through `launch`, so that it ends also when this process is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torpor_services.backoff import Backoff
from torpor_services.clock import SystemClock

from torpor_cli.errors import CommandFailed

STOP_TIMEOUT_S = 25.0
# The exit code of our services for settings that are wrong: starting them again would not help.
_WRONG_SETTINGS = 2


@dataclass
class Child:
    """One service process."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    on_event: Callable[[str], None] = lambda _: None
    lost_with_it: str = ""  # what its end cannot be mended by starting it again; empty: it can
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    _keeper: asyncio.Task[None] | None = None
    _stopping: bool = False
    _failed: asyncio.Future[None] = field(init=False)

    async def start(self) -> None:
        """Starts it and keeps it running until `stop`."""
        self._failed = asyncio.get_running_loop().create_future()
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    async def wait_failed(self) -> None:
        """Until it can no longer be kept running; raises CommandFailed."""
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that was not enough in time."""
        self._stopping = True
        if self._keeper:
            self._keeper.cancel()
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    async def _spawn(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *python("torpor_cli.launch", str(os.getpid()), *self.command),
                env=dict(self.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _keep(self) -> None:
        backoff = Backoff(SystemClock(), initial_s=0.2, max_s=10.0)
        while True:
            assert self.process
            backoff.succeeded()
            code = await self.process.wait()
            if self._stopping:
                return
            if code == _WRONG_SETTINGS:
                self._failed.set_exception(CommandFailed(f"{self.name} cannot start: {self.last_line()}"))
                return
            if self.lost_with_it:
                lost = f"{self.name} ended with {code}: {self.last_line()}; {self.lost_with_it}"
                self._failed.set_exception(CommandFailed(lost))
                return
            self.on_event(f"{self.name} ended with {code}: {self.last_line()}; starting it again")
            await asyncio.sleep(backoff.next_delay_s())
            self.restarts += 1
            await self._spawn()

    def last_line(self) -> str:
        """The end of its log, for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 4096))
                lines = file.read().decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return "no log"
        return lines[-1] if lines else f"nothing in {self.log}"


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    # -P: a file of the working directory, such as an operator.py, must not stand for one of the standard library.
    return [sys.executable, "-P", "-m", module, *arguments]


async def run_command(arguments: Sequence[str], kubeconfig: Path | None, context: str) -> None:
    """A command of ours in a short-lived process: what it imports (55 MB) does not stay. Raises CommandFailed."""
    command = python("torpor_cli", *arguments)
    if kubeconfig is not None:
        command += ["--kubeconfig", str(kubeconfig)]
    if context:
        command += ["--context", context]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise CommandFailed(errors.decode("utf-8", "replace").strip().removeprefix("torpor: ") or "it failed")
