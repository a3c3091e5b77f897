"""From prompts to a trained head: traffic, features, batches, losses, the loop, checkpoints."""
