# ruff: noqa: PERF401 - a table of cases reads better as loops
"""A pool of judge replies, well-formed to hostile: the right scores, or ids to ask for again; nothing else."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from judge.ruler import lenient_json, replies
from judge.ruler.replies import MAX_CHARACTERS, parse_scores
from tests.judge.kit import Model, ruler, transcript
from tests.kits.scoring_server import Scorer, blocks

IDS = ["abc101", "def202", "ghj303", "kmn404"]
TRUTH = dict(zip(IDS, [0.9, 0.1, 0.55, 0.3], strict=True))

Case = tuple[str, dict[str, float]]
"""A reply, and the right scores of those that it names beyond doubt."""


def _entries(scale: float, form: str) -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for name, truth in TRUTH.items():
        score: object = round(truth * scale, 6)
        if form == "string":
            score = str(score)
        elif form == "fraction":
            score = f"{score}/{scale:g}"
        elif form == "percent":
            score = f"{truth * 100:g}%"
        out.append({"id": name, "explanation": 'did "well" {so} [far], 3 of 10', "score": score})
    return out


def _shapes(entries: list[dict[str, object]]) -> dict[str, str]:
    by_id = {str(e["id"]): e["score"] for e in entries}
    return {
        "object": json.dumps({"scores": entries}),
        "indented": json.dumps({"scores": entries}, indent=2),
        "list": json.dumps(entries),
        "by id": json.dumps(by_id),
        "nested by id": json.dumps({"scores": by_id}),
        "objects by id": json.dumps({i: {"score": s, "reason": "x"} for i, s in by_id.items()}),
        "other keys": json.dumps(
            {"results": [{"trajectory_id": i, "rating": s, "rationale": "y"} for i, s in by_id.items()]}
        ),
        "upper case": json.dumps({"scores": [{"ID": i.upper(), "Score": s} for i, s in by_id.items()]}),
        "deep": json.dumps({"a": {"b": entries}}),
        "trailing commas": json.dumps({"scores": entries})[:-2] + ",]}",
    }


_WRAPS = {
    "bare": "{}",
    "fence": "```json\n{}\n```",
    "plain fence": "```\n{}\n```",
    "prose": "Here is my verdict [as asked]:\n\n{}\n\nI hope that helps {{really}}!",
    "thinking": '<think>abc101 maybe 0.2? {{"abc101": 0.2}} hmm</think>\n{}',
    "draft": '{{"note": "thinking about it"}}\n{}',
}


def well_formed() -> list[Case]:
    cases: list[Case] = []
    for scale, form in [
        (1.0, "number"),
        (10.0, "number"),
        (100.0, "number"),
        (1.0, "string"),
        (10.0, "string"),
        (10.0, "fraction"),
        (5.0, "fraction"),
        (100.0, "percent"),
    ]:
        entries = _entries(scale, form)
        random.Random(scale).shuffle(entries)
        right = TRUTH if scale == 1.0 or form in ("fraction", "percent") else {}
        for (_, shape), (_, wrap) in itertools.product(_shapes(entries).items(), _WRAPS.items()):
            cases.append(
                (wrap.replace("{}", "\0").replace("{{", "{").replace("}}", "}").replace("\0", shape), right)
            )
    return cases


def in_lines() -> list[Case]:
    cases: list[Case] = []
    for pattern in [
        "{}: {}",
        "- {}: {}",
        "**{}**: {}",
        "{} = {}",
        "{} - {} - because it won",
        "Trajectory {}: {}",
        "id {} -> {}",
        "| {} | {} | fine |",
        "* `{}`: **{}**",
        "{}: score {}",
        "1. {}: {}",
    ]:
        body = "\n".join(pattern.format(i, s) for i, s in TRUTH.items())
        found = {} if pattern.startswith("1.") else TRUTH
        cases += [
            (body, found),
            ("My scores are:\n\n" + body, found),
            (body + "\n\nDone.", found),
            (f"```\n{body}\n```", found),
        ]
    return cases


def defective() -> list[Case]:
    entries = _entries(1.0, "number")
    cases: list[Case] = []
    for missing in range(4):
        rest = [e for i, e in enumerate(entries) if i != missing]
        right = {i: s for i, s in TRUTH.items() if i != IDS[missing]}
        cases.append((json.dumps({"scores": rest}), right))
        for bad in [None, "high", True, [], {}, "0.5.1", "NaN", "", "1e999", "7/0", "--1"]:
            cases.append((json.dumps({"scores": [*rest, {"id": IDS[missing], "score": bad}]}), right))
        for bad in ["NaN", "Infinity", "-Infinity", "1e9999"]:
            cases.append(
                (
                    '{"scores": '
                    + json.dumps(rest)[:-1]
                    + f', {{"id": "{IDS[missing]}", "score": {bad}}}]}}',
                    right,
                )
            )
        for other in [
            "zzz999",
            "abc1011",
            "",
            "1",
            "trajectory",
            IDS[missing] + "x",
            7,
            None,
        ]:  # someone else's id
            cases.append((json.dumps({"scores": [*rest, {"id": other, "score": 1.0}]}), right))
        twice = [*entries, {"id": IDS[missing], "score": 0.77}]
        cases.append((json.dumps({"scores": twice}), right))
        cases.append((json.dumps({"scores": [*entries, entries[missing]]}), TRUTH))
        cases.append((json.dumps({"scores": [*rest, {"score": 0.5}]}), right))
        cases.append(
            (
                '{"scores": '
                + json.dumps(rest)[:-1]
                + f', {{"id": "{IDS[missing]}", "score": 0.2, "score": 0.9}}]}}',
                right,
            )
        )
    for cut in range(0, 240, 8):  # cut off in the middle: nothing that was not said
        cases.append((json.dumps({"scores": entries})[:cut], {}))
    for reply in [
        "",
        " ",
        "null",
        "[]",
        "{}",
        "I can't judge this.",
        "0.9, 0.1, 0.55, 0.3",
        "[0.9, 0.1, 0.55, 0.3]",
        '{"scores": [0.9, 0.1, 0.55, 0.3]}',
        "[" * 5000,
        "{" * 5000,
        '{"a":' * 3000,
        "]}" * 100,
        "\x00\x01",
        "```json",
        '"abc101"',
        "abc101",
        "abc101:",
        "abc101: good",
        '{"scores": "abc101"}',
        '{"id": "abc101"}',
        '{"score": 1}',
        "all: 1.0",
        "everyone gets 1",
        "abc101: 2024-01-01 was fine",
        "�" * 50,
        "9" * 5000,
        "-" * 5000,
    ]:
        cases.append((reply, {}))
    mixed = [{"id": i, "score": s} for i, s in zip(IDS, [0.9, 8, 5, 3], strict=True)]
    cases.append((json.dumps({"scores": mixed}), {}))
    return cases


def plain() -> list[Case]:
    """Replies whose meaning is plain though their form is not the one asked for."""
    entries = _entries(1.0, "number")
    draft = [{"id": i, "score": 0.5} for i in IDS]
    one_a_line = "\n".join(json.dumps(e) for e in entries)
    final = json.dumps({"scores": entries})
    drafted = json.dumps({"scores": draft})
    lines = "\n".join(f"{i}: {s}" for i, s in TRUTH.items())
    draft_lines = "\n".join(f"{i}: 0.5" for i in IDS)
    shown = {i: {"draft_score": 0.5, "final_score": s, "reason": "x"} for i, s in TRUTH.items()}
    replies = [
        one_a_line,
        f"```jsonl\n{one_a_line}\n```",
        one_a_line.replace("\n", ",\n"),
        "\n\n".join(f"About this one:\n{json.dumps(e)}" for e in entries),
        *(json.dumps({"scores": [{**e, "id": f(e["id"])} for e in entries]}) for f in _ECHOES),
        *("\n".join(f"{f(i)}: {s}" for i, s in TRUTH.items()) for f in _ECHOES),
        json.dumps({f"trajectory {i}": s for i, s in TRUTH.items()}),
        json.dumps({"scores": [{"id": e["id"], "final_score": e["score"]} for e in entries]}),
        json.dumps([{"id": e["id"], "score": 0.5, "final_score": e["score"]} for e in entries]),
        json.dumps([{"id": e["id"], "draft_score": 0.5, "Final Score": e["score"]} for e in entries]),
        json.dumps(shown),
        json.dumps({"draft_scores": draft, "final_scores": entries}),
        json.dumps({"final": entries, "initial": draft}),
        f"Draft:\n{drafted}\nFinal:\n{final}",
        f"{drafted}\n{final}",
        "\n".join(json.dumps(e) for e in draft) + "\n\nOn reflection:\n" + one_a_line,
        f"{draft_lines}\n\nAfter comparing them again:\n\n{lines}",
        f"{json.dumps(draft)}\n\nFinal scores:\n{lines}",
        f"{final}\n\nabc101: 3 mistakes\ndef202: 7 mistakes",
        "\n".join(f"### Trajectory {i}\nIt did well.\n**Final score:** {s}\n" for i, s in TRUTH.items()),
        "scores:\n" + "\n".join(f"- id: {i}\n  score: {s}\n" for i, s in TRUTH.items()),
        "\n".join(f"{n}. {i}: {s}" for n, (i, s) in enumerate(TRUTH.items(), 1)),
        str({"scores": [{"id": i, "score": s, "explanation": None} for i, s in TRUTH.items()]}),
        "{" + ", ".join(f"{i}: {s}" for i, s in TRUTH.items()) + "}",
        json.dumps(entries).replace("}, {", "} {"),
        json.dumps([{"id": i, "explanation": "A\nB", "score": s} for i, s in TRUTH.items()]).replace(
            "\\n", "\n"
        ),
        '[{"id": "abc101", "score": 9/10}, {"id": "def202", "score": 10%}, {"id": "ghj303", "score": 0.55,}, '
        r"""{"id": "kmn404", "explanation": "said \(x\) and it\'s", "score": 0.3}]""",
        f"I think that abc101: 0.2 might do.</think>{final}",
        json.dumps({"scores": [{"id": e["id"], "name": "attempt 1", "score": e["score"]} for e in entries]}),
    ]
    return [(reply, TRUTH) for reply in replies]


_ECHOES: list[Callable[[object], str]] = [
    lambda i: f"trajectory {i}",
    lambda i: f"<{i}>",
    lambda i: f"Trajectory: {i}",
    lambda i: f"<trajectory {i}>",
    lambda i: f"attempt `{i}`",
]


def ambiguous() -> list[Case]:
    """What can't be told is asked for again."""
    entries = _entries(1.0, "number")
    final = json.dumps({"scores": entries})
    cases: list[Case] = [
        ("\n".join(json.dumps(e) for e in [*entries, {"id": "abc101", "score": 0.2}]), _but("abc101")),
        (f"{final}\n\n{json.dumps({'scores': [{'id': 'abc101', 'score': 0.2}]})}", _but("abc101")),
        (json.dumps({"draft": entries}), {}),
        (json.dumps([{"id": "abc101", "trajectory_id": "def202", "score": 1}]), {}),
        (json.dumps([{"id": "abc101", "final_score": 0.1, "revised_score": 0.4}]), {}),
        (
            json.dumps(
                [{"id": "better than abc101", "score": 0.4}, {"id": "abc101 and def202", "score": 0.4}]
            ),
            {},
        ),
        (json.dumps([{"id": "<abc101x>", "score": 1}, {"id": "xabc101", "score": 1}]), {}),
        ('{"first": {"abc101": 0.2, "def202": 0.2}, "second": {"abc101": 0.9, "de', {}),
        ("### abc101\nscore: 0.2\nscore: 0.9", {}),
    ]
    cut = json.dumps({"scores": entries})
    cases.append((cut[: cut.index("kmn404")], {i: s for i, s in TRUTH.items() if i != "kmn404"}))
    return cases


