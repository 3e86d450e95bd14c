"""A step with a teacher: its gradient against the literal formulas, and who teaches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import TrainerConfig
from pipeline.events import unpack_ids
from tests.kits.settings import with_values
from tests.trainer.kit import VOCAB, exactly, exchange, stir
from trainer.batches.examples import Example
from trainer.checkpoints.tensors import adapter_files, state_bytes, state_of
from trainer.distillation.teacher import TeacherAnswer, hinted_calls_of, teacher_logprobs_of
from trainer.engine.engine import Engine
from trainer.sequences import TokenSequence, build

WEIGHT = 0.7
PROMPT, HINTED = [5, 6, 9], np.array([5, 6, 17, 18, 9], np.int32)
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "lora.rank": 4,
    "distill.weight": WEIGHT,
    "optimizer.learning_rate": 1e-2,
    "logprob_bound": 1e9,
    "distill.divergence": "sampled",
}


@pytest.fixture(scope="module")
def engine(tiny_base: str) -> Engine:
    engine = exactly(Engine(tiny_base, with_values(TrainerConfig(), SETTINGS)))
    stir(engine)
    return engine


def configure(engine: Engine, **values: Any) -> None:
    engine.configure(with_values(TrainerConfig(), SETTINGS | values))


def sequences() -> list[TokenSequence]:
    """One of two calls, and one of a call with a temperature and a forced token."""
    return [
        *build("a", [exchange("a", 0, PROMPT, [7, 8]), exchange("a", 1, [*PROMPT, 7, 8, 4], [3, 2, 11])]),
        *build("b", [exchange("b", 0, PROMPT, [12, 13, 14], forced=[0, 1, 0], request=b'{"temperature": 0.5}')]),
    ]


def examples(advantage: float = 0.4) -> list[Example]:
    """Call 1 of the first and call 0 of the second sequence have hints."""
    first, second = sequences()
    return [
        Example(first, advantage, hinted_calls=hinted_calls_of(first, {1: HINTED})),
        Example(second, -advantage, hinted_calls=hinted_calls_of(second, {0: HINTED})),
    ]


def logprobs(engine: Engine, prompt: Any, reply: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of all tokens at each place of `reply`, by the model's own forward pass."""
    ids = torch.tensor([[*prompt, *reply]])
    logits = engine.model.peft(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def literal_terms(
    policy: torch.Tensor,
    teacher: torch.Tensor | None,
    reply: list[int],
    own: float,
    trained: list[int],
    *,
    divergence: str,
    top_k: int,
) -> list[torch.Tensor]:
    """What each trained token of a reply adds to the loss. `policy` and `teacher` are the logprobs of all tokens at its
    places, `own` is its advantage. An importance weight is a ratio to the recorded logprob of -2."""
    terms = []
    for t in trained:
        p = policy[t][reply[t]]
        weight, total = min(float((p.detach() + 2.0).exp()), 3.0), own
        if teacher is not None and divergence == "sampled":
            total += WEIGHT * float(teacher[t][reply[t]] - p.detach())
        term = -weight * total * p
        if teacher is not None and divergence == "reverse_kl":
            best = teacher[t].argsort(descending=True)[:top_k]
            mine, its = policy[t][best].exp(), teacher[t][best].exp()
            kl = (mine * (mine / its).log()).sum()
            if top_k < VOCAB:
                kl = kl + (1 - mine.sum()) * ((1 - mine.sum()) / (1 - its.sum())).log()
            term = term + WEIGHT * weight * kl
        terms.append(term)
    return terms


def assert_gradient(engine: Engine, batch: list[Example], terms: Callable[[], list[torch.Tensor]]) -> None:
    """The gradient of the engine's loss of `batch` is that of the mean of `terms`."""
    found = []
    for literal in (False, True):
        engine.model.peft.zero_grad(set_to_none=True)
        if literal:
            torch.stack(terms()).mean().backward()  # type: ignore[no-untyped-call]
        else:
            engine.passes.gradients(engine._with_teacher(engine.initial_state(), batch, [0, 0]), [0, 0])
        found.append([p.grad.clone() for p in engine.model.parameters if p.grad is not None])
    assert found[0]
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("packing", ["prefix", "padded"])
@pytest.mark.parametrize(("divergence", "top_k"), [("sampled", 1), ("reverse_kl", 5), ("reverse_kl", 99)])
@pytest.mark.parametrize("advantage", [0.4, 0.0])
def test_the_gradient_is_that_of_the_literal_formula(
    engine: Engine, divergence: str, top_k: int, advantage: float, packing: str
) -> None:
    """Of the rewards' and the teacher's advantage together, and of the teacher's alone."""
    configure(engine, **{"distill.divergence": divergence, "distill.top_k": top_k, "memory.packing": packing})

    def terms() -> list[torch.Tensor]:
        out = []
        for prompt, reply, own, temperature, hinted, trained in (
            ([*PROMPT, 7, 8, 4], [3, 2, 11], advantage, 1.0, True, [0, 1, 2]),
            (PROMPT, [7, 8], advantage, 1.0, False, [0, 1]),
            (PROMPT, [12, 13, 14], -advantage, 0.5, True, [0, 2]),
        ):
            policy = logprobs(engine, prompt, reply, temperature)
            with torch.no_grad():
                teacher = logprobs(engine, HINTED, reply, temperature) if hinted else None
            k = min(top_k, VOCAB)
            out += literal_terms(policy, teacher, reply, own, trained, divergence=divergence, top_k=k)
        return out

    assert_gradient(engine, examples(advantage), terms)


@pytest.mark.parametrize(("divergence", "top_k"), [("sampled", 0), ("reverse_kl", 5), ("reverse_kl", VOCAB)])
def test_the_answers_of_a_teacher_from_outside_have_the_gradient_of_the_literal_formula(
    engine: Engine, divergence: str, top_k: int
) -> None:
    """The teacher reads what the policy read, at temperature 1. Of three calls it did not answer for one, and teaches
    nothing about one that was sampled at another temperature."""
    configure(engine, **{"distill.divergence": divergence, "distill.teacher": "outside", "distill.top_k": 3})
    torch.manual_seed(2)
    distributions = (2 * torch.randn(2, 3, VOCAB)).log_softmax(-1).double()
    calls = [
        (exchange("a", 1, [*PROMPT, 7, 8, 4], [3, 2, 11]), 0.4, 1.0, [0, 1, 2]),
        (exchange("a", 0, PROMPT, [7, 8]), 0.4, 1.0, [0, 1]),
        (exchange("b", 0, PROMPT, [12, 13, 14]), -0.4, 0.5, [0, 2]),
    ]
    answers = []
    for (call, *_), its in zip(calls[::2], distributions, strict=True):
        ids = unpack_ids(call.sampled_ids)
        best = its.topk(top_k, -1)
        answers.append(
            TeacherAnswer(call.seq, ids, its[range(3), ids.tolist()].numpy(), best.indices.numpy(), best.values.numpy())
        )
    batch = [
        Example(s, advantage, teacher=teacher_logprobs_of(s, [answer]))
        for s, advantage, answer in zip(sequences(), (0.4, -0.4), answers, strict=True)
    ]

    def terms() -> list[torch.Tensor]:
        out = []
        for (call, own, temperature, trained), its in zip(calls, (distributions[0], None, None), strict=True):
            reply = unpack_ids(call.sampled_ids).tolist()
            policy = logprobs(engine, unpack_ids(call.prompt_ids), reply, temperature)
            out += literal_terms(policy, its, reply, own, trained, divergence=divergence, top_k=top_k)
        return out

    assert_gradient(engine, batch, terms)


def test_without_a_weight_hints_change_nothing(engine: Engine) -> None:
    configure(engine, **{"distill.weight": 0.0})
    state = engine.initial_state()
    plain = [Example(s, a) for s, a in zip(sequences(), (0.4, -0.4), strict=True)]
    steps = [engine.step(state, batch, [0, 0]) for batch in (examples(), plain)]
    for name, weights in steps[0].state.weights.items():
        assert torch.equal(weights, steps[1].state.weights[name])
    assert "tokens_taught" not in steps[0].metrics


def test_who_teaches(engine: Engine) -> None:
    """The policy, the average, which is exact after a restart, and the base model."""
    configure(engine, **{"distill.teacher": "average"})
    state = engine.initial_state()
    first = engine.step(state, examples(), [0, 0])
    assert first.state.average is not None
    for name, weights in first.state.average.items():
        expected = 0.95 * state.weights[name].float() + 0.05 * first.state.weights[name].float()
        torch.testing.assert_close(weights, expected)
    files = {"state.pt": state_bytes(first.state)} | adapter_files(first.state.weights, engine.model.lora, "base")
    resumed = engine.step(state_of(1, files), examples(), [0, 0])
    second = engine.step(first.state, examples(), [0, 0])
    gaps = {"average": second.metrics["teacher_gap"]}
    assert resumed.metrics["teacher_gap"] == gaps["average"]
    for teacher in ("policy", "base"):
        configure(engine, **{"distill.teacher": teacher})
        gaps[teacher] = engine.step(first.state, examples(), [0, 0]).metrics["teacher_gap"]
    assert len(set(gaps.values())) == 3
    assert second.metrics["tokens_taught"] == 5
    engine.model.load_adapter(first.state.weights)
    with torch.no_grad():
        policy = logprobs(engine, [*PROMPT, 7, 8, 4], [3, 2, 11]), logprobs(engine, PROMPT, [12, 13, 14], 0.5)
        teacher = logprobs(engine, HINTED, [3, 2, 11]), logprobs(engine, HINTED, [12, 13, 14], 0.5)
    at = ((0, 0, 3), (0, 1, 2), (0, 2, 11), (1, 0, 12), (1, 2, 14))
    literal = np.mean([float(policy[s][t, i] - teacher[s][t, i]) for s, t, i in at])
    assert gaps["policy"] == pytest.approx(literal, abs=1e-10)
