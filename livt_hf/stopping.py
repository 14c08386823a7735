"""Stopping when asked to, at a moment that suits the run."""

import logging
import os
import signal
import time

logger = logging.getLogger(__name__)


class StopOnSignal:
    """Turns SIGINT and SIGTERM into a request; asked again after some seconds, they act as usual."""

    # Schedulers and terminals signal launcher and processes, and the launcher passes it on: one wish arrives twice.
    patience = 3.0

    def __init__(self, announce: bool = True):
        # Data loading workers inherit the handler, so that they outlive the signal, but say nothing.
        self._speaker = os.getpid() if announce else None
        self._since: float | None = None

    @property
    def requested(self) -> bool:
        return self._since is not None

    def __enter__(self):
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        if self._since is None:
            self._since = time.monotonic()
            if os.getpid() == self._speaker:
                logger.warning("stopping after this update; the run will be saved")
        elif time.monotonic() - self._since > self.patience:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
