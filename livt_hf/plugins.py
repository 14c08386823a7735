"""Plugins: Python files or modules of the user's own, imported before anything is looked up by name."""

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
import types
from pathlib import Path

from livt_hf.errors import LiVTError

_IMPORT_SYSTEM = (str(Path(str(importlib.__file__)).parent), "<frozen importlib")


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find where a module would be imported from; None if there is none, or if that is no name of a module."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a.b where there is no a, and of an empty name
        return None


def load_plugin(name: str | None) -> None:
    """Import a plugin once; what it registers (`register_loss`, `register_dataset`) is known from then on."""
    if name is None:
        return
    path = Path(name).expanduser()
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise LiVTError(f"the plugin {name} does not exist; pass a .py file or an installed module.")
    # The name is made of the path, so that two files called losses.py do not meet.
    stem = path.resolve().as_posix().replace("/", "_").removesuffix(".py")
    module = f"livt_plugin_{stem}" if is_file else name
    if module in sys.modules:
        return
    try:
        if is_file:
            sys.modules[module] = types.ModuleType(module)
            sys.modules[module].__file__ = str(path)
            importlib.machinery.SourceFileLoader(module, str(path)).exec_module(sys.modules[module])
        elif find_module(name) is None:  # of a.b, this imports a
            raise LiVTError(f"the plugin {name} is not an installed module; pass a module or a .py file.")
        else:
            importlib.import_module(name)
    except Exception as error:
        sys.modules.pop(module, None)  # imported halfway
        if isinstance(error, LiVTError):
            raise
        raise _explain_failure(name, error) from error


def _explain_failure(name: str, error: Exception) -> LiVTError:
    """Return the error of a plugin with its own frames, without those of the package and of the import system."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith((__file__, *_IMPORT_SYSTEM)):
        frame = frame.tb_next
    lines = "".join(traceback.format_exception(type(error), error, frame, chain=False))
    return LiVTError(f"the plugin {name} cannot be imported; mend it, or leave it out:\n{lines.rstrip()}", "plugin")
