"""Judge replies, well-formed to hostile: the right scores or none. test_quoting_judges.py has the attacks."""

import itertools
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.ruler.replies import UnreadableReplyError, parse_scores

IDS = ["abc101", "def202", "ghj303", "kmn404"]
KEY = "score_pqr505"
TRUTH = dict(zip(IDS, [0.9, 0.1, 1, 0.3], strict=True))
SAID = 'did "well" {so} [far], 3 of 10,\nbetter than kmn404: 0.3'
ENTRIES = [{"id": i, "explanation": SAID, KEY: TRUTH[i]} for i in sorted(IDS, reverse=True)]
ASKED_FOR = json.dumps({"scores": ENTRIES})
LINES = "\n".join(f"{i}: {s}" for i, s in TRUTH.items())

SHAPES = [
    ASKED_FOR,
    json.dumps({"scores": ENTRIES}, indent=2),
    json.dumps({"scores": [{k: e[k] for k in reversed(e)} for e in ENTRIES]}, ensure_ascii=False),
    ASKED_FOR.replace("\\n", "\n"),
]
WRAPS = [
    "%s",
    "\n\n%s\n",
    "```json\n%s\n```",
    "```\n%s\n```",
    "Here is my verdict [as asked]:\n\n%s\n\nI hope that helps!",
    '<think>abc101 maybe 0.2? {"abc101": 0.2, "' + KEY + '": 0.2} hmm</think>\n%s',
]
READABLE = [wrap.replace("%s", shape) for shape, wrap in itertools.product(SHAPES, WRAPS)]


@pytest.mark.parametrize("reply", READABLE)
def test_a_reply_in_the_form_asked_for_is_read(reply: str) -> None:
    assert parse_scores(reply, IDS, KEY).scores == TRUTH


def replaced(**fields: object) -> str:
    """The asked-for reply with another first entry."""
    return json.dumps({"scores": [{**ENTRIES[0], **fields}, *ENTRIES[1:]]})


def first(bad: str) -> str:
    """The asked-for reply with another number in its first entry."""
    return ASKED_FOR.replace(f'"{KEY}": 0.3', f'"{KEY}": {bad}')


def without(key: str) -> str:
    return json.dumps({"scores": [{k: v for k, v in e.items() if k != key} for e in ENTRIES]})


UNREADABLE = [
    *(ASKED_FOR[:cut] for cut in range(0, len(ASKED_FOR), 7)),
    *(first(bad) for bad in ['"0.3"', '"low"', "null", "true", "0,3", "3/10", "30%", "[]", "{}", "[0.3]", "", "--1"]),
    *(replaced(id=other) for other in ["zzz999", "", 1, None, "trajectory kmn404", "kmn404 (good)", "KMN404", IDS[2]]),
    *(replaced(**{key: 1}) for key in ("rank", "score", "final_score", KEY.upper(), "explanation")),
    *(without(key) for key in ("id", "explanation", KEY)),
    first(f'0.2, "{KEY}": 0.3'),
    first('0.3, "score": 0.3'),
    ASKED_FOR.replace(KEY, "score"),
    json.dumps(ENTRIES),
    json.dumps({"scores": {str(e["id"]): e for e in ENTRIES}}),
    json.dumps({"scores": [*ENTRIES, ENTRIES[0]]}),
    json.dumps({"scores": [*ENTRIES, {"id": "zzz999", "explanation": "", KEY: 0.5}]}),
    json.dumps({"scores": ENTRIES[1:]}),
    json.dumps({"scores": ENTRIES, "average": 0.46}),
    "\n".join(json.dumps(e) for e in ENTRIES),
    str({"scores": ENTRIES}),
    ASKED_FOR[:-2] + ",]}",
    ASKED_FOR.replace("}, {", "}, // so\n{"),
    f"{ASKED_FOR}\n\n{ASKED_FOR}",
    f"{ASKED_FOR}\n\n{LINES}",
    f"On reflection abc101 is best. {ASKED_FOR}",
    f"abc101: 0.2; it says </think>\n{ASKED_FOR}",
    f"<think>It says </think> {ASKED_FOR}</think>{ASKED_FOR}",
    f"<think>{ASKED_FOR}",
    LINES,
    LINES.replace(":", f" {KEY}:"),
    "",
    " ",
    "null",
    "[]",
    "{}",
    "I can't judge this.",
    "[0.9, 0.1, 1, 0.3]",
    '{"scores": [0.9, 0.1, 1, 0.3]}',
    "[" * 5000,
    '{"a":' * 3000,
    '{"a":' * 300_000 + KEY * 4 + "}",
    "\x00\x01",
    "}" + KEY * 4 + "{",
    "9" * 5000,
]


@pytest.mark.parametrize("number", range(0, len(UNREADABLE), 20))
def test_any_other_reply_is_not_read(number: int) -> None:
    for reply in UNREADABLE[number : number + 20]:
        with pytest.raises(UnreadableReplyError):
            assert not parse_scores(reply, IDS, KEY), reply


@pytest.mark.parametrize("high", ["1.01", "-0.5", "7", "1e300", "1e999", "9" * 5000, "NaN", "Infinity"])
def test_a_score_outside_of_0_to_1_makes_every_score_of_the_reply_doubtful(high: str) -> None:
    """Nobody asked for its scale. A judge that means tenths may say 1 for the worst of a group."""
    with pytest.raises(UnreadableReplyError, match="a score that is not from 0 to 1"):
        parse_scores(first(high), IDS, KEY)


def test_explanations_are_kept() -> None:
    assert parse_scores(ASKED_FOR, IDS, KEY).explanations == dict.fromkeys(IDS, SAID)


@pytest.mark.parametrize("atom", ["\n", " ", '{"scores": [', '"', "[{", '{"id": "abc101"},', "</think>", KEY])
def test_the_longest_reply_is_parsed(atom: str) -> None:
    """A judge in JSON mode that ends in white space for ever is common; 1,600 line breaks once took 23 s."""
    for before in ("<think>", '{"scores": [', '{"scores": ["' + KEY * len(IDS)):
        with pytest.raises(UnreadableReplyError):
            parse_scores(before + atom * (1_000_000 // len(atom)) + "}", IDS, KEY)


@given(st.lists(st.sampled_from([*'{}[]":,.01 \n-/%', f'"{KEY}":', '{"scores":[{', '"id":"abc101"', '"}]}'])))
def test_parsing_gives_scores_from_0_to_1_or_its_own_error(reply: list[str]) -> None:
    with suppress(UnreadableReplyError):
        assert all(0.0 <= s <= 1.0 for s in parse_scores("".join(reply), IDS[:1], KEY).scores.values())
