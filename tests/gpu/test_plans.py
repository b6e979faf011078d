"""Plans: a launch worked out once must be what a launch worked out anew would be, every time.

Nothing is launched here. A stand-in for the compiled kernel keeps what it is given, and that is
held against what ``launch.run`` gets from a call that remembers nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402

import sluice  # noqa: E402
from sluice import dispatch, library  # noqa: E402
from sluice.backends import triton as backend  # noqa: E402
from sluice.backends.triton import configs, launch  # noqa: E402
from sluice.backends.triton.configs import Config  # noqa: E402

not_interpreted = pytest.mark.skipif(
    backend.interpreted(), reason="kernels have no signature there"
)


class Compiled:
    """What a plan sees of a compiled kernel; its launches are kept."""

    def __init__(self, kernel: Any, seen: list[dict[str, Any]], target: str = "cuda") -> None:
        self.kernel, self.seen = kernel, seen
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend=target))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launched(*values: Any) -> None:
            named = dict(zip(self.kernel.arg_names, values, strict=True))
            self.seen.append({"programs": grid[0], **named})

        return launched


class Triton:
    """Stands in for ``launch.run``: ``bound`` by it, ``direct`` past it."""

    def __init__(self, target: str = "cuda") -> None:
        self.bound: list[dict[str, Any]] = []
        self.direct: list[dict[str, Any]] = []
        self.target = target

    def run(self, kernel: Any, programs: int, arguments: dict[str, Any], options: Any) -> Any:
        addresses = {
            name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in arguments.items()
        }
        self.bound.append({"programs": programs, **addresses})
        return Compiled(kernel, self.direct, self.target)


def forget() -> None:
    launch.forget()
    library._problems.clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    seen = Triton()
    monkeypatch.setattr(launch, "run", lambda *launched: seen.run(*launched))
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(dispatch, "select", lambda p, _=None: backend.kernel(p.op))
    forget()
    yield seen
    forget()


# ----------------------------------------------------------------------------------- the operators

HK, HV, K, V, P, N = 2, 4, 16, 16, 6, 2
D = 2 * HK * K + HV * V
HALF = torch.float16


def rand(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.rand(shape).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same shape, other strides, the last one kept."""
    return torch.stack([x, x])[0] if x.dim() < 2 else torch.cat([x, x], -1)[..., : x.shape[-1]]


def step_calls() -> dict[str, dict[str, Any]]:
    """Calls that differ in one thing each."""
    slots = torch.tensor([1, 4])
    plain: dict[str, Any] = {
        "qkvz": (rand(N, 1, D), rand(N, 1, HV * V)),
        "ba": (rand(N, 1, HV), rand(N, 1, HV)),
        "conv_weight": rand(D, 4),
        "A_log": rand(HV, dtype=torch.float32),
        "dt_bias": rand(HV, dtype=torch.float32),
        "norm_weight": rand(V),
        "conv_state": rand(P, D, 3),
        "state": rand(P, HV, V, K, dtype=torch.float32),
        "out": rand(N, 1, HV * V),
    }
    both = (strided(plain["qkvz"][0]), strided(plain["qkvz"][1]))
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "slots": {"slots": slots},
        "narrow slots": {"slots": slots.int()},
        "every second slot": {"slots": torch.tensor([1, 0, 4, 0])[::2]},
        "write slots": {"slots": slots, "write_slots": slots + 1},
        "has_state": {"slots": slots, "has_state": torch.tensor([True, False])},
        "pad_slot": {"slots": slots, "pad_slot": 0},
        "strides of x": {"qkvz": both},
        "strides of the gates": {"ba": tuple(strided(x) for x in plain["ba"])},
        "a strided A_log": {"A_log": rand(2 * HV, dtype=torch.float32)[::2]},
        "strides of out": {"out": strided(plain["out"])},
        "a pool inside another": {"state": rand(P, 2 * HV, V, K, dtype=torch.float32)[:, :HV]},
        "another window": {"conv_state": rand(P, 3, D).transpose(1, 2)},
        "a longer window": {"conv_state": rand(P, D, 5)},
        "weights of a Conv1d": {"conv_weight": rand(D, 1, 4)},
        "dtype of the state": {"state": rand(P, HV, V, K)},
        "dtype of the window": {"conv_state": rand(P, D, 3, dtype=torch.float32)},
        "dtype of A_log": {"A_log": rand(HV)},
        "layout": {"state_layout": "kv"},
        "bias": {"conv_bias": rand(D)},
        "scale": {"scale": 0.5},
        "eps": {"eps": 1e-3},
        "gate": {"gate_activation": "sigmoid"},
        "no norm of q and k": {"normalize_qk": False},
        "neg_eigval": {"neg_eigval": True},
        "two tokens": {
            "qkvz": (rand(N, 2, D), rand(N, 2, HV * V)),
            "ba": (rand(N, 2, HV), rand(N, 2, HV)),
            "out": rand(N, 2, HV * V),
        },
        "interleaved": {
            "qkvz": rand(N, 1, D + HV * V), "ba": rand(N, 1, 2 * HV), "order": "interleaved",
        },
    }  # fmt: skip
    return {name: {**plain, **change} for name, change in changes.items()}


