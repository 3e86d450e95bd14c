"""The sections of the log, vLLM, the sampler agent, the store, budgets, the dashboard, retention, the supervisor,
telemetry and signing."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pipeline.config.types import Copies, Count, Natural, NotNegative, Payload, Port, Positive, Section, Several, Share


class NatsConfig(Section, frozen=True, kw_only=True):
    """The log."""

    url: str | tuple[str, ...] = ""
    """Address of a NATS server with JetStream. For a cluster, the addresses of its servers: a list, or one string
    with commas. Empty: `journeywork up` starts a server."""
    port: Port = 0
    """Port of the server that `journeywork up` starts. 0: any free one."""
    sync: Literal["always"] | Positive = "always"
    """When the server that `journeywork up` starts syncs messages to disk. `always`: before it acknowledges them, so
    acknowledged messages survive a power cut. A number: the interval in seconds; a power cut loses the messages that
    were acknowledged since the last sync, and the services continue without them (docs/operations.md)."""
    max_bytes: Natural = 0
    """Bytes that all streams and buckets may use on the disk; `journeywork docs` has the share of each. 0: half of the
    free space for the server that `journeywork up` starts, no limit for other servers."""
    max_memory: Natural = 0
    """Bytes of memory that the NATS server may use for the subjects of runs and groups, 560 bytes each. Above it the
    supervisor deletes the oldest events that the judge, the trainer and the store have read, so the log keeps them for
    less than `rollouts_max_age_h`. 0: an eighth of the machine's memory for the server that `journeywork up` starts, no
    limit for other servers."""
    rollouts_max_age_h: Positive = 48.0
    """Age in hours at which the log deletes the events of runs. History is kept in the store. A trajectory that was
    opened longer ago takes no calls, can't be completed and is not trained, and its id is not reused. An alarm is
    raised when the store has not written an event after half of this time."""
    exchange_memory_bytes: Natural = 268_435_456
    """Largest memory, in bytes, that a process uses for recent exchanges of runs. The gateway records an exchange as
    its difference from a remembered one of the trajectory; readers reassemble it. 0: the gateway records whole
    exchanges."""
    max_payload: Payload = 1_048_576
    """Largest message in bytes. Larger events go through the object store."""
    replicas: Copies = 1
    """Copies of each stream and bucket in a NATS cluster; usually 3. Existing streams are changed at the next start."""
    users: str = ""
    """Folder with the nkey seed of each NATS user: `gateway.nk`, `judge.nk` and so on (`journeywork docs` lists the
    users). Each process connects with its own. `journeywork up` makes them for the server that it starts."""
    nkey_seed: str = ""
    """File with the nkey seed that every process connects with, if `users` is not set."""
    tls_ca: str = ""
    """File with the CA certificates that the server's certificate is checked against. Empty: the system's. If it is
    set, or the address begins with `tls://`, nothing is sent without TLS."""
    provision: bool = True
    """Whether services create streams, consumers and buckets when they connect. Set it to false if their users lack
    the right, and run `journeywork provision` as a user that has it. `journeywork up` does both for the server
    that it starts."""
    connect_timeout_s: Positive = 15.0
    """How long a service tries to connect at its start, and then waits for its streams."""
    ack_timeout_s: Positive = 5.0
    """How long a publish waits for its acknowledgement before it is repeated."""
    publish_deadline_s: Positive = 60.0
    """How long a publish or a read is repeated before it fails."""

    @property
    def rollouts_max_age_s(self) -> float:
        """`rollouts_max_age_h` in seconds."""
        return self.rollouts_max_age_h * 3600

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of `url`, one by one."""
        texts = (self.url,) if isinstance(self.url, str) else self.url
        return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())

    @property
    def address(self) -> str:
        """The addresses of `url` as one text with commas, which is a valid `url` too."""
        return ",".join(self.servers)


