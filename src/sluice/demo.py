"""``sluice demo``: compare one hybrid model in stock transformers and in sluice, then time both.

Nothing is timed unless the outputs agree. Rounds of both are interleaved; medians are reported.
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sluice
from sluice import dispatch
from sluice.contract.errors import ContractError, SluiceError
from sluice.doctor import specs
from sluice.integrations.transformers import accelerate, known_layers, plain_torch, restore
from sluice.layers.qwen import ORDERS, QwenShape, from_config, linear_layers_of, named, preset
from sluice.neighbours import BUSY, Neighbours
from sluice.state_pool import MissingDependencyError
from sluice.testing.compare import largest_error, relative_error

KINDS = ("transformers", "sluice")
# what is timed: the whole model, its gated delta layers, and their operators (no projections)
PHASES = ("prefill", "prefill_gdn", "prefill_ops", "decode", "decode_gdn", "decode_ops")
# relative error of the logits; a lost or stale state makes it about 1
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
HIDDEN, VOCABULARY, KEPT_LOGITS = 1024, 4096, 16

Progress = Callable[[int], AbstractContextManager[Callable[[str], None]]]


@dataclass(frozen=True)
class Options:
    """The options; ``model`` is a Qwen model, whose heads are taken, or a checkpoint directory."""

    model: str = "Qwen3.5-4B"
    batch: int = 8
    prompt_length: int = 256
    tokens: int = 32
    rounds: int = 3
    layers: int = 4
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def checkpoint(self) -> Path | None:
        """The directory, where ``model`` is one."""
        path = Path(self.model)
        return path if path.is_dir() or path.is_absolute() else None


@dataclass
class Result:
    """The result. ``seconds[phase][kind]`` has one entry per round; empty if outputs disagree."""

    model: str
    notes: list[str]
    machine: dict[str, Any]
    backends: dict[str, str]
    options: dict[str, Any]
    error: float
    largest: float
    tolerance: float
    equal_tokens: int
    all_tokens: int
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    others: float | None = None  # share of the cores that other programs took while it was timed

    @property
    def busy(self) -> bool:
        """Whether other programs took so much of the cores that times are not reliable."""
        return (self.others or 0.0) > BUSY

    @property
    def agree(self) -> bool:
        """Whether logits are within tolerance and, in float32, all greedy tokens are the same."""
        exact = self.options["dtype"] == "float32"  # else rounding may decide near ties
        same = self.equal_tokens == self.all_tokens or not exact
        return self.error <= self.tolerance and same

    def median(self, phase: str, kind: str) -> float:
        """Milliseconds."""
        return 1e3 * statistics.median(self.seconds[phase][kind])

    def to_json(self) -> dict[str, Any]:
        """Plain data: what ``--json`` writes."""
        medians = {p: {k: round(self.median(p, k), 4) for k in KINDS} for p in self.seconds}
        return {**asdict(self), "agree": self.agree, "median_ms": medians}

    def agreement(self) -> str:
        """The agreement in one sentence."""
        verb = "agree" if self.agree else "DISAGREE"
        return (
            f"Outputs {verb}: relative error of the logits {self.error:.1e} (largest single one "
            f"{self.largest:.1e}; allowed {self.tolerance:.0e}), {self.equal_tokens} of "
            f"{self.all_tokens} greedy tokens equal"
            + ("." if self.options["dtype"] == "float32" else " (near ties may fall either way).")
        )

    def line(self) -> str:
        """The speed-ups in one line: of the whole model, and of the layers without projections."""
        dtype = self.options["dtype"]
        if not self.agree:
            return f"{dtype}: {self.agreement()}"
        parts = []
        for phase in ("prefill", "decode"):
            stock, ours = (self.median(f"{phase}_ops", kind) for kind in KINDS)
            whole = self.median(phase, "transformers") / self.median(phase, "sluice")
            parts.append(
                f"{phase} {whole:.2f}x, without projections {stock / ours:.2f}x ({ours:.2f} ms)"
            )
        return f"In {dtype} (logits within {self.error:.0e}): {'; '.join(parts)}."

    def table(self) -> str:
        """The times of both, as a table."""
        batch, prompt = self.options["batch"], self.options["prompt_length"]
        names = {
            "prefill": f"prefill, {batch} x {prompt} tokens",
            "prefill_gdn": "  its gated delta layers",
            "prefill_ops": "    without projections",
            "decode": f"decode, a step of {batch}",
            "decode_gdn": "  its gated delta layers",
            "decode_ops": "    without projections",
        }
        lines = [f"{'':<28}{'transformers':>14}{'sluice':>14}{'speed-up':>12}"]
        for phase, name in names.items():
            stock, ours = (self.median(phase, kind) for kind in KINDS)
            cells = f"{stock:>11.2f} ms{ours:>11.2f} ms{stock / ours:>11.2f}x"
            lines.append(f"{name:<28}{cells}")
        return "\n".join(lines)


def run(options: Options, progress: Progress) -> Result:
    """Build or load the model, compare the outputs, and time both if they agree."""
    _need_transformers()
    folder = options.checkpoint
    if folder is None:
        named("demo", "--model", options.model)  # refuses an unknown name before anything is shown
    elif not (folder / "config.json").is_file():
        raise SluiceError(f"--model: expected a directory with config.json, got {folder}")
    with torch.no_grad(), progress(3 + 2 * options.rounds) as advance:
        advance("building the model")
        model, shape, notes = load(options) if folder else build(options)
        ids = _prompt(model, options)
        outputs: dict[str, tuple[Tensor, Tensor]] = {}
        for kind in KINDS:
            advance(f"comparing: {kind}")
            with running(model, kind):
                feed = outputs["transformers"][1] if outputs else None
                outputs[kind] = generate(model, ids, options.tokens, feed)
        result = compare(shape, notes, options, outputs)
        if not result.agree:
            return result
        result.seconds = {phase: {kind: [] for kind in KINDS} for phase in PHASES}
        _, feed = outputs["transformers"]
        neighbours = Neighbours()
        for i in range(options.rounds):
            for kind in KINDS if i % 2 == 0 else reversed(KINDS):
                advance(f"round {i + 1} of {options.rounds}: {kind}")
                with running(model, kind):
                    for phase, seconds in timed(model, ids, feed).items():
                        result.seconds[phase][kind].append(seconds)
        result.others = neighbours.share()
    return result


def build(options: Options) -> tuple[nn.Module, QwenShape, list[str]]:
    """A model with a preset's gated delta heads, its shape, and what was made smaller."""
    import transformers

    shape = preset(options.model)
    hidden, layers = min(shape.hidden, HIDDEN), options.layers
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_num_key_heads": shape.num_k_heads,
        "linear_num_value_heads": shape.num_v_heads,
        "linear_key_head_dim": shape.head_k_dim,
        "linear_value_head_dim": shape.head_v_dim,
        "linear_conv_kernel_dim": shape.conv_width,
    }
    torch.manual_seed(0)
    kind: Any
    if shape.order == "interleaved":
        config: Any = transformers.Qwen3NextConfig(**sizes, mlp_only_layers=list(range(layers)))
        kind = transformers.Qwen3NextForCausalLM
    else:
        config = transformers.Qwen3_5TextConfig(**sizes)
        kind = transformers.Qwen3_5ForCausalLM
    model = kind(config).eval().requires_grad_(False)
    for layer in known_layers(model):
        _remembering(layer, shape)
    linear = len(linear_layers_of(layers))
    notes = [
        f"random weights; gated delta heads as in {shape.name}: {shape.num_k_heads} key and "
        f"{shape.num_v_heads} value heads of {shape.head_v_dim}, conv width {shape.conv_width}",
        f"made small: {layers} of {shape.layers} layers ({linear} gated delta, the rest full "
        f"attention), hidden {hidden} of {shape.hidden}, a dense MLP of {2 * hidden}, "
        f"{VOCABULARY} words",
    ]
    return model.to(options.device, options.dtype), shape, notes