def decode_calls() -> dict[str, dict[str, Any]]:
    slots, float32 = torch.tensor([1, 4]), torch.float32
    plain: dict[str, Any] = {
        "q": rand(N, 1, HK, K),
        "k": rand(N, 1, HK, K),
        "v": rand(N, 1, HV, V),
        "g": -rand(N, 1, HV, dtype=float32),
        "beta": rand(N, 1, HV, dtype=float32),
        "state": rand(P, HV, V, K, dtype=float32),
        "out": rand(N, 1, HV, V),
    }
    tokens = {name: x for name, x in plain.items() if name != "state"}
    packed = {name: x.flatten(0, 1).unsqueeze(0) for name, x in tokens.items()}
    swapped = {name: x.transpose(1, 2) for name, x in tokens.items()}
    per_key = -rand(N, 1, HV, K, dtype=float32)
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "slots": {"slots": slots},
        "write slots": {"slots": slots, "write_slots": slots.int() + 1},
        "has_state": {"has_state": torch.tensor([True, False])},
        "pad_slot": {"slots": slots, "pad_slot": 0},
        "strides of q": {"q": strided(plain["q"])},
        "strides of v": {"v": strided(plain["v"])},
        "strides of g": {"g": strided(plain["g"])},
        "no g": {"g": None},
        "no beta": {"beta": None},
        "g per key": {"g": per_key},
        "g per key, strided": {"g": per_key.transpose(2, 3).contiguous().transpose(2, 3)},
        "raw gates": {"A_log": rand(HV), "dt_bias": rand(HV)},
        "a pool inside another": {"state": rand(P, 2 * HV, V, K, dtype=float32)[:, :HV]},
        "dtype of the state": {"state": rand(P, HV, V, K)},
        "dtype of g": {"g": -rand(N, 1, HV)},
        "layout": {"state_layout": "kv"},
        "scale": {"scale": 0.5},
        "normalize_qk": {"normalize_qk": True},
        "packed": {**packed, "cu_seqlens": torch.tensor([0, 1, 2])},
        "packed as one": {**packed, "cu_seqlens": torch.tensor([0, 2])},
        "[B, H, T, D]": {"layout": "bhtd", **swapped},
    }
    return {name: {**plain, **change} for name, change in changes.items()}


CALLS = {"step": step_calls, "decode": decode_calls}
# tensors that are copied in each call lie elsewhere each time
COPIED = {
    "every second slot": "slots_ptr",
    "a strided A_log": "A_log_ptr",
    "g per key, strided": "g_ptr",
}


