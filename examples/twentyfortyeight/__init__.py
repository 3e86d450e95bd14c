"""2048 on a 3x3 board: an agent of several turns whose every move may earn points.

| module | what lives there |
| --- | --- |
| `game` | rules, seeded tiles, what the model sees |
| `make_model` | makes the tiny base model: the tokenizer and a small pre-trained Qwen3, from a seed |
| `train` | the agent, its training and its evaluation, through the SDK |
| `curve.json`, `curve.svg` | the recorded runs |
"""
