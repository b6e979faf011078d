"""Prefill in 16 bits where keys repeat: outputs are then sums that nearly cancel.

With beta = 1 and keys that are equal, correlated or repeated, `QKg D` telescopes. Kernels that
round both factors to bfloat16 have errors of 6e-3 to 9e-3 here at K = V = 128, twice their usual
error. With other betas the corrections themselves telescope: kernels that round their matrix and
their values to bfloat16 have errors of 1e-2 to 1e-1, also in the state. The bound is the same for
all inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import sluice
from sluice import calls
from sluice.testing import cases, oracle
from sluice.testing.compare import relative_error
from tests.suite import DEVICE, backends, run_or_skip

AIM = 6e-3
NAMES = ("identical_keys", "identical_keys_given", "correlated_keys", "repeated_keys")
ON_GPU = DEVICE == "cuda"
BY_NAME = {case.name.split("/")[-1]: case for case, _ in cases.pairs("prefill")}


@pytest.fixture
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter with the bfloat16 arithmetic of a GPU.

    The interpreter truncates float32 to bfloat16 and multiplies the bits of bfloat16 matrices as
    integers, so the backend refuses bfloat16 there. With this fixture it rounds and multiplies
    correctly.
    """
    import sluice.backends.triton as backend

    if backend.unavailable() is not None or not backend.interpreted():
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        return (x.astype(np.uint32) << 16).view(np.float32)

    def rounded(x: Any) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def converted(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return rounded(x)
        if (source, target) == (tl.bfloat16, tl.float32):
            return wide(x)
        return convert(x, source, target, mode)

    def product(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        def as_floats(x: Any) -> Any:
            if x.dtype.scalar != tl.bfloat16:
                return x
            return interpreter.TensorHandle(wide(x.data), tl.float32)

        return dot(self, as_floats(a), as_floats(b), d, *options)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    monkeypatch.setattr(backend, "refuse", lambda spec: None)
    yield
    calls.forget()  # what was bound although the backend refuses it


@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", backends("prefill"))
def test_repeated_keys_are_as_exact_as_others(backend, name):
    tokens, heads = (2100, 2) if ON_GPU else (195, 1)
    case = BY_NAME[name].with_(K=128, V=128, tokens=tokens, Hk=heads, Hv=heads, beta_one=True)
    inputs = case.inputs(torch.bfloat16, DEVICE)
    expected = case.expected(inputs)
    outputs = run_or_skip(case, inputs, backend)
    error = relative_error(outputs["o"].cpu(), expected.outputs["o"].cpu())
    assert error <= AIM
    case.check(outputs, expected)


KEYS = ("identical", "cosine 0.98", "every 4", "every 16")
BETAS = (1.0, 0.9, 0.6, None)  # None: random
WAYS = (
    ("no decay", torch.bfloat16),
    ("no decay", torch.float16),
    ("decay, state", torch.bfloat16),
    ("normalised", torch.bfloat16),
)


def nearly_repeated(kind: str, tokens: int, K: int = 128) -> Tensor:
    """Unit keys [tokens, K]: equal, close to one key, repeating, or independent."""
    keys = torch.nn.functional.normalize(torch.randn(tokens, K), dim=-1)
    how, _, number = kind.partition(" ")
    if how == "independent":
        return keys
    if how == "every":
        return keys[: int(number)].repeat(tokens // int(number) + 1, 1)[:tokens]
    cosine = float(number) if number else 1.0
    near = cosine * keys[:1] + (1 - cosine**2) ** 0.5 * keys
    return torch.nn.functional.normalize(near, dim=-1)


def call_of(
    keys: list[Tensor], betas: tuple[float | None, ...], dtype: torch.dtype, V: int = 0
) -> Any:
    """A call with these key heads, each with one value head per entry of ``betas``."""
    tokens, K = keys[0].shape
    V = V or (128 if ON_GPU else 32)
    HK, HV = len(keys), len(keys) * len(betas)
    q = torch.nn.functional.normalize(torch.randn(1, tokens, HK, K), dim=-1)
    beta = torch.rand(1, tokens, HV)
    for head in range(HV):
        constant = betas[head % len(betas)]
        if constant is not None:
            beta[:, :, head] = constant
    call = {
        "q": q.to(dtype),
        "k": torch.stack(keys, dim=1)[None].to(dtype),
        "v": torch.randn(1, tokens, HV, V).to(dtype),
        "beta": beta,
        "state": torch.zeros(1, HV, V, K),
    }
    return {name: x.to(DEVICE) for name, x in call.items()}


def repeating_call(dtype: torch.dtype, way: str) -> dict[str, Any]:
    """A call with one key head per entry of KEYS, each with one value head per entry of BETAS."""
    torch.manual_seed(0)
    tokens = 1000 if ON_GPU else 195
    call = call_of([nearly_repeated(kind, tokens) for kind in KEYS], BETAS, dtype)
    if way == "normalised":
        lengths = torch.rand(1, tokens, len(KEYS), 1, device=DEVICE) + 0.5
        call |= {"k": (call["k"] * lengths).to(dtype), "normalize_qk": True}
    if way == "decay, state":
        call["g"] = -0.015 * torch.rand(call["beta"].shape, device=DEVICE)
        call["state"] = 0.3 * torch.randn(call["state"].shape, device=DEVICE)
    return call


def found_by(backend: str, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The result of ``prefill``, with the state in a copy of the pool."""
    own = call | {"state": call["state"].clone()}
    try:
        return sluice.prefill(**own, backend=backend)
    except sluice.BackendError as refusal:
        pytest.skip(str(refusal))


def errors(found: Tensor, exact: Tensor, dim: int) -> list[float]:
    """The relative error of each slice of a dimension."""
    pairs = zip(found.cpu().unbind(dim), exact.cpu().unbind(dim), strict=True)
    return [relative_error(x, y) for x, y in pairs]


@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
@pytest.mark.parametrize(("way", "dtype"), WAYS)
@pytest.mark.parametrize("backend", backends("prefill"))
def test_outputs_and_states_of_nearly_repeated_keys(backend, way, dtype):
    """Here roundings of the corrections add up from token to token, in o and in the state."""
    call = repeating_call(dtype, way)
    exact_o, exact_state = oracle.delta(**call)
    o, state = found_by(backend, call)
    names = [f"{keys}, beta {beta}" for keys in KEYS for beta in BETAS]
    found = zip(names, errors(o, exact_o, 2), errors(state, exact_state, 1), strict=True)
    assert not [line for line in found if not max(line[1:]) <= AIM]


@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
@pytest.mark.parametrize("kind", ["independent", "cosine 0.98"])
@pytest.mark.parametrize(
    ("dtype", "beta", "aim"), [(torch.bfloat16, 0.7011, 4e-4), (torch.float16, 0.70093, 1e-4)]
)
@pytest.mark.parametrize("backend", backends("prefill"))
def test_beta_keeps_the_bits_the_inputs_have_not(backend, dtype, beta, aim, kind):
    """Rounded to the inputs' dtype, these betas and the state would be off by 2.6e-3 and 3.5e-4."""
    torch.manual_seed(0)
    call = call_of([nearly_repeated(kind, 128)], (beta,), dtype)
    _, exact = oracle.delta(**call)
    _, found = found_by(backend, call)
    share = (found.cpu().double() * exact.cpu()).sum() / exact.cpu().square().sum()
    assert abs(share - 1) <= aim


LENGTHS = (75, 66, 11, 5, 2, 1, 64)


@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
@pytest.mark.parametrize("backend", backends("prefill"))
def test_a_short_last_chunk_of_equal_keys_is_as_exact(backend):
    """Packed sequences of one key each: few tokens have few equal pairs, but errors add up."""
    torch.manual_seed(0)
    keys = torch.cat([nearly_repeated("identical", n) for n in LENGTHS])
    call = call_of([keys], (1.0, 0.9, 0.6), torch.bfloat16)
    call["state"] = call["state"].repeat(len(LENGTHS), 1, 1, 1)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    call["cu_seqlens"] = ends.to(torch.int32).to(DEVICE)
    exact_o, exact_state = oracle.delta(**call)
    o, state = found_by(backend, call)
    for i, (begin, end) in enumerate(pairwise(ends.tolist())):
        assert max(errors(o[:, begin:end], exact_o[:, begin:end], 2)) <= AIM, LENGTHS[i]
        assert max(errors(state[i], exact_state[i], 0)) <= AIM, LENGTHS[i]


@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
@pytest.mark.parametrize(("K", "V"), [(64, 64), (256, 128), (48, 80)])
@pytest.mark.parametrize("backend", backends("prefill"))
def test_equal_keys_of_other_sizes(backend, K, V):
    """Sizes at which kernels divide a state in other ways."""
    torch.manual_seed(0)
    keys = [nearly_repeated(kind, 150, K) for kind in ("identical", "every 4")]
    call = call_of(keys, (0.9,), torch.bfloat16, V)
    exact_o, exact_state = oracle.delta(**call)
    o, state = found_by(backend, call)
    assert max(errors(o, exact_o, 2)) <= AIM
    assert max(errors(state, exact_state, 1)) <= AIM


@pytest.fixture
def bound_anew() -> Iterator[None]:
    """Nothing that a test binds by a plan of its own is left for others."""
    yield
    calls.forget()


@pytest.mark.usefixtures("bfloat16_in_the_interpreter", "bound_anew")
@pytest.mark.parametrize("segment", [0, 128])
@pytest.mark.parametrize("backend", backends("prefill"))
def test_chunks_of_equal_keys_among_others(backend, segment, monkeypatch):
    """Runs of one to three chunks of either kind, with checkpoints inside and cut in segments."""
    torch.manual_seed(0)
    kinds = ["identical"] * 2 + ["independent"] + ["identical"] + ["independent"] * 2
    keys = torch.cat([nearly_repeated(kind, 64) for kind in kinds])[:-20]
    call = call_of([keys], (0.9,), torch.bfloat16)
    positions = torch.tensor([[40, 128, 150, 230, 270]], device=DEVICE)
    slots = 1 + torch.arange(positions.shape[1], device=DEVICE)[None]
    call |= {
        "g": -0.01 * torch.rand(call["beta"].shape, device=DEVICE),
        "state": 0.3 * torch.randn(6, *call["state"].shape[1:], device=DEVICE),
        "slots": torch.zeros(1, dtype=torch.int64, device=DEVICE),
        "checkpoints": sluice.Checkpoints(slots, positions=positions),
    }
    exact_o, exact_state = oracle.delta(**call)
    if backend == "triton":
        cut_by_triton(segment, monkeypatch)
    elif segment:
        pytest.skip("plans of Triton's")
    o, state = found_by(backend, call)
    for found, exact in zip(o.split(64, dim=1), exact_o.split(64, dim=1), strict=True):
        assert relative_error(found.cpu(), exact.cpu()) <= AIM
    assert max(errors(state, exact_state, 0)) <= AIM


@pytest.mark.usefixtures("bfloat16_in_the_interpreter")
@pytest.mark.parametrize("backend", backends("prefill"))
def test_hard_and_ordinary_chunks_take_turns(backend):
    """Each kind after each, and a partial end; without checkpoints."""
    torch.manual_seed(1)
    kinds = ["independent", "identical", "independent", "independent", "identical", "identical"]
    kinds = (kinds * 4 if ON_GPU else kinds) + ["independent"]
    keys = [torch.cat([nearly_repeated(kind, 64) for kind in kinds])[:-30] for _ in range(2)]
    call = call_of(keys, (0.9,), torch.bfloat16)
    call["g"] = -0.01 * torch.rand(call["beta"].shape, device=DEVICE)
    exact_o, exact_state = oracle.delta(**call)
    o, state = found_by(backend, call)
    for found, exact in zip(o.split(64, dim=1), exact_o.split(64, dim=1), strict=True):
        assert relative_error(found.cpu(), exact.cpu()) <= AIM
    assert max(errors(state, exact_state, 1)) <= AIM


def cut_by_triton(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton cut sequences into these segments, and look two chunks ahead where possible."""
    from sluice.backends.triton import interpreted, prefill

    plan = prefill.Plan(segment, 32, 4, 2)
    calls.forget()  # what was bound by another plan
    monkeypatch.setattr(prefill, "best_plan", lambda p, processors: plan)
    if interpreted():
        import triton.language as tl

        from sluice.backends.triton.kernels import prefill_chunk_loop

        monkeypatch.setattr(prefill_chunk_loop, "RUN", tl.constexpr(2))


@pytest.mark.parametrize("exponent", [-6, 9])
@pytest.mark.parametrize("backend", backends("prefill"))
def test_products_beyond_float16_are_no_trouble(backend, exponent):
    """`q · k` up to 2¹⁸ · 128, or mostly below float16's smallest number, with float16 inputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, 1, 64, device=DEVICE) for _ in range(3))
    size = 2.0**exponent
    g = torch.full((1, 150, 1), -0.05, device=DEVICE)
    state = torch.zeros(1, 1, 64, 64, device=DEVICE)
    half = [x.half() for x in (q * size, k * size, v / 64)]
    exact = sluice.prefill(*(x.double() for x in half), g=g.double(), scale=size**-2 / 8,
                           state=state.double(), backend="reference")  # fmt: skip
    try:
        found = sluice.prefill(*half, g=g, scale=size**-2 / 8, state=state, backend=backend)
    except sluice.BackendError as refusal:
        pytest.skip(str(refusal))
    assert relative_error(found[0].cpu(), exact[0].cpu()) <= 2e-3
