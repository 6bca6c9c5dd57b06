"""What only a run answers: a tiny model is run, and what is found is kept on disk."""
