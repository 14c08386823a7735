"""What the package refuses, and how a run says that it was stopped."""


class LiVTError(ValueError):
    """Bad input or circumstances, in one sentence that names the value and the way out.

    Commands print the sentence alone. Every other exception is a bug and keeps its traceback.
    """


class Interrupted(Exception):
    """The run was asked to stop, saved itself and can go on."""
