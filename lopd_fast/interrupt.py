"""Ctrl-C and SIGTERM as a request: the step in progress ends and is saved, a second signal stops at once."""

import os
import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = b"stopping after this step; press again to stop at once\n"


class StopRequest:
    """`with StopRequest() as stop:` then ask `stop.requested` between steps.

    The first SIGINT or SIGTERM sets `requested` and prints one line; the second raises KeyboardInterrupt. The old
    handlers are back when the block ends. Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self, notice: bool = True) -> None:
        self.requested = False
        self._notice = notice  # whether to print the line: of several processes one does
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the old handler was not set from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._notice:
            os.write(2, _NOTICE)  # print() may not be entered twice, and the signal may have come within one
