"""`[nats]`: the log."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Copies, Natural, Payload, Port, Positive, Section


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
