"""Runs before a script that has a part of a device: keeps its PyTorch to that part, as in a shard.

Python imports a file of this name by itself, in every process of a rank, since its folder is in PYTHONPATH
(`script_processes`). So a script needs no change, nothing is imported that it does not import, and no device
is touched before it does. A sitecustomize of the installation is run as well, after this one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class LimitWithTorch(MetaPathFinder):
    """Sets the limit when torch has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch as it is found without this, with the limit behind it."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        import_torch = spec.loader.exec_module

        def import_and_limit(module: ModuleType) -> None:
            import_torch(module)
            from airflow_gpu_provider.training.memory_limit import limit_once_used

            limit_once_used()

        spec.loader.exec_module = import_and_limit  # type: ignore[method-assign]
        return spec


def run_the_installations_own() -> None:
    """Run the file of the same name that this one has hidden."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, LimitWithTorch())
run_the_installations_own()
