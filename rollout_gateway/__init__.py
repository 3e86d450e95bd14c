"""The HTTP front: any OpenAI client in, exact tokens on the log, the newest policy version out.

| module | what lives there |
| --- | --- |
| `service` | wires the parts and serves |
| `server` | HTTP/1.1: connections, whole requests, streamed answers |
| `app` | from a request to its answer: routes, identity, errors |
| `chat`, `exchange` | one model call: routed, sampled, recorded, answered; its parties |
| `identity`, `keys`, `inference`, `pacing` | whose call it is, whether it may, and when it must wait |
| `wire`, `dialects` | calls and answers; what is added to a request and taken off a reply |
| `streaming` | a streamed reply, cleaned as it passes and put together again |
| `translate`, `messages_api`, `responses_api` | Anthropic's messages and OpenAI's responses, as chat and back |
| `routes`, `openapi` | the control API's table; `/openapi.json` |
| `control`, `promotion`, `watchers`, `metrics` | what these routes do |
| `trajectories` | open runs, rebuilt from the log; keys; sequence numbers |
| `policies` | versions and promotions, from the POLICY stream |
| `tail` | a stream followed through restarts of the log's server |
| `routing` | what a name in `model` stands for now |
| `replicas` | inference servers, leases on versions |
| `adapters` | from a checkpoint to an adapter that provably serves |
| `upstream` | the pooled HTTP client |
| `errors` | OpenAI's error format |
"""
