"""The support example: the desk's rules, its tokenizer, and the stand-in for its judge model."""

from __future__ import annotations

import random

import pytest

from examples.support.desk import ACTIONS, MOODS, VOUCHER, keeps_all_rules, kept_rules, reply_to, score, ticket
from examples.support.make_model import taught, words
from trainer import tiny

ASKED = ticket("test")


def test_each_rule_is_broken_alone() -> None:
    others = {"action": next(a for a in ACTIONS.values() if a != ACTIONS[ASKED.problem])}
    others["opening"] = next(o for o in MOODS.values() if o != MOODS[ASKED.mood])
    replies = {
        "": reply_to(ASKED),
        "action": reply_to(ASKED, action=others["action"]),
        "opening": reply_to(ASKED, opening=others["opening"]),
        "order": reply_to(ASKED, order=99),
        "no_voucher": reply_to(ASKED, voucher=True),
    }
    for broken, reply in replies.items():
        assert {rule for rule, kept in kept_rules(ASKED.text, reply).items() if not kept} == ({broken} - {""})
        assert keeps_all_rules(ASKED.text, reply) == (broken == "")
        assert score(f"[user] {ASKED.text}", f"[assistant] {reply}\n") == {"": 1.0, "action": 0.6}.get(broken, 0.8)


def test_a_reply_with_every_action_keeps_the_rule_of_none() -> None:
    assert not kept_rules(ASKED.text, " ".join(ACTIONS.values()))["action"]


def test_a_text_without_a_ticket_is_no_task_of_the_desk() -> None:
    with pytest.raises(ValueError, match="no ticket"):
        score("[user] What is 2 + 2?", "[assistant] 4")


def test_the_teacher_breaks_rules_and_the_tokenizer_knows_its_words() -> None:
    tokenizer = tiny.make_tokenizer(words())
    draw = random.Random(0)
    chats = [taught(ticket(str(n)), draw) for n in range(300)]
    kept = [keeps_all_rules(ticket(str(n)).text, chat[-1]["content"]) for n, chat in enumerate(chats)]
    assert 0.1 < sum(kept) / len(kept) < 0.4
    for chat in chats[:20]:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        assert len(tokenizer(text).input_ids) < 30
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert any(VOUCHER in chat[-1]["content"] for chat in chats)
