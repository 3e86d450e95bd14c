"""Calls of the judge model.

| module | what it does |
| --- | --- |
| `chat` | what a call takes, returns and raises |
| `judge_model` | opens the judge model of the settings; adapts a request to what the model accepts |
| `openai_client` | the direct way to an OpenAI-compatible URL, which needs little CPU time |
| `litellm_client` | every other provider, through litellm |
| `params` | `judge.request.params` |
"""
