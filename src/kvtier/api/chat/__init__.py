"""Conversations as every chat API asks them and answers them: messages, tools, what the model thinks and says."""
