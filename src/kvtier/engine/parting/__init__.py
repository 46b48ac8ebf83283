"""Where prompts diverge from earlier ones: a bounded record of tokens, the comparison, causes and message numbers."""
