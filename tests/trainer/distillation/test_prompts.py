"""Where a hint stands in the teacher's prompt, and which recorded tokens the teacher is asked about."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config import DistillConfig
from pipeline.events import Hint
from tests.trainer.kit import exchange
from trainer.distillation.prompts import HintedPrompts, HintUnusableError, transcript
from trainer.distillation.teacher import TeacherAnswer, hinted_calls_of, teacher_logprobs_of
from trainer.sequences import build
from trainer.tiny import make_tokenizer

TEXT = {"type": "text", "text": "No"}
USER = {"role": "user", "content": "What?"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> HintedPrompts:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer([]).save_pretrained(folder)
    return HintedPrompts(str(folder), DistillConfig(hint_template="\n{hint}", correction_template=" [{hint}]"))


def rendered(prompts: HintedPrompts, text: str, **body: Any) -> str:
    ids = prompts.render(exchange("t", 0, [5], [6], request=msgspec.json.encode(body)), text)
    return str(prompts._tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], "<|user|>What?\nb2<|end|>"),
        (
            [{"role": "system", "content": "Be brief."}, USER, {"role": "tool", "content": "17"}],
            "<|system|>Be brief.<|end|><|user|>What?\nb2<|end|><|tool|>17<|end|>",
        ),
        (
            [USER, {"role": "assistant", "content": "a1"}, {"role": "user", "content": [TEXT]}],
            "<|user|>What?<|end|><|assistant|>a1<|end|><|user|>No\nb2<|end|>",
        ),
        ([{"role": "system", "content": "Go."}], "<|system|>Go.<|end|><|user|>b2<|end|>"),
    ],
)
def test_a_hint_stands_at_the_end_of_the_last_user_message(
    prompts: HintedPrompts, messages: list[dict[str, Any]], expected: str
) -> None:
    assert rendered(prompts, prompts.text_of([Hint(call=0, text="b2")]), messages=messages) == (
        expected + "<|assistant|>"
    )


BEGUN = {"role": "assistant", "content": "It is"}
OPEN = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [([USER, BEGUN], "<|user|>What?\nb2<|end|><|assistant|>It is"), ([BEGUN], "<|user|>b2<|end|><|assistant|>It is")],
)
def test_a_message_that_the_call_continues_stays_last_and_open(
    prompts: HintedPrompts, messages: list[dict[str, Any]], expected: str
) -> None:
    assert rendered(prompts, "\nb2", messages=messages, **OPEN) == expected


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({"documents": [{"text": "d"}]}, "d--"),
        ({"reasoning_effort": "low"}, "-low-True"),
        ({"reasoning_effort": "none"}, "-none-False"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "-low-False"),
        ({"chat_template_kwargs": {"add_generation_prompt": False, "reasoning_effort": "high"}}, "-high-"),
    ],
)
def test_the_template_reads_what_the_inference_server_gives_it(
    prompts: HintedPrompts, body: dict[str, Any], read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{{ documents[0].text if documents }}-{{ reasoning_effort }}-{{ enable_thinking }}"
        "{{ '|' if add_generation_prompt }}"
    )
    monkeypatch.setattr(prompts._tokenizer, "chat_template", template)
    assert rendered(prompts, "b2", messages=[USER], **body) == read + "|"


@pytest.mark.parametrize("template", ["{{ 1 // n }}", "{{ 2.0 ** (10000 + n) }}"])
def test_a_template_that_can_t_compute_with_a_request_refuses_it(
    prompts: HintedPrompts, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(prompts._tokenizer, "chat_template", template)
    with pytest.raises(HintUnusableError, match="template refuses"):
        rendered(prompts, "b2", messages=[USER], chat_template_kwargs={"n": 0})


@pytest.mark.parametrize(("said", "told"), [("roles must alternate", True), (USER["content"] * 3, False)])
def test_a_refusal_of_the_template_repeats_no_text_of_a_run(
    prompts: HintedPrompts, said: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts._tokenizer, "chat_template", f"{{{{ raise_exception({said!r}) }}}}")
    messages = [{"role": "user", "content": USER["content"] * 3}]
    with pytest.raises(HintUnusableError, match="template refuses") as refused:
        rendered(prompts, "b2", messages=messages)
    assert (said in str(refused.value)) == told


def test_hints_and_corrections_have_templates_of_their_own(prompts: HintedPrompts) -> None:
    hints = [Hint(call=0, text="the {hint}"), Hint(call=0, text="b2", kind="correction")]
    assert prompts.text_of(hints) == "\nthe {hint} [b2]"


def test_a_prompt_that_is_too_long_for_the_model_is_refused(prompts: HintedPrompts) -> None:
    call = exchange("t", 0, [5], [6, 7], request=msgspec.json.encode({"messages": [USER]}))
    fits = len(prompts.render(call, "b2")) + 2
    short = HintedPrompts(prompts._tokenizer.name_or_path, prompts.config, fits)
    short.render(call, "b2")
    with pytest.raises(HintUnusableError, match=f"are {fits + 1} tokens, the trainer's model takes {fits}"):
        short.render(call, "b2.")


def test_a_text_that_can_t_fit_is_not_tokenized(prompts: HintedPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    call = exchange("t", 0, [5], [6, 7], request=msgspec.json.encode({"messages": [USER]}))
    short = HintedPrompts(prompts._tokenizer.name_or_path, prompts.config, 100)
    tokenized: list[str] = []
    monkeypatch.setattr(type(short._tokenizer), "__call__", lambda _, text, **__: tokenized.append(text))
    with pytest.raises(HintUnusableError, match="characters, the trainer's model takes 100 tokens"):
        short.render(call, "b" * 2**20)
    assert not tokenized


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "1"}
WHOLE = 'assistant: {"name":"add","arguments":{"a":1}}\n\ntool: 2\n\nassistant: Done'


@pytest.mark.parametrize(
    ("calls", "expected"), [([[USER]], "Done"), ([[USER], [USER, ASKS, RESULT]], WHOLE), ([[USER], [RESULT]], "Done")]
)
def test_a_run_is_shown_as_what_followed_its_first_prompt(calls: list[list[dict[str, Any]]], expected: str) -> None:
    response = msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": "Done"}}]})
    assert expected == transcript(
        [
            exchange("t", seq, [5], [6], request=msgspec.json.encode({"messages": messages}), response=response)
            for seq, messages in enumerate(calls)
        ]
    )


def test_a_lesson_is_the_teachers_prompt_and_the_trained_tokens_of_the_call() -> None:
    """No teacher is asked about forced tokens, and context of the run is not read twice."""
    (sequence,) = build(
        "t", [exchange("t", 0, [5, 6], [7, 8]), exchange("t", 1, [5, 6, 7, 8, 9], [10, 11, 12], forced=[0, 1, 0])]
    )
    (hinted,) = hinted_calls_of(sequence, {1: np.array([20, 21, 22], np.int32), 4: np.array([20], np.int32)})
    assert hinted.sequence.ids.tolist() == [20, 21, 22, 10, 11, 12]
    assert hinted.sequence.loss_mask.tolist() == [False] * 3 + [True, False, True]
    assert hinted.slots.tolist() == [2, 3]
    everything = sequence.calls == 1
    assert hinted_calls_of(sequence.masking_out(everything), {1: np.array([20], np.int32)}) == ()


def test_a_teacher_from_outside_teaches_only_tokens_of_temperature_1() -> None:
    """Regression: its logprobs, of temperature 1, drew a policy that sampled at 0.7 to 0.7 times its logits."""
    (sequence,) = build(
        "t", [exchange("t", 0, [5, 6], [7, 8]), exchange("t", 1, [5, 6, 7, 8], [9], request=b'{"temperature": 0.7}')]
    )
    ids = [np.array([7, 8], np.int32), np.array([9], np.int32)]
    answers = [
        TeacherAnswer(c, i, np.full(len(i), -1.0), i[:, None], np.full((len(i), 1), -1.0)) for c, i in enumerate(ids)
    ]
    teacher_logprobs = teacher_logprobs_of(sequence, answers)
    assert teacher_logprobs is not None
    assert np.isnan(teacher_logprobs.logprobs_k).tolist() == [False, False, True]
    assert np.isnan(teacher_logprobs.top_logprobs_kK).ravel().tolist() == [False, False, True]
    assert teacher_logprobs_of(sequence.masking_out(sequence.calls == 0), answers) is None


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"{",
        b"7",
        b"[]",
        b'{"messages": [7]}',
        b'{"messages": [{}]}',
        b'{"messages": ["x"]}',
        b'{"messages": [{"role": "user", "content": 7}]}',
        b'{"messages": [{"role": "user", "content": [7]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        b'{"messages": [{"role": "user", "content": "x", "tool_calls": [7]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 7}',
        b'{"messages": ' + b"[" * 100_000,
    ],
)
def test_a_request_that_is_no_chat_is_refused(prompts: HintedPrompts, request_bytes: bytes) -> None:
    call = exchange("t", 0, [5], [6], request=request_bytes)
    with pytest.raises(HintUnusableError):
        prompts.render(call, "x")
    with pytest.raises(HintUnusableError):
        transcript([call])
