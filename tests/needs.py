"""What some tests need of the system; elsewhere they are skipped and say why."""

import os
from pathlib import Path

import pytest

from livt_hf.system import LAUNCHES_SEVERAL

needs_unix = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs signals or shell scripts: not on Windows")
needs_linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, or memory counted in kB: Linux")
needs_launcher = pytest.mark.skipif(not LAUNCHES_SEVERAL, reason="torch for Windows launches one process")
