"""Constraints for pip: `oldest` holds every dependency at the release of its lower bound, `newest` holds none.

python .ci/versions.py oldest > versions.txt && pip install -e ".[test]" -c versions.txt
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = [dependency for extra in project["optional-dependencies"].values() for dependency in extra]
for dependency in project["dependencies"] + extras:
    bound = re.match(r"([\w-]+)>=([\d.]+)", dependency)
    if bound and sys.argv[1:] == ["oldest"]:
        print(f"{bound[1]}=={bound[2]}.*")
