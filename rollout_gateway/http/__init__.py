"""HTTP/1.1 in both directions. Nothing here knows what the gateway's calls mean, and this room imports no other room.

| module | what lives there |
| --- | --- |
| `server` | runs the server: `run_server` |
| `connection` | clients' connections: order of answers, deadlines; their limits together, and which one makes room |
| `parser` | from bytes to requests |
| `request` | one request and its answer |
| `cancellation` | early end of a request's work |
| `body` | reads JSON bodies |
| `origins` | checks of `Host` and `Origin` |
| `errors` | errors in OpenAI's format |
| `upstream`, `upstream_connection` | the client for inference servers |
"""
