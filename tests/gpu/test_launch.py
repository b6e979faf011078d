"""Bound launches: what the driver is given is what Triton itself would be given, in every call.

Nothing is launched here (fake_driver.py). The parameters that the driver reads from memory are held
against the arguments with which Triton's own launcher would be called on the same tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import sluice  # noqa: E402
from sluice import calls  # noqa: E402
from sluice.backends import cuda_driver  # noqa: E402
from sluice.backends import triton as backend  # noqa: E402
from sluice.backends.triton import arguments, configs, launch, variants  # noqa: E402
from sluice.backends.triton.configs import Config  # noqa: E402
from tests.gpu import fake_driver  # noqa: E402
from tests.gpu.cross import bound, specs_of  # noqa: E402

pytestmark = pytest.mark.skipif(backend.interpreted(), reason="kernels have no signature there")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.Driver]:
    yield fake_driver.install(monkeypatch)
    calls.forget()


# ----------------------------------------------------------------------------------- the operators

HK, HV, K, V, P, N = 2, 4, 16, 16, 6, 2
D = 2 * HK * K + HV * V
HALF, CPU = torch.float16, torch.device("cpu")


def rand(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.rand(shape).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same shape, other strides, the last one kept."""
    return torch.stack([x, x])[0] if x.dim() < 2 else torch.cat([x, x], -1)[..., : x.shape[-1]]


def later(x: Tensor) -> Tensor:
    """The same, one element into other memory: not at a multiple of 16 bytes."""
    return torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape)


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


def prefill_calls() -> dict[str, dict[str, Any]]:
    """Packed prompts of a pool: a call of several kernels, with a workspace."""
    T, float32 = 200, torch.float32
    plain: dict[str, Any] = {
        "q": rand(T, HK, K),
        "k": rand(T, HK, K),
        "v": rand(T, HV, V),
        "g": -rand(T, HV, dtype=float32),
        "beta": rand(T, HV, dtype=float32),
        "state": rand(P, HV, V, K, dtype=float32),
        "slots": torch.tensor([1, 4]),
        "cu_seqlens": torch.tensor([0, 70, T]),
        "out": rand(T, HV, V),
    }
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "strides of k": {"k": strided(plain["k"])},
        "no beta": {"beta": None},
        "raw gates": {"A_log": rand(HV), "dt_bias": rand(HV)},
        "normalize_qk": {"normalize_qk": True},
        "another T": {n: x[:150] for n, x in plain.items() if n in ("q", "k", "v", "g", "beta")}
        | {"out": plain["out"][:150], "cu_seqlens": torch.tensor([0, 70, 150])},
        "q elsewhere": {"q": later(plain["q"])},
    }
    return {name: {**plain, **change} for name, change in changes.items()}


CALLS = {"step": step_calls, "decode": decode_calls, "prefill": prefill_calls}
COPIED = {
    "every second slot": "slots",
    "a strided A_log": "A_log",
    "g per key, strided": "g",
}
"""Tensors that are copied first, because kernels read them without gaps."""


class Recorder:
    """Stands in for a kernel in Triton's own launcher."""

    def __init__(self, kernel: Any, seen: list[dict[str, Any]]) -> None:
        self.kernel, self.seen, self.function = kernel, seen, self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**given: Any) -> None:
            self.seen.append({"kernel": self.kernel.name, "programs": grid, **given})

        return run


