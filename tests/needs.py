"""What some tests need of the system; elsewhere they are skipped and say why."""

from pathlib import Path

import pytest

needs_linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, or memory counted in kB: Linux")