def _but(name: str) -> dict[str, float]:
    return {i: s for i, s in TRUTH.items() if i != name}


POOL = well_formed() + in_lines() + defective() + plain() + ambiguous()


def test_the_pool_of_replies_is_large() -> None:
    assert len(POOL) >= 300


@pytest.mark.parametrize("number", range(0, len(POOL), 20))
def test_a_reply_gives_the_right_scores_or_asks_again(number: int) -> None:
    for reply, right in POOL[number : number + 20]:
        got = parse_scores(reply, IDS)
        assert set(got.scores) | set(got.missing) == set(IDS), reply
        assert not set(got.scores) & set(got.missing), reply
        for name, score in got.scores.items():
            assert score == pytest.approx(TRUTH[name]), reply
        if right:
            assert set(got.scores) >= set(right), reply


@pytest.mark.parametrize("high", ["1.01", "-0.5", "7", '"85"', '"12/10"', "1e300"])
def test_a_score_outside_of_0_to_1_makes_every_score_of_the_reply_doubtful(high: str) -> None:
    """Nobody asked for its scale. A judge that means tenths may say 1 for the worst of a group."""
    got = parse_scores(f'{{"abc101": {high}, "def202": 0.5, "ghj303": 1, "kmn404": 0}}', IDS)
    assert (got.scores, got.missing, got.out_of_range) == ({}, tuple(IDS), True)
    assert not parse_scores('{"abc101": 1.0, "def202": 0.0}', IDS).out_of_range


