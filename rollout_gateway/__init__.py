"""The HTTP front: answers OpenAI's and Anthropic's clients, records exact tokens, serves the newest policy version.

The way of a call: `http` reads the request's head, and `app` checks origin and key by it before the body is kept.
`model_calls` reads the body into a `Call` by `dialects`, and has the trajectory found by `capture.identity`.
`capture.dispatch` takes a lease on a replica that serves the version (`serving.routing`, `serving.replicas`) and asks
it. `capture.handler` has the answer recorded by the `Trajectory` and acknowledged by the log, and only then answers the
client. If the client leaves, the request's one `Cancellation` ends the wait for the server, never a record.

| room | what lives there; each imports only those above it |
| --- | --- |
| `http` | HTTP/1.1 server and client, errors, cancellation |
| `dialects` | the APIs: what is asked of vLLM, what is removed from its reply, translations, streams |
| `access` | API keys and trajectory tokens |
| `serving` | policy versions, the inference servers that take calls, and the choice among them |
| `sampler` | a process of its own beside inference servers: loads adapters into them and registers them |
| `capture` | calls and trajectories, recorded on the log |
| `outside` | models of providers: their calls, passed on and recorded |
| `api` | routes, bodies, answers and their document |
| `model_calls` | from a model call to its answer |
| `app` | from a request to its answer |
| `service` | connects the parts and serves |
| `vllm_plugin` | not of the gateway: runs inside vLLM on CPU, and serves adapters faster |
"""
