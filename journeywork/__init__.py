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

from journeywork.client import AsyncJourneywork as AsyncJourneywork
from journeywork.client import Journeywork as Journeywork
from journeywork.evaluation import EvaluationReport as EvaluationReport
from journeywork.gathering import TaskGroup as TaskGroup
from journeywork.gathering import TooManyExceptionsError as TooManyExceptionsError
from journeywork.looping import LoopOptions as LoopOptions
from journeywork.looping import LoopResult as LoopResult
from journeywork.looping import loop as loop
from journeywork.statistics import Estimate as Estimate
from journeywork.trajectory import CompleteOptions as CompleteOptions
from journeywork.trajectory import FeedbackOptions as FeedbackOptions
from journeywork.trajectory import OpenOptions as OpenOptions
from journeywork.trajectory import Outcome as Outcome
from journeywork.trajectory import Trajectory as Trajectory
from journeywork.transport import GatewayUnavailableError as GatewayUnavailableError
from journeywork.transport import JourneyworkError as JourneyworkError
