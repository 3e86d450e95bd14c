"""A service that dies of one message: by an exit, or by an exception. It ends by itself when nothing is left to do.

python -m tests.pipeline.log.deaths_child NATS_URL exit|exception"""

import os
import sys

import anyio

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.events import TrajectoryCompleted
from pipeline.log.broker import Broker
from pipeline.log.consumer import handling
from tests.kits.quick_service import quick_consumers

POISON = "poison"
ACK_WAIT_S = 0.6


async def serve(url: str, how: str) -> None:
    async with Broker.connect(NatsConfig(url=url), name="judge") as broker, broker.consume("judge") as messages:
        while (batch := await messages.batch(100, wait_s=ACK_WAIT_S)) or await broker.lag("judge"):
            for delivery in batch:
                assert isinstance(delivery.event, TrajectoryCompleted)
                with handling([delivery]):
                    if delivery.event.trajectory == POISON:
                        if how == "exit":
                            os._exit(3)
                        raise ValueError(POISON)
                await delivery.ack(confirmed=True)


if __name__ == "__main__":
    streams.CONSUMERS = quick_consumers(ACK_WAIT_S)
    anyio.run(serve, *sys.argv[1:])
