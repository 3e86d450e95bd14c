"""`[gateway]` and `[[gateway.keys]]`: the HTTP front."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Count, Natural, NotNegative, Port, Positive, Section


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
