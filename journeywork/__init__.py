"""The SDK that agent code may import; it talks HTTP to the gateway and needs only httpx and anyio.

    from journeywork import Journeywork

    with Journeywork("http://127.0.0.1:8700") as jw, jw.trajectory("policy", group="task-7") as run:
        client = openai.OpenAI(**run.openai)
        ...
        run.reward = 1.0

    jw.feedback(response.id, thumb="down", text="the other account")     # days later, from another program

    groups = jw.gather("policy", tasks, play)          # play(run, task) runs your agent and returns the reward
    print(jw.evaluate(["policy@0", "policy"], held_out, play).difference(1, "reward"))

| module | contents |
| --- | --- |
| `client` | HTTP clients of the gateway, blocking and asynchronous |
| `transport` | errors, backoff, responses |
| `command_line` | types of command-line arguments, exit statuses |
| `trajectory` | one agent run and its result |
| `gathering` | concurrent runs |
| `art` | programs that were written for openpipe-art |
| `looping`, `attempts` | playing while the trainer trains; what the gateway has of it, for a resume |
| `evaluation/` | held-out tasks played by versions and other models; `journeywork eval` |
| `starter/` | `journeywork init` |
| `statistics` | means with 95 % intervals |

Agents in other languages use the HTTP API that docs/gateway.md describes.
"""

from journeywork.client import AsyncJourneywork, Journeywork
from journeywork.evaluation import EvaluationReport
from journeywork.gathering import TaskGroup, TooManyExceptionsError
from journeywork.looping import LoopOptions, LoopResult, loop
from journeywork.statistics import Estimate
from journeywork.trajectory import CompleteOptions, FeedbackOptions, OpenOptions, Outcome, Trajectory
from journeywork.transport import GatewayUnavailableError, JourneyworkError

__all__ = [
    "AsyncJourneywork",
    "CompleteOptions",
    "Estimate",
    "EvaluationReport",
    "FeedbackOptions",
    "GatewayUnavailableError",
    "Journeywork",
    "JourneyworkError",
    "LoopOptions",
    "LoopResult",
    "OpenOptions",
    "Outcome",
    "TaskGroup",
    "TooManyExceptionsError",
    "Trajectory",
    "loop",
]
