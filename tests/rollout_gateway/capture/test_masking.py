"""What a mask matches is recorded nowhere, and the agent gets it."""

import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import events
from pipeline.config import MaskConfig
from pipeline.events import Event, ExchangeRecorded, PolicyEvaluated, SignalGiven, TrajectoryCompleted, TrajectoryOpened
from pipeline.events.evaluation import TaskResult
from pipeline.log.broker import Broker
from pipeline.security import users
from rollout_gateway.capture import masking
from rollout_gateway.capture.masking import Masks
from rollout_gateway.http.errors import ApiError
from tests.conftest import NatsServer
from tests.kits.events import completed, opened
from tests.kits.events import exchange as recorded
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway
from tests.rollout_gateway.kit import exchanges


def documented_pattern() -> str:
    """The pattern for mail addresses that docs/store.md gives."""
    page = Path(__file__).parents[3] / "docs" / "store.md"
    return str(
        tomllib.loads(page.read_text("utf-8").split("```toml\n")[1].split("```")[0])["gateway"]["masks"][0]["pattern"]
    )


MAIL = MaskConfig(name="mail", pattern=documented_pattern())
CARD = MaskConfig(name="card", pattern="4[0-9]{15}")
SECRET = "jane.doe@example.com"
ESCAPED = "jane.doe\\u0040example.com"
E = TypeVar("E", bound=Event)
pytestmark = pytest.mark.inference


def play(gateway: GatewayProcess, name: str, text: str, *, stream: bool = False) -> str:
    """Play a run of two calls whose texts hold `text`. Returns what the agent got."""
    run = gateway.open(id=name, task=f"write to {text}", metadata={"who": {text: [text]}})
    said = ""
    with gateway.agent(run, default_headers={"x-journeywork-role": text}) as agent:
        for turn in range(2):
            ask: Any = [{"role": "user", "content": f"a{turn + 1}=x {text}"}]
            if stream:
                chunks = agent.chat.completions.create(model="tictactoe", messages=ask, max_tokens=4, stream=True)
                said += "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            else:
                reply = agent.chat.completions.create(model="tictactoe", messages=ask, max_tokens=4)
                said += reply.choices[0].message.content or ""
    about = f"{gateway.url}/v1/trajectories/{name}/feedback"
    for _ in range(2):  # the repetition is the same signal
        given = {"text": f"ask {text}", "key": "one", "name": text, "source": text}
        assert httpx.post(about, json=given).status_code == 201
        assert (
            gateway.complete(name, rewards={text: 1.0}, metrics={text: 2.0}, metadata={"to": text}).status_code == 200
        )
        assert gateway.open(id=f"{name}-again", metadata={"to": text})
    return said


MASKED = ("masked-False", "masked-True")