def load(options: Options) -> tuple[nn.Module, QwenShape, list[str]]:
    """The whole model of a checkpoint directory."""
    import transformers

    folder = options.checkpoint
    assert folder is not None
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
        if kind not in ORDERS:
            raise ContractError("--model", "model_type", f"one of {', '.join(ORDERS)}", repr(kind))
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        shape = from_config(config)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=options.dtype, local_files_only=True
        )
    except SluiceError:
        raise
    except Exception as error:  # a damaged checkpoint may raise anything
        raise SluiceError(f"--model: cannot load {folder}: {error}") from error
    notes = [f"checkpoint {folder}, {shape.layers} layers ({shape.linear_layers} linear)"]
    return model.to(options.device).eval().requires_grad_(False), shape, notes


@contextlib.contextmanager
def running(model: nn.Module, kind: str) -> Iterator[None]:
    """A scope in which the model runs its own layers, or sluice's."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    with ExitStack() as stack:
        if kind == "sluice":
            accelerate(model)
            stack.callback(restore, model)
        else:
            stack.enter_context(plain_torch(model) if on_cpu else nullcontext())
        yield


def generate(
    model: Any, ids: Tensor, tokens: int, feed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of the prompt's last token and of every token after it, and the greedy tokens.

    ``feed``: tokens to decode instead of the greedy ones, so that two runs see the same input.
    """
    out = model(ids, use_cache=True, logits_to_keep=min(KEPT_LOGITS, ids.shape[1]))
    logits, picks = [out.logits], [out.logits[:, -1].argmax(-1, keepdim=True)]
    for i in range(tokens):
        token = picks[-1] if feed is None else feed[:, i : i + 1]
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
        picks.append(out.logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(logits, dim=1).float(), torch.cat(picks, dim=1)


def compare(
    shape: QwenShape,
    notes: list[str],
    options: Options,
    outputs: dict[str, tuple[Tensor, Tensor]],
) -> Result:
    """The difference between sluice's outputs and the stock ones."""
    (exact, expected), (logits, picks) = (outputs[kind] for kind in KINDS)
    device = torch.device(options.device)
    ran = ("conv_qkv", "prefill", "rms_norm_gated", "step")
    served = (s for s in specs(shape, device, options.dtype) if s.op in ran)
    about = {**asdict(options), "dtype": str(options.dtype).removeprefix("torch.")}
    return Result(
        model=shape.name if options.checkpoint is None else options.model,
        notes=notes,
        machine=machine(device),
        backends={s.op: dispatch.explain(s).chosen or "-" for s in served},
        options=about,
        error=relative_error(logits, exact),
        largest=largest_error(logits, exact),
        tolerance=TOLERANCE[options.dtype],
        equal_tokens=int((picks == expected).sum()),
        all_tokens=picks.numel(),
    )


def timed(model: Any, ids: Tensor, feed: Tensor) -> dict[str, float]:
    """Seconds of prefill, and of decode per token, in the order of ``PHASES``."""
    layers = known_layers(model)
    linear: list[nn.Module] = [
        m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)
    ]
    with Watch(layers, ids.device) as watch, Watch(linear, ids.device) as projections:

        def parts(begin: float) -> tuple[float, float, float]:
            whole, inside = watch.now() - begin, watch.lap()
            return whole, inside, inside - projections.lap()

        begin = watch.now()
        out = model(ids, use_cache=True, logits_to_keep=1)
        prefill, steps = parts(begin), []
        for token in feed[:, :-1].split(1, dim=1):
            begin = watch.now()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            steps.append(parts(begin))
    decode = [statistics.median(part) for part in zip(*steps, strict=True)]
    return dict(zip(PHASES, (*prefill, *decode), strict=True))


