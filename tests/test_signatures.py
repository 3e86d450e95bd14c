"""Checkpoints that the trainer signs are served; others are not."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.commands.status import read_log
from pipeline.config import ConfigError, NatsConfig, SigningConfig, load
from pipeline.events import CheckpointPublished, DeadLettered, decode, encode
from pipeline.log.broker import Broker
from pipeline.running.plan import make_plan
from pipeline.security import nkey, signing
from rollout_gateway.serving.policies import Policies
from store.lake.lake import open_lake
from store.lake.versions import copy_version
from tests.kits.events import checkpoint as checkpoint_of
from tests.kits.waiting import until_true
from tests.trainer import kit
from tests.trainer.conftest import tiny_base as tiny_base
from tests.trainer.kit import running, steps_reach
from trainer.checkpoints import checkpoint
from trainer.checkpoints.start import read_version


def event(step: int = 1, **more: Any) -> CheckpointPublished:
    return checkpoint_of(step, kit.MODEL, **{"groups": ("g",), "metrics": {"loss": 0.1}} | more)


@pytest.fixture
def pair() -> nkey.KeyPair:
    return nkey.KeyPair(nkey.new_seed())


def test_every_field_is_under_the_signature(pair: nkey.KeyPair) -> None:
    trust = signing.Trust(SigningConfig(keys=(pair.public,)))
    signed = signing.Signer(pair).sign(event())
    assert trust.objection(decode(encode(signed))) == ""  # type: ignore[arg-type]
    changed = {str: "other", int: 7, bytes: b"other", tuple: ("other",), dict: {"other": "x"}}
    for field in msgspec.structs.fields(CheckpointPublished):
        value = changed[type(getattr(signed, field.name))]
        value = {"other": 1.0} if field.name == "metrics" else value
        assert trust.objection(msgspec.structs.replace(signed, **{field.name: value})), field.name


def test_keys_that_can_not_be_used_are_named_and_not_shown(pair: nkey.KeyPair) -> None:
    seed = nkey.new_seed().decode()
    other = "B" if pair.public.endswith("A") else "A"
    for wrong in ("", "U", seed, pair.public[:-1] + other):
        with pytest.raises(ConfigError, match=r"signing\.keys") as caught:
            signing.Trust(SigningConfig(keys=(wrong,)))
        assert seed not in str(caught.value)
    with pytest.raises(ConfigError, match=r"signing\.keys is empty"):
        signing.Trust(SigningConfig(check="require"))
    assert not signing.Trust(SigningConfig(keys=(pair.public,), check="off")).is_enforced
    assert not signing.Trust(SigningConfig()).is_enforced


def test_up_without_a_trainer_serves_signed_checkpoints_only(tmp_path: Path) -> None:
    """It trusts the keys that the settings name, else its own, which a trainer of the same run directory uses."""
    settings = [f"run_dir={tmp_path}", 'vllm.urls=["http://x:1"]']
    planned, _ = make_plan(load(None, settings), ("gateway", "sampler"))
    trust = signing.Trust(signing.trusting_own_key(planned.signing))
    assert "is not signed" in trust.objection(event())
    public = nkey.KeyPair(nkey.new_seed()).public
    planned, _ = make_plan(load(None, [*settings, f'signing.keys=["{public}"]']), ("gateway", "sampler"))
    assert signing.trusting_own_key(planned.signing).keys == (public,)


async def letters(broker: Broker) -> list[str]:
    found = [r.event for r in await broker.read(DeadLettered)]
    return sorted(e.detail for e in found if isinstance(e, DeadLettered) and e.reason == "unsigned")


async def test_forged_checkpoints_at_a_reused_sequence_get_separate_dead_letters(
    nats_config: NatsConfig, pair: nkey.KeyPair
) -> None:
    async with Broker.connect(nats_config) as broker:
        for step in (1, 2):
            await broker.publish(event(step))
            await Policies("p", [kit.MODEL], signing.Trust(SigningConfig(keys=(pair.public,)))).rebuild(broker)
            await broker.js.delete_stream("POLICY")
            await broker.provision()
        assert len(await letters(broker)) == 2


async def test_forged_checkpoints_are_skipped(nats_config: NatsConfig, tiny_base: str, tmp_path: Path) -> None:
    config = kit.settings(tiny_base, tmp_path / "run", nats_config, groups_per_step=1)
    seed = tmp_path / "checkpoints.nk"
    config = config.replace(signing=signing.trusting_own_key(SigningConfig(seed=str(seed))))
    public = nkey.load(seed).public
    assert config.signing.keys == (public,)
    trust = signing.Trust(config.signing)

    async with Broker.connect(nats_config) as broker:
        async with running(config):
            await kit.publish_group(broker, "g0", [0.0, 1.0], seed=1)
            (true,) = await steps_reach(broker, 1)
        assert true.signer == public
        stranger = signing.Signer(nkey.KeyPair(nkey.new_seed()))
        altered = msgspec.structs.replace(true, adapter="evil", adapter_sha256="0", step=8, version="tiny@8")
        for forged in (event(7), altered, stranger.sign(event(9))):
            await broker.publish(forged)

        policies = Policies("p", [kit.MODEL], trust)
        await policies.rebuild(broker)
        assert policies.names() == ["tiny", "tiny@0", "tiny@1"]
        said = await letters(broker)
        assert [s.partition("tiny@")[2][:1] for s in said] == ["7", "9", "8"], said
        status = await read_log(nats_config, trust, "p")
        assert status["policies"] == {"tiny": "tiny@1"}
        for copied in (true, msgspec.structs.replace(true, step=7, version="tiny@7")):
            await copy_version(broker, open_lake(config).storage, "adapters", copied)
        assert set(read_version(config, kit.MODEL, 1).files) == set(checkpoint.ADAPTER_FILES)
        with pytest.raises(checkpoint.CheckpointError, match="signature of the checkpoint tiny@7 does not match"):
            read_version(config, kit.MODEL, 7)
        await Policies("p", [kit.MODEL], trust).rebuild(broker)  # another gateway, or this one again
        assert await letters(broker) == said

        changed: list[int] = []
        async with anyio.create_task_group() as tg:
            tg.start_soon(policies.follow, broker, lambda r: changed.append(r.event.step))  # type: ignore[union-attr]
            await broker.publish(event(6))
            # A trainer that starts again goes on from its own last step, and signs with the same key.
            async with running(config) as facts:
                assert facts == {"step": 1}
                await kit.publish_group(broker, "g1", [0.0, 1.0], seed=2)
                newest = (await steps_reach(broker, 6))[-1]
            await until_true(lambda: policies.knows("tiny@2"))
            tg.cancel_scope.cancel()
        assert (newest.version, newest.signer, changed) == ("tiny@2", public, [2])
        assert len(await letters(broker)) == 4
