"""kubectl accepts the imitation, where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kubernetes.builders import gpu_node, pod
from tests.kubernetes.imitation import Imitation

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def test_kubectl_creates_shows_and_deletes(cluster: Imitation, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.write_kubeconfig(tmp_path / "config")),
        "HOME": str(tmp_path),
    }

    def kubectl(*words: str, stdin: str | None = None) -> str:
        command = ["kubectl", *words]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=environment, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    cluster.create(gpu_node())
    created = kubectl("create", "--validate=false", "-f", "-", stdin=json.dumps(pod("one", gpus=1)))
    assert created == "pod/one created\n"
    cluster.wait_for(lambda: (cluster.pod("one") or {})["status"]["phase"] == "Running", "the pod runs")
    assert kubectl("get", "po", "one", "-o", "jsonpath={.spec.nodeName}") == "gpu-0"
    kubectl("delete", "pod", "one", "--grace-period=0", "--force")
    assert kubectl("get", "pods", "-A", "-o", "name") == ""
