"""The models of a training: where the base comes from, and how actor, critic and reference are built from it."""
