"""Anthropic's Messages API: blocks in, blocks out, and how many tokens a prompt has."""
