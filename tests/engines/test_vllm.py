"""The whole of vLLM with the plug-in gives the tokens of stock transformers, in float32."""

from __future__ import annotations

import statistics

import pytest
import torch
from vllm import ModelRegistry
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba import abstract
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from sluice.integrations import vllm as sluice_plugin
from sluice.integrations.vllm import private
from tests.engines import tiny
from tests.engines.no_torchvision import without_torchvision
from tests.engines.tiny import NEW_TOKENS, known_answers
from tests.engines.vllm_engine import MTP, NGRAM, Engine, calls, engine
from tests.engines.vllm_own_kernels import copied_states


def _same(found, wanted):
    """Every token of every prompt."""
    wrong = {
        i: (a, b) for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if list(a) != list(b)
    }
    assert not wrong, f"{len(wrong)} of {len(wanted)} prompts differ: {wrong}"


def _longer(truth):
    """Prompts of two tokens and more, and their answers.

    vLLM 0.32 gives a new prompt of one token drafts too, if others have some at that moment, and
    tells no layer that its state is new.
    """
    pairs = zip(truth.prompts, truth.tokens, strict=True)
    prompts, tokens = zip(*(pair for pair in pairs if len(pair[0]) > 1), strict=True)
    return prompts, tokens


def test_32_at_once_and_an_abort_in_the_middle(truth):
    with engine(truth.folder) as e:
        assert e.layers() == ["sluice.integrations.vllm.layer.SluiceGDN"] * 3
        _same(e.tokens(truth.prompts, NEW_TOKENS), truth.tokens)
        assert calls()["decode"] > 0
        assert calls()["prefill"] > 0
        assert calls()["vLLM's own"] == 0
        for i in range(8):
            e.core.add_request(str(i), {"prompt_token_ids": truth.prompts[i]}, e.params(NEW_TOKENS))
        finished = {}
        for step in range(10 * NEW_TOKENS):
            if step == 5:
                e.core.abort_request(["1", "4"])
            for out in e.core.step():
                if out.finished and out.outputs[0].finish_reason != "abort":
                    finished[int(out.request_id)] = out.outputs[0].token_ids
            if not e.core.has_unfinished_requests():
                break
        rest = [0, 2, 3, 5, 6, 7]
        assert sorted(finished) == rest
        _same([finished[i] for i in rest], [truth.tokens[i] for i in rest])


def test_two_engines_at_once_and_one_that_is_left_in_the_middle(truth):
    """States are an engine's own; what one leaves behind is nobody's."""
    asked = range(6)
    with engine(truth.folder) as one, engine(truth.folder, enable_prefix_caching=True) as two:
        found = {}
        for i in asked:
            for name, e in (("one", one), ("two", two)):
                prompt = {"prompt_token_ids": truth.prompts[i]}
                e.core.add_request(f"{name} {i}", prompt, e.params(NEW_TOKENS))
        while one.core.has_unfinished_requests() or two.core.has_unfinished_requests():
            for out in (*one.core.step(), *two.core.step()):
                if out.finished:
                    found[out.request_id] = out.outputs[0].token_ids
        for name in ("one", "two"):
            _same([found[f"{name} {i}"] for i in asked], truth.tokens[:6])
        for i in asked:
            prompt = {"prompt_token_ids": truth.prompts[i]}
            one.core.add_request(f"left {i}", prompt, one.params(NEW_TOKENS))
        for _ in range(5):
            one.core.step()
        assert one.core.has_unfinished_requests()
    with engine(truth.folder) as e:
        _same(e.tokens(truth.prompts[:12], NEW_TOKENS), truth.tokens[:12])


def test_chunked_prefill_with_a_small_budget(truth):
    with engine(truth.folder, max_num_batched_tokens=40, max_num_seqs=16) as e:
        _same(e.tokens(truth.prompts, NEW_TOKENS), truth.tokens)
        assert calls()["prefill"] > sum(map(len, truth.prompts)) / 40
        assert calls()["vLLM's own"] == 0


