"""Which policy versions exist, and what becomes of a name that only looks like one."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.config import NatsConfig, SigningConfig
from pipeline.events import PolicyPromoted, PolicyRetired, TrajectoryOpened
from pipeline.log.broker import Broker, LogEntry
from pipeline.log.messages import Place
from pipeline.security import nkey
from pipeline.security.signing import Trust
from rollout_gateway.http.errors import ApiError
from rollout_gateway.sampler.controller import ServerController
from rollout_gateway.serving.policies import Policies
from tests.kits.events import checkpoint
from tests.rollout_gateway.conftest import PROJECT, StartGateway, publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.gateway_parts import parts

NO_VERSIONS = [f"tictactoe@{step}" for step in ("9", "00", "٠", "²", "01", "9" * 5000, "", "-1")]


async def test_a_step_that_is_no_canonical_number_is_an_unknown_version(
    start_gateway_alone: StartGateway, fake_vllm: FakeVllm
) -> None:
    gateway = start_gateway_alone(urls=(fake_vllm.url,), **{"replicas.wait_s": 10.0})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:

        async def post(path: str, **body: Any) -> tuple[int, str, str]:
            reply = await client.post(path, json=body)
            error = reply.json()["error"]
            return reply.status_code, error["code"], error["param"]

        for name in NO_VERSIONS:
            chat = await post("/v1/chat/completions", model=name, messages=[])
            assert chat == (404, "model_not_found", "model")
            pin = await post("/v1/trajectories", model="tictactoe", pinned=name)
            assert pin == (404, "model_not_found", "pinned")
            decided = await post("/v1/policies/tictactoe/promote", version=name)
            assert decided == (404, "model_not_found", "version")
            split = await post("/v1/policies/tictactoe/split", version="tictactoe@0", other=name)
            assert split == (404, "model_not_found", "other")
        for action, body, field in (
            ("promote", {}, "version"),
            ("promote", {"version": ""}, "version"),
            ("split", {}, "version"),
            ("split", {"version": "tictactoe@0"}, "other"),
            ("follow", {"by": "x" * 201}, "by"),
            ("rollback", {"reason": "x" * 5000}, "reason"),
        ):
            assert await post(f"/v1/policies/tictactoe/{action}", **body) == (400, "invalid_body", field)
        forged = await post("/v1/policies/tictactoe/follow", request="a\nNats-Rollup: all")
        assert forged[:2] == (400, "invalid_name")
        reply = await client.post(
            "/v1/chat/completions", json={"model": "tictactoe", "messages": [{"role": "user", "content": "hi"}]}
        )
        assert reply.status_code == 200, reply.text


async def test_a_base_version_loaded_as_an_adapter_is_unloaded(nats_config: NatsConfig, tmp_path: Path) -> None:
    server = FakeVllm()
    server.loaded["tictactoe@0"] = "/elsewhere"
    async with parts(nats_config, tmp_path, [server]):
        assert not server.loaded


async def test_an_unexpected_error_while_one_version_loads_refuses_that_version(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = ServerController._verify

    async def broken(self: ServerController, checkpoint: Any, *rest: Any) -> None:
        if checkpoint.event.step == 1:
            raise KeyError("unforeseen")
        await verify(self, checkpoint, *rest)

    monkeypatch.setattr(ServerController, "_verify", broken)
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server]) as gateway:
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: "tictactoe@1" in gateway.policies.refused)
        assert "KeyError" in gateway.policies.refused["tictactoe@1"]
        await publish_adapter(gateway.broker, 2)
        await gateway.until(lambda: gateway.router.current("tictactoe") == "tictactoe@2")
        assert set(server.loaded) == {"tictactoe@2"}


async def test_a_retired_version_is_told_with_what_can_be_named_and_how_it_is_served_again(
    broker: Broker, start_gateway_alone: StartGateway, fake_vllm: FakeVllm
) -> None:
    for step in (1, 2):
        await publish_adapter(broker, step)
    await broker.publish(PolicyRetired(project=PROJECT, model="tictactoe", version="tictactoe@1"))
    gateway = start_gateway_alone(urls=(fake_vllm.url,))
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        for path, body, field in (
            ("policies/tictactoe/promote", {"version": "tictactoe@1"}, "version"),
            ("policies/tictactoe/split", {"version": "tictactoe@2", "other": "tictactoe@1"}, "other"),
            ("trajectories", {"model": "tictactoe", "pinned": "tictactoe@1"}, "pinned"),
        ):
            reply = await client.post(f"/v1/{path}", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", field)
            assert "no longer kept (`retention.adapters`)" in error["message"]
            assert "that is: tictactoe@0, tictactoe@2. " in error["message"]
            assert "train --adopt" in error["message"]
        listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert "tictactoe@1" not in listed
        assert (await client.get("/v1/models/tictactoe@1")).json()["id"] == "tictactoe@1"  # its calls continue


async def test_a_branch_is_served_beside_main_under_a_name_of_its_own(nats_config: NatsConfig, tmp_path: Path) -> None:
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server]) as gateway:
        main, branch = gateway.policies.models["tictactoe"], "tictactoe+stricter"
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: gateway.router.current("tictactoe") == "tictactoe@1")
        for step in (1, 2):
            await publish_adapter(gateway.broker, step, seed=10 + step, branch="stricter")
        await gateway.until(lambda: gateway.policies.knows(f"{branch}@2"))

        assert set(server.loaded) == {"tictactoe@1"}  # nobody has asked for the branch
        assert gateway.policies.names(branch) == [branch, f"{branch}@1", f"{branch}@2"]
        for name, version in ((branch, f"{branch}@2"), (f"{branch}@1", f"{branch}@1")):
            opened = TrajectoryOpened(project=PROJECT, trajectory=version, model=branch, group=version, split="val")
            await gateway.registry.open(opened, "")
            assert (await gateway.call(version, model=name))[0] == 200
            assert version in server.loaded
        assert server.loaded["tictactoe@1"] != server.loaded[f"{branch}@1"]

        assert gateway.router.current("tictactoe") == "tictactoe@1"  # main has no version 2
        assert list(main.checkpoints) == ["tictactoe@1"]
        for nothing in (f"{branch}@0", f"{branch}@3", "tictactoe+other@1"):
            with pytest.raises(ApiError, match="does not exist"):
                gateway.router.resolve(nothing, None)


def test_a_branch_whose_only_checkpoint_is_refused_does_not_exist(tmp_path: Path) -> None:
    """Without a valid signature: as if it had never been published."""
    key = nkey.load_or_make(tmp_path / "checkpoints.nk").public
    policies = Policies("p", ["m"], Trust(SigningConfig(keys=(key,))))
    event = checkpoint(1, branch="b")
    assert not policies.apply(LogEntry(event, "POLICY", Place(1, 0), event.subject()))
    assert policies.state("m+b") is None
    assert policies.names() == ["m", "m@0"]


@pytest.mark.parametrize(
    ("versions", "applied"),
    [
        (("m@1", "outside:master"), True),
        (("outside:master", ""), True),
        (("outside:other", ""), False),
        (("m", "outside:master"), False),
    ],
)
def test_a_decision_about_a_master_names_itself_or_policy_versions(versions: tuple[str, str], applied: bool) -> None:
    policies = Policies("p", ["m"], apprentices={"master": "m"})
    event = PolicyPromoted(project="p", model="master", version=versions[0], other=versions[1])
    assert policies.apply(LogEntry(event, "POLICY", Place(1, 0), event.subject())) == applied
    assert (policies.routed["master"].decided is not None) == applied
    assert policies.decided_versions() == (["m@1"] if applied and "m@1" in versions else [])
