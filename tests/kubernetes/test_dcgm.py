"""What the DCGM exporter's text says."""

from __future__ import annotations

from airflow_gpu_provider.kubernetes.dcgm import readings

TEXT = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",device="nvidia1",Hostname="gpu-0",pod="train",namespace="ml"} 97
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",device="nvidia0",Hostname="gpu-0",pod="",namespace=""} 0
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",device="nvidia1",Hostname="gpu-0",pod="train",namespace="ml"} 40321
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",device="nvidia1",Hostname="gpu-0",pod="train",namespace="ml"} 61
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b",Hostname="gpu-0",pod="train",namespace="ml"} 310.5
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-b",device="nvidia1",Hostname="gpu-0",pod="train",namespace="ml"} 79
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a",device="nvidia0",Hostname="gpu-0",pod="",namespace=""} 0
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{gpu="0",UUID="GPU-a"} 1
DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="0",UUID="GPU-a"} not a number at all
"""


def test_gpus_are_told_in_order_with_their_pods() -> None:
    idle, busy = readings(TEXT)
    assert (busy.uuid, busy.index, busy.node, busy.pod) == ("GPU-b", 1, "gpu-0", ("ml", "train"))
    assert (busy.utilisation, busy.memory_used_mib, busy.temperature_c, busy.power_w) == (
        0.97,
        40321,
        61,
        310.5,
    )
    assert busy.xid == 79
    assert (idle.utilisation, idle.pod, idle.xid) == (0.0, None, None)


def test_what_is_not_told_is_unknown_and_not_zero() -> None:
    [one] = readings('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 40\n')
    assert (one.utilisation, one.memory_used_mib, one.power_w, one.xid) == (None, None, None, None)
    assert readings('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} NaN\n') == ()


def test_slices_are_told_apart_and_measured_by_the_engines() -> None:
    labels = 'gpu="0",UUID="GPU-a",GPU_I_PROFILE="3g.40gb",GPU_I_ID="{}"'
    text = "".join(
        f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels.format(slice_id)}}} {value}\n"
        for slice_id, value in (("2", 0.25), ("1", 0.5))
    )
    assert [(each.slice_id, each.profile, each.utilisation) for each in readings(text)] == [
        ("1", "3g.40gb", 0.5),
        ("2", "3g.40gb", 0.25),
    ]


def test_prometheus_renames_labels_and_the_gpus_pod_is_still_found() -> None:
    text = (
        'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="gpu-1",exported_pod="train",exported_namespace="ml",'
        'pod="dcgm-exporter-x",namespace="gpu-operator"} 5 1700000000000\n'
    )
    [one] = readings(text)
    assert (one.node, one.pod) == ("gpu-1", ("ml", "train"))
