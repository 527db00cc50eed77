"""An event loop for a guest: tasks, timers, locks and queues, without sockets, threads, pipes or signals.

asyncio's own loop wants a pair of sockets to wake itself by. A guest has one thread, so there is nobody who could
wake it: between callbacks the loop just sleeps until the next timer.
"""

import asyncio
import time


class _Sleeper:
    """In place of a selector."""

    def select(self, timeout):
        """Sleep for `timeout` seconds. Raises RuntimeError where None says that only an event could end it."""
        if timeout is None:
            raise RuntimeError(
                "every task waits for something that no other task or timer will do; a guest has no other events"
            )
        if timeout > 0:
            time.sleep(timeout)
        return []


class GuestEventLoop(asyncio.BaseEventLoop):
    def __init__(self):
        super().__init__()
        self._selector = _Sleeper()

    def _process_events(self, event_list):
        pass  # There are none.

    def _write_to_self(self):
        pass  # One thread: whoever calls this is not waiting.


class GuestEventLoopPolicy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = GuestEventLoop
