"""`journeywork prepare` makes what containers need, and a second run changes nothing."""

import hashlib
import stat
from pathlib import Path

import pytest

from pipeline.commands.prepare import prepare
from pipeline.config import ConfigError, load
from pipeline.security import users

COMPOSE = Path(__file__).parents[3] / "deploy" / "compose.toml"


def test_keys_and_settings_are_made_once_and_are_their_owner_s(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = load(COMPOSE, [f"run_dir={run}"])
    first = prepare(config)
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    names = {p.name for p in files}
    assert names == {
        "config.toml",
        "up.lock",
        "operator.key",
        "vllm.key",
        "checkpoints.nk",
        *(f"{u.name}.nk" for u in users.USERS),
    }
    assert prepare(config) == first == load(run / "config.toml")
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in (run / "keys").iterdir())
    assert stat.S_IMODE(run.stat().st_mode) == 0o700

    # The settings know the operator's key by its hash, and hold no secret.
    [key] = first.gateway.keys
    secret = files[run / "keys" / "operator.key"]
    assert (key.role, key.sha256) == ("operator", hashlib.sha256(secret).hexdigest())
    assert len(first.signing.keys) == 1
    for path, content in files.items():
        assert path.parent.name != "keys" or content.strip() not in files[run / "config.toml"]


def test_what_the_settings_name_stays(tmp_path: Path) -> None:
    digest = "0" * 64
    config = load(
        COMPOSE,
        [f"run_dir={tmp_path}", f'gateway.keys=[{{sha256="{digest}", name="ours"}}]', "nats.nkey_seed=/etc/ours.nk"],
    )
    made = prepare(config)
    assert [k.name for k in made.gateway.keys] == ["ours"]
    assert (made.nats.users, made.nats.nkey_seed, made.nats.provision) == ("", "/etc/ours.nk", True)
    assert {p.name for p in (tmp_path / "keys").iterdir()} == {"vllm.key", "checkpoints.nk"}


@pytest.mark.parametrize("content", ["", " \n"])
@pytest.mark.parametrize("name", ["operator.key", "vllm.key", "checkpoints.nk"])
def test_an_empty_file_is_no_secret(tmp_path: Path, name: str, content: str) -> None:
    """The digest of an empty operator's key would make every request without a key an operator's."""
    path = tmp_path / "keys" / name
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"{name} is empty: delete it"):
        prepare(load(COMPOSE, [f"run_dir={tmp_path}"]))
    assert not (tmp_path / "config.toml").exists()


def test_settings_without_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nats.url and vllm.urls: set both"):
        prepare(load(None, [f"run_dir={tmp_path}"]))
