"""Run exported graphs in ONNX Runtime, passing states from call to call without copies.

The recurrent state is read and written in one buffer, which the operator allows. The conv window
has two buffers that swap after each call: with one, ONNX Runtime rolls a row by a copy between
overlapping memory. Keys and values grow, so the runtime allocates them, and its outputs are the
next inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.contract import arguments
from sluice.contract.errors import ContractError

_FILE = "a file of sluice export"
_KINDS = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(bool)": torch.bool,
}


class Runner:
    """A graph of :func:`export`, called token by token or prompt by prompt.

    Args:
        path: the exported file.
        batch: the number of sequences.
        threads: of ONNX Runtime, which chooses by default.
        providers: execution providers that this ONNX Runtime has; the CPU's by default. States are
            kept in host memory.

    Call it with the graph's input (``input_ids`` or ``hidden_states``) to get its output.
    ``reset()`` starts new sequences, and ``states`` are the current tensors.
    """

    def __init__(
        self,
        path: str | Path,
        batch: int = 1,
        *,
        threads: int | None = None,
        providers: tuple[str, ...] = ("CPUExecutionProvider",),
    ) -> None:
        import onnxruntime

        arguments.path("Runner", path)
        arguments.integer("Runner", "batch", batch, 1)
        if not Path(path).is_file():
            raise ContractError("Runner", "path", _FILE, str(path))
        there = onnxruntime.get_available_providers()
        if isinstance(providers, str) or not set(providers) <= set(there):
            # ONNX Runtime would say so on the terminal, and go on with the CPU
            raise ContractError("Runner", "providers", f"some of {there}", repr(providers))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            arguments.integer("Runner", "threads", threads, 1)
            options.intra_op_num_threads = threads
        self._make_value = onnxruntime.OrtValue.ortvalue_from_numpy
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=list(providers)
            )
        except Exception as error:  # its own classes, which it does not promise
            raise ContractError("Runner", "path", _FILE, f"{path}: {error}") from error
        self.batch = batch
        inputs = {x.name: x for x in self.session.get_inputs()}
        self._past = {n: x for n, x in inputs.items() if n.startswith("past.")}
        own = [x for n, x in inputs.items() if n not in self._past]
        if len(own) != 1 or own[0].type not in _KINDS:
            found = ", ".join(f"{x.name} {x.type}" for x in own)
            raise ContractError("Runner", "path", "one input beside the states", found or "none")
        (self._input,) = own
        outputs = [x.name for x in self.session.get_outputs()]
        self._output = outputs[0]
        missing = {n.replace("past.", "present.", 1) for n in self._past} - set(outputs)
        if missing:
            raise ContractError("Runner", "path", "an output for each state", sorted(missing))
        self.reset()

    def reset(self) -> None:
        """Set states to zero, and drop keys and values."""
        self._kept: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._grown: dict[str, Any] = {}
        for name, x in self._past.items():
            shape = [n if isinstance(n, int) else 0 for n in x.shape]
            zeros = torch.zeros(self.batch, *shape[1:], dtype=_KINDS[x.type])
            if isinstance(x.shape[2], str):
                self._grown[name] = self._make_value(zeros.numpy())
            else:
                self._kept[name] = zeros
                if name.endswith("conv"):
                    self._spare[name] = torch.empty_like(zeros)

    @property
    def states(self) -> dict[str, Tensor]:
        """The states by name, without "past."; those updated in place are not copied."""
        grown = {n: torch.from_numpy(x.numpy()) for n, x in self._grown.items()}
        now = self._kept | grown
        return {name.removeprefix("past."): now[name] for name in self._past}

    def __call__(self, x: Tensor) -> Tensor:
        """The output for the next tokens; updates the states.

        Raises ContractError for anything but a tensor of the graph's dtype with ``batch`` rows.
        """
        self._check(x)
        x = x.detach().contiguous()
        binding = self.session.io_binding()
        self._bind(binding.bind_input, self._input.name, x)
        binding.bind_output(self._output, "cpu")
        for name, kept in self._kept.items():
            self._bind(binding.bind_input, name, kept)
            written = self._spare.get(name, kept)
            self._bind(binding.bind_output, _present(name), written)
        for name, grown in self._grown.items():
            binding.bind_ortvalue_input(name, grown)
            binding.bind_output(_present(name), "cpu")
        self.session.run_with_iobinding(binding)
        bound = (self._output, *map(_present, self._kept), *map(_present, self._grown))
        made = dict(zip(bound, binding.get_outputs(), strict=True))  # in the order they were bound
        for name in self._spare:
            self._kept[name], self._spare[name] = self._spare[name], self._kept[name]
        self._grown = {name: made[_present(name)] for name in self._grown}
        return torch.from_numpy(made[self._output].numpy())

    def _check(self, x: object) -> None:
        name, kind, dims = self._input.name, _KINDS[self._input.type], len(self._input.shape)
        if not isinstance(x, Tensor):
            raise ContractError("Runner", name, "a tensor", type(x).__name__)
        if x.dtype != kind:
            raise ContractError("Runner", name, f"dtype {kind}", x.dtype)
        if x.device.type != "cpu":
            raise ContractError("Runner", name, "a CPU tensor", f"device {x.device}")
        sizes = [n if isinstance(n, int) else None for n in self._input.shape]
        sizes[0] = self.batch
        fits = x.dim() == dims and all(
            b is None or a == b for a, b in zip(x.shape, sizes, strict=True)
        )
        if not fits or x.shape[1] == 0:
            shape = f"{sizes}".replace("None", "tokens", 1).replace("None", "any")
            raise ContractError("Runner", name, f"shape {shape}", f"shape {list(x.shape)}")

    def _bind(self, bind: Any, name: str, x: Tensor) -> None:
        kind = {torch.float32: 1, torch.float16: 10, torch.int64: 7}[x.dtype]  # ONNX's numbers
        bind(name, "cpu", 0, kind, list(x.shape), x.data_ptr())


def _present(name: str) -> str:
    return name.replace("past.", "present.", 1)
