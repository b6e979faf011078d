"""A transformers model of Qwen3.5-35B-A3B's layer shapes: stock with FLA against accelerated.

    PYTHONPATH=src python benchmarks/gpu_transformers.py --fla-path DIR      # a GPU, bfloat16
    PYTHONPATH=src python benchmarks/gpu_transformers.py --device cpu        # in miniature

One model object, the same weights: stock and after ``sluice.accelerate`` in turn, each row twice
(accelerated, stock, accelerated, stock), of which the second counts. Nothing is timed before the
two agree: each gated delta layer against the same layer in float32, and 64 greedy tokens. Three
times are given for prefill and decode: the whole model, the gated delta layers in it (marks around
them, none inside), and what lies between their projections ("core": the same marks, while the
layers' linear children hand out stored results). On a GPU decode is also measured as a CUDA graph
of the layers alone, where the host's launches cost nothing.

Full attention runs without cuDNN unless ``--cudnn-attention`` is given: cuDNN builds a plan for
each length of the cache it has not seen, so every decoded token of the model that is measured first
pays for one, and the second model finds them all. What a new length costs is printed.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STARTED = time.perf_counter()
Run = Callable[[int], Any]
Rows = dict[str, dict[str, float]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="bfloat16, or float32 on a CPU")
    parser.add_argument("--fla-path", help="directory that holds the package fla (stock uses it)")
    parser.add_argument(
        "--layers", type=int, default=4, help="every fourth, and the last, has full attention"
    )
    parser.add_argument("--experts", type=int, help="256, or 8 on a CPU")
    parser.add_argument("--tokens", type=int, help="of prefill: 8192, or 512 on a CPU")
    parser.add_argument("--batches", help="of decode: 1,16,64, or 1,4 on a CPU")
    parser.add_argument("--context", type=int, default=256, help="tokens before decode")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of decode")
    parser.add_argument("--time-limit", type=float, default=200, help="seconds; then no more rows")
    parser.add_argument(
        "--cudnn-attention", action="store_true", help="let torch choose cuDNN for full attention"
    )
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    args.dtype = getattr(torch, args.dtype or ("float32" if cpu else "bfloat16"))
    args.experts = args.experts or (8 if cpu else 256)
    args.tokens = args.tokens or (512 if cpu else 8192)
    args.batches = [int(b) for b in (args.batches or ("1,4" if cpu else "1,16,64")).split(",")]
    args.vocabulary = 1024 if cpu else 248320
    return args


def build(args: argparse.Namespace) -> nn.Module:
    """Random weights; decays of 0.45 to 0.999 per token, so that the states matter."""
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    config = Qwen3_5MoeTextConfig(
        num_hidden_layers=args.layers,
        layer_types=[
            "full_attention" if i % 4 == 3 or i == args.layers - 1 else "linear_attention"
            for i in range(args.layers)
        ],
        num_experts=args.experts,
        num_experts_per_tok=min(8, args.experts),
        vocab_size=args.vocabulary,
        dtype=args.dtype,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(args.dtype)
    try:
        with torch.device(args.device):
            model = Qwen3_5MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    for layer in gated_layers(model):
        layer.A_log.data.uniform_(0.05, 4.0).log_()
        layer.dt_bias.data.uniform_(0.02, 0.2).expm1_().log_()
        layer.conv1d.weight.data.normal_(std=0.5)
        for name, weight in layer.named_parameters():
            if "proj" in name:
                weight.data.normal_(std=weight.shape[1] ** -0.5)
    return model.eval().requires_grad_(False)


def gated_layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]


# --------------------------------------------------------------------------------------- agreement


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def layer_errors(model: nn.Module, x: Tensor) -> list[float]:
    """Each layer's distance from the same layer computed in float32 by torch alone."""
    from sluice.integrations.transformers import plain_torch, restore

    errors = []
    for layer in gated_layers(model):
        found = layer(x)
        exact = restore(copy.deepcopy(layer)).float()
        with plain_torch(exact):
            errors.append(relative(found, exact(x.float())))
    return errors


def greedy(model: nn.Module, ids: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """n tokens, and the logits that chose them."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    logits, chosen = [out.logits[:, -1].float()], []
    for _ in range(n):
        chosen.append(logits[-1].argmax(-1))
        out = model(chosen[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1].float())
    return torch.stack(chosen, 1), torch.stack(logits[:n], 1)


def forced(model: nn.Module, ids: Tensor, chosen: Tensor) -> Tensor:
    """The logits of a model that is given another one's tokens."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    logits = [out.logits[:, -1].float()]
    for token in chosen.unbind(1)[:-1]:
        out = model(token[:, None], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1].float())
    return torch.stack(logits, 1)


