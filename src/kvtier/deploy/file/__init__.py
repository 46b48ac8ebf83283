"""The deployment file: its YAML, its two forms, its checks."""
