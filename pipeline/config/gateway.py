"""`[gateway]`, `[gateway.http]`, `[gateway.replicas]`, `[gateway.detection]` and `[[gateway.keys]]`: the HTTP front."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Count, Natural, NotNegative, Port, Positive, Section, Share


class KeyConfig(Section, frozen=True, kw_only=True):
    """An API key. `journeywork keys` makes one."""

    sha256: str
    """SHA-256 of the key, in hexadecimal. The key itself is in no file."""
    name: str = ""
    """Owner of the trajectories that the key opens. Keys with the same name share trajectories and rate. Empty: a
    part of the hash."""
    role: Literal["agent", "feedback", "operator"] = "agent"
    """`agent`: model calls and its own trajectories. `feedback`: feedback on any trajectory of the project, and nothing
    else. `operator`: every trajectory, decisions about versions, and metrics."""
    calls_per_minute: Natural = 0
    """Calls per minute with the key, and with the keys of trajectories that it opened. Completing a group or
    a run made of others' calls, or ranking runs, counts as a call for each run that is looked at; each MiB of a body,
    and each MiB that the calls of a run add to the log, counts as a further one. 0: no limit. Each gateway process
    counts by itself."""
    models: tuple[str, ...] = ()
    """Models that the key may call and open trajectories for. Empty: all."""
    calls_only: bool = False
    """The key makes model calls only. It can't open, read, list or complete trajectories through the control API."""
    expires: str = ""
    """Date and time in ISO 8601, UTC unless it names a zone. Empty: never."""


class HttpConfig(Section, frozen=True, kw_only=True):
    """Limits of connections and requests, and the host names that are served."""

    max_connections: Count = 10_000
    """Connections of clients at once. Beyond it those that have been idle longest are closed, a hundredth of all at
    once, then those whose request has been incomplete longest. If all are being answered, a new one gets a 503. The
    limit on open files of the process bounds it."""
    max_body_bytes: Count = 16 * 1024 * 1024
    """Longest body of a model call. A longer one gets a 413 and is not read. A conversation of a million tokens takes
    about 5 MB; the rest is for images. Reading 16 MiB takes 0.1 to 0.3 s of the gateway's one processor."""
    max_control_body_bytes: Count = 1024 * 1024
    """Longest body of a call of the control API."""
    max_buffered_bytes: Count = 512 * 1024 * 1024
    """Bytes of incomplete request bodies over all connections; at least `max_body_bytes`. Beyond it, the newest
    requests of the API key with the most buffered bytes get a 503 that asks them to try again."""
    head_timeout_s: Positive = 30.0
    """Time for a request's headers, and for a new connection to begin its first request."""
    body_timeout_s: Positive = 60.0
    """Time for a request's body, plus a second for every 64 KiB that have arrived."""
    idle_timeout_s: Positive = 600.0
    """Time that a connection may stay open between two requests. Make it longer than clients keep their
    connections: a request that is sent while its connection is closed fails."""
    write_timeout_s: Positive = 300.0
    """A client that reads nothing of its answer for this long is disconnected."""
    hosts: tuple[str, ...] = ()
    """Further names that clients may send in `Host`, without a port, for example behind a reverse proxy; `*`: any.
    On the loopback interface the gateway answers to `localhost`, the loopback addresses and these names only,
    which stops DNS rebinding. On other interfaces, where keys are required, it answers to any name unless some
    are set."""


class ReplicasConfig(Section, frozen=True, kw_only=True):
    """Calls to the inference servers, and the checks of their health and adapters."""

    timeout_s: Positive = 300.0
    """Longest duration of one call to an inference server."""
    wait_s: NotNegative = 180.0
    """How long a request waits for an inference server to come up."""
    health_interval_s: Positive = 1.0
    """Time between two health checks of a healthy inference server."""
    health_retry_s: Positive = 0.25
    """Time between two health checks of an inference server that does not answer."""
    serving_share: Share = 0.5
    """Share of the ready servers that must have loaded a version before its model's name is routed to it; at least one
    server. Other servers get calls for the version when they have loaded it. 1: all servers."""


