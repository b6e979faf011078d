"""``examples/serve.py`` gives the tokens that one-by-one generation gives."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import sluice
from tests import recorded

NEW, CONTEXT = 12, 128


@pytest.fixture(scope="module")
def model(serve):
    return serve.load(None, "cpu")


@pytest.fixture(scope="module")
def prompts(serve, model):
    # one that repeats itself, so that guesses have a chance; two shorter than the conv window
    return [*serve.make_prompts(model, 6, 96), [5, 6, 7, 8] * 9, [3, 9], [4]]


@pytest.fixture(scope="module")
def exact(serve, model, prompts):
    return serve.one_by_one(model, prompts, NEW)


@pytest.fixture(autouse=True)
def _plain():
    with sluice.use_backend("reference"):
        yield


@pytest.fixture
def graphs(monkeypatch):
    """Graphs on a CPU, by recordings."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", recorded.RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recorded.recording)


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("slots", [4, 16], ids="{} slots".format)
def test_the_engine_gives_the_tokens_of_one_by_one_generation(
    serve, model, prompts, exact, slots, speculate
):
    assert len({tuple(x) for x in exact}) == len(exact)
    engine = serve.Engine(model, slots, CONTEXT, speculate)
    assert serve.serve(engine, prompts, NEW) == exact
    kept = len(engine.prefixes)
    assert engine.pool.slots - engine.pool.available == kept  # nothing else holds a slot
    if slots == 16:
        assert serve.serve(engine, prompts, NEW) == exact  # now from cached prefixes
        assert engine.counts["prompt tokens from the cache"] >= 5 * serve.BLOCK


def test_prompts_that_begin_alike_read_the_beginning_once(serve, model, prompts, exact):
    """Six prompts share 48 tokens: a block and a half."""
    engine = serve.Engine(model, 16, CONTEXT)
    assert serve.serve(engine, prompts[:1], NEW) == exact[:1]
    assert serve.serve(engine, prompts[1:6], NEW) == exact[1:6]
    assert engine.counts["prompt tokens from the cache"] == 5 * serve.BLOCK


@pytest.mark.parametrize("wrong", [2, 3, 5])
def test_right_and_wrong_guesses_give_the_same_tokens(
    serve, model, prompts, exact, wrong, monkeypatch
):
    """Guesses that are right, but for every ``wrong``-th token of a sequence."""

    known = list(zip(prompts, exact, strict=True))

    def guess(tokens, n):
        prompt, made = next((p, x) for p, x in known if tokens[: len(p)] == p)
        at = len(tokens) - len(prompt)
        found = [(i + at, token) for i, token in enumerate(made[at : at + n])]
        return [token if i % wrong else (token + 1) % 512 for i, token in found]

    monkeypatch.setattr(serve, "guess", guess)
    engine = serve.Engine(model, 16, CONTEXT, speculate=3)
    assert serve.serve(engine, prompts, NEW) == exact
    assert 0 < engine.counts["right guesses"] < engine.counts["guesses"]


def test_a_prefix_that_is_not_restored_is_noticed(serve, model, prompts, exact, monkeypatch):
    """The comparison can fail: a fork that loses the state gives other tokens."""
    engine = serve.Engine(model, 16, CONTEXT)
    serve.serve(engine, prompts, 2)
    monkeypatch.setattr(engine.pool, "fork", lambda slot: engine.pool.allocate())
    assert serve.serve(engine, prompts, NEW) != exact


@pytest.mark.parametrize("speculate", [0, 3])
def test_graphs_give_the_tokens_of_one_by_one_generation(
    serve, model, prompts, exact, speculate, graphs
):
    """Six slots: graphs of 1, 2, 4 and 6 rows, and batches of 3 and 5 that are padded."""
    engine = serve.Engine(model, 6, CONTEXT, speculate, graphs=True)
    assert list(engine.graphs) == [1, 2, 4, 6]
    used = []
    decode = engine._decode
    engine._decode = lambda inputs: used.append(inputs) or decode(inputs)
    assert serve.serve(engine, prompts, NEW) == exact
    replays = {n: graph.graph.replays for n, graph in engine.graphs.items()}
    assert not used, "a batch ran without a graph"
    assert sum(replays.values()) > NEW
    if not speculate:  # with guesses some sizes may not occur
        assert all(replays.values()), replays