QUOTES = [
    json.dumps(dict.fromkeys(IDS, 1.0)),
    json.dumps({"evidence": {i: {"final_score": 1.0} for i in IDS}}),
    json.dumps([{"id": i, "score": 1.0} for i in IDS]),
    '{"abc101": 1.0}',
    "Final scores as the attempts saw them:\n" + "\n".join(f"{i}: 1.0" for i in IDS),
    "\n".join(f'{i}: "Final score: 1.0"' for i in IDS),
]
"""What agents wrote of themselves, as a judge may repeat it with their ids."""


@pytest.mark.parametrize("number", range(len(QUOTES)))
def test_quoted_evidence_changes_no_score(number: int) -> None:
    quote = QUOTES[number]
    answer = json.dumps({"scores": _entries(1.0, "number")})
    for reply in (f"{answer}\n\nEvidence:\n{quote}", f"{answer}\n{quote}", f"{quote}\n\n{answer}"):
        assert parse_scores(reply, IDS).scores == pytest.approx(TRUTH), reply
    if quote.startswith("{"):
        beside = f'{{"scores": {json.dumps(_entries(1.0, "number"))}, "quotes": {quote}}}'
        assert parse_scores(beside, IDS).scores == pytest.approx(TRUTH)


def test_explanations_are_kept() -> None:
    got = parse_scores(
        '{"scores": [{"id": "abc101", "explanation": "won in four moves", "score": 1}]}', ["abc101"]
    )
    assert got.explanations == {"abc101": "won in four moves"}


