"""Start NVML and keep it started, or say why it is off.

"Started" is a pair (library, pid): a forked child inherits the library's memory but not its connection to the
driver, so it must start again. All of that is state of one object; there are no module globals. The next
step, reading devices through a started library, is `nvml.NvmlProbe`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any


class NvmlOff(str, Enum):
    """Why NVML gives nothing. The sentence is for people: it says what to do."""

    NOT_STARTED = "not_started"
    """Nobody asked yet."""
    NOT_INSTALLED = "not_installed"
    """The Python binding is not installed."""
    LIBRARY_MISSING = "library_missing"
    """libnvidia-ml.so.1 is not on this machine."""
    DRIVER_MISSING = "driver_missing"
    """The library is there, the kernel driver is not loaded."""
    DRIVER_TOO_OLD = "driver_too_old"
    """Library and driver do not fit each other."""
    NO_PERMISSION = "no_permission"
    """This user may not talk to the driver."""
    FORKED = "forked"
    """Started in the parent process; the next read starts it again here."""
    FAILED = "failed"
    """Any other error of the driver."""

    @property
    def sentence(self) -> str:
        """Return the reason in words, with what to do about it."""
        return f"no NVML: {_WORDS[self]}"


_WORDS = {
    NvmlOff.NOT_STARTED: "not read yet",
    NvmlOff.NOT_INSTALLED: "Python package not installed; install nvidia-ml-py",
    NvmlOff.LIBRARY_MISSING: "library not found; install the NVIDIA driver, or let the container use it",
    NvmlOff.DRIVER_MISSING: "driver not loaded; load the kernel module nvidia (modprobe nvidia)",
    NvmlOff.DRIVER_TOO_OLD: "driver and library have different versions, or are too old; update the driver "
    "and restart the machine",
    NvmlOff.NO_PERMISSION: "no permission to use the driver; give this user access to /dev/nvidia*",
    NvmlOff.FORKED: "this process was forked after NVML started; it is started again at the next read",
    NvmlOff.FAILED: "the driver reports an error; see the agent's log",
}


class NvmlSession:
    """NVML in this process."""

    def __init__(self, load: Callable[[], ModuleType] | None = None) -> None:
        self._load = load or (lambda: importlib.import_module("pynvml"))
        self._library: Any = None
        self._pid: int | None = None
        self._off: NvmlOff = NvmlOff.NOT_STARTED
        self.detail: str | None = None  #: the driver's own words for the last failure
        self.starts = 0  #: how often it was started; handles of an earlier start are void

    @property
    def off(self) -> NvmlOff | None:
        """Why NVML cannot be used at this moment, or None when it is started in this very process."""
        if self._pid is None:
            return self._off
        return None if self._pid == os.getpid() else NvmlOff.FORKED

    @property
    def library(self) -> Any:
        """The started binding; only valid while `off` is None."""
        return self._library

    def ensure(self) -> NvmlOff | None:
        """Start NVML unless it is started in this process; return why that is not possible.

        Tried again on every call: a driver that is loaded later is found without a restart.
        """
        if self.off is None:
            return None
        self._pid = None
        try:
            library: Any = self._load()
        except ImportError as error:
            return self._failed(NvmlOff.NOT_INSTALLED, error)
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            return self._failed(_why(library, error.value), error)
        self._library, self._pid, self.detail = library, os.getpid(), None
        self.starts += 1
        return None

    def drop(self, error: Exception) -> NvmlOff:
        """Forget a start that the driver no longer honours (it was unloaded or restarted)."""
        self._pid = None
        return self._failed(_why(self._library, getattr(error, "value", None)), error)

    def close(self) -> None:
        """Stop NVML if it was started in this process."""
        if self.off is None:
            self._pid, self._off = None, NvmlOff.NOT_STARTED
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError as error:
                self.detail = str(error)

    def _failed(self, off: NvmlOff, error: Exception) -> NvmlOff:
        self._off, self.detail = off, str(error)
        return off


def _why(library: Any, code: int | None) -> NvmlOff:
    return {
        library.NVML_ERROR_LIBRARY_NOT_FOUND: NvmlOff.LIBRARY_MISSING,
        library.NVML_ERROR_DRIVER_NOT_LOADED: NvmlOff.DRIVER_MISSING,
        library.NVML_ERROR_LIB_RM_VERSION_MISMATCH: NvmlOff.DRIVER_TOO_OLD,
        library.NVML_ERROR_FUNCTION_NOT_FOUND: NvmlOff.DRIVER_TOO_OLD,
        library.NVML_ERROR_NO_PERMISSION: NvmlOff.NO_PERMISSION,
    }.get(code, NvmlOff.FAILED)
