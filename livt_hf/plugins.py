"""Plugins: Python files or modules of the user's own, imported before anything is looked up by name."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

from livt_hf.errors import LiVTError


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module would be imported from; None if there is none, or if that is no name of a module."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a.b where there is no a, and of an empty name
        return None


def load_plugin(name: str | None) -> None:
    """Import a plugin once; what it registers (`register_loss`, `register_dataset`) is known from then on."""
    if name is None:
        return
    path = Path(name).expanduser()
    if path.suffix != ".py":
        if find_module(name) is None:
            raise LiVTError(f"the plugin {name} is not an installed module; pass a module or a .py file.")
        importlib.import_module(name)
        return
    if not path.is_file():
        raise LiVTError(f"the plugin {name} does not exist; pass a .py file or an installed module.")
    # Under a name made of its place, so that two files called losses.py do not meet.
    module = f"livt_plugin_{path.resolve().as_posix().replace('/', '_').removesuffix('.py')}"
    if module not in sys.modules:
        loader = importlib.machinery.SourceFileLoader(module, str(path))
        sys.modules[module] = types.ModuleType(module)
        sys.modules[module].__file__ = str(path)
        loader.exec_module(sys.modules[module])