def test_scores_corrected_after_a_draft_count() -> None:
    got = parse_scores('{"abc101": 0.2}\nOn second thought:\n{"abc101": 0.8}', ["abc101"])
    assert got.scores == {"abc101": 0.8}


@pytest.mark.parametrize("number", range(len(plain())))
def test_an_unambiguous_reply_is_parsed_whatever_its_form(number: int) -> None:
    reply, truth = plain()[number]
    assert parse_scores(reply, IDS).scores == pytest.approx(truth), reply


@pytest.mark.parametrize("number", range(len(ambiguous())))
def test_ids_with_ambiguous_scores_are_missing(number: int) -> None:
    reply, right = ambiguous()[number]
    assert parse_scores(reply, IDS).scores == pytest.approx(right), reply


ATOMS = [
    "\n", " ", "\t\r", "[", "{", "]", "}", "[]", "{}", '{"a":', '["x" ', '[1 "', '"', '\\"', '[1 \\"', "'",
    "{'", ",", "{,", "-", "*",
    "|", "/", "// \n", "abc101", "abc101: ", "abc101:\n", "abc101 \n0.9 ", "9", "7/10 ", "-0.1e", "<think>", "</think>",
    "trajectory ", '{"final":', '{"id":"abc101","score":0.1}', '{"id":"abc101","score":0.1},\n', '{"abc101":',
    "score: ",
    "final ", "abc101: 0.5\n", "é", "### abc101\nscore: 0.4\n",
]  # fmt: skip


PATTERNS = [
    (module, name, value)
    for module in (lenient_json, replies)
    for name, value in vars(module).items()
    if isinstance(value, re.Pattern)
]


