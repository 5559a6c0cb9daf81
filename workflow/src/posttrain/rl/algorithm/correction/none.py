"""No correction: uses the trainer's log-probabilities before the update instead of the engine's.

Source: DeepSeekMath (arXiv 2402.03300), equation 3, whose old policy is the one that sampled.
"""
