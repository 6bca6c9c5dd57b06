"""Questions that only a run answers: runs tiny models, and caches the answers on disk."""
