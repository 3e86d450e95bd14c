"""Access to the log in NATS JetStream: publish, consume, read, follow.

| module | what lives there |
| --- | --- |
| `broker` | one connection: publish with deduplication, consume, dead letters |
| `history` | typed reads: the event class gives stream, subject and type |
| `exchanges` | exchanges as what follows earlier ones, and whole again |
| `follow` | follow events from a position on, through restarts of servers |
| `stream_reader` | undecoded messages without a consumer: one, a page, a subject; what a stream holds |
| `subjects` | event classes to streams and subjects |
| `messages` | what a read returns: message, event, place (sequence and stream time) |
| `objects` | the object store: adapters, events that exceed the payload limit |
| `key_value` | values with a time to live: the records of sampler agents and gateways |
| `consumer` | consumers: deliveries kept alive and acknowledged |
| `deaths` | how often a message ended the process that handled it |
| `pulling` | messages of consumers in bulk |
| `fast_client` | nats-py's client with a short way for publishes and bulk delivery |
| `provision` | create and update streams, consumers and buckets |
| `health` | whether the log takes writes, and how full it is |
| `memory` | bounds the memory of the NATS server by deleting the oldest events |
| `unwritten` | alarms about events that the store has not written |
| `credentials` | authentication and TLS of a connection |
| `retry` | which errors pass by themselves; calls repeated until then |

Imports go downwards only: `key_value` uses `follow`; `broker` and `follow` use `history` and `consumer`, these use
`objects` and `stream_reader`, and those use `messages`, `subjects`, `fast_client` and `retry`.
"""