def agree(stock: dict[str, Any], ours: dict[str, Any], dtype: torch.dtype) -> None:
    """Raise unless the accelerated model is as exact as stock, and chooses the same tokens.

    Where rounding decides (two tokens closer than the models' logits are), either may be chosen.
    """
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    for i, (a, b) in enumerate(zip(stock["layers"], ours["layers"], strict=True)):
        print(f"gated delta layer {i}: error against float32: stock {a:.1e}, accelerated {b:.1e}")
        if b > max(1.25 * a, 1e-5) or b > bound:
            raise SystemExit(f"layer {i}: the accelerated layer is not as exact as stock")
    chosen, theirs, mine = stock["tokens"], stock["logits"], ours["logits"]
    noise = (mine - theirs).square().mean(-1).sqrt()
    picked = mine.argmax(-1)
    gap = theirs.gather(-1, chosen[..., None]) - theirs.gather(-1, picked[..., None])
    same = picked == chosen
    error = relative(mine, theirs)
    print(
        f"logits: relative distance {error:.1e}; {int(same.sum())} of {same.numel()} greedy tokens"
    )
    if bool(((gap.squeeze(-1) > 6 * noise) & ~same).any()) or float(same.float().mean()) < 0.85:
        raise SystemExit("greedy tokens differ by more than rounding")
    if error > (1e-3 if dtype == torch.float32 else 0.2):
        raise SystemExit("logits differ by more than rounding")


def answers(model: nn.Module, args: argparse.Namespace, chosen: Tensor | None) -> dict[str, Any]:
    """What a model gives, to be compared."""
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(0, args.vocabulary, (2, 100), generator=gen).to(args.device)
    x = torch.randn(2, 300, model.config.hidden_size, generator=gen).to(args.device, args.dtype)
    found: dict[str, Any] = {"layers": layer_errors(model, x)}
    if chosen is None:
        found["tokens"], found["logits"] = greedy(model, ids, 64)
    else:
        found["logits"] = forced(model, ids, chosen)
    return found


# ------------------------------------------------------------------------------------------ timing


class Clock:
    """Marks on the device's own timeline, or on the host's."""

    def __init__(self, device: str) -> None:
        self.gpu = device.startswith("cuda")
        self.spare: list[Any] = []  # made before they are needed, not while something is timed

    def mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) if self.gpu else (stop - start) * 1e3

    def ready(self) -> None:
        """Nothing left to do on the device, and marks at hand."""
        if self.gpu:
            while len(self.spare) < 64:
                self.spare.append(torch.cuda.Event(enable_timing=True))
                self.spare[-1].record()  # which is when torch makes it
            torch.cuda.synchronize()

    def warm(self, seconds: float = 0.3) -> None:
        """Bring the device to the clocks it has under load."""
        gc.collect()
        if self.gpu:
            x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                for _ in range(20):
                    x @ x
                torch.cuda.synchronize()