def test_preemption(truth):
    """16 requests need another block at the same time, and there are blocks for half of them."""
    with engine(truth.folder, num_gpu_blocks_override=36) as e:
        more = tiny.prompts([e.block - 4], each=16, seed=4)
        wanted, _ = tiny.greedy(truth.model, more, NEW_TOKENS)
        prompts = more + truth.prompts[:48]
        _same(e.tokens(prompts, NEW_TOKENS), wanted + truth.tokens[:48])
        assert e.metric("num_preemptions") > 0


def test_a_prefix_that_is_found_equals_one_that_is_not(truth):
    """Reliability row 35."""
    with engine(
        truth.folder, enable_prefix_caching=True, max_num_seqs=4, num_gpu_blocks_override=512
    ) as e:
        heads = tiny.prompts([e.block + 10], each=4, seed=2)
        tails = tiny.prompts([1, 5, 20, 33, 40, 64, 65, 90], each=2, seed=3)
        prompts = [head + tail for tail in tails for head in heads]
        wanted, _ = tiny.greedy(truth.model, prompts, NEW_TOKENS)
        first = e.run(prompts, NEW_TOKENS)
        again = e.run(prompts, NEW_TOKENS)
        for outs in (first, again):
            _same([o.outputs[0].token_ids for o in outs], wanted)
        assert sum(o.num_cached_tokens > 0 for o in first) > 0
        assert sum(o.num_cached_tokens > 0 for o in again) == len(prompts)
        assert calls()["prefill with checkpoints"] > 0
        assert calls()["vLLM's own"] == 0


def test_drafts_of_which_some_are_rejected(truth):
    """Reliability row 34."""
    prompts, tokens = truth.prompts[:16], 6 * NEW_TOKENS  # long enough for text to repeat itself
    wanted, _ = tiny.greedy(truth.model, prompts, tokens)
    with engine(truth.folder, speculative_config=NGRAM) as e:
        _same(e.tokens(truth.prompts, NEW_TOKENS), truth.tokens)
        _same(e.tokens(prompts, tokens), wanted)
        drafted = e.metric("spec_decode_num_draft_tokens")
        accepted = e.metric("spec_decode_num_accepted_tokens")
        assert 0 < accepted < drafted
        assert any("drafts" in kind for kind in calls())
        assert calls()["vLLM's own"] == 0


def test_drafts_of_the_models_own_layer(tmp_path):
    """MTP, one layer asked three times."""
    truth = known_answers(str(tmp_path), seed=0)
    tiny.add_drafter(truth)
    prompts, wanted = _longer(truth)
    with engine(truth.folder, speculative_config=MTP) as e:
        _same(e.tokens(prompts, NEW_TOKENS), wanted)
        drafted = e.metric("spec_decode_num_draft_tokens")
        accepted = e.metric("spec_decode_num_accepted_tokens")
        assert 0 < accepted < drafted
        assert calls()["prefill and drafts"] > 0
        assert calls()["vLLM's own"] == 0


@pytest.mark.parametrize("drafts", [NGRAM, MTP], ids=["n-grams", "MTP"])
def test_a_prefix_whose_states_drafts_have_left(tmp_path, drafts):
    """Reliability rows 34 and 35. A text is continued whose last blocks were answers themselves."""
    truth = known_answers(str(tmp_path), seed=0)
    tiny.add_drafter(truth)
    options = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
    with (
        copied_states(),
        engine(
            truth.folder, speculative_config=drafts, max_num_seqs=4, max_model_len=512, **options
        ) as e,
    ):
        prompts, new = tiny.prompts([19, 30, 41, 62], seed=5), 2 * e.block + 12
        wanted, _ = tiny.greedy(truth.model, prompts, new)
        _same(e.tokens(prompts, new), wanted)
        drafted = e.metric("spec_decode_num_draft_tokens")
        accepted = e.metric("spec_decode_num_accepted_tokens")
        assert 0 < accepted < drafted
        tails = tiny.prompts([1, 2, 7, 33], seed=6)
        texts = [p + w + q for p, w, q in zip(prompts, wanted, tails, strict=True)]
        wanted, _ = tiny.greedy(truth.model, texts, NEW_TOKENS)
        for _ in range(2):
            outs = e.run(texts, NEW_TOKENS)
            _same([o.outputs[0].token_ids for o in outs], wanted)
            found = [o.num_cached_tokens for o in outs]
            assert all(n > len(p) for n, p in zip(found, prompts, strict=True)), found
        assert calls()["drafts"] > 0
        assert calls()["vLLM's own"] == 0


