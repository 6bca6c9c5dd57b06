"""LoRA and its kin, over `peft`."""
