"""`[judge]` with its sections, `[feedback]` and `[teacher]`: groups and their scores.

The *judge* is the service that gives each trajectory of a group its reward, composed of the parts in `judge.rewards`.
One kind of part asks a model (`judge.model`) with a *rubric*, a text that says what is good. *Feedback* is what users
and other people say of a run later. The *teacher* is a model whose probabilities the trainer learns from."""

from __future__ import annotations

from typing import Any, Literal

from pipeline.config.types import (
    Correlation,
    Count,
    Natural,
    NotNegative,
    Positive,
    Prompt,
    Section,
    Share,
    SmallCount,
    Weight,
)


class RewardConfig(Section, frozen=True, kw_only=True):
    """One part of a composed reward."""

    name: str
    """Name of the part in `components` of a scored group."""
    kind: Literal["agent", "metric", "python", "ruler", "feedback", "next_state", "length", "turns", "context"] = (
        "agent"
    )
    """`agent`: the reward that the agent reported under `name`, else its overall reward. `metric`: the agent's metric
    `name`. `python`: a function. `ruler`: the judge model with `rubric`. `feedback`: the signals with the name `name`,
    from the keys in `by` (docs/on-the-job.md). `next_state`: the judge model scores each call by what followed it; the
    scores are rewards of the calls, and no part of the run's own. `length`, `turns`, `context`: a penalty for what
    the run sampled, how often it called a model, and what all its prompts held; tokens are the policy's, an outside
    model's calls count as turns only."""
    weight: Weight = 1.0
    """Weight in `judge.combine`."""
    entry: str = ""
    """Kind `python`: the function as `package.module:function`. It takes the trajectory as a dict and returns a
    number, or `{"reward": number, "calls": {call: number}}`."""
    rubric: str = ""
    """Kinds `ruler` and `next_state`: the rubric, as in `judge.rubric`. Empty: that one, or for `next_state` the rubric
    `next_state`."""
    free: Natural = 0
    """Kinds `length`, `turns` and `context`: a run of so many tokens or calls has the penalty 0."""
    limit: Natural = 0
    """The same kinds: from so many on the penalty is -1. Between `free` and `limit` it is linear."""
    votes: Count = 3
    """Kind `next_state`: how often the judge model is asked about each call. The score with the most votes counts, 0 in
    a tie."""
    default: Weight | None = None
    """Kind `feedback`: the value of a run on which no feedback came. Not set: such a run has no reward."""
    by: tuple[str, ...] = ()
    """Kind `feedback`: names of the API keys whose numbers count. Numbers of other keys are only recorded. Empty: every
    key."""
    timeout_s: Positive = 10.0
    """Longest duration of one call of the function. Its processes are killed after that."""
    memory_mb: Count = 1024
    """Address space of each process of a call, in MiB."""
    processes: Count = 64
    """Processes and threads that one call may have at once in the sandbox. The kernel enforces it from Linux 5.14 on,
    unless the judge runs as root."""
    isolate: Literal["auto", "require", "off"] = "auto"
    """`auto`: the function runs in a bubblewrap sandbox (no network, nothing writable). If bubblewrap is not installed
    it runs without a sandbox, and the judge logs a warning. `require`: without bubblewrap the judge does not start.
    `off`: the function runs without a sandbox. docs/judging.md lists the guarantees of each."""
    readable: tuple[str, ...] = ()
    """Files and folders that the function may read in its sandbox, besides Python and the folders of the search
    path."""


class JudgeRequestConfig(Section, frozen=True, kw_only=True):
    """One call to the judge model."""

    timeout_s: Positive = 120.0
    """Longest time that a server may be silent within a call. A reply that never ends is given up after `retries` + 1
    times this and a minute."""
    retries: Natural = 2
    """How often a call is repeated if the provider fails."""
    temperature: NotNegative | None = None
    """Sampling temperature. Not set: it is not sent."""
    max_tokens: Natural = 8192
    """Longest reply in tokens, a reasoning model's thinking included. 0: no limit is sent."""
    params: dict[str, Any] = {}
    """Further parameters of litellm's `completion`, for example `reasoning_effort`, `extra_headers`, `api_version`,
    `tenant_id`. `${NAME}` in a string is replaced by the environment variable. Give secrets in this way only."""


class FeedbackConfig(Section, frozen=True, kw_only=True):
    """Signals about runs: what users, people and other programs say about them, during a run or later."""

    wait_s: NotNegative = 0.0
    """How long a group whose runs are complete waits until each run has the feedback that `judge.rewards` names. It is
    scored as soon as all of it is there. 0: it is scored at once, with the feedback that came before. At most
    `nats.rollouts_max_age_h` less twice `judge.timeout_s`."""
    wait_for: Literal["rewards", "all"] = "rewards"
    """`rewards`: a group is scored as soon as it has the feedback that `judge.rewards` names; texts that come later are
    only recorded. `all`: a group always waits for `wait_s`. Use it for hints, which may come at any time."""
    max_share: Share = 1.0
    """Largest share of a step that groups which one API key graded may have. The size of a step is the sum of its
    absolute advantages; a larger part is scaled down, which the step's metric `graders_limited` counts. Below 1, groups
    are compared only with groups that the same keys graded. Hints of one key teach at most this share of a step's
    trained tokens. 1: no limit, for installations where one program reports all results."""
    max_signals: Count = 1000
    """How many signals one API key may give on one run. Every reader of the run reads all of them. Further signals get
    a 409."""
    late: Literal["record", "train"] = "train"
    """Effect of feedback that comes after the scoring. `record`: it is recorded, and `journeywork rejudge` uses it.
    `train`: in addition, a run that was discarded because it had no reward is scored once, when its reward comes."""


