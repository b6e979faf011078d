"""The causal-conv1d package: the convolution that most models call on a GPU."""

from __future__ import annotations

from torch import Tensor

from sluice.bench.providers.base import (
    Call,
    Job,
    Provider,
    RefusalError,
    as_batch,
    equal_lengths,
    load,
)


class CausalConv1d(Provider):
    name = "causal-conv1d"
    title = "causal-conv1d"
    package = "causal_conv1d"
    distribution = "causal-conv1d"
    install = "pip install causal-conv1d (needs nvcc, or a wheel for exactly this torch)"
    devices = ("cuda",)

    def _causal_conv1d(self, job: Job) -> Call:
        module, c, i = load(self.package), job.case, job.inputs
        if c.lengths is None:
            x, pool = i["x"][:, 0], i["state"]

            def decode() -> Tensor:
                return module.causal_conv1d_update(
                    x, pool, i["weight"], activation="silu", conv_state_indices=i["slots"]
                )

            return Call(
                decode,
                lambda y: {"y": y[:, None], "state": job.rows()},
                mutable=(pool,),
            )
        same = equal_lengths(job)
        if same is None:
            raise RefusalError("packed prompts of different lengths cannot bring a state")
        # channels last in memory, [N, D, T] by strides: it requires this to take a window
        x = as_batch(i["x"], *same).transpose(1, 2)
        window = job.rows().transpose(1, 2).contiguous().transpose(1, 2)

        def prompts() -> tuple[Tensor, Tensor]:
            return module.causal_conv1d_fn(
                x, i["weight"], initial_states=window, return_final_states=True, activation="silu"
            )

        return Call(
            prompts,
            lambda r: {"y": r[0].transpose(1, 2).reshape(i["x"].shape), "state": r[1].contiguous()},
            ("window rows gathered, channels last", "the window comes back in a fresh tensor"),
        )


def provider() -> CausalConv1d:
    return CausalConv1d()
