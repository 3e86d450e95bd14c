"""From a sentence to a trained model: `train` is the script, `examples/notebooks/auto_rl.ipynb` the notebook."""