class TeacherConfig(Section, frozen=True, kw_only=True):
    """A teacher from outside (`trainer.distill.teacher` = "outside"): any OpenAI-compatible vLLM server with the
    models' own tokenizer. The judge asks it before it publishes a group, and the trainer reads its answers from the log
    (docs/on-the-job.md)."""

    url: str = ""
    """Base URL up to `/v1`, such as `http://teacher:8000/v1`. Empty: there is none."""
    model: str = ""
    """The model's name at that server: a model, or a version of Journeywork that the server has loaded."""
    api_key_env: str = ""
    """Environment variable with the server's key."""
    concurrency: SmallCount = 8
    """Requests at the same time, of each judge process."""
    timeout_s: Positive = 120.0
    """Timeout of one request."""
    retries: Natural = 4
    """Further attempts at a request that failed for a reason that may pass."""
    wait_s: Positive = 300.0
    """Longest time that a group waits for the teacher. Then the group is published, and its runs without an answer are
    trained on their rewards alone."""
    max_tokens: Natural = 0
    """Largest run, in tokens over all its conversations, about which the teacher is asked. 0: no limit."""


class AnchorConfig(Section, frozen=True, kw_only=True):
    """Anchor groups: groups with known rewards that the judge scores repeatedly, to measure its drift."""

    file: str = ""
    """JSONL file of the groups and their rewards. Empty: none."""
    every_s: Positive = 3600.0
    """Time between two runs over the anchor groups."""
    min_tau: Correlation = 0.5
    """Kendall tau below which a run raises the alarm: an error in the log and `judge_drift`."""


class HealingConfig(Section, frozen=True, kw_only=True):
    """Healing: a run of the policy that scored low is given to an outside model before its group is published. The
    outside model answers the call at fault anew; if the judge model scores that answer higher, in both orders, it is a
    correction of the call (docs/on-the-job.md)."""

    outside: str = ""
    """Name of the outside model, which speaks the dialect `chat` and `may_train`. Empty: nothing is healed."""
    url: str = ""
    """The gateway that is asked, which has the provider's key. Empty: this installation's."""
    api_key_env: str = ""
    """Environment variable with an API key of the gateway for model calls."""
    below: Weight = 0.5
    """Runs with a lower reward are healed."""
    max_usd: NotNegative = 1.0
    """What the outside model may cost in a day (UTC), by the prices of `[[outside]]`: in all judge processes, as
    `rollout.compared` says. What is being healed when it is reached still costs: at most two calls a run. The cost of
    judging counts for `budget.judge_usd`."""
    wait_s: Positive = 120.0
    """Longest time that a group waits for its healing."""


class JudgeConfig(Section, frozen=True, kw_only=True):
    """Groups and their scores."""

    group_size: Count = 8
    """Trajectories in a group, unless the agent names another number when it opens a trajectory."""
    min_size: Count = 2
    """A group that times out with fewer scorable members is discarded."""
    timeout_s: Positive = 600.0
    """Time from a group's first completed trajectory until the group is closed without the missing ones."""
    model: str = ""
    """litellm name of the judge model. Empty: only rewards that agents report count."""
    api_base: str = ""
    """URL of the judge model's server. Empty: the provider's own."""
    api_key_env: str = ""
    """Name of the environment variable that holds the API key. The key itself is in no file."""
    rubric: str = ""
    """Path of a rubric, or the name of one that comes with Journeywork. Empty: `general`."""
    concurrency: Count = 16
    """Calls to the judge model at once, in each judge process. Further judges may run on other machines."""
    passes: Count = 2
    """Number of passes over one group. Each pass shows the trajectories in another order."""
    attempts: Count = 4
    """Maximum number of calls in one pass until every score could be read from a reply."""
    retry_for_s: NotNegative = 3600.0
    """How long a group that could not be judged is retried before it is discarded as unscored."""
    context_tokens: Prompt = 100_000
    """Longest prompt of one call, in tokens. Longer trajectories are cut. The judge halves it if the model refuses a
    prompt as too long."""
    max_images: Natural = 16
    """Largest number of images that are shown in one call; further images are only named. 0: for a judge model that
    takes no images."""
    combine: Literal["mean", "sum", "product", "min"] = "mean"
    """How `rewards` become one number: weighted mean, weighted sum, product, or the smallest."""
    rewards: tuple[RewardConfig, ...] = ()
    """Parts of the final reward. Empty: the agents' own rewards if every member of the group has one, else the
    judge model's."""
    request: JudgeRequestConfig = JudgeRequestConfig()
    anchors: AnchorConfig = AnchorConfig()
    healing: HealingConfig = HealingConfig()
