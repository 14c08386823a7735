"""Constraints for pip: `oldest` holds every dependency at its lower bound, `newest` holds none.

python .ci/versions.py oldest > versions.txt && pip install -e ".[test]" -c versions.txt
"""

import re
import sys
from pathlib import Path

if sys.argv[1:] == ["oldest"]:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for package, version in re.findall(r'"([\w-]+)>=([\d.]+)', project):
        print(f"{package}=={version}")