def through_triton(op: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments with which Triton would launch the kernels of a call."""
    seen: list[dict[str, Any]] = []
    with calls.check_only() as found:
        getattr(sluice, op)(**given)
    (spec, tensors), *_ = found
    launches = bound(spec)
    launches.calls = [c._replace(kernel=Recorder(c.kernel, seen)) for c in launches.calls]
    launches._by_driver = lambda: False
    launches(tensors)
    return seen


def wanted(op: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The same as numbers: tensors are addresses."""
    found = []
    for kernel in through_triton(op, given):
        values = {}
        for name, x in kernel.items():
            values[name] = x.data_ptr() if isinstance(x, Tensor) else x
        found.append(values)
    return found


def differences(
    launched: fake_driver.Launched,
    expected: dict[str, Any],
    call: arguments.KernelCall,
    copied: Any,
) -> dict[str, Any]:
    """Where the driver's parameters are not Triton's arguments."""
    found: dict[str, Any] = {}
    if (launched.kernel, (launched.programs,)) != (expected["kernel"], expected["programs"]):
        found["kernel"] = launched.kernel, launched.programs
    for name, x in launched.arguments.items():
        source = getattr(call.arguments[name], "source", "")
        if source == copied or source.startswith("ws."):
            continue  # elsewhere each time
        rounded = isinstance(x, float) and math.isclose(x, expected[name], rel_tol=1e-7)
        if x != expected[name] and not rounded:
            found[name] = x, expected[name]
    return found


@pytest.mark.parametrize("op", CALLS)
def test_a_remembered_launch_is_the_one_a_fresh_call_would_make(op, driver):
    """Each call twice after each other call: never what another, or an earlier, one brought."""
    function, every = getattr(sluice, op), CALLS[op]()
    expected, kernels = {}, {}
    for name, given in every.items():
        expected[name] = wanted(op, given)
        kernels[name] = bound(specs_of(lambda given=given: function(**given), CPU)[0]).calls
    for _ in range(2):
        for name, given in every.items():
            for _ in range(2):
                driver.launched.clear()
                function(**given, backend="triton")
                assert len(driver.launched) == len(expected[name]) > 0, name
                for found, one, call in zip(
                    driver.launched, expected[name], kernels[name], strict=True
                ):
                    assert differences(found, one, call, COPIED.get(name)) == {}, name
                    told = variants.variant(call).parameters
                    wanted_names = {p.name for p in told if p.kind != variants.CONSTANT}
                    assert set(found.arguments) == wanted_names
                if name in COPIED:
                    given_at = given[COPIED[name]].data_ptr()
                    (one,) = driver.launched
                    assert one.arguments[f"{COPIED[name]}_ptr"] != given_at, f"{name}: not copied"


def test_the_workspace_of_a_call_is_one_piece_of_memory(driver, monkeypatch):
    """Its parts lie in it without overlap, each at a multiple of 256 bytes, in every kernel."""
    made: list[Tensor] = []
    empty = torch.empty

    def watched(*size: Any, **options: Any) -> Tensor:
        made.append(empty(*size, **options))
        return made[-1]

    given = prefill_calls()["normalize_qk"]
    spec = specs_of(lambda: sluice.prefill(**given), CPU)[0]
    launches = bound(spec)
    sluice.prefill(**given, backend="triton")
    driver.launched.clear()
    monkeypatch.setattr(torch, "empty", watched)
    sluice.prefill(**given, backend="triton")
    (workspace,) = made
    base, size = workspace.data_ptr(), workspace.numel()
    places: dict[str, set[int]] = {}
    for found, call in zip(driver.launched, launches.calls, strict=True):
        for name, address in found.arguments.items():
            source = getattr(call.arguments[name], "source", "")
            if source.startswith("ws."):
                places.setdefault(source, set()).add(address - base)
    assert len(places) > 5
    assert all(len(found) == 1 for found in places.values())
    ends = 0
    for name, (offset,) in sorted(places.items(), key=lambda x: min(x[1])):
        _, shape, dtype = launches._workspace[name]
        assert offset % 256 == 0
        assert offset >= ends, f"{name} begins in the part before it"
        ends = offset + math.prod(shape) * dtype.itemsize
    assert ends <= size


def test_the_tensors_of_a_call_are_its_own(driver):
    """The same shapes, other tensors, as in every step of decode."""
    sluice.decode(**decode_calls()["plain"], backend="triton")
    other = decode_calls()["plain"]
    sluice.decode(**other, backend="triton")
    found = driver.launched[-1].arguments
    for name in ("q", "k", "v", "g", "beta", "state"):
        assert found[f"{name}_ptr"] == other[name].data_ptr()
    assert found["o_ptr"] == other["out"].data_ptr()


@pytest.mark.parametrize("op", ["step", "decode"])
def test_a_wrong_argument_is_refused_in_every_call(op, driver):
    """Between calls that are right, too."""
    function, plain = getattr(sluice, op), CALLS[op]()["plain"]
    wrong = {**plain, "state": plain["state"][:, :1]}
    texts = set()
    for _ in range(3):
        function(**plain, backend="triton")
        with pytest.raises(sluice.ContractError) as refusal:
            function(**wrong, backend="triton")
        texts.add(str(refusal.value))
    assert len(texts) == 1
    assert len(driver.launched) == 3


def test_verify_and_commit_have_bindings_of_their_own(driver):
    given = decode_calls()["slots"]
    del given["out"]
    for _ in range(2):
        _, draft = sluice.verify(**given, backend="triton")
        sluice.commit(draft, torch.tensor([1, 0]), backend="triton")
        sluice.decode(**given, backend="triton")
    verified, committed, decoded = (found.arguments for found in driver.launched[3:])
    assert "draft_k_ptr" not in decoded
    assert verified["draft_k_ptr"] == committed["draft_k_ptr"] == draft.k.data_ptr()
    assert len(driver.loaded) == 3


# -------------------------------------------------------------------------------------- one binding


def plain() -> dict[str, Any]:
    return {**decode_calls()["plain"], "backend": "triton"}


def test_an_address_that_is_no_multiple_of_16_gets_machine_code_of_its_own(driver):
    """Once, and the usual code is used again where addresses allow it."""
    given = plain()
    sluice.decode(**given)
    assert driver.loaded == ["decode_kernel"]
    for elsewhere in ({"q": later(given["q"])}, {"state": later(given["state"])}):
        for change in (elsewhere, elsewhere, {}):
            sluice.decode(**{**given, **change})
            address = change.get("q", given["q"]).data_ptr()
            assert driver.launched[-1].arguments["q_ptr"] == address
    assert driver.loaded == ["decode_kernel"] * 3


@pytest.mark.parametrize("name", ["slots", "g", "beta"])
def test_indices_and_gates_may_begin_anywhere(driver, name):
    given = {**decode_calls()["slots"], "backend": "triton"}
    sluice.decode(**given)
    sluice.decode(**{**given, name: later(given[name])})
    assert driver.loaded == ["decode_kernel"]
    assert driver.launched[1].arguments[f"{name}_ptr"] % 16 != 0


@pytest.mark.parametrize("name", ["q", "k"])
def test_tokens_may_begin_anywhere_where_lanes_are_fewer_than_keys(driver, name):
    given = {**decode_calls()["slots"], "backend": "triton"}
    given |= {"q": rand(N, 1, HK, 64), "k": rand(N, 1, HK, 64), "state": rand(P, HV, V, 64)}
    sluice.decode(**given)
    sluice.decode(**{**given, name: later(given[name])})
    assert driver.loaded == ["decode_unaligned_kernel"]
    assert driver.launched[1].arguments[f"{name}_ptr"] % 16 != 0


def test_every_launch_asks_for_the_stream_and_overlaps_on_hopper(driver):
    given = plain()
    for _ in range(3):
        sluice.decode(**given)
    first, *others = driver.launched
    assert [found.stream - first.stream for found in others] == [1, 2]
    assert all(found.overlap for found in driver.launched)
    assert first.threads == 32 * configs.decode(torch.float32, "vk", K, V, N * HV).num_warps


def test_a_thread_without_a_context_enters_that_of_the_device(driver):
    """Autograd's threads have none before their first call into the CUDA runtime."""
    given, driver.context = plain(), None
    sluice.decode(**given)
    assert (driver.context, len(driver.launched)) == (1000, 1)
    driver.context = 7  # one that somebody else has chosen
    sluice.decode(**given)
    assert (driver.context, len(driver.launched)) == (7, 2)


@pytest.mark.parametrize("what", ["debug", "instrumentation", "stages", "hook", "launch hook"])
def test_settings_that_change_kernels_go_through_triton(what, driver, monkeypatch):
    """Also those that come after the call was bound; and the driver launches again after them."""
    given, knobs, seen = plain(), triton.knobs, []
    kernel = backend.module_of(backend.__name__, backend.OPS, "decode").DECODE.function
    monkeypatch.setattr(launch.Launches, "_through_triton", lambda *_: seen.append(what))
    sluice.decode(**given)
    assert (len(driver.launched), seen) == (1, [])
    with contextlib.ExitStack() as scope:
        scope.enter_context(knobs.runtime.scope())
        scope.enter_context(knobs.compilation.scope())
        if what == "debug":
            knobs.runtime.debug = True
        elif what == "instrumentation":
            knobs.compilation.instrumentation_mode = "consan"
        elif what == "stages":
            knobs.runtime.add_stages_inspection_hook = print
        elif what == "launch hook":
            knobs.runtime.launch_enter_hook.add(print)
            scope.callback(knobs.runtime.launch_enter_hook.remove, print)
        else:
            kernel.pre_run_hooks.append(print)
            scope.callback(kernel.pre_run_hooks.clear)
        sluice.decode(**given)
        sluice.decode(**{**given, "scale": 0.25})  # bound under the setting
        assert (len(driver.launched), len(seen)) == (1, 2)
    sluice.decode(**given)
    sluice.decode(**{**given, "scale": 0.25})
    assert (len(driver.launched), len(seen)) == (3, 2)


def test_kernels_for_other_gpus_go_through_triton(driver, monkeypatch):
    """AMD's know whether a tensor is below 2 GiB."""
    monkeypatch.undo()
    spec = specs_of(lambda: sluice.decode(**decode_calls()["plain"]))[0]
    launches = launch.Launches(spec, arguments.Binding(spec), [])
    assert launches._by_driver()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not launches._by_driver()


def test_without_sequences_no_kernel_runs_and_outputs_are_zeros(driver):
    given = {**decode_calls()["packed"], "backend": "triton"}
    given["cu_seqlens"], given["slots"] = torch.tensor([0]), torch.empty(0, dtype=torch.int64)
    given["out"].fill_(7.0)
    sluice.decode(**given)
    assert driver.launched == []
    assert not given["out"].any()


def test_a_launch_happens_on_the_device_of_its_call(driver, monkeypatch):
    log: list[str] = []

    @contextlib.contextmanager
    def entered(device: Any) -> Iterator[None]:
        log.append(f"enter {device}")
        yield
        log.append("leave")

    monkeypatch.setattr(torch.cuda, "device", entered)
    with calls.check_only() as found:
        sluice.decode(**decode_calls()["plain"])
    (spec, tensors), *_ = found
    for index in (0, 1):
        launches = bound(spec.on(torch.device("cuda", index))).bound()
        assert log == ([] if index == 0 else ["enter cuda:1", "leave"])
        log.clear()
        for _ in range(2):
            launches(tensors)
            assert log == ([] if index == 0 else ["enter 1", "leave"])
            log.clear()
    assert len(driver.loaded) == 2, "machine code is loaded on each device"


def test_a_changed_table_counts_once_bindings_are_forgotten(driver, monkeypatch):
    given = plain()
    for warps in (1, 2):
        row = Config(num_warps=warps, BLOCK_V=8 * warps, PIECE_K=16)
        table = {("vk", 4): (configs.Row(configs.ANY, row),)}
        monkeypatch.setattr(configs, "DECODE", table)
        calls.forget()
        sluice.decode(**given)
    assert [found.threads for found in driver.launched] == [32, 64]


def test_a_driver_that_refuses_is_an_error_with_its_reason(driver):
    driver.result = 700
    with pytest.raises(
        cuda_driver.DriverError, match=r"launching decode_kernel: .*\(CUDA error 700\)"
    ):
        sluice.decode(**plain())


# -------------------------------------------------------------------------- parameters in memory


class Memory:
    """A driver that keeps the parameters of a launch, as its layout says."""

    def __init__(self, layout: cuda_driver.Layout, kinds: list[str]) -> None:
        self.layout, self.kinds, self.seen = layout, kinds, []
        self.fake = fake_driver.Driver()
        self.cuTensorMapEncodeTiled = self.fake.cuTensorMapEncodeTiled
        self.cuTensorMapReplaceAddress = self.fake.cuTensorMapReplaceAddress

    def cuLaunchKernelEx(self, config: int, function: int, places: int, extra: None) -> int:  # noqa: N802
        at = (ctypes.c_void_p * len(self.kinds)).from_address(places)
        set_up = cuda_driver._Config.from_address(config)
        read = [fake_driver._read(x, kind) for x, kind in zip(at, self.kinds, strict=True)]
        self.seen.append((set_up.stream, read))
        return 0


MATRIX = cuda_driver.Matrix(torch.bfloat16, 100, 256, 512, (64, 128), 128)
KINDS = ["pointer", "i", "matrix", "i", "i", "q", "q", "f", "pointer", "matrix", "q", "pointer"]
VALUES = (-5, 100, 256, 512, 1, 0.1, 1 << 40)


@pytest.fixture
def kernel_launch(monkeypatch: pytest.MonkeyPatch) -> tuple[cuda_driver.KernelLaunch, Memory]:
    layout = cuda_driver.Layout(KINDS)
    memory = Memory(layout, KINDS)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: memory)
    made = cuda_driver.KernelLaunch(
        9, "kernel", 7, 128, 4096, True, layout, VALUES, [MATRIX, MATRIX._replace(rows=50)]
    )
    return made, memory