def test_two_ranks_with_half_of_the_heads_each(truth, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to ask a rank for its layers
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(truth.folder, **ranks) as e:
        for rank in range(2):
            assert e.layers(rank) == ["sluice.integrations.vllm.layer.SluiceGDN"] * 3
        _same(e.tokens(truth.prompts, NEW_TOKENS), truth.tokens)


def _qwen3_5(folder, seed):
    """Qwen3.5's text model. Its module in vLLM imports that of images."""
    without_torchvision()
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)
    return known_answers(str(folder), seed, family="Qwen3_5")


def test_weights_in_split_order(tmp_path):
    truth = _qwen3_5(tmp_path, seed=0)
    for options in ({}, {"speculative_config": NGRAM, "max_num_batched_tokens": 200}):
        with engine(truth.folder, **options) as e:
            assert e.layers() == ["sluice.integrations.vllm.layer.SluiceGDN"] * 3
            prompts, wanted = _longer(truth) if options else (truth.prompts, truth.tokens)
            _same(e.tokens(prompts, NEW_TOKENS), wanted)
            assert any("drafts" in kind for kind in calls()) == bool(options)
            assert calls()["prefill"] > 0
            assert calls()["vLLM's own"] == 0


def test_bfloat16_is_closer_to_float32_than_vllms_own(tmp_path):
    """Six random models: the log probability of every token, asked and answered, and the likeliest.

    bfloat16 holds the weights, so the engine's roundings are all that differs. A single prompt says
    little: roundings of other layers part the ways of both, so the greedy tokens that equal
    float32's may be fewer by chance, as models differ (docs/vllm.md). vLLM's own kernels take no
    other dtype on a CPU.
    """
    errors: dict[bool, list[list[float]]] = {on: [[], [], []] for on in (False, True)}
    likeliest, greedy = {False: 0, True: 0}, {False: [], True: []}
    for seed in range(6):
        truth = known_answers(str(tmp_path / str(seed)), seed, rounded=True)
        for on in (False, True):
            with engine(truth.folder, on=on, dtype="bfloat16") as e:
                assert (("sluice" in e.layers()[0]), bool(calls())) == (on, False)
                outs = e.run(truth.prompts, NEW_TOKENS, logprobs=5, prompt_logprobs=1)
            equal = 0
            for out, prompt, tokens in zip(outs, truth.prompts, truth.tokens, strict=True):
                new = out.outputs[0]
                text = prompt + list(new.token_ids)
                with torch.inference_mode():
                    exact = truth.model(torch.tensor([text])).logits[0].log_softmax(-1)
                for t in range(1, len(prompt)):
                    found, row = out.prompt_logprobs[t], exact[t - 1]
                    errors[on][0].append(abs(found[prompt[t]].logprob - float(row[prompt[t]])))
                    best = found.get(int(row.argmax()))
                    likeliest[on] += best is not None and best.rank == 1
                for t, found in enumerate(new.logprobs):
                    row = exact[len(prompt) - 1 + t]
                    errors[on][min(t, 1) + 1] += [
                        abs(x.logprob - float(row[k])) for k, x in found.items()
                    ]
                equal += sum(a == b for a, b in zip(new.token_ids, tokens, strict=True))
            greedy[on].append(equal)
    means = {on: [statistics.mean(kind) for kind in errors[on]] for on in errors}
    print(f"likeliest {likeliest}, greedy {greedy}, errors {means}")  # noqa: T201
    kinds = zip(("prompt", "first token", "later ones"), means[True], means[False], strict=True)
    for kind, ours, theirs in kinds:
        assert ours <= theirs, kind
    assert likeliest[True] >= likeliest[False]
    more = [a - b for a, b in zip(greedy[True], greedy[False], strict=True)]
    assert sum(more) >= -3 * statistics.stdev(more) * len(more) ** 0.5


