"""Judge replies, well-formed to hostile: the right scores or none. test_quoting_judges.py has the attacks."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from judge.ruler import replies
from judge.ruler.replies import MAX_CHARACTERS, UnreadableReplyError, parse_scores
from tests.judge.kit import Model, ruler, transcript
from tests.kits.scoring_server import Scorer, blocks

IDS = ["abc101", "def202", "ghj303", "kmn404"]
TRUTH = dict(zip(IDS, [0.9, 0.1, 0.55, 0.3], strict=True))


def entries(show: Callable[[float], object] = float) -> list[dict[str, object]]:
    """The asked-for entries of TRUTH, each score as `show` writes it, not in the order of the ids."""
    said = 'did "well" {so} [far], 3 of 10'
    return [{"id": i, "explanation": said, "score": show(TRUTH[i])} for i in sorted(IDS, reverse=True)]


ENTRIES = entries()
ASKED_FOR = json.dumps({"scores": ENTRIES})
ONE_A_LINE = "\n".join(json.dumps(e) for e in ENTRIES)
LINES = "\n".join(f"{i}: {s}" for i, s in TRUTH.items())
HALVES = "\n".join(f"{i}: 0.5" for i in IDS)
HALVES_JSON = json.dumps({"scores": [{"id": i, "score": 0.5} for i in IDS]})

SHOWN: list[Callable[[float], object]] = [
    float, str, lambda s: f"{s * 10:g}/10", lambda s: f"{s * 5:g} / 5", lambda s: f"{s * 100:g}%",
]  # fmt: skip
SHAPES: list[Callable[[list[dict[str, object]]], str]] = [
    lambda said: json.dumps({"scores": said}),
    lambda said: json.dumps({"scores": said}, indent=2),
    lambda said: json.dumps(said),
    lambda said: json.dumps({str(e["id"]): e["score"] for e in said}),
    lambda said: json.dumps({"scores": {str(e["id"]): e["score"] for e in said}}),
    lambda said: json.dumps({str(e["id"]): {"score": e["score"], "reason": "x"} for e in said}),
    lambda said: json.dumps({"r": [{"trajectory_id": e["id"], "rating": e["score"], "rationale": "y"} for e in said]}),
    lambda said: json.dumps({"scores": [{"ID": str(e["id"]).upper(), "Score": e["score"]} for e in said]}),
    lambda said: json.dumps({"a": {"b": said}}),
]  # fmt: skip
WRAPS = [
    "%s", "```json\n%s\n```", "```\n%s\n```", "Here is {my} verdict [as asked]:\n\n%s\n\nI hope that helps!",
    '<think>abc101 maybe 0.2? {"abc101": 0.2} hmm</think>\n%s', 'I think that abc101: 0.2 might do.</think>%s',
    '{"note": "thinking about it"}\n%s',
]  # fmt: skip
WELL_FORMED = [wrap % shape(entries(show)) for show, shape, wrap in itertools.product(SHOWN, SHAPES, WRAPS)]

ROWS = [
    "{}: {}", "- {}: {}", "**{}**: {}", "{} = {}", "{} - {} - because it won", "Trajectory {}: {}", "id {} -> {}",
    "| {} | {} | fine |", "* `{}`: **{}**", "{}: score {}", "<{}>: {}", "Trajectory: {}: {}", "<trajectory {}>: {}",
    "attempt `{}`: {}", "### Trajectory {}\nIt did well in 4 moves.\n**Final score:** {}\n", "- id: {}\n  score: {}\n",
]  # fmt: skip
PROSE = [
    wrap % "\n".join(row.format(i, s) for i, s in TRUTH.items())
    for row, wrap in itertools.product(ROWS, ["%s", "My scores are:\n\n%s", "%s\n\nDone.", "```\n%s\n```"])
]
ECHOES: list[Callable[[object], str]] = [
    lambda i: f"trajectory {i}", lambda i: f"<{i}>", lambda i: f"<trajectory {i}>", lambda i: f"attempt `{i}`",
]  # fmt: skip
OTHER_FORMS = [
    ONE_A_LINE,
    f"```jsonl\n{ONE_A_LINE}\n```",
    ONE_A_LINE.replace("\n", ",\n"),
    "\n\n".join(f"About this one:\n{json.dumps(e)}" for e in ENTRIES),
    *(json.dumps({"scores": [{**e, "id": echo(e["id"])} for e in ENTRIES]}) for echo in ECHOES),
    json.dumps({f"trajectory {i}": s for i, s in TRUTH.items()}),
    json.dumps([{"id": i, "Final Score": s} for i, s in TRUTH.items()]),
    json.dumps([{"id": i, "name": "attempt 1", "score": s} for i, s in TRUTH.items()]),
    json.dumps([*ENTRIES, ENTRIES[0]]),
    f"{ASKED_FOR}\n\nabc101: 3 mistakes\ndef202: 7 mistakes",
    f"{ASKED_FOR}\n\nFinal scores:\n{LINES}",
    "\n".join(f"{n}. {i}: {s}" for n, (i, s) in enumerate(TRUTH.items(), 1)),
    json.dumps([{"id": i, "explanation": "A\nB", "score": s} for i, s in TRUTH.items()]).replace("\\n", "\n"),
]
READABLE = WELL_FORMED + PROSE + OTHER_FORMS


@pytest.mark.parametrize("number", range(0, len(READABLE), 40))
def test_a_reply_without_ambiguity_is_read_whatever_its_form(number: int) -> None:
    for reply in READABLE[number : number + 40]:
        assert parse_scores(reply, IDS).scores == pytest.approx(TRUTH), reply


def replaced(**fields: object) -> str:
    """The asked-for reply with another first entry."""
    return json.dumps({"scores": [{"id": IDS[3], "score": 0.3, **fields}, *ENTRIES[1:]]})


UNREADABLE = [
    *(ASKED_FOR[:cut] for cut in range(0, len(ASKED_FOR), 7)),
    *(ONE_A_LINE[:cut] for cut in range(0, len(ONE_A_LINE), 23)),
    *(replaced(score=bad) for bad in [None, "high", True, [], {}, "0.5.1", "NaN", "", "1e999", "7/0", "--1", [0.3]]),
    *(replaced(id=other) for other in ["zzz999", "kmn4041", "", "1", "trajectory", "xkmn404", 7, None, IDS[2]]),
    *(replaced().replace("0.3", bad) for bad in ["NaN", "Infinity", "-Infinity", "1e9999", "0.2, \"score\": 0.9"]),
    str({"scores": ENTRIES}),  # as Python writes it
    "{" + ", ".join(f"{i}: {s}" for i, s in TRUTH.items()) + "}",
    ASKED_FOR[:-2] + ",]}",
    ASKED_FOR.replace("0.3}", "3/10}"),
    replaced(draft_score=0.5),
    replaced(rank=1),
    replaced(trajectory_id=IDS[0]),
    replaced(id="better than kmn404"),
    replaced(id="kmn404 and abc101"),
    json.dumps({"scores": [*ENTRIES, {"score": 0.5}]}),
    json.dumps({"scores": [*ENTRIES, {"id": IDS[0], "score": 0.77}]}),
    json.dumps({"scores": ENTRIES, "average": 0.46}),
    json.dumps({"scores": ENTRIES[1:]}),
    json.dumps({"draft": ENTRIES, "final": json.loads(HALVES_JSON)}),
    f"{HALVES_JSON}\nOn reflection:\n{ASKED_FOR}",
    f"{ASKED_FOR}\n\nEvidence:\n{json.dumps(dict.fromkeys(IDS, 1.0))}",
    f"{ASKED_FOR}\n\nFinal scores:\n{HALVES}",
    f"{HALVES}\n\nAfter comparing them again:\n\n{LINES}",
    f"{ASKED_FOR} // [1]",
    ASKED_FOR.replace("}, {", "}, // so\n{"),
    f"{LINES}\nIn all, kmn404 solved 1 of 2.",
    LINES.replace("0.55", "0,55"),
    "".join(f"### {i}\nscore: {s}\nscore: 0.2\n" for i, s in TRUTH.items()),
    "\n".join(f"{i}: 2024-01-01 was fine" for i in IDS),
    "", " ", "null", "[]", "{}", "I can't judge this.", "0.9, 0.1, 0.55, 0.3", "[0.9, 0.1, 0.55, 0.3]",
    '{"scores": [0.9, 0.1, 0.55, 0.3]}', "[" * 5000, "{" * 5000, '{"a":' * 3000, "]}" * 100, "\x00\x01", "```json",
    '"abc101"', "abc101", "abc101:", "abc101: good", '{"scores": "abc101"}', '{"id": "abc101"}', '{"score": 1}',
    "all: 1.0", "\ufffd" * 50, "9" * 5000, "-" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("number", range(0, len(UNREADABLE), 40))
def test_a_reply_that_leaves_a_doubt_is_not_read(number: int) -> None:
    for reply in UNREADABLE[number : number + 40]:
        with pytest.raises(UnreadableReplyError):
            assert not parse_scores(reply, IDS), reply


@pytest.mark.parametrize("high", ["1.01", "-0.5", "7", '"85"', '"12/10"', "1e300"])
def test_a_score_outside_of_0_to_1_makes_every_score_of_the_reply_doubtful(high: str) -> None:
    """Nobody asked for its scale. A judge that means tenths may say 1 for the worst of a group."""
    with pytest.raises(UnreadableReplyError, match="which is not from 0 to 1") as error:
        parse_scores(f'{{"abc101": {high}, "def202": 0.5, "ghj303": 1, "kmn404": 0}}', IDS)
    assert error.value.kind == "out_of_range"


def test_a_score_line_that_a_trajectory_holds_may_be_a_quotation() -> None:
    reply = "### abc101\nIt ends with\n**Score: 1.0**\nwhich is bold."
    assert parse_scores(reply, IDS[:1]).scores == {"abc101": 1.0}
    with pytest.raises(UnreadableReplyError, match="may be a quotation"):
        parse_scores(reply, IDS[:1], "I won.\nSCORE:  1.0\n")


def test_explanations_are_kept() -> None:
    for reply in ('{"scores": [{"id": "abc101", "explanation": "won", "score": 1}]}', "abc101: 1 - won"):
        assert parse_scores(reply, ["abc101"]).explanations == {"abc101": "won"}


ATOMS = [
    "\n", " ", "\t\r", "[", "{", "]", "}", "[]", "{}", '{"a":', '["x" ', '[1 "', '"', '\\"', '[1 \\"', "'",
    "{'", ",", "{,", "-", "*", "|", "/", "abc101", "abc101: ", "abc101:\n", "abc101 \n0.9 ", "9", "7/10 ", "-0.1e",
    "<think>", "</think>", "trajectory ", '{"id":"abc101","score":0.1}', '{"id":"abc101","score":0.1},\n', '{"abc101":',
    "score: ", "final ", "abc101: 0.5\n", "é", "### abc101\nscore: 0.4\n",
]  # fmt: skip
PATTERNS = [(replies, name, value) for name, value in vars(replies).items() if isinstance(value, re.Pattern)]


class Counting:
    """A pattern that counts the characters that it reads."""

    characters = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            match = getattr(self._pattern, method)(*args)
            text, *start = args[1:] if method == "sub" else args
            stop = match.end() if isinstance(match, re.Match) and method != "fullmatch" else len(text)
            Counting.characters += stop - (start[0] if start else 0)
            return match

        return call


def characters_read(text: str) -> int:
    Counting.characters = 0
    with pytest.MonkeyPatch.context() as patched:
        for module, name, pattern in PATTERNS:
            patched.setattr(module, name, Counting(pattern))
        with suppress(UnreadableReplyError):
            parse_scores(text, IDS, text)
    return Counting.characters


@settings(max_examples=60, deadline=None)
@given(*(st.lists(st.sampled_from(ATOMS), min_size=least, max_size=5) for least in (1, 0, 0)))
@pytest.mark.slow
def test_the_work_of_parsing_is_linear_in_the_length_of_the_reply(
    unit: list[str], before: list[str], after: list[str]
) -> None:
    """A reply that is built to make a parser go back and forth takes no more work than any other of its length."""
    body = "".join(unit)

    def text(size: int) -> str:
        return "".join(before) + body * (size // len(body)) + "".join(after)

    once, twice = characters_read(text(6_000)), characters_read(text(12_000))
    assert twice <= 2.5 * once + 5_000
    assert twice <= 50 * len(text(12_000))


def repeats(parsed: Any) -> Iterator[Any]:
    """The unbounded quantifiers within a parsed pattern that may give back what they took."""
    backtracks = isinstance(parsed, tuple) and str(parsed[0]) in ("MAX_REPEAT", "MIN_REPEAT")
    if backtracks and str(parsed[1][1]) == "MAXREPEAT":
        yield parsed
    if isinstance(parsed, tuple | list) or hasattr(parsed, "data"):
        for inner in getattr(parsed, "data", parsed):
            yield from repeats(inner)


@pytest.mark.parametrize(("name", "pattern"), [(n, p) for _, n, p in PATTERNS])
def test_no_pattern_backtracks(name: str, pattern: re.Pattern[str]) -> None:
    """A match or a failure takes time linear in the text, because what a quantifier took it never gives back. The one
    exception is lazy, ends at the text's end at the latest, and is followed by nothing that can fail."""
    parser = importlib.import_module("re._parser")
    assert len(list(repeats(parser.parse(pattern.pattern, pattern.flags)))) == (name == "_THINKING"), name
    assert len(list(repeats(parser.parse(r"(?:\s*,)+?x|a++")))) == 2  # the check sees a pattern that does


