"""What a call costs beside its kernel on a CPU, and beside a busy process.

    PYTHONPATH=src python benchmarks/cpu_host.py [decode neighbour host]

- decode: one and eight sequences, the public call and the bound launch, beside ONNX Runtime in
  place, as in ``cpu_targets.py``.
- neighbour: one sequence again while another process keeps one core busy.
- host: every operator on heads so small that its kernel takes next to nothing, with one thread.
"""
# ruff: noqa: T201

from __future__ import annotations

import subprocess
import sys
import time

import torch
from cpu_targets import (
    TAPS,
    Bursts,
    Run,
    check,
    exact,
    launch_of,
    medians,
    narrow,
    on_cpu,
    onnx_attention,
    run_lines,
    show,
    states,
    tokens,
)

BUSY = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
while True:
    pass
"""


def decode_sides(N: int) -> dict[str, Run]:
    """Calls in float32 and bfloat16, the bound launch, and ONNX Runtime."""
    x, state = tokens(N, 1), states(N)
    want = exact("decode", x, state)
    made = [
        on_cpu("decode", *y, state=state.clone(), out=torch.empty_like(y[2]))
        for y in (x, narrow(x))
    ]
    for call, bound in zip(made, (1e-5, 1e-2), strict=True):
        check(call()[0], want[0], bound)
    return {
        "call": made[0],
        "bf16": made[1],
        "launch": launch_of(made[0]),
        "onnxruntime": onnx_attention(x, state.mT.contiguous()),
    }


def decode() -> None:
    """Ahead of ONNX Runtime in place."""
    for N, bound in ((1, 1.5), (8, 2.0)):
        goals = {name: ("onnxruntime", name, ">=", bound) for name in ("call", "bf16")}
        show(f"decode N={N}", medians(decode_sides(N), 25), goals)


def neighbour() -> None:
    """One sequence, alone and beside a process that keeps one core busy."""
    found = decode_sides(1)
    sides = {name: found[name] for name in ("call", "onnxruntime")}
    alone = Bursts(sides, 15, 0.2, alone=True)
    with subprocess.Popen([sys.executable, "-c", BUSY]) as other:
        time.sleep(0.5)
        beside = Bursts(sides, 15, 0.2, alone=False)
        other.kill()
    for name, bursts in (("alone", alone), ("beside a busy process", beside)):
        middle, mean, last = bursts.medians(), bursts.means(), bursts.last(0.01)
        each = (f"{n} {middle[n]:.1f} (mean {mean[n]:.1f}, 99% {last[n]:.1f})" for n in sides)
        print(f"decode N=1, {name}: {', '.join(each)}")
    goals = {"against ONNX Runtime": ("call", "onnxruntime", "<=", 1.0)}
    for name in ("medians", "means"):
        before, after = (getattr(bursts, name)() for bursts in (alone, beside))
        show(f"times slower ({name})", {n: after[n] / before[n] for n in sides}, goals)


def host() -> None:
    """Every operator with one thread, on small heads."""
    heads, width = 2, 16
    x, v = torch.randn(1, 1, heads, width), torch.randn(1, 1, 2 * heads, width)
    g, channels = torch.zeros(1, 1, 2 * heads), 4 * heads * width
    state, window = torch.zeros(1, 2 * heads, width, width), torch.zeros(1, channels, TAPS - 1)
    taps, vector, token = torch.randn(channels, TAPS), torch.randn(2 * heads), window.mT[:, :1]
    layer = {
        "conv_weight": taps, "A_log": vector, "dt_bias": vector, "norm_weight": torch.ones(width),
        "conv_state": window, "state": state,
    }  # fmt: skip
    gates = {"a": g, "b": g, "A_log": vector, "num_k_heads": heads, "num_v_heads": 2 * heads}
    pairs = (torch.randn(1, channels), torch.randn(1, 2 * heads * width)), (g[0], g[0])
    _, draft = on_cpu("verify", x, x, v, g, g, state=state)()
    draft = draft._replace(mark=None)  # or it could be committed once
    sides = {
        "decode": on_cpu("decode", x, x, v, g, g, state=state),
        "verify": on_cpu("verify", x, x, v, g, g, state=state),
        "commit": on_cpu("commit", draft, torch.ones(1, dtype=torch.int64)),
        "conv_qkv": on_cpu("conv_qkv", token, taps, state=window, **gates),
        "causal_conv1d": on_cpu("causal_conv1d", token, taps, state=window),
        "rms_norm_gated": on_cpu("rms_norm_gated", v, v, torch.ones(width)),
        "step": on_cpu("step", *pairs, **layer),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    launches = {f"{name} launch": launch_of(call) for name, call in sides.items()}
    found = medians(sides | launches, 9)
    torch.set_num_threads(before)
    for name in sides:
        print(f"host {name:18} call {found[name]:.1f}  launch {found[name + ' launch']:.1f}")


def main() -> None:
    run_lines({f.__name__: f for f in (decode, neighbour, host)})


if __name__ == "__main__":
    main()