def differences(name: str, found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    assert found.keys() == wanted.keys()
    return {
        key: (found[key], wanted[key])
        for key in wanted
        if found[key] != wanted[key] and key != COPIED.get(name)
    }


@not_interpreted
@pytest.mark.parametrize("op", CALLS)
def test_a_remembered_launch_is_the_one_a_fresh_call_would_make(op, seen):
    """Each call twice after each other call: never what another, or an earlier, one brought."""
    call, wanted = getattr(sluice, op), {}
    calls = CALLS[op]()
    for name, arguments in calls.items():
        forget()
        call(**arguments)
        wanted[name] = seen.bound.pop()
    forget()
    for _ in range(2):
        for name, arguments in calls.items():
            for _ in range(2):
                seen.bound.clear(), seen.direct.clear()
                call(**arguments)
                (found,) = seen.bound + seen.direct
                assert differences(name, found, wanted[name]) == {}, name
                if name in COPIED:
                    given = arguments[COPIED[name].removesuffix("_ptr")]
                    assert found[COPIED[name]] != given.data_ptr(), f"{name}: not copied"
            assert seen.direct, f"{name}: not launched as planned"


@not_interpreted
def test_the_tensors_of_a_call_are_its_own(seen):
    """The same shapes, other tensors, as in every step of decode."""
    sluice.decode(**decode_calls()["plain"])
    other = decode_calls()["plain"]
    sluice.decode(**other)
    (found,) = seen.direct
    for name in ("q", "k", "v", "g", "beta", "state"):
        assert found[f"{name}_ptr"] == other[name].data_ptr()
    assert found["o_ptr"] == other["out"].data_ptr()


@not_interpreted
@pytest.mark.parametrize("op", CALLS)
def test_a_wrong_argument_is_refused_in_every_call(op, seen):
    """Between calls that are right, too."""
    call, plain = getattr(sluice, op), CALLS[op]()["plain"]
    wrong = {**plain, "state": plain["state"][:, :1]}
    texts = set()
    for _ in range(3):
        call(**plain)
        with pytest.raises(sluice.ContractError) as refusal:
            call(**wrong)
        texts.add(str(refusal.value))
    assert len(texts) == 1
    assert len(seen.bound) + len(seen.direct) == 3


@not_interpreted
def test_verify_and_commit_have_plans_of_their_own(seen):
    arguments = decode_calls()["slots"]
    del arguments["out"]
    for _ in range(2):
        _, draft = sluice.verify(**arguments)
        sluice.commit(draft, torch.tensor([1, 0]))
        sluice.decode(**arguments)
    assert len(seen.bound) == len(seen.direct) == 3
    verified, committed, decoded = seen.direct
    assert decoded["draft_k_ptr"] is None
    assert verified["draft_k_ptr"] == committed["draft_k_ptr"] == draft.k.data_ptr()


def test_problems_on_other_devices_are_others():
    """A plan is a problem's, and a device is part of what makes it that problem."""
    o = sluice.contract.options.DeltaOptions()
    found = []
    for device in ("cpu", "meta"):
        made = {
            name: x.to(device) for name, x in decode_calls()["plain"].items() if name != "state"
        }
        pool = torch.zeros(P, HV, V, K, device=device)
        t = library.DECODE.tensors(
            made["q"], made["k"], made["v"], made["g"], made["beta"], None, None, pool,
            sluice.contract.tensors.Rows(), None, None, made["out"],
        )  # fmt: skip
        found.append([library.problem_of(library.DECODE, t, o) for _ in range(2)])
    (a, b), (c, d) = found
    assert a is b
    assert c is d
    assert a is not c


# ---------------------------------------------------------------------------------------- the plan


class Kernel:
    """``kernel(a_ptr, b_ptr, n)``; b's alignment is no part of it."""

    def __init__(self) -> None:
        self.arg_names = ["a_ptr", "b_ptr", "n"]
        self.params = [
            SimpleNamespace(do_not_specialize_on_alignment=free) for free in (False, True, True)
        ]
        self.pre_run_hooks: list[Any] = []


def plan(device: str = "cpu", programs: int = 3, **more: Any) -> launch.Plan:
    pointers = (torch.zeros(64), torch.zeros(64))
    return launch.Plan(
        Kernel(), programs, Config(1), torch.device(device), pointers, n=7, **more
    )  # fmt: skip


def test_an_address_that_is_no_multiple_of_16_goes_through_triton(seen):
    p, x = plan(), torch.zeros(64)
    p(x, x)
    p(x[1:33], x)
    p(x, x[1:33])
    assert [call["a_ptr"] for call in seen.bound] == [x.data_ptr(), x.data_ptr() + 4]
    (direct,) = seen.direct
    assert direct == {"programs": 3, "a_ptr": x.data_ptr(), "b_ptr": x.data_ptr() + 4, "n": 7}


def test_a_first_address_that_is_no_multiple_of_16_is_not_remembered(seen):
    p, x = plan(), torch.zeros(64)
    p(x[1:33], x)
    p(x, x)
    p(x, x)
    assert len(seen.bound) == 2
    assert len(seen.direct) == 1


@pytest.mark.parametrize("what", ["debug", "instrumentation", "hook", "stages"])
def test_settings_that_change_kernels_go_through_triton(what, seen, monkeypatch):
    p, x = plan(), torch.zeros(64)

    def setting() -> None:
        knobs = triton.knobs
        if what == "debug":
            monkeypatch.setattr(knobs.runtime, "debug", True)
        elif what == "instrumentation":
            monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "consan")
        elif what == "stages":
            monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", print, raising=False)
        else:
            p.kernel.pre_run_hooks.append(print)

    p(x, x)
    setting()
    p(x, x)
    assert len(seen.bound) == 2
    assert not seen.direct


