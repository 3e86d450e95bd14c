"""Calls of the judge model.

| module | what it does |
| --- | --- |
| `chat` | what a call takes, returns and raises |
| `judge_model` | opens the judge model of the settings; adapts a request to what the model accepts |
| `litellm_client` | sends requests, through litellm |
| `params` | `judge.request.params` |
"""