class DetectionConfig(Section, frozen=True, kw_only=True):
    """Detection of trajectories for calls that name none. The gateway recognises a continued conversation by its
    messages."""

    enabled: bool = False
    """Whether trajectories are detected."""
    idle_s: Positive = 60.0
    """A detected trajectory is completed when it has had no call for this long."""
    outcome: Literal["scored", "masked", "no_result"] = "scored"
    """Outcome of a detected trajectory. With `scored` the judge assigns the reward."""
    grouped: bool = True
    """Whether runs that begin with the same messages form a group. False: each run is a group of its own, for tasks
    that come once (docs/on-the-job.md)."""


class MaskConfig(Section, frozen=True, kw_only=True):
    """Text that is never recorded."""

    name: str
    """Name that replaces the text, in brackets."""
    pattern: str
    """Regular expression in RE2's syntax, such as `[\\pL\\pN._%+-]+@[\\pL\\pN-]+(\\.[\\pL\\pN-]+)+`."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    """The HTTP front."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond the loopback interface keys are required."""
    port: Port = 0
    """Port to listen on. 0: any free one."""
    public_url: str = ""
    """Start of `base_url` in the answer that opens a trajectory, such as `https://gateway.example.com`. Empty:
    `http://` and the request's `Host`."""
    max_run_bytes: Count = 256 * 1024 * 1024
    """Bytes of a run's calls: whole requests, responses and tokens. A run that has more takes no further call. The
    judge holds all of a run, in about five times as much memory."""
    max_group_size: Count = 1024
    """Most runs in a group that is opened or completed. The judge holds all runs of a group at once."""
    drain_s: NotNegative = 10.0
    """How long running calls may continue when the gateway stops. New calls get a 503 `stopping`. Calls that are
    not done by then are cut off with an error and recorded as `failed`."""
    keys: tuple[KeyConfig, ...] = ()
    """Keys of clients. If neither this list nor `keys_file` has one, everyone may call; that is allowed on the
    loopback interface only."""
    keys_file: str = "keys.toml"
    """File with further keys, under the run directory. `journeywork keys` adds and revokes keys there; the gateway
    reads it again within two seconds of a change. Once the file has existed, keys are required, even if it is
    deleted."""
    key_secret_env: str = ""
    """Name of the environment variable with the secret that trajectory keys are made from. All gateway replicas
    need the same. Empty: a secret of this run, in its folder."""
    masks: tuple[MaskConfig, ...] = ()
    """Patterns of text that is replaced in all records of runs and feedback. Agents get the original text. A call with
    such text is recorded without its tokens and is not trained. All gateways of a project need the same patterns."""
    max_reward: Positive = 1000.0
    """Largest absolute value of a reward, of a named reward and of the sum of named rewards in a completion. Beyond
    it the completion gets a 400."""
    further_fields: tuple[str, ...] = ()
    """Fields of model calls that the gateway passes to the inference server besides sampling parameters, such as
    `priority` or `prompt_logprobs`. Fields that an agent could misuse (`chat_template`, `kv_transfer_params`,
    `mm_processor_kwargs`) are refused by default."""
    max_calls: Natural = 0
    """Model calls at once in this replica. Beyond it calls get a 429, unless the API key has less than its share: the
    limit divided by the number of keys with calls. 0: no limit."""
    max_groups_ahead: Literal["auto"] | Natural = "auto"
    """Groups that may be open or not trained yet, over all gateways. Beyond it opening a new group gets a 429, unless
    the API key has less than its share: the limit divided by the number of keys that have such groups. 0: no limit.
    This bounds staleness before agents run; otherwise the trainer discards stale groups after they ran. `auto`:
    `trainer.groups_per_step` x (`trainer.max_staleness` + 1) in the settings that `journeywork up` with a trainer and
    `journeywork prepare` write, unless `trainer.max_steps` ends the training; elsewhere no limit. All gateways of a
    project need the same value."""
    groups_ahead_s: Positive = 3600.0
    """Time after which a group no longer counts towards `max_groups_ahead`, because its agents have probably died. Make
    it longer than a group takes from its first run to its training."""
    http: HttpConfig = HttpConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    detection: DetectionConfig = DetectionConfig()
