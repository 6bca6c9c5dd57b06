"""LoRA and other adapters, on top of `peft`."""