@pytest.mark.parametrize(
    "atom", ["\n", " ", '{"scores": [', '"', "[{", '{"id": "abc101", "score": 0.5}', "abc101: 0.5\n"]
)
@pytest.mark.slow
def test_the_longest_reply_is_parsed(atom: str) -> None:
    """A judge in JSON mode that ends in white space for ever is common; 1,600 line breaks once took 23 s."""
    with pytest.raises(UnreadableReplyError):
        parse_scores('{"scores": [' + atom * (MAX_CHARACTERS // len(atom)), IDS)


@given(st.text(alphabet=st.sampled_from('{}[]":,.0123456789abcdefghjkmn \n-/%sco'), max_size=200))
def test_parsing_gives_scores_from_0_to_1_or_its_own_error(reply: str) -> None:
    with suppress(UnreadableReplyError):
        assert all(0.0 <= s <= 1.0 for s in parse_scores(reply, IDS[:1]).scores.values())


@pytest.mark.anyio
async def test_after_any_first_reply_every_trajectory_gets_its_own_score() -> None:
    """Replies as the first answer to a real prompt; what cannot be read is asked for again from a good judge."""
    transcripts = [transcript(f"t{i}", f"quality={TRUTH[name]}") for i, name in enumerate(IDS)]
    for reply in (READABLE + UNREADABLE)[::5]:
        asked = 0

        def answer(request: dict[str, Any], reply: str = reply) -> str:
            nonlocal asked
            asked += 1
            if asked > 1:
                return str(Scorer()(request))
            prompt = str(request["messages"][1]["content"])
            for name, text in blocks(prompt, prompt.split()[2]):
                pool_id = next(i for i in IDS if f"quality={TRUTH[i]}" in text)
                reply = reply.replace(pool_id, name).replace(pool_id.upper(), name.upper())
            return reply

        scores, _ = await ruler(Model(answer), passes=1).judge(transcripts)
        assert scores == pytest.approx({f"t{i}": TRUTH[name] for i, name in enumerate(IDS)}), reply
