"""From rows of any source to memory-mapped prompts: `sources`, `tokenize`, `prompts`."""
