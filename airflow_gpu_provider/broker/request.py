"""Turn what an author wrote into a `GpuRequest`, or say what is wrong with it.

This is the earliest place that can know: it runs when the DAG file is parsed, or when a template has been
rendered (so numbers may come as text). It knows nothing of the fleet; whether the fleet can ever serve the
request is the next step, `admission.reject_reason`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from airflow_gpu_provider.broker.artifact_names import artifact_name
from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.label_names import checked_labels, checked_taints
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, GpuRequest
from airflow_gpu_provider.broker.units import parse_mib
from airflow_gpu_provider.exceptions import InvalidRequest

#: What a process on a shared device needs before it has computed anything: the CUDA context.
LEAST_SHARED_MIB = 512


def build_request(
    *,
    gpus: object = 1,
    memory: str | None = None,
    shared: object = False,
    share: object = None,
    model: str | Iterable[str] | None = None,
    min_tflops: object = None,
    strict: object = False,
    cpu_cores: object = None,
    host_memory: str | None = None,
    host: str | None = None,
    spares: object = 0,
    max_runtime: object = None,
    task_class: str | None = None,
    artifacts: str | Iterable[str] | None = None,
    artifacts_required: object = False,
    node_labels: str | Iterable[str] | Mapping[str, str] | None = None,
    tolerates: str | Iterable[str] | None = None,
) -> GpuRequest:
    """Return the request; raise InvalidRequest that names the argument, what was given and what to write.

    ``memory`` is per device, or what is needed of a ``shared`` one; ``share`` is the least part of it, 0..1.
    ``cpu_cores`` and ``host_memory`` are for the whole gang, ``max_runtime`` is
    in seconds. ``None`` and the empty text leave a wish out.
    """
    least = _amount("min_tflops", min_tflops)
    is_strict = _flag("strict", strict)
    if is_strict and not least:
        raise InvalidRequest(
            "strict=True refuses devices below min_tflops, but min_tflops is not given: "
            "set min_tflops (A100 = 35, V100 = 15) or leave strict out"
        )
    runtime = _amount("max_runtime", max_runtime)
    if runtime == 0:
        raise InvalidRequest("max_runtime is 0 seconds: promise a time above 0 or leave it out")
    named = _artifacts(artifacts)
    must_be_near = _flag("require_artifacts", artifacts_required)
    if must_be_near and not named:
        raise InvalidRequest(
            "require_artifacts=True asks for nodes that hold the artifacts, but artifacts is not given: "
            'name them, such as artifacts=["/data/models/gpt2"], or leave require_artifacts out'
        )
    members, extra = _whole("gpus", gpus, least=1), _whole("spares", spares, least=0)
    size = _size("memory", memory)
    milli = _milli(_flag("shared", shared), share, size)
    if milli < WHOLE_DEVICE:
        _check_shared(members, extra, size, is_strict)
    return GpuRequest(
        gpus=members,
        models=_models(model),
        memory_mib=size,
        milli=milli,
        min_tflops=least or 0.0,
        strict=is_strict,
        cpu_cores=_amount("cpu_cores", cpu_cores) or 0.0,
        host_memory_mib=_size("host_memory", host_memory),
        host=host or None,
        spares=extra,
        max_runtime_s=runtime,
        task_class=task_class or None,
        artifacts=named,
        artifacts_required=must_be_near,
        node_labels=_labels(node_labels),
        tolerates=_taints(tolerates),
    )


def _milli(is_shared: bool, share: object, memory_mib: int) -> int:
    """Return the least part of a device in milli-GPU; the memory may make it more on the device it gets."""
    part = _amount("share", share)
    if part is None and not is_shared:
        return WHOLE_DEVICE
    if part is None and not memory_mib:
        raise InvalidRequest(
            "shared=True asks for a part of a device, but not for how much: give what it needs, such as "
            'memory="8GiB", or the part itself, such as share=0.25; or leave shared out'
        )
    if part is not None and not 0 < part < 1:
        raise InvalidRequest(
            f"share={share!r} is no part of a device: write more than 0 and less than 1, such as share=0.25 "
            "for a quarter; leave it out for a whole device"
        )
    return 1 if part is None else max(1, round(part * WHOLE_DEVICE))


def _check_shared(gpus: int, spares: int, memory_mib: int, is_strict: bool) -> None:
    """Refuse what cannot be promised to who shares a device."""
    if gpus > 1:
        raise InvalidRequest(
            f"gpus={gpus} of shared devices: a gang goes at the pace of its busiest device, which neighbours "
            "decide; ask for whole devices (leave shared and share out), or for several tasks of gpus=1"
        )
    if spares:
        raise InvalidRequest(
            f"spares={spares} of a shared device: spares are whole devices for a gang; leave spares out"
        )
    if is_strict:
        raise InvalidRequest(
            "strict=True promises min_tflops, which a shared device cannot keep while others compute on it; "
            "ask for a whole device, or leave strict out"
        )
    if 0 < memory_mib < LEAST_SHARED_MIB:
        raise InvalidRequest(
            f"memory={memory_mib}MiB of a shared device is less than CUDA itself takes in each process; ask "
            f"for {LEAST_SHARED_MIB}MiB or more"
        )


def _number(name: str, value: object) -> float:
    """Return a finite number from a number or its text. True is 1 in Python, and never meant as one here."""
    number = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name}={value!r} is not a number: write it in digits, such as {name}=2")
    return number


def _whole(name: str, value: object, *, least: int) -> int:
    number = _number(name, value)
    if number != int(number):
        raise InvalidRequest(
            f"{name}={value!r} is no whole number: devices are leased whole, write {least} or more"
        )
    if number < least:
        raise InvalidRequest(f"{name}={value!r} is too few: the least is {least}")
    return int(number)


def _amount(name: str, value: object) -> float | None:
    if value is None or value == "":
        return None
    number = _number(name, value)
    if number < 0:
        raise InvalidRequest(f"{name}={value!r} is negative: write 0 or more, or leave it out")
    return number


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise InvalidRequest(f"{name}={value!r} is neither True nor False")


def _size(name: str, value: object) -> int:
    if value is None or value == "":
        return 0
    try:
        return parse_mib(value)
    except InvalidRequest as wrong:
        raise InvalidRequest(f"{name}: {wrong.message}") from wrong


def _models(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    names = value.split("|") if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        raise _no_model(value)
    models = set()
    for name in names:
        if not isinstance(name, str):
            raise _no_model(value)
        if name.strip():
            models.add(canonical_model(name))
    return frozenset(models)


def _artifacts(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        names = [names]
    found = set()
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise InvalidRequest(
                f"artifacts={value!r} names no artifact: write a path or digest, or a list of them, such as "
                '["/data/models/gpt2"]'
            )
        found.add(artifact_name(name.strip()))
    return frozenset(found)


def _labels(value: object) -> frozenset[str]:
    """Return labels as "name=value", from such texts or a mapping."""
    example = 'labels that nodes must have, such as node_labels={"zone": "hall-1"} or ["zone=hall-1"]'
    texts = value
    if isinstance(value, Mapping):
        texts = [f"{name}={each}" for name, each in value.items()]
        odd = next((name for name in value if "=" in str(name)), None)
        if odd is not None:
            raise InvalidRequest(f"node_labels: the name {odd!r} has an = in it; write {example}")
    return _checked("node_labels", _names("node_labels", texts, example), checked_labels)


def _taints(value: object) -> frozenset[str]:
    example = 'taints of nodes that it may use, such as ["lab"]'
    return _checked("tolerates", _names("tolerates", value, example), checked_taints)


def _checked(
    argument: str, names: frozenset[str], check: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> frozenset[str]:
    try:
        return frozenset(check(tuple(sorted(names))))
    except ValueError as wrong:
        raise InvalidRequest(f"{argument}: {wrong}") from None


def _names(argument: str, value: object, example: str) -> frozenset[str]:
    if value is None:
        return frozenset()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        names = [names]
    found = list(names)
    if not all(isinstance(name, str) for name in found):
        raise InvalidRequest(f"{argument}={value!r} names nothing: write {example}")
    return frozenset(name.strip() for name in found if name.strip())


def _no_model(value: object) -> InvalidRequest:
    return InvalidRequest(f'model={value!r} names no GPU model: write "A100", "A100|H100" or a list of names')
