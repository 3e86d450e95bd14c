"""What sampler agents learn from the records of gateways."""

from __future__ import annotations

import msgspec

from rollout_gateway.sampler.gateway_records import GatewayRecords


def record(seq: int, **fields: object) -> bytes:
    return msgspec.json.encode({"policy_seq": seq, **fields})


def test_a_version_is_released_when_every_gateway_knows_and_none_uses_it() -> None:
    gateways = GatewayRecords("p")
    assert gateways.is_released("r", "m@1", 7)
    gateways.apply("a", record(7))
    gateways.apply("b", record(6))
    assert not gateways.is_released("r", "m@1", 7)  # b may still begin a call
    gateways.apply("b", record(9, in_flight={"r": ["m@1", "m@2"]}))
    assert not gateways.is_released("r", "m@1", 7)
    assert gateways.is_released("other", "m@1", 7)
    gateways.apply("b", record(9, in_flight={"r": ["m@2"]}))
    assert gateways.is_released("r", "m@1", 7)
    assert not gateways.is_released("r", "m@2", 7)
    gateways.apply("b", b"")  # its record has expired
    assert gateways.is_released("r", "m@2", 7)


def test_wanted_versions_of_all_gateways_count() -> None:
    gateways = GatewayRecords("p")
    gateways.apply("a", record(1, wanted=["m@3"]))
    gateways.apply("b", record(1, wanted=["m@2", "m@3"]))
    gateways.apply("c", b"no record")
    assert gateways.wanted() == ["m@3", "m@2"]


def test_what_serves_is_known_as_of_the_records() -> None:
    gateways = GatewayRecords("p")
    assert gateways.have_applied(7)
    gateways.apply("a", record(7, serving=["m@5"]))
    gateways.apply("b", record(6, serving=["m@4"]))
    assert gateways.serving() == {"m@5", "m@4"}
    assert not gateways.have_applied(7)  # b may serve another version now
    gateways.apply("b", record(8, serving=["m@5"]))
    assert gateways.have_applied(7)
    assert gateways.serving() == {"m@5"}
