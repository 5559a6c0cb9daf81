"""The engine's log-probabilities are not looked at: the trainer's own, before the update, stand for them.

Source: DeepSeekMath (arXiv 2402.03300), equation 3, whose old policy is the one that sampled.
"""