async def test_a_masked_text_is_in_no_file_and_its_call_has_no_tokens(
    start_gateway: StartGateway, nats_server: NatsServer, broker: Broker
) -> None:
    gateway = await anyio.to_thread.run_sync(lambda: start_gateway(masks=(MAIL,)))
    for stream in (False, True):
        masked_run, plain_run = f"masked-{stream}", f"plain-{stream}"
        await anyio.to_thread.run_sync(partial(play, gateway, masked_run, SECRET, stream=stream))
        await anyio.to_thread.run_sync(partial(play, gateway, plain_run, "nobody", stream=stream))
        for event in await exchanges(broker, masked_run):
            (message,) = msgspec.json.decode(event.request)["messages"]
            assert message["content"].endswith("x [mail]")
            assert (event.prompt_ids, event.sampled_ids, event.logprobs) == (b"", b"", b"")
            assert b"token_ids" not in bytes(event.response)
        assert all(event.prompt_ids and event.sampled_ids for event in await exchanges(broker, plain_run))
    for kind, text in ((TrajectoryOpened, "task"), (SignalGiven, "text")):
        texts = [getattr(r.event, text) for r in await broker.read(kind) if r.event.trajectory in MASKED]
        assert texts == [{"task": "write to [mail]", "text": "ask [mail]"}[text]] * 2
    for kind, more in ((TrajectoryOpened, {}), (TrajectoryCompleted, {"to": "[mail]"})):
        events = [r.event for r in await broker.read(kind) if r.event.trajectory in MASKED]
        recorded = [msgspec.json.decode(event.metadata) for event in events]
        assert recorded == [{"who": {"[mail]": ["[mail]"]}, **more}] * 2
    found = [file for file in nats_server.folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert not found


async def masked(event: E, *masks: MaskConfig) -> E:
    return await Masks(masks or [MAIL, CARD]).apply(event)


def exchange(request: Any, response: Any) -> ExchangeRecorded:
    bodies = {"request": msgspec.json.encode(request), "response": msgspec.json.encode(response)}
    return recorded("t", project=PROJECT, request_hash="h", **bodies)


async def test_an_answer_that_is_split_into_tokens_is_masked_whole() -> None:
    tokens = {"content": [{"token": "jane.doe"}, {"token": "@example.com"}]}
    message = {"content": f"It is {SECRET}.", "tool_calls": [{"function": {"arguments": f'{{"to":"{SECRET}"}}'}}]}
    event = exchange({"n": 1}, {"choices": [{"message": message, "logprobs": tokens, "token_ids": [7]}]})
    event = await masked(event, MAIL)
    assert b"jane" not in bytes(event.response)
    assert (event.sampled_ids, event.request_hash) == (b"", "")
    assert bytes(event.request) == b'{"n":1}'


@pytest.mark.parametrize(
    "address",
    ["Jane.Doe@EXAMPLE.COM", "a@mail.example.co.uk", "jörg@münchen.example", "x+y_z%1@a-b.example", "<a@b.example>"],
)
async def test_the_documented_pattern_leaves_nothing_of_an_address(address: str) -> None:
    event = await masked(exchange({"a": f"to {address}, please"}, {}))
    assert bytes(event.request) in (b'{"a":"to [mail], please"}', b'{"a":"to <[mail]>, please"}')


def nested(depth: int, text: str) -> bytes:
    return b'{"a":' + b"[" * depth + msgspec.json.encode(text) + b"]" * depth + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"user": 1e999, "a": "%s"}' % SECRET.encode(),
        b'{"n": ' + b"1" * 5000 + b', "a": "%s"}' % SECRET.encode(),
        b'{"choices": [{"message": {"content": "%s' % SECRET.encode(),
        nested(600, SECRET),
        nested(100_000, SECRET),
        msgspec.json.encode({"arguments": f'{{"to": "{ESCAPED}"}}'}),
        msgspec.json.encode({"arguments": f'{{"to": "{ESCAPED}'}),  # broken off
        b'{"a": "jane.doe\\u0040example.com"}',
    ],
)
@pytest.mark.parametrize("field", ["request", "response"])
async def test_what_can_not_be_searched_is_not_recorded(raw: bytes, field: str) -> None:
    event = await masked(msgspec.structs.replace(exchange({}, {}), **{field: raw}))
    assert b"jane" not in bytes(event.request) + bytes(event.response)
    assert (event.prompt_ids, event.sampled_ids, event.logprobs, event.request_hash) == (b"", b"", b"", "")


@pytest.mark.parametrize("first", [f'"{SECRET}"', f'["{ESCAPED}"]', f'{{"to": "{SECRET}"}}', "4111111111111111"])
async def test_the_first_value_of_a_key_that_is_there_twice_is_not_recorded(first: str) -> None:
    raw = b'{"a": %b, "b": 1, "a": "x"}' % first.encode()
    before = msgspec.structs.replace(exchange({}, {}), request=raw)
    event = await masked(before)
    assert bytes(event.request) == b'{"a":"x","b":1}'
    assert event.sampled_ids == before.sampled_ids  # the server read the last value, too


