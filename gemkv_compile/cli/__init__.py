"""The `gemkv` command."""
