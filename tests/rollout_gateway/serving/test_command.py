"""`journeywork policy` against a gateway."""

import pytest
from msgspec import structs

from pipeline.events import PolicyPromoted
from pipeline.log.broker import Broker
from rollout_gateway.serving.command import main
from tests.conftest import free_port
from tests.kits.waiting import until_true
from tests.rollout_gateway.conftest import StartGateway, publish_adapter
from tests.rollout_gateway.kit import ASK, key_config, serves


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOURNEYWORK_URL", "JOURNEYWORK_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.inference
async def test_decisions_are_taken_and_shown_with_their_reasons_and_hold_at_every_gateway(
    start_gateway: StartGateway, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = start_gateway()

    def policy(*arguments: str) -> str:
        main([*arguments, "--url", gateway.url])
        return capsys.readouterr().out

    for step in (1, 2):
        await publish_adapter(broker, step)
        await serves(gateway, f"tictactoe@{step}")
    assert policy("list").splitlines() == [
        "tictactoe: tictactoe@2",
        "  why: it follows the newest version that enough servers hold; there was no decision",
        "  newest tictactoe@2, loaded tictactoe@1, tictactoe@2",
    ]
    promoted = policy("promote", "tictactoe@1", "--reason", "better on held-out tasks", "--by", "me")
    assert promoted.startswith("tictactoe: tictactoe@1\n  why: promoted by me at 2")
    assert " UTC: better on held-out tasks\n" in promoted
    taken_back = policy("rollback", "tictactoe")
    assert taken_back.startswith("tictactoe: tictactoe@2\n  why: the decision after it was taken back at")
    split = policy("split", "tictactoe@2", "tictactoe@1", "--percent", "20")
    assert split.startswith("tictactoe: 20 % tictactoe@2, 80 % tictactoe@1\n  why: split at")
    policy("promote", "tictactoe@2")
    assert policy("rollback", "tictactoe").startswith("tictactoe: 20 % tictactoe@2, 80 % tictactoe@1\n")
    policy("promote", "tictactoe@1")
    other = start_gateway(folder="other")
    for each in (other, gateway):
        await serves(each, "tictactoe@1")
    assert gateway.client().chat.completions.create(**ASK).model == "tictactoe@1"
    followed = policy("follow", "tictactoe", "--reason", "enough")
    assert followed.startswith("tictactoe: tictactoe@2\n  why: follows the newest at")
    await serves(other, "tictactoe@2")
    policy("promote", "tictactoe@0")
    await publish_adapter(broker, 3)
    await until_true(lambda: "loaded tictactoe@1, tictactoe@2, tictactoe@3" in policy("list"))
    for each in (other, gateway):  # a decision holds against a version that comes after it
        await serves(each, "tictactoe@0")
    assert policy("follow", "tictactoe", "--reason", "enough").startswith("tictactoe: tictactoe@3\n")
    followed = policy("list")
    await serves(other, "tictactoe@3")
    events = [r.event for r in await broker.read(PolicyPromoted)]
    actions = "promote rollback split promote rollback promote follow promote follow"
    assert " ".join(e.action for e in events) == actions
    assert events[0].reason == "better on held-out tasks"
    assert policy("list") == followed
    # A decision of a log from before 0.2, whose word is not sent any more.
    await broker.publish(structs.replace(events[0], action="pin", request="old", reason="better"))
    await until_true(lambda: "pinned by me" in policy("list"))
    assert policy("list").startswith("tictactoe: tictactoe@1\n")


def test_what_cannot_be_done_is_told(
    start_front: StartGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = start_front(keys=(key_config("op", role="operator"), key_config("agent")))

    def fails(*arguments: str, code: int = 1) -> str:
        with pytest.raises(SystemExit, match=str(code)):
            main([*arguments, "--url", gateway.url])
        return capsys.readouterr().err

    assert "Give an operator's key with --key or JOURNEYWORK_API_KEY" in fails("list")
    told = fails("promote", "chess@0", "--key", "agent")
    assert told.startswith("waiting until inference servers hold chess@0\n")
    assert "operator" in told
    monkeypatch.setenv("JOURNEYWORK_API_KEY", "op")
    assert "unknown" in fails("promote", "nope@1").lower() or "nope" in fails("promote", "nope@1")
    assert "<model>@<step>" in fails("promote", "chess", code=2)
    with pytest.raises(SystemExit, match="2"):
        main(["list", "--url", "chess"])
    with pytest.raises(SystemExit, match="1"):
        main(["list", "--url", f"http://127.0.0.1:{free_port()}"])
    assert "is `journeywork up` running?" in capsys.readouterr().err
    monkeypatch.setenv("JOURNEYWORK_URL", gateway.url)
    main(["list"])
    assert "chess: chess@0" in capsys.readouterr().out
