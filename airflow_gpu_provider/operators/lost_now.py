"""An exception that reaches work whose lease is lost wherever it is.

Python raises it in the working thread between two of its instructions; code that does not return to Python
(a CUDA call) does not see it. Used by `held_lease`, which replaces it by the reason.
"""

from __future__ import annotations

import ctypes

from airflow_gpu_provider.exceptions import LeaseLost


class LostNow(LeaseLost):
    """Raised asynchronously in the working thread, which allows no arguments."""

    def __init__(self) -> None:
        super().__init__("The GPU lease was lost while its task ran.")


def lose_now(thread: int) -> None:
    """Raise `LostNow` in the thread of this number."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(LostNow))
