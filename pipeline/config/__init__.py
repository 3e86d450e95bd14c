"""Settings: one TOML file, dotted flags over it, one validated frozen tree, saved with every run.

`load(path, ["trainer.learning_rate=1e-3"])` gives a `Config`. Unknown keys and wrong types are errors that name the
key. Each service reads its own section; `docs/configuration.md` is generated from the docstrings below.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli_w
from msgspec import Meta

from pipeline.config.checks import PROCESSES as PROCESSES
from pipeline.config.checks import check
from pipeline.config.overrides import convert, set_override
from pipeline.errors import ConfigError as ConfigError

Port = Annotated[int, Meta(ge=0, le=65535)]
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Several = Annotated[int, Meta(ge=2)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Correlation = Annotated[float, Meta(ge=-1, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Payload = Annotated[int, Meta(ge=1024, le=64 * 1024 * 1024)]
Copies = Annotated[int, Meta(ge=1, le=5)]
Prompt = Annotated[int, Meta(ge=1000)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class NatsConfig(Section, frozen=True, kw_only=True):
    """The log."""

    url: str | tuple[str, ...] = ""
    """Address of a NATS server with JetStream, or those of a cluster's servers: a list, or one text with commas. Empty:
    `journeyman up` starts one from its wheel."""
    port: Port = 0
    """Port of the server that `journeyman up` starts; 0: any free one."""
    sync: Literal["always"] | Positive = "always"
    """`always`: the server that `journeyman up` starts writes each message through to the disk before it acknowledges it,
    so what was acknowledged survives a power cut. A number: seconds between two such writes; a power cut then loses what
    was acknowledged since the last one, and the services go on with what is left (docs/operations.md)."""
    max_bytes: Natural = 0
    """Bytes that streams and buckets may take on disk together; docs/streams.md says how they share them. 0: half of the
    disk's free space at the start for the server that `journeyman up` starts, no limit for a server elsewhere."""
    max_payload: Payload = 1_048_576
    """Bytes; larger events travel through the object store."""
    replicas: Copies = 1
    """Copies of each stream and bucket in a NATS cluster, 3 as a rule. Those that exist are changed at the next start."""
    users: str = ""
    """Folder with the nkey seed of each NATS user: `gateway.nk`, `judge.nk` and so on (docs/streams.md has the users). Each
    process connects with its own. `journeyman up` makes them for the server that it starts."""
    nkey_seed: str = ""
    """File with the nkey seed that every process connects with. One of `users`, `nkey_seed` and `credentials` at most."""
    credentials: str = ""
    """Credentials file (JWT and seed, as `nsc` writes it) that every process connects with."""
    inbox_prefix: str = ""
    """What the subjects of replies begin with. Empty: `_INBOX_<user>` with `users`, else `_INBOX`."""
    tls_ca: str = ""
    """File with the CA certificates that sign the server's. Set, or with a `tls://` address, nothing is sent without TLS.
    Empty: the system's."""
    tls_cert: str = ""
    """File with the certificate that this side shows to the server."""
    tls_key: str = ""
    """File with the private key of `tls_cert`; empty: it is in the same file."""
    server_cert: str = ""
    """File with the certificate of the server that is started here (`journeyman up`, `journeyman exec nats`); for `up` it
    must name 127.0.0.1. Set, the server takes TLS connections only; where `tls_ca` and `tls_cert` are set too, clients must show
    a certificate of that CA. Empty: no TLS, for a server that only the loopback interface reaches."""
    server_key: str = ""
    """File with the private key of `server_cert`."""
    provision: bool = True
    """Whether services make streams, consumers and buckets when they connect. Set it to false where they lack the right, and
    run `journeyman provision` as a user who has it. `journeyman up` does both for the server that it starts."""
    connect_timeout_s: Positive = 15.0
    """How long a service looks for a server at its start, and then waits for its streams."""
    ack_timeout_s: Positive = 5.0
    """How long one publish waits for its acknowledgement before it is repeated."""
    publish_deadline_s: Positive = 60.0
    """How long a publish or a read is repeated before it is an error."""

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of `url`, one by one."""
        texts = (self.url,) if isinstance(self.url, str) else self.url
        return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())

    @property
    def address(self) -> str:
        """The addresses of `url` as one text with commas, which is a valid `url` too."""
        return ",".join(self.servers)


class RetentionConfig(Section, frozen=True, kw_only=True):
    """What stays of trained versions. The trainer of a branch removes what is its own; nothing that serves is removed."""

    adapters: Natural = 20
    """Newest adapters of each model and branch that stay in the object store; 0: all. The best by validation, what a name
    stands for, its predecessor (a rollback's target), what a split names, what an open trajectory is pinned to and what an
    inference server holds stay too."""
    grace_s: NotNegative = 600.0
    """From `policy.retired` to the removal of the adapter, if nothing came to need it meanwhile."""
    every_s: Positive = 60.0
    """Between two looks at what may go."""
    policy_days: NotNegative = 90.0
    """Age at which events of POLICY go, except checkpoints whose adapter is there and each model's last decision; 0: never."""


class SupervisorConfig(Section, frozen=True, kw_only=True):
    """How `journeyman up` watches what it started."""

    deadline_s: Positive = 30.0
    """A process that is ready and then gives no sign of life for so long is killed and started again. A sign of life is a
    heartbeat of a service's event loop, vLLM's health page, and a write that each stream of the log acknowledges."""
    probe_every_s: Positive = 10.0
    """Between two probes of the log, and of vLLM."""


class VllmConfig(Section, frozen=True, kw_only=True):
    """The inference servers."""

    urls: tuple[str, ...] = ()
    """Servers that already run. Empty: `journeyman up` starts one."""
    api_key_file: str = ""
    """File with the API key that the gateway sends to the servers. `journeyman up` makes one for the server that it
    starts."""
    port: Port = 0
    """Port of the server that `journeyman up` starts; 0: any free one."""
    args: tuple[str, ...] = ()
    """Further arguments of that server, in JSON's form on the command line: `--set 'vllm.args=["--dtype", "bfloat16"]'`."""
    tool_parser: str = "auto"
    """How that server reads tool calls, by the name that vLLM's `--tool-call-parser` takes: agents may then leave the choice
    of a tool to the model. `auto`: by the model's family, none for an unknown one; empty: none."""
    reasoning_parser: str = ""
    """How that server reads thoughts, by the name that vLLM's `--reasoning-parser` takes (`qwen3`, `deepseek_r1`); empty:
    they are part of the reply's text."""
    env: dict[str, str] = {}
    """Further environment of that server."""
    max_loras: Count = 4
    """Adapters held at once: at least the staleness bound plus two."""
    max_lora_rank: Count = 8
    max_model_len: Natural = 0
    """0: the model's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    start_timeout_s: Positive = 600.0
    """An inference server that does not answer by then is killed and started again."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """One trainable policy."""

    name: str = "policy"
    """Serving name: what agents put into `model`."""
    base: str = ""
    """Folder or hub name of the base model."""
    trainer: dict[str, Any] = {}
    """Settings of `[trainer]` that differ for this model."""


class KeyConfig(Section, frozen=True, kw_only=True):
    """An API key; `journeyman keys` makes one."""

    sha256: str
    """Of the key, in hexadecimal; the key itself is in no file."""
    name: str = ""
    """What the key opens belongs to this name, and keys of one name share what they own and their rate. Empty: a part of
    the hash."""
    role: Literal["agent", "operator"] = "agent"
    """`agent`: model calls and its own trajectories; `operator`: every trajectory, decisions about versions, and metrics."""
    calls_per_minute: Natural = 0
    """Calls with the key and with the keys of the trajectories it opened; 0: no limit. Each gateway replica counts for
    itself."""
    models: tuple[str, ...] = ()
    """Models it may call and open trajectories for. Empty: all."""
    projects: tuple[str, ...] = ()
    """Projects whose gateways know it. Empty: all."""
    calls_only: bool = False
    """It makes model calls and nothing else: it can't open, read, list or complete trajectories by the control API."""
    expires: str = ""
    """Date and time in ISO 8601, UTC where it names no zone. Empty: never."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    """The HTTP front."""

    host: str = "127.0.0.1"
    port: Port = 0
    """0: any free one."""
    capture: Literal["acked", "async", "off"] = "acked"
    """`acked`: an exchange is answered once the log holds it. `async` answers first: a completion waits until the run's exchanges
    are recorded, a crash may lose them, and a run with an exchange that the log did not take ends as `no_result`. `off` records
    no exchanges; runs, pinned versions and splits work as with the others."""
    request_timeout_s: Positive = 300.0
    upstream_wait_s: NotNegative = 180.0
    """How long a request waits for an inference server to come (back) up."""
    deadly_request_s: NotNegative = 600.0
    """How long a request that was in flight at two deaths of its inference server is refused (502) when it comes again."""
    drain_s: NotNegative = 10.0
    """How long running calls may go on when the gateway stops. Calls that come meanwhile get a 503 `stopping`; what is not
    done by then is cut off with an error, and recorded as `failed`."""
    max_body_bytes: Count = 64 * 1024 * 1024
    """The longest body of a model call; a longer one is a 413 and is not read."""
    max_control_body_bytes: Count = 1024 * 1024
    """The same for calls of the control API."""
    max_buffered_bytes: Count = 512 * 1024 * 1024
    """Bytes of request bodies that have not come whole yet, over all connections; at least `max_body_bytes`. Beyond it the
    requests that began last are a 503 and told to come again."""
    max_connections: Count = 10_000
    """Connections of clients at once. Beyond it the one that has been idle longest is closed, then the oldest whose request
    is not whole; where all are being answered, a new one is a 503. Never more than the process may have open files for."""
    head_timeout_s: Positive = 30.0
    """How long a request's headers may take, and a new connection to begin its first request."""
    body_timeout_s: Positive = 60.0
    """How long a request's body may take; every 64 KiB of it that have come add a second."""
    idle_timeout_s: Positive = 600.0
    """How long a connection may stay open between two requests. Clients keep connections too, and one that is closed as a
    request goes out on it fails that request: make this longer than clients keep theirs."""
    write_timeout_s: Positive = 300.0
    """A client that takes no byte of what waits for it for so long is cut off."""
    hosts: tuple[str, ...] = ()
    """Further names that clients may put into `Host`, without a port, as behind a reverse proxy; `*`: any. On the loopback
    interface the gateway answers to `localhost`, the loopback addresses and these, so that a web page whose name was made
    to point here reaches nothing. On other interfaces, where keys are required, it answers to any name until some are set."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call, such as `https://app.example.com`; `*`: any. Requests of other pages are refused."""
    public_url: str = ""
    """What `base_url` in the answer to an opening begins with, such as `https://gateway.example.com`. Empty: the scheme and
    host of the request, or what a trusted proxy says of them."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Addresses whose `Forwarded` and `X-Forwarded-Proto` and `-Host` headers are believed."""
    health_interval_s: Positive = 1.0
    """Between two health checks of an inference server that works."""
    health_retry_s: Positive = 0.25
    """Between two tries to reach one that does not."""
    probe: Literal["require", "warn"] = "require"
    """An adapter whose logprobs equal the base model's is not served, or served with a warning."""
    key_secret_env: str = ""
    """Name of the environment variable with the secret that trajectory keys are made from; gateway replicas share it.
    Empty: a secret of this run, kept in its folder."""
    keys: tuple[KeyConfig, ...] = ()
    """Who may call. With none here nor in `keys_file` everyone may, which is allowed on the loopback interface only."""
    keys_file: str = "keys.toml"
    """File with further keys, under the run directory, read again within a second or two of a change; `journeyman keys`
    adds to it and revokes. Once it has been there, keys are needed, even when it is deleted."""
    max_reward: Positive = 1000.0
    """The largest absolute value of a reward, of a named reward and of the sum of named rewards that a completion may report;
    beyond it is a 400."""
    infer: bool = False
    """Calls that name no trajectory are made into trajectories by the continuity of their messages."""
    infer_idle_s: Positive = 60.0
    """An inferred trajectory without a call for so long is complete."""
    infer_outcome: Literal["scored", "masked", "no_result"] = "scored"
    """What a run that went silent counts as; `scored` leaves its reward to the judge."""
    max_calls: Natural = 0
    """Model calls that may be under way at once in this replica before further ones are told to wait (429); 0: no limit."""
    max_groups_ahead: Natural = 0
    """Groups that may be open or untrained before new ones are told to wait (429); 0: no limit. Bounds staleness at the
    start of a run, where the trainer would otherwise discard at its end."""


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
    workers: Natural = 0
    """Processes that call the judge model. Each makes up to about 150 calls a second, for which litellm takes a core; 0:
    the judge's own process calls."""
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


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Groups to checkpoints."""

    engine: Literal["transformers", "unsloth"] = "transformers"
    """`unsloth` needs a CUDA GPU. It is imported before the libraries that it patches."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the base model's weights; `auto`: float32 on CPU, bfloat16 on CUDA. `float64` is for comparing results."""
    load_in_4bit: bool = False
    """With engine `unsloth`: hold the base model in four bits."""
    max_seq_length: Count = 8192
    """With engine `unsloth`: the longest sequence it prepares for."""
    groups_per_step: Count = 8
    learning_rate: NotNegative = 1e-5
    """Of AdamW on the adapter; for models of about 0.5 to 10 billion parameters. TRL's guide to LoRA has 1e-5 where full training
    has 1e-6. Much smaller models want more (the demo's 0.8 million parameters: 2e-3)."""
    max_steps: Natural = 0
    """0: for as long as groups come."""
    lora_rank: Count = 8
    lora_alpha: Positive = 16.0
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the ends of their names (`q_proj`). Empty: all but heads, routers and experts."""
    loss_type: str = "dapo"
    beta: NotNegative = 0.0
    """Weight of the KL to the base model."""
    max_staleness: Natural = 2
    """Tokens sampled more than this many steps ago are not trained; a group with none younger is discarded."""
    sampler_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "token_truncate"
    """What is done about replies sampled by an older version: importance ratios against the recorded logprobs, cut off
    at `correction_max` or (mask) dropped beyond it; `none` clips against the recorded logprobs as PPO does."""
    correction_max: Positive = 3.0
    correction_min: NotNegative | None = None
    """Smallest ratio: raised to it, or (mask) dropped below it."""
    epsilon: NotNegative = 0.2
    """Clip range of the probability ratio. It acts with `sampler_correction` = `none` only, as do `epsilon_high` and `delta`: under
    the other corrections the ratio that is clipped is that of the trainer to itself, always 1, and `clip_ratio` is always 0."""
    epsilon_high: NotNegative | None = None
    """Upper clip range where it differs from `epsilon`. With `loss_type` = `cispo` it is the bound of the ratio itself, 5 where it
    is left out."""
    delta: Positive | None = None
    """Two-sided clipping: bound of the ratio where the advantage is negative; above `1 + epsilon_high`."""
    off_policy_mask: NotNegative | None = None
    """Sequences with a negative advantage whose mean log ratio of sampler to trainer exceeds this are left out."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus: the batch's mean entropy per trained token, in nats."""
    kl_unbiased: bool = True
    """Multiply the KL term by the probability ratio, which makes its gradient that of the reverse KL."""
    loss_options: dict[str, float] = {}
    """Constants of single loss types by TRL's names: `sapo_temperature_pos`, `sapo_temperature_neg`, `vespo_k_pos`,
    `vespo_lambda_pos`, `vespo_k_neg`, `vespo_lambda_neg`."""
    importance_level: Literal["token", "sequence"] = "token"
    advantage_scaling: Literal["group", "batch", "none"] = "group"
    """By which standard deviation an advantage is divided."""
    weighting: Literal["loss", "trajectory"] = "loss"
    """`loss`: as the loss type says; `trajectory`: every trajectory counts the same however long it is."""
    mask_truncated: bool = False
    """Do not train replies that hit the token limit."""
    max_completion_length: Count = 512
    """The constant that loss type `dr_grpo` divides by."""
    max_grad_norm: NotNegative = 1.0
    weight_decay: NotNegative = 0.0
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    lr_schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "constant"
    """`linear` and `cosine` fall to 0 at `max_steps`. `inverse_sqrt` needs no end: after `warmup_steps` (10,000 where that is 0) it
    falls with the root of the steps taken. Changed settings of the optimizer hold from the next start on."""
    warmup_steps: Natural = 0
    threads: Count = 1
    """CPU threads of the trainer's computation; the rest is the inference server's."""
    start_timeout_s: Positive = 600.0
    """A trainer that has not loaded its models by then is killed and started again."""
    tokens_per_batch: Count = 16_384
    """Token budget of one forward and backward pass; a step takes as many passes as it needs. On CUDA the trainer takes fewer where
    the memory formula says that so many do not fit (`journeyman check-model`)."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Keep only each layer's input for the backward pass and compute the rest again: about a third more computation, a small part of
    the memory. `auto`: on with CUDA where the model can, off on CPU."""
    gpu_memory_share: Share = 0.0
    """Share of the GPU's memory that passes are planned for. 0: what is free; `journeyman up` sets 0.45 where its inference server is
    on the same GPU."""
    packing: Literal["auto", "prefix", "padded"] = "auto"
    """`prefix`: sequences of a group share the computation of what they have in common; `auto`: where it pays."""
    attention: Literal["sdpa", "flex"] = "sdpa"
    """How shared prefixes are computed: `sdpa` with a dense mask, or PyTorch's FlexAttention, whose mask takes no memory that
    grows with the square of a tree. FlexAttention has no gradients on CPU, so it needs CUDA."""
    processes: Count = 1
    """Processes (GPUs) that share the passes of a step; `journeyman up` starts them with `accelerate launch`."""
    peak_tflops: NotNegative = 0.0
    """The device's peak at the weights' type, to report model FLOPs utilisation; 0: unknown."""
    logprob_bound: NotNegative | None = None
    """Largest difference, in nats, that is put down to rounding when logprobs of the trainer are compared: at start, of a
    training pass with the model's own forward pass (the largest of any token; in bfloat16 the mean, since rounding may send a
    token to another expert), and in every step with those that the sampler recorded (the mean). Empty: 1e-3 where the model
    is float32, 0.08 in bfloat16. Above it the model is refused at start, and a step is not taken."""
    check_sequences: Natural = 8
    """Sequences per step whose recorded logprobs are compared with recomputed ones at the version that sampled."""
    keep_checkpoints: Count = 3
    """Newest checkpoint folders that stay on disk (the log's object store keeps every adapter)."""
    best_min_trajectories: Natural = 8
    """Validation trajectories that a step needs to become the best one. It takes the place of another where the 95 % interval of
    the difference of their mean rewards lies above 0."""
    seed: Natural = 0
    branch: str = "main"
    """Line of history to train from; another one than `main` is made by `journeyman replay` or `rejudge`, begins at the
    base model and has checkpoints of its own, which the gateway does not serve."""
    checkpoints: str = "checkpoints"
    """Folder under the run directory."""


class StoreConfig(Section, frozen=True, kw_only=True):
    """Events to Parquet."""

    dir: str = "store"
    """Folder under the run directory, or object storage as `s3://<bucket>/<prefix>` (the bucket has to be there)."""
    s3_endpoint: str = ""
    """URL of an S3-compatible server; empty: AWS. Credentials come from the AWS_* variables, never from here."""
    s3_region: str = ""
    """Empty: what AWS_REGION, AWS_DEFAULT_REGION or the credentials' file says."""
    flush_rows: Count = 20_000
    flush_bytes: Count = 64 * 1024 * 1024
    flush_s: Positive = 2.0
    """A file is written after so many events, bytes of events or seconds, whichever comes first; what is in memory at once
    is at most twice that."""
    compact_s: Positive = 30.0
    """Between two looks for small files to merge."""
    compact_files: Several = 16
    """So many small neighbours are worth merging."""
    compact_bytes: Count = 128 * 1024 * 1024
    """Files are merged up to about this size."""
    compact_grace_s: NotNegative = 300.0
    """How long replaced files stay for readers that listed them before; longer than any query takes."""
    keep_days: NotNegative = 0.0
    """Files whose newest event is older are let go; 0: everything is kept."""


class TelemetryConfig(Section, frozen=True, kw_only=True):
    """Traces. Where they go is said by the standard OTEL_EXPORTER_OTLP_* or by LANGFUSE_* variables."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto`: on where such a variable is set."""
    content: bool = True
    """Whether prompts and replies are part of the spans."""


class SigningConfig(Section, frozen=True, kw_only=True):
    """Signatures of checkpoints: with them, who can write to the log still can't have an adapter loaded."""

    seed: str = ""
    """File with the nkey seed that the trainer signs with. `journeyman up` makes one in the run directory."""
    keys: tuple[str, ...] = ()
    """Public nkeys whose checkpoints may be served. `journeyman up` adds that of `seed`."""
    check: Literal["auto", "require", "off"] = "auto"
    """`auto`: signatures are checked where `keys` is not empty; `require`: the gateway does not start without `keys`; `off`:
    every checkpoint on the log may be served."""


class Config(Section, frozen=True, kw_only=True):
    """Everything."""

    project: str = "default"
    run_dir: str = "runs/default"
    log_level: str = "INFO"
    nats: NatsConfig = NatsConfig()
    vllm: VllmConfig = VllmConfig()
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    gateway: GatewayConfig = GatewayConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    retention: RetentionConfig = RetentionConfig()
    judge: JudgeConfig = JudgeConfig()
    trainer: TrainerConfig = TrainerConfig()
    store: StoreConfig = StoreConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    signing: SigningConfig = SigningConfig()
    environment: dict[str, tuple[str, ...]] = {}
    """Further environment variables that `journeyman up` passes on, by process (`nats`, `vllm`, `gateway`, `judge`, `trainer`,
    `store`, `telemetry`): names, or beginnings of names with a `*` at the end. docs/security.md says what each gets anyway."""

    def path(self, *parts: str) -> Path:
        """A path under the run directory; absolute parts stand for themselves."""
        return Path(self.run_dir).joinpath(*parts)

    def trainer_of(self, model: ModelConfig) -> TrainerConfig:
        """`[trainer]` with what the model's own table says otherwise."""
        try:
            return convert(msgspec.to_builtins(self.trainer) | model.trainer, TrainerConfig)
        except ConfigError as error:
            raise ConfigError(f"models: trainer of {model.name}: {error}") from error

    def model(self, name: str) -> ModelConfig:
        for model in self.models:
            if model.name == name:
                return model
        raise ConfigError(
            f"no model {name!r} is configured; there are: {', '.join(m.name for m in self.models)}"
        )


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Settings from a TOML file and `section.key=value` overrides (values by the type of the
    setting: as TOML or JSON, else as plain strings).

    Raises `ConfigError` naming the setting that can't be used."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text("utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"no settings file {path}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the settings file {path} can't be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        set_override(tree, Config, override)
    config = convert(tree, Config)
    check(config)
    return config


def nats_of_run(run_dir: Path) -> NatsConfig:
    """Return how to reach the log of a run that `journeyman up` started: its settings, at the address that it uses now.

    Raises `ConfigError` where nothing was started."""
    state, saved = run_dir / "state.json", run_dir / "config.toml"
    if not state.is_file():
        raise ConfigError(f"{run_dir} holds no state.json: nothing was started there")
    nats = load(saved).nats if saved.is_file() else NatsConfig()
    return msgspec.structs.replace(nats, url=msgspec.json.decode(state.read_bytes())["urls"]["nats"])


def _without_none(tree: Any) -> Any:
    """TOML has no null: a setting that is not set is left out."""
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(value) for value in tree] if isinstance(tree, list | tuple) else tree


def save(config: Config, path: Path) -> None:
    """Write the resolved settings as TOML, so that the run can be repeated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(tomli_w.dumps(_without_none(msgspec.to_builtins(config))), "utf-8")
    temporary.replace(path)


def config_hash(section: Section) -> str:
    """Short SHA-256 of a section's values: two runs with the same hash were told the same."""
    return hashlib.sha256(msgspec.json.encode(section, order="sorted")).hexdigest()[:16]
