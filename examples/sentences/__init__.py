"""Sentences under rules: a text task whose reward is a Python function that the judge calls.

| module | what lives there |
| --- | --- |
| `tasks` | the rules of a sentence, drawn from a seed |
| `reward` | the reward function of the judge's settings: the share of the rules that a sentence keeps |
| `make_model` | makes the tiny base model: the tokenizer and a small pre-trained Qwen3, from a seed |
| `train` | the agent, its training and its evaluation, through the SDK |
| `curve.json`, `curve.svg` | the recorded runs |
"""