class Watch:
    """Adds up the time spent in some modules with hooks; on a GPU with events."""

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        self.modules, self.device = modules, device
        self.marks: list[Any] = []  # starts and ends, in turn

    def now(self) -> float:
        """The host's clock, after waiting for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self, *_: Any) -> None:
        """A hook that records the current time."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
        else:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def lap(self) -> float:
        """Seconds in the modules since the last call; the device must be idle."""
        pairs, self.marks = list(zip(self.marks[::2], self.marks[1::2], strict=True)), []
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in pairs)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    def __enter__(self) -> Watch:
        self.hooks = [m.register_forward_pre_hook(self.mark) for m in self.modules]
        self.hooks += [m.register_forward_hook(self.mark) for m in self.modules]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and the versions."""
    import transformers

    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif (info := Path("/proc/cpuinfo")).is_file():
        models = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "sluice": sluice.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _prompt(model: Any, options: Options) -> Tensor:
    words = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    size = options.batch, options.prompt_length
    return torch.randint(words, size, generator=generator).to(options.device)


def _remembering(layer: Any, shape: QwenShape) -> None:
    """Set gates to values like those of trained models, so that outputs depend on the state.

    A newly initialised transformers layer forgets nearly everything at every token.
    """
    layer.A_log.uniform_(0.05, 4.0).log_()
    layer.dt_bias.uniform_(0.01, 0.2).expm1_().log_()  # softplus of it is 0.01 to 0.2
    layer.norm.activation = shape.gate_activation


def _need_transformers() -> None:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            'the demo compares with transformers: pip install "sluice-gdn[transformers]"'
        ) from error
    except Exception as error:  # a broken install raises anything
        raise MissingDependencyError(
            f"the demo compares with transformers, which cannot be imported: {error!r}"
        ) from error
    transformers.logging.set_verbosity_error()  # hides its advice to install other packages