class VllmConfig(Section, frozen=True, kw_only=True):
    """The inference servers."""

    urls: tuple[str, ...] = ()
    """URLs of inference servers that already run. Empty: `journeywork up` starts one."""
    api_key_file: str = ""
    """File with the API key that the gateway sends to the servers. `journeywork up` makes one for the server that it
    starts."""
    port: Port = 0
    """Port of the server that `journeywork up` starts. 0: any free one."""
    args: tuple[str, ...] = ()
    """Further arguments of that server. As a flag, write a JSON list: `--set 'vllm.args=["--dtype", "bfloat16"]'`."""
    tool_parser: str = "auto"
    """Value of vLLM's `--tool-call-parser`. With a parser, agents may let the model choose tools (`tool_choice =
    "auto"`). `auto`: the parser of the model's family, none for an unknown family. Empty: none."""
    reasoning_parser: str = ""
    """Value of vLLM's `--reasoning-parser`, such as `qwen3` or `deepseek_r1`. Empty: reasoning stays in the reply's
    text."""
    env: dict[str, str] = {}
    """Further environment variables of that server."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that images, audio and video of a call may be fetched from. Empty: none; media come as data: URLs. The
    gateway checks it, and a server that `journeywork up` starts gets it as `--allowed-media-domains`."""
    max_loras: Natural = 0
    """Adapters that a server holds at once; at least `trainer.max_staleness` + 2, and more than there are models.
    0: as many as that needs, 4 or more."""
    max_lora_rank: Count = 8
    """Largest rank of an adapter, one that vLLM takes: 1, 8, 16, 32, 64, 128, 256, 320 or 512."""
    max_model_len: Natural = 0
    """Longest prompt and reply together, in tokens. 0: the model's own limit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Which build of vLLM `journeywork up` expects. `auto`: the one that is installed."""
    start_timeout_s: Positive = 600.0
    """A server that is not ready after this time is killed and restarted."""
    sleep: bool = False
    """The server sleeps while the trainer computes a step: its weights move to the machine's memory, and calls wait.
    Between steps the trainer's base model is in the machine's memory. So both can use 0.85 of one GPU's memory.
    Needs one trainer process. Steps have to be shorter than `gateway.replicas.timeout_s`."""

    @property
    def flags(self) -> dict[str, str]:
        """The flags among `args` with their values; empty for a flag without one. vLLM takes `_` for `-` in names. In
        `--flag.key`, which sets one key of a flag's JSON, it does so up to the dot."""
        flags = {}
        for argument, following in zip(self.args, (*self.args[1:], "-"), strict=False):
            if argument.startswith("-"):
                name, equals, value = argument.partition("=")
                value = value if equals or following.startswith("-") else following
                head, dot, key = name.partition(".")
                flags[head.replace("_", "-") + dot + key] = value
        return flags


class SamplerConfig(Section, frozen=True, kw_only=True):
    """The sampler agent, which loads adapters into the inference servers of `vllm.urls` and registers them on the log.
    One agent runs on each machine with inference servers. Agent and servers share the folder of the adapters."""

    advertise: tuple[str, ...] = ()
    """URLs under which gateways reach the servers of `vllm.urls`, in the same order. Empty: `vllm.urls` itself."""
    adapters: str = "adapters"
    """Folder under the run directory that adapters are unpacked into. The inference servers read them there. Adapters
    that no server of this agent has loaded are deleted: two agents can't share the folder."""
    ttl_s: Annotated[float, Meta(ge=1)] = 10.0
    """How long the record of an agent or a gateway lasts after its last renewal. Gateways send no calls to the servers
    of an expired agent, and agents do not wait for the calls of an expired gateway."""


class StoreConfig(Section, frozen=True, kw_only=True):
    """The store, which writes events to the lake."""

    dir: str = "store"
    """Folder under the run directory, or object storage as `s3://<bucket>/<prefix>` (the bucket must exist)."""
    s3_endpoint: str = ""
    """URL of an S3-compatible server. Empty: AWS. Credentials come from the AWS_* environment variables only."""
    s3_region: str = ""
    """Region of the bucket. Empty: from AWS_REGION, AWS_DEFAULT_REGION or the AWS configuration file."""
    flush_rows: Count = 20_000
    """A commit is made when this many events wait, or `flush_bytes` or `flush_s` is reached."""
    flush_bytes: Count = 64 * 1024 * 1024
    """Largest number of bytes of events that wait to be committed. At most twice as many are in memory."""
    flush_s: Positive = 2.0
    """Longest time that an event waits to be written."""
    compact_s: Positive = 30.0
    """Time between two checks for small files to merge."""
    compact_files: Several = 16
    """Small files are merged when there are this many of them."""
    compact_bytes: Count = 128 * 1024 * 1024
    """Approximate size up to which files are merged, in bytes."""
    compact_grace_s: NotNegative = 300.0
    """How long merged files stay for queries that began before the merge. Make it longer than any query."""
    checkpoints: Literal["all", "adapters", "none"] = "all"
    """What the lake keeps of each version, so that it can be forked (`models.0.start`). `all`: its adapter with the
    training state (optimizer and unrounded weights, about 12 bytes for each weight of the adapter). `adapters`: its
    adapter. `none`: nothing."""
    keep_days: NotNegative = 0.0
    """Age in days of its newest event at which a file is deleted. 0: never."""
    gpu_usd_h: NotNegative = 0.0
    """Price of an hour in which an inference server answers calls, in USD: what the GPU or the machine costs. The views
    `costs` and `takeovers` add it to what providers charged. 0: answers of policies cost nothing there."""


