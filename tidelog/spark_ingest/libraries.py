"""The libraries that the source and the sink need, also where only PySpark is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

_NEEDED: Final = ("numpy", "pyarrow")


def check_libraries() -> None:
    """Raises ImportError in a Python without a library that reads and writes need.

    PySpark depends on neither, and its own processes end without a reason where pyarrow is missing.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(
            f'format("tidelog") needs {" and ".join(missing)} in {sys.executable}: '
            "pip install 'tidelog[spark]' for the Python of the driver and of the executors"
        )