def test_weights_that_were_loaded_again(tmp_path):
    """In bfloat16, in which vLLM packs a weight for its own kernels and keeps a copy for others.

    A model without experts: vLLM 0.32 does not load those again on a CPU.
    """
    one, two = (_qwen3_5(tmp_path / str(seed), seed) for seed in (0, 1))
    with engine(two.folder, dtype="bfloat16") as e:
        wanted = e.tokens(one.prompts, NEW_TOKENS)
    with engine(one.folder, dtype="bfloat16") as e:
        assert e.tokens(one.prompts, NEW_TOKENS) != wanted
        e.llm.collective_rpc("reload_weights", kwargs={"weights_path": two.folder})
        _same(e.tokens(one.prompts, NEW_TOKENS), wanted)


def test_batch_invariant_mode_is_offered_with_vllms_own_metadata():
    backend = private.invariant_backend()
    assert backend.supports_batch_invariance()
    assert backend.get_builder_cls() is GDNAttentionMetadataBuilder
    assert backend is private.invariant_backend()


@pytest.mark.parametrize(
    ("release", "asked"),
    [("one distance for all layers", 64), ("a layer that keeps none", None), ("before 0.33", 1)],
)
def test_states_inside_prompts_are_as_far_apart_as_vllm_wants(monkeypatch, release, asked):
    spec = MambaSpec(block_size=64, shapes=((2,),), dtypes=(torch.float32,))
    names = "get_mamba_prefill_checkpoint_alignment", "get_mamba_prefill_checkpoint_grid"
    for name in names:
        if release == "before 0.33":
            monkeypatch.delattr(abstract, name, raising=False)
        else:
            monkeypatch.setattr(abstract, name, lambda config: asked, raising=False)
    found = private.with_checkpoints(spec, None)
    assert (found.num_prefill_checkpoint_blocks, found.prefill_checkpoint_alignment) == (
        0 if asked is None else 1,
        asked,
    )
    assert private.has_checkpoints(found) == (asked is not None)
    # vLLM's own kernels might serve a batch, and leave the state unwritten
    monkeypatch.setattr(private, "KNOWN", private.KNOWN - {"checkpoint"})
    assert not private.has_checkpoints(private.with_checkpoints(spec, None))


def test_a_release_that_hands_the_output_over_is_not_served(monkeypatch):
    """vLLM 0.22 to 0.25."""
    assert private.missing() is None
    monkeypatch.setattr(private.base(), "forward", lambda self, hidden_states, output: None)
    assert "forward" in private.missing()


def test_registering_again_changes_nothing_and_another_plug_in_stays(monkeypatch):
    sluice_plugin.register()
    sluice_plugin.register()
    assert op_registry_oot[private.LAYER].__name__ == "SluiceGDN"
    monkeypatch.setitem(op_registry_oot, private.LAYER, Engine)
    sluice_plugin.register()
    assert op_registry_oot[private.LAYER] is Engine


def test_the_graph_that_vllm_traces(truth):
    """vLLM's compilation, up to the code generator."""
    prompts, wanted = truth.prompts[:8], truth.tokens[:8]
    options = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
    with engine(truth.folder, **options) as e:
        _same(e.tokens(prompts, NEW_TOKENS), wanted)
        assert calls()["decode"] > 0
