"""Gateways in front of providers: without inference servers, and with a master and its apprentice."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import anyio.to_thread
import httpx
import pytest

from pipeline.config import OutsideConfig
from pipeline.events import ExchangeRecorded, TrajectoryOpened
from pipeline.log.broker import Broker
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway, publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import exchanges
from tests.rollout_gateway.outside.provider import Provider, completion, providing, whole

KEY = "sk-provider-0123456789abcdef"
PRICES: dict[str, Any] = {"input_usd": 2.5, "cached_input_usd": 1.25, "cache_write_usd": 3.75, "output_usd": 10.0}

StartOutside = Callable[..., GatewayProcess]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """A provider whose key the gateways find in their environment (`table`)."""
    monkeypatch.setenv("TEST_PROVIDER_KEY", KEY)
    with providing() as made:
        yield made


@pytest.fixture
def second_provider() -> Iterator[Provider]:
    with providing() as made:
        yield made


def table(provider: Provider, **more: Any) -> OutsideConfig:
    fields = {"name": "master", "url": provider.url, "model": "big", "api_key_env": "TEST_PROVIDER_KEY"}
    return OutsideConfig(**{**fields, **PRICES, **more})


@pytest.fixture
def start_outside(start_front: StartGateway) -> StartOutside:
    """Starts gateways with these tables of outside models."""
    return lambda *tables, **settings: start_front(outside=tables, **settings)


CHAT: Any = {"model": "master", "messages": [{"role": "user", "content": "a1=x"}]}
MASTER, APPRENTICE = "outside:master", "tictactoe@1"


class Apprentice(FakeVllm):
    """An inference server whose answers have this logprob. It keeps the texts of the messages that it saw."""

    logprob = -0.5

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    async def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = await super()._answer(path, body)
        if path == "/v1/chat/completions" and status == 200:
            assert not body.get("stream")
            self.seen.append([message["content"] for message in body["messages"]])
            answer["choices"][0]["logprobs"]["content"][0]["logprob"] = self.logprob
            answer["usage"] = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        return status, answer


class Shop:
    """A gateway with a master and its apprentice."""

    def __init__(self, gateway: GatewayProcess, server: Apprentice, provider: Provider, broker: Broker) -> None:
        self.gateway, self.server, self.provider, self.broker = gateway, server, provider, broker
        self.client = httpx.AsyncClient(base_url=gateway.url, timeout=60)

    async def post(self, path: str, status: int = 200, key: str = "", **body: Any) -> Any:
        """Post a request, with this key or else the client's, that is answered with this status."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = await self.client.post(path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def decide(self, action: str, status: int = 200, model: str = "master", **body: Any) -> Any:
        return await self.post(f"/v1/policies/{model}/{action}", status, **body)

    async def open(self, name: str, **more: Any) -> Any:
        opened = await self.post("/v1/trajectories", 201, **{"model": "master", "id": name, **more})
        assert opened["model"] == more.get("model", "master")
        return opened

    async def call(self, name: str, path: str = "chat/completions", retry: bool = False, **more: Any) -> httpx.Response:
        headers = {"x-stainless-retry-count": str(int(retry))}
        return await self.client.post(f"/t/{name}/v1/{path}", json={**CHAT, **more}, headers=headers)

    async def opened(self, name: str) -> TrajectoryOpened:
        (found,) = await self.broker.read(TrajectoryOpened, project=PROJECT, trajectory=name)
        return found.event

    async def calls(self, name: str) -> list[ExchangeRecorded]:
        return await exchanges(self.broker, name)


OpenShop = Callable[..., Awaitable[Shop]]


@pytest.fixture
async def open_shop(start_gateway_alone: StartGateway, broker: Broker, provider: Provider) -> AsyncIterator[OpenShop]:
    provider.says(whole(completion()))
    shops: list[Shop] = []

    async def start(
        *,
        promote: bool = True,
        publish: bool = True,
        crash_at: str = "",
        table_of: Any = None,
        key: str = "",
        **settings: Any,
    ) -> Shop:
        """`key`: of the client's requests. `promote`: whether the apprentice answers for the master. `publish`: whether
        it has a version beside its base."""
        server = Apprentice()
        await server.start()
        of_master = table(provider, **{"apprentice": "tictactoe", **(table_of or {})})
        more = {"urls": (server.url,), "outside": (of_master,), "replicas.wait_s": 5.0, **settings}
        gateway = await anyio.to_thread.run_sync(partial(start_gateway_alone, **more))
        if crash_at:
            await anyio.to_thread.run_sync(gateway.stop)
            await anyio.to_thread.run_sync(gateway.start, crash_at)
        shop = Shop(gateway, server, provider, broker)
        shop.client.headers["authorization"] = f"Bearer {key or 'none'}"
        shops.append(shop)
        if publish:
            await publish_adapter(broker, 1)

        async def is_known() -> bool:
            return APPRENTICE in (await shop.client.get("/v1/models")).text

        if promote:
            await until(is_known)
            await shop.decide("promote", version=APPRENTICE)
        return shop

    yield start
    for shop in shops:
        await shop.client.aclose()
        await anyio.to_thread.run_sync(shop.gateway.stop)
        await shop.server.stop()
