"""The SDK that agent code may import; it talks HTTP to the gateway and needs only httpx and anyio.

    from journeyman import Journeyman

    with Journeyman("http://127.0.0.1:8700") as jm, jm.trajectory("policy", group="task-7") as run:
        client = openai.OpenAI(**run.openai)
        ...
        run.reward = 1.0

`client` is the whole of it. Agents in other languages use the HTTP API that docs/gateway.md describes.
"""

from journeyman.client import (
    AsyncJourneyman,
    CompleteOptions,
    GatewayUnavailableError,
    Journeyman,
    JourneymanError,
    OpenOptions,
    Outcome,
    Trajectory,
)

__all__ = [
    "AsyncJourneyman",
    "CompleteOptions",
    "GatewayUnavailableError",
    "Journeyman",
    "JourneymanError",
    "OpenOptions",
    "Outcome",
    "Trajectory",
]
