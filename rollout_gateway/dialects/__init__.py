"""Model calls in the formats of OpenAI and Anthropic. This room imports `http` and no other room.

| module | what lives there |
| --- | --- |
| `calls` | a call and its reply, whichever endpoint they came by |
| `call_ids` | tool calls of a stream told apart |
| `prompts` | a promoted prompt in place of the agent's |
| `permitted` | which fields and media of a call reach the inference server |
| `endpoints` | chat completions and completions: what to ask vLLM for, and what to remove from its reply |
| `shape` | what is wrong with a call that a server could not read |
| `streaming` | a streamed reply: cleaned for the client, assembled for the log |
| `translate` | what the translations of other APIs into chat completions share |
| `messages`, `messages_input` | Anthropic's messages |
| `responses`, `responses_input` | OpenAI's responses |
"""
