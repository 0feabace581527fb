"""Where time goes: the most expensive operations of a learner's pass and of decoding, by the device and by the CPU.

`wall_ms` is without the profiler, `busy` the share of it in which kernels ran: the rest waits for Python. `calls`: of
the driver, for one pass or one step.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from gpu_sections.bench import Bench, Row, snapshot_of
from gpu_sections.engines import BUILD, PROMPT, decoder_of, requests_of
from gpu_sections.learner import data_of, trained
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # documented
from torch.profiler import ProfilerActivity, profile

from echo2.learner.core.losses import make_loss
from echo2.learner.core.trainer import Trainer
from echo2.learner.grpo.loop import GrpoLoss

MOST = 15
CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize")


def run(bench: Bench) -> None:
    """Profile a pass of the learner, and ten steps of each engine."""
    learner(bench)
    bench.forget_peak()
    engines(bench)


def learner(bench: Bench) -> None:
    """Profile one micro-batch, forward and backward."""
    policy = trained(bench, "0.6B", False)
    trainer, loss = Trainer(bench.pick(16_384, 16_384, 256)), GrpoLoss(make_loss("dppo"), 0.0)
    trainer.add("it", policy)
    data = data_of(policy.vocab_size, 16, bench.pick(512, 128, 16))
    learnt = profiled(bench, lambda: trainer.forward_backward("it", data, loss), 1)
    told(bench, {"what": "learner", "rows": 16, "tokens_run": trainer.num_tokens_run("it", data)}, *learnt)


def engines(bench: Bench) -> None:
    """Profile ten steps of each."""
    snapshot = snapshot_of(bench.policy("0.6B", "bfloat16"))
    for engine in BUILD:
        decoder = decoder_of(bench, engine, snapshot)
        decoder.step(requests_of(bench.values("0.6B")["vocab_size"], 16, bench.pick(PROMPT, PROMPT, 8), 4096), [])
        found = profiled(bench, lambda decoder=decoder: decoder.step({}, []), 10)  # type: ignore[misc]
        told(bench, {"what": f"a step of {engine}", "rows": 16}, *found)
        decoder.clear()


def profiled(bench: Bench, work: Callable[[], Any], times: int) -> tuple[float, list[Any], int]:
    """Return the seconds of some work, and its operations' averages over so many times."""
    seconds = bench.seconds(work, repeats=5, warm_up=3)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        for _ in range(times):
            work()
        bench.sync()
    return seconds, list(recorded.key_averages()), times


def told(bench: Bench, row: Row, seconds: float, operations: list[Any], times: int) -> None:
    """Record the most expensive operations, in milliseconds of one time."""
    on_cpu = [one for one in operations if one.device_type == DeviceType.CPU]
    kernels = [one for one in operations if one.device_type != DeviceType.CPU]
    device_ms = sum(one.self_device_time_total for one in kernels) / times / 1e3
    calls = {name: one.count / times for name in CALLS for one in on_cpu if one.key == name}
    row |= {"wall_ms": seconds * 1e3, "device_ms": device_ms, "busy": device_ms / seconds / 1e3, "calls": calls}
    bench.record(row)
    for by, some, attribute in (
        ("kernels", kernels, "self_device_time_total"),
        ("operations on the device", on_cpu, "self_device_time_total"),
        ("operations on the cpu", on_cpu, "self_cpu_time_total"),
    ):
        ordered = sorted(some, key=attrgetter(attribute), reverse=True)[:MOST]
        shown = [
            f"{getattr(one, attribute) / times / 1e3:.3f} x{one.count / times:g} {one.key[:60]}" for one in ordered
        ]
        bench.record({"what": row["what"], "ms of": by, "operations": "; ".join(shown)})
