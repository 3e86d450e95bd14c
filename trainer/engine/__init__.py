"""The model and its optimizer steps. Nothing here knows of the log or of checkpoints.

| module | what lives there |
| --- | --- |
| `engine` | `Engine`: a model, its passes and its optimizer steps, with their checks and metrics |
| `passes` | `Passes`: forward and backward passes over a batch, in one process or several |
| `model` | `PolicyModel`: a base model with one adapter, and the logprobs that it gives |
| `state` | `TrainState`, what a step returns, and the errors of batches that can't be trained |
| `loading` | base models and fresh adapters, by Transformers or Unsloth |
| `forward` | the model's forward pass over a layout, with attention masks for shared prefixes |
| `tree_attention` | attention over shared prefixes by segments of their tree, instead of under a dense mask |
| `images` | the inputs of a vision-language model for the images of a layout |
| `verify` | the comparison of a training pass with the model's own forward pass, at the start |
| `loss` | the losses, each with its paper |
| `loss_inputs` | from examples to the inputs of a loss |
| `optimizer` | `PolicyOptimizer`: AdamW and its schedule |
| `fitting` | passes within the memory that there is, and their token budget |
| `checks` | measurements with forward passes of their own, on a sample |
| `late` | runs older than the staleness bound: their correction and effective sample size |
| `statistics` | metrics from the passes of a step |
| `parallel` | `ProcessGroup`: the processes that share the passes of a step |
| `sharding` | `ShardedModel`: a base model divided among these processes |
"""
