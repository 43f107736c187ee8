"""What looks at a configuration, a machine or a run without training: each tool is a function here and a command of `ppoflow`."""
