"""From the head to the loss: logits that are split over the vocabulary, and those that are never made."""
