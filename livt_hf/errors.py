"""What the package refuses."""


class LiVTError(ValueError):
    """Bad input or circumstances, in one sentence that names the value and the way out.

    Commands print the sentence alone. Every other exception is a bug and keeps its traceback.
    """
