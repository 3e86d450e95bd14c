"""`[judge]` and `[[judge.rewards]]`: groups and their scores."""

from __future__ import annotations

from typing import Any, Literal

from pipeline.config.types import Correlation, Count, Natural, NotNegative, Positive, Prompt, Section, Several


class RewardConfig(Section, frozen=True, kw_only=True):
    """One part of a composed reward."""

    name: str
    """Under which the part is kept in `components`."""
    kind: Literal["agent", "metric", "python", "ruler"] = "agent"
    """`agent`: what the agent reported (under `name` in its named rewards, else its reward); `metric`: its metric
    `name`; `python`: a function; `ruler`: the judge model with `rubric`."""
    weight: float = 1.0
    entry: str = ""
    """`package.module:function` of kind `python`; it gets the trajectory as a dict and returns a number."""
    rubric: str = ""
    """As `judge.rubric`, for kind `ruler`."""
    timeout_s: Positive = 10.0
    """Of one call of the function; its processes are killed then."""
    memory_mb: Count = 1024
    """Memory that all processes of one call may hold together, and address space of each."""
    processes: Count = 64
    """Processes and threads that one call may have at once."""
    isolate: Literal["auto", "require", "off"] = "auto"
    """`auto`: the function runs in a bubblewrap sandbox (no network, nothing writable, only code readable); where bubblewrap
    is missing it runs without, and a warning says so. `require`: where bubblewrap is missing the judge does not start.
    `off`: the function runs without a sandbox. docs/judging.md says what each promises."""
    readable: tuple[str, ...] = ()
    """Files and folders that the function may read in its sandbox besides Python and the modules of the search path."""


class JudgeConfig(Section, frozen=True, kw_only=True):
    """Groups and scores."""

    group_size: Count = 8
    min_size: Several = 2
    """A group that times out with fewer scorable members is discarded."""
    timeout_s: Positive = 600.0
    """From a group's first completed trajectory to its closing without the missing ones."""
    model: str = ""
    """litellm name of the judge model; empty: only rewards that agents gave count."""
    api_base: str = ""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; the key itself is never in a file."""
    fallbacks: tuple[str, ...] = ()
    """litellm names of models to ask, in this order, where the first can't be reached."""
    rubric: str = ""
    """File with the rubric, or the name of one that comes with Journeyman; empty: the general one."""
    concurrency: Count = 16
    """Calls to the judge model at once."""
    judgings: Count = 2
    """At most so many judgings of a group, each in another order; from the second on it ends once they agree."""
    agreement: NotNegative = 0.1
    """Mean absolute difference of scores up to which two judgings agree."""
    structured: Literal["auto", "schema", "text"] = "auto"
    """Whether the answer's JSON schema is sent along; `auto`: until the provider refuses it."""
    temperature: NotNegative | None = None
    """Sent only where set."""
    max_tokens: Natural = 8192
    """Tokens that one reply may have, a reasoning model's thinking included; it ends a reply that would never end. 0: not
    sent."""
    params: dict[str, Any] = {}
    """Further parameters of litellm's `completion` for the judge model, and for fallbacks of the same provider: for example
    `reasoning_effort`, `extra_headers`, `api_version`, `tenant_id`. A string may hold `${NAME}`, which becomes the environment
    variable's value; secrets are given in this way only."""
    model_params: dict[str, dict[str, Any]] = {}
    """By litellm name of the judge model or of a fallback: its own parameters, before those in `params`."""
    request_timeout_s: Positive = 120.0
    retries: Natural = 2
    """Times that one call is repeated by the router when the provider fails."""
    attempts: Count = 4
    """Calls for one judging until every score could be read."""
    retry_for_s: NotNegative = 3600.0
    """How long a group that could not be judged is tried again before it is discarded as unscored."""
    context_tokens: Prompt = 100_000
    """Tokens of one call's prompt at most: today's judge models take 128,000 or more, reply included. Longer groups are judged
    in overlapping subsets, longer trajectories cut. It is halved by itself where the model refuses a prompt as too long."""
    rewards: tuple[RewardConfig, ...] = ()
    """What the final reward is made of; empty: agents' own rewards where all have one, else the judge model's."""
    combine: Literal["mean", "sum", "product", "min"] = "mean"
    """How `rewards` become one: weighted mean, weighted sum, product, or the smallest."""
    anchors: str = ""
    """JSONL file of groups with known rewards, judged again and again so that the judge's drift shows."""
    anchor_every_s: Positive = 3600.0
    anchor_min_tau: Correlation = 0.5
    """An anchor run with a Kendall tau below this raises the alarm: an error in the log and in `judge.json`."""
