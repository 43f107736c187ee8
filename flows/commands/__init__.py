"""The commands of `ppoflow` that are loaded when they are called."""
