"""AdamW whose parameters, and so its states, are float32 already."""

from torch.optim import AdamW as AdamW_FP32OptimParams

__all__ = ["AdamW_FP32OptimParams"]