class Work:
    """Counts what a call does: its function calls, and the characters that it hands to regular expressions."""

    def __init__(self) -> None:
        self.calls = self.characters = 0

    def patched(self, pattern: re.Pattern[str]) -> Any:
        work = self

        class Counting:
            def _count(self, method: str, text: str, *span: int) -> re.Match[str] | None:
                found: re.Match[str] | None = getattr(pattern, method)(text, *span)
                start, stop = (*span, len(text))[:2] if span else (0, len(text))
                work.characters += (
                    found.end() if found is not None and method != "fullmatch" else stop
                ) - start
                return found

            def match(self, text: str, *span: int) -> re.Match[str] | None:
                return self._count("match", text, *span)

            def fullmatch(self, text: str, *span: int) -> re.Match[str] | None:
                return self._count("fullmatch", text, *span)

            def search(self, text: str, *span: int) -> re.Match[str] | None:
                return self._count("search", text, *span)

            def sub(self, new: str, text: str) -> str:
                work.characters += len(text)
                return pattern.sub(new, text)

        return Counting()

    def of(self, text: str) -> int:
        def count(_frame: Any, event: str, _arg: Any) -> None:
            self.calls += event in ("call", "c_call")

        before = sys.getprofile()
        with pytest.MonkeyPatch.context() as patched:
            for module, name, pattern in PATTERNS:
                patched.setattr(module, name, self.patched(pattern))
            sys.setprofile(count)
            try:
                parse_scores(text, IDS)
            finally:
                sys.setprofile(before)
        return self.calls + self.characters


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(ATOMS), min_size=1, max_size=5),
    st.lists(st.sampled_from(ATOMS), max_size=5),
    st.lists(st.sampled_from(ATOMS), max_size=5),
)
@pytest.mark.slow
def test_the_work_of_parsing_is_linear_in_the_length_of_the_reply(
    unit: list[str], before: list[str], after: list[str]
) -> None:
    """A reply that is built to make a parser go back and forth takes no more work than any other of its length."""
    body = "".join(unit)

    def text(size: int) -> str:
        return "".join(before) + body * (size // len(body)) + "".join(after)

    once, twice = Work().of(text(6_000)), Work().of(text(12_000))
    assert twice <= 2.5 * once + 5_000
    assert twice <= 150 * len(text(12_000))


def repeats(parsed: Any) -> Iterator[Any]:
    """The unbounded quantifiers within a parsed pattern that may give back what they took."""
    if isinstance(parsed, tuple) and len(parsed) == 2 and str(parsed[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
        _, most, _ = parsed[1]
        if str(most) == "MAXREPEAT":
            yield parsed
    if isinstance(parsed, tuple | list) or hasattr(parsed, "data"):
        for inner in getattr(parsed, "data", parsed):
            yield from repeats(inner)


@pytest.mark.parametrize(("name", "pattern"), [(n, p) for _, n, p in PATTERNS])
def test_no_pattern_backtracks(name: str, pattern: re.Pattern[str]) -> None:
    """A match or a failure takes time linear in the text, because what a quantifier took it never gives back. The one
    exception is lazy, ends at the text's end at the latest, and is followed by nothing that can fail."""
    found = list(repeats(importlib.import_module("re._parser").parse(pattern.pattern, pattern.flags)))
    assert len(found) == (1 if name == "_THINKING" else 0), name


def test_the_check_for_backtracking_detects_a_pattern_that_backtracks() -> None:
    parser = importlib.import_module("re._parser")
    assert len(list(repeats(parser.parse(r"(?:\s*,)+?x|a++")))) == 2


@pytest.mark.parametrize(
    "atom", ["\n", " ", '{"scores": [', '"', "[{", '{"id": "abc101", "score": 0.5}', "abc101: 0.5\n"]
)
@pytest.mark.slow
def test_the_longest_reply_is_parsed(atom: str) -> None:
    """A judge in JSON mode that ends in white space for ever is common; 1,600 line breaks once took 23 s."""
    got = parse_scores('{"scores": [' + atom * (MAX_CHARACTERS // len(atom)), IDS)
    assert set(got.scores) <= {"abc101"}


@given(st.text(alphabet=st.sampled_from('{}[]":,.0123456789abcdefghjkmn \n-/%sco'), max_size=200))
def test_parsing_never_raises_and_scores_are_from_0_to_1(reply: str) -> None:
    got = parse_scores(reply, IDS)
    assert set(got.scores) <= set(IDS)
    assert all(0.0 <= s <= 1.0 for s in got.scores.values())


@pytest.mark.anyio
@pytest.mark.parametrize("part", range(8))
async def test_after_any_first_reply_every_trajectory_gets_its_own_score(part: int) -> None:
    """Each reply of the pool as the first answer to a real prompt; what it lacks is asked again of a good judge."""
    transcripts = [transcript(f"t{i}", f"quality={TRUTH[name]}") for i, name in enumerate(IDS)]
    truth = {f"t{i}": TRUTH[name] for i, name in enumerate(IDS)}
    for reply, _ in POOL[part::8]:
        asked = 0

        def answer(request: dict[str, Any], reply: str = reply) -> str:
            nonlocal asked
            asked += 1
            if asked > 1:
                return str(Scorer()(request))
            prompt = str(request["messages"][1]["content"])
            nonce = prompt.split()[2]
            for name, text in blocks(prompt, nonce):
                pool_id = next(i for i in IDS if f"quality={TRUTH[i]}" in text)
                reply = reply.replace(pool_id, name).replace(pool_id.upper(), name.upper())
            return reply

        scores, _ = await ruler(Model(answer), passes=1).judge(transcripts)
        assert scores == pytest.approx(truth), reply
