"""Running the build's commands: quiet, with a log each, visible as they go, and ended when the build ends.

A step prints one line when it is done; while one runs, a line every ten seconds tells which and for how long.
Whatever a step started is ended with its whole process group when the step is left, also by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HEARTBEAT_S = 10.0  # Who watches `make demo` takes half a minute of silence for a hang.
REASON_CHARACTERS_MAX = 300


class BuildError(Exception):
    """Something the reader has to mend; the message is one line and says how."""


def say(text: str) -> None:
    print(f"python runtime: {text}", file=sys.stderr, flush=True)


class Steps:
    """The steps of one build; use as a context manager."""

    def __init__(self, logs: Path, *, expected_s: float) -> None:
        self._logs = logs
        self._expected_s = expected_s
        self._started = time.monotonic()
        self._running: dict[str, float] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Steps:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._heart.join()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def stop(self) -> None:
        """End every command that still runs; their steps then fail."""
        self._over.set()
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            _end_group(process)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        with self._lock:
            self._running[what] = started
        try:
            yield
        finally:
            with self._lock:
                del self._running[what]
        say(f"{what}: done in {time.monotonic() - started:.0f} s")

    def run(
        self,
        what: str,
        command: Sequence[str | Path],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        standard_input: str = "",
    ) -> None:
        """Run `command` to its end. Raises BuildError, with the last line it wrote, if it fails."""
        log = self._logs / f"{what.replace(' ', '-')}.log"
        with self.step(what), log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    [str(part) for part in command],
                    cwd=cwd,
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise BuildError(f"{what}: cannot run {command[0]}: {error.strerror}") from error
            status = self._wait(process, standard_input)
            if self._over.is_set():
                raise BuildError(f"{what}: stopped")
            if status != 0:
                raise BuildError(f"{what} failed: {_reason(log, status)} (all of it: {log})")

    def _wait(self, process: subprocess.Popen[bytes], standard_input: str) -> int:
        with self._lock:
            self._processes.add(process)
        try:
            if self._over.is_set():
                _end_group(process)
            process.communicate(standard_input.encode())
            return process.returncode
        finally:
            _end_group(process)
            with self._lock:
                self._processes.discard(process)

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            now = time.monotonic()
            with self._lock:
                running = [f"{what} {now - started:.0f} s" for what, started in self._running.items()]
            if running:
                say(f"… {', '.join(running)} ({self.elapsed_s():.0f} s of about {self._expected_s:.0f})")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the command and the compilers it started, where it has not ended by itself."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Everything is written to a folder that is thrown away.
        process.wait()


def _reason(log: Path, status: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if status == -signal.SIGKILL:
        return "it was killed, perhaps for want of memory"
    errors = [line for line in lines if "error:" in line or line.endswith("not found")]
    told = errors[:1] or lines[-1:]
    return told[0][:REASON_CHARACTERS_MAX] if told else f"exit status {status}"
