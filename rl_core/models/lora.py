"""Low-rank adapters by peft."""