async def test_numbers_of_requests_and_names_are_masked() -> None:
    event = await masked(exchange({"card": 4111111111111111, "n": 2}, {}))
    assert msgspec.json.decode(event.request) == {"card": "[card]", "n": 2}
    assert not event.prompt_ids
    event = await masked(msgspec.structs.replace(exchange({}, {}), role=SECRET))
    assert (event.role, event.prompt_ids) == ("[mail]", b"")
    ended = await masked(completed(rewards={SECRET: 1.0, "a": 2.0}, metrics={SECRET: 3.0}))
    assert (ended.rewards, ended.metrics) == ({"[mail]": 1.0, "a": 2.0}, {"[mail]": 3.0})
    signal = SignalGiven(project="p", signal="s", trajectory="t", model="m", group="g", name=SECRET, source=SECRET)
    given = await masked(signal)
    assert (given.name, given.source) == ("[mail]", "[mail]")
    task = TaskResult(task=SECRET, metrics={SECRET: 1.0}, trajectories=("t",))
    evaluated = await masked(
        PolicyEvaluated(project="p", evaluation="e", entrant="m@1", model="m", tasks=(task,), scenarios=SECRET)
    )
    assert evaluated.tasks == (TaskResult(task="[mail]", metrics={"[mail]": 1.0}, trajectories=("t",)),)
    assert evaluated.scenarios == "[mail]"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": [1, 2, 3]}, "tokens_not_masked"),
        ({"prompt": [[1, 2], [3]]}, "tokens_not_masked"),
        ({"user": SECRET}, "person_masked"),
        ({"safety_identifier": SECRET}, "person_masked"),
        ({"metadata": {"user_id": 4111111111111111}}, "person_masked"),
        ({"metadata": {"subject": f"id {SECRET}"}}, "person_masked"),
    ],
)
async def test_a_call_that_could_not_be_recorded_is_refused(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(ApiError) as refused:
        await Masks([MAIL, CARD]).check_call(msgspec.json.encode(fields))
    assert (refused.value.status, refused.value.code) == (400, code)
    await Masks().check_call(msgspec.json.encode(fields))


async def test_people_are_named_by_pseudonyms() -> None:
    """An erasure finds them by their names, and a mask keeps names that it matches from the record."""
    await Masks([MAIL]).check_call(b'{"user": "user-17", "metadata": {"subject": "user-17"}, "prompt": ["a", "b"]}')
    with pytest.raises(ApiError, match=r"`metadata.subject` .* Name the person by a pseudonym"):
        await masked(opened("t", metadata=msgspec.json.encode({"subject": SECRET})))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", ["(a+)+$", r"CORP\\\w+"])
async def test_no_pattern_and_no_escapes_take_more_than_linear_time(pattern: str) -> None:
    slow = MaskConfig(name="x", pattern=pattern)
    for said in (
        "a" * 200_000 + "!",
        "\\" * 500_000 + "!",
        "\\u005c" + "u005c" * 100_000,
        r"\ud800" * 100_000,
        r"\n.\q" * 100_000,
    ):
        assert (await masked(exchange({"k": said}, {}), slow)).prompt_ids


async def test_the_event_loop_goes_on_while_a_large_body_is_masked() -> None:
    event = exchange({"messages": ["x" * 8] * 60_000}, {})
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.sleep(0)

    async with anyio.create_task_group() as tg:
        tg.start_soon(turn)
        await masked(event)
        tg.cancel_scope.cancel()
    assert turns > 10


def test_every_text_of_an_event_that_the_gateway_publishes_is_masked_or_an_identifier() -> None:
    """A field of a new event that can hold a person's words belongs to `masking._TEXT_FIELDS` or `_JSON_FIELDS`."""
    tokens = {"prompt_ids", "sampled_ids", "logprobs", "forced", "top_ids", "top_logprobs"}
    of_runs = {"project", "trajectory", "group", "owner", "pinned", "asked", "signal", "copied_from", "request"}
    of_policies = {"model", "policy_version", "version", "other", "outside", "teacher", "evaluation", "entrant"}
    of_calls = {"by", "finish_reason", "endpoint", "request_hash", "replica", "failed_providers"}
    identifiers = of_runs | of_policies | of_calls
    of_operators = {"reason", "evidence", "prompt", "replaces"}  # of a promotion
    (gateway,) = [user for user in users.USERS if user.name == "gateway"]
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
    published = [
        k for k in kinds if any(f"{k.__struct_config__.tag}.".startswith(p.rstrip(">")) for p in gateway.publishes)
    ]
    assert ExchangeRecorded in published
    texts = {
        field.name
        for kind in published
        for field in msgspec.structs.fields(kind)
        if "str" in str(field.type) or "bytes" in str(field.type)
    }
    unknown = texts - {*masking._TEXT_FIELDS, *masking._JSON_FIELDS} - tokens - identifiers - of_operators
    assert not unknown, "add these to masking._RUN_FIELDS or _JSON_FIELDS, or to `identifiers` here"


# -- a text, and the JSON in it --------------------------------------------------------------------------------------

GREEDY = MaskConfig(name="mail", pattern=r"\S+@\S+")
PASSWORD = MaskConfig(name="password", pattern='"password": *"[^"]*"')
STRICT = MaskConfig(name="password", pattern='"password": "[a-z0-9@. ]*"')
NUMBER = MaskConfig(name="number", pattern=r"\b[0-9]{3}-[0-9]{4}\b")
PIN = MaskConfig(name="pin", pattern=r"\b[0-9]{4}\b")
TWICE = [json.dumps({"in": f'{{"to": "{said}"}}'}) for said in (SECRET, ESCAPED)]
UMLAUT = json.dumps({"to": "j\u00fcrgen.m\u00fcller@example.com", "at": "C:\\new"})


@pytest.mark.parametrize(
    ("masks", "said", "recorded"),
    [
        # JSON in a text stays JSON, where its values alone match.
        (
            [MAIL],
            f'{{"to":"{ESCAPED}","text":"a \\"b\\"\\nc","n":1.0}}',
            '{"to":"[mail]","text":"a \\"b\\"\\nc","n":1.0}',
        ),
        ([MAIL], f'{{"text":"\\"{SECRET}\\""}}', '{"text":"\\"[mail]\\""}'),
        ([GREEDY], f'[{{"to":"{SECRET}","n":1}}]', '[{"to":"[mail]","n":1}]'),
        ([CARD], '{"card":4111111111111111}', '{"card":"[card]"}'),
        ([CARD], '{ "n": 1.0 }', '{ "n": 1.0 }'),
        ([CARD], "{x} 4111111111111111", "{x} [card]"),
        # What matches across values is masked in the text, which no other mask keeps.
        ([PASSWORD], '{"password": "hunter2", "n": 1}', {"_raw": '{[password], "n": 1}'}),
        ([STRICT, MAIL], f'{{"n": 1, "password": "hunter2 {SECRET}"}}', {"_raw": '{"n": 1, [password]}'}),
        # Escapes of JSON are decoded once, also in a text that is no JSON.
        ([NUMBER], "it is:\\n123-4567", "it is:\n[number]"),
        ([NUMBER], "it is:\\t123-4567", "it is:\t[number]"),
        ([MAIL], f"Result: {UMLAUT}", 'Result: {"to": "[mail]", "at": "C:\\new"}'),
        ([MAIL], UMLAUT[:-1], '{"to": "[mail]", "at": "C:\\new"'),
        ([MAIL], TWICE[0], TWICE[0].replace(SECRET, "[mail]")),
        ([MAIL], TWICE[1], TWICE[1]),  # docs/store.md says so
        # Masks are applied in their order, and none brings back what another one removed.
        ([PIN, MAIL], f"1234\\u0041 {ESCAPED}", "[pin]A [mail]"),
        ([MaskConfig(name="a", pattern="sk-[a-z]+"), MaskConfig(name="b", pattern=r"\[a\]")], "sk-abc", "[b]"),
        *(
            ([MaskConfig(name=name, pattern=MAIL.pattern)], f"my {SECRET}", f"my [{name}]")
            for name in (r"\0", r"a\9", "a\\", 'a"b')
        ),
    ],
)
async def test_what_is_recorded_of_a_text(masks: list[MaskConfig], said: str, recorded: Any) -> None:
    before = exchange({"k": said}, {})
    event = await masked(before, *masks)
    found = msgspec.json.decode(event.request)["k"]
    assert (found if isinstance(recorded, str) else msgspec.json.decode(found)) == recorded
    assert (event.prompt_ids != b"") is (found == said)
    assert found != said or event is before  # byte for byte


@given(st.text(alphabet='\\"\n\t/nu0d8é\U0001f600 {}[],:', max_size=12), st.sampled_from(["request", "response"]))
async def test_a_secret_of_any_characters_is_in_no_text_however_json_writes_it(middle: str, field: str) -> None:
    """As it is, as a key, in the arguments of a tool call, and in JSON that is broken off."""
    mask = MaskConfig(name="x", pattern="KEY-(?s:.)*?-END")
    secret = f"KEY-{middle}-END"
    said = [json.dumps({"user": secret, "n": 1}, ensure_ascii=plain) for plain in (True, False)]
    texts = {"text": secret, secret: 1, "arguments": said, "broken": [text[:-1] for text in said]}
    event = await masked(msgspec.structs.replace(exchange({}, {}), **{field: msgspec.json.encode(texts)}), mask)
    recorded = msgspec.json.decode(getattr(event, field))
    assert (recorded["text"], recorded["[x]"], event.prompt_ids) == ("[x]", 1, b"")
    assert [json.loads(text) for text in recorded["arguments"]] == [{"user": "[x]", "n": 1}] * 2
    assert all("[x]" in text and "KEY" not in text and "END" not in text for text in recorded["broken"])


async def test_large_json_in_a_text_is_masked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_LARGE_JSON", 50)
    for said in (f'["{SECRET}","{"x" * 50}"]', f'["\\u0022{ESCAPED}","{"x" * 50}"]'):
        recorded = msgspec.json.decode((await masked(exchange({"k": said}, {}), GREEDY)).request)["k"]
        assert (SECRET in recorded, list(msgspec.json.decode(recorded))) == (False, ["_raw"])
