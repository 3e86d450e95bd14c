"""The SDK that agent code may import; it talks HTTP to the gateway and needs only httpx and anyio.

    from journeyman import Journeyman

    with Journeyman("http://127.0.0.1:8700") as jm, jm.trajectory("policy", group="task-7") as run:
        client = openai.OpenAI(**run.openai)
        ...
        run.reward = 1.0

    groups = jm.gather("policy", tasks, play)          # play(run, task) runs your agent and returns the reward
    print(jm.compare("policy@0", "policy", held_out, play).difference)

| module | contents |
| --- | --- |
| `client` | HTTP clients of the gateway, blocking and asynchronous |
| `transport` | errors, backoff, responses |
| `command_line` | types of command-line arguments, exit statuses |
| `trajectory` | one agent run and its result |
| `gathering` | concurrent runs, evaluation, comparison of versions |
| `art` | programs that were written for openpipe-art |
| `looping`, `attempts` | playing while the trainer trains; what the gateway has of it, for a resume |
| `curriculum` | tasks sampled by the posterior of their rewards |
| `environments/` | `journeyman run-env` |
| `evaluation/` | `journeyman eval` |
| `starter/` | `journeyman init` |
| `statistics` | means with 95 % intervals |

Agents in other languages use the HTTP API that docs/gateway.md describes.
"""

from journeyman.client import AsyncJourneyman, Journeyman
from journeyman.curriculum import Curriculum
from journeyman.gathering import Comparison, Evaluation, TaskGroup, TooManyExceptionsError
from journeyman.looping import LoopResult, loop
from journeyman.statistics import Estimate
from journeyman.trajectory import CompleteOptions, OpenOptions, Outcome, Trajectory
from journeyman.transport import GatewayUnavailableError, JourneymanError

__all__ = [
    "AsyncJourneyman",
    "Comparison",
    "CompleteOptions",
    "Curriculum",
    "Estimate",
    "Evaluation",
    "GatewayUnavailableError",
    "Journeyman",
    "JourneymanError",
    "LoopResult",
    "OpenOptions",
    "Outcome",
    "TaskGroup",
    "TooManyExceptionsError",
    "Trajectory",
    "loop",
]
