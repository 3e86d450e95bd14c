"""HTTP/1.1 in both directions, by uvicorn and aiohttp. Nothing here knows what the gateway's calls mean, and this room
imports no other room.

| module | what lives there |
| --- | --- |
| `server` | runs the server: `run_server` |
| `connection` | clients' connections: uvicorn's, with further limits |
| `request` | one request and its answer; the bound on all bodies together |
| `cancellation` | early end of a request's work |
| `body` | reads JSON bodies |
| `origins` | checks of `Host` and `Origin` |
| `errors` | errors in OpenAI's format |
| `upstream` | the client for inference servers |
| `event_stream` | splits what a server streams into events |
"""
