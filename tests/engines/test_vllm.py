"""The whole of vLLM with the plug-in gives the tokens of stock transformers, in float32."""

from __future__ import annotations

import statistics

import torch
from vllm import ModelRegistry
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from sluice.integrations import vllm as sluice_plugin
from sluice.integrations.vllm import private
from tests.engines import tiny
from tests.engines.no_torchvision import without_torchvision
from tests.engines.tiny import NEW_TOKENS, known_answers
from tests.engines.vllm_engine import NGRAM, Engine, calls, engine


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
    """Reliability row 35. (With drafts as well, vLLM's CPU build copies states by a GPU kernel.)"""
    with engine(
        truth.folder, enable_prefix_caching=True, max_num_seqs=4, num_gpu_blocks_override=512
    ) as e:
        heads = tiny.prompts([e.block + 10], each=4, seed=2)
        tails = tiny.prompts([1, 5, 20, 33, 40], seed=3)
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
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    with engine(truth.folder, speculative_config=drafts) as e:
        _same(e.tokens(prompts, NEW_TOKENS), wanted)
        drafted = e.metric("spec_decode_num_draft_tokens")
        accepted = e.metric("spec_decode_num_accepted_tokens")
        assert 0 < accepted < drafted
        assert calls()["prefill and drafts"] > 0
        assert calls()["vLLM's own"] == 0


def test_weights_in_split_order(tmp_path):
    """Qwen3.5's text model. Its module in vLLM imports that of images."""
    without_torchvision()
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)
    truth = known_answers(str(tmp_path), seed=0, family="Qwen3_5")
    for options in ({}, {"speculative_config": NGRAM, "max_num_batched_tokens": 200}):
        with engine(truth.folder, **options) as e:
            assert e.layers() == ["sluice.integrations.vllm.layer.SluiceGDN"] * 3
            prompts, wanted = _longer(truth) if options else (truth.prompts, truth.tokens)
            _same(e.tokens(prompts, NEW_TOKENS), wanted)
            assert any("drafts" in kind for kind in calls()) == bool(options)
            assert calls()["prefill"] > 0
            assert calls()["vLLM's own"] == 0


def test_bfloat16_is_closer_to_float32_than_vllms_own(tmp_path):
    """Every token of six random models' prompts: its log probability, and which token is likeliest.

    bfloat16 holds the weights, so the engine's roundings are all that differs. A single prompt says
    little: roundings of other layers part the ways of both. vLLM's own kernels take no other dtype
    on a CPU.
    """
    first: dict[bool, list[float]] = {False: [], True: []}
    error: dict[bool, list[float]] = {False: [], True: []}
    equal, greedy = {False: 0, True: 0}, {False: 0, True: 0}
    for seed in range(6):
        truth = known_answers(str(tmp_path / str(seed)), seed, rounded=True)
        with torch.inference_mode():
            wanted = [
                truth.model(torch.tensor([p])).logits[0].log_softmax(-1) for p in truth.prompts
            ]
        for on in (False, True):
            with engine(truth.folder, on=on, dtype="bfloat16") as e:
                assert (("sluice" in e.layers()[0]), bool(calls())) == (on, False)
                outs = e.run(truth.prompts, NEW_TOKENS, logprobs=5, prompt_logprobs=1)
            for out, prompt, exact in zip(outs, truth.prompts, wanted, strict=True):
                for t in range(1, len(prompt)):
                    found, row = out.prompt_logprobs[t], exact[t - 1]
                    error[on].append(abs(found[prompt[t]].logprob - float(row[prompt[t]])))
                    likeliest = found.get(int(row.argmax()))
                    equal[on] += likeliest is not None and likeliest.rank == 1
            for out, tokens, exact in zip(outs, truth.tokens, truth.logprobs, strict=True):
                new = out.outputs[0]
                greedy[on] += sum(a == b for a, b in zip(new.token_ids, tokens, strict=True))
                first[on] += [abs(x.logprob - float(exact[k])) for k, x in new.logprobs[0].items()]
    means = {on: (statistics.mean(error[on]), statistics.mean(first[on])) for on in error}
    print(f"likeliest {equal}, greedy {greedy}, of all and of first tokens {means}")  # noqa: T201
    assert means[True][0] <= means[False][0]
    assert means[True][1] <= means[False][1]
    assert equal[True] >= equal[False]


def test_batch_invariant_mode_is_offered_with_vllms_own_metadata():
    backend = private.invariant_backend()
    assert backend.supports_batch_invariance()
    assert backend.get_builder_cls() is GDNAttentionMetadataBuilder
    assert backend is private.invariant_backend()


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
