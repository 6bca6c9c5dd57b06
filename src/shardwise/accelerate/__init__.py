"""accelerate on split models: `shardwise.trainer.prepare` takes the place of `accelerator.prepare`.

Needs accelerate (`pip install -e '.[trainer]'` in a clone). See docs/trainer.md.
"""
