"""What all chat APIs share: conversations with messages and tools, and answers with reasoning, text and tool calls."""
