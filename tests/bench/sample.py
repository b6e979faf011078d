"""Invented results: a GPU, four providers, several heads and sizes."""

from __future__ import annotations

import torch

from sluice.bench.floors import Floors
from sluice.bench.plan import Wanted, workloads
from sluice.bench.results import Results, Row, Times, describe_workload

# times over the floor, by provider: invented, and so is the machine
SLOWNESS = {"sluice": 1.6, "fla": 4.0, "flashqla": 2.4, "flashinfer": 1.5}
ONLY = {"flashqla": ("prefill",), "flashinfer": ("prefill", "decode", "verify")}
COPIES = [(1 << n, 2e-6 + (1 << n) / 4.2e12) for n in range(18, 31, 2)]


def sample(scale: float = 1.0, spread: float = 0.02, eager: bool = True) -> Results:
    """All of the GPU surface; ``scale`` multiplies sluice's times, ``spread`` is their noise.

    Without ``eager`` as an earlier version wrote them: no times of eager calls.
    """
    floors = Floors(COPIES, {"bfloat16": 7.8e14})
    chosen = workloads("cuda", Wanted(), torch.bfloat16)
    described = [describe_workload(w, torch.bfloat16) for w in chosen]
    rows = []
    for n, w in enumerate(described):
        floor, bound = floors.seconds(w["bytes"], w["flops"], w["dtype"])
        for m, (name, slowness) in enumerate(SLOWNESS.items()):
            row = Row(w["name"], name, "ok", floor_s=floor, bound=bound)
            rows.append(row)
            if w["op"] not in ONLY.get(name, (w["op"],)):
                row.status, row.reason = "refused", f"has no {w['op']}"
                continue
            if name == "fla" and w["size"] == "8x4096":
                row.status, row.reason = "wrong", "o: relative error 3.00e-02 > 1.00e-02"
                continue
            median = 2e-6 + floor * slowness * (1 + 0.4 * ((n * 7 + m * 3) % 5) / 5)
            median *= scale if name == "sluice" else 1.0
            row.set_samples([median * (1 + spread * (k - 10) / 8) for k in range(21)])
            if eager:
                row.host = Times.of([2e-5 * (m + 1) * x for x in (0.9, 1.0, 1.2)])
                row.eager = Times.of([row.host.median_s + median * x for x in (0.9, 1.0, 1.2)])
            row.detail = "triton" if name == "sluice" else ""
            row.method = "events" if name == "flashqla" else "graph"
            row.errors, row.sets = {"o": 3e-3, "state": 1e-3}, 8
            row.converted = ("pool rows gathered",) if name == "fla" else ()
    providers = [
        {"name": name, "title": title, "install": "", "peer": name != "sluice", "missing": None}
        | {"version": "1.0", "import_s": 1.0}
        for name, title in zip(SLOWNESS, ("sluice", "FLA", "FlashQLA", "FlashInfer"), strict=True)
    ]
    gone = {"name": "causal-conv1d", "title": "causal-conv1d", "peer": True, "import_s": None}
    gone |= {"missing": "ModuleNotFoundError", "version": None, "install": "pip install it"}
    providers.append(gone)
    machine = {
        "device": "cuda", "name": "Invented GPU", "cpu": "Invented CPU", "cores": 16, "threads": 16,
        "versions": {"torch": "2.11.0"}, "python": "3.12.0",
        "clocks": {"clocks.sm": "1980 MHz", "clocks.max.sm": "1980 MHz"}, "clocks_after": None,
    }  # fmt: skip
    first = [
        {"provider": name, "op": "prefill", "workload": described[0]["name"]}
        | {"import_s": 1.5, "call_s": seconds}
        for name, seconds in zip(SLOWNESS, (2.1, 31.0, 92.0, 7.5), strict=True)
    ]
    run = {"date": "2026-11-15T00:00:00+00:00", "commit": "0123456789ab", "seconds": 400.0}
    run |= {"rounds": 5, "quick": False, "processes": "one for each provider", "note": ""}
    return Results(machine, described, providers, rows, floors.to_json(), first, run)
