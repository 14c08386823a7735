"""Plugins: Python files or modules of the user's own, imported before anything is looked up by name."""

import importlib
import importlib.util
import sys
from pathlib import Path

from livt_hf.errors import LiVTError


def load_plugin(name: str | None) -> None:
    """Import a plugin once; what it registers (`register_loss`, `register_dataset`) is known from then on."""
    if name is None:
        return
    path = Path(name).expanduser()
    if path.suffix != ".py":
        if importlib.util.find_spec(name) is None:
            raise LiVTError(f"the plugin {name} is not an installed module; pass a module or a .py file.")
        importlib.import_module(name)
        return
    if not path.is_file():
        raise LiVTError(f"the plugin {name} does not exist; pass a .py file or an installed module.")
    # Under a name made of its place, so that two files called losses.py do not meet.
    module = f"livt_plugin_{path.resolve().as_posix().replace('/', '_').removesuffix('.py')}"
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
