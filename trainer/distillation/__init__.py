"""Distillation from a teacher: the policy itself with a hint in its prompt, or another model whose logprobs lie on the
log.

| module | what lives there |
| --- | --- |
| `teacher` | which recorded tokens a teacher is asked about, and what it says of them |
| `prompts` | a call's prompt with a hint in it, in the model's own chat template |
"""