def test_padding_of_a_graph_touches_no_state(serve, model, graphs):
    engine = serve.Engine(model, 4, CONTEXT, graphs=True)
    pools = engine.pool.conv, engine.pool.recurrent
    with torch.inference_mode():
        engine.graphs[4](torch.tensor([[5, 6, 7, 8], [0, 0, 0, 0], [0, 1, 2, 3]]))
        for pool in pools:
            pool.fill_(7.0)
        engine.graphs[4](torch.tensor([[5], [0], [2]]))
    for pool in pools:
        assert bool((pool[:, [0, 1, 3]] == 7.0).all())
        assert not bool((pool[:, 2] == 7.0).all())


def test_mistakes_with_a_graphs_buffers_are_noticed(
    serve, model, prompts, exact, graphs, monkeypatch
):
    """The comparison can fail: padding that keeps its slots, inputs that are not copied."""

    def stale(graph, inputs):
        graph.inputs[:, : inputs.shape[1]] = inputs
        graph.graph.replay()
        return graph.outputs[: inputs.shape[1]]

    def moved(graph, inputs):
        graph.inputs = inputs
        graph.graph.replay()
        return graph.outputs[: inputs.shape[1]]

    monkeypatch.setattr(serve.Graph, "__call__", moved)
    engine = serve.Engine(model, 6, CONTEXT, graphs=True)
    assert serve.serve(engine, prompts, NEW) != exact
    monkeypatch.setattr(serve.Graph, "__call__", stale)
    engine = serve.Engine(model, 6, CONTEXT, graphs=True)
    with pytest.raises(sluice.ContractError, match="no slot twice"):
        serve.serve(engine, prompts, NEW)


def test_a_graph_that_was_not_warmed_up_is_noticed(serve, model, prompts, exact, graphs):
    """The comparison can fail: keys that are allocated in a capture are zero in each replay."""

    class Cold(serve.Graph):
        def __init__(self, run, rows, device):
            warm = iter([lambda inputs: None, run])
            super().__init__(lambda inputs: next(warm)(inputs), rows, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "Graph", Cold)
        engine = serve.Engine(model, 6, CONTEXT, graphs=True)
    assert serve.serve(engine, prompts[:2], NEW) != exact[:2]


def test_a_recorded_graph_repeats_operations_and_no_python():
    """The stand-in itself: static inputs and outputs, in-place writes, and no waiting."""
    x, total, calls = torch.ones(3), torch.zeros(3), []

    def run():
        calls.append(1)
        total.add_(x)
        return x * 2

    graph = recorded.RecordedGraph()
    with recorded.recording(graph):
        y = run()
    x.fill_(5.0)
    graph.replay()
    assert y.tolist() == [10.0] * 3
    assert total.tolist() == [6.0] * 3
    assert len(calls) == 1
    with recorded.recording(graph), pytest.raises(RuntimeError, match="capturing"):
        x[0].item()
    with recorded.recording(graph), pytest.raises(RuntimeError, match="capturing"):
        torch.tensor([1, 2])
    for wait in (lambda: x.tolist(), lambda: x[x > 3]):
        with recorded.recording(graph), pytest.raises(RuntimeError, match="capturing"):
            wait()


def test_guesses_are_what_followed_before(serve):
    assert serve.guess([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert serve.guess([1, 2, 3, 4, 1, 2], 0) == []
    assert serve.guess([1, 2, 3], 4) == []
    assert torch.get_default_dtype() == torch.float32
