"""The forward of a model of which this rank holds some layers: what is passed through, and where it ends."""