@contextlib.contextmanager
def marked(modules: list[nn.Module], clock: Clock) -> Iterator[list[tuple[Any, Any]]]:
    """Within this scope, each call of these modules is listed with its span."""
    spans: list[tuple[Any, Any]] = []
    begun: list[Any] = []

    def enter(module: nn.Module, args: Any) -> None:
        begun.append(clock.mark())

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        spans.append((begun.pop(), clock.mark()))

    hooks = [module.register_forward_pre_hook(enter) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    try:
        yield spans
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def answering(modules: list[nn.Module], run: Run) -> Iterator[None]:
    """Within this scope, these modules hand out what they gave in one run, at once.

    Hooks on them would be timed with the layers around them, and weigh as much as they do.
    """
    given: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        given[module] = out

    hooks = [module.register_forward_hook(keep) for module in modules]
    run(0)
    for hook in hooks:
        hook.remove()
    for module in modules:
        module.__dict__["forward"] = lambda x, out=given[module]: out
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def median_of(run: Run, n: int, clock: Clock) -> float:
    """ms of a run."""
    found = []
    for i in range(n):
        clock.ready()
        start = clock.mark()
        run(i)
        stop = clock.mark()
        clock.ready()
        found.append(clock.ms(start, stop))
    return statistics.median(found)


def median_inside(run: Run, n: int, clock: Clock, layers: list[nn.Module]) -> float:
    """ms of all calls of ``layers`` in a run."""
    found = []
    for i in range(n):
        clock.ready()
        with marked(layers, clock) as spans:
            run(i)
        clock.ready()
        found.append(sum(clock.ms(*span) for span in spans))
    return statistics.median(found)


def three(run: Run, n: int, model: nn.Module, clock: Clock) -> dict[str, float]:
    """The whole model, its gated delta layers, and what lies between their projections."""
    layers = gated_layers(model)
    linears = [m for layer in layers for m in layer.children() if isinstance(m, nn.Linear)]
    found = {"model": median_of(run, n, clock), "layers": median_inside(run, n, clock, layers)}
    with answering(linears, run):
        found["core"] = median_inside(run, n, clock, layers)
    return found


def prefill(model: nn.Module, args: argparse.Namespace, clock: Clock) -> dict[str, float]:
    ids = torch.randint(0, args.vocabulary, (1, args.tokens), device=args.device)

    def run(_: int) -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    for i in range(2):
        run(i)
    clock.warm()
    return three(run, 3 if args.device == "cpu" else 5, model, clock)


def decode(model: nn.Module, args: argparse.Namespace, clock: Clock, B: int) -> dict[str, float]:
    ids = torch.randint(0, args.vocabulary, (B, args.context), device=args.device)
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    token = ids[:, :1]

    def run(_: int) -> None:
        model(token, past_key_values=cache, use_cache=True)

    for i in range(5):
        run(i)
    clock.warm()
    found = three(run, args.steps, model, clock)
    if clock.gpu:
        found["graph"] = graph_of_layers(model, cache, token, args)
    return found


def graph_of_layers(model: nn.Module, cache: Any, token: Tensor, args: argparse.Namespace) -> float:
    """ms of one replay of the gated delta layers' decode; nan where it cannot be captured."""
    x = torch.randn(token.shape[0], 1, model.config.hidden_size, device=args.device)
    x = x.to(args.dtype)

    def layers() -> None:
        for layer in gated_layers(model):
            layer(x, cache_params=cache)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layers()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            layers()
    except RuntimeError as reason:
        print(f"not captured: {str(reason).splitlines()[0][:90]}")
        torch.cuda.synchronize()
        return float("nan")
    clock = Clock("cuda")
    clock.warm()
    for _ in range(5):
        graph.replay()
    return median_of(lambda _: graph.replay(), 50, clock)


# ------------------------------------------------------------------------------------------- table


def measure(model: nn.Module, args: argparse.Namespace) -> tuple[Rows, Rows]:
    """Each row of stock and of the accelerated model, as long as there is time."""
    import sluice

    clock, stock, ours = Clock(args.device), {}, {}
    todo = [(f"decode B={B}", lambda B=B: decode(model, args, clock, B)) for B in args.batches]
    todo.insert(0, (f"prefill T={args.tokens}", lambda: prefill(model, args, clock)))
    for title, row in todo:
        if time.perf_counter() - STARTED > args.time_limit:
            print(f"no time for {title}")
            continue
        for _ in range(2):  # the second counts: in the first, either one compiles and tunes
            sluice.accelerate(model)
            ours[title] = row()
            sluice.restore(model)
            stock[title] = row()
        print(f"{title}: after {time.perf_counter() - STARTED:.0f} s", flush=True)
    return stock, ours


def show(stock: Rows, ours: Rows) -> None:
    names = {"model": "whole model", "layers": "gated delta layers", "core": "core"}
    names["graph"] = "layers, graph"
    print(f"\n{'ms':18}" + "".join(f"{title:>30}" for title in names.values()))
    print(f"{'':18}" + f"{'stock':>12}{'sluice':>10}{'x':>8}" * len(names))
    for title in (t for t in stock if t in ours):
        line = f"{title:18}"
        for part in names:
            a, b = stock[title].get(part), ours[title].get(part)
            line += f"{'':30}" if a is None or b is None else f"{a:12.3f}{b:10.3f}{a / b:8.2f}"
        print(line)


def new_lengths(args: argparse.Namespace) -> str:
    """What full attention of one token costs the first time a cache has this length, and again."""
    config = {"device": args.device, "dtype": args.dtype}
    clock, first, again = Clock(args.device), [], []
    q = torch.randn(1, 16, 1, 256, **config)
    for length in range(args.context, args.context + 8):
        k = torch.randn(1, 16, length, 256, **config)
        for found in (first, again):
            clock.ready()
            begun = time.perf_counter()
            nn.functional.scaled_dot_product_attention(q, k, k)
            clock.ready()
            found.append((time.perf_counter() - begun) * 1e3)
    return (
        f"{statistics.median(first):.2f} ms at a new length, {statistics.median(again):.2f} again"
    )


def choose_attention(args: argparse.Namespace) -> None:
    """Full attention without cuDNN, unless asked for; both are the same for either model."""
    if not args.device.startswith("cuda"):
        return
    print(f"full attention as torch chooses: {new_lengths(args)}")
    if not args.cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
        print(f"full attention without cuDNN: {new_lengths(args)}", flush=True)


def described(args: argparse.Namespace) -> str:
    import transformers

    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    found = "no fla"
    with contextlib.suppress(ImportError):
        import fla

        found = f"fla {fla.__version__}{'' if 'fla.ops' in sys.modules else ', not used'}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}, {versions}, {found}"


@torch.inference_mode()
def main() -> None:
    args = arguments()
    if args.fla_path:
        sys.path.insert(0, args.fla_path)
    import sluice
    from sluice.bench.peer_environment import for_peers

    for_peers()
    choose_attention(args)
    model = build(args)
    print(described(args), flush=True)
    print(f"built after {time.perf_counter() - STARTED:.0f} s", flush=True)
    stock_answers = answers(model, args, None)
    sluice.accelerate(model)
    agree(stock_answers, answers(model, args, stock_answers["tokens"]), args.dtype)
    sluice.restore(model)
    print(f"checked after {time.perf_counter() - STARTED:.0f} s", flush=True)
    stock, ours = measure(model, args)
    if args.json:
        args.json.write_text(json.dumps({"stock": stock, "sluice": ours}, indent=1), "utf-8")
    show(stock, ours)


if __name__ == "__main__":
    main()