class BudgetConfig(Section, frozen=True, kw_only=True):
    """What learning may cost: all models of the project together, since its first event. The store adds up the costs
    from the history (view `spending`) every `alarms.every_s`. At a limit it raises an alarm, and the judge discards
    groups as `over_budget`; calls are answered as before. To continue learning, set a higher limit for all services."""

    judge_usd: NotNegative = 0.0
    """Cost of judging, in USD. 0: no limit."""
    gpu_hours: NotNegative = 0.0
    """Hours of the trainer's steps, times `trainer.processes`, and hours in which inference servers answered calls.
    0: no limit."""
    sampled_tokens: Natural = 0
    """Tokens that were sampled in runs that ended. 0: no limit."""
    keep_share: Share = 0.0
    """Share of the groups that are judged and trained all the same when a limit is reached, chosen by a hash of their
    names. 0: learning stops. 0.1: it goes on ten times as slowly."""


class UiConfig(Section, frozen=True, kw_only=True):
    """The dashboard (docs/dashboard.md)."""

    enabled: bool = True
    """Whether `journeywork up` starts it."""
    host: str = "127.0.0.1"
    """Address that it listens on. For an address that other machines can reach, `gateway.keys` must have an operator's
    key."""
    port: Port = 8701
    """Port that it listens on; `journeywork up` and `journeywork status` print it. If another process uses 8701, a free
    port is taken. 0: any free one."""
    hosts: tuple[str, ...] = ()
    """Further names that browsers may send in `Host`, without a port, for example behind a reverse proxy. On the
    loopback interface it answers to `localhost`, the loopback addresses and these names only."""
    gateway_url: str = ""
    """URL of the gateway that decisions and labels are sent to. Empty: the gateway that `journeywork up` started."""


class RetentionConfig(Section, frozen=True, kw_only=True):
    """How long trained versions are kept. The trainer of a branch removes its own versions, and none that is in use."""

    adapters: Natural = 20
    """Newest adapters of each model and branch that stay in the object store. 0: all. These stay too: the best
    version by validation, the versions of the last decision and of the one before it (the target of a
    rollback), and versions that an open trajectory is pinned to, an evaluation names, or an inference server holds."""
    grace_s: NotNegative = 600.0
    """Time from `policy.retired` to the removal of the adapter. If something needs the version meanwhile, it stays."""
    every_s: Positive = 60.0
    """Time between two checks for versions to remove."""
    policy_days: NotNegative = 90.0
    """Age in days at which events of POLICY are deleted, except checkpoints with an adapter and decisions. 0: never."""


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """How `journeywork up` checks its processes."""

    deadline_s: Positive = 30.0
    """A process that was ready and then does not respond for this long is killed and restarted. Services respond with
    heartbeats of their event loop, vLLM with its health page, the log by acknowledging a write to each stream."""
    probe_every_s: Positive = 10.0
    """Time between two checks of the log, and of vLLM."""


class TelemetryConfig(Section, frozen=True, kw_only=True):
    """Traces and scores. The environment variables OTEL_EXPORTER_OTLP_* or LANGFUSE_* name their
    destination."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto`: on if such a variable is set."""
    content: Literal["all", "none"] = "all"
    """Whether prompts, replies, explanations and metadata are sent."""


class SigningConfig(Section, frozen=True, kw_only=True):
    """Signatures of checkpoints. With them, a client that can only write to the log can't get an adapter loaded."""

    seed: str = ""
    """File with the nkey seed that the trainer signs with. `journeywork up` creates one in the run directory."""
    keys: tuple[str, ...] = ()
    """Public nkeys whose checkpoints may be served. `journeywork up` adds the key of `seed`."""
    check: Literal["auto", "require", "off"] = "auto"
    """`auto`: signatures are checked if `keys` is not empty. `require`: the gateway does not start without `keys`.
    `off`: every checkpoint on the log may be served."""