def test_a_kernel_first_launched_under_such_a_setting_is_not_remembered(seen, monkeypatch):
    p, x = plan(), torch.zeros(64)
    with monkeypatch.context() as debugging:
        debugging.setattr(triton.knobs.runtime, "debug", True)
        p(x, x)
    p(x, x)
    p(x, x)
    assert len(seen.bound) == 2
    assert len(seen.direct) == 1


def test_kernels_for_other_gpus_go_through_triton(seen):
    """AMD's know whether a tensor is below 2 GiB."""
    seen.target = "hip"
    p, x = plan(), torch.zeros(64)
    for _ in range(3):
        p(x, x)
    assert len(seen.bound) == 3


def test_while_compiling_ahead_nothing_is_launched(seen):
    p, x = plan(), torch.zeros(64)
    p(x, x)
    with launch.compiling([lambda: p(x, x)]):
        pass
    assert len(seen.bound) == 2
    assert not seen.direct


def test_no_programs_no_launch(seen):
    plan(programs=0)(torch.zeros(64), torch.zeros(64))
    assert not seen.bound + seen.direct


def test_a_launch_happens_on_the_device_of_its_problem(seen, monkeypatch):
    log: list[str] = []

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        log.append(f"enter {device}")
        yield
        log.append("leave")

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_overlaps", lambda device: True)
    x = torch.zeros(64)
    here, there = plan("cuda:0"), plan("cuda:1")
    for _ in range(2):
        here(x, x)
        assert log == []
        there(x, x)
        assert log == ["enter cuda:1", "leave"]
        log.clear()


@not_interpreted
def test_a_changed_table_counts_once_plans_are_forgotten(seen, monkeypatch):
    arguments = decode_calls()["plain"]
    for warps in (1, 2):
        row = Config(num_warps=warps, BLOCK_V=8 * warps, PIECE_K=16)
        table = {("vk", 4): (configs.Row(configs.ANY, row),)}
        monkeypatch.setattr(configs, "DECODE", table)
        launch.forget()
        sluice.decode(**arguments)
    assert [call["BLOCK_V"] for call in seen.bound] == [8, 16]


def test_plans_of_equal_problems_are_apart():
    """Equal problems may come with other strides; the very same one never does."""
    launch.forget()
    p, q = (library.dispatch.Explanation("decode", None, ()) for _ in range(2))
    made: list[Any] = []

    def make(problem: Any) -> Any:
        made.append(problem)
        return object()

    assert launch.plan_of(p, make) is launch.plan_of(p, make)
    assert launch.plan_of(q, make) is not launch.plan_of(p, make)
    assert made[0] is p
    assert made[1] is q
    launch.forget()


# ------------------------------------------------------------------------- Triton itself, no device


@triton.jit(do_not_specialize=["n"])
def doubled(x_ptr, y_ptr, slots_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    at = offs
    if slots_ptr is not None:
        at = tl.load(slots_ptr + offs, mask=offs < n)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """A driver whose launches are kept: (grid, stream, *arguments)."""
    launches: list[tuple[Any, ...]] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            pass

        def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
            launches.append(((x, y, z), stream, *arguments))

    stream = iter(range(100))
    fake = SimpleNamespace(
        launcher_cls=Launcher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: next(stream),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=SimpleNamespace(
            load_binary=lambda *_: (1, 2, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
            unload_module=lambda _: None,
        ),
    )
    monkeypatch.setattr(driver, "_active", fake)
    yield launches
    doubled.device_caches.clear()


@not_interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="puts another driver in place")
def test_triton_is_given_the_same_either_way(nowhere):
    """Its compiled kernel takes all parameters in order, and asks for the stream in each call."""
    x, y = torch.zeros(64), torch.zeros(64)
    p = launch.Plan(doubled, 5, Config(1), x.device, (x, y, None), n=1, BLOCK=64)
    p(x, y, None)
    assert p.compiled is not None
    p(x, y, None)
    p(y, x, None)
    first, second, third = nowhere
    assert [call[0] for call in nowhere] == [(5, 1, 1)] * 3
    assert [call[1] for call in nowhere] == [0, 1, 2]
    assert first[2:] == (x, y, None, 1, 64)
    assert second[2:] == (x.data_ptr(), y.data_ptr(), None, 1, 64)
    assert third[2:] == (y.data_ptr(), x.data_ptr(), None, 1, 64)
    assert isinstance(doubled.warmup(x, y, None, 1, 64, grid=(1,)), CompiledKernel)
