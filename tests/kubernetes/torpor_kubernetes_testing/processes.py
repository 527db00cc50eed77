"""One server process of a test: its log, its early death, its end.

A process started here dies with the one that started it, however that ends (`kill -9` too): the kernel sends it
SIGKILL when the *thread* that started it ends, so start servers from a thread that lives as long as they should,
as the main thread does. Linux only.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

LOG_TAIL_BYTES = 3_000
READY_POLL_S = 0.03  # A server that is starting cannot be waited for on an event.
STOP_PATIENCE_S = 10.0

# Run in a fresh interpreter instead of `preexec_fn`, which may deadlock in a process with threads (gRPC's).
# 1 is PR_SET_PDEATHSIG; it outlives exec. The parent may be gone before it is set, hence the second look.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ProcessFailed(Exception):
    """A server ended by itself, or was not ready in time; the message ends with the tail of its log."""


class ServerProcess:
    """A program and its log file, started as often as wanted. Belongs to no event loop.

    `name` where the program's own does not tell it apart; `environment` instead of this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        name: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(part) for part in command]
        self._name = name
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def name(self) -> str:
        return self._name or Path(self._command[0]).name

    @property
    def pid(self) -> int:
        """Raises ProcessFailed where the process is not running."""
        if self._process is None or self._process.poll() is not None:
            raise ProcessFailed(f"{self.name} is not running\n{self.log_tail()}")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.running:
            raise RuntimeError(f"{self.name} already runs")
        launcher = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*launcher, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    async def ready(self, probe: Callable[[], Awaitable[bool]], *, timeout_s: float) -> None:
        """Wait until `probe` is true. Raises ProcessFailed at once if the process ends first."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await probe():
                    if not self.running:
                        raise ProcessFailed(f"{self.name} ended before it was ready\n{self.log_tail()}")
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError as error:
            raise ProcessFailed(f"{self.name} was not ready in {timeout_s} s\n{self.log_tail()}") from error

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """`kill -9`, also of a stopped process; returns when it is gone. Nothing to do if it is not running."""
        await self._end(signal.SIGKILL)

    async def terminate(self) -> None:
        """SIGTERM, and SIGKILL after 10 s."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        try:
            await asyncio.to_thread(process.wait, STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def resident_bytes(self) -> int:
        """Resident set size. Source: VmRSS of /proc."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(kib) * 1024

    def has_logged(self, text: str) -> bool:
        """Whether `text` was written since the last start."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return text.encode() in log.read()

    def log_tail(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return f"({self._log} was never written)"
