"""Signals in data loading workers."""

import os
import signal
import threading


def outlive_signals(_worker: int) -> None:
    """Make a data loading worker ignore the signals that stop a run: its parent decides when to stop.

    Whoever stops a run may signal all its processes, and SIGTERM would end torch's workers at once.
    """
    outlive_ctrl_c()
    if hasattr(signal, "sigwaitinfo"):  # macOS does not tell who sends a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_own_process, daemon=True).start()


def outlive_ctrl_c() -> None:
    """Ignore Ctrl-C in a spawned worker; a forked one has the handler of the training already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _wait_for_own_process() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
