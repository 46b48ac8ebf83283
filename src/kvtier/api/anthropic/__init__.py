"""Anthropic's Messages API: content blocks in, content blocks out, and the token count of a prompt."""