def test_parameters_lie_where_the_driver_reads_them(kernel_launch):
    made, memory = kernel_launch
    pointers, matrices = (0x1000, 2**63 + 64, 0x3000), (0x8000, 0x9000)
    made(pointers, matrices, 42)
    ((stream, read),) = memory.seen
    a, b, c = pointers
    float32 = struct.unpack("=f", struct.pack("=f", 0.1))[0]
    assert stream == 42
    assert read == [a, -5, 0x8000, 100, 256, 512, 1, float32, b, 0x9000, 1 << 40, c]


def test_descriptors_are_encoded_once_and_moved_only_to_new_addresses(kernel_launch):
    made, memory = kernel_launch
    for matrices in ((16, 32), (16, 32), (48, 32), (48, 64), (48, 64), (16, 32)):
        made((1, 2, 3), matrices, 0)
        _, read = memory.seen[-1]
        assert (read[2], read[9]) == matrices
    assert [address for address, _ in memory.fake.encoded] == [16, 32]
    assert memory.fake.moved == [48, 64, 16, 32]
    size = torch.bfloat16.itemsize
    (_, first), (_, second) = memory.fake.encoded
    assert first == (9, 2, 256, 100, 512 * size, 128, 64, 1, 1, 0, 3)
    assert second == (9, 2, 256, 50, 512 * size, 128, 64, 1, 1, 0, 3)


def test_two_threads_never_mix_their_parameters(kernel_launch):
    """One launch's addresses, all of them or none, as long as the driver reads them."""
    made, memory = kernel_launch

    def launch_often(base: int) -> None:
        for _ in range(2000):
            made((base, base + 1, base + 2), (base + 16, base + 32), base)

    threads = [threading.Thread(target=launch_often, args=(1 << shift,)) for shift in (20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(memory.seen) == 4000
    for base, read in memory.seen:
        found = (read[0], read[8], read[11], read[2], read[9])
        assert found == (base, base + 1, base + 2, base + 16, base + 32)
    assert {base for base, _ in memory.seen} == {1 << 20, 1 << 40}


def test_out_that_overlaps_another_tensor_is_refused_before_a_launch(driver):
    """With the addresses that a launch gathers, so a call asks for none of them twice."""
    given = plain()
    sluice.decode(**given)
    before = len(driver.launched)
    with pytest.raises(sluice.ContractError, match="out: expected memory of its own, apart from v"):
        sluice.decode(**given | {"out": given["v"]})
    assert len(driver.launched) == before
    sluice.decode(**given)
    assert len(driver.launched) == before + 1
