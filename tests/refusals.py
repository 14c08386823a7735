"""What a refusal must name: the argument that is wrong and the values; its sentence is free to change."""

import contextlib
from collections.abc import Iterator

import pytest

from livt_hf.errors import LiVTError


@contextlib.contextmanager
def refusal(argument: str | None, *values) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error of this argument (None: of no single one) whose text has all these values."""
    with pytest.raises(LiVTError) as caught:
        yield caught
    text = str(caught.value)
    assert caught.value.argument == argument, f"{caught.value.argument}: {text}"
    assert [value for value in values if str(value) not in text] == [], text
