"""`[nats]`: the log."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Copies, Natural, Payload, Port, Positive, Section


class NatsConfig(Section, frozen=True, kw_only=True):
    """The log."""

    url: str | tuple[str, ...] = ""
    """Address of a NATS server with JetStream. For a cluster, the addresses of its servers: a list, or one string
    with commas. Empty: `journeyman up` starts a server."""
    port: Port = 0
    """Port of the server that `journeyman up` starts. 0: any free one."""
    sync: Literal["always"] | Positive = "always"
    """When the server that `journeyman up` starts syncs messages to the disk. `always`: before it acknowledges them, so
    acknowledged messages survive a power cut. A number: every so many seconds; a power cut loses the messages that were
    acknowledged since the last sync, and the services continue with what is left (docs/operations.md)."""
    max_bytes: Natural = 0
    """Bytes that all streams and buckets may use on the disk; docs/streams.md has the share of each. 0: half of the
    free space for the server that `journeyman up` starts, no limit for other servers."""
    max_payload: Payload = 1_048_576
    """Largest message in bytes. Larger events go through the object store."""
    replicas: Copies = 1
    """Copies of each stream and bucket in a NATS cluster; usually 3. Existing streams are changed at the next start."""
    users: str = ""
    """Folder with the nkey seed of each NATS user: `gateway.nk`, `judge.nk` and so on (docs/streams.md lists the
    users). Each process connects with its own. `journeyman up` makes them for the server that it starts."""
    nkey_seed: str = ""
    """File with the nkey seed that every process connects with. Set at most one of `users`, `nkey_seed` and
    `credentials`."""
    credentials: str = ""
    """Credentials file (JWT and seed, as `nsc` writes it) that every process connects with."""
    inbox_prefix: str = ""
    """Prefix of the subjects of replies. Empty: `_INBOX_<user>` with `users`, else `_INBOX`."""
    tls_ca: str = ""
    """File with the CA certificates that the server's certificate is checked against. Empty: the system's. If it is
    set, or the address begins with `tls://`, nothing is sent without TLS."""
    tls_cert: str = ""
    """File with the client certificate that services send to the server."""
    tls_key: str = ""
    """File with the private key of `tls_cert`. Empty: it is in the same file."""
    server_cert: str = ""
    """File with the certificate of the server that `journeyman up` or `journeyman exec nats` starts; for `up` it
    must name 127.0.0.1. If it is set, the server accepts TLS connections only; if `tls_ca` and `tls_cert` are
    set too, clients need a certificate of that CA. Empty: no TLS, for a server on the loopback interface."""
    server_key: str = ""
    """File with the private key of `server_cert`."""
    provision: bool = True
    """Whether services create streams, consumers and buckets when they connect. Set it to false if their users lack
    the right, and run `journeyman provision` as a user that has it. `journeyman up` does both for the server
    that it starts."""
    connect_timeout_s: Positive = 15.0
    """How long a service tries to connect at its start, and then waits for its streams."""
    ack_timeout_s: Positive = 5.0
    """How long a publish waits for its acknowledgement before it is repeated."""
    publish_deadline_s: Positive = 60.0
    """How long a publish or a read is repeated before it fails."""

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of `url`, one by one."""
        texts = (self.url,) if isinstance(self.url, str) else self.url
        return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())

    @property
    def address(self) -> str:
        """The addresses of `url` as one text with commas, which is a valid `url` too."""
        return ",".join(self.servers)
